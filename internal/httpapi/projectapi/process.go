package projectapi

import (
	"encoding/base64"
	"net/http"
	"strconv"
	"time"

	"sandlot"
	"sandlot/internal/authz"
	"sandlot/internal/httpapi/route"
)

type processBody struct {
	PID        int       `json:"pid"`
	Argv       []string  `json:"argv"`
	User       string    `json:"user"`
	StartedAt  time.Time `json:"started_at"`
	Background bool      `json:"background"`
	Running    bool      `json:"running"`
	ExitCode   *int      `json:"exit_code,omitempty"`
	Signal     string    `json:"signal,omitempty"`
	LogPath    string    `json:"log_path,omitempty"`
}

type processList struct {
	Processes []processBody `json:"processes"`
}

type signalRequest struct {
	Signal string `json:"signal,omitempty" doc:"A name such as SIGTERM (the default) or KILL, or a number"`
}

type stdinRequest struct {
	Data   string `json:"data,omitempty"`
	Base64 string `json:"data_base64,omitempty" doc:"Instead of data, for bytes that are not UTF-8"`
	Close  bool   `json:"close,omitempty" doc:"Then close the process's input"`
}

func (a api) processes() []*route.Operation {
	codes := []sandlot.Code{sandlot.CodeNotRunning, sandlot.CodeSandboxUnhealthy, sandlot.CodeTimeout}
	return []*route.Operation{
		{
			ID: "listProcesses", Method: http.MethodGet, Path: base + "/{id}/processes", Tag: "exec", Action: authz.Write, Response: processList{},
			Summary: "Processes inside, and ended ones that the API started", Codes: codes, Handle: a.processList,
		},
		{
			ID: "streamProcess", Method: http.MethodGet, Path: base + "/{id}/processes/{pid}/stream", Tag: "exec", Action: authz.Write,
			Raw: "text/event-stream", Stream: true, Summary: "Follow a background process from its first output", Detail: streamDetail,
			Codes: append(codes, sandlot.CodeShuttingDown), Handle: a.follow,
		},
		{
			ID: "signalProcess", Method: http.MethodPost, Path: base + "/{id}/processes/{pid}/signal", Tag: "exec", Action: authz.Write,
			Request: signalRequest{}, Optional: true, Status: http.StatusNoContent, Summary: "Signal a process, with its group when the API started it",
			Codes: append(codes, sandlot.CodeConflict), Handle: a.signal,
		},
		{
			ID: "writeStdin", Method: http.MethodPost, Path: base + "/{id}/processes/{pid}/stdin", Tag: "exec", Action: authz.Write,
			Request: stdinRequest{}, Status: http.StatusNoContent, Summary: "Write to a background process's input",
			Codes: append(codes, sandlot.CodeConflict), Handle: a.stdin,
		},
	}
}

// process reads the path's ids.
func process(q *route.Request) (sandlot.ID, int, error) {
	id, err := q.SandboxID()
	if err != nil {
		return "", 0, err
	}
	pid, err := strconv.Atoi(q.R.PathValue("pid"))
	if err != nil || pid < 1 || pid > 1<<22 {
		return "", 0, sandlot.Errorf(sandlot.CodeNotFound, "no such process")
	}
	return id, pid, nil
}

func (a api) processList(q *route.Request) error {
	id, err := q.SandboxID()
	if err != nil {
		return err
	}
	list, err := a.service.Processes(q.Context(), q.Grant, id)
	if err != nil {
		return err
	}
	out := processList{Processes: []processBody{}}
	for _, p := range list {
		out.Processes = append(out.Processes, processBody{
			PID: p.PID, Argv: orEmpty(p.Argv), User: p.User, StartedAt: p.StartedAt, Background: p.Background, Running: p.Running,
			ExitCode: p.ExitCode, Signal: p.Signal, LogPath: p.LogPath,
		})
	}
	return q.JSON(out)
}

func (a api) follow(q *route.Request) error {
	id, pid, err := process(q)
	if err != nil {
		return err
	}
	ctx, cancel := q.Stream()
	defer cancel()
	s, err := a.service.Follow(ctx, q.Grant, id, pid)
	if err != nil {
		return route.Cause(ctx, err)
	}
	return relay(q, ctx, cancel, s)
}

func (a api) signal(q *route.Request) error {
	id, pid, err := process(q)
	if err != nil {
		return err
	}
	in := signalRequest{Signal: "SIGTERM"}
	if err := q.Decode(&in); err != nil {
		return err
	}
	if err := a.service.Signal(q.Context(), q.Grant, id, pid, in.Signal); err != nil {
		return err
	}
	return q.NoContent()
}

func (a api) stdin(q *route.Request) error {
	id, pid, err := process(q)
	if err != nil {
		return err
	}
	var in stdinRequest
	if err := q.Decode(&in); err != nil {
		return err
	}
	data := []byte(in.Data)
	if in.Base64 != "" {
		if in.Data != "" {
			return sandlot.Errorf(sandlot.CodeInvalidRequest, "data and data_base64 exclude each other")
		}
		if data, err = base64.StdEncoding.DecodeString(in.Base64); err != nil {
			return sandlot.Errorf(sandlot.CodeInvalidRequest, "data_base64 is not base64").With("field", "data_base64")
		}
	}
	if err := a.service.Stdin(q.Context(), q.Grant, id, pid, data, in.Close); err != nil {
		return err
	}
	return q.NoContent()
}
