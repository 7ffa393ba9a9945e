package agent

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"sandlot"
	"sandlot/internal/guest"
	"sandlot/internal/wire"
)

// openTerminal starts argv in a terminal of 80 by 24.
func (b *box) openTerminal(t testing.TB, argv ...string) string {
	t.Helper()
	in := wire.NewTerminal{ID: string(sandlot.NewID("trm")), Argv: argv, WindowSize: wire.WindowSize{Cols: 80, Rows: 24}}
	got, err := b.NewTerminal(t.Context(), in)
	if err != nil {
		t.Fatalf("open %q: %v", argv, err)
	}
	if !got.Running || got.WindowSize != in.WindowSize || got.PID <= 1 {
		t.Errorf("opened %+v", got)
	}
	return in.ID
}

// screen is a viewer that keeps what it sees.
type screen struct {
	t       testing.TB
	s       *guest.ExecStream
	seen    []byte
	skipped int64
	exit    *wire.Exit
}

func (b *box) watchTerminal(t testing.TB, id string) *screen {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	s, err := b.TerminalStream(ctx, id)
	if err != nil {
		t.Fatal("watch:", err)
	}
	t.Cleanup(s.Close)
	return &screen{t: t, s: s}
}

// read takes one frame and says whether there was one.
func (s *screen) read() bool {
	s.t.Helper()
	kind, b, err := s.s.Next()
	switch {
	case errors.Is(err, io.EOF):
		return false
	case err != nil:
		s.t.Fatalf("after %.200q: %v", s.seen, err)
	case kind == wire.FrameStdout:
		s.seen = append(s.seen, b...)
	case kind == wire.FrameSkipped:
		s.skipped++
	case kind == wire.FrameExit:
		exit := s.s.Exit()
		s.exit = &exit
	}
	return true
}

func (s *screen) until(text string) {
	s.t.Helper()
	for !bytes.Contains(s.seen, []byte(text)) {
		if !s.read() {
			s.t.Fatalf("it ended before it showed %q: %.500q", text, s.seen)
		}
	}
}

func (s *screen) end() wire.Exit {
	s.t.Helper()
	for s.read() {
	}
	if s.exit == nil {
		s.t.Fatal("no exit")
	}
	return *s.exit
}

func (b *box) typeIn(t testing.TB, id, text string) {
	t.Helper()
	if err := b.TerminalInput(t.Context(), id, []byte(text)); err != nil {
		t.Fatalf("type %.40q: %v", text, err)
	}
}

func TestTerminalShell(t *testing.T) {
	b := start(t)
	id := b.openTerminal(t, "bash", "--norc", "--noprofile")
	s := b.watchTerminal(t, id)
	b.typeIn(t, id, "stty -echo; PS1=; bind 'set enable-bracketed-paste off'; echo up\r")
	s.until("up\r\n")
	b.typeIn(t, id, `[ -t 0 ] && [ -t 1 ] && [ -t 2 ] && : </dev/tty && echo ctty $TERM $FROM_IDENTITY; ps -o pid=,sid= $$ | awk '{print "leads " ($1==$2)}'`+"\r")
	s.until("ctty xterm-256color i\r\nleads 1\r\n")
	b.typeIn(t, id, "trap 'echo win=$(stty size)' WINCH; echo ok\r")
	s.until("ok\r\n")
	if err := b.ResizeTerminal(t.Context(), id, wire.WindowSize{Cols: 91, Rows: 31}); err != nil {
		t.Fatal(err)
	}
	b.typeIn(t, id, "true\r")
	s.until("win=31 91\r\n")
	b.typeIn(t, id, "kill -TERM $$; kill -KILL $$\r")
	if exit := s.end(); exit.ExitCode != 137 || exit.Signal != "SIGKILL" || exit.DurationUS <= 0 {
		t.Errorf("%+v", exit)
	}
	late := b.watchTerminal(t, id) // reads the end
	if exit := late.end(); exit.ExitCode != 137 || !bytes.Contains(late.seen, []byte("win=31 91")) {
		t.Errorf("late: %+v, %q", exit, late.seen)
	}
	list, err := b.Terminals(t.Context())
	if err != nil || len(list) != 1 || list[0].Running || list[0].ExitCode == nil || *list[0].ExitCode != 137 || list[0].Cols != 91 {
		t.Errorf("%+v, %v", list, err)
	}
	wantCode(t, b.TerminalInput(t.Context(), id, []byte("x")), sandlot.CodeConflict)
	wantCode(t, b.ResizeTerminal(t.Context(), id, wire.WindowSize{Cols: 1, Rows: 1}), sandlot.CodeConflict)
}

// A line that no editor reads is edited by the terminal, by characters.
func TestTerminalErasesCharacters(t *testing.T) {
	b := start(t)
	id := b.openTerminal(t, "bash", "-c", "stty -echo; echo up; read x; echo \"=$x=\"")
	s := b.watchTerminal(t, id)
	s.until("up\r\n")
	b.typeIn(t, id, "żó\x7f+😀\x7f\r")
	if s.end(); !bytes.HasSuffix(s.seen, []byte("=ż+=\r\n")) {
		t.Errorf("%q", s.seen)
	}
}

// All that a program said before it ended is shown, also to a viewer that held the terminal up meanwhile.
func TestTerminalLastWords(t *testing.T) {
	b := start(t)
	for range 20 {
		id := b.openTerminal(t, "bash", "-c", "seq 20000; echo the end")
		s := b.watchTerminal(t, id)
		if exit := s.end(); exit.ExitCode != 0 || !bytes.HasSuffix(s.seen, []byte("\n20000\r\nthe end\r\n")) || s.skipped != 0 {
			t.Fatalf("%+v after %d bytes, which end with %.40q", exit, len(s.seen), s.seen[max(0, len(s.seen)-40):])
		}
	}
	id := b.openTerminal(t, "bash", "-c", "stty -echo; (trap '' HUP; exec sleep 1000) & sleep 0.1; echo up; read x; echo one; sleep 0.2; echo the end")
	s := b.watchTerminal(t, id)
	s.until("up\r\n")
	tm, err := b.a.terminals.get(id)
	if err != nil {
		t.Fatal(err)
	}
	tm.mu.Lock() // as while a viewer is waited for
	b.typeIn(t, id, "\r")
	<-tm.p.done
	time.Sleep(2 * drainAfterExit)
	tm.mu.Unlock()
	if s.end(); !bytes.HasSuffix(s.seen, []byte("one\r\nthe end\r\n")) {
		t.Errorf("held up, it showed %q", s.seen)
	}
}

// A viewer that does not read neither stops the program nor the others; what it missed is told, once, and what it gets then
// begins with whole characters. It gets the end.
func TestTerminalSlowViewer(t *testing.T) {
	b := start(t)
	id := b.openTerminal(t, "bash", "-c", "stty -echo; echo first; read x; yes 'zażółć gęślą jaźń' | head -n 1000000; echo last; read x; exit 4")
	slow, fast := b.watchTerminal(t, id), b.watchTerminal(t, id)
	slow.until("first\r\n")
	fast.until("first\r\n")
	b.typeIn(t, id, "\r")
	total := int64(0)
	for !bytes.Contains(fast.seen, []byte("last\r\n")) {
		if len(fast.seen) > 1<<20 {
			total += int64(len(fast.seen) - 100)
			fast.seen = fast.seen[len(fast.seen)-100:]
		}
		if !fast.read() {
			t.Fatal("it ended")
		}
	}
	if fast.skipped == 0 && total < 25<<20 {
		t.Errorf("the fast one has seen %d bytes", total)
	}
	slow.seen = nil
	for slow.skipped == 0 {
		if !slow.read() {
			t.Fatal("it ended")
		}
	}
	slow.seen = nil
	slow.until("last\r\n")
	if n := len(slow.seen); n > wire.TerminalReplay || !utf8.Valid(slow.seen) || !bytes.HasPrefix(slow.seen, []byte("zażółć")) {
		t.Errorf("after what it missed came %d bytes, which begin with %.60q", n, slow.seen)
	}
	b.typeIn(t, id, "\r")
	if exit := slow.end(); exit.ExitCode != 4 {
		t.Errorf("%+v", exit)
	}
}

// A replay never begins inside a character or a control sequence, whatever the program shows.
func TestTerminalReplayBegins(t *testing.T) {
	for _, c := range []struct{ unit, want string }{
		{"x\r\n", "x\r\n"},
		{"\x1b[31mred", "\x1b[31mred"},
		{"żółć😀", ""}, // any of its characters
		{"\xff", ""},  // no character at all
	} {
		tm := &terminal{viewers: map[*viewer]struct{}{}}
		tm.changed = sync.NewCond(&tm.mu)
		for tm.end < wire.TerminalReplay+10_000 {
			tm.show([]byte(c.unit))
		}
		for range 8 {
			tm.show([]byte(c.unit[:1])) // where the ring begins moves on
			v, err := tm.view()
			if err != nil {
				t.Fatal(err)
			}
			var all []byte
			for v.at < tm.end {
				b, skipped := tm.next(t.Context(), v)
				if skipped != 0 {
					t.Errorf("%q: a new viewer missed %d", c.unit, skipped)
				}
				all = append(all, b...)
			}
			tm.leave(v)
			if len(all) > wire.TerminalReplay || len(all) < wire.TerminalReplay-5000 {
				t.Errorf("%q: %d bytes", c.unit, len(all))
			}
			if !strings.HasPrefix(string(all), c.want) || c.unit[0] != 0xff && !utf8.RuneStart(all[0]) {
				t.Errorf("%q: begins with %.20q", c.unit, all)
			}
		}
	}
}

// Closing one ends its whole session: what ignores the hang-up, what is in the background, what has left the shell's group and
// what outlived the shell. What is hung up and listens has time to put its things in order.
func TestTerminalCloseEndsSession(t *testing.T) {
	b := start(t)
	dir := b.root + "/workspace"
	id := b.openTerminal(t, "bash", "-c", `
		set -m
		(trap 'sleep 0.1; echo saved >saved; exit' HUP; echo $BASHPID >a; while :; do sleep 0.01; done) &
		(trap '' HUP; echo $BASHPID >b; exec sleep 1000) &
		while [ ! -s a ] || [ ! -s b ]; do sleep 0.01; done
		echo $$ >c; trap '' HUP; echo up; exit`)
	s := b.watchTerminal(t, id)
	s.end() // the shell is gone
	var left []int
	for _, name := range []string{"a", "b"} {
		text, _ := os.ReadFile(dir + "/" + name)
		pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
		if err != nil {
			t.Fatal(name, err)
		}
		left = append(left, pid)
	}
	if !alive(left[1]) {
		t.Fatal("what ignores the hang-up has ended with its shell")
	}
	if err := b.CloseTerminal(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	for i, pid := range left {
		if alive(pid) {
			t.Errorf("process %d goes on", i)
		}
	}
	if text, _ := os.ReadFile(dir + "/saved"); string(text) != "saved\n" {
		t.Errorf("nothing was saved: %q", text)
	}
	wantCode(t, b.CloseTerminal(t.Context(), id), sandlot.CodeNotFound)
	if _, err := b.TerminalStream(t.Context(), id); sandlot.ErrorCode(err) != sandlot.CodeNotFound {
		t.Errorf("watch: %v", err)
	}
}

// A program that does not read what is typed costs the one who types a bounded time, and nobody else any.
func TestTerminalUnreadInput(t *testing.T) {
	b := start(t)
	id := b.openTerminal(t, "bash", "-c", "stty raw -echo; echo up; sleep 1000")
	s := b.watchTerminal(t, id)
	s.until("up")
	flood := bytes.Repeat([]byte("x"), 64<<10)
	var err error
	for range 64 {
		if err = b.TerminalInput(t.Context(), id, flood); err != nil {
			break
		}
	}
	wantCode(t, err, sandlot.CodeTimeout)
	if res := b.sh(t, "echo well"); res.ExitCode != 0 {
		t.Errorf("%+v", res)
	}
	if err := b.CloseTerminal(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	s.end()
	wantCode(t, b.TerminalInput(t.Context(), b.openTerminal(t, "sleep", "1000"), bytes.Repeat(flood, 40)), sandlot.CodeTooLarge)
}

// Who typed too much at a program that does not read can still interrupt it, and what it did not read is no command then.
func TestTerminalInterruptsUnread(t *testing.T) {
	b := start(t)
	id := b.openTerminal(t, "bash", "-c", "stty -icanon -echo; trap 'while read -t 0.2 -n 100 x; do echo \"read $x\"; done; exit 5' INT; echo up; while :; do sleep 0.05; done")
	s := b.watchTerminal(t, id)
	s.until("up")
	var err error
	for err == nil {
		err = b.TerminalInput(t.Context(), id, bytes.Repeat([]byte("x"), 64<<10))
	}
	wantCode(t, err, sandlot.CodeTimeout)
	b.typeIn(t, id, "yy\x03")
	if exit := s.end(); exit.ExitCode != 5 || bytes.Contains(s.seen, []byte("read")) {
		t.Errorf("%+v after %.200q", exit, s.seen)
	}
}

func TestTerminalLimitsAndMistakes(t *testing.T) {
	b := start(t)
	var ids []string
	for range maxTerminals {
		ids = append(ids, b.openTerminal(t, "sleep", "1000"))
	}
	full := wire.NewTerminal{ID: string(sandlot.NewID("trm")), WindowSize: wire.WindowSize{Cols: 80, Rows: 24}}
	_, err := b.NewTerminal(t.Context(), full)
	wantCode(t, err, sandlot.CodeRateLimited)
	if err := b.CloseTerminal(t.Context(), ids[0]); err != nil {
		t.Fatal(err)
	}
	b.openTerminal(t, "true")
	for name, change := range map[string]func(*wire.NewTerminal){
		"no columns":    func(in *wire.NewTerminal) { in.Cols = 0 },
		"rows":          func(in *wire.NewTerminal) { in.Rows = 1001 },
		"no id":         func(in *wire.NewTerminal) { in.ID = "" },
		"env":           func(in *wire.NewTerminal) { in.Env = map[string]string{"A=B": "x"} },
		"cwd":           func(in *wire.NewTerminal) { in.Cwd = "/nowhere" },
		"no program":    func(in *wire.NewTerminal) { in.Argv = []string{"no-such-program"} },
		"empty program": func(in *wire.NewTerminal) { in.Argv = []string{""} },
		"NUL":           func(in *wire.NewTerminal) { in.Argv = []string{"echo", "a\x00b"} },
		"user":          func(in *wire.NewTerminal) { in.User = "nobody-at-all" },
	} {
		if err := b.CloseTerminal(t.Context(), ids[len(ids)-1]); err != nil { // there is room
			t.Fatal(err)
		}
		ids = ids[:len(ids)-1]
		in := full
		change(&in)
		if _, err := b.NewTerminal(t.Context(), in); sandlot.ErrorCode(err) != sandlot.CodeInvalidRequest && sandlot.ErrorCode(err) != sandlot.CodeNotFound {
			t.Errorf("%s: %v", name, err)
		}
	}
	in := full
	in.ID = ids[1]
	_, err = b.NewTerminal(t.Context(), in)
	wantCode(t, err, sandlot.CodeConflict)
	wantCode(t, b.ResizeTerminal(t.Context(), ids[1], wire.WindowSize{Cols: 0, Rows: 5}), sandlot.CodeInvalidRequest)
	for range maxViewers {
		b.watchTerminal(t, ids[1])
	}
	_, err = b.TerminalStream(t.Context(), ids[1])
	wantCode(t, err, sandlot.CodeRateLimited)
	for _, call := range []error{
		b.TerminalInput(t.Context(), "trmnone", []byte("x")), b.CloseTerminal(t.Context(), "trmnone"),
		b.ResizeTerminal(t.Context(), "trmnone", wire.WindowSize{Cols: 1, Rows: 1}),
	} {
		wantCode(t, call, sandlot.CodeNotFound)
	}
}

// ADVERSARIAL 46: storms of terminals that cannot start, that end at once, of resizes and viewers leave nothing behind.
func TestTerminalStorm(t *testing.T) {
	b := start(t)
	id := b.openTerminal(t, "sleep", "1000")
	warm := b.watchTerminal(t, id)
	_ = warm
	b.sh(t, "true")
	goroutines, fds := runtime.NumGoroutine(), countFDs(t)
	size := wire.WindowSize{Cols: 80, Rows: 24}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for i := range 100 {
				_, err := b.NewTerminal(t.Context(), wire.NewTerminal{ID: string(sandlot.NewID("trm")), Argv: []string{"/no/such"}, WindowSize: size})
				wantCode(t, err, sandlot.CodeInvalidRequest)
				if err := b.ResizeTerminal(t.Context(), id, wire.WindowSize{Cols: 1 + i, Rows: 1 + i}); err != nil {
					t.Error(err)
				}
				if s, err := b.TerminalStream(t.Context(), id); err == nil {
					s.Close()
				}
				if i%10 > 0 {
					continue
				}
				in := wire.NewTerminal{ID: string(sandlot.NewID("trm")), Argv: []string{"true"}, WindowSize: size}
				if _, err := b.NewTerminal(t.Context(), in); err != nil {
					t.Error(err)
				}
				if err := b.CloseTerminal(t.Context(), in.ID); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	census(t, goroutines, fds, 12)
	list, err := b.Terminals(t.Context())
	if err != nil || len(list) != 1 {
		t.Errorf("%d terminals, %v", len(list), err)
	}
}
