package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/creack/pty"
	"golang.org/x/sys/unix"

	"sandlot/internal/testenv"
	"sandlot/test/live"
)

// viewer is a WebSocket on a terminal.
type viewer struct {
	t    *testing.T
	c    *websocket.Conn
	seen bytes.Buffer
	exit *int
}

type session struct {
	SessionID string `json:"session_id"`
	PID       int    `json:"pid"`
	Running   bool   `json:"running"`
	ExitCode  *int   `json:"exit_code"`
	Viewers   int    `json:"viewers"`
}

func openTerminal(t *testing.T, b live.Box, in map[string]any) session {
	t.Helper()
	var s session
	if err := b.Call(t.Context(), http.MethodPost, "/"+b.ID+"/terminal", in, &s); err != nil {
		t.Fatal("open a terminal:", err)
	}
	return s
}

func watch(t *testing.T, b live.Box, s session) *viewer {
	t.Helper()
	url := "ws" + strings.TrimPrefix(b.URL, "http") + "/api/v1/projects/default/sandboxes/" + b.ID + "/terminal/" + s.SessionID + "/ws"
	c, _, err := websocket.Dial(t.Context(), url, &websocket.DialOptions{HTTPHeader: http.Header{"Authorization": {"Bearer " + b.Token}}})
	if err != nil {
		t.Fatal("connect to the terminal:", err)
	}
	c.SetReadLimit(4 << 20)
	t.Cleanup(func() { _ = c.CloseNow() })
	return &viewer{t: t, c: c}
}

func (v *viewer) send(s string) {
	v.t.Helper()
	if err := v.c.Write(v.t.Context(), websocket.MessageBinary, []byte(s)); err != nil {
		v.t.Fatal("type:", err)
	}
}

func (v *viewer) say(m map[string]any) {
	v.t.Helper()
	b, _ := json.Marshal(m)
	if err := v.c.Write(v.t.Context(), websocket.MessageText, b); err != nil {
		v.t.Fatal("say:", err)
	}
}

// until reads until what was shown matches, and forgets it.
func (v *viewer) until(pattern string) string {
	v.t.Helper()
	re := regexp.MustCompile(pattern)
	ctx, cancel := context.WithTimeout(v.t.Context(), 30*time.Second)
	defer cancel()
	for {
		if at := re.FindIndex(v.seen.Bytes()); at != nil {
			return string(v.seen.Next(at[1]))
		}
		if v.exit != nil {
			v.t.Fatalf("the terminal ended before it showed %q; it showed %q", pattern, v.seen.String())
		}
		kind, b, err := v.c.Read(ctx)
		if err != nil {
			v.t.Fatalf("waiting for %q: %v; it showed %q", pattern, err, v.seen.String())
		}
		if kind == websocket.MessageBinary {
			v.seen.Write(b)
			continue
		}
		var m struct {
			Type     string `json:"type"`
			ExitCode *int   `json:"exit_code"`
		}
		if err := json.Unmarshal(b, &m); err != nil {
			v.t.Fatalf("a message: %v: %q", err, b)
		}
		if m.Type == "exit" {
			v.exit = m.ExitCode
		} else {
			fmt.Fprintf(&v.seen, "\n<%s>\n", b)
		}
	}
}

func (v *viewer) ended() int {
	v.t.Helper()
	ctx, cancel := context.WithTimeout(v.t.Context(), 30*time.Second)
	defer cancel()
	for v.exit == nil {
		kind, b, err := v.c.Read(ctx)
		if err != nil {
			v.t.Fatalf("waiting for the end: %v; it showed %q", err, v.seen.String())
		}
		if kind == websocket.MessageText {
			var m struct {
				ExitCode *int `json:"exit_code"`
			}
			_ = json.Unmarshal(b, &m)
			v.exit = m.ExitCode
		}
	}
	return *v.exit
}

// A shell in a terminal: who it is, its window, its signals, characters of several bytes, its end.
func TestTerminal(t *testing.T) {
	t.Parallel()
	b := live.New(t, map[string]any{"env": map[string]string{"FROM_CREATE": "yes"}})
	s := openTerminal(t, b, map[string]any{"cols": 101, "rows": 33, "env": map[string]string{"PS1": "$ "}})
	v := watch(t, b, s)
	v.send("PS1='ready> '\r")
	v.until(`hready> `) // after what turns bracketed paste on
	for _, c := range []struct{ types, shows string }{
		{"tty; stty size; id -un; pwd; echo $TERM $FROM_CREATE\r", `/dev/pts/\d+\r\n33 101\r\nuser\r\n/workspace\r\nxterm-256color yes\r\n`},
		{"printf 'żółć \\U1F600\\n'\r", `żółć 😀\r\n`},
		{"echo =ż\u00f3\x7f+=\r", `\r=ż\+=\r\n`}, // one key erases one character
		{"trap 'stty size' WINCH\r", `ready> `},
		{"sh -c 'echo go; exec sleep 100'\r", `[\r\n]go\r\n`}, // then the terminal is no more as the line editor has it
		{"\x03", `(\^C|\x03)\r\n.*ready> `},                   // gVisor's terminal echoes the byte itself
		{"sh -c 'echo go; exec cat -v'\r", `[\r\n]go\r\n`},
		{"=ż\u00f3\x7f+\x7f\x7f\u00f3\r", `\n=M-CM-3\r\n`}, // without readline too
		{"\x1b[200~pa\xc5\xbcste\x1b[201~\r", `\^\[\[200~paM-EM-<ste\^\[\[201~\r\n`},
		{"\x04", `ready> `},
		{"sleep 7 & jobs\r", `Running\s+sleep 7`},
	} {
		v.send(c.types)
		v.until(c.shows)
	}
	v.say(map[string]any{"type": "resize", "cols": 90, "rows": 20})
	v.send("true\r")
	v.until(`20 90\r\n`)
	v.send("exit 5\r")
	if code := v.ended(); code != 5 {
		t.Errorf("exit %d, want 5", code)
	}
	// Who comes late reads the end.
	late := watch(t, b, s)
	late.until(`exit`)
	if code := late.ended(); code != 5 {
		t.Errorf("a late viewer's exit %d, want 5", code)
	}
}

// Full-screen programs draw with curses, in the window that they are given.
func TestTerminalFullScreen(t *testing.T) {
	t.Parallel()
	b := live.New(t, nil)
	b.Put(t, "screen.py", []byte(`
import curses
def main(w):
    while True:
        h, c = w.getmaxyx()
        w.erase(); w.addstr(h-2, 3, "size=%dx%d" % (c, h), curses.A_REVERSE); w.refresh()
        k = w.getch()
        if k == ord("q"): return
curses.wrapper(main)
`))
	v := watch(t, b, openTerminal(t, b, map[string]any{"cmd": []string{"python3", "screen.py"}, "cols": 70, "rows": 21}))
	v.until(`\x1b\[\?1049h`)
	v.until(`\x1b\[20;4H.*size=70x21`)
	v.say(map[string]any{"type": "resize", "cols": 90, "rows": 31})
	v.until(`\x1b\[30;4H.*size=90x31`)
	v.send("q")
	v.until(`\x1b\[\?1049l`)
	if code := v.ended(); code != 0 {
		t.Errorf("exit %d", code)
	}
}

// A terminal outlives its viewers; each new one gets the last of what was shown, no more than 256 KiB; two see the same.
func TestTerminalViewers(t *testing.T) {
	t.Parallel()
	b := live.New(t, nil)
	s := openTerminal(t, b, map[string]any{"cmd": "stty -echo; echo first; read x; seq 200000; echo last; read x; echo got $x; read x"})
	one := watch(t, b, s)
	one.until(`first\r\n`)
	_ = one.c.CloseNow()
	again := watch(t, b, s)
	again.until(`^first\r\n`)
	two := watch(t, b, s)
	two.until(`^first\r\n`)
	again.send("go\r")
	again.until(`\n200000\r\nlast\r\n`)
	two.until(`\n200000\r\nlast\r\n`)
	late := watch(t, b, s)
	shown := late.until(`last\r\n`)
	if len(shown) > 256<<10 || len(shown) < 128<<10 || !regexp.MustCompile(`^\d+\r\n`).MatchString(shown) {
		t.Errorf("a late viewer got %d bytes that begin with %.20q", len(shown), shown)
	}
	two.send("ok\r")
	for _, v := range []*viewer{again, two, late} {
		v.until(`got ok`)
	}
	var list struct{ Terminals []session }
	if err := b.Call(t.Context(), http.MethodGet, "/"+b.ID+"/terminal", nil, &list); err != nil || len(list.Terminals) != 1 || !list.Terminals[0].Running {
		t.Errorf("terminals: %+v, %v", list, err)
	}
	if err := b.Call(t.Context(), http.MethodDelete, "/"+b.ID+"/terminal/"+s.SessionID, nil, nil); err != nil {
		t.Error("close:", err)
	}
	if code := again.ended(); code == 0 {
		t.Errorf("a closed terminal's exit is %d", code)
	}
}

// Closing a terminal ends all that ran in it, also what ignores the hang-up.
func TestTerminalClose(t *testing.T) {
	t.Parallel()
	b := live.New(t, nil)
	s := openTerminal(t, b, map[string]any{"cmd": "trap '' HUP; nohup sleep 4321 >/dev/null & echo up; while :; do sleep 1; done"})
	v := watch(t, b, s)
	v.until(`up\r\n`)
	if err := b.Call(t.Context(), http.MethodDelete, "/"+b.ID+"/terminal/"+s.SessionID, nil, nil); err != nil {
		t.Fatal(err)
	}
	if got := b.Out(t, "pgrep -f '[s]leep 4321' || echo none"); got != "none" {
		t.Errorf("left behind: %q", got)
	}
	err := b.Call(t.Context(), http.MethodPost, "/"+b.ID+"/terminal/"+s.SessionID+"/input", map[string]any{"data": "x"}, nil)
	if err == nil || !strings.Contains(err.Error(), "not_found") {
		t.Errorf("input into a closed terminal: %v", err)
	}
}

// The documented calls: create, stream, input as text and base64, resize, delete.
func TestTerminalEvents(t *testing.T) {
	t.Parallel()
	b := live.New(t, nil)
	s := openTerminal(t, b, map[string]any{"cols": 80, "rows": 24})
	at := "/" + b.ID + "/terminal/" + s.SessionID
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	resp, err := b.Request(ctx, http.MethodGet, at+"/stream", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var shown []byte
	var code *int
	sc := bufio.NewScanner(resp.Body)
	until := func(text string) {
		t.Helper()
		for code == nil && !bytes.Contains(shown, []byte(text)) && sc.Scan() {
			data, ok := strings.CutPrefix(sc.Text(), "data: ")
			if !ok {
				continue
			}
			var e struct {
				Type     string `json:"type"`
				Data     []byte `json:"data"`
				ExitCode *int   `json:"exit_code"`
			}
			if err := json.Unmarshal([]byte(data), &e); err != nil {
				t.Fatalf("an event: %v: %s", err, data)
			}
			shown, code = append(shown, e.Data...), e.ExitCode
		}
	}
	input := func(in map[string]any) {
		t.Helper()
		if err := b.Call(ctx, http.MethodPost, at+"/input", in, nil); err != nil {
			t.Error("input:", err)
		}
	}
	input(map[string]any{"data": "echo a$((1+1))b; stty size\r"})
	until("a2b\r\n24 80\r\n")
	input(map[string]any{"data": "ZWNobyBjJCgoMisxKSlkDQ==", "base64": true}) // echo c$((2+1))d
	until("c3d\r\n")
	if err := b.Call(ctx, http.MethodPost, at+"/resize", map[string]any{"cols": 91, "rows": 31}, nil); err != nil {
		t.Error("resize:", err)
	}
	input(map[string]any{"base64": "ZXhpdCAzDQ=="}) // exit 3
	until("never")
	if code == nil || *code != 3 || !bytes.Contains(shown, []byte("a2b\r\n24 80\r\n")) || !bytes.Contains(shown, []byte("c3d\r\n")) {
		t.Errorf("exit %v after %q", code, shown)
	}
}

// SandboxUser; a program that does not read what is typed, and terminals without end.
func TestTerminalLimits(t *testing.T) {
	t.Parallel()
	b := live.New(t, nil)
	s := openTerminal(t, b, map[string]any{"cmd": []string{"sleep", "1000"}})
	at := "/" + b.ID + "/terminal/" + s.SessionID
	flood := map[string]any{"data": strings.Repeat("x\n", 16<<10)}
	var err error
	for range 64 {
		if err = b.Call(t.Context(), http.MethodPost, at+"/input", flood, nil); err != nil {
			break
		}
	}
	if err == nil || !strings.Contains(err.Error(), "timeout") {
		t.Errorf("2 MiB typed at a program that does not read: %v", err)
	}
	if got := b.Out(t, "echo well"); got != "well" {
		t.Errorf("then a command says %q", got)
	}
	// An interrupt gets through all the same.
	v := watch(t, b, s)
	v.send("\x03")
	if code := v.ended(); code != 130 {
		t.Errorf("interrupted: exit %d", code)
	}
	openTerminal(t, b, map[string]any{"cmd": []string{"sleep", "1000"}}) // in its place
	for i := 1; ; i++ {
		err = b.Call(t.Context(), http.MethodPost, "/"+b.ID+"/terminal", map[string]any{"cmd": []string{"sleep", "1000"}}, nil)
		if err == nil && i < 40 {
			continue
		}
		if i != 32 || err == nil || !strings.Contains(err.Error(), "rate_limited") {
			t.Errorf("terminal %d: %v", i+1, err)
		}
		break
	}
	for _, in := range []map[string]any{{"cols": 1001}, {"cols": -1}, {"rows": 100000}, {"user": "nobody!"}, {"cwd": "/nowhere"}, {"cmd": []string{"no-such-program"}}} {
		if err := b.Call(t.Context(), http.MethodPost, "/"+b.ID+"/terminal", in, nil); err == nil {
			t.Errorf("%v: a terminal", in)
		}
	}
}

// `sandlot sandbox shell` in a real terminal: raw, with the window's size and its changes, the shell's status, Ctrl-] and --attach.
func TestShellCommand(t *testing.T) {
	t.Parallel()
	b := live.New(t, nil)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute) // its end ends what is waited for
	t.Cleanup(cancel)
	start := func(args ...string) (cmd *exec.Cmd, until func(string) string, send func(string), cooked func() bool) {
		cmd = exec.CommandContext(ctx, testenv.Bin(t, "sandlot"), append([]string{"sandbox", "shell"}, args...)...)
		cmd.Env = append(cmd.Environ(), "SANDLOT_URL="+b.URL, "SANDLOT_TOKEN="+b.Token, "SANDLOT_PROJECT=default", "TERM=xterm")
		f, err := pty.StartWithSize(cmd, &pty.Winsize{Rows: 30, Cols: 99})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = f.Close() })
		var seen bytes.Buffer
		until = func(pattern string) string {
			t.Helper()
			re := regexp.MustCompile(pattern)
			buf := make([]byte, 4096)
			for {
				if at := re.FindIndex(seen.Bytes()); at != nil {
					return string(seen.Next(at[1]))
				}
				n, err := f.Read(buf)
				seen.Write(buf[:n])
				if err != nil && !re.Match(seen.Bytes()) {
					t.Fatalf("waiting for %q: %v; it showed %q", pattern, err, seen.String())
				}
			}
		}
		send = func(s string) {
			if strings.HasPrefix(s, "size ") {
				_ = pty.Setsize(f, &pty.Winsize{Rows: 22, Cols: 66})
				_ = cmd.Process.Signal(syscall.SIGWINCH)
				return
			}
			_, _ = f.WriteString(s)
		}
		cooked = func() bool {
			tio, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
			if err != nil {
				t.Fatal(err)
			}
			return tio.Lflag&(unix.ICANON|unix.ECHO|unix.ISIG) == unix.ICANON|unix.ECHO|unix.ISIG
		}
		return cmd, until, send, cooked
	}
	cmd, until, send, cooked := start(b.ID)
	send("PS1='ready> '; stty size; echo $TERM\r")
	until(`30 99\r\nxterm\r\n`)
	until(`ready> `)
	send("size 22 66")
	live.Eventually(t, 20*time.Second, "the new size", func() bool {
		send("stty size\r")
		return strings.Contains(until(`\d+ \d+\r\n`), "22 66")
	})
	if cooked() {
		t.Error("the user's terminal is not raw")
	}
	send("\x1d")
	until(`\x1b\[\?1049l`) // a full-screen program may be what goes on
	left := until(`--attach (trm\w+)`)
	if err := cmd.Wait(); err != nil || !cooked() {
		t.Errorf("leaving: %v, as before: %v", err, cooked())
	}
	sid := left[strings.LastIndex(left, " ")+1:]
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGHUP} {
		cmd, until, _, cooked = start("--attach", sid, b.ID)
		until(`ready> `)
		_ = cmd.Process.Signal(sig)
		_ = cmd.Wait()
		if code := cmd.ProcessState.ExitCode(); code != 130 || !cooked() {
			t.Errorf("%s: status %d, as before: %v", sig, code, cooked())
		}
	}
	cmd, until, send, cooked = start("--attach", sid, b.ID)
	until(`ready> `)
	send("exit 7\r")
	_ = cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != 7 || !cooked() {
		t.Errorf("the shell's status is %d, want 7; as before: %v", code, cooked())
	}
	cmd, until, _, _ = start(b.ID, "--", "sh", "-c", "echo $1; exit 9", "-", "two words")
	until(`two words\r\n`)
	_ = cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != 9 {
		t.Errorf("a command's status is %d, want 9", code)
	}
	// Without a terminal here, what comes on stdin is typed; at its end all that still reads is told.
	piped := exec.CommandContext(ctx, testenv.Bin(t, "sandlot"), "sandbox", "shell", b.ID)
	piped.Env = cmd.Env
	piped.Stdin = strings.NewReader("echo pi$((1+1))ped\ncat")
	if out, err := piped.CombinedOutput(); err != nil || !strings.Contains(string(out), "pi2ped\r\n") {
		t.Errorf("from a pipe: %v: %q", err, out)
	}
	cmd, until, _, cooked = start("--attach", "trmnone", b.ID)
	until(`not_found`)
	_ = cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != 1 || !cooked() {
		t.Errorf("no such terminal: status %d", code)
	}
}
