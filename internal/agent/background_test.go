package agent

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"sandlot"
	"sandlot/internal/guest"
	"sandlot/internal/wire"
)

// followed reads a process's stream to its end.
func followed(t testing.TB, b *box, pid int) (string, wire.Exit) {
	t.Helper()
	s, err := b.ProcessStream(t.Context(), pid)
	must(t, err)
	defer s.Close()
	return readStream(t, s)
}

func readStream(t testing.TB, s *guest.ExecStream) (string, wire.Exit) {
	t.Helper()
	var out strings.Builder
	for {
		kind, p, err := s.Next()
		if errors.Is(err, io.EOF) {
			return out.String(), s.Exit()
		}
		must(t, err)
		if kind == wire.FrameStdout {
			out.Write(p)
		}
	}
}

func background(t testing.TB, b *box, script string) wire.Started {
	t.Helper()
	st, err := b.StartBackground(t.Context(), wire.Exec{Argv: []string{"bash", "-c", script}})
	must(t, err)
	return st
}

func TestBackground(t *testing.T) {
	b := start(t)
	st := background(t, b, `echo one; echo two >&2; while read -r l; do echo "got $l"; done; echo end; exit 4`)
	if !strings.HasPrefix(st.LogPath, "/var/log/sandlot/") || st.PID <= 1 {
		t.Fatalf("%+v", st)
	}
	s, err := b.ProcessStream(t.Context(), st.PID)
	must(t, err)
	defer s.Close()
	for _, want := range []string{"a", "b"} {
		must(t, b.Stdin(t.Context(), st.PID, []byte(want+"\n"), false))
	}
	eventually(t, "the log", func() bool { return strings.Contains(readFile(t, b.outside(st.LogPath)), "got b\n") })
	ps, err := b.Processes(t.Context())
	must(t, err)
	if len(ps) != 1 || ps[0].PID != st.PID || !ps[0].Running || !ps[0].Background || ps[0].LogPath != st.LogPath || ps[0].Argv[0] != "bash" || !ps[0].Agent {
		t.Errorf("listed as %+v", ps)
	}
	must(t, b.Stdin(t.Context(), st.PID, []byte("c"), true))
	const want = "one\ntwo\ngot a\ngot b\nend\n" // read fails on a line without its end
	for range 2 {
		if got, exit := followed(t, b, st.PID); got != want || exit.ExitCode != 4 {
			t.Errorf("got %q, %+v", got, exit)
		}
	}
	if got, exit := readStream(t, s); got != want || exit.ExitCode != 4 {
		t.Errorf("the first follower got %q, %+v", got, exit)
	}
	ps, err = b.Processes(t.Context())
	if err != nil || ps[0].Running || ps[0].ExitCode == nil || *ps[0].ExitCode != 4 {
		t.Errorf("listed as %+v, %v", ps, err)
	}
	wantCode(t, b.Stdin(t.Context(), st.PID, []byte("x"), false), sandlot.CodeConflict)
	wantCode(t, b.Signal(t.Context(), st.PID, "TERM"), sandlot.CodeNotFound)
}

func TestBackgroundRefuses(t *testing.T) {
	b := start(t)
	ctx := t.Context()
	_, err := b.StartBackground(ctx, wire.Exec{Argv: []string{"missing"}})
	wantCode(t, err, sandlot.CodeInvalidRequest)
	if n := names(t, b.outside("var/log/sandlot")); len(n) != 0 {
		t.Errorf("left: %v", n)
	}
	_, err = b.ProcessStream(ctx, 4_000_000)
	wantCode(t, err, sandlot.CodeNotFound)
	r := b.sh(t, "true")
	_, err = b.ProcessStream(ctx, r.PID)
	wantCode(t, err, sandlot.CodeInvalidRequest)
	wantCode(t, b.Stdin(ctx, r.PID, nil, false), sandlot.CodeInvalidRequest)
	st := background(t, b, "sleep 1000")
	for _, sig := range []string{"", "0", "-9", "65", "SIGNOTHING", "SIGSIGTERM", "9; rm", strings.Repeat("9", 100)} {
		wantCode(t, b.Signal(ctx, st.PID, sig), sandlot.CodeInvalidRequest)
	}
	wantCode(t, b.Signal(ctx, os.Getpid(), "KILL"), sandlot.CodeForbidden)
	wantCode(t, b.Signal(ctx, 1, "KILL"), sandlot.CodeForbidden)
	wantCode(t, b.Signal(ctx, 0, "KILL"), sandlot.CodeInvalidRequest)
	wantCode(t, b.Signal(ctx, -1, "KILL"), sandlot.CodeInvalidRequest)
	wantCode(t, b.Signal(ctx, os.Getppid(), "KILL"), sandlot.CodeNotFound) // not this sandbox's
}

func TestSignals(t *testing.T) {
	b := start(t)
	for _, tt := range []struct {
		sig  string
		code int
		name string
	}{{"SIGTERM", 143, "SIGTERM"}, {"term", 143, "SIGTERM"}, {"9", 137, "SIGKILL"}, {"INT", 130, "SIGINT"}} {
		st := background(t, b, "exec 2>/dev/null; sleep 1000 & echo $!; wait")
		var child int
		eventually(t, "the child", func() bool {
			child, _ = strconv.Atoi(strings.TrimSpace(readFile(t, b.outside(st.LogPath))))
			return child > 0
		})
		must(t, b.Signal(t.Context(), st.PID, tt.sig))
		if _, exit := followed(t, b, st.PID); exit.ExitCode != tt.code || exit.Signal != tt.name {
			t.Errorf("%s: %+v", tt.sig, exit)
		}
		if tt.sig != "INT" { // shells without job control start "&" with it ignored
			eventually(t, "the group's end", func() bool { return !alive(child) })
		}
	}
}

// What a background process leaves behind prints on into its log.
func TestBackgroundDaemonKeepsItsLog(t *testing.T) {
	b := start(t)
	st := background(t, b, "(sleep 0.5; echo late) & echo early")
	if got, _ := followed(t, b, st.PID); got != "early\n" {
		t.Errorf("followed %q", got)
	}
	eventually(t, "the late line", func() bool { return readFile(t, b.outside(st.LogPath)) == "early\nlate\n" })
}

func TestLogIsBounded(t *testing.T) {
	b := start(t)
	b.a.logLimit = 3 << 20
	st := background(t, b, "head -c 7M /dev/zero; echo end")
	s, err := b.ProcessStream(t.Context(), st.PID)
	must(t, err)
	defer s.Close()
	got, exit := readStream(t, s)
	if len(got) != 3<<20+len(logCut) || !strings.HasSuffix(got, string(logCut)) || exit.ExitCode != 0 {
		t.Errorf("%d bytes, %+v", len(got), exit)
	}
	must(t, os.Remove(b.outside(st.LogPath)))
	_, err = b.ProcessStream(t.Context(), st.PID)
	wantCode(t, err, sandlot.CodeNotFound)
	must(t, os.Symlink("/etc/passwd", b.outside(st.LogPath)))
	if _, err = b.ProcessStream(t.Context(), st.PID); err == nil {
		t.Error("followed a link")
	}
}

const maxPIDs = 1 << 22 // no real process is likely to be near

func TestFinishedAreForgotten(t *testing.T) {
	b := start(t)
	first := background(t, b, "true")
	followed(t, b, first.PID)
	for i := range keptProcesses {
		must(t, b.a.procs.reserve())
		p := newProc(&wire.Exec{Argv: []string{"true"}}, &user{})
		p.pid = maxPIDs - 1 - i
		b.a.procs.add(p)
		p.finish(0)
		b.a.procs.finished(p)
	}
	ps, err := b.Processes(t.Context())
	must(t, err)
	if len(ps) != keptProcesses {
		t.Errorf("%d are listed", len(ps))
	}
	eventually(t, "the log gone", func() bool {
		_, err := os.Stat(b.outside(first.LogPath))
		return errors.Is(err, os.ErrNotExist)
	})
}

func TestStdinOfAProcessThatDoesNotRead(t *testing.T) {
	b := start(t)
	st := background(t, b, "sleep 1000")
	began := time.Now()
	done := make(chan error, 1)
	go func() { done <- b.Stdin(t.Context(), st.PID, make([]byte, 1<<20), false) }()
	time.Sleep(50 * time.Millisecond)
	must(t, b.Signal(t.Context(), st.PID, "KILL"))
	if err := <-done; err == nil || time.Since(began) > 5*time.Second {
		t.Errorf("after %s: %v", time.Since(began), err)
	}
}

func TestStartGivesStdin(t *testing.T) {
	b := start(t)
	st, err := b.StartBackground(t.Context(), wire.Exec{Argv: []string{"head", "-n", "2"}, Stdin: []byte("first\n")})
	must(t, err)
	must(t, b.Stdin(t.Context(), st.PID, []byte("second\n"), false))
	if got, _ := followed(t, b, st.PID); got != "first\nsecond\n" {
		t.Errorf("got %q", got)
	}
	if _, err := os.Stat(filepath.Join(b.root, "workspace")); err != nil {
		t.Error(err)
	}
}
