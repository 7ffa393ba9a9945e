// Package route is the toolkit that every HTTP dialect is written with: the table of operations, strict
// decoding, the error envelope and event streams.
//
// The table is the single source of what is registered, who may call it, what the OpenAPI document says
// and what the access matrix in the tests covers: none of them can drift from another.
package route

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"strings"
	"time"

	"sandlot"
	"sandlot/internal/authz"
)

// Operation is one method on one path.
type Operation struct {
	ID      string // camelCase, unique
	Method  string
	Path    string // ServeMux pattern without the method
	Summary string
	Detail  string // Markdown, for the document
	Tag     string
	Action  authz.Action // 0: public
	Params  []Param
	// Request is a zero value of the JSON body's type, nil when there is none.
	Request  any
	Optional bool   // the JSON body may be left out
	RawBody  string // media type of a body that is not JSON
	// Response is a zero value of the JSON answer's type, nil when there is none.
	Response any
	Also     any    // another answer's type
	Status   int    // of success
	Raw      string // media type of an answer that is not JSON, beside or instead of Response
	Stream   bool   // the answer may last: it counts against the caller's streams and ends at shutdown
	Codes    []sandlot.Code
	Handle   func(*Request) error
}

// Param is a query parameter or a header of an operation. Path parameters come from the path.
type Param struct {
	Name     string
	In       string // "query" (default) or "header"
	Type     string // "string" (default), "integer", "boolean"
	Help     string
	Required bool
	Prefix   bool // any name that begins with Name
}

// Request is one call.
type Request struct {
	W        http.ResponseWriter
	R        *http.Request
	Op       *Operation
	ID       string
	Grant    authz.Grant
	Received time.Time
	Log      *slog.Logger
	// Again asks whether the caller may still do this: a token can be revoked while a stream lasts. Nil where anybody may.
	Again func() error
	// Drain ends when streams are to end.
	Drain context.Context //nolint:containedctx // the server's, not the call's
	// Beat is the time between signs of life on a silent stream.
	Beat time.Duration
	// Stall is how long a transfer may make no progress.
	Stall time.Duration
}

// Context is the request's.
func (q *Request) Context() context.Context { return q.R.Context() }

// Stream is the context of a stream: it also ends, with cause ErrShuttingDown, when the server begins to
// stop, and within a beat when the caller may not do this any more. Calls that only take long have until they end.
func (q *Request) Stream() (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(q.Context())
	stop := context.AfterFunc(q.Drain, func() { cancel(ErrShuttingDown) })
	if q.Again != nil {
		go q.permitted(ctx, cancel)
	}
	return ctx, func() {
		stop()
		cancel(nil)
	}
}

// permitted ends a stream whose caller may not have it any more. A store that fails changes nothing.
func (q *Request) permitted(ctx context.Context, refuse context.CancelCauseFunc) {
	tick := time.NewTicker(q.Beat)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		err := q.Again()
		switch sandlot.ErrorCode(err) {
		case sandlot.CodeUnauthorized, sandlot.CodeForbidden:
			refuse(err)
			return
		}
	}
}

// Cause is err, or when that is why ctx ended ErrShuttingDown or the refusal of who may not have a stream any more.
func Cause(ctx context.Context, err error) error {
	var e *sandlot.Error
	if err != nil && errors.As(context.Cause(ctx), &e) {
		return e
	}
	return err
}

// SandboxID is the path's {id}. What is no id is not_found: it names nothing.
func (q *Request) SandboxID() (sandlot.ID, error) {
	id, err := sandlot.ParseID(q.R.PathValue("id"))
	if err != nil {
		return "", sandlot.Errorf(sandlot.CodeNotFound, "no such sandbox")
	}
	return id, nil
}

// JSON answers with v and the operation's status.
func (q *Request) JSON(v any) error { return WriteJSON(q.W, q.Op.Status, v) }

// NoContent answers with nothing.
func (q *Request) NoContent() error {
	q.W.WriteHeader(http.StatusNoContent)
	return nil
}

// PathParams are the names in the operation's path.
func (o *Operation) PathParams() []string {
	var names []string
	for part := range strings.SplitSeq(o.Path, "/") {
		if strings.HasPrefix(part, "{") {
			names = append(names, strings.Trim(part, "{}"))
		}
	}
	return names
}

func (o *Operation) known(name string) bool {
	for _, p := range o.Params {
		if p.In != "header" && (p.Name == name || p.Prefix && strings.HasPrefix(name, p.Name)) {
			return true
		}
	}
	return false
}

// CheckQuery refuses parameters that the operation does not have: a misspelt one would be ignored in silence.
func (q *Request) CheckQuery() error {
	if q.R.URL.RawQuery == "" {
		return nil
	}
	values, err := parseQuery(q.R.URL.RawQuery)
	if err != nil {
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "the query is not well formed")
	}
	for name, v := range values {
		if !q.Op.known(name) {
			names := make([]string, 0, len(q.Op.Params))
			for _, p := range q.Op.Params {
				if p.In != "header" {
					names = append(names, p.Name)
				}
			}
			return unknown("query parameter", name, names)
		}
		if len(v) > 1 {
			return sandlot.Errorf(sandlot.CodeInvalidRequest, "query parameter %q is given twice", name).With("field", name)
		}
	}
	return nil
}
