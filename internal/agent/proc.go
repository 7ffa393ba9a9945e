package agent

import (
	"context"
	"os"
	"sync"
	"syscall"
	"time"

	"sandlot"
	"sandlot/internal/wire"

	"golang.org/x/sys/unix"
)

const keptArgv = 4096 // bytes of a process's argv that are kept for listing

// proc is a process that the agent started.
type proc struct {
	pid        int
	argv       []string
	user       string
	background bool
	started    time.Time
	done       chan struct{} // closed when it has been reaped

	// Set before done is closed.
	status syscall.WaitStatus
	ended  time.Time

	// Of background processes.
	log   *outputLog
	stdin *stdin
}

func newProc(e *wire.Exec, u *user) *proc {
	p := &proc{user: u.name, background: e.Background, started: time.Now(), done: make(chan struct{})}
	room := keptArgv
	for _, arg := range e.Argv {
		if room <= 0 {
			break
		}
		p.argv = append(p.argv, clip(arg, room))
		room -= len(arg) + 1
	}
	return p
}

func (p *proc) finish(ws syscall.WaitStatus) {
	p.status, p.ended = ws, time.Now()
	close(p.done)
	if p.stdin != nil {
		p.stdin.close()
	}
}

func (p *proc) running() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// exit is the exit code as a shell tells it, and the signal's name. The process must be done.
func (p *proc) exit() (int, string) {
	if p.status.Signaled() {
		return 128 + int(p.status.Signal()), signalName(p.status.Signal())
	}
	return p.status.ExitStatus(), ""
}

func signalName(s syscall.Signal) string {
	if n := unix.SignalName(s); n != "" {
		return n
	}
	return "SIG" + itoa(int(s))
}

// describe is what listing shows.
func (p *proc) describe() wire.Process {
	w := wire.Process{
		PID: p.pid, Agent: true, Argv: p.argv, User: p.user, StartedAt: p.started, Background: p.background, Running: p.running(),
	}
	if p.log != nil {
		w.LogPath = p.log.shown
	}
	if !w.Running {
		code, sig := p.exit()
		w.ExitCode, w.Signal = &code, sig
	}
	return w
}

// table is the processes that the agent started: those that run and the last finished ones.
type table struct {
	mu      sync.Mutex
	closed  bool
	limit   int
	busy    int // running or about to
	byPID   map[int]*proc
	retired []*proc               // finished, oldest first
	held    map[*os.File]struct{} // reading ends that goroutines keep draining
}

func newTable() *table {
	return &table{limit: maxProcesses, byPID: make(map[int]*proc), held: make(map[*os.File]struct{})}
}

const maxHeld = 512

// hold keeps r open until letGo or the agent's end. It says whether there was room.
func (t *table) hold(r *os.File) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed || len(t.held) >= maxHeld {
		return false
	}
	t.held[r] = struct{}{}
	return true
}

func (t *table) letGo(r *os.File) {
	t.mu.Lock()
	delete(t.held, r)
	t.mu.Unlock()
	_ = r.Close()
}

// discard closes a pipe that has ended. Another one is still some descendant's output: a server that was
// started with "&" would die of SIGPIPE at its next word, so the words are read and dropped for as long as
// it lives.
func (t *table) discard(p *pipe) {
	if p.ended || !t.hold(p.r) {
		_ = p.r.Close()
		return
	}
	_ = p.r.SetReadDeadline(time.Time{})
	go func() {
		buf := make([]byte, 4096)
		for {
			if _, err := p.r.Read(buf); err != nil {
				t.letGo(p.r)
				return
			}
		}
	}()
}

// reserve makes room for one process.
func (t *table) reserve() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return sandlot.Errorf(sandlot.CodeSandboxUnhealthy, "the agent is closing")
	}
	if t.busy >= t.limit {
		return sandlot.Errorf(sandlot.CodeRateLimited, "%d commands run at the same time, which is the limit; wait for one or kill one", t.limit).With("retry_after_s", 1)
	}
	t.busy++
	return nil
}

func (t *table) release() {
	t.mu.Lock()
	t.busy--
	t.mu.Unlock()
}

// add puts in a process that was reserved.
func (t *table) add(p *proc) {
	t.mu.Lock()
	t.byPID[p.pid] = p
	closed := t.closed
	t.mu.Unlock()
	if closed {
		killTree(p.pid)
	}
}

// finished retires p and forgets the oldest of too many.
func (t *table) finished(p *proc) {
	t.mu.Lock()
	t.busy--
	t.retired = append(t.retired, p)
	var old *proc
	if len(t.retired) > keptProcesses {
		old = t.retired[0]
		t.retired = append(t.retired[:0], t.retired[1:]...)
		if t.byPID[old.pid] == old {
			delete(t.byPID, old.pid)
		}
	}
	t.mu.Unlock()
	if old != nil && old.log != nil {
		old.log.remove()
	}
}

func (t *table) get(pid int) *proc {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.byPID[pid]
}

func (t *table) all() []*proc {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := make([]*proc, 0, len(t.byPID))
	for _, p := range t.byPID {
		out = append(out, p)
	}
	return out
}

func (t *table) running() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.busy
}

// close refuses new processes and kills those that run. Where the machine does not end with the agent (it is
// a directory on somebody's computer), what outlived its session's leader is killed too.
func (t *table) close(machine bool) {
	t.mu.Lock()
	t.closed = true
	t.mu.Unlock()
	var leaders []int
	for _, p := range t.all() {
		// A session's number is not given to another process while the session has members: where the
		// leader is gone but a process has its pid, nothing of ours is left.
		if p.running() || !machine && !isDir("/proc/"+itoa(p.pid)) {
			leaders = append(leaders, p.pid)
		}
	}
	if len(leaders) > 0 {
		killTree(leaders...)
	}
	for _, p := range t.all() {
		select {
		case <-p.done:
		case <-time.After(5 * time.Second):
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for r := range t.held {
		_ = r.Close()
	}
}

// stdin is the writing end of a background process's standard input. turn holds one token: the writer's.
type stdin struct {
	turn chan struct{}
	f    *os.File
}

func newStdin(f *os.File) *stdin { return &stdin{turn: make(chan struct{}, 1), f: f} }

func (s *stdin) close() { _ = s.f.Close() }

const stdinPatience = 30 * time.Second

// write waits for its turn and gives b to the process, until ctx ends.
func (s *stdin) write(ctx context.Context, b []byte) (int, error) {
	select {
	case s.turn <- struct{}{}:
	case <-ctx.Done():
		return 0, os.ErrDeadlineExceeded
	}
	return s.writeInTurn(ctx, b)
}

// writeInTurn is write for who has the turn, and ends it.
func (s *stdin) writeInTurn(ctx context.Context, b []byte) (int, error) {
	defer func() { <-s.turn }()
	_ = s.f.SetWriteDeadline(time.Time{})
	late := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		_ = s.f.SetWriteDeadline(time.Unix(1, 0))
		close(late)
	})
	n, err := s.f.Write(b)
	if !stop() {
		<-late // or it would end the next one's turn
	}
	return n, err
}
