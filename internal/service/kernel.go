package service

import (
	"context"
	"errors"
	"io"
	"strings"
	"time"

	"sandlot"
	"sandlot/internal/authz"
	"sandlot/internal/failpoint"
	"sandlot/internal/guest"
	"sandlot/internal/wire"
)

// maxCode is how much code a cell may have.
const maxCode = 1 << 20

// CodeRequest asks to run a cell.
type CodeRequest struct {
	Code     string
	Language string        // "": the context's own, or python
	Context  string        // "": the default one of python, none for other languages
	Timeout  time.Duration // 0: the default
}

func (r *CodeRequest) wire() (wire.Cell, error) {
	c := wire.Cell{Context: r.Context, Language: r.Language, Code: r.Code}
	if err := validLanguage(r.Language); err != nil {
		return c, err
	}
	if r.Context != "" {
		if err := validContext("context_id", r.Context); err != nil {
			return c, err
		}
		if r.Language == "bash" {
			return c, invalid("bash keeps no state: leave context_id out").With("field", "context_id")
		}
	}
	if len(r.Code) > maxCode {
		return c, sandlot.Errorf(sandlot.CodeTooLarge, "code has more than %d bytes: write a file and run that", maxCode).With("field", "code")
	}
	timeout, err := boundedTime("timeout_s", r.Timeout, sandlot.DefaultExecTimeout, time.Second, sandlot.MaxExecTimeout)
	c.TimeoutMS = timeout.Milliseconds()
	return c, err
}

func validLanguage(language string) error {
	switch language {
	case "", "python", "javascript", "typescript", "bash":
		return nil
	}
	return invalid("language must be python, javascript, typescript or bash").With("field", "language")
}

// validContext allows what fits a path's segment.
func validContext(field, id string) error {
	ok := len(id) > 0 && len(id) <= 64
	for i := range len(id) {
		c := id[i]
		ok = ok && (c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || i > 0 && (c == '-' || c == '_' || c == '.'))
	}
	if !ok {
		return invalid("%s has 1 to 64 letters, digits, '-', '_' and '.', and begins with a letter or digit", field).With("field", field)
	}
	return nil
}

// RunCode runs a cell to its end. A cell that fails is no error: the result says so.
//
// Codes: invalid_request, too_large, not_found, sandbox_not_running, sandbox_unhealthy, unsupported (the template
// has no such language), rate_limited (too many cells or contexts), timeout (its turn did not come).
func (s *Service) RunCode(ctx context.Context, g authz.Grant, id sandlot.ID, req CodeRequest) (guest.CellResult, error) {
	c, err := req.wire()
	if err != nil {
		return guest.CellResult{}, err
	}
	l, err := s.use(ctx, g, id)
	if err != nil {
		return guest.CellResult{}, err
	}
	defer s.hold(l)()
	if err := failpoint.Hit(ctx, "service.exec.begin"); err != nil {
		return guest.CellResult{}, err
	}
	c.Collect = sandlot.MaxOutputBytes
	r, err := l.guest.RunCell(ctx, c) // bounded by its own timeout and a grace
	if err == nil {
		err = failpoint.Hit(ctx, "service.exec.done")
	}
	return r, s.explainCode(ctx, l, req.Language, err)
}

// explainCode is explain for what a template has no kernel for.
func (s *Service) explainCode(ctx context.Context, l *live, language string, err error) error {
	err = l.explain(err)
	if sandlot.ErrorCode(err) != sandlot.CodeUnsupported {
		return err
	}
	if language == "" {
		language = "python"
	}
	sb := l.snapshot()
	has := []string{"bash"}
	if t, terr := s.template(ctx, sb.Project, sb.Template+"@"+sb.TemplateDigest); terr == nil {
		has = append(t.Kernels, has...)
	}
	return sandlot.Wrap(err, sandlot.CodeUnsupported, "the template %s has no %s: it runs %s", sb.Template, language, strings.Join(has, ", ")).
		With("field", "language").With("languages", has)
}

// CodeStream is a cell's output as it comes. Close must be called; before the end it interrupts the cell.
type CodeStream struct {
	*guest.CellStream
	l       *live
	release func()
}

// Next returns the next frame; io.EOF comes after the last one.
func (s *CodeStream) Next() (kind byte, payload []byte, err error) {
	kind, payload, err = s.CellStream.Next()
	if err != nil && !errors.Is(err, io.EOF) {
		err = s.l.explain(err)
	}
	return kind, payload, err
}

// Close lets go.
func (s *CodeStream) Close() {
	s.CellStream.Close()
	s.release()
}

// RunCodeStream runs a cell and streams what it gives. ctx interrupts it. Codes as of RunCode.
func (s *Service) RunCodeStream(ctx context.Context, g authz.Grant, id sandlot.ID, req CodeRequest) (*CodeStream, error) {
	c, err := req.wire()
	if err != nil {
		return nil, err
	}
	l, err := s.use(ctx, g, id)
	if err != nil {
		return nil, err
	}
	release := s.hold(l)
	if err := failpoint.Hit(ctx, "service.exec.begin"); err != nil {
		release()
		return nil, err
	}
	cells, err := l.guest.Cell(ctx, c)
	if err != nil {
		release()
		return nil, s.explainCode(ctx, l, req.Language, err)
	}
	return &CodeStream{CellStream: cells, l: l, release: release}, nil
}

// ContextRequest asks for a context.
type ContextRequest struct {
	ID       string // "": a new one
	Language string // "": python
	Cwd      string
}

// CreateContext makes a context and starts its kernel.
//
// Codes: invalid_request, conflict (there is one of that name), unsupported, rate_limited, and those of a call.
func (s *Service) CreateContext(ctx context.Context, g authz.Grant, id sandlot.ID, req ContextRequest) (wire.Context, error) {
	if err := validLanguage(req.Language); err != nil {
		return wire.Context{}, err
	}
	if req.Language == "bash" {
		return wire.Context{}, invalid("bash keeps no state: run its code without a context").With("field", "language")
	}
	if req.Language == "" {
		req.Language = "python"
	}
	if req.ID == "" {
		req.ID = string(sandlot.NewID("ctx"))
	}
	if err := validContext("id", req.ID); err != nil {
		return wire.Context{}, err
	}
	if req.Cwd != "" {
		if err := validPath("cwd", req.Cwd); err != nil {
			return wire.Context{}, err
		}
	}
	l, err := s.use(ctx, g, id)
	if err != nil {
		return wire.Context{}, err
	}
	defer s.hold(l)()
	c, err := l.guest.NewContext(ctx, wire.NewContext{ID: req.ID, Language: req.Language, Cwd: req.Cwd})
	return c, s.explainCode(ctx, l, req.Language, err)
}

// ListContexts lists the contexts of a sandbox, oldest first.
func (s *Service) ListContexts(ctx context.Context, g authz.Grant, id sandlot.ID) ([]wire.Context, error) {
	return call(ctx, s, g, id, func(c *guest.Client) ([]wire.Context, error) { return c.Contexts(ctx) })
}

// RestartContext gives a context a new kernel; a cell that runs in it ends. Codes: not_found, and those of a call.
func (s *Service) RestartContext(ctx context.Context, g authz.Grant, id sandlot.ID, name string) (wire.Context, error) {
	if err := knownContext(name); err != nil {
		return wire.Context{}, err
	}
	return call(ctx, s, g, id, func(c *guest.Client) (wire.Context, error) { return c.RestartContext(ctx, name) })
}

// InterruptContext interrupts the cell that runs in a context, if one does. Codes: not_found, and those of a call.
func (s *Service) InterruptContext(ctx context.Context, g authz.Grant, id sandlot.ID, name string) error {
	if err := knownContext(name); err != nil {
		return err
	}
	_, err := call(ctx, s, g, id, func(c *guest.Client) (struct{}, error) { return struct{}{}, c.InterruptContext(ctx, name) })
	return err
}

// DeleteContext ends a context with all that runs in it. Codes: not_found, and those of a call.
func (s *Service) DeleteContext(ctx context.Context, g authz.Grant, id sandlot.ID, name string) error {
	if err := knownContext(name); err != nil {
		return err
	}
	_, err := call(ctx, s, g, id, func(c *guest.Client) (struct{}, error) { return struct{}{}, c.DeleteContext(ctx, name) })
	return err
}

// knownContext says not_found for what cannot be a context's name.
func knownContext(name string) error {
	if validContext("id", name) != nil {
		return sandlot.Errorf(sandlot.CodeNotFound, "no such context")
	}
	return nil
}
