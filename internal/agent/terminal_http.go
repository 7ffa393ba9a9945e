package agent

import (
	"context"
	"io"
	"net/http"

	"sandlot"
	"sandlot/internal/wire"
)

func (a *Agent) serveNewTerminal(w http.ResponseWriter, r *http.Request) error {
	id, err := a.ready()
	if err != nil {
		return err
	}
	var in wire.NewTerminal
	if err := readJSON(r, &in); err != nil {
		return err
	}
	t, err := a.terminals.open(id, &in)
	if err != nil {
		return err
	}
	return answerJSON(w, t.describe())
}

func (a *Agent) serveTerminals(w http.ResponseWriter, _ *http.Request) error {
	return answerJSON(w, a.terminals.list())
}

func (a *Agent) serveTerminalClose(w http.ResponseWriter, r *http.Request) error {
	if err := a.terminals.remove(r.PathValue("id")); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (a *Agent) serveTerminalResize(w http.ResponseWriter, r *http.Request) error {
	t, err := a.terminals.get(r.PathValue("id"))
	if err != nil {
		return err
	}
	var size wire.WindowSize
	if err := readJSON(r, &size); err != nil {
		return err
	}
	if err := t.resize(size); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (a *Agent) serveTerminalInput(w http.ResponseWriter, r *http.Request) error {
	t, err := a.terminals.get(r.PathValue("id"))
	if err != nil {
		return err
	}
	b, err := io.ReadAll(io.LimitReader(r.Body, maxJSON+1))
	switch {
	case err != nil:
		return sandlot.Wrap(err, sandlot.CodeInvalidRequest, "the body could not be read")
	case len(b) > maxJSON:
		return sandlot.Errorf(sandlot.CodeTooLarge, "the input has more than %d bytes", maxJSON)
	}
	if err := t.write(r.Context(), b); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (a *Agent) serveTerminalStream(w http.ResponseWriter, r *http.Request) error {
	t, err := a.terminals.get(r.PathValue("id"))
	if err != nil {
		return err
	}
	v, err := t.view()
	if err != nil {
		return err
	}
	defer t.leave(v)
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	defer context.AfterFunc(a.ctx, cancel)()
	fw := newFrameWriter(w, cancel)
	defer fw.close()
	fw.json(wire.FrameStarted, wire.Started{PID: t.p.pid})
	for {
		b, skipped := t.next(ctx, v)
		if ctx.Err() != nil {
			return nil
		}
		if skipped > 0 {
			fw.json(wire.FrameSkipped, wire.Skipped{Bytes: skipped})
		}
		if len(b) == 0 {
			break
		}
		_ = fw.frame(wire.FrameStdout, b)
	}
	code, sig := t.p.exit()
	fw.json(wire.FrameExit, wire.Exit{ExitCode: code, Signal: sig, DurationUS: t.p.ended.Sub(t.p.started).Microseconds()})
	return nil
}
