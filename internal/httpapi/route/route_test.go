package route

import (
	"bytes"
	"encoding/json"
	"errors"
	"testing"
	"unicode/utf8"

	"sandlot"
)

type sample struct {
	Name string            `json:"name"`
	N    *int              `json:"n"`
	Env  map[string]string `json:"env"`
	Sub  *struct {
		Hosts []string `json:"hosts"`
	} `json:"sub"`
}

// FuzzUnmarshal: whatever comes, the answer is a value that encoding/json agrees with, or a typed error.
func FuzzUnmarshal(f *testing.F) {
	for _, s := range []string{
		`{}`, `{"name":"a","n":1,"env":{"A":"b"},"sub":{"hosts":["x"]}}`, `{"Name":"a"}`, `{"env":{"a":"","a":""}}`, `[[[[`, `{"n":1e99}`, "\xff", `{} 1`, `null`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var got, want sample
		err := Unmarshal(b, &got)
		if err != nil {
			if code := sandlot.ErrorCode(err); code != sandlot.CodeInvalidRequest {
				t.Fatalf("%s: %v", code, err)
			}
			return
		}
		d := json.NewDecoder(bytes.NewReader(b))
		d.DisallowUnknownFields()
		if err := d.Decode(&want); err != nil || got.Name != want.Name {
			t.Fatalf("accepted %q, encoding/json says %v", b, err)
		}
	})
}

// FuzzRunes: no byte is lost, and no text event has half a character.
func FuzzRunes(f *testing.F) {
	f.Add([]byte("gr\u00fcn \U0001F98A \xff\xfe z\xc3"), 3)
	f.Add([]byte("\xf0\x9f\xa6"), 1)
	f.Fuzz(func(t *testing.T, b []byte, size int) {
		size = min(max(size, 1), 64)
		var r Runes
		var all []byte
		for part := b; len(part) > 0; {
			n := min(size, len(part))
			data, text := r.Next(part[:n])
			if text != utf8.Valid(data) {
				t.Fatalf("%q is text: %v", data, text)
			}
			if utf8.Valid(b) && !text {
				t.Fatalf("a character of %q was split: %q", b, data)
			}
			all = append(all, data...)
			part = part[n:]
		}
		if all = append(all, r.Rest()...); !bytes.Equal(all, b) {
			t.Fatalf("%q became %q", b, all)
		}
	})
}

func TestDidYouMean(t *testing.T) {
	for name, want := range map[string]string{
		`{"nam":"x"}`:           `unknown field "nam": did you mean "name"?`,
		`{"NAME":"x"}`:          `unknown field "NAME": did you mean "name"?`,
		`{"sub":{"host":[]}}`:   `unknown field "sub.host": did you mean "hosts"?`,
		`{"completely":"else"}`: `unknown field "completely"`,
	} {
		var v sample
		err := Unmarshal([]byte(name), &v)
		var e *sandlot.Error
		if e, _ = err.(*sandlot.Error); e == nil || e.Message != want {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestFailureHidesCauses: what is shown is what was meant to be shown.
func TestFailureHidesCauses(t *testing.T) {
	status, body := Failure(sandlot.Wrap(errors.New("secret cause"), sandlot.CodeConflict, "a\nb\x1b[31m\u202e\xff"), "req1")
	if status != 409 || body["message"] != "a\uFFFDb\uFFFD[31m\uFFFD\uFFFD" {
		t.Errorf("%d %q", status, body["message"])
	}
	status, body = Failure(errors.New("secret cause"), "req1")
	if status != 500 || body["code"] != "internal" || body["request_id"] != "req1" {
		t.Errorf("%d %v", status, body)
	}
}
