package route

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"net/http"
	"strconv"
	"strings"

	"sandlot"
)

// Statuses maps codes to HTTP. It is the only such table.
var Statuses = map[sandlot.Code]int{
	sandlot.CodeInvalidRequest:   http.StatusBadRequest,
	sandlot.CodeUnauthorized:     http.StatusUnauthorized,
	sandlot.CodeForbidden:        http.StatusForbidden,
	sandlot.CodeNotFound:         http.StatusNotFound,
	sandlot.CodeMethod:           http.StatusMethodNotAllowed,
	sandlot.CodeConflict:         http.StatusConflict,
	sandlot.CodeNotRunning:       http.StatusConflict,
	sandlot.CodeTooLarge:         http.StatusRequestEntityTooLarge,
	sandlot.CodeRange:            http.StatusRequestedRangeNotSatisfiable,
	sandlot.CodeRateLimited:      http.StatusTooManyRequests,
	sandlot.CodeQuotaExceeded:    http.StatusTooManyRequests,
	sandlot.CodeCapacity:         http.StatusTooManyRequests,
	sandlot.CodeUnsupported:      http.StatusNotImplemented,
	sandlot.CodeTimeout:          http.StatusGatewayTimeout,
	sandlot.CodeDiskFull:         http.StatusInsufficientStorage,
	sandlot.CodeSandboxUnhealthy: http.StatusBadGateway,
	sandlot.CodeShuttingDown:     http.StatusServiceUnavailable,
	sandlot.CodeUnavailable:      http.StatusServiceUnavailable,
	sandlot.CodeInternal:         http.StatusInternalServerError,
}

// statusClientGone is logged for a caller that went away; nobody receives it.
const statusClientGone = 499

// Failure is an error as it is shown: its status and the object inside the envelope.
func Failure(err error, requestID string) (status int, body map[string]any) {
	var e *sandlot.Error
	switch {
	case errors.As(err, &e):
	case errors.Is(err, context.Canceled):
		return statusClientGone, map[string]any{"code": "client_gone", "message": "the client went away", "request_id": requestID}
	case errors.Is(err, context.DeadlineExceeded):
		e = sandlot.Errorf(sandlot.CodeTimeout, "it did not finish in its time")
	default:
		e = sandlot.Errorf(sandlot.CodeInternal, "internal error: the server's log has it under this request_id")
	}
	status, ok := Statuses[e.Code]
	if !ok {
		status = http.StatusInternalServerError
	}
	body = make(map[string]any, len(e.Fields)+3)
	for k, v := range e.Fields {
		body[k] = v
	}
	body["code"], body["message"], body["request_id"] = string(e.Code), clean(e.Message), requestID
	return status, body
}

// clean makes a message safe to show anywhere: valid UTF-8, no control characters, bounded.
func clean(s string) string {
	s = strings.Map(func(r rune) rune {
		if r < 0x20 || r >= 0x7f && r < 0xa0 || r >= 0x202a && r <= 0x202e || r >= 0x2066 && r <= 0x2069 {
			return '\uFFFD'
		}
		return r
	}, strings.ToValidUTF8(s, "\uFFFD"))
	if len(s) > 1024 {
		s = strings.ToValidUTF8(s[:1024], "") + "…"
	}
	return s
}

// WriteError answers with the envelope.
func WriteError(w http.ResponseWriter, err error, requestID string) (status int) {
	status, body := Failure(err, requestID)
	h := w.Header()
	for _, name := range []string{"Content-Length", "Content-Range", "Content-Encoding", "Accept-Ranges", "Last-Modified"} {
		h.Del(name) // meant for the answer that did not come
	}
	if s, ok := seconds(body["retry_after_s"]); ok {
		h.Set("Retry-After", strconv.Itoa(s))
	} else if status == http.StatusTooManyRequests || status == http.StatusServiceUnavailable {
		h.Set("Retry-After", "1")
	}
	if status == http.StatusUnauthorized {
		h.Set("WWW-Authenticate", `Bearer realm="sandlot"`)
	}
	if status == http.StatusRequestedRangeNotSatisfiable {
		if size, ok := body["size"]; ok {
			if n, ok := seconds(size); ok {
				h.Set("Content-Range", "bytes */"+strconv.Itoa(n))
			}
		}
	}
	_ = WriteJSON(w, status, map[string]any{"error": body}) // the client may be gone
	return status
}

// seconds reads a whole number that may have come through JSON.
func seconds(v any) (int, bool) {
	switch n := v.(type) {
	case int:
		return n, true
	case int64:
		return int(n), true
	case float64:
		return int(math.Ceil(n)), true
	}
	return 0, false
}

// WriteJSON answers with one JSON value and a known length.
func WriteJSON(w http.ResponseWriter, status int, v any) error {
	var b strings.Builder
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return err
	}
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(b.Len()))
	w.WriteHeader(status)
	_, err := w.Write([]byte(b.String()))
	if err != nil {
		return context.Canceled // the client went away
	}
	return nil
}
