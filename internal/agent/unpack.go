package agent

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"
	"syscall"
	"unicode/utf8"

	"sandlot"
)

// member is what an archive said of a name. An unnamed parent directory has the index of the member that
// needed it.
type member struct {
	kind  byte
	index int
}

// refuse is the error of a member. Indexes count from 0.
func refuse(index int, name string, code sandlot.Code, why string) error {
	return sandlot.Errorf(code, "member %d (%q) of the archive: %s", index, clip(strings.ToValidUTF8(name, "?"), 128), why).With("member", index)
}

// unpacker writes an archive's members below root, which is empty and its alone. Links are made last, so
// that no member can be written through one.
type unpacker struct {
	root    *os.Root
	lim     limits
	members map[string]member
	links   []link
	dirs    []dirMeta
	bytes   int64
}

type link struct {
	name, target string
	index        int
}

type dirMeta struct {
	name string
	h    *tar.Header
}

// unpack reads a whole archive.
func unpack(root *os.Root, body io.Reader, lim limits) (map[string]member, error) {
	in := &bounded{r: body, left: lim.total()}
	tr := tar.NewReader(in)
	u := &unpacker{root: root, lim: lim, members: make(map[string]member)}
	for i := 0; ; i++ {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) && !in.ended {
			break
		}
		if err != nil {
			return nil, u.broken(in, i, err)
		}
		if i >= lim.members {
			return nil, sandlot.Errorf(sandlot.CodeTooLarge, "member %d of the archive: there are more than %d", i, lim.members).With("member", i)
		}
		if err := u.add(i, h, tr); err != nil {
			if in.err != nil || in.ended {
				err = u.broken(in, i, err)
			}
			return nil, err
		}
	}
	// What pads the archive is read to its end: only then gzip has checked its sum.
	if _, err := io.Copy(io.Discard, in); err != nil {
		return nil, u.broken(in, len(u.members), err)
	}
	return u.members, u.finish()
}

// broken is the error of an archive that could not be read further.
func (u *unpacker) broken(in *bounded, i int, err error) error {
	if in.left <= 0 {
		return sandlot.Errorf(sandlot.CodeTooLarge, "member %d of the archive: the archive has more than %d bytes", i, u.lim.bytes).With("member", i)
	}
	if in.ended || errors.Is(err, io.ErrUnexpectedEOF) {
		return sandlot.Wrap(err, sandlot.CodeInvalidRequest, "member %d of the archive: the archive ends early", i).With("member", i)
	}
	return sandlot.Wrap(err, sandlot.CodeInvalidRequest, "member %d of the archive: its header is not tar's", i).With("member", i)
}

// add checks and writes one member.
func (u *unpacker) add(i int, h *tar.Header, content io.Reader) error {
	bad := func(why string) error { return refuse(i, h.Name, sandlot.CodeInvalidRequest, why) }
	if h.Typeflag == tar.TypeXGlobalHeader {
		return nil
	}
	name, why := memberName(h.Name)
	if why != "" {
		return bad(why)
	}
	if h.Typeflag == tar.TypeGNUSparse || sparse(h) {
		return bad("it is sparse")
	}
	if name == "." {
		if h.Typeflag != tar.TypeDir {
			return bad("its name is empty")
		}
		return nil
	}
	old, twice := u.members[name]
	if twice && !(old.kind == tar.TypeDir && h.Typeflag == tar.TypeDir) {
		return bad(fmt.Sprintf("member %d has the same name", old.index))
	}
	if err := u.parents(i, h.Name, name); err != nil {
		return err
	}
	var err error
	switch h.Typeflag {
	case tar.TypeReg:
		if h.Mode&0o6000 != 0 {
			return bad("it is set-user-id or set-group-id")
		}
		if h.Size < 0 || h.Size > u.lim.bytes-u.bytes {
			return refuse(i, h.Name, sandlot.CodeTooLarge, fmt.Sprintf("the archive has more than %d bytes", u.lim.bytes))
		}
		u.bytes += h.Size
		err = u.file(name, h, content)
	case tar.TypeDir:
		if !twice {
			err = u.root.Mkdir(name, 0o700)
		}
		u.dirs = append(u.dirs, dirMeta{name, &tar.Header{Mode: h.Mode, ModTime: h.ModTime}})
	case tar.TypeSymlink:
		if h.Linkname == "" || len(h.Linkname) >= sandlot.MaxPathBytes || strings.IndexByte(h.Linkname, 0) >= 0 {
			return bad("its link's target cannot be one")
		}
		u.links = append(u.links, link{name, h.Linkname, i})
	case tar.TypeLink:
		to, why := memberName(h.Linkname)
		if why != "" || u.members[to].kind != tar.TypeReg {
			return bad("it is a hard link to what is not a file before it in the archive")
		}
		err = u.root.Link(to, name)
	default:
		return bad("it is a device, a FIFO or of no known kind")
	}
	if err != nil {
		return u.failed(i, h.Name, err)
	}
	kind := h.Typeflag
	if kind == tar.TypeLink {
		kind = tar.TypeReg
	}
	u.members[name] = member{kind, i}
	return nil
}

func (u *unpacker) failed(i int, name string, err error) error {
	if e := fileError(err, "member"); sandlot.ErrorCode(e) == sandlot.CodeDiskFull {
		return e
	}
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return refuse(i, name, sandlot.CodeInvalidRequest, "it cannot be written: "+errno.Error())
	}
	return err
}

// parents makes the directories above a member that the archive did not name.
func (u *unpacker) parents(i int, full, name string) error {
	for at := 0; ; {
		k := strings.IndexByte(name[at:], '/')
		if k < 0 {
			return nil
		}
		dir := name[:at+k]
		at += k + 1
		switch m, ok := u.members[dir]; {
		case !ok:
			if err := u.root.Mkdir(dir, 0o755); err != nil {
				return u.failed(i, full, err)
			}
			u.members[dir] = member{tar.TypeDir, i}
		case m.kind == tar.TypeSymlink:
			return refuse(i, full, sandlot.CodeInvalidRequest, fmt.Sprintf("it would be written through the link of member %d", m.index))
		case m.kind != tar.TypeDir:
			return refuse(i, full, sandlot.CodeInvalidRequest, fmt.Sprintf("it is below member %d, which is no directory", m.index))
		}
	}
}

func (u *unpacker) file(name string, h *tar.Header, content io.Reader) error {
	f, err := u.root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	bp := blocks.Get().(*[]byte)
	defer blocks.Put(bp)
	_, err = io.CopyBuffer(onlyWriter{f}, onlyReader{content}, (*bp)[:min(max(h.Size, 512), block)])
	if err == nil {
		err = f.Chmod(fs.FileMode(h.Mode & 0o777)) //nolint:gosec // nine bits
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	setTimes(u.root, name, h.ModTime)
	return err
}

// onlyWriter and onlyReader hide ReadFrom and WriteTo, which would not use the buffer.
type (
	onlyWriter struct{ io.Writer }
	onlyReader struct{ io.Reader }
)

// finish makes the links and gives the directories their modes, the inner ones first.
func (u *unpacker) finish() error {
	for _, l := range u.links {
		if err := u.root.Symlink(l.target, l.name); err != nil {
			return u.failed(l.index, l.name, err)
		}
	}
	for i := len(u.dirs) - 1; i >= 0; i-- {
		d := u.dirs[i]
		// Its owner keeps it open: it must still be moved into place.
		_ = u.root.Chmod(d.name, fs.FileMode(d.h.Mode&0o777)|0o700) //nolint:gosec // nine bits
		setTimes(u.root, d.name, d.h.ModTime)
	}
	return nil
}

// memberName cleans a member's name, or says why it is none.
func memberName(s string) (name, why string) {
	switch {
	case s == "":
		return "", "its name is empty"
	case s[0] == '/':
		return "", "its name is absolute"
	case len(s) > sandlot.MaxPathBytes:
		return "", "its name is too long"
	case !utf8.ValidString(s) || strings.IndexByte(s, 0) >= 0:
		return "", "its name is not valid UTF-8 or has a NUL byte"
	}
	for part := range strings.SplitSeq(s, "/") {
		if part == ".." {
			return "", `its name has a ".." component`
		}
		if len(part) > sandlot.MaxNameBytes {
			return "", "its name has a component that is too long"
		}
	}
	return path.Clean(s), ""
}

func sparse(h *tar.Header) bool {
	for k := range h.PAXRecords {
		if strings.HasPrefix(k, "GNU.sparse.") {
			return true
		}
	}
	return false
}

// bounded reads at most left bytes and remembers how the stream ended.
type bounded struct {
	r     io.Reader
	left  int64
	ended bool  // io.EOF came
	err   error // any other end
}

func (b *bounded) Read(p []byte) (int, error) {
	if b.left <= 0 {
		b.err = sandlot.Errorf(sandlot.CodeTooLarge, "the archive has too many bytes")
		return 0, b.err
	}
	if int64(len(p)) > b.left {
		p = p[:b.left]
	}
	n, err := b.r.Read(p)
	b.left -= int64(n)
	switch {
	case errors.Is(err, io.EOF) && n > 0:
		return n, nil // whether anybody wants more decides whether the end came early
	case errors.Is(err, io.EOF):
		b.ended = true
	case err != nil:
		b.err = err
	}
	return n, err
}
