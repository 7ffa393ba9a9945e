package agent

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"time"

	"sandlot"
	"sandlot/internal/wire"
)

const (
	maxCode     = 1 << 20
	maxCellJSON = 8 << 20   // a cell's body: JSON may take six bytes for one
	maxArgument = 100 << 10 // of code that bash is given as an argument; execve takes 128 KiB
)

// cellOutput takes what a cell gives. The functions may be called from a goroutine each.
type cellOutput struct {
	stdout, stderr func([]byte) error // nil: thrown away
	results        func(parts []byte) bool
	bytes          int  // of results
	live           bool // it is read while the cell runs
}

// result passes one on, and says whether there was room for it.
func (o *cellOutput) result(m *message) bool {
	if len(m.Data) == 0 || m.Data[0] != '{' {
		return false
	}
	b := make([]byte, 0, len(m.Data)+32)
	b = append(append(b, `{"data":`...), m.Data...)
	if m.Main {
		b = append(b, `,"main":true`...)
	}
	b = append(b, '}')
	if len(b) > wire.MaxResultBytes || o.bytes+len(b) > 2*wire.MaxResultBytes || o.results == nil {
		return false
	}
	if _, err := wire.DecodeResult(b); err != nil { // the host would take it for the agent's fault
		return false
	}
	if !o.results(b) {
		return false
	}
	o.bytes += len(b)
	return true
}

// appendResult appends a result's frames.
func appendResult(buf, b []byte) []byte {
	for {
		n := min(len(b), wire.MaxFrame-1)
		last := byte(0)
		if n == len(b) {
			last = 1
		}
		h := make([]byte, wire.FrameHeader+1)
		wire.PutHeader(h, wire.FrameResult, n+1)
		h[wire.FrameHeader] = last
		buf = append(append(buf, h...), b[:n]...)
		if b = b[n:]; last == 1 {
			return buf
		}
	}
}

func checkCell(c *wire.Cell) error {
	switch c.Language {
	case "", "python", "javascript", "typescript", "bash":
	default:
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "language must be python, javascript, typescript or bash")
	}
	switch {
	case len(c.Code) > maxCode:
		return sandlot.Errorf(sandlot.CodeTooLarge, "the code has more than %d bytes: write a file and run that", maxCode)
	case c.TimeoutMS <= 0 || c.TimeoutMS > sandlot.MaxExecTimeout.Milliseconds():
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "the timeout is not positive or over %s", sandlot.MaxExecTimeout)
	case c.Collect < 0 || c.Collect > sandlot.MaxOutputBytes:
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "collect is negative or over %d", sandlot.MaxOutputBytes)
	}
	return nil
}

// serveCell runs one cell and answers with frames.
func (a *Agent) serveCell(w http.ResponseWriter, r *http.Request) error {
	id, err := a.ready()
	if err != nil {
		return err
	}
	var cell wire.Cell
	if err := readJSONUpTo(r, &cell, maxCellJSON); err != nil {
		return err
	}
	if err := checkCell(&cell); err != nil {
		return err
	}
	if cell.Context == "" && (cell.Language == "python" || cell.Language == "") {
		cell.Context = wire.DefaultContext
	}
	if cell.Language == "bash" {
		if cell.Context != "" {
			return sandlot.Errorf(sandlot.CodeInvalidRequest, "bash keeps no state: leave the context out")
		}
		if err := checkScript(cell.Code); err != nil {
			return err
		}
	}
	if cell.Collect > 0 {
		return a.collectCell(w, r, id, &cell)
	}
	return a.streamCell(w, r, id, &cell)
}

// collectCell answers when the cell is over.
func (a *Agent) collectCell(w http.ResponseWriter, r *http.Request, id *identity, cell *wire.Cell) error {
	var stdout, stderr, results capture
	for _, c := range []*capture{&stdout, &stderr, &results} {
		c.all, c.limit = &a.captured, int(cell.Collect)
		defer c.free()
	}
	results.limit = 3 * wire.MaxResultBytes // cellOutput counts
	end, err := a.cell(r.Context(), id, cell, &cellOutput{
		stdout: stdout.take, stderr: stderr.take,
		results: func(b []byte) bool {
			frames := appendResult(nil, b)
			if results.truncated {
				return false
			}
			before := len(results.data)
			_ = results.take(frames)
			return len(results.data) == before+len(frames)
		},
	})
	if err != nil {
		return err
	}
	end.StdoutTruncated, end.StderrTruncated = stdout.truncated, stderr.truncated
	parts := outputFrames(nil, wire.FrameStdout, stdout.data)
	parts = outputFrames(parts, wire.FrameStderr, stderr.data)
	parts = append(parts, results.data, appendJSON(nil, wire.FrameCell, end))
	answerParts(w, parts)
	return nil
}

// streamCell sends what the cell gives as it comes. A reader that stalls stalls the cell; one that goes away
// interrupts it.
func (a *Agent) streamCell(w http.ResponseWriter, r *http.Request, id *identity, cell *wire.Cell) error {
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	fw := newFrameWriter(w, cancel)
	defer fw.close()
	end, err := a.cell(ctx, id, cell, &cellOutput{
		live:    true,
		stdout:  func(b []byte) error { return fw.frame(wire.FrameStdout, b) },
		stderr:  func(b []byte) error { return fw.frame(wire.FrameStderr, b) },
		results: func(b []byte) bool { return fw.raw(appendResult(nil, b)) == nil },
	})
	if err != nil {
		if fw.refuse() {
			return err
		}
		b, _ := errorBody(err)
		_ = fw.frame(wire.FrameError, b)
		return nil
	}
	fw.json(wire.FrameCell, end)
	return nil
}

// cell runs a cell where it belongs, after those before it.
func (a *Agent) cell(ctx context.Context, id *identity, cell *wire.Cell, out *cellOutput) (wire.CellEnd, error) {
	if cell.Language == "bash" {
		return a.script(ctx, id, cell, out)
	}
	if cell.Context == "" {
		c, err := a.kernels.pass(cell.Language)
		if err != nil {
			return wire.CellEnd{}, err
		}
		defer a.kernels.passed(c)
		c.turn <- struct{}{}
		defer c.release()
		end, err := c.run(ctx, id, cell, out, false)
		end.ExecutionCount, end.StateLost = 1, false // there was none to lose
		return end, err
	}
	c, err := a.kernels.open(cell.Context, cell.Language, "", false)
	if err != nil {
		return wire.CellEnd{}, err
	}
	if err := c.wait(ctx, time.Duration(cell.TimeoutMS)*time.Millisecond); err != nil {
		return wire.CellEnd{}, err
	}
	defer c.release()
	if ctx.Err() != nil {
		return wire.CellEnd{}, context.Cause(ctx)
	}
	if cell.Language == "" {
		cell.Language = c.language
	}
	return c.run(ctx, id, cell, out, false)
}

func checkScript(code string) error {
	if strings.IndexByte(code, 0) >= 0 {
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "code for bash has a NUL byte")
	}
	if len(code) > sandlot.MaxStdinBytes {
		return sandlot.Errorf(sandlot.CodeTooLarge, "code for bash has more than %d bytes: write a file and run that", sandlot.MaxStdinBytes)
	}
	return nil
}

// script runs a cell with bash.
func (a *Agent) script(ctx context.Context, id *identity, cell *wire.Cell, out *cellOutput) (wire.CellEnd, error) {
	e := &wire.Exec{Argv: []string{"bash", "-c", cell.Code}}
	if len(cell.Code) > maxArgument {
		e.Argv[2], e.Stdin = `eval "$(cat)"`, []byte(cell.Code)
	}
	defer func() { go a.parking.fill() }()
	run, err := a.begin(id, e)
	var ns *notStarted
	if errors.As(err, &ns) {
		return wire.CellEnd{}, sandlot.Errorf(sandlot.CodeUnsupported, "%s", trimLine(ns.Message))
	}
	if err != nil {
		return wire.CellEnd{}, err
	}
	exit := run.finish(ctx, cell.TimeoutMS, out.stdout, out.stderr)
	end := wire.CellEnd{ExecutionCount: 1, DurationUS: exit.DurationUS, TimedOut: exit.TimedOut}
	limit := time.Duration(cell.TimeoutMS) * time.Millisecond
	switch {
	case exit.TimedOut:
		end.Error = &wire.CellError{Name: "Timeout", Value: "the cell took longer than " + limit.String() + " and was ended"}
	case exit.Signal != "":
		end.Error = &wire.CellError{Name: "ExitError", Value: "signal: " + exit.Signal}
	case exit.ExitCode != 0:
		end.Error = &wire.CellError{Name: "ExitError", Value: "exit status " + itoa(exit.ExitCode)}
	}
	return end, nil
}

// Contexts.

func (a *Agent) serveContexts(w http.ResponseWriter, _ *http.Request) error {
	return answerJSON(w, a.kernels.list())
}

func (a *Agent) serveNewContext(w http.ResponseWriter, r *http.Request) error {
	id, err := a.ready()
	if err != nil {
		return err
	}
	var in wire.NewContext
	if err := readJSON(r, &in); err != nil {
		return err
	}
	if err := checkCell(&wire.Cell{Language: in.Language, TimeoutMS: 1}); err != nil {
		return err
	}
	if in.Cwd != "" {
		name, err := resolve(in.Cwd)
		if err != nil {
			return err
		}
		in.Cwd = shown(name)
	}
	c, err := a.kernels.open(in.ID, in.Language, in.Cwd, true)
	if err != nil {
		return err
	}
	if err = c.wait(r.Context(), startPatience); err == nil {
		err = c.warmUp(id)
		c.release()
	}
	if err != nil {
		_ = a.kernels.remove(in.ID)
		return err
	}
	return answerJSON(w, c.describe())
}

func (a *Agent) serveDeleteContext(w http.ResponseWriter, r *http.Request) error {
	if err := a.kernels.remove(r.PathValue("id")); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (a *Agent) serveRestartContext(w http.ResponseWriter, r *http.Request) error {
	id, err := a.ready()
	if err != nil {
		return err
	}
	c, err := a.kernels.get(r.PathValue("id"))
	if err != nil {
		return err
	}
	if err := c.restart(r.Context(), id); err != nil {
		return err
	}
	return answerJSON(w, c.describe())
}

func (a *Agent) serveInterruptContext(w http.ResponseWriter, r *http.Request) error {
	c, err := a.kernels.get(r.PathValue("id"))
	if err != nil {
		return err
	}
	c.interrupt()
	w.WriteHeader(http.StatusNoContent)
	return nil
}
