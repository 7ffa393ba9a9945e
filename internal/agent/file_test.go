package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"sandlot"
	"sandlot/internal/guest"
	"sandlot/internal/wire"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

func at(path string) guest.At { return guest.At{Path: path} }

func (b *box) put(t testing.TB, path, content string) {
	t.Helper()
	if err := b.PutContent(t.Context(), at(path), strings.NewReader(content), int64(len(content))); err != nil {
		t.Fatalf("put %s: %v", path, err)
	}
}

func (b *box) get(t testing.TB, path, rng string) (string, *guest.Content) {
	t.Helper()
	c, err := b.Content(t.Context(), at(path), rng)
	if err != nil {
		t.Fatalf("get %s: %v", path, err)
	}
	defer func() { _ = c.Close() }()
	body, err := io.ReadAll(c)
	if err != nil {
		t.Fatalf("get %s: %v", path, err)
	}
	return string(body), c
}

// host is the file's name outside.
func (b *box) outside(path string) string { return filepath.Join(b.root, path) }

// ADVERSARIAL 1: every path form, on every operation.
func TestPathForms(t *testing.T) {
	b := start(t)
	canary := filepath.Join(t.TempDir(), "canary")
	if err := os.WriteFile(canary, []byte("canary"), 0o600); err != nil {
		t.Fatal(err)
	}
	rel, _ := filepath.Rel(b.outside("workspace"), canary)
	bad := []string{
		"", "..", "../", "../x", rel, "a/../../b", "a/..", "/..", "/../x", "a/b/..", "./..",
		"nul\x00byte", "\xc0\xae\xc0\xae/x", "bad\xff", strings.Repeat("a/", 2048) + "a", strings.Repeat("c", 256),
	}
	ctx := t.Context()
	for _, p := range bad {
		for op, f := range map[string]func() error{
			"list":   func() error { _, err := b.List(ctx, at(p), "", 0); return err },
			"stat":   func() error { _, err := b.Stat(ctx, at(p)); return err },
			"get":    func() error { _, err := b.Content(ctx, at(p), ""); return err },
			"put":    func() error { return b.PutContent(ctx, at(p), strings.NewReader("x"), 1) },
			"delete": func() error { return b.Delete(ctx, at(p), true) },
			"mkdir":  func() error { return b.Mkdir(ctx, at(p)) },
			"move":   func() error { return b.Move(ctx, at(p), "x") },
			"to":     func() error { return b.Move(ctx, at("x"), p) },
			"tar":    func() error { _, err := b.ArchiveGet(ctx, at(p), false); return err },
			"untar":  func() error { return b.ArchivePut(ctx, at(p), strings.NewReader(""), 0, false) },
			"watch":  func() error { _, err := b.Watch(ctx, at(p), false); return err },
		} {
			if err := f(); sandlot.ErrorCode(err) != sandlot.CodeInvalidRequest {
				t.Errorf("%s of %.40q: %v", op, p, err)
			}
		}
	}
	if readFile(t, canary) != "canary" {
		t.Error("the canary changed")
	}
	for _, p := range []string{"%2e%2e%2fx", "..x", "a..", "...", "é", "a b", "-rf", "a\nb", "//workspace//y", "./z"} {
		b.put(t, p, "1")
		if got, _ := b.get(t, p, ""); got != "1" {
			t.Errorf("%q: %q", p, got)
		}
	}
	for _, p := range []string{".", "/", "/workspace", "/workspace/"} {
		wantCode(t, b.Delete(ctx, at(p), true), sandlot.CodeInvalidRequest)
		wantCode(t, b.Move(ctx, at(p), "/tmp/x"), sandlot.CodeInvalidRequest)
		wantCode(t, b.PutContent(ctx, at(p), strings.NewReader("x"), 1), sandlot.CodeInvalidRequest)
	}
}

// Where a directory stands for "/", no link leads out of it.
func TestLinksOutside(t *testing.T) {
	b := start(t)
	out := t.TempDir()
	if err := os.WriteFile(filepath.Join(out, "secret"), []byte("canary"), 0o600); err != nil {
		t.Fatal(err)
	}
	must(t, os.Symlink(out, b.outside("workspace/out")))
	must(t, os.Symlink(filepath.Join(out, "secret"), b.outside("workspace/file")))
	must(t, os.Symlink("../../../../../../../../../.."+out, b.outside("workspace/rel")))
	ctx := t.Context()
	for _, p := range []string{"out/secret", "file", "rel/secret"} {
		if c, err := b.Content(ctx, at(p), ""); err == nil {
			t.Errorf("%s was read", p)
			_ = c.Close()
		}
	}
	for _, p := range []string{"out/new", "rel/new"} {
		if err := b.PutContent(ctx, at(p), strings.NewReader("x"), 1); err == nil {
			t.Errorf("%s was written", p)
		}
		if err := b.Mkdir(ctx, at(p)); err == nil {
			t.Errorf("%s was made", p)
		}
	}
	if _, err := b.List(ctx, at("out"), "", 0); err == nil {
		t.Error("listed through a link")
	}
	b.put(t, "file", "replaced") // the link, not what it named
	if got := readFile(t, filepath.Join(out, "secret")); got != "canary" {
		t.Errorf("the canary is %q", got)
	}
	if e, _ := os.ReadDir(out); len(e) != 1 {
		t.Errorf("outside are %d files", len(e))
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// ADVERSARIAL 3: nothing blocks, nothing never ends.
func TestSpecialFiles(t *testing.T) {
	b := start(t)
	must(t, syscall.Mkfifo(b.outside("workspace/fifo"), 0o666))
	l, err := net.Listen("unix", b.outside("workspace/sock"))
	must(t, err)
	defer func() { _ = l.Close() }()
	must(t, os.WriteFile(b.outside("workspace/huge"), nil, 0o600))
	must(t, os.Truncate(b.outside("workspace/huge"), 1<<42))
	names := []string{"fifo", "sock", "."}
	if os.Getuid() == 0 && syscall.Mknod(b.outside("workspace/zero"), syscall.S_IFCHR|0o666, 1<<8|5) == nil {
		names = append(names, "zero")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for _, n := range names {
		_, err := b.Content(ctx, at(n), "")
		wantCode(t, err, sandlot.CodeInvalidRequest)
		wantCode(t, b.PutContent(ctx, at(n), strings.NewReader("x"), 1), sandlot.CodeInvalidRequest)
		if n != "." {
			_, err = b.List(ctx, at(n), "", 0)
			wantCode(t, err, sandlot.CodeInvalidRequest)
			_, err = b.ArchiveGet(ctx, at(n), false)
			wantCode(t, err, sandlot.CodeInvalidRequest)
			_, err = b.Watch(ctx, at(n), false)
			wantCode(t, err, sandlot.CodeInvalidRequest)
		}
	}
	_, err = b.Content(ctx, at("huge"), "")
	wantCode(t, err, sandlot.CodeTooLarge)
	if got, c := b.get(t, "huge", "bytes=1099511627776-1099511627779"); got != "\x00\x00\x00\x00" || c.Total != 1<<42 {
		t.Errorf("got %q of %d", got, c.Total)
	}
	_, err = b.Content(ctx, at("huge"), "bytes=0-")
	wantCode(t, err, sandlot.CodeTooLarge)
	fi, err := b.Stat(ctx, at("fifo"))
	if err != nil || fi.Type != "fifo" {
		t.Errorf("stat %+v, %v", fi, err)
	}
}

func TestContent(t *testing.T) {
	b := start(t)
	b.put(t, "new/dir/f", "hello world")
	if st, err := os.Stat(b.outside("workspace/new/dir/f")); err != nil || st.Mode().Perm() != 0o644 {
		t.Errorf("mode %v, %v", st.Mode(), err)
	}
	must(t, os.Chmod(b.outside("workspace/new/dir/f"), 0o751))
	b.put(t, "/workspace/new/dir/f", "0123456789")
	if st, _ := os.Stat(b.outside("workspace/new/dir/f")); st.Mode().Perm() != 0o751 {
		t.Errorf("the mode was not kept: %v", st.Mode())
	}
	for rng, want := range map[string]string{
		"": "0123456789", "bytes=0-0": "0", "bytes=2-4": "234", "bytes=7-": "789", "bytes=-3": "789", "bytes=-99": "0123456789", "bytes=5-99": "56789",
	} {
		got, c := b.get(t, "new/dir/f", rng)
		if got != want || c.Size != int64(len(want)) || c.Partial != (rng != "") || c.Total != 10 {
			t.Errorf("%q: got %q, %+v", rng, got, c)
		}
	}
	for _, rng := range []string{"bytes=10-", "bytes=4-2", "bytes=0-1,3-4", "lines=1-2", "bytes=", "bytes=-", "bytes=-0", "bytes=a-b", "bytes=-1-2", "bytes=99999999999999999999-"} {
		_, err := b.Content(t.Context(), at("new/dir/f"), rng)
		wantCode(t, err, sandlot.CodeRange)
	}
	b.put(t, "empty", "")
	if got, _ := b.get(t, "empty", ""); got != "" {
		t.Errorf("empty is %q", got)
	}
	must(t, b.PutContent(t.Context(), at("unsized"), io.MultiReader(strings.NewReader("a"), strings.NewReader("b")), -1))
	if got, _ := b.get(t, "unsized", ""); got != "ab" {
		t.Errorf("unsized is %q", got)
	}
	_, err := b.Content(t.Context(), at("missing"), "")
	wantCode(t, err, sandlot.CodeNotFound)
	_, err = b.Content(t.Context(), at("empty/below"), "")
	wantCode(t, err, sandlot.CodeNotFound)
	wantCode(t, b.PutContent(t.Context(), at("empty/below"), strings.NewReader("x"), 1), sandlot.CodeConflict)
	err = b.PutContent(t.Context(), at("big"), strings.NewReader("x"), sandlot.MaxFileBytes+1)
	wantCode(t, err, sandlot.CodeTooLarge)
}

// The agent keeps the limit itself, whether the size was told or not, and leaves nothing behind.
func TestPutLimits(t *testing.T) {
	b := start(t)
	err := b.PutContent(t.Context(), at("flood"), io.LimitReader(zeros{}, sandlot.MaxFileBytes+2), -1)
	wantCode(t, err, sandlot.CodeTooLarge)
	ctx, cancel := context.WithCancel(t.Context())
	pr, pw := io.Pipe()
	done := make(chan error, 1)
	go func() { done <- b.PutContent(ctx, at("aborted"), pr, 1000) }()
	_, _ = pw.Write([]byte("some"))
	eventually(t, "the temporary file", func() bool { return len(names(t, b.outside("workspace"))) == 1 })
	cancel()
	_ = pw.CloseWithError(errors.New("client gone"))
	if err := <-done; err == nil {
		t.Error("no error")
	}
	eventually(t, "no temporary file", func() bool { return len(names(t, b.outside("workspace"))) == 0 })
}

func names(t testing.TB, dir string) []string {
	t.Helper()
	e, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, x := range e {
		out = append(out, x.Name())
	}
	return out
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

func TestDiskFull(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: needs root, to mount a small filesystem")
	}
	b := start(t)
	dir := b.outside("workspace/small")
	must(t, os.Mkdir(dir, 0o755))
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=1m,nr_inodes=64"); err != nil {
		t.Skipf("SKIPPED: mount: %v", err)
	}
	defer func() { _ = syscall.Unmount(dir, syscall.MNT_DETACH) }()
	wantCode(t, b.PutContent(t.Context(), at("small/f"), io.LimitReader(zeros{}, 4<<20), 4<<20), sandlot.CodeDiskFull)
	var tarball bytes.Buffer
	writeTar(t, &tarball, tarFile("a", strings.Repeat("x", 3<<20)))
	wantCode(t, b.ArchivePut(t.Context(), at("small"), &tarball, -1, false), sandlot.CodeDiskFull)
	if n := names(t, dir); len(n) != 0 {
		t.Errorf("left: %v", n)
	}
	b.put(t, "small/f", "fits")
	must(t, b.Move(t.Context(), at("small/f"), "moved")) // to another filesystem
	if got, _ := b.get(t, "moved", ""); got != "fits" {
		t.Errorf("moved is %q", got)
	}
}

func TestStreamingIsBounded(t *testing.T) {
	b := start(t)
	const size = 200 << 20
	peak := watchHeap(t)
	must(t, b.PutContent(t.Context(), at("big"), io.LimitReader(zeros{}, size), size))
	c, err := b.Content(t.Context(), at("big"), "")
	must(t, err)
	n, err := io.Copy(io.Discard, c)
	_ = c.Close()
	if n != size || err != nil {
		t.Errorf("%d bytes, %v", n, err)
	}
	if p := peak(); p > 16<<20 {
		t.Errorf("the heap grew by %d bytes", p)
	}
}

// watchHeap returns a function that tells by how much the heap had grown at most.
func watchHeap(t testing.TB) func() int64 {
	t.Helper()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	base, most := int64(m.HeapAlloc), int64(0)
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			runtime.ReadMemStats(&m)
			most = max(most, int64(m.HeapAlloc)-base)
			select {
			case <-stop:
				return
			case <-time.After(5 * time.Millisecond):
			}
		}
	}()
	return func() int64 { close(stop); <-done; return most }
}

func TestListStatMkdirMoveDelete(t *testing.T) {
	b := start(t)
	ctx := t.Context()
	must(t, b.Mkdir(ctx, at("d/e")))
	must(t, b.Mkdir(ctx, at("d/e")))
	b.put(t, "d/f", "12345")
	must(t, os.Symlink("f", b.outside("workspace/d/l")))
	l, err := b.List(ctx, at("d"), "", 0)
	must(t, err)
	want := wire.FileList{Path: "/workspace/d", Entries: []wire.FileInfo{
		{Name: "e", Path: "/workspace/d/e", Type: "dir", Mode: "0755"},
		{Name: "f", Path: "/workspace/d/f", Type: "file", Size: 5, Mode: "0644"},
		{Name: "l", Path: "/workspace/d/l", Type: "symlink", Size: 1, Mode: "0777", Target: "f"},
	}}
	ignore := cmpopts.IgnoreFields(wire.FileInfo{}, "ModTime", "User", "Group")
	sizes := cmp.FilterPath(func(p cmp.Path) bool { return p.String() == "Entries.Size" }, cmp.Comparer(func(a, b int64) bool { return a == b || a == 0 || b == 0 }))
	if d := cmp.Diff(want, l, ignore, sizes); d != "" {
		t.Errorf("list (-want +got):\n%s", d)
	}
	wantCode(t, b.Mkdir(ctx, at("d/f")), sandlot.CodeConflict)
	wantCode(t, b.Mkdir(ctx, at("d/f/g")), sandlot.CodeConflict)
	wantCode(t, b.Delete(ctx, at("d"), false), sandlot.CodeConflict)
	wantCode(t, b.Delete(ctx, at("nope"), true), sandlot.CodeNotFound)
	must(t, b.Move(ctx, at("d/f"), "d/g"))
	wantCode(t, b.Move(ctx, at("d/f"), "d/g"), sandlot.CodeNotFound)
	wantCode(t, b.Move(ctx, at("d/g"), "no/dir"), sandlot.CodeNotFound)
	must(t, b.Delete(ctx, at("d/g"), false))
	must(t, b.Delete(ctx, at("d"), true))
	_, err = b.Stat(ctx, at("d"))
	wantCode(t, err, sandlot.CodeNotFound)
	_, err = b.List(ctx, at("d"), "", 0)
	wantCode(t, err, sandlot.CodeNotFound)

	// Pages.
	for i := range 2500 {
		must(t, os.WriteFile(b.outside(fmt.Sprintf("tmp/%04d", i)), nil, 0o600))
	}
	var all []string
	for after := ""; ; {
		l, err := b.List(ctx, at("/tmp"), after, 0)
		must(t, err)
		for _, e := range l.Entries {
			all = append(all, e.Name)
		}
		if after = l.Next; after == "" {
			break
		}
	}
	if len(all) != 2500 || all[0] != "0000" || all[2499] != "2499" {
		t.Errorf("%d names", len(all))
	}
	if l, err := b.List(ctx, at("/tmp"), "0009", 2); err != nil || len(l.Entries) != 2 || l.Entries[0].Name != "0010" || l.Next != "0011" {
		t.Errorf("got %+v, %v", l, err)
	}
}

func TestWatch(t *testing.T) {
	b := start(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	must(t, os.MkdirAll(b.outside("workspace/w/sub"), 0o755))
	w, err := b.Watch(ctx, at("w"), true)
	must(t, err)
	defer w.Close()
	seen := make(chan wire.FileEvent, 100)
	go func() {
		for {
			ev, ok, err := w.Next()
			if err != nil {
				close(seen)
				return
			}
			if ok {
				seen <- ev
			}
		}
	}()
	wait := func(op, path string) {
		t.Helper()
		for {
			select {
			case ev := <-seen:
				if ev.Op == op && ev.Path == path {
					return
				}
			case <-time.After(5 * time.Second):
				t.Fatalf("no %s of %s", op, path)
			}
		}
	}
	must(t, os.WriteFile(b.outside("workspace/w/sub/f"), []byte("x"), 0o600))
	wait("write", "/workspace/w/sub/f")
	must(t, os.MkdirAll(b.outside("workspace/w/new/deep"), 0o755))
	wait("create", "/workspace/w/new/deep")
	eventually(t, "the new directory watched", func() bool {
		must(t, os.WriteFile(b.outside("workspace/w/new/deep/g"), []byte("x"), 0o600))
		select {
		case ev := <-seen:
			return strings.HasSuffix(ev.Path, "/g")
		case <-time.After(20 * time.Millisecond):
			return false
		}
	})
	must(t, os.Remove(b.outside("workspace/w/sub/f")))
	wait("remove", "/workspace/w/sub/f")
	cancel()
	for range seen {
	}
	eventually(t, "the watch's end", func() bool { return b.a.watches.Load() == 0 })

	// There is a limit, and it counts the open ones.
	var open []*guest.WatchStream
	for range maxWatches {
		w, err := b.Watch(t.Context(), at("w"), false)
		must(t, err)
		open = append(open, w)
	}
	_, err = b.Watch(t.Context(), at("w"), false)
	wantCode(t, err, sandlot.CodeRateLimited)
	for _, w := range open {
		w.Close()
	}
	eventually(t, "room again", func() bool { return b.a.watches.Load() == 0 })
}
