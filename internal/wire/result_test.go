package wire

import (
	"strings"
	"testing"
)

func TestDecodeResult(t *testing.T) {
	r, err := DecodeResult([]byte(`{"data":{"text/plain":"a\ud800","application/json":{"x":[1]},"image/png":"AAAA","image/svg+xml":"<svg/>","application/vnd.plotly.v1+json":{}},"main":true}`))
	if err != nil || !r.Main || r.Data["text/plain"] != "a\uFFFD" || len(r.Data) != 5 {
		t.Errorf("%+v, %v", r, err)
	}
	for _, bad := range []string{
		``, `[]`, `{"data":[]}`, `{"data":{"text":"x"}}`, `{"data":{"text/plain":1}}`, `{"data":{"image/png":"no!"}}`, `{"data":{"a/b c":"x"}}`,
		`{"data":{"text/plain\n":"x"}}`, `{"data":{"text/` + strings.Repeat("a", 200) + `":"x"}}`,
		`{"data":{"application/json":` + strings.Repeat("[", 2000) + strings.Repeat("]", 2000) + `}}`,
	} {
		if r, err := DecodeResult([]byte(bad)); err == nil {
			t.Errorf("%.60q was taken: %+v", bad, r)
		}
	}
}

func FuzzDecodeResult(f *testing.F) {
	f.Add([]byte(`{"data":{"text/plain":"a","application/json":{"x":[1]}},"main":true}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := DecodeResult(b)
		if err == nil && len(r.Data) > maxMedia {
			t.Errorf("%d representations", len(r.Data))
		}
	})
}
