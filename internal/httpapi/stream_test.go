package httpapi

import (
	"bufio"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
)

// event is any event of any stream.
type event struct {
	Type       string         `json:"type"`
	Data       string         `json:"data"`
	DataBase64 string         `json:"data_base64"`
	ExitCode   *int           `json:"exit_code"`
	Path       string         `json:"path"`
	Error      map[string]any `json:"error"`
}

// events opens a stream; the channel is closed at its end.
func (w *world) events(ctx context.Context, method, path, body string) <-chan event {
	w.t.Helper()
	req, err := http.NewRequestWithContext(ctx, method, w.url+path, strings.NewReader(body))
	if err != nil {
		w.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+w.token)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		w.t.Fatal(err)
	}
	if resp.StatusCode != http.StatusOK || resp.Header.Get("Content-Type") != "text/event-stream" {
		b, _ := io.ReadAll(resp.Body)
		w.t.Fatalf("%d %s", resp.StatusCode, b)
	}
	ch := make(chan event, 1000)
	go func() {
		defer close(ch)
		defer func() { _ = resp.Body.Close() }()
		r := bufio.NewReader(resp.Body)
		for {
			line, err := r.ReadString('\n')
			if err != nil {
				return
			}
			if data, ok := strings.CutPrefix(line, "data: "); ok {
				var e event
				if json.Unmarshal([]byte(data), &e) != nil {
					e.Type = "not JSON: " + data
				}
				ch <- e
			}
		}
	}()
	return ch
}

func next(t *testing.T, ch <-chan event) event {
	t.Helper()
	select {
	case e, ok := <-ch:
		if !ok {
			t.Fatal("the stream has ended")
		}
		return e
	case <-time.After(10 * time.Second):
		t.Fatal("no event")
	}
	return event{}
}

// TestExecStreamKeepsBytes: characters are never split, other bytes survive as base64.
func TestExecStreamKeepsBytes(t *testing.T) {
	w := newWorld(t, Limits{})
	id := w.create(`{}`)
	// a four-byte character in four writes, two bytes that are no text, an end in the middle of a character
	cmd := `for b in '\360' '\237' '\246' '\212' ; do printf "$b"; sleep 0.05; done; sleep 0.1; printf '\377\376'; sleep 0.1; printf 'z\303'; exit 3`
	body, _ := json.Marshal(map[string]any{"cmd": cmd, "stream": true})
	var all []byte
	var exit *int
	for e := range w.events(t.Context(), "POST", boxes+"/"+id+"/exec", string(body)) {
		switch e.Type {
		case "stdout":
			if strings.ContainsRune(e.Data, '\uFFFD') {
				t.Errorf("a character was split: %q", e.Data)
			}
			raw, err := base64.StdEncoding.DecodeString(e.DataBase64)
			if err != nil {
				t.Error(err)
			}
			all = append(append(all, e.Data...), raw...)
		case "exit":
			exit = e.ExitCode
		default:
			t.Errorf("%+v", e)
		}
	}
	if string(all) != "\U0001F98A\xff\xfez\xc3" || exit == nil || *exit != 3 {
		t.Errorf("%q, exit %v", all, exit)
	}
}

// TestClientGoesAway: adversarial item 56 in part. The foreground command ends, and nothing is left here.
func TestClientGoesAway(t *testing.T) {
	w := newWorld(t, Limits{Beat: 100 * time.Millisecond})
	id := w.create(`{}`)
	w.do("POST", boxes+"/"+id+"/exec", `{"cmd":"true"}`)
	http.DefaultClient.CloseIdleConnections()
	base := runtime.NumGoroutine()
	mark := fmt.Sprintf("86%d", time.Now().UnixNano()%1_000_000)
	var wg sync.WaitGroup
	for range 10 {
		wg.Go(func() {
			ctx, cancel := context.WithCancel(t.Context())
			ch := w.events(ctx, "POST", boxes+"/"+id+"/exec", `{"cmd":"echo up; sleep `+mark+`","stream":true}`)
			next(t, ch)
			cancel()
			for range ch {
			}
		})
		wg.Go(func() {
			ctx, cancel := context.WithCancel(t.Context())
			ch := w.events(ctx, "GET", boxes+"/"+id+"/files/watch", "")
			if e := next(t, ch); e.Type != "ready" {
				t.Errorf("%+v", e)
			}
			cancel()
			for range ch {
			}
		})
	}
	wg.Wait()
	http.DefaultClient.CloseIdleConnections()
	deadline := time.Now().Add(10 * time.Second)
	for runtime.NumGoroutine() > base+8 && time.Now().Before(deadline) {
		time.Sleep(20 * time.Millisecond)
	}
	if n := runtime.NumGoroutine(); n > base+8 {
		buf := make([]byte, 1<<20)
		t.Errorf("%d goroutines, %d before\n%.6000s", n, base, buf[:runtime.Stack(buf, true)])
	}
	for time.Now().Before(deadline) {
		a := w.do("POST", boxes+"/"+id+"/exec", `{"cmd":"pgrep -f '[s]leep `+mark+`' | wc -l"}`)
		if out, _ := a.json(t)["stdout"].(string); strings.TrimSpace(out) == "0" {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
	t.Error("commands outlive their clients")
}

// TestStreamsOfStalledReaders: a client that reads nothing is gone after a heartbeat; memory stays bounded.
func TestStreamsOfStalledReaders(t *testing.T) {
	w := newWorld(t, Limits{Beat: 300 * time.Millisecond})
	id := w.create(`{}`)
	c, err := net.Dial("tcp", strings.TrimPrefix(w.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	body := `{"cmd":"yes","stream":true}`
	_, err = fmt.Fprintf(c, "POST %s/%s/exec HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Length: %d\r\n\r\n%s", boxes, id, w.token, len(body), body)
	if err != nil {
		t.Fatal(err)
	}
	deadline := time.Now().Add(15 * time.Second)
	for time.Now().Before(deadline) {
		if strings.Contains(w.log.String(), `"op":"exec"`) { // logged when it has ended
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
	t.Error("a stream whose reader stalls does not end")
}

// TestHeartbeat: a silent stream shows signs of life.
func TestHeartbeat(t *testing.T) {
	w := newWorld(t, Limits{Beat: 100 * time.Millisecond})
	id := w.create(`{}`)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	req, _ := http.NewRequestWithContext(ctx, "POST", w.url+boxes+"/"+id+"/exec", strings.NewReader(`{"cmd":"sleep 30","stream":true}`))
	req.Header.Set("Authorization", "Bearer "+w.token)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	if line, _ := bufio.NewReader(resp.Body).ReadString('\n'); line != ": ping\n" {
		t.Errorf("%q", line)
	}
}

// TestShutdownEndsStreams: adversarial item 54 in part. Streams end with a typed event, sandboxes run on.
func TestShutdownEndsStreams(t *testing.T) {
	w := newWorld(t, Limits{})
	id := w.create(`{}`)
	var streams []<-chan event
	for range 20 {
		ch := w.events(t.Context(), "POST", boxes+"/"+id+"/exec", `{"cmd":"echo up; sleep 100","stream":true}`)
		next(t, ch)
		streams = append(streams, ch)
	}
	slow := make(chan answer, 1)
	go func() { slow <- w.do("POST", boxes+"/"+id+"/exec", `{"cmd":"sleep 100","timeout_s":200}`) }()
	soon := make(chan answer, 1)
	go func() { soon <- w.do("POST", boxes+"/"+id+"/exec", `{"cmd":"sleep 1; echo done"}`) }()
	time.Sleep(300 * time.Millisecond)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if err := w.server.Shutdown(ctx); err != nil {
		t.Error(err)
	}
	for _, ch := range streams {
		e := next(t, ch)
		if e.Type != "error" || e.Error["code"] != "shutting_down" || e.Error["request_id"] == "" {
			t.Errorf("%+v", e)
		}
	}
	if a := <-soon; a.status != http.StatusOK || !strings.Contains(string(a.body), "done") {
		t.Errorf("a command that ends within the grace: %d %s", a.status, a.body)
	}
	if a := <-slow; a.status != http.StatusServiceUnavailable || a.code(t) != "shutting_down" {
		t.Errorf("the command in the foreground: %d %s", a.status, a.body)
	}
	alive, err := w.store.Alive(t.Context())
	if err != nil || len(alive) != 1 {
		t.Errorf("%d sandboxes run on, %v", len(alive), err)
	}
}

func TestStreamCap(t *testing.T) {
	w := newWorld(t, Limits{Streams: 2})
	id := w.create(`{}`)
	for range 2 {
		next(t, w.events(t.Context(), "GET", boxes+"/"+id+"/files/watch", ""))
	}
	if a := w.do("GET", boxes+"/"+id+"/files/watch", ""); a.status != http.StatusTooManyRequests || a.code(t) != "rate_limited" {
		t.Errorf("%d %s", a.status, a.body)
	}
	if a := w.do("GET", boxes+"/"+id, ""); a.status != http.StatusOK {
		t.Errorf("other calls: %d", a.status)
	}
}
