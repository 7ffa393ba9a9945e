package agent

import (
	"bytes"
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unicode/utf8"

	"sandlot"
	"sandlot/internal/wire"

	"golang.org/x/sys/unix"
)

const (
	maxTerminals  = 32   // that run
	keptTerminals = 32   // ended, for who comes late
	maxWindow     = 1000 // columns, rows
	maxViewers    = 32   // of one terminal

	// viewerPatience is how long a terminal's program waits for a viewer that is behind and does not move.
	viewerPatience = 250 * time.Millisecond
	hangUpPatience = 500 * time.Millisecond // between a closed terminal's SIGHUP and SIGKILL
)

// terminal is a pseudo-terminal, the session that runs in it, and the last of what it showed.
type terminal struct {
	id      string
	p       *proc
	master  *os.File
	in      *stdin // writes to master, in turns
	changed *sync.Cond
	unread  atomic.Bool // its program did not read the last input

	mu      sync.Mutex
	size    wire.WindowSize
	ring    []byte // the byte at offset i of all output is ring[i % len(ring)]
	end     int64  // offset: bytes so far
	viewers map[*viewer]struct{}
	over    bool // nothing comes any more
}

// viewer is somebody who reads a terminal's output.
type viewer struct {
	at    int64     // offset of the next byte
	moved time.Time // when it took the last ones
	gone  bool
}

// terminals are a sandbox's.
type terminals struct {
	a  *Agent
	mu sync.Mutex
	// opening counts towards the limit what is not in byID yet.
	opening int
	byID    map[string]*terminal
}

func newTerminals(a *Agent) *terminals { return &terminals{a: a, byID: make(map[string]*terminal)} }

// open starts a terminal.
func (ts *terminals) open(id *identity, in *wire.NewTerminal) (*terminal, error) {
	if err := checkWindow(in.WindowSize); err != nil {
		return nil, err
	}
	if len(in.Argv) == 0 {
		in.Argv = []string{"bash", "-l"}
	}
	if err := checkExec(&wire.Exec{Argv: in.Argv, Env: in.Env}); err != nil {
		return nil, err
	}
	if in.ID == "" || len(in.ID) > 64 || strings.ContainsAny(in.ID, "/\x00") {
		return nil, sandlot.Errorf(sandlot.CodeInvalidRequest, "a terminal's id has 1 to 64 characters and no slash")
	}
	ts.mu.Lock()
	running := ts.opening
	for _, t := range ts.byID {
		if t.p.running() {
			running++
		}
	}
	_, taken := ts.byID[in.ID]
	if !taken && running < maxTerminals {
		ts.opening++
	}
	ts.mu.Unlock()
	switch {
	case taken:
		return nil, sandlot.Errorf(sandlot.CodeConflict, "there is a terminal %s already", in.ID)
	case running >= maxTerminals:
		return nil, sandlot.Errorf(sandlot.CodeRateLimited, "the sandbox has %d terminals, which is the limit: close one first", maxTerminals).With("retry_after_s", 1)
	}
	t, err := ts.a.startTerminal(id, in)
	ts.mu.Lock()
	defer ts.mu.Unlock()
	ts.opening--
	if err != nil {
		return nil, err
	}
	ts.byID[in.ID] = t
	ts.forget()
	return t, nil
}

// forget drops the oldest of too many that have ended. The caller holds mu.
func (ts *terminals) forget() {
	var ended []*terminal
	for _, t := range ts.byID {
		if !t.p.running() {
			ended = append(ended, t)
		}
	}
	slices.SortFunc(ended, func(x, y *terminal) int { return x.p.started.Compare(y.p.started) })
	for _, t := range ended[:max(0, len(ended)-keptTerminals)] {
		delete(ts.byID, t.id)
	}
}

func (ts *terminals) get(id string) (*terminal, error) {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	if t := ts.byID[id]; t != nil {
		return t, nil
	}
	return nil, sandlot.Errorf(sandlot.CodeNotFound, "no terminal %q", clip(id, 64))
}

func (ts *terminals) list() []wire.Terminal {
	ts.mu.Lock()
	all := make([]*terminal, 0, len(ts.byID))
	for _, t := range ts.byID {
		all = append(all, t)
	}
	ts.mu.Unlock()
	slices.SortFunc(all, func(x, y *terminal) int { return x.p.started.Compare(y.p.started) })
	out := make([]wire.Terminal, 0, len(all))
	for _, t := range all {
		out = append(out, t.describe())
	}
	return out
}

// remove closes a terminal: its session is hung up, and killed when it does not go.
func (ts *terminals) remove(id string) error {
	t, err := ts.get(id)
	if err != nil {
		return err
	}
	ts.mu.Lock()
	delete(ts.byID, id)
	ts.mu.Unlock()
	t.close()
	return nil
}

func checkWindow(w wire.WindowSize) error {
	if w.Cols < 1 || w.Cols > maxWindow || w.Rows < 1 || w.Rows > maxWindow {
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "cols and rows are between 1 and %d", maxWindow)
	}
	return nil
}

// openPTY makes a pseudo-terminal for a user. The slave is closed by the caller.
func (a *Agent) openPTY(u *user, size wire.WindowSize) (master *os.File, slave int, err error) {
	fd, err := syscall.Open("/dev/ptmx", syscall.O_RDWR|syscall.O_NOCTTY|syscall.O_CLOEXEC|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, -1, err
	}
	master = os.NewFile(uintptr(fd), "ptmx")
	fail := func(err error) (*os.File, int, error) {
		_ = master.Close()
		return nil, -1, err
	}
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		return fail(err)
	}
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err != nil {
		return fail(err)
	}
	path := "/dev/pts/" + itoa(n)
	slave, err = syscall.Open(path, syscall.O_RDWR|syscall.O_NOCTTY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return fail(err)
	}
	if a.switchUser {
		_ = os.Chown(path, int(u.uid), -1) // programs that open it by its name, tmux for one
	}
	err = setWindow(fd, size)
	if err == nil {
		var tio *unix.Termios
		if tio, err = unix.IoctlGetTermios(slave, unix.TCGETS); err == nil {
			tio.Iflag |= unix.IUTF8 // a key that erases does so with a character, not a byte
			err = unix.IoctlSetTermios(slave, unix.TCSETS, tio)
		}
	}
	if err != nil {
		_ = syscall.Close(slave)
		return fail(err)
	}
	return master, slave, nil
}

func setWindow(fd int, w wire.WindowSize) error {
	return unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: uint16(w.Rows), Col: uint16(w.Cols)}) //nolint:gosec // checked
}

func (a *Agent) startTerminal(id *identity, in *wire.NewTerminal) (*terminal, error) {
	u, err := a.account(in.User)
	if err != nil {
		return nil, err
	}
	master, slave, err := a.openPTY(u, in.WindowSize)
	if err != nil {
		return nil, sandlot.Wrap(err, sandlot.CodeRateLimited, "the sandbox has no room for another terminal").With("retry_after_s", 1)
	}
	env := map[string]string{"TERM": "xterm-256color", "COLORTERM": "truecolor"}
	for k, v := range in.Env {
		env[k] = v
	}
	e := &wire.Exec{Argv: in.Argv, Cwd: in.Cwd, Env: env, User: in.User}
	t := &terminal{id: in.ID, master: master, in: newStdin(master), size: in.WindowSize, viewers: make(map[*viewer]struct{})}
	t.changed = sync.NewCond(&t.mu)
	t.p, err = a.launchIn(id, u, e, nil, []int{slave, slave, slave}, nil, nil, true)
	_ = syscall.Close(slave)
	if err != nil {
		_ = master.Close()
		var ns *notStarted
		if errors.As(err, &ns) {
			return nil, sandlot.Errorf(sandlot.CodeInvalidRequest, "%s", trimLine(ns.Message))
		}
		return nil, err
	}
	go t.read()
	go func() {
		<-t.p.done
		// What it said last is in the terminal already; what it left behind may go on, but not for this terminal.
		_ = master.SetReadDeadline(time.Now().Add(drainAfterExit))
	}()
	return t, nil
}

// read takes what the terminal shows until it ends.
func (t *terminal) read() {
	buf := make([]byte, 32<<10)
	for {
		n, err := t.master.Read(buf)
		if n > 0 {
			t.show(buf[:n])
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			t.rest(buf)
		}
		if err != nil {
			break // EIO: no program has it any more
		}
	}
	if t.p.running() { // it closed its terminal and goes on without one
		<-t.p.done
	}
	t.mu.Lock()
	t.over = true
	t.changed.Broadcast()
	t.mu.Unlock()
	_ = t.master.Close()
}

// rest takes what is in the terminal when its program has ended, which a viewer may have kept read from taking.
func (t *terminal) rest(buf []byte) {
	raw, err := t.master.SyscallConn()
	if err != nil {
		return
	}
	for left := 1 << 20; left > 0; { // what still runs may write without end
		var n int
		if raw.Control(func(fd uintptr) { n, err = syscall.Read(int(fd), buf) }) != nil || err != nil || n <= 0 {
			return
		}
		t.show(buf[:n])
		left -= n
	}
}

// show keeps output for the viewers. While one of them keeps up, it is not outrun; one that does not move
// is waited for as long as viewerPatience and then misses what it misses.
func (t *terminal) show(b []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for t.crowded(len(b)) {
		wait := time.AfterFunc(viewerPatience, t.changed.Broadcast)
		t.changed.Wait()
		wait.Stop()
	}
	// The ring grows as it is needed: most terminals never show that much.
	if grown := t.end + int64(len(b)); grown > int64(len(t.ring)) && len(t.ring) < wire.TerminalReplay {
		ring := make([]byte, min(max(2*grown, 4<<10), wire.TerminalReplay))
		copy(ring, t.ring[:min(t.end, int64(len(t.ring)))]) // it has never wrapped
		t.ring = ring
	}
	for len(b) > 0 {
		n := copy(t.ring[t.end%int64(len(t.ring)):], b)
		b, t.end = b[n:], t.end+int64(n)
	}
	t.changed.Broadcast()
}

// crowded says whether n more bytes would outrun every viewer that still moves. The caller holds mu.
func (t *terminal) crowded(n int) bool {
	moving := false
	for v := range t.viewers {
		behind := t.end - v.at
		if behind+int64(n) <= wire.TerminalReplay/2 {
			return false
		}
		moving = moving || time.Since(v.moved) < viewerPatience
	}
	return moving
}

// view begins to read from where the replay begins.
func (t *terminal) view() (*viewer, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.viewers) >= maxViewers {
		return nil, sandlot.Errorf(sandlot.CodeRateLimited, "the terminal has %d viewers, which is the limit", maxViewers).With("retry_after_s", 1)
	}
	v := &viewer{at: t.first(), moved: time.Now()}
	t.viewers[v] = struct{}{}
	return v, nil
}

// first is the offset of the oldest output that can be shown by itself: the ring's start, or when what came
// before is lost, the next line's or control sequence's, or the next character's. The caller holds mu.
func (t *terminal) first() int64 {
	oldest := t.end - int64(len(t.ring))
	if oldest <= 0 {
		return 0
	}
	b := t.bytes(oldest, 4<<10)
	if i := bytes.IndexAny(b, "\n\x1b"); i >= 0 {
		if b[i] == '\n' {
			i++
		}
		return oldest + int64(i)
	}
	for i := range min(utf8.UTFMax, len(b)) {
		if utf8.RuneStart(b[i]) {
			return oldest + int64(i)
		}
	}
	return oldest
}

// bytes are at most n of the output from an offset on. The caller holds mu.
func (t *terminal) bytes(at, n int64) []byte {
	n = min(n, t.end-at)
	out := make([]byte, 0, n)
	for n > 0 {
		from := at % int64(len(t.ring))
		piece := t.ring[from:min(from+n, int64(len(t.ring)))]
		out = append(out, piece...)
		at, n = at+int64(len(piece)), n-int64(len(piece))
	}
	return out
}

// next waits for output and returns it; nothing means the end. skipped is what was lost since the last call.
func (t *terminal) next(ctx context.Context, v *viewer) (b []byte, skipped int64) {
	stop := context.AfterFunc(ctx, func() {
		t.mu.Lock()
		v.gone = true
		t.changed.Broadcast()
		t.mu.Unlock()
	})
	defer stop()
	t.mu.Lock()
	defer t.mu.Unlock()
	for v.at == t.end && !t.over && !v.gone {
		t.changed.Wait()
	}
	if v.gone {
		return nil, 0
	}
	if v.at < t.end-int64(len(t.ring)) {
		at := t.first()
		skipped, v.at = at-v.at, at
	}
	b = t.bytes(v.at, 64<<10)
	v.at += int64(len(b))
	v.moved = time.Now()
	t.changed.Broadcast()
	return b, skipped
}

func (t *terminal) leave(v *viewer) {
	t.mu.Lock()
	delete(t.viewers, v)
	t.changed.Broadcast()
	t.mu.Unlock()
}

// resize tells the terminal and, by SIGWINCH, the program in its foreground.
func (t *terminal) resize(w wire.WindowSize) error {
	if err := checkWindow(w); err != nil {
		return err
	}
	raw, err := t.master.SyscallConn()
	if err == nil {
		if cerr := raw.Control(func(fd uintptr) {
			if err = setWindow(int(fd), w); err != nil {
				return
			}
			// Not every kernel signals the foreground by itself; once more does no harm.
			group, gerr := unix.IoctlGetInt(int(fd), unix.TIOCGPGRP)
			if gerr != nil || group <= 1 {
				group = t.p.pid
			}
			_ = syscall.Kill(-group, syscall.SIGWINCH)
		}); cerr != nil {
			err = cerr
		}
	}
	if err != nil {
		return sandlot.Wrap(err, sandlot.CodeConflict, "the terminal has ended")
	}
	t.mu.Lock()
	t.size = w
	t.mu.Unlock()
	return nil
}

// close hangs up, and kills what does not go.
func (t *terminal) close() {
	// A session's number is not given to another process while the session has members: where the shell is
	// gone but a process has its pid, nothing of the terminal's is left.
	if !t.p.running() && isDir("/proc/"+itoa(t.p.pid)) {
		return
	}
	// A shell does not tell what it has put into the background, or what it was replaced by, in every case.
	for _, pid := range members(t.p.pid) {
		_ = syscall.Kill(pid, syscall.SIGHUP)
		_ = syscall.Kill(pid, syscall.SIGCONT)
	}
	for end := time.Now().Add(hangUpPatience); len(members(t.p.pid)) > 0 && time.Now().Before(end); {
		time.Sleep(2 * time.Millisecond)
	}
	killTree(t.p.pid)
	<-t.p.done
}

// members are the processes of a session that run.
func members(session int) []int {
	var out []int
	for pid := range pids() {
		if sid, err := unix.Getsid(pid); err != nil || sid != session {
			continue
		}
		if st, ok := readStat(pid); ok && st.state != 'Z' && st.state != 'X' {
			out = append(out, pid)
		}
	}
	return out
}

func (t *terminal) describe() wire.Terminal {
	t.mu.Lock()
	w := wire.Terminal{ID: t.id, Viewers: len(t.viewers), WindowSize: t.size}
	t.mu.Unlock()
	w.PID, w.Argv, w.User, w.StartedAt, w.Running = t.p.pid, t.p.argv, t.p.user, t.p.started, t.p.running()
	if !w.Running {
		code, _ := t.p.exit()
		w.ExitCode = &code
	}
	return w
}
