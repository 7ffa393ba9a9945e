package agent

import (
	"container/heap"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"path"
	"slices"
	"strconv"
	"syscall"

	"sandlot"
	"sandlot/internal/wire"
)

const pageSize = 1000 // entries of one answer to list

// target is who asks for which file.
type target struct {
	u    *user
	name string // resolve's result
}

func (t target) shown() string { return shown(t.name) }

// target reads ?path= and ?user=.
func (a *Agent) target(r *http.Request) (target, error) {
	if _, err := a.ready(); err != nil {
		return target{}, err
	}
	q := r.URL.Query()
	name, err := resolve(q.Get("path"))
	if err != nil {
		return target{}, err
	}
	u, err := a.account(q.Get("user"))
	return target{u, name}, err
}

// do runs f as the request's user and gives its error a code.
func (a *Agent) do(t target, f func() error) error {
	return fileError(a.as(t.u, f), t.shown())
}

// precious says whether removing or moving name would break the sandbox.
func precious(name string) error {
	if name == "." || shown(name) == workspace {
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "%s itself cannot be removed or moved", shown(name))
	}
	return nil
}

func (a *Agent) info(name string, st fs.FileInfo) wire.FileInfo {
	fi := wire.FileInfo{
		Name: path.Base(shown(name)), Path: shown(name), Type: typeOf(st.Mode()), Size: st.Size(),
		Mode: fmt.Sprintf("%04o", unixMode(st.Mode())), ModTime: st.ModTime().UTC(),
	}
	if sys, ok := st.Sys().(*syscall.Stat_t); ok {
		fi.User, fi.Group = a.users.names(sys.Uid, sys.Gid)
	}
	if st.Mode()&fs.ModeSymlink != 0 {
		fi.Target, _ = a.files.Readlink(name)
	}
	return fi
}

func unixMode(m fs.FileMode) uint32 {
	u := uint32(m.Perm())
	if m&fs.ModeSetuid != 0 {
		u |= 0o4000
	}
	if m&fs.ModeSetgid != 0 {
		u |= 0o2000
	}
	if m&fs.ModeSticky != 0 {
		u |= 0o1000
	}
	return u
}

func (a *Agent) serveStat(w http.ResponseWriter, r *http.Request) error {
	t, err := a.target(r)
	if err != nil {
		return err
	}
	var fi wire.FileInfo
	err = a.do(t, func() error {
		st, err := a.files.Lstat(t.name)
		if err == nil {
			fi = a.info(t.name, st)
		}
		return err
	})
	if err != nil {
		return err
	}
	return answerJSON(w, fi)
}

// serveList answers with a directory's entries in the order of their names, ?limit= of them after ?after=.
func (a *Agent) serveList(w http.ResponseWriter, r *http.Request) error {
	t, err := a.target(r)
	if err != nil {
		return err
	}
	q := r.URL.Query()
	limit := pageSize
	if s := q.Get("limit"); s != "" {
		if limit, err = strconv.Atoi(s); err != nil || limit < 1 || limit > pageSize {
			return sandlot.Errorf(sandlot.CodeInvalidRequest, "limit is a number from 1 to %d", pageSize)
		}
	}
	out := wire.FileList{Path: t.shown(), Entries: []wire.FileInfo{}}
	err = a.do(t, func() error {
		names, more, err := a.page(t.name, q.Get("after"), limit)
		if err != nil {
			return err
		}
		for _, n := range names {
			st, err := a.files.Lstat(join(t.name, n))
			if errors.Is(err, fs.ErrNotExist) {
				continue // it went away since
			}
			if err != nil {
				return err
			}
			out.Entries = append(out.Entries, a.info(join(t.name, n), st))
		}
		if more {
			out.Next = names[len(names)-1]
		}
		return nil
	})
	if err != nil {
		return err
	}
	return answerJSON(w, out)
}

// page returns the first limit names of a directory after a name, sorted, and whether there are more. Of a
// huge directory only these are held.
func (a *Agent) page(name, after string, limit int) ([]string, bool, error) {
	f, err := openDir(a.files, name)
	if err != nil {
		if errors.Is(err, syscall.ENOTDIR) {
			if st, serr := a.files.Lstat(name); serr == nil && !st.IsDir() {
				return nil, false, sandlot.Errorf(sandlot.CodeInvalidRequest, "%s is a %s, not a directory", clip(shown(name), 256), typeOf(st.Mode()))
			}
		}
		return nil, false, err
	}
	defer func() { _ = f.Close() }()
	var h maxHeap
	for {
		names, err := f.Readdirnames(4096)
		for _, n := range names {
			switch {
			case n <= after:
			case len(h) <= limit: // one more than the page, to know whether there is another
				heap.Push(&h, n)
			case n < h[0]:
				h[0] = n
				heap.Fix(&h, 0)
			}
		}
		if errors.Is(err, io.EOF) || err == nil && len(names) == 0 {
			break
		}
		if err != nil {
			return nil, false, err
		}
	}
	slices.Sort(h)
	if len(h) > limit {
		return h[:limit], true, nil
	}
	return h, false, nil
}

type maxHeap []string

func (h maxHeap) Len() int           { return len(h) }
func (h maxHeap) Less(i, j int) bool { return h[i] > h[j] }
func (h maxHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *maxHeap) Push(x any)        { *h = append(*h, x.(string)) }
func (h *maxHeap) Pop() any {
	old := *h
	x := old[len(old)-1]
	*h = old[:len(old)-1]
	return x
}

// serveMkdir makes a directory and its parents. One that exists is fine.
func (a *Agent) serveMkdir(w http.ResponseWriter, r *http.Request) error {
	t, err := a.target(r)
	if err != nil {
		return err
	}
	err = a.do(t, func() error {
		err := a.files.MkdirAll(t.name, 0o755)
		if errors.Is(err, syscall.ENOTDIR) || errors.Is(err, fs.ErrExist) {
			return sandlot.Errorf(sandlot.CodeConflict, "%s or a part of its path exists and is not a directory", clip(t.shown(), 256))
		}
		return err
	})
	if err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// serveDelete removes a file or an empty directory, with ?recursive=1 a full one.
func (a *Agent) serveDelete(w http.ResponseWriter, r *http.Request) error {
	t, err := a.target(r)
	if err != nil {
		return err
	}
	if err := precious(t.name); err != nil {
		return err
	}
	recursive := r.URL.Query().Get("recursive") == "1"
	err = a.do(t, func() error {
		st, err := a.files.Lstat(t.name)
		if err != nil {
			return err
		}
		if st.IsDir() && recursive {
			return a.files.RemoveAll(t.name)
		}
		err = a.files.Remove(t.name)
		if errors.Is(err, syscall.ENOTEMPTY) || errors.Is(err, fs.ErrExist) {
			return sandlot.Errorf(sandlot.CodeConflict, "%s is not empty; ask for it recursively", clip(t.shown(), 256))
		}
		return err
	})
	if err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// serveMove renames ?path= to ?to=, and replaces a file that is there.
func (a *Agent) serveMove(w http.ResponseWriter, r *http.Request) error {
	t, err := a.target(r)
	if err != nil {
		return err
	}
	to, err := resolve(r.URL.Query().Get("to"))
	if err != nil {
		return err
	}
	if err := errors.Join(precious(t.name), precious(to)); err != nil {
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "/ and %s themselves cannot be moved or replaced", workspace)
	}
	err = a.do(t, func() error {
		if _, err := a.files.Lstat(t.name); err != nil {
			return err
		}
		err := a.files.Rename(t.name, to)
		if errors.Is(err, syscall.EXDEV) {
			return a.moveAcross(t.name, to)
		}
		if errors.Is(err, fs.ErrNotExist) {
			return sandlot.Errorf(sandlot.CodeNotFound, "the directory of %s does not exist", clip(shown(to), 256))
		}
		return err
	})
	if err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// moveAcross moves a regular file to another filesystem: a copy under another name, then a rename.
func (a *Agent) moveAcross(from, to string) error {
	src, st, err := openRegular(a.files, from)
	if err != nil {
		if st, serr := a.files.Lstat(from); serr == nil && !st.Mode().IsRegular() {
			return syscall.EXDEV
		}
		return err
	}
	defer func() { _ = src.Close() }()
	tmp, f, err := a.temp(path.Dir(to))
	if err != nil {
		return err
	}
	_, err = io.Copy(f, src)
	if err == nil {
		err = f.Chmod(st.Mode().Perm())
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = a.files.Rename(tmp, to)
	}
	if err != nil {
		_ = a.files.Remove(tmp)
		return err
	}
	return a.files.Remove(from)
}
