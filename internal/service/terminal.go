package service

import (
	"context"

	"sandlot"
	"sandlot/internal/authz"
	"sandlot/internal/guest"
	"sandlot/internal/wire"
)

const (
	defaultCols  = 80
	defaultRows  = 24
	maxWindow    = 1000
	maxTermInput = 64 << 10 // bytes of one input
)

// TerminalRequest asks for a terminal.
type TerminalRequest struct {
	Argv []string // empty: a login shell
	Cwd  string
	Env  map[string]string
	User string
	Cols int // 0: 80
	Rows int // 0: 24
}

// OpenTerminal starts a terminal, which lives until its program ends, it is closed, or the sandbox stops.
//
// Codes: invalid_request, rate_limited (too many), and those of a call.
func (s *Service) OpenTerminal(ctx context.Context, g authz.Grant, id sandlot.ID, req TerminalRequest) (wire.Terminal, error) {
	in := wire.NewTerminal{ID: string(sandlot.NewID("trm")), Argv: req.Argv, Cwd: req.Cwd, Env: req.Env, User: req.User}
	in.Cols, in.Rows = req.Cols, req.Rows
	if in.Cols == 0 {
		in.Cols = defaultCols
	}
	if in.Rows == 0 {
		in.Rows = defaultRows
	}
	if err := validWindow(in.WindowSize); err != nil {
		return wire.Terminal{}, err
	}
	if len(req.Argv) > 0 { // the same rules as a command's
		if _, err := (&ExecRequest{Argv: req.Argv}).wire(); err != nil {
			return wire.Terminal{}, err
		}
	}
	if req.Cwd != "" {
		if err := validPath("cwd", req.Cwd); err != nil {
			return wire.Terminal{}, err
		}
	}
	if err := validEnv("env", req.Env); err != nil {
		return wire.Terminal{}, err
	}
	if err := validUser(req.User); err != nil {
		return wire.Terminal{}, err
	}
	return call(ctx, s, g, id, func(c *guest.Client) (wire.Terminal, error) { return c.NewTerminal(ctx, in) })
}

func validWindow(w wire.WindowSize) error {
	for _, f := range []struct {
		name string
		n    int
	}{{"cols", w.Cols}, {"rows", w.Rows}} {
		if f.n < 1 || f.n > maxWindow {
			return invalid("%s is between 1 and %d", f.name, maxWindow).With("field", f.name)
		}
	}
	return nil
}

// knownTerminal says not_found for what cannot be a terminal's id.
func knownTerminal(tid string) error {
	if _, err := sandlot.ParseID(tid); err != nil {
		return sandlot.Errorf(sandlot.CodeNotFound, "no such terminal")
	}
	return nil
}

// Terminals lists a sandbox's terminals, oldest first, the last ended ones too.
func (s *Service) Terminals(ctx context.Context, g authz.Grant, id sandlot.ID) ([]wire.Terminal, error) {
	return call(ctx, s, g, id, func(c *guest.Client) ([]wire.Terminal, error) { return c.Terminals(ctx) })
}

// TerminalStream replays what a terminal showed last, wire.TerminalReplay bytes at most, and goes on until it ends. To
// look at a terminal is no activity: only what is typed is.
func (s *Service) TerminalStream(ctx context.Context, g authz.Grant, id sandlot.ID, tid string) (*Stream, error) {
	if err := knownTerminal(tid); err != nil {
		return nil, err
	}
	l, err := s.use(ctx, g, id)
	if err != nil {
		return nil, err
	}
	s.touch(l)
	frames, err := l.guest.TerminalStream(ctx, tid)
	if err != nil {
		return nil, l.explain(err)
	}
	return &Stream{frames: frames, l: l, release: func() {}}, nil
}

// TerminalInput types b. Codes: not_found, conflict (it has ended), timeout (its program does not read), too_large.
func (s *Service) TerminalInput(ctx context.Context, g authz.Grant, id sandlot.ID, tid string, b []byte) error {
	if err := knownTerminal(tid); err != nil {
		return err
	}
	if len(b) > maxTermInput {
		return sandlot.Errorf(sandlot.CodeTooLarge, "an input has at most %d bytes: send it in pieces", maxTermInput)
	}
	if len(b) == 0 {
		return nil
	}
	_, err := call(ctx, s, g, id, func(c *guest.Client) (struct{}, error) { return struct{}{}, c.TerminalInput(ctx, tid, b) })
	return err
}

// ResizeTerminal tells a terminal its window's size. Codes: invalid_request, not_found, conflict.
func (s *Service) ResizeTerminal(ctx context.Context, g authz.Grant, id sandlot.ID, tid string, cols, rows int) error {
	if err := knownTerminal(tid); err != nil {
		return err
	}
	size := wire.WindowSize{Cols: cols, Rows: rows}
	if err := validWindow(size); err != nil {
		return err
	}
	_, err := call(ctx, s, g, id, func(c *guest.Client) (struct{}, error) { return struct{}{}, c.ResizeTerminal(ctx, tid, size) })
	return err
}

// CloseTerminal ends a terminal and all that runs in it. Codes: not_found.
func (s *Service) CloseTerminal(ctx context.Context, g authz.Grant, id sandlot.ID, tid string) error {
	if err := knownTerminal(tid); err != nil {
		return err
	}
	_, err := call(ctx, s, g, id, func(c *guest.Client) (struct{}, error) { return struct{}{}, c.CloseTerminal(ctx, tid) })
	return err
}
