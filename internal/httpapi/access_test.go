package httpapi

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"sandlot"
	"sandlot/internal/authz"
)

// public are the operations that need no token. The list may only shrink.
var public = []string{"health", "openapi", "ready"}

// TestAccessMatrix: adversarial item 28, for every operation of the document that the server serves.
func TestAccessMatrix(t *testing.T) {
	w := newWorld(t, Limits{})
	doc := parse(t, w.as("", http.MethodGet, "/api/openapi.json", "").body)

	id := w.create(`{}`)
	if a := w.do("POST", "/api/v1/projects", `{"ref":"second"}`); a.status != http.StatusCreated {
		t.Fatalf("%s", a.body)
	}
	built := w.do("POST", boxes+"/templates", `{"name":"mine","definition":"x"}`)
	if built.status != http.StatusAccepted {
		t.Fatalf("%s", built.body)
	}
	build, _ := built.json(t)["id"].(string)
	foreign := otherTenant(t, w)
	revokedID, revoked := w.mint(`{"name":"revoked"}`)
	if a := w.as(revoked, "GET", "/api/v1/whoami", ""); a.status != http.StatusOK { // now it is cached
		t.Fatalf("%s", a.body)
	}
	if a := w.do("DELETE", "/api/v1/tokens/"+revokedID, ""); a.status != http.StatusNoContent {
		t.Fatalf("%s", a.body)
	}
	_, sibling := w.mint(`{"name":"sibling","project":"second","scopes":["sandboxes:*","admin"],"role":"admin"}`)
	_, reader := w.mint(`{"name":"reader","scopes":["sandboxes:read"]}`)
	_, writer := w.mint(`{"name":"writer","scopes":["sandboxes:write"]}`)
	_, lowly := w.mint(`{"name":"lowly","scopes":["sandboxes:*"],"role":"readonly"}`)
	_, plainAdmin := w.mint(`{"name":"dev-admin","scopes":["admin"],"role":"developer"}`)
	victimToken, _ := w.mint(`{"name":"victim"}`)
	expired := expiredToken(t, w)

	kinds := map[string]string{ // caller → what is wrong with it
		"none": "", "bad": "sl_" + strings.Repeat("A", 43), "short": "sl_x", "expired": expired, "revoked": revoked,
	}
	var seen []string
	for path, item := range doc.Paths.Map() {
		for method, op := range item.Operations() {
			concrete := strings.NewReplacer("{ref}", "default", "{id}", id, "{pid}", "1", "{name}", "base", "{build}", build).Replace(path)
			if strings.HasPrefix(path, "/api/v1/tokens/") {
				concrete = "/api/v1/tokens/" + victimToken
			}
			if op.Security == nil {
				seen = append(seen, op.OperationID)
				continue
			}
			scope := fmt.Sprint(op.Extensions["x-required-scope"])
			expect := func(who, token string, want ...int) {
				a := w.as(token, method, concrete, "")
				if !slices.Contains(want, a.status) {
					t.Errorf("%s %s as %s: %d, want %v: %.200s", method, path, who, a.status, want, a.body)
				}
				if method != http.MethodHead && a.status >= 400 {
					a.code(t)
				}
			}
			for who, token := range kinds {
				expect(who, token, http.StatusUnauthorized)
			}
			switch scope {
			case string(sandlot.ScopeRead):
				expect("foreign", foreign, http.StatusNotFound)
				expect("sibling", sibling, http.StatusNotFound)
				expect("writer", writer, http.StatusForbidden)
				expect("lowly", lowly, http.StatusOK)
			case string(sandlot.ScopeWrite):
				expect("foreign", foreign, http.StatusNotFound)
				expect("sibling", sibling, http.StatusNotFound)
				expect("reader", reader, http.StatusForbidden)
				expect("lowly", lowly, http.StatusForbidden)
			case string(sandlot.ScopeAdmin):
				expect("reader", reader, http.StatusForbidden)
				expect("writer", writer, http.StatusForbidden)
				expect("dev-admin", plainAdmin, http.StatusForbidden)
				if strings.Contains(path, "/tokens/{id}") {
					expect("foreign", foreign, http.StatusNotFound)
					expect("sibling", sibling, http.StatusNotFound)
				}
				if op.OperationID == "createProject" {
					expect("sibling", sibling, http.StatusForbidden)
				}
			case "any":
			default:
				t.Errorf("%s %s: scope %q", method, path, scope)
			}
		}
		// every method that the document does not list
		for _, method := range []string{"GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "PROPFIND"} {
			if item.Operations()[method] != nil {
				continue
			}
			a := w.do(method, strings.NewReplacer("{ref}", "default", "{id}", id, "{pid}", "1", "{name}", "base", "{build}", build).Replace(path), "")
			if a.status != http.StatusMethodNotAllowed || a.code(t) != "method_not_allowed" || a.header.Get("Allow") == "" {
				t.Errorf("%s %s: %d %s", method, path, a.status, a.body)
			}
		}
	}
	slices.Sort(seen)
	if !slices.Equal(seen, public) {
		t.Errorf("public operations are %v, want %v", seen, public)
	}
	// the positive control, last: the sandbox was there all the time, and its owner reaches it
	if a := w.do("GET", boxes+"/"+id, ""); a.status != http.StatusOK {
		t.Errorf("the control fails: %d %s", a.status, a.body)
	}
}

// TestForeignIsAsNonexistent: what another tenant owns and what does not exist have one answer.
func TestForeignIsAsNonexistent(t *testing.T) {
	w := newWorld(t, Limits{})
	id := w.create(`{}`)
	foreign := otherTenant(t, w)
	same := func(a, b answer) {
		t.Helper()
		am, bm := a.json(t)["error"].(map[string]any), b.json(t)["error"].(map[string]any)
		delete(am, "request_id")
		delete(bm, "request_id")
		if a.status != b.status || !maps.Equal(am, bm) {
			t.Errorf("%d %v is not %d %v", a.status, am, b.status, bm)
		}
	}
	none := string(sandlot.NewID("sbx"))
	same(w.as(foreign, "GET", boxes+"/"+id, ""), w.as(foreign, "GET", "/api/v1/projects/nowhere/sandboxes/"+id, ""))
	// within the caller's own project: another's id against no id at all
	mine := "/api/v1/projects/theirs/sandboxes/"
	for _, rest := range []string{"", "/metrics", "/logs"} {
		same(w.as(foreign, "GET", mine+id+rest, ""), w.as(foreign, "GET", mine+none+rest, ""))
		same(w.as(foreign, "GET", mine+id+rest, ""), w.as(foreign, "GET", mine+"NOT-an_id"+rest, ""))
	}
	same(w.as(foreign, "POST", mine+id+"/exec", `{"cmd":"id"}`), w.as(foreign, "POST", mine+none+"/exec", `{"cmd":"id"}`))
	same(w.as(foreign, "DELETE", mine+id, ""), w.as(foreign, "DELETE", mine+none, ""))
}

// otherTenant makes an organization with its own project "theirs" and returns its owner's secret.
func otherTenant(t *testing.T, w *world) string {
	t.Helper()
	now := time.Now()
	org := sandlot.Org{ID: sandlot.NewID("org"), Name: "other", Plan: sandlot.PlanUnlimited, CreatedAt: now}
	if err := w.store.InsertOrg(t.Context(), org); err != nil {
		t.Fatal(err)
	}
	project := sandlot.Project{ID: sandlot.NewID("prj"), Org: org.ID, Ref: "theirs", CreatedAt: now}
	if err := w.store.InsertProject(t.Context(), project); err != nil {
		t.Fatal(err)
	}
	return insertToken(t, w, sandlot.Token{
		Org: org.ID, Role: sandlot.RoleOwner, Scopes: []sandlot.Scope{sandlot.ScopeAll, sandlot.ScopeAdmin},
	})
}

func insertToken(t *testing.T, w *world, tok sandlot.Token) string {
	t.Helper()
	secret, hash := authz.NewSecret()
	tok.ID, tok.Name, tok.Hash, tok.CreatedAt = sandlot.NewID("tok"), "t", hash, time.Now()
	if err := w.store.InsertToken(t.Context(), tok); err != nil {
		t.Fatal(err)
	}
	return secret.Reveal()
}

func expiredToken(t *testing.T, w *world) string {
	t.Helper()
	var who struct {
		Organization struct {
			ID sandlot.ID `json:"id"`
		} `json:"organization"`
	}
	if err := json.Unmarshal(w.do("GET", "/api/v1/whoami", "").body, &who); err != nil {
		t.Fatal(err)
	}
	return insertToken(t, w, sandlot.Token{
		Org: who.Organization.ID, Role: sandlot.RoleOwner, Scopes: []sandlot.Scope{sandlot.ScopeAll, sandlot.ScopeAdmin}, ExpiresAt: time.Now().Add(-time.Second),
	})
}

// TestTokensGiveNoMoreThanTheirMaker: minting is not a way up.
func TestTokensGiveNoMoreThanTheirMaker(t *testing.T) {
	w := newWorld(t, Limits{})
	_, admin := w.mint(`{"name":"a","role":"admin","scopes":["admin","sandboxes:read"],"project":"default"}`)
	for body, want := range map[string]int{
		`{"name":"x","role":"owner","project":"default","scopes":["sandboxes:read"]}`: http.StatusForbidden,
		`{"name":"x","project":"default","scopes":["sandboxes:write"]}`:               http.StatusForbidden,
		`{"name":"x","project":"default"}`:                                            http.StatusForbidden, // sandboxes:* by default
		`{"name":"x","scopes":["sandboxes:read"]}`:                                    http.StatusNotFound,  // the whole organization
		`{"name":"x","project":"nowhere","scopes":["sandboxes:read"]}`:                http.StatusNotFound,
		`{"name":"x","project":"default","scopes":["root"]}`:                          http.StatusBadRequest,
		`{"name":"x","project":"default","scopes":["sandboxes:read"],"role":"king"}`:  http.StatusBadRequest,
		`{"name":"x","project":"default","scopes":["sandboxes:read"]}`:                http.StatusCreated,
		`{"name":"x","project":"default","role":"admin","scopes":["admin"]}`:          http.StatusCreated,
		`{"name":"x","project":"default","scopes":["admin"],"expires_in_s":-5}`:       http.StatusBadRequest,
		`{"name":"x","project":"default","scopes":["admin"],"expires_in_s":1e30}`:     http.StatusBadRequest,
	} {
		if a := w.as(admin, "POST", "/api/v1/tokens", body); a.status != want {
			t.Errorf("%s: %d, want %d: %s", body, a.status, want, a.body)
		}
	}
	if a := w.do("GET", "/api/v1/tokens", ""); strings.Contains(string(a.body), "sl_") {
		t.Error("the list shows a secret")
	}
}
