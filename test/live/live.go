// Package live gives the tests of one package one real server with real sandboxes.
package live

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"sandlot/internal/devserver"
	"sandlot/internal/testenv"
)

var shared struct {
	once   sync.Once
	server *devserver.Server
	dir    string
	err    error
}

// Pool is what the shared server keeps ready. Set it before the first test.
var Pool = map[string]int{"base": 2}

// Main runs a package's tests, stops the shared server as an operator does, and fails when the host still has
// anything of it then.
func Main(m *testing.M) {
	code := m.Run()
	if s := shared.server; s != nil {
		if err := end(s); err != nil {
			fmt.Fprintf(os.Stderr, "FAIL: %v\n", err)
			code = 1
		}
		if code != 0 {
			fmt.Fprintf(os.Stderr, "the server's log ends:\n%s\n", tail(s.Log(), 8<<10))
		}
	}
	if shared.dir != "" {
		os.RemoveAll(shared.dir)
	}
	os.Exit(code)
}

func end(s *devserver.Server) error {
	if err := s.Stop(); err != nil {
		return err
	}
	// A mount's last traces go a moment after the process that had it.
	var left []string
	for deadline := time.Now().Add(5 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		var err error
		if left, err = testenv.Owned(s.NodeDir()); err != nil {
			return err
		}
		if len(left) == 0 || time.Now().After(deadline) {
			break
		}
	}
	if len(left) > 0 {
		return fmt.Errorf("left on the host after stop and reap: %q", left)
	}
	return nil
}

func tail(s string, n int) string { return s[max(0, len(s)-n):] }

// Server is the package's server. It starts with the first test that asks.
func Server(t testing.TB) *devserver.Server {
	t.Helper()
	testenv.Root(t)
	bin := filepath.Dir(testenv.Bin(t, "sandlot"))
	templates := testenv.TemplatesDir(t)
	for name := range Pool {
		testenv.Template(t, name)
	}
	shared.once.Do(func() {
		if shared.dir, shared.err = os.MkdirTemp("", "sandlot-live"); shared.err != nil {
			return
		}
		// Not the test's context: the server outlives it.
		shared.server, shared.err = devserver.Start(context.Background(), devserver.Config{
			Bin: bin, Templates: templates, StateDir: shared.dir, Engine: "gvisor", Pool: Pool,
		})
	})
	if shared.err != nil {
		t.Fatal(shared.err)
	}
	return shared.server
}

// Box is a sandbox of the shared server that ends with its test.
type Box struct {
	*devserver.Server
	ID string
}

// New makes one; in are more fields of the request than the template base.
func New(t testing.TB, in map[string]any) Box {
	t.Helper()
	s := Server(t)
	req := map[string]any{"template": "base"}
	for k, v := range in {
		req[k] = v
	}
	sb, err := s.Create(t.Context(), req)
	if err != nil {
		t.Fatal("create:", err)
	}
	b := Box{s, sb.ID}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := s.Delete(ctx, sb.ID); err != nil {
			t.Error("delete:", err)
		}
	})
	return b
}

// Try runs a command; in are more fields of the request.
func (b Box) Try(t testing.TB, cmd any, in ...map[string]any) (devserver.Result, error) {
	req := map[string]any{"cmd": cmd}
	for _, m := range in {
		for k, v := range m {
			req[k] = v
		}
	}
	return b.Exec(t.Context(), b.ID, req)
}

// Run runs a command that must be answered.
func (b Box) Run(t testing.TB, cmd any, in ...map[string]any) devserver.Result {
	t.Helper()
	r, err := b.Try(t, cmd, in...)
	if err != nil {
		t.Fatalf("exec %v: %v", cmd, err)
	}
	return r
}

// Out runs a command that must succeed, and returns what it printed, trimmed.
func (b Box) Out(t testing.TB, cmd any, in ...map[string]any) string {
	t.Helper()
	r := b.Run(t, cmd, in...)
	if r.ExitCode != 0 {
		t.Fatalf("exec %v: %+v", cmd, r)
	}
	return strings.TrimSpace(r.Stdout)
}

// Root is the user field of a command.
var Root = map[string]any{"user": "root"}

// Do sends a request below the sandbox and returns the answer's body. A refusal is an error of type
// *devserver.StatusError.
func (b Box) Do(ctx context.Context, method, path string, body []byte, headers ...string) ([]byte, error) {
	var r io.Reader
	if body != nil {
		r = bytes.NewReader(body)
	}
	resp, err := b.Request(ctx, method, "/"+b.ID+path, r, headers...)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	return io.ReadAll(resp.Body)
}

// Put writes a file.
func (b Box) Put(t testing.TB, path string, content []byte) {
	t.Helper()
	if _, err := b.Do(t.Context(), http.MethodPut, "/files/content?path="+path, content); err != nil {
		t.Fatalf("write %s: %v", path, err)
	}
}

// Read reads a file.
func (b Box) Read(t testing.TB, path string) []byte {
	t.Helper()
	out, err := b.Do(t.Context(), http.MethodGet, "/files/content?path="+path, nil)
	if err != nil {
		t.Fatalf("read %s: %v", path, err)
	}
	return out
}

// Background starts a command and returns its pid and its log's path.
func (b Box) Background(t testing.TB, cmd any, in ...map[string]any) (pid int, log string) {
	t.Helper()
	req := map[string]any{"cmd": cmd, "background": true}
	for _, m := range in {
		for k, v := range m {
			req[k] = v
		}
	}
	var out struct {
		PID     int    `json:"pid"`
		LogPath string `json:"log_path"`
	}
	if err := b.Call(t.Context(), http.MethodPost, "/"+b.ID+"/exec", req, &out); err != nil {
		t.Fatalf("background %v: %v", cmd, err)
	}
	return out.PID, out.LogPath
}

// Event is an event of a stream.
type Event struct {
	Type       string
	Data       string
	DataBase64 string `json:"data_base64"`
	Path       string
	ExitCode   int `json:"exit_code"`
	Error      struct{ Code string }
}

// Events reads a stream of server-sent events until it ends or f says false.
func Events(r io.Reader, f func(Event) bool) error {
	sc := bufio.NewScanner(r)
	sc.Buffer(nil, 4<<20)
	for sc.Scan() {
		data, ok := strings.CutPrefix(sc.Text(), "data: ")
		if !ok {
			continue
		}
		var e Event
		if err := json.Unmarshal([]byte(data), &e); err != nil {
			return fmt.Errorf("event %.200q: %w", data, err)
		}
		if !f(e) {
			return nil
		}
	}
	return sc.Err()
}

// Logs lists the names of a sandbox's events.
func (b Box) Logs(t testing.TB) []string {
	t.Helper()
	var out struct {
		Events []struct {
			Event string `json:"event"`
		}
	}
	if err := b.Call(t.Context(), http.MethodGet, "/"+b.ID+"/logs", nil, &out); err != nil {
		t.Fatal("logs:", err)
	}
	var names []string
	for _, e := range out.Events {
		names = append(names, e.Event)
	}
	return names
}

// Eventually waits until ok says true.
func Eventually(t testing.TB, within time.Duration, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(within); !ok(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %s: %s", within, what)
		}
	}
}
