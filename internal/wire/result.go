package wire

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"mime"
	"strings"
)

const (
	maxMedia = 64   // representations of one result
	maxDepth = 1000 // of a JSON value
)

// DecodeResult reads a Result as JSON, and refuses what is none: names that are no media types, binary types that
// are no base64, other values than text. Text is valid UTF-8 after that: encoding/json replaces what is not. A JSON
// value comes as json.RawMessage. The error may be shown: it has nothing of b.
func DecodeResult(b []byte) (Result, error) {
	var in struct {
		Data map[string]json.RawMessage `json:"data"`
		Main bool                       `json:"main"`
	}
	if json.Unmarshal(b, &in) != nil {
		return Result{}, errors.New("a result is not the JSON that was expected")
	}
	if len(in.Data) > maxMedia {
		return Result{}, fmt.Errorf("a result has more than %d representations", maxMedia)
	}
	r := Result{Data: make(map[string]any, len(in.Data)), Main: in.Main}
	for name, raw := range in.Data {
		if !validMedia(name) {
			return Result{}, errors.New("a result has a media type that is none")
		}
		if isJSON(name) {
			if depth(raw) > maxDepth {
				return Result{}, errors.New("a result is nested too deeply")
			}
			r.Data[name] = raw
			continue
		}
		var text string
		if json.Unmarshal(raw, &text) != nil {
			return Result{}, errors.New("a result's value is not text")
		}
		if isBinary(name) {
			if _, err := base64.StdEncoding.DecodeString(text); err != nil {
				return Result{}, errors.New("a result's bytes are not base64")
			}
		}
		r.Data[name] = text
	}
	return r, nil
}

// depth is how deeply a valid JSON value is nested.
func depth(b []byte) (most int) {
	n, quoted := 0, false
	for i := 0; i < len(b); i++ {
		switch c := b[i]; {
		case quoted && c == '\\':
			i++
		case c == '"':
			quoted = !quoted
		case quoted:
		case c == '{' || c == '[':
			n++
			most = max(most, n)
		case c == '}' || c == ']':
			n--
		}
	}
	return most
}

func isJSON(media string) bool {
	return media == "application/json" || strings.HasSuffix(media, "+json") || media == "e2b/data" || media == "e2b/chart"
}

// isBinary says whether a type's value is base64.
func isBinary(media string) bool {
	kind, _, _ := strings.Cut(media, ";")
	switch {
	case kind == "image/svg+xml":
		return false
	case kind == "application/pdf", kind == "application/octet-stream":
		return true
	}
	return strings.HasPrefix(kind, "image/") || strings.HasPrefix(kind, "audio/") || strings.HasPrefix(kind, "video/")
}

func validMedia(name string) bool {
	if len(name) > 128 || !strings.Contains(name, "/") {
		return false
	}
	for i := range len(name) {
		if name[i] < ' ' || name[i] > '~' {
			return false
		}
	}
	_, _, err := mime.ParseMediaType(name)
	return err == nil
}
