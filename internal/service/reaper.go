package service

import (
	"context"
	"math"
	"time"

	"sandlot"
)

const (
	reapersAtOnce = 8
	retryEnding   = 5 * time.Second
	waitForReaper = 50 * time.Millisecond
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

// reap begins to end what is due and returns when to look again. It waits for none of them: a machine that
// is slow to die must not keep others alive.
func (s *Service) reap(ctx context.Context) time.Duration {
	now := s.clock.Elapsed()
	next := now + time.Hour
	for _, l := range s.all() {
		if l.pending() {
			continue
		}
		at, reason := l.deadline()
		if l.state().Terminal() { // its machine could not be destroyed, or is being destroyed
			at, reason = now, ""
		}
		if at > now {
			next = min(next, at)
			continue
		}
		next = min(next, now+retryEnding)
		if !l.reaping.CompareAndSwap(false, true) {
			continue
		}
		select {
		case s.reapers <- struct{}{}:
		default:
			l.reaping.Store(false)
			next = min(next, now+waitForReaper)
			continue
		}
		s.loops.Go(func() {
			defer func() {
				l.reaping.Store(false)
				<-s.reapers
			}()
			s.expire(ctx, l, reason)
		})
	}
	return next
}

// expire ends a sandbox unless something happened meanwhile that keeps it.
func (s *Service) expire(ctx context.Context, l *live, reason sandlot.Reason) {
	e := ending{state: sandlot.StateStopped, reason: reason, unless: func(elapsed time.Duration) bool {
		at, again := l.deadline()
		return at > elapsed || again != reason
	}}
	if _, err := s.end(ctx, l, e); err != nil {
		s.log.Error("a sandbox could not be ended", "sandbox", l.id, "reason", reason, "error", err)
	}
}
