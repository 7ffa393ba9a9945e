package projectapi

import (
	"context"
	"encoding/base64"
	"errors"
	"io"
	"maps"
	"net/http"
	"time"

	"sandlot"
	"sandlot/internal/authz"
	"sandlot/internal/httpapi/route"
	"sandlot/internal/service"
	"sandlot/internal/wire"
)

type codeRequest struct {
	Code      *string `json:"code" doc:"At most 1 MiB"`
	Language  string  `json:"language,omitempty" doc:"python, javascript, typescript or bash; default the context's, or python"`
	ContextID string  `json:"context_id,omitempty" doc:"The state to run in, made when there is none of that name. Default: default for python; javascript, typescript and bash keep nothing then"`
	TimeoutS  *int64  `json:"timeout_s,omitempty" doc:"1 to 86400, default 60; then the cell is interrupted"`
	Stream    bool    `json:"stream,omitempty" doc:"Answer with server-sent events"`
}

type cellError struct {
	Name      string `json:"name"`
	Value     string `json:"value"`
	Traceback string `json:"traceback"`
}

type codeBody struct {
	ContextID       string           `json:"context_id" doc:"Empty when no state is kept"`
	ExecutionCount  int              `json:"execution_count" doc:"In this context, from 1"`
	Stdout          string           `json:"stdout"`
	Stderr          string           `json:"stderr"`
	StdoutBase64    string           `json:"stdout_base64,omitempty" doc:"The bytes themselves, when they are not UTF-8"`
	StderrBase64    string           `json:"stderr_base64,omitempty"`
	Results         []map[string]any `json:"results" doc:"Values by media type: text/plain, text/html, image/png as base64 …"`
	Error           *cellError       `json:"error"`
	DurationMS      float64          `json:"duration_ms" doc:"Measured inside"`
	TimedOut        bool             `json:"timed_out"`
	StateLost       bool             `json:"state_lost" doc:"The kernel died or was replaced: variables are gone"`
	StdoutTruncated bool             `json:"stdout_truncated" doc:"It printed more than the 10 MiB that are kept; a line at its end says so too"`
	StderrTruncated bool             `json:"stderr_truncated"`
	ResultsDropped  int              `json:"results_dropped,omitempty" doc:"Results that were too many or too large"`
}

// endEvent is the last event of a cell's stream.
type endEvent struct {
	Type           string  `json:"type"`
	ContextID      string  `json:"context_id"`
	ExecutionCount int     `json:"execution_count"`
	DurationMS     float64 `json:"duration_ms"`
	TimedOut       bool    `json:"timed_out"`
	StateLost      bool    `json:"state_lost"`
	ResultsDropped int     `json:"results_dropped,omitempty"`
}

// errorEvent is what the code raised. A failure of the sandbox has an "error" with a code instead.
type errorEvent struct {
	Type string `json:"type"`
	cellError
}

type contextRequest struct {
	ID       string `json:"id,omitempty" doc:"Default: one is made up"`
	Language string `json:"language,omitempty" doc:"python (default), javascript or typescript"`
	Cwd      string `json:"cwd,omitempty" doc:"Default /workspace"`
}

type contextBody struct {
	ID             string    `json:"id"`
	Language       string    `json:"language"`
	Cwd            string    `json:"cwd"`
	State          string    `json:"state" enum:"starting,idle,busy,dead" doc:"dead: the next cell starts it anew"`
	PID            int       `json:"pid,omitempty"`
	ExecutionCount int       `json:"execution_count"`
	CreatedAt      time.Time `json:"created_at"`
	LastUsedAt     time.Time `json:"last_used_at"`
}

type contextList struct {
	Contexts []contextBody `json:"contexts"`
}

func showContext(c wire.Context) contextBody {
	return contextBody{
		ID: c.ID, Language: c.Language, Cwd: c.Cwd, State: c.State, PID: c.PID, ExecutionCount: c.ExecutionCount,
		CreatedAt: c.CreatedAt.UTC().Truncate(time.Millisecond), LastUsedAt: c.LastUsedAt.UTC().Truncate(time.Millisecond),
	}
}

func (a api) kernels() []*route.Operation {
	codes := []sandlot.Code{sandlot.CodeNotRunning, sandlot.CodeSandboxUnhealthy, sandlot.CodeTimeout}
	one := base + "/{id}/contexts/{context}"
	return []*route.Operation{
		{
			ID: "runCode", Method: http.MethodPost, Path: base + "/{id}/run-code", Tag: "code", Action: authz.Write, Request: codeRequest{}, Response: codeBody{},
			Raw: "text/event-stream", Stream: true, Summary: "Run code as a notebook cell does",
			Detail: "Python keeps its state for the next cell of the same context. A cell past its time is interrupted and its state kept; " +
				"a kernel that does not mind that is replaced, which `state_lost` tells, as it does of one that died. " +
				"A client that goes away interrupts its cell. With `stream`, events: `{\"type\":\"stdout\"|\"stderr\",\"data\":…}`, or `data_base64` for bytes that are not UTF-8; " +
				"`{\"type\":\"result\",\"text/plain\":…}`; `{\"type\":\"error\",\"name\",\"value\",\"traceback\"}`; at last `{\"type\":\"end\",\"execution_count\":…}`.",
			Codes:  append(codes, sandlot.CodeConflict, sandlot.CodeShuttingDown, sandlot.CodeUnsupported),
			Handle: a.runCode,
		},
		{
			ID: "listContexts", Method: http.MethodGet, Path: base + "/{id}/contexts", Tag: "code", Action: authz.Write, Response: contextList{},
			Summary: "Contexts: the states that cells share", Codes: codes, Handle: a.contextList,
		},
		{
			ID: "createContext", Method: http.MethodPost, Path: base + "/{id}/contexts", Tag: "code", Action: authz.Write, Request: contextRequest{}, Optional: true,
			Response: contextBody{}, Status: http.StatusCreated, Summary: "Start a context ahead of its first cell",
			Codes: append(codes, sandlot.CodeConflict, sandlot.CodeUnsupported), Handle: a.contextCreate,
		},
		{
			ID: "restartContext", Method: http.MethodPost, Path: one + "/restart", Tag: "code", Action: authz.Write, Response: contextBody{},
			Summary: "Give a context a new kernel; a cell that runs in it ends", Codes: append(codes, sandlot.CodeConflict), Handle: a.contextRestart,
		},
		{
			ID: "interruptContext", Method: http.MethodPost, Path: one + "/interrupt", Tag: "code", Action: authz.Write, Status: http.StatusNoContent,
			Summary: "Interrupt the cell that runs in a context, if one does", Codes: codes, Handle: a.contextInterrupt,
		},
		{
			ID: "deleteContext", Method: http.MethodDelete, Path: one, Tag: "code", Action: authz.Write, Status: http.StatusNoContent,
			Summary: "End a context with all that runs in it", Codes: codes, Handle: a.contextDelete,
		},
	}
}

func (a api) runCode(q *route.Request) error {
	id, err := q.SandboxID()
	if err != nil {
		return err
	}
	var in codeRequest
	if err := q.Decode(&in); err != nil {
		return err
	}
	if in.Code == nil {
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "code is missing").With("field", "code")
	}
	req := service.CodeRequest{Code: *in.Code, Language: in.Language, Context: in.ContextID, Timeout: route.Seconds(given(in.TimeoutS))}
	if in.Stream {
		ctx, cancel := q.Stream()
		defer cancel()
		s, err := a.service.RunCodeStream(ctx, q.Grant, id, req)
		if err != nil {
			return route.Cause(ctx, err)
		}
		return relayCell(q, ctx, cancel, s)
	}
	r, err := a.service.RunCode(q.Context(), q.Grant, id, req)
	if err != nil {
		return err
	}
	out := codeBody{
		ContextID: r.Context, ExecutionCount: r.ExecutionCount, Results: make([]map[string]any, 0, len(r.Results)),
		DurationMS: float64(r.DurationUS) / 1000, TimedOut: r.TimedOut, StateLost: r.StateLost,
		StdoutTruncated: r.StdoutTruncated, StderrTruncated: r.StderrTruncated, ResultsDropped: r.ResultsDropped,
	}
	out.Stdout, out.StdoutBase64 = text(r.Stdout, r.StdoutTruncated)
	out.Stderr, out.StderrBase64 = text(r.Stderr, r.StderrTruncated)
	if r.StdoutTruncated {
		out.Stdout += outputCut
	}
	if r.StderrTruncated {
		out.Stderr += outputCut
	}
	for _, v := range r.Results {
		out.Results = append(out.Results, v.Data)
	}
	if e := r.Error; e != nil {
		out.Error = (*cellError)(e)
	}
	return q.JSON(out)
}

// outputCut is for who reads the text and no flag: a model, a notebook.
const outputCut = "\n[sandlot: the output's first 10 MiB end here; the rest is not kept]\n"

// relayCell sends a cell's frames as events until its end, the client's, or the server's.
func relayCell(q *route.Request, ctx context.Context, cancel func(), s *service.CodeStream) error { //nolint:revive // ctx is the stream's, q holds the request's
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
		case wire.FrameResult:
			r := s.Result()
			e := maps.Clone(r.Data)
			e["type"], e["main"] = "result", r.Main // no media type is spelt like these
			err = sse.Event(e)
		case wire.FrameCell:
			for i := range runes {
				_ = send(i, runes[i].Rest(), false)
			}
			end := s.End()
			if end.Error != nil {
				err = sse.Event(errorEvent{"error", cellError(*end.Error)})
			}
			if err == nil {
				err = sse.Event(endEvent{
					Type: "end", ContextID: end.Context, ExecutionCount: end.ExecutionCount, DurationMS: float64(end.DurationUS) / 1000,
					TimedOut: end.TimedOut, StateLost: end.StateLost, ResultsDropped: end.ResultsDropped,
				})
			}
		}
		if err != nil {
			return err
		}
	}
}

func (a api) contextList(q *route.Request) error {
	id, err := q.SandboxID()
	if err != nil {
		return err
	}
	list, err := a.service.ListContexts(q.Context(), q.Grant, id)
	if err != nil {
		return err
	}
	out := contextList{Contexts: make([]contextBody, 0, len(list))}
	for _, c := range list {
		out.Contexts = append(out.Contexts, showContext(c))
	}
	return q.JSON(out)
}

func (a api) contextCreate(q *route.Request) error {
	id, err := q.SandboxID()
	if err != nil {
		return err
	}
	var in contextRequest
	if err := q.Decode(&in); err != nil {
		return err
	}
	c, err := a.service.CreateContext(q.Context(), q.Grant, id, service.ContextRequest{ID: in.ID, Language: in.Language, Cwd: in.Cwd})
	if err != nil {
		return err
	}
	return q.JSON(showContext(c))
}

func (a api) contextRestart(q *route.Request) error {
	id, err := q.SandboxID()
	if err != nil {
		return err
	}
	c, err := a.service.RestartContext(q.Context(), q.Grant, id, q.R.PathValue("context"))
	if err != nil {
		return err
	}
	return q.JSON(showContext(c))
}

func (a api) contextInterrupt(q *route.Request) error {
	id, err := q.SandboxID()
	if err != nil {
		return err
	}
	if err := a.service.InterruptContext(q.Context(), q.Grant, id, q.R.PathValue("context")); err != nil {
		return err
	}
	return q.NoContent()
}

func (a api) contextDelete(q *route.Request) error {
	id, err := q.SandboxID()
	if err != nil {
		return err
	}
	if err := a.service.DeleteContext(q.Context(), q.Grant, id, q.R.PathValue("context")); err != nil {
		return err
	}
	return q.NoContent()
}
