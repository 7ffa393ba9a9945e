package agent

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"sandlot"
	"sandlot/internal/guest"
)

type entry struct {
	h    tar.Header
	body string
}

func tarFile(name, body string) entry {
	return entry{tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(body))}, body}
}

func tarLink(kind byte, name, to string) entry {
	return entry{tar.Header{Name: name, Typeflag: kind, Linkname: to, Mode: 0o777}, ""}
}

func tarDir(name string) entry {
	return entry{tar.Header{Name: name, Typeflag: tar.TypeDir, Mode: 0o755}, ""}
}

func writeTar(t testing.TB, w io.Writer, entries ...entry) {
	t.Helper()
	tw := tar.NewWriter(w)
	for _, e := range entries {
		must(t, tw.WriteHeader(&e.h))
		_, err := io.WriteString(tw, e.body)
		must(t, err)
	}
	must(t, tw.Close())
}

func makeTar(t testing.TB, entries ...entry) []byte {
	t.Helper()
	var b bytes.Buffer
	writeTar(t, &b, entries...)
	return b.Bytes()
}

// rawHeader is a header that archive/tar would not write: the block's fields as given, with a right checksum.
func rawHeader(name string, size string, kind byte) []byte {
	h := make([]byte, 512)
	copy(h, name)
	copy(h[100:], "0000644\x00")
	copy(h[108:], "0000000\x00")
	copy(h[116:], "0000000\x00")
	copy(h[124:], size)
	copy(h[136:], "00000000000\x00")
	h[156] = kind
	copy(h[257:], "ustar\x0000")
	copy(h[148:], "        ")
	sum := 0
	for _, c := range h {
		sum += int(c)
	}
	copy(h[148:], fmt.Sprintf("%06o\x00 ", sum))
	return h
}

// withPAX appends to an archive a member whose extended header says more than archive/tar would write.
func withPAX(b []byte, records ...string) []byte {
	var x string
	for _, r := range records {
		n := len(r) + 3
		for len(fmt.Sprintf("%d %s\n", n, r)) != n {
			n++
		}
		x += fmt.Sprintf("%d %s\n", n, r)
	}
	b = append(b[:len(b)-1024:len(b)-1024], rawHeader("pax", fmt.Sprintf("%011o\x00", len(x)), 'x')...)
	b = append(b, x...)
	b = append(b, make([]byte, 512-len(x)%512)...)
	b = append(b, rawHeader("innocent", "00000000001\x00", '0')...)
	b = append(b, make([]byte, 512)...)
	return append(b, tarEnd...)
}

var tarEnd = make([]byte, 1024)

func gz(t testing.TB, b []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	z := gzip.NewWriter(&out)
	_, err := z.Write(b)
	must(t, err)
	must(t, z.Close())
	return out.Bytes()
}

// snapshot is all that a directory holds, as text.
func snapshot(t testing.TB, dir string) string {
	t.Helper()
	var b strings.Builder
	err := filepath.Walk(dir, func(p string, st os.FileInfo, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(dir, p)
		fmt.Fprintf(&b, "%s %s", rel, st.Mode())
		if st.Mode().IsRegular() {
			fmt.Fprintf(&b, " %q", readFile(t, p))
		}
		if st.Mode()&os.ModeSymlink != 0 {
			to, _ := os.Readlink(p)
			b.WriteString(" -> " + to)
		}
		b.WriteByte('\n')
		return nil
	})
	must(t, err)
	return b.String()
}

// ADVERSARIAL 4: each is refused with the member's index, and the target is as it was.
func TestHostileArchives(t *testing.T) {
	b := start(t)
	ok := tarFile("ok", "fine")
	suid := tarFile("su", "x")
	suid.h.Mode = 0o4755
	whole := makeTar(t, ok, tarFile("b", strings.Repeat("x", 2000)))
	tests := []struct {
		name   string
		tar    []byte
		member int
		code   sandlot.Code
	}{
		{"absolute", makeTar(t, ok, tarFile("/abs", "x")), 1, sandlot.CodeInvalidRequest},
		{"dots", makeTar(t, ok, tarFile("../x", "x")), 1, sandlot.CodeInvalidRequest},
		{"dots inside", makeTar(t, ok, tarFile("a/../../x", "x")), 1, sandlot.CodeInvalidRequest},
		{"dots at the end", makeTar(t, ok, tarDir("a/..")), 1, sandlot.CodeInvalidRequest},
		{"written through a link", makeTar(t, ok, tarLink(tar.TypeSymlink, "l", "/tmp"), tarFile("l/x", "x")), 2, sandlot.CodeInvalidRequest},
		{"written over a link", makeTar(t, ok, tarLink(tar.TypeSymlink, "l", "/tmp/x"), tarFile("l", "x")), 2, sandlot.CodeInvalidRequest},
		{"through a chain of links", makeTar(t, tarLink(tar.TypeSymlink, "a", "."), tarLink(tar.TypeSymlink, "a/b", "..")), 1, sandlot.CodeInvalidRequest},
		{"hard link outside", makeTar(t, ok, tarLink(tar.TypeLink, "h", "../../etc/passwd")), 1, sandlot.CodeInvalidRequest},
		{"hard link absolute", makeTar(t, ok, tarLink(tar.TypeLink, "h", "/etc/passwd")), 1, sandlot.CodeInvalidRequest},
		{"hard link to nothing", makeTar(t, ok, tarLink(tar.TypeLink, "h", "later"), tarFile("later", "")), 1, sandlot.CodeInvalidRequest},
		{"hard link to a link", makeTar(t, ok, tarLink(tar.TypeSymlink, "l", "/etc/passwd"), tarLink(tar.TypeLink, "h", "l")), 2, sandlot.CodeInvalidRequest},
		{"character device", makeTar(t, ok, entry{tar.Header{Name: "c", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 5}, ""}), 1, sandlot.CodeInvalidRequest},
		{"block device", makeTar(t, ok, entry{tar.Header{Name: "c", Typeflag: tar.TypeBlock}, ""}), 1, sandlot.CodeInvalidRequest},
		{"FIFO", makeTar(t, ok, entry{tar.Header{Name: "c", Typeflag: tar.TypeFifo}, ""}), 1, sandlot.CodeInvalidRequest},
		{"set-user-id", makeTar(t, ok, suid), 1, sandlot.CodeInvalidRequest},
		{"the same name twice", makeTar(t, ok, tarFile("./ok", "other")), 1, sandlot.CodeInvalidRequest},
		{"below a file", makeTar(t, ok, tarFile("ok/x", "")), 1, sandlot.CodeInvalidRequest},
		{"PAX path", withPAX(makeTar(t, ok), "path=../../evil"), 1, sandlot.CodeInvalidRequest},
		{"PAX sparse", withPAX(makeTar(t, ok), "GNU.sparse.map=0,1", "GNU.sparse.numblocks=1", "GNU.sparse.size=1"), 1, sandlot.CodeInvalidRequest},
		{"GNU sparse", append(append(makeTar(t, ok)[:1024], rawHeader("s", "00000000000\x00", 'S')...), tarEnd...), 1, sandlot.CodeInvalidRequest},
		{"unknown kind", append(append(makeTar(t, ok)[:1024], rawHeader("s", "00000000000\x00", 'Z')...), tarEnd...), 1, sandlot.CodeInvalidRequest},
		{"negative size", append(append(makeTar(t, ok)[:1024], rawHeader("s", "\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", '0')...), tarEnd...), 1, sandlot.CodeInvalidRequest},
		{"huge size", append(append(makeTar(t, ok)[:1024], rawHeader("s", "\x80\x00\x00\x00\x7f\xff\xff\xff\xff\xff\xff\xff", '0')...), tarEnd...), 1, sandlot.CodeTooLarge},
		{"truncated content", whole[:1024+512+700], 1, sandlot.CodeInvalidRequest},
		{"truncated header", whole[:1024+100], 1, sandlot.CodeInvalidRequest},
		{"no end mark", whole[:1024], 1, sandlot.CodeInvalidRequest},
		{"nothing", nil, 0, sandlot.CodeInvalidRequest},
		{"not tar", bytes.Repeat([]byte("garbage "), 512), 0, sandlot.CodeInvalidRequest},
		{"name of 256 bytes", makeTar(t, ok, tarFile(strings.Repeat("n", 256), "")), 1, sandlot.CodeInvalidRequest},
		{"empty name", append(rawHeader("", "00000000000\x00", '0'), tarEnd...), 0, sandlot.CodeInvalidRequest},
		{"a file where a directory is", makeTar(t, tarFile("new", "x"), tarFile("kept", "x")), 1, sandlot.CodeConflict},
		{"through the target's link", makeTar(t, tarFile("new", "x"), tarFile("link/x", "x")), 1, sandlot.CodeConflict},
	}
	target := b.outside("workspace/target")
	must(t, os.MkdirAll(filepath.Join(target, "kept/inner"), 0o755))
	must(t, os.WriteFile(filepath.Join(target, "ok"), []byte("old"), 0o600))
	must(t, os.Symlink(b.outside("tmp"), filepath.Join(target, "link")))
	before := snapshot(t, b.outside("/"))
	for _, tt := range tests {
		for _, zip := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/gzip=%v", tt.name, zip), func(t *testing.T) {
				body := tt.tar
				if zip {
					body = gz(t, body)
				}
				err := b.ArchivePut(t.Context(), at("target"), bytes.NewReader(body), int64(len(body)), zip)
				wantCode(t, err, tt.code)
				var e *sandlot.Error
				if errors.As(err, &e) && e.Fields["member"] != int64(tt.member) {
					t.Errorf("fields %v, want member %d: %v", e.Fields, tt.member, err)
				}
				if tt.code == sandlot.CodeConflict {
					return // these need the target as it is
				}
				if err := b.ArchivePut(t.Context(), at("absent"), bytes.NewReader(body), int64(len(body)), zip); err == nil {
					t.Error("accepted into a new directory")
				}
			})
		}
	}
	if after := snapshot(t, b.outside("/")); after != before {
		t.Errorf("the sandbox changed:\n%s\nwas:\n%s", after, before)
	}
}

// Masses of empty members and a thousandfold gzip are cut off while they come.
func TestArchiveBombs(t *testing.T) {
	b := start(t)
	b.a.limits = limits{members: 2000, bytes: 1 << 20}
	heap := watchHeap(t)
	send := func(write func(w io.Writer)) error {
		pr, pw := io.Pipe()
		go func() {
			z, _ := gzip.NewWriterLevel(pw, gzip.BestSpeed)
			write(z)
			_ = pw.CloseWithError(z.Close())
		}()
		defer func() { _ = pr.Close() }()
		return b.ArchivePut(t.Context(), at("bomb"), pr, -1, true)
	}
	h := rawHeader("d/", "00000000000\x00", '5')
	block := bytes.Repeat(h, 100)
	err := send(func(w io.Writer) {
		for range 300 { // 30,000 members
			if _, err := w.Write(block); err != nil {
				return
			}
		}
	})
	wantCode(t, err, sandlot.CodeTooLarge)
	err = send(func(w io.Writer) {
		_, _ = w.Write(rawHeader("f", "00004000001\x00", '0')) // 1 MiB and a byte
		_, _ = io.Copy(w, io.LimitReader(zeros{}, 32<<20))
	})
	wantCode(t, err, sandlot.CodeTooLarge)
	// Without a header that could be refused: padding behind the end.
	err = send(func(w io.Writer) {
		_, _ = w.Write(tarEnd)
		_, _ = io.Copy(w, io.LimitReader(zeros{}, 32<<20))
	})
	wantCode(t, err, sandlot.CodeTooLarge)
	if n := names(t, b.outside("workspace")); len(n) != 0 {
		t.Errorf("left: %v", n)
	}
	if grown := heap(); grown > 16<<20 {
		t.Errorf("the heap grew by %d bytes", grown)
	}
}

func TestArchiveRoundTrip(t *testing.T) {
	b := start(t)
	src := b.outside("workspace/src")
	must(t, os.MkdirAll(filepath.Join(src, "d/empty"), 0o755))
	must(t, os.WriteFile(filepath.Join(src, "d/run.sh"), []byte("#!/bin/sh\n"), 0o755)) //nolint:gosec // a program
	must(t, os.WriteFile(filepath.Join(src, strings.Repeat("é", 100)), []byte(strings.Repeat("long", 50_000)), 0o600))
	must(t, os.Symlink("/etc/passwd", filepath.Join(src, "d/abs")))
	must(t, os.Symlink("d", filepath.Join(src, "rel")))
	want := snapshot(t, src)
	must(t, syscall.Mkfifo(filepath.Join(src, "fifo"), 0o600)) // left out
	old := time.Date(2020, 1, 2, 3, 4, 5, 0, time.UTC)
	must(t, os.Chtimes(filepath.Join(src, "d/run.sh"), old, old))
	for _, zip := range []bool{false, true} {
		r, err := b.ArchiveGet(t.Context(), at("src"), zip)
		must(t, err)
		body, err := io.ReadAll(r)
		must(t, err)
		_ = r.Close()
		for _, into := range []string{"new", "new", "d/new", "/tmp"} { // new, merged, with parents, existing
			must(t, b.ArchivePut(t.Context(), at(into), bytes.NewReader(body), int64(len(body)), zip))
		}
		for _, dir := range []string{"workspace/new", "workspace/d/new"} {
			if got := snapshot(t, b.outside(dir)); got != want {
				t.Errorf("%s:\n%s\nwant:\n%s", dir, got, want)
			}
		}
		st, err := os.Stat(b.outside("workspace/new/d/run.sh"))
		if err != nil || !st.ModTime().Equal(old) {
			t.Errorf("time %v, %v", st.ModTime(), err)
		}
		must(t, b.Delete(t.Context(), at("new"), true))
		must(t, b.Delete(t.Context(), at("d"), true))
	}
	_, err := b.ArchiveGet(t.Context(), at("src/rel/run.sh"), false)
	wantCode(t, err, sandlot.CodeInvalidRequest)
	_, err = b.ArchiveGet(t.Context(), at("none"), false)
	wantCode(t, err, sandlot.CodeNotFound)
}

// ADVERSARIAL 5: a tree that changes while it is read gives a valid archive or a typed error.
func TestArchiveGetWhileTreeChanges(t *testing.T) {
	b := start(t)
	dir := b.outside("workspace/tree")
	out := t.TempDir()
	must(t, os.WriteFile(filepath.Join(out, "secret"), []byte("CANARY"), 0o600))
	must(t, os.MkdirAll(filepath.Join(dir, "sub"), 0o755))
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			f := filepath.Join(dir, "sub", fmt.Sprint("f", i%5))
			_ = os.WriteFile(f, make([]byte, 1<<20), 0o600)
			_ = os.Truncate(f, int64(i%7)*100_000)
			_ = os.Rename(filepath.Join(dir, "sub"), filepath.Join(dir, "was"))
			_ = os.Symlink(out, filepath.Join(dir, "sub"))
			_ = os.Remove(filepath.Join(dir, "sub"))
			_ = os.Rename(filepath.Join(dir, "was"), filepath.Join(dir, "sub"))
			_ = os.Remove(f)
		}
	})
	for range 60 {
		r, err := b.ArchiveGet(t.Context(), at("tree"), false)
		must(t, err)
		readTar(t, r)
	}
	close(stop)
	wg.Wait()
}

func readTar(t testing.TB, r io.ReadCloser) {
	t.Helper()
	defer func() { _ = r.Close() }()
	body, err := io.ReadAll(r)
	if bytes.Contains(body, []byte("CANARY")) {
		t.Error("bytes from outside")
	}
	if err != nil {
		wantOneOf(t, err, sandlot.CodeConflict, sandlot.CodeNotFound, sandlot.CodeForbidden)
		return
	}
	tr := tar.NewReader(bytes.NewReader(body))
	for {
		if _, err := tr.Next(); errors.Is(err, io.EOF) {
			return
		} else if err != nil {
			t.Errorf("not a valid archive: %v", err)
			return
		}
	}
}

func wantOneOf(t testing.TB, err error, codes ...sandlot.Code) {
	t.Helper()
	for _, c := range codes {
		if sandlot.ErrorCode(err) == c {
			return
		}
	}
	t.Errorf("error %v", err)
}

func TestArchiveGetTooLarge(t *testing.T) {
	b := start(t)
	must(t, os.WriteFile(b.outside("workspace/huge"), nil, 0o600))
	must(t, os.Truncate(b.outside("workspace/huge"), 1<<40))
	r, err := b.ArchiveGet(t.Context(), guest.At{Path: "/workspace"}, false)
	must(t, err)
	defer func() { _ = r.Close() }()
	_, err = io.Copy(io.Discard, r)
	wantCode(t, err, sandlot.CodeTooLarge)
}

func FuzzUnpack(f *testing.F) {
	f.Add(makeTar(f, tarDir("d"), tarFile("d/f", "content"), tarLink(tar.TypeSymlink, "l", "../../x"), tarLink(tar.TypeLink, "h", "d/f")))
	f.Add(append(rawHeader("s", "00000000000\x00", 'S'), tarEnd...))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) > 1<<16 {
			return
		}
		base := t.TempDir()
		must(t, os.Mkdir(filepath.Join(base, "in"), 0o755))
		root, err := os.OpenRoot(filepath.Join(base, "in"))
		must(t, err)
		defer func() { _ = root.Close() }()
		if _, err := unpack(root, bytes.NewReader(b), limits{1000, 1 << 20}); err != nil && sandlot.ErrorCode(err) == sandlot.CodeInternal {
			t.Errorf("an error without a code: %v", err)
		}
		if n := names(t, base); len(n) != 1 {
			t.Errorf("written outside: %v", n)
		}
	})
}
