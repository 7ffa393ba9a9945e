package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"strings"

	"sandlot"
)

// cpCmd copies files into or out of a sandbox.
type cpCmd struct {
	From string `arg:"" name:"from" help:"A file or directory here, ID:PATH of a sandbox, or - for standard input."`
	To   string `arg:"" name:"to" help:"A file or directory here, ID:PATH of a sandbox, or - for standard output."`
	User string `short:"u" placeholder:"USER" help:"The user inside whose rights count."`
}

// Help says how names are read.
func (cpCmd) Help() string {
	return "A relative path of a sandbox is below /workspace. What is copied to a directory that exists lands in it under its own name; " +
		"DIR/. copies a directory's content. A file here whose name looks like ID:PATH is written ./ID:PATH."
}

// remotePath is a file of a sandbox.
type remotePath struct{ id, path string }

// parseRemote reads ID:PATH. What does not begin with a sandbox's id is a file here.
func parseRemote(s string) (remotePath, bool) {
	id, p, ok := strings.Cut(s, ":")
	if _, err := sandlot.ParseID(id); !ok || err != nil || !strings.HasPrefix(id, sandlot.PrefixSandbox) {
		return remotePath{}, false
	}
	if p == "" {
		p = "."
	}
	return remotePath{id, p}, true
}

func (x *cpCmd) Run(ctx context.Context, s *streams, r *sandboxCmd) error {
	from, fromRemote := parseRemote(x.From)
	to, toRemote := parseRemote(x.To)
	if fromRemote == toRemote {
		return errors.New("one side is a sandbox's, ID:PATH, and the other one is here")
	}
	c, err := r.client()
	if err != nil {
		return err
	}
	cp := copier{c: c, s: s, user: x.User}
	var done copied
	if toRemote {
		done, err = cp.upload(ctx, x.From, to)
	} else {
		done, err = cp.download(ctx, from, x.To)
	}
	if err != nil || !r.JSON || x.To == "-" {
		return err
	}
	b, err := json.Marshal(done)
	if err != nil {
		return err
	}
	return printJSON(s.out, b)
}

// copied is what --json tells of a copy.
type copied struct {
	From  string `json:"from"`
	To    string `json:"to"`
	Bytes int64  `json:"bytes"`
	Files int    `json:"files"`
}

type copier struct {
	c    *client
	s    *streams
	user string
}

func (cp *copier) query(p string) url.Values {
	q := url.Values{"path": {p}}
	if cp.user != "" {
		q.Set("user", cp.user)
	}
	return q
}

// fileType is what a path inside is: "file", "dir", …, or "" when there is nothing.
func (cp *copier) fileType(ctx context.Context, r remotePath) (string, error) {
	var fi struct {
		Type string `json:"type"`
	}
	_, err := cp.c.call(ctx, http.MethodGet, cp.c.sandboxes(r.id, "files", "stat"), cp.query(r.path), nil, &fi)
	if isNotFound(err) {
		// The same code says that there is no such sandbox; then the transfer says so.
		return "", nil
	}
	if err == nil && fi.Type == "symlink" { // what it leads to counts: a directory can be listed
		q := cp.query(r.path)
		q.Set("limit", "1")
		if _, err := cp.c.call(ctx, http.MethodGet, cp.c.sandboxes(r.id, "files", "list"), q, nil, nil); err == nil {
			return "dir", nil
		}
		return "file", nil
	}
	return fi.Type, err
}

func (cp *copier) upload(ctx context.Context, src string, dst remotePath) (copied, error) {
	if src == "-" {
		return cp.uploadStream(ctx, dst)
	}
	fi, err := os.Stat(src)
	if err != nil {
		return copied{}, err
	}
	switch {
	case fi.IsDir():
		return cp.uploadDir(ctx, src, dst)
	case !fi.Mode().IsRegular():
		return copied{}, fmt.Errorf("%s is neither a file nor a directory", src)
	case fi.Size() > sandlot.MaxFileBytes:
		return copied{}, fmt.Errorf("%s has %s; a file has at most %s", src, size(fi.Size()), size(sandlot.MaxFileBytes))
	}
	kind := ""
	if !strings.HasSuffix(dst.path, "/") {
		if kind, err = cp.fileType(ctx, dst); err != nil {
			return copied{}, err
		}
	}
	if kind == "dir" || strings.HasSuffix(dst.path, "/") {
		dst.path = path.Join(dst.path, filepath.Base(src))
	}
	if fi.Mode()&0o111 != 0 && kind != "file" {
		// Only an archive carries a mode.
		return cp.uploadProgram(ctx, src, dst)
	}
	f, err := os.Open(src)
	if err != nil {
		return copied{}, err
	}
	defer f.Close()
	return cp.put(ctx, src, dst, f, fi.Size())
}

func (cp *copier) uploadStream(ctx context.Context, dst remotePath) (copied, error) {
	if strings.HasSuffix(dst.path, "/") {
		return copied{}, errors.New("standard input has no name: give a file's path")
	}
	n := int64(-1)
	if f, ok := cp.s.in.(*os.File); ok {
		if fi, err := f.Stat(); err == nil && fi.Mode().IsRegular() {
			if at, err := f.Seek(0, io.SeekCurrent); err == nil {
				n = fi.Size() - at
			}
		}
	}
	return cp.put(ctx, "-", dst, cp.s.in, n)
}

func (cp *copier) put(ctx context.Context, src string, dst remotePath, r io.Reader, n int64) (copied, error) {
	bar := newProgress(cp.s.err, src, n)
	defer bar.finish()
	count := &counter{r: bar.through(r)}
	var body io.Reader = count
	if n == 0 {
		body = http.NoBody
	}
	resp, err := cp.c.do(ctx, http.MethodPut, cp.c.sandboxes(dst.id, "files", "content"), cp.query(dst.path),
		http.Header{"Content-Type": {"application/octet-stream"}}, io.NopCloser(body), n)
	if err != nil {
		return copied{}, err
	}
	resp.Body.Close()
	return copied{From: src, To: dst.id + ":" + dst.path, Bytes: count.n, Files: 1}, nil
}

type counter struct {
	r io.Reader
	n int64
}

func (c *counter) Read(b []byte) (int, error) {
	n, err := c.r.Read(b)
	c.n += int64(n)
	return n, err
}

// putArchive sends what write packs, as it is packed.
func (cp *copier) putArchive(ctx context.Context, src string, dst remotePath, total int64, write func(*packer) error) (copied, error) {
	bar := newProgress(cp.s.err, src, total)
	defer bar.finish()
	pr, pw := io.Pipe()
	p := newPacker(pw, bar)
	packed := make(chan error, 1)
	go func() {
		err := write(p)
		if err == nil {
			err = p.close()
		}
		pw.CloseWithError(err)
		packed <- err
	}()
	resp, err := cp.c.do(ctx, http.MethodPut, cp.c.sandboxes(dst.id, "files", "archive"), cp.query(dst.path),
		http.Header{"Content-Type": {"application/x-tar"}}, pr, -1)
	pr.Close() // the packer stops when the server has answered early
	perr := <-packed
	var answered *apiError
	switch {
	case err == nil:
		resp.Body.Close()
	case errors.As(err, &answered), perr == nil, errors.Is(perr, io.ErrClosedPipe):
		return copied{}, err
	default: // it broke off because of what is here
		return copied{}, perr
	}
	return copied{From: src, To: dst.id + ":" + dst.path, Bytes: p.bytes, Files: p.files}, nil
}

func (cp *copier) uploadProgram(ctx context.Context, src string, dst remotePath) (copied, error) {
	name := path.Base(dst.path)
	done, err := cp.putArchive(ctx, src, remotePath{dst.id, path.Dir(dst.path)}, -1, func(p *packer) error {
		fi, err := os.Stat(src)
		if err != nil {
			return err
		}
		return p.file(name, src, fi)
	})
	done.To = dst.id + ":" + dst.path
	return done, err
}

func (cp *copier) uploadDir(ctx context.Context, src string, dst remotePath) (copied, error) {
	content := strings.HasSuffix(src, "/.") || src == "."
	if !content {
		kind, err := cp.fileType(ctx, dst)
		if err != nil {
			return copied{}, err
		}
		if kind == "dir" || strings.HasSuffix(dst.path, "/") {
			dst.path = path.Join(dst.path, filepath.Base(src))
		}
	}
	var total int64
	err := filepath.WalkDir(src, func(_ string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if fi, err := d.Info(); err == nil && fi.Mode().IsRegular() {
			total += fi.Size()
		}
		return nil
	})
	if err != nil {
		return copied{}, err
	}
	if total > sandlot.MaxFileBytes {
		return copied{}, fmt.Errorf("%s has %s; an archive has at most %s of content: copy its parts", src, size(total), size(sandlot.MaxFileBytes))
	}
	return cp.putArchive(ctx, src, dst, total, func(p *packer) error { return p.dir(src, cp.s.err) })
}

func (cp *copier) download(ctx context.Context, src remotePath, dst string) (copied, error) {
	kind, err := cp.fileType(ctx, src)
	if err != nil {
		return copied{}, err
	}
	if kind == "dir" {
		return cp.downloadDir(ctx, src, dst)
	}
	resp, err := cp.c.do(ctx, http.MethodGet, cp.c.sandboxes(src.id, "files", "content"), cp.query(src.path), nil, nil, -1)
	if err != nil {
		return copied{}, err
	}
	defer resp.Body.Close()
	if resp.ContentLength > sandlot.MaxFileBytes {
		return copied{}, errors.New("the server sends more than a file may have")
	}
	bar := newProgress(cp.s.err, src.path, resp.ContentLength)
	defer bar.finish()
	body := io.LimitReader(bar.through(resp.Body), sandlot.MaxFileBytes)
	done := copied{From: src.id + ":" + src.path, To: dst, Files: 1}
	if dst == "-" {
		done.Bytes, err = io.Copy(cp.s.out, body)
		return done, err
	}
	if fi, err := os.Stat(dst); err == nil && fi.IsDir() || strings.HasSuffix(dst, "/") {
		name := path.Base(path.Clean("/" + src.path))
		if name == "/" {
			return copied{}, errors.New("say what the file is to be called here")
		}
		dst = filepath.Join(dst, name)
	}
	done.To = dst
	done.Bytes, err = writeFile(dst, body)
	return done, err
}

// writeFile writes a file whole or not at all. An existing one keeps its mode; a link is followed.
func writeFile(dst string, r io.Reader) (n int64, err error) {
	mode := fs.FileMode(0o644)
	if real, err := filepath.EvalSymlinks(dst); err == nil {
		dst = real
	}
	if fi, err := os.Stat(dst); err == nil {
		if !fi.Mode().IsRegular() { // a device, a pipe: it is written to as it is
			f, err := os.OpenFile(dst, os.O_WRONLY, 0)
			if err != nil {
				return 0, err
			}
			n, err = io.Copy(f, r)
			return n, errors.Join(err, f.Close())
		}
		mode = fi.Mode().Perm()
	}
	f, err := os.CreateTemp(filepath.Dir(dst), ".sandlot-*")
	if err != nil {
		return 0, err
	}
	defer os.Remove(f.Name())
	n, err = io.Copy(f, r)
	err = errors.Join(err, f.Chmod(mode), f.Close())
	if err != nil {
		return n, err
	}
	return n, os.Rename(f.Name(), dst)
}

func (cp *copier) downloadDir(ctx context.Context, src remotePath, dst string) (copied, error) {
	resp, err := cp.c.do(ctx, http.MethodGet, cp.c.sandboxes(src.id, "files", "archive"), cp.query(src.path), nil, nil, -1)
	if err != nil {
		return copied{}, err
	}
	defer resp.Body.Close()
	bar := newProgress(cp.s.err, src.path, -1)
	defer bar.finish()
	done := copied{From: src.id + ":" + src.path, To: dst}
	if dst == "-" { // a tar
		done.Bytes, err = io.Copy(cp.s.out, bar.through(resp.Body))
		return done, err
	}
	if fi, err := os.Stat(dst); err == nil && fi.IsDir() && !strings.HasSuffix(src.path, "/.") {
		name := path.Base(path.Clean("/" + src.path))
		if name == "/" {
			name = src.id // the sandbox's own directory
		}
		dst = filepath.Join(dst, name)
	}
	if err := os.MkdirAll(dst, 0o755); err != nil {
		return copied{}, err
	}
	done.To = dst
	done.Bytes, done.Files, err = unpackHere(bar.through(resp.Body), dst, cp.s.err)
	return done, err
}
