package main

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"
)

const bigEvent = 3 << 20 // far over any line buffer

// exec does what its command says.
func (f *fakeAPI) exec(w http.ResponseWriter, r *http.Request) error {
	var b execBody
	if err := errors.Join(params(r), f.known(r), body(r, &b)); err != nil {
		return err
	}
	f.execs = append(f.execs, b)
	if b.Stream && b.Background {
		return fakeInvalid("stream and background exclude each other")
	}
	line, _ := b.Cmd.(string)
	switch {
	case b.Background:
		return answer(w, 200, map[string]any{"pid": 42, "log_path": "/tmp/x.log"})
	case line == "unhealthy":
		return &fakeError{502, "sandbox_unhealthy", "the sandbox does not answer"}
	case !b.Stream:
		return answer(w, 200, map[string]any{"exit_code": 5, "stdout": "out", "stderr": ""})
	}
	w.Header().Set("Content-Type", "text/event-stream")
	event := func(v map[string]any) {
		raw, _ := json.Marshal(v)
		fmt.Fprintf(w, "data: %s\n\n", raw)
		_ = http.NewResponseController(w).Flush()
	}
	io.WriteString(w, ": ping\n\n")
	switch line {
	case "big":
		event(map[string]any{"type": "stdout", "data": strings.Repeat("x", bigEvent)})
	case "binary":
		event(map[string]any{"type": "stdout", "data_base64": base64.StdEncoding.EncodeToString([]byte{0xff, 0, 0xfe})})
	case "stdin":
		event(map[string]any{"type": "stdout", "data": b.Stdin})
	case "hang":
		event(map[string]any{"type": "stdout", "data": "begun\n"})
		<-r.Context().Done()
		close(f.gone)
		return nil
	case "late error":
		event(map[string]any{"type": "error", "error": map[string]any{"code": "shutting_down", "message": "the server is stopping", "request_id": "req9"}})
		return nil
	case "cut":
		io.WriteString(w, "data: {\"type\":\"std")
		return nil
	case "silent":
		return nil
	case "slow":
		event(map[string]any{"type": "exit", "exit_code": 137, "signal": "SIGKILL", "timed_out": true})
		return nil
	default:
		event(map[string]any{"type": "stdout", "data": "out\n"})
		event(map[string]any{"type": "stderr", "data": "err\n"})
		event(map[string]any{"type": "some later kind"})
	}
	code := 0
	if _, err := fmt.Sscanf(line, "exit %d", &code); err != nil {
		code = 0
	}
	event(map[string]any{"type": "exit", "exit_code": code})
	return nil
}

func TestExec(t *testing.T) {
	f := newFakeAPI(t)
	id := f.sandbox()
	for _, tt := range []struct {
		name, in  string
		args      []string
		code      int
		out, errs string // errs: contained
	}{
		{"streams apart", "", []string{"true"}, 0, "out\n", "err\n"},
		{"status", "", []string{"exit 3"}, 3, "out\n", "err\n"},
		{"signal", "", []string{"exit 137"}, 137, "out\n", "err\n"},
		{"argv", "", []string{"--", "ls", "-la"}, 0, "out\n", "err\n"},
		{"flags after the command are its own", "", []string{"ls", "-la", "--json"}, 0, "out\n", "err\n"},
		{"an event longer than any buffer", "", []string{"big"}, 0, strings.Repeat("x", bigEvent), ""},
		{"bytes", "", []string{"binary"}, 0, "\xff\x00\xfe", ""},
		{"stdin", "hello", []string{"-i", "stdin"}, 0, "hello", ""},
		{"stdin is not read unasked", "hello", []string{"stdin"}, 0, "", ""},
		{"out of time", "", []string{"slow"}, 124, "", "ran out of its time"},
		{"error", "", []string{"unhealthy"}, 1, "", "the sandbox does not answer (sandbox_unhealthy, request req7)"},
		{"error within the stream", "", []string{"late error"}, 1, "", "the server is stopping (shutting_down, request req9)"},
		{"a stream that breaks off", "", []string{"cut"}, 1, "", "broke off"},
		{"a stream without an end", "", []string{"silent"}, 1, "", "ended before the command did"},
		{"background", "", []string{"-d", "sleep 9"}, 0, "42\t/tmp/x.log\n", ""},
		{"no such sandbox", "", nil, 2, "", "expected"},
		{"no command", "", []string{"--"}, 1, "", "say what to run"},
		{"half a second", "", []string{"--timeout", "1500ms", "true"}, 1, "", "whole seconds"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			code, out, errs := f.cli(tt.in, append([]string{"sandbox", "exec", id}, tt.args...)...)
			if code != tt.code || out != tt.out || !strings.Contains(errs, tt.errs) {
				t.Errorf("exit %d, stdout %.80q, stderr %q", code, out, errs)
			}
		})
	}
	t.Run("what is sent", func(t *testing.T) {
		t.Setenv("INHERITED", "v")
		f.execs = nil
		code, _, errs := f.cli("", "sandbox", "exec", id, "-u", "root", "-w", "/tmp", "-e", "A=b=c", "-e", "INHERITED", "--timeout", "2m", "--", "ls", "-la")
		if code != 0 {
			t.Fatal(errs)
		}
		got, _ := json.Marshal(f.execs[0])
		want := `{"cmd":["ls","-la"],"cwd":"/tmp","env":{"A":"b=c","INHERITED":"v"},"user":"root","timeout_s":120,"stream":true}`
		if string(got) != want {
			t.Errorf("got  %s\nwant %s", got, want)
		}
	})
	t.Run("json", func(t *testing.T) {
		code, out, _ := f.cli("", "sandbox", "exec", "--json", id, "true")
		var v struct {
			ExitCode int `json:"exit_code"`
		}
		if err := json.Unmarshal([]byte(out), &v); err != nil || v.ExitCode != 5 || code != 5 {
			t.Errorf("exit %d, %q", code, out)
		}
	})
	t.Run("too much stdin", func(t *testing.T) {
		code, _, errs := f.cli(strings.Repeat("x", 1<<20), "sandbox", "exec", "-i", id, "stdin")
		if code != 1 || !strings.Contains(errs, "cp - ID:FILE") {
			t.Errorf("exit %d, %q", code, errs)
		}
	})
}

func TestRun(t *testing.T) {
	f := newFakeAPI(t)
	code, out, errs := f.cli("", "sandbox", "run", "-t", "base", "-m", "team=a", "--", "exit 4")
	if code != 4 || out != "out\n" || errs != "err\n" {
		t.Errorf("exit %d, %q, %q", code, out, errs)
	}
	if len(f.alive) != 0 || len(f.deleted) != 1 {
		t.Errorf("alive %v, deleted %v", f.alive, f.deleted)
	}
	code, _, errs = f.cli("", "sandbox", "run", "--keep", "--", "true")
	if code != 0 || len(f.alive) != 1 || !strings.Contains(errs, "sbx") {
		t.Errorf("keep: exit %d, alive %v, %q", code, f.alive, errs)
	}
	code, _, errs = f.cli("", "sandbox", "run", "-t", "nope", "--", "true")
	if code != 1 || !strings.Contains(errs, "there is no template nope (not_found, request req7)") {
		t.Errorf("exit %d, %q", code, errs)
	}
}

// TestInterrupt is Ctrl-C: the command inside ends, and what run made is deleted.
func TestInterrupt(t *testing.T) {
	for _, verb := range []string{"exec", "run"} {
		t.Run(verb, func(t *testing.T) {
			f := newFakeAPI(t)
			args := []string{"sandbox", "run", "--", "hang"}
			if verb == "exec" {
				args = []string{"sandbox", "exec", f.sandbox(), "hang"}
			} else {
				f.cli("", "--version") // sets the environment
			}
			ctx, interrupt := context.WithCancel(t.Context())
			out := &notify{found: make(chan struct{}), want: "begun"}
			ended := make(chan int, 1)
			go func() { ended <- run(ctx, args, &streams{strings.NewReader(""), out, io.Discard}) }()
			wait(t, out.found, "the command's output")
			interrupt()
			wait(t, f.gone, "the server to see the client go")
			select {
			case code := <-ended:
				if code != 130 {
					t.Errorf("exit %d", code)
				}
			case <-time.After(10 * time.Second):
				t.Fatal("it does not end")
			}
			f.mu.Lock()
			defer f.mu.Unlock()
			if verb == "run" && len(f.alive) != 0 {
				t.Errorf("left: %v", f.alive)
			}
		})
	}
}

// notify tells when something was written. Only run's goroutine writes.
type notify struct {
	buf   bytes.Buffer
	want  string
	found chan struct{}
	done  bool
}

func (n *notify) Write(b []byte) (int, error) {
	n.buf.Write(b)
	if !n.done && strings.Contains(n.buf.String(), n.want) {
		n.done = true
		close(n.found)
	}
	return len(b), nil
}

func wait(t *testing.T, c <-chan struct{}, what string) {
	t.Helper()
	select {
	case <-c:
	case <-time.After(10 * time.Second):
		t.Fatalf("no sign of %s", what)
	}
}

func TestReadEvents(t *testing.T) {
	for _, tt := range []struct {
		in   string
		want []string
		fail string
	}{
		{"", nil, ""},
		{": ping\n\n", nil, ""},
		{"data: a\n\ndata:b\n\n", []string{"a", "b"}, ""},
		{"data: a\r\ndata: b\r\n\r\n", []string{"a\nb"}, ""},
		{"event: x\nid: 1\ndata: a\nretry: 1\n\n", []string{"a"}, ""},
		{"data: a\n\ndata: b", []string{"a"}, "broke off"},
		{"data: a\n\ndata: b\n", []string{"a"}, "broke off"},
		{"data: " + strings.Repeat("x", maxEvent+1) + "\n\n", nil, "more than"},
	} {
		var got []string
		err := readEvents(strings.NewReader(tt.in), func(b []byte) error { got = append(got, string(b)); return nil })
		if !slices.Equal(got, tt.want) || (err == nil) != (tt.fail == "") || err != nil && !strings.Contains(err.Error(), tt.fail) {
			t.Errorf("%.40q: got %.80q, %v", tt.in, got, err)
		}
	}
}

// FuzzReadEvents: whatever a server sends, no event is over the limit and nothing panics.
func FuzzReadEvents(f *testing.F) {
	f.Add([]byte("data: {\"type\":\"exit\"}\n\n: ping\n\ndata\n\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		_ = readEvents(bytes.NewReader(b), func(data []byte) error {
			if len(data) > maxEvent {
				t.Errorf("an event of %d bytes", len(data))
			}
			return nil
		})
	})
}
