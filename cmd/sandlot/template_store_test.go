package main

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"io"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"sandlot"
	"sandlot/internal/testenv"
)

func TestImageName(t *testing.T) {
	for image, want := range map[string]string{
		"registry.example:5000/team/App:1.2": "app", "alpine": "alpine", "alpine@sha256:00": "alpine", "./saved.tar": "saved", "/layouts/web": "web",
	} {
		if got := imageName(image); got != want {
			t.Errorf("%s: %q, want %q", image, got, want)
		}
	}
}

// What `docker save` wrote becomes a template, is inspected, and goes.
func TestTemplateImportInspectRemove(t *testing.T) {
	testenv.Root(t)
	var files bytes.Buffer
	w := tar.NewWriter(&files)
	for _, f := range []struct{ name, content string }{{"etc/passwd", "root:x:0:0::/root:/bin/sh\n"}, {"etc/motd", "from the image\n"}, {"bin/sh", "#!"}} {
		if err := w.WriteHeader(&tar.Header{Name: f.name, Mode: 0o755, Size: int64(len(f.content)), Typeflag: tar.TypeReg}); err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(w, f.content)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(files.Bytes())), nil })
	if err != nil {
		t.Fatal(err)
	}
	img, err := mutate.AppendLayers(empty.Image, layer)
	if err != nil {
		t.Fatal(err)
	}
	img, err = mutate.Config(img, v1.Config{Env: []string{"FROM_IMAGE=yes"}})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "saved.tar")
	if err := tarball.WriteToFile(file, name.MustParseReference("example.test/tiny:1"), img); err != nil {
		t.Fatal(err)
	}
	store, cache := t.TempDir(), t.TempDir()
	sandlotCmd := func(want int, args ...string) string {
		t.Helper()
		var out, said bytes.Buffer
		if code := run(t.Context(), args, &streams{in: strings.NewReader(""), out: &out, err: &said}); code != want {
			t.Fatalf("%q: status %d, want %d: %s", args, code, want, said.String())
		}
		return out.String() + said.String()
	}
	made := sandlotCmd(0, "template", "import", "--store", store, "--cache", cache, "--name", "tiny", file)
	if !regexp.MustCompile(`(?m)^tiny@sha256:[0-9a-f]{64}$`).MatchString(made) {
		t.Errorf("import says %q", made)
	}
	var m sandlot.Template
	if err := json.Unmarshal([]byte(sandlotCmd(0, "template", "inspect", "--json", "--store", store, "tiny")), &m); err != nil || m.Name != "tiny" || m.Env["FROM_IMAGE"] != "yes" {
		t.Errorf("inspect: %+v, %v", m, err)
	}
	if got := sandlotCmd(0, "template", "inspect", "--store", store, "tiny@"+m.Digest); !strings.Contains(got, m.Digest) {
		t.Errorf("inspect of a version: %s", got)
	}
	sandlotCmd(0, "template", "rm", "--store", store, "tiny")
	if got := sandlotCmd(1, "template", "inspect", "--store", store, "tiny"); !strings.Contains(got, "tiny") {
		t.Errorf("inspect of nothing: %s", got)
	}
}
