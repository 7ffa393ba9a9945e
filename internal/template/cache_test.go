package template

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"sandlot"
)

// TestCacheIsBounded keeps the layers of one build under a bound, and those of all under it when it has ended.
func TestCacheIsBounded(t *testing.T) {
	b := newBuilder(t)
	step := func(name string) string {
		return "[[step]]\n[[step.files]]\ndest = \"/opt/" + name + "\"\nsrc = \"a\"\n"
	}
	large := map[string]string{"a": strings.Repeat("0123456789abcdef", 1<<16)} // 1 MiB
	opts := Options{CacheDir: b.cache, Store: b.store, Log: io.Discard, MaxCacheBytes: 3 << 20}
	if _, err := Build(t.Context(), define(t, b.defs, "two", step("one")+step("two"), large), opts); err != nil {
		t.Fatal(err)
	}
	_, err := Build(t.Context(), define(t, b.defs, "five", step("1")+step("2")+step("3")+step("4")+step("5"), large), opts)
	var failed *StepError
	if sandlot.ErrorCode(err) != sandlot.CodeTooLarge || !errors.As(err, &failed) {
		t.Errorf("a build over the bound: %v", err)
	}
	var total int64
	files, err := filepath.Glob(filepath.Join(b.cache, "layers", "*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if info, err := os.Lstat(f); err == nil && info.IsDir() {
			total += diskUse(f)
		}
		if layer, ok := strings.CutSuffix(f, sizeSuffix); ok {
			if _, err := os.Lstat(layer); err != nil {
				t.Errorf("a layer went and its size stayed: %v", err)
			}
		}
	}
	if total > opts.MaxCacheBytes+1<<20 || total == 0 {
		t.Errorf("the cache has %d bytes, over its bound of %d", total, opts.MaxCacheBytes)
	}
}

// Layers that are longest unused go first.
func TestCachePrune(t *testing.T) {
	c := &cache{dir: t.TempDir()}
	for i, name := range []string{"new", "older", "oldest", "ancient"} {
		dir := c.path(name)
		if err := errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(dir+sizeSuffix, []byte("100"), 0o600)); err != nil {
			t.Fatal(err)
		}
		used := time.Now().Add(-time.Duration(i) * time.Hour)
		if name == "ancient" {
			used = time.Now().Add(-2 * keepLayersFor)
		}
		if err := os.Chtimes(dir, used, used); err != nil {
			t.Fatal(err)
		}
	}
	has := func(name string) bool {
		_, err := os.Lstat(c.path(name))
		return err == nil
	}
	c.prune(0)
	if !has("new") || !has("older") || !has("oldest") || has("ancient") {
		t.Error("without a bound, not only what is old went")
	}
	c.prune(200)
	if !has("new") || !has("older") || has("oldest") {
		t.Error("over the bound, not the layer that was unused longest went")
	}
}
