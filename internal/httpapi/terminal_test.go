package httpapi

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"sandlot"
)

// terminal opens one and returns its path.
func (w *world) terminal(id, body string) string {
	w.t.Helper()
	a := w.do("POST", boxes+"/"+id+"/terminal", body)
	if a.status != http.StatusCreated {
		w.t.Fatalf("open a terminal: %d %s", a.status, a.body)
	}
	sid, _ := a.json(w.t)["session_id"].(string)
	return boxes + "/" + id + "/terminal/" + sid
}

func (w *world) dial(path string, header http.Header) (*websocket.Conn, *http.Response, error) {
	w.t.Helper()
	c, resp, err := websocket.Dial(w.t.Context(), "ws"+strings.TrimPrefix(w.url, "http")+path+"/ws", &websocket.DialOptions{HTTPHeader: header})
	if err == nil {
		c.SetReadLimit(4 << 20)
		w.t.Cleanup(func() { _ = c.CloseNow() })
	}
	return c, resp, err
}

func (w *world) socket(path string) *websocket.Conn {
	w.t.Helper()
	c, _, err := w.dial(path, bearer(w.token))
	if err != nil {
		w.t.Fatal(err)
	}
	return c
}

func bearer(token string) http.Header { return http.Header{"Authorization": {"Bearer " + token}} }

// drain reads a WebSocket to its end: the bytes, the text messages, the close code.
func drain(t *testing.T, c *websocket.Conn) (shown []byte, said []map[string]any, code websocket.StatusCode) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for {
		kind, b, err := c.Read(ctx)
		switch {
		case err != nil:
			return shown, said, websocket.CloseStatus(err)
		case kind == websocket.MessageBinary:
			shown = append(shown, b...)
		default:
			var m map[string]any
			if err := json.Unmarshal(b, &m); err != nil {
				t.Fatalf("%v: %q", err, b)
			}
			said = append(said, m)
		}
	}
}

// showing reads until the terminal has shown text.
func showing(t *testing.T, c *websocket.Conn, text string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	var seen []byte
	for !bytes.Contains(seen, []byte(text)) {
		_, b, err := c.Read(ctx)
		if err != nil {
			t.Fatalf("waiting for %q after %.500q: %v", text, seen, err)
		}
		seen = append(seen, b...)
	}
}

func TestTerminalSocketRefuses(t *testing.T) {
	w := newWorld(t, Limits{})
	id := w.create(`{}`)
	path := w.terminal(id, `{"cmd":["cat"]}`)
	foreign := otherTenant(t, w)
	_, reader := w.mint(`{"name":"r","scopes":["sandboxes:read"]}`)
	with := func(token string, more ...string) http.Header {
		h := bearer(token)
		for i := 0; i < len(more); i += 2 {
			h.Set(more[i], more[i+1])
		}
		return h
	}
	none := boxes + "/" + id + "/terminal/" + string(sandlot.NewID("trm"))
	for name, c := range map[string]struct {
		path   string
		header http.Header
		status int
		code   string
	}{
		"no token":           {path, nil, 401, "unauthorized"},
		"token in the query": {path + "/ws?token=" + w.token + "&x=", nil, 401, "unauthorized"},
		"foreign":            {path, with(foreign), 404, "not_found"},
		"reader":             {path, with(reader), 403, "forbidden"},
		"no such terminal":   {none, with(w.token), 404, "not_found"},
		"no id at all":       {boxes + "/" + id + "/terminal/..%2f..", with(w.token), 404, "not_found"},
		"another origin":     {path, with(w.token, "Origin", "https://evil.example"), 403, "forbidden"},
		"no origin's page":   {path, with(w.token, "Origin", "null"), 403, "forbidden"},
		"broken origin":      {path, with(w.token, "Origin", "http://%zz"), 403, "forbidden"},
	} {
		_, resp, err := w.dial(c.path, c.header)
		if err == nil || resp == nil {
			t.Fatalf("%s: %v", name, err)
		}
		body, _ := io.ReadAll(resp.Body)
		if a := (answer{resp.StatusCode, resp.Header, body}); a.status != c.status || a.code(t) != c.code {
			t.Errorf("%s: %d %s, want %d %s", name, a.status, body, c.status, c.code)
		}
	}
	for _, header := range [][]string{
		nil, {"Connection", "Upgrade", "Upgrade", "h2c"}, {"Connection", "Upgrade", "Upgrade", "websocket", "Sec-WebSocket-Version", "12", "Sec-WebSocket-Key", "eA=="},
	} {
		if a := w.do("GET", path+"/ws", "", header...); a.status != http.StatusBadRequest || a.code(t) != "invalid_request" {
			t.Errorf("%q: %d %s", header, a.status, a.body)
		}
	}
	// The controls: no origin, and the server's own.
	showTyped := func(h http.Header) {
		c, _, err := w.dial(path, h)
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Write(t.Context(), websocket.MessageBinary, []byte("hello\r")); err != nil {
			t.Fatal(err)
		}
		showing(t, c, "hello\r\nhello\r\n")
		_ = c.Close(websocket.StatusNormalClosure, "")
	}
	showTyped(with(w.token))
	showTyped(with(w.token, "Origin", w.url))
}

func TestTerminalSocketMessages(t *testing.T) {
	w := newWorld(t, Limits{})
	path := w.terminal(w.create(`{}`), `{"cmd":["bash","--norc","--noprofile"]}`)
	c := w.socket(path)
	say := func(kind websocket.MessageType, s string) {
		t.Helper()
		if err := c.Write(t.Context(), kind, []byte(s)); err != nil {
			t.Fatal(err)
		}
	}
	say(websocket.MessageText, `{"type":"resize","cols":70,"rows":20}`)
	say(websocket.MessageText, `{"type":"input","data":"stty size; echo a$((1+1))b\r"}`)
	showing(t, c, "20 70\r\na2b\r\n")
	// Mistakes are told, and nothing else happens.
	for _, s := range []string{`{"type":"resize","cols":0,"rows":20}`, `{"type":"dance"}`, `nonsense`, `{"type":"resize","cols":1e99}`, `[]`} {
		say(websocket.MessageText, s)
		for {
			kind, b, err := c.Read(t.Context())
			if err != nil {
				t.Fatalf("%s: %v", s, err)
			}
			if kind == websocket.MessageText {
				if !strings.Contains(string(b), `"type":"error"`) || !strings.Contains(string(b), `"code":"invalid_request"`) {
					t.Errorf("%s: %s", s, b)
				}
				break
			}
		}
	}
	say(websocket.MessageBinary, "exit 3\r")
	_, said, code := drain(t, c)
	if len(said) != 1 || said[0]["type"] != "exit" || said[0]["exit_code"] != 3.0 || code != websocket.StatusNormalClosure {
		t.Errorf("%v, closed with %d", said, code)
	}
	c = w.socket(path) // the late one too
	if _, said, code := drain(t, c); len(said) != 1 || said[0]["exit_code"] != 3.0 || code != websocket.StatusNormalClosure {
		t.Errorf("late: %v, closed with %d", said, code)
	}
	c = w.socket(w.terminal(w.create(`{}`), `{"cmd":["cat"]}`))
	_ = c.Write(t.Context(), websocket.MessageBinary, make([]byte, 200<<10))
	// The server does not read on, so that its kernel may end the connection before the close code is read.
	if shown, _, code := drain(t, c); len(shown) > 0 || code != websocket.StatusMessageTooBig && code != -1 {
		t.Errorf("a message too long: %d bytes, closed with %d", len(shown), code)
	}
}

// ADVERSARIAL 29: a stream does not outlive the right to it.
func TestRevokedTokenEndsStreams(t *testing.T) {
	w := newWorld(t, Limits{Beat: 100 * time.Millisecond})
	id := w.create(`{}`)
	path := w.terminal(id, `{"cmd":["cat"]}`)
	tid, secret := w.mint(`{"name":"soon-gone"}`)
	c, _, err := w.dial(path, bearer(secret))
	if err != nil {
		t.Fatal(err)
	}
	owner := w.token
	w.token = secret
	stream := w.events(t.Context(), "GET", path+"/stream", "")
	watch := w.events(t.Context(), "GET", boxes+"/"+id+"/files/watch", "")
	w.token = owner
	mine := w.socket(path)
	kept := make(chan []byte, 1000) // who does not read answers no ping
	go func() {
		defer close(kept)
		for {
			_, b, err := mine.Read(t.Context())
			if err != nil {
				return
			}
			kept <- b
		}
	}()
	for i := range 5 { // some beats
		if err := c.Write(t.Context(), websocket.MessageBinary, fmt.Appendf(nil, "still %d mine\r", i)); err != nil {
			t.Fatal(err)
		}
		showing(t, c, fmt.Sprintf("\nstill %d mine\r\n", i))
		time.Sleep(50 * time.Millisecond)
	}
	if a := w.do("DELETE", "/api/v1/tokens/"+tid, ""); a.status != http.StatusNoContent {
		t.Fatalf("%d %s", a.status, a.body)
	}
	_, said, code := drain(t, c)
	if len(said) != 1 || said[0]["type"] != "error" || code != websocket.StatusPolicyViolation {
		t.Errorf("%v, closed with %d", said, code)
	}
	for name, ch := range map[string]<-chan event{"stream": stream, "watch": watch} {
		var last event
		for e := range ch {
			last = e
		}
		if last.Type != "error" || last.Error["code"] != "unauthorized" {
			t.Errorf("%s: %+v", name, last)
		}
	}
	// Another's goes on, and so does the terminal.
	if err := mine.Write(t.Context(), websocket.MessageBinary, []byte("mine too\r")); err != nil {
		t.Fatal(err)
	}
	var seen []byte
	for b := range kept {
		if seen = append(seen, b...); bytes.Contains(seen, []byte("\nmine too\r\n")) {
			return
		}
	}
	t.Errorf("another's ended after %q", seen)
}

// ADVERSARIAL 54: a server that stops says so, and waits until it has.
func TestShutdownEndsTerminalSockets(t *testing.T) {
	w := newWorld(t, Limits{})
	path := w.terminal(w.create(`{}`), `{"cmd":["cat"]}`)
	var all []*websocket.Conn
	for range 10 {
		all = append(all, w.socket(path))
	}
	type end struct {
		said []map[string]any
		code websocket.StatusCode
	}
	ends := make(chan end, len(all))
	for _, c := range all {
		go func() {
			_, said, code := drain(t, c)
			ends <- end{said, code}
		}()
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if err := w.server.Shutdown(ctx); err != nil {
		t.Error(err)
	}
	if n := w.api.streams.Load(); n != 0 {
		t.Errorf("%d streams are left", n)
	}
	for range all {
		e := <-ends
		if len(e.said) != 1 || fmt.Sprint(e.said[0]["error"].(map[string]any)["code"]) != "shutting_down" || e.code != websocket.StatusGoingAway {
			t.Errorf("%v, closed with %d", e.said, e.code)
		}
	}
}

// ADVERSARIAL 56: a client that is gone without a word, or answers nothing, has no viewer and no goroutine after some beats.
func TestTerminalSocketOfTheDead(t *testing.T) {
	w := newWorld(t, Limits{Beat: 200 * time.Millisecond})
	id := w.create(`{}`)
	path := w.terminal(id, `{"cmd":"read x; yes"}`)
	var idle []net.Conn
	for range 3 {
		c, err := net.Dial("tcp", strings.TrimPrefix(w.url, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = c.Close() }()
		_, err = fmt.Fprintf(c, "GET %s/ws HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"+
			"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n", path, w.token)
		if err != nil {
			t.Fatal(err)
		}
		head := make([]byte, 12)
		if _, err := io.ReadFull(c, head); err != nil || string(head) != "HTTP/1.1 101" {
			t.Fatalf("%q, %v", head, err)
		}
		idle = append(idle, c)
	}
	_ = idle
	gone := func(what string) {
		t.Helper()
		for deadline := time.Now().Add(20 * time.Second); w.api.streams.Load() > 0; time.Sleep(20 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("%s: %d streams are open", what, w.api.streams.Load())
			}
		}
	}
	gone("clients that answer no ping")
	// One that reads nothing of a flood, though its kernel answers.
	c := w.socket(path)
	if err := c.Write(t.Context(), websocket.MessageBinary, []byte("\r")); err != nil {
		t.Fatal(err)
	}
	gone("a client that does not read")
	if _, _, err := c.Read(t.Context()); errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	a := w.do("GET", boxes+"/"+id+"/terminal", "")
	if !strings.Contains(string(a.body), `"viewers":0`) || !strings.Contains(string(a.body), `"running":true`) {
		t.Errorf("%s", a.body)
	}
}

func TestTerminalInputForms(t *testing.T) {
	w := newWorld(t, Limits{})
	id := w.create(`{}`)
	path := w.terminal(id, `{"cmd":["cat"],"cols":80,"rows":24}`)
	for body, want := range map[string]int{
		`{"data":"x"}`: 204, `{"data":"eA==","base64":true}`: 204, `{"base64":"eA=="}`: 204, `{"data":"x","base64":false}`: 204, `{}`: 204,
		`{"data":"x","base64":"eA=="}`: 400, `{"data":"x!","base64":true}`: 400, `{"base64":7}`: 400, `{"data":7}`: 400, `[]`: 400,
		`{"data":"` + strings.Repeat("x", 64<<10+1) + `"}`: 413,
	} {
		if a := w.do("POST", path+"/input", body); a.status != want {
			t.Errorf("%.60s: %d %s, want %d", body, a.status, a.body, want)
		}
	}
	for body, want := range map[string]int{`{"cols":1,"rows":1000}`: 204, `{"cols":0,"rows":10}`: 400, `{"cols":80}`: 400, `{"cols":1001,"rows":5}`: 400, `{"cols":"x","rows":1}`: 400} {
		if a := w.do("POST", path+"/resize", body); a.status != want {
			t.Errorf("%s: %d %s, want %d", body, a.status, a.body, want)
		}
	}
	if a := w.do("DELETE", path, ""); a.status != 204 {
		t.Errorf("close: %d %s", a.status, a.body)
	}
	for _, call := range [][3]string{{"POST", "/input", `{"data":"x"}`}, {"POST", "/resize", `{"cols":1,"rows":1}`}, {"GET", "/stream", ""}, {"DELETE", "", ""}} {
		if a := w.do(call[0], path+call[1], call[2]); a.status != 404 || a.code(t) != "not_found" {
			t.Errorf("%s of a closed terminal: %d %s", call[1], a.status, a.body)
		}
	}
}
