// Package adversary attacks a real server and real sandboxes, and checks that nothing gets out of them, into
// another one, or into the way of others. Each test says whom it takes the attacker for and what would have
// happened, as prerequisite/impact, and the item of the adversarial list. What must fail is tried beside what
// must not: a test whose control fails has shown nothing.
package adversary

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sandlot/internal/devserver"
	"sandlot/internal/engine/gvisor"
	"sandlot/test/live"
)

// heirloom is a file that this process has open without close-on-exec when it starts the server, as a careless
// operator's shell would.
var heirloom *os.File

func TestMain(m *testing.M) {
	f, err := os.CreateTemp("", "sandlot-heirloom")
	if err == nil {
		_, err = unix.FcntlInt(f.Fd(), unix.F_SETFD, 0)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Remove(f.Name())
	heirloom = f
	live.Main(m)
}

// secret is a canary: nobody else can have these bytes.
func secret() string {
	var b [16]byte
	_, _ = rand.Read(b[:])
	return "canary" + hex.EncodeToString(b[:])
}

// refused checks that err is an answer with one of these statuses.
func refused(t *testing.T, what string, err error, statuses ...int) {
	t.Helper()
	var se *devserver.StatusError
	if !errors.As(err, &se) || !slices.Contains(statuses, se.Status) {
		t.Errorf("%s: want status %v, got %v", what, statuses, err)
	}
}

// machineDir is where the host keeps a sandbox's record and disk.
func machineDir(b live.Box) string { return filepath.Join(b.NodeDir(), "machines", b.ID) }

// runDir is where the host keeps a sandbox's mounts and sockets.
func runDir(b live.Box) string { return filepath.Join(gvisor.RunDir(b.NodeDir()), b.ID) }

// cgroupFile is a file of the sandbox's cgroup.
func cgroupFile(t *testing.T, b live.Box, controller, name string) string {
	t.Helper()
	tag := "sandlot-" + filepath.Base(gvisor.RunDir(b.NodeDir()))
	for _, dir := range []string{controller, ""} {
		p := filepath.Join("/sys/fs/cgroup", dir, tag, b.ID, name)
		if _, err := os.Stat(p); err == nil {
			return p
		}
	}
	t.Fatalf("no %s of the sandbox's cgroup is found", name)
	return ""
}

// hostProcesses are the sandbox's processes on the host.
func hostProcesses(t *testing.T, b live.Box) []int {
	t.Helper()
	raw, err := os.ReadFile(cgroupFile(t, b, "memory", "cgroup.procs"))
	if err != nil {
		t.Fatal(err)
	}
	var pids []int
	for f := range strings.FieldsSeq(string(raw)) {
		if pid, err := strconv.Atoi(f); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// fds lists what a process has open; nil when it is gone.
func fds(pid int) []string {
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil
	}
	open := []string{}
	for _, e := range entries {
		if to, err := os.Readlink(filepath.Join(dir, e.Name())); err == nil {
			open = append(open, to)
		}
	}
	return open
}

// goroutines asks the HTTP half how many it has.
func goroutines(t *testing.T, s *devserver.Server) int {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.URL+"/metrics", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+s.Token)
	resp, err := s.HTTP.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	all, _ := io.ReadAll(resp.Body)
	for line := range strings.Lines(string(all)) {
		if n, ok := strings.CutPrefix(line, "go_goroutines "); ok {
			v, _ := strconv.Atoi(strings.TrimSpace(n))
			return v
		}
	}
	t.Fatal("/metrics has no go_goroutines")
	return 0
}

// weight is what the server holds: descriptors of both halves and goroutines of the one that is exposed.
type weight struct{ node, api, goroutines int }

func weigh(t *testing.T, s *devserver.Server) weight {
	t.Helper()
	return weight{len(fds(s.PID())), len(fds(s.APIPID())), goroutines(t, s)}
}

// settles waits until the server holds no more than it did, but for some connections that are kept for reuse.
func settles(t *testing.T, s *devserver.Server, before weight) {
	t.Helper()
	const kept = 24
	var now weight
	for deadline := time.Now().Add(45 * time.Second); ; time.Sleep(500 * time.Millisecond) {
		s.HTTP.CloseIdleConnections()
		now = weigh(t, s)
		if now.node <= before.node+kept && now.api <= before.api+kept && now.goroutines <= before.goroutines+2*kept {
			return
		}
		if time.Now().After(deadline) {
			t.Errorf("the server held %+v before and holds %+v after", before, now)
			return
		}
	}
}

// answers checks that a sandbox does.
func answers(t *testing.T, b live.Box, when string) {
	t.Helper()
	if r, err := b.Try(t, []string{"echo", "here"}); err != nil || r.Stdout != "here\n" {
		t.Errorf("%s a sandbox says %+v, %v", when, r, err)
	}
}

// latency runs true n times in a sandbox and returns the slowest but one in a hundred.
func latency(t *testing.T, b live.Box, n int) time.Duration {
	t.Helper()
	took := make([]time.Duration, n)
	for i := range took {
		begun := time.Now()
		if r, err := b.Try(t, []string{"true"}); err != nil || r.ExitCode != 0 {
			t.Fatalf("exec: %+v, %v", r, err)
		}
		took[i] = time.Since(begun)
	}
	slices.Sort(took)
	return took[(n*99+99)/100-1]
}

// scan searches the parts of a file that hold data, sparse as a disk is.
func scan(t *testing.T, path, needle string) bool {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	buf := make([]byte, 1<<20)
	for off := int64(0); ; {
		from, err := f.Seek(off, unix.SEEK_DATA)
		if err != nil { // no data any more
			return false
		}
		to, err := f.Seek(from, unix.SEEK_HOLE)
		if err != nil {
			t.Fatal(err)
		}
		for at := from; at < to; {
			n, err := f.ReadAt(buf[:min(int64(len(buf)), to-at)], at)
			if strings.Contains(string(buf[:n]), needle) {
				return true
			}
			if err != nil || n < len(buf) {
				break
			}
			at += int64(n - len(needle)) // it may lie across two reads
		}
		off = to
	}
}

// send sends JSON with a token, reads JSON, and returns the status.
func send(ctx context.Context, s *devserver.Server, token, method, path string, in, out any) (int, error) {
	var body io.Reader
	if in != nil && method != http.MethodGet {
		b, err := json.Marshal(in)
		if err != nil {
			return 0, err
		}
		body = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, s.URL+path, body)
	if err != nil {
		return 0, err
	}
	req.Header.Set("Authorization", "Bearer "+token)
	resp, err := s.HTTP.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	if out != nil && resp.StatusCode < 300 {
		return resp.StatusCode, json.NewDecoder(resp.Body).Decode(out)
	}
	_, err = io.Copy(io.Discard, resp.Body)
	return resp.StatusCode, err
}
