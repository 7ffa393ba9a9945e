package e2e

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"sandlot/test/live"
)

func body(s string) io.Reader { return strings.NewReader(s) }

func decode(t *testing.T, resp *http.Response, v any) {
	t.Helper()
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(v); err != nil {
		t.Fatal(err)
	}
}

func TestExec(t *testing.T) {
	t.Parallel()
	b := live.New(t, map[string]any{"env": map[string]string{"A": "create", "B": "create"}})
	for _, c := range []struct {
		name   string
		cmd    any
		in     map[string]any
		code   int
		stdout string
		signal string
	}{
		{name: "line", cmd: "echo $((6*7)) | cat", stdout: "42\n"},
		{name: "argv", cmd: []string{"printf", "%s|", "a b", "$HOME", "-n"}, stdout: "a b|$HOME|-n|"},
		{name: "env", cmd: "echo $A $B $C", in: map[string]any{"env": map[string]string{"B": "exec", "C": "exec"}}, stdout: "create exec exec\n"},
		{name: "cwd", cmd: "pwd", in: map[string]any{"cwd": "/usr/lib"}, stdout: "/usr/lib\n"},
		{name: "default cwd and user", cmd: "pwd; id -un; echo $HOME", stdout: "/workspace\nuser\n/home/user\n"},
		{name: "root", cmd: "id -u", in: live.Root, stdout: "0\n"},
		{name: "sudo", cmd: "sudo id -u && sudo -u user id -un", stdout: "0\nuser\n"},
		{name: "stdin", cmd: "tr a-z A-Z", in: map[string]any{"stdin": "hello"}, stdout: "HELLO"},
		{name: "exit code", cmd: "exit 7", code: 7},
		{name: "signal", cmd: []string{"bash", "-c", "kill -9 $$"}, code: 137, signal: "SIGKILL"},
		{name: "missing", cmd: []string{"no-such-program"}, code: 127},
		{name: "identity", cmd: "echo $SANDBOX_ID $SANDBOX_TEMPLATE; hostname", stdout: b.ID + " base\n" + b.ID + "\n"},
	} {
		r := b.Run(t, c.cmd, c.in)
		if r.ExitCode != c.code || r.Stdout != c.stdout || r.Signal != c.signal || r.TimedOut {
			t.Errorf("%s: %+v", c.name, r)
		}
	}
	_, err := b.Try(t, "true", map[string]any{"user": "nobody-here"})
	refused(t, err, http.StatusBadRequest, "invalid_request")
}

// A timeout ends the command with all its children, keeps what was printed, and leaves the sandbox as it was.
func TestExecTimeout(t *testing.T) {
	t.Parallel()
	b := live.New(t, nil)
	begun := time.Now()
	r := b.Run(t, "echo before; sleep 777 & (setsid sleep 778 &) ; sh -c 'sleep 779; true'", map[string]any{"timeout_s": 2})
	if !r.TimedOut || r.Stdout != "before\n" || time.Since(begun) > 20*time.Second {
		t.Errorf("after %s: %+v", time.Since(begun), r)
	}
	got := b.Out(t, "ps -eo args | grep '^sleep 77' || true")
	if strings.Contains(got, "777") || strings.Contains(got, "779") {
		t.Errorf("processes of the command are left: %q", got)
	}
	if !strings.Contains(got, "778") { // the control: what left the session is its own master
		t.Errorf("ps shows %q", got)
	}
}

func TestExecStream(t *testing.T) {
	t.Parallel()
	b := live.New(t, nil)
	stream := func(req string) (types, text string, code int) {
		resp, err := b.Request(t.Context(), http.MethodPost, "/"+b.ID+"/exec", body(req))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if kind := resp.Header.Get("Content-Type"); kind != "text/event-stream" {
			t.Errorf("content type %q", kind)
		}
		code = -1
		if err := live.Events(resp.Body, func(e live.Event) bool {
			types += e.Type + " "
			if e.Type == "exit" {
				code = e.ExitCode
			}
			raw, _ := base64.StdEncoding.DecodeString(e.DataBase64)
			text += e.Data + string(raw)
			return true
		}); err != nil {
			t.Error(err)
		}
		return types, text, code
	}
	types, text, code := stream(`{"cmd":"echo one; sleep 0.3; echo two >&2; sleep 0.3; printf '\\xe2\\x82'; sleep 0.3; printf '\\xac'; exit 3","stream":true}`)
	if types != "stdout stderr stdout exit " || text != "one\ntwo\n€" || code != 3 {
		t.Errorf("events %q, text %q, code %d", types, text, code)
	}
	if _, text, _ = stream(`{"cmd":["printf","\\377\\376"],"stream":true}`); text != "\xff\xfe" {
		t.Errorf("bytes that are not text: %q", text)
	}

	// A client that goes away ends its command.
	resp, err := b.Request(t.Context(), http.MethodPost, "/"+b.ID+"/exec", body(`{"cmd":"echo begun; exec sleep 888","stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	if err := live.Events(resp.Body, func(e live.Event) bool { return e.Data != "begun\n" }); err != nil {
		t.Error(err)
	}
	if got := b.Out(t, "pgrep -fc '^sleep 888' || true"); got != "1" {
		t.Errorf("%q commands run before the client goes", got)
	}
	resp.Body.Close()
	live.Eventually(t, 20*time.Second, "the command of a client that went away ends", func() bool {
		return b.Out(t, "pgrep -fc '^sleep 888' || true") == "0"
	})
}

func TestBackground(t *testing.T) {
	t.Parallel()
	b := live.New(t, nil)
	pid, log := b.Background(t, "echo hello; while read line; do echo got $line; done; echo end")
	path := "/processes/" + strconv.Itoa(pid)
	lines := make(chan string, 100)
	resp, err := b.Request(t.Context(), http.MethodGet, "/"+b.ID+path+"/stream", nil)
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		defer resp.Body.Close()
		defer close(lines)
		_ = live.Events(resp.Body, func(e live.Event) bool {
			lines <- e.Type + " " + e.Data
			return true
		})
	}()
	expect := func(want string) {
		t.Helper()
		select {
		case got := <-lines:
			if got != want {
				t.Errorf("followed %q, want %q", got, want)
			}
		case <-time.After(20 * time.Second):
			t.Fatalf("no event; want %q", want)
		}
	}
	expect("stdout hello\n")
	write := func(in string) {
		t.Helper()
		if _, err := b.Do(t.Context(), http.MethodPost, path+"/stdin", []byte(in)); err != nil {
			t.Fatal(err)
		}
	}
	write(`{"data":"one\n"}`)
	expect("stdout got one\n")
	write(`{"data_base64":"` + base64.StdEncoding.EncodeToString([]byte("two\n")) + `"}`)
	expect("stdout got two\n")
	write(`{"close":true}`)
	expect("stdout end\n")
	expect("exit ")
	if got := string(b.Read(t, log)); got != "hello\ngot one\ngot two\nend\n" {
		t.Errorf("its log has %q", got)
	}

	pid, _ = b.Background(t, []string{"sleep", "999"})
	state := func() (running bool, signal string) {
		var out struct {
			Processes []struct {
				PID     int
				Running bool
				Signal  string
			}
		}
		if err := b.Call(t.Context(), http.MethodGet, "/"+b.ID+"/processes", nil, &out); err != nil {
			t.Fatal(err)
		}
		for _, p := range out.Processes {
			if p.PID == pid {
				return p.Running, p.Signal
			}
		}
		t.Fatalf("process %d is not listed", pid)
		return false, ""
	}
	if running, _ := state(); !running {
		t.Error("a background process does not run")
	}
	if _, err := b.Do(t.Context(), http.MethodPost, fmt.Sprintf("/processes/%d/signal", pid), []byte(`{"signal":"TERM"}`)); err != nil {
		t.Fatal(err)
	}
	live.Eventually(t, 20*time.Second, "the process ends by the signal", func() bool {
		running, signal := state()
		return !running && signal == "SIGTERM"
	})
}

// item 42 in small: a program that wants too much memory ends, and its sandbox goes on and says what happened.
func TestMemoryLimit(t *testing.T) {
	t.Parallel()
	b := live.New(t, map[string]any{"memory_mb": 256})
	const hog = "b = []\nwhile True: b.append(bytearray(16 << 20))\n"
	r := b.Run(t, []string{"python3", "-c", hog})
	if r.ExitCode != 137 || r.Signal != "SIGKILL" {
		t.Errorf("a program without end to its memory: %+v", r)
	}
	if got := b.Out(t, "echo alive"); got != "alive" {
		t.Errorf("then the sandbox says %q", got)
	}
	live.Eventually(t, 30*time.Second, "the event oom", func() bool { return slices.Contains(b.Logs(t), "oom") })
}
