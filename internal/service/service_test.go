package service

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
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
	secret, err := w.Bootstrap(ctx)
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

// TestQuotaRace: adversarial item 48.
func TestQuotaRace(t *testing.T) {
	const limit = 5
	w := newWorld(t, func(p *sandlot.Plan) { p.Concurrent = limit })
	defer w.close()
	w.node.delay = jitter(3 * time.Millisecond)
	injected := errors.New("injected")
	w.node.failing = func() error {
		if rand.N(4) == 0 {
			return injected
		}
		return nil
	}
	var made, refused, failed atomic.Int64
	var wg sync.WaitGroup
	for i := range 200 {
		wg.Go(func() {
			c, err := w.Create(t.Context(), w.grant, CreateRequest{})
			switch {
			case err == nil:
				made.Add(1)
				if i%2 == 0 {
					if _, err := w.Delete(t.Context(), w.grant, c.Sandbox.ID); err != nil {
						t.Error(err)
					}
				}
			case sandlot.ErrorCode(err) == sandlot.CodeQuotaExceeded:
				refused.Add(1)
				var e *sandlot.Error
				if !errors.As(err, &e) || e.Fields["retry_after_s"] == nil || e.Fields["limit"] != limit {
					t.Errorf("refusal %+v", e)
				}
			default:
				failed.Add(1)
			}
		})
	}
	wg.Wait()
	if w.node.most > limit {
		t.Errorf("%d machines at once, the limit is %d", w.node.most, limit)
	}
	if made.Load() == 0 || refused.Load() == 0 || failed.Load() == 0 {
		t.Errorf("the race did not happen: made %d, refused %d, failed %d", made.Load(), refused.Load(), failed.Load())
	}
	w.census(w.node.alive())
	w.node.failing = func() error { return nil }
	for w.quota.count() < limit { // every place that was given back can be taken again
		w.create(CreateRequest{})
	}
	w.census(limit)
}

// TestIdempotency: adversarial item 50.
func TestIdempotency(t *testing.T) {
	w := newWorld(t, nil)
	defer w.close()
	w.node.delay = jitter(5 * time.Millisecond)
	req := CreateRequest{Key: "k1", BodyHash: [32]byte{1}}
	ids := make([]sandlot.ID, 50)
	var replayed atomic.Int64
	var wg sync.WaitGroup
	for i := range ids {
		wg.Go(func() {
			c, err := w.Create(t.Context(), w.grant, req)
			if err != nil {
				t.Error(err)
				return
			}
			if ids[i] = c.Sandbox.ID; c.Replayed {
				replayed.Add(1)
			}
		})
	}
	wg.Wait()
	for _, id := range ids {
		if id != ids[0] {
			t.Fatalf("two sandboxes: %s, %s", id, ids[0])
		}
	}
	if replayed.Load() != 49 || w.node.creates.Load() != 1 {
		t.Errorf("%d replayed, %d machines made", replayed.Load(), w.node.creates.Load())
	}
	other := req
	other.BodyHash = [32]byte{2}
	if _, err := w.Create(t.Context(), w.grant, other); sandlot.ErrorCode(err) != sandlot.CodeConflict {
		t.Errorf("another body: %v", err)
	}
	// a failed create leaves its key free
	w.node.failing = func() error { return sandlot.Errorf(sandlot.CodeCapacity, "injected") }
	again := CreateRequest{Key: "k2"}
	if _, err := w.Create(t.Context(), w.grant, again); sandlot.ErrorCode(err) != sandlot.CodeCapacity {
		t.Errorf("failing create: %v", err)
	}
	w.node.failing = func() error { return nil }
	if c, err := w.Create(t.Context(), w.grant, again); err != nil || c.Replayed {
		t.Errorf("second try: %+v, %v", c.Replayed, err)
	}
	// after a day the key means nothing any more
	w.clock.Step(25 * time.Hour)
	if c, err := w.Create(t.Context(), w.grant, other); err != nil || c.Replayed {
		t.Errorf("a day later: %+v, %v", c.Replayed, err)
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

// TestDeadlines: idle, lifetime and clock steps; adversarial item 55 in part.
func TestDeadlines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil)
		defer w.close()
		idle := w.create(CreateRequest{IdleTimeout: 60 * time.Second})
		busy := w.create(CreateRequest{IdleTimeout: 60 * time.Second, Lifetime: 10 * time.Minute})
		loaded := w.create(CreateRequest{IdleTimeout: 60 * time.Second, Lifetime: 20 * time.Minute})
		held := w.create(CreateRequest{IdleTimeout: 60 * time.Second, Lifetime: 20 * time.Minute})
		w.node.mu.Lock()
		w.node.cpu[loaded.ID] = 10
		w.node.mu.Unlock()
		s, err := w.ExecStream(t.Context(), w.grant, held.ID, ExecRequest{Argv: []string{"sleep", "8m"}, Timeout: time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		w.clock.Step(24 * time.Hour) // neither a step forward nor one back ends or keeps anything
		time.Sleep(50 * time.Second)
		w.clock.Step(-48 * time.Hour)
		if _, err := w.Exec(t.Context(), w.grant, busy.ID, ExecRequest{Argv: []string{"true"}}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(9 * time.Second)
		synctest.Wait()
		if got := w.get(idle.ID); got.State != sandlot.StateRunning {
			t.Errorf("ended after 59 s: %v %v", got.State, got.Reason)
		}
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if got := w.get(idle.ID); got.State != sandlot.StateStopped || got.Reason != sandlot.ReasonIdleTimeout {
			t.Errorf("after 61 s: %v %v", got.State, got.Reason)
		}
		for range 20 { // a call each 30 s
			time.Sleep(30 * time.Second)
			_, _ = w.Exec(t.Context(), w.grant, busy.ID, ExecRequest{Argv: []string{"true"}})
		}
		synctest.Wait()
		if got := w.get(busy.ID); got.Reason != sandlot.ReasonLifetime {
			t.Errorf("busy after its lifetime: %v %v", got.State, got.Reason)
		}
		if got := w.get(loaded.ID); got.State != sandlot.StateRunning {
			t.Errorf("10%% of a CPU does not count as activity: %v %v", got.State, got.Reason)
		}
		for err == nil {
			_, _, err = s.Next()
		}
		s.Close() // after 8 minutes; then 60 s of idling
		time.Sleep(50 * time.Second)
		synctest.Wait()
		// the stream ended 8 minutes in; nothing held it after that
		if got := w.get(held.ID); got.State != sandlot.StateRunning {
			t.Errorf("held: %v %v", got.State, got.Reason)
		}
		time.Sleep(15 * time.Second)
		synctest.Wait()
		if got := w.get(held.ID); got.Reason != sandlot.ReasonIdleTimeout {
			t.Errorf("held, let go, and idle: %v %v", got.State, got.Reason)
		}
		if _, err := w.SetTimeout(t.Context(), w.grant, loaded.ID, 0, 30*time.Second); err != nil {
			t.Fatal(err)
		}
		time.Sleep(31 * time.Second)
		synctest.Wait()
		if got := w.get(loaded.ID); got.Reason != sandlot.ReasonLifetime {
			t.Errorf("a shortened lifetime: %v %v", got.State, got.Reason)
		}
		w.census(0)
	})
}

func TestUsageAndMetrics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // the bubble's clock starts at 2000-01-01, a month's beginning
		w := newWorld(t, nil)
		defer w.close()
		b := w.create(CreateRequest{VCPU: 2, MemoryMB: 2048, IdleTimeout: sandlot.MaxIdleTimeout, Lifetime: sandlot.MaxLifetime})
		time.Sleep(30 * time.Minute)
		if _, err := w.Delete(t.Context(), w.grant, b.ID); err != nil {
			t.Fatal(err)
		}
		w.create(CreateRequest{IdleTimeout: sandlot.MaxIdleTimeout, Lifetime: sandlot.MaxLifetime})
		time.Sleep(time.Hour)
		u, err := w.Usage(t.Context(), w.grant)
		if err != nil {
			t.Fatal(err)
		}
		if u.Project.VCPUHours() != 2 || u.Project.GBHours() != 2 || u.Project.Started != 2 {
			t.Errorf("%v vCPU-h, %v GB-h, %d sandboxes", u.Project.VCPUHours(), u.Project.GBHours(), u.Project.Started)
		}
		samples, err := w.Metrics(t.Context(), w.grant, b.ID, time.Time{})
		if err != nil || len(samples) < 50 || samples[0].Processes != 3 {
			t.Errorf("%d samples, %v", len(samples), err)
		}
		events, _, err := w.Logs(t.Context(), w.grant, b.ID, 0, 100)
		if err != nil || len(events) != 3 || events[2].Name != "stopped" {
			t.Errorf("%v, %v", events, err)
		}
	})
}

func TestHardLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, func(p *sandlot.Plan) { p.HardLimit, p.IncludedVCPUHours, p.IncludedGBHours = true, 1, 10 })
		defer w.close()
		w.create(CreateRequest{IdleTimeout: sandlot.MaxIdleTimeout, Lifetime: sandlot.MaxLifetime})
		w.create(CreateRequest{IdleTimeout: sandlot.MaxIdleTimeout, Lifetime: sandlot.MaxLifetime})
		time.Sleep(31 * time.Minute)
		if _, err := w.Create(t.Context(), w.grant, CreateRequest{}); sandlot.ErrorCode(err) != sandlot.CodeQuotaExceeded {
			t.Errorf("over the allowance: %v", err)
		}
	})
}

func TestValidation(t *testing.T) {
	w := newWorld(t, func(p *sandlot.Plan) { p.MaxVCPU, p.MaxMemoryMB, p.MaxLifetime = 2, 4096, time.Hour })
	defer w.close()
	big := make(map[string]string)
	for i := range 1001 {
		big[fmt.Sprint("V", i)] = ""
	}
	for name, req := range map[string]CreateRequest{
		"vcpu over the plan":     {VCPU: 3},
		"negative vcpu":          {VCPU: -1},
		"memory over the plan":   {MemoryMB: 4097},
		"memory below":           {MemoryMB: 64},
		"disk":                   {DiskGB: 21},
		"idle":                   {IdleTimeout: 29 * time.Second},
		"lifetime over the plan": {Lifetime: 2 * time.Hour},
		"overflow":               {Lifetime: 1<<63 - 1},
		"name":                   {Name: "../x"},
		"env name":               {Env: map[string]string{"A=B": ""}},
		"env value":              {Env: map[string]string{"A": "x\x00y"}},
		"env count":              {Env: big},
		"env size":               {Env: map[string]string{"A": string(make([]byte, 300<<10))}},
		"metadata":               {Metadata: map[string]string{"": "x"}},
		"egress mode":            {Egress: sandlot.Egress{Mode: "some"}},
		"egress hosts":           {Egress: sandlot.Egress{Mode: sandlot.EgressOpen, Hosts: []string{"a"}}},
		"egress host":            {Egress: sandlot.Egress{Hosts: []string{"a b"}}},
		"preview":                {Preview: "some"},
		"isolation":              {Isolation: "some"},
		"key":                    {Key: "a\nb"},
	} {
		if _, err := w.Create(t.Context(), w.grant, req); sandlot.ErrorCode(err) != sandlot.CodeInvalidRequest {
			t.Errorf("%s: %v", name, err)
		}
	}
	// adversarial item 6: names that people choose never become a path, an argument or a log line
	for _, name := range []string{"../x", "a/b", "-rf", "--root=/", "$(id)", "a\nb", "a\x00", string(make([]byte, 10<<10)), "\u202ebase", "bаse", ".hidden", "base@sha256:../x"} {
		if _, err := w.Create(t.Context(), w.grant, CreateRequest{Template: name}); sandlot.ErrorCode(err) != sandlot.CodeInvalidRequest {
			t.Errorf("template %q: %v", name, err)
		}
	}
	if _, err := w.Create(t.Context(), w.grant, CreateRequest{Template: "con"}); sandlot.ErrorCode(err) != sandlot.CodeNotFound {
		t.Errorf("an unknown template: %v", err)
	}
	w.census(0)
	b := w.create(CreateRequest{})
	// adversarial item 7: of argv, cwd, env and user
	for name, req := range map[string]ExecRequest{
		"none":     {},
		"nul":      {Argv: []string{"a\x00b"}},
		"huge":     {Argv: []string{string(make([]byte, 2<<20))}},
		"cwd":      {Argv: []string{"a"}, Cwd: "/proc/../x"},
		"uid":      {Argv: []string{"a"}, User: "0:0"},
		"user":     {Argv: []string{"a"}, User: "../"},
		"env":      {Argv: []string{"a"}, Env: map[string]string{"": "x"}},
		"env line": {Argv: []string{"a"}, Env: map[string]string{"A\nB": "x"}},
		"timeout":  {Argv: []string{"a"}, Timeout: 25 * time.Hour},
	} {
		if _, err := w.Exec(t.Context(), w.grant, b.ID, req); sandlot.ErrorCode(err) != sandlot.CodeInvalidRequest {
			t.Errorf("%s: %v", name, err)
		}
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
