package agent

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"net/http"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"

	"sandlot"
	"sandlot/internal/wire"
)

// handler is the agent's API.
func (a *Agent) handler() http.Handler {
	mux := http.NewServeMux()
	on := func(pattern string, h func(http.ResponseWriter, *http.Request) error) {
		mux.Handle(pattern, a.wrap(h))
	}
	on("GET "+wire.PathHealth, a.serveHealth)
	on("POST "+wire.PathIdentity, a.serveIdentity)
	on("GET "+wire.PathStats, a.serveStats)
	on("POST "+wire.PathExec, a.serveExec)
	on("GET "+wire.PathProcesses, a.serveProcesses)
	on("GET "+wire.PathProcesses+"/{pid}/stream", a.serveFollow)
	on("POST "+wire.PathProcesses+"/{pid}/signal", a.serveSignal)
	on("POST "+wire.PathProcesses+"/{pid}/stdin", a.serveStdin)
	on("POST "+wire.PathTerminals, a.serveNewTerminal)
	on("GET "+wire.PathTerminals, a.serveTerminals)
	on("DELETE "+wire.PathTerminals+"/{id}", a.serveTerminalClose)
	on("POST "+wire.PathTerminals+"/{id}/resize", a.serveTerminalResize)
	on("POST "+wire.PathTerminals+"/{id}/input", a.serveTerminalInput)
	on("GET "+wire.PathTerminals+"/{id}/stream", a.serveTerminalStream)
	on("GET "+wire.PathList, a.serveList)
	on("GET "+wire.PathStat, a.serveStat)
	on("GET "+wire.PathContent, a.serveGet) // and HEAD
	on("PUT "+wire.PathContent, a.servePut)
	on("DELETE "+wire.PathContent, a.serveDelete)
	on("POST "+wire.PathMkdir, a.serveMkdir)
	on("POST "+wire.PathMove, a.serveMove)
	on("GET "+wire.PathArchive, a.serveArchiveGet)
	on("PUT "+wire.PathArchive, a.serveArchivePut)
	on("GET "+wire.PathWatch, a.serveWatch)
	on("POST "+wire.PathCells, a.serveCell)
	on("GET "+wire.PathContexts, a.serveContexts)
	on("POST "+wire.PathContexts, a.serveNewContext)
	on("DELETE "+wire.PathContexts+"/{id}", a.serveDeleteContext)
	on("POST "+wire.PathContexts+"/{id}/restart", a.serveRestartContext)
	on("POST "+wire.PathContexts+"/{id}/interrupt", a.serveInterruptContext)
	on("POST "+wire.PathSink, serveSink)
	on("GET "+wire.PathSource, serveSource)
	on("POST "+wire.PathForkExec, a.serveForkExec)
	return mux
}

// wrap answers with a handler's error, and with internal where it panics.
func (a *Agent) wrap(h func(http.ResponseWriter, *http.Request) error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer func() {
			v := recover()
			if v == nil {
				return
			}
			if v == http.ErrAbortHandler { //nolint:errorlint // a sentinel panic value
				panic(v)
			}
			a.log.Error("panic", "path", r.URL.Path, "value", v, "stack", string(debug.Stack()))
			answerError(w, sandlot.Errorf(sandlot.CodeInternal, "the agent failed on this request"))
		}()
		if err := h(w, r); err != nil {
			if sandlot.ErrorCode(err) == sandlot.CodeInternal {
				a.log.Warn("request", "path", r.URL.Path, "err", err)
			}
			answerError(w, err)
		}
	})
}

var statuses = map[sandlot.Code]int{
	sandlot.CodeInvalidRequest: http.StatusBadRequest,
	sandlot.CodeForbidden:      http.StatusForbidden,
	sandlot.CodeNotFound:       http.StatusNotFound,
	sandlot.CodeConflict:       http.StatusConflict,
	sandlot.CodeTooLarge:       http.StatusRequestEntityTooLarge,
	sandlot.CodeRange:          http.StatusRequestedRangeNotSatisfiable,
	sandlot.CodeRateLimited:    http.StatusTooManyRequests,
	sandlot.CodeUnsupported:    http.StatusNotImplemented,
	sandlot.CodeTimeout:        http.StatusGatewayTimeout,
	sandlot.CodeDiskFull:       http.StatusInsufficientStorage,
}

func answerError(w http.ResponseWriter, err error) {
	b, status := errorBody(err)
	h := w.Header()
	for k := range h {
		h.Del(k)
	}
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", itoa(len(b)))
	w.WriteHeader(status)
	_, _ = w.Write(b)
}

// errorBody is err as a wire.Error, and its status.
func errorBody(err error) ([]byte, int) {
	we := wire.Error{Code: string(sandlot.CodeInternal), Message: "the agent failed on this request"}
	var e *sandlot.Error
	if errors.As(err, &e) {
		we = wire.Error{Code: string(e.Code), Message: e.Message, Fields: e.Fields}
	}
	status, ok := statuses[sandlot.Code(we.Code)]
	if !ok {
		status = http.StatusInternalServerError
	}
	b, merr := json.Marshal(we)
	if merr != nil {
		b = []byte(`{"code":"internal","message":"the agent failed on this request"}`)
	}
	return b, status
}

func answerJSON(w http.ResponseWriter, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", itoa(len(b)))
	_, _ = w.Write(b)
	return nil
}

// readJSON reads the whole body, which must be one value. Reading to the end matters: only then does the
// server notice a host that goes away.
func readJSON(r *http.Request, v any) error { return readJSONUpTo(r, v, maxJSON) }

func readJSONUpTo(r *http.Request, v any, limit int64) error {
	b, err := io.ReadAll(io.LimitReader(r.Body, limit+1))
	if err != nil {
		return sandlot.Wrap(err, sandlot.CodeInvalidRequest, "the body could not be read")
	}
	if int64(len(b)) > limit {
		return sandlot.Errorf(sandlot.CodeTooLarge, "the body has more than %d bytes", limit)
	}
	if err := json.Unmarshal(b, v); err != nil {
		return sandlot.Wrap(err, sandlot.CodeInvalidRequest, "the body is not the JSON that was expected")
	}
	return nil
}

// fileError gives a system call's error about a file a code. what is shown to people.
func fileError(err error, what string) error {
	if err == nil {
		return nil
	}
	var e *sandlot.Error
	if errors.As(err, &e) {
		return err
	}
	what = clip(what, 256)
	var errno syscall.Errno
	errors.As(err, &errno)
	switch errno {
	case syscall.ENOENT:
		return sandlot.Wrap(err, sandlot.CodeNotFound, "%s does not exist", what)
	case syscall.ENOTDIR:
		return sandlot.Wrap(err, sandlot.CodeNotFound, "%s: a part of the path is not a directory", what)
	case syscall.EACCES, syscall.EPERM:
		return sandlot.Wrap(err, sandlot.CodeForbidden, "%s: permission denied", what)
	case syscall.EROFS:
		return sandlot.Wrap(err, sandlot.CodeForbidden, "%s is on a read-only filesystem", what)
	case syscall.EEXIST:
		return sandlot.Wrap(err, sandlot.CodeConflict, "%s exists already", what)
	case syscall.ENOTEMPTY:
		return sandlot.Wrap(err, sandlot.CodeConflict, "%s is not empty", what)
	case syscall.ETXTBSY, syscall.EBUSY:
		return sandlot.Wrap(err, sandlot.CodeConflict, "%s is in use", what)
	case syscall.ENOSPC, syscall.EDQUOT:
		return sandlot.Wrap(err, sandlot.CodeDiskFull, "the sandbox's disk is full")
	case syscall.EFBIG:
		return sandlot.Wrap(err, sandlot.CodeTooLarge, "%s would be too large", what)
	case syscall.EISDIR:
		return sandlot.Wrap(err, sandlot.CodeInvalidRequest, "%s is a directory", what)
	case syscall.ELOOP:
		return sandlot.Wrap(err, sandlot.CodeInvalidRequest, "%s has too many links", what)
	case syscall.ENAMETOOLONG:
		return sandlot.Wrap(err, sandlot.CodeInvalidRequest, "%s is too long a name", what)
	case syscall.EXDEV:
		return sandlot.Wrap(err, sandlot.CodeInvalidRequest, "%s is on another filesystem than its destination", what)
	case syscall.ENXIO, syscall.ENODEV:
		return sandlot.Wrap(err, sandlot.CodeInvalidRequest, "%s is not a regular file", what)
	case syscall.EINVAL:
		return sandlot.Wrap(err, sandlot.CodeInvalidRequest, "%s cannot be used this way", what)
	case syscall.EMFILE, syscall.ENFILE, syscall.ENOMEM, syscall.EAGAIN:
		return sandlot.Wrap(err, sandlot.CodeRateLimited, "the sandbox is out of resources").With("retry_after_s", 1)
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return sandlot.Wrap(err, sandlot.CodeNotFound, "%s does not exist", what)
	case errors.Is(err, fs.ErrPermission):
		return sandlot.Wrap(err, sandlot.CodeForbidden, "%s: permission denied", what)
	case strings.Contains(err.Error(), "escapes from parent"): // os.Root's, which has no name
		return sandlot.Wrap(err, sandlot.CodeForbidden, "%s leads out of the sandbox's directory", what)
	}
	return sandlot.Wrap(err, sandlot.CodeInternal, "%s: the operation failed", what)
}

// Health, stats and the processes.

func (a *Agent) serveHealth(w http.ResponseWriter, _ *http.Request) error {
	return answerJSON(w, a.health())
}

func (a *Agent) serveStats(w http.ResponseWriter, _ *http.Request) error {
	n := a.procs.running()
	ahead := a.kernels.ahead()
	if ahead != 0 {
		n--
	}
	if a.root == "" {
		n = 0
		for pid := range pids() {
			if pid != os.Getpid() && pid != a.parking.child() && pid != ahead {
				n++
			}
		}
	}
	return answerJSON(w, wire.Stats{Processes: max(n, 0)})
}

const maxListed = 2048 // processes

func (a *Agent) serveProcesses(w http.ResponseWriter, _ *http.Request) error {
	out := []wire.Process{}
	seen := map[int]bool{os.Getpid(): true, a.parking.child(): true}
	for _, p := range a.procs.all() {
		out = append(out, p.describe())
		seen[p.pid] = p.running()
	}
	if a.root == "" {
		since := booted()
		for pid := range pids() {
			if len(out) >= maxListed {
				break
			}
			if seen[pid] {
				continue
			}
			if p, ok := a.describeOther(pid, since); ok {
				out = append(out, p)
			}
		}
	}
	return answerJSON(w, out)
}

func pidOf(r *http.Request) (int, error) {
	pid, err := strconv.ParseInt(r.PathValue("pid"), 10, 32)
	if err != nil || pid <= 0 {
		return 0, sandlot.Errorf(sandlot.CodeInvalidRequest, "a pid is a positive number")
	}
	return int(pid), nil
}

// ours is the process of a request that the agent started.
func (a *Agent) ours(r *http.Request) (*proc, error) {
	pid, err := pidOf(r)
	if err != nil {
		return nil, err
	}
	if p := a.procs.get(pid); p != nil {
		return p, nil
	}
	return nil, sandlot.Errorf(sandlot.CodeNotFound, "no process %d was started here", pid)
}

func (a *Agent) serveSignal(w http.ResponseWriter, r *http.Request) error {
	if _, err := a.ready(); err != nil {
		return err
	}
	pid, err := pidOf(r)
	if err != nil {
		return err
	}
	var s wire.Signal
	if err := readJSON(r, &s); err != nil {
		return err
	}
	sig, err := parseSignal(s.Signal)
	if err != nil {
		return err
	}
	p := a.procs.get(pid)
	switch {
	case pid == 1 || pid == os.Getpid():
		return sandlot.Errorf(sandlot.CodeForbidden, "the sandbox's first process cannot be signalled; delete the sandbox instead")
	case p != nil && p.running():
		err = syscall.Kill(-pid, sig) // its own group, always: it was started in a new session
	case a.root != "":
		err = syscall.ESRCH
	default:
		err = syscall.Kill(pid, sig)
	}
	if errors.Is(err, syscall.ESRCH) {
		return sandlot.Errorf(sandlot.CodeNotFound, "no process %d runs here", pid)
	}
	if err != nil {
		return fileError(err, "the process")
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (a *Agent) serveStdin(w http.ResponseWriter, r *http.Request) error {
	p, err := a.ours(r)
	if err != nil {
		return err
	}
	b, err := io.ReadAll(io.LimitReader(r.Body, maxJSON+1))
	if err != nil {
		return sandlot.Wrap(err, sandlot.CodeInvalidRequest, "the body could not be read")
	}
	switch {
	case len(b) > maxJSON:
		return sandlot.Errorf(sandlot.CodeTooLarge, "the body has more than %d bytes", maxJSON)
	case p.stdin == nil:
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "only background processes take stdin")
	case !p.running():
		return sandlot.Errorf(sandlot.CodeConflict, "the process has ended")
	}
	// A request that goes away stops waiting for the process to read.
	ctx, cancel := context.WithTimeout(r.Context(), stdinPatience)
	defer cancel()
	n, err := p.stdin.write(ctx, b)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return sandlot.Errorf(sandlot.CodeTimeout, "the process does not read its stdin; %d of %d bytes were written", n, len(b)).With("written", n)
	}
	if err != nil {
		return sandlot.Wrap(err, sandlot.CodeConflict, "the process has closed its stdin; %d of %d bytes were written", n, len(b)).With("written", n)
	}
	if r.URL.Query().Get("close") == "1" {
		p.stdin.close()
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
