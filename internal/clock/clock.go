// Package clock tells wall time and elapsed time apart. Deadlines are stored as wall time and measured by
// elapsed time, so that a step of the host's clock neither ends a sandbox nor keeps it.
package clock

import (
	"sync/atomic"
	"time"
)

// Clock tells time.
type Clock interface {
	Now() time.Time         // wall time, UTC, without a monotonic part
	Elapsed() time.Duration // since some fixed instant of this process; never jumps
}

// System is the host's clock. Under testing/synctest it is the bubble's.
func System() Clock { return &system{start: time.Now()} }

type system struct{ start time.Time }

func (*system) Now() time.Time           { return time.Now().Round(0).UTC() }
func (s *system) Elapsed() time.Duration { return time.Since(s.start) }

// Stepped is the system clock whose wall time a test moves.
type Stepped struct {
	system
	offset atomic.Int64
}

// NewStepped makes a Stepped clock that has not moved yet.
func NewStepped() *Stepped { return &Stepped{system: system{start: time.Now()}} }

// Now is the wall time with all steps.
func (s *Stepped) Now() time.Time { return s.system.Now().Add(time.Duration(s.offset.Load())) }

// Step moves the wall clock.
func (s *Stepped) Step(d time.Duration) { s.offset.Add(int64(d)) }
