package service

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"sandlot"
	"sandlot/internal/authz"
	"sandlot/internal/clock"
	"sandlot/internal/failpoint"
	"sandlot/internal/node"
	"sandlot/internal/store/sqlite"
)

type world struct {
	*Service
	t     testing.TB
	node  *fakeNode
	store *sqlite.Store
	grant authz.Grant
	clock *clock.Stepped
}

// newWorld is a started service over a fake node. plan changes the organization's.
func newWorld(t testing.TB, plan func(*sandlot.Plan)) *world {
	t.Helper()
	ctx := context.Background()
	st, err := sqlite.Open(ctx, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	plans := sandlot.DefaultPlans()
	if plan != nil {
		p := plans[sandlot.PlanUnlimited]
		plan(&p)
		plans[sandlot.PlanUnlimited] = p
	}
	w := &world{t: t, node: newFakeNode(), store: st, clock: clock.NewStepped()}
	a := authz.New(st, w.clock.Now)
	w.Service = New(Config{Store: st, Node: w.node, Authz: a, Log: slog.New(slog.DiscardHandler), Clock: w.clock, Plans: plans})
	var secret sandlot.Secret
	err = w.FirstStart(ctx, func(first sandlot.Secret) error {
		secret = first
		return nil
	})
	if err != nil || secret == "" {
		t.Fatalf("bootstrap: %q, %v", secret.Reveal(), err)
	}
	p, err := a.Authenticate(ctx, secret)
	if err != nil {
		t.Fatal(err)
	}
	if w.grant, err = a.Authorize(ctx, p, authz.Write, "default"); err != nil {
		t.Fatal(err)
	}
	if err := w.Start(ctx); err != nil {
		t.Fatal(err)
	}
	return w
}

// close stops the service and removes what still runs.
func (w *world) close() {
	w.t.Helper()
	if err := w.Close(context.Background()); err != nil {
		w.t.Error(err)
	}
	if _, err := w.node.Reconcile(context.Background(), nil); err != nil {
		w.t.Error(err)
	}
	if err := w.store.Close(); err != nil {
		w.t.Error(err)
	}
}

func (w *world) create(req CreateRequest) sandlot.Sandbox {
	w.t.Helper()
	c, err := w.Create(context.Background(), w.grant, req)
	if err != nil {
		w.t.Fatal(err)
	}
	return c.Sandbox
}

func (w *world) get(id sandlot.ID) sandlot.Sandbox {
	w.t.Helper()
	b, err := w.Get(context.Background(), w.grant, id)
	if err != nil {
		w.t.Fatal(err)
	}
	return b
}

// census: nothing may be left but what the store says runs.
func (w *world) census(want int) {
	w.t.Helper()
	alive, err := w.store.Alive(context.Background())
	if err != nil {
		w.t.Fatal(err)
	}
	if len(alive) != want || w.node.alive() != want || w.quota.count() != want || len(w.all()) != want {
		w.t.Errorf("rows %d, machines %d, places %d, records %d, want %d each", len(alive), w.node.alive(), w.quota.count(), len(w.all()), want)
	}
}

// TestCreateFailpoints: each step of create fails in turn and leaves nothing.
func TestCreateFailpoints(t *testing.T) {
	w := newWorld(t, nil)
	defer w.close()
	for _, p := range []string{"service.create.reserved", "service.create.claimed", "service.create.identified"} {
		disarm, err := failpoint.Arm(p + "=error")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.Create(t.Context(), w.grant, CreateRequest{}); !errors.Is(err, failpoint.ErrInjected) {
			t.Errorf("%s: %v", p, err)
		}
		disarm()
		w.census(0)
	}
	// the caller goes away in the middle
	ctx, cancel := context.WithCancel(t.Context())
	w.node.delay = func() time.Duration { cancel(); return time.Millisecond }
	if _, err := w.Create(ctx, w.grant, CreateRequest{}); err == nil {
		t.Error("a cancelled create succeeded")
	}
	w.node.delay = func() time.Duration { return 0 }
	w.census(0)
	w.create(CreateRequest{})
	w.census(1)
}

func TestDeleteWinsAndIsIdempotent(t *testing.T) {
	w := newWorld(t, nil)
	defer w.close()
	b := w.create(CreateRequest{})
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			got, err := w.Delete(t.Context(), w.grant, b.ID)
			if err != nil || got.State != sandlot.StateStopped || got.Reason != sandlot.ReasonDeleted {
				t.Errorf("%v %v %v", got.State, got.Reason, err)
			}
		})
	}
	wg.Wait()
	w.census(0)
	if _, err := w.Exec(t.Context(), w.grant, b.ID, ExecRequest{Argv: []string{"true"}}); sandlot.ErrorCode(err) != sandlot.CodeNotRunning {
		t.Errorf("exec after delete: %v", err)
	}
	if _, err := w.Delete(t.Context(), w.grant, sandlot.NewID("sbx")); sandlot.ErrorCode(err) != sandlot.CodeNotFound {
		t.Errorf("delete of nothing: %v", err)
	}
}

func TestCrashAndLostHost(t *testing.T) {
	w := newWorld(t, nil)
	a, b, c := w.create(CreateRequest{}), w.create(CreateRequest{}), w.create(CreateRequest{})
	w.node.die(a.ID, "boom")
	wait(t, func() bool { return w.get(a.ID).State == sandlot.StateFailed })
	if got := w.get(a.ID); got.Reason != sandlot.ReasonCrashed || got.Detail != "boom" {
		t.Errorf("%v %q", got.Reason, got.Detail)
	}
	w.census(2)
	if err := w.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	// the host loses one while nobody looks, and has one that nobody was told of
	w.node.mu.Lock()
	w.node.drop(b.ID, w.node.machines[b.ID])
	w.node.mu.Unlock()
	if _, err := w.node.Create(t.Context(), node.CreateRequest{Template: "base"}); err != nil {
		t.Fatal(err)
	}
	w.Service = New(Config{Store: w.store, Node: w.node, Authz: w.authz, Log: w.log, Clock: w.clock})
	if err := w.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	defer w.close()
	if got := w.get(b.ID); got.State != sandlot.StateFailed || got.Reason != sandlot.ReasonHostLost {
		t.Errorf("lost: %v %v", got.State, got.Reason)
	}
	if _, err := w.Exec(t.Context(), w.grant, c.ID, ExecRequest{Argv: []string{"true"}}); err != nil {
		t.Errorf("adopted: %v", err)
	}
	w.census(1)
}

// TestBeforeStart: a server that listens before it has looked at its host says so.
func TestBeforeStart(t *testing.T) {
	w := newWorld(t, nil)
	b := w.create(CreateRequest{})
	if err := w.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.Service = New(Config{Store: w.store, Node: w.node, Authz: w.authz, Log: w.log, Clock: w.clock})
	_, execErr := w.Exec(t.Context(), w.grant, b.ID, ExecRequest{Argv: []string{"true"}})
	_, deleteErr := w.Delete(t.Context(), w.grant, b.ID)
	_, createErr := w.Create(t.Context(), w.grant, CreateRequest{})
	for what, err := range map[string]error{"exec": execErr, "delete": deleteErr, "create": createErr, "ready": w.Ready(t.Context())} {
		if sandlot.ErrorCode(err) != sandlot.CodeUnavailable {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := w.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	defer w.close()
	if err := w.Ready(t.Context()); err != nil {
		t.Error(err)
	}
	if got, err := w.Delete(t.Context(), w.grant, b.ID); err != nil || got.Reason != sandlot.ReasonDeleted {
		t.Errorf("%v %v", got.Reason, err)
	}
}

func wait(t *testing.T, ok func() bool) {
	t.Helper()
	for range 500 {
		if ok() {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
	t.Fatal("it did not happen")
}

// TestLifecycleHammer: adversarial item 49, short.
func TestLifecycleHammer(t *testing.T) {
	w := newWorld(t, func(p *sandlot.Plan) { p.Concurrent = 12 })
	defer w.close()
	w.node.delay = jitter(2 * time.Millisecond)
	ctx, cancel := context.WithTimeout(t.Context(), 1500*time.Millisecond)
	defer cancel()
	var mu sync.Mutex
	var ids []sandlot.ID
	pick := func() sandlot.ID {
		mu.Lock()
		defer mu.Unlock()
		if len(ids) == 0 {
			return sandlot.NewID("sbx")
		}
		return ids[rand.N(len(ids))]
	}
	legal := map[sandlot.Code]bool{"": true, sandlot.CodeNotRunning: true, sandlot.CodeNotFound: true, sandlot.CodeQuotaExceeded: true}
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for ctx.Err() == nil {
				var err error
				id := pick()
				switch rand.N(6) {
				case 0:
					var c Created
					if c, err = w.Create(t.Context(), w.grant, CreateRequest{}); err == nil {
						mu.Lock()
						ids = append(ids, c.Sandbox.ID)
						mu.Unlock()
					}
				case 1:
					_, err = w.Delete(t.Context(), w.grant, id)
				case 2:
					_, err = w.SetTimeout(t.Context(), w.grant, id, time.Hour, time.Hour)
				case 3:
					var s *Stream
					if s, err = w.ExecStream(t.Context(), w.grant, id, ExecRequest{Argv: []string{"sleep", "1ms"}}); err == nil {
						for err == nil {
							_, _, err = s.Next()
						}
						s.Close()
						if code := sandlot.ErrorCode(err); code != sandlot.CodeNotRunning {
							err = nil // io.EOF
						}
					}
				case 4:
					w.node.mu.Lock()
					alive := w.node.machines[id] != nil
					w.node.mu.Unlock()
					if alive && rand.N(4) == 0 {
						w.node.die(id, "hammered")
					}
				default:
					_, err = w.Exec(t.Context(), w.grant, id, ExecRequest{Argv: []string{"true"}})
				}
				code := sandlot.ErrorCode(err)
				if code == sandlot.CodeSandboxUnhealthy {
					continue // its machine died and the event is on its way
				}
				if !legal[code] {
					t.Errorf("%s: %v", code, err)
				}
			}
		})
	}
	wg.Wait()
	wait(t, func() bool { return w.node.alive() == len(w.all()) })
	w.census(w.node.alive())
	for _, l := range w.all() {
		l.mu.Lock()
		if l.active != 0 {
			t.Errorf("%s is held %d times by nobody", l.id, l.active)
		}
		l.mu.Unlock()
	}
}

func BenchmarkCreate(b *testing.B) {
	w := newWorld(b, nil)
	defer w.close()
	for b.Loop() {
		c, err := w.Create(context.Background(), w.grant, CreateRequest{})
		if err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		if _, err := w.Delete(context.Background(), w.grant, c.Sandbox.ID); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
}
