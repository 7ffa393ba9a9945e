package sqlite

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"sandlot"
	"sandlot/internal/store"
)

var t0 = time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)

func open1(t testing.TB) (*Store, store.Bootstrap) {
	t.Helper()
	s, err := Open(context.Background(), filepath.Join(t.TempDir(), "state dir %3f"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	org := sandlot.NewID(sandlot.PrefixOrg)
	b := store.Bootstrap{
		Org:     sandlot.Org{ID: org, Name: "default", Plan: "unlimited", CreatedAt: t0},
		Project: sandlot.Project{ID: sandlot.NewID(sandlot.PrefixProject), Org: org, Ref: "default", CreatedAt: t0},
		User:    sandlot.User{ID: sandlot.NewID(sandlot.PrefixUser), Name: "owner", CreatedAt: t0},
		Role:    sandlot.RoleOwner,
		Token: sandlot.Token{
			ID: sandlot.NewID(sandlot.PrefixToken), Org: org, Name: "owner", Role: sandlot.RoleOwner,
			Scopes: []sandlot.Scope{sandlot.ScopeAll, sandlot.ScopeAdmin}, Hash: [32]byte{1}, CreatedAt: t0,
		},
		Secret: []byte("0123456789abcdef0123456789abcdef"),
	}
	if err := s.Bootstrap(t.Context(), b, func() error { return errors.New("killed") }); err == nil {
		t.Fatal("a failed bootstrap was kept")
	}
	calls := 0
	for range 2 {
		if err := s.Bootstrap(t.Context(), b, func() error { calls++; return nil }); err != nil {
			t.Fatal(err)
		}
	}
	if calls != 1 {
		t.Fatalf("bootstrapped %d times", calls)
	}
	return s, b
}

func creation(b store.Bootstrap, at time.Time) store.Creation {
	id := sandlot.NewID(sandlot.PrefixSandbox)
	return store.Creation{
		Org: b.Org.ID,
		Sandbox: sandlot.Sandbox{
			ID: id, Project: b.Project.ID, CreatedBy: b.Token.ID, Name: "n", Template: "base", TemplateDigest: "sha256:x",
			Isolation: "none", Engine: "memory", Size: sandlot.DefaultSize, State: sandlot.StateRunning,
			IdleTimeout: time.Minute, Lifetime: time.Hour, Env: map[string]string{"KEY": "canary"},
			Metadata: map[string]string{"a": "1"}, Egress: sandlot.Egress{Mode: sandlot.EgressOpen}, Preview: "public",
			CreatedAt: at, ExpiresAt: at.Add(time.Hour), LastActiveAt: at, Timings: sandlot.Timings{Source: "pool"},
		},
		Events:   []sandlot.Event{{At: at, Sandbox: id, Kind: "lifecycle", Name: "running", Fields: map[string]any{"x": "y"}}},
		Interval: sandlot.UsageInterval{Sandbox: id, Project: b.Project.ID, Org: b.Org.ID, VCPU: 2, MemoryMB: 2048, State: sandlot.StateRunning, Start: at},
	}
}

func TestSandboxRoundTrip(t *testing.T) {
	s, b := open1(t)
	ctx := t.Context()
	c := creation(b, t0)
	if err := s.InsertSandbox(ctx, c); err != nil {
		t.Fatal(err)
	}
	want := c.Sandbox
	want.Env = map[string]string{"KEY": ""} // values are not stored
	got, err := s.Sandbox(ctx, b.Project.ID, want.ID)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	if _, err := s.Sandbox(ctx, sandlot.NewID(sandlot.PrefixProject), want.ID); sandlot.ErrorCode(err) != sandlot.CodeNotFound {
		t.Errorf("another project's view: %v", err)
	}
	raw, err := os.ReadFile(filepath.Join(dirOf(t, s), FileName+"-wal"))
	if err != nil {
		t.Fatal(err)
	}
	if string(raw) == "" || contains(raw, "canary") {
		t.Error("an environment value reached the disk")
	}
	end := store.End{ID: want.ID, State: sandlot.StateStopped, Reason: sandlot.ReasonDeleted, At: t0.Add(time.Minute), Billed: t0.Add(time.Minute),
		Event: sandlot.Event{At: t0, Sandbox: want.ID, Kind: "lifecycle", Name: "stopped"}}
	for i, want := range []bool{true, false} {
		if done, err := s.EndSandbox(ctx, end); done != want || err != nil {
			t.Errorf("end %d: %v, %v", i, done, err)
		}
	}
	events, _, err := s.Events(ctx, want.ID, 0, 10)
	if err != nil || len(events) != 2 {
		t.Fatalf("events: %v, %v", events, err)
	}
	if d := cmp.Diff(c.Events[0], events[0]); d != "" {
		t.Error(d)
	}
}

func dirOf(t *testing.T, s *Store) string {
	t.Helper()
	var seq int
	var name, file string
	if err := s.read.QueryRow(`PRAGMA database_list`).Scan(&seq, &name, &file); err != nil {
		t.Fatal(err)
	}
	return filepath.Dir(file)
}

func contains(b []byte, s string) bool {
	for i := range len(b) - len(s) {
		if string(b[i:i+len(s)]) == s {
			return true
		}
	}
	return false
}

func TestListPagesAndFilters(t *testing.T) {
	s, b := open1(t)
	ctx := t.Context()
	var all []sandlot.ID
	for i := range 7 {
		c := creation(b, t0.Add(time.Duration(i/2)*time.Second)) // equal times: the id decides
		c.Sandbox.Metadata = map[string]string{`k "'%`: fmt.Sprint(i % 2)}
		if err := s.InsertSandbox(ctx, c); err != nil {
			t.Fatal(err)
		}
		all = append(all, c.Sandbox.ID)
	}
	q := store.Query{Project: b.Project.ID, Limit: 3}
	seen := map[sandlot.ID]bool{}
	for pages := 0; ; pages++ {
		page, next, err := s.Sandboxes(ctx, q)
		if err != nil {
			t.Fatal(err)
		}
		for _, x := range page {
			if seen[x.ID] {
				t.Errorf("%s twice", x.ID)
			}
			seen[x.ID] = true
		}
		if next.ID == "" {
			break
		}
		if q.After = next; pages > 5 {
			t.Fatal("the listing does not end")
		}
	}
	if len(seen) != len(all) {
		t.Errorf("listed %d of %d", len(seen), len(all))
	}
	page, _, err := s.Sandboxes(ctx, store.Query{Project: b.Project.ID, Limit: 100, Metadata: map[string]string{`k "'%`: "1"}})
	if err != nil || len(page) != 3 {
		t.Errorf("filtered: %d, %v", len(page), err)
	}
}

func TestUsageCountsEachMillisecondOnce(t *testing.T) {
	s, b := open1(t)
	ctx := t.Context()
	month := time.Date(2026, 5, 1, 0, 0, 0, 0, time.UTC)
	a, o := creation(b, month.Add(-time.Hour)), creation(b, month.Add(2*time.Hour)) // one began last month, one stays open
	for _, c := range []store.Creation{a, o} {
		if err := s.InsertSandbox(ctx, c); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.EndSandbox(ctx, store.End{ID: a.Sandbox.ID, State: sandlot.StateStopped, At: month.Add(time.Hour), Billed: month.Add(time.Hour),
		Event: sandlot.Event{Sandbox: a.Sandbox.ID}}); err != nil {
		t.Fatal(err)
	}
	u, err := s.Usage(ctx, b.Org.ID, month, month.Add(3*time.Hour))
	if err != nil || len(u) != 1 {
		t.Fatalf("%v, %v", u, err)
	}
	// one hour of the first in this month, one hour of the second so far; 2 vCPU and 2 GiB each
	if got := u[0].Total; got.VCPUHours() != 4 || got.GBHours() != 4 || got.Started != 2 {
		t.Errorf("usage %+v = %v vCPU-h, %v GB-h", got, got.VCPUHours(), got.GBHours())
	}
}

func TestEventsAreBounded(t *testing.T) {
	s, b := open1(t)
	ctx := t.Context()
	c := creation(b, t0)
	if err := s.InsertSandbox(ctx, c); err != nil {
		t.Fatal(err)
	}
	var batch []sandlot.Event
	for i := range store.MaxEvents + 50 {
		batch = append(batch, sandlot.Event{At: t0, Sandbox: c.Sandbox.ID, Kind: "lifecycle", Name: "e", Message: fmt.Sprint(i)})
	}
	if err := s.AddEvents(ctx, batch...); err != nil {
		t.Fatal(err)
	}
	events, _, err := s.Events(ctx, c.Sandbox.ID, 0, 5000)
	if err != nil || len(events) != store.MaxEvents || events[0].Message != "50" {
		t.Errorf("%d events, first %q, %v", len(events), events[0].Message, err)
	}
}

func TestMaintainThinsSamples(t *testing.T) {
	s, b := open1(t)
	ctx := t.Context()
	c := creation(b, t0)
	if err := s.InsertSandbox(ctx, c); err != nil {
		t.Fatal(err)
	}
	var taken []store.Activity
	for i := range 720 { // two hours
		v := sandlot.Sample{At: t0.Add(time.Duration(i) * 10 * time.Second), CPUPercent: float64(i % 6), MemoryBytes: int64(i % 6), CPUMS: int64(i)}
		taken = append(taken, store.Activity{ID: c.Sandbox.ID, LastActiveAt: v.At, Sample: &v})
	}
	if err := s.Flush(ctx, taken); err != nil {
		t.Fatal(err)
	}
	for range 2 { // twice: thinning is idempotent
		if err := s.Maintain(ctx, t0.Add(2*time.Hour)); err != nil {
			t.Fatal(err)
		}
	}
	got, err := s.Samples(ctx, c.Sandbox.ID, time.Time{}, 10000)
	if err != nil || len(got) != 60+360 {
		t.Fatalf("%d samples, %v", len(got), err)
	}
	if v := got[0]; v.CPUPercent != 2.5 || v.MemoryBytes != 5 || v.CPUMS != 5 {
		t.Errorf("first thinned sample %+v", v)
	}
}

// TestStorageFaults: adversarial item 53.
func TestStorageFaults(t *testing.T) {
	t.Run("disk full", func(t *testing.T) {
		s, b := open1(t)
		ctx := t.Context()
		if _, err := s.write.Exec(`PRAGMA max_page_count = 60`); err != nil {
			t.Fatal(err)
		}
		var err error
		var kept int
		for kept = 0; err == nil && kept < 1000; kept++ {
			err = s.InsertSandbox(ctx, creation(b, t0))
		}
		if sandlot.ErrorCode(err) != sandlot.CodeUnavailable {
			t.Fatalf("a full disk says %v", err)
		}
		alive, err := s.Alive(ctx)
		if err != nil || len(alive) != kept-1 {
			t.Errorf("%d acknowledged, %d remembered, %v", kept-1, len(alive), err)
		}
	})
	t.Run("damaged", func(t *testing.T) {
		dir := t.TempDir()
		s, err := Open(t.Context(), dir)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, FileName), []byte("this is not a database, whatever its name says, not at all"), 0o600); err != nil {
			t.Fatal(err)
		}
		if s, err := Open(t.Context(), dir); err == nil {
			_ = s.Close()
			t.Fatal("a damaged database was opened")
		}
	})
	t.Run("of a newer program", func(t *testing.T) {
		dir := t.TempDir()
		s, err := Open(t.Context(), dir)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.write.Exec(`INSERT INTO goose_db_version (version_id, is_applied) VALUES (9999, 1)`); err != nil {
			t.Fatal(err)
		}
		_ = s.Close()
		if s, err := Open(t.Context(), dir); err == nil {
			_ = s.Close()
			t.Fatal("a newer database was opened")
		}
	})
	t.Run("modes", func(t *testing.T) {
		s, _ := open1(t)
		dir := dirOf(t, s)
		for path, want := range map[string]os.FileMode{dir: 0o700, filepath.Join(dir, FileName): 0o600} {
			if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != want {
				t.Errorf("%s: %v, %v", path, fi.Mode(), err)
			}
		}
	})
}

func BenchmarkInsertSandbox(b *testing.B) {
	s, boot := open1(b)
	for b.Loop() {
		if err := s.InsertSandbox(context.Background(), creation(boot, time.Now())); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkInsertSandboxParallel(b *testing.B) {
	s, boot := open1(b)
	b.SetParallelism(8)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if err := s.InsertSandbox(context.Background(), creation(boot, time.Now())); err != nil {
				b.Error(err)
			}
		}
	})
}
