package service

import (
	"context"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"sandlot"
	"sandlot/internal/guest"
	"sandlot/internal/node"
)

// live is what is known of a sandbox that has a machine.
type live struct {
	id     sandlot.ID
	org    sandlot.ID
	guest  *guest.Client
	nodeOf node.Node

	transition sync.Mutex // held through a change of state
	reaping    atomic.Bool

	mu       sync.Mutex
	sb       sandlot.Sandbox // copied on read
	expected bool            // pending: its create has not been acknowledged
	exited   *string         // the machine died meanwhile
	active   int             // calls and streams that hold it open
	idleAt   time.Duration   // elapsed time at which it has been idle for too long
	lifeAt   time.Duration
	activeAt time.Duration // elapsed time of the last activity
	sampled  *sandlot.Sample
	counted  int64 // CPU milliseconds when its processes were last counted
	gone     int   // samples in a row that the node left it out of
	undead   bool  // ended, but its machine could not be destroyed yet
}

// newLive makes the record of a sandbox that is alive. Its deadlines are counted from the wall clock once,
// here; after that only elapsed time moves them.
func (s *Service) newLive(sb sandlot.Sandbox, org sandlot.ID) *live {
	now, elapsed := s.clock.Now(), s.clock.Elapsed()
	since := min(max(now.Sub(sb.LastActiveAt), 0), sb.IdleTimeout)
	left := min(max(sb.ExpiresAt.Sub(now), 0), sb.Lifetime)
	l := &live{
		id: sb.ID, org: org, sb: sb, nodeOf: s.node,
		activeAt: elapsed - since, idleAt: elapsed - since + sb.IdleTimeout, lifeAt: elapsed + left,
	}
	l.guest = guest.New(func(ctx context.Context) (net.Conn, error) { return s.node.Dial(ctx, sb.ID) })
	return l
}

func (l *live) closeGuest() { l.guest.Close() }

// snapshot is the sandbox as it is now.
func (l *live) snapshot() sandlot.Sandbox {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.sb
}

func (l *live) state() sandlot.State {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.sb.State
}

func (l *live) pending() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.expected
}

// noteExit remembers that the machine died while its create was under way, and says whether it was.
func (l *live) noteExit(detail string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.expected {
		return false
	}
	l.exited = &detail
	return true
}

func (l *live) event(at time.Time, name, message string) sandlot.Event {
	return sandlot.Event{At: at, Sandbox: l.id, Kind: "lifecycle", Name: name, Message: message}
}

// touch counts as activity.
func (s *Service) touch(l *live) {
	elapsed, now := s.clock.Elapsed(), s.clock.Now()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.activeAt, l.idleAt = elapsed, elapsed+l.sb.IdleTimeout
	l.sb.LastActiveAt = now
}

// hold counts as activity until release is called: a sandbox does not become idle under a call that runs.
func (s *Service) hold(l *live) (release func()) {
	s.touch(l)
	l.mu.Lock()
	l.active++
	l.mu.Unlock()
	return sync.OnceFunc(func() {
		s.touch(l)
		l.mu.Lock()
		l.active--
		at := l.idleAt
		l.mu.Unlock()
		s.arm(at)
	})
}

// deadline says when the sandbox is to be stopped, and why.
func (l *live) deadline() (at time.Duration, reason sandlot.Reason) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.active == 0 && l.idleAt < l.lifeAt {
		return l.idleAt, sandlot.ReasonIdleTimeout
	}
	return l.lifeAt, sandlot.ReasonLifetime
}
