package route

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"reflect"
	"slices"
	"strings"
	"unicode/utf8"

	"sandlot"
)

// maxDepth of a JSON body. The deepest documented one has three levels.
const maxDepth = 32

// Body reads the request's body, whatever its content type says: the documented curl lines send none for JSON.
func (q *Request) Body() ([]byte, error) {
	if enc := q.R.Header.Get("Content-Encoding"); enc != "" && enc != "identity" {
		return nil, sandlot.Errorf(sandlot.CodeInvalidRequest, "a JSON body is sent without Content-Encoding")
	}
	from := q.Upload(sandlot.MaxBodyBytes)
	defer func() { _ = from.Close() }()
	body, err := io.ReadAll(from)
	if err != nil {
		return nil, err
	}
	return body, nil
}

// Decode reads the JSON body into v, a pointer to a struct. Refused: names that v has not (a misspelt one
// would be ignored in silence), names given twice (two readers could disagree), excessive depth.
func (q *Request) Decode(v any) error {
	body, err := q.Body()
	if err != nil {
		return err
	}
	if len(bytes.TrimSpace(body)) == 0 {
		if q.Op.Optional {
			return nil
		}
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "the body is empty: send a JSON object")
	}
	return Unmarshal(body, v)
}

// Unmarshal is Decode of bytes.
func Unmarshal(body []byte, v any) error {
	if !utf8.Valid(body) {
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "the body is not valid UTF-8")
	}
	if b := bytes.TrimLeft(body, " \t\r\n"); len(b) > 0 && b[0] != '{' {
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "the body must be a JSON object")
	}
	d := json.NewDecoder(bytes.NewReader(body))
	d.UseNumber()
	if err := check(d, reflect.TypeOf(v).Elem(), "", 0); err != nil {
		return jsonError(err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "the body has more than one JSON value")
	}
	if err := json.Unmarshal(body, v); err != nil {
		return jsonError(err)
	}
	return nil
}

func jsonError(err error) error {
	var typed *sandlot.Error
	var mistyped *json.UnmarshalTypeError
	switch {
	case errors.As(err, &typed):
		return err
	case errors.As(err, &mistyped) && mistyped.Field != "":
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "%s must be %s, not a JSON %s", mistyped.Field, kindName(mistyped.Type), mistyped.Value).With("field", mistyped.Field)
	case errors.As(err, &mistyped):
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "the body must be a JSON object")
	}
	return sandlot.Wrap(err, sandlot.CodeInvalidRequest, "the body is not valid JSON")
}

func kindName(t reflect.Type) string {
	switch t.Kind() {
	case reflect.String:
		return "a string"
	case reflect.Bool:
		return "true or false"
	case reflect.Int, reflect.Int32, reflect.Int64:
		return "a whole number"
	case reflect.Slice:
		return "a list"
	case reflect.Pointer:
		return kindName(t.Elem())
	}
	return "an object"
}

var unmarshaler = reflect.TypeFor[json.Unmarshaler]()

// check walks one value. t is what it will be decoded into, nil where that does not matter.
func check(d *json.Decoder, t reflect.Type, at string, depth int) error {
	if depth > maxDepth {
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "the body is nested deeper than %d levels", maxDepth)
	}
	tok, err := d.Token()
	if err != nil {
		return err
	}
	delim, ok := tok.(json.Delim)
	if !ok {
		return nil
	}
	for t != nil && t.Kind() == reflect.Pointer && !t.Implements(unmarshaler) {
		t = t.Elem()
	}
	if t != nil && (t.Implements(unmarshaler) || reflect.PointerTo(t).Implements(unmarshaler)) {
		t = nil
	}
	if delim == '[' {
		var elem reflect.Type
		if t != nil && t.Kind() == reflect.Slice {
			elem = t.Elem()
		}
		for d.More() {
			if err := check(d, elem, at, depth+1); err != nil {
				return err
			}
		}
	} else {
		seen := map[string]bool{}
		for d.More() {
			tok, err := d.Token()
			if err != nil {
				return err
			}
			name, _ := tok.(string)
			if seen[name] {
				return sandlot.Errorf(sandlot.CodeInvalidRequest, "%q is given twice", join(at, name)).With("field", join(at, name))
			}
			seen[name] = true
			var next reflect.Type
			switch {
			case t != nil && t.Kind() == reflect.Struct:
				fields := fieldsOf(t)
				if next, ok = fields[name]; !ok {
					names := make([]string, 0, len(fields))
					for n := range fields {
						names = append(names, n)
					}
					return unknown("field", join(at, name), names)
				}
			case t != nil && t.Kind() == reflect.Map:
				next = t.Elem()
			}
			if err := check(d, next, join(at, name), depth+1); err != nil {
				return err
			}
		}
	}
	_, err = d.Token() // the closing delimiter
	return err
}

func join(at, name string) string {
	if at == "" {
		return name
	}
	return at + "." + name
}

func fieldsOf(t reflect.Type) map[string]reflect.Type {
	fields := make(map[string]reflect.Type, t.NumField())
	for f := range t.Fields() {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if name != "" && name != "-" {
			fields[name] = f.Type
		}
	}
	return fields
}

// unknown words the refusal of a name that does not exist, with the nearest that does.
func unknown(what, name string, names []string) error {
	slices.Sort(names)
	short := name[strings.LastIndexByte(name, '.')+1:]
	best, bestD := "", 3
	for _, n := range names {
		if d := distance(strings.ToLower(short), n, bestD); d < bestD {
			best, bestD = n, d
		}
	}
	if len(name) > 100 {
		name = strings.ToValidUTF8(name[:100], "") + "…"
	}
	if best != "" {
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "unknown %s %q: did you mean %q?", what, name, best).With("field", name)
	}
	return sandlot.Errorf(sandlot.CodeInvalidRequest, "unknown %s %q", what, name).With("field", name).With("known", names)
}

// distance is Levenshtein's, or limit when it is not less.
func distance(a, b string, limit int) int {
	if len(a) > 64 || len(b) > 64 || max(len(a)-len(b), len(b)-len(a)) >= limit {
		return limit
	}
	prev, cur := make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range prev {
		prev[j] = j
	}
	for i := range len(a) {
		cur[0] = i + 1
		for j := range len(b) {
			cost := 1
			if a[i] == b[j] {
				cost = 0
			}
			cur[j+1] = min(prev[j+1]+1, cur[j]+1, prev[j]+cost)
		}
		prev, cur = cur, prev
	}
	return min(prev[len(b)], limit)
}
