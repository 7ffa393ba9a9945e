package service

import (
	"testing"
	"testing/synctest"
	"time"

	"sandlot"
)

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
		if err != nil || len(samples) < 30 || samples[0].Processes != 3 {
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
