package agent

import (
	"archive/tar"
	"compress/gzip"
	"errors"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"

	"sandlot"
	"sandlot/internal/wire"
)

// limits bound an archive, in both directions.
type limits struct {
	members int
	bytes   int64 // of content
}

// archiveLimits are every agent's.
var archiveLimits = limits{members: 100_000, bytes: sandlot.MaxFileBytes}

// total is what a tar within the limits has at most, uncompressed, with its headers.
func (l limits) total() int64 { return l.bytes + int64(l.members)*2048 }

// serveArchiveGet answers with a tar of a directory: its files, directories and links; sockets, FIFOs and
// devices are left out. The tree may change meanwhile: what vanished is left out, what grew is cut at the
// size that its header told, and what shrank ends the answer with wire.TrailerError. No link is followed.
func (a *Agent) serveArchiveGet(w http.ResponseWriter, r *http.Request) error {
	t, err := a.target(r)
	if err != nil {
		return err
	}
	var root *os.Root
	err = a.do(t, func() (err error) {
		root, err = openRoot(a.files, t.name)
		if errors.Is(err, syscall.ENOTDIR) {
			return sandlot.Errorf(sandlot.CodeInvalidRequest, "%s is not a directory", clip(t.shown(), 256))
		}
		return err
	})
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	h := w.Header()
	h.Set("Content-Type", "application/x-tar")
	h.Set("Trailer", wire.TrailerError)
	var body io.Writer = w
	var zip *gzip.Writer
	if acceptsGzip(r.Header.Get("Accept-Encoding")) {
		h.Set("Content-Encoding", "gzip")
		zip, _ = gzip.NewWriterLevel(w, gzip.BestSpeed) // the level is valid
		body = zip
	}
	if r.Method == http.MethodHead {
		return nil
	}
	// tar writes in small pieces; each write on the stream costs a system call.
	buf := &gather{w: body, buf: make([]byte, 0, 64<<10)}
	p := &packer{lim: a.limits, root: root, tw: tar.NewWriter(buf), ctx: r.Context().Done()}
	err = a.as(t.u, func() error { return p.dir(".") })
	if err == nil {
		err = p.tw.Close()
	}
	if err == nil {
		err = buf.flush()
	}
	if err == nil && zip != nil {
		err = zip.Close()
	}
	if err != nil {
		_ = buf.flush()
		b, _ := errorBody(fileError(err, t.shown()))
		h.Set(wire.TrailerError, string(b))
	}
	return nil
}

func acceptsGzip(header string) bool {
	for part := range strings.SplitSeq(header, ",") {
		name, q, _ := strings.Cut(strings.TrimSpace(part), ";")
		if strings.EqualFold(strings.TrimSpace(name), "gzip") {
			return !strings.HasPrefix(strings.ReplaceAll(q, " ", ""), "q=0") || strings.Contains(q, ".")
		}
	}
	return false
}

// gather joins small writes and lets large ones pass.
type gather struct {
	w   io.Writer
	buf []byte
}

func (g *gather) Write(b []byte) (int, error) {
	if len(g.buf)+len(b) > cap(g.buf) {
		if err := g.flush(); err != nil {
			return 0, err
		}
	}
	if len(b) >= cap(g.buf) {
		return g.w.Write(b)
	}
	g.buf = append(g.buf, b...)
	return len(b), nil
}

func (g *gather) flush() error {
	if len(g.buf) == 0 {
		return nil
	}
	_, err := g.w.Write(g.buf)
	g.buf = g.buf[:0]
	return err
}

// packer writes a tree into a tar. Every file is reached through root, which no link leads out of.
type packer struct {
	lim     limits
	root    *os.Root
	tw      *tar.Writer
	ctx     <-chan struct{}
	members int
	bytes   int64
}

func (p *packer) dir(name string) error {
	f, err := p.root.OpenFile(name, os.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	var names []string
	for err == nil && len(names) <= p.lim.members {
		var some []string
		some, err = f.Readdirnames(4096)
		names = append(names, some...)
	}
	_ = f.Close()
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	slices.Sort(names)
	for _, n := range names {
		if err := p.member(join(name, n)); err != nil {
			return err
		}
	}
	return nil
}

func (p *packer) member(name string) error {
	select {
	case <-p.ctx:
		return errors.New("agent: the host went away")
	default:
	}
	if p.members++; p.members > p.lim.members {
		return sandlot.Errorf(sandlot.CodeTooLarge, "the directory has more than %d members", p.lim.members)
	}
	st, err := p.root.Lstat(name)
	if vanished(err) {
		return nil
	}
	if err != nil {
		return err
	}
	switch {
	case st.IsDir():
		if err := p.header(name+"/", st, tar.TypeDir, 0, ""); err != nil {
			return err
		}
		if err := p.dir(name); !vanished(err) {
			return err
		}
	case st.Mode()&fs.ModeSymlink != 0:
		link, err := p.root.Readlink(name)
		if vanished(err) || errors.Is(err, syscall.EINVAL) {
			return nil
		}
		if err != nil {
			return err
		}
		return p.header(name, st, tar.TypeSymlink, 0, link)
	case st.Mode().IsRegular():
		return p.file(name)
	}
	return nil
}

// vanished says that a member is no longer what its directory said: the guest changed it.
func vanished(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) || errors.Is(err, syscall.ELOOP)
}

func (p *packer) file(name string) error {
	f, err := p.root.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOFOLLOW, 0)
	if vanished(err) || errors.Is(err, syscall.ENXIO) {
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	if !st.Mode().IsRegular() {
		return nil
	}
	if p.bytes += st.Size(); st.Size() < 0 || p.bytes > p.lim.bytes {
		return sandlot.Errorf(sandlot.CodeTooLarge, "the directory has more than %d bytes", p.lim.bytes)
	}
	if err := p.header(name, st, tar.TypeReg, st.Size(), ""); err != nil {
		return err
	}
	bp := blocks.Get().(*[]byte)
	defer blocks.Put(bp)
	for left := st.Size(); left > 0; {
		n, err := f.Read((*bp)[:min(left, block)])
		if n > 0 {
			if _, err := p.tw.Write((*bp)[:n]); err != nil {
				return err
			}
			left -= int64(n)
		}
		if errors.Is(err, io.EOF) && left > 0 {
			return sandlot.Errorf(sandlot.CodeConflict, "%s became smaller while it was read", clip(name, 256))
		}
		if err != nil && left > 0 {
			return err
		}
	}
	return nil
}

func (p *packer) header(name string, st fs.FileInfo, kind byte, size int64, link string) error {
	h := &tar.Header{
		Typeflag: kind, Name: name, Linkname: link, Size: size, Mode: int64(st.Mode().Perm()), ModTime: st.ModTime(),
	}
	if sys, ok := st.Sys().(*syscall.Stat_t); ok {
		h.Uid, h.Gid = int(sys.Uid), int(sys.Gid)
	}
	return p.tw.WriteHeader(h)
}

// serveArchivePut unpacks a tar into a directory. All of it is first unpacked and checked in a directory of
// its own beside the destination's members (or beside the destination, when that does not exist yet), then
// moved into place member by member: an archive that is refused changes nothing. Directories merge, files
// and links are replaced, and nothing is written through a link.
func (a *Agent) serveArchivePut(w http.ResponseWriter, r *http.Request) error {
	t, err := a.target(r)
	if err != nil {
		return err
	}
	if r.ContentLength > a.limits.total() {
		return sandlot.Errorf(sandlot.CodeTooLarge, "an archive has at most %d bytes of content", a.limits.bytes)
	}
	body := io.Reader(r.Body)
	switch enc := r.Header.Get("Content-Encoding"); enc {
	case "", "identity":
	case "gzip":
		zip, err := gzip.NewReader(r.Body)
		if err != nil {
			return sandlot.Wrap(err, sandlot.CodeInvalidRequest, "the body is not gzip")
		}
		body = zip
	default:
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "the content encoding is neither gzip nor none")
	}
	err = a.do(t, func() error {
		st, err := a.files.Stat(t.name)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return a.unpackNew(t.name, body)
		case err != nil:
			return err
		case !st.IsDir():
			return sandlot.Errorf(sandlot.CodeConflict, "%s is a %s, not a directory", clip(t.shown(), 256), typeOf(st.Mode()))
		}
		return a.unpackInto(t.name, body)
	})
	if err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// unpackNew makes the directory name of an archive, whole or not at all.
func (a *Agent) unpackNew(name string, body io.Reader) (err error) {
	parent := path.Dir(name)
	if err := a.files.MkdirAll(parent, 0o755); err != nil {
		return err
	}
	tmp := join(parent, tempName())
	if err := a.files.Mkdir(tmp, 0o700); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = a.files.RemoveAll(tmp)
		}
	}()
	root, err := openRoot(a.files, tmp)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	if _, err := unpack(root, body, a.limits); err != nil {
		return err
	}
	if err := a.files.Chmod(tmp, 0o755); err != nil {
		return err
	}
	return a.files.Rename(tmp, name)
}

// unpackInto merges an archive into the directory name.
func (a *Agent) unpackInto(name string, body io.Reader) error {
	dest, err := openRoot(a.files, name)
	if err != nil {
		return err
	}
	defer func() { _ = dest.Close() }()
	tmp := tempName()
	if err := dest.Mkdir(tmp, 0o700); err != nil {
		return err
	}
	defer func() { _ = dest.RemoveAll(tmp) }()
	root, err := dest.OpenRoot(tmp)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	members, err := unpack(root, body, a.limits)
	if err != nil {
		return err
	}
	var moves []string
	if err := plan(dest, tmp, ".", members, &moves); err != nil {
		return err
	}
	for _, m := range moves {
		if err := dest.Rename(join(tmp, m), m); err != nil {
			return err
		}
	}
	return nil
}

// plan finds what to rename from tmp into dest, and refuses before the first rename what cannot be merged.
func plan(dest *os.Root, tmp, dir string, members map[string]member, moves *[]string) error {
	f, err := dest.Open(join(tmp, dir))
	if err != nil {
		return err
	}
	entries, err := f.ReadDir(-1)
	_ = f.Close()
	if err != nil {
		return err
	}
	for _, e := range entries {
		name := join(dir, e.Name())
		st, err := dest.Lstat(name)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			*moves = append(*moves, name)
		case err != nil:
			return err
		case e.IsDir() && st.IsDir():
			if err := plan(dest, tmp, name, members, moves); err != nil {
				return err
			}
		case e.IsDir() != st.IsDir():
			m := members[name]
			return refuse(m.index, name, sandlot.CodeConflict, "the sandbox has a "+typeOf(st.Mode())+" of this name")
		default:
			*moves = append(*moves, name)
		}
	}
	return nil
}
