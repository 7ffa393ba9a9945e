package service

import (
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"sandlot"
)

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
