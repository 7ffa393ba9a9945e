package guest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"runtime"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"sandlot"
	"sandlot/internal/wire"
)

// fake is an agent that answers every stream's first request with bytes of its own, for as long as more
// returns true.
func fake(t *testing.T, answer string, more func(w io.Writer) bool) *Client {
	t.Helper()
	c := New(func(context.Context) (net.Conn, error) {
		ours, theirs := net.Pipe()
		go func() {
			defer func() { _ = theirs.Close() }()
			go func() { _, _ = io.Copy(io.Discard, theirs) }()
			time.Sleep(time.Millisecond) // let the request go out
			if _, err := io.WriteString(theirs, answer); err != nil {
				return
			}
			for more != nil && more(theirs) {
			}
		}()
		return ours, nil
	})
	t.Cleanup(c.Close)
	return c
}

func flood(chunk string) func(io.Writer) bool {
	return func(w io.Writer) bool { _, err := io.WriteString(w, chunk); return err == nil }
}

func respond(status int, body string) string {
	return fmt.Sprintf("HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s", status, len(body), body)
}

func frame(kind byte, payload string) string {
	return string(wire.AppendFrame(nil, kind, []byte(payload)))
}

const head = "HTTP/1.1 200 OK\r\n\r\n" // a body until the stream's end

// ADVERSARIAL 11: whatever an agent that was replaced answers, every call ends soon, in bounded memory, with
// sandbox_unhealthy.
func TestHostileAgent(t *testing.T) {
	log.SetOutput(io.Discard) // net/http tells of unasked-for bytes
	started := frame(wire.FrameStarted, `{"pid":7}`)
	answers := []struct {
		name   string
		answer string
		more   func(io.Writer) bool
	}{
		{"closes", "", nil},
		{"garbage", "\x00\x01\x02 no http\r\n\r\n", nil},
		{"endless garbage", "", flood(strings.Repeat("x", 4096))},
		{"huge headers", "HTTP/1.1 200 OK\r\n", flood("X-A: " + strings.Repeat("a", 1000) + "\r\n")},
		{"endless informational answers", "", flood("HTTP/1.1 103 Early Hints\r\nX: y\r\n\r\n")},
		{"switches protocols", "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", nil},
		{"redirects", "HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1/\r\nContent-Length: 0\r\n\r\n", nil},
		{"impossible length", "HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n", nil},
		{"negative length", "HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n", nil},
		{"two lengths", "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n12345", nil},
		{"chunk bomb", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n", nil},
		{"short body", "HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{", nil},
		{"endless body", head, flood(strings.Repeat("[", 1<<16))},
		{"empty body", respond(200, ""), nil},
		{"deep JSON", respond(200, strings.Repeat("[", 1<<20)), nil},
		{"wrong JSON", respond(200, `{"entries":7,"processes":"x","pid":{}}`), nil},
		{"null", respond(200, "null"), nil},
		{"numbers", respond(200, `{"processes":-1,"pid":-1,"id":"../../x","type":"evil","size":-1}`), nil},
		{"array of processes", respond(200, `[{"pid":0},{"pid":99999999}]`), nil},
		{"error without a code", respond(500, `{"message":"x"}`), nil},
		{"error with the host's code", respond(400, `{"code":"unauthorized","message":"x"}`), nil},
		{"error that is no JSON", respond(400, `<html>`), nil},
		{"endless error", "HTTP/1.1 500 X\r\n\r\n", flood(strings.Repeat("e", 1<<16))},
		{"frame bomb", head + "\x01\xff\xff\xff\xff", nil},
		{"cut frame", head + started[:7], nil},
		{"exit first", respond(200, frame(wire.FrameExit, `{}`)), nil},
		{"no exit", respond(200, started+frame(wire.FrameStdout, "x")), nil},
		{"two starts", respond(200, started+started), nil},
		{"unknown frame", respond(200, started+frame(99, "x")), nil},
		{"impossible pid", respond(200, frame(wire.FrameStarted, `{"pid":-7}`)), nil},
		{"impossible log", respond(200, frame(wire.FrameStarted, `{"pid":7,"log_path":"/a\u001b[31m"}`)), nil},
		{"impossible exit", respond(200, started+frame(wire.FrameExit, `{"exit_code":-3}`)), nil},
		{"impossible signal", respond(200, started+frame(wire.FrameExit, `{"signal":"<script>"}`)), nil},
		{"valid then garbage", head + started, flood(strings.Repeat("garbage!", 8192))},
		{"endless output", head + started, flood(frame(wire.FrameStdout, strings.Repeat("o", 1<<18)))},
		{"error frame that is none", respond(200, started+frame(wire.FrameError, `{"code":"internal"}`)), nil},
	}
	exec := wire.Exec{Argv: []string{"true"}, Collect: 1 << 20, TimeoutMS: 1000}
	at := At{Path: "x"}
	calls := map[string]func(ctx context.Context, c *Client) error{
		"health":     func(ctx context.Context, c *Client) error { _, err := c.Health(ctx); return err },
		"stats":      func(ctx context.Context, c *Client) error { _, err := c.Stats(ctx); return err },
		"run":        func(ctx context.Context, c *Client) error { _, err := c.Run(ctx, exec); return err },
		"background": func(ctx context.Context, c *Client) error { _, err := c.StartBackground(ctx, exec); return err },
		"processes":  func(ctx context.Context, c *Client) error { _, err := c.Processes(ctx); return err },
		"cell":       func(ctx context.Context, c *Client) error { _, err := c.RunCell(ctx, hostileCell); return err },
		"contexts":   func(ctx context.Context, c *Client) error { _, err := c.Contexts(ctx); return err },
		"context":    func(ctx context.Context, c *Client) error { _, err := c.RestartContext(ctx, "x"); return err },
		"list":       func(ctx context.Context, c *Client) error { _, err := c.List(ctx, at, "", 0); return err },
		"stat":       func(ctx context.Context, c *Client) error { _, err := c.Stat(ctx, at); return err },
		"content": func(ctx context.Context, c *Client) error {
			r, err := c.Content(ctx, at, "")
			if err == nil {
				var n int64
				if n, err = io.CopyN(io.Discard, r, 8<<20); n == 8<<20 {
					err = nonsense("TestContentLimit has the rest")
				} else if errors.Is(err, io.EOF) {
					err = nil
				}
				_ = r.Close()
			}
			return err
		},
		"archive": func(ctx context.Context, c *Client) error {
			r, err := c.ArchiveGet(ctx, at, true)
			if err == nil {
				_, err = io.Copy(io.Discard, r)
				_ = r.Close()
			}
			return err
		},
		"put": func(ctx context.Context, c *Client) error { return c.PutContent(ctx, at, strings.NewReader("x"), 1) },
		"watch": func(ctx context.Context, c *Client) error {
			w, err := c.Watch(ctx, at, false)
			for err == nil {
				_, _, err = w.Next()
			}
			if w != nil {
				w.Close()
			}
			return err
		},
	}
	// What is a proper answer to some calls.
	fine := map[string]bool{
		"null/health": true, "null/stats": true, "null/processes": true, "null/list": true, "null/contexts": true,
		"wrong JSON/health": true, "numbers/list": true,
	}
	goroutines := runtime.NumGoroutine()
	runtime.GC()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for _, a := range answers {
		for name, call := range calls {
			key := a.name + "/" + name
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			began := time.Now()
			err := call(ctx, fake(t, a.answer, a.more))
			cancel()
			// A body is a file's bytes, or a success that nobody reads, to some calls.
			proper := fine[key] || (name == "content" || name == "put") && strings.HasPrefix(a.answer, "HTTP/1.1 200 ")
			if err != nil && sandlot.ErrorCode(err) != sandlot.CodeSandboxUnhealthy || err == nil && !proper {
				t.Errorf("%s: %v", key, err)
			}
			if err != nil && (len(err.Error()) > 2000 || strings.ContainsAny(err.Error(), "\x00\x1b\n")) {
				t.Errorf("%s: the error's text: %.3000q", key, err.Error())
			}
			if took := time.Since(began); took > 10*time.Second {
				t.Errorf("%s took %s", key, took)
			}
		}
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > 32<<20 {
		t.Errorf("the heap grew by %d bytes", grown)
	}
	for end := time.Now().Add(5 * time.Second); runtime.NumGoroutine() > goroutines+10; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Errorf("%d goroutines, were %d", runtime.NumGoroutine(), goroutines)
			break
		}
	}
}

func TestContentLimit(t *testing.T) {
	c := fake(t, head, flood(strings.Repeat("x", 1<<16)))
	d, _, err := c.download(t.Context(), request{method: "GET", path: wire.PathContent}, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = d.Close() }()
	n, err := io.Copy(io.Discard, d)
	if n > 1<<20 || sandlot.ErrorCode(err) != sandlot.CodeSandboxUnhealthy {
		t.Errorf("%d bytes, %v", n, err)
	}
}

func TestErrorMapping(t *testing.T) {
	huge := strings.Repeat("é", 100_000)
	for _, tt := range []struct {
		body string
		code sandlot.Code
		msg  string
	}{
		{`{"code":"not_found","message":"x does not exist"}`, sandlot.CodeNotFound, "x does not exist"},
		{`{"code":"not_found","message":"\u001b[31mred\u0007\n2026 level=ERROR fake\u202e"}`, sandlot.CodeNotFound, `\u001b[31mred\u0007\u000a2026 level=ERROR fake\u202e`},
		{"{\"code\":\"not_found\",\"message\":\"bad \xff utf8\"}", sandlot.CodeNotFound, "bad \ufffd utf8"},
		{`{"code":"quota_exceeded","message":"x"}`, sandlot.CodeSandboxUnhealthy, ""},
		{`{"code":"sandbox_not_running","message":"x"}`, sandlot.CodeSandboxUnhealthy, ""},
		{`{"code":"forbidden","message":""}`, sandlot.CodeSandboxUnhealthy, ""},
		{`{"code":"internal","message":"` + huge + `"}`, sandlot.CodeInternal, ""},
		{`[]`, sandlot.CodeSandboxUnhealthy, ""},
		{``, sandlot.CodeSandboxUnhealthy, ""},
	} {
		err := guestError([]byte(tt.body))
		var e *sandlot.Error
		if !errors.As(err, &e) || e.Code != tt.code || tt.msg != "" && e.Message != tt.msg || len(e.Message) > maxMessage {
			t.Errorf("%.100s: %v", tt.body, err)
		}
	}
	err := guestError([]byte(`{"code":"too_large","message":"m","fields":{"member":3,"size":-1,"retry_after_s":1e9,"evil":"<b>","written":1.5}}`))
	var e *sandlot.Error
	if !errors.As(err, &e) || len(e.Fields) != 1 || e.Fields["member"] != int64(3) {
		t.Errorf("fields %v", e.Fields)
	}
}

// The caller's own end is told as such, not as the guest's fault.
func TestContextErrors(t *testing.T) {
	c := New(func(ctx context.Context) (net.Conn, error) { <-ctx.Done(); return nil, ctx.Err() })
	defer c.Close()
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(20*time.Millisecond, cancel)
	if _, err := c.Run(ctx, wire.Exec{Argv: []string{"true"}}); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	ctx, cancel = context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := c.Health(ctx); sandlot.ErrorCode(err) != sandlot.CodeTimeout {
		t.Errorf("timed out: %v", err)
	}
}

// A command is never sent twice: not when its stream breaks before the answer, and not on a used stream
// that turns out to be dead.
func TestExecIsNotRepeated(t *testing.T) {
	var bodies bytes.Buffer
	conns := make(chan net.Conn, 10)
	c := New(func(context.Context) (net.Conn, error) {
		ours, theirs := net.Pipe()
		conns <- theirs
		return ours, nil
	})
	defer c.Close()
	go func() {
		for conn := range conns {
			buf := make([]byte, 4096)
			_, _ = io.ReadFull(conn, buf[:1]) // the take
			n, _ := conn.Read(buf)            // health
			if !bytes.HasPrefix(buf[:n], []byte("GET")) {
				bodies.Write(buf[:n])
				_ = conn.Close()
				continue
			}
			b, _ := json.Marshal(wire.Health{})
			_, _ = io.WriteString(conn, respond(200, string(b)))
			n, _ = conn.Read(buf) // exec
			bodies.Write(buf[:n])
			_ = conn.Close()
		}
	}()
	if _, err := c.Health(t.Context()); err != nil {
		t.Fatal(err)
	}
	_, err := c.Run(t.Context(), wire.Exec{Argv: []string{"ONCE"}})
	if sandlot.ErrorCode(err) != sandlot.CodeSandboxUnhealthy {
		t.Errorf("error %v", err)
	}
	time.Sleep(50 * time.Millisecond)
	close(conns)
	if n := bytes.Count(bodies.Bytes(), []byte("ONCE")); n != 1 {
		t.Errorf("sent %d times", n)
	}
}

func FuzzGuestError(f *testing.F) {
	f.Add([]byte(`{"code":"not_found","message":"x","fields":{"member":1}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var e *sandlot.Error
		if !errors.As(guestError(b), &e) {
			t.Fatal("not an *Error")
		}
		if len(e.Message) > maxMessage || !utf8.ValidString(e.Message) || strings.ContainsAny(e.Message, "\x00\x1b\r\n\u202e") {
			t.Errorf("message %q", e.Message)
		}
	})
}

func FuzzExecStream(f *testing.F) {
	f.Add([]byte(frame(wire.FrameStarted, `{"pid":7}`) + frame(wire.FrameStdout, "x") + frame(wire.FrameExit, `{"exit_code":1}`)))
	f.Add([]byte("\x01\xff\xff\xff\xff"))
	f.Fuzz(func(t *testing.T, b []byte) {
		c := New(func(context.Context) (net.Conn, error) {
			ours, theirs := net.Pipe()
			go func() { _, _ = io.Copy(io.Discard, theirs) }()
			go func() {
				_, _ = io.WriteString(theirs, respond(200, string(b)))
				_ = theirs.Close()
			}()
			return ours, nil
		})
		defer c.Close()
		res, err := c.Run(t.Context(), wire.Exec{Argv: []string{"x"}, Collect: 1000})
		if err == nil && (len(res.Stdout) > 1000 || res.ExitCode < 0) {
			t.Errorf("%+v", res.Exit)
		}
		if err != nil && !errors.As(err, new(*sandlot.Error)) {
			t.Errorf("an error without a code: %v", err)
		}
	})
}
