// Package authz says who may do what. It is the only place that compares tenants.
//
// A request carries a bearer secret. Authenticate turns it into a Principal; Authorize turns a principal,
// an action and a project into a Grant, or into the error that says why not. What lies outside a caller's
// reach is not_found, worded as for what does not exist.
package authz

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"slices"
	"strings"
	"sync"
	"time"

	"sandlot"
	"sandlot/internal/store"
)

// Action is what a request wants.
type Action int

const (
	// Self is about the caller's own token: any valid token.
	Self Action = iota + 1
	// Read lists and gets sandboxes, metrics, logs and usage.
	Read
	// Write creates, closes and works inside sandboxes.
	Write
	// Manage works on tokens.
	Manage
	// ManageOrg makes projects: for tokens of the whole organization.
	ManageOrg
)

// secretPrefix makes a leaked secret recognizable to scanners.
const secretPrefix = "sl_"

const secretLen = len(secretPrefix) + 43 // 32 bytes in base64url

// cacheSize bounds the cached credentials; a full cache is emptied.
const cacheSize = 10_000

// Store is what authz needs to remember.
type Store interface {
	Credential(ctx context.Context, hash [32]byte) (store.Credential, error)
	ProjectByRef(ctx context.Context, ref string) (sandlot.Project, error)
}

// Authz judges requests.
type Authz struct {
	store Store
	now   func() time.Time

	mu       sync.RWMutex
	epoch    uint64 // grows with each invalidation
	creds    map[[32]byte]store.Credential
	projects map[string]sandlot.Project // projects are never removed or renamed
}

// New makes an Authz. now is the wall clock.
func New(s Store, now func() time.Time) *Authz {
	return &Authz{store: s, now: now, creds: map[[32]byte]store.Credential{}, projects: map[string]sandlot.Project{}}
}

// NewSecret makes a bearer secret and the hash that is stored of it.
func NewSecret() (sandlot.Secret, [32]byte) {
	var b [32]byte
	_, _ = rand.Read(b[:]) // never fails
	s := secretPrefix + base64.RawURLEncoding.EncodeToString(b[:])
	return sandlot.Secret(s), sha256.Sum256([]byte(s))
}

// Principal is an authenticated caller.
type Principal struct {
	Token sandlot.Token
	Org   sandlot.Org
}

// Grant is the permission to act in one project.
type Grant struct {
	Principal
	Project sandlot.Project // zero for Self, Manage and ManageOrg
	Action  Action
}

var errUnauthorized = sandlot.Errorf(sandlot.CodeUnauthorized, "the token is missing or not valid: send Authorization: Bearer <token>")

// Authenticate checks a bearer secret. Fails with CodeUnauthorized, in the same words for every reason.
func (a *Authz) Authenticate(ctx context.Context, secret sandlot.Secret) (Principal, error) {
	s := secret.Reveal()
	if len(s) != secretLen || !strings.HasPrefix(s, secretPrefix) {
		return Principal{}, errUnauthorized
	}
	hash := sha256.Sum256([]byte(s))
	a.mu.RLock()
	c, ok := a.creds[hash]
	epoch := a.epoch
	a.mu.RUnlock()
	if !ok {
		var err error
		if c, err = a.store.Credential(ctx, hash); sandlot.ErrorCode(err) == sandlot.CodeNotFound {
			return Principal{}, errUnauthorized
		} else if err != nil {
			return Principal{}, err
		}
		a.mu.Lock()
		if a.epoch == epoch { // a token that was revoked while we read must not be kept
			if len(a.creds) >= cacheSize {
				clear(a.creds)
			}
			a.creds[hash] = c
		}
		a.mu.Unlock()
	}
	t := c.Token
	if !t.RevokedAt.IsZero() || !t.ExpiresAt.IsZero() && !a.now().Before(t.ExpiresAt) {
		return Principal{}, errUnauthorized
	}
	return Principal{Token: t, Org: c.Org}, nil
}

// Invalidate forgets what is cached, after a token or a plan has changed in the store.
func (a *Authz) Invalidate() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.epoch++
	clear(a.creds)
}

// Authorize says whether p may do action, in the project called ref where the action is about sandboxes.
// Codes: not_found (no such project, or another tenant's), forbidden (scope or role).
func (a *Authz) Authorize(ctx context.Context, p Principal, action Action, ref string) (Grant, error) {
	g := Grant{Principal: p, Action: action}
	if action == Read || action == Write {
		project, err := a.project(ctx, ref)
		if err != nil {
			return Grant{}, err
		}
		if !p.reaches(project) {
			return Grant{}, noProject()
		}
		g.Project = project
	}
	if err := p.may(action); err != nil {
		return Grant{}, err
	}
	return g, nil
}

func noProject() error { return sandlot.Errorf(sandlot.CodeNotFound, "no such project") }

func (a *Authz) project(ctx context.Context, ref string) (sandlot.Project, error) {
	if _, err := sandlot.ParseName(ref); err != nil {
		return sandlot.Project{}, noProject()
	}
	a.mu.RLock()
	project, ok := a.projects[ref]
	a.mu.RUnlock()
	if ok {
		return project, nil
	}
	project, err := a.store.ProjectByRef(ctx, ref)
	if sandlot.ErrorCode(err) == sandlot.CodeNotFound {
		return sandlot.Project{}, noProject()
	} else if err != nil {
		return sandlot.Project{}, err
	}
	a.mu.Lock()
	a.projects[ref] = project
	a.mu.Unlock()
	return project, nil
}

func (p Principal) reaches(project sandlot.Project) bool {
	return p.Org.ID == project.Org && (p.Token.Project == "" || p.Token.Project == project.ID)
}

func (p Principal) has(scopes ...sandlot.Scope) bool {
	return slices.ContainsFunc(scopes, func(s sandlot.Scope) bool { return slices.Contains(p.Token.Scopes, s) })
}

// may is the table of actions, scopes and roles.
func (p Principal) may(action Action) error {
	role := func(r sandlot.Role, what string) error {
		if !p.Token.Role.AtLeast(r) {
			return sandlot.Errorf(sandlot.CodeForbidden, "role %s may not %s", p.Token.Role, what).With("role", string(p.Token.Role))
		}
		return nil
	}
	scope := func(want sandlot.Scope, also ...sandlot.Scope) error {
		if !p.has(append(also, want)...) {
			return sandlot.Errorf(sandlot.CodeForbidden, "the token lacks scope %s", want).With("required_scope", string(want))
		}
		return nil
	}
	switch action {
	case Self:
		return nil
	case Read:
		if err := scope(sandlot.ScopeRead, sandlot.ScopeAll); err != nil {
			return err
		}
		return role(sandlot.RoleReadonly, "read")
	case Write:
		if err := scope(sandlot.ScopeWrite, sandlot.ScopeAll); err != nil {
			return err
		}
		return role(sandlot.RoleDeveloper, "change sandboxes")
	case Manage, ManageOrg:
		if err := scope(sandlot.ScopeAdmin); err != nil {
			return err
		}
		if action == ManageOrg && p.Token.Project != "" {
			return sandlot.Errorf(sandlot.CodeForbidden, "a token of one project may not make projects")
		}
		return role(sandlot.RoleAdmin, "manage tokens and projects")
	}
	return sandlot.Errorf(sandlot.CodeForbidden, "unknown action")
}

// Owns says whether a thing of project is inside the grant.
func (g Grant) Owns(project sandlot.ID) bool { return g.Project.ID != "" && g.Project.ID == project }

// ReachesProject says whether the grant's token may see project.
func (g Grant) ReachesProject(project sandlot.Project) bool { return g.reaches(project) }

// ReachesToken says whether the grant's token may see and revoke t: those of its own organization and, for
// a token of one project, of that project.
func (g Grant) ReachesToken(t sandlot.Token) bool {
	return t.Org == g.Org.ID && (g.Token.Project == "" || t.Project == g.Token.Project)
}

// MayIssue says whether the grant's token may make a token with this reach, role and scopes: never more
// than it has itself.
func (g Grant) MayIssue(t sandlot.Token) error {
	if !g.ReachesToken(t) {
		return noProject()
	}
	if !g.Token.Role.AtLeast(t.Role) {
		return sandlot.Errorf(sandlot.CodeForbidden, "a token of role %s cannot make one of role %s", g.Token.Role, t.Role)
	}
	for _, s := range t.Scopes {
		also := s
		if s == sandlot.ScopeRead || s == sandlot.ScopeWrite {
			also = sandlot.ScopeAll
		}
		if !g.has(s, also) {
			return sandlot.Errorf(sandlot.CodeForbidden, "a token without scope %s cannot give it", s).With("required_scope", string(s))
		}
	}
	return nil
}
