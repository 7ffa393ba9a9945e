package httpapi

import (
	"net/http"
	"time"

	"sandlot"
	"sandlot/internal/authz"
	"sandlot/internal/httpapi/route"
	"sandlot/internal/service"
)

type projectBody struct {
	ID        string    `json:"id"`
	Ref       string    `json:"ref" doc:"The project's name in paths"`
	CreatedAt time.Time `json:"created_at"`
}

type projectList struct {
	Projects []projectBody `json:"projects"`
}

type projectRequest struct {
	Ref string `json:"ref" doc:"Lower-case letters, digits, '-' and '.', unique on the server"`
}

type tokenBody struct {
	ID        string     `json:"id"`
	Name      string     `json:"name"`
	Project   string     `json:"project,omitempty" doc:"The one project that it reaches; absent: all of the organization"`
	Role      string     `json:"role" enum:"owner,admin,developer,readonly"`
	Scopes    []string   `json:"scopes"`
	CreatedAt time.Time  `json:"created_at"`
	ExpiresAt *time.Time `json:"expires_at,omitempty"`
	RevokedAt *time.Time `json:"revoked_at,omitempty"`
	Token     string     `json:"token,omitempty" doc:"The secret: shown once, in the answer that made it"`
}

type tokenList struct {
	Tokens []tokenBody `json:"tokens"`
}

type tokenRequest struct {
	Name       string   `json:"name"`
	Project    string   `json:"project,omitempty" doc:"A project's ref; absent: every project of the organization"`
	Role       string   `json:"role,omitempty" enum:"owner,admin,developer,readonly" doc:"Default developer; never above the caller's"`
	Scopes     []string `json:"scopes,omitempty" doc:"Default sandboxes:*; never beyond the caller's"`
	ExpiresInS int64    `json:"expires_in_s,omitempty" doc:"Absent: it does not expire"`
}

type whoamiBody struct {
	Token        tokenBody `json:"token"`
	Organization struct {
		ID   string `json:"id"`
		Name string `json:"name"`
		Plan string `json:"plan"`
	} `json:"organization"`
	Projects []projectBody `json:"projects"`
}

// management is organizations' own business, kept small: projects and tokens.
func (a *API) management() []*route.Operation {
	return []*route.Operation{
		{
			ID: "whoami", Method: http.MethodGet, Path: "/api/v1/whoami", Tag: "access", Action: authz.Self, Status: http.StatusOK,
			Summary: "The caller's token, organization and projects", Response: whoamiBody{}, Handle: a.whoami,
		},
		{
			ID: "listProjects", Method: http.MethodGet, Path: "/api/v1/projects", Tag: "access", Action: authz.Self, Status: http.StatusOK,
			Summary: "The projects that the caller's token reaches", Response: projectList{}, Handle: a.listProjects,
		},
		{
			ID: "createProject", Method: http.MethodPost, Path: "/api/v1/projects", Tag: "access", Action: authz.ManageOrg, Status: http.StatusCreated,
			Summary: "Make a project", Request: projectRequest{}, Response: projectBody{}, Codes: []sandlot.Code{sandlot.CodeConflict}, Handle: a.createProject,
		},
		{
			ID: "listTokens", Method: http.MethodGet, Path: "/api/v1/tokens", Tag: "access", Action: authz.Manage, Status: http.StatusOK,
			Summary: "Tokens, without their secrets", Response: tokenList{}, Handle: a.listTokens,
		},
		{
			ID: "createToken", Method: http.MethodPost, Path: "/api/v1/tokens", Tag: "access", Action: authz.Manage, Status: http.StatusCreated,
			Summary: "Make a token that may do no more than the caller's", Request: tokenRequest{}, Response: tokenBody{},
			Codes: []sandlot.Code{sandlot.CodeNotFound}, Handle: a.createToken,
		},
		{
			ID: "revokeToken", Method: http.MethodDelete, Path: "/api/v1/tokens/{id}", Tag: "access", Action: authz.Manage, Status: http.StatusNoContent,
			Summary: "End a token at once", Codes: []sandlot.Code{sandlot.CodeNotFound}, Handle: a.revokeToken,
		},
	}
}

func showProject(p sandlot.Project) projectBody {
	return projectBody{ID: string(p.ID), Ref: p.Ref, CreatedAt: p.CreatedAt}
}

func showToken(t sandlot.Token, refs map[sandlot.ID]string) tokenBody {
	b := tokenBody{ID: string(t.ID), Name: t.Name, Project: refs[t.Project], Role: string(t.Role), Scopes: []string{}, CreatedAt: t.CreatedAt}
	for _, s := range t.Scopes {
		b.Scopes = append(b.Scopes, string(s))
	}
	if !t.ExpiresAt.IsZero() {
		b.ExpiresAt = &t.ExpiresAt
	}
	if !t.RevokedAt.IsZero() {
		b.RevokedAt = &t.RevokedAt
	}
	return b
}

func (a *API) whoami(q *route.Request) error {
	refs, err := a.service.ProjectRefs(q.Context(), q.Grant)
	if err != nil {
		return err
	}
	b := whoamiBody{Token: showToken(q.Grant.Token, refs)}
	o := q.Grant.Org
	b.Organization.ID, b.Organization.Name, b.Organization.Plan = string(o.ID), o.Name, o.Plan
	if b.Projects, err = a.projects(q); err != nil {
		return err
	}
	return q.JSON(b)
}

func (a *API) projects(q *route.Request) ([]projectBody, error) {
	all, err := a.service.Projects(q.Context(), q.Grant)
	list := []projectBody{}
	for _, p := range all {
		list = append(list, showProject(p))
	}
	return list, err
}

func (a *API) listProjects(q *route.Request) error {
	list, err := a.projects(q)
	if err != nil {
		return err
	}
	return q.JSON(projectList{list})
}

func (a *API) createProject(q *route.Request) error {
	var in projectRequest
	if err := q.Decode(&in); err != nil {
		return err
	}
	p, err := a.service.CreateProject(q.Context(), q.Grant, in.Ref)
	if err != nil {
		return err
	}
	return q.JSON(showProject(p))
}

func (a *API) listTokens(q *route.Request) error {
	all, err := a.service.Tokens(q.Context(), q.Grant)
	if err != nil {
		return err
	}
	refs, err := a.service.ProjectRefs(q.Context(), q.Grant)
	if err != nil {
		return err
	}
	list := []tokenBody{}
	for _, t := range all {
		list = append(list, showToken(t, refs))
	}
	return q.JSON(tokenList{list})
}

func (a *API) createToken(q *route.Request) error {
	var in tokenRequest
	if err := q.Decode(&in); err != nil {
		return err
	}
	req := service.TokenRequest{Name: in.Name, Project: in.Project, Role: sandlot.Role(in.Role), Expires: route.Seconds(in.ExpiresInS)}
	for _, s := range in.Scopes {
		req.Scopes = append(req.Scopes, sandlot.Scope(s))
	}
	t, secret, err := a.service.CreateToken(q.Context(), q.Grant, req)
	if err != nil {
		return err
	}
	refs, err := a.service.ProjectRefs(q.Context(), q.Grant)
	if err != nil {
		return err
	}
	b := showToken(t, refs)
	b.Token = secret.Reveal()
	return q.JSON(b)
}

func (a *API) revokeToken(q *route.Request) error {
	id, err := sandlot.ParseID(q.R.PathValue("id"))
	if err != nil {
		return sandlot.Errorf(sandlot.CodeNotFound, "no such token")
	}
	if err := a.service.RevokeToken(q.Context(), q.Grant, id); err != nil {
		return err
	}
	return q.NoContent()
}
