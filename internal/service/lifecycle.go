package service

import (
	"context"
	"time"

	"sandlot"
	"sandlot/internal/authz"
	"sandlot/internal/failpoint"
	"sandlot/internal/store"
)

var _ = failpoint.Declare("service.delete.begin", "service.delete.stored", "service.delete.destroyed")

// Get returns a sandbox as it is now. It does not count as activity, so that watching keeps nothing alive.
func (s *Service) Get(ctx context.Context, g authz.Grant, id sandlot.ID) (sandlot.Sandbox, error) {
	if l := s.find(id); l != nil {
		if sb := l.snapshot(); g.Owns(sb.Project) && !l.pending() {
			return sb, nil
		}
	}
	return s.stored(ctx, g, id)
}

// stored reads the row. What is another tenant's and what does not exist take this same path.
func (s *Service) stored(ctx context.Context, g authz.Grant, id sandlot.ID) (sandlot.Sandbox, error) {
	sb, err := s.store.Sandbox(ctx, g.Project.ID, id)
	if isNotFound(err) {
		return sb, errNoSandbox
	}
	return sb, err
}

// use finds a running sandbox for a call into it. Codes: not_found, sandbox_not_running.
func (s *Service) use(ctx context.Context, g authz.Grant, id sandlot.ID) (*live, error) {
	if l := s.find(id); l != nil {
		if sb := l.snapshot(); g.Owns(sb.Project) && !l.pending() {
			if sb.State != sandlot.StateRunning {
				return nil, sandlot.NotRunning(sb.State, sb.Reason)
			}
			return l, nil
		}
	}
	sb, err := s.ended(ctx, g, id)
	if err != nil {
		return nil, err
	}
	return nil, sandlot.NotRunning(sb.State, sb.Reason)
}

// ended reads the row of a sandbox that has no record here. Before Start is over it may be one that runs;
// after it, one that ended between the two looks.
func (s *Service) ended(ctx context.Context, g authz.Grant, id sandlot.ID) (sandlot.Sandbox, error) {
	sb, err := s.stored(ctx, g, id)
	if err == nil && !sb.State.Terminal() {
		return sandlot.Sandbox{}, errNotReady
	}
	return sb, err
}

var errNotReady = sandlot.Errorf(sandlot.CodeUnavailable, "the server is starting or stopping").With("retry_after_s", 1)

// ListRequest selects sandboxes of the grant's project.
type ListRequest struct {
	All      bool // also those that ended in the last 24 h
	State    sandlot.State
	Metadata map[string]string
	After    store.Cursor
	Limit    int
}

// List returns sandboxes, newest first, and where the next page begins.
func (s *Service) List(ctx context.Context, g authz.Grant, req ListRequest) ([]sandlot.Sandbox, store.Cursor, error) {
	q := store.Query{Project: g.Project.ID, State: req.State, Metadata: req.Metadata, After: req.After, Limit: req.Limit}
	if req.All || req.State.Terminal() {
		q.EndedSince = s.clock.Now().Add(-store.EndedListedAfter)
	}
	page, next, err := s.store.Sandboxes(ctx, q)
	for i, sb := range page {
		if l := s.find(sb.ID); l != nil && !sb.State.Terminal() {
			if now := l.snapshot(); now.State == sb.State { // a filter's promise is kept
				page[i] = now
			}
		}
	}
	return page, next, err
}

// SetTimeout sets a living sandbox's idle timeout and lifetime anew, counted from now. Zero keeps the value.
func (s *Service) SetTimeout(ctx context.Context, g authz.Grant, id sandlot.ID, idle, lifetime time.Duration) (sandlot.Sandbox, error) {
	l, err := s.use(ctx, g, id)
	if err != nil {
		return sandlot.Sandbox{}, err
	}
	maxLife := s.plan(g.Org).MaxLifetime
	if maxLife == 0 {
		maxLife = sandlot.MaxLifetime
	}
	l.transition.Lock()
	defer l.transition.Unlock()
	sb := l.snapshot()
	if sb.State.Terminal() {
		return sandlot.Sandbox{}, sandlot.NotRunning(sb.State, sb.Reason)
	}
	if idle, err = boundedTime("idle_timeout_s", idle, sb.IdleTimeout, sandlot.MinIdleTimeout, sandlot.MaxIdleTimeout); err != nil {
		return sandlot.Sandbox{}, err
	}
	if lifetime, err = boundedTime("lifetime_s", lifetime, sb.Lifetime, sandlot.MinLifetime, maxLife); err != nil {
		return sandlot.Sandbox{}, err
	}
	now := s.clock.Now().Truncate(time.Millisecond)
	ev := l.event(now, "timeout", "")
	ev.Fields = map[string]any{"idle_timeout_s": int(idle.Seconds()), "lifetime_s": int(lifetime.Seconds())}
	commit, cancel := detached(ctx, 10*time.Second)
	defer cancel()
	if err := s.store.SetTimeout(commit, store.Timeout{ID: id, IdleTimeout: idle, Lifetime: lifetime, ExpiresAt: now.Add(lifetime), At: now, Event: ev}); err != nil {
		return sandlot.Sandbox{}, err
	}
	elapsed := s.clock.Elapsed()
	l.mu.Lock()
	l.sb.IdleTimeout, l.sb.Lifetime, l.sb.ExpiresAt, l.sb.LastActiveAt = idle, lifetime, now.Add(lifetime), now
	l.activeAt, l.idleAt, l.lifeAt = elapsed, elapsed+idle, elapsed+lifetime
	sb = l.sb
	l.mu.Unlock()
	at, _ := l.deadline()
	s.arm(at)
	return sb, nil
}

// Delete ends a sandbox: when it returns, the machine is dead and its memory gone. Idempotent: one that
// has ended before is returned as it ended.
func (s *Service) Delete(ctx context.Context, g authz.Grant, id sandlot.ID) (sandlot.Sandbox, error) {
	l := s.find(id)
	if l == nil || !g.Owns(l.snapshot().Project) || l.pending() {
		return s.ended(ctx, g, id)
	}
	if err := failpoint.Hit(ctx, "service.delete.begin"); err != nil {
		return sandlot.Sandbox{}, err
	}
	return s.end(ctx, l, ending{state: sandlot.StateStopped, reason: sandlot.ReasonDeleted})
}

// ending says how a sandbox ends.
type ending struct {
	state  sandlot.State
	reason sandlot.Reason
	detail string
	billed time.Time                              // zero: now
	unless func(elapsed time.Duration) (not bool) // judged with the transition held
}

// end makes a sandbox terminal: first its row, then its machine. The first ending wins; a later call
// destroys the machine when that had failed. On failure of the store nothing has changed.
func (s *Service) end(ctx context.Context, l *live, e ending) (sandlot.Sandbox, error) {
	ctx, cancel := detached(ctx, time.Minute)
	defer cancel()
	l.transition.Lock()
	defer l.transition.Unlock()
	sb := l.snapshot()
	if !sb.State.Terminal() {
		if e.unless != nil && e.unless(s.clock.Elapsed()) {
			return sb, nil
		}
		now := s.clock.Now().Truncate(time.Millisecond)
		if now.Before(sb.CreatedAt) {
			now = sb.CreatedAt // the wall clock was set back
		}
		if e.billed.IsZero() || e.billed.After(now) {
			e.billed = now
		}
		ev := l.event(now, string(e.state), e.detail)
		ev.Fields = map[string]any{"reason": string(e.reason)}
		if _, err := s.store.EndSandbox(ctx, store.End{
			ID: l.id, State: e.state, Reason: e.reason, Detail: e.detail, At: now, Billed: e.billed, Event: ev,
		}); err != nil {
			return sandlot.Sandbox{}, err
		}
		l.mu.Lock()
		l.sb.State, l.sb.Reason, l.sb.Detail, l.sb.EndedAt = e.state, e.reason, e.detail, now
		l.undead = true
		sb = l.sb
		l.mu.Unlock()
		s.meter.ended(sb)
		if err := failpoint.Hit(ctx, "service.delete.stored"); err != nil {
			return sandlot.Sandbox{}, err
		}
	}
	l.mu.Lock()
	undead := l.undead
	l.mu.Unlock()
	if !undead {
		return sb, nil
	}
	if err := s.node.Destroy(ctx, l.id); err != nil {
		s.log.Error("a machine could not be destroyed", "sandbox", l.id, "error", err)
		return sandlot.Sandbox{}, sandlot.Wrap(err, sandlot.CodeUnavailable, "the sandbox has ended, but its machine could not be removed yet: it will be tried again").With("retry_after_s", 5)
	}
	l.mu.Lock()
	l.undead = false
	l.mu.Unlock()
	s.forget(l)
	s.quota.release(l.org)
	if err := failpoint.Hit(ctx, "service.delete.destroyed"); err != nil {
		return sandlot.Sandbox{}, err
	}
	return sb, nil
}

// explain turns a failed call into a sandbox that ended meanwhile into what the caller should know.
func (l *live) explain(err error) error {
	if err == nil {
		return nil
	}
	if sb := l.snapshot(); sb.State.Terminal() {
		return sandlot.NotRunning(sb.State, sb.Reason)
	}
	return err
}
