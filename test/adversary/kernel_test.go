package adversary

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"sandlot/test/live"
)

// cellText runs code in a context and returns its last value as text, or the error's name.
func cellText(t testing.TB, b live.Box, id, code string) (string, error) {
	var a struct {
		Results []map[string]any
		Error   *struct{ Name, Value string }
	}
	err := b.Call(t.Context(), http.MethodPost, "/"+b.ID+"/run-code", map[string]any{"code": code, "context_id": id, "timeout_s": 60}, &a)
	if err != nil {
		return "", err
	}
	if a.Error != nil {
		return a.Error.Name, nil
	}
	if len(a.Results) == 0 {
		return "", nil
	}
	return fmt.Sprint(a.Results[0]["text/plain"]), nil
}

// SandboxUser/HostDoS; item 44, of a kernel. Cells whose output or results nobody reads are held nowhere, and keep no
// other context waiting; when their readers go they are interrupted, and their state is kept.
func TestKernelFlood(t *testing.T) {
	b := live.New(t, nil)
	if got, err := cellText(t, b, "other", "x = 1; x"); got != "1" {
		t.Fatal("control:", got, err)
	}
	before := b.RSS()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for i, code := range []string{
		"state = 7\nimport os\nwhile True: os.write(1, b'x' * 65536)",
		"state = 7\nwhile True: display('y' * 100000)",
	} {
		req := fmt.Sprintf(`{"code":%q,"context_id":"flood%d","stream":true,"timeout_s":100}`, code, i)
		resp, err := b.Request(ctx, http.MethodPost, "/"+b.ID+"/run-code", strings.NewReader(req))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if _, err := io.ReadFull(resp.Body, make([]byte, 64<<10)); err != nil { // it has begun, and is not read any more
			t.Fatal("control: no output:", err)
		}
	}
	most := 0.0
	for begun := time.Now(); time.Since(begun) < 3*time.Second; time.Sleep(100 * time.Millisecond) {
		most = max(most, b.RSS())
		if got, err := cellText(t, b, "other", "x"); got != "1" {
			t.Fatal("another context meanwhile:", got, err)
		}
	}
	if most-before > 64 {
		t.Errorf("two readers that stalled cost the server %.0f MB", most-before)
	}
	cancel()
	for i := range 2 {
		if got, err := cellText(t, b, fmt.Sprint("flood", i), "state"); got != "7" {
			t.Errorf("the state after flood %d: %q, %v", i, got, err)
		}
	}
}

// ApiUser/HostDoS; item 46, of kernels. Contexts that come, die and go, and cells whose clients leave at once, leave
// nothing, in the server or inside.
func TestKernelStorm(t *testing.T) {
	b := live.New(t, map[string]any{"memory_mb": 2048})
	if got, err := cellText(t, b, "first", "1"); got != "1" {
		t.Fatal("control:", got, err)
	}
	before := weigh(t, b.Server)
	fds := b.Out(t, "ls /proc/1/fd | wc -l", live.Root)
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for j := range 8 {
				id := fmt.Sprintf("s%d-%d", i, j)
				if got, err := cellText(t, b, id, "import os; os._exit(1)"); got != "KernelDied" {
					t.Errorf("%s: %q, %v", id, got, err)
				}
				if got, err := cellText(t, b, id, "1+1"); got != "2" {
					t.Errorf("%s: %q, %v", id, got, err)
				}
				if _, err := b.Do(t.Context(), http.MethodDelete, "/contexts/"+id, nil); err != nil {
					t.Error(err)
				}
			}
		})
		wg.Go(func() {
			for range 50 {
				ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
				if resp, err := b.Request(ctx, http.MethodPost, "/"+b.ID+"/run-code", strings.NewReader(`{"code":"while True: pass","context_id":"first","stream":true}`)); err == nil {
					_, _ = io.Copy(io.Discard, resp.Body)
					resp.Body.Close()
				}
				cancel()
			}
		})
	}
	wg.Wait()
	if got, err := cellText(t, b, "first", "1+1"); got != "2" {
		t.Errorf("after the storm: %q, %v", got, err)
	}
	answers(t, b, "after the storm")
	settles(t, b.Server, before)
	live.Eventually(t, 20*time.Second, "the agent has as many descriptors open as before, "+fds, func() bool {
		was, _ := strconv.Atoi(fds)
		n, err := strconv.Atoi(b.Out(t, "ls /proc/1/fd | wc -l", live.Root))
		return err == nil && n <= was+8
	})
}
