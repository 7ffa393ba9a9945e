package agent

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"sandlot"
	"sandlot/internal/wire"
)

const (
	drainAfterExit = 200 * time.Millisecond // for output that descendants still hold open
	pingAfter      = 15 * time.Second
	chunk          = 64 << 10 // bytes read at once: a pipe's capacity
)

var chunks = sync.Pool{New: func() any { b := make([]byte, wire.FrameHeader+chunk); return &b }}

// serveExec runs one process and answers with frames.
func (a *Agent) serveExec(w http.ResponseWriter, r *http.Request) error {
	// The answer leaves first; then there is time to park the next child.
	defer func() { go a.parking.fill() }()
	id, err := a.ready()
	if err != nil {
		return err
	}
	var e wire.Exec
	if err := readJSON(r, &e); err != nil {
		return err
	}
	if err := checkExec(&e); err != nil {
		return err
	}
	switch {
	case e.Background:
		p, err := a.startBackground(id, &e)
		if err != nil {
			return err
		}
		answerFrames(w, appendJSON(nil, wire.FrameStarted, wire.Started{PID: p.pid, LogPath: p.log.shown}))
		return nil
	case e.Collect > 0:
		out, err := a.collect(r.Context(), id, &e)
		if err != nil {
			return err
		}
		defer out.stderr.free()
		defer out.stdout.free()
		out.answer(w)
		return nil
	}
	return a.stream(w, r, id, &e)
}

// answerFrames answers with whole frames: with their length known, a small answer is a single write.
func answerFrames(w http.ResponseWriter, frames []byte) {
	frameHeaders(w, len(frames))
	_, _ = w.Write(frames)
}

func frameHeaders(w http.ResponseWriter, length int) {
	h := w.Header()
	h.Set("Content-Type", "application/octet-stream")
	h.Set("Content-Length", itoa(length))
}

func appendJSON(buf []byte, kind byte, v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // wire's types always marshal
	}
	return wire.AppendFrame(buf, kind, b)
}

// maxCaptured bounds what all running commands' kept outputs take of the sandbox's memory together.
const maxCaptured = 128 << 20

// capture is what collect keeps of one output.
type capture struct {
	data      []byte
	limit     int
	truncated bool
	all       *atomic.Int64 // bytes kept by all captures of the agent
}

func (c *capture) take(b []byte) error {
	room := c.limit - len(c.data)
	if len(b) > room {
		c.truncated = true
		b = b[:room]
	}
	if c.all.Add(int64(len(b))) > maxCaptured {
		c.all.Add(-int64(len(b)))
		c.truncated, c.limit = true, len(c.data)
		return nil
	}
	c.data = append(c.data, b...)
	return nil
}

func (c *capture) free() {
	c.all.Add(-int64(len(c.data)))
	c.data = nil
}

type collected struct {
	pid            int
	stdout, stderr capture
	exit           wire.Exit
}

// answer sends all frames: a small answer in a single write, a large one without copying the outputs.
func (c *collected) answer(w http.ResponseWriter) {
	parts := [][]byte{appendJSON(nil, wire.FrameStarted, wire.Started{PID: c.pid})}
	parts = outputFrames(parts, wire.FrameStdout, c.stdout.data)
	parts = outputFrames(parts, wire.FrameStderr, c.stderr.data)
	answerParts(w, append(parts, appendJSON(nil, wire.FrameExit, c.exit)))
}

// outputFrames appends frames around data, which is not copied.
func outputFrames(parts [][]byte, kind byte, data []byte) [][]byte {
	for data := range slices.Chunk(data, wire.MaxFrame) {
		h := make([]byte, wire.FrameHeader)
		wire.PutHeader(h, kind, len(data))
		parts = append(parts, h, data)
	}
	return parts
}

// answerParts answers with frames in pieces: a small answer in a single write, a large one without copying.
func answerParts(w http.ResponseWriter, parts [][]byte) {
	const small = 3 << 10
	total := 0
	for _, p := range parts {
		total += len(p)
	}
	if total <= small {
		answerFrames(w, slices.Concat(parts...))
		return
	}
	frameHeaders(w, total)
	for _, p := range parts {
		if _, err := w.Write(p); err != nil {
			return
		}
	}
}

// collect runs e to its end and keeps the first e.Collect bytes of each output.
func (a *Agent) collect(ctx context.Context, id *identity, e *wire.Exec) (*collected, error) {
	out := &collected{}
	out.stdout.all, out.stderr.all = &a.captured, &a.captured
	out.stdout.limit, out.stderr.limit = int(e.Collect), int(e.Collect)
	run, err := a.begin(id, e)
	var ns *notStarted
	if errors.As(err, &ns) {
		_ = out.stderr.take([]byte(ns.Message))
		out.exit = wire.Exit{ExitCode: ns.Code}
		return out, nil
	}
	if err != nil {
		return nil, err
	}
	out.pid = run.p.pid
	out.exit = run.finish(ctx, e.TimeoutMS, out.stdout.take, out.stderr.take)
	out.exit.StdoutTruncated, out.exit.StderrTruncated = out.stdout.truncated, out.stderr.truncated
	return out, nil
}

// stream runs e and sends what it prints as it comes. A reader that stalls stalls the process on its pipe;
// one that goes away ends it.
func (a *Agent) stream(w http.ResponseWriter, r *http.Request, id *identity, e *wire.Exec) error {
	run, err := a.begin(id, e)
	var ns *notStarted
	if errors.As(err, &ns) {
		buf := appendJSON(nil, wire.FrameStarted, wire.Started{})
		buf = wire.AppendFrame(buf, wire.FrameStderr, []byte(ns.Message))
		answerFrames(w, appendJSON(buf, wire.FrameExit, wire.Exit{ExitCode: ns.Code}))
		return nil
	}
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	fw := newFrameWriter(w, cancel)
	defer fw.close()
	fw.json(wire.FrameStarted, wire.Started{PID: run.p.pid})
	exit := run.finish(ctx, e.TimeoutMS,
		func(b []byte) error { return fw.frame(wire.FrameStdout, b) },
		func(b []byte) error { return fw.frame(wire.FrameStderr, b) })
	fw.json(wire.FrameExit, exit)
	return nil
}

// foreground is a process whose outputs the agent reads.
type foreground struct {
	p              *proc
	procs          *table
	stdout, stderr *pipe
}

// begin starts a foreground process.
func (a *Agent) begin(id *identity, e *wire.Exec) (*foreground, error) {
	u, err := a.account(e.User)
	if err != nil {
		return nil, err
	}
	if len(e.Stdin) == 0 {
		if ready := a.parking.take(); ready != nil {
			f := &foreground{procs: a.procs, stdout: ready.stdout, stderr: ready.stderr}
			f.p, err = a.launch(id, u, e, ready, nil, nil, nil)
			if err == nil {
				return f, nil
			}
			a.parking.give(ready)
			if !errors.Is(err, errUnfit) {
				return nil, err
			}
		}
	}
	return a.fork(id, u, e)
}

// fork is begin with a process that is forked now.
func (a *Agent) fork(id *identity, u *user, e *wire.Exec) (*foreground, error) {
	null, err := devNull()
	if err != nil {
		return nil, noPipes(err)
	}
	fds := []int{int(null.Fd()), 0, 0}
	var in [2]int
	if len(e.Stdin) > 0 {
		if err := syscall.Pipe2(in[:], syscall.O_CLOEXEC); err != nil {
			return nil, noPipes(err)
		}
		defer func() { _ = syscall.Close(in[0]) }()
		fds[0] = in[0]
	}
	f := &foreground{procs: a.procs}
	if f.stdout, err = newPipe(); err == nil {
		if f.stderr, err = newPipe(); err != nil {
			f.stdout.drop()
		}
	}
	if err != nil {
		if len(e.Stdin) > 0 {
			_ = syscall.Close(in[1])
		}
		return nil, noPipes(err)
	}
	fds[1], fds[2] = f.stdout.w, f.stderr.w
	f.p, err = a.launch(id, u, e, nil, fds, nil, nil)
	if err != nil {
		f.stdout.drop()
		f.stderr.drop()
		if len(e.Stdin) > 0 {
			_ = syscall.Close(in[1])
		}
		return nil, err
	}
	f.stdout.started()
	f.stderr.started()
	if len(e.Stdin) > 0 {
		feed(in[1], e.Stdin, f.p.done)
	}
	return f, nil
}

func noPipes(err error) error {
	return sandlot.Wrap(err, sandlot.CodeRateLimited, "the sandbox has no room for another process").With("retry_after_s", 1)
}

// feed writes b into a pipe and closes it, without waiting for a process that does not read.
func feed(fd int, b []byte, done <-chan struct{}) {
	if len(b) <= 4096 { // fits an empty pipe
		_, _ = syscall.Write(fd, b)
		_ = syscall.Close(fd)
		return
	}
	_ = syscall.SetNonblock(fd, true)
	f := os.NewFile(uintptr(fd), "|1")
	go func() {
		defer func() { _ = f.Close() }()
		stop := make(chan struct{})
		defer close(stop)
		go func() { // a reader that inherited the pipe and never reads must not keep this goroutine
			select {
			case <-done:
				_ = f.SetWriteDeadline(time.Now().Add(drainAfterExit))
			case <-stop:
			}
		}()
		_, _ = f.Write(b)
	}()
}

// finish reads both outputs until they end, waits for the process, and ends it when its time is up or ctx
// is done. The sinks are called from one goroutine each; after a sink's error its output is only discarded.
func (f *foreground) finish(ctx context.Context, timeoutMS int64, stdout, stderr func([]byte) error) wire.Exit {
	var readers sync.WaitGroup
	readers.Go(func() { f.stderr.drain(stderr) })
	readers.Go(func() { f.stdout.drain(stdout) })

	var timeout <-chan time.Time
	if timeoutMS > 0 {
		t := time.NewTimer(time.Duration(timeoutMS)*time.Millisecond - time.Since(f.p.started))
		defer t.Stop()
		timeout = t.C
	}
	var exit wire.Exit
	select {
	case <-f.p.done:
	case <-timeout:
		exit.TimedOut = true
		killTree(f.p.pid)
		<-f.p.done
	case <-ctx.Done():
		killTree(f.p.pid)
		<-f.p.done
	}
	late := time.Now().Add(drainAfterExit)
	_ = f.stdout.r.SetReadDeadline(late)
	_ = f.stderr.r.SetReadDeadline(late)
	readers.Wait()
	f.procs.discard(f.stdout)
	f.procs.discard(f.stderr)
	exit.ExitCode, exit.Signal = f.p.exit()
	exit.DurationUS = f.p.ended.Sub(f.p.started).Microseconds()
	return exit
}

// drain gives all that comes through the pipe to sink, until every writer closed it. After the read
// deadline, which finish sets when the process has ended, it takes what is in the pipe already and stops.
func (p *pipe) drain(sink func([]byte) error) {
	bp := chunks.Get().(*[]byte)
	defer chunks.Put(bp)
	buf := (*bp)[wire.FrameHeader:]
	failed := false
	give := func(b []byte) {
		if !failed && sink(b) != nil {
			failed = true
		}
	}
	for {
		n, err := p.r.Read(buf)
		if n > 0 {
			give(buf[:n])
		}
		if err == nil {
			continue
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			p.ended = true
			return
		}
		for left := 1 << 20; left > 0; left -= n {
			if n, err = syscall.Read(p.fd, buf[:min(left, len(buf))]); n <= 0 || err != nil {
				return
			}
			give(buf[:n])
		}
		return
	}
}
