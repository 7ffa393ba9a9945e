package service

import (
	"context"
	"math"
	"sync"
	"time"

	"sandlot"
)

const (
	reapersAtOnce = 8
	retryEnding   = 5 * time.Second
)

// arm wakes the reaper when a deadline lies before the one that it sleeps for.
func (s *Service) arm(at time.Duration) {
	if int64(at) < s.wakeAt.Load() {
		select {
		case s.wake <- struct{}{}:
		default:
		}
	}
}

// reapLoop ends sandboxes at their deadlines. It looks at all of them each time that it wakes, and sleeps
// until the earliest deadline: activity only moves a deadline later, which costs an early wake at most.
func (s *Service) reapLoop(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.wake:
		case <-timer.C:
		}
		s.wakeAt.Store(math.MaxInt64) // an arm from now on is a wake
		next := s.reap(ctx)
		s.wakeAt.Store(int64(next))
		timer.Reset(max(next-s.clock.Elapsed(), time.Millisecond))
	}
}

// reap ends what is due and returns the next deadline.
func (s *Service) reap(ctx context.Context) time.Duration {
	now := s.clock.Elapsed()
	next := now + time.Hour
	slots := make(chan struct{}, reapersAtOnce)
	var wait sync.WaitGroup
	for _, l := range s.all() {
		if l.pending() {
			continue
		}
		at, reason := l.deadline()
		if l.state().Terminal() { // its machine could not be destroyed
			at, reason = now, ""
		}
		if at > now {
			next = min(next, at)
			continue
		}
		next = min(next, now+retryEnding)
		slots <- struct{}{}
		wait.Go(func() {
			defer func() { <-slots }()
			e := ending{state: sandlot.StateStopped, reason: reason, unless: func(elapsed time.Duration) bool {
				at, again := l.deadline()
				return at > elapsed || again != reason
			}}
			if _, err := s.end(ctx, l, e); err != nil {
				s.log.Error("a sandbox could not be ended", "sandbox", l.id, "reason", reason, "error", err)
			}
		})
	}
	wait.Wait()
	return next
}
