package channel_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"sandlot"
	"sandlot/internal/engine/channel"
	"sandlot/internal/wire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func listen(t *testing.T, path string) (*channel.Listener, string) {
	t.Helper()
	secret := channel.NewSecret()
	l, err := channel.Listen(path, secret, os.Getuid())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l, secret
}

// dial opens a stream as a guest does and says hello on it.
func dial(t *testing.T, path, hello string) net.Conn {
	t.Helper()
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	c, err := net.Dial("unix", fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(path)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	_, _ = io.WriteString(c, hello) // it may be turned away already
	return c
}

func closed(c net.Conn) bool {
	_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
	_, err := c.Read(make([]byte, 1))
	return err == io.EOF || err != nil && strings.Contains(err.Error(), "reset")
}

func TestStream(t *testing.T) {
	// Longer than a socket's address holds.
	path := filepath.Join(t.TempDir(), strings.Repeat("d", 100), strings.Repeat("e", 60))
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	l, secret := listen(t, path)
	select {
	case <-l.Ready():
		t.Error("ready before a hello")
	default:
	}
	guest := dial(t, path, wire.HelloMagic+secret+"\n")
	<-l.Ready()
	host, err := l.Dial(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer host.Close()
	if _, err := host.Write([]byte("ping")); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 4)
	if _, err := io.ReadFull(guest, buf); err != nil || string(buf) != "ping" {
		t.Errorf("%q, %v", buf, err)
	}
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("the socket's mode: %v, %v", fi.Mode(), err)
	}
}

// TestStrangers is item 12: whoever does not know the machine's secret is turned away, and does not stand in
// the way of the agent.
func TestStrangers(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, secret := listen(t, path)
	good := wire.HelloMagic + secret + "\n"
	for name, hello := range map[string]string{
		"wrong secret": wire.HelloMagic + channel.NewSecret() + "\n",
		"wrong magic":  "SANDLOT9 " + secret + "\n",
		"no newline":   wire.HelloMagic + secret + "x",
		"zeros":        strings.Repeat("\x00", wire.HelloLen),
	} {
		if c := dial(t, path, hello); !closed(c) {
			t.Errorf("%s was let in", name)
		}
	}
	for range 100 { // more than may be greeted at once, and they say nothing
		dial(t, path, "")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for ctx.Err() == nil { // the silent ones are dropped after a while
		dial(t, path, good)
		short, stop := context.WithTimeout(ctx, 200*time.Millisecond)
		c, err := l.Dial(short)
		stop()
		if err == nil {
			c.Close()
			return
		}
	}
	t.Error("silent strangers keep the agent out")
}

// TestDeadStreamsAreSkipped: after a guest was restored, the streams that it had parked are dead.
func TestDeadStreamsAreSkipped(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, secret := listen(t, path)
	good := wire.HelloMagic + secret + "\n"
	dead := dial(t, path, good)
	<-l.Ready()
	dead.Close()
	early := dial(t, path, good+"HTTP/1.1 200 OK\r\n") // speaks before it is asked
	time.Sleep(50 * time.Millisecond)
	guest := dial(t, path, good)
	host, err := l.Dial(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer host.Close()
	_, _ = host.Write([]byte("x"))
	_ = guest.SetReadDeadline(time.Now().Add(5 * time.Second))
	if _, err := guest.Read(make([]byte, 1)); err != nil {
		t.Errorf("the living stream was not taken: %v", err)
	}
	if !closed(early) {
		t.Error("a stream that spoke first was kept")
	}
}

// TestFlood: a guest that opens streams without end holds a bounded number, and the newest work.
func TestFlood(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, secret := listen(t, path)
	before := fds(t)
	for range 300 {
		dial(t, path, wire.HelloMagic+secret+"\n")
	}
	<-l.Ready()
	time.Sleep(100 * time.Millisecond)
	// Each of the guest's own ends is a descriptor of this process too.
	if grown := fds(t) - before - 300; grown > 32 {
		t.Errorf("%d descriptors more than the guest's own", grown)
	}
	c, err := l.Dial(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
}

func fds(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// TestTakeOver: a new listener at the same path gets the agent's redials, and closing lets everybody go.
func TestTakeOver(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, secret := listen(t, path)
	old := dial(t, path, wire.HelloMagic+secret+"\n")
	<-l.Ready()
	again, err := channel.Listen(path, secret, os.Getuid())
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	dial(t, path, wire.HelloMagic+secret+"\n")
	<-again.Ready()
	l.Close()
	if !closed(old) {
		t.Error("a parked stream outlives its listener")
	}
	if _, err := l.Dial(t.Context()); sandlot.ErrorCode(err) != sandlot.CodeSandboxUnhealthy {
		t.Errorf("dial after close: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	c, err := again.Dial(ctx)
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	cancel()
	if _, err := again.Dial(ctx); err == nil {
		t.Error("a dial with an ended context worked without a stream")
	}
}
