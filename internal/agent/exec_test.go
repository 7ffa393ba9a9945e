package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"sandlot"
	"sandlot/internal/wire"

	"github.com/google/go-cmp/cmp"
)

func TestExec(t *testing.T) {
	b := start(t)
	write := func(name, content string, mode os.FileMode) {
		if err := os.WriteFile(filepath.Join(b.root, "workspace", name), []byte(content), mode); err != nil {
			t.Fatal(err)
		}
	}
	write("plain", "echo hi\n", 0o644)
	write("badinterp", "#!/no/such/interpreter\n", 0o755)
	write("binary", "\x00\x01\x02", 0o755)
	big := strings.Repeat("x", 200_000)
	type res struct {
		code           int
		signal         string
		stdout, stderr string
	}
	tests := []struct {
		name string
		e    wire.Exec
		want res
	}{
		{"true", wire.Exec{Argv: []string{"true"}}, res{}},
		{"false", wire.Exec{Argv: []string{"false"}}, res{code: 1}},
		{"both outputs", wire.Exec{Argv: []string{"bash", "-c", "echo out; echo err >&2; exit 7"}}, res{7, "", "out\n", "err\n"}},
		{"missing", wire.Exec{Argv: []string{"no-such-program"}}, res{127, "", "", "bash: no-such-program: command not found\n"}},
		{"missing path", wire.Exec{Argv: []string{"./nope"}}, res{127, "", "", "bash: ./nope: No such file or directory\n"}},
		{"not executable", wire.Exec{Argv: []string{"./plain"}}, res{126, "", "", "bash: ./plain: Permission denied\n"}},
		{"a directory", wire.Exec{Argv: []string{"/tmp/"}}, res{126, "", "", "bash: /tmp/: Is a directory\n"}},
		{"no interpreter", wire.Exec{Argv: []string{"./badinterp"}}, res{127, "", "", "bash: ./badinterp: cannot execute: required file not found\n"}},
		{"not a program", wire.Exec{Argv: []string{"./binary"}}, res{126, "", "", "bash: ./binary: cannot execute binary file: Exec format error\n"}},
		{"argv is not a shell's", wire.Exec{Argv: []string{"echo", "-n", "$HOME; `x` *", "--"}}, res{stdout: "$HOME; `x` * --"}},
		{"killed", wire.Exec{Argv: []string{"bash", "-c", "kill -9 $$"}}, res{code: 137, signal: "SIGKILL"}},
		{"terminated", wire.Exec{Argv: []string{"bash", "-c", "kill -TERM $$"}}, res{code: 143, signal: "SIGTERM"}},
		{"no stdin", wire.Exec{Argv: []string{"cat"}}, res{}},
		{"stdin", wire.Exec{Argv: []string{"cat"}, Stdin: []byte("héllo")}, res{stdout: "héllo"}},
		{"big stdin", wire.Exec{Argv: []string{"cat"}, Stdin: []byte(big)}, res{stdout: big}},
		{"big stdin unread", wire.Exec{Argv: []string{"true"}, Stdin: []byte(big)}, res{}},
		{"default directory", wire.Exec{Argv: []string{"pwd"}}, res{stdout: b.root + "/workspace\n"}},
		{"directory", wire.Exec{Argv: []string{"pwd"}, Cwd: "/tmp"}, res{stdout: b.root + "/tmp\n"}},
		{"environment", wire.Exec{
			Argv: []string{"bash", "-c", "echo $FROM_IDENTITY $BOTH $A $USER $LANG $TERM"},
			Env:  map[string]string{"A": "a b\nc", "BOTH": "exec", "LD_X": "=x"},
		}, res{stdout: "i exec a b c user C.UTF-8 dumb\n"}},
		{"path of the request", wire.Exec{Argv: []string{"bash", "-c", "true"}, Env: map[string]string{"PATH": "/nowhere"}}, res{127, "", "", "bash: bash: command not found\n"}},
		{"new session", wire.Exec{Argv: []string{"bash", "-c", "read -r _ _ _ _ g s _ < /proc/$$/stat; [ $g = $$ ] && [ $s = $$ ]"}}, res{}},
		{"root", wire.Exec{Argv: []string{"bash", "-c", "echo $USER"}, User: "root"}, res{stdout: "root\n"}},
		{"bytes that are not text", wire.Exec{Argv: []string{"printf", `\xff\x00\xfe`}}, res{stdout: "\xff\x00\xfe"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			tt.e.TimeoutMS = 20_000
			r := b.run(t, tt.e)
			got := res{r.ExitCode, r.Signal, string(r.Stdout), string(r.Stderr)}
			if d := cmp.Diff(tt.want, got, cmp.AllowUnexported(res{})); d != "" {
				t.Errorf("collected (-want +got):\n%s", d)
			}
			// The same, streamed.
			tt.e.Collect = 0
			s, err := b.Exec(t.Context(), tt.e)
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			var out, errs bytes.Buffer
			for {
				kind, p, err := s.Next()
				if errors.Is(err, io.EOF) {
					break
				}
				if err != nil {
					t.Fatal(err)
				}
				switch kind {
				case wire.FrameStdout:
					out.Write(p)
				case wire.FrameStderr:
					errs.Write(p)
				}
			}
			got = res{s.Exit().ExitCode, s.Exit().Signal, out.String(), errs.String()}
			if d := cmp.Diff(tt.want, got, cmp.AllowUnexported(res{})); d != "" {
				t.Errorf("streamed (-want +got):\n%s", d)
			}
		})
	}
}

func TestExecRefuses(t *testing.T) {
	b := start(t)
	vars := make(map[string]string)
	for i := range sandlot.MaxEnvVars + 1 {
		vars["V"+strconv.Itoa(i)] = ""
	}
	tests := map[string]wire.Exec{
		"no argv":            {},
		"empty argv":         {Argv: []string{""}},
		"NUL in argv":        {Argv: []string{"echo", "a\x00b"}},
		"missing cwd":        {Argv: []string{"true"}, Cwd: "/no/such"},
		"cwd is a file":      {Argv: []string{"true"}, Cwd: "/etc/f"},
		"cwd with dots":      {Argv: []string{"true"}, Cwd: "../.."},
		"missing everything": {Argv: []string{"nope"}, Cwd: "/no/such"},
		"env name":           {Argv: []string{"true"}, Env: map[string]string{"=x": ""}},
		"env empty name":     {Argv: []string{"true"}, Env: map[string]string{"": ""}},
		"env newline name":   {Argv: []string{"true"}, Env: map[string]string{"A\nB": ""}},
		"env digit name":     {Argv: []string{"true"}, Env: map[string]string{"1A": ""}},
		"env NUL":            {Argv: []string{"true"}, Env: map[string]string{"A": "\x00"}},
		"env 1 MiB":          {Argv: []string{"true"}, Env: map[string]string{"A": strings.Repeat("a", 1<<20)}},
		"env many":           {Argv: []string{"true"}, Env: vars},
		"user by number":     {Argv: []string{"true"}, User: "0"},
		"user pair":          {Argv: []string{"true"}, User: "0:0"},
		"user path":          {Argv: []string{"true"}, User: "../"},
		"user unknown":       {Argv: []string{"true"}, User: "nobody-here"},
		"user newline":       {Argv: []string{"true"}, User: "root\n"},
		"negative timeout":   {Argv: []string{"true"}, TimeoutMS: -1},
		"long timeout":       {Argv: []string{"true"}, TimeoutMS: 1 << 50},
		"one long argument":  {Argv: []string{"true", strings.Repeat("a", 200_000)}},
	}
	if err := os.WriteFile(filepath.Join(b.root, "etc/f"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, e := range tests {
		t.Run(name, func(t *testing.T) {
			_, err := b.Run(t.Context(), e)
			wantCode(t, err, sandlot.CodeInvalidRequest)
		})
	}
	_, err := b.Run(t.Context(), wire.Exec{Argv: []string{"true", strings.Repeat("a", sandlot.MaxArgvBytes)}})
	wantCode(t, err, sandlot.CodeTooLarge)
	_, err = b.Run(t.Context(), wire.Exec{Argv: []string{"true"}, Stdin: make([]byte, sandlot.MaxStdinBytes+1)})
	wantCode(t, err, sandlot.CodeTooLarge)
}

func TestNothingBeforeIdentity(t *testing.T) {
	b := startBare(t, Config{Root: t.TempDir()})
	_, err := b.Run(t.Context(), wire.Exec{Argv: []string{"true"}})
	wantCode(t, err, sandlot.CodeConflict)
	_, err = b.List(t.Context(), at("."), "", 0)
	wantCode(t, err, sandlot.CodeConflict)
	b.identify(t)
	b.identify(t) // the same again is fine
	b.run(t, wire.Exec{Argv: []string{"true"}})
	wantCode(t, b.Identify(t.Context(), wire.Identity{ID: "sbxother"}), sandlot.CodeConflict)
	h, err := b.Health(t.Context())
	if err != nil || h.ID != "sbxtest" {
		t.Errorf("health %+v, %v", h, err)
	}
}

func TestTimeoutEndsGroupAndSession(t *testing.T) {
	b := start(t)
	// The second child leaves the group but not the session.
	script := `echo before; sleep 1000 & echo $! >a; python3 -c 'import os,time; os.setpgid(0,0); open("b","w").write(str(os.getpid())); time.sleep(1000)' & sleep 1000`
	if _, err := os.Stat("/usr/bin/python3"); err != nil {
		script = `echo before; sleep 1000 & echo $! >a; echo $! >b; sleep 1000`
	}
	began := time.Now()
	r := b.run(t, wire.Exec{Argv: []string{"bash", "-c", script}, TimeoutMS: 700})
	if !r.TimedOut || r.ExitCode != 137 || string(r.Stdout) != "before\n" {
		t.Errorf("got %+v %q", r.Exit, r.Stdout)
	}
	if took := time.Since(began); took > 3*time.Second {
		t.Errorf("took %s", took)
	}
	for _, f := range []string{"a", "b"} {
		pid, err := strconv.Atoi(strings.TrimSpace(readFile(t, filepath.Join(b.root, "workspace", f))))
		if err != nil {
			t.Fatal(err)
		}
		eventually(t, "child "+f+" dead", func() bool { return !alive(pid) })
	}
}

func readFile(t testing.TB, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestDisconnectKills(t *testing.T) {
	b := start(t)
	for _, collect := range []int64{0, 1000} {
		ctx, cancel := context.WithCancel(t.Context())
		pidFile := filepath.Join(b.root, "workspace", "pid")
		_ = os.Remove(pidFile)
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			s, err := b.Exec(ctx, wire.Exec{Argv: []string{"bash", "-c", "echo $$ >tmp; mv tmp pid; sleep 1000"}, Collect: collect})
			if err == nil {
				<-ctx.Done()
				s.Close()
			}
		}()
		eventually(t, "the command's start", func() bool { _, err := os.Stat(pidFile); return err == nil })
		pid, _ := strconv.Atoi(strings.TrimSpace(readFile(t, pidFile)))
		cancel()
		<-ended
		eventually(t, "the command's end", func() bool { return !alive(pid) })
	}
}

// A server that a command leaves behind holds its outputs; the command's answer does not wait for it, and it
// can go on printing.
func TestLeftoverHoldsPipes(t *testing.T) {
	b := start(t)
	began := time.Now()
	r := b.sh(t, `(for i in $(seq 50); do sleep 0.02; echo noise || exit; done; echo survived >survivor) & echo done`)
	if took := time.Since(began); took > 800*time.Millisecond {
		t.Errorf("took %s", took)
	}
	if r.ExitCode != 0 || !bytes.HasPrefix(r.Stdout, []byte("done\n")) {
		t.Errorf("got %+v %q", r.Exit, r.Stdout)
	}
	eventually(t, "the leftover's end", func() bool {
		_, err := os.Stat(filepath.Join(b.root, "workspace/survivor"))
		return err == nil
	})
}

func TestTruncation(t *testing.T) {
	b := start(t)
	r := b.run(t, wire.Exec{Argv: []string{"bash", "-c", "head -c 3000000 /dev/zero; echo tail >&2"}, Collect: 1000, TimeoutMS: 20_000})
	if len(r.Stdout) != 1000 || !r.StdoutTruncated || r.StderrTruncated || string(r.Stderr) != "tail\n" || r.ExitCode != 0 {
		t.Errorf("got %+v, %d bytes, %q", r.Exit, len(r.Stdout), r.Stderr)
	}
	// All of the limit comes through, in frames that are small enough.
	r = b.run(t, wire.Exec{Argv: []string{"head", "-c", "9000000", "/dev/zero"}, TimeoutMS: 20_000})
	if len(r.Stdout) != 9_000_000 || r.StdoutTruncated {
		t.Errorf("got %+v, %d bytes", r.Exit, len(r.Stdout))
	}
}

// A reader that stalls blocks the process on its pipe; nothing grows.
func TestStalledReaderIsBounded(t *testing.T) {
	b := start(t)
	s, err := b.Exec(t.Context(), wire.Exec{Argv: []string{"bash", "-c", "head -c 100M /dev/zero; echo $? >done"}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	runtime.GC()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	time.Sleep(300 * time.Millisecond)
	runtime.GC()
	runtime.ReadMemStats(&after)
	if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > 8<<20 {
		t.Errorf("the heap grew by %d bytes", grown)
	}
	if _, err := os.Stat(filepath.Join(b.root, "workspace/done")); err == nil {
		t.Error("the process was not blocked")
	}
	var total int
	for {
		kind, p, err := s.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if kind == wire.FrameStdout {
			total += len(p)
		}
	}
	if total != 100<<20 || s.Exit().ExitCode != 0 {
		t.Errorf("got %d bytes, %+v", total, s.Exit())
	}
}

func TestTooManyCommands(t *testing.T) {
	const limit = 24
	b := start(t)
	b.a.procs.limit = limit
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var wg sync.WaitGroup
	var mu sync.Mutex
	codes := map[sandlot.Code]int{}
	for range limit + 20 {
		wg.Go(func() {
			s, err := b.Exec(ctx, wire.Exec{Argv: []string{"sleep", "1000"}})
			mu.Lock()
			codes[sandlot.ErrorCode(err)]++
			mu.Unlock()
			if err == nil {
				<-ctx.Done()
				s.Close()
			}
		})
	}
	eventually(t, "all answered", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return codes[""]+codes[sandlot.CodeRateLimited] == limit+20
	})
	if codes[""] != limit {
		t.Errorf("got %v", codes)
	}
	cancel()
	wg.Wait()
	eventually(t, "room again", func() bool { return b.a.procs.running() == 0 })
	b.run(t, wire.Exec{Argv: []string{"true"}})
}

// ADVERSARIAL 46: what fails leaves nothing behind.
func TestMissingBinaryCensus(t *testing.T) {
	b := start(t)
	b.run(t, wire.Exec{Argv: []string{"missing"}})
	g, f := runtime.NumGoroutine(), countFDs(t)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for i := range 500 {
				e := wire.Exec{Argv: []string{"missing"}, Stdin: []byte("x")}
				if i%2 == 1 {
					e.Argv[0] = "./missing" // through fork and execve
				}
				if r := b.run(t, e); r.ExitCode != 127 {
					t.Errorf("exit code %d", r.ExitCode)
				}
			}
		})
	}
	wg.Wait()
	b.CloseIdle()
	census(t, g, f, 12)
}

func TestDisconnectCensus(t *testing.T) {
	b := start(t)
	b.run(t, wire.Exec{Argv: []string{"true"}})
	g, f := runtime.NumGoroutine(), countFDs(t)
	var wg sync.WaitGroup
	for range 10 {
		wg.Go(func() {
			for range 50 {
				s, err := b.Exec(t.Context(), wire.Exec{Argv: []string{"sleep", "1000"}})
				if err != nil {
					t.Error(err)
					return
				}
				s.Close()
			}
		})
	}
	wg.Wait()
	eventually(t, "no process left", func() bool { return b.a.procs.running() == 0 })
	b.CloseIdle()
	census(t, g, f, 12)
}

func TestMultiByteOutput(t *testing.T) {
	b := start(t)
	// Frames may cut a character; their bytes together are the output.
	want := strings.Repeat("é漢🙂", 20_000)
	if err := os.WriteFile(filepath.Join(b.root, "workspace/t"), []byte(want), 0o600); err != nil {
		t.Fatal(err)
	}
	if r := b.run(t, wire.Exec{Argv: []string{"cat", "t"}}); string(r.Stdout) != want {
		t.Errorf("got %d bytes, want %d", len(r.Stdout), len(want))
	}
}

func TestCloseKillsEverything(t *testing.T) {
	b := start(t)
	st, err := b.StartBackground(t.Context(), wire.Exec{Argv: []string{"bash", "-c", "sleep 1000 & sleep 1000"}})
	if err != nil {
		t.Fatal(err)
	}
	b.sh(t, "sleep 1000 & echo $! >left")
	left, _ := strconv.Atoi(strings.TrimSpace(readFile(t, filepath.Join(b.root, "workspace/left"))))
	if !alive(left) || !alive(st.PID) {
		t.Fatal("not running")
	}
	if err := b.a.Close(); err != nil {
		t.Error(err)
	}
	eventually(t, "everything dead", func() bool { return !alive(left) && !alive(st.PID) })
	_, err = b.a.collect(context.Background(), &identity{}, &wire.Exec{Argv: []string{"true"}, Collect: 1})
	wantCode(t, err, sandlot.CodeSandboxUnhealthy)
}

func BenchmarkExecTrue(bm *testing.B) {
	b := start(bm)
	var inside int64
	for bm.Loop() {
		r := b.run(bm, wire.Exec{Argv: []string{"true"}})
		inside += r.DurationUS
	}
	bm.ReportMetric(float64(inside)/float64(bm.N), "µs-inside/op")
}

func BenchmarkForkExec(bm *testing.B) {
	b := start(bm)
	var inside int64
	for bm.Loop() {
		r, err := b.BenchForkExec(bm.Context(), wire.Exec{Argv: []string{"true"}})
		if err != nil {
			bm.Fatal(err)
		}
		inside += r.DurationUS
	}
	bm.ReportMetric(float64(inside)/float64(bm.N), "µs-inside/op")
}

func ExampleNew() {
	_, err := New(Config{Boot: wire.Boot{Secret: "short"}})
	fmt.Println(err)
	// Output: agent: the secret has 5 characters, not 64
}
