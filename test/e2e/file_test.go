package e2e

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/rand"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"sandlot/test/live"
)

func TestFiles(t *testing.T) {
	t.Parallel()
	b := live.New(t, nil)
	content := make([]byte, 3<<20)
	_, _ = rand.Read(content)
	b.Put(t, "deep/er/data.bin", content) // makes parents
	if got := b.Read(t, "/workspace/deep/er/data.bin"); !bytes.Equal(got, content) {
		t.Errorf("read back %d bytes of %d, or others", len(got), len(content))
	}
	if got := b.Out(t, "sha256sum < deep/er/data.bin | wc -c; stat -c '%U %a' deep/er/data.bin"); got != "68\nuser 644" {
		t.Errorf("inside: %q", got)
	}

	resp, err := b.Request(t.Context(), http.MethodGet, "/"+b.ID+"/files/content?path=deep/er/data.bin", nil, "Range", "bytes=1000-1999")
	if err != nil {
		t.Fatal(err)
	}
	part, _ := io.ReadAll(resp.Body)
	resp.Body.Close()
	if resp.StatusCode != http.StatusPartialContent || !bytes.Equal(part, content[1000:2000]) || resp.Header.Get("Content-Range") != "bytes 1000-1999/3145728" {
		t.Errorf("range: %d, %d bytes, %q", resp.StatusCode, len(part), resp.Header.Get("Content-Range"))
	}
	_, err = b.Do(t.Context(), http.MethodGet, "/files/content?path=deep/er/data.bin", nil, "Range", "bytes=9999999-")
	refused(t, err, http.StatusRequestedRangeNotSatisfiable, "range_not_satisfiable")

	do := func(method, path string) {
		t.Helper()
		if _, err := b.Do(t.Context(), method, path, nil); err != nil {
			t.Errorf("%s %s: %v", method, path, err)
		}
	}
	do(http.MethodPost, "/files/mkdir?path=made/of/dirs")
	do(http.MethodPost, "/files/move?path=deep/er/data.bin&to=made/moved.bin")
	names := func(dir string) string {
		var out struct{ Entries []struct{ Name, Type string } }
		if err := b.Call(t.Context(), http.MethodGet, "/"+b.ID+"/files/list?path="+dir, nil, &out); err != nil {
			t.Fatal(err)
		}
		s := ""
		for _, e := range out.Entries {
			s += e.Name + ":" + e.Type + " "
		}
		return s
	}
	if got := names("made"); got != "moved.bin:file of:dir " {
		t.Errorf("list: %q", got)
	}
	var st struct {
		Size             int64
		Type, User, Mode string
	}
	if err := b.Call(t.Context(), http.MethodGet, "/"+b.ID+"/files/stat?path=made/moved.bin", nil, &st); err != nil || st.Size != 3<<20 || st.User != "user" || st.Mode != "0644" {
		t.Errorf("stat: %+v, %v", st, err)
	}
	_, err = b.Do(t.Context(), http.MethodDelete, "/files/content?path=made", nil)
	refused(t, err, http.StatusConflict, "conflict")
	do(http.MethodDelete, "/files/content?path=made/moved.bin")
	_, err = b.Do(t.Context(), http.MethodGet, "/files/content?path=made/moved.bin", nil)
	refused(t, err, http.StatusNotFound, "not_found")
	do(http.MethodDelete, "/files/content?path=made&recursive=1")

	_, err = b.Do(t.Context(), http.MethodPut, "/files/content?path=/etc/passwd", []byte("x"))
	refused(t, err, http.StatusForbidden, "forbidden")
	if _, err := b.Do(t.Context(), http.MethodPut, "/files/content?path=/etc/motd&user=root", []byte("by root")); err != nil {
		t.Error("root writes /etc:", err)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

func TestFileLimit(t *testing.T) {
	t.Parallel()
	b := live.New(t, nil)
	const most = 256 << 20
	put := func(n int64) error {
		resp, err := b.Request(t.Context(), http.MethodPut, "/"+b.ID+"/files/content?path=big", io.LimitReader(zeros{}, n))
		if err == nil {
			resp.Body.Close()
		}
		return err
	}
	refused(t, put(most+1), http.StatusRequestEntityTooLarge, "too_large")
	_, err := b.Do(t.Context(), http.MethodGet, "/files/content?path=big", nil)
	refused(t, err, http.StatusNotFound, "not_found") // whole or not at all
	if err := put(most); err != nil {
		t.Error("exactly the limit:", err)
	}
	if got := b.Out(t, "stat -c %s big"); got != "268435456" {
		t.Errorf("its size is %q", got)
	}
}

func pack(t *testing.T, files map[string]string) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if err := w.WriteHeader(&tar.Header{Name: name, Size: int64(len(files[name])), Mode: 0o755, Typeflag: tar.TypeReg}); err != nil {
			t.Fatal(err)
		}
		_, _ = w.Write([]byte(files[name]))
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

func zip(b []byte) []byte {
	var buf bytes.Buffer
	w := gzip.NewWriter(&buf)
	_, _ = w.Write(b)
	_ = w.Close()
	return buf.Bytes()
}

func TestArchive(t *testing.T) {
	t.Parallel()
	b := live.New(t, nil)
	files := map[string]string{"run.sh": "#!/bin/sh\necho from $0", "sub/data.txt": strings.Repeat("data ", 10000)}
	plain := pack(t, files)
	if _, err := b.Do(t.Context(), http.MethodPut, "/files/archive?path=up", plain, "Content-Type", "application/x-tar"); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Do(t.Context(), http.MethodPut, "/files/archive?path=upz", zip(plain), "Content-Encoding", "gzip"); err != nil {
		t.Fatal(err)
	}
	if got := b.Out(t, "up/run.sh && diff -r up upz && stat -c %U up/sub/data.txt"); got != "from up/run.sh\nuser" {
		t.Errorf("inside: %q", got)
	}
	for _, encoding := range []string{"identity", "gzip"} {
		resp, err := b.Request(t.Context(), http.MethodGet, "/"+b.ID+"/files/archive?path=up", nil, "Accept-Encoding", encoding)
		if err != nil {
			t.Fatal(err)
		}
		var r io.Reader = resp.Body
		if encoding == "gzip" {
			if r, err = gzip.NewReader(resp.Body); err != nil {
				t.Fatalf("Content-Encoding %q: %v", resp.Header.Get("Content-Encoding"), err)
			}
		}
		got := map[string]string{}
		for tr := tar.NewReader(r); ; {
			h, err := tr.Next()
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatal(encoding, err)
			}
			if h.Typeflag == tar.TypeReg {
				content, _ := io.ReadAll(tr)
				got[strings.TrimPrefix(h.Name, "./")] = string(content)
			}
		}
		resp.Body.Close()
		if !maps.Equal(got, files) {
			t.Errorf("%s: got %v", encoding, slices.Sorted(maps.Keys(got)))
		}
	}
}

func TestWatch(t *testing.T) {
	t.Parallel()
	b := live.New(t, nil)
	b.Out(t, "mkdir watched")
	resp, err := b.Request(t.Context(), http.MethodGet, "/"+b.ID+"/files/watch?path=watched&recursive=1", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	seen := make(chan string, 100)
	go func() {
		defer close(seen)
		_ = live.Events(resp.Body, func(e live.Event) bool { seen <- e.Type + " " + e.Path; return true })
	}()
	await := func(want string) {
		t.Helper()
		for timeout := time.After(20 * time.Second); ; {
			select {
			case got, ok := <-seen:
				if !ok {
					t.Fatalf("the watch ended before %q", want)
				}
				if strings.TrimSpace(got) == want {
					return
				}
			case <-timeout:
				t.Fatalf("no %q", want)
			}
		}
	}
	await("ready")
	b.Out(t, "mkdir watched/sub; sleep 0.5; echo x > watched/sub/file; rm watched/sub/file")
	await("create /workspace/watched/sub")
	await("create /workspace/watched/sub/file")
	await("remove /workspace/watched/sub/file")
}

// A full disk is the sandbox's own: programs get ENOSPC, the API says disk_full, and room can be made again.
func TestDiskFull(t *testing.T) {
	t.Parallel()
	b := live.New(t, map[string]any{"disk_gb": 1})
	r := b.Run(t, "dd if=/dev/zero of=fill bs=1M count=2000", map[string]any{"timeout_s": 120})
	if r.ExitCode == 0 || !strings.Contains(r.Stderr, "No space left on device") {
		t.Errorf("2 GB into 1 GB: %+v", r)
	}
	_, err := b.Do(t.Context(), http.MethodPut, "/files/content?path=more", make([]byte, 4<<20))
	refused(t, err, http.StatusInsufficientStorage, "disk_full")
	if got := b.Out(t, "rm fill && echo room > more && cat more"); got != "room" {
		t.Errorf("after making room: %q", got)
	}
}

// /tmp is on the sandbox's disk: a regression, since gVisor's own tmpfs there took the sandbox's memory and
// ended it when it was full.
func TestTmpIsOnDisk(t *testing.T) {
	t.Parallel()
	b := live.New(t, nil)
	r := b.Out(t, "stat -c %a /tmp && head -c 1500M /dev/zero >/tmp/fill && stat -c %s /tmp/fill && rm /tmp/fill && echo fine")
	if r != "1777\n1572864000\nfine" {
		t.Errorf("more than the sandbox's memory in /tmp: %q", r)
	}
}
