package wire

import "time"

// PathTerminals is where terminals are: POST NewTerminal → Terminal; GET → []Terminal; DELETE …/{id}; POST …/{id}/resize
// WindowSize; POST …/{id}/input bytes; GET …/{id}/stream → frames as of an exec: FrameStarted, then what the terminal
// showed last and what it shows from now on as FrameStdout, FrameSkipped where this viewer was too slow, and FrameExit.
const PathTerminals = "/terminals"

// TerminalReplay is how many bytes of a terminal's output a new viewer gets at most.
const TerminalReplay = 256 << 10

// FrameSkipped is a Skipped as JSON: between what was shown before and what comes next, something is missing.
const FrameSkipped byte = 10

// Skipped says what a slow viewer missed.
type Skipped struct {
	Bytes int64 `json:"bytes"`
}

// NewTerminal asks for a terminal.
type NewTerminal struct {
	ID   string            `json:"id"`
	Argv []string          `json:"argv,omitempty"` // default a login shell
	Cwd  string            `json:"cwd,omitempty"`  // default /workspace
	Env  map[string]string `json:"env,omitempty"`  // over Identity's
	User string            `json:"user,omitempty"` // default "user"
	WindowSize
}

// WindowSize is a terminal's in characters.
type WindowSize struct {
	Cols int `json:"cols"` // 1 … 1000
	Rows int `json:"rows"` // 1 … 1000
}

// Terminal describes one.
type Terminal struct {
	ID        string    `json:"id"`
	PID       int       `json:"pid"`
	Argv      []string  `json:"argv"`
	User      string    `json:"user"`
	Running   bool      `json:"running"`
	ExitCode  *int      `json:"exit_code,omitempty"`
	Viewers   int       `json:"viewers"`
	StartedAt time.Time `json:"started_at"`
	WindowSize
}
