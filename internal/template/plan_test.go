package template

import (
	"os"
	"path/filepath"
	"testing"
)

// define writes a definition folder below dir.
func define(t *testing.T, dir, name, text string, files map[string]string) string {
	t.Helper()
	d := filepath.Join(dir, name)
	if err := os.MkdirAll(d, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(d, definitionFile), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	for p, content := range files {
		p = filepath.Join(d, p)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return d
}

func planOf(t *testing.T, dir string) *plan {
	t.Helper()
	def, err := loadDefinition(dir)
	if err != nil {
		t.Fatal(err)
	}
	p, err := newPlan(def, &Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.close)
	return p
}

const twoSteps = `
[[step]]
[[step.files]]
dest = "/opt"
src = "tree"
[[step]]
run = "true"
`

func TestKeysChangeWithInputsOnly(t *testing.T) {
	tree := map[string]string{"tree/a": "1", "tree/sub/b": "2"}
	base := planOf(t, define(t, t.TempDir(), "x", twoSteps, tree))
	same := planOf(t, define(t, t.TempDir(), "x", twoSteps, tree))
	if base.key != same.key || base.imageKey != same.imageKey {
		t.Error("the same definition in another folder has another key")
	}

	differ := func(what string, p *plan, firstDiffering int) {
		t.Helper()
		if len(p.layers) != len(base.layers) {
			t.Fatalf("%s: %d layers, want %d", what, len(p.layers), len(base.layers))
		}
		for i := range p.layers {
			if changed := p.layers[i].key != base.layers[i].key; changed != (i >= firstDiffering) {
				t.Errorf("%s: layer %d (%s) changed: %t", what, i, p.layers[i].title, changed)
			}
		}
	}
	// Layers: 0 prepare, 1 files, 2 run, 3 finish.
	differ("file content", planOf(t, define(t, t.TempDir(), "x", twoSteps, map[string]string{"tree/a": "1", "tree/sub/b": "3"})), 1)
	differ("file name", planOf(t, define(t, t.TempDir(), "x", twoSteps, map[string]string{"tree/a": "1", "tree/sub/c": "2"})), 1)
	differ("step", planOf(t, define(t, t.TempDir(), "x", twoSteps[:len(twoSteps)-2]+"; false\"\n", tree)), 2)

	d := define(t, t.TempDir(), "x", twoSteps, tree)
	if err := os.Chmod(filepath.Join(d, "tree/a"), 0o755); err != nil {
		t.Fatal(err)
	}
	differ("mode", planOf(t, d), 1)

	described := planOf(t, define(t, t.TempDir(), "x", "description = 'new'\n"+twoSteps, tree))
	differ("description", described, len(base.layers))
	if described.key == base.key || described.imageKey != base.imageKey {
		t.Error("a description is part of the manifest's key and not of the image's")
	}
	parts := []string{"a", "b"}
	k1, _ := layerKey("p", "run", parts[0]+parts[1], nil)
	k2, _ := layerKey("pr", "un", parts[0]+parts[1], nil)
	if k1 == k2 {
		t.Error("the parts of a key run into each other")
	}
}

func TestPlanOfATemplateFromAnother(t *testing.T) {
	dir := t.TempDir()
	parent := define(t, dir, "parent", "kernels = ['python']\n[env]\nA = 'parent'\nB = 'parent'\n[[step]]\nrun = 'true'\n", nil)
	child := define(t, dir, "child", "[env]\nA = 'child'\n[from]\ntemplate = 'parent'\n[[step]]\nrun = 'false'\n", nil)
	pp, pc := planOf(t, parent), planOf(t, child)
	if len(pc.layers) != len(pp.layers)+1 || pc.layers[1].key != pp.layers[1].key {
		t.Errorf("the child's %d layers do not begin with the parent's %d", len(pc.layers), len(pp.layers))
	}
	def, err := loadDefinition(child)
	if err != nil {
		t.Fatal(err)
	}
	p, err := newPlan(def, &Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer p.close()
	if got := def.template(); got.Env["A"] != "child" || got.Env["B"] != "parent" || len(got.Kernels) != 1 {
		t.Errorf("inherited %+v", got)
	}

	define(t, dir, "a", "[from]\ntemplate = 'b'\n", nil)
	circle, err := loadDefinition(define(t, dir, "b", "[from]\ntemplate = 'a'\n", nil))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := newPlan(circle, &Options{}); err == nil {
		t.Error("a template made from itself has a plan")
	}
}

func TestInputsRefuse(t *testing.T) {
	dir := t.TempDir()
	outside := filepath.Join(dir, "secret")
	if err := os.WriteFile(outside, []byte("s"), 0o600); err != nil {
		t.Fatal(err)
	}
	text := "[[step]]\n[[step.files]]\ndest = '/x'\nsrc = 'in'\n"
	link := define(t, dir, "link", text, nil)
	if err := os.Symlink(dir, filepath.Join(link, "in")); err != nil {
		t.Fatal(err)
	}
	p := planOf(t, link)
	if in := p.layers[1].inputs; len(in) != 1 || in[0].Link != dir || in[0].Sum != "" {
		t.Errorf("a link out of the folder was followed: %+v", in)
	}
	through := define(t, dir, "through", "[[step]]\n[[step.files]]\ndest = '/x'\nsrc = 'in/secret'\n", nil)
	if err := os.Symlink(dir, filepath.Join(through, "in")); err != nil {
		t.Fatal(err)
	}
	fifo := define(t, dir, "fifo", text, nil)
	if err := mkfifo(filepath.Join(fifo, "in")); err != nil {
		t.Fatal(err)
	}
	for _, d := range []string{through, fifo} {
		def, err := loadDefinition(d)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := newPlan(def, &Options{}); err == nil {
			t.Errorf("%s: no error", filepath.Base(d))
		}
	}
}
