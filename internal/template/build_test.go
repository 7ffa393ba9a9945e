package template

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Children are this test binary: without this, each would sleep a second at its end for the race detector.
func TestMain(m *testing.M) {
	os.Setenv("GORACE", "atexit_sleep_ms=0 "+os.Getenv("GORACE"))
	os.Exit(m.Run())
}

// builder has what a real build needs, and fails the test on what it leaves.
type builder struct {
	t     *testing.T
	defs  string
	cache string
	store *Store
	log   bytes.Buffer
}

func newBuilder(t *testing.T) *builder {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("building a template needs root")
	}
	if _, err := exec.LookPath("mkfs.erofs"); err != nil {
		t.Skip("mkfs.erofs is not installed")
	}
	b := &builder{t: t, defs: t.TempDir(), cache: t.TempDir(), store: openStore(t)}
	t.Cleanup(func() {
		mounts, err := os.ReadFile("/proc/self/mountinfo")
		if err != nil || strings.Contains(string(mounts), b.cache) {
			t.Errorf("the build left a mount: %v", err)
		}
		if _, err := os.Lstat(filepath.Join(b.cache, "layers", newLayer)); !errors.Is(err, os.ErrNotExist) {
			t.Error("the build left a half-made layer")
		}
	})
	return b
}

func (b *builder) build(ctx context.Context, dir string) (image string, err error) {
	t, err := Build(ctx, dir, Options{CacheDir: b.cache, Store: b.store, Log: &b.log})
	return t.Image, err
}

// dump runs dump.erofs on one path of an image.
func dump(t *testing.T, image string, args ...string) string {
	t.Helper()
	out, err := exec.Command("dump.erofs", append(args, image)...).CombinedOutput()
	if err != nil {
		t.Errorf("dump.erofs %v: %v\n%s", args, err, out)
	}
	return string(out)
}

const filesOnly = `
description = "files only"
[[step]]
[[step.files]]
dest = "/opt/tree"
src = "tree"
owner = "user"
[[step.files]]
dest = "/opt/tree/link"
link = "a"
[[step]]
[[step.files]]
dest = "/opt/tree/a"
content = "second\n"
mode = "4755"
[[step.files]]
dest = "/var/log/x"
content = "gone"
`

func TestBuildFilesOnly(t *testing.T) {
	b := newBuilder(t)
	dir := define(t, b.defs, "files", filesOnly, map[string]string{"tree/a": "first\n", "tree/sub/b": strings.Repeat("x", 10_000)})
	image, err := b.build(t.Context(), dir)
	if err != nil {
		t.Fatalf("%v\n%s", err, &b.log)
	}
	if out, err := exec.Command("fsck.erofs", image).CombinedOutput(); err != nil {
		t.Errorf("fsck.erofs: %v\n%s", err, out)
	}
	// dump.erofs prints no more than the nine permission bits: look for set-uid in the layer.
	layers, err := filepath.Glob(filepath.Join(b.cache, "layers/*/opt/tree/a"))
	if err != nil || len(layers) != 2 {
		t.Errorf("%d layers have the file, want both steps': %v", len(layers), err)
	}
	setuid := 0
	for _, p := range layers {
		if info, err := os.Lstat(p); err == nil && info.Mode()&os.ModeSetuid != 0 {
			setuid++
		}
	}
	if setuid != 1 {
		t.Errorf("%d of the files are set-uid, want the second step's", setuid)
	}
	a := dump(t, image, "--path=/opt/tree/a")
	if !strings.Contains(a, "Size: 7") || !strings.Contains(a, "Uid: 0") || !strings.Contains(a, "Access: 0755") {
		t.Errorf("/opt/tree/a is not the second step's:\n%s", a)
	}
	for p, want := range map[string]string{
		"/opt/tree/sub/b":        "Uid: 1000",
		"/opt/tree/link":         "symlink",
		"/home/user":             "Uid: 1000",
		"/workspace":             "Uid: 1000",
		"/tmp":                   "Access: 0777",
		"/.sandlot":              "Access: 0755",
		"/proc":                  "Access: 0555",
		"/etc/machine-id":        "Size: 0",
		"/etc/resolv.conf":       "Size: 0",
		"/etc/hostname":          "Size: 8",
		"/etc/sudoers.d/sandlot": "Access: 0440",
		"/etc/passwd":            "Uid: 0",
	} {
		if out := dump(t, image, "--path="+p); !strings.Contains(out, want) {
			t.Errorf("%s lacks %q:\n%s", p, want, out)
		}
	}
	if out, err := exec.Command("dump.erofs", "--path=/var/log/x", image).CombinedOutput(); err == nil && strings.Contains(string(out), "Size:") {
		t.Errorf("a log stayed:\n%s", out)
	}

	// Again: nothing to do, and quickly. From nothing, elsewhere: the same bytes.
	began := time.Now()
	again, err := b.build(t.Context(), dir)
	if err != nil || again != image {
		t.Errorf("again: %s, %v", again, err)
	}
	if took := time.Since(began); took > time.Second {
		t.Errorf("a build with nothing changed took %v", took)
	}
	other := newBuilder(t)
	dir = define(t, other.defs, "files", filesOnly, map[string]string{"tree/a": "first\n", "tree/sub/b": strings.Repeat("x", 10_000)})
	elsewhere, err := other.build(t.Context(), dir)
	if err != nil || filepath.Base(elsewhere) != filepath.Base(image) {
		t.Errorf("another build of the same: %s, %v; want %s", elsewhere, err, image)
	}
}

// A new description makes a new manifest and no new image; a change in the second step keeps the first.
func TestBuildDoesOnlyWhatChanged(t *testing.T) {
	b := newBuilder(t)
	files := map[string]string{"tree/a": "1"}
	dir := define(t, b.defs, "x", filesOnly, files)
	first, err := b.build(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	define(t, b.defs, "x", strings.Replace(filesOnly, "files only", "described", 1), files)
	b.log.Reset()
	described, err := b.build(t.Context(), dir)
	if err != nil || described != first || strings.Contains(b.log.String(), "image") {
		t.Errorf("another description: %s, %v\n%s", described, err, &b.log)
	}
	if got, err := b.store.Get("x"); err != nil || got.Description != "described" {
		t.Errorf("Get = %+v, %v", got, err)
	}
	define(t, b.defs, "x", strings.Replace(filesOnly, "second", "third!", 1), files)
	b.log.Reset()
	changed, err := b.build(t.Context(), dir)
	if err != nil || changed == first {
		t.Errorf("another file: %s, %v", changed, err)
	}
	if !strings.Contains(b.log.String(), "[2/5] files, 2: cached") {
		t.Errorf("the first files step was not cached:\n%s", &b.log)
	}
	define(t, b.defs, "x", filesOnly, files)
	b.log.Reset()
	if back, err := b.build(t.Context(), dir); err != nil || back != first || strings.Contains(b.log.String(), "image") {
		t.Errorf("back to the first: %s, %v\n%s", back, err, &b.log)
	}
}

func TestBuildFailureNamesTheStepAndLeavesNothing(t *testing.T) {
	b := newBuilder(t)
	for name, tt := range map[string]struct{ text, want string }{
		// An image of files alone has no shell.
		"command":          {"[[step]]\nrun = 'true'", "step run true"},
		"file over folder": {"[[step]]\n[[step.files]]\ndest = '/a/b'\ncontent = ''\n[[step.files]]\ndest = '/a'\ncontent = ''", "step files, 2"},
		"below a file":     {"[[step]]\n[[step.files]]\ndest = '/a'\ncontent = ''\n[[step.files]]\ndest = '/a/b'\ncontent = ''", "step files, 2"},
	} {
		_, err := b.build(t.Context(), define(t, b.defs, "x", tt.text, nil))
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: error %v, want one with %q", name, err, tt.want)
		}
	}
	if list, err := b.store.List(); err != nil || len(list) != 0 {
		t.Errorf("failed builds left %+v, %v", list, err)
	}
	if blobs, err := os.ReadDir(filepath.Join(b.store.dir, "blobs")); err != nil || len(blobs) != 0 {
		t.Errorf("failed builds left %v, %v", blobs, err)
	}
	small := define(t, b.defs, "small", filesOnly, map[string]string{"tree/a": "1"})
	if _, err := Build(t.Context(), small, Options{CacheDir: b.cache, Store: b.store, MaxImageBytes: 4096}); err == nil {
		t.Error("an image over its limit was kept")
	}
	if blobs, err := os.ReadDir(filepath.Join(b.store.dir, "blobs")); err != nil || len(blobs) != 0 {
		t.Errorf("an image over its limit left %v, %v", blobs, err)
	}
}

// A link that one step leaves cannot lead the next step, or the end of the build, to the host's files.
func TestBuildLinksStayInside(t *testing.T) {
	b := newBuilder(t)
	host := t.TempDir()
	victim := filepath.Join(host, "victim")
	if err := os.WriteFile(victim, []byte("host"), 0o600); err != nil {
		t.Fatal(err)
	}
	text := `
[[step]]
[[step.files]]
dest = "` + host + `"
dir = true
[[step.files]]
dest = "/opt/out"
link = "` + host + `"
[[step.files]]
dest = "/opt/up"
link = "../../../../../../../../.."
[[step.files]]
dest = "/etc/hostname"
link = "` + victim + `"
[[step.files]]
dest = "/run"
link = "` + host + `"
[[step]]
[[step.files]]
dest = "/opt/out/victim"
content = "guest"
[[step.files]]
dest = "/opt/up` + host + `/second"
content = "guest"
`
	image, err := b.build(t.Context(), define(t, b.defs, "links", text, nil))
	if err != nil {
		t.Fatalf("%v\n%s", err, &b.log)
	}
	if data, err := os.ReadFile(victim); err != nil || string(data) != "host" {
		t.Errorf("the host's file now holds %q, %v", data, err)
	}
	if entries, err := os.ReadDir(host); err != nil || len(entries) != 1 {
		t.Errorf("the host's folder now holds %v, %v", entries, err)
	}
	// The links were followed, inside the image.
	for _, p := range []string{victim, filepath.Join(host, "second")} {
		if out := dump(t, image, "--path="+p); !strings.HasPrefix(p, "/tmp/") && !strings.Contains(out, "Size: 5") {
			t.Errorf("%s in the image:\n%s", p, out)
		}
	}
}

func TestBuildStopsWithItsContext(t *testing.T) {
	b := newBuilder(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := b.build(ctx, define(t, b.defs, "x", filesOnly, map[string]string{"tree/a": "1"})); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
}
