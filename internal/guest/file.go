package guest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"sync"
	"time"

	"sandlot"
	"sandlot/internal/wire"
)

const (
	pageSize    = 1000
	maxTarBytes = sandlot.MaxFileBytes + 256<<20 // an archive's content and headers
)

// At names a file: a path of the sandbox (relative ones are below /workspace), and the user whose rights
// count ("" is the default user).
type At struct {
	Path string
	User string
}

func (a At) values() url.Values {
	q := url.Values{"path": {a.Path}}
	if a.User != "" {
		q.Set("user", a.User)
	}
	return q
}

var fileTypes = map[string]bool{"file": true, "dir": true, "symlink": true, "fifo": true, "socket": true, "device": true}

func checkInfo(fi *wire.FileInfo) error {
	if !fileTypes[fi.Type] || fi.Size < 0 || len(fi.Name) > 4*sandlot.MaxPathBytes || len(fi.Mode) > 8 {
		return nonsense("it describes an impossible file")
	}
	return nil
}

// List returns a directory's entries in the order of their names: at most limit (0: 1000) after a name.
// Fails with CodeNotFound, CodeInvalidRequest (not a directory) or CodeForbidden.
func (c *Client) List(ctx context.Context, at At, after string, limit int) (wire.FileList, error) {
	q := at.values()
	if after != "" {
		q.Set("after", after)
	}
	if limit > 0 {
		q.Set("limit", strconv.Itoa(limit))
	}
	var out wire.FileList
	if err := c.call(ctx, request{method: http.MethodGet, path: wire.PathList, query: q}, nil, &out); err != nil {
		return wire.FileList{}, err
	}
	if len(out.Entries) > pageSize || len(out.Next) > sandlot.MaxPathBytes {
		return wire.FileList{}, nonsense("it lists more than a page")
	}
	for i := range out.Entries {
		if err := checkInfo(&out.Entries[i]); err != nil {
			return wire.FileList{}, err
		}
	}
	return out, nil
}

// Stat describes a file; a link itself, not what it names. Codes as of List.
func (c *Client) Stat(ctx context.Context, at At) (wire.FileInfo, error) {
	var fi wire.FileInfo
	if err := c.call(ctx, request{method: http.MethodGet, path: wire.PathStat, query: at.values()}, nil, &fi); err != nil {
		return wire.FileInfo{}, err
	}
	return fi, checkInfo(&fi)
}

// Mkdir makes a directory and its parents. Fails with CodeConflict, CodeInvalidRequest or CodeForbidden.
func (c *Client) Mkdir(ctx context.Context, at At) error {
	return c.call(ctx, request{method: http.MethodPost, path: wire.PathMkdir, query: at.values()}, nil, nil)
}

// Move renames a file. Codes as of List, and CodeConflict.
func (c *Client) Move(ctx context.Context, at At, to string) error {
	q := at.values()
	q.Set("to", to)
	return c.call(ctx, request{method: http.MethodPost, path: wire.PathMove, query: q}, nil, nil)
}

// Delete removes a file or an empty directory, recursively a full one. Codes as of List, and CodeConflict.
func (c *Client) Delete(ctx context.Context, at At, recursive bool) error {
	q := at.values()
	if recursive {
		q.Set("recursive", "1")
	}
	return c.call(ctx, request{method: http.MethodDelete, path: wire.PathContent, query: q}, nil, nil)
}

// Content is a file's bytes, or one range of them.
type Content struct {
	io.ReadCloser
	Size    int64 // of what Read returns; -1: not known
	Partial bool  // a range was asked for: it starts at Offset, in a file of Total bytes
	Offset  int64
	Total   int64
	ModTime time.Time // zero: not told
}

// Content opens a file; rng is a Range header's value or "". At most sandlot.MaxFileBytes come.
// Fails with CodeNotFound, CodeInvalidRequest (not a regular file), CodeForbidden, CodeTooLarge or CodeRange.
func (c *Client) Content(ctx context.Context, at At, rng string) (*Content, error) {
	q := request{method: http.MethodGet, path: wire.PathContent, query: at.values()}
	if rng != "" {
		q.header = http.Header{"Range": {rng}}
	}
	body, resp, err := c.download(ctx, q, sandlot.MaxFileBytes)
	if err != nil {
		return nil, err
	}
	out := &Content{ReadCloser: body, Size: resp.ContentLength, Total: resp.ContentLength}
	out.ModTime, _ = http.ParseTime(resp.Header.Get("Last-Modified"))
	if out.Size > sandlot.MaxFileBytes {
		_ = body.Close()
		return nil, nonsense("it sends a file that is over the limit")
	}
	if out.Partial = resp.StatusCode == http.StatusPartialContent; out.Partial {
		var last int64
		n, err := fmt.Sscanf(resp.Header.Get("Content-Range"), "bytes %d-%d/%d", &out.Offset, &last, &out.Total)
		if rng == "" || n != 3 || err != nil || out.Offset < 0 || last < out.Offset || last >= out.Total || last-out.Offset+1 != out.Size {
			_ = body.Close()
			return nil, nonsense("its range is impossible")
		}
	}
	return out, nil
}

// PutContent writes a file, whole or not at all; size -1 means that r alone knows it.
// Fails with CodeTooLarge, CodeInvalidRequest, CodeForbidden, CodeConflict or CodeDiskFull.
func (c *Client) PutContent(ctx context.Context, at At, r io.Reader, size int64) error {
	if size > sandlot.MaxFileBytes {
		return sandlot.Errorf(sandlot.CodeTooLarge, "a file has at most %d bytes", sandlot.MaxFileBytes)
	}
	return c.upload(ctx, request{method: http.MethodPut, path: wire.PathContent, query: at.values(), size: size}, r)
}

// ArchiveGet returns a tar of a directory, compressed when gzip is set. An error in the middle comes from Read.
// Codes as of List; from Read also CodeTooLarge, and CodeConflict when a file shrank meanwhile.
func (c *Client) ArchiveGet(ctx context.Context, at At, gzip bool) (io.ReadCloser, error) {
	q := request{method: http.MethodGet, path: wire.PathArchive, query: at.values()}
	if gzip {
		q.header = http.Header{"Accept-Encoding": {"gzip"}}
	}
	body, resp, err := c.download(ctx, q, maxTarBytes)
	if err != nil {
		return nil, err
	}
	if (resp.Header.Get("Content-Encoding") == "gzip") != gzip {
		_ = body.Close()
		return nil, nonsense("its archive's encoding is not the one asked for")
	}
	body.trailer = resp.Trailer
	return body, nil
}

// ArchivePut unpacks a tar (gzip: compressed) into a directory, which is unchanged when the archive is refused.
// Fails with CodeInvalidRequest (field member), CodeTooLarge, CodeConflict, CodeForbidden or CodeDiskFull.
func (c *Client) ArchivePut(ctx context.Context, at At, r io.Reader, size int64, gzip bool) error {
	q := request{method: http.MethodPut, path: wire.PathArchive, query: at.values(), size: size}
	if gzip {
		q.header = http.Header{"Content-Encoding": {"gzip"}}
	}
	return c.upload(ctx, q, r)
}

// download makes a call whose answer is a body of at most limit bytes.
func (c *Client) download(ctx context.Context, q request, limit int64) (*download, *http.Response, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	resp, err := c.send(ctx, c.bulk, q)
	if err != nil {
		cancel(context.Canceled)
		return nil, nil, err
	}
	d := &download{body: resp.Body, ctx: ctx, cancel: cancel, left: limit}
	d.stall = time.AfterFunc(time.Hour, func() { cancel(errNoAnswer) })
	d.stall.Stop()
	return d, resp, nil
}

// download is a bounded body that fails when the guest stalls. A reader that stalls is not the guest's fault:
// the clock only runs within Read.
type download struct {
	body    io.ReadCloser
	ctx     context.Context
	cancel  context.CancelCauseFunc
	stall   *time.Timer
	left    int64
	trailer http.Header
}

func (d *download) Read(p []byte) (int, error) {
	d.stall.Reset(stallTimeout)
	n, err := d.body.Read(p)
	d.stall.Stop()
	if d.left -= int64(n); d.left < 0 {
		return 0, nonsense("its answer is too long")
	}
	if errors.Is(err, io.EOF) {
		if t := d.trailer.Get(wire.TrailerError); t != "" {
			return n, guestError([]byte(t))
		}
		return n, io.EOF
	}
	if err != nil {
		return n, broken(d.ctx, err)
	}
	return n, nil
}

func (d *download) Close() error {
	d.stall.Stop()
	_ = d.body.Close()
	d.cancel(context.Canceled)
	return nil
}

// upload makes a call with a body, and gives up when the guest takes nothing for too long.
func (c *Client) upload(ctx context.Context, q request, r io.Reader) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(context.Canceled)
	src := &source{r: r}
	src.stall = time.AfterFunc(stallTimeout, func() { cancel(errNoAnswer) })
	defer src.end()
	q.body = src
	resp, err := c.send(ctx, c.bulk, q)
	if err != nil {
		if own := src.failed(); own != nil {
			return own
		}
		return err
	}
	_ = resp.Body.Close()
	return nil
}

// source watches how a body is taken: the clock runs while the stream is written to, and stands while the
// caller's reader is waited for.
type source struct {
	r     io.Reader
	stall *time.Timer

	mu   sync.Mutex
	over bool
	err  error // of r
}

func (s *source) Read(p []byte) (int, error) {
	s.stall.Stop()
	n, err := s.r.Read(p)
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil && !errors.Is(err, io.EOF) {
		s.err = err
	}
	if err == nil && !s.over {
		s.stall.Reset(stallTimeout)
	}
	return n, err
}

func (s *source) failed() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

func (s *source) end() {
	s.mu.Lock()
	s.over = true
	s.mu.Unlock()
	s.stall.Stop()
}

// WatchStream tells what changes in a directory.
type WatchStream struct{ *frameStream }

// Watch begins to watch; when it returns, the watch stands.
// Fails with CodeNotFound, CodeForbidden, CodeInvalidRequest or CodeRateLimited.
func (c *Client) Watch(ctx context.Context, at At, recursive bool) (*WatchStream, error) {
	q := request{method: http.MethodGet, path: wire.PathWatch, query: at.values()}
	if recursive {
		q.query.Set("recursive", "1")
	}
	fs, err := c.open(ctx, q, 0, false)
	if err != nil {
		return nil, err
	}
	kind, _, err := fs.read()
	if err == nil && kind != wire.FramePing {
		err = nonsense("its watch does not begin as it should")
	}
	if err != nil {
		fs.Close()
		return nil, err
	}
	return &WatchStream{fs}, nil
}

var fileOps = map[string]bool{"create": true, "write": true, "remove": true, "rename": true, "chmod": true, "overflow": true}

// Next returns the next event; ok is false for a sign of life without one.
func (w *WatchStream) Next() (ev wire.FileEvent, ok bool, err error) {
	kind, payload, err := w.read()
	switch {
	case err != nil:
		return wire.FileEvent{}, false, err
	case kind == wire.FramePing:
		return wire.FileEvent{}, false, nil
	case kind != wire.FrameEvent || json.Unmarshal(payload, &ev) != nil || !fileOps[ev.Op] || len(ev.Path) > 4*sandlot.MaxPathBytes:
		return wire.FileEvent{}, false, nonsense("its event is not one")
	}
	return ev, true, nil
}
