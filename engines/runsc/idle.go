package main

import (
	"sync"
	_ "unsafe" // for go:linkname
)

// latencyMonitoring starts, once, the goroutine that tunes systrap's fast path: spinning instead of sleeping,
// on the stub's and on the sentry's side. It wakes each 0.4 ms for as long as the sandbox lives, whether
// anything runs inside or not, and costs 3 % of a CPU for each idle sandbox: a hundred of them would use up a
// host of three CPUs by doing nothing. Spinning is for one workload on its own cores; here many share them.
//
//go:linkname latencyMonitoring gvisor.dev/gvisor/pkg/sentry/platform/systrap.latencyMonitoring
var latencyMonitoring sync.Once

// keepStill takes that start away, so that the fast path stays off, as it is on a host with one CPU.
func keepStill() { latencyMonitoring.Do(func() {}) }
