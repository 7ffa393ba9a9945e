package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// server is a real `sandlot serve` of this run.
type server struct {
	cmd   *exec.Cmd
	state string
	url   string
	token string
	http  *http.Client
	bin   string
	log   string
	key   string
}

// start returns a server with this engine and pool, the running one when it is the same.
func (b *bench) start(ctx context.Context, engine string, pool map[string]int) (*server, error) {
	key := fmt.Sprint(engine, pool)
	if b.srv != nil && b.srv.key == key {
		return b.srv, nil
	}
	if err := b.stopServer(); err != nil {
		return nil, err
	}
	state, err := os.MkdirTemp(b.dir, "state-")
	if err != nil {
		return nil, err
	}
	ln, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	addr := ln.Addr().String()
	ln.Close()
	var conf strings.Builder
	fmt.Fprintf(&conf, "rate_per_second = 1000000\nrate_burst = 1000000\nlog_level = \"warn\"\n[pool]\n")
	if len(pool) == 0 {
		pool = map[string]int{peerTemplate: 0} // an empty table would mean the default
	}
	for name, n := range pool {
		fmt.Fprintf(&conf, "%q = %d\n", name, n)
	}
	file := filepath.Join(state, "config.toml")
	if err := os.WriteFile(file, []byte(conf.String()), 0o600); err != nil {
		return nil, err
	}
	s := &server{state: state, url: "http://" + addr, bin: b.bin, log: filepath.Join(state, "log"), key: key}
	s.http = &http.Client{Transport: &http.Transport{
		MaxIdleConnsPerHost: 64, DisableCompression: true, WriteBufferSize: 256 << 10, ReadBufferSize: 256 << 10,
	}}
	logFile, err := os.Create(s.log)
	if err != nil {
		return nil, err
	}
	defer logFile.Close()
	s.cmd = exec.Command(filepath.Join(b.bin, "sandlot"), "serve", "--config", file, "--listen", addr, "--state-dir", state,
		"--templates", b.templates, "--engine", engine)
	s.cmd.Stdout, s.cmd.Stderr = logFile, logFile
	if err := s.cmd.Start(); err != nil {
		return nil, err
	}
	b.srv = s
	if err := s.await(ctx, pool); err != nil {
		out, _ := os.ReadFile(s.log)
		return nil, fmt.Errorf("server: %w\n%s", err, out)
	}
	return s, nil
}

// await waits until the server answers and its pools are full.
func (s *server) await(ctx context.Context, pool map[string]int) error {
	deadline := time.Now().Add(3 * time.Minute)
	for time.Now().Before(deadline) && ctx.Err() == nil {
		time.Sleep(50 * time.Millisecond)
		if s.token == "" {
			b, err := os.ReadFile(filepath.Join(s.state, "owner.token"))
			if err != nil {
				continue
			}
			s.token = strings.TrimSpace(string(b))
		}
		var out struct {
			Templates []struct {
				Name string
				Pool struct{ Ready int }
			}
		}
		if err := s.call(ctx, "GET", "/templates", nil, &out); err != nil {
			continue
		}
		full := true
		for _, t := range out.Templates {
			full = full && t.Pool.Ready >= pool[t.Name]
		}
		if full {
			return nil
		}
	}
	return errors.New("not ready in time")
}

func (b *bench) stopServer() error {
	s := b.srv
	if s == nil {
		return nil
	}
	b.srv = nil
	_ = s.cmd.Process.Signal(syscall.SIGTERM)
	done := make(chan error, 1)
	go func() { done <- s.cmd.Wait() }()
	select {
	case <-done:
	case <-time.After(60 * time.Second):
		_ = s.cmd.Process.Kill()
		<-done
	}
	if out, err := exec.Command(filepath.Join(s.bin, "sandlot"), "reap", "--state-dir", s.state).CombinedOutput(); err != nil {
		return fmt.Errorf("reap: %w: %s", err, out)
	}
	return nil
}

const base = "/api/v1/projects/default/sandboxes"

// request sends one request below the project's sandboxes.
func (s *server) request(ctx context.Context, method, path string, body io.Reader) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, s.url+base+path, body)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+s.token)
	resp, err := s.http.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode >= 400 {
		defer resp.Body.Close()
		out, _ := io.ReadAll(io.LimitReader(resp.Body, 2000))
		return nil, fmt.Errorf("%s %s: %s: %s", method, path, resp.Status, out)
	}
	return resp, nil
}

// call sends JSON and reads JSON.
func (s *server) call(ctx context.Context, method, path string, in, out any) error {
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return err
		}
		body = bytes.NewReader(b)
	}
	resp, err := s.request(ctx, method, path, body)
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

type sandbox struct {
	ID      string
	Timings struct {
		TotalMS  float64 `json:"total_ms"`
		FromPool bool    `json:"from_pool"`
		Source   string
	}
}

type execResult struct {
	ExitCode   int     `json:"exit_code"`
	Stdout     string  `json:"stdout"`
	DurationMS float64 `json:"duration_ms"`
}

func (s *server) create(ctx context.Context, in map[string]any) (sandbox, error) {
	var sb sandbox
	return sb, s.call(ctx, "POST", "", in, &sb)
}

func (s *server) exec(ctx context.Context, id string, in map[string]any) (execResult, error) {
	var r execResult
	return r, s.call(ctx, "POST", "/"+id+"/exec", in, &r)
}

func (s *server) remove(ctx context.Context, id string) error {
	return s.call(ctx, "DELETE", "/"+id, nil, nil)
}

// poolReady waits until a template's pool is full again.
func (s *server) poolReady(ctx context.Context, name string, n int) error {
	return s.await(ctx, map[string]int{name: n})
}

// rss is the memory of the server's processes (both halves), in MB.
func (s *server) rss() float64 {
	total := 0.0
	pids := []int{s.cmd.Process.Pid}
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", s.cmd.Process.Pid, s.cmd.Process.Pid))
	for _, f := range append(strings.Fields(string(b)), childrenOfThreads(s.cmd.Process.Pid)...) {
		if pid, err := strconv.Atoi(f); err == nil && strings.Contains(cmdline(pid), "serve-api") {
			pids = append(pids, pid)
			break
		}
	}
	for _, pid := range pids {
		total += procField(pid, "status", "VmRSS") / 1024
	}
	return total
}

func childrenOfThreads(pid int) (out []string) {
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, f := range files {
		b, _ := os.ReadFile(f)
		out = append(out, strings.Fields(string(b))...)
	}
	return out
}

func cmdline(pid int) string {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	return string(b)
}

// procField reads a "Key: N kB" line of a file of /proc/pid, in kB.
func procField(pid int, file, key string) float64 {
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

func kernelRelease() string {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return "unknown kernel"
	}
	return unix.ByteSliceToString(u.Sysname[:]) + " " + unix.ByteSliceToString(u.Release[:])
}

func cpus() int { return runtime.NumCPU() }
