// Package node is the host: machines, their pool, what is left of an earlier run, and their measurements.
// It is the half of Sandlot that is root. The other half reaches it through the Node interface: Host
// implements it, and Client and Serve carry it over a Unix socket.
//
// Node knows machines, not sandboxes: no tenant, token or database is here. A machine's ID becomes the
// sandbox's ID when it is claimed, so that a claim writes nothing on this side. After a restart the other
// half says which IDs it has acknowledged (Reconcile); every other machine is removed, also those that
// were still in the pool, because nobody can say any more whether somebody had touched them.
package node

import (
	"context"
	"net"
	"time"

	"sandlot"
)

// CreateRequest asks for a machine.
type CreateRequest struct {
	Template string     // name or name@sha256:…
	Project  sandlot.ID // whose own templates count too
	Size     sandlot.Size
	// Isolation "" means the host's default.
	Isolation sandlot.Isolation
}

// Created is a machine that was claimed or made. Its agent waits for its identity: the caller gives it
// (guest.Client.Identify) before anything else runs inside.
type Created struct {
	ID        sandlot.ID        `json:"id"`
	Engine    string            `json:"engine"`
	Isolation sandlot.Isolation `json:"isolation"`
	Template  sandlot.Template  `json:"template"`
	Size      sandlot.Size      `json:"size"`
	Timings   sandlot.Timings   `json:"timings"` // TotalMS is the caller's to set
}

// Machine is one living machine as the node sees it.
type Machine struct {
	ID      sandlot.ID `json:"id"`
	Engine  string     `json:"engine"`
	Pooled  bool       `json:"pooled"`
	Created time.Time  `json:"created"`
}

// TemplateInfo is a template with the state of its pool.
type TemplateInfo struct {
	sandlot.Template
	Pool PoolInfo `json:"pool"`
	Own  bool     `json:"own,omitempty"` // the project's, not everybody's
}

// PoolInfo is the state of one template's pool.
type PoolInfo struct {
	Target  int `json:"target"`
	Ready   int `json:"ready"`
	Filling int `json:"filling"`
}

// Info is what the host can do.
type Info struct {
	Engines  []EngineInfo `json:"engines"`
	CPUs     int          `json:"cpus"`
	Memory   int64        `json:"memory_bytes"`
	Machines int          `json:"machines"`
}

// EngineInfo names an engine and what it can do.
type EngineInfo struct {
	Name      string            `json:"name"`
	Isolation sandlot.Isolation `json:"isolation"`
	Default   bool              `json:"default"`
}

// EventKind says what happened to a machine.
type EventKind string

const (
	EventExited EventKind = "exited" // it died without Destroy
	EventOOM    EventKind = "oom"    // the kernel killed something inside for memory; it lives on
)

// Event is something that happened to a machine without being asked for.
type Event struct {
	Kind   EventKind  `json:"kind"`
	ID     sandlot.ID `json:"id"`
	Detail string     `json:"detail"` // escaped, at most 4 KiB
}

// ReconcileReport counts what Reconcile did.
type ReconcileReport struct {
	Adopted []sandlot.ID `json:"adopted"` // alive and kept
	Lost    []sandlot.ID `json:"lost"`    // asked for, but not alive
	Reaped  int          `json:"reaped"`  // removed: nobody asked for them
	Failed  []sandlot.ID `json:"failed"`  // could not be removed; quarantined, `sandlot doctor` names them
}

// Node is one host.
type Node interface {
	// Reconcile says which machines are acknowledged. It must be the first call: before it, Create fails
	// with CodeCapacity and no pool is filled. Calling it again removes what has become unknown since.
	Reconcile(ctx context.Context, keep []sandlot.ID) (ReconcileReport, error)

	// Create claims a machine from the pool or makes one. Codes: not_found (template), unsupported
	// (isolation, size), capacity, timeout.
	Create(ctx context.Context, req CreateRequest) (Created, error)

	// Destroy ends a machine: when it returns nil the machine is dead and its memory is gone; its disk
	// and namespaces are removed right behind. Idempotent: an unknown machine is no error.
	Destroy(ctx context.Context, id sandlot.ID) error

	// Dial returns a byte stream to a machine's agent. Codes: not_found, sandbox_unhealthy, timeout.
	Dial(ctx context.Context, id sandlot.ID) (net.Conn, error)

	// Samples measures machines; those that are not alive are left out. Processes is not filled.
	Samples(ctx context.Context, ids []sandlot.ID) (map[sandlot.ID]sandlot.Sample, error)

	// Events delivers events until ctx ends. A reader that falls behind by 1,024 events is cut off and
	// must call Reconcile after it has subscribed again.
	Events(ctx context.Context) (<-chan Event, error)

	Machines(ctx context.Context) ([]Machine, error)

	// Templates lists what a project can use, its own and everybody's; "" for everybody's alone.
	Templates(ctx context.Context, project sandlot.ID) ([]TemplateInfo, error)
	// Versions lists all versions of one, the newest first. Codes: not_found.
	Versions(ctx context.Context, project sandlot.ID, name string) ([]TemplateInfo, error)
	// BuildTemplate builds a template of a project in sandboxes and gives log each line of what happens. When
	// ctx ends the build is undone. A failure's Fields have the step's name as "step". Codes: invalid_request,
	// conflict (a build is under way; the name is everybody's), quota_exceeded, capacity, timeout, unsupported, not_found.
	BuildTemplate(ctx context.Context, req BuildRequest, log func(line string)) (sandlot.Template, error)
	// RemoveTemplate removes a project's template with all versions, or NAME@DIGEST. Codes: not_found, conflict
	// (a sandbox uses it), forbidden (it is everybody's).
	RemoveTemplate(ctx context.Context, project sandlot.ID, ref string) error

	Info(ctx context.Context) (Info, error)
}
