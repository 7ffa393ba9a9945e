package httpapi

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"time"
)

// Server serves an API on listeners, with bounds on what a connection may do.
type Server struct {
	api  *API
	http http.Server
}

// NewServer makes a Server. There are no whole-request timeouts: uploads and streams last as long as they
// move, which each of them bounds by itself.
func NewServer(api *API) *Server {
	return &Server{api: api, http: http.Server{
		Handler:           api,
		ReadHeaderTimeout: api.limits.Header,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    64 << 10,
		ErrorLog:          slog.NewLogLogger(api.log.Handler(), slog.LevelDebug),
	}}
}

// Serve answers on ln until Shutdown, and returns nil then.
func (s *Server) Serve(ln net.Listener) error {
	if err := s.http.Serve(ln); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// Shutdown takes no more requests. Streams end at once with an event that says so; other requests have
// until ctx ends, then they are answered with shutting_down.
func (s *Server) Shutdown(ctx context.Context) error {
	s.api.stopping()
	err := s.http.Shutdown(ctx)
	for err == nil && s.api.streams.Load() > 0 { // WebSockets, which http.Server knows nothing of any more
		select {
		case <-ctx.Done():
			err = ctx.Err()
		case <-time.After(5 * time.Millisecond):
		}
	}
	if err == nil {
		return nil
	}
	s.api.halt()
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	if err := s.http.Shutdown(last); err == nil {
		return nil
	}
	return s.http.Close()
}
