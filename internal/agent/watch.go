package agent

import (
	"errors"
	"io/fs"
	"net/http"
	"path"
	"path/filepath"
	"strings"

	"sandlot"
	"sandlot/internal/wire"

	"github.com/fsnotify/fsnotify"
)

const maxWatchedDirs = 1000

// serveWatch tells what changes in a directory, with ?recursive=1 in all below it, until the host goes away.
// Directories that appear are watched too; when there are more than maxWatchedDirs, or events were lost, an
// "overflow" says that the host must look for itself.
func (a *Agent) serveWatch(w http.ResponseWriter, r *http.Request) error {
	t, err := a.target(r)
	if err != nil {
		return err
	}
	if a.watches.Add(1) > maxWatches {
		a.watches.Add(-1)
		return sandlot.Errorf(sandlot.CodeRateLimited, "%d watches are open, which is the limit", maxWatches).With("retry_after_s", 1)
	}
	defer a.watches.Add(-1)
	fw, err := fsnotify.NewWatcher()
	if err != nil {
		return fileError(err, "the watch")
	}
	defer func() { _ = fw.Close() }()
	wt := &watcher{a: a, w: fw, recursive: r.URL.Query().Get("recursive") == "1"}
	err = a.do(t, func() error {
		st, err := a.files.Stat(t.name)
		if err != nil {
			return err
		}
		if typeOf(st.Mode()) == "fifo" || !st.IsDir() && !st.Mode().IsRegular() {
			return notRegular(t.name, st.Mode())
		}
		return wt.add(t.name, st.IsDir())
	})
	if err != nil {
		return err
	}
	gone := make(chan struct{}, 1)
	out := newFrameWriter(w, func() { gone <- struct{}{} })
	defer out.close()
	_ = out.frame(wire.FramePing, nil) // the watch stands
	for {
		select {
		case <-r.Context().Done():
			return nil
		case <-a.ctx.Done():
			return nil
		case <-gone:
			return nil
		case err, ok := <-fw.Errors:
			if !ok {
				return nil
			}
			a.log.Debug("watch", "err", err)
			out.json(wire.FrameEvent, wire.FileEvent{Op: "overflow", Path: t.shown()})
		case ev, ok := <-fw.Events:
			if !ok {
				return nil
			}
			name := wt.name(ev.Name)
			for _, op := range operations(ev.Op) {
				out.json(wire.FrameEvent, wire.FileEvent{Op: op, Path: shown(name)})
			}
			if wt.recursive && ev.Op.Has(fsnotify.Create) {
				wt.found = func(name string) {
					out.json(wire.FrameEvent, wire.FileEvent{Op: "create", Path: shown(name)})
				}
				if err := a.as(t.u, func() error { return wt.grow(name) }); err != nil {
					out.json(wire.FrameEvent, wire.FileEvent{Op: "overflow", Path: shown(name)})
				}
			}
		}
	}
}

var opNames = []struct {
	op   fsnotify.Op
	name string
}{
	{fsnotify.Create, "create"}, {fsnotify.Write, "write"}, {fsnotify.Remove, "remove"},
	{fsnotify.Rename, "rename"}, {fsnotify.Chmod, "chmod"},
}

func operations(op fsnotify.Op) []string {
	var out []string
	for _, o := range opNames {
		if op.Has(o.op) {
			out = append(out, o.name)
		}
	}
	return out
}

type watcher struct {
	a         *Agent
	w         *fsnotify.Watcher
	recursive bool
	found     func(name string) // told of what a new directory held before it was watched
}

// name is the sandbox's name of a path that fsnotify told.
func (wt *watcher) name(p string) string {
	p = filepath.Clean(p)
	if wt.a.root != "" {
		p = strings.TrimPrefix(p, wt.a.root)
	}
	if p = strings.TrimPrefix(p, "/"); p == "" {
		return "."
	}
	return p
}

// add watches name and, when asked, the directories below it.
func (wt *watcher) add(name string, dir bool) error {
	if len(wt.w.WatchList()) >= maxWatchedDirs {
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "a watch covers at most %d directories", maxWatchedDirs)
	}
	if err := wt.w.Add(wt.a.inside(shown(name))); err != nil {
		return err
	}
	if !dir || !wt.recursive {
		return nil
	}
	f, err := openDir(wt.a.files, name)
	if err != nil {
		return err
	}
	entries, err := f.ReadDir(-1)
	_ = f.Close()
	if err != nil {
		return err
	}
	for _, e := range entries {
		if wt.found != nil {
			wt.found(path.Join(name, e.Name()))
		}
		if !e.IsDir() {
			continue
		}
		if err := wt.add(path.Join(name, e.Name()), true); err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrPermission) {
			return err
		}
	}
	return nil
}

// grow watches a directory that appeared.
func (wt *watcher) grow(name string) error {
	st, err := wt.a.files.Lstat(name)
	if err != nil || !st.IsDir() {
		return nil //nolint:nilerr // it went away again
	}
	if err := wt.add(name, true); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
