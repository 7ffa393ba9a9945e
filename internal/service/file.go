package service

import (
	"context"
	"io"

	"sandlot"
	"sandlot/internal/authz"
	"sandlot/internal/failpoint"
	"sandlot/internal/guest"
	"sandlot/internal/wire"
)

var _ = failpoint.Declare("service.upload.begin", "service.upload.done")

// All file work happens inside the sandbox, by its agent, with the rights of the sandbox's user: a path
// never meets the host's filesystem. What is checked here is its form.

// At names a file of a sandbox: relative paths are below /workspace; User "" is the default user.
type At = guest.At

func validAt(at At) error {
	if err := validPath("path", at.Path); err != nil {
		return err
	}
	return validUser(at.User)
}

// onFile runs one request about a path.
func onFile[T any](ctx context.Context, s *Service, g authz.Grant, id sandlot.ID, at At, f func(*guest.Client) (T, error)) (T, error) {
	if err := validAt(at); err != nil {
		var zero T
		return zero, err
	}
	return call(ctx, s, g, id, f)
}

type none = struct{}

// ListFiles returns a directory's entries by name, at most limit after a name.
func (s *Service) ListFiles(ctx context.Context, g authz.Grant, id sandlot.ID, at At, after string, limit int) (wire.FileList, error) {
	return onFile(ctx, s, g, id, at, func(c *guest.Client) (wire.FileList, error) { return c.List(ctx, at, after, limit) })
}

// StatFile describes a file, a link itself.
func (s *Service) StatFile(ctx context.Context, g authz.Grant, id sandlot.ID, at At) (wire.FileInfo, error) {
	return onFile(ctx, s, g, id, at, func(c *guest.Client) (wire.FileInfo, error) { return c.Stat(ctx, at) })
}

// Mkdir makes a directory and its parents.
func (s *Service) Mkdir(ctx context.Context, g authz.Grant, id sandlot.ID, at At) error {
	_, err := onFile(ctx, s, g, id, at, func(c *guest.Client) (none, error) { return none{}, c.Mkdir(ctx, at) })
	return err
}

// MoveFile renames a file.
func (s *Service) MoveFile(ctx context.Context, g authz.Grant, id sandlot.ID, at At, to string) error {
	if err := validPath("to", to); err != nil {
		return err
	}
	_, err := onFile(ctx, s, g, id, at, func(c *guest.Client) (none, error) { return none{}, c.Move(ctx, at, to) })
	return err
}

// DeleteFile removes a file or directory.
func (s *Service) DeleteFile(ctx context.Context, g authz.Grant, id sandlot.ID, at At, recursive bool) error {
	_, err := onFile(ctx, s, g, id, at, func(c *guest.Client) (none, error) { return none{}, c.Delete(ctx, at, recursive) })
	return err
}

// WriteFile stores r as a file, whole or not at all. size -1: not known.
func (s *Service) WriteFile(ctx context.Context, g authz.Grant, id sandlot.ID, at At, r io.Reader, size int64) error {
	_, err := onFile(ctx, s, g, id, at, func(c *guest.Client) (none, error) {
		if err := failpoint.Hit(ctx, "service.upload.begin"); err != nil {
			return none{}, err
		}
		if err := c.PutContent(ctx, at, r, size); err != nil {
			return none{}, err
		}
		return none{}, failpoint.Hit(ctx, "service.upload.done")
	})
	return err
}

// Unpack stores a tar's content below a directory.
func (s *Service) Unpack(ctx context.Context, g authz.Grant, id sandlot.ID, at At, r io.Reader, size int64, gzip bool) error {
	_, err := onFile(ctx, s, g, id, at, func(c *guest.Client) (none, error) {
		if err := failpoint.Hit(ctx, "service.upload.begin"); err != nil {
			return none{}, err
		}
		return none{}, c.ArchivePut(ctx, at, r, size, gzip)
	})
	return err
}

// ReadFile opens a file's bytes, or the range that rng, a Range header's value, asks for.
func (s *Service) ReadFile(ctx context.Context, g authz.Grant, id sandlot.ID, at At, rng string) (*guest.Content, error) {
	l, release, err := s.open(ctx, g, id, at)
	if err != nil {
		return nil, err
	}
	c, err := l.guest.Content(ctx, at, rng)
	if err != nil {
		release()
		return nil, l.explain(err)
	}
	c.ReadCloser = &heldBody{c.ReadCloser, release}
	return c, nil
}

// Pack opens a tar of a directory.
func (s *Service) Pack(ctx context.Context, g authz.Grant, id sandlot.ID, at At, gzip bool) (io.ReadCloser, error) {
	l, release, err := s.open(ctx, g, id, at)
	if err != nil {
		return nil, err
	}
	r, err := l.guest.ArchiveGet(ctx, at, gzip)
	if err != nil {
		release()
		return nil, l.explain(err)
	}
	return &heldBody{r, release}, nil
}

// open holds a running sandbox for what outlives the call.
func (s *Service) open(ctx context.Context, g authz.Grant, id sandlot.ID, at At) (*live, func(), error) {
	if err := validAt(at); err != nil {
		return nil, nil, err
	}
	l, err := s.use(ctx, g, id)
	if err != nil {
		return nil, nil, err
	}
	return l, s.hold(l), nil
}

type heldBody struct {
	io.ReadCloser
	release func()
}

func (h *heldBody) Close() error {
	defer h.release()
	return h.ReadCloser.Close()
}

// Watch is a stream of changes below a directory. Close must be called.
type Watch struct {
	stream  *guest.WatchStream
	l       *live
	release func()
}

// Next returns the next change; ok is false for a sign of life.
func (w *Watch) Next() (e wire.FileEvent, ok bool, err error) {
	e, ok, err = w.stream.Next()
	return e, ok, w.l.explain(err)
}

// Close lets go.
func (w *Watch) Close() {
	w.stream.Close()
	w.release()
}

// WatchFiles begins to watch a directory; when it returns, the watch stands.
func (s *Service) WatchFiles(ctx context.Context, g authz.Grant, id sandlot.ID, at At, recursive bool) (*Watch, error) {
	l, release, err := s.open(ctx, g, id, at)
	if err != nil {
		return nil, err
	}
	w, err := l.guest.Watch(ctx, at, recursive)
	if err != nil {
		release()
		return nil, l.explain(err)
	}
	return &Watch{w, l, release}, nil
}
