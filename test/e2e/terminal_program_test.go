package e2e

import (
	"bytes"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"sandlot/test/live"
)

// The programs that people use a terminal for, in the template that has them: they draw, they follow the window's size, they
// take their keys, and leave the terminal as it was.
func TestTerminalPrograms(t *testing.T) {
	t.Parallel()
	b := live.New(t, map[string]any{"template": "base"})
	run := func(cmd string) *viewer {
		t.Helper()
		return watch(t, b, openTerminal(t, b, map[string]any{"cmd": cmd, "cols": 80, "rows": 24}))
	}
	ended := func(v *viewer, what string) {
		t.Helper()
		if code := v.ended(); code != 0 {
			t.Errorf("%s: exit %d", what, code)
		}
	}
	resize := map[string]any{"type": "resize", "cols": 100, "rows": 40}

	v := run("vi note.txt")
	v.until(`\x1b\[\?1049h(?s:.*)~`)
	v.send("ihello żółć\x1b")
	v.say(resize)
	v.send(":set columns?\r")
	v.until(`columns=100`)
	v.send("ZZ")
	ended(v, "vi")
	if got := b.Out(t, "cat note.txt"); got != "hello żółć" {
		t.Errorf("vi wrote %q", got)
	}

	v = run("htop")
	v.until(`(?s)PID.*Help`)
	v.say(resize)
	v.until(`(?s)\x1b\[40(;\d+H|H|d).*Help`) // the keys are in the last line
	v.send("q")
	v.until(`\x1b\[\?1049l`)
	ended(v, "htop")

	v = run("seq 1000 | less")
	v.until(`\n23\r\n`)
	v.send("G")
	v.until(`\n1000\r\n`)
	v.send("q")
	ended(v, "less")

	// What runs in tmux goes on when its terminal is closed.
	v = run("tmux new -s work")
	v.until(`\[work\]`)
	v.send("echo in-$((40+2)) żółć\r")
	v.until(`in-42 żółć`)
	v.send("\x02%") // two panes beside each other
	v.until(`│`)
	v.say(resize)
	live.Eventually(t, 30*time.Second, "the pane's new size", func() bool { // tmux takes its time to tell
		v.send("clear; stty size\r")
		return strings.HasPrefix(regexp.MustCompile(`\d+ \d+\D$`).FindString(v.until(`(23 39|39 49|39 50)\D`)), "39")
	})
	v.send("\x02d")
	v.until(`\[detached`)
	ended(v, "tmux")
	s := openTerminal(t, b, map[string]any{"cmd": "tmux attach -t work", "cols": 80, "rows": 24})
	v = watch(t, b, s)
	v.until(`in-42 żółć`)
	if err := b.Call(t.Context(), http.MethodDelete, "/"+b.ID+"/terminal/"+s.SessionID, nil, nil); err != nil {
		t.Error("close:", err)
	}
	if got := b.Out(t, "tmux list-panes -t work | wc -l"); got != "2" {
		t.Errorf("panes of tmux after its terminal was closed: %s", got)
	}
}

// A viewer that does not read keeps nobody waiting. It is told what it missed, or is cut off.
func TestTerminalStalledViewer(t *testing.T) {
	t.Parallel()
	b := live.New(t, nil)
	s := openTerminal(t, b, map[string]any{"cmd": "stty -echo; echo first; read x; yes zażółć | head -c 24000000; echo; echo last; read x; exit 6"})
	fast, stalled := watch(t, b, s), watch(t, b, s)
	fast.until(`first\r\n`)
	stalled.until(`first\r\n`)
	fast.send("\r")
	fast.until(`last\r\n`)
	if got := b.Out(t, "echo well"); got != "well" {
		t.Errorf("a command beside it: %q", got)
	}
	told := false
	for !told {
		kind, p, err := stalled.c.Read(t.Context())
		if err != nil { // it was cut off: it has answered no ping for too long
			stalled = watch(t, b, s)
			stalled.until(`last\r\n`)
			break
		}
		stalled.seen.Write(p)
		told = kind == websocket.MessageText && bytes.Contains(p, []byte(`"type":"skipped"`))
	}
	if told {
		stalled.seen.Reset()
		if after := stalled.until(`last\r\n`); !strings.HasPrefix(after, "zażółć") {
			t.Errorf("after what it missed it was shown %.40q", after)
		}
	}
	fast.send("\r")
	for _, v := range []*viewer{fast, stalled} {
		if code := v.ended(); code != 6 {
			t.Errorf("exit %d", code)
		}
	}
}
