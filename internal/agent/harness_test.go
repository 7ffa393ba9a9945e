package agent

import (
	"context"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"sandlot"
	"sandlot/internal/guest"
	"sandlot/internal/wire"
)

const testSecret = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

// host is the engine's side of an agent's socket.
type host struct {
	path  string
	l     net.Listener
	conns chan net.Conn
}

func newHost(t testing.TB) *host {
	t.Helper()
	dir, err := os.MkdirTemp("", "sl") // t.TempDir can be too long for a socket's name
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	h := &host{path: filepath.Join(dir, "s"), conns: make(chan net.Conn, 1024)}
	h.listen(t)
	t.Cleanup(h.stop)
	return h
}

func (h *host) listen(t testing.TB) {
	t.Helper()
	var lc net.ListenConfig
	l, err := lc.Listen(t.Context(), "unix", h.path)
	if err != nil {
		t.Fatal(err)
	}
	h.l = l
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				hello := make([]byte, wire.HelloLen)
				if _, err := io.ReadFull(c, hello); err != nil { // the agent is closing
					_ = c.Close()
					return
				}
				if string(hello) != wire.HelloMagic+testSecret+"\n" {
					t.Errorf("hello %q", hello)
				}
				h.conns <- c
			}()
		}
	}()
}

// stop closes the socket and all parked streams, as a host process that dies.
func (h *host) stop() {
	_ = h.l.Close()
	for {
		select {
		case c := <-h.conns:
			_ = c.Close()
		default:
			return
		}
	}
}

func (h *host) dial(ctx context.Context) (net.Conn, error) {
	select {
	case c := <-h.conns:
		return c, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

type box struct {
	*guest.Client
	a    *Agent
	h    *host
	root string
}

// start runs an agent whose "/" is a new directory, with its identity.
func start(t testing.TB) *box {
	b := startBare(t, Config{Root: t.TempDir()})
	b.identify(t)
	return b
}

func startBare(t testing.TB, cfg Config) *box {
	t.Helper()
	h := newHost(t)
	cfg.Boot.Secret, cfg.Boot.Socket = testSecret, h.path
	if testing.Verbose() {
		cfg.Log = slog.New(slog.NewTextHandler(os.Stderr, nil))
	}
	a, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return run(t, a, h)
}

func run(t testing.TB, a *Agent, h *host) *box {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- a.Run(context.Background()) }()
	c := guest.New(h.dial)
	t.Cleanup(func() {
		c.Close()
		_ = a.Close()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	return &box{Client: c, a: a, h: h, root: a.root}
}

func (b *box) identify(t testing.TB) {
	t.Helper()
	err := b.Identify(t.Context(), wire.Identity{
		ID: "sbxtest", Hostname: "box", MachineID: strings.Repeat("0a", 16), Entropy: make([]byte, 64), Now: time.Now(),
		Env: map[string]string{"FROM_IDENTITY": "i", "BOTH": "identity"},
	})
	if err != nil {
		t.Fatal(err)
	}
}

func (b *box) sh(t testing.TB, script string) guest.ExecResult {
	t.Helper()
	return b.run(t, wire.Exec{Argv: []string{"bash", "-c", script}, TimeoutMS: 20_000})
}

func (b *box) run(t testing.TB, e wire.Exec) guest.ExecResult {
	t.Helper()
	res, err := b.Run(t.Context(), e)
	if err != nil {
		t.Fatalf("%q: %v", clip(strings.Join(e.Argv, " "), 200), err)
	}
	return res
}

func wantCode(t testing.TB, err error, code sandlot.Code) {
	t.Helper()
	if sandlot.ErrorCode(err) != code {
		t.Errorf("got error %v, want code %s", err, code)
	}
}

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not in time: %s", what)
		}
	}
}

func countFDs(t testing.TB) int {
	t.Helper()
	e, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(e)
}

// census waits until goroutines and files are what they were, within slack.
func census(t testing.TB, goroutines, fds, slack int) {
	t.Helper()
	eventually(t, "goroutines and files back to where they were", func() bool {
		runtime.GC() // finalizers close what nobody refers to any more
		return runtime.NumGoroutine() <= goroutines+slack && countFDs(t) <= fds+slack
	})
}

func alive(pid int) bool {
	st, ok := readStat(pid)
	return ok && st.state != 'Z'
}
