package gvisor

import (
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
	"strings"
	"sync"
	"syscall"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"sandlot"
	"sandlot/internal/engine"
	"sandlot/internal/wire"
)

var _ engine.Runner = (*machine)(nil)

const (
	// buildSocket is beside the agent's socket.
	buildSocket = "build.sock"
	// changesTimeout bounds the reading of what a program changed.
	changesTimeout = 10 * time.Minute
)

// RunProgram implements engine.Runner. The program is started through gVisor's own control socket, so nothing
// that this process reads of it passes through the guest's agent: its output, which is copied, its exit code and
// the tar of its changes, which gVisor's kernel writes.
func (m *machine) RunProgram(ctx context.Context, p engine.Program) error {
	argv := p.Argv
	if p.Serve != nil {
		stop, err := m.serveBuild(p.Serve)
		if err != nil {
			return err
		}
		defer stop()
		argv = append([]string{wire.AgentPath, wire.ForwardMode, engine.BuildAddr, filepath.Join(wire.GuestDir, buildSocket)}, argv...)
	}
	process := specs.Process{
		Args: argv, Env: p.Env, Cwd: "/",
		Capabilities: &specs.LinuxCapabilities{Bounding: capabilities, Effective: capabilities, Permitted: capabilities},
	}
	b, err := json.Marshal(process)
	if err != nil {
		return err
	}
	file := filepath.Join(m.e.dir(m.rec.ID), "process.json")
	if err := os.WriteFile(file, b, 0o600); err != nil {
		return err
	}
	cmd := m.runsc(ctx, "exec", "--process="+file, string(m.rec.ID))
	cmd.Stdout, cmd.Stderr = p.Out, p.Out
	if err := m.ended(ctx, cmd.Run()); err != nil {
		return err
	}
	if p.Changes == nil {
		return nil
	}
	return m.changes(ctx, p.Changes)
}

// ended turns runsc's end into the program's.
func (m *machine) ended(ctx context.Context, err error) error {
	var exit *exec.ExitError
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case m.alive() != nil:
		return sandlot.Errorf(sandlot.CodeSandboxUnhealthy, "the step's sandbox ended; the step may have met its memory limit of %d MB", m.rec.Size.MemoryMB)
	case errors.As(err, &exit) && exit.ExitCode() > 0:
		return engine.ExitError(exit.ExitCode())
	}
	return err
}

// runsc makes a call about this machine.
func (m *machine) runsc(ctx context.Context, args ...string) *exec.Cmd {
	e := m.e
	spec := engine.Spec{ID: m.rec.ID, Size: m.rec.Size}
	cmd := exec.CommandContext(ctx, e.cfg.Runsc, append(e.runscArgs(spec), args...)...)
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}
	cmd.Dir = "/"
	cmd.WaitDelay = time.Second // what the program left behind may hold the output open
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	return cmd
}

// changes gives take what was changed in the image.
func (m *machine) changes(ctx context.Context, take func(io.Reader) error) error {
	ctx, cancel := context.WithTimeout(ctx, changesTimeout)
	defer cancel()
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	var said strings.Builder
	cmd := m.runsc(ctx, "tar", "rootfs-upper", "--file=/proc/self/fd/3", string(m.rec.ID)) // it says things on its output
	cmd.ExtraFiles = []*os.File{w}
	cmd.Stdout, cmd.Stderr = &said, &said
	err = cmd.Start()
	w.Close()
	if err != nil {
		return err
	}
	// A sandbox that writes nothing more holds nobody up: the pipe ends with it, and the end of ctx ends it.
	stop := context.AfterFunc(ctx, func() { _ = r.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	took := take(r)
	if took != nil {
		r.Close()
		cancel()
	}
	err = m.ended(ctx, cmd.Wait())
	if took != nil {
		return took
	}
	if err != nil {
		return fmt.Errorf("reading what the step changed: %w: %.500q", err, said.String())
	}
	return nil
}

// serveBuild answers the machine's requests at buildSocket.
func (m *machine) serveBuild(h http.Handler) (stop func(), err error) {
	guest := filepath.Join(m.e.run(m.rec.ID), "guest")
	dir, err := os.Open(guest)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), buildSocket), Net: "unix"})
	if err != nil {
		return nil, err
	}
	ln.SetUnlinkOnClose(false) // it goes with the machine
	base := uidBase(m.rec.Slot)
	path := filepath.Join(guest, buildSocket)
	if err := errors.Join(os.Chmod(path, 0o600), os.Chown(path, base, base)); err != nil {
		ln.Close()
		return nil, err
	}
	srv := &http.Server{
		Handler: h, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: time.Minute, MaxHeaderBytes: 16 << 10,
	}
	go func() { _ = srv.Serve(&cappedListener{Listener: ln, slots: make(chan struct{}, maxBuildConns)}) }()
	return func() { srv.Close() }, nil
}

// maxBuildConns bounds what one build has open here.
const maxBuildConns = 16

// cappedListener accepts no more than cap(slots) connections at a time.
type cappedListener struct {
	net.Listener
	slots chan struct{}
}

func (l *cappedListener) Accept() (net.Conn, error) {
	l.slots <- struct{}{}
	c, err := l.Listener.Accept()
	if err != nil {
		<-l.slots
		return nil, err
	}
	return &cappedConn{Conn: c, slots: l.slots}, nil
}

type cappedConn struct {
	net.Conn
	slots chan struct{}
	once  sync.Once
}

func (c *cappedConn) Close() error {
	c.once.Do(func() { <-c.slots })
	return c.Conn.Close()
}
