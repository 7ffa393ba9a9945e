package service

import (
	"context"
	"crypto/rand"
	"time"

	"sandlot"
	"sandlot/internal/authz"
	"sandlot/internal/store"
)

// FirstStart makes, on an empty store, the organization and the project "default", the user "owner" and a
// token that may do everything in them. keep gets that token's secret before the store is committed: a
// process that is killed in between has kept a secret that is not valid, and the next start makes another;
// never is there a server whose only token nobody has. On a store that is not empty nothing happens.
func (s *Service) FirstStart(ctx context.Context, keep func(sandlot.Secret) error) error {
	now := s.clock.Now().Truncate(time.Millisecond)
	secret, hash := authz.NewSecret()
	key := make([]byte, 32)
	_, _ = rand.Read(key) // never fails
	b := store.Bootstrap{
		Org:    sandlot.Org{ID: sandlot.NewID(sandlot.PrefixOrg), Name: "default", Plan: sandlot.PlanUnlimited, CreatedAt: now},
		User:   sandlot.User{ID: sandlot.NewID(sandlot.PrefixUser), Name: "owner", CreatedAt: now},
		Role:   sandlot.RoleOwner,
		Secret: key,
	}
	b.Project = sandlot.Project{ID: sandlot.NewID(sandlot.PrefixProject), Org: b.Org.ID, Ref: "default", CreatedAt: now}
	b.Token = sandlot.Token{
		ID: sandlot.NewID(sandlot.PrefixToken), Org: b.Org.ID, User: b.User.ID, Name: "owner", Role: sandlot.RoleOwner,
		Scopes: []sandlot.Scope{sandlot.ScopeAll, sandlot.ScopeAdmin}, Hash: hash, CreatedAt: now,
	}
	return s.store.Bootstrap(ctx, b, func() error { return keep(secret) })
}

// Projects lists the projects that the grant's token reaches.
func (s *Service) Projects(ctx context.Context, g authz.Grant) ([]sandlot.Project, error) {
	all, err := s.store.Projects(ctx, g.Org.ID)
	if err != nil {
		return nil, err
	}
	var mine []sandlot.Project
	for _, p := range all {
		if g.ReachesProject(p) {
			mine = append(mine, p)
		}
	}
	return mine, nil
}

// CreateProject adds a project to the grant's organization. Codes: invalid_request, conflict.
func (s *Service) CreateProject(ctx context.Context, g authz.Grant, ref string) (sandlot.Project, error) {
	if _, err := sandlot.ParseName(ref); err != nil {
		return sandlot.Project{}, invalid("ref: %s", message(err)).With("field", "ref")
	}
	p := sandlot.Project{ID: sandlot.NewID(sandlot.PrefixProject), Org: g.Org.ID, Ref: ref, CreatedAt: s.clock.Now().Truncate(time.Millisecond)}
	return p, s.store.InsertProject(ctx, p)
}

// Tokens lists the tokens that the grant's token reaches.
func (s *Service) Tokens(ctx context.Context, g authz.Grant) ([]sandlot.Token, error) {
	all, err := s.store.Tokens(ctx, g.Org.ID)
	if err != nil {
		return nil, err
	}
	var mine []sandlot.Token
	for _, t := range all {
		if g.ReachesToken(t) {
			mine = append(mine, t)
		}
	}
	return mine, nil
}

// TokenRequest asks for a token.
type TokenRequest struct {
	Name    string
	Project string // ref; "": every project of the organization
	Role    sandlot.Role
	Scopes  []sandlot.Scope
	Expires time.Duration // 0: never
}

// CreateToken makes a token that may do no more than the grant's own, and returns its secret, once.
func (s *Service) CreateToken(ctx context.Context, g authz.Grant, req TokenRequest) (sandlot.Token, sandlot.Secret, error) {
	t := sandlot.Token{
		ID: sandlot.NewID(sandlot.PrefixToken), Org: g.Org.ID, Name: req.Name, Role: req.Role, Scopes: req.Scopes,
		CreatedAt: s.clock.Now().Truncate(time.Millisecond),
	}
	if _, err := sandlot.ParseName(t.Name); err != nil {
		return t, "", invalid("name: %s", message(err)).With("field", "name")
	}
	if t.Role == "" {
		t.Role = sandlot.RoleDeveloper
	}
	if !t.Role.Valid() {
		return t, "", invalid(`role must be "owner", "admin", "developer" or "readonly"`).With("field", "role")
	}
	if len(t.Scopes) == 0 {
		t.Scopes = []sandlot.Scope{sandlot.ScopeAll}
	}
	for i, sc := range t.Scopes {
		switch sc {
		case sandlot.ScopeRead, sandlot.ScopeWrite, sandlot.ScopeAll, sandlot.ScopeAdmin:
		default:
			return t, "", invalid(`scopes[%d] must be "sandboxes:read", "sandboxes:write", "sandboxes:*" or "admin"`, i).With("field", "scopes")
		}
	}
	if len(t.Scopes) > 8 {
		return t, "", invalid("scopes has at most 8 entries").With("field", "scopes")
	}
	if req.Expires < 0 || req.Expires > 10*365*24*time.Hour {
		return t, "", invalid("expires_in_s must be between 1 and 315360000").With("field", "expires_in_s")
	}
	if req.Expires > 0 {
		t.ExpiresAt = t.CreatedAt.Add(req.Expires)
	}
	if req.Project != "" {
		p, err := s.projectFor(ctx, g, req.Project)
		if err != nil {
			return t, "", err
		}
		t.Project = p.ID
	}
	if err := g.MayIssue(t); err != nil {
		return t, "", err
	}
	var secret sandlot.Secret
	secret, t.Hash = authz.NewSecret()
	return t, secret, s.store.InsertToken(ctx, t)
}

func (s *Service) projectFor(ctx context.Context, g authz.Grant, ref string) (sandlot.Project, error) {
	p, err := s.store.ProjectByRef(ctx, ref)
	if err == nil && g.ReachesProject(p) {
		return p, nil
	}
	if err != nil && !isNotFound(err) {
		return p, err
	}
	return sandlot.Project{}, sandlot.Errorf(sandlot.CodeNotFound, "no such project")
}

// RevokeToken ends a token at once. Idempotent. Codes: not_found.
func (s *Service) RevokeToken(ctx context.Context, g authz.Grant, id sandlot.ID) error {
	t, err := s.store.Token(ctx, id)
	if isNotFound(err) || err == nil && !g.ReachesToken(t) {
		return sandlot.Errorf(sandlot.CodeNotFound, "no such token")
	}
	if err != nil {
		return err
	}
	defer s.authz.Invalidate()
	return s.store.RevokeToken(ctx, id, s.clock.Now())
}

// ProjectRefs names projects by id, for answers about tokens.
func (s *Service) ProjectRefs(ctx context.Context, g authz.Grant) (map[sandlot.ID]string, error) {
	all, err := s.store.Projects(ctx, g.Org.ID)
	refs := make(map[sandlot.ID]string, len(all))
	for _, p := range all {
		refs[p.ID] = p.Ref
	}
	return refs, err
}
