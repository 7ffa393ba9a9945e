package sandlot

import "time"

// State is where a sandbox is in its life:
// starting → running ⇄ paused → stopped, and failed. stopped and failed are terminal.
type State string

const (
	StateStarting State = "starting"
	StateRunning  State = "running"
	StatePaused   State = "paused"
	StateStopped  State = "stopped"
	StateFailed   State = "failed"
)

// Terminal says whether no other state can follow.
func (s State) Terminal() bool { return s == StateStopped || s == StateFailed }

// CanBecome is the state machine.
func (s State) CanBecome(next State) bool {
	switch s {
	case StateStarting:
		return next == StateRunning || next == StateStopped || next == StateFailed
	case StateRunning:
		return next == StatePaused || next == StateStopped || next == StateFailed
	case StatePaused:
		return next == StateRunning || next == StateStopped || next == StateFailed
	}
	return false
}

// Reason says why a sandbox left the running state.
type Reason string

const (
	ReasonDeleted      Reason = "deleted"
	ReasonIdleTimeout  Reason = "idle_timeout"
	ReasonLifetime     Reason = "lifetime"
	ReasonPauseExpired Reason = "pause_expired"
	ReasonCrashed      Reason = "crashed"
	ReasonAbuse        Reason = "abuse"
	ReasonQuota        Reason = "quota"
	ReasonHostLost     Reason = "host_lost"
)

// Isolation is the caller's choice of how far a sandbox is from the host.
type Isolation string

const (
	IsolationGVisor  Isolation = "gvisor"
	IsolationMicroVM Isolation = "microvm"
	IsolationNone    Isolation = "none" // the memory engine: tests and benches only
)

// Size is what a sandbox reserves.
type Size struct {
	VCPU     int `json:"vcpu"`
	MemoryMB int `json:"memory_mb"` // MiB
	DiskGB   int `json:"disk_gb"`   // GiB
}

// DefaultSize is every shipped template's.
var DefaultSize = Size{VCPU: 1, MemoryMB: 1024, DiskGB: 5}

// Sandbox is one machine as its owner sees it.
type Sandbox struct {
	ID             ID
	Project        ID
	CreatedBy      ID // the token
	Name           string
	Template       string // name
	TemplateDigest string // sha256:…
	Isolation      Isolation
	Engine         string
	Size           Size
	State          State
	Reason         Reason
	Detail         string // one line for people on a failure
	IdleTimeout    time.Duration
	Lifetime       time.Duration
	Env            map[string]string
	Metadata       map[string]string
	Egress         Egress
	Preview        string // "public" or "private"
	CreatedAt      time.Time
	ExpiresAt      time.Time // CreatedAt or the last timeout call, plus Lifetime
	LastActiveAt   time.Time
	EndedAt        time.Time // zero while alive
	Timings        Timings
}

// Timings says where a create's time went, in milliseconds.
type Timings struct {
	TotalMS   float64 `json:"total_ms"`
	FromPool  bool    `json:"from_pool"`
	Source    string  `json:"source"` // "pool", "snapshot" or "cold"
	QueueMS   float64 `json:"queue_ms"`
	DiskMS    float64 `json:"disk_ms"`
	BootMS    float64 `json:"boot_ms"`
	AgentMS   float64 `json:"agent_ms"`
	NetworkMS float64 `json:"network_ms"`
}

// Sample is one measurement of a sandbox.
type Sample struct {
	At          time.Time `json:"at"`
	CPUPercent  float64   `json:"cpu_percent"` // of one vCPU, over the time since the sample before
	CPUMS       int64     `json:"cpu_ms"`      // used since the machine started
	MemoryBytes int64     `json:"memory_bytes"`
	NetRxBytes  int64     `json:"net_rx_bytes"`
	NetTxBytes  int64     `json:"net_tx_bytes"`
	Processes   int       `json:"processes"`
	DiskUsed    int64     `json:"disk_used_bytes"`
	DiskTotal   int64     `json:"disk_total_bytes"`
}
