package sandlot

import "time"

// Plan is what an organization may use and what it pays. A zero limit means none.
type Plan struct {
	Name              string
	IncludedVCPUHours float64 // per calendar month, UTC
	IncludedGBHours   float64
	HardLimit         bool // beyond the allowance: refused instead of billed
	Concurrent        int  // sandboxes alive at any instant
	MaxVCPU           int
	MaxMemoryMB       int
	MaxLifetime       time.Duration
	VCPUHourPLN       float64 // net, beyond the allowance
	GBHourPLN         float64
}

// The absolute size bounds, whatever the plan.
const (
	MinVCPU     = 1
	MaxVCPU     = 8
	MinMemoryMB = 128
	MaxMemoryMB = 16384
	MinDiskGB   = 1
	MaxDiskGB   = 20
)

// PlanUnlimited is the plan of a self-hosted server's first organization.
const PlanUnlimited = "unlimited"

// DefaultPlans are the plans that a configuration may change.
func DefaultPlans() map[string]Plan {
	return map[string]Plan{
		PlanUnlimited: {Name: PlanUnlimited, MaxVCPU: MaxVCPU, MaxMemoryMB: MaxMemoryMB, MaxLifetime: MaxLifetime},
		"free": {
			Name: "free", IncludedVCPUHours: 5, IncludedGBHours: 10, HardLimit: true, Concurrent: 2,
			MaxVCPU: 2, MaxMemoryMB: 4096, MaxLifetime: time.Hour,
		},
		"pro": {
			Name: "pro", IncludedVCPUHours: 100, IncludedGBHours: 200, Concurrent: 20,
			MaxVCPU: 4, MaxMemoryMB: 8192, MaxLifetime: MaxLifetime, VCPUHourPLN: 0.25, GBHourPLN: 0.04,
		},
		"team": {
			Name: "team", IncludedVCPUHours: 500, IncludedGBHours: 1000, Concurrent: 100,
			MaxVCPU: 8, MaxMemoryMB: 16384, MaxLifetime: MaxLifetime, VCPUHourPLN: 0.25, GBHourPLN: 0.04,
		},
	}
}
