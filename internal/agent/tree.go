package agent

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"sandlot"
)

// tree is the sandbox's files. Names are resolve's results: relative to the sandbox's "/".
type tree interface {
	OpenFile(name string, flag int, perm fs.FileMode) (*os.File, error)
	Lstat(name string) (fs.FileInfo, error)
	Stat(name string) (fs.FileInfo, error)
	Mkdir(name string, perm fs.FileMode) error
	MkdirAll(name string, perm fs.FileMode) error
	Rename(from, to string) error
	Remove(name string) error
	RemoveAll(name string) error
	Readlink(name string) (string, error)
	Chmod(name string, perm fs.FileMode) error
}

// hostTree is the machine's own files: links lead where they lead, because all of it is the sandbox's.
type hostTree struct{}

func (hostTree) OpenFile(name string, flag int, perm fs.FileMode) (*os.File, error) {
	return os.OpenFile("/"+name, flag, perm)
}
func (hostTree) Lstat(name string) (fs.FileInfo, error)       { return os.Lstat("/" + name) }
func (hostTree) Stat(name string) (fs.FileInfo, error)        { return os.Stat("/" + name) }
func (hostTree) Mkdir(name string, perm fs.FileMode) error    { return os.Mkdir("/"+name, perm) }
func (hostTree) MkdirAll(name string, perm fs.FileMode) error { return os.MkdirAll("/"+name, perm) }
func (hostTree) Rename(from, to string) error                 { return os.Rename("/"+from, "/"+to) }
func (hostTree) Remove(name string) error                     { return os.Remove("/" + name) }
func (hostTree) RemoveAll(name string) error                  { return os.RemoveAll("/" + name) }
func (hostTree) Readlink(name string) (string, error)         { return os.Readlink("/" + name) }
func (hostTree) Chmod(name string, perm fs.FileMode) error    { return os.Chmod("/"+name, perm) }

// rootTree is a directory that stands for "/". Links that lead out of it do not work, absolute ones neither.
type rootTree struct {
	dir  string
	mu   sync.Mutex
	open *os.Root // at the first use: an idle agent holds no file
	over bool
}

func (t *rootTree) root() (*os.Root, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.over {
		return nil, sandlot.Errorf(sandlot.CodeSandboxUnhealthy, "the agent is closing")
	}
	if t.open == nil {
		r, err := os.OpenRoot(t.dir)
		if err != nil {
			return nil, err
		}
		t.open = r
	}
	return t.open, nil
}

func (t *rootTree) close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.over = true
	if t.open != nil {
		_ = t.open.Close()
	}
}

func with[T any](t *rootTree, f func(r *os.Root) (T, error)) (T, error) {
	r, err := t.root()
	if err != nil {
		var zero T
		return zero, err
	}
	return f(r)
}

func (t *rootTree) do(f func(r *os.Root) error) error {
	_, err := with(t, func(r *os.Root) (struct{}, error) { return struct{}{}, f(r) })
	return err
}

func (t *rootTree) OpenFile(name string, flag int, perm fs.FileMode) (*os.File, error) {
	return with(t, func(r *os.Root) (*os.File, error) { return r.OpenFile(name, flag, perm) })
}

func (t *rootTree) Lstat(name string) (fs.FileInfo, error) {
	return with(t, func(r *os.Root) (fs.FileInfo, error) { return r.Lstat(name) })
}

func (t *rootTree) Stat(name string) (fs.FileInfo, error) {
	return with(t, func(r *os.Root) (fs.FileInfo, error) { return r.Stat(name) })
}

func (t *rootTree) Readlink(name string) (string, error) {
	return with(t, func(r *os.Root) (string, error) { return r.Readlink(name) })
}

func (t *rootTree) Mkdir(name string, perm fs.FileMode) error {
	return t.do(func(r *os.Root) error { return r.Mkdir(name, perm) })
}

func (t *rootTree) MkdirAll(name string, perm fs.FileMode) error {
	return t.do(func(r *os.Root) error { return r.MkdirAll(name, perm) })
}

func (t *rootTree) Rename(from, to string) error {
	return t.do(func(r *os.Root) error { return r.Rename(from, to) })
}
func (t *rootTree) Remove(name string) error {
	return t.do(func(r *os.Root) error { return r.Remove(name) })
}

func (t *rootTree) RemoveAll(name string) error {
	return t.do(func(r *os.Root) error { return r.RemoveAll(name) })
}

func (t *rootTree) Chmod(name string, perm fs.FileMode) error {
	return t.do(func(r *os.Root) error { return r.Chmod(name, perm) })
}

// openDir opens a directory, with O_DIRECTORY: what os.OpenRoot opens is whatever has the name, and a FIFO
// would block it.
func openDir(t tree, name string) (*os.File, error) {
	return t.OpenFile(name, os.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NONBLOCK, 0)
}

// openRoot makes a root of a directory. Nothing reached through it is outside.
func openRoot(t tree, name string) (*os.Root, error) {
	f, err := openDir(t, name)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	return os.OpenRoot("/proc/self/fd/" + itoa(int(f.Fd())))
}

// openRegular opens a file for reading and refuses everything that could block or never end.
func openRegular(t tree, name string) (*os.File, fs.FileInfo, error) {
	f, err := t.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOCTTY, 0)
	if err != nil {
		return nil, nil, err
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = notRegular(name, st.Mode())
	}
	if err != nil {
		_ = f.Close()
		return nil, nil, err
	}
	return f, st, nil
}

func notRegular(name string, mode fs.FileMode) error {
	return sandlot.Errorf(sandlot.CodeInvalidRequest, "%s is a %s, not a regular file", clip(shown(name), 256), typeOf(mode))
}

func typeOf(mode fs.FileMode) string {
	switch {
	case mode.IsRegular():
		return "file"
	case mode.IsDir():
		return "dir"
	case mode&fs.ModeSymlink != 0:
		return "symlink"
	case mode&fs.ModeNamedPipe != 0:
		return "fifo"
	case mode&fs.ModeSocket != 0:
		return "socket"
	}
	return "device"
}

// follow returns the name that a last component's links lead to, for writing: a file that does not exist
// yet is fine. A directory that stands for "/" does not follow: there the link itself is replaced.
func follow(t tree, name string) (string, error) {
	if _, ok := t.(hostTree); !ok {
		return name, nil
	}
	for range 40 {
		target, err := t.Readlink(name)
		if err != nil {
			if errors.Is(err, syscall.EINVAL) || errors.Is(err, fs.ErrNotExist) {
				return name, nil
			}
			return "", err
		}
		if !filepath.IsAbs(target) {
			// The directory's own links count before "..": resolve it first.
			dir, err := filepath.EvalSymlinks(filepath.Dir("/" + name))
			if err != nil {
				return "", err
			}
			target = filepath.Join(dir, target)
		}
		if target = filepath.Clean(target); target == "/" {
			return ".", nil
		}
		name = target[1:]
	}
	return "", syscall.ELOOP
}

// setTimes sets a file's modification time where that is possible.
func setTimes(r *os.Root, name string, mtime time.Time) {
	if !mtime.IsZero() && mtime.Unix() > 0 {
		_ = r.Chtimes(name, mtime, mtime)
	}
}
