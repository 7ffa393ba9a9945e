package agent

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"sandlot"
)

// block is how much of a file moves at once: fewer system calls, which cost much in gVisor.
const block = 1 << 20

// blocks is capped: what is not in use is freed by the collector.
var blocks = sync.Pool{New: func() any { b := make([]byte, block); return &b }}

const tempPrefix = ".sandlot-"

// serveGet answers with a file's bytes, or with one range of them. HEAD too.
func (a *Agent) serveGet(w http.ResponseWriter, r *http.Request) error {
	t, err := a.target(r)
	if err != nil {
		return err
	}
	var f *os.File
	var st fs.FileInfo
	err = a.do(t, func() (err error) {
		f, st, err = openRegular(a.files, t.name)
		return err
	})
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	size := st.Size()
	h := w.Header()
	h.Set("Content-Type", "application/octet-stream")
	h.Set("Last-Modified", st.ModTime().UTC().Format(http.TimeFormat))
	from, n, status := int64(0), size, http.StatusOK
	if spec := r.Header.Get("Range"); spec != "" {
		if from, n, err = parseRange(spec, size); err != nil {
			return err
		}
		h.Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", from, from+n-1, size))
		status = http.StatusPartialContent
	} else if size == 0 && r.Method == http.MethodGet {
		return copyUnsized(w, f) // empty, or one of /proc's, which only tell when read
	}
	if n > sandlot.MaxFileBytes {
		return sandlot.Errorf(sandlot.CodeTooLarge, "the file has %d bytes; more than %d only come in ranges", n, sandlot.MaxFileBytes)
	}
	h.Set("Accept-Ranges", "bytes")
	h.Set("Content-Length", strconv.FormatInt(n, 10))
	w.WriteHeader(status)
	if r.Method == http.MethodHead {
		return nil
	}
	bp := blocks.Get().(*[]byte)
	defer blocks.Put(bp)
	for n > 0 {
		k, err := f.ReadAt((*bp)[:min(n, block)], from)
		if k > 0 {
			if _, werr := w.Write((*bp)[:k]); werr != nil {
				return nil //nolint:nilerr // the host went away: there is nobody to tell
			}
			from, n = from+int64(k), n-int64(k)
		}
		if err != nil && n > 0 {
			panic(http.ErrAbortHandler) // it shrank, or cannot be read: the short body says so
		}
	}
	return nil
}

// copyUnsized answers with all that can be read of a file whose size says nothing.
func copyUnsized(w http.ResponseWriter, f *os.File) error {
	bp := blocks.Get().(*[]byte)
	defer blocks.Put(bp)
	n, err := io.ReadFull(f, (*bp)[:64<<10])
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		w.Header().Set("Content-Length", itoa(n))
		_, _ = w.Write((*bp)[:n])
		return nil
	}
	if err != nil {
		return fileError(err, "the file")
	}
	for total := n; n > 0 && err == nil; total += n {
		if total > sandlot.MaxFileBytes {
			panic(http.ErrAbortHandler)
		}
		if _, werr := w.Write((*bp)[:n]); werr != nil {
			return nil //nolint:nilerr // the host went away
		}
		n, err = f.Read(*bp)
	}
	if err != nil && !errors.Is(err, io.EOF) {
		panic(http.ErrAbortHandler)
	}
	return nil
}

// parseRange reads a Range header of one range.
func parseRange(spec string, size int64) (from, n int64, err error) {
	bad := func() error {
		return sandlot.Errorf(sandlot.CodeRange, "the range is not one range of the file's %d bytes", size).With("size", size)
	}
	s, ok := strings.CutPrefix(spec, "bytes=")
	first, last, dash := strings.Cut(s, "-")
	if !ok || !dash || strings.Contains(s, ",") {
		return 0, 0, bad()
	}
	number := func(s string) (int64, bool) {
		v, err := strconv.ParseUint(strings.TrimSpace(s), 10, 63)
		return int64(v), err == nil //nolint:gosec // 63 bits
	}
	if first = strings.TrimSpace(first); first == "" {
		k, ok := number(last)
		if !ok || k == 0 || size == 0 {
			return 0, 0, bad()
		}
		k = min(k, size)
		return size - k, k, nil
	}
	from, ok = number(first)
	if !ok || from >= size {
		return 0, 0, bad()
	}
	to := size - 1
	if strings.TrimSpace(last) != "" {
		if to, ok = number(last); !ok || to < from {
			return 0, 0, bad()
		}
		to = min(to, size-1)
	}
	return from, to - from + 1, nil
}

// temp makes a file of its own in a directory.
func (a *Agent) temp(dir string) (string, *os.File, error) {
	name := join(dir, tempName())
	f, err := a.files.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL|syscall.O_NOFOLLOW, 0o600)
	return name, f, err
}

func tempName() string {
	var b [8]byte
	_, _ = rand.Read(b[:])
	return tempPrefix + hex.EncodeToString(b[:])
}

// servePut writes a file: whole under its name at the end, or not at all. Parents are made, an existing
// file's mode is kept, a link is followed to what it names.
func (a *Agent) servePut(w http.ResponseWriter, r *http.Request) error {
	t, err := a.target(r)
	if err != nil {
		return err
	}
	if r.ContentLength > sandlot.MaxFileBytes {
		return tooLarge()
	}
	if t.name == "." {
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "/ is a directory")
	}
	var tmp, dest string
	var f *os.File
	mode := fs.FileMode(0o644)
	err = a.do(t, func() (err error) {
		if dest, err = follow(a.files, t.name); err != nil {
			return err
		}
		st, err := a.files.Lstat(dest)
		switch {
		case err == nil && st.Mode().IsRegular():
			mode = st.Mode().Perm()
		case err == nil && st.Mode()&fs.ModeSymlink == 0:
			return notRegular(dest, st.Mode())
		case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
			if err := a.files.MkdirAll(path.Dir(dest), 0o755); err != nil {
				if errors.Is(err, syscall.ENOTDIR) || errors.Is(err, fs.ErrExist) {
					return sandlot.Errorf(sandlot.CodeConflict, "a part of %s is not a directory", clip(t.shown(), 256))
				}
				return err
			}
		case err != nil:
			return err
		}
		tmp, f, err = a.temp(path.Dir(dest))
		return err
	})
	if err != nil {
		return err
	}
	err = receive(f, r)
	if err == nil {
		err = fileError(f.Chmod(mode), t.shown())
	}
	if cerr := f.Close(); err == nil {
		err = fileError(cerr, t.shown())
	}
	err = errors.Join(err, a.do(t, func() error {
		if err != nil {
			_ = a.files.Remove(tmp)
			return nil
		}
		err := a.files.Rename(tmp, dest)
		if err != nil {
			_ = a.files.Remove(tmp)
		}
		return err
	}))
	if err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func tooLarge() error {
	return sandlot.Errorf(sandlot.CodeTooLarge, "a file has at most %d bytes", sandlot.MaxFileBytes)
}

// receive writes a request's body into f.
func receive(f *os.File, r *http.Request) error {
	bp := blocks.Get().(*[]byte)
	defer blocks.Put(bp)
	var total int64
	for {
		n, err := r.Body.Read(*bp)
		if total += int64(n); total > sandlot.MaxFileBytes {
			return tooLarge()
		}
		if n > 0 {
			if _, werr := f.Write((*bp)[:n]); werr != nil {
				return fileError(werr, "the file")
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return sandlot.Wrap(err, sandlot.CodeInvalidRequest, "the body ended early")
		}
	}
}
