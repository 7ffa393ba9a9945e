package authz

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"sandlot"
	"sandlot/internal/store"
)

type fakeStore struct {
	mu    sync.Mutex
	cred  store.Credential
	asked int
	slow  chan struct{}
}

func (f *fakeStore) Credential(_ context.Context, hash [32]byte) (store.Credential, error) {
	f.mu.Lock()
	f.asked++
	c, slow := f.cred, f.slow
	f.mu.Unlock()
	if slow != nil {
		<-slow
	}
	if c.Token.Hash != hash {
		return store.Credential{}, sandlot.Errorf(sandlot.CodeNotFound, "no such row")
	}
	return c, nil
}

func (f *fakeStore) ProjectByRef(_ context.Context, ref string) (sandlot.Project, error) {
	if ref != "mine" && ref != "other" {
		return sandlot.Project{}, sandlot.Errorf(sandlot.CodeNotFound, "no such row")
	}
	return sandlot.Project{ID: sandlot.ID("prj" + ref), Org: "orgone", Ref: ref}, nil
}

func world(role sandlot.Role, project sandlot.ID, scopes ...sandlot.Scope) (*Authz, *fakeStore, sandlot.Secret) {
	secret, hash := NewSecret()
	f := &fakeStore{cred: store.Credential{
		Org:   sandlot.Org{ID: "orgone"},
		Token: sandlot.Token{ID: "tokone", Org: "orgone", Project: project, Hash: hash, Role: role, Scopes: scopes},
	}}
	return New(f, time.Now), f, secret
}

func TestRevocationIsImmediate(t *testing.T) {
	a, f, secret := world(sandlot.RoleOwner, "", sandlot.ScopeAll)
	for range 3 {
		if _, err := a.Authenticate(t.Context(), secret); err != nil {
			t.Fatal(err)
		}
	}
	if f.asked != 1 {
		t.Errorf("asked %d times", f.asked)
	}
	f.cred.Token.RevokedAt = time.Now()
	a.Invalidate()
	if _, err := a.Authenticate(t.Context(), secret); sandlot.ErrorCode(err) != sandlot.CodeUnauthorized {
		t.Errorf("a revoked token: %v", err)
	}
}

// TestRevocationDuringLookup: a row that was read before a revocation must not be cached after it.
func TestRevocationDuringLookup(t *testing.T) {
	a, f, secret := world(sandlot.RoleOwner, "", sandlot.ScopeAll)
	slow := make(chan struct{})
	f.slow = slow
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = a.Authenticate(context.Background(), secret)
	}()
	for asked := 0; asked == 0; time.Sleep(time.Millisecond) {
		f.mu.Lock()
		asked = f.asked
		f.mu.Unlock()
	}
	f.mu.Lock()
	f.cred.Token.RevokedAt, f.slow = time.Now(), nil
	f.mu.Unlock()
	a.Invalidate()
	close(slow)
	<-done
	if _, err := a.Authenticate(t.Context(), secret); sandlot.ErrorCode(err) != sandlot.CodeUnauthorized {
		t.Errorf("the old row was cached: %v", err)
	}
}

func TestExpiryAppliesToCachedTokens(t *testing.T) {
	a, f, secret := world(sandlot.RoleOwner, "", sandlot.ScopeAll)
	now := time.Now()
	a.now = func() time.Time { return now }
	f.cred.Token.ExpiresAt = now.Add(time.Minute)
	if _, err := a.Authenticate(t.Context(), secret); err != nil {
		t.Fatal(err)
	}
	now = now.Add(time.Minute)
	if _, err := a.Authenticate(t.Context(), secret); sandlot.ErrorCode(err) != sandlot.CodeUnauthorized {
		t.Errorf("%v", err)
	}
}

// TestTable: every role, scope and action.
func TestTable(t *testing.T) {
	roles := []sandlot.Role{sandlot.RoleOwner, sandlot.RoleAdmin, sandlot.RoleDeveloper, sandlot.RoleReadonly, "unknown", ""}
	for _, role := range roles {
		for _, scope := range []sandlot.Scope{sandlot.ScopeRead, sandlot.ScopeWrite, sandlot.ScopeAll, sandlot.ScopeAdmin, "unknown"} {
			for action, want := range map[Action]bool{
				Self:      true,
				Read:      (scope == sandlot.ScopeRead || scope == sandlot.ScopeAll) && role != "" && role != "unknown",
				Write:     (scope == sandlot.ScopeWrite || scope == sandlot.ScopeAll) && (role == "owner" || role == "admin" || role == "developer"),
				Manage:    scope == sandlot.ScopeAdmin && (role == "owner" || role == "admin"),
				ManageOrg: scope == sandlot.ScopeAdmin && (role == "owner" || role == "admin"),
				0:         false,
				99:        false,
			} {
				a, _, secret := world(role, "", scope)
				p, err := a.Authenticate(t.Context(), secret)
				if err != nil {
					t.Fatal(err)
				}
				if _, err := a.Authorize(t.Context(), p, action, "mine"); (err == nil) != want {
					t.Errorf("%s %s %d: %v", role, scope, action, err)
				}
			}
		}
	}
}

func TestReach(t *testing.T) {
	a, _, secret := world(sandlot.RoleOwner, "prjmine", sandlot.ScopeAll, sandlot.ScopeAdmin)
	p, err := a.Authenticate(t.Context(), secret)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := a.Authorize(t.Context(), p, Read, "mine"); err != nil {
		t.Error(err)
	}
	var seen []string
	for _, ref := range []string{"other", "nowhere", "../mine", "MINE", "", strings.Repeat("a", 100)} {
		_, err := a.Authorize(t.Context(), p, Read, ref)
		seen = append(seen, fmt.Sprint(err))
		if sandlot.ErrorCode(err) != sandlot.CodeNotFound || seen[0] != fmt.Sprint(err) {
			t.Errorf("%q: %v", ref, err)
		}
	}
	if _, err := a.Authorize(t.Context(), p, ManageOrg, ""); sandlot.ErrorCode(err) != sandlot.CodeForbidden {
		t.Errorf("a token of one project makes projects: %v", err)
	}
	if (Grant{}).Owns("") {
		t.Error("a grant without a project owns something")
	}
}

func TestSecretsHaveOneForm(t *testing.T) {
	secret, _ := NewSecret()
	if s := secret.Reveal(); len(s) != secretLen || !strings.HasPrefix(s, "sl_") || fmt.Sprint(secret) == s {
		t.Errorf("%q, printed %v", s, secret)
	}
}
