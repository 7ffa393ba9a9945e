// Package devserver runs a real `sandlot serve` as a process of its own, for end-to-end tests and benches.
package devserver

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Config says which server to run.
type Config struct {
	Bin       string // directory of sandlot, sandlot-agent and runsc
	Templates string // the template store
	StateDir  string // exists
	Engine    string // "gvisor" or "memory"
	Pool      map[string]int
	Options   string   // more lines of its configuration file, before the pool's
	Env       []string // more than its own fixed environment
}

// Server is a running server.
type Server struct {
	URL   string
	Token string
	HTTP  *http.Client

	cfg  Config
	addr string
	cmd  *exec.Cmd
	done chan error
}

const (
	startPatience = 3 * time.Minute
	stopPatience  = time.Minute
)

// Start starts a server and waits until it is ready and its pools are full.
func Start(ctx context.Context, cfg Config) (*Server, error) {
	ln, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	s := &Server{cfg: cfg, addr: ln.Addr().String(), HTTP: &http.Client{Transport: &http.Transport{
		MaxIdleConnsPerHost: 64, DisableCompression: true, WriteBufferSize: 256 << 10, ReadBufferSize: 256 << 10,
	}}}
	ln.Close()
	s.URL = "http://" + s.addr
	return s, s.Restart(ctx, cfg.Env...)
}

// StateDir is the server's.
func (s *Server) StateDir() string { return s.cfg.StateDir }

// NodeDir is the node half's state directory.
func (s *Server) NodeDir() string { return filepath.Join(s.cfg.StateDir, "node") }

// PID is the node half's process, the parent of the HTTP half's.
func (s *Server) PID() int { return s.cmd.Process.Pid }

func (s *Server) logFile() string { return filepath.Join(s.cfg.StateDir, "server.log") }

// Log is all that the server has logged.
func (s *Server) Log() string {
	b, _ := os.ReadFile(s.logFile())
	return string(b)
}

// Restart starts the server again at the same address, with these variables more in its environment.
func (s *Server) Restart(ctx context.Context, env ...string) error {
	var conf strings.Builder
	conf.WriteString("rate_per_second = 1000000\nrate_burst = 1000000\nallow_failpoints = true\n" + s.cfg.Options + "\n[pool]\n")
	pool := map[string]int{"base": 0} // an empty table would mean the default
	maps.Copy(pool, s.cfg.Pool)
	for name, n := range pool {
		fmt.Fprintf(&conf, "%q = %d\n", name, n)
	}
	file := filepath.Join(s.cfg.StateDir, "config.toml")
	if err := os.WriteFile(file, []byte(conf.String()), 0o600); err != nil {
		return err
	}
	log, err := os.OpenFile(s.logFile(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	s.cmd = exec.Command(filepath.Join(s.cfg.Bin, "sandlot"), "serve", "--config", file, "--listen", s.addr, //nolint:gosec,noctx // Stop ends it
		"--state-dir", s.cfg.StateDir, "--templates", s.cfg.Templates, "--engine", s.cfg.Engine)
	s.cmd.Env = append([]string{"PATH=" + os.Getenv("PATH")}, env...)
	s.cmd.Stdout, s.cmd.Stderr = log, log
	if err := s.cmd.Start(); err != nil {
		return err
	}
	s.done = make(chan error, 1)
	go func(cmd *exec.Cmd, done chan<- error) { done <- cmd.Wait() }(s.cmd, s.done)
	if err := s.Await(ctx); err != nil {
		s.Kill()
		return fmt.Errorf("server: %w\n%s", err, s.Log())
	}
	return nil
}

// Await waits until the server is ready and its pools are full.
func (s *Server) Await(ctx context.Context) error {
	deadline := time.Now().Add(startPatience)
	for time.Now().Before(deadline) && ctx.Err() == nil {
		select {
		case err := <-s.done:
			s.done <- err
			return fmt.Errorf("it ended: %w", err)
		case <-time.After(20 * time.Millisecond):
		}
		b, err := os.ReadFile(filepath.Join(s.cfg.StateDir, "owner.token"))
		if err != nil {
			continue
		}
		s.Token = strings.TrimSpace(string(b))
		if ready, err := s.ready(ctx); err == nil && ready {
			return nil
		}
	}
	return errors.Join(errors.New("not ready in time"), context.Cause(ctx))
}

func (s *Server) ready(ctx context.Context) (bool, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.URL+"/readyz", nil)
	if err != nil {
		return false, err
	}
	resp, err := s.HTTP.Do(req)
	if err != nil {
		return false, err
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return false, nil
	}
	var out struct {
		Templates []struct {
			Name string
			Pool struct{ Ready int }
		}
	}
	if err := s.Call(ctx, http.MethodGet, "/templates", nil, &out); err != nil {
		return false, err
	}
	for _, t := range out.Templates {
		if t.Pool.Ready < s.cfg.Pool[t.Name] {
			return false, nil
		}
	}
	return true, nil
}

// Kill ends the node half with SIGKILL; the HTTP half goes with it.
func (s *Server) Kill() {
	_ = s.cmd.Process.Kill()
	_ = s.Wait()
}

// Wait waits until the server has ended by itself.
func (s *Server) Wait() error {
	err := <-s.done
	s.done <- err
	s.HTTP.CloseIdleConnections()
	return err
}

// Stop ends the server as an operator does, and removes all machines of its state directory.
func (s *Server) Stop() error {
	_ = s.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case err := <-s.done:
		s.done <- err
	case <-time.After(stopPatience):
		s.Kill()
		return errors.New("the server did not stop in time")
	}
	s.HTTP.CloseIdleConnections()
	if s.cfg.Engine != "gvisor" {
		return nil
	}
	out, err := exec.Command(filepath.Join(s.cfg.Bin, "sandlot"), "reap", "--state-dir", s.cfg.StateDir).CombinedOutput() //nolint:gosec,noctx // bounded by itself
	if err != nil {
		return fmt.Errorf("reap: %w: %s", err, out)
	}
	return nil
}

// base is the path of the project's sandboxes.
const base = "/api/v1/projects/default/sandboxes"

// StatusError is an answer of 400 and up.
type StatusError struct {
	Status int
	Code   string
	Body   string
}

func (e *StatusError) Error() string { return fmt.Sprintf("status %d: %s", e.Status, e.Body) }

// Upload sends a body of a known size below the project's sandboxes. The caller closes the answer's body.
func (s *Server) Upload(ctx context.Context, path string, body io.Reader, size int64) (*http.Response, error) {
	return s.send(ctx, http.MethodPut, path, body, size)
}

// Request sends a request below the project's sandboxes, or at a whole path, /api/…. The caller closes the answer's body.
func (s *Server) Request(ctx context.Context, method, path string, body io.Reader, headers ...string) (*http.Response, error) {
	return s.send(ctx, method, path, body, 0, headers...)
}

func (s *Server) send(ctx context.Context, method, path string, body io.Reader, size int64, headers ...string) (*http.Response, error) {
	if !strings.HasPrefix(path, "/api/") {
		path = base + path
	}
	req, err := http.NewRequestWithContext(ctx, method, s.URL+path, body)
	if err != nil {
		return nil, err
	}
	if size > 0 {
		req.ContentLength = size
	}
	req.Header.Set("Authorization", "Bearer "+s.Token)
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	resp, err := s.HTTP.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode < 400 {
		return resp, nil
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	var envelope struct{ Error struct{ Code string } }
	_ = json.Unmarshal(b, &envelope)
	return nil, &StatusError{Status: resp.StatusCode, Code: envelope.Error.Code, Body: string(b)}
}

// Call sends JSON and reads JSON.
func (s *Server) Call(ctx context.Context, method, path string, in, out any) error {
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return err
		}
		body = bytes.NewReader(b)
	}
	resp, err := s.Request(ctx, method, path, body)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if out == nil {
		_, err = io.Copy(io.Discard, resp.Body)
		return err
	}
	return json.NewDecoder(resp.Body).Decode(out)
}

// Sandbox is what a create answers, as far as tests and benches look.
type Sandbox struct {
	ID      string `json:"id"`
	State   string `json:"state"`
	Reason  string `json:"reason"`
	Timings struct {
		TotalMS  float64 `json:"total_ms"`
		FromPool bool    `json:"from_pool"`
		Source   string  `json:"source"`
		AgentMS  float64 `json:"agent_ms"`
	} `json:"timings"`
}

// Result is what an exec answers.
type Result struct {
	ExitCode   int     `json:"exit_code"`
	Stdout     string  `json:"stdout"`
	Stderr     string  `json:"stderr"`
	DurationMS float64 `json:"duration_ms"`
	TimedOut   bool    `json:"timed_out"`
	Signal     string  `json:"signal"`
}

// Create creates a sandbox.
func (s *Server) Create(ctx context.Context, in map[string]any) (Sandbox, error) {
	var sb Sandbox
	return sb, s.Call(ctx, http.MethodPost, "", in, &sb)
}

// Exec runs a command.
func (s *Server) Exec(ctx context.Context, id string, in map[string]any) (Result, error) {
	var r Result
	return r, s.Call(ctx, http.MethodPost, "/"+id+"/exec", in, &r)
}

// Get reads a sandbox.
func (s *Server) Get(ctx context.Context, id string) (Sandbox, error) {
	var sb Sandbox
	return sb, s.Call(ctx, http.MethodGet, "/"+id, nil, &sb)
}

// Delete deletes a sandbox.
func (s *Server) Delete(ctx context.Context, id string) error {
	return s.Call(ctx, http.MethodDelete, "/"+id, nil, nil)
}

// APIPID is the HTTP half's process, 0 when it does not run.
func (s *Server) APIPID() int {
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", s.PID()))
	for _, f := range files {
		b, _ := os.ReadFile(f)
		for field := range strings.FieldsSeq(string(b)) {
			cmdline, _ := os.ReadFile("/proc/" + field + "/cmdline")
			if pid, err := strconv.Atoi(field); err == nil && strings.Contains(string(cmdline), "serve-api") {
				return pid
			}
		}
	}
	return 0
}

// RSS is the resident memory of both halves, in MB.
func (s *Server) RSS() float64 {
	return (ProcKB(s.PID(), "status", "VmRSS") + ProcKB(s.APIPID(), "status", "VmRSS")) / 1024
}

// ProcKB reads a "Key: N kB" line of a file of /proc/pid. It is 0 when there is none.
func ProcKB(pid int, file, key string) float64 {
	f, err := os.Open(fmt.Sprintf("/proc/%d/%s", pid, file))
	if err != nil {
		return 0
	}
	defer f.Close()
	for sc := bufio.NewScanner(f); sc.Scan(); {
		if rest, ok := strings.CutPrefix(sc.Text(), key+":"); ok {
			n, _ := strconv.ParseFloat(strings.Fields(rest)[0], 64)
			return n
		}
	}
	return 0
}
