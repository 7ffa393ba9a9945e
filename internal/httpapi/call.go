package httpapi

import (
	"net/http"
	"strconv"
	"time"

	"sandlot"
	"sandlot/internal/httpapi/route"
)

// call is what the access log tells of one request. No header, query or body is in it.
type call struct {
	id      string
	start   time.Time
	rec     *recorder
	op      *route.Operation
	token   sandlot.ID
	project string
	err     error
	done    bool
}

type callKey struct{}

// requestID takes the caller's id when it is harmless, and makes one otherwise.
func requestID(r *http.Request) string {
	id := r.Header.Get("X-Request-Id")
	if len(id) == 0 || len(id) > 64 {
		return string(sandlot.NewID(sandlot.PrefixRequest))
	}
	for i := range len(id) {
		c := id[i]
		if (c < '0' || c > '9') && (c < 'A' || c > 'Z') && (c < 'a' || c > 'z') && c != '-' && c != '_' && c != '.' {
			return string(sandlot.NewID(sandlot.PrefixRequest))
		}
	}
	return id
}

// finish logs and counts a request once.
func (a *API) finish(r *http.Request, c *call, _ error) {
	if c.done {
		return
	}
	c.done = true
	took := time.Since(c.start)
	name := "none"
	if c.op != nil {
		name = c.op.ID
	}
	a.meter.observe(name, c.rec.status, took)
	attrs := []any{
		"request_id", c.id, "op", name, "method", r.Method, "status", c.rec.status, "bytes", c.rec.bytes,
		"ms", float64(took.Microseconds()) / 1000,
	}
	if c.token != "" {
		attrs = append(attrs, "token", c.token)
	}
	if c.project != "" {
		attrs = append(attrs, "project", c.project)
	}
	if id, err := sandlot.ParseID(r.PathValue("id")); err == nil {
		attrs = append(attrs, "id", id)
	}
	switch {
	case c.err != nil && (sandlot.ErrorCode(c.err) == sandlot.CodeInternal || c.rec.status >= http.StatusInternalServerError):
		a.log.Error("request", append(attrs, "code", sandlot.ErrorCode(c.err), "error", c.err.Error())...)
	case c.err != nil:
		a.log.Info("request", append(attrs, "code", sandlot.ErrorCode(c.err))...)
	default:
		a.log.Info("request", attrs...)
	}
}

// recorder remembers what was answered.
type recorder struct {
	http.ResponseWriter
	status int
	bytes  int64
}

// Unwrap lets http.ResponseController through.
func (r *recorder) Unwrap() http.ResponseWriter { return r.ResponseWriter }

func (r *recorder) WriteHeader(status int) {
	if r.status == 0 {
		r.status = status
	}
	r.ResponseWriter.WriteHeader(status)
}

func (r *recorder) Write(b []byte) (int, error) {
	if r.status == 0 {
		r.status = http.StatusOK
	}
	n, err := r.ResponseWriter.Write(b)
	r.bytes += int64(n)
	return n, err
}

// sized says whether more bytes were promised than sent.
func (r *recorder) sized() bool {
	n, err := strconv.ParseInt(r.Header().Get("Content-Length"), 10, 64)
	return err != nil && r.Header().Get("Content-Type") != "text/event-stream" || err == nil && n > r.bytes
}

// discard takes what ServeMux says about a request that it has no handler for.
type discard struct {
	header http.Header
	status int
}

func (d *discard) Header() http.Header         { return d.header }
func (d *discard) Write(b []byte) (int, error) { return len(b), nil }
func (d *discard) WriteHeader(status int)      { d.status = status }
