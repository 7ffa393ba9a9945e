// Package wire is what the host and the agent inside a sandbox say to each other: HTTP/1.1 over byte
// streams that the agent dials out, with the agent as the server.
//
// The agent opens each stream with a hello: HelloMagic, the machine's secret as 64 hex digits, '\n'. It
// keeps Spares idle streams open at all times and opens another when one is taken into use, so that the
// host never waits for a dial. Whoever takes one writes Take on it before anything else, even when its first
// request comes much later: an HTTP client may well keep in reserve what it dialled.
//
// Host and agent are built from one commit and started together, so the protocol has no versions but
// HelloMagic's.
package wire

import (
	"encoding/binary"
	"fmt"
	"io"
	"time"
)

const (
	HelloMagic = "SANDLOT1 "
	SecretLen  = 64                              // hex digits
	HelloLen   = len(HelloMagic) + SecretLen + 1 // bytes of a hello, with its newline
	Take       = '\n'                            // the host's first byte on a stream
	Spares     = 2                               // idle streams that an agent keeps open

	// GuestDir is where the engine shows the agent its own files: read-only, for root alone.
	GuestDir   = "/.sandlot"
	AgentPath  = GuestDir + "/agent"
	BootPath   = GuestDir + "/boot.json"
	SocketPath = GuestDir + "/agent.sock"

	// ForwardMode as the agent's first argument starts agent.Forward instead.
	ForwardMode = "forward"
)

// Boot is BootPath's content: what the agent needs before it can be asked anything.
type Boot struct {
	Secret string            `json:"secret"` // 64 hex digits
	Socket string            `json:"socket"`
	Env    map[string]string `json:"env,omitempty"`   // the template's
	Start  []string          `json:"start,omitempty"` // run before the first hello
	Ready  []string          `json:"ready,omitempty"`

	// MaxProcesses bounds user code's processes and threads by the pids controller, where the kernel inside
	// keeps no RLIMIT_NPROC. 0: it does.
	MaxProcesses int `json:"max_processes,omitempty"`

	// Hostname and MachineID are set before the first hello, so that an Identity that leaves them as they
	// are costs nothing.
	Hostname  string `json:"hostname,omitempty"`
	MachineID string `json:"machine_id,omitempty"`
	// Warm: nobody waits for this machine, so the agent walks the paths of a first request before its first
	// hello.
	Warm bool `json:"warm,omitempty"`
	// Kernels are the template's languages besides bash. Where nobody waits, python's is started ahead.
	Kernels []string `json:"kernels,omitempty"`
}

// Paths of the agent's API. {pid} is decimal.
const (
	PathHealth    = "/health"    // GET → Health
	PathIdentity  = "/identity"  // POST Identity → 204
	PathStats     = "/stats"     // GET → Stats
	PathExec      = "/exec"      // POST Exec → frames
	PathProcesses = "/processes" // GET → []Process; …/{pid}/stream GET → frames; …/{pid}/signal POST Signal; …/{pid}/stdin POST bytes, ?close=1
	PathList      = "/files/list"
	PathStat      = "/files/stat"
	PathContent   = "/files/content" // GET (Range), PUT, DELETE (?recursive=1)
	PathMkdir     = "/files/mkdir"
	PathMove      = "/files/move"    // POST ?path=&to=
	PathArchive   = "/files/archive" // GET tar of a directory, PUT tar into one
	PathWatch     = "/files/watch"   // GET → frames of FrameEvent with FileEvent
	PathSink      = "/bench/sink"    // POST bytes → discarded
	PathSource    = "/bench/source"  // GET ?bytes=N → zeros
	PathForkExec  = "/bench/exec"    // POST Exec → Bench: the agent's own fork+exec, measured inside

	// TrailerError, an Error as JSON, follows the body of an answer that could not be finished.
	TrailerError = "X-Sandlot-Error"
)

// Identity makes a machine somebody's sandbox. It comes once, before any user code runs. An empty Hostname
// or MachineID stays as Boot set it.
type Identity struct {
	ID        string            `json:"id"`
	Hostname  string            `json:"hostname"`
	MachineID string            `json:"machine_id"`    // 32 hex digits
	Entropy   []byte            `json:"entropy"`       // 64 random bytes, added to the kernel's pool
	Now       time.Time         `json:"now"`           // the host's clock
	Env       map[string]string `json:"env,omitempty"` // for every process from now on
}

// Health answers PathHealth.
type Health struct {
	ID         string `json:"id"` // empty until Identity
	UptimeMS   int64  `json:"uptime_ms"`
	Goroutines int    `json:"goroutines"`
	FDs        int    `json:"fds"`
}

// Stats answers PathStats.
type Stats struct {
	Processes int `json:"processes"` // besides the agent
}

// Exec asks for a process.
type Exec struct {
	Argv       []string          `json:"argv"`
	Cwd        string            `json:"cwd,omitempty"`        // default /workspace
	Env        map[string]string `json:"env,omitempty"`        // over Identity's
	User       string            `json:"user,omitempty"`       // a name of /etc/passwd; default "user"
	TimeoutMS  int64             `json:"timeout_ms,omitempty"` // 0: none (background only)
	Stdin      []byte            `json:"stdin,omitempty"`
	Background bool              `json:"background,omitempty"`
	// Collect: the agent keeps at most this many bytes of each stream and sends them at the end, for the
	// fewest frames. 0: frames are sent as output comes.
	Collect int64 `json:"collect,omitempty"`
}

// Exit is a FrameExit's payload.
type Exit struct {
	ExitCode        int    `json:"exit_code"`        // 128+n when signal n ended it
	Signal          string `json:"signal,omitempty"` // "SIGKILL", …
	TimedOut        bool   `json:"timed_out,omitempty"`
	StdoutTruncated bool   `json:"stdout_truncated,omitempty"`
	StderrTruncated bool   `json:"stderr_truncated,omitempty"`
	DurationUS      int64  `json:"duration_us"` // fork to reaped, measured inside
}

// Started is a FrameStarted's payload.
type Started struct {
	PID     int    `json:"pid"`
	LogPath string `json:"log_path,omitempty"` // background: both streams, at most 64 MiB
}

// Process describes one that the agent started, or (Agent false) any other inside.
type Process struct {
	PID        int       `json:"pid"`
	Agent      bool      `json:"agent"`
	Argv       []string  `json:"argv"`
	User       string    `json:"user"`
	StartedAt  time.Time `json:"started_at"`
	Background bool      `json:"background"`
	Running    bool      `json:"running"`
	ExitCode   *int      `json:"exit_code,omitempty"`
	Signal     string    `json:"signal,omitempty"`
	LogPath    string    `json:"log_path,omitempty"`
}

// Signal asks to signal a process group.
type Signal struct {
	Signal string `json:"signal"` // "SIGTERM", "TERM" or a number
}

// FileInfo describes a file as lstat sees it.
type FileInfo struct {
	Name    string    `json:"name"`
	Path    string    `json:"path"` // absolute, cleaned
	Type    string    `json:"type"` // "file", "dir", "symlink", "fifo", "socket", "device"
	Size    int64     `json:"size"`
	Mode    string    `json:"mode"` // "0644"
	User    string    `json:"user"`
	Group   string    `json:"group"`
	ModTime time.Time `json:"modified_at"`
	Target  string    `json:"target,omitempty"` // of a symlink
}

// FileList answers PathList; Next pages on (?after=Next).
type FileList struct {
	Path    string     `json:"path"`
	Entries []FileInfo `json:"entries"`
	Next    string     `json:"next,omitempty"`
}

// FileEvent is what watch tells.
type FileEvent struct {
	Op   string `json:"op"` // "create", "write", "remove", "rename", "chmod", "overflow"
	Path string `json:"path"`
}

// Bench answers PathForkExec.
type Bench struct {
	DurationUS int64 `json:"duration_us"`
}

// Error is the body of an answer with status 400 and up. Code is one of sandlot.Code's.
type Error struct {
	Code    string         `json:"code"`
	Message string         `json:"message"`
	Fields  map[string]any `json:"fields,omitempty"`
}

// A frame is one type byte, the payload's length as four bytes big-endian, and the payload.
const (
	FrameStdout  byte = 1
	FrameStderr  byte = 2
	FrameExit    byte = 3 // Exit as JSON; the last frame
	FrameStarted byte = 4 // Started as JSON; the first frame of an exec. PID 0: the program could not be started
	FrameEvent   byte = 5 // JSON
	FramePing    byte = 6 // empty, each 15 s of silence
	FrameError   byte = 7 // Error as JSON; the last frame

	MaxFrame    = 1 << 20 // bytes of a payload
	FrameHeader = 5
)

// AppendFrame appends one frame to buf. A payload over MaxFrame becomes several frames.
func AppendFrame(buf []byte, kind byte, payload []byte) []byte {
	for {
		n := min(len(payload), MaxFrame)
		buf = append(buf, kind, 0, 0, 0, 0)
		binary.BigEndian.PutUint32(buf[len(buf)-4:], uint32(n)) //nolint:gosec // at most MaxFrame
		buf = append(buf, payload[:n]...)
		if payload = payload[n:]; len(payload) == 0 {
			return buf
		}
	}
}

// PutHeader fills in the header of a frame whose payload of n bytes is, or will be, right behind it.
func PutHeader(h []byte, kind byte, n int) {
	h[0] = kind
	binary.BigEndian.PutUint32(h[1:FrameHeader], uint32(n)) //nolint:gosec // the caller's buffer bounds it
}

// ReadFrame reads one frame into buf, which it grows when needed and returns resliced as the payload. A
// payload over MaxFrame is refused before anything is allocated. io.EOF only comes between frames.
func ReadFrame(r io.Reader, buf []byte) (kind byte, payload []byte, err error) {
	var h [FrameHeader]byte
	if _, err := io.ReadFull(r, h[:]); err != nil {
		return 0, buf[:0], err
	}
	n := binary.BigEndian.Uint32(h[1:])
	if n > MaxFrame {
		return 0, buf[:0], fmt.Errorf("wire: a frame of %d bytes is over %d", n, MaxFrame)
	}
	if cap(buf) < int(n) {
		buf = make([]byte, n)
	}
	buf = buf[:n]
	if _, err := io.ReadFull(r, buf); err != nil {
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return 0, buf[:0], err
	}
	return h[0], buf, nil
}
