package sandlot

import (
	"errors"
	"fmt"
)

// Code says what kind of failure an error is. httpapi maps it to a status; any error without a code
// is internal.
type Code string

const (
	CodeInvalidRequest   Code = "invalid_request"       // the caller sent something that cannot be right
	CodeUnauthorized     Code = "unauthorized"          // no token, or a token that is not valid
	CodeForbidden        Code = "forbidden"             // a valid token without the scope or role
	CodeNotFound         Code = "not_found"             // no such thing, or not this caller's
	CodeConflict         Code = "conflict"              // the request contradicts an earlier one (idempotency key)
	CodeNotRunning       Code = "sandbox_not_running"   // Fields: current_status, reason
	CodeTooLarge         Code = "too_large"             // a body or file over its limit
	CodeRange            Code = "range_not_satisfiable" // a Range outside the file
	CodeRateLimited      Code = "rate_limited"          // Fields: retry_after_s
	CodeQuotaExceeded    Code = "quota_exceeded"        // a plan's limit; Fields: limit, used
	CodeCapacity         Code = "capacity"              // this host has no room now; Fields: retry_after_s
	CodeUnsupported      Code = "unsupported"           // this engine, host or template cannot do it
	CodeTimeout          Code = "timeout"               // it did not finish in its time
	CodeDiskFull         Code = "disk_full"             // the sandbox's disk is full
	CodeSandboxUnhealthy Code = "sandbox_unhealthy"     // the agent inside does not answer, or answers nonsense
	CodeMethod           Code = "method_not_allowed"    // the path exists, not with this method
	CodeShuttingDown     Code = "shutting_down"         // the server stops; sandboxes run on, call again
	CodeUnavailable      Code = "unavailable"           // the server's own storage or node fails; Fields: retry_after_s
	CodeInternal         Code = "internal"              // ours to fix
)

// Error is the typed failure. Message is for people, ends without a full stop, says what to do next
// where that is not plain, and never carries a secret or unescaped guest bytes.
type Error struct {
	Code    Code
	Message string
	Fields  map[string]any // more, machine readable; merged into the error envelope
	Err     error          // the cause: logged, never shown
}

func (e *Error) Error() string {
	if e.Err != nil {
		return fmt.Sprintf("%s: %s: %v", e.Code, e.Message, e.Err)
	}
	return fmt.Sprintf("%s: %s", e.Code, e.Message)
}

func (e *Error) Unwrap() error { return e.Err }

// With returns e with one more field.
func (e *Error) With(key string, value any) *Error {
	fields := make(map[string]any, len(e.Fields)+1)
	for k, v := range e.Fields {
		fields[k] = v
	}
	fields[key] = value
	return &Error{Code: e.Code, Message: e.Message, Fields: fields, Err: e.Err}
}

// Errorf makes an *Error; a %w verb's operand becomes the cause.
func Errorf(code Code, format string, args ...any) *Error {
	err := fmt.Errorf(format, args...)
	return &Error{Code: code, Message: err.Error(), Err: errors.Unwrap(err)}
}

// Wrap gives a cause a code and a message for people; the cause is kept for the log.
func Wrap(err error, code Code, format string, args ...any) *Error {
	return &Error{Code: code, Message: fmt.Sprintf(format, args...), Err: err}
}

// ErrorCode returns the code of err, CodeInternal when it has none, "" when err is nil.
func ErrorCode(err error) Code {
	if err == nil {
		return ""
	}
	var e *Error
	if errors.As(err, &e) {
		return e.Code
	}
	return CodeInternal
}

// NotRunning is the error of a call that needs another state.
func NotRunning(s State, r Reason) *Error {
	e := Errorf(CodeNotRunning, "the sandbox is %s", s).With("current_status", string(s))
	if r != "" {
		e = e.With("reason", string(r))
	}
	return e
}
