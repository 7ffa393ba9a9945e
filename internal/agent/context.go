package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"sandlot"
	"sandlot/internal/wire"
)

const (
	maxQueued      = 16              // cells that wait for their turn in one context
	interruptGrace = 2 * time.Second // for a cell to end after its interrupt
	startPatience  = 30 * time.Second
	sampleMemory   = 100 * time.Millisecond
)

// Why a kernel is ended from outside its cell.
const (
	endRestarted = "the context was restarted"
	endDeleted   = "the context was deleted"
)

// kernelContext is one state that cells share. Its cells run one after the other, in the order they came.
type kernelContext struct {
	ks                *kernels
	id, language, cwd string // id "": it ends with its cell
	created           time.Time

	turn    chan struct{} // holds the running cell's token
	waiting atomic.Int32

	mu    sync.Mutex
	k     *kernelProc // nil: the next cell starts one
	state string
	used  time.Time
	count int
	why   string // k is being ended for this reason
	gone  bool   // deleted
}

func newContext(ks *kernels, id, language, cwd string) *kernelContext {
	if language == "" {
		language = "python"
	}
	if cwd == "" {
		cwd = workspace
	}
	now := time.Now()
	return &kernelContext{
		ks: ks, id: id, language: kernelLanguage(language), cwd: cwd, created: now, used: now,
		turn: make(chan struct{}, 1), state: "starting",
	}
}

func (c *kernelContext) current() *kernelProc {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.k
}

func (c *kernelContext) describe() wire.Context {
	c.mu.Lock()
	defer c.mu.Unlock()
	w := wire.Context{
		ID: c.id, Language: c.language, Cwd: c.cwd, State: c.state, ExecutionCount: c.count, CreatedAt: c.created, LastUsedAt: c.used,
	}
	if c.k != nil {
		w.PID = c.k.p.pid
		if !c.k.p.running() {
			w.State, w.PID = "dead", 0
		}
	}
	return w
}

// wait takes the context's turn, for at most patience.
func (c *kernelContext) wait(ctx context.Context, patience time.Duration) error {
	select {
	case c.turn <- struct{}{}:
	default:
		defer c.waiting.Add(-1)
		if c.waiting.Add(1) > maxQueued {
			return sandlot.Errorf(sandlot.CodeRateLimited, "%d cells wait in context %s already: let one end, interrupt it, or use another context", maxQueued, c.id).With("retry_after_s", 1)
		}
		late := time.NewTimer(patience)
		defer late.Stop()
		select {
		case c.turn <- struct{}{}:
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-late.C:
			return sandlot.Errorf(sandlot.CodeTimeout, "other cells of context %s took all of this one's time: interrupt them, or use another context", c.id)
		}
	}
	c.mu.Lock()
	gone := c.gone
	c.mu.Unlock()
	if gone {
		c.release()
		return sandlot.Errorf(sandlot.CodeNotFound, "context %s was deleted before this cell's turn came", c.id)
	}
	return nil
}

func (c *kernelContext) release() { <-c.turn }

func (c *kernelContext) set(state string) {
	c.mu.Lock()
	c.state, c.used = state, time.Now()
	c.mu.Unlock()
}

// ensure returns the context's kernel, a new one where the last has ended. lost says that there was one. The
// caller has the turn.
func (c *kernelContext) ensure(id *identity, deadline time.Time, out *cellOutput) (k *kernelProc, lost bool, err error) {
	if k = c.current(); k != nil {
		if k.p.running() {
			return k, false, nil
		}
		k.begin(out) // its last words
		c.drop(k)
		lost = true
	}
	c.set("starting")
	k, err = c.ks.start(id, c.language, c.cwd)
	if err == nil {
		c.mu.Lock()
		if c.k, c.why = k, ""; c.gone {
			c.why = endDeleted
		}
		gone := c.gone
		c.mu.Unlock()
		if gone {
			k.kill()
		}
		k.begin(out)
		err = k.await(deadline)
	}
	if err != nil {
		c.set("dead")
	}
	return k, lost, err
}

// drop takes out a kernel that is not to be used any more, with all that it started and that kept its session.
func (c *kernelContext) drop(k *kernelProc) {
	k.kill()
	k.finish()
	k.discard()
	c.mu.Lock()
	if c.k == k {
		c.k, c.state, c.count = nil, "dead", 0
	}
	c.mu.Unlock()
}

// end ends the kernel, and the cell that runs in it.
func (c *kernelContext) end(why string) {
	c.mu.Lock()
	k := c.k
	c.why, c.gone = why, c.gone || why == endDeleted
	c.mu.Unlock()
	if k == nil {
		return
	}
	k.kill()
	select {
	case c.turn <- struct{}{}: // else the cell does it
		c.drop(k)
		c.release()
	default:
	}
}

// interrupt interrupts the cell that runs, if one does.
func (c *kernelContext) interrupt() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.k != nil && c.state == "busy" && c.k.p.running() {
		_ = syscall.Kill(-c.k.p.pid, syscall.SIGINT)
	}
}

// restart gives the context a new kernel.
func (c *kernelContext) restart(ctx context.Context, id *identity) error {
	c.end(endRestarted)
	if err := c.wait(ctx, startPatience); err != nil {
		return err
	}
	defer c.release()
	if k := c.current(); k != nil {
		c.drop(k)
	}
	return c.warmUp(id)
}

// warmUp starts the kernel, where there is none. The caller has the turn.
func (c *kernelContext) warmUp(id *identity) error {
	var out cellOutput
	k, _, err := c.ensure(id, time.Now().Add(startPatience), &out)
	if err == nil {
		k.finish()
		c.set("idle")
		return nil
	}
	var e *sandlot.Error
	if k == nil || errors.As(err, &e) {
		return err
	}
	c.drop(k)
	return sandlot.Errorf(sandlot.CodeInternal, "the %s kernel did not start: %s", c.language, k.fate())
}

// run runs one cell. The caller has the turn. quiet: it is none of a user's.
//
// When the cell's time is up, or ctx ends, it is interrupted; when that does not end it within interruptGrace,
// its kernel is ended, and the next cell has a new one.
func (c *kernelContext) run(ctx context.Context, id *identity, cell *wire.Cell, out *cellOutput, quiet bool) (wire.CellEnd, error) {
	end := wire.CellEnd{Context: c.id}
	limit := time.Duration(cell.TimeoutMS) * time.Millisecond
	patience := max(limit, startPatience)
	if quiet {
		patience = limit
	}
	k, lost, err := c.ensure(id, time.Now().Add(patience), out)
	end.StateLost = lost
	if err != nil {
		if k == nil {
			return end, err
		}
		c.drop(k)
		end.ExecutionCount = 1
		end.Error = &wire.CellError{Name: "KernelDied", Value: fmt.Sprintf("the %s kernel did not start: %s", c.language, k.fate())}
		return end, nil
	}
	k.begin(out)
	if !quiet {
		c.ks.taken(k)
	}
	c.set("busy")
	x := execution{k: k, cell: cell, out: out, began: time.Now()}
	x.deadline = x.began.Add(limit)
	lines := k.run(cell)
	if !k.identified {
		lines = append(k.identity(id), lines...)
	}
	k.send(lines, x.deadline)
	alive := x.follow(ctx)
	end.DurationUS = time.Since(x.began).Microseconds()
	end.TimedOut, end.Error, end.ResultsDropped = x.timedOut, x.failed, x.dropped
	if alive {
		k.finish()
		c.mu.Lock()
		c.count, c.state, c.used = k.count, "idle", time.Now()
		end.ExecutionCount = c.count
		c.mu.Unlock()
		if x.timedOut {
			end.Error = x.late(fmt.Sprintf("the cell took longer than %s and was interrupted; variables are kept", limit))
		}
		return end, nil
	}
	end.ExecutionCount, end.StateLost = k.count+1, true
	c.drop(k)
	c.mu.Lock()
	why := c.why
	c.mu.Unlock()
	switch {
	case why != "":
		end.Error = &wire.CellError{Name: "KernelDied", Value: why + " while the cell ran; variables are lost"}
	case x.killed && x.timedOut:
		end.Error = x.late(fmt.Sprintf("the cell took longer than %s and did not end when it was interrupted: its kernel was replaced, variables are lost", limit))
	default:
		end.Error = k.epitaph()
	}
	return end, nil
}

// execution is a cell under way.
type execution struct {
	k        *kernelProc
	cell     *wire.Cell
	out      *cellOutput
	began    time.Time
	deadline time.Time

	interrupted, killed bool
	timedOut            bool
	failed              *wire.CellError
	results             int
	dropped             int
}

func (x *execution) late(value string) *wire.CellError {
	e := &wire.CellError{Name: "Timeout", Value: value}
	if x.failed != nil {
		e.Traceback = x.failed.Traceback
	}
	return e
}

// follow reads what the kernel says until the cell is over. It says whether the kernel can take another.
func (x *execution) follow(ctx context.Context) bool {
	k := x.k
	defer context.AfterFunc(ctx, k.wake)()
	next := x.began.Add(sampleMemory)
	for {
		_ = k.sock.SetReadDeadline(earlier(x.deadline, next))
		now := time.Now()
		if !x.interrupted && ctx.Err() != nil || !now.Before(x.deadline) {
			if x.interrupted {
				x.killed = true
				k.kill()
				return false
			}
			x.timedOut = ctx.Err() == nil
			x.interrupted = true
			x.deadline = now.Add(interruptGrace)
			_ = syscall.Kill(-k.p.pid, syscall.SIGINT)
			continue
		}
		m, err := k.next()
		switch {
		case err == nil:
			if m.ID != k.id {
				continue // of an earlier cell
			}
			switch m.Type {
			case "result":
				x.result(m)
			case "error":
				x.failed = m.failure()
			case "done":
				k.count = max(1, min(m.Count, 1<<30))
				return true
			}
		case errors.Is(err, os.ErrDeadlineExceeded):
			if now = time.Now(); !now.Before(next) {
				k.sample()
				next = now.Add(sampleMemory)
			}
		default:
			return false
		}
	}
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

func (x *execution) result(m *message) {
	if x.out.live { // what was printed before it comes before it
		x.k.stdout.sync()
		x.k.stderr.sync()
	}
	if x.results++; x.results > wire.MaxResults || !x.out.result(m) {
		x.dropped++
	}
}
