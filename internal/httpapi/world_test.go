package httpapi

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"sandlot"
	"sandlot/internal/authz"
	"sandlot/internal/engine"
	"sandlot/internal/engine/memory"
	"sandlot/internal/httpapi/route"
	"sandlot/internal/node"
	"sandlot/internal/service"
	"sandlot/internal/store/sqlite"
)

var update = flag.Bool("update", false, "write what the tests see to the files that they compare with")

// oneTemplate is a template store for the memory engine, which needs no image.
type oneTemplate struct{}

var built = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func (oneTemplate) List() ([]sandlot.Template, error) {
	t := sandlot.Template{
		Name: "python-3.12", Digest: "sha256:" + strings.Repeat("0", 64), Description: "for tests", Contents: []string{"nothing"},
		Kernels: []string{"python"}, Size: sandlot.DefaultSize, BuiltAt: built,
	}
	b := t
	b.Name = "base"
	return []sandlot.Template{b, t}, nil
}

func (o oneTemplate) Get(ref string) (sandlot.Template, error) {
	all, _ := o.List()
	for _, t := range all {
		if t.Name == ref {
			return t, nil
		}
	}
	return sandlot.Template{}, sandlot.Errorf(sandlot.CodeNotFound, "no template %q", ref)
}

// logBuffer collects logs for tests that look into them.
type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// world is the whole product above the engine, on a real listener: the memory engine's machines run the
// real agent.
type world struct {
	t       testing.TB
	dir     string
	url     string
	api     *API
	server  *Server
	service *service.Service
	store   *sqlite.Store
	authz   *authz.Authz
	log     *logBuffer
	token   string // owner's
}

func newWorld(t testing.TB, limits Limits, more ...*route.Operation) *world {
	t.Helper()
	ctx := context.Background()
	w := &world{t: t, dir: t.TempDir(), log: &logBuffer{}}
	log := slog.New(slog.NewJSONHandler(w.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	var err error
	if w.store, err = sqlite.Open(ctx, w.dir+"/db"); err != nil {
		t.Fatal(err)
	}
	host := node.NewHost(node.Config{Engines: []engine.Engine{memory.New(t.TempDir())}, Templates: oneTemplate{}, Log: log, MemoryFloor: 1})
	w.authz = authz.New(w.store, time.Now)
	w.service = service.New(service.Config{Store: w.store, Node: host, Authz: w.authz, Log: log})
	if err := w.service.FirstStart(ctx, func(first sandlot.Secret) error {
		w.token = first.Reveal()
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if err := w.service.Start(ctx); err != nil {
		t.Fatal(err)
	}
	if limits.RequestsPerSecond == 0 {
		limits.RequestsPerSecond, limits.Burst = 1e6, 1e6
	}
	w.api = New(Config{Service: w.service, Authz: w.authz, Log: log, Limits: limits, Version: "test", more: more})
	w.server = NewServer(w.api)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w.url = "http://" + ln.Addr().String()
	served := make(chan error, 1)
	go func() { served <- w.server.Serve(ln) }()
	t.Cleanup(func() {
		http.DefaultClient.CloseIdleConnections()
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		if err := w.server.Shutdown(ctx); err != nil {
			t.Errorf("shutdown: %v", err)
		}
		if err := <-served; err != nil {
			t.Errorf("serve: %v", err)
		}
		if err := w.service.Close(ctx); err != nil {
			t.Errorf("close: %v", err)
		}
		if _, err := host.Reconcile(ctx, nil); err != nil {
			t.Errorf("reap: %v", err)
		}
		if err := host.Close(); err != nil {
			t.Errorf("host: %v", err)
		}
		if err := w.store.Close(); err != nil {
			t.Errorf("store: %v", err)
		}
	})
	return w
}

const boxes = "/api/v1/projects/default/sandboxes"

// answer is a response that was read whole.
type answer struct {
	status int
	header http.Header
	body   []byte
}

func (a answer) json(t testing.TB) map[string]any {
	t.Helper()
	var m map[string]any
	if err := json.Unmarshal(a.body, &m); err != nil {
		t.Fatalf("status %d, not JSON: %q", a.status, a.body)
	}
	return m
}

// code is the error's, "" when it is none.
func (a answer) code(t testing.TB) string {
	t.Helper()
	if a.status < 400 {
		return ""
	}
	e, _ := a.json(t)["error"].(map[string]any)
	if e["message"] == "" || e["request_id"] != a.header.Get("X-Request-Id") || a.header.Get("X-Request-Id") == "" {
		t.Errorf("not the envelope: %s", a.body)
	}
	code, _ := e["code"].(string)
	return code
}

func (w *world) do(method, path, body string, header ...string) answer {
	w.t.Helper()
	return w.as(w.token, method, path, body, header...)
}

func (w *world) as(token, method, path, body string, header ...string) answer {
	w.t.Helper()
	var r io.Reader
	if body != "" {
		r = strings.NewReader(body)
	}
	req, err := http.NewRequest(method, w.url+path, r)
	if err != nil {
		w.t.Fatal(err)
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		w.t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		w.t.Fatal(err)
	}
	return answer{resp.StatusCode, resp.Header, b}
}

func (w *world) create(body string) string {
	w.t.Helper()
	a := w.do("POST", boxes, body)
	if a.status != http.StatusCreated {
		w.t.Fatalf("create: %d %s", a.status, a.body)
	}
	id, _ := a.json(w.t)["id"].(string)
	return id
}

// mint makes a token.
func (w *world) mint(body string) (id, secret string) {
	w.t.Helper()
	a := w.do("POST", "/api/v1/tokens", body)
	if a.status != http.StatusCreated {
		w.t.Fatalf("token: %d %s", a.status, a.body)
	}
	m := a.json(w.t)
	id, _ = m["id"].(string)
	secret, _ = m["token"].(string)
	return id, secret
}

// diskFiles reads everything in the state directory.
func (w *world) diskFiles() map[string]string {
	w.t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(w.dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := os.ReadFile(p)
		if len(b) > 0 {
			out[p] = string(b)
		}
		return err
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return out
}
