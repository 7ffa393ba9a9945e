package service

import (
	"context"
	"errors"
	"io"
	"time"

	"sandlot"
	"sandlot/internal/authz"
	"sandlot/internal/failpoint"
	"sandlot/internal/guest"
	"sandlot/internal/wire"
)

var _ = failpoint.Declare("service.exec.begin", "service.exec.done")

// ExecRequest asks for a process inside a sandbox.
type ExecRequest struct {
	Argv    []string
	Cwd     string
	Env     map[string]string
	User    string
	Timeout time.Duration // 0: the default
	Stdin   []byte
}

func (r *ExecRequest) wire() (wire.Exec, error) {
	e := wire.Exec{Argv: r.Argv, Cwd: r.Cwd, Env: r.Env, User: r.User, Stdin: r.Stdin}
	if len(r.Argv) == 0 || r.Argv[0] == "" {
		return e, invalid("cmd is missing").With("field", "cmd")
	}
	total := 0
	for _, a := range r.Argv {
		if total += len(a) + 1; total > sandlot.MaxArgvBytes {
			return e, invalid("cmd has more than %d bytes", sandlot.MaxArgvBytes).With("field", "cmd")
		}
		for i := range len(a) {
			if a[i] == 0 {
				return e, invalid("cmd has a NUL byte").With("field", "cmd")
			}
		}
	}
	if r.Cwd != "" {
		if err := validPath("cwd", r.Cwd); err != nil {
			return e, err
		}
	}
	if err := validEnv("env", r.Env); err != nil {
		return e, err
	}
	if err := validUser(r.User); err != nil {
		return e, err
	}
	if len(r.Stdin) > sandlot.MaxStdinBytes {
		return e, sandlot.Errorf(sandlot.CodeTooLarge, "stdin has more than %d bytes: write a file first", sandlot.MaxStdinBytes).With("field", "stdin")
	}
	timeout, err := boundedTime("timeout_s", r.Timeout, sandlot.DefaultExecTimeout, time.Second, sandlot.MaxExecTimeout)
	e.TimeoutMS = timeout.Milliseconds()
	return e, err
}

// validUser allows names as useradd does: nothing that could be a uid, a group or a path.
func validUser(name string) error {
	if name == "" {
		return nil
	}
	ok := len(name) <= 32
	for i := range len(name) {
		c := name[i]
		ok = ok && (c >= 'a' && c <= 'z' || c == '_' || i > 0 && (c >= '0' && c <= '9' || c == '-'))
	}
	if !ok {
		return invalid("user is the name of an account in the sandbox, such as user or root").With("field", "user")
	}
	return nil
}

// Exec runs a process to its end and returns what it printed, at most sandlot.MaxOutputBytes of each stream.
//
// Codes: invalid_request, not_found, sandbox_not_running, sandbox_unhealthy.
func (s *Service) Exec(ctx context.Context, g authz.Grant, id sandlot.ID, req ExecRequest) (guest.ExecResult, error) {
	e, err := req.wire()
	if err != nil {
		return guest.ExecResult{}, err
	}
	l, err := s.use(ctx, g, id)
	if err != nil {
		return guest.ExecResult{}, err
	}
	defer s.hold(l)()
	if err := failpoint.Hit(ctx, "service.exec.begin"); err != nil {
		return guest.ExecResult{}, err
	}
	e.Collect = sandlot.MaxOutputBytes
	r, err := l.guest.Run(ctx, e) // bounded by its own timeout and a grace
	if err == nil {
		err = failpoint.Hit(ctx, "service.exec.done")
	}
	return r, l.explain(err)
}

// Stream is output as it comes. Close must be called; closing a foreground command's stream ends it.
type Stream struct {
	frames  *guest.ExecStream
	l       *live
	release func()
}

// Next returns the next frame; io.EOF comes after the last one.
func (s *Stream) Next() (kind byte, payload []byte, err error) {
	kind, payload, err = s.frames.Next()
	if err != nil && !errors.Is(err, io.EOF) {
		err = s.l.explain(err)
	}
	return kind, payload, err
}

// Close lets go.
func (s *Stream) Close() {
	s.frames.Close()
	s.release()
}

// ExecStream runs a process and streams what it prints. ctx ends it.
func (s *Service) ExecStream(ctx context.Context, g authz.Grant, id sandlot.ID, req ExecRequest) (*Stream, error) {
	e, err := req.wire()
	if err != nil {
		return nil, err
	}
	return s.stream(ctx, g, id, func(c *guest.Client) (*guest.ExecStream, error) { return c.Exec(ctx, e) })
}

func (s *Service) stream(ctx context.Context, g authz.Grant, id sandlot.ID, open func(*guest.Client) (*guest.ExecStream, error)) (*Stream, error) {
	l, err := s.use(ctx, g, id)
	if err != nil {
		return nil, err
	}
	release := s.hold(l)
	if err := failpoint.Hit(ctx, "service.exec.begin"); err != nil {
		release()
		return nil, err
	}
	frames, err := open(l.guest)
	if err != nil {
		release()
		return nil, l.explain(err)
	}
	return &Stream{frames: frames, l: l, release: release}, nil
}

// ExecBackground starts a process that outlives the call. It keeps no sandbox from being idle; its CPU does.
func (s *Service) ExecBackground(ctx context.Context, g authz.Grant, id sandlot.ID, req ExecRequest) (wire.Started, error) {
	timeout := req.Timeout
	e, err := req.wire()
	if err != nil {
		return wire.Started{}, err
	}
	e.Background = true
	if timeout == 0 {
		e.TimeoutMS = 0 // it lives as long as its sandbox
	}
	l, err := s.use(ctx, g, id)
	if err != nil {
		return wire.Started{}, err
	}
	defer s.hold(l)()
	if err := failpoint.Hit(ctx, "service.exec.begin"); err != nil {
		return wire.Started{}, err
	}
	p, err := l.guest.StartBackground(ctx, e)
	return p, l.explain(err)
}

// call runs one short request to a sandbox's agent.
func call[T any](ctx context.Context, s *Service, g authz.Grant, id sandlot.ID, f func(*guest.Client) (T, error)) (T, error) {
	var zero T
	l, err := s.use(ctx, g, id)
	if err != nil {
		return zero, err
	}
	defer s.hold(l)()
	v, err := f(l.guest)
	return v, l.explain(err)
}

// Processes lists what runs inside, and what was started through the API and has ended.
func (s *Service) Processes(ctx context.Context, g authz.Grant, id sandlot.ID) ([]wire.Process, error) {
	return call(ctx, s, g, id, func(c *guest.Client) ([]wire.Process, error) { return c.Processes(ctx) })
}

// Follow streams a background process's output from its beginning, then as it comes.
func (s *Service) Follow(ctx context.Context, g authz.Grant, id sandlot.ID, pid int) (*Stream, error) {
	return s.stream(ctx, g, id, func(c *guest.Client) (*guest.ExecStream, error) { return c.ProcessStream(ctx, pid) })
}

// Signal signals a process, with its group when the API started it.
func (s *Service) Signal(ctx context.Context, g authz.Grant, id sandlot.ID, pid int, signal string) error {
	_, err := call(ctx, s, g, id, func(c *guest.Client) (struct{}, error) { return struct{}{}, c.Signal(ctx, pid, signal) })
	return err
}

// Stdin writes to a background process, and closes its input when last is set.
func (s *Service) Stdin(ctx context.Context, g authz.Grant, id sandlot.ID, pid int, data []byte, last bool) error {
	_, err := call(ctx, s, g, id, func(c *guest.Client) (struct{}, error) { return struct{}{}, c.Stdin(ctx, pid, data, last) })
	return err
}
