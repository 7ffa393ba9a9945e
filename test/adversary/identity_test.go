package adversary

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sandlot/internal/devserver"
	"sandlot/internal/engine/gvisor"
	"sandlot/internal/testenv"
	"sandlot/test/live"
)

// own starts a server of the test's own, which it may stop, start and lie to.
func own(t *testing.T) *devserver.Server {
	t.Helper()
	testenv.Root(t)
	bin := filepath.Dir(testenv.Bin(t, "sandlot"))
	testenv.Template(t, "base")
	s, err := devserver.Start(t.Context(), devserver.Config{
		Bin: bin, Templates: testenv.TemplatesDir(t), StateDir: t.TempDir(), Engine: "gvisor",
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Stop(); err != nil {
			t.Error(err)
		}
		live.Eventually(t, 5*time.Second, "nothing is left on the host after stop and reap", func() bool {
			return len(testenv.Census(t, s.NodeDir())) == 0
		})
		if t.Failed() {
			t.Log(s.Log())
		}
	})
	return s
}

// stop ends a server as an operator does, and leaves its sandboxes.
func stop(t *testing.T, s *devserver.Server) {
	t.Helper()
	if err := syscall.Kill(s.PID(), syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := s.Wait(); err != nil {
		t.Error("stop:", err)
	}
}

// foreign runs a container of the operator's own with the same runsc. It says whether it still runs.
func foreign(t *testing.T) (alive func() bool) {
	t.Helper()
	runsc := testenv.Bin(t, "runsc")
	dir := t.TempDir()
	root := filepath.Join(dir, "state")
	spec := map[string]any{
		"ociVersion": "1.0.0",
		"process":    map[string]any{"args": []string{"/bin/sleep", "600"}, "cwd": "/", "env": []string{"PATH=/bin"}},
		"root":       map[string]any{"path": "/", "readonly": true},
		"linux":      map[string]any{"namespaces": []map[string]string{{"type": "pid"}, {"type": "mount"}, {"type": "ipc"}, {"type": "uts"}}},
	}
	b, err := json.Marshal(spec)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "config.json"), b, 0o600); err != nil {
		t.Fatal(err)
	}
	run := func(args ...string) (string, error) {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, runsc, append([]string{"--root=" + root, "--network=none", "--ignore-cgroups"}, args...)...) //nolint:gosec // our own
		cmd.Env = []string{"PATH=" + os.Getenv("PATH")}
		out, err := os.CreateTemp(dir, "out") // not a pipe: the container would keep it
		if err != nil {
			return "", err
		}
		defer out.Close()
		cmd.Stdout, cmd.Stderr = out, out
		err = cmd.Run()
		said, _ := os.ReadFile(out.Name())
		return string(said), err
	}
	if out, err := run("run", "--detach", "--bundle="+dir, "operators"); err != nil {
		t.Fatalf("control: the operator's container: %v: %s", err, out)
	}
	t.Cleanup(func() {
		if out, err := run("delete", "--force", "operators"); err != nil {
			t.Errorf("%v: %s", err, out)
		}
	})
	return func() bool {
		out, err := run("exec", "operators", "/bin/echo", "mine")
		return err == nil && strings.Contains(out, "mine")
	}
}

// sleeper is a process that is nobody's business. It says whether it still runs.
func sleeper(t *testing.T) (pid int, alive func() bool) {
	t.Helper()
	cmd := exec.Command("sleep", "600")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { _ = cmd.Wait(); close(ended) }()
	t.Cleanup(func() { _ = cmd.Process.Kill(); <-ended })
	return cmd.Process.Pid, func() bool {
		select {
		case <-ended:
			return false
		case <-time.After(100 * time.Millisecond):
			return true
		}
	}
}

// Operator/HostDoS; item 52. What is not the server's stays as it is, what is the server's and nobody's goes, and a
// number that names another process now is not taken for what it named.
func TestForeignAndRecycled(t *testing.T) {
	s := own(t)
	foreignRuns := foreign(t)
	if !foreignRuns() {
		t.Fatal("control: the operator's container does not answer")
	}
	ctx := t.Context()
	box := func() string {
		sb, err := s.Create(ctx, map[string]any{"template": "base"})
		if err != nil {
			t.Fatal(err)
		}
		return sb.ID
	}
	kept, recycled, torn, lost := box(), box(), box(), box()
	stop(t, s)

	// A record whose pid another process has now.
	victim, victimRuns := sleeper(t)
	record := func(id string) string { return filepath.Join(s.NodeDir(), "machines", id, "record.json") }
	raw, err := os.ReadFile(record(recycled))
	if err != nil {
		t.Fatal(err)
	}
	var rec map[string]any
	if err := json.Unmarshal(raw, &rec); err != nil {
		t.Fatal(err)
	}
	process, ok := rec["sandbox"].(map[string]any)
	if !ok || process["pid"] == nil {
		t.Fatalf("control: the record has no process: %s", raw)
	}
	process["pid"] = victim
	if raw, err = json.Marshal(rec); err == nil {
		err = os.WriteFile(record(recycled), raw, 0o600)
	}
	// A record that is torn, and a machine whose directory is gone with its record.
	err = errors.Join(err, os.WriteFile(record(torn), []byte(`{"id":"sbx`), 0o600), os.RemoveAll(filepath.Join(s.NodeDir(), "machines", lost)))
	if err != nil {
		t.Fatal(err)
	}
	// Leftovers that bear the server's mark and are of no machine.
	run := gvisor.RunDir(s.NodeDir())
	left := "sbx" + strings.Repeat("q", 20)
	disk := filepath.Join(run, left, "disk")
	if err := os.MkdirAll(disk, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", disk, "tmpfs", 0, "size=1m"); err != nil {
		t.Fatal(err)
	}
	groups := 0
	for _, parent := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/memory", "/sys/fs/cgroup/pids"} {
		if os.Mkdir(filepath.Join(parent, "sandlot-"+filepath.Base(run), left), 0o755) == nil {
			groups++
		}
	}
	if groups == 0 {
		t.Fatal("control: no cgroup could be made")
	}
	// Beside them, what only looks alike.
	other := filepath.Join(filepath.Dir(run), "operators")
	if err := os.MkdirAll(filepath.Join(other, left), 0o700); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(other) })

	if err := s.Restart(ctx); err != nil {
		t.Fatal(err)
	}
	if r, err := s.Exec(ctx, kept, map[string]any{"cmd": "echo here"}); err != nil || r.Stdout != "here\n" {
		t.Errorf("control: the sandbox that nobody touched: %+v, %v", r, err)
	}
	for what, id := range map[string]string{"recycled pid": recycled, "torn record": torn, "no directory": lost} {
		sb, err := s.Get(ctx, id)
		if err != nil || sb.State != "failed" || sb.Reason != "host_lost" {
			t.Errorf("%s: %+v, %v", what, sb, err)
		}
	}
	for _, line := range testenv.Census(t, s.NodeDir()) {
		for what, id := range map[string]string{"recycled pid": recycled, "torn record": torn, "no directory": lost, "leftover": left} {
			if strings.Contains(line, id) {
				t.Errorf("%s: left: %s", what, line)
			}
		}
	}
	check := func(when string) {
		t.Helper()
		if !victimRuns() {
			t.Errorf("%s the process that got a sandbox's pid is dead", when)
		}
		if !foreignRuns() {
			t.Errorf("%s the operator's container does not answer", when)
		}
		if _, err := os.Stat(filepath.Join(other, left)); err != nil {
			t.Errorf("%s: %v", when, err)
		}
	}
	check("after the start")

	// The same once more for reap, with the last one's record.
	stop(t, s)
	raw, err = os.ReadFile(record(kept))
	if err == nil {
		err = json.Unmarshal(raw, &rec)
	}
	if err != nil {
		t.Fatal(err)
	}
	rec["sandbox"] = map[string]any{"pid": victim, "start": 1}
	if raw, err = json.Marshal(rec); err == nil {
		err = os.WriteFile(record(kept), raw, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(ctx, testenv.Bin(t, "sandlot"), "reap", "--state-dir", s.StateDir()).CombinedOutput() //nolint:gosec // our own
	if err != nil || !strings.Contains(string(out), "removed 1 machines") {
		t.Errorf("reap: %s, %v", out, err)
	}
	if left := testenv.Census(t, s.NodeDir()); len(left) > 0 {
		t.Errorf("after reap: %q", left)
	}
	check("after reap")
	if err := s.Restart(ctx); err != nil {
		t.Fatal(fmt.Errorf("a start after reap: %w", err))
	}
}
