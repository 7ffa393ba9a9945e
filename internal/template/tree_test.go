package template

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"crypto/sha512"
	"encoding/base64"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func mkfifo(p string) error { return syscall.Mkfifo(p, 0o600) }

func TestImagePath(t *testing.T) {
	for in, want := range map[string]string{
		"a": "a", "./a/./b/": "a/b", "a//b": "a/b", ".": ".", "..a/b..": "..a/b..",
		"": "!", "/a": "!", "..": "!", "a/../b": "!", "a/..": "!", "a\x00b": "!",
		strings.Repeat("x", 256): "!", strings.Repeat("x/", 2049): "!",
	} {
		got, err := imagePath(in)
		if err != nil {
			got = "!"
		}
		if got != want {
			t.Errorf("imagePath(%.40q) = %.40q, want %q", in, got, want)
		}
	}
}

// names lists a finished tree.
func names(t *testing.T, fill func(*tree) error) ([]string, error) {
	t.Helper()
	var b bytes.Buffer
	tr := newTree(&b)
	if err := fill(tr); err != nil {
		return nil, err
	}
	if err := tr.close(); err != nil {
		t.Fatal(err)
	}
	var list []string
	r := tar.NewReader(&b)
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return list, nil
		}
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, h.Name)
	}
}

func tarOf(t *testing.T, headers ...tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	tw := tar.NewWriter(&b)
	for _, h := range headers {
		if err := tw.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := tw.Write(make([]byte, h.Size)); err != nil {
			t.Fatal(err)
		}
	}
	if err := tw.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestHostilePackageArchives(t *testing.T) {
	for name, h := range map[string]tar.Header{
		"absolute":  {Name: "/etc/passwd", Typeflag: tar.TypeReg},
		"dot dot":   {Name: "package/../../etc/passwd", Typeflag: tar.TypeReg},
		"symlink":   {Name: "package/x", Typeflag: tar.TypeSymlink, Linkname: "/etc"},
		"hard link": {Name: "package/x", Typeflag: tar.TypeLink, Linkname: "/etc/passwd"},
		"device":    {Name: "package/x", Typeflag: tar.TypeBlock, Devmajor: 8},
		"fifo":      {Name: "package/x", Typeflag: tar.TypeFifo},
	} {
		data := tarOf(t, tar.Header{Name: "package/ok", Typeflag: tar.TypeReg, Size: 1, Mode: 0o4755}, h)
		if got, err := names(t, func(tr *tree) error {
			return addPackage(tr, "opt/x", tar.NewReader(bytes.NewReader(data)))
		}); err == nil {
			t.Errorf("%s: accepted as %q", name, got)
		}
	}
	good := tarOf(t, tar.Header{Name: "package/bin/x", Typeflag: tar.TypeReg, Size: 3, Mode: 0o6755, Uid: 12, Gid: 12})
	got, err := names(t, func(tr *tree) error { return addPackage(tr, "opt/x", tar.NewReader(bytes.NewReader(good))) })
	if err != nil || len(got) != 1 || got[0] != "opt/x/bin/x" {
		t.Errorf("a plain package: %q, %v", got, err)
	}
}

func TestPackageIntegrity(t *testing.T) {
	var b bytes.Buffer
	gz := gzip.NewWriter(&b)
	if _, err := gz.Write(tarOf(t, tar.Header{Name: "package/a", Typeflag: tar.TypeReg})); err != nil {
		t.Fatal(err)
	}
	if err := gz.Close(); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "x.tgz")
	if err := os.WriteFile(file, b.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	sum := sha512.Sum512(b.Bytes())
	p := npmPackage{Name: "x", Integrity: "sha512-" + base64.StdEncoding.EncodeToString(sum[:]), Dest: "/opt/x"}
	if got, err := names(t, func(tr *tree) error { return p.add(tr, file) }); err != nil || len(got) != 1 {
		t.Errorf("%q, %v", got, err)
	}
	p.Integrity = "sha512-" + base64.StdEncoding.EncodeToString(make([]byte, 64))
	if _, err := names(t, func(tr *tree) error { return p.add(tr, file) }); err == nil {
		t.Error("an archive with another integrity was unpacked")
	}
}

func zipOf(t *testing.T, files map[string]string) *zip.Reader {
	t.Helper()
	var b bytes.Buffer
	w := zip.NewWriter(&b)
	for name, content := range files {
		f, err := w.Create(name)
		if err == nil {
			_, err = io.WriteString(f, content)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	r, err := zip.NewReader(bytes.NewReader(b.Bytes()), int64(b.Len()))
	if err != nil && !errors.Is(err, zip.ErrInsecurePath) {
		t.Fatal(err)
	}
	return r
}

func TestModuleZip(t *testing.T) {
	const folder = "m@v1/data/"
	got, err := names(t, func(tr *tree) error {
		return addZip(tr, "opt", zipOf(t, map[string]string{folder + "a": "x", "m@v1/other": "y"}), folder)
	})
	if err != nil || len(got) != 1 || got[0] != "opt/a" {
		t.Errorf("%q, %v", got, err)
	}
	for _, name := range []string{"../x", "a/../../x", "/etc/x"} {
		if got, err := names(t, func(tr *tree) error {
			return addZip(tr, "opt", zipOf(t, map[string]string{folder + name: "x"}), folder)
		}); err == nil {
			t.Errorf("%s: accepted as %q", name, got)
		}
	}
	if _, err := names(t, func(tr *tree) error { return addZip(tr, "opt", zipOf(t, map[string]string{"x": ""}), folder) }); err == nil {
		t.Error("a module without the folder was accepted")
	}
}

func TestEmbeddedFileLists(t *testing.T) {
	const folder = "m@v1/d/"
	for name, tt := range map[string]struct {
		list string
		ok   bool
	}{
		"plain":       {`{"files":[{"name":"lib","perm":2147484141},{"name":"lib/a","size":1,"perm":420},{"name":"l","perm":134217728,"symlink":"lib/a"}]}`, true},
		"dot dot":     {`{"files":[{"name":"../a","size":1,"perm":420}]}`, false},
		"absolute":    {`{"files":[{"name":"/a","size":1,"perm":420}]}`, false},
		"device":      {`{"files":[{"name":"a","perm":67108864}]}`, false},
		"missing":     {`{"files":[{"name":"b","size":1,"perm":420}]}`, false},
		"too long":    {`{"files":[{"name":"lib/a","size":0,"perm":420}]}`, false},
		"too short":   {`{"files":[{"name":"lib/a","size":2,"perm":420}]}`, false},
		"not gzip":    {`{"files":[{"name":"z","size":1,"perm":420,"compressed":true}]}`, false},
		"negative":    {`{"files":[{"name":"lib/a","size":-1,"perm":420}]}`, false},
		"over limits": {`{"files":[{"name":"lib/a","size":99999999999,"perm":420}]}`, false},
		"no json":     {`[`, false},
	} {
		z := zipOf(t, map[string]string{folder + "files.json": tt.list, folder + "lib/a": "x", folder + "z.gz": "x"})
		got, err := names(t, func(tr *tree) error { return addEmbedded(tr, "usr/local", z, folder) })
		if (err == nil) != tt.ok {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
}

// FuzzImagePath: what is accepted stays below the root.
func FuzzImagePath(f *testing.F) {
	for _, s := range []string{"a", "../a", "/a", "a/./b", "a/../..", "a//b", "\x00"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got, err := imagePath(s)
		if err == nil && !filepath.IsLocal(got) {
			t.Errorf("imagePath(%q) = %q leaves the root", s, got)
		}
	})
}

func FuzzParseDefinition(f *testing.F) {
	f.Add([]byte(twoSteps))
	f.Add([]byte("[from.debian]\nsuite='x'\n[[step]]\napt=['a']"))
	f.Fuzz(func(t *testing.T, data []byte) {
		if def, err := parseDefinition("x", data); err == nil {
			def.template()
		}
	})
}
