package gvisor_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"sandlot"
	"sandlot/internal/engine"
	"sandlot/internal/engine/enginetest"
	"sandlot/internal/testenv"
	"sandlot/internal/wire"
)

// findParked prints the pids of the agent's children that are not programs yet.
const findParked = `for p in /proc/[0-9]*; do n=${p#/proc/}; [ $n != 1 ] && tr '\0' ' ' <$p/cmdline 2>/dev/null | grep -q '^/.sandlot/agent' && echo $n; done; true`

// TestParkedChild holds an exec that became a parked child against what a forked one would be. Two in a row: the
// second comes when a child has been parked anew.
func TestParkedChild(t *testing.T) {
	dir := nodeDir(t)
	e := open(t, dir)
	m, _, err := e.Create(t.Context(), engine.Spec{
		ID: sandlot.NewID(sandlot.PrefixSandbox), Template: testenv.Template(t, "base"), Size: sandlot.DefaultSize, Pooled: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := m.Destroy(context.Background()); err != nil {
			t.Error(err)
		}
	}()
	c := enginetest.Client(t, m)
	enginetest.Identify(t, c, m.Record().ID)
	// behind runs a command as root that is forked, not parked, while nothing else runs.
	behind := func(cmd string) string {
		t.Helper()
		_, err := c.StartBackground(t.Context(), wire.Exec{
			Argv: []string{"bash", "-c", "sleep 0.5; (" + cmd + ") >/tmp/behind.new 2>&1; mv /tmp/behind.new /tmp/behind"}, User: "root", Background: true,
		})
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		return enginetest.Sh(t, c, "for i in $(seq 100); do [ -e /tmp/behind ] && break; sleep 0.1; done; cat /tmp/behind; sudo rm /tmp/behind")
	}

	t.Run("like a forked one", func(t *testing.T) {
		for range 2 {
			got := enginetest.Sh(t, c, `id -un; pwd; ls /proc/self/fd | tr '\n' ' '; python3 -c 'import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []))'; [ $$ = $(cut -d' ' -f6 /proc/$$/stat) ] && echo leads`)
			want := "user\n/workspace\n0 1 2 3 set()\nleads"
			if got != want {
				t.Errorf("got %q, want %q", got, want)
			}
		}
	})
	t.Run("what cannot start", func(t *testing.T) {
		for range 2 {
			r, err := c.Run(t.Context(), wire.Exec{Argv: []string{"/no/such/program"}, TimeoutMS: 5000, Collect: 1000})
			if err != nil || r.ExitCode != 127 || !strings.Contains(string(r.Stderr), "No such file or directory") {
				t.Errorf("missing program: %+v, %v", r, err)
			}
			if _, err := c.Run(t.Context(), wire.Exec{Argv: []string{"/bin/true"}, Cwd: "/no/such/dir", TimeoutMS: 5000, Collect: 1000}); sandlot.ErrorCode(err) != sandlot.CodeInvalidRequest {
				t.Errorf("missing directory: %v", err)
			}
			r, err = c.Run(t.Context(), wire.Exec{Argv: []string{"/etc/passwd"}, TimeoutMS: 5000, Collect: 1000})
			if err != nil || r.ExitCode != 126 {
				t.Errorf("not executable: %+v, %v", r, err)
			}
		}
	})
	t.Run("what does not fit", func(t *testing.T) {
		big := strings.Repeat("x", 100<<10)
		r, err := c.Run(t.Context(), wire.Exec{
			Argv: []string{"bash", "-c", "echo ${#1} ${#2} ${#3}", "x", big, big, big}, TimeoutMS: 10_000, Collect: 1000,
		})
		if want := fmt.Sprintf("%d %d %d\n", len(big), len(big), len(big)); err != nil || string(r.Stdout) != want {
			t.Errorf("%q, %v", r.Stdout, err)
		}
	})
	// A parked child that kept another command's descriptors would keep its pipes open.
	t.Run("no descriptors of others", func(t *testing.T) {
		started, err := c.StartBackground(t.Context(), wire.Exec{Argv: []string{"bash", "-c", "cat >copied; echo ended >>copied"}, Background: true})
		if err != nil {
			t.Fatal(err)
		}
		enginetest.Sh(t, c, "true") // the next is parked while cat runs
		time.Sleep(200 * time.Millisecond)
		if err := c.Stdin(t.Context(), started.PID, []byte("text\n"), true); err != nil {
			t.Fatal(err)
		}
		for range 200 {
			if enginetest.Sh(t, c, "cat copied 2>/dev/null || true") == "text\nended" {
				return
			}
			time.Sleep(20 * time.Millisecond)
		}
		t.Error("a command whose input was closed still waits for its end")
	})
	t.Run("killed while parked", func(t *testing.T) {
		for range 2 {
			pid := behind(findParked)
			if len(strings.Fields(pid)) != 1 {
				t.Fatalf("parked: %q", pid)
			}
			enginetest.Sh(t, c, "true")
			behind("kill -9 $(" + findParked + ")")
			if got := enginetest.Sh(t, c, "echo fine"); got != "fine" {
				t.Errorf("the next command: %q", got)
			}
		}
	})
	t.Run("many at once", func(t *testing.T) {
		var wg sync.WaitGroup
		for i := range 20 {
			wg.Go(func() {
				r, err := c.Run(t.Context(), wire.Exec{Argv: []string{"echo", fmt.Sprint(i)}, TimeoutMS: 20_000, Collect: 1000})
				if err != nil || string(r.Stdout) != fmt.Sprintln(i) {
					t.Errorf("%d: %+v, %v", i, r, err)
				}
			})
		}
		wg.Wait()
	})
	t.Run("it is not counted", func(t *testing.T) {
		var stats wire.Stats
		for range 100 {
			if stats, err = c.Stats(t.Context()); err == nil && stats.Processes == 0 {
				return
			}
			time.Sleep(20 * time.Millisecond)
		}
		t.Errorf("an idle machine has %d processes, %v", stats.Processes, err)
	})
}
