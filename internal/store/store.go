// Package store holds the words between Sandlot's use cases and what remembers their results. It has no
// interface: service and authz each declare the methods that they need; package sqlite implements all.
//
// Methods fail with sandlot.CodeNotFound when there is no such row, sandlot.CodeConflict when a unique
// name is taken, and sandlot.CodeUnavailable when the storage itself fails (disk full, read-only, I/O).
package store

import (
	"time"

	"sandlot"
)

// Retention of what is kept after its use.
const (
	IdempotencyKept  = 24 * time.Hour
	MaxEvents        = 1000               // per sandbox
	FineSamples      = time.Hour          // after it, one sample per minute is kept
	MaxSampleAge     = 7 * 24 * time.Hour // of a sandbox that lives on
	SamplesAfterEnd  = 24 * time.Hour
	EventsAfterEnd   = 7 * 24 * time.Hour
	EndedListedAfter = 24 * time.Hour // ?all=1
)

// Bootstrap is what a new server starts with. It is written whole or not at all.
type Bootstrap struct {
	Org     sandlot.Org
	Project sandlot.Project
	User    sandlot.User
	Role    sandlot.Role // User's in Project
	Token   sandlot.Token
	Secret  []byte // the server's key for derived secrets
}

// Credential is a token with what is needed to judge it.
type Credential struct {
	Token sandlot.Token
	Org   sandlot.Org
}

// Creation is everything that makes a sandbox acknowledged.
type Creation struct {
	Sandbox  sandlot.Sandbox
	Org      sandlot.ID
	Events   []sandlot.Event
	Interval sandlot.UsageInterval
	Key      string // Idempotency-Key, or empty
	BodyHash [32]byte
}

// Idempotency is what is remembered of a create that carried a key.
type Idempotency struct {
	BodyHash [32]byte
	Sandbox  sandlot.ID
}

// End is a transition to a terminal state.
type End struct {
	ID     sandlot.ID
	State  sandlot.State
	Reason sandlot.Reason
	Detail string
	At     time.Time
	Billed time.Time // where open intervals close; not after At
	Event  sandlot.Event
}

// Timeout sets a sandbox's times anew.
type Timeout struct {
	ID          sandlot.ID
	IdleTimeout time.Duration
	Lifetime    time.Duration
	ExpiresAt   time.Time
	At          time.Time // counts as activity
	Event       sandlot.Event
}

// Alive is a sandbox that had not ended.
type Alive struct {
	Sandbox sandlot.Sandbox
	Org     sandlot.ID
}

// Activity is what changes in a running sandbox without anybody waiting for it to be stored.
type Activity struct {
	ID           sandlot.ID
	LastActiveAt time.Time
	Timings      sandlot.Timings
	Sample       *sandlot.Sample
}

// Query selects sandboxes of one project, newest first.
type Query struct {
	Project    sandlot.ID
	State      sandlot.State     // "" is any
	EndedSince time.Time         // zero: only those that have not ended; else also those that ended since
	Metadata   map[string]string // all must match
	After      Cursor            // zero: from the newest
	Limit      int
}

// Cursor is a place in a listing.
type Cursor struct {
	CreatedAt time.Time
	ID        sandlot.ID
}

// ProjectUsage is one project's share of a month.
type ProjectUsage struct {
	Project sandlot.ID
	Ref     string
	Total   sandlot.UsageTotal
}
