package main

import (
	"archive/tar"
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func write(t *testing.T, name, content string, mode fs.FileMode) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(content), mode); err != nil {
		t.Fatal(err)
	}
}

func TestCpIn(t *testing.T) {
	f := newFakeAPI(t)
	id := f.sandbox()
	dir := t.TempDir()
	write(t, filepath.Join(dir, "a.txt"), "text", 0o644)
	write(t, filepath.Join(dir, "run.sh"), "#!", 0o755)
	write(t, filepath.Join(dir, "empty"), "", 0o644)
	write(t, filepath.Join(dir, "tree", "sub", "b"), "b", 0o600)
	write(t, filepath.Join(dir, "tree", "c"), "c", 0o644)
	if err := os.Symlink("sub/b", filepath.Join(dir, "tree", "link")); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		src, in, dst string
		want         map[string]string
	}{
		{"a.txt", "", "x.txt", map[string]string{"/workspace/x.txt": "text"}},
		{"a.txt", "", "", map[string]string{"/workspace/a.txt": "text"}},
		{"a.txt", "", "dir", map[string]string{"/workspace/dir/a.txt": "text"}},
		{"a.txt", "", "new/", map[string]string{"/workspace/new/a.txt": "text"}},
		{"a.txt", "", "/tmp/x?&#é", map[string]string{"/tmp/x?&#é": "text"}},
		{"empty", "", "e", map[string]string{"/workspace/e": ""}},
		{"run.sh", "", "bin/go", map[string]string{"/workspace/bin/go": "#!"}},
		{"-", "from stdin", "s", map[string]string{"/workspace/s": "from stdin"}},
		{"tree", "", "fresh", map[string]string{"/workspace/fresh/sub/b": "b", "/workspace/fresh/c": "c", "/workspace/fresh/link": "-> sub/b"}},
		{"tree", "", "dir", map[string]string{"/workspace/dir/tree/sub/b": "b"}},
		{"tree/.", "", "dir", map[string]string{"/workspace/dir/sub/b": "b"}},
	} {
		src := tt.src
		if src != "-" {
			src = dir + "/" + src
		}
		if code, out, errs := f.cli(tt.in, "sandbox", "cp", src, id+":"+tt.dst); code != 0 || out != "" || errs != "" {
			t.Errorf("%s → %s: exit %d, %q, %q", tt.src, tt.dst, code, out, errs)
		}
		for name, want := range tt.want {
			if got, ok := f.files[name]; !ok || string(got) != want {
				t.Errorf("%s → %s: %s has %q, %v", tt.src, tt.dst, name, got, ok)
			}
		}
	}
	if m := f.modes["/workspace/bin/go"]; m != 0o755 {
		t.Errorf("a program's mode became %o", m)
	}
	big := filepath.Join(dir, "big")
	write(t, big, "", 0o644)
	if err := os.Truncate(big, 257<<20); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		args []string
		want string
	}{
		{[]string{filepath.Join(dir, "none"), id + ":x"}, "no such file"},
		{[]string{big, id + ":x"}, "a file has at most 256.0 MiB"},
		{[]string{dir, id + ":x"}, "an archive has at most 256.0 MiB"},
		{[]string{"-", id + ":x/"}, "has no name"},
		{[]string{"a", "b"}, "one side is a sandbox's"},
		{[]string{id + ":a", id + ":b"}, "one side is a sandbox's"},
		{[]string{filepath.Join(dir, "a.txt"), "sbxnone:x"}, "no such sandbox"},
	} {
		if code, _, errs := f.cli("", append([]string{"sandbox", "cp"}, tt.args...)...); code != 1 || !strings.Contains(errs, tt.want) {
			t.Errorf("%v: exit %d, %q", tt.args, code, errs)
		}
	}
}

func TestCpOut(t *testing.T) {
	f := newFakeAPI(t)
	id := f.sandbox()
	f.files["/workspace/a.txt"] = []byte("text")
	f.files["/workspace/dir/b"] = []byte("b")
	f.files["/workspace/dir/sub"] = nil
	f.files["/workspace/dir/sub/run"] = []byte("#!")
	f.modes["/workspace/dir/sub/run"] = 0o4111
	dir := t.TempDir()
	write(t, filepath.Join(dir, "old"), "old", 0o600)
	write(t, filepath.Join(dir, "there", "x"), "", 0o644)
	for _, tt := range []struct {
		src, dst string
		want     map[string]string
	}{
		{"a.txt", "new", map[string]string{"new": "text"}},
		{"a.txt", "old", map[string]string{"old": "text"}},
		{"a.txt", "there", map[string]string{"there/a.txt": "text"}},
		{"dir", "fresh", map[string]string{"fresh/b": "b", "fresh/sub/run": "#!"}},
		{"/workspace/dir/", "there", map[string]string{"there/dir/b": "b"}},
		{"dir/.", "there", map[string]string{"there/b": "b"}},
	} {
		if code, out, errs := f.cli("", "sandbox", "cp", id+":"+tt.src, dir+"/"+tt.dst); code != 0 || out != "" || errs != "" {
			t.Errorf("%s → %s: exit %d, %q, %q", tt.src, tt.dst, code, out, errs)
		}
		for name, want := range tt.want {
			if got, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(got) != want {
				t.Errorf("%s → %s: %s has %q, %v", tt.src, tt.dst, name, got, err)
			}
		}
	}
	for name, want := range map[string]fs.FileMode{"old": 0o600, "fresh/sub/run": 0o755} {
		if fi, err := os.Stat(filepath.Join(dir, name)); err != nil || fi.Mode() != want {
			t.Errorf("%s has mode %v, %v", name, fi.Mode(), err)
		}
	}
	if code, out, _ := f.cli("", "sandbox", "cp", id+":a.txt", "-"); code != 0 || out != "text" {
		t.Errorf("to stdout: exit %d, %q", code, out)
	}
	if code, out, _ := f.cli("", "sandbox", "cp", id+":dir", "-"); code != 0 || !strings.Contains(out, "ustar") {
		t.Errorf("a tar to stdout: exit %d, %.80q", code, out)
	}
	if code, _, errs := f.cli("", "sandbox", "cp", id+":none", dir+"/none"); code != 1 || !strings.Contains(errs, "it does not exist (not_found") {
		t.Errorf("exit %d, %q", code, errs)
	}
	if entries, _ := filepath.Glob(filepath.Join(dir, ".sandlot-*")); len(entries) > 0 {
		t.Errorf("left: %v", entries)
	}
}

// TestHostileArchive: a sandbox that packs its own tar writes nothing outside the directory here.
func TestHostileArchive(t *testing.T) {
	reg := func(name string, size int64) *tar.Header {
		return &tar.Header{Name: name, Typeflag: tar.TypeReg, Size: size, Mode: 0o6777}
	}
	link := func(name, to string) *tar.Header {
		return &tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: to}
	}
	for _, tt := range []struct {
		name    string
		members []*tar.Header
		fail    bool
	}{
		{"dots", []*tar.Header{reg("../canary", 4)}, true},
		{"dots within", []*tar.Header{reg("a/../../canary", 4)}, true},
		{"absolute", []*tar.Header{reg("/canary", 4)}, true},
		{"link out, then through it", []*tar.Header{link("l", ".."), reg("l/canary", 4)}, false},
		{"absolute link, then through it", []*tar.Header{link("l", "/"), reg("l/canary", 4)}, false},
		{"link to the canary, then its name", []*tar.Header{link("l", "../canary"), reg("l", 4)}, false},
		{"chain of links", []*tar.Header{link("a", "."), link("a/b", "a"), link("c", "a/../.."), reg("c/canary", 4)}, true},
		{"hard link", []*tar.Header{{Name: "h", Typeflag: tar.TypeLink, Linkname: "../canary"}, reg("h", 4)}, false},
		{"device and FIFO", []*tar.Header{{Name: "d", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 3}, {Name: "p", Typeflag: tar.TypeFifo}}, false},
		{"one name twice", []*tar.Header{reg("a", 4), reg("a", 4)}, false},
		{"set-user-id", []*tar.Header{reg("a", 4)}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			parent := t.TempDir()
			dir := filepath.Join(parent, "dir")
			if err := os.Mkdir(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			write(t, filepath.Join(parent, "canary"), "intact", 0o644)
			var b bytes.Buffer
			tw := tar.NewWriter(&b)
			for _, h := range tt.members {
				if err := tw.WriteHeader(h); err != nil {
					t.Fatal(err)
				}
				if h.Size > 0 {
					if _, err := tw.Write([]byte("evil")); err != nil {
						t.Fatal(err)
					}
				}
			}
			tw.Close()
			var warn bytes.Buffer
			_, _, err := unpackHere(&b, dir, &warn)
			if (err != nil) != tt.fail {
				t.Errorf("error %v", err)
			}
			if got, err := os.ReadFile(filepath.Join(parent, "canary")); err != nil || string(got) != "intact" {
				t.Errorf("the canary is %q, %v", got, err)
			}
			if entries, _ := os.ReadDir(parent); len(entries) != 2 {
				t.Errorf("beside the directory: %v", entries)
			}
			err = filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
				if err != nil {
					return err
				}
				if fi, err := d.Info(); err != nil || fi.Mode()&(fs.ModeSetuid|fs.ModeSetgid|fs.ModeDevice|fs.ModeNamedPipe) != 0 {
					t.Errorf("%s: %v, %v", p, fi.Mode(), err)
				}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	t.Run("endless", func(t *testing.T) {
		var b bytes.Buffer
		if err := tar.NewWriter(&b).WriteHeader(reg("a", 1<<40)); err != nil {
			t.Fatal(err)
		}
		if _, _, err := unpackHere(&b, t.TempDir(), &b); err == nil || !strings.Contains(err.Error(), "more than") {
			t.Errorf("error %v", err)
		}
	})
	t.Run("cut", func(t *testing.T) {
		var b bytes.Buffer
		tw := tar.NewWriter(&b)
		if err := tw.WriteHeader(reg("a", 1000)); err != nil {
			t.Fatal(err)
		}
		if _, _, err := unpackHere(&b, t.TempDir(), &b); err == nil {
			t.Error("no error")
		}
	})
}

func TestParseRemote(t *testing.T) {
	for in, want := range map[string]remotePath{
		"sbxabc:":         {"sbxabc", "."},
		"sbxabc:a:b":      {"sbxabc", "a:b"},
		"sbxabc:/etc/x":   {"sbxabc", "/etc/x"},
		"./sbxabc:x":      {},
		"sbxabc":          {},
		"C:x":             {},
		"-":               {},
		"../sbx:x":        {},
		"sbxABC:x":        {},
		"other123:/etc/x": {},
	} {
		if got, ok := parseRemote(in); got != want || ok != (want != remotePath{}) {
			t.Errorf("%q: %v, %v", in, got, ok)
		}
	}
}
