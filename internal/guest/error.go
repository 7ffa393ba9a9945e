package guest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"
	"unicode"
	"unicode/utf8"

	"sandlot"
	"sandlot/internal/wire"
)

const maxMessage = 512 // bytes of a guest's words in an error

// guestCodes are what a guest may answer. Others, as quota_exceeded or unauthorized, are not its to say.
var guestCodes = map[sandlot.Code]bool{
	sandlot.CodeInvalidRequest: true, sandlot.CodeForbidden: true, sandlot.CodeNotFound: true, sandlot.CodeConflict: true,
	sandlot.CodeTooLarge: true, sandlot.CodeRange: true, sandlot.CodeRateLimited: true, sandlot.CodeUnsupported: true,
	sandlot.CodeTimeout: true, sandlot.CodeDiskFull: true, sandlot.CodeInternal: true,
}

// guestFields are the fields that a guest's error may carry, all of them numbers, with their largest value.
var guestFields = map[string]float64{
	"retry_after_s": 60, "member": 1 << 20, "size": math.MaxInt64 / 2, "written": 1 << 30,
}

// guestError maps the body of an error answer.
func guestError(b []byte) error {
	var w wire.Error
	if err := json.Unmarshal(b, &w); err != nil {
		return nonsense("its error is not one")
	}
	code := sandlot.Code(w.Code)
	if !guestCodes[code] || w.Message == "" {
		return nonsense("its error has no known code or no message")
	}
	e := &sandlot.Error{Code: code, Message: sanitize(w.Message, maxMessage)}
	for k, most := range guestFields {
		if v, ok := w.Fields[k].(float64); ok && v >= 0 && v <= most && v == math.Trunc(v) {
			e = e.With(k, int64(v))
		}
	}
	return e
}

// nonsense is the error of an answer that the agent would not give.
func nonsense(format string, args ...any) error {
	return sandlot.Errorf(sandlot.CodeSandboxUnhealthy, "the sandbox's agent is not itself: "+format, args...)
}

// broken is the error of a call without a whole answer.
func broken(ctx context.Context, err error) error {
	var e *sandlot.Error
	switch {
	case errors.As(err, &e):
		return e
	case ctx.Err() != nil && context.Cause(ctx) == context.Canceled: //nolint:errorlint // the caller's own cancel, nothing that wraps it
		return context.Canceled
	case ctx.Err() != nil && !errors.Is(context.Cause(ctx), errNoAnswer):
		return sandlot.Errorf(sandlot.CodeTimeout, "the sandbox did not answer in time")
	case errors.Is(err, errTooLong):
		return nonsense("its answer is too long")
	}
	// net/http quotes what it could not read: the cause is the guest's text too.
	cause := errors.New(sanitize(err.Error(), maxMessage))
	return sandlot.Wrap(cause, sandlot.CodeSandboxUnhealthy, "the sandbox's agent does not answer")
}

// sanitize makes a guest's text fit to show and to log: valid UTF-8 without control, format or
// direction characters, at most limit bytes.
func sanitize(s string, limit int) string {
	var b strings.Builder
	for len(s) > 0 {
		r, n := utf8.DecodeRuneInString(s)
		piece := s[:n]
		if r == utf8.RuneError && n == 1 {
			piece = fmt.Sprintf(`\x%02x`, s[0])
		} else if !unicode.IsPrint(r) { // controls, line separators, bidi marks, other spaces
			piece = fmt.Sprintf(`\u%04x`, r)
		}
		if b.Len()+len(piece) > limit-len("…") {
			b.WriteString("…")
			break
		}
		b.WriteString(piece)
		s = s[n:]
	}
	return b.String()
}
