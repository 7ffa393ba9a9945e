package agent

import (
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"sandlot"
	"sandlot/internal/wire"
)

const maxLog = 64 << 20 // bytes of a background process's output that are kept

var logCut = []byte("\n[sandlot: the output's first 64 MiB end here; the rest is not kept]\n")

// startBackground starts a process that outlives the request. Its outputs go through one pipe, in the order
// they were written, into a log that everybody inside may read.
func (a *Agent) startBackground(id *identity, e *wire.Exec) (*proc, error) {
	u, err := a.account(e.User)
	if err != nil {
		return nil, err
	}
	out, err := newPipe()
	if err != nil {
		return nil, noPipes(err)
	}
	var in [2]int
	if err := syscall.Pipe2(in[:], syscall.O_CLOEXEC); err != nil {
		out.drop()
		return nil, noPipes(err)
	}
	log := &outputLog{limit: a.logLimit, changed: make(chan struct{})}
	if err := a.createLog(log); err != nil {
		out.drop()
		_ = syscall.Close(in[0])
		_ = syscall.Close(in[1])
		return nil, err
	}
	_ = syscall.SetNonblock(in[1], true)
	pin := newStdin(os.NewFile(uintptr(in[1]), "|1"))
	p, err := a.launch(id, u, e, nil, []int{in[0], out.w, out.w}, log, pin)
	_ = syscall.Close(in[0])
	if err != nil {
		out.drop()
		pin.close()
		_ = log.f.Close()
		log.remove()
		var ns *notStarted
		if errors.As(err, &ns) {
			return nil, sandlot.Errorf(sandlot.CodeInvalidRequest, "%s", trimLine(ns.Message))
		}
		return nil, err
	}
	out.started()
	if len(e.Stdin) > 0 {
		pin.turn <- struct{}{} // what comes later comes after it
		go func() { _, _ = pin.writeInTurn(a.ctx, e.Stdin) }()
	}
	drained := make(chan struct{})
	a.procs.hold(out.r)
	go func() {
		defer close(drained)
		out.drain(log.append) // descendants may write on after p's exit
		a.procs.letGo(out.r)
		_ = log.f.Close()
	}()
	go func() {
		<-p.done
		select {
		case <-drained:
		case <-time.After(drainAfterExit):
		}
		log.finish()
	}()
	if e.TimeoutMS > 0 {
		t := time.AfterFunc(time.Duration(e.TimeoutMS)*time.Millisecond, func() {
			if p.running() {
				killTree(p.pid)
			}
		})
		go func() { <-p.done; t.Stop() }()
	}
	return p, nil
}

func trimLine(s string) string {
	if n := len(s); n > 0 && s[n-1] == '\n' {
		return s[:n-1]
	}
	return s
}

// outputLog is a background process's output: a file, and the news of its growth.
type outputLog struct {
	path  string // on this machine
	shown string // inside the sandbox
	f     *os.File
	limit int64

	mu      sync.Mutex
	size    int64
	cut     bool
	ended   bool
	changed chan struct{} // closed and replaced at every change
}

// createLog makes an empty log under a name of its own. The directory and the file are root's, so that
// only root can make a link of them.
func (a *Agent) createLog(l *outputLog) error {
	var last error
	for _, dir := range []string{a.logDir, "tmp/.sandlot"} {
		at := a.inside("/" + dir)
		if last = os.MkdirAll(at, 0o755); last != nil { //nolint:gosec // everybody inside reads the logs
			continue
		}
		for range 100 {
			name := itoa(int(a.logSeq.Add(1))) + ".log"
			l.path, l.shown = filepath.Join(at, name), "/"+dir+"/"+name
			l.f, last = os.OpenFile(l.path, os.O_CREATE|os.O_EXCL|os.O_WRONLY|syscall.O_NOFOLLOW, 0o644) //nolint:gosec // as above
			if !errors.Is(last, os.ErrExist) {
				break
			}
		}
		if last == nil {
			return nil
		}
	}
	return fileError(last, "the log")
}

// append keeps b, up to the log's limit.
func (l *outputLog) append(b []byte) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cut {
		return nil
	}
	if left := l.limit - l.size; int64(len(b)) > left {
		b = append(b[:left:left], logCut...)
		l.cut = true
	}
	n, err := l.f.Write(b)
	l.size += int64(n)
	if err != nil {
		l.cut = true // the disk is full: the process goes on, its output is not kept
	}
	l.tell()
	return nil
}

func (l *outputLog) finish() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ended = true
	l.tell()
}

func (l *outputLog) tell() {
	close(l.changed)
	l.changed = make(chan struct{})
}

func (l *outputLog) remove() { _ = os.Remove(l.path) }

func (l *outputLog) state() (size int64, ended bool, changed <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.size, l.ended, l.changed
}

// serveFollow sends a background process's output from its start, and goes on until it exits.
func (a *Agent) serveFollow(w http.ResponseWriter, r *http.Request) error {
	p, err := a.ours(r)
	if err != nil {
		return err
	}
	if p.log == nil {
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "only background processes can be followed")
	}
	f, err := os.OpenFile(p.log.path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return fileError(err, "the log")
	}
	defer func() { _ = f.Close() }()
	if st, err := f.Stat(); err != nil || !st.Mode().IsRegular() {
		return sandlot.Errorf(sandlot.CodeNotFound, "the log is gone")
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	fw := newFrameWriter(w, cancel)
	defer fw.close()
	fw.json(wire.FrameStarted, wire.Started{PID: p.pid, LogPath: p.log.shown})
	bp := chunks.Get().(*[]byte)
	defer chunks.Put(bp)
	var off int64
	for {
		size, ended, changed := p.log.state()
		for off < size && ctx.Err() == nil {
			n, err := f.ReadAt((*bp)[:min(size-off, int64(len(*bp)))], off)
			if n > 0 {
				off += int64(n)
				_ = fw.frame(wire.FrameStdout, (*bp)[:n])
			}
			if err != nil && (n == 0 || !errors.Is(err, io.EOF)) {
				off = size // somebody inside truncated it
			}
		}
		if ended {
			code, sig := p.exit()
			fw.json(wire.FrameExit, wire.Exit{ExitCode: code, Signal: sig, DurationUS: p.ended.Sub(p.started).Microseconds()})
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil
		case <-a.ctx.Done():
			return nil
		}
	}
}
