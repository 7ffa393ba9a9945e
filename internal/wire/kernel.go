package wire

import "time"

// Paths of running code. {id} is a context's.
const (
	PathCells    = "/kernels/cells"    // POST Cell → frames: stdout, stderr, FrameResult, then FrameCell
	PathContexts = "/kernels/contexts" // GET → []Context; POST NewContext → Context; DELETE …/{id}; POST …/{id}/restart, …/{id}/interrupt
)

// DefaultContext is the context of a cell that names none, in a language that keeps state.
const DefaultContext = "default"

// Cell asks to run code.
type Cell struct {
	// Context that the code runs in. It is made when there is none of that name. Empty: DefaultContext for
	// python; for the other languages a process of its own that ends with the cell.
	Context   string `json:"context,omitempty"`
	Language  string `json:"language"` // "python", "javascript", "typescript", "bash"
	Code      string `json:"code"`
	TimeoutMS int64  `json:"timeout_ms"`
	// Collect: keep at most this many bytes of each stream and send them at the end, in the fewest frames.
	// 0: frames are sent as output comes.
	Collect int64 `json:"collect,omitempty"`
}

// CellEnd is a FrameCell's payload, the last frame of a cell.
type CellEnd struct {
	Context         string     `json:"context"`         // empty: none was kept
	ExecutionCount  int        `json:"execution_count"` // of the context, from 1
	Error           *CellError `json:"error,omitempty"`
	DurationUS      int64      `json:"duration_us"` // inside the kernel
	TimedOut        bool       `json:"timed_out,omitempty"`
	StateLost       bool       `json:"state_lost,omitempty"` // the context's kernel ended or was replaced: variables are gone
	StdoutTruncated bool       `json:"stdout_truncated,omitempty"`
	StderrTruncated bool       `json:"stderr_truncated,omitempty"`
	ResultsDropped  int        `json:"results_dropped,omitempty"` // too many or too large
}

// CellError is what code raised, or how its kernel ended ("KernelDied", "Timeout", "Interrupted", "OutOfMemory").
type CellError struct {
	Name      string `json:"name"`
	Value     string `json:"value"`
	Traceback string `json:"traceback"`
}

// Result is what a FrameResult's pieces make together: one rich value, keyed by media type. Binary types are
// base64; "application/json" is any JSON value, all else a string.
type Result struct {
	Data map[string]any `json:"data"`
	Main bool           `json:"main,omitempty"` // the value of the cell's last expression
}

// NewContext asks for a context ahead of its first cell.
type NewContext struct {
	ID       string `json:"id"`
	Language string `json:"language"`
	Cwd      string `json:"cwd,omitempty"` // default /workspace
}

// Context is one kernel's state.
type Context struct {
	ID             string    `json:"id"`
	Language       string    `json:"language"`
	Cwd            string    `json:"cwd"`
	State          string    `json:"state"` // "starting", "idle", "busy", "dead" (the next cell starts it anew)
	PID            int       `json:"pid,omitempty"`
	ExecutionCount int       `json:"execution_count"`
	CreatedAt      time.Time `json:"created_at"`
	LastUsedAt     time.Time `json:"last_used_at"`
}

const (
	// FrameResult is a piece of a Result as JSON: one byte, 0 when another piece follows and 1 at the last, and
	// then the bytes.
	FrameResult byte = 8
	FrameCell   byte = 9 // CellEnd as JSON; the last frame of a cell

	MaxResultBytes = 32 << 20 // of one Result as JSON; a cell's results together have twice as much
	MaxResults     = 1000     // of a cell
)
