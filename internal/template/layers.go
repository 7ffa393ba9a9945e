package template

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	opaque           = whiteout + whiteout + ".opq"
	layerErrorPrefix = "unpacking layer "
)

// extractLayers runs in the child: it unpacks the layers that a tree holds, each with a mark behind it, with
// the image as root directory. As with extract, links of the image are followed and cannot lead out of it.
func extractLayers(r io.Reader) error {
	tr := tar.NewReader(r)
	n := 1
	made := make(unpacked)
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if h.Name == layerMark {
			n++
			clear(made)
			continue
		}
		if err := made.extract(h, tr); err != nil {
			return fmt.Errorf("%s%d: %.256q: %w", layerErrorPrefix, n, h.Name, err)
		}
	}
}

// unpacked are the paths, with their parents, that the layer at hand made: its whiteouts mean what was there
// before it, wherever among its entries they stand.
type unpacked map[string]struct{}

func (made unpacked) add(name string) {
	for ; name != "."; name = path.Dir(name) {
		if _, ok := made[name]; ok {
			return
		}
		made[name] = struct{}{}
	}
}

func (made unpacked) extract(h *tar.Header, r io.Reader) error {
	name, err := imagePath(h.Name)
	if err != nil {
		return err
	}
	if base := path.Base(name); strings.HasPrefix(base, whiteout) {
		dir := path.Dir(name)
		if base == opaque {
			return made.hideBelow(dir)
		}
		return made.hide(path.Join(dir, strings.TrimPrefix(base, whiteout)))
	}
	p := "/" + name
	if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
		return err
	}
	if h.Typeflag == tar.TypeDir {
		if err := makeDir(p); err != nil {
			return err
		}
	} else if name == "." {
		return errors.New("the root must be a folder")
	} else if err := makeFile(h, p, r); err != nil {
		return err
	}
	made.add(name)
	if h.Typeflag == tar.TypeLink {
		return nil // the mode and owner are the target's
	}
	if err := os.Lchown(p, h.Uid, h.Gid); err != nil || h.Typeflag == tar.TypeSymlink {
		return err
	}
	return unix.Chmod(p, uint32(h.Mode&0o7777)) // after chown, which clears set-uid
}

// makeDir makes p a folder and keeps what is in it when it is one.
func makeDir(p string) error {
	if info, err := os.Lstat(p); err == nil && !info.IsDir() {
		if err := os.Remove(p); err != nil {
			return err
		}
	}
	if err := os.Mkdir(p, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return nil
}

// makeFile makes p what h says, in place of whatever was there.
func makeFile(h *tar.Header, p string, r io.Reader) error {
	if h.Typeflag == tar.TypeLink {
		target, err := imagePath(h.Linkname)
		if err != nil {
			return err
		}
		target = "/" + target
		from, err := os.Lstat(target)
		if err != nil {
			return fmt.Errorf("a hard link: %w", err)
		}
		if from.IsDir() {
			return errors.New("a hard link to a folder")
		}
		if to, err := os.Lstat(p); err == nil && os.SameFile(from, to) {
			return nil
		}
		if err := os.RemoveAll(p); err != nil {
			return err
		}
		return os.Link(target, p) // of a symbolic link itself, where the target is one
	}
	if err := os.RemoveAll(p); err != nil {
		return err
	}
	switch h.Typeflag {
	case tar.TypeReg:
		f, err := os.OpenFile(p, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return err
		}
		_, err = io.Copy(f, r)
		return errors.Join(err, f.Close())
	case tar.TypeSymlink:
		return os.Symlink(h.Linkname, p)
	}
	return fmt.Errorf("an entry of type %q", h.Typeflag)
}

// hide removes what earlier layers have at name.
func (made unpacked) hide(name string) error {
	if _, ok := made[name]; ok {
		return made.hideBelow(name)
	}
	err := os.RemoveAll("/" + name)
	if errors.Is(err, unix.ENOTDIR) {
		return nil // its folder is none, so there is nothing to hide
	}
	return err
}

// hideBelow removes what earlier layers have in folder name.
func (made unpacked) hideBelow(name string) error {
	p := "/" + name
	if info, err := os.Lstat(p); err != nil || !info.IsDir() {
		return nil
	}
	entries, err := os.ReadDir(p)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := made.hide(path.Join(name, e.Name())); err != nil {
			return err
		}
	}
	return nil
}
