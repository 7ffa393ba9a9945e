package agent

import (
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"time"

	"sandlot"
	"sandlot/internal/wire"
)

// warmPatience bounds all of warm; what it has not done by then the first request does.
const warmPatience = 5 * time.Second

// warm walks the paths that a first request walks: the server's, the decoder's, fork and exec of a program and
// of a shell. In a user-space kernel a page that is touched for the first time is expensive, and a machine in
// the pool has the time. It leaves nothing behind.
func (a *Agent) warm(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, warmPatience)
	defer cancel()
	for _, argv := range [][]string{{"/bin/true"}, {"bash", "-c", "true"}} {
		e := &wire.Exec{Argv: argv, Collect: 4096, TimeoutMS: warmPatience.Milliseconds()}
		if _, err := a.collect(ctx, &identity{env: a.cfg.Boot.Env}, e); err != nil {
			a.log.Debug("warm", "argv", argv, "err", err)
		}
	}
	var in wire.Identity
	if b, err := json.Marshal(wire.Identity{ID: "warm", Entropy: make([]byte, 64), Now: a.started, Env: map[string]string{"A": "b"}}); err == nil {
		_ = json.Unmarshal(b, &in)
	}
	client, server := net.Pipe()
	defer func() { _ = client.Close() }()
	srv := &http.Server{Handler: a.handler(), ReadHeaderTimeout: warmPatience}
	go func() { _ = srv.Serve(&onceListener{conn: server, ctx: ctx}) }()
	defer func() { _ = srv.Close() }()
	_ = client.SetDeadline(time.Now().Add(warmPatience))
	tr := &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) { return client, nil }}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://warm"+wire.PathHealth, nil)
	if err != nil {
		return
	}
	if resp, err := tr.RoundTrip(req); err == nil {
		_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, sandlot.MaxBodyBytes))
		_ = resp.Body.Close()
	}
}

// onceListener accepts one connection, then waits for ctx's end.
type onceListener struct {
	conn net.Conn
	ctx  context.Context
}

func (l *onceListener) Accept() (net.Conn, error) {
	if c := l.conn; c != nil {
		l.conn = nil
		return c, nil
	}
	<-l.ctx.Done()
	return nil, net.ErrClosed
}

func (l *onceListener) Close() error   { return nil }
func (l *onceListener) Addr() net.Addr { return &net.UnixAddr{Name: "warm", Net: "unix"} }
