// Package projectapi is the Project API's dialect: /api/v1/projects/{ref}/sandboxes.
package projectapi

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"sandlot"
	"sandlot/internal/authz"
	"sandlot/internal/httpapi/route"
	"sandlot/internal/service"
	"sandlot/internal/store"
)

const base = "/api/v1/projects/{ref}/sandboxes"

// Operations is the dialect's table.
func Operations(s *service.Service) []*route.Operation {
	a := api{s}
	ops := slices.Concat(a.sandboxes(), a.watching(), a.templateOps(), a.execs(), a.processes(), a.kernels(), a.terminals(), a.files())
	for _, op := range ops {
		if op.Status == 0 {
			op.Status = http.StatusOK
		}
	}
	return ops
}

type api struct{ service *service.Service }

type egressBody struct {
	Mode  string   `json:"mode,omitempty" enum:"open,allowlist,none"`
	Hosts []string `json:"hosts,omitempty" doc:"Names, *. wildcards, IPs, CIDRs; allowlist only"`
}

type createRequest struct {
	Template     string            `json:"template,omitempty" doc:"A template's name, or name@sha256:…; default base"`
	Name         string            `json:"name,omitempty" doc:"For people; need not be unique"`
	VCPU         *int              `json:"vcpu,omitempty" doc:"1 to the plan's limit"`
	MemoryMB     *int              `json:"memory_mb,omitempty" doc:"128 to the plan's limit"`
	DiskGB       *int              `json:"disk_gb,omitempty" doc:"1 to 20"`
	IdleTimeoutS *int64            `json:"idle_timeout_s,omitempty" doc:"30 to 86400, default 300"`
	LifetimeS    *int64            `json:"lifetime_s,omitempty" doc:"30 to the plan's limit, default 3600"`
	Env          map[string]string `json:"env,omitempty" doc:"For every process inside; values are not stored and never shown"`
	Metadata     map[string]string `json:"metadata,omitempty" doc:"Yours; filter the list with metadata.KEY=value"`
	Egress       *egressBody       `json:"egress,omitempty" doc:"Kept, but the network is closed in this version"`
	Preview      string            `json:"preview,omitempty" enum:"public,private"`
	Isolation    string            `json:"isolation,omitempty" enum:"gvisor,microvm"`
}

type sandboxBody struct {
	ID             string            `json:"id"`
	State          string            `json:"state" enum:"running,paused,stopped,failed"`
	Reason         string            `json:"reason,omitempty" doc:"Why it ended"`
	Detail         string            `json:"detail,omitempty"`
	Name           string            `json:"name,omitempty"`
	Template       string            `json:"template"`
	TemplateDigest string            `json:"template_digest"`
	Isolation      string            `json:"isolation"`
	Engine         string            `json:"engine"`
	VCPU           int               `json:"vcpu"`
	MemoryMB       int               `json:"memory_mb"`
	DiskGB         int               `json:"disk_gb"`
	IdleTimeoutS   int64             `json:"idle_timeout_s"`
	LifetimeS      int64             `json:"lifetime_s"`
	CreatedAt      time.Time         `json:"created_at"`
	ExpiresAt      time.Time         `json:"expires_at" doc:"When its lifetime ends"`
	LastActiveAt   time.Time         `json:"last_active_at"`
	EndedAt        *time.Time        `json:"ended_at,omitempty"`
	EnvNames       []string          `json:"env_names"`
	Metadata       map[string]string `json:"metadata"`
	Egress         egressBody        `json:"egress"`
	Network        string            `json:"network" enum:"closed" doc:"Nothing is reachable from inside in this version"`
	Preview        string            `json:"preview" enum:"public,private"`
	PreviewToken   string            `json:"preview_token,omitempty" doc:"For private previews; only in the answer to create"`
	Timings        sandlot.Timings   `json:"timings"`
	Usage          *reservedBody     `json:"usage,omitempty" doc:"Over its whole life; in the answer to delete"`
}

type reservedBody struct {
	VCPUSeconds float64 `json:"vcpu_seconds"`
	GBSeconds   float64 `json:"gb_seconds"`
}

func show(b sandlot.Sandbox) sandboxBody {
	out := sandboxBody{
		ID: string(b.ID), State: string(b.State), Reason: string(b.Reason), Detail: b.Detail, Name: b.Name, Template: b.Template,
		TemplateDigest: b.TemplateDigest, Isolation: string(b.Isolation), Engine: b.Engine,
		VCPU: b.Size.VCPU, MemoryMB: b.Size.MemoryMB, DiskGB: b.Size.DiskGB,
		IdleTimeoutS: int64(b.IdleTimeout / time.Second), LifetimeS: int64(b.Lifetime / time.Second),
		CreatedAt: b.CreatedAt, ExpiresAt: b.ExpiresAt, LastActiveAt: b.LastActiveAt.Truncate(time.Millisecond),
		EnvNames: slices.AppendSeq([]string{}, maps.Keys(b.Env)), Metadata: b.Metadata,
		Egress:  egressBody{Mode: string(b.Egress.Mode), Hosts: b.Egress.Hosts},
		Network: "closed", Preview: b.Preview, Timings: b.Timings,
	}
	slices.Sort(out.EnvNames)
	if out.Metadata == nil {
		out.Metadata = map[string]string{}
	}
	if !b.EndedAt.IsZero() {
		out.EndedAt = &b.EndedAt
	}
	return out
}

type sandboxList struct {
	Sandboxes []sandboxBody `json:"sandboxes"`
	Next      string        `json:"next_cursor,omitempty" doc:"Pass it as cursor for the next page; absent on the last"`
}

type timeoutRequest struct {
	IdleTimeoutS *int64 `json:"idle_timeout_s,omitempty" doc:"Absent: as it was"`
	LifetimeS    *int64 `json:"lifetime_s,omitempty" doc:"Counted from now; absent: as it was"`
}

func (a api) sandboxes() []*route.Operation {
	return []*route.Operation{
		{
			ID: "listSandboxes", Method: http.MethodGet, Path: base, Tag: "sandboxes", Action: authz.Read, Response: sandboxList{},
			Summary: "List sandboxes, newest first",
			Params: []route.Param{
				{Name: "all", Type: "boolean", Help: "Also those that ended in the last 24 hours"},
				{Name: "state", Help: "running, paused, stopped or failed"},
				{Name: "metadata.", Prefix: true, Help: "Only sandboxes whose metadata has this value"},
				{Name: "limit", Type: "integer", Help: "1 to 200, default 100"},
				{Name: "cursor", Help: "next_cursor of the page before"},
			},
			Handle: a.list,
		},
		{
			ID: "createSandbox", Method: http.MethodPost, Path: base, Tag: "sandboxes", Action: authz.Write, Status: http.StatusCreated,
			Request: createRequest{}, Optional: true, Response: sandboxBody{}, Summary: "Create a sandbox that runs",
			Params: []route.Param{{Name: "Idempotency-Key", In: "header", Help: "Calls with one key and body make one sandbox, for 24 hours"}},
			Codes: []sandlot.Code{
				sandlot.CodeConflict, sandlot.CodeQuotaExceeded, sandlot.CodeCapacity, sandlot.CodeUnsupported, sandlot.CodeTimeout,
				sandlot.CodeSandboxUnhealthy,
			},
			Handle: a.create,
		},
		{
			ID: "getSandbox", Method: http.MethodGet, Path: base + "/{id}", Tag: "sandboxes", Action: authz.Read, Response: sandboxBody{},
			Summary: "Get a sandbox", Detail: "Does not count as activity: watching a sandbox does not keep it alive.", Handle: a.get,
		},
		{
			ID: "deleteSandbox", Method: http.MethodDelete, Path: base + "/{id}", Tag: "sandboxes", Action: authz.Write, Response: sandboxBody{},
			Summary: "End a sandbox and destroy its memory and disk", Detail: "Idempotent: one that has ended is returned as it ended.", Handle: a.delete,
		},
		{
			ID: "setTimeout", Method: http.MethodPost, Path: base + "/{id}/timeout", Tag: "sandboxes", Action: authz.Write, Request: timeoutRequest{},
			Response: sandboxBody{}, Summary: "Set idle timeout and lifetime anew, counted from now", Codes: []sandlot.Code{sandlot.CodeNotRunning},
			Handle: a.timeout,
		},
	}
}

// given is *v, or 0 for the default when it is absent. An explicit 0 is no default: it becomes a value
// that no bounds include.
func given[T int | int64](v *T) T {
	switch {
	case v == nil:
		return 0
	case *v == 0:
		return -1
	}
	return *v
}

func (a api) create(q *route.Request) error {
	body, err := q.Body()
	if err != nil {
		return err
	}
	var in createRequest
	if len(body) > 0 {
		if err := route.Unmarshal(body, &in); err != nil {
			return err
		}
	}
	req := service.CreateRequest{
		Template: in.Template, Name: in.Name, VCPU: given(in.VCPU), MemoryMB: given(in.MemoryMB), DiskGB: given(in.DiskGB),
		IdleTimeout: route.Seconds(given(in.IdleTimeoutS)), Lifetime: route.Seconds(given(in.LifetimeS)), Env: in.Env, Metadata: in.Metadata,
		Preview: in.Preview, Isolation: sandlot.Isolation(in.Isolation), Key: q.R.Header.Get("Idempotency-Key"),
		BodyHash: sha256.Sum256(body), Received: q.Received,
	}
	if in.Egress != nil {
		req.Egress = sandlot.Egress{Mode: sandlot.EgressMode(in.Egress.Mode), Hosts: in.Egress.Hosts}
	}
	made, err := a.service.Create(q.Context(), q.Grant, req)
	if err != nil {
		return err
	}
	out := show(made.Sandbox)
	out.PreviewToken = made.PreviewToken.Reveal()
	if made.Replayed {
		q.W.Header().Set("Idempotency-Replayed", "true")
	}
	q.W.Header().Set("Location", strings.Replace(base, "{ref}", q.Grant.Project.Ref, 1)+"/"+out.ID)
	return q.JSON(out)
}

func (a api) list(q *route.Request) error {
	all, err := q.QueryBool("all")
	if err != nil {
		return err
	}
	limit, err := q.QueryInt("limit", 100, 1, 200)
	if err != nil {
		return err
	}
	req := service.ListRequest{All: all, State: sandlot.State(q.Query("state")), Limit: int(limit), Metadata: map[string]string{}}
	switch req.State {
	case "", sandlot.StateRunning, sandlot.StatePaused, sandlot.StateStopped, sandlot.StateFailed:
	default:
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "state must be running, paused, stopped or failed").With("field", "state")
	}
	for name, v := range q.R.URL.Query() {
		if key, ok := strings.CutPrefix(name, "metadata."); ok {
			req.Metadata[key] = v[0]
		}
	}
	if len(req.Metadata) > 16 {
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "at most 16 metadata filters")
	}
	if req.After, err = decodeCursor(q.Query("cursor")); err != nil {
		return err
	}
	page, next, err := a.service.List(q.Context(), q.Grant, req)
	if err != nil {
		return err
	}
	out := sandboxList{Sandboxes: make([]sandboxBody, len(page)), Next: encodeCursor(next)}
	for i, b := range page {
		out.Sandboxes[i] = show(b)
	}
	return q.JSON(out)
}

// cursorBody is opaque to callers, and no secret: it selects within their own listing.
type cursorBody struct {
	T int64  `json:"t"`
	I string `json:"i"`
}

func encodeCursor(c store.Cursor) string {
	if c.ID == "" {
		return ""
	}
	b, _ := json.Marshal(cursorBody{c.CreatedAt.UnixMilli(), string(c.ID)}) // cannot fail
	return base64.RawURLEncoding.EncodeToString(b)
}

func decodeCursor(s string) (store.Cursor, error) {
	if s == "" {
		return store.Cursor{}, nil
	}
	bad := sandlot.Errorf(sandlot.CodeInvalidRequest, "cursor is not one that this list gave").With("field", "cursor")
	b, err := base64.RawURLEncoding.DecodeString(s)
	var c cursorBody
	if err != nil || json.Unmarshal(b, &c) != nil {
		return store.Cursor{}, bad
	}
	id, err := sandlot.ParseID(c.I)
	if err != nil {
		return store.Cursor{}, bad
	}
	return store.Cursor{CreatedAt: time.UnixMilli(c.T), ID: id}, nil
}

func (a api) get(q *route.Request) error {
	id, err := q.SandboxID()
	if err != nil {
		return err
	}
	b, err := a.service.Get(q.Context(), q.Grant, id)
	if err != nil {
		return err
	}
	return q.JSON(show(b))
}

func (a api) delete(q *route.Request) error {
	id, err := q.SandboxID()
	if err != nil {
		return err
	}
	b, err := a.service.Delete(q.Context(), q.Grant, id)
	if err != nil {
		return err
	}
	out := show(b)
	if u, err := a.service.SandboxUsage(q.Context(), q.Grant, id); err == nil { // it is gone either way
		out.Usage = &reservedBody{float64(u.VCPUMS) / 1000, float64(u.MBMS) / 1024 / 1000}
	}
	return q.JSON(out)
}

func (a api) timeout(q *route.Request) error {
	id, err := q.SandboxID()
	if err != nil {
		return err
	}
	var in timeoutRequest
	if err := q.Decode(&in); err != nil {
		return err
	}
	b, err := a.service.SetTimeout(q.Context(), q.Grant, id, route.Seconds(given(in.IdleTimeoutS)), route.Seconds(given(in.LifetimeS)))
	if err != nil {
		return err
	}
	return q.JSON(show(b))
}
