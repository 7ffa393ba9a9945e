package agent

import (
	"sync"
	"syscall"
	"time"

	"sandlot/internal/wire"
)

// maxEarly bounds what is kept of an output between two cells.
const maxEarly = 1 << 20

// output is one of a kernel's two: read all the time, and given to the cell that runs.
type output struct {
	pipe  *pipe
	raw   syscall.RawConn // of pipe.r
	procs *table
	held  bool

	mu     sync.Mutex
	sink   func([]byte) error // nil between cells
	failed bool               // the sink's cell does not take any more
	early  []byte             // what came between cells
	dead   bool               // what comes is thrown away
	closed bool
}

func newOutput(procs *table) (*output, error) {
	p, err := newPipe()
	if err != nil {
		return nil, err
	}
	raw, err := p.r.SyscallConn()
	if err != nil {
		p.drop()
		return nil, err
	}
	return &output{pipe: p, raw: raw, procs: procs}, nil
}

// watch begins to read. It goes on until every writer has closed the pipe, which may be long after the kernel.
func (o *output) watch() {
	o.pipe.started()
	o.held = o.procs.hold(o.pipe.r)
	go func() {
		_ = o.raw.Read(func(uintptr) bool { return o.readAll() })
		o.mu.Lock()
		defer o.mu.Unlock()
		o.closed = true
		if o.held {
			o.procs.letGo(o.pipe.r)
		} else {
			_ = o.pipe.r.Close()
		}
	}()
}

// readAll reads until the pipe is empty, and says whether it has ended. It lets go of the lock between two reads:
// who writes without a pause does not keep it.
func (o *output) readAll() bool {
	bp, _ := chunks.Get().(*[]byte)
	defer chunks.Put(bp)
	for {
		o.mu.Lock()
		n, ended := o.read((*bp)[wire.FrameHeader:])
		o.mu.Unlock()
		if n == 0 {
			return ended
		}
	}
}

// read reads once, and returns 0 when the pipe is empty or has ended. The caller holds mu.
func (o *output) read(buf []byte) (n int, ended bool) {
	for {
		n, err := syscall.Read(o.pipe.fd, buf)
		switch {
		case err == syscall.EINTR: //nolint:errorlint // a bare Errno
			continue
		case err == syscall.EAGAIN: //nolint:errorlint // a bare Errno
			return 0, false
		case err != nil || n <= 0:
			return 0, true
		}
		o.give(buf[:n])
		return n, false
	}
}

func (o *output) give(b []byte) {
	switch {
	case o.sink != nil:
		if !o.failed && o.sink(b) != nil {
			o.failed = true
		}
	case !o.dead:
		o.early = append(o.early, b[:min(len(b), maxEarly-len(o.early))]...)
	}
}

// begin gives what there is, and what comes, to sink. nil: it is thrown away.
func (o *output) begin(sink func([]byte) error) {
	if sink == nil {
		sink = func([]byte) error { return nil }
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.sink, o.failed = sink, false
	if len(o.early) > 0 {
		o.give(o.early)
		o.early = nil
	}
}

// finish gives what is in the pipe to the cell, and takes the cell off. A pipe has no more than a megabyte in it:
// who writes without a pause does not keep the cell open.
func (o *output) finish() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.drain()
	o.sink = nil
}

// sync gives what is in the pipe to the cell.
func (o *output) sync() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.drain()
}

// drain is finish's and sync's. The caller holds mu.
func (o *output) drain() {
	if !o.closed {
		// Not Read, which waits for the reader that watches; Control only keeps the descriptor open.
		_ = o.raw.Control(func(uintptr) {
			bp, _ := chunks.Get().(*[]byte)
			defer chunks.Put(bp)
			for left := 1 << 20; left > 0; {
				n, _ := o.read((*bp)[wire.FrameHeader:])
				if n == 0 {
					break
				}
				left -= n
			}
		})
	}
}

// discard throws away what comes from now on. A server that the cell left in a session of its own would die of
// SIGPIPE at its next word, so that is still read; where there is no room for that, it is not.
func (o *output) discard() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.dead, o.early = true, nil
	if !o.held && !o.closed {
		_ = o.pipe.r.SetReadDeadline(time.Unix(1, 0))
	}
}
