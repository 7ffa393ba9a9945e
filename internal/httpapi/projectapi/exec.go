package projectapi

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"unicode/utf8"

	"github.com/danielgtaylor/huma/v2"

	"sandlot"
	"sandlot/internal/authz"
	"sandlot/internal/guest"
	"sandlot/internal/httpapi/route"
	"sandlot/internal/service"
	"sandlot/internal/wire"
)

// command is a string, run with bash -c, or an argv array.
type command []string

// UnmarshalJSON takes either form.
func (c *command) UnmarshalJSON(b []byte) error {
	var line string
	if json.Unmarshal(b, &line) == nil {
		*c = nil
		if line != "" {
			*c = command{"bash", "-c", line}
		}
		return nil
	}
	var argv []string
	if json.Unmarshal(b, &argv) != nil {
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "cmd must be a string or a list of strings").With("field", "cmd")
	}
	*c = argv
	return nil
}

// Schema is for the document.
func (command) Schema(huma.Registry) *huma.Schema {
	return &huma.Schema{
		Description: "A string runs with bash -c; a list is an argv",
		OneOf:       []*huma.Schema{{Type: "string"}, {Type: "array", Items: &huma.Schema{Type: "string"}}},
	}
}

var _ huma.SchemaProvider = command(nil)

type execRequest struct {
	Cmd        command           `json:"cmd"`
	Cwd        string            `json:"cwd,omitempty" doc:"Default /workspace"`
	Env        map[string]string `json:"env,omitempty" doc:"Over the sandbox's own"`
	TimeoutS   *int64            `json:"timeout_s,omitempty" doc:"1 to 86400, default 60; background: none unless given"`
	Stdin      string            `json:"stdin,omitempty"`
	User       string            `json:"user,omitempty" doc:"Default user; root on request"`
	Stream     bool              `json:"stream,omitempty" doc:"Answer with server-sent events"`
	Background bool              `json:"background,omitempty" doc:"Answer at once with pid and log_path"`
}

type execBody struct {
	ExitCode        int     `json:"exit_code" doc:"128+n when signal n ended it"`
	Signal          string  `json:"signal,omitempty"`
	Stdout          string  `json:"stdout"`
	Stderr          string  `json:"stderr"`
	StdoutBase64    string  `json:"stdout_base64,omitempty" doc:"The bytes themselves, when they are not UTF-8"`
	StderrBase64    string  `json:"stderr_base64,omitempty"`
	DurationMS      float64 `json:"duration_ms" doc:"From fork to reaped, measured inside"`
	TimedOut        bool    `json:"timed_out"`
	StdoutTruncated bool    `json:"stdout_truncated" doc:"It printed more than the 10 MiB that are kept"`
	StderrTruncated bool    `json:"stderr_truncated"`
}

type backgroundBody struct {
	PID     int    `json:"pid"`
	LogPath string `json:"log_path"`
}

// outputEvent is one event of a stream of output.
type outputEvent struct {
	Type       string `json:"type" enum:"stdout,stderr,exit,error"`
	Data       string `json:"data,omitempty"`
	DataBase64 string `json:"data_base64,omitempty" doc:"Bytes that are not UTF-8"`
}

type exitEvent struct {
	Type       string  `json:"type"`
	ExitCode   int     `json:"exit_code"`
	Signal     string  `json:"signal,omitempty"`
	TimedOut   bool    `json:"timed_out"`
	DurationMS float64 `json:"duration_ms"`
}

const streamDetail = "Events: `{\"type\":\"stdout\"|\"stderr\",\"data\":…}`, or `data_base64` for bytes that are not UTF-8, and at last " +
	"`{\"type\":\"exit\",\"exit_code\":…}` or `{\"type\":\"error\",\"error\":{…}}`. A character is never split."

func (a api) execs() []*route.Operation {
	return []*route.Operation{{
		ID: "exec", Method: http.MethodPost, Path: base + "/{id}/exec", Tag: "exec", Action: authz.Write, Request: execRequest{}, Response: execBody{}, Also: backgroundBody{},
		Raw: "text/event-stream", Stream: true, Summary: "Run a command",
		Detail: "Answers when the command has ended; with `stream`, with its output as it comes; with `background`, at once with `pid` and `log_path`. " +
			"A client that goes away ends a foreground command. " + streamDetail,
		Codes: []sandlot.Code{
			sandlot.CodeNotRunning, sandlot.CodeSandboxUnhealthy, sandlot.CodeTimeout, sandlot.CodeConflict, sandlot.CodeShuttingDown,
		},
		Handle: a.exec,
	}}
}

func (a api) exec(q *route.Request) error {
	id, err := q.SandboxID()
	if err != nil {
		return err
	}
	var in execRequest
	if err := q.Decode(&in); err != nil {
		return err
	}
	if in.Stream && in.Background {
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "stream and background exclude each other: follow a background process with processes/{pid}/stream")
	}
	req := service.ExecRequest{Argv: in.Cmd, Cwd: in.Cwd, Env: in.Env, User: in.User, Timeout: route.Seconds(given(in.TimeoutS)), Stdin: []byte(in.Stdin)}
	switch {
	case in.Background:
		p, err := a.service.ExecBackground(q.Context(), q.Grant, id, req)
		if err != nil {
			return err
		}
		return q.JSON(backgroundBody{p.PID, p.LogPath})
	case in.Stream:
		ctx, cancel := q.Stream()
		defer cancel()
		s, err := a.service.ExecStream(ctx, q.Grant, id, req)
		if err != nil {
			return route.Cause(ctx, err)
		}
		return relay(q, ctx, cancel, s)
	}
	r, err := a.service.Exec(q.Context(), q.Grant, id, req)
	if err != nil {
		return err
	}
	return q.JSON(showExec(r))
}

func showExec(r guest.ExecResult) execBody {
	out := execBody{
		ExitCode: r.ExitCode, Signal: r.Signal, DurationMS: float64(r.DurationUS) / 1000, TimedOut: r.TimedOut,
		StdoutTruncated: r.StdoutTruncated, StderrTruncated: r.StderrTruncated,
	}
	out.Stdout, out.StdoutBase64 = text(r.Stdout, r.StdoutTruncated)
	out.Stderr, out.StderrBase64 = text(r.Stderr, r.StderrTruncated)
	return out
}

// text shows bytes as a string, and as base64 too when they are none. A character that truncation cut is dropped.
func text(b []byte, truncated bool) (s, encoded string) {
	if truncated {
		for i := 1; i < utf8.UTFMax && i <= len(b); i++ {
			if utf8.RuneStart(b[len(b)-i]) {
				if !utf8.FullRune(b[len(b)-i:]) {
					b = b[:len(b)-i]
				}
				break
			}
		}
	}
	if utf8.Valid(b) {
		return string(b), ""
	}
	return strings.ToValidUTF8(string(b), "\uFFFD"), base64.StdEncoding.EncodeToString(b)
}

// relay sends a stream's frames as events until its end, the client's, or the server's.
func relay(q *route.Request, ctx context.Context, cancel func(), s *service.Stream) error { //nolint:revive // ctx is the stream's, q holds the request's
	defer s.Close()
	sse := route.NewSSE(q, cancel)
	defer sse.End()
	var runes [2]route.Runes
	names := [2]string{"stdout", "stderr"}
	send := func(i int, b []byte, valid bool) error {
		e := outputEvent{Type: names[i]}
		switch {
		case len(b) == 0:
			return nil
		case valid:
			e.Data = string(b)
		default:
			e.DataBase64 = base64.StdEncoding.EncodeToString(b)
		}
		return sse.Event(e)
	}
	for {
		kind, payload, err := s.Next()
		if err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			err = route.Cause(ctx, err)
			sse.Error(err)
			return err
		}
		switch kind {
		case wire.FrameStdout, wire.FrameStderr:
			i := int(kind - wire.FrameStdout)
			b, valid := runes[i].Next(payload)
			err = send(i, b, valid)
		case wire.FrameExit:
			for i := range runes {
				_ = send(i, runes[i].Rest(), false)
			}
			var x wire.Exit
			if err = json.Unmarshal(payload, &x); err == nil {
				err = sse.Event(exitEvent{"exit", x.ExitCode, x.Signal, x.TimedOut, float64(x.DurationUS) / 1000})
			}
		}
		if err != nil {
			return err
		}
	}
}
