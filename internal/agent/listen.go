package agent

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"sync"
	"time"

	"sandlot/internal/wire"
)

const (
	redialMin    = 5 * time.Millisecond
	redialMax    = time.Second
	helloTimeout = 5 * time.Second
	settled      = time.Second // a stream that stayed parked this long was welcome
)

// listener is a net.Listener whose connections are dialled, not accepted. It keeps wire.Spares streams open
// that nobody has taken, because only those are there for somebody new on the host's side: a stream that was
// used and is idle belongs to the client that used it.
//
// Each spare has a goroutine, which dials, says the hello, hands the stream to the server, and waits until
// the stream is used or closed; then it dials the next.
type listener struct {
	dial   func(ctx context.Context) (net.Conn, error)
	hello  []byte
	log    *slog.Logger
	conns  chan net.Conn
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu    sync.Mutex
	fresh map[net.Conn]chan bool // streams not taken; receives true when taken, false when closed before
}

func newListener(ctx context.Context, dial func(context.Context) (net.Conn, error), secret string, log *slog.Logger) *listener {
	ctx, cancel := context.WithCancel(ctx)
	l := &listener{
		dial:   dial,
		hello:  []byte(wire.HelloMagic + secret + "\n"),
		log:    log,
		conns:  make(chan net.Conn),
		ctx:    ctx,
		cancel: cancel,
		fresh:  make(map[net.Conn]chan bool),
	}
	for range wire.Spares {
		l.wg.Go(l.keep)
	}
	return l
}

// keep holds one spare stream for ever.
func (l *listener) keep() {
	wait := redialMin
	for first := true; l.ctx.Err() == nil; first = false {
		if !first {
			l.sleep(wait/2 + rand.N(wait)) //nolint:gosec // jitter, not a secret
		}
		conn, err := l.open()
		if err != nil {
			l.log.Debug("dial the host", "err", err)
			wait = min(wait*2, redialMax)
			continue
		}
		since := time.Now()
		for ok := true; ok; {
			used := l.offer(conn)
			if !used {
				break
			}
			// Taken into use: replace it at once.
			wait = redialMin
			if conn, err = l.open(); err != nil {
				ok = false
			}
			since = time.Now()
		}
		if err == nil && time.Since(since) >= settled {
			wait = redialMin // it had been welcome: the host restarted, or the machine was restored
		} else {
			wait = min(wait*2, redialMax)
		}
	}
}

// open dials one stream and says the hello.
func (l *listener) open() (net.Conn, error) {
	conn, err := l.dial(l.ctx)
	if err != nil {
		return nil, err
	}
	_ = conn.SetWriteDeadline(time.Now().Add(helloTimeout))
	if _, err := conn.Write(l.hello); err != nil {
		_ = conn.Close()
		return nil, err
	}
	_ = conn.SetWriteDeadline(time.Time{})
	return &stream{Conn: conn, l: l}, nil
}

// stream notices the first byte that comes: from then on it is somebody's.
type stream struct {
	net.Conn
	l     *listener
	taken bool // only the server's reader looks
}

func (s *stream) Read(p []byte) (int, error) {
	n, err := s.Conn.Read(p)
	if s.taken || n == 0 {
		return n, err
	}
	s.taken = true
	s.l.settle(s, true)
	if p[0] != wire.Take {
		return n, err
	}
	if n = copy(p, p[1:n]); n == 0 && err == nil {
		return s.Conn.Read(p)
	}
	return n, err
}

// CloseWrite lets the server end an answer before it hangs up on a body that it does not want.
func (s *stream) CloseWrite() error {
	if c, ok := s.Conn.(interface{ CloseWrite() error }); ok {
		return c.CloseWrite()
	}
	return nil
}

// offer hands conn to the server and waits until it is taken (true) or closed (false).
func (l *listener) offer(conn net.Conn) bool {
	used := make(chan bool, 1)
	l.mu.Lock()
	l.fresh[conn] = used
	l.mu.Unlock()
	select {
	case l.conns <- conn:
	case <-l.ctx.Done():
		l.settle(conn, false)
		_ = conn.Close()
		return false
	}
	select {
	case ok := <-used:
		return ok
	case <-l.ctx.Done():
		return false // the server closes conn
	}
}

// track is the server's ConnState.
func (l *listener) track(conn net.Conn, state http.ConnState) {
	switch state {
	case http.StateClosed, http.StateHijacked:
		l.settle(conn, false)
	case http.StateNew, http.StateActive, http.StateIdle:
	}
}

func (l *listener) settle(conn net.Conn, used bool) {
	l.mu.Lock()
	ch, ok := l.fresh[conn]
	delete(l.fresh, conn)
	l.mu.Unlock()
	if ok {
		ch <- used
	}
}

func (l *listener) sleep(d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-l.ctx.Done():
	}
}

// Accept returns the next stream that was dialled.
func (l *listener) Accept() (net.Conn, error) {
	select {
	case conn := <-l.conns:
		return conn, nil
	case <-l.ctx.Done():
		return nil, net.ErrClosed
	}
}

// Close stops dialling; streams that the server has are the server's.
func (l *listener) Close() error {
	l.cancel()
	l.wg.Wait()
	return nil
}

// Addr is a placeholder: nothing listens.
func (l *listener) Addr() net.Addr { return &net.UnixAddr{Name: "host", Net: "unix"} }
