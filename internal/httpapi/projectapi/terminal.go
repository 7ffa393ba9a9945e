package projectapi

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"sandlot"
	"sandlot/internal/authz"
	"sandlot/internal/httpapi/route"
	"sandlot/internal/service"
	"sandlot/internal/wire"
)

type terminalRequest struct {
	Cols int               `json:"cols,omitempty" doc:"1 to 1000, default 80"`
	Rows int               `json:"rows,omitempty" doc:"1 to 1000, default 24"`
	Cmd  command           `json:"cmd,omitempty"`
	Cwd  string            `json:"cwd,omitempty" doc:"Default /workspace"`
	Env  map[string]string `json:"env,omitempty" doc:"Over the sandbox's own; TERM is xterm-256color unless given"`
	User string            `json:"user,omitempty" doc:"Default user; root on request"`
}

type terminalBody struct {
	SessionID string    `json:"session_id"`
	PID       int       `json:"pid"`
	Argv      []string  `json:"argv"`
	User      string    `json:"user"`
	Cols      int       `json:"cols"`
	Rows      int       `json:"rows"`
	Running   bool      `json:"running"`
	ExitCode  *int      `json:"exit_code,omitempty"`
	Viewers   int       `json:"viewers"`
	StartedAt time.Time `json:"started_at"`
}

type terminalList struct {
	Terminals []terminalBody `json:"terminals"`
}

// encoded says how data is to be read: true, or the bytes themselves in base64 instead of data.
type encoded struct {
	flag bool
	data string
}

// UnmarshalJSON takes either form.
func (e *encoded) UnmarshalJSON(b []byte) error {
	if json.Unmarshal(b, &e.flag) == nil || json.Unmarshal(b, &e.data) == nil {
		return nil
	}
	return sandlot.Errorf(sandlot.CodeInvalidRequest, "base64 must be true, or a string").With("field", "base64")
}

// Schema is for the document.
func (encoded) Schema(huma.Registry) *huma.Schema {
	return &huma.Schema{Description: "true: data is base64. A string: base64, instead of data", OneOf: []*huma.Schema{{Type: "boolean"}, {Type: "string"}}}
}

type inputRequest struct {
	Data   string  `json:"data,omitempty"`
	Base64 encoded `json:"base64,omitzero"`
}

type resizeRequest struct {
	Cols int `json:"cols" doc:"1 to 1000"`
	Rows int `json:"rows" doc:"1 to 1000"`
}

// terminalEvent is one event of a terminal's stream.
type terminalEvent struct {
	Type string `json:"type"`
	Data []byte `json:"data"` // base64
}

// skippedEvent says what a slow viewer missed.
type skippedEvent struct {
	Type  string `json:"type"`
	Bytes int64  `json:"bytes"`
}

func (a api) terminals() []*route.Operation {
	codes := []sandlot.Code{sandlot.CodeNotRunning, sandlot.CodeSandboxUnhealthy, sandlot.CodeTimeout}
	at := base + "/{id}/terminal"
	return []*route.Operation{
		{
			ID: "openTerminal", Method: http.MethodPost, Path: at, Tag: "terminal", Action: authz.Write, Request: terminalRequest{}, Optional: true,
			Response: terminalBody{}, Status: http.StatusCreated, Summary: "Start a terminal",
			Detail: "A login shell, or `cmd`, in a terminal of its own. It goes on without viewers, until its program ends or it is closed.",
			Codes:  codes, Handle: a.terminalOpen,
		},
		{
			ID: "listTerminals", Method: http.MethodGet, Path: at, Tag: "terminal", Action: authz.Write, Response: terminalList{},
			Summary: "Terminals, the last ended ones too", Codes: codes, Handle: a.terminalList,
		},
		{
			ID: "streamTerminal", Method: http.MethodGet, Path: at + "/{sid}/stream", Tag: "terminal", Action: authz.Write,
			Raw: "text/event-stream", Stream: true, Summary: "Watch a terminal",
			Detail: "First the last 256 KiB that it showed, then what it shows: events `{\"type\":\"output\",\"data\":base64}` and at its end " +
				"`{\"type\":\"exit\",\"exit_code\":…}`. A viewer that is too slow misses output, where `{\"type\":\"skipped\",\"bytes\":…}` says so. " +
				"To watch is no activity; to type is.",
			Codes: append(codes, sandlot.CodeShuttingDown), Handle: a.terminalStream,
		},
		{
			ID: "connectTerminal", Method: http.MethodGet, Path: at + "/{sid}/ws", Tag: "terminal", Action: authz.Write,
			Raw: "application/octet-stream", Stream: true, Summary: "Watch and type through a WebSocket",
			Detail: "Binary messages are the terminal's bytes, both ways, the last 256 KiB that it showed first. Text messages are JSON: the client's " +
				"`{\"type\":\"resize\",\"cols\":…,\"rows\":…}` and `{\"type\":\"input\",\"data\":…}`, the server's `{\"type\":\"exit\",\"exit_code\":…}` " +
				"before it closes, `{\"type\":\"skipped\",\"bytes\":…}` where the client was too slow, and `{\"type\":\"error\",\"error\":…}` for what " +
				"could not be done. A page may connect only to its own origin.",
			Codes: append(codes, sandlot.CodeShuttingDown), Handle: a.terminalSocket,
		},
		{
			ID: "typeIntoTerminal", Method: http.MethodPost, Path: at + "/{sid}/input", Tag: "terminal", Action: authz.Write, Request: inputRequest{},
			Status: http.StatusNoContent, Summary: "Type into a terminal", Detail: "At most 64 KiB.",
			Codes: append(codes, sandlot.CodeConflict), Handle: a.terminalInput,
		},
		{
			ID: "resizeTerminal", Method: http.MethodPost, Path: at + "/{sid}/resize", Tag: "terminal", Action: authz.Write, Request: resizeRequest{},
			Status: http.StatusNoContent, Summary: "Tell a terminal its window's size", Codes: append(codes, sandlot.CodeConflict), Handle: a.terminalResize,
		},
		{
			ID: "closeTerminal", Method: http.MethodDelete, Path: at + "/{sid}", Tag: "terminal", Action: authz.Write, Status: http.StatusNoContent,
			Summary: "Close a terminal", Detail: "Its session is hung up, and what does not go is killed.", Codes: codes, Handle: a.terminalClose,
		},
	}
}

func showTerminal(t wire.Terminal) terminalBody {
	return terminalBody{
		SessionID: t.ID, PID: t.PID, Argv: orEmpty(t.Argv), User: t.User, Cols: t.Cols, Rows: t.Rows, Running: t.Running,
		ExitCode: t.ExitCode, Viewers: t.Viewers, StartedAt: t.StartedAt,
	}
}

func (a api) terminalOpen(q *route.Request) error {
	id, err := q.SandboxID()
	if err != nil {
		return err
	}
	var in terminalRequest
	if err := q.Decode(&in); err != nil {
		return err
	}
	t, err := a.service.OpenTerminal(q.Context(), q.Grant, id, service.TerminalRequest{
		Argv: in.Cmd, Cwd: in.Cwd, Env: in.Env, User: in.User, Cols: in.Cols, Rows: in.Rows,
	})
	if err != nil {
		return err
	}
	return q.JSON(showTerminal(t))
}

func (a api) terminalList(q *route.Request) error {
	id, err := q.SandboxID()
	if err != nil {
		return err
	}
	list, err := a.service.Terminals(q.Context(), q.Grant, id)
	if err != nil {
		return err
	}
	out := terminalList{Terminals: []terminalBody{}}
	for _, t := range list {
		out.Terminals = append(out.Terminals, showTerminal(t))
	}
	return q.JSON(out)
}

func (a api) terminalStream(q *route.Request) error {
	id, err := q.SandboxID()
	if err != nil {
		return err
	}
	ctx, cancel := q.Stream()
	defer cancel()
	s, err := a.service.TerminalStream(ctx, q.Grant, id, q.R.PathValue("sid"))
	if err != nil {
		return route.Cause(ctx, err)
	}
	defer s.Close()
	sse := route.NewSSE(q, cancel)
	defer sse.End()
	err = watchTerminal(s, func(b []byte) error { return sse.Event(terminalEvent{"output", b}) },
		func(n int64) error { return sse.Event(skippedEvent{"skipped", n}) },
		func(x wire.Exit) error {
			return sse.Event(exitEvent{"exit", x.ExitCode, x.Signal, x.TimedOut, float64(x.DurationUS) / 1000})
		})
	if err != nil {
		err = route.Cause(ctx, err)
		sse.Error(err)
	}
	return err
}

// watchTerminal gives what a terminal shows to output, the bytes that were missed to skipped, and its end to exit.
func watchTerminal(s *service.Stream, output func([]byte) error, skipped func(int64) error, exit func(wire.Exit) error) error {
	for {
		kind, payload, err := s.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		switch {
		case err != nil:
		case kind == wire.FrameStdout:
			err = output(payload)
		case kind == wire.FrameSkipped:
			var missed wire.Skipped
			if err = json.Unmarshal(payload, &missed); err == nil {
				err = skipped(missed.Bytes)
			}
		case kind == wire.FrameExit:
			var x wire.Exit
			if err = json.Unmarshal(payload, &x); err == nil {
				err = exit(x)
			}
		}
		if err != nil {
			return err
		}
	}
}

func (a api) terminalInput(q *route.Request) error {
	id, err := q.SandboxID()
	if err != nil {
		return err
	}
	var in inputRequest
	if err := q.Decode(&in); err != nil {
		return err
	}
	data := []byte(in.Data)
	if in.Base64.flag || in.Base64.data != "" {
		text := in.Data
		if in.Base64.data != "" {
			if in.Data != "" {
				return sandlot.Errorf(sandlot.CodeInvalidRequest, "data and a base64 string exclude each other").With("field", "base64")
			}
			text = in.Base64.data
		}
		if data, err = base64.StdEncoding.DecodeString(text); err != nil {
			return sandlot.Errorf(sandlot.CodeInvalidRequest, "what is to be typed is not base64").With("field", "data")
		}
	}
	if err := a.service.TerminalInput(q.Context(), q.Grant, id, q.R.PathValue("sid"), data); err != nil {
		return err
	}
	return q.NoContent()
}

func (a api) terminalResize(q *route.Request) error {
	id, err := q.SandboxID()
	if err != nil {
		return err
	}
	var in resizeRequest
	if err := q.Decode(&in); err != nil {
		return err
	}
	if err := a.service.ResizeTerminal(q.Context(), q.Grant, id, q.R.PathValue("sid"), in.Cols, in.Rows); err != nil {
		return err
	}
	return q.NoContent()
}

func (a api) terminalClose(q *route.Request) error {
	id, err := q.SandboxID()
	if err != nil {
		return err
	}
	if err := a.service.CloseTerminal(q.Context(), q.Grant, id, q.R.PathValue("sid")); err != nil {
		return err
	}
	return q.NoContent()
}
