package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/coder/websocket"
	"golang.org/x/term"
)

// shellCmd is a terminal in a sandbox.
type shellCmd struct {
	User    string   `short:"u" help:"The user inside." placeholder:"USER"`
	Workdir string   `short:"w" help:"The directory inside." placeholder:"DIR"`
	Attach  string   `help:"Go on with a terminal that was left." placeholder:"SESSION"`
	ID      string   `arg:"" help:"The sandbox."`
	Command []string `arg:"" optional:"" passthrough:"" help:"Instead of a login shell."`
}

// detachKey is Ctrl-], as telnet has it. It leaves the terminal as it is.
const detachKey = 0x1d

const maxShellMessage = 1 << 20 // bytes of a message from the server

// asBefore undoes what a full-screen program that goes on elsewhere has done to the user's terminal: the other screen, its
// keys, mouse and paste reports, a hidden cursor, colours.
const asBefore = "\x1b[?1049l\x1b[?1l\x1b>\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1004l\x1b[?1006l\x1b[?2004l\x1b[?25h\x1b[0m"

type openTerminalBody struct {
	Cols int    `json:"cols,omitempty"`
	Rows int    `json:"rows,omitempty"`
	Cmd  any    `json:"cmd,omitempty"`
	Cwd  string `json:"cwd,omitempty"`
	User string `json:"user,omitempty"`
	Env  any    `json:"env,omitempty"`
}

type terminalMessage struct {
	Type     string          `json:"type"`
	Cols     int             `json:"cols,omitempty"`
	Rows     int             `json:"rows,omitempty"`
	Bytes    int64           `json:"bytes,omitempty"`
	ExitCode *int            `json:"exit_code,omitempty"`
	Error    json.RawMessage `json:"error,omitempty"`
}

// Run ends with the status of the shell's, or with 0 when it is left by Ctrl-]. The user's terminal is afterwards as it was.
func (x *shellCmd) Run(ctx context.Context, s *streams, r *sandboxCmd) error {
	c, err := r.client()
	if err != nil {
		return err
	}
	local, _ := s.in.(*os.File)
	if local != nil && !term.IsTerminal(int(local.Fd())) {
		local = nil
	}
	sid := x.Attach
	if sid == "" {
		in := openTerminalBody{Cwd: x.Workdir, User: x.User}
		if t := os.Getenv("TERM"); t != "" {
			in.Env = map[string]string{"TERM": t}
		}
		in.Cols, in.Rows = window(local)
		if args := x.Command; len(args) > 0 {
			if args[0] == "--" {
				args = args[1:]
			}
			if len(args) == 1 {
				in.Cmd = args[0]
			} else if len(args) > 1 {
				in.Cmd = args
			}
		}
		var out struct {
			SessionID string `json:"session_id"`
		}
		if _, err := c.call(ctx, http.MethodPost, c.sandboxes(x.ID, "terminal"), nil, in, &out); err != nil {
			return err
		}
		sid = out.SessionID
	}
	ctx, cancel := signal.NotifyContext(ctx, syscall.SIGHUP, syscall.SIGQUIT)
	defer cancel()
	conn, err := c.dialTerminal(ctx, x.ID, sid)
	if err != nil {
		return err
	}
	defer func() { _ = conn.CloseNow() }()
	if local != nil {
		before, err := term.MakeRaw(int(local.Fd()))
		if err != nil {
			return err
		}
		defer func() { _ = term.Restore(int(local.Fd()), before) }()
		go resizes(ctx, conn, local)
	}
	left := make(chan struct{})
	go typing(ctx, conn, s.in, local != nil, left)
	code, err := showing(ctx, conn, s, left)
	ended := err == nil && code >= 0 && ctx.Err() == nil
	if local != nil && !ended {
		_, _ = io.WriteString(s.out, asBefore)
	}
	switch {
	case err != nil:
		return err
	case code < 0:
		fmt.Fprintf(s.err, "\r\n[left the terminal; `sandlot sandbox shell --attach %s %s` goes on]\r\n", sid, x.ID)
	case code > 0:
		return exitCode(code)
	}
	return nil
}

func window(f *os.File) (cols, rows int) {
	if f == nil {
		return 0, 0
	}
	cols, rows, err := term.GetSize(int(f.Fd()))
	if err != nil || cols < 1 || rows < 1 {
		return 0, 0
	}
	return min(cols, 1000), min(rows, 1000)
}

func (c *client) dialTerminal(ctx context.Context, id, sid string) (*websocket.Conn, error) {
	url := "ws" + strings.TrimPrefix(c.base, "http") + c.sandboxes(id, "terminal", sid, "ws")
	conn, resp, err := websocket.Dial(ctx, url, &websocket.DialOptions{
		HTTPClient: c.http,
		HTTPHeader: http.Header{"Authorization": {"Bearer " + c.token.Reveal()}, "User-Agent": {"sandlot/" + version}},
	})
	if err != nil {
		if resp != nil && resp.StatusCode/100 != 1 && resp.Body != nil {
			return nil, readError(resp)
		}
		return nil, fmt.Errorf("%s: %w", c.base, err)
	}
	conn.SetReadLimit(maxShellMessage)
	return conn, nil
}

func tell(ctx context.Context, conn *websocket.Conn, m terminalMessage) error {
	b, err := json.Marshal(m)
	if err != nil {
		return err
	}
	return conn.Write(ctx, websocket.MessageText, b)
}

// resizes tells the sandbox of each new size of the window, first of today's: it may be another viewer's.
func resizes(ctx context.Context, conn *websocket.Conn, f *os.File) {
	changed := make(chan os.Signal, 1)
	signal.Notify(changed, syscall.SIGWINCH)
	defer signal.Stop(changed)
	for {
		if cols, rows := window(f); cols > 0 && tell(ctx, conn, terminalMessage{Type: "resize", Cols: cols, Rows: rows}) != nil {
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}

// typing sends what is typed, until the detach key or the input's end. An input that is no terminal ends with Ctrl-D, on a
// line of its own, for each program that still reads.
func typing(ctx context.Context, conn *websocket.Conn, in io.Reader, raw bool, left chan<- struct{}) {
	buf := make([]byte, 32<<10)
	end := []byte{4}
	for {
		n, err := in.Read(buf)
		b := buf[:n]
		if raw {
			if i := bytes.IndexByte(b, detachKey); i >= 0 {
				_ = conn.Write(ctx, websocket.MessageBinary, b[:i])
				close(left)
				_ = conn.Close(websocket.StatusNormalClosure, "left")
				return
			}
		}
		if len(b) > 0 {
			if conn.Write(ctx, websocket.MessageBinary, b) != nil {
				return
			}
			end = []byte{4}
			if b[len(b)-1] != '\n' {
				end = []byte{'\n', 4}
			}
		}
		if err == nil {
			continue
		}
		for !raw && conn.Write(ctx, websocket.MessageBinary, end) == nil {
			end = []byte{4}
			time.Sleep(time.Second)
		}
		return
	}
}

// showing copies what the terminal shows, and returns its exit code: -1 when it was left, 130 when ctx ended.
func showing(ctx context.Context, conn *websocket.Conn, s *streams, left <-chan struct{}) (int, error) {
	for {
		kind, b, err := conn.Read(ctx)
		if err != nil {
			select {
			case <-left:
				return -1, nil
			default:
			}
			if ctx.Err() != nil {
				return 130, nil
			}
			return 0, fmt.Errorf("the connection to the terminal was lost; it goes on in the sandbox: %w", err)
		}
		if kind == websocket.MessageBinary {
			if _, err := s.out.Write(b); err != nil {
				return 0, err
			}
			continue
		}
		var m terminalMessage
		if json.Unmarshal(b, &m) != nil {
			continue
		}
		switch {
		case m.Type == "exit" && m.ExitCode != nil:
			return *m.ExitCode, nil
		case m.Type == "skipped":
			fmt.Fprintf(s.err, "\r\n[%d bytes were too fast for this connection]\r\n", m.Bytes)
		case m.Type == "error":
			e := parseEnvelope(b)
			switch {
			case e == nil:
				return 0, errors.New("the server reported an error that cannot be read")
			case e.Code != "timeout":
				return 0, e
			}
			fmt.Fprintf(s.err, "\r\n[%s]\r\n", e.Message)
		}
	}
}
