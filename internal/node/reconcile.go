package node

import (
	"context"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"

	"sandlot"
	"sandlot/internal/engine"
	"sandlot/internal/failpoint"
)

// reconcileAtOnce bounds how many machines are adopted or reaped at a time.
const reconcileAtOnce = 8

// Reconcile implements Node.
func (h *Host) Reconcile(ctx context.Context, keep []sandlot.ID) (ReconcileReport, error) {
	wanted := make(map[sandlot.ID]bool, len(keep))
	for _, id := range keep {
		wanted[id] = true
	}
	var (
		mu     sync.Mutex
		report ReconcileReport
		g      errgroup.Group
	)
	g.SetLimit(reconcileAtOnce)
	for _, eng := range h.cfg.Engines {
		recs, err := eng.List(ctx)
		if err != nil {
			return report, err
		}
		if err := failpoint.Hit(ctx, "node.reconcile.listed"); err != nil {
			return report, err
		}
		for _, rec := range recs {
			g.Go(func() error {
				done := h.reconcile(ctx, eng, rec, wanted[rec.ID])
				mu.Lock()
				defer mu.Unlock()
				switch done {
				case failed:
					report.Failed = append(report.Failed, rec.ID)
				case kept:
					report.Adopted = append(report.Adopted, rec.ID)
				case reaped:
					report.Reaped++
				}
				return nil
			})
		}
	}
	if err := g.Wait(); err != nil {
		return report, err
	}
	h.mu.Lock()
	for _, id := range keep {
		if m := h.machines[id]; m == nil || m.pooled {
			report.Lost = append(report.Lost, id)
		}
	}
	h.reconciled = true
	h.mu.Unlock()
	slices.Sort(report.Adopted)
	slices.Sort(report.Failed)
	h.pools.kick()
	return report, nil
}

// outcome is what became of one machine.
type outcome int

const (
	kept outcome = iota
	reaped
	failed
	undecided // it may be the one that is being made just now; a later call decides
)

// reconcile keeps or removes one machine that the host has.
func (h *Host) reconcile(ctx context.Context, eng engine.Engine, rec engine.Record, wanted bool) outcome {
	h.mu.Lock()
	m, making := h.machines[rec.ID], h.making > 0
	h.mu.Unlock()
	switch {
	case m != nil && (m.pooled || wanted): // this process made it and knows it
		return kept
	case m != nil:
		if err := h.remove(ctx, m); err != nil {
			h.cfg.Log.Error("a machine that nobody owns could not be removed", "machine", rec.ID, "err", err)
			return failed
		}
		return reaped
	case making:
		return undecided
	}
	if wanted {
		m, err := eng.Adopt(ctx, rec)
		if err == nil {
			h.mu.Lock()
			h.hold(m, eng, false)
			h.mu.Unlock()
			return kept
		}
		h.cfg.Log.Warn("a machine was not adopted", "machine", rec.ID, "err", err)
	}
	if err := eng.Reap(ctx, rec); err != nil {
		h.cfg.Log.Error("a machine could not be reaped; `sandlot doctor` shows it", "machine", rec.ID, "err", err)
		return failed
	}
	return reaped
}
