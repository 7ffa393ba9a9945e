// Package channel is the host's end of the streams that an agent dials out of its sandbox over a Unix
// socket. The guest opens them, because a guest that listens on a host's socket could not be checkpointed,
// and because nothing of the host is then reachable from a path of the guest's.
//
// Each stream begins with a hello of fixed length that holds the machine's secret. Nothing more of what a
// guest sends is read here.
package channel

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"sandlot"
	"sandlot/internal/wire"
)

const (
	helloTimeout = 5 * time.Second
	maxParked    = 8 // streams that wait for a use; an agent keeps wire.Spares
	maxGreeting  = 8 // streams that have not said their hello yet
	dialTimeout  = 10 * time.Second
)

// NewSecret returns a machine's secret: wire.SecretLen hex digits.
func NewSecret() string {
	var b [wire.SecretLen / 2]byte
	rand.Read(b[:]) // never fails on Linux
	return hex.EncodeToString(b[:])
}

// Listener accepts one machine's streams.
type Listener struct {
	ln       *net.UnixListener
	hello    []byte
	parked   chan *net.UnixConn
	greeting chan struct{}
	ready    chan struct{}
	once     sync.Once
	closed   <-chan struct{}
	cancel   context.CancelFunc
	wg       sync.WaitGroup
}

// Listen listens at path, whose directory must exist. An old socket there is replaced, so that a restarted
// host takes over a running agent's redials. The socket belongs to uid alone.
func Listen(path, secret string, uid int) (*Listener, error) {
	if len(secret) != wire.SecretLen {
		return nil, fmt.Errorf("channel: a secret has %d hex digits", wire.SecretLen)
	}
	// A socket's path is bound through a directory descriptor, because it may be longer than the 107 bytes
	// that an address holds.
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
		return nil, err
	}
	short := fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(path))
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: short, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("channel: %w", err)
	}
	ln.SetUnlinkOnClose(false)
	if err := errors.Join(os.Chmod(path, 0o600), os.Chown(path, uid, uid)); err != nil {
		ln.Close()
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background()) // ends with Close, not with a caller
	l := &Listener{
		ln:       ln,
		hello:    []byte(wire.HelloMagic + secret + "\n"),
		parked:   make(chan *net.UnixConn, maxParked),
		greeting: make(chan struct{}, maxGreeting),
		ready:    make(chan struct{}),
		closed:   ctx.Done(),
		cancel:   cancel,
	}
	l.wg.Add(1)
	go l.accept(ctx)
	return l, nil
}

// Ready is closed when the agent has said its first hello.
func (l *Listener) Ready() <-chan struct{} { return l.ready }

func (l *Listener) accept(ctx context.Context) {
	defer l.wg.Done()
	for {
		c, err := l.ln.AcceptUnix()
		if err != nil {
			select {
			case <-l.closed:
				return
			case <-time.After(10 * time.Millisecond): // out of descriptors: others may be freed
				continue
			}
		}
		select {
		case l.greeting <- struct{}{}:
			l.wg.Add(1)
			go l.greet(ctx, c)
		default: // too many at once that say nothing
			c.Close()
		}
	}
}

func (l *Listener) greet(ctx context.Context, c *net.UnixConn) {
	defer l.wg.Done()
	defer func() { <-l.greeting }()
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	buf := make([]byte, len(l.hello))
	_ = c.SetReadDeadline(time.Now().Add(helloTimeout))
	if _, err := io.ReadFull(c, buf); err != nil || subtle.ConstantTimeCompare(buf, l.hello) != 1 {
		c.Close()
		return
	}
	_ = c.SetReadDeadline(time.Time{})
	widen(c)
	for {
		select {
		case <-l.closed:
			c.Close()
			return
		case l.parked <- c:
			l.once.Do(func() { close(l.ready) })
			return
		default:
		}
		// Full: the oldest goes, since after a restore the old ones are dead.
		select {
		case old := <-l.parked:
			old.Close()
		default:
		}
	}
}

// sendBuffer is how many bytes may be on their way into a guest on one stream. The kernel's default, 208 KiB,
// has sender and guest take turns: each wake-up of a guest costs more than copying that much.
const sendBuffer = 1 << 20

// widen raises the send buffer, beyond the host's limit where this process may.
func widen(c *net.UnixConn) {
	rc, err := c.SyscallConn()
	if err != nil {
		return
	}
	_ = rc.Control(func(fd uintptr) {
		if unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, sendBuffer) != nil {
			_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUF, sendBuffer)
		}
	})
}

// Dial takes a stream that the agent has opened, and waits for one when there is none.
func (l *Listener) Dial(ctx context.Context) (net.Conn, error) {
	timeout := time.NewTimer(dialTimeout)
	defer timeout.Stop()
	for {
		select {
		case c := <-l.parked:
			if alive(c) {
				return c, nil
			}
			c.Close()
		case <-l.closed:
			return nil, sandlot.Errorf(sandlot.CodeSandboxUnhealthy, "the sandbox has ended")
		case <-timeout.C:
			return nil, sandlot.Errorf(sandlot.CodeSandboxUnhealthy, "the agent inside the sandbox opened no stream within %s", dialTimeout)
		case <-ctx.Done():
			return nil, sandlot.Wrap(context.Cause(ctx), sandlot.CodeTimeout, "gave up waiting for the agent inside the sandbox")
		}
	}
}

// alive says whether a parked stream can be used: the guest has not closed it, and has kept silent, as the
// protocol wants before a request.
func alive(c *net.UnixConn) bool {
	rc, err := c.SyscallConn()
	if err != nil {
		return false
	}
	ok := false
	err = rc.Control(func(fd uintptr) {
		var b [1]byte
		_, _, err := unix.Recvfrom(int(fd), b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
		ok = err == unix.EAGAIN
	})
	return err == nil && ok
}

// Close ends the listener and its parked streams. Streams that were taken are their takers'.
func (l *Listener) Close() error {
	l.cancel()
	l.ln.Close()
	l.wg.Wait()
	for {
		select {
		case c := <-l.parked:
			c.Close()
		default:
			return nil
		}
	}
}

// Pair makes the two ends of a stream within this host.
func Pair() (a, b *net.UnixConn, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	var ends [2]*net.UnixConn
	var errs [2]error
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "stream")
		var c net.Conn
		if c, errs[i] = net.FileConn(f); errs[i] == nil {
			ends[i], _ = c.(*net.UnixConn)
		}
		f.Close()
	}
	if err := errors.Join(errs[:]...); err != nil {
		for _, c := range ends {
			if c != nil {
				c.Close()
			}
		}
		return nil, nil, err
	}
	return ends[0], ends[1], nil
}
