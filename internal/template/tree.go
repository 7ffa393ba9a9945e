package template

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"

	"sandlot"
)

// What one step may bring in through a tree.
const (
	maxTreeBytes   = 8 << 30
	maxTreeEntries = 500_000
)

// tree is a stream of files on its way into an image. It is the only way in for what archives and
// definition folders hold: it knows folders, regular files and symbolic links, and no path that leaves the
// root. The other end (child.go) unpacks it with the image as root directory.
type tree struct {
	tw      *tar.Writer
	bytes   int64
	entries int
}

func newTree(w io.Writer) *tree { return &tree{tw: tar.NewWriter(w)} }

// owner is a file's uid and gid; only root and the sandbox's user are used.
type owner int

const (
	ownerRoot owner = 0
	ownerUser owner = userID
)

// imagePath checks a path of an archive or a definition and returns it relative to the image's root.
func imagePath(p string) (string, error) {
	if p == "" || len(p) > sandlot.MaxPathBytes || strings.ContainsRune(p, 0) {
		return "", fmt.Errorf("a path has 1 to %d bytes and no NUL", sandlot.MaxPathBytes)
	}
	if path.IsAbs(p) {
		return "", fmt.Errorf("%q is absolute", p)
	}
	for part := range strings.SplitSeq(p, "/") {
		if part == ".." {
			return "", fmt.Errorf("%q leaves its root", p)
		}
		if len(part) > sandlot.MaxNameBytes {
			return "", fmt.Errorf("a component of %.64q… is over %d bytes", p, sandlot.MaxNameBytes)
		}
	}
	return path.Clean(p), nil
}

// destPath checks a destination that a definition names: absolute, inside the image.
func destPath(p string) (string, error) {
	if !path.IsAbs(p) {
		return "", fmt.Errorf("dest %q must be absolute", p)
	}
	return imagePath("./" + strings.TrimLeft(p, "/"))
}

func (t *tree) header(h *tar.Header, p string) error {
	name, err := imagePath(p)
	if err != nil {
		return err
	}
	t.entries++
	t.bytes += h.Size
	if t.entries > maxTreeEntries || h.Size < 0 || t.bytes > maxTreeBytes {
		return sandlot.Errorf(sandlot.CodeTooLarge, "a step brings in at most %d entries and %d bytes", maxTreeEntries, int64(maxTreeBytes))
	}
	h.Name = name
	h.Format = tar.FormatPAX
	return t.tw.WriteHeader(h)
}

func (t *tree) dir(p string, mode int64, o owner) error {
	return t.header(&tar.Header{Typeflag: tar.TypeDir, Mode: mode & 0o7777, Uid: int(o), Gid: int(o)}, p)
}

// file adds size bytes of r, which must hold exactly that many.
func (t *tree) file(p string, mode int64, o owner, size int64, r io.Reader) error {
	h := &tar.Header{Mode: mode & 0o7777, Uid: int(o), Gid: int(o)}
	return t.owned(p, h, size, r)
}

// owned is file with an owner and mode of any kind, which h has.
func (t *tree) owned(p string, h *tar.Header, size int64, r io.Reader) error {
	h.Typeflag, h.Size = tar.TypeReg, size
	if err := t.header(h, p); err != nil {
		return err
	}
	if _, err := io.CopyN(t.tw, r, size); err != nil {
		return fmt.Errorf("%s: shorter than announced: %w", p, err)
	}
	if n, err := r.Read(make([]byte, 1)); n > 0 || (err != nil && !errors.Is(err, io.EOF)) {
		return fmt.Errorf("%s: longer than announced, or broken at its end: %w", p, errors.Join(err))
	}
	return nil
}

// link adds a symbolic link. Its target may be anything: it is resolved inside the image only.
func (t *tree) link(p, target string, o owner) error { return t.linkOf(p, target, int(o), int(o)) }

func (t *tree) linkOf(p, target string, uid, gid int) error {
	if target == "" || len(target) > sandlot.MaxPathBytes || strings.ContainsRune(target, 0) {
		return fmt.Errorf("%s: a link's target has 1 to %d bytes and no NUL", p, sandlot.MaxPathBytes)
	}
	return t.header(&tar.Header{Typeflag: tar.TypeSymlink, Linkname: target, Mode: 0o777, Uid: uid, Gid: gid}, p)
}

func (t *tree) close() error { return t.tw.Close() }
