// Package httpapi is Sandlot over HTTP: it decodes, bounds, asks authz, calls service and encodes. The
// dialects below it are tables of operations; what they share is in route.
package httpapi

import (
	"context"
	"log/slog"
	"net/http"
	"net/url"
	"runtime/debug"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"sandlot"
	"sandlot/internal/authz"
	"sandlot/internal/httpapi/projectapi"
	"sandlot/internal/httpapi/route"
	"sandlot/internal/service"
)

// Limits bound what one token may do at once. Zero fields mean the default.
type Limits struct {
	RequestsPerSecond float64       // 100
	Burst             int           // 200
	Streams           int           // 1,000 open at once
	Beat              time.Duration // 15 s: heartbeat of silent streams, and how long a write may block
	Stall             time.Duration // 30 s: how long a body may make no progress
	Header            time.Duration // 10 s: how long a request's header may take
}

// Config is what the API needs. Service, Authz and Log are.
type Config struct {
	Service *service.Service
	Authz   *authz.Authz
	Log     *slog.Logger
	Limits  Limits
	Version string // shown in the OpenAPI document
	// OpenMetrics lets anybody read /metrics; otherwise it takes a token with scope admin.
	OpenMetrics bool

	more []*route.Operation // of tests
}

// API is the handler.
type API struct {
	service *service.Service
	authz   *authz.Authz
	log     *slog.Logger
	limits  Limits
	callers *callers
	mux     *http.ServeMux
	ops     []*route.Operation
	doc     []byte
	meter   *meter
	open    bool

	streams  atomic.Int64    // open ones
	drain    context.Context // ends when streams are to end
	stopping context.CancelFunc
	hard     context.Context // ends when every request is to end
	halt     context.CancelFunc
}

// New makes the handler. It panics when the table of operations contradicts itself, which a test shows.
func New(c Config) *API {
	l := &c.Limits
	set(&l.RequestsPerSecond, 100)
	set(&l.Burst, 200)
	set(&l.Streams, 1000)
	set(&l.Beat, 15*time.Second)
	set(&l.Stall, 30*time.Second)
	set(&l.Header, 10*time.Second)
	if c.Version == "" {
		c.Version = "0.1.0"
	}
	a := &API{
		service: c.Service, authz: c.Authz, log: c.Log, limits: c.Limits, callers: newCallers(c.Limits),
		mux: http.NewServeMux(), meter: newMeter(c.Service.Collectors()), open: c.OpenMetrics,
	}
	a.drain, a.stopping = context.WithCancel(context.Background())
	a.hard, a.halt = context.WithCancel(context.Background())
	a.ops = append(a.ops, a.management()...)
	a.ops = append(a.ops, projectapi.Operations(c.Service)...)
	a.ops = append(a.ops, a.system()...)
	a.ops = append(a.ops, c.more...)
	var err error
	if a.doc, err = route.Document(a.ops, c.Version); err != nil {
		panic(err)
	}
	for _, op := range a.ops {
		a.mux.Handle(op.Method+" "+op.Path, &operation{a, op})
	}
	a.closeGaps()
	return a
}

// closeGaps keeps a path that has a name of its own from being taken for an id: DELETE …/usage is 405, not
// the deletion of a sandbox called usage.
func (a *API) closeGaps() {
	methods := map[string][]string{}
	for _, op := range a.ops {
		methods[op.Path] = append(methods[op.Path], op.Method)
	}
	for path, have := range methods {
		for _, m := range []string{http.MethodGet, http.MethodPost, http.MethodPut, http.MethodDelete, http.MethodPatch} {
			r := &http.Request{Method: m, URL: &url.URL{Path: path}, Host: "localhost"}
			if h, _ := a.mux.Handler(r); isOperation(h) && h.(*operation).op.Path != path {
				slices.Sort(have)
				a.mux.Handle(m+" "+path, notAllowed(strings.Join(have, ", ")))
			}
		}
	}
}

// notAllowed is what ServeMux answers by itself where it can tell.
type notAllowed string

func (n notAllowed) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Allow", string(n))
	w.WriteHeader(http.StatusMethodNotAllowed)
}

func set[T comparable](v *T, deflt T) {
	var zero T
	if *v == zero {
		*v = deflt
	}
}

// Operations is the table, for tests that go through all of it.
func (a *API) Operations() []*route.Operation { return a.ops }

// Document is the OpenAPI document that is served.
func (a *API) Document() []byte { return a.doc }

// operation serves one row of the table.
type operation struct {
	a  *API
	op *route.Operation
}

// ServeHTTP gives the request its id, answers panics and unknown routes in the envelope, and logs.
func (a *API) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	start := time.Now()
	id := requestID(r)
	w.Header().Set("X-Request-Id", id)
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.Header().Set("Cache-Control", "no-store")
	rec := &recorder{ResponseWriter: w}
	call := &call{id: id, start: start, rec: rec}
	defer func() {
		if v := recover(); v != nil {
			if v == http.ErrAbortHandler { //nolint:errorlint // a sentinel panic value
				a.finish(r, call, nil)
				panic(v)
			}
			a.log.Error("panic", "request_id", id, "value", v, "stack", string(debug.Stack()))
			if rec.status != 0 {
				a.finish(r, call, nil)
				panic(http.ErrAbortHandler) // half an answer is out: cut it, so that nobody takes it for whole
			}
			route.WriteError(rec, sandlot.Errorf(sandlot.CodeInternal, "internal error: the server's log has it under this request_id"), id)
		}
		a.finish(r, call, nil)
	}()
	ctx, cancel := context.WithCancelCause(context.WithValue(r.Context(), callKey{}, call))
	defer cancel(nil)
	defer context.AfterFunc(a.hard, func() { cancel(route.ErrShuttingDown) })()
	r = r.WithContext(ctx)
	if r.ContentLength != 0 { // also of a body that nobody reads; Upload moves it on
		_ = http.NewResponseController(w).SetReadDeadline(start.Add(a.limits.Stall))
	}
	if h, _ := a.mux.Handler(r); isOperation(h) {
		a.mux.ServeHTTP(rec, r)
		return
	}
	a.stray(rec, r, id)
}

func isOperation(h http.Handler) bool {
	_, ok := h.(*operation)
	return ok
}

// stray answers what no operation does: 405 when the path has other methods, else 404.
func (a *API) stray(w *recorder, r *http.Request, id string) {
	probe := &discard{header: http.Header{}}
	h, _ := a.mux.Handler(r)
	h.ServeHTTP(probe, r)
	if probe.status == http.StatusMethodNotAllowed {
		w.Header().Set("Allow", probe.header.Get("Allow"))
		route.WriteError(w, sandlot.Errorf(sandlot.CodeMethod, "this path does not take this method").With("allow", probe.header.Get("Allow")), id)
		return
	}
	route.WriteError(w, sandlot.Errorf(sandlot.CodeNotFound, "no such route: /api/openapi.json lists them all"), id)
}

// ServeHTTP asks who calls and whether they may, then does it.
func (o *operation) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a := o.a
	call, _ := r.Context().Value(callKey{}).(*call)
	call.op = o.op
	if err := o.serve(call, w, r); err != nil {
		call.err = err
		if call.rec.status == 0 {
			route.WriteError(call.rec, err, call.id)
			return
		}
		a.log.Debug("an answer ended early", "request_id", call.id, "error", err)
		if sandlot.ErrorCode(err) != "" && call.rec.sized() {
			panic(http.ErrAbortHandler) // fewer bytes than promised: the connection must not be reused
		}
	}
}

func (o *operation) serve(call *call, w http.ResponseWriter, r *http.Request) error {
	a, op := o.a, o.op
	if r.Method == http.MethodHead && op.Stream { // ServeMux gives GET's handlers HEAD too
		w.Header().Set("Allow", op.Method)
		return sandlot.Errorf(sandlot.CodeMethod, "a stream has no HEAD")
	}
	q := &route.Request{W: w, R: r, Op: op, ID: call.id, Received: call.start, Log: a.log, Beat: a.limits.Beat, Stall: a.limits.Stall, Drain: a.drain}
	if op.Action != 0 {
		p, err := a.authenticate(r)
		if err != nil {
			return err
		}
		call.token = p.Token.ID
		release, err := a.callers.enter(p.Token.ID, op.Stream)
		if err != nil {
			return err
		}
		defer release()
		if q.Grant, err = a.authz.Authorize(r.Context(), p, op.Action, r.PathValue("ref")); err != nil {
			return err
		}
		call.project = q.Grant.Project.Ref
		q.Again = func() error {
			p, err := a.authenticate(r)
			if err == nil {
				_, err = a.authz.Authorize(r.Context(), p, op.Action, r.PathValue("ref"))
			}
			return err
		}
	}
	if op.Stream {
		a.streams.Add(1)
		defer a.streams.Add(-1)
	}
	if err := q.CheckQuery(); err != nil {
		return err
	}
	return route.Cause(r.Context(), op.Handle(q))
}

// authenticate reads the bearer token. The scheme's case does not matter; nothing else may be around it.
func (a *API) authenticate(r *http.Request) (authz.Principal, error) {
	h := r.Header["Authorization"]
	if len(h) != 1 {
		return a.authz.Authenticate(r.Context(), "")
	}
	const scheme = "bearer "
	if len(h[0]) < len(scheme) || !equalFold(h[0][:len(scheme)], scheme) {
		return a.authz.Authenticate(r.Context(), "")
	}
	return a.authz.Authenticate(r.Context(), sandlot.Secret(h[0][len(scheme):]))
}

func equalFold(a, b string) bool {
	for i := range len(a) {
		if a[i]|0x20 != b[i]|0x20 {
			return false
		}
	}
	return true
}
