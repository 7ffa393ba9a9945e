// Package enginetest is the conformance suite of engines. Every engine passes all of it; what an engine
// declares not to be able to do is left out by its Capabilities alone.
package enginetest

import (
	"context"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"sandlot"
	"sandlot/internal/engine"
	"sandlot/internal/failpoint"
	"sandlot/internal/guest"
	"sandlot/internal/wire"
)

// Harness is what an engine's own test file gives.
type Harness struct {
	// Open opens an engine on the test's state directory. Called again after Close it finds what is there.
	Open     func(t *testing.T) engine.Engine
	Template sandlot.Template
	// Kill makes a machine die by itself.
	Kill func(t *testing.T, m engine.Machine)
	// Census lists, sorted, everything on the host that belongs to the state directory's machines.
	Census func(t *testing.T) []string
	// Machines is the directory whose entries List reads.
	Machines string
}

const patience = 60 * time.Second

// Run runs the suite.
func Run(t *testing.T, h Harness) {
	t.Run("Lifecycle", h.lifecycle)
	t.Run("TwoMachinesAreStrangers", h.strangers)
	t.Run("Concurrent", h.concurrent)
	t.Run("DiesByItself", h.diesByItself)
	t.Run("Adopt", h.adopt)
	t.Run("ReapsWhatWasNeverFinished", h.unfinished)
	t.Run("ForeignEntriesAreLeftAlone", h.foreign)
	t.Run("CancelledCreateLeavesNothing", h.cancelled)
	t.Run("FailpointsOfCreate", h.failpoints)
	t.Run("FailpointsOfDestroy", h.failpointsDestroy)
	t.Run("BadIDs", h.badIDs)
}

func (h Harness) spec() engine.Spec {
	return engine.Spec{ID: sandlot.NewID(sandlot.PrefixSandbox), Template: h.Template, Size: sandlot.DefaultSize}
}

func (h Harness) open(t *testing.T) engine.Engine {
	t.Helper()
	e := h.Open(t)
	t.Cleanup(func() {
		for _, r := range list(t, e) {
			if err := e.Reap(context.Background(), r); err != nil {
				t.Errorf("clean up %s: %v", r.ID, err)
			}
		}
		if err := e.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return e
}

func (h Harness) create(t *testing.T, e engine.Engine) engine.Machine {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	m, _, err := e.Create(ctx, h.spec())
	if err != nil {
		t.Fatalf("create: %v", err)
	}
	return m
}

func list(t *testing.T, e engine.Engine) []engine.Record {
	t.Helper()
	recs, err := e.List(context.Background())
	if err != nil {
		t.Fatalf("list: %v", err)
	}
	return recs
}

// Client is a client of a machine's agent.
func Client(t *testing.T, m engine.Machine) *guest.Client {
	t.Helper()
	c := guest.New(m.Dial)
	t.Cleanup(func() { c.Close() })
	return c
}

// Identify gives a machine an identity.
func Identify(t *testing.T, c *guest.Client, id sandlot.ID) {
	t.Helper()
	err := c.Identify(t.Context(), wire.Identity{
		ID: string(id), Hostname: string(id), MachineID: strings.Repeat("ab", 16),
		Entropy: make([]byte, 64), Now: time.Now(), Env: map[string]string{"SANDBOX_ID": string(id)},
	})
	if err != nil {
		t.Fatalf("identify: %v", err)
	}
}

// Sh runs a command and returns its output without the newline at its end.
func Sh(t *testing.T, c *guest.Client, cmd string) string {
	t.Helper()
	r, err := c.Run(t.Context(), wire.Exec{Argv: []string{"bash", "-c", cmd}, TimeoutMS: patience.Milliseconds(), Collect: 1 << 20})
	if err != nil {
		t.Fatalf("exec %q: %v", cmd, err)
	}
	if r.ExitCode != 0 {
		t.Fatalf("exec %q: exit code %d: %s", cmd, r.ExitCode, r.Stderr)
	}
	return strings.TrimSuffix(string(r.Stdout), "\n")
}

func (h Harness) clean(t *testing.T, before []string) {
	t.Helper()
	var diff string
	for range 100 { // the kernel finishes some removals behind
		if diff = cmp.Diff(before, h.Census(t)); diff == "" {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
	t.Errorf("something is left on the host (-before +after):\n%s", diff)
}

func (h Harness) lifecycle(t *testing.T) {
	e := h.open(t)
	before := h.Census(t)
	m := h.create(t, e)
	if got := m.Record(); got.Engine != e.Name() || got.Template != h.Template.Name || got.Created.IsZero() {
		t.Errorf("record: %+v", got)
	}
	if recs := list(t, e); len(recs) != 1 || recs[0].ID != m.Record().ID {
		t.Errorf("list: %+v", recs)
	}
	c := Client(t, m)
	Identify(t, c, m.Record().ID)
	if got := Sh(t, c, `echo "$SANDBOX_ID"; echo written > /dev/shm/x 2>/dev/null; pwd -P >/dev/null; echo kept > note; cat note`); got != string(m.Record().ID)+"\nkept" {
		t.Errorf("output: %q", got)
	}
	if e.Capabilities().Resize {
		if err := m.Resize(t.Context(), sandlot.Size{VCPU: 2, MemoryMB: 512, DiskGB: sandlot.DefaultSize.DiskGB}); err != nil {
			t.Errorf("resize: %v", err)
		}
	}
	u, err := m.Usage(t.Context())
	if err != nil || u.At.IsZero() || u.DiskTotal <= 0 {
		t.Errorf("usage: %+v, %v", u, err)
	}
	for range 2 {
		if err := m.Destroy(t.Context()); err != nil {
			t.Fatalf("destroy: %v", err)
		}
	}
	select {
	case <-m.Done():
	default:
		t.Error("a destroyed machine is not done")
	}
	if !m.Exit().Requested {
		t.Error("the exit is not marked as requested")
	}
	if _, err := m.Dial(t.Context()); sandlot.ErrorCode(err) != sandlot.CodeSandboxUnhealthy {
		t.Errorf("dial of a destroyed machine: %v", err)
	}
	if err := m.Resize(t.Context(), sandlot.DefaultSize); e.Capabilities().Resize && sandlot.ErrorCode(err) != sandlot.CodeSandboxUnhealthy {
		t.Errorf("resize of a destroyed machine: %v", err)
	}
	if err := e.Reap(t.Context(), m.Record()); err != nil {
		t.Errorf("reap of a machine that is gone: %v", err)
	}
	if recs := list(t, e); len(recs) != 0 {
		t.Errorf("list after destroy: %+v", recs)
	}
	h.clean(t, before)
}

func (h Harness) strangers(t *testing.T) {
	e := h.open(t)
	a, b := h.create(t, e), h.create(t, e)
	ca, cb := Client(t, a), Client(t, b)
	Identify(t, ca, a.Record().ID)
	Identify(t, cb, b.Record().ID)
	Sh(t, ca, "echo canary-7c1f > secret")
	if got := Sh(t, cb, "cat secret 2>/dev/null; ls"); strings.Contains(got, "canary") || strings.Contains(got, "secret") {
		t.Errorf("one machine sees another's file: %q", got)
	}
	if err := a.Destroy(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := Sh(t, cb, "echo fine"); got != "fine" {
		t.Errorf("after its neighbour was destroyed: %q", got)
	}
}

func (h Harness) concurrent(t *testing.T) {
	e := h.open(t)
	before := h.Census(t)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			m, _, err := e.Create(t.Context(), h.spec())
			if err != nil {
				t.Errorf("create: %v", err)
				return
			}
			c := guest.New(m.Dial)
			defer c.Close()
			if _, err := c.Health(t.Context()); err != nil {
				t.Errorf("health: %v", err)
			}
			var inner sync.WaitGroup
			for range 3 {
				inner.Go(func() {
					if err := m.Destroy(t.Context()); err != nil {
						t.Errorf("destroy: %v", err)
					}
				})
			}
			inner.Wait()
		})
	}
	wg.Wait()
	h.clean(t, before)
}

func (h Harness) diesByItself(t *testing.T) {
	e := h.open(t)
	before := h.Census(t)
	m := h.create(t, e)
	h.Kill(t, m)
	select {
	case <-m.Done():
	case <-time.After(patience):
		t.Fatal("nobody noticed that the machine died")
	}
	if x := m.Exit(); x.Requested || x.Detail == "" {
		t.Errorf("exit: %+v", x)
	}
	if _, err := m.Dial(t.Context()); sandlot.ErrorCode(err) != sandlot.CodeSandboxUnhealthy {
		t.Errorf("dial: %v", err)
	}
	if _, err := m.Usage(t.Context()); err == nil {
		t.Error("a dead machine has a usage")
	}
	if err := m.Destroy(t.Context()); err != nil {
		t.Fatalf("destroy: %v", err)
	}
	h.clean(t, before)
}

func (h Harness) adopt(t *testing.T) {
	e := h.Open(t)
	m := h.create(t, e)
	if !e.Capabilities().Survives {
		if _, err := e.Adopt(t.Context(), m.Record()); sandlot.ErrorCode(err) != sandlot.CodeNotFound {
			t.Errorf("adopt: %v", err)
		}
		if err := e.Close(); err != nil {
			t.Fatal(err)
		}
		return
	}
	c := Client(t, m)
	Identify(t, c, m.Record().ID)
	Sh(t, c, "echo before > f; sleep 1000 >/dev/null 2>&1 & echo $! > pid")
	c.Close()
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	e = h.open(t)
	recs := list(t, e)
	if len(recs) != 1 || cmp.Diff(recs[0], m.Record()) != "" {
		t.Fatalf("list: %+v, want %+v", recs, m.Record())
	}
	again, err := e.Adopt(t.Context(), recs[0])
	if err != nil {
		t.Fatalf("adopt: %v", err)
	}
	if got := Sh(t, Client(t, again), "cat f; kill -0 $(cat pid) && echo alive"); got != "before\nalive" {
		t.Errorf("after adoption: %q", got)
	}
	h.Kill(t, again)
	<-again.Done()
	if _, err := e.Adopt(t.Context(), recs[0]); sandlot.ErrorCode(err) != sandlot.CodeNotFound {
		t.Errorf("adopt of a dead machine: %v", err)
	}
	if err := e.Reap(t.Context(), recs[0]); err != nil {
		t.Errorf("reap: %v", err)
	}
}

func (h Harness) unfinished(t *testing.T) {
	e := h.open(t)
	before := h.Census(t)
	spec := h.spec()
	dir := h.Machines + "/" + string(spec.ID)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dir+"/record.json", []byte(`{"id":"sbx`), 0o600); err != nil { // torn
		t.Fatal(err)
	}
	recs := list(t, e)
	if len(recs) != 1 || recs[0].ID != spec.ID {
		t.Fatalf("list: %+v", recs)
	}
	if _, err := e.Adopt(t.Context(), recs[0]); sandlot.ErrorCode(err) != sandlot.CodeNotFound {
		t.Errorf("adopt: %v", err)
	}
	for range 2 {
		if err := e.Reap(t.Context(), recs[0]); err != nil {
			t.Fatalf("reap: %v", err)
		}
	}
	h.clean(t, before)
}

func (h Harness) foreign(t *testing.T) {
	e := h.open(t)
	for _, name := range []string{"Not-An-ID", "..data", "x"} {
		p := h.Machines + "/" + name
		if err := os.MkdirAll(p, 0o700); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { os.RemoveAll(p) })
	}
	if recs := list(t, e); len(recs) != 0 {
		t.Errorf("foreign directories are taken for machines: %+v", recs)
	}
}

func (h Harness) cancelled(t *testing.T) {
	e := h.open(t)
	before := h.Census(t)
	for _, after := range []time.Duration{0, 5 * time.Millisecond, 40 * time.Millisecond} {
		ctx, cancel := context.WithTimeout(t.Context(), after)
		m, _, err := e.Create(ctx, h.spec())
		cancel()
		if err == nil { // it was faster
			if err := m.Destroy(t.Context()); err != nil {
				t.Error(err)
			}
		}
	}
	h.clean(t, before)
}

// points are the engine's own failpoints.
func (h Harness) points(e engine.Engine, step string) []string {
	return slices.DeleteFunc(failpoint.Names(), func(n string) bool { return !strings.HasPrefix(n, e.Name()+"."+step+".") })
}

func (h Harness) failpoints(t *testing.T) {
	e := h.open(t)
	before := h.Census(t)
	for _, name := range h.points(e, "create") {
		disarm, err := failpoint.Arm(name + "=error")
		if err != nil {
			t.Fatal(err)
		}
		m, _, err := e.Create(t.Context(), h.spec())
		disarm()
		if err == nil {
			t.Errorf("%s: the create did not fail", name)
			_ = m.Destroy(t.Context())
		}
		if recs := list(t, e); len(recs) != 0 {
			t.Errorf("%s: a failed create left %+v", name, recs)
		}
		h.clean(t, before)
	}
}

func (h Harness) failpointsDestroy(t *testing.T) {
	e := h.open(t)
	before := h.Census(t)
	for _, name := range h.points(e, "destroy") {
		m := h.create(t, e)
		disarm, err := failpoint.Arm(name + "=error")
		if err != nil {
			t.Fatal(err)
		}
		err = m.Destroy(t.Context())
		disarm()
		if err == nil {
			t.Errorf("%s: the destroy did not fail", name)
		}
		if recs := list(t, e); len(recs) != 1 {
			t.Errorf("%s: the record is lost: %+v", name, recs)
		}
		if err := e.Reap(t.Context(), m.Record()); err != nil {
			t.Errorf("%s: reap: %v", name, err)
		}
		h.clean(t, before)
	}
}

func (h Harness) badIDs(t *testing.T) {
	e := h.open(t)
	for _, id := range []sandlot.ID{"", "..", "../../etc", "-rf", "a/b", "A", "sbx\x00", "sbx\n1", "x"} {
		spec := h.spec()
		spec.ID = id
		if m, _, err := e.Create(t.Context(), spec); err == nil {
			t.Errorf("create with id %q worked", id)
			_ = m.Destroy(t.Context())
		}
		if err := e.Reap(t.Context(), engine.Record{ID: id}); err == nil {
			t.Errorf("reap with id %q worked", id)
		}
	}
}
