package agent

import (
	"context"
	"errors"
	"io"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"sandlot/internal/guest"
	"sandlot/internal/wire"
)

func neverDial(ctx context.Context) (net.Conn, error) { <-ctx.Done(); return nil, ctx.Err() }

func TestSpares(t *testing.T) {
	b := startBare(t, Config{Root: t.TempDir()})
	parked := func() int { return len(b.h.conns) }
	settled := func(want int) {
		t.Helper()
		eventually(t, "spares", func() bool { return parked() == want })
		time.Sleep(20 * time.Millisecond)
		if n := parked(); n != want {
			t.Errorf("%d streams are parked, want %d", n, want)
		}
	}
	settled(wire.Spares)
	_, err := b.Health(t.Context()) // takes one, which is replaced
	must(t, err)
	settled(wire.Spares)
	for range 20 { // the same stream again and again
		_, err := b.Health(t.Context())
		must(t, err)
	}
	settled(wire.Spares)

	// Many at once never wait for more than a dial.
	b.identify(t)
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			if _, err := b.Run(t.Context(), wire.Exec{Argv: []string{"sleep", "0.1"}}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	settled(wire.Spares)

	// A stream that is taken and kept in reserve is no spare.
	for range 2 * wire.Spares {
		conn, err := b.h.dial(t.Context())
		must(t, err)
		defer func() { _ = conn.Close() }()
		_, err = conn.Write([]byte{wire.Take})
		must(t, err)
		settled(wire.Spares)
	}

	// The host's process dies, all streams with it, and comes back after a while; then again at once.
	for _, gap := range []time.Duration{150 * time.Millisecond, 0} {
		b.CloseIdle()
		b.h.stop()
		time.Sleep(gap)
		b.h.listen(t)
		began := time.Now()
		if _, err := b.Health(t.Context()); err != nil {
			t.Error(err)
		}
		if took := time.Since(began); took > time.Second {
			t.Errorf("after %s it took %s", gap, took)
		}
		settled(wire.Spares)
	}

	// Parked streams that break are replaced at once, as after a restore.
	time.Sleep(settledFor)
	for range wire.Spares {
		_ = (<-b.h.conns).Close()
	}
	began := time.Now()
	settled(wire.Spares)
	if took := time.Since(began); took > 200*time.Millisecond {
		t.Errorf("new spares took %s", took)
	}
}

const settledFor = settled + 10*time.Millisecond

// A host that hangs up on every stream is not dialled in a tight loop.
func TestUnwelcome(t *testing.T) {
	var dials atomic.Int32
	a, err := New(Config{Root: t.TempDir(), Boot: wire.Boot{Secret: testSecret}, Dial: func(context.Context) (net.Conn, error) {
		dials.Add(1)
		ours, theirs := net.Pipe()
		go func() {
			_, _ = io.ReadFull(theirs, make([]byte, wire.HelloLen))
			_ = theirs.Close()
		}()
		return ours, nil
	}})
	must(t, err)
	done := make(chan error, 1)
	go func() { done <- a.Run(t.Context()) }()
	time.Sleep(500 * time.Millisecond)
	_ = a.Close()
	must(t, <-done)
	if n := dials.Load(); n < 4 || n > 60 {
		t.Errorf("%d dials in half a second", n)
	}
}

func TestHelloHasADeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &listener{ctx: t.Context(), hello: make([]byte, 10), dial: func(context.Context) (net.Conn, error) {
			ours, _ := net.Pipe() // nobody reads
			return ours, nil
		}}
		began := time.Now()
		_, err := l.open()
		var ne net.Error
		if !errors.As(err, &ne) || !ne.Timeout() || time.Since(began) != helloTimeout {
			t.Errorf("after %s: %v", time.Since(began), err)
		}
	})
}

// A thousand agents in one process, which dial only when somebody wants a stream, cost little.
func TestThousandAgents(t *testing.T) {
	const n = 1000
	root := t.TempDir()
	runtime.GC()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	goroutines := runtime.NumGoroutine()
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wanted := make([]chan net.Conn, n)
	for i := range n {
		wanted[i] = make(chan net.Conn)
		a, err := New(Config{Root: root, Boot: wire.Boot{Secret: testSecret}, Dial: func(ctx context.Context) (net.Conn, error) {
			ours, theirs := net.Pipe()
			select {
			case wanted[i] <- theirs:
				return ours, nil
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}})
		must(t, err)
		wg.Go(func() {
			if err := a.Run(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	time.Sleep(100 * time.Millisecond)
	runtime.GC()
	runtime.ReadMemStats(&after)
	if per := int64(after.HeapAlloc+after.StackInuse-before.HeapAlloc-before.StackInuse) / n; per > 48<<10 {
		t.Errorf("an idle agent takes %d bytes", per)
	}
	if per := float64(runtime.NumGoroutine()-goroutines) / n; per > 6 {
		t.Errorf("an idle agent takes %.1f goroutines", per)
	}
	for i := range 50 {
		c := guest.New(func(ctx context.Context) (net.Conn, error) {
			conn := <-wanted[i]
			_, err := io.ReadFull(conn, make([]byte, wire.HelloLen))
			return conn, err
		})
		if _, err := c.Health(ctx); err != nil {
			t.Error(err)
		}
		c.Close()
	}
	cancel()
	wg.Wait()
	eventually(t, "all goroutines gone", func() bool { return runtime.NumGoroutine() <= goroutines+5 })
}
