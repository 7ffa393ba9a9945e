package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"runtime/debug"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"sandlot"
	"sandlot/internal/engine/channel"
)

// The Node interface over a Unix socket: HTTP/1.1 with JSON, one POST per method at "/"+method. Three methods
// differ: "events" and "build" answer with a line of JSON per event, and "dial" answers 101 and passes the stream's
// descriptor with the answer's bytes (SCM_RIGHTS), so that what a guest sends never passes through the
// process that is root.

const (
	maxNodeBody = 4 << 20
	// dialAnswer is the whole answer of a dial that worked.
	dialAnswer = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: fd\r\nConnection: Upgrade\r\n\r\n"
)

// failure carries an error over the socket.
type failure struct {
	Code    sandlot.Code   `json:"code"`
	Message string         `json:"message"`
	Fields  map[string]any `json:"fields,omitempty"`
}

type idRequest struct {
	ID sandlot.ID `json:"id"`
}

type templateRequest struct {
	Project sandlot.ID `json:"project"`
	Ref     string     `json:"ref"`
}

type idsRequest struct {
	IDs []sandlot.ID `json:"ids"`
}

// Listen listens on a Unix socket that uid alone may use. An old socket there is replaced.
func Listen(path string, uid int) (*net.UnixListener, error) {
	if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
		return nil, err
	}
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, err
	}
	if err := errors.Join(os.Chmod(path, 0o600), os.Chown(path, uid, -1)); err != nil {
		ln.Close()
		return nil, err
	}
	return ln, nil
}

// Serve answers for n on ln until ctx ends. Only processes of uid and of root are served.
func Serve(ctx context.Context, ln net.Listener, n Node, uid int, log *slog.Logger) error {
	s := &server{n: n, log: log}
	mux := http.NewServeMux()
	handle(s, mux, "reconcile", func(ctx context.Context, r idsRequest) (any, error) { return n.Reconcile(ctx, r.IDs) })
	handle(s, mux, "create", func(ctx context.Context, r CreateRequest) (any, error) {
		made, err := n.Create(ctx, r)
		if err == nil && ctx.Err() != nil { // the caller died meanwhile: nobody will own it
			return nil, errors.Join(context.Cause(ctx), n.Destroy(context.WithoutCancel(ctx), made.ID))
		}
		return made, err
	})
	handle(s, mux, "destroy", func(ctx context.Context, r idRequest) (any, error) { return struct{}{}, n.Destroy(ctx, r.ID) })
	handle(s, mux, "samples", func(ctx context.Context, r idsRequest) (any, error) { return n.Samples(ctx, r.IDs) })
	handle(s, mux, "machines", func(ctx context.Context, _ struct{}) (any, error) { return n.Machines(ctx) })
	handle(s, mux, "templates", func(ctx context.Context, r templateRequest) (any, error) { return n.Templates(ctx, r.Project) })
	handle(s, mux, "versions", func(ctx context.Context, r templateRequest) (any, error) { return n.Versions(ctx, r.Project, r.Ref) })
	handle(s, mux, "remove-template", func(ctx context.Context, r templateRequest) (any, error) {
		return struct{}{}, n.RemoveTemplate(ctx, r.Project, r.Ref)
	})
	handle(s, mux, "info", func(ctx context.Context, _ struct{}) (any, error) { return n.Info(ctx) })
	mux.HandleFunc("POST /events", s.events)
	mux.HandleFunc("POST /dial", s.dial)
	mux.HandleFunc("POST /build", s.build)
	srv := &http.Server{
		Handler:           mux,
		ReadHeaderTimeout: 10 * time.Second,
		MaxHeaderBytes:    16 << 10,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelWarn),
		BaseContext:       func(net.Listener) context.Context { return ctx },
	}
	stop := context.AfterFunc(ctx, func() {
		// In-flight calls get a moment; machines do not depend on them.
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
		defer cancel()
		if srv.Shutdown(grace) != nil {
			srv.Close()
		}
	})
	defer stop()
	err := srv.Serve(peerListener{ln, uid})
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

type server struct {
	n   Node
	log *slog.Logger
}

// handle registers one method.
func handle[In any](s *server, mux *http.ServeMux, name string, f func(context.Context, In) (any, error)) {
	mux.HandleFunc("POST /"+name, func(w http.ResponseWriter, r *http.Request) {
		defer s.recover(w)
		var in In
		if err := decode(w, r, &in); err != nil {
			s.fail(w, err)
			return
		}
		out, err := f(r.Context(), in)
		if err != nil {
			s.fail(w, err)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(out) // the caller is gone
	})
}

func decode(w http.ResponseWriter, r *http.Request, in any) error {
	err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxNodeBody)).Decode(in)
	if err != nil && !errors.Is(err, io.EOF) {
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "bad request: %w", err)
	}
	return nil
}

func (s *server) recover(w http.ResponseWriter) {
	if p := recover(); p != nil {
		s.log.Error("panic in the node", "panic", p, "stack", string(debug.Stack()))
		s.fail(w, fmt.Errorf("panic: %v", p))
	}
}

func (s *server) fail(w http.ResponseWriter, err error) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusUnprocessableEntity)
	_ = json.NewEncoder(w).Encode(s.failure(err))
}

func (s *server) failure(err error) failure {
	f := failure{Code: sandlot.ErrorCode(err), Message: "the node failed; its log says why"}
	var e *sandlot.Error
	if errors.As(err, &e) {
		f.Message, f.Fields = e.Message, e.Fields
	}
	if f.Code == sandlot.CodeInternal {
		s.log.Error("node call failed", "err", err)
	}
	return f
}

func (s *server) build(w http.ResponseWriter, r *http.Request) {
	defer s.recover(w)
	var in BuildRequest
	if err := decode(w, r, &in); err != nil {
		s.fail(w, err)
		return
	}
	rc := http.NewResponseController(w)
	var mu sync.Mutex
	enc := json.NewEncoder(w)
	send := func(news buildNews) {
		mu.Lock()
		defer mu.Unlock()
		_ = enc.Encode(news) // the end of the caller ends r's context, and with it the build
		_ = rc.Flush()
	}
	t, err := s.n.BuildTemplate(r.Context(), in, func(line string) { send(buildNews{Log: line}) })
	if err != nil {
		f := s.failure(err)
		send(buildNews{Failure: &f})
		return
	}
	send(buildNews{Done: &t})
}

func (s *server) events(w http.ResponseWriter, r *http.Request) {
	ch, err := s.n.Events(r.Context())
	if err != nil {
		s.fail(w, err)
		return
	}
	rc := http.NewResponseController(w)
	w.WriteHeader(http.StatusOK)
	_ = rc.Flush()
	enc := json.NewEncoder(w)
	for e := range ch {
		if enc.Encode(e) != nil || rc.Flush() != nil {
			return
		}
	}
}

func (s *server) dial(w http.ResponseWriter, r *http.Request) {
	var in idRequest
	if err := decode(w, r, &in); err != nil {
		s.fail(w, err)
		return
	}
	guest, err := s.n.Dial(r.Context(), in.ID)
	if err != nil {
		s.fail(w, err)
		return
	}
	end, ok := guest.(*net.UnixConn)
	if !ok { // its relay keeps it, for as long as the other end is open
		if end, err = relay(guest); err != nil {
			guest.Close()
			s.fail(w, err)
			return
		}
	}
	defer end.Close() // the caller has a descriptor of its own by then
	c, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		s.fail(w, err)
		return
	}
	defer c.Close()
	uc, ok := c.(*net.UnixConn)
	if !ok {
		return
	}
	rc, err := end.SyscallConn()
	if err != nil {
		return
	}
	_ = rc.Control(func(fd uintptr) {
		_, _, err = uc.WriteMsgUnix([]byte(dialAnswer), unix.UnixRights(int(fd)), nil)
	})
}

// relay gives a stream that is no socket of this host (a virtio port, a remote node) a descriptor.
func relay(guest net.Conn) (*net.UnixConn, error) {
	ours, theirs, err := channel.Pair()
	if err != nil {
		return nil, err
	}
	pump := func(dst, src net.Conn) {
		_, _ = io.Copy(dst, src)
		dst.Close()
		src.Close()
	}
	go pump(ours, guest)
	go pump(guest, ours)
	return theirs, nil
}

// peerListener turns away processes of other users.
type peerListener struct {
	net.Listener
	uid int
}

func (l peerListener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if uid, err := peerUID(c); err == nil && (uid == l.uid || uid == 0) {
			return c, nil
		}
		c.Close()
	}
}

func peerUID(c net.Conn) (int, error) {
	uc, ok := c.(*net.UnixConn)
	if !ok {
		return 0, errors.New("not a Unix socket")
	}
	rc, err := uc.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	if cerr := rc.Control(func(fd uintptr) {
		cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); cerr != nil {
		return 0, cerr
	}
	if err != nil {
		return 0, err
	}
	return int(cred.Uid), nil
}
