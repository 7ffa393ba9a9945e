package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"sandlot"
	"sandlot/internal/guest"
	"sandlot/internal/wire"
)

func startPython(t *testing.T) *box {
	t.Helper()
	if _, err := exec.LookPath("python3"); err != nil {
		t.Skip("SKIPPED: no python3")
	}
	return start(t)
}

func (b *box) cell(t testing.TB, code string, more ...func(*wire.Cell)) guest.CellResult {
	t.Helper()
	c := wire.Cell{Language: "python", Code: code, TimeoutMS: 60_000}
	for _, f := range more {
		f(&c)
	}
	r, err := b.RunCell(t.Context(), c)
	if err != nil {
		t.Fatalf("%q: %v", clip(code, 200), err)
	}
	return r
}

func in(id string) func(*wire.Cell)      { return func(c *wire.Cell) { c.Context = id } }
func within(ms int64) func(*wire.Cell)   { return func(c *wire.Cell) { c.TimeoutMS = ms } }
func language(l string) func(*wire.Cell) { return func(c *wire.Cell) { c.Language = l } }
func keep(n int64) func(*wire.Cell)      { return func(c *wire.Cell) { c.Collect = n } }
func text(r guest.CellResult) (s string) {
	for _, v := range r.Results {
		s += fmt.Sprint(v.Data["text/plain"], ";")
	}
	return s
}

func failure(r guest.CellResult) string {
	if r.Error == nil {
		return ""
	}
	return r.Error.Name
}

func TestCellKeepsState(t *testing.T) {
	b := startPython(t)
	r := b.cell(t, "import os, sys\nx = 41\nprint('out')\nprint('err', file=sys.stderr)\nx + 1")
	if string(r.Stdout) != "out\n" || string(r.Stderr) != "err\n" || text(r) != "42;" || !r.Results[0].Main || r.ExecutionCount != 1 || r.Context != "default" || r.Error != nil {
		t.Errorf("%+v %s %s", r, r.Stdout, r.Stderr)
	}
	if r = b.cell(t, "x += 1; x"); text(r) != "42;" || r.ExecutionCount != 2 || r.StateLost {
		t.Errorf("%+v", r)
	}
	if r = b.cell(t, "x", in("other")); failure(r) != "NameError" || r.Context != "other" {
		t.Errorf("another context: %+v", r)
	}
	if r = b.cell(t, "print(os.environ['FROM_IDENTITY'], os.getcwd().endswith('/workspace'))"); string(r.Stdout) != "i True\n" {
		t.Errorf("%q", r.Stdout)
	}
	if r = b.cell(t, "os.system('echo child'); print('after')"); string(r.Stdout) != "child\nafter\n" {
		t.Errorf("a subprocess: %q", r.Stdout)
	}
}

// A cell past its time is interrupted and its state kept; a kernel that does not mind the interrupt is replaced.
func TestCellTimeout(t *testing.T) {
	b := startPython(t)
	b.cell(t, "x = 1")
	r := b.cell(t, "print('begun', flush=True)\nwhile True: pass", within(1000))
	if failure(r) != "Timeout" || !r.TimedOut || r.StateLost || string(r.Stdout) != "begun\n" || !strings.Contains(r.Error.Traceback, "KeyboardInterrupt") {
		t.Errorf("%+v", r)
	}
	if r = b.cell(t, "x"); text(r) != "1;" || r.StateLost {
		t.Errorf("after an interrupt: %+v", r)
	}
	r = b.cell(t, "import subprocess\np = subprocess.Popen(['sleep', '767'])\nwhile True:\n  try:\n    while True: sum(range(9))\n  except KeyboardInterrupt: print('no')", within(1000))
	if failure(r) != "Timeout" || !r.TimedOut || !r.StateLost || string(r.Stdout) != "no\n" {
		t.Errorf("%+v %s", r.CellEnd, r.Stdout)
	}
	if got := b.sh(t, "pgrep -fc '^sleep 767' || true"); string(got.Stdout) != "0\n" {
		t.Errorf("%q of the old kernel's processes are left", got.Stdout)
	}
	if r = b.cell(t, "x"); failure(r) != "NameError" || r.ExecutionCount != 1 || r.StateLost {
		t.Errorf("after a replacement: %+v %+v", r.CellEnd, r.Error)
	}
}

func TestCellClientGone(t *testing.T) {
	b := startPython(t)
	b.cell(t, "x, got = 1, []")
	ctx, cancel := context.WithCancel(t.Context())
	s, err := b.Cell(ctx, wire.Cell{Language: "python", Code: "try:\n  print('begun', flush=True)\n  while True: sum(range(9))\nfinally: got.append(2)", TimeoutMS: 60_000})
	if err != nil {
		t.Fatal(err)
	}
	if _, b, err := s.Next(); err != nil || string(b) != "begun\n" {
		t.Errorf("%q, %v", b, err)
	}
	cancel()
	s.Close()
	if r := b.cell(t, "x, got"); text(r) != "(1, [2]);" || r.StateLost {
		t.Errorf("%+v %s", r, text(r))
	}
}

func TestKernelDies(t *testing.T) {
	b := startPython(t)
	for _, c := range []struct{ code, value, stdout string }{
		{"print('a', flush=True); import os; os._exit(3)", "exit status 3", "a\n"},
		{"print('b', flush=True); import os; os.kill(os.getpid(), 11)", "SIGSEGV", "b\n"},
		{"print('c', flush=True); import os; os.kill(os.getpid(), 9)", "SIGKILL", "c\n"},
		{"print('d', flush=True); import os, time\nif os.fork() == 0: time.sleep(300)\nos._exit(4)", "exit status 4", "d\n"}, // the child holds the channel
		{"print('e', flush=True); import os; os.close(3); import time; time.sleep(300)", "SIGKILL", "e\n"},
		{"print('f', flush=True); import os; os.write(3, b'no JSON\\n'); import time; time.sleep(300)", "SIGKILL", "f\n"},
	} {
		b.cell(t, "x = 1")
		r := b.cell(t, c.code)
		if failure(r) != "KernelDied" || !strings.Contains(r.Error.Value, c.value) || !r.StateLost || string(r.Stdout) != c.stdout {
			t.Errorf("%q: %+v %+v %q", c.code, r.CellEnd, r.Error, r.Stdout)
		}
		if r = b.cell(t, "1+1"); text(r) != "2;" || r.ExecutionCount != 1 || r.StateLost {
			t.Errorf("after %q: %+v", c.code, r)
		}
	}
	// Between two cells.
	pid := text(b.cell(t, "import os; os.getpid()"))
	b.sh(t, "kill -9 "+strings.TrimSuffix(pid, ";"))
	eventually(t, "the kernel's end is seen", func() bool {
		all, err := b.Contexts(t.Context())
		return err == nil && all[0].State == "dead"
	})
	if r := b.cell(t, "1+1"); text(r) != "2;" || !r.StateLost {
		t.Errorf("after a kill between two cells: %+v", r)
	}
}

// What a thread or a child says between two cells comes with the next.
func TestCellLateOutput(t *testing.T) {
	b := startPython(t)
	r := b.cell(t, "import threading, subprocess\nt = threading.Timer(0.3, lambda: print('late'))\nt.start()\np = subprocess.Popen('sleep 0.2; echo child', shell=True)\nprint('now')")
	if string(r.Stdout) != "now\n" {
		t.Errorf("%q", r.Stdout)
	}
	time.Sleep(time.Second)
	if r = b.cell(t, "t.join(); p.wait(); print('next')"); string(r.Stdout) != "child\nlate\nnext\n" {
		t.Errorf("%q", r.Stdout)
	}
}

func TestCellOutputIsCut(t *testing.T) {
	b := startPython(t)
	r := b.cell(t, "import sys\nfor i in range(40): sys.stdout.write('x' * (1 << 20))\nprint('end', file=sys.stderr)", keep(1<<20))
	if len(r.Stdout) != 1<<20 || !r.StdoutTruncated || r.StderrTruncated || string(r.Stderr) != "end\n" {
		t.Errorf("%d bytes, %+v, %q", len(r.Stdout), r.CellEnd, r.Stderr)
	}
	r = b.cell(t, "import os; os.write(1, bytes(range(256))); os.write(2, '€'.encode()[:2]) and None")
	if len(r.Stdout) != 256 || string(r.Stderr) != "\xe2\x82" {
		t.Errorf("%q %q", r.Stdout, r.Stderr)
	}
}

func TestCellStream(t *testing.T) {
	b := startPython(t)
	s, err := b.Cell(t.Context(), wire.Cell{Language: "python", TimeoutMS: 60_000, Code: "import sys, time\nprint('1', flush=True); time.sleep(.2)\nprint('2', file=sys.stderr, flush=True); time.sleep(.2)\ndisplay(3); time.sleep(.2)\nprint('4', flush=True)\n'x' * 3_000_000"})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	var got strings.Builder
	for {
		kind, payload, err := s.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		switch kind {
		case wire.FrameResult:
			r := s.Result()
			v, _ := r.Data["text/plain"].(string)
			fmt.Fprintf(&got, "r%v:%s:%d ", r.Main, v[:1], len(v))
		case wire.FrameStdout, wire.FrameStderr:
			if s := strings.TrimSpace(string(payload)); s != "" {
				fmt.Fprintf(&got, "%d:%s ", kind, s)
			}
		}
	}
	if !strings.HasPrefix(got.String(), "1:1 2:2 rfalse:3:1 1:4 rtrue:'") || s.End().Error != nil {
		t.Errorf("%q %+v", got.String(), s.End())
	}
}

// A context that is stuck does not keep another waiting, and has its cells wait in order, up to a limit.
func TestContextsAreApart(t *testing.T) {
	b := startPython(t)
	b.cell(t, "x = 0", in("stuck"))
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() {
		_, _ = b.RunCell(ctx, wire.Cell{Context: "stuck", Code: "while True: pass", TimeoutMS: 60_000})
	})
	state := func(id string) string {
		all, err := b.Contexts(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range all {
			if c.ID == id {
				return c.State
			}
		}
		return ""
	}
	eventually(t, "the context is busy", func() bool { return state("stuck") == "busy" })
	if r := b.cell(t, "1+1"); text(r) != "2;" {
		t.Errorf("%+v", r)
	}
	var refused, deleted int
	var mu sync.Mutex
	for range maxQueued + 3 {
		wg.Go(func() {
			_, err := b.RunCell(ctx, wire.Cell{Context: "stuck", Code: "1", TimeoutMS: 60_000})
			mu.Lock()
			defer mu.Unlock()
			switch sandlot.ErrorCode(err) {
			case sandlot.CodeRateLimited:
				refused++
			case sandlot.CodeNotFound:
				deleted++
			}
		})
	}
	eventually(t, "the queue is full", func() bool { mu.Lock(); defer mu.Unlock(); return refused == 3 })
	_, err := b.RunCell(t.Context(), wire.Cell{Context: "stuck", Language: "javascript", Code: "1", TimeoutMS: 1000})
	wantCode(t, err, sandlot.CodeInvalidRequest)
	if err := b.DeleteContext(t.Context(), "stuck"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "those that waited are told", func() bool { mu.Lock(); defer mu.Unlock(); return deleted == maxQueued })
}

func TestContextsLifecycle(t *testing.T) {
	b := startPython(t)
	ctx := t.Context()
	c, err := b.NewContext(ctx, wire.NewContext{ID: "a.b-c_1", Language: "python", Cwd: "/tmp"})
	if err != nil || c.State != "idle" || c.Cwd != "/tmp" || c.PID == 0 || c.ExecutionCount != 0 {
		t.Fatalf("%+v, %v", c, err)
	}
	_, err = b.NewContext(ctx, wire.NewContext{ID: "a.b-c_1"})
	wantCode(t, err, sandlot.CodeConflict)
	for _, id := range []string{"", "..", "a/b", ".a", strings.Repeat("a", 65)} {
		_, err = b.NewContext(ctx, wire.NewContext{ID: id})
		wantCode(t, err, sandlot.CodeInvalidRequest)
	}
	_, err = b.NewContext(ctx, wire.NewContext{ID: "x", Cwd: "/no/such"})
	wantCode(t, err, sandlot.CodeInvalidRequest)
	if r := b.cell(t, "import os; y = 1; os.getcwd()", in(c.ID)); !strings.HasSuffix(text(r), "/tmp';") {
		t.Errorf("%s", text(r))
	}
	again, err := b.RestartContext(ctx, c.ID)
	if err != nil || again.PID == c.PID || again.State != "idle" || again.ExecutionCount != 0 {
		t.Errorf("%+v, %v", again, err)
	}
	if r := b.cell(t, "y", in(c.ID)); failure(r) != "NameError" || r.ExecutionCount != 1 || r.StateLost {
		t.Errorf("%+v", r)
	}

	done := make(chan guest.CellResult, 1)
	busy := func(code string) {
		go func() {
			r, _ := b.RunCell(context.WithoutCancel(ctx), wire.Cell{Context: c.ID, Code: code, TimeoutMS: 60_000})
			done <- r
		}()
		eventually(t, "a file of the cell", func() bool { return os.Remove(filepath.Join(b.root, "tmp/begun")) == nil })
	}
	busy("open('begun', 'w').close()\nwhile True: pass")
	if err := b.InterruptContext(ctx, c.ID); err != nil {
		t.Error(err)
	}
	if r := <-done; failure(r) != "KeyboardInterrupt" || r.TimedOut || r.StateLost {
		t.Errorf("interrupted: %+v", r)
	}
	busy("open('begun', 'w').close()\nwhile True: pass")
	if _, err = b.RestartContext(ctx, c.ID); err != nil {
		t.Error(err)
	}
	if r := <-done; failure(r) != "KernelDied" || !strings.Contains(r.Error.Value, "restarted") {
		t.Errorf("restarted: %+v", r)
	}
	if err := b.DeleteContext(ctx, c.ID); err != nil {
		t.Error(err)
	}
	wantCode(t, b.DeleteContext(ctx, c.ID), sandlot.CodeNotFound)
	wantCode(t, b.InterruptContext(ctx, c.ID), sandlot.CodeNotFound)
	_, err = b.RestartContext(ctx, c.ID)
	wantCode(t, err, sandlot.CodeNotFound)
	if all, err := b.Contexts(ctx); err != nil || len(all) != 0 {
		t.Errorf("%+v, %v", all, err)
	}
}

func TestTooManyContexts(t *testing.T) {
	b := startPython(t)
	for i := range maxContexts {
		if _, err := b.a.kernels.open("c"+strconv.Itoa(i), "python", "", false); err != nil {
			t.Fatal(err)
		}
	}
	_, err := b.RunCell(t.Context(), wire.Cell{Context: "more", Code: "1", TimeoutMS: 1000})
	wantCode(t, err, sandlot.CodeRateLimited)
	if err := b.DeleteContext(t.Context(), "c1"); err != nil {
		t.Error(err)
	}
	if r := b.cell(t, "1+1", in("more")); text(r) != "2;" {
		t.Errorf("%+v", r)
	}
}

func TestCellBash(t *testing.T) {
	b := start(t)
	r := b.cell(t, "echo out; echo err >&2; exit 3", language("bash"))
	if string(r.Stdout) != "out\n" || string(r.Stderr) != "err\n" || failure(r) != "ExitError" || r.Error.Value != "exit status 3" || r.Context != "" {
		t.Errorf("%+v", r)
	}
	if r = b.cell(t, "echo $FROM_IDENTITY; pwd; cat; true "+strings.Repeat("#", 300<<10), language("bash")); !strings.HasSuffix(string(r.Stdout), "/workspace\n") || r.Error != nil {
		t.Errorf("a long script: %q %+v", r.Stdout, r.Error)
	}
	if r = b.cell(t, "echo a; sleep 60", language("bash"), within(500)); failure(r) != "Timeout" || !r.TimedOut || string(r.Stdout) != "a\n" {
		t.Errorf("%+v", r)
	}
	if r = b.cell(t, "kill -9 $$", language("bash")); r.Error.Value != "signal: SIGKILL" {
		t.Errorf("%+v", r.Error)
	}
	_, err := b.RunCell(t.Context(), wire.Cell{Language: "bash", Context: "c", Code: "1", TimeoutMS: 1000})
	wantCode(t, err, sandlot.CodeInvalidRequest)
}

func TestCellRefused(t *testing.T) {
	b := start(t)
	for _, c := range []struct {
		cell wire.Cell
		code sandlot.Code
	}{
		{wire.Cell{Language: "cobol", TimeoutMS: 1}, sandlot.CodeInvalidRequest},
		{wire.Cell{Language: "python"}, sandlot.CodeInvalidRequest},
		{wire.Cell{Language: "python", TimeoutMS: 1, Code: strings.Repeat("#", maxCode+1)}, sandlot.CodeTooLarge},
		{wire.Cell{Language: "bash", TimeoutMS: 1, Code: "a\x00b"}, sandlot.CodeInvalidRequest},
		{wire.Cell{Language: "python", TimeoutMS: 1, Context: "a b"}, sandlot.CodeInvalidRequest},
	} {
		_, err := b.RunCell(t.Context(), c.cell)
		wantCode(t, err, c.code)
	}
	bare := startBare(t, Config{Root: t.TempDir(), Bridges: os.DirFS(t.TempDir())})
	_, err := bare.RunCell(t.Context(), wire.Cell{Language: "python", TimeoutMS: 1000})
	wantCode(t, err, sandlot.CodeConflict)
	bare.identify(t)
	_, err = bare.RunCell(t.Context(), wire.Cell{Language: "python", TimeoutMS: 1000})
	wantCode(t, err, sandlot.CodeUnsupported)
}

// The kernel that waits in a pool takes the sandbox's environment, draws its own randomness, and counts from one.
func TestKernelAhead(t *testing.T) {
	if _, err := exec.LookPath("python3"); err != nil {
		t.Skip("SKIPPED: no python3")
	}
	cfg := Config{Root: t.TempDir()}
	cfg.Boot.Kernels, cfg.Boot.Warm = []string{"python"}, true
	b := startBare(t, cfg)
	eventually(t, "the kernel runs before the identity", func() bool { return b.a.kernels.ahead() != 0 })
	if s, err := b.Stats(t.Context()); err != nil || s.Processes != 0 {
		t.Errorf("%+v, %v: the kernel counts as somebody's", s, err)
	}
	pid := b.a.kernels.ahead()
	b.identify(t)
	r := b.cell(t, "import os; (os.getpid(), os.environ['FROM_IDENTITY'])")
	if want := fmt.Sprintf("(%d, 'i');", pid); text(r) != want || r.ExecutionCount != 1 || r.StateLost {
		t.Errorf("%s, want %s; %+v", text(r), want, r.CellEnd)
	}
	if b.a.kernels.ahead() != 0 {
		t.Error("the kernel is still taken for unused")
	}
}

// An image may have anything where the kernels' programs go, and any program for a python3.
func TestKernelHostileImage(t *testing.T) {
	if _, err := exec.LookPath("python3"); err != nil {
		t.Skip("SKIPPED: no python3")
	}
	for name, in := range map[string]func(root string) error{
		"link": func(root string) error {
			return errors.Join(os.Mkdir(root+"/run", 0o755), os.Symlink("/workspace", root+"/run/sandlot"))
		},
		"links": func(root string) error { return os.Symlink(t.TempDir(), root+"/run") },
		"file": func(root string) error {
			return errors.Join(os.MkdirAll(root+"/run/sandlot", 0o755), os.WriteFile(root+"/run/sandlot/kernel", nil, 0o644))
		},
		"bridge": func(root string) error {
			return errors.Join(os.MkdirAll(root+kernelDir, 0o755), os.Symlink("/etc/passwd", root+kernelDir+"/"+pythonBridge))
		},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			if err := in(root); err != nil {
				t.Fatal(err)
			}
			b := startBare(t, Config{Root: root})
			b.identify(t)
			if r := b.cell(t, "1+1"); text(r) != "2;" {
				t.Errorf("%+v", r)
			}
			if real, err := filepath.EvalSymlinks(root + kernelDir + "/" + pythonBridge); err != nil || real != root+kernelDir+"/"+pythonBridge {
				t.Errorf("the bridge is at %s, %v", real, err)
			}
		})
	}
	// One that never says that it is ready does not hold the machine's start.
	bridges := t.TempDir()
	if err := os.WriteFile(bridges+"/"+pythonBridge, []byte("import time\ntime.sleep(600)\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	cfg := Config{Root: t.TempDir(), Bridges: os.DirFS(bridges)}
	cfg.Boot.Kernels, cfg.Boot.Warm = []string{"python"}, true
	b := startBare(t, cfg)
	b.identify(t)
	if all, err := b.Contexts(t.Context()); err != nil || len(all) != 0 {
		t.Errorf("%+v, %v", all, err)
	}
	if got := b.sh(t, "pgrep -fc '"+b.root+".*[b]ridge.py' || true"); string(got.Stdout) != "0\n" {
		t.Errorf("%q kernels that never answered are left", got.Stdout)
	}
}

func TestCellCensus(t *testing.T) {
	b := startPython(t)
	b.cell(t, "1")
	goroutines, fds := runtime.NumGoroutine(), countFDs(t)
	for i := range 5 {
		id := "c" + strconv.Itoa(i)
		b.cell(t, "1", in(id))
		b.cell(t, "import os; os._exit(1)", in(id))
		b.cell(t, "1", in(id))
		if err := b.DeleteContext(t.Context(), id); err != nil {
			t.Error(err)
		}
	}
	census(t, goroutines, fds, 4)
}
