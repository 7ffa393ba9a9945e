package template

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
)

// childName is argv[0] of the child process that works on an image (child.go).
const childName = "sandlot-template-child"

// A job is one piece of work of a child process in namespaces of its own.
type job struct {
	Action string   // actionExec, …
	Dir    string   // the working directory that Lowers, Upper and Work are relative to
	Lowers []string // layers, topmost first; the lowest is an empty folder
	Upper  string   // where changes go; "" mounts read-only
	Work   string   // overlayfs's own folder beside Upper
	Mount  string   // an empty folder to mount the stack on

	// actionExec, actionImage, actionHost
	Argv []string
	Env  []string

	// actionExec
	Binds map[string]string // folder of the host → name below buildDir, read-only
	Files map[string]string // content that covers a file of the image while the program runs

	network bool
	serve   http.Handler // in a sandbox: what the program reaches, at engine.BuildAddr
}

const (
	actionExec    = "exec"    // run a program with the stack as root directory
	actionExtract = "extract" // unpack a tree from standard input into the stack
	actionLayers  = "layers"  // unpack an image's layers from standard input into the stack
	actionPrepare = "prepare" // accounts and folders that each template has
	actionFinish  = "finish"  // remove what belongs to one build or one host
	actionImage   = "image"   // run a program of the host with the stack mounted read-only
	actionHost    = "host"    // run a program of the host without any stack
)

// buildDir is where a running step finds Binds; it is on a file system that no layer sees.
const buildDir = "/run/.build"

// runJob runs j to its end. stdin may be nil. Output goes to out. When ctx ends, the child and all that it
// started are killed.
//
// Nothing is left behind on any path: the child is the first process of a process namespace, and its mounts
// live in its mount namespace.
func runJob(ctx context.Context, j job, stdin io.Reader, out io.Writer) error {
	spec, err := json.Marshal(j)
	if err != nil {
		return err
	}
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	defer w.Close()

	var tail tailWriter
	cmd := exec.CommandContext(ctx, "/proc/self/exe")
	cmd.Args = []string{childName}
	cmd.Env = os.Environ()
	cmd.Stdin = stdin
	cmd.Stdout = out
	cmd.Stderr = io.MultiWriter(out, &tail)
	cmd.ExtraFiles = []*os.File{r}
	flags := syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS
	if !j.network {
		flags |= syscall.CLONE_NEWNET
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: uintptr(flags), Pdeathsig: syscall.SIGKILL}

	// The death signal comes when the thread that started the child ends: keep it.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := cmd.Start(); err != nil {
		if errors.Is(err, syscall.EPERM) {
			return fmt.Errorf("building a template needs root: %w", err)
		}
		return err
	}
	r.Close()
	_, werr := w.Write(spec)
	w.Close()
	err = cmd.Wait()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		if line := tail.last(); line != "" {
			return fmt.Errorf("%w: %s", err, line)
		}
		return err
	}
	return werr
}

// tailWriter keeps the end of what was written.
type tailWriter struct {
	mu  sync.Mutex
	buf []byte
}

const tailBytes = 8 << 10

func (t *tailWriter) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf = append(t.buf, p...)
	if over := len(t.buf) - tailBytes; over > 0 {
		t.buf = append(t.buf[:0], t.buf[over:]...)
	}
	return len(p), nil
}

func (t *tailWriter) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.buf)
}

// last returns the last line that is not empty.
func (t *tailWriter) last() string {
	lines := strings.Split(strings.TrimSpace(t.String()), "\n")
	return strings.TrimSpace(lines[len(lines)-1])
}

// runHost runs a program of this host as it is (pip, npm and go as download clients) and returns what it
// printed.
func runHost(ctx context.Context, dir string, argv ...string) ([]byte, error) {
	var stdout bytes.Buffer
	var tail tailWriter
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Dir = dir
	cmd.Stdout = &limitWriter{w: &stdout, left: 4 << 20}
	cmd.Stderr = &tail
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return nil, fmt.Errorf("%s: %w: %s", argv[0], err, tail.last())
	}
	return stdout.Bytes(), nil
}

// limitWriter drops what is over its limit.
type limitWriter struct {
	w    io.Writer
	left int
}

func (l *limitWriter) Write(p []byte) (int, error) {
	n := len(p)
	if len(p) > l.left {
		p = p[:l.left]
	}
	l.left -= len(p)
	_, err := l.w.Write(p)
	return n, err
}
