package e2e

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"sandlot/internal/devserver"
	"sandlot/internal/testenv"
	"sandlot/test/live"
)

type page struct {
	Sandboxes []devserver.Sandbox
	Next      string `json:"next_cursor"`
}

func list(t *testing.T, query string) []string {
	t.Helper()
	var ids []string
	for cursor := ""; ; {
		var p page
		if err := live.Server(t).Call(t.Context(), http.MethodGet, "?"+query+cursor, nil, &p); err != nil {
			t.Fatal("list:", err)
		}
		for _, sb := range p.Sandboxes {
			ids = append(ids, sb.ID)
		}
		if p.Next == "" {
			return ids
		}
		cursor = "&cursor=" + p.Next
	}
}

func TestList(t *testing.T) {
	t.Parallel()
	red := live.New(t, map[string]any{"metadata": map[string]string{"list-test": "yes", "color": "red"}})
	blue := live.New(t, map[string]any{"metadata": map[string]string{"list-test": "yes", "color": "blue"}})
	if got := list(t, "metadata.list-test=yes&limit=1"); !slices.Equal(got, []string{blue.ID, red.ID}) {
		t.Errorf("newest first, in two pages: %v", got)
	}
	if got := list(t, "metadata.list-test=yes&metadata.color=red"); !slices.Equal(got, []string{red.ID}) {
		t.Errorf("red ones: %v", got)
	}
	if err := red.Delete(t.Context(), red.ID); err != nil {
		t.Fatal(err)
	}
	if got := list(t, "metadata.list-test=yes"); !slices.Equal(got, []string{blue.ID}) {
		t.Errorf("after the delete: %v", got)
	}
	if got := list(t, "all=1&metadata.list-test=yes"); !slices.Equal(got, []string{blue.ID, red.ID}) {
		t.Errorf("with ended ones: %v", got)
	}
	_, err := red.Try(t, "true")
	refused(t, err, http.StatusConflict, "sandbox_not_running")
}

// refused checks that err is an answer with this status and code.
func refused(t *testing.T, err error, status int, code string) {
	t.Helper()
	var se *devserver.StatusError
	if !errors.As(err, &se) || se.Status != status || se.Code != code {
		t.Errorf("want %d %s, got %v", status, code, err)
	}
}

func TestIdempotencyKey(t *testing.T) {
	t.Parallel()
	s := live.Server(t)
	create := func() devserver.Sandbox {
		var sb devserver.Sandbox
		resp, err := s.Request(t.Context(), http.MethodPost, "", body(`{"template":"base"}`), "Idempotency-Key", "e2e-key")
		if err != nil {
			t.Fatal(err)
		}
		decode(t, resp, &sb)
		return sb
	}
	first, second := create(), create()
	if first.ID == "" || first.ID != second.ID {
		t.Errorf("two sandboxes for one key: %s and %s", first.ID, second.ID)
	}
	if err := s.Delete(t.Context(), first.ID); err != nil {
		t.Error(err)
	}
}

// The idle one runs no command, the busy one does all the time: both have the shortest times there are.
func TestEndsByTime(t *testing.T) {
	t.Parallel()
	idle := live.New(t, map[string]any{"idle_timeout_s": 30})
	old := live.New(t, map[string]any{"lifetime_s": 30})
	kept := live.New(t, map[string]any{"idle_timeout_s": 30, "env": map[string]string{"GREETING": "hi"}})
	begun := time.Now()
	reason := func(b live.Box) string {
		sb, err := b.Get(t.Context(), b.ID)
		if err != nil {
			t.Fatal(err)
		}
		return sb.Reason
	}
	for reason(idle) == "" || reason(old) == "" {
		if since := time.Since(begun); since > time.Minute {
			t.Fatal("they still run after", since)
		}
		kept.Out(t, "echo $GREETING")
		_, _ = old.Try(t, "true") // activity does not prolong a life
		time.Sleep(time.Second)
	}
	if since := time.Since(begun); since < 25*time.Second {
		t.Error("ended early, after", since)
	}
	if got := reason(idle); got != "idle_timeout" {
		t.Errorf("the idle one ended for %q", got)
	}
	if got := reason(old); got != "lifetime" {
		t.Errorf("the old one ended for %q", got)
	}
	if got := reason(kept); got != "" {
		t.Errorf("the busy one ended for %q", got)
	}
	if got := idle.Logs(t); !slices.Contains(got, "stopped") {
		t.Errorf("the idle one's events: %v", got)
	}
	var m struct {
		Samples []struct {
			CPUMS       int64 `json:"cpu_ms"`
			MemoryBytes int64 `json:"memory_bytes"`
			Processes   int
			DiskTotal   int64 `json:"disk_total_bytes"`
		}
	}
	if err := kept.Call(t.Context(), http.MethodGet, "/"+kept.ID+"/metrics", nil, &m); err != nil {
		t.Fatal(err)
	}
	if n := len(m.Samples); n < 2 || m.Samples[n-1].MemoryBytes == 0 || m.Samples[n-1].CPUMS == 0 || m.Samples[n-1].DiskTotal < 4<<30 {
		t.Errorf("half a minute's samples: %+v", m.Samples)
	}
}

func TestTimeoutIsSetAnew(t *testing.T) {
	t.Parallel()
	b := live.New(t, map[string]any{"lifetime_s": 60})
	var sb struct {
		IdleTimeoutS int       `json:"idle_timeout_s"`
		ExpiresAt    time.Time `json:"expires_at"`
	}
	if err := b.Call(t.Context(), http.MethodPost, "/"+b.ID+"/timeout", map[string]int{"idle_timeout_s": 600, "lifetime_s": 7200}, &sb); err != nil {
		t.Fatal(err)
	}
	if left := time.Until(sb.ExpiresAt); sb.IdleTimeoutS != 600 || left < 7000*time.Second {
		t.Errorf("%+v, %s left", sb, left)
	}
}

// Not parallel: it stops the server under everything else.
func TestRestarts(t *testing.T) {
	s := live.Server(t)
	b := live.New(t, map[string]any{"env": map[string]string{"KEPT": "yes"}, "metadata": map[string]string{"restart": "1"}})
	b.Put(t, "kept.txt", []byte("precious"))
	pid := b.Out(t, "nohup sleep 1000 >/dev/null 2>&1 & echo $!")
	check := func(when string) {
		t.Helper()
		if got := b.Out(t, "cat kept.txt; echo \" $KEPT\"; kill -0 "+pid+" && echo alive"); got != "precious yes\nalive" {
			t.Errorf("after %s the sandbox says %q", when, got)
		}
		if got := list(t, "metadata.restart=1"); !slices.Equal(got, []string{b.ID}) {
			t.Errorf("after %s the list is %v", when, got)
		}
		if again := live.New(t, nil); again.Out(t, "echo new") != "new" {
			t.Errorf("after %s a new sandbox does not answer", when)
		}
	}
	check("nothing")

	// A stream that is open at the stop ends with an event that says so.
	ended := make(chan live.Event, 1)
	resp, err := s.Request(t.Context(), http.MethodPost, "/"+b.ID+"/exec", body(`{"cmd":"echo begun; sleep 60","stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	begun := make(chan struct{})
	go func() {
		defer resp.Body.Close()
		var last live.Event
		_ = live.Events(resp.Body, func(e live.Event) bool {
			if e.Type == "stdout" {
				close(begun)
			}
			last = e
			return true
		})
		ended <- last
	}()
	<-begun
	if err := syscall.Kill(s.PID(), syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := s.Wait(); err != nil {
		t.Error("the server's exit after SIGTERM:", err)
	}
	if e := <-ended; e.Type != "error" || e.Error.Code != "shutting_down" {
		t.Errorf("the open stream ended with %+v", e)
	}
	if err := s.Restart(context.Background()); err != nil {
		t.Fatal(err)
	}
	check("SIGTERM and a start")

	half := s.APIPID()
	if half == 0 {
		t.Fatal("no HTTP half is found")
	}
	if err := syscall.Kill(half, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	live.Eventually(t, 30*time.Second, "another HTTP half answers", func() bool {
		now := s.APIPID()
		if now == 0 || now == half {
			return false
		}
		_, err := s.Get(t.Context(), b.ID)
		return err == nil
	})
	check("kill -9 of the HTTP half")

	// The new half's namespace was copied when the sandbox was there: that must not keep its disk.
	if err := s.Delete(t.Context(), b.ID); err != nil {
		t.Fatal(err)
	}
	live.Eventually(t, 10*time.Second, "nothing of a deleted sandbox is on the host", func() bool {
		return !slices.ContainsFunc(testenv.Census(t, s.NodeDir()), func(line string) bool { return strings.Contains(line, b.ID) })
	})
}
