package route

import (
	"context"
	"errors"
	"io"
	"math"
	"net/http"
	"os"
	"sync"
	"time"

	"sandlot"
)

// transferBuffer is what a transfer holds of a file, however large the file is.
const transferBuffer = 256 << 10

var buffers = sync.Pool{New: func() any { b := make([]byte, transferBuffer); return &b }}

// Copy sends src as the body of the answer. A client that takes nothing for q.Stall is gone.
func (q *Request) Copy(src io.Reader) error {
	rc := http.NewResponseController(q.W)
	buf, _ := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	for {
		n, rerr := src.Read(*buf)
		if n > 0 {
			_ = rc.SetWriteDeadline(time.Now().Add(q.Stall))
			if _, err := q.W.Write((*buf)[:n]); err != nil {
				return context.Canceled
			}
		}
		if rerr == io.EOF { //nolint:errorlint // io.Reader returns it bare
			return nil
		}
		if rerr != nil {
			return rerr
		}
	}
}

// Upload is the request's body, at most limit bytes of it. A client that sends nothing for q.Stall is gone.
func (q *Request) Upload(limit int64) io.ReadCloser {
	return &upload{q: q, body: http.MaxBytesReader(q.W, q.R.Body, limit), limit: limit, rc: http.NewResponseController(q.W)}
}

type upload struct {
	q     *Request
	body  io.ReadCloser
	limit int64
	rc    *http.ResponseController
	next  time.Time
}

func (u *upload) Read(b []byte) (int, error) {
	if now := time.Now(); now.After(u.next) { // not at each read: it is a timer
		_ = u.rc.SetReadDeadline(now.Add(u.q.Stall))
		u.next = now.Add(u.q.Stall / 8)
	}
	n, err := u.body.Read(b)
	switch {
	case err == nil:
		return n, nil
	case errors.Is(err, io.EOF):
		// The connection's own watch for a client that goes away must not run into the deadline. After any
		// other end it stays: what is left of the body must not keep the connection for ever.
		_ = u.rc.SetReadDeadline(time.Time{})
		return n, io.EOF
	}
	return n, u.fail(err)
}

func (u *upload) Close() error { return u.body.Close() }

// fail gives words to a body that ends before it should.
func (u *upload) fail(err error) error {
	var large *http.MaxBytesError
	switch {
	case errors.As(err, &large):
		return sandlot.Errorf(sandlot.CodeTooLarge, "the body has more than %d bytes", u.limit).With("limit", u.limit)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return sandlot.Wrap(err, sandlot.CodeTimeout, "the rest of the body did not come")
	}
	return sandlot.Wrap(err, sandlot.CodeInvalidRequest, "the body ended before its end")
}

// Seconds is n seconds, without overflow.
func Seconds(n int64) time.Duration {
	const most = math.MaxInt64 / int64(time.Second)
	return time.Duration(min(max(n, -most), most)) * time.Second
}
