package httpapi

import (
	"fmt"
	"net/http"
	"testing"
)

// BenchmarkList is one page of 200 of a thousand sandboxes.
func BenchmarkList(b *testing.B) {
	w := newWorld(b, Limits{})
	for i := range 1000 {
		w.create(fmt.Sprintf(`{"metadata":{"n":"%d"}}`, i%10))
	}
	for b.Loop() {
		if a := w.do("GET", boxes+"?limit=200", ""); a.status != http.StatusOK {
			b.Fatalf("%d %s", a.status, a.body)
		}
	}
}

// BenchmarkCreateAndDelete is both calls over HTTP, with the memory engine's cold start between them.
func BenchmarkCreateAndDelete(b *testing.B) {
	w := newWorld(b, Limits{})
	for b.Loop() {
		id := w.create(`{}`)
		if a := w.do("DELETE", boxes+"/"+id, ""); a.status != http.StatusOK {
			b.Fatalf("%d %s", a.status, a.body)
		}
	}
}

// BenchmarkExec is one synchronous exec over HTTP.
func BenchmarkExec(b *testing.B) {
	w := newWorld(b, Limits{})
	id := w.create(`{}`)
	for b.Loop() {
		if a := w.do("POST", boxes+"/"+id+"/exec", `{"cmd":["true"]}`); a.status != http.StatusOK {
			b.Fatalf("%d %s", a.status, a.body)
		}
	}
}
