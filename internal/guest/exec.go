package guest

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"sandlot"
	"sandlot/internal/wire"
)

const (
	maxPID       = 1 << 22
	maxProcesses = 4096 // in one answer
)

func itoa(n int64) string { return strconv.FormatInt(n, 10) }

// ExecResult is a command that has ended.
type ExecResult struct {
	wire.Exit
	PID            int
	Stdout, Stderr []byte
}

// Run runs a command to its end and keeps the first e.Collect bytes of each output, sandlot.MaxOutputBytes
// when it is 0. A cancelled ctx ends the command.
// Fails with CodeInvalidRequest, CodeTooLarge, CodeRateLimited or CodeConflict (no identity yet).
func (c *Client) Run(ctx context.Context, e wire.Exec) (ExecResult, error) {
	if e.Collect <= 0 || e.Collect > sandlot.MaxOutputBytes {
		e.Collect = sandlot.MaxOutputBytes
	}
	e.Background = false
	s, err := c.Exec(ctx, e)
	if err != nil {
		return ExecResult{}, err
	}
	defer s.Close()
	var out ExecResult
	for {
		kind, payload, err := s.Next()
		if errors.Is(err, io.EOF) {
			out.Exit, out.PID = s.exit, s.started.PID
			return out, nil
		}
		if err != nil {
			return ExecResult{}, err
		}
		to := &out.Stdout
		if kind == wire.FrameStderr {
			to = &out.Stderr
		}
		if kind == wire.FrameStdout || kind == wire.FrameStderr {
			if int64(len(*to)+len(payload)) > e.Collect {
				return ExecResult{}, nonsense("it sent more output than was asked for")
			}
			*to = append(*to, payload...)
		}
	}
}

// Exec starts a command. A foreground one streams until it ends, and Close or a cancelled ctx ends it; of
// a background one only Started is there to read. Codes as of Run.
func (c *Client) Exec(ctx context.Context, e wire.Exec) (*ExecStream, error) {
	b, err := json.Marshal(e)
	if err != nil {
		return nil, sandlot.Wrap(err, sandlot.CodeInvalidRequest, "the command cannot be written as JSON")
	}
	q := request{method: http.MethodPost, path: wire.PathExec, body: bytes.NewReader(b), size: int64(len(b))}
	var whole time.Duration
	if e.TimeoutMS > 0 && !e.Background {
		whole = time.Duration(e.TimeoutMS)*time.Millisecond + execGrace
	}
	// With Collect the answer only begins when the command has ended.
	return c.frames(ctx, q, whole, e.Collect > 0 && !e.Background)
}

// StartBackground starts a command that outlives the call. Codes as of Run; a program that cannot be
// started is CodeInvalidRequest.
func (c *Client) StartBackground(ctx context.Context, e wire.Exec) (wire.Started, error) {
	e.Background = true
	ctx, cancel := context.WithTimeoutCause(ctx, callTimeout, errNoAnswer)
	defer cancel()
	s, err := c.Exec(ctx, e)
	if err != nil {
		return wire.Started{}, err
	}
	defer s.Close()
	s.finish()
	if s.started.PID == 0 || s.started.LogPath == "" {
		return wire.Started{}, nonsense("a background command without pid or log")
	}
	return s.started, nil
}

// ProcessStream follows a background process from its first output until it ends.
// Fails with CodeNotFound or CodeInvalidRequest.
func (c *Client) ProcessStream(ctx context.Context, pid int) (*ExecStream, error) {
	return c.frames(ctx, request{method: http.MethodGet, path: processPath(pid, "stream")}, 0, false)
}

func processPath(pid int, what string) string {
	return wire.PathProcesses + "/" + strconv.Itoa(pid) + "/" + what
}

// Signal signals a process that the agent started with its group, or any other by itself.
// Fails with CodeNotFound, CodeInvalidRequest or CodeForbidden.
func (c *Client) Signal(ctx context.Context, pid int, signal string) error {
	return c.call(ctx, request{method: http.MethodPost, path: processPath(pid, "signal")}, wire.Signal{Signal: signal}, nil)
}

// Stdin gives b to a background process, and then, when asked, the end of its input.
// Fails with CodeNotFound, CodeInvalidRequest, CodeConflict or CodeTimeout.
func (c *Client) Stdin(ctx context.Context, pid int, b []byte, end bool) error {
	q := request{method: http.MethodPost, path: processPath(pid, "stdin"), body: bytes.NewReader(b), size: int64(len(b))}
	if end {
		q.query = map[string][]string{"close": {"1"}}
	}
	ctx, cancel := context.WithTimeoutCause(ctx, 2*callTimeout, errNoAnswer)
	defer cancel()
	resp, err := c.send(ctx, c.calls, q)
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

// Processes lists what runs, and what the agent started and has ended lately.
func (c *Client) Processes(ctx context.Context) ([]wire.Process, error) {
	var out []wire.Process
	if err := c.call(ctx, request{method: http.MethodGet, path: wire.PathProcesses}, nil, &out); err != nil {
		return nil, err
	}
	if len(out) > maxProcesses {
		return nil, nonsense("it lists too many processes")
	}
	for _, p := range out {
		if p.PID <= 0 || p.PID > maxPID || !validSignal(p.Signal) || !validLog(p.LogPath) {
			return nil, nonsense("it lists an impossible process")
		}
	}
	return out, nil
}

// ExecStream is a command's frames. Next and Close are one goroutine's; Close may come from another.
type ExecStream struct {
	*frameStream
	started wire.Started
	exit    wire.Exit
	ended   bool
	viewer  bool // of a terminal: it may miss something
}

// frames makes a call that is answered with frames. With whole, all of it must be over by then.
func (c *Client) frames(ctx context.Context, q request, whole time.Duration, late bool) (*ExecStream, error) {
	fs, err := c.open(ctx, q, whole, late)
	if err != nil {
		return nil, err
	}
	s := &ExecStream{frameStream: fs}
	kind, payload, err := fs.read()
	if err == nil && (kind != wire.FrameStarted || json.Unmarshal(payload, &s.started) != nil ||
		s.started.PID < 0 || s.started.PID > maxPID || !validLog(s.started.LogPath)) {
		err = nonsense("its frames do not begin as they should")
	}
	if err != nil {
		fs.Close()
		return nil, err
	}
	return s, nil
}

// Started tells the pid (0: the program could not be started, as the exit code and stderr say).
func (s *ExecStream) Started() wire.Started { return s.started }

// Exit is how the command ended, after Next returned io.EOF.
func (s *ExecStream) Exit() wire.Exit { return s.exit }

// Next returns the next frame: FrameStdout, FrameStderr, FramePing, and at last FrameExit, whose content is
// Exit's too. The payload is good until the next call. After FrameExit it returns io.EOF.
func (s *ExecStream) Next() (kind byte, payload []byte, err error) {
	if s.ended {
		return 0, nil, io.EOF
	}
	kind, payload, err = s.read()
	if err != nil {
		return 0, nil, err
	}
	switch kind {
	case wire.FrameStdout, wire.FrameStderr, wire.FramePing:
		return kind, payload, nil
	case wire.FrameSkipped:
		var missed wire.Skipped
		if s.viewer && json.Unmarshal(payload, &missed) == nil && missed.Bytes > 0 {
			return kind, payload, nil
		}
	case wire.FrameExit:
		var exit wire.Exit
		if json.Unmarshal(payload, &exit) != nil || exit.ExitCode < 0 || exit.ExitCode > 255 || exit.DurationUS < 0 || !validSignal(exit.Signal) {
			return 0, nil, nonsense("its exit is impossible")
		}
		s.exit, s.ended = exit, true
		payload = bytes.Clone(payload)
		s.finish()
		return kind, payload, nil
	}
	return 0, nil, nonsense("a frame of kind %d where none belongs", kind)
}

func validSignal(s string) bool {
	if s == "" {
		return true
	}
	return strings.HasPrefix(s, "SIG") && len(s) <= 16 && strings.Trim(s, "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+") == ""
}

func validLog(p string) bool {
	return p == "" || p[0] == '/' && len(p) <= sandlot.MaxPathBytes && utf8.ValidString(p) && sanitize(p, 2*sandlot.MaxPathBytes) == p
}

// frameStream reads frames from an answer, and gives up when none comes for too long.
type frameStream struct {
	body   io.ReadCloser
	r      *bufio.Reader
	buf    []byte
	ctx    context.Context
	cancel context.CancelCauseFunc
	silent *time.Timer
	whole  *time.Timer
}

// open makes the call. late says that the first frame may be as long in coming as whole.
func (c *Client) open(ctx context.Context, q request, whole time.Duration, late bool) (*frameStream, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	s := &frameStream{ctx: ctx, cancel: cancel}
	give := func() { cancel(errNoAnswer) }
	if whole > 0 {
		s.whole = time.AfterFunc(whole, give)
	}
	if !late {
		s.silent = time.AfterFunc(stallTimeout, give)
	}
	resp, err := c.send(ctx, c.calls, q)
	if err != nil {
		s.stop()
		return nil, err
	}
	if s.silent == nil {
		s.silent = time.AfterFunc(stallTimeout, give)
	}
	s.body, s.r = resp.Body, bufio.NewReaderSize(resp.Body, 16<<10)
	return s, nil
}

func (s *frameStream) stop() {
	if s.whole != nil {
		s.whole.Stop()
	}
	if s.silent != nil {
		s.silent.Stop()
	}
	s.cancel(context.Canceled)
}

// read returns the next frame. The silence only counts while somebody reads.
func (s *frameStream) read() (byte, []byte, error) {
	s.silent.Reset(stallTimeout)
	kind, payload, err := wire.ReadFrame(s.r, s.buf)
	s.silent.Stop()
	s.buf = payload[:0]
	if err != nil {
		return 0, nil, broken(s.ctx, err)
	}
	if kind == wire.FrameError {
		return 0, nil, guestError(payload)
	}
	return kind, payload, nil
}

// finish looks for the answer's end, so that its stream can carry the next call. It is due at once.
func (s *frameStream) finish() {
	s.silent.Reset(time.Second)
	_, _ = s.r.ReadByte()
	s.silent.Stop()
}

// Close ends the stream; a foreground command that still runs is killed. It may be called at any time.
func (s *frameStream) Close() {
	s.stop()
	_ = s.body.Close()
}
