package template

import (
	"archive/tar"
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"sandlot"
)

const parentText = `
kernels = ["python"]
start = ["/bin/serve"]
ready = ["/bin/check"]
[size]
vcpu = 2
memory_mb = 2048
disk_gb = 7
[env]
A = "parent"
B = "parent"
[[step]]
[[step.files]]
dest = "/opt/parent"
content = "1"
[[step.files]]
dest = "/opt/both"
content = "parent"
`

const childSteps = `
[[step]]
[[step.files]]
dest = "/opt/both"
content = "child"
`

// The parent's image and what its manifest says go on in a child, whether the parent is a definition, a
// template of the store, or one version of it that its name stands for no more.
func TestBuildFromAnotherTemplate(t *testing.T) {
	b := newBuilder(t)
	define(t, b.defs, "parent", parentText, nil)
	build := func(name, from, more string) (sandlot.Template, error) {
		t.Helper()
		dir := define(t, b.defs, name, more+"[env]\nA = 'child'\n[from]\ntemplate = '"+from+"'\n"+childSteps, nil)
		return Build(t.Context(), dir, Options{CacheDir: b.cache, Store: b.store, Log: &b.log})
	}
	check := func(got sandlot.Template, parentFile string) {
		t.Helper()
		if got.Size != (sandlot.Size{VCPU: 2, MemoryMB: 2048, DiskGB: 7}) || strings.Join(got.Kernels, ",") != "python" ||
			strings.Join(got.Start, ",") != "/bin/serve" || strings.Join(got.Ready, ",") != "/bin/check" {
			t.Errorf("%s does not inherit: %+v", got.Name, got)
		}
		if e := got.Env; e["A"] != "child" || e["B"] != "parent" || e["LANG"] != "C.UTF-8" || len(e) != 3 {
			t.Errorf("%s: env %v", got.Name, e)
		}
		expectTree(t, got.Image, map[string]string{"opt/parent": "= " + parentFile, "opt/both": "= child", "workspace": "/"})
	}

	got, err := build("of-definition", "parent", "")
	if err != nil {
		t.Fatalf("%v\n%s", err, &b.log)
	}
	check(got, "1")

	first, err := Build(t.Context(), filepath.Join(b.defs, "parent"), Options{CacheDir: b.cache, Store: b.store, Log: &b.log})
	if err != nil {
		t.Fatal(err)
	}
	define(t, b.defs, "parent", strings.Replace(parentText, `content = "1"`, `content = "2"`, 1), nil)
	second, err := Build(t.Context(), filepath.Join(b.defs, "parent"), Options{CacheDir: b.cache, Store: b.store, Log: &b.log})
	if err != nil || first.Digest == second.Digest {
		t.Fatalf("%v, %s and %s", err, first.Digest, second.Digest)
	}
	if got, err = build("of-version", "parent@"+first.Digest, ""); err != nil {
		t.Fatalf("%v\n%s", err, &b.log)
	}
	check(got, "1")

	if err := os.RemoveAll(filepath.Join(b.defs, "parent")); err != nil {
		t.Fatal(err)
	}
	if got, err = build("of-store", "parent", ""); err != nil {
		t.Fatalf("%v\n%s", err, &b.log)
	}
	check(got, "2")

	// Its own size, kernels and start win, and what the store has not got is said.
	own, err := build("own", "parent", "kernels = []\nstart = ['/bin/own']\n[size]\nvcpu = 1\nmemory_mb = 512\ndisk_gb = 1\n")
	if err != nil {
		t.Fatal(err)
	}
	if own.Size.MemoryMB != 512 || len(own.Kernels) != 0 || strings.Join(own.Start, ",") != "/bin/own" || own.Ready != nil {
		t.Errorf("own values: %+v", own)
	}
	for _, from := range []string{"nothing", "parent@sha256:" + strings.Repeat("0", 64)} {
		if _, err := build("lost", from, ""); sandlot.ErrorCode(err) != sandlot.CodeNotFound || !strings.Contains(err.Error(), from) {
			t.Errorf("from %s: %v", from, err)
		}
	}
	if _, err := build("wrong", "../parent", ""); err == nil {
		t.Error("a parent outside was taken")
	}
}

// An image of the definition folder, pinned, is a root like any other; a template made from it has its variables.
func TestBuildFromAnImage(t *testing.T) {
	b := newBuilder(t)
	img := imageOf(t, v1.Config{Env: []string{"A=image", "C=image"}, Cmd: []string{"/bin/image"}},
		layerTar(t, file("opt/parent", "1"), file("opt/both", "image")))
	digest, err := img.Digest()
	if err != nil {
		t.Fatal(err)
	}
	text := func(digest, place string) string {
		return "[env]\nB = 'parent'\n[from.oci]\nstart = true\n" + place + "\ndigest = '" + digest + "'\n"
	}
	dir := define(t, b.defs, "parent", text(digest.String(), "layout = 'image'"), nil)
	if err := os.CopyFS(filepath.Join(dir, "image"), os.DirFS(writeLayout(t, img))); err != nil {
		t.Fatal(err)
	}
	child := define(t, b.defs, "child", "[env]\nA = 'child'\n[from]\ntemplate = 'parent'\n"+childSteps, nil)
	for range 2 { // built, then from the cache
		got, err := Build(t.Context(), child, Options{CacheDir: b.cache, Store: b.store, Log: &b.log})
		if err != nil {
			t.Fatalf("%v\n%s", err, &b.log)
		}
		if e := got.Env; e["A"] != "child" || e["B"] != "parent" || e["C"] != "image" || strings.Join(got.Start, " ") != "/bin/image" {
			t.Errorf("env %v, start %q", e, got.Start)
		}
		expectTree(t, got.Image, map[string]string{"opt/parent": "= 1", "opt/both": "= child"})
		if err := b.store.Remove(t.Context(), "child"); err != nil {
			t.Fatal(err)
		}
	}

	outside := filepath.Join(dir, "outside")
	if err := os.Symlink(writeLayout(t, img), outside); err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct{ text, want string }{
		"not pinned":        {"[from.oci]\nlayout = 'image'\n", "pinned by digest"},
		"not there":         {text(digest.String(), "layout = 'none'"), "none"},
		"another image":     {text("sha256:"+strings.Repeat("0", 64), "layout = 'image'"), "has no image"},
		"out of its folder": {text(digest.String(), "layout = '../image'"), "leaves its root"},
		"through a link":    {text(digest.String(), "layout = 'outside'"), "escapes"},
		"an absolute one":   {text(digest.String(), "archive = '/etc/passwd'"), "absolute"},
		"two places":        {text(digest.String(), "layout = 'image'\narchive = 'x'"), "exactly one"},
		"two digests":       {text(digest.String(), "reference = 'x@sha256:"+strings.Repeat("0", 64)+"'"), "another digest"},
		"no platform":       {text(digest.String(), "layout = 'image'\nplatform = 'beos'"), "platform"},
	} {
		if err := os.WriteFile(filepath.Join(dir, definitionFile), []byte(tt.text), 0o644); err != nil {
			t.Fatal(err)
		}
		_, err := Build(t.Context(), dir, Options{CacheDir: b.cache, Store: b.store, Log: &b.log, Fresh: true})
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: error %v, want one with %q", name, err, tt.want)
		}
	}
	if _, err := b.store.Get("parent"); !errors.Is(err, os.ErrNotExist) && sandlot.ErrorCode(err) != sandlot.CodeNotFound {
		t.Errorf("a refused definition left a template: %v", err)
	}
}

func TestUbuntuArchives(t *testing.T) {
	s := &ubuntuSource{Suite: "noble"}
	if err := s.check(); err != nil {
		t.Fatal(err)
	}
	lines, err := s.archives(t.Context(), t.TempDir())
	if err != nil || len(lines) != 3 {
		t.Fatalf("%q, %v", lines, err)
	}
	for i, pocket := range []string{"noble ", "noble-updates ", "noble-security "} {
		if !strings.HasPrefix(lines[i], "deb [signed-by="+ubuntuKeyring+"] http") || !strings.Contains(lines[i], " "+pocket+"main universe") {
			t.Errorf("line %q is not of %s", lines[i], pocket)
		}
	}
	for _, bad := range []ubuntuSource{{}, {Suite: "../x"}, {Suite: "noble", Components: []string{"main [trusted=yes]"}}} {
		if bad.check() == nil {
			t.Errorf("%+v is accepted", bad)
		}
	}
}

func TestNPMPackageParts(t *testing.T) {
	data := layerTar(t, file("package/bin/x", "x"), file("package/binary", "x"), file("package/share/doc", "x"), file("package/LICENSE", "x"))
	for _, tt := range []struct{ only, want string }{
		{"", "opt/bin/x opt/binary opt/share/doc opt/LICENSE"}, {"bin", "opt/bin/x"}, {"bin/x LICENSE", "opt/bin/x opt/LICENSE"}, {"bin nothing", "!"},
	} {
		got, err := names(t, func(tr *tree) error {
			return addPackage(tr, "opt", tar.NewReader(bytes.NewReader(data)), strings.Fields(tt.only)...)
		})
		if (err != nil) != (tt.want == "!") || err == nil && strings.Join(got, " ") != tt.want {
			t.Errorf("only %q: %q, %v", tt.only, got, err)
		}
	}
}
