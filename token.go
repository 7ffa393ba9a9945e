package sandlot

import "time"

// Role is a member's place in a project.
type Role string

const (
	RoleOwner     Role = "owner"
	RoleAdmin     Role = "admin"
	RoleDeveloper Role = "developer"
	RoleReadonly  Role = "readonly"
)

// Scope is what a token may do.
type Scope string

const (
	ScopeRead  Scope = "sandboxes:read"  // list, get, metrics, logs, usage
	ScopeWrite Scope = "sandboxes:write" // create, exec, files, terminal, close
	ScopeAll   Scope = "sandboxes:*"     // both
	ScopeAdmin Scope = "admin"           // tokens, projects, members
)

// Org owns projects.
type Org struct {
	ID        ID
	Name      string
	Plan      string // "free", "pro", "team" or "unlimited"
	CreatedAt time.Time
}

// Project owns sandboxes. Ref is its name in URLs, unique on the server.
type Project struct {
	ID        ID
	Org       ID
	Ref       string
	CreatedAt time.Time
}

// Token is a credential. The secret itself is never stored: only its SHA-256, which is enough because
// a secret has 256 random bits.
type Token struct {
	ID        ID
	Project   ID // empty: every project of Org
	Org       ID
	User      ID // who it was made for; empty: nobody
	Name      string
	Role      Role
	Scopes    []Scope
	Hash      [32]byte
	CreatedAt time.Time
	ExpiresAt time.Time // zero: never
	RevokedAt time.Time // zero: valid
}

// Secret is a string that does not print itself.
type Secret string

func (Secret) String() string               { return "[redacted]" }
func (Secret) GoString() string             { return "[redacted]" }
func (Secret) MarshalText() ([]byte, error) { return []byte("[redacted]"), nil }

// Reveal returns the secret itself: for the one place that must send or hash it.
func (s Secret) Reveal() string { return string(s) }
