package gvisor

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"sandlot"
	"sandlot/internal/engine"
	"sandlot/internal/engine/channel"
	"sandlot/internal/failpoint"
	"sandlot/internal/hostos"
	"sandlot/internal/wire"
)

var _ = failpoint.Declare("gvisor.create.recorded", "gvisor.create.disk", "gvisor.create.network",
	"gvisor.create.started", "gvisor.create.ready", "gvisor.destroy.killed", "gvisor.destroy.unmounted")

// maxSaid is how much of what a sandbox printed an error has.
const maxSaid = 1500

// createTimeout bounds a Create on a busy host; it takes 0.2 s on an idle one.
const createTimeout = 60 * time.Second

// Create implements engine.Engine.
func (e *Engine) Create(ctx context.Context, spec engine.Spec) (_ engine.Machine, parts engine.Parts, err error) {
	if _, err := sandlot.ParseID(string(spec.ID)); err != nil {
		return nil, parts, err
	}
	free, err := hostos.DiskFree(e.machines)
	if err != nil {
		return nil, parts, err
	}
	if free < e.cfg.FreeFloor {
		return nil, parts, sandlot.Errorf(sandlot.CodeCapacity, "this host's disk is nearly full: %d MB left of a floor of %d MB", free>>20, e.cfg.FreeFloor>>20)
	}
	ctx, cancel := context.WithTimeout(ctx, createTimeout)
	defer cancel()
	if err := os.Mkdir(e.dir(spec.ID), 0o700); err != nil {
		return nil, parts, fmt.Errorf("machine %s: %w", spec.ID, err)
	}
	rec := record{Record: engine.Record{
		ID: spec.ID, Engine: Name, Template: spec.Template.Name, Digest: spec.Template.Digest,
		Size: spec.Size, Created: time.Now(),
	}, Secret: channel.NewSecret()}
	m := &machine{e: e, rec: rec, done: make(chan struct{})}
	defer func() {
		if err == nil {
			return
		}
		// The caller may have gone; what was begun is undone all the same.
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), reapTimeout)
		defer cancel()
		if uerr := m.remove(undo); uerr != nil {
			e.cfg.Log.Error("a failed create could not be undone; its record stays", "machine", spec.ID, "err", uerr)
		}
	}()
	if m.rec.Slot, err = e.takeSlot(spec.ID); err != nil {
		return nil, parts, err
	}
	if err := e.writeRecord(m.rec); err != nil {
		return nil, parts, err
	}
	if err := failpoint.Hit(ctx, "gvisor.create.recorded"); err != nil {
		return nil, parts, err
	}
	if err := e.prepare(ctx, spec, m, &parts); err != nil {
		return nil, parts, err
	}
	begun := time.Now()
	if err := e.start(ctx, spec, m); err != nil {
		return nil, parts, err
	}
	parts.Boot = time.Since(begun)
	if err := failpoint.Hit(ctx, "gvisor.create.started"); err != nil {
		return nil, parts, err
	}
	begun = time.Now()
	select {
	case <-m.link.Ready():
	case <-m.done:
		return nil, parts, sandlot.Errorf(sandlot.CodeSandboxUnhealthy, "the sandbox ended while it started: %q", m.exit.Log[max(0, len(m.exit.Log)-maxSaid):])
	case <-ctx.Done():
		return nil, parts, sandlot.Wrap(context.Cause(ctx), sandlot.CodeTimeout, "the agent did not answer in time")
	}
	parts.Agent = time.Since(begun)
	e.programsFirst(spec.ID)
	if err := failpoint.Hit(ctx, "gvisor.create.ready"); err != nil {
		return nil, parts, err
	}
	e.keep(m)
	return m, parts, nil
}

// prepare makes everything that the machine needs before its first process.
func (e *Engine) prepare(ctx context.Context, spec engine.Spec, m *machine, parts *engine.Parts) error {
	run, base := e.run(spec.ID), uidBase(m.rec.Slot)
	if err := os.Mkdir(run, 0o711); err != nil {
		return err
	}
	var g errgroup.Group
	g.Go(func() error {
		begun := time.Now()
		defer func() { parts.Disk = time.Since(begun) }()
		blank, err := hostos.BlankDisk(ctx, e.cfg.StateDir, spec.Size.DiskGB)
		if err != nil {
			return err
		}
		image, disk := filepath.Join(e.dir(spec.ID), "disk.img"), filepath.Join(run, "disk")
		if err := hostos.CopySparse(blank, image); err != nil {
			return err
		}
		if err := os.Mkdir(disk, 0o711); err != nil {
			return err
		}
		if err := hostos.MountImage(image, disk); err != nil {
			return err
		}
		for name, owner := range map[string]int{"workspace": base + 1000, "upper": 0} {
			p := filepath.Join(disk, name)
			if err := errors.Join(os.Mkdir(p, 0o755), os.Chown(p, owner, owner)); err != nil {
				return err
			}
		}
		return failpoint.Hit(ctx, "gvisor.create.disk")
	})
	g.Go(func() error { return e.makeCgroup(spec) })
	g.Go(func() error {
		begun := time.Now()
		defer func() { parts.Network = time.Since(begun) }()
		if err := hostos.MakeNetns(filepath.Join(run, "netns")); err != nil {
			return err
		}
		return failpoint.Hit(ctx, "gvisor.create.network")
	})
	g.Go(func() error {
		guest := filepath.Join(run, "guest")
		if err := errors.Join(os.Mkdir(guest, 0o700), os.Chown(guest, base, base)); err != nil {
			return err
		}
		if err := os.Link(e.agentPath(), filepath.Join(guest, "agent")); err != nil {
			return err
		}
		boot, err := json.Marshal(wire.Boot{
			Secret: m.rec.Secret, Socket: wire.SocketPath,
			Env: spec.Template.Env, Start: spec.Template.Start, Ready: spec.Template.Ready, MaxProcesses: sandlot.MaxProcesses,
			Warm: spec.Pooled, Kernels: spec.Template.Kernels,
		})
		if err != nil {
			return err
		}
		path := filepath.Join(guest, "boot.json")
		if err := errors.Join(os.WriteFile(path, boot, 0o400), os.Chown(path, base, base)); err != nil {
			return err
		}
		if m.link, err = channel.Listen(filepath.Join(guest, "agent.sock"), m.rec.Secret, base); err != nil {
			return err
		}
		return e.writeBundle(spec, m.rec.Slot)
	})
	return g.Wait()
}

// cgroupsVar tells our runsc which cgroups to join; it is engines/runsc's name, as killsVar is.
const cgroupsVar = "SANDLOT_CGROUPS"

// makeCgroup makes the machine's cgroup with its limits.
func (e *Engine) makeCgroup(spec engine.Spec) error {
	g := e.cgroup(spec.ID)
	if err := g.Make(limits(spec.Size)); err != nil {
		return err
	}
	if spec.Pooled {
		return g.SetWeight(pooledWeight)
	}
	return nil
}

// limits are a size's, as the host enforces them.
func limits(size sandlot.Size) hostos.Limits {
	return hostos.Limits{MemoryBytes: int64(size.MemoryMB)<<20 + memoryReserve, CPUMilli: int64(size.VCPU) * 1000, PIDs: outerPIDs}
}

// start runs runsc, which returns when the sandbox runs on its own.
func (e *Engine) start(ctx context.Context, spec engine.Spec, m *machine) error {
	dir := e.dir(spec.ID)
	// What the guest's first process prints lands on the sandbox's own disk, within its own limit.
	console, err := os.OpenFile(filepath.Join(e.run(spec.ID), "disk", consoleName), os.O_CREATE|os.O_WRONLY|os.O_APPEND|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer console.Close()
	kills := e.killsFile(spec.ID)
	if err := os.WriteFile(kills, nil, 0o600); err != nil {
		return err
	}
	pidFile := filepath.Join(dir, "pid")
	args := append(e.runscArgs(spec), "run", "--detach", "--bundle="+filepath.Join(dir, "bundle"), "--pid-file="+pidFile, string(spec.ID))
	cmd := exec.CommandContext(ctx, e.cfg.Runsc, args...)
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", cgroupsVar + "=" + strings.Join(e.cgroup(spec.ID).ProcFiles(), ":"), killsVar + "=" + kills}
	cmd.Stdout, cmd.Stderr = console, console
	cmd.Dir = "/"
	// If this process is killed the helper goes too; what it had started by then is in the cgroup.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	ended := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // Pdeathsig is about the thread
		defer runtime.UnlockOSThread()
		ended <- cmd.Run()
	}()
	if err := <-ended; err != nil {
		return sandlot.Wrap(fmt.Errorf("runsc: %w: %s", err, runscError(filepath.Join(dir, "runsc.log"))),
			sandlot.CodeInternal, "the sandbox did not start")
	}
	b, err := os.ReadFile(pidFile)
	if err != nil {
		return err
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		return fmt.Errorf("runsc wrote a bad pid file: %w", err)
	}
	p, err := hostos.FindProcess(pid)
	if err != nil {
		return sandlot.Wrap(err, sandlot.CodeInternal, "the sandbox ended while it started")
	}
	m.rec.Sandbox = p
	if err := e.writeRecord(m.rec); err != nil {
		return err
	}
	if err := m.watch(); err != nil {
		return err
	}
	return e.limited(spec.ID, pid)
}

// runscError returns the last error line of runsc's log.
func runscError(path string) string {
	b, _ := os.ReadFile(path)
	lines := bytes.Split(bytes.TrimSpace(b), []byte("\n"))
	return fmt.Sprintf("%.500q", lines[len(lines)-1])
}
