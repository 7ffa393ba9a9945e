package sandlot

import "time"

// UsageInterval is a stretch of time in which a sandbox held one size in one billed state. The ledger is
// the list of them; nothing else is billed from.
type UsageInterval struct {
	Sandbox  ID
	Project  ID
	Org      ID
	VCPU     int
	MemoryMB int
	State    State // running; a later plan may bill paused differently
	Start    time.Time
	End      time.Time // zero while open
}

// UsageTotal sums intervals.
type UsageTotal struct {
	VCPUMS  int64 // reserved vCPUs × milliseconds
	MBMS    int64 // reserved MiB × milliseconds
	Started int64 // sandboxes that were alive in the period
}

// VCPUHours is the reserved vCPU time in hours.
func (u UsageTotal) VCPUHours() float64 { return float64(u.VCPUMS) / 3.6e6 }

// GBHours is the reserved memory in GiB-hours.
func (u UsageTotal) GBHours() float64 { return float64(u.MBMS) / 1024 / 3.6e6 }

// Add sums two totals.
func (u UsageTotal) Add(v UsageTotal) UsageTotal {
	return UsageTotal{u.VCPUMS + v.VCPUMS, u.MBMS + v.MBMS, u.Started + v.Started}
}
