package template

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// cache keeps layers:
//
//	DIR/lock          held by the one build that runs
//	DIR/layers/empty  the lowest layer of each stack
//	DIR/layers/KEY    what one step changed, in overlayfs's form
//	DIR/layers/KEY.meta  what the layer says of itself, for some; there before the layer is
//	DIR/layers/KEY.size  its bytes, where a bound asks for them
//	DIR/layers/.new   the layer that is being made; renamed when it is finished
//	DIR/mount         where stacks are mounted, in the namespaces of child processes only
//
// Layers have files of any owner and set-uid programs: the folder is for root alone.
type cache struct {
	dir  string
	lock *os.File
}

const (
	newLayer   = ".new"
	emptyLayer = "empty"
	metaSuffix = ".meta"
	sizeSuffix = ".size"

	keepLayersFor = 30 * 24 * time.Hour // since their last use
	minFreeBytes  = 1 << 30             // a build stops when the disk has less
)

// openCache makes dir and waits for its lock.
func openCache(ctx context.Context, dir string) (*cache, error) {
	if dir == "" {
		return nil, errors.New("no folder for the cache")
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	for _, d := range []string{dir, filepath.Join(dir, "layers"), filepath.Join(dir, "layers", emptyLayer), filepath.Join(dir, "mount")} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return nil, err
		}
	}
	if err := os.Chmod(filepath.Join(dir, "layers"), 0o700); err != nil {
		return nil, err
	}
	lock, err := lockFile(ctx, filepath.Join(dir, "lock"))
	if err != nil {
		return nil, err
	}
	c := &cache{dir: dir, lock: lock}
	if err := os.RemoveAll(c.path(newLayer)); err != nil { // of a build that was killed
		c.close()
		return nil, err
	}
	return c, nil
}

func (c *cache) close() { c.lock.Close() }

func (c *cache) path(name string) string { return filepath.Join(c.dir, "layers", name) }

// layerDir is a layer's folder, relative to DIR/layers. A short name keeps the mount options short.
func (c *cache) layerDir(key string) string { return key[:32] }

func (c *cache) has(key string) bool {
	p := c.path(c.layerDir(key))
	if info, err := os.Lstat(p); err != nil || !info.IsDir() {
		return false
	}
	now := time.Now()
	return os.Chtimes(c.path(c.layerDir(key)), now, now) == nil
}

// meta returns what a layer says of itself.
func (c *cache) meta(key string) ([]byte, error) {
	return os.ReadFile(c.path(c.layerDir(key) + metaSuffix))
}

// make makes l on top of lowers, topmost first. The layer gets its name when it is complete and on disk.
func (c *cache) make(ctx context.Context, l layer, lowers []string, log *progress, title string, opts *Options) (err error) {
	if err := c.checkSpace(); err != nil {
		return err
	}
	base := c.path(newLayer)
	defer func() { err = errors.Join(err, os.RemoveAll(base)) }()
	for _, d := range []string{"", "fs", "work", "temp"} {
		if err := os.MkdirAll(filepath.Join(base, d), 0o755); err != nil {
			return err
		}
	}
	w := &work{
		def:    l.def,
		inputs: l.inputs,
		temp:   filepath.Join(base, "temp"),
		upper:  filepath.Join(base, "fs"),
		box:    opts.Box,
		stack:  c.stack(lowers),
	}
	w.stack.Upper, w.stack.Work = newLayer+"/fs", newLayer+"/work"
	err = c.during(ctx, log, title, opts.Verbose, func(ctx context.Context, out io.Writer) error {
		w.out = out
		return l.apply(ctx, w)
	})
	if err != nil {
		return err
	}
	if err := syncFS(c.dir); err != nil {
		return err
	}
	final := c.path(c.layerDir(l.key))
	if err := os.RemoveAll(final); err != nil { // made afresh
		return err
	}
	if w.meta != nil {
		if err := os.WriteFile(final+metaSuffix, w.meta, 0o600); err != nil {
			return err
		}
	}
	if err := os.Rename(w.upper, final); err != nil {
		return err
	}
	if opts.MaxCacheBytes > 0 {
		if err := os.WriteFile(final+sizeSuffix, []byte(strconv.FormatInt(diskUse(final), 10)), 0o600); err != nil {
			return err
		}
	}
	now := time.Now() // the folder's own time is that of its last use
	return os.Chtimes(final, now, now)
}

// stack is a job's part that mounts lowers, topmost first, read-only.
func (c *cache) stack(lowers []string) job {
	return job{
		Dir:    filepath.Join(c.dir, "layers"),
		Lowers: append(append([]string(nil), lowers...), emptyLayer),
		Mount:  filepath.Join(c.dir, "mount"),
	}
}

// size is what a layer takes on disk, where that was written down; else 0.
func (c *cache) size(key string) int64 {
	b, _ := os.ReadFile(c.path(c.layerDir(key) + sizeSuffix))
	n, _ := strconv.ParseInt(string(b), 10, 64)
	return n
}

// diskUse is what the files below dir take. It follows no link.
func diskUse(dir string) int64 {
	var total int64
	_ = filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil //nolint:nilerr // what cannot be read does not count
		}
		if info, err := d.Info(); err == nil {
			if st, ok := info.Sys().(*syscall.Stat_t); ok {
				total += st.Blocks * 512
			}
		}
		return nil
	})
	return total
}

// prune removes layers that no build used for long, and with a bound those that were unused longest over it.
func (c *cache) prune(most int64) {
	entries, err := os.ReadDir(filepath.Join(c.dir, "layers"))
	if err != nil {
		return
	}
	type layer struct {
		name string
		used time.Time
	}
	var layers []layer
	for _, e := range entries {
		info, err := e.Info()
		if err != nil || e.Name() == emptyLayer || !info.IsDir() || strings.HasPrefix(e.Name(), ".") {
			continue
		}
		layers = append(layers, layer{e.Name(), info.ModTime()})
	}
	slices.SortFunc(layers, func(a, b layer) int { return b.used.Compare(a.used) })
	var total int64
	for _, l := range layers {
		if most > 0 {
			b, _ := os.ReadFile(c.path(l.name + sizeSuffix))
			n, _ := strconv.ParseInt(string(b), 10, 64)
			total += n
		}
		if time.Since(l.used) <= keepLayersFor && (most == 0 || total <= most) {
			continue
		}
		if os.RemoveAll(c.path(l.name)) == nil { // else tried again by the next build
			_ = os.Remove(c.path(l.name + metaSuffix))
			_ = os.Remove(c.path(l.name + sizeSuffix))
		}
	}
}

func (c *cache) checkSpace() error {
	var s unix.Statfs_t
	if err := unix.Statfs(c.dir, &s); err != nil {
		return err
	}
	if s.Bavail*uint64(s.Bsize) < minFreeBytes {
		return fmt.Errorf("less than %d MiB are free in %s", minFreeBytes>>20, c.dir)
	}
	return nil
}

func syncFS(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	return unix.Syncfs(int(f.Fd()))
}

// lockFile opens and locks a file; closing it, or the end of the process, lets go. Children do not inherit it.
func lockFile(ctx context.Context, name string) (*os.File, error) {
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return f, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			f.Close()
			return nil, err
		}
		select {
		case <-ctx.Done():
			f.Close()
			return nil, ctx.Err()
		case <-time.After(100 * time.Millisecond):
		}
	}
}
