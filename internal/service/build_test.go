package service

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"sandlot"
	"sandlot/internal/node"
)

// ended waits for a build's end and returns it with all lines that were seen.
func (w *world) ended(id sandlot.ID) (Build, []string) {
	w.t.Helper()
	var lines []string
	b, err := w.WatchBuild(w.t.Context(), w.grant, id, func(l string) error {
		lines = append(lines, l)
		return nil
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return b, lines
}

func (w *world) build(definition string) Build {
	w.t.Helper()
	b, err := w.BuildTemplate(w.t.Context(), w.grant, node.BuildRequest{Name: "mine", Definition: definition})
	if err != nil {
		w.t.Fatal(err)
	}
	return b
}

func TestBuilds(t *testing.T) {
	w := newWorld(t, nil)
	defer w.close()
	good, lines := w.ended(w.build("x").ID)
	if good.State != BuildSucceeded || good.Template.Digest != "sha256:built" || !slices.Equal(lines, []string{"step one"}) || good.Ended.IsZero() {
		t.Errorf("ended as %+v after %q", good, lines)
	}
	bad, _ := w.ended(w.build("fail").ID)
	if bad.State != BuildFailed || bad.BuildStep() != "run x" || sandlot.ErrorCode(bad.Err) != sandlot.CodeInvalidRequest {
		t.Errorf("ended as %+v", bad)
	}
	going := w.build("wait")
	if _, err := w.BuildTemplate(t.Context(), w.grant, node.BuildRequest{Name: "mine", Definition: "x"}); sandlot.ErrorCode(err) != sandlot.CodeConflict {
		t.Errorf("a second build at the same time: %v", err)
	}
	other := w.grant
	other.Project.ID = "prjother"
	if _, err := w.Build(t.Context(), other, going.ID); !isNotFound(err) {
		t.Errorf("another project's look: %v", err)
	}
	if err := w.CancelBuild(t.Context(), other, going.ID); !isNotFound(err) {
		t.Errorf("another project's cancel: %v", err)
	}
	elsewhere, err := w.BuildTemplate(t.Context(), other, node.BuildRequest{Name: "mine", Definition: "x"})
	if err != nil {
		t.Errorf("another project's build meanwhile: %v", err)
	}
	if _, err := w.WatchBuild(t.Context(), other, elsewhere.ID, func(string) error { return nil }); err != nil {
		t.Error(err)
	}
	gone, leave := context.WithCancelCause(t.Context())
	left := errors.New("left")
	if _, err := w.WatchBuild(gone, w.grant, going.ID, func(string) error { leave(left); return nil }); !errors.Is(err, left) {
		t.Errorf("a watcher that leaves: %v", err)
	}
	if b, err := w.Build(t.Context(), w.grant, going.ID); err != nil || b.State != BuildRunning {
		t.Errorf("after its watcher left: %+v, %v", b, err)
	}
	if err := w.CancelBuild(t.Context(), w.grant, going.ID); err != nil {
		t.Error(err)
	}
	if b, _ := w.ended(going.ID); b.State != BuildFailed || sandlot.ErrorCode(b.Err) != sandlot.CodeTimeout {
		t.Errorf("cancelled, it ended as %+v", b)
	}
	var all []sandlot.ID
	for range keptBuilds + 5 {
		b := w.build("x")
		w.ended(b.ID)
		all = append(all, b.ID)
	}
	if _, err := w.Build(t.Context(), w.grant, all[0]); !isNotFound(err) {
		t.Errorf("old builds are kept for ever: %v", err)
	}
	if _, err := w.Build(t.Context(), w.grant, all[len(all)-1]); err != nil {
		t.Error(err)
	}
	w.build("wait") // close ends it
}

func TestBuildRefuses(t *testing.T) {
	w := newWorld(t, nil)
	defer w.close()
	for _, req := range []node.BuildRequest{
		{Name: "mine"}, {Definition: "x"}, {Name: "../x", Definition: "x"},
		{Name: "mine", Definition: "x", Import: &node.ImportRequest{Reference: "alpine"}},
	} {
		if _, err := w.BuildTemplate(t.Context(), w.grant, req); sandlot.ErrorCode(err) != sandlot.CodeInvalidRequest {
			t.Errorf("%+v: %v", req, err)
		}
	}
	for _, ref := range []string{"", "..", "a@b", "x@sha256:", "X"} {
		if err := w.RemoveTemplate(t.Context(), w.grant, ref); !isNotFound(err) {
			t.Errorf("removing %q: %v", ref, err)
		}
	}
}

// The log of a build is bounded, and a watcher that comes late begins where it does.
func TestBuildLogIsBounded(t *testing.T) {
	b := &build{changed: make(chan struct{})}
	line := strings.Repeat("x", 1000)
	for range 1000 {
		b.log(line)
	}
	seen, next, _ := b.see(0)
	if len(seen.Log)*1001 > keptBuildLog || len(seen.Log) == 0 || !seen.Cut || next != 1000 {
		t.Errorf("%d lines are kept, cut %v, the next is %d", len(seen.Log), seen.Cut, next)
	}
	b.log("last")
	if seen, _, _ := b.see(next); !slices.Equal(seen.Log, []string{"last"}) {
		t.Errorf("from there on: %q", seen.Log)
	}
}
