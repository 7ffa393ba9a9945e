package agent

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"sandlot"
	"sandlot/internal/guest"
	"sandlot/internal/wire"
)

const (
	initVar  = "SANDLOT_TEST_INIT" // names the directory to build a machine's "/" in
	passwd   = "root:x:0:0::/root:/bin/bash\nuser:x:1000:1000::/home/user:/bin/bash\nodd:x:1001:1001:only:six\n"
	groups   = "root:x:0:\nuser:x:1000:\nextra:x:2000:root,user\n"
	readyTag = "workspace/ready"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(initVar); dir != "" {
		if err := beInit(dir); err != nil {
			fmt.Fprintln(os.Stderr, "init:", err)
			os.Exit(3)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// beInit is the machine's side of startMachine: the agent as PID 1 over a copy of this machine's files.
func beInit(dir string) error {
	merged := dir + "/merged"
	steps := []func() error{
		func() error { return syscall.Mount("", "/", "", syscall.MS_PRIVATE|syscall.MS_REC, "") },
		func() error { return syscall.Mount("tmpfs", dir+"/upper", "tmpfs", 0, "size=64m") },
		func() error { return os.Mkdir(dir+"/upper/u", 0o755) },
		func() error { return os.Mkdir(dir+"/upper/w", 0o755) },
		func() error {
			return syscall.Mount("overlay", merged, "overlay", 0, "lowerdir=/,upperdir="+dir+"/upper/u,workdir="+dir+"/upper/w")
		},
		func() error { return syscall.Mount("/dev", merged+"/dev", "", syscall.MS_BIND, "") },
		func() error { return os.MkdirAll(merged+dir+"/run", 0o755) },
		func() error { return syscall.Mount(dir+"/run", merged+dir+"/run", "", syscall.MS_BIND, "") },
		func() error { return syscall.Chroot(merged) },
		func() error { return os.Chdir("/") },
		func() error { return syscall.Mount("proc", "/proc", "proc", 0, "") },
		func() error { return os.WriteFile("/etc/passwd", []byte(passwd), 0o600) },
		func() error { return os.WriteFile("/etc/group", []byte(groups), 0o600) },
		func() error { return os.MkdirAll("/workspace", 0o755) },
		func() error { return os.Chown("/workspace", 1000, 1000) },
		func() error { return os.MkdirAll("/home/user", 0o755) },
		func() error { return os.Chmod("/root", 0o700) },
		func() error { return os.WriteFile("/root/secret", []byte("root's"), 0o600) },
		// Another program's leak: nothing that the agent was given may reach a command.
		func() error { _, err := syscall.Open("/etc/passwd", syscall.O_RDONLY, 0); return err },
	}
	for i, step := range steps {
		if err := step(); err != nil {
			return fmt.Errorf("step %d: %w", i, err)
		}
	}
	b, err := os.ReadFile(dir + "/run/boot.json")
	if err != nil {
		return err
	}
	var boot wire.Boot
	if err := json.Unmarshal(b, &boot); err != nil {
		return err
	}
	_ = os.Unsetenv(initVar)
	BecomeInit()
	a, err := New(Config{Boot: boot, Log: slog.New(slog.NewTextHandler(os.Stderr, nil))})
	if err != nil {
		return err
	}
	return a.Run(context.Background())
}

type machine struct {
	*guest.Client
	h   *host
	cmd *exec.Cmd
}

// startMachine runs this test binary as the first process of a machine of its own.
func startMachine(t *testing.T, boot wire.Boot) *machine {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: needs root, for namespaces")
	}
	h := newHost(t)
	_ = h.l.Close()
	dir := filepath.Dir(h.path)
	for _, d := range []string{"upper", "merged", "run"} {
		must(t, os.Mkdir(filepath.Join(dir, d), 0o755))
	}
	h.path = filepath.Join(dir, "run/s")
	h.listen(t)
	boot.Secret, boot.Socket = testSecret, h.path
	b, _ := json.Marshal(boot)
	must(t, os.WriteFile(filepath.Join(dir, "run/boot.json"), b, 0o600))
	exe, err := os.Executable()
	must(t, err)
	var log bytes.Buffer
	cmd := exec.CommandContext(t.Context(), exe)
	cmd.Env = append(os.Environ(), initVar+"="+dir)
	cmd.Stderr = &log
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS | syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC}
	if err := cmd.Start(); err != nil {
		t.Skipf("SKIPPED: no namespaces: %v", err)
	}
	ended := make(chan struct{})
	go func() { _ = cmd.Wait(); close(ended) }()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-ended
		if t.Failed() {
			t.Logf("the machine said: %s", log.String())
		}
	})
	c := guest.New(h.dial)
	t.Cleanup(c.Close)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	healthy := make(chan error, 1)
	go func() { _, err := c.Health(ctx); healthy <- err }()
	select {
	case err := <-healthy:
		must(t, err)
	case <-ended:
		t.Skipf("SKIPPED: the machine did not start: %s", log.String())
	}
	return &machine{c, h, cmd}
}

func (m *machine) identify(t *testing.T) {
	t.Helper()
	must(t, m.Identify(t.Context(), wire.Identity{
		ID: "sbxmachine", Hostname: "boxy", MachineID: strings.Repeat("0a", 16), Entropy: make([]byte, 64), Now: time.Now(),
	}))
}

func (m *machine) sh(t *testing.T, user, script string) string {
	t.Helper()
	r, err := m.Run(t.Context(), wire.Exec{Argv: []string{"bash", "-c", script}, User: user, TimeoutMS: 20_000})
	if err != nil || r.ExitCode != 0 {
		t.Errorf("%s: %v, %+v %s", script, err, r.Exit, r.Stderr)
	}
	return string(r.Stdout)
}

func TestAsInit(t *testing.T) {
	m := startMachine(t, wire.Boot{
		Env:   map[string]string{"TEMPLATE": "yes"},
		Start: []string{"bash", "-c", "sleep 0.1; echo $TEMPLATE >ready; sleep 1000"},
		Ready: []string{"test", "-s", "/" + readyTag},
	})
	ctx := t.Context()
	m.identify(t)

	t.Run("identity", func(t *testing.T) {
		if got := m.sh(t, "", "hostname; cat /etc/hostname /etc/machine-id; grep -c boxy /etc/hosts"); got != "boxy\nboxy\n"+strings.Repeat("0a", 16)+"\n1\n" {
			t.Errorf("got %q", got)
		}
	})
	t.Run("users", func(t *testing.T) {
		if got := m.sh(t, "", "id; echo $HOME $USER $LOGNAME $SHELL; umask; pwd"); got != "uid=1000(user) gid=1000(user) groups=1000(user),2000(extra)\n/home/user user user /bin/bash\n0022\n/workspace\n" {
			t.Errorf("user: %q", got)
		}
		if got := m.sh(t, "root", "id; echo $HOME"); got != "uid=0(root) gid=0(root) groups=0(root),2000(extra)\n/root\n" {
			t.Errorf("root: %q", got)
		}
		_, err := m.Run(ctx, wire.Exec{Argv: []string{"id"}, User: "odd"})
		wantCode(t, err, sandlot.CodeInvalidRequest)
		m.sh(t, "root", "echo later:x:1002:1002::/tmp:/bin/sh >>/etc/passwd")
		if got := m.sh(t, "later", "id -u; id -G"); got != "1002\n1002\n" {
			t.Errorf("a user that was added: %q", got)
		}
	})
	t.Run("files keep users apart", func(t *testing.T) {
		for _, p := range []string{"/root/secret", "/root"} {
			_, err := m.Content(ctx, at(p), "")
			wantOneOf(t, err, sandlot.CodeForbidden, sandlot.CodeInvalidRequest)
		}
		_, err := m.List(ctx, at("/root"), "", 0)
		wantCode(t, err, sandlot.CodeForbidden)
		_, err = m.ArchiveGet(ctx, at("/root"), false)
		wantCode(t, err, sandlot.CodeForbidden)
		_, err = m.Watch(ctx, at("/root"), false)
		wantCode(t, err, sandlot.CodeForbidden)
		wantCode(t, m.PutContent(ctx, at("/root/new"), strings.NewReader("x"), 1), sandlot.CodeForbidden)
		wantCode(t, m.PutContent(ctx, at("/etc/new"), strings.NewReader("x"), 1), sandlot.CodeForbidden)
		wantCode(t, m.Mkdir(ctx, at("/root/new")), sandlot.CodeForbidden)
		wantCode(t, m.Delete(ctx, at("/root/secret"), false), sandlot.CodeForbidden)
		wantCode(t, m.Move(ctx, at("/root/secret"), "mine"), sandlot.CodeForbidden)
		wantCode(t, m.ArchivePut(ctx, at("/root"), bytes.NewReader(makeTar(t, tarFile("x", "x"))), -1, false), sandlot.CodeForbidden)
		must(t, m.PutContent(ctx, guest.At{Path: "/root/new", User: "root"}, strings.NewReader("x"), 1))
		must(t, m.PutContent(ctx, at("mine"), strings.NewReader("x"), 1))
		must(t, m.ArchivePut(ctx, at("dir"), bytes.NewReader(makeTar(t, tarFile("x", "x"))), -1, false))
		must(t, m.ArchivePut(ctx, at("dir"), bytes.NewReader(makeTar(t, tarFile("y/z", "x"))), -1, false))
		if got := m.sh(t, "root", "stat -c %U:%G:%a /workspace/mine /workspace/dir/x /workspace/dir/y/z /root/new"); got != "user:user:644\nuser:user:644\nuser:user:644\nroot:root:644\n" {
			t.Errorf("owners: %q", got)
		}
		fi, err := m.Stat(ctx, at("mine"))
		if err != nil || fi.User != "user" || fi.Group != "user" {
			t.Errorf("stat %+v, %v", fi, err)
		}
		r, err := m.ArchiveGet(ctx, at("/workspace"), false)
		must(t, err)
		_, err = io.Copy(io.Discard, r)
		must(t, err)
		_ = r.Close()
	})
	t.Run("users at once", func(t *testing.T) {
		// Work as the user, on many threads, never shows root's files.
		var wg sync.WaitGroup
		for i := range 8 {
			wg.Go(func() {
				for range 100 {
					if i%2 == 0 {
						c, err := m.Content(ctx, guest.At{Path: "/root/secret", User: "root"}, "")
						if err != nil {
							t.Error(err)
							return
						}
						_ = c.Close()
						continue
					}
					_, err := m.Content(ctx, at("/root/secret"), "")
					wantCode(t, err, sandlot.CodeForbidden)
				}
			})
		}
		wg.Wait()
	})
	t.Run("cwd", func(t *testing.T) {
		_, err := m.Run(ctx, wire.Exec{Argv: []string{"true"}, Cwd: "/root"})
		wantCode(t, err, sandlot.CodeInvalidRequest)
		_, err = m.Run(ctx, wire.Exec{Argv: []string{"true"}, Cwd: "/proc/self/fd/7"})
		wantCode(t, err, sandlot.CodeInvalidRequest)
	})
	t.Run("files of the agent", func(t *testing.T) { // ADVERSARIAL 8
		if got := m.sh(t, "root", "cd /proc/self/fd; for i in $(seq 0 200); do [ -e $i ] && echo $i; done; true"); got != "0\n1\n2\n" {
			t.Errorf("a command has files %q", got)
		}
	})
	t.Run("orphans", func(t *testing.T) {
		m.sh(t, "", "for i in $(seq 50); do (true & sleep 0.05 &) ; done")
		eventually(t, "no zombies", func() bool {
			return m.sh(t, "", "grep -l '^State:.Z' /proc/[0-9]*/status 2>/dev/null | wc -l") == "0\n"
		})
		ps, err := m.Processes(ctx)
		must(t, err)
		for _, p := range ps {
			if p.Running && !p.Agent && p.PID == 1 {
				t.Errorf("the agent lists itself: %+v", p)
			}
		}
	})
	t.Run("a storm of commands and orphans", func(t *testing.T) {
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				for i := range 40 {
					code := i % 100
					r, err := m.Run(ctx, wire.Exec{Argv: []string{"bash", "-c", "(true &) ; (true &); exit " + strconv.Itoa(code)}, TimeoutMS: 20_000})
					if err != nil || r.ExitCode != code {
						t.Errorf("exit %d: %+v, %v", code, r.Exit, err)
					}
				}
			})
		}
		wg.Wait()
	})
	t.Run("signals", func(t *testing.T) {
		wantCode(t, m.Signal(ctx, 1, "KILL"), sandlot.CodeForbidden)
		for _, sig := range []string{"TERM", "INT", "HUP", "QUIT", "USR1", "PIPE", "ABRT"} {
			m.sh(t, "root", "kill -"+sig+" 1")
		}
		// What the agent ignores, its children do not.
		r, err := m.Run(ctx, wire.Exec{Argv: []string{"bash", "-c", "kill -TERM $$; sleep 5"}})
		if err != nil || r.Signal != "SIGTERM" {
			t.Errorf("%+v, %v", r.Exit, err)
		}
		m.sh(t, "root", "setsid -f sleep 1234; sleep 0.1")
		ps, err := m.Processes(ctx)
		must(t, err)
		killed := false
		for _, p := range ps {
			if p.Running && strings.Join(p.Argv, " ") == "sleep 1234" {
				if p.Agent || p.User != "root" || time.Since(p.StartedAt).Abs() > time.Minute {
					t.Errorf("listed as %+v", p)
				}
				must(t, m.Signal(ctx, p.PID, "9"))
				killed = true
			}
		}
		if !killed {
			t.Error("a stranger's process is not listed")
		}
	})
	t.Run("background", func(t *testing.T) {
		st, err := m.StartBackground(ctx, wire.Exec{Argv: []string{"bash", "-c", "echo hello; id -un"}})
		must(t, err)
		if !strings.HasPrefix(st.LogPath, "/var/log/sandlot/") {
			t.Errorf("log %q", st.LogPath)
		}
		eventually(t, "the log", func() bool { return m.sh(t, "", "cat "+st.LogPath) == "hello\nuser\n" })
	})
	t.Run("limit of processes", func(t *testing.T) {
		if got := m.sh(t, "", "ulimit -u"); got != strconv.Itoa(sandlot.MaxProcesses)+"\n" {
			t.Errorf("got %q", got)
		}
	})
}

func TestTemplateThatIsNotReady(t *testing.T) {
	for name, boot := range map[string]wire.Boot{
		"with a check":    {Start: []string{"bash", "-c", "echo no port >&2; exit 3"}, Ready: []string{"false"}},
		"without a check": {Start: []string{"bash", "-c", "echo no port >&2; exit 3"}},
	} {
		boot.Secret = testSecret
		a, err := New(Config{Root: t.TempDir(), Dial: neverDial, Boot: boot})
		must(t, err)
		if err := a.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "code 3") || !strings.Contains(err.Error(), "no port") {
			t.Errorf("%s: Run: %v", name, err)
		}
		_ = a.Close()
	}
}

func TestPasswd(t *testing.T) {
	dir := t.TempDir()
	us := newUsers(dir)
	if _, err := us.lookup("user"); err == nil {
		t.Error("found without a file")
	}
	must(t, os.WriteFile(filepath.Join(dir, "passwd"), []byte(passwd+"user:x:0:0:again:/:/bin/sh\nbig:x:99999999999:1::/:\nnl:x:1:1::/:\n"), 0o600))
	must(t, os.WriteFile(filepath.Join(dir, "group"), []byte(groups), 0o600))
	u, err := us.lookup("user")
	if err != nil || u.uid != 1000 || len(u.groups) != 2 || u.groups[1] != 2000 {
		t.Errorf("%+v, %v", u, err)
	}
	if u, err := us.lookup("nl"); err != nil || u.shell != "/bin/sh" {
		t.Errorf("%+v, %v", u, err)
	}
	for _, bad := range []string{"", "0", "1000", "0:0", "user:user", "../", "-x", "odd", "big", "user\n", "a b", strings.Repeat("u", 33)} {
		if _, err := us.lookup(bad); sandlot.ErrorCode(err) != sandlot.CodeInvalidRequest {
			t.Errorf("%q: %v", bad, err)
		}
	}
	// A FIFO in its place blocks nothing.
	must(t, os.Remove(filepath.Join(dir, "passwd")))
	must(t, syscall.Mkfifo(filepath.Join(dir, "passwd"), 0o600))
	if _, err := us.lookup("user"); err == nil {
		t.Error("found in a FIFO")
	}
	if _, err := readSmall(filepath.Join(dir, "passwd"), 10); err == nil || errors.Is(err, fs.ErrNotExist) {
		t.Errorf("readSmall: %v", err)
	}
}
