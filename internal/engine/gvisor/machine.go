package gvisor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"sandlot"
	"sandlot/internal/engine"
	"sandlot/internal/engine/channel"
	"sandlot/internal/failpoint"
	"sandlot/internal/hostos"
)

const consoleName = "console.log"

// adoptTimeout is how long an adopted machine's agent may take to dial again; its redials are at most a
// second apart.
const adoptTimeout = 10 * time.Second

// machine implements engine.Machine.
type machine struct {
	e    *Engine
	rec  record
	link *channel.Listener
	proc *hostos.Handle

	requested atomic.Bool
	done      chan struct{}
	exit      engine.Exit // valid once done is closed

	destroying sync.Mutex // one Destroy at a time
	trimming   sync.Mutex // held while the disk is trimmed; remove waits for it
}

// watch opens the sandbox's process and closes done when it dies.
func (m *machine) watch() error {
	h, err := m.rec.Sandbox.Open()
	if err != nil {
		return err
	}
	m.proc = h
	go func() {
		if err := h.Wait(); err != nil {
			return // let go of: Release
		}
		m.exit = engine.Exit{Requested: m.requested.Load(), Detail: "the sandbox's kernel ended", Log: m.consoleEnd()}
		close(m.done)
	}()
	return nil
}

// release lets go of the machine without harming it.
func (m *machine) release() {
	if m.link != nil {
		m.link.Close()
	}
	if m.proc != nil {
		m.proc.Close()
	}
}

// consoleEnd reads the last 4 KiB that the guest's first process printed. It opens nothing that the guest
// could have made: the file lies beside the guest's directories on its disk.
func (m *machine) consoleEnd() []byte {
	f, err := os.Open(filepath.Join(m.e.run(m.rec.ID), "disk", consoleName))
	if err != nil {
		return nil
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return nil
	}
	const most = 4 << 10
	b, _ := io.ReadAll(io.NewSectionReader(f, max(0, fi.Size()-most), most))
	return b
}

// Record implements engine.Machine.
func (m *machine) Record() engine.Record { return m.rec.Record }

// Done implements engine.Machine.
func (m *machine) Done() <-chan struct{} { return m.done }

// Exit implements engine.Machine.
func (m *machine) Exit() engine.Exit {
	select {
	case <-m.done:
		return m.exit
	default:
		return engine.Exit{}
	}
}

// Dial implements engine.Machine.
func (m *machine) Dial(ctx context.Context) (net.Conn, error) {
	if err := m.alive(); err != nil {
		return nil, err
	}
	return m.link.Dial(ctx)
}

func (m *machine) alive() error {
	select {
	case <-m.done:
		return sandlot.Errorf(sandlot.CodeSandboxUnhealthy, "the sandbox has ended")
	default:
		return nil
	}
}

// Resize implements engine.Machine.
func (m *machine) Resize(_ context.Context, size sandlot.Size) error {
	if err := m.alive(); err != nil {
		return err
	}
	g := m.e.cgroup(m.rec.ID)
	if err := g.SetWeight(100); err != nil {
		return err
	}
	if size == m.rec.Size {
		return nil
	}
	return g.Set(limits(size))
}

// Usage implements engine.Machine.
func (m *machine) Usage(context.Context) (engine.Usage, error) {
	if err := m.alive(); err != nil {
		return engine.Usage{}, err
	}
	u, err := m.e.cgroup(m.rec.ID).Usage()
	if err != nil {
		return engine.Usage{}, err
	}
	used, total, err := hostos.DiskUsage(filepath.Join(m.e.run(m.rec.ID), "disk"))
	if err != nil {
		return engine.Usage{}, err
	}
	m.trim(used)
	return engine.Usage{
		At: time.Now(), CPU: u.CPU, MemoryBytes: u.MemoryBytes, OOMKills: u.OOMKills + m.e.kills(m.rec.ID),
		DiskUsed: used, DiskTotal: total,
	}, nil
}

// trimAbove is how much more than its filesystem uses a disk image may take before it is trimmed.
const trimAbove = 256 << 20

// trim gives freed space of the machine's disk back to the host, in the background, one at a time.
func (m *machine) trim(used int64) {
	taken, err := hostos.Allocated(filepath.Join(m.e.dir(m.rec.ID), "disk.img"))
	if err != nil || taken < used+trimAbove || !m.trimming.TryLock() {
		return
	}
	go func() {
		defer m.trimming.Unlock()
		if err := hostos.Trim(filepath.Join(m.e.run(m.rec.ID), "disk")); err != nil && m.alive() == nil {
			m.e.cfg.Log.Warn("a sandbox's disk was not trimmed", "machine", m.rec.ID, "err", err)
		}
	}()
}

// Destroy implements engine.Machine.
func (m *machine) Destroy(ctx context.Context) error {
	m.requested.Store(true)
	m.destroying.Lock()
	defer m.destroying.Unlock()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), reapTimeout)
	defer cancel()
	return m.remove(ctx)
}

// remove ends and removes everything of the machine, in the order that keeps the record until the last.
func (m *machine) remove(ctx context.Context) error {
	e, id := m.e, m.rec.ID
	if m.proc != nil && m.alive() == nil {
		if err := m.proc.Kill(); err != nil {
			return err
		}
	}
	group := e.cgroup(id)
	_ = group.Unthrottle() // it may be gone already
	if err := group.Kill(ctx); err != nil {
		return fmt.Errorf("machine %s: %w", id, err)
	}
	if m.proc != nil {
		select {
		case <-m.done:
		case <-ctx.Done():
			return fmt.Errorf("machine %s: its process did not end: %w", id, context.Cause(ctx))
		}
	}
	if err := failpoint.Hit(ctx, "gvisor.destroy.killed"); err != nil {
		return err
	}
	m.release()
	m.trimming.Lock() // for good: what comes next takes the disk away
	defer m.trimming.Unlock()
	run := e.run(id)
	for _, mnt := range []string{"disk", "netns"} {
		if err := hostos.Unmount(filepath.Join(run, mnt)); err != nil {
			return fmt.Errorf("machine %s: unmount %s: %w", id, mnt, err)
		}
	}
	if err := failpoint.Hit(ctx, "gvisor.destroy.unmounted"); err != nil {
		return err
	}
	if err := group.Remove(ctx); err != nil {
		return err
	}
	if err := os.RemoveAll(run); err != nil {
		return err
	}
	e.forget(m)
	return os.RemoveAll(e.dir(id))
}

// Adopt implements engine.Engine.
func (e *Engine) Adopt(ctx context.Context, want engine.Record) (engine.Machine, error) {
	rec, err := e.readRecord(want.ID)
	if err != nil {
		return nil, err
	}
	gone := func(why string) error {
		return sandlot.Errorf(sandlot.CodeNotFound, "machine %s cannot be adopted: %s", want.ID, why)
	}
	if rec.Sandbox.PID == 0 {
		return nil, gone("it was never ready")
	}
	m := &machine{e: e, rec: rec, done: make(chan struct{})}
	if err := m.watch(); err != nil {
		return nil, gone("its process is gone")
	}
	m.link, err = channel.Listen(filepath.Join(e.run(rec.ID), "guest", "agent.sock"), rec.Secret, uidBase(rec.Slot))
	if err != nil {
		m.proc.Close()
		return nil, err
	}
	timeout := time.NewTimer(adoptTimeout)
	defer timeout.Stop()
	select {
	case <-m.link.Ready():
		e.keep(m)
		return m, nil
	case <-m.done:
		err = gone("it ended")
	case <-timeout.C:
		err = gone("its agent did not dial")
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	m.release()
	return nil, err
}

// Reap implements engine.Engine.
func (e *Engine) Reap(ctx context.Context, want engine.Record) error {
	if _, err := sandlot.ParseID(string(want.ID)); err != nil {
		return err
	}
	rec, err := e.readRecord(want.ID)
	if sandlot.ErrorCode(err) == sandlot.CodeNotFound {
		return nil
	}
	if err != nil {
		return err
	}
	m := &machine{e: e, rec: rec, done: make(chan struct{})}
	if rec.Sandbox.PID != 0 {
		if err := m.watch(); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return m.Destroy(ctx)
}
