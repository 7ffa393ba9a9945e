package service

import (
	"context"
	"slices"
	"sync"
	"time"

	"sandlot"
	"sandlot/internal/store"
)

const (
	countersAtOnce = 16
	countTimeout   = 2 * time.Second
	// countAfter is the CPU time that makes a sandbox's processes worth counting again. Asking costs the
	// guest about a millisecond, so that an idle one is left asleep.
	countAfter = 50 // milliseconds
	goneAfter  = 2  // samples

	flushPortion = 50 // sandboxes in one transaction
)

func (s *Service) sampleLoop(ctx context.Context) {
	tick := time.NewTicker(sandlot.SampleEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			if err := s.sample(ctx); err != nil && ctx.Err() == nil {
				s.log.Warn("samples were not taken", "error", err)
			}
		}
	}
}

// sample measures every running sandbox, counts load as activity, and stores both.
func (s *Service) sample(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, sandlot.SampleEvery)
	defer cancel()
	byID := map[sandlot.ID]*live{}
	var ids []sandlot.ID
	for _, l := range s.all() {
		if l.state() == sandlot.StateRunning {
			byID[l.id], ids = l, append(ids, l.id)
		}
	}
	if len(ids) == 0 {
		return nil
	}
	samples, err := s.node.Samples(ctx, ids)
	if err != nil {
		return err
	}
	slots := make(chan struct{}, countersAtOnce)
	var wait sync.WaitGroup
	for id, l := range byID {
		v, ok := samples[id]
		if !ok {
			if l.missed() >= goneAfter {
				s.crashed(ctx, l, "the machine is gone")
			}
			continue
		}
		if v.At.IsZero() {
			v.At = s.clock.Now()
		}
		if v.CPUPercent >= sandlot.ActiveCPUPercent {
			s.touch(l)
		}
		if !l.sampledWith(v) {
			continue
		}
		slots <- struct{}{}
		wait.Go(func() {
			defer func() { <-slots }()
			l.countProcesses(ctx)
		})
	}
	wait.Wait()
	return s.flush(ctx, samples)
}

// flush stores in portions: a create waits behind one of them, not behind a thousand sandboxes.
func (s *Service) flush(ctx context.Context, samples map[sandlot.ID]sandlot.Sample) error {
	for part := range slices.Chunk(s.activity(samples), flushPortion) {
		if err := s.store.Flush(ctx, part); err != nil {
			return err
		}
	}
	return nil
}

func (l *live) missed() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.gone++
	return l.gone
}

// sampledWith keeps a sample and says whether the processes are worth counting.
func (l *live) sampledWith(v sandlot.Sample) (count bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.gone = 0
	count = l.sampled == nil || v.CPUMS-l.counted >= countAfter
	if l.sampled != nil {
		v.Processes = l.sampled.Processes
	}
	if count {
		l.counted = v.CPUMS
	}
	l.sampled = &v
	return count
}

func (l *live) countProcesses(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, countTimeout)
	defer cancel()
	stats, err := l.guest.Stats(ctx)
	if err != nil {
		return // a guest that does not answer has no count; its calls tell why
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	v := *l.sampled
	v.Processes = min(max(stats.Processes, 0), 1<<20) // the guest's word
	l.sampled = &v
}

// activity is what is to be stored of the running sandboxes: with the samples just taken, when there are any.
func (s *Service) activity(samples map[sandlot.ID]sandlot.Sample) []store.Activity {
	var changes []store.Activity
	for _, l := range s.all() {
		l.mu.Lock()
		if l.sb.State == sandlot.StateRunning {
			c := store.Activity{ID: l.id, LastActiveAt: l.sb.LastActiveAt, Timings: l.sb.Timings}
			if _, ok := samples[l.id]; ok && l.sampled != nil {
				v := *l.sampled
				c.Sample = &v
			}
			changes = append(changes, c)
		}
		l.mu.Unlock()
	}
	return changes
}
