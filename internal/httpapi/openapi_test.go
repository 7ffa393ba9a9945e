package httpapi

import (
	"bytes"
	"net/http"
	"os"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/google/go-cmp/cmp"
)

const documentFile = "../../api/openapi.json"

func TestDocument(t *testing.T) {
	w := newWorld(t, Limits{})
	a := w.as("", http.MethodGet, "/api/openapi.json", "")
	if a.status != http.StatusOK {
		t.Fatalf("%d %s", a.status, a.body)
	}
	doc := parse(t, a.body)
	if err := doc.Validate(t.Context()); err != nil {
		t.Error(err)
	}
	got := bytes.Replace(a.body, []byte(`"version": "test"`), []byte(`"version": "0.1.0"`), 1)
	if *update {
		if err := os.WriteFile(documentFile, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(documentFile)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(string(want), string(got)); d != "" {
		t.Errorf("api/openapi.json is not what the server serves; run this test with -update\n%.2000s", d)
	}
}

func parse(t *testing.T, b []byte) *openapi3.T {
	t.Helper()
	doc, err := openapi3.NewLoader().LoadFromData(b)
	if err != nil {
		t.Fatal(err)
	}
	return doc
}
