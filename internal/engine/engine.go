// Package engine is the seam between Sandlot and what isolates a sandbox. This file holds the interface,
// its vocabulary and its rules; enginetest holds the suite that every engine passes.
//
// # Lifecycle
//
// A machine is made by Create from a template's image and is ready when Create returns: its agent has
// dialled out, said its secret, and answers requests. It lives until Destroy, or until it dies by itself,
// which Done tells. The engine writes down what it is about to make before it makes it (intent before
// effect), in the machine's own directory below its state directory, so that List finds every machine that
// may exist, whole or in part, after the host process was killed at any instant. A record is then either
// adopted (the machine is alive and answers) or reaped (whatever is left of it is removed). Processes are
// identified by pid and start time, never by pid alone.
//
// # Rules
//
//   - Create either returns a ready machine or leaves nothing behind.
//   - Destroy and Reap are idempotent; when they return nil nothing of the machine is left: no process,
//     mount, loop device, namespace, link, cgroup or file.
//   - Every method honours its context, and has a bound of its own where a guest could stall it.
//   - Nothing that a guest sends is trusted. The engine reads one fixed-length hello and nothing else;
//     everything after it is the business of internal/guest, in the unprivileged half.
package engine

import (
	"context"
	"net"
	"time"

	"sandlot"
)

// Capabilities declare what differs between engines. Callers look here, never at the type.
type Capabilities struct {
	Isolation sandlot.Isolation
	Survives  bool // machines outlive the process that made them, so Adopt can succeed
	Resize    bool // Machine.Resize works on a ready machine
	Pause     bool
	Snapshot  bool
}

// Spec asks for a machine.
type Spec struct {
	ID       sandlot.ID // becomes the machine's directory, cgroup, link and namespace name
	Template sandlot.Template
	Size     sandlot.Size
	// Pooled: nobody waits for this machine. It has a small share of the CPU until Resize.
	Pooled bool
}

// Parts says where the time of a Create went.
type Parts struct {
	Disk, Network, Boot, Agent time.Duration
}

// Record is what List finds of a machine. It says enough to adopt or reap it.
type Record struct {
	ID       sandlot.ID   `json:"id"`
	Engine   string       `json:"engine"`
	Template string       `json:"template"`
	Digest   string       `json:"digest"`
	Size     sandlot.Size `json:"size"`
	Created  time.Time    `json:"created"`
}

// Usage is what a machine has used, read from the host's own accounting, never from the guest.
type Usage struct {
	At          time.Time
	CPU         time.Duration // since the machine was made
	MemoryBytes int64
	NetRxBytes  int64
	NetTxBytes  int64
	DiskUsed    int64
	DiskTotal   int64
	OOMKills    int64
}

// Exit says how a machine died. Log is the end of what it last printed: bounded, guest-controlled, to be escaped.
type Exit struct {
	Requested bool // Destroy was called
	Detail    string
	Log       []byte
}

// Machine is one running sandbox.
//
// Prerequisites: a method other than Done and Destroy needs a live machine and fails with
// sandlot.CodeSandboxUnhealthy when it has died.
type Machine interface {
	Record() Record

	// Dial returns a fresh byte stream to the agent, which speaks HTTP/1.1 as a server on it. The stream
	// is the caller's to close. The guest opened it; Dial waits at most until ctx ends for the guest to
	// open another. Where the stream is a socket of this host it is a *net.UnixConn, so that it can be
	// handed to another process.
	Dial(ctx context.Context) (net.Conn, error)

	// Resize sets the CPU and memory limits. The disk's size never changes. On failure the limits are
	// those before or those asked for, each limit whole.
	Resize(ctx context.Context, size sandlot.Size) error

	// Usage reads the host's accounting. It does not wake the guest.
	Usage(ctx context.Context) (Usage, error)

	// Done is closed when the machine is dead; Exit then says how.
	Done() <-chan struct{}
	Exit() Exit

	// Destroy kills the machine and removes all of it. Idempotent. On failure the record stays, List
	// still finds it, and Destroy or Reap may be called again.
	Destroy(ctx context.Context) error
}

// Engine makes machines.
type Engine interface {
	Name() string
	Capabilities() Capabilities

	// Create makes a machine and waits until its agent answers.
	// On failure nothing is left, or, when cleaning up failed too, a record that List finds.
	// Fails with sandlot.CodeCapacity when the host has no room.
	Create(ctx context.Context, spec Spec) (Machine, Parts, error)

	// List reads from the host, not from memory, every machine that may exist, whole or in part.
	List(ctx context.Context) ([]Record, error)

	// Adopt takes over a machine that an earlier process made. It fails with sandlot.CodeNotFound when
	// the machine is not alive and well; the caller then reaps it.
	Adopt(ctx context.Context, rec Record) (Machine, error)

	// Reap removes whatever is left of a machine that is in no process's hands. Idempotent. It never
	// touches what does not carry this engine's records: an operator's own containers are foreign.
	Reap(ctx context.Context, rec Record) error

	// Close lets go of all machines without harming them: they run on, to be adopted later.
	Close() error
}
