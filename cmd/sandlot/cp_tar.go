package main

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

	"sandlot"
)

// packer writes files of this machine into a tar.
type packer struct {
	tw    *tar.Writer
	bar   *progress
	files int
	bytes int64
}

func newPacker(w io.Writer, bar *progress) *packer { return &packer{tw: tar.NewWriter(w), bar: bar} }

func (p *packer) close() error { return p.tw.Close() }

// dir packs the content of a directory. Links are packed as links; sockets, pipes and devices are left out,
// which is told on warn.
func (p *packer) dir(root string, warn io.Writer) error {
	return filepath.WalkDir(root, func(at string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, at)
		if err != nil {
			return err
		}
		if rel == "." {
			return nil
		}
		fi, err := d.Info()
		if errors.Is(err, fs.ErrNotExist) {
			return nil // gone meanwhile
		}
		if err != nil {
			return err
		}
		name := filepath.ToSlash(rel)
		switch {
		case fi.IsDir():
			return p.tw.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: name + "/", Mode: int64(fi.Mode().Perm()), ModTime: fi.ModTime()})
		case fi.Mode()&fs.ModeSymlink != 0:
			target, err := os.Readlink(at)
			if err != nil {
				return err
			}
			return p.tw.WriteHeader(&tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target, ModTime: fi.ModTime()})
		case fi.Mode().IsRegular():
			return p.file(name, at, fi)
		}
		fmt.Fprintf(warn, "sandlot: %s is neither a file nor a directory: left out\n", printable(at))
		return nil
	})
}

// file packs one file: exactly the bytes that its header tells, or it fails.
func (p *packer) file(name, from string, fi fs.FileInfo) error {
	f, err := os.Open(from)
	if err != nil {
		return err
	}
	defer f.Close()
	err = p.tw.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Size: fi.Size(), Mode: int64(fi.Mode().Perm()), ModTime: fi.ModTime()})
	if err != nil {
		return err
	}
	var r io.Reader = io.LimitReader(f, fi.Size())
	n, err := io.Copy(p.tw, p.bar.through(r))
	p.bytes += n
	p.files++
	if err == nil && n < fi.Size() {
		return fmt.Errorf("%s became shorter while it was copied", from)
	}
	return err
}

// maxMembers bounds an archive that a sandbox sends.
const maxMembers = 1_000_000

// unpackHere writes an archive that a sandbox sent below dir. The sandbox is a stranger: nothing is written
// outside dir or through a link, no file gets more than the permission bits, and links that lead out of dir,
// devices and pipes are left out, which is told on warn.
func unpackHere(r io.Reader, dir string, warn io.Writer) (written int64, files int, err error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return 0, 0, err
	}
	defer root.Close()
	tr := tar.NewReader(r)
	for range maxMembers {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			_, err = io.Copy(io.Discard, io.LimitReader(r, 1<<20)) // a stream that broke off says so here
			return written, files, err
		}
		if err != nil {
			return written, files, fmt.Errorf("the archive broke off: %w", err)
		}
		name := path.Clean(h.Name)
		if name == "." {
			continue
		}
		if !filepath.IsLocal(name) {
			return written, files, fmt.Errorf("the archive names %q, which is outside of it", printable(h.Name))
		}
		written += h.Size
		if h.Size < 0 || written > sandlot.MaxFileBytes {
			return written, files, fmt.Errorf("the archive has more than %s", size(sandlot.MaxFileBytes))
		}
		took, err := unpackMember(root, tr, h, name)
		if err != nil {
			return written, files, err
		}
		switch {
		case took:
			files++
		case h.Typeflag != tar.TypeDir:
			fmt.Fprintf(warn, "sandlot: %s is left out: a link that leads out of the directory, or no file\n", printable(name))
		}
	}
	return written, files, fmt.Errorf("the archive has more than %d members", maxMembers)
}

// unpackMember writes one member and says whether it is a file that was written.
func unpackMember(root *os.Root, content io.Reader, h *tar.Header, name string) (bool, error) {
	if err := makeParents(root, path.Dir(name)); err != nil {
		return false, err
	}
	mode := fs.FileMode(h.Mode & 0o777)
	switch h.Typeflag {
	case tar.TypeDir:
		if err := makeParents(root, name); err != nil {
			return false, err
		}
		return false, root.Chmod(name, mode|0o700)
	case tar.TypeSymlink:
		if !filepath.IsLocal(path.Join(path.Dir(name), h.Linkname)) || path.IsAbs(h.Linkname) || strings.IndexByte(h.Linkname, 0) >= 0 {
			return false, nil
		}
		if err := clearTheWay(root, name); err != nil {
			return false, err
		}
		return true, root.Symlink(h.Linkname, name)
	case tar.TypeReg:
		if err := clearTheWay(root, name); err != nil {
			return false, err
		}
		f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode|0o600)
		if err != nil {
			return false, err
		}
		_, err = io.Copy(f, content)
		err = errors.Join(err, f.Close())
		if err == nil {
			_ = root.Chtimes(name, h.ModTime, h.ModTime)
		}
		return err == nil, err
	}
	return false, nil
}

// makeParents makes a directory and those above it. None of them may be a link: a link's target is judged
// by where its name is, so its name must be where it says.
func makeParents(root *os.Root, dir string) error {
	at := "."
	for part := range strings.SplitSeq(dir, "/") {
		at = path.Join(at, part)
		fi, err := root.Lstat(at)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			err = root.Mkdir(at, 0o755)
		case err == nil && !fi.IsDir():
			err = fmt.Errorf("the archive goes through %s, which is no directory here", printable(at))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// clearTheWay removes what is not a directory.
func clearTheWay(root *os.Root, name string) error {
	err := root.Remove(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
