package adversary

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"sandlot/internal/devserver"
	"sandlot/internal/testenv"
	"sandlot/test/live"
)

// swapper makes of the name swap, in turn and without end, a directory of the sandbox's own and a link to a
// path of the host.
const swapper = `
import os, shutil, sys
targets = sys.argv[1:]
i = 0
while True:
    try:
        os.makedirs("own", exist_ok=True)
        if not os.path.exists("own/secret"): open("own/secret", "w").write("inside")
        os.symlink(targets[i % len(targets)], "link")
        os.rename("link", "swap")
        os.unlink("swap")
        os.rename("own", "swap")
        os.rename("swap", "own")
    except OSError: # a call has made something in between
        for n in ("link", "swap"):
            if os.path.islink(n): os.unlink(n)
            else: shutil.rmtree(n, ignore_errors=True)
    i += 1
`

// SandboxRoot/HostLeak; item 2. Links that come and go under file calls lead to the sandbox's own files, whatever they
// name: all work on files happens inside.
func TestSymlinkRace(t *testing.T) {
	b := live.New(t, nil)
	canary := secret()
	outside := t.TempDir()
	file := filepath.Join(outside, "secret")
	if err := os.WriteFile(file, []byte(canary), 0o666); err != nil {
		t.Fatal(err)
	}
	for dir := outside; dir != "/"; dir = filepath.Dir(dir) {
		_ = os.Chmod(dir, 0o777) //nolint:gosec // no right of the host's may be what saves it
	}
	b.Put(t, "swap.py", []byte(swapper))
	pid, log := b.Background(t, []string{"python3", "swap.py", outside, "../../../../../.." + outside, "/proc/1/root" + outside}, live.Root)
	begun := time.Now()
	var mu sync.Mutex
	inside, missed, answersSeen := 0, 0, 0
	check := func(out []byte, err error) {
		mu.Lock()
		defer mu.Unlock()
		answersSeen++
		var se *devserver.StatusError
		switch {
		case bytes.Contains(out, []byte(canary)):
			t.Error("a canary of the host's came out")
		case bytes.Contains(out, []byte("inside")):
			inside++
		case errors.As(err, &se):
			missed++
			if se.Status >= 500 || strings.Contains(se.Body, canary) {
				t.Errorf("answer: %v", err)
			}
		case err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF): // an archive is cut off
			t.Error(err)
		}
	}
	var wg sync.WaitGroup
	for _, call := range []struct{ method, path string }{
		{http.MethodGet, "/files/content?path=swap/secret"},
		{http.MethodGet, "/files/list?path=swap"},
		{http.MethodPut, "/files/content?path=swap/written"},
		{http.MethodDelete, "/files/content?path=swap/secret2"},
		{http.MethodGet, "/files/archive?path=swap"},
		{http.MethodGet, "/files/content?path=own/secret"},
		{http.MethodPost, "/files/mkdir?path=swap/dir"},
	} {
		wg.Go(func() {
			for time.Since(begun) < 3*time.Second {
				var body []byte
				if call.method == http.MethodPut {
					body = []byte("written from the API")
				}
				check(b.Do(t.Context(), call.method, call.path+"&user=root", body))
			}
		})
	}
	wg.Wait()
	if inside == 0 || missed == 0 {
		t.Errorf("control: %d answers with the sandbox's own file, %d refused: there was no race; its log: %s", inside, missed, b.Read(t, log))
	}
	b.Out(t, fmt.Sprintf("kill -9 %d", pid), live.Root)
	entries, err := os.ReadDir(outside)
	if err != nil || len(entries) != 1 || entries[0].Name() != "secret" {
		t.Errorf("the host's directory has %v now, %v", entries, err)
	}
	if got, _ := os.ReadFile(file); string(got) != canary {
		t.Errorf("the host's file is %q now", got)
	}
	t.Logf("%d answers", answersSeen)
}

// SandboxUser/HostDoS; item 3. Whatever a path names, the answer comes soon, and nothing is left waiting.
func TestSpecialFiles(t *testing.T) {
	b := live.New(t, nil)
	b.Out(t, `mkfifo fifo && truncate -s 8T sparse && mkdir dir && ln -s loop loop && ln -s /dev/zero zero &&
		python3 -c 'import socket; s = socket.socket(socket.AF_UNIX); s.bind("sock")' && echo plain > plain && sudo chown user /dev/full || true`)
	before := weigh(t, b.Server)
	call := func(method, path string) error {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		var body []byte
		if method == http.MethodPut {
			body = []byte("x")
		}
		out, err := b.Do(ctx, method, "/files/content?path="+path, body)
		if err == nil && len(out) > 1<<20 {
			t.Errorf("%s %s gave %d bytes", method, path, len(out))
		}
		if ctx.Err() != nil {
			t.Errorf("%s %s took too long", method, path)
		}
		return err
	}
	for _, path := range []string{"fifo", "sock", "dir", "loop", "zero", "/dev/zero", "/dev/stdin", "/proc/kcore", "/proc/1/mem", "/proc/1/fd/0", "sparse", "/dev/tty"} {
		err := call(http.MethodGet, path)
		refused(t, "read "+path, err, 400, 403, 404, 409, 413)
	}
	for _, path := range []string{"dir", "/dev/full", "/proc/1/mem", "/proc/sysrq-trigger", "plain/below", "loop/below"} {
		err := call(http.MethodPut, path)
		refused(t, "write "+path, err, 400, 403, 404, 409, 507)
	}
	if err := call(http.MethodGet, "plain"); err != nil {
		t.Error("control:", err)
	}
	out, err := b.Do(t.Context(), http.MethodGet, "/files/content?path=sparse", nil, "Range", "bytes=1099511627776-1099511627777")
	if err != nil || !bytes.Equal(out, []byte{0, 0}) {
		t.Errorf("control: a range of the sparse file: %q, %v", out, err)
	}
	settles(t, b.Server, before)
}

const mutator = `
import os, random
while True:
    n = "tree/f%d" % random.randrange(20)
    r = random.randrange(5)
    try:
        if r == 0: open(n, "w").write("x" * random.randrange(200000))
        elif r == 1: os.truncate(n, random.randrange(1000))
        elif r == 2: os.rename(n, "tree/f%d" % random.randrange(20))
        elif r == 3: os.unlink(n)
        else: os.symlink(os.environ["OUT"], n)
    except OSError: pass
`

// SandboxRoot/HostLeak; item 5. A directory that changes while it is downloaded gives a whole archive, or one whose end
// is missing; never a wrong one, and nothing from outside.
func TestArchiveOfAMovingTree(t *testing.T) {
	b := live.New(t, nil)
	canary := secret()
	outside := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(outside, []byte(canary), 0o666); err != nil {
		t.Fatal(err)
	}
	b.Put(t, "mutate.py", []byte(mutator))
	b.Out(t, "mkdir tree && head -c 300000 /dev/zero | tr '\\0' z > tree/stable")
	b.Background(t, []string{"python3", "mutate.py"}, map[string]any{"env": map[string]string{"OUT": outside}})
	whole, cut, links := 0, 0, 0
	for begun := time.Now(); time.Since(begun) < 3*time.Second || whole == 0 && time.Since(begun) < 20*time.Second; {
		resp, err := b.Request(t.Context(), http.MethodGet, "/"+b.ID+"/files/archive?path=tree", nil)
		if err != nil {
			refused(t, "archive", err, 404, 409)
			continue
		}
		raw, readErr := io.ReadAll(io.LimitReader(resp.Body, 64<<20))
		resp.Body.Close()
		if bytes.Contains(raw, []byte(canary)) {
			t.Fatal("a canary of the host's is in the archive")
		}
		tr := tar.NewReader(bytes.NewReader(raw))
		var tarErr error
		stable := false
		for {
			h, err := tr.Next()
			if err != nil {
				tarErr = err
				break
			}
			if h.Typeflag == tar.TypeSymlink {
				links++
			}
			content, err := io.ReadAll(tr)
			if err != nil {
				tarErr = err
				break
			}
			if strings.HasSuffix(h.Name, "stable") && len(content) == 300000 && bytes.Count(content, []byte("z")) == 300000 {
				stable = true
			}
		}
		switch {
		case readErr == nil && tarErr == io.EOF && stable:
			whole++
		case readErr != nil:
			cut++
		default:
			t.Errorf("a download that ended well is no archive: %v, with the file that nobody touches: %v", tarErr, stable)
		}
	}
	if whole == 0 || links == 0 {
		t.Errorf("control: %d whole archives, %d cut ones, %d links seen", whole, cut, links)
	}
}

// ApiUser/Escape; item 7. Environment, arguments, directory and user are the guest's: they reach no process of the host.
func TestExecFields(t *testing.T) {
	canary := secret()
	b := live.New(t, map[string]any{"env": map[string]string{"LD_PRELOAD": "/nowhere/" + canary + ".so", "LD_AUDIT": canary, "GODEBUG": canary}})
	if got := b.Run(t, "echo $LD_PRELOAD", map[string]any{"env": map[string]string{"PATH": "/usr/bin:/bin", "PYTHONPATH": canary}}); !strings.Contains(got.Stdout, canary) {
		t.Errorf("control: inside, LD_PRELOAD is %+v", got)
	}
	b.Background(t, []string{"sleep", "60"}, map[string]any{"env": map[string]string{"RUNSC_DEBUG": canary, "GODEBUG": canary}})
	fixed := regexp.MustCompile(`^(PATH=/usr/sbin:/usr/bin:/sbin:/bin|GOTRACEBACK=\w*|SANDLOT_FAILPOINTS?=|RUNSC_START_TIME_NANOS=\d+|SANDLOT_CGROUPS=[\w/.:-]*)$`)
	seen := 0
	for _, pid := range append(hostProcesses(t, b), b.APIPID()) {
		raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
		if err != nil {
			continue // it has just ended
		}
		for kv := range strings.SplitSeq(strings.TrimRight(string(raw), "\x00"), "\x00") {
			if kv == "" {
				continue
			}
			seen++
			if !fixed.MatchString(kv) {
				t.Errorf("process %d of the host has %.100q in its environment", pid, kv)
			}
		}
		if raw, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); bytes.Contains(raw, []byte(canary)) {
			t.Errorf("process %d of the host has the canary among its arguments", pid)
		}
	}
	if seen == 0 {
		t.Error("control: no environment was read")
	}
	big := map[string]string{}
	for i := range 1001 {
		big[fmt.Sprintf("V%d", i)] = "x"
	}
	for what, in := range map[string]map[string]any{
		"name with =":      {"env": map[string]string{"A=B": "x"}},
		"name with LF":     {"env": map[string]string{"A\nB": "x"}},
		"empty name":       {"env": map[string]string{"": "x"}},
		"NUL in a value":   {"env": map[string]string{"A": "x\x00y"}},
		"1 MB value":       {"env": map[string]string{"A": strings.Repeat("x", 1<<20)}},
		"1001 variables":   {"env": big},
		"uid pair":         {"user": "0:0"},
		"uid":              {"user": "0"},
		"path as a user":   {"user": "../root"},
		"no such user":     {"user": "daemonx"},
		"cwd with ..":      {"cwd": "/workspace/../etc"},
		"cwd that is none": {"cwd": "/nowhere"},
		"cwd of a file":    {"cwd": "/etc/passwd"},
		"cwd of a fd":      {"cwd": "/proc/self/fd/7"},
		"root's cwd":       {"cwd": "/root"},
	} {
		_, err := b.Try(t, "true", in)
		refused(t, what, err, 400, 413)
	}
	for _, fd := range []string{"3", "4", "5", "6", "7", "8", "9", "10"} {
		// The agent's own descriptors are those of PID 1: none of them leads out.
		r, err := b.Try(t, "pwd -P; ls -d host* boot* 2>/dev/null; ls .. | head -3", map[string]any{"cwd": "/proc/1/fd/" + fd, "user": "root"})
		if err == nil && (strings.Contains(r.Stdout, canary) || strings.Contains(r.Stdout, "machines")) {
			t.Errorf("fd %s of the agent is %q", fd, r.Stdout)
		}
	}
	if got := b.Out(t, []string{"printf", "%s", "-n", "--root=/", "$(id)"}); got != "-n--root=/$(id)" {
		t.Errorf("arguments: %q", got)
	}
}

// SandboxRoot/Escape; item 8. No process has a descriptor that it does not need: neither inside, nor those that the
// server starts on the host.
func TestInheritedDescriptors(t *testing.T) {
	b, peer := live.New(t, nil), live.New(t, nil)
	for _, user := range []string{"user", "root"} {
		got := b.Out(t, []string{"python3", "-c", `
import os
for n in sorted(os.listdir("/proc/self/fd"), key=int):
    try: print(n, os.readlink("/proc/self/fd/" + n))
    except OSError: pass  # the listing's own
`}, map[string]any{"user": user})
		for i, line := range strings.Split(got, "\n") {
			if !regexp.MustCompile(`^([0-2]) (/dev/null|pipe:\[\d+\])$`).MatchString(line) || i > 2 {
				t.Errorf("%s's program has the descriptor %q", user, line)
			}
		}
	}
	link := fmt.Sprintf("/proc/self/fd/%d", heirloom.Fd())
	name, err := os.Readlink(link)
	if err != nil || !slices.Contains(fds(b.PID()), name) {
		t.Fatalf("control: the server did not inherit %q: %v", name, err)
	}
	tpl, err := testenv.Templates(t).Get("base")
	if err != nil {
		t.Fatal(err)
	}
	common := `^(socket:\[\d+\]|pipe:\[\d+\]|anon_inode:.*|/dev/null|/memfd:[\w-]+ \(deleted\)|/sys/fs/cgroup/[\w/.-]+`
	q := regexp.QuoteMeta
	api := regexp.MustCompile(common + `|` + q(b.StateDir()) + `/server\.log|.*/sandlot\.db(-wal|-shm)?)$`)
	box := regexp.MustCompile(common + `|/|/root/(\.sandlot|workspace)(/.*)?|/upper/runsc-filestore-\d+.*` +
		`|` + q(machineDir(b)) + `/(runsc\.log|bundle/config\.json)|` + q(runDir(b)) + `/disk/console\.log|` + q(tpl.Image) + `)$`)
	// Its own accounts, to read, and one byte for each program that was ended: see engines/runsc/memory.go.
	box = regexp.MustCompile(box.String() + `|^(/sandlot-[0-9a-f]+/` + q(b.ID) + `/memory\.(usage_in_bytes|limit_in_bytes|stat|current|max)|` + q(runDir(b)) + `/disk/kills)$`)
	check := func(what string, pid int, allowed *regexp.Regexp) {
		open := fds(pid)
		if len(open) == 0 {
			return // it has ended
		}
		for _, fd := range open {
			if !allowed.MatchString(fd) || strings.Contains(fd, peer.ID) || fd == name {
				t.Errorf("%s, process %d, has %q open", what, pid, fd)
			}
		}
	}
	check("the HTTP half", b.APIPID(), api)
	pids := hostProcesses(t, b)
	if len(pids) < 3 {
		t.Errorf("control: the sandbox has the processes %v", pids)
	}
	for _, pid := range pids {
		check("the sandbox", pid, box)
	}
}

func sum(t *testing.T, path string) string {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		t.Fatal(err)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// SandboxRoot/Escape; item 10. A guest's root changes neither the agent, nor the template, nor the programs that the host
// runs: what it can change is its own, and the next sandbox has the original.
func TestBinariesStay(t *testing.T) {
	b := live.New(t, nil)
	tpl, err := testenv.Templates(t).Get("base")
	if err != nil {
		t.Fatal(err)
	}
	files := []string{tpl.Image, testenv.Bin(t, "sandlot-agent"), testenv.Bin(t, "runsc"), filepath.Join(filepath.Dir(runDir(b)), "agent")}
	before := map[string]string{}
	for _, f := range files {
		before[f] = sum(t, f)
	}
	const hashes = "sha256sum < /.sandlot/agent; sha256sum < /usr/bin/env; sha256sum < /usr/bin/jq"
	first := b.Out(t, hashes)
	got := b.Out(t, `
cd /
for f in /.sandlot/agent /proc/1/exe /.sandlot/boot.json /.sandlot/agent.sock; do
  (echo evil > $f) 2>/dev/null && echo "wrote $f"
  (echo evil >> $f) 2>/dev/null && echo "appended $f"
  rm -f $f 2>/dev/null && echo "removed $f"
  mv $f /tmp/x 2>/dev/null && echo "moved $f"
  chmod 777 $f 2>/dev/null && echo "chmod $f"
  dd if=/dev/zero of=$f bs=1 count=1 conv=notrunc 2>/dev/null && echo "dd $f"
done
touch /.sandlot/new 2>/dev/null && echo created
mount -o remount,rw /.sandlot 2>/dev/null && touch /.sandlot/new 2>/dev/null && echo "created after a remount"
for p in /proc/[0-9]*; do [ "$(readlink $p/exe)" = /.sandlot/agent ] && (echo evil > $p/exe) 2>/dev/null && echo "wrote $p/exe"; done
echo evil > /usr/bin/env && echo evil >> /usr/bin/jq; head -c 4 /usr/bin/env
`, live.Root)
	if got != "evil" {
		t.Errorf("root inside (control: it changes its own programs, and nothing else): %q", got)
	}
	for _, f := range files {
		if sum(t, f) != before[f] {
			t.Errorf("%s of the host has changed", f)
		}
	}
	for _, in := range []map[string]any{nil, {"disk_gb": 1}} { // from the pool and cold
		if got := live.New(t, in).Out(t, hashes); got != first {
			t.Errorf("the next sandbox has other programs: %q, not %q", got, first)
		}
	}
}

const dialer = `
import socket, sys
def dial(path, hello):
    s = socket.socket(socket.AF_UNIX)
    s.settimeout(15)
    try:
        s.connect(path)
        if hello is not None:
            s.sendall(hello)
            got = s.recv(100)
            return "closed" if got == b"" else "answered %r" % got
        return "connected"
    except ConnectionResetError: return "closed"
    except OSError as e: return type(e).__name__
for path in sys.argv[1:]:
    print(dial(path, None))
for hello in (b"x" * 200, b"sandlot-agent 1 " + b"0" * 64 + b"\n", b"\0" * 200): print(dial("/.sandlot/agent.sock", hello))
`

// SandboxRoot/Lateral; item 12. The socket is the agent's: users inside cannot reach it, root without the secret is sent
// away, another sandbox's is nowhere, and no flood of connections disturbs the agent or fills the server.
func TestAgentSocket(t *testing.T) {
	b, peer := live.New(t, nil), live.New(t, nil)
	b.Put(t, "dial.py", []byte(dialer))
	other := filepath.Join(runDir(peer), "guest", "agent.sock")
	if _, err := os.Stat(other); err != nil {
		t.Fatal("control: the other sandbox's socket is not on the host:", err)
	}
	node := filepath.Join(filepath.Dir(runDir(peer)), "node.sock")
	args := []string{"python3", "dial.py", "/.sandlot/agent.sock", other, "/proc/1/root" + other, node}
	if got := b.Out(t, args); !strings.HasPrefix(got, "PermissionError\nFileNotFoundError\n") || strings.Contains(got, "connected") || strings.Contains(got, "answered") {
		t.Errorf("a user inside: %q", got)
	}
	if got := b.Out(t, args, live.Root); got != "connected\nFileNotFoundError\nFileNotFoundError\nFileNotFoundError\nclosed\nclosed\nclosed" {
		t.Errorf("root inside (control: it connects to its own socket): %q", got)
	}
	if got := b.Run(t, "cat /.sandlot/boot.json"); got.ExitCode == 0 {
		t.Error("a user inside reads the secret")
	}
	if got := b.Out(t, "cat /.sandlot/boot.json", live.Root); !strings.Contains(got, "secret") {
		t.Errorf("control: root inside reads its own machine's file: %.50q", got)
	}
	before := weigh(t, b.Server)
	b.Put(t, "flood.py", []byte(`
import socket, time
end = time.time() + 4
n, held = 0, []
while time.time() < end:
    s = socket.socket(socket.AF_UNIX)
    try:
        s.connect("/.sandlot/agent.sock")
        s.send(b"sandlot")
        n += 1
    except OSError: pass
    held.append(s)
    if len(held) > 300: held.pop(0).close()
print(n)
`))
	flood := make(chan string, 1)
	go func() {
		r, err := b.Try(t, []string{"python3", "flood.py"}, live.Root)
		flood <- fmt.Sprint(strings.TrimSpace(r.Stdout), err)
	}()
	for begun := time.Now(); time.Since(begun) < 3*time.Second; time.Sleep(200 * time.Millisecond) {
		answers(t, b, "during a flood of its agent's socket")
	}
	var connections int
	if got := <-flood; !scanInt(got, &connections) || connections < 20 {
		t.Errorf("control: the flood made %s connections", got)
	}
	answers(t, b, "after a flood of its agent's socket")
	answers(t, peer, "beside a flood of another's socket")
	settles(t, b.Server, before)
}

func scanInt(s string, n *int) bool {
	_, err := fmt.Sscan(s, n)
	return err == nil
}

// ApiUser/HostLeak; item 1. Paths that name something else to somebody else are refused, or name the sandbox's own.
func TestPathForms(t *testing.T) {
	b := live.New(t, nil)
	b.Put(t, "plain", []byte("inside"))
	for _, path := range []string{"../etc/shadow", "a/../../b", "/workspace/..", "x/..", "", "%00", "a\x00b", "\xc0\xae\xc0\xae/etc", strings.Repeat("a", 256), strings.Repeat("a/", 2049)} {
		_, err := b.Do(t.Context(), http.MethodGet, "/files/content?path="+url.QueryEscape(path), nil)
		want := []int{400}
		if path == "%00" { // an ordinary name once it is decoded
			want = []int{404}
		}
		refused(t, fmt.Sprintf("%.40q", path), err, want...)
	}
	for _, raw := range []string{"..%2f..%2fetc%2fpasswd", "%2e%2e/etc/passwd", "%c0%ae%c0%ae/x"} {
		_, err := b.Do(t.Context(), http.MethodGet, "/files/content?path="+raw, nil)
		refused(t, raw, err, 400)
	}
	if got := b.Read(t, "./plain"); string(got) != "inside" {
		t.Errorf("control: %q", got)
	}
}
