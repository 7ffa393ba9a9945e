package kernel

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	runcode "sandlot/conformance/run-code"
)

// patience is how long a cell may take before the test gives up. It is not a promise.
const patience = time.Minute

// python is the interpreter of the tests: one that has what the corpus needs, when SANDLOT_PYTHON names one.
func python() string {
	if p := os.Getenv("SANDLOT_PYTHON"); p != "" {
		return p
	}
	return "python3"
}

// script is the program that runs JavaScript: SANDLOT_NODE may name another node, or bun.
func script() string {
	if p := os.Getenv("SANDLOT_NODE"); p != "" {
		return p
	}
	return "node"
}

// process is a kernel as the agent would start it, without a sandbox around it.
type process struct {
	t      *testing.T
	cmd    *exec.Cmd
	sock   int
	pipes  [2]int // its stdout and stderr
	said   [2]bytes.Buffer
	in     []byte // messages that are not looked at yet
	id     int
	closed bool // the kernel has closed its end
}

// message is what a kernel says.
type message struct {
	Type      string         `json:"type"`
	ID        int            `json:"id"`
	Main      bool           `json:"main"`
	Data      map[string]any `json:"data"`
	Name      string         `json:"name"`
	Value     string         `json:"value"`
	Traceback string         `json:"traceback"`
	Count     int            `json:"count"`
}

// install writes a bridge where a kernel can be started from.
func install(t *testing.T, name string) string {
	t.Helper()
	content, err := Files.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(file, content, 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// start starts a kernel and waits until it is ready.
func start(t *testing.T, language string, env ...string) *process {
	t.Helper()
	program, bridge := python(), "bridge.py"
	if language != "python" {
		program, bridge = script(), "bridge.mjs"
	}
	p := &process{t: t, cmd: exec.Command(program, install(t, bridge))} //nolint:gosec,noctx // of the test's own choosing
	p.cmd.Dir = t.TempDir()
	p.cmd.Env = append(os.Environ(), env...)
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	p.sock = ends[0]
	files := []*os.File{os.NewFile(uintptr(ends[1]), "kernel")}
	for i := range p.pipes {
		var two [2]int
		if err := unix.Pipe2(two[:], unix.O_CLOEXEC); err != nil {
			t.Fatal(err)
		}
		p.pipes[i] = two[0]
		files = append(files, os.NewFile(uintptr(two[1]), "pipe"))
	}
	p.cmd.ExtraFiles, p.cmd.Stdout, p.cmd.Stderr = files[:1], files[1], files[2]
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		_ = f.Close()
	}
	for _, fd := range []int{p.sock, p.pipes[0], p.pipes[1]} {
		if err := unix.SetNonblock(fd, true); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		_ = unix.Kill(-p.cmd.Process.Pid, unix.SIGKILL)
		_ = p.cmd.Wait()
		for _, fd := range []int{p.sock, p.pipes[0], p.pipes[1]} {
			_ = unix.Close(fd)
		}
	})
	if m := p.next(); m == nil || m.Type != "ready" {
		t.Fatalf("the kernel says %+v instead of ready; stderr %q", m, p.said[1].String())
	}
	return p
}

func (p *process) send(v any) {
	p.t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		p.t.Fatal(err)
	}
	p.write(append(b, '\n'))
}

func (p *process) write(b []byte) {
	p.t.Helper()
	for len(b) > 0 {
		n, err := unix.Write(p.sock, b)
		switch {
		case errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR):
			_, _ = unix.Poll([]unix.PollFd{{Fd: int32(p.sock), Events: unix.POLLOUT}}, 100) //nolint:gosec // a descriptor
		case err != nil:
			p.t.Fatal("the kernel does not read:", err)
		default:
			b = b[n:]
		}
	}
}

// next returns the next message and reads the outputs meanwhile; nil when the kernel has closed its end.
func (p *process) next() *message {
	p.t.Helper()
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); {
		if line, rest, ok := bytes.Cut(p.in, []byte("\n")); ok {
			p.in = rest
			m := new(message)
			if err := json.Unmarshal(line, m); err != nil {
				p.t.Fatalf("the kernel says %.300q: %v", line, err)
			}
			return m
		}
		if p.closed {
			return nil
		}
		fds := make([]unix.PollFd, 0, 3)
		for _, fd := range []int{p.sock, p.pipes[0], p.pipes[1]} {
			fds = append(fds, unix.PollFd{Fd: int32(fd), Events: unix.POLLIN}) //nolint:gosec // a descriptor
		}
		_, _ = unix.Poll(fds, 1000)
		p.drain()
		b := make([]byte, 1<<16)
		switch n, err := unix.Read(p.sock, b); {
		case n > 0:
			p.in = append(p.in, b[:n]...)
		case err == nil || errors.Is(err, unix.ECONNRESET):
			p.closed = true
		}
	}
	p.t.Fatalf("the kernel does not answer; stdout %.300q, stderr %.300q", p.said[0].String(), p.said[1].String())
	return nil
}

// drain reads what is in the pipes.
func (p *process) drain() {
	b := make([]byte, 1<<16)
	for i, fd := range p.pipes {
		for {
			n, err := unix.Read(fd, b)
			if n <= 0 {
				if errors.Is(err, unix.EINTR) {
					continue
				}
				break
			}
			p.said[i].Write(b[:n])
		}
	}
}

// begin sends a cell.
func (p *process) begin(language, code string) {
	p.id++
	p.send(map[string]any{"op": "run", "id": p.id, "language": language, "code": code})
}

// end takes a cell's messages until it is done. Without a kernel left the error is "dead".
func (p *process) end() runcode.Answer {
	p.t.Helper()
	var a runcode.Answer
	for {
		m := p.next()
		if m == nil {
			a.Error = &runcode.Failure{Name: "dead"}
			break
		}
		if m.ID != p.id {
			p.t.Fatalf("a message of cell %d in cell %d: %+v", m.ID, p.id, m)
		}
		switch m.Type {
		case "result":
			a.Results = append(a.Results, m.Data)
			continue
		case "error":
			if a.Error != nil {
				p.t.Fatalf("two errors: %+v, %+v", *a.Error, m)
			}
			a.Error = &runcode.Failure{Name: m.Name, Value: m.Value, Traceback: m.Traceback}
			continue
		case "done":
		default:
			p.t.Fatalf("a message of an unknown kind: %+v", m)
		}
		break
	}
	p.drain()
	a.Stdout, a.Stderr = strings.ToValidUTF8(p.said[0].String(), "\ufffd"), strings.ToValidUTF8(p.said[1].String(), "\ufffd")
	p.said[0].Reset()
	p.said[1].Reset()
	return a
}

func (p *process) run(language, code string) runcode.Answer {
	p.t.Helper()
	p.begin(language, code)
	return p.end()
}

// interrupt waits until the running cell has printed what, and interrupts it.
func (p *process) interrupt(what string) {
	p.t.Helper()
	for deadline := time.Now().Add(patience); !strings.Contains(p.said[0].String(), what); p.drain() {
		if time.Now().After(deadline) {
			p.t.Fatalf("the cell does not print %q but %q", what, p.said[0].String())
		}
		time.Sleep(time.Millisecond)
	}
	if err := unix.Kill(-p.cmd.Process.Pid, unix.SIGINT); err != nil {
		p.t.Fatal(err)
	}
}

// text is an answer's last text/plain.
func text(a runcode.Answer) string {
	for _, r := range slices.Backward(a.Results) {
		if s, ok := r["text/plain"].(string); ok {
			return s
		}
	}
	return ""
}

// native runs cells in kernels of its own.
type native map[string]*process

func (n native) Run(t *testing.T, context, language, code string) runcode.Answer {
	t.Helper()
	p := n[context]
	if p == nil {
		p = start(t, language)
		n[context] = p
	}
	p.t = t
	return p.run(language, code)
}

// hangUp closes the channel and waits until the kernel has ended.
func (p *process) hangUp() {
	p.t.Helper()
	if err := unix.Shutdown(p.sock, unix.SHUT_WR); err != nil {
		p.t.Fatal(err)
	}
	if m := p.next(); m != nil {
		p.t.Fatalf("the kernel still says %+v", m)
	}
}
