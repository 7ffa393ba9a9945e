// Package guest is the host's client of the agent inside a sandbox. It believes nothing that it reads: a
// guest's root can replace the agent. Every answer is bounded in bytes and in time, every number checked,
// every text escaped; what is not as internal/wire says becomes sandlot.CodeSandboxUnhealthy.
package guest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"sync"
	"time"

	"sandlot"
	"sandlot/internal/wire"
)

const (
	callTimeout  = 30 * time.Second  // of a call that only asks something
	bulkPatience = 120 * time.Second // from a body's last byte to the answer
	stallTimeout = 60 * time.Second  // without a byte where bytes, or pings, are due
	takeTimeout  = 5 * time.Second   // of a stream's first byte
	execGrace    = 15 * time.Second  // beyond a command's own time

	maxJSON   = 16 << 20 // bytes of a JSON answer
	maxErrors = 64 << 10 // bytes of an error's body
	bufferLen = 256 << 10
)

// Client talks to one sandbox's agent. Its methods may be called from any number of goroutines.
//
// Errors are *sandlot.Error with the codes that each method lists, besides sandlot.CodeSandboxUnhealthy
// when the agent is gone or talks nonsense, and CodeTimeout when ctx's deadline passed. A cancelled ctx
// comes back as context.Canceled. A request that may have been executed is never sent twice.
type Client struct {
	calls *http.Transport // small messages
	bulk  *http.Transport // files: large buffers, which are not kept for long
}

// New makes a client whose streams come from dial: each speaks HTTP/1.1 with the agent, its hello is over.
func New(dial func(ctx context.Context) (net.Conn, error)) *Client {
	dialer := func(ctx context.Context, _, _ string) (net.Conn, error) { return take(ctx, dial) }
	return &Client{
		calls: &http.Transport{
			DialContext:            dialer,
			DisableCompression:     true,
			MaxIdleConnsPerHost:    4,
			IdleConnTimeout:        90 * time.Second,
			MaxResponseHeaderBytes: 16 << 10,
		},
		bulk: &http.Transport{
			DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
				conn, err := dialer(ctx, network, addr)
				return bulkConn{conn}, err
			},
			DisableCompression:     true,
			MaxIdleConnsPerHost:    1,
			IdleConnTimeout:        10 * time.Second,
			ResponseHeaderTimeout:  bulkPatience,
			MaxResponseHeaderBytes: 16 << 10,
			ReadBufferSize:         bufferLen,
			WriteBufferSize:        bufferLen,
		},
	}
}

// bulkConn is a stream that a body is copied to in large pieces, whatever pieces it comes in: each one costs a
// wake-up of the guest, which is dearer than copying as much.
type bulkConn struct{ net.Conn }

// pieceLen is what a copy holds of a body; a guest's socket takes as much at once.
const pieceLen = 1 << 20

var pieces = sync.Pool{New: func() any { b := make([]byte, pieceLen); return &b }}

// ReadFrom implements io.ReaderFrom.
func (c bulkConn) ReadFrom(r io.Reader) (total int64, err error) {
	buf, _ := pieces.Get().(*[]byte)
	defer pieces.Put(buf)
	for {
		n := 0
		for n < len(*buf) && err == nil {
			var k int
			k, err = r.Read((*buf)[n:])
			n += k
		}
		if n > 0 {
			w, werr := c.Write((*buf)[:n])
			total += int64(w)
			if werr != nil {
				return total, werr
			}
		}
		if err == io.EOF { //nolint:errorlint // io.Reader returns it bare
			return total, nil
		}
		if err != nil {
			return total, err
		}
	}
}

// take dials until it has a stream that is not dead: parked ones break when the machine is restored.
func take(ctx context.Context, dial func(ctx context.Context) (net.Conn, error)) (net.Conn, error) {
	for tries := 0; ; tries++ {
		conn, err := dial(ctx)
		if err != nil {
			return nil, err
		}
		_ = conn.SetWriteDeadline(time.Now().Add(takeTimeout))
		if _, err = conn.Write([]byte{wire.Take}); err == nil {
			_ = conn.SetWriteDeadline(time.Time{})
			return conn, nil
		}
		_ = conn.Close()
		if tries == 2*wire.Spares {
			return nil, err
		}
	}
}

// CloseIdle drops the streams that no call uses: after the machine was restored they lead nowhere.
func (c *Client) CloseIdle() {
	c.calls.CloseIdleConnections()
	c.bulk.CloseIdleConnections()
}

// Close is CloseIdle: what is in use ends with its call's context.
func (c *Client) Close() { c.CloseIdle() }

// request is one call.
type request struct {
	method, path string
	query        url.Values
	header       http.Header
	body         io.Reader
	size         int64 // of body; -1: not known
}

// send makes the call and returns the answer of a success. The caller closes the body.
func (c *Client) send(ctx context.Context, tr *http.Transport, q request) (*http.Response, error) {
	u := url.URL{Scheme: "http", Host: "guest", Path: q.path, RawQuery: q.query.Encode()}
	req, err := http.NewRequestWithContext(ctx, q.method, u.String(), q.body)
	if err != nil {
		return nil, sandlot.Wrap(err, sandlot.CodeInvalidRequest, "the request cannot be sent")
	}
	if q.body != nil {
		req.ContentLength = q.size
		if q.size == 0 {
			req.Body = http.NoBody
		}
	}
	for k, v := range q.header {
		req.Header[k] = v
	}
	resp, err := tr.RoundTrip(req)
	if err != nil {
		return nil, broken(ctx, err)
	}
	if resp.StatusCode >= 200 && resp.StatusCode < 300 {
		return resp, nil
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode < 400 {
		return nil, nonsense("it answered with status %d", resp.StatusCode)
	}
	b, err := readAll(resp.Body, maxErrors)
	if err != nil {
		return nil, broken(ctx, err)
	}
	return nil, guestError(b)
}

// call sends a JSON value, when there is one, and reads a JSON answer, when there is one.
func (c *Client) call(ctx context.Context, q request, in, out any) error {
	return c.callFor(ctx, callTimeout, q, in, out)
}

// callFor is call with another patience.
func (c *Client) callFor(ctx context.Context, patience time.Duration, q request, in, out any) error {
	ctx, cancel := context.WithTimeoutCause(ctx, patience, errNoAnswer)
	defer cancel()
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return sandlot.Wrap(err, sandlot.CodeInvalidRequest, "the request cannot be written as JSON")
		}
		q.body, q.size = bytes.NewReader(b), int64(len(b))
	}
	resp, err := c.send(ctx, c.calls, q)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := readAll(resp.Body, maxJSON)
	if err != nil {
		return broken(ctx, err)
	}
	if out == nil {
		return nil
	}
	if err := json.Unmarshal(b, out); err != nil {
		return nonsense("its answer is not the JSON that was expected")
	}
	return nil
}

var (
	errTooLong  = errors.New("guest: the answer is too long")
	errNoAnswer = errors.New("guest: no answer in time")
)

// readAll reads to the end, which must come within limit bytes.
func readAll(r io.Reader, limit int64) ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err == nil && int64(len(b)) > limit {
		err = errTooLong
	}
	return b, err
}

// Health asks how the agent is.
func (c *Client) Health(ctx context.Context) (wire.Health, error) {
	var h wire.Health
	if err := c.call(ctx, request{method: http.MethodGet, path: wire.PathHealth}, nil, &h); err != nil {
		return wire.Health{}, err
	}
	if h.ID != "" {
		if _, err := sandlot.ParseID(h.ID); err != nil {
			return wire.Health{}, nonsense("its id is not one")
		}
	}
	return h, nil
}

// Identify makes the machine somebody's sandbox. The same identity again is fine; another one fails with
// CodeConflict.
func (c *Client) Identify(ctx context.Context, id wire.Identity) error {
	return c.call(ctx, request{method: http.MethodPost, path: wire.PathIdentity}, id, nil)
}

// Stats counts the sandbox's processes, as the guest sees them.
func (c *Client) Stats(ctx context.Context) (wire.Stats, error) {
	var s wire.Stats
	if err := c.call(ctx, request{method: http.MethodGet, path: wire.PathStats}, nil, &s); err != nil {
		return wire.Stats{}, err
	}
	if s.Processes < 0 || s.Processes > maxPID {
		return wire.Stats{}, nonsense("its count of processes is impossible")
	}
	return s, nil
}

// BenchForkExec has the agent time its own fork and exec.
func (c *Client) BenchForkExec(ctx context.Context, e wire.Exec) (wire.Bench, error) {
	var b wire.Bench
	err := c.call(ctx, request{method: http.MethodPost, path: wire.PathForkExec}, e, &b)
	return b, err
}

// BenchSink sends r's bytes to be thrown away.
func (c *Client) BenchSink(ctx context.Context, r io.Reader, size int64) error {
	resp, err := c.send(ctx, c.bulk, request{method: http.MethodPost, path: wire.PathSink, body: r, size: size})
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

// BenchSource returns n zeros.
func (c *Client) BenchSource(ctx context.Context, n int64) (io.ReadCloser, error) {
	q := request{method: http.MethodGet, path: wire.PathSource, query: url.Values{"bytes": {itoa(n)}}}
	resp, err := c.send(ctx, c.bulk, q)
	if err != nil {
		return nil, err
	}
	return resp.Body, nil
}
