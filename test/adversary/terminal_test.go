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

	"github.com/coder/websocket"

	"sandlot/test/live"
)

func openTerminal(t *testing.T, b live.Box, in map[string]any) (path string) {
	t.Helper()
	var s struct {
		SessionID string `json:"session_id"`
	}
	if err := b.Call(t.Context(), http.MethodPost, "/"+b.ID+"/terminal", in, &s); err != nil {
		t.Fatal("open a terminal:", err)
	}
	return "/" + b.ID + "/terminal/" + s.SessionID
}

func connectTerminal(ctx context.Context, b live.Box, path string) (*websocket.Conn, error) {
	url := "ws" + strings.TrimPrefix(b.URL, "http") + "/api/v1/projects/default/sandboxes" + path + "/ws"
	c, _, err := websocket.Dial(ctx, url, &websocket.DialOptions{HTTPHeader: http.Header{"Authorization": {"Bearer " + b.Token}}})
	return c, err
}

// SandboxUser/HostDoS; item 44, of terminals. Viewers that stall before a flood cost the server little and hold nothing up:
// not the terminal, not its other viewers, not the commands beside it.
func TestTerminalFlood(t *testing.T) {
	b := live.New(t, nil)
	answers(t, b, "before the flood")
	before := b.RSS()
	path := openTerminal(t, b, map[string]any{"cmd": "read x; exec cat /dev/zero"})
	for range 8 {
		c, err := connectTerminal(t.Context(), b, path)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = c.CloseNow() }()
		resp, err := b.Request(t.Context(), http.MethodGet, path+"/stream", nil)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
	}
	reader, err := connectTerminal(t.Context(), b, path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = reader.CloseNow() }()
	reader.SetReadLimit(4 << 20)
	if err := reader.Write(t.Context(), websocket.MessageBinary, []byte("\r")); err != nil {
		t.Fatal(err)
	}
	most, read := 0.0, 0
	for read < 32<<20 { // far more than all buffers on the way hold
		_, p, err := reader.Read(t.Context())
		if err != nil {
			t.Fatal("the viewer that reads:", err)
		}
		if read += len(p); read%(8<<20) < len(p) {
			most = max(most, b.RSS())
		}
	}
	most = max(most, b.RSS())
	if most-before > 64 {
		t.Errorf("sixteen viewers that stalled cost the server %.0f MB", most-before)
	}
	answers(t, b, "in the flood")
	if err := b.Call(t.Context(), http.MethodDelete, path, nil, nil); err != nil {
		t.Error("close:", err)
	}
	if got := b.Out(t, "pgrep -fc '^cat /dev/zero' || true"); got != "0" {
		t.Errorf("%s programs outlive their terminal", got)
	}
}

// ApiUser/HostDoS; item 46, of terminals. Those that cannot start, floods of sizes and of viewers that leave at once, and
// terminals that are closed while all that happens, leave nothing in the server or inside.
func TestTerminalStorm(t *testing.T) {
	b := live.New(t, nil)
	steady := openTerminal(t, b, map[string]any{"cmd": []string{"cat"}})
	if c, err := connectTerminal(t.Context(), b, steady); err != nil {
		t.Fatal(err)
	} else {
		_ = c.CloseNow()
	}
	answers(t, b, "before the storm")
	before := weigh(t, b.Server)
	inside := func() (fds, processes int) {
		words := strings.Fields(b.Out(t, "ls /proc/1/fd | wc -l; pgrep -c . || true", live.Root))
		if len(words) == 2 {
			fds, _ = strconv.Atoi(words[0])
			processes, _ = strconv.Atoi(words[1])
		}
		return fds, processes
	}
	wasFDs, wasProcesses := inside()
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for range 250 {
				err := b.Call(t.Context(), http.MethodPost, "/"+b.ID+"/terminal", map[string]any{"cmd": []string{"no-such-program"}}, nil)
				refused(t, "a program that does not exist", err, 400)
			}
		})
		wg.Go(func() {
			for j := range 250 {
				size := map[string]any{"cols": 1 + j, "rows": 1000 - j}
				if err := b.Call(t.Context(), http.MethodPost, steady+"/resize", size, nil); err != nil {
					t.Error("resize:", err)
				}
			}
		})
		wg.Go(func() {
			for j := range 50 {
				ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
				if j%2 == 0 {
					if c, err := connectTerminal(ctx, b, steady); err != nil {
						refused(t, "connect", err, 429)
					} else {
						_ = c.CloseNow()
					}
				} else if resp, err := b.Request(ctx, http.MethodGet, steady+"/stream", nil); err == nil {
					resp.Body.Close()
				}
				cancel()
			}
		})
		wg.Go(func() {
			for j := range 20 {
				path := openTerminal(t, b, map[string]any{"cmd": fmt.Sprintf("(trap '' HUP; sleep %d) & yes", 7000+100*i+j)})
				ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
				if resp, err := b.Request(ctx, http.MethodGet, path+"/stream", nil); err == nil {
					_, _ = io.CopyN(io.Discard, resp.Body, 10_000)
					resp.Body.Close()
				}
				cancel()
				if err := b.Call(t.Context(), http.MethodDelete, path, nil, nil); err != nil {
					t.Error("close:", err)
				}
			}
		})
	}
	wg.Wait()
	answers(t, b, "after the storm")
	settles(t, b.Server, before)
	live.Eventually(t, 20*time.Second, fmt.Sprintf("the agent has %d descriptors open and the sandbox %d processes, as before", wasFDs, wasProcesses), func() bool {
		fds, processes := inside()
		return fds > 0 && fds <= wasFDs+8 && processes <= wasProcesses
	})
	var list struct {
		Terminals []struct{ Viewers int }
	}
	live.Eventually(t, 20*time.Second, "one terminal, nobody looks at it", func() bool {
		err := b.Call(t.Context(), http.MethodGet, "/"+b.ID+"/terminal", nil, &list)
		return err == nil && len(list.Terminals) == 1 && list.Terminals[0].Viewers == 0
	})
}
