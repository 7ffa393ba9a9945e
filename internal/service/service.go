// Package service is what Sandlot does: the use cases over a store and a node.
//
// A sandbox that is alive has a record in memory (live) beside its row; the row is the truth about its
// state and survives this process, the record knows what a row need not: when it was last active, which
// streams hold it open, and the client of its agent.
//
// Lock order: live.transition, then live.mu; Service.mu and Quota.mu are leaves. createGate is taken
// before all of them.
package service

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"sandlot"
	"sandlot/internal/authz"
	"sandlot/internal/clock"
	"sandlot/internal/node"
	"sandlot/internal/store"
)

// Store is what the use cases need to remember.
type Store interface {
	authz.Store
	Bootstrap(ctx context.Context, b store.Bootstrap, last func() error) error
	Secret(ctx context.Context) ([]byte, error)
	Ping(ctx context.Context) error
	Maintain(ctx context.Context, now time.Time) error

	Org(ctx context.Context, id sandlot.ID) (sandlot.Org, error)
	Projects(ctx context.Context, org sandlot.ID) ([]sandlot.Project, error)
	InsertProject(ctx context.Context, p sandlot.Project) error
	Token(ctx context.Context, id sandlot.ID) (sandlot.Token, error)
	Tokens(ctx context.Context, org sandlot.ID) ([]sandlot.Token, error)
	InsertToken(ctx context.Context, t sandlot.Token) error
	RevokeToken(ctx context.Context, id sandlot.ID, now time.Time) error

	InsertSandbox(ctx context.Context, c store.Creation) error
	EndSandbox(ctx context.Context, e store.End) (bool, error)
	SetTimeout(ctx context.Context, t store.Timeout) error
	Sandbox(ctx context.Context, project, id sandlot.ID) (sandlot.Sandbox, error)
	Sandboxes(ctx context.Context, q store.Query) ([]sandlot.Sandbox, store.Cursor, error)
	Alive(ctx context.Context) ([]store.Alive, error)
	Idempotency(ctx context.Context, project sandlot.ID, key string, since time.Time) (store.Idempotency, error)

	Flush(ctx context.Context, changes []store.Activity) error
	LastAlive(ctx context.Context, id sandlot.ID) (time.Time, error)
	Samples(ctx context.Context, id sandlot.ID, since time.Time, limit int) ([]sandlot.Sample, error)
	AddEvents(ctx context.Context, events ...sandlot.Event) error
	Events(ctx context.Context, id sandlot.ID, after int64, limit int) ([]sandlot.Event, int64, error)
	Usage(ctx context.Context, org sandlot.ID, from, to time.Time) ([]store.ProjectUsage, error)
	SandboxUsage(ctx context.Context, id sandlot.ID, to time.Time) (sandlot.UsageTotal, error)
}

// Config is what a Service is made of. Store, Node, Authz and Log are needed.
type Config struct {
	Store Store
	Node  node.Node
	Authz *authz.Authz
	Log   *slog.Logger
	Clock clock.Clock             // nil: the system's
	Plans map[string]sandlot.Plan // nil: sandlot.DefaultPlans
	// MaxSandboxes bounds those alive on this host at any instant; 0: the node alone decides.
	MaxSandboxes int
	// DefaultTemplate serves a create that names none; "": "base".
	DefaultTemplate string
}

// Service is the use cases.
type Service struct {
	store  Store
	node   node.Node
	authz  *authz.Authz
	log    *slog.Logger
	clock  clock.Clock
	plans  map[string]sandlot.Plan
	deflt  string
	quota  *quota
	keys   *keyring
	tmpl   templateCache
	builds builds
	meter  Meter

	createGate sync.RWMutex // read: from asking the node for a machine until it is known here; write: Reconcile

	mu     sync.RWMutex
	live   map[sandlot.ID]*live
	secret []byte

	reapers chan struct{} // slots of those that end sandboxes
	wake    chan struct{}
	wakeAt  atomic.Int64 // elapsed nanoseconds at which the reaper wakes by itself
	ready   atomic.Bool
	readyAt atomic.Int64 // elapsed nanoseconds of the last good answer
	closing atomic.Bool
	stop    context.CancelFunc
	loops   sync.WaitGroup
}

// New makes a Service. Start makes it work.
func New(c Config) *Service {
	if c.Clock == nil {
		c.Clock = clock.System()
	}
	if c.Plans == nil {
		c.Plans = sandlot.DefaultPlans()
	}
	if c.DefaultTemplate == "" {
		c.DefaultTemplate = "base"
	}
	quota := newQuota(c.MaxSandboxes)
	return &Service{
		store: c.Store, node: c.Node, authz: c.Authz, log: c.Log, clock: c.Clock, plans: c.Plans, deflt: c.DefaultTemplate,
		quota: quota, meter: newMeter(quota.count), keys: newKeyring(), live: map[sandlot.ID]*live{}, wake: make(chan struct{}, 1),
		reapers: make(chan struct{}, reapersAtOnce),
	}
}

// Start takes over what an earlier process left: sandboxes that are alive go on, those whose machines are
// gone become failed with reason host_lost, and the node removes machines that nobody was told of. Then it
// starts to watch. ctx bounds the start only.
//
// On failure nothing runs and Start may be called again.
func (s *Service) Start(ctx context.Context) error {
	secret, err := s.store.Secret(ctx)
	if err != nil {
		return sandlot.Wrap(err, sandlot.ErrorCode(err), "the server has no key yet: FirstStart comes before Start")
	}
	alive, err := s.store.Alive(ctx)
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.secret = secret
	clear(s.live)
	s.quota.reset()
	for _, a := range alive {
		l := s.newLive(a.Sandbox, a.Org)
		s.live[a.Sandbox.ID] = l
		s.quota.adopt(a.Org)
	}
	s.mu.Unlock()

	run, stop := context.WithCancel(context.WithoutCancel(ctx))
	events, err := s.node.Events(run)
	if err != nil {
		stop()
		return err
	}
	if err := s.reconcile(ctx); err != nil {
		stop()
		return err
	}
	s.stop = stop
	s.loops.Go(func() { s.watchNode(run, events) })
	s.loops.Go(func() { s.reapLoop(run) })
	s.loops.Go(func() { s.sampleLoop(run) })
	s.loops.Go(func() { s.maintainLoop(run) })
	s.ready.Store(true)
	return nil
}

// Close stops watching and stores what is not stored yet. Sandboxes run on. Requests in flight should
// have ended before.
func (s *Service) Close(ctx context.Context) error {
	if !s.closing.CompareAndSwap(false, true) || s.stop == nil {
		return nil
	}
	s.ready.Store(false)
	s.stop()
	s.builds.end()
	s.loops.Wait()
	err := s.flush(ctx, nil)
	for _, l := range s.all() {
		l.closeGuest()
	}
	return err
}

// Ready says whether requests can be served: the node answers and was reconciled, the store can be written.
func (s *Service) Ready(ctx context.Context) error {
	if !s.ready.Load() {
		return errNotReady
	}
	// Anybody may ask: the answer of a moment ago does, so that asking costs no write to the disk each time.
	if at := s.readyAt.Load(); at != 0 && s.clock.Elapsed()-time.Duration(at) < time.Second {
		return nil
	}
	if _, err := s.node.Info(ctx); err != nil {
		return sandlot.Wrap(err, sandlot.CodeUnavailable, "the node does not answer").With("retry_after_s", 1)
	}
	if err := s.store.Ping(ctx); err != nil {
		return err
	}
	s.readyAt.Store(int64(s.clock.Elapsed()))
	return nil
}

// reconcile makes node and store agree. Creates wait for it, so that no machine is removed between its
// making and its being known here.
func (s *Service) reconcile(ctx context.Context) error {
	s.createGate.Lock()
	defer s.createGate.Unlock()
	var keep []sandlot.ID
	for _, l := range s.all() {
		if !l.state().Terminal() {
			keep = append(keep, l.id)
		}
	}
	r, err := s.node.Reconcile(ctx, keep)
	if err != nil {
		return sandlot.Wrap(err, sandlot.CodeUnavailable, "the node could not be reconciled").With("retry_after_s", 1)
	}
	s.log.Info("node reconciled", "adopted", len(r.Adopted), "lost", len(r.Lost), "reaped", r.Reaped, "quarantined", len(r.Failed))
	for _, id := range r.Failed {
		s.log.Error("a machine could not be removed", "sandbox", id)
	}
	for _, id := range r.Lost {
		l := s.find(id)
		if l == nil || l.pending() {
			continue
		}
		seen, err := s.store.LastAlive(ctx, id)
		if err != nil {
			return err
		}
		if _, err := s.end(ctx, l, ending{state: sandlot.StateFailed, reason: sandlot.ReasonHostLost,
			detail: "the machine was gone when the server looked for it", billed: seen}); err != nil {
			return err
		}
	}
	return nil
}

// watchNode hears what happens to machines. When the node cuts it off it subscribes and reconciles again.
func (s *Service) watchNode(ctx context.Context, events <-chan node.Event) {
	for {
		for e := range events {
			s.nodeEvent(ctx, e)
		}
		events = nil
		for wait := 100 * time.Millisecond; events == nil; wait = min(2*wait, 5*time.Second) {
			if sleep(ctx, wait) != nil {
				return
			}
			next, err := s.node.Events(ctx)
			if err == nil {
				err = s.reconcile(ctx)
			}
			if err != nil {
				if ctx.Err() == nil {
					s.log.Warn("the node's events are lost", "error", err)
				}
				continue
			}
			events = next
		}
	}
}

func (s *Service) nodeEvent(ctx context.Context, e node.Event) {
	l := s.find(e.ID)
	if l == nil {
		return
	}
	switch e.Kind {
	case node.EventOOM:
		ev := l.event(s.clock.Now(), "oom", "the kernel ended a process for lack of memory")
		ev.Kind = "kernel"
		if e.Detail != "" {
			ev.Fields = map[string]any{"detail": e.Detail}
		}
		if err := s.store.AddEvents(ctx, ev); err != nil {
			s.log.Warn("an event was not stored", "sandbox", e.ID, "error", err)
		}
	case node.EventExited:
		if l.noteExit(e.Detail) {
			return // its create is under way and will see it
		}
		s.crashed(ctx, l, e.Detail)
	}
}

// crashed ends a sandbox whose machine died by itself.
func (s *Service) crashed(ctx context.Context, l *live, detail string) {
	if detail == "" {
		detail = "the machine ended by itself"
	}
	if _, err := s.end(ctx, l, ending{state: sandlot.StateFailed, reason: sandlot.ReasonCrashed, detail: detail}); err != nil {
		s.log.Error("a crashed sandbox could not be ended", "sandbox", l.id, "error", err) // the sampler tries again
	}
}

// maintainLoop keeps the store bounded.
func (s *Service) maintainLoop(ctx context.Context) {
	for sleep(ctx, time.Minute) == nil {
		if err := s.store.Maintain(ctx, s.clock.Now()); err != nil && ctx.Err() == nil {
			s.log.Warn("the store was not tidied", "error", err)
		}
	}
}

func (s *Service) find(id sandlot.ID) *live {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.live[id]
}

func (s *Service) all() []*live {
	s.mu.RLock()
	defer s.mu.RUnlock()
	all := make([]*live, 0, len(s.live))
	for _, l := range s.live {
		all = append(all, l)
	}
	return all
}

func (s *Service) plan(org sandlot.Org) sandlot.Plan {
	if p, ok := s.plans[org.Plan]; ok {
		return p
	}
	s.log.Error("an organization has a plan that the configuration does not", "org", org.ID, "plan", org.Plan)
	return s.plans["free"]
}

// sleep waits unless ctx ends first.
func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// detached keeps ctx's values, not its end: for what must be finished once it was begun.
func detached(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), d)
}

var errNoSandbox = sandlot.Errorf(sandlot.CodeNotFound, "no such sandbox")

func asError(err error, e **sandlot.Error) bool { return errors.As(err, e) }

func isNotFound(err error) bool {
	var e *sandlot.Error
	return errors.As(err, &e) && e.Code == sandlot.CodeNotFound
}
