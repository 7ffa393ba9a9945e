// Package gvisor isolates sandboxes with gVisor: each runs under its own user-space kernel, in its own user,
// network, mount and pid namespaces, in its own cgroup, as its own range of host uids, on its own disk image.
//
// Three places hold a machine (id is its ID):
//
//	STATE/machines/id/   record.json, disk.img, OCI bundle, runsc's state: root's alone
//	RUN/id/              mount points that the sandbox's gofer must reach as an unprivileged uid:
//	                     disk (the mounted image), guest (the agent's files), netns
//	cgroup /GROUP/id     every process of the machine
//
// The directory below STATE/machines is the intent: it is made first and removed last.
package gvisor

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"

	"sandlot"
	"sandlot/internal/engine"
	"sandlot/internal/hostos"
)

// Name is this engine's, in records and answers.
const Name = "gvisor"

// Config says where an engine works and with what.
type Config struct {
	StateDir  string // exists; root's alone
	RunDir    string // "" for RunDir(StateDir); every parent must be searchable by anybody
	Runsc     string // the pinned runsc
	Agent     string // the agent's static binary
	FreeFloor int64  // bytes that must stay free below StateDir for a Create; 0 for DefaultFreeFloor
	Log       *slog.Logger
}

// DefaultFreeFloor keeps the host alive when many sandboxes fill their disks: images are sparse, so their
// sizes are promises that the host may not be able to keep all at once.
const DefaultFreeFloor = 4 << 30

// Engine implements engine.Engine.
type Engine struct {
	cfg      Config
	machines string // StateDir/machines
	group    string // cgroup parent
	cgroups  *hostos.Cgroups

	mu    sync.Mutex
	slots map[int]sandlot.ID // uid range in use → its machine
	live  map[*machine]struct{}
}

var _ engine.Engine = (*Engine)(nil)

// New prepares the directories and reads what an earlier run left there; it starts and ends nothing.
func New(ctx context.Context, cfg Config) (*Engine, error) {
	for what, path := range map[string]*string{"runsc": &cfg.Runsc, "agent": &cfg.Agent} {
		if fi, err := os.Stat(*path); err != nil || !fi.Mode().IsRegular() {
			return nil, sandlot.Errorf(sandlot.CodeUnsupported, "the %s binary %q is not there: build it with ./dev build", what, *path)
		}
		var err error
		if *path, err = filepath.Abs(*path); err != nil { // runsc starts in another directory
			return nil, err
		}
	}
	state, err := filepath.Abs(cfg.StateDir)
	if err != nil {
		return nil, err
	}
	if cfg.RunDir == "" {
		cfg.RunDir = RunDir(state)
	}
	if cfg.FreeFloor == 0 {
		cfg.FreeFloor = DefaultFreeFloor
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	cfg.StateDir = state
	e := &Engine{cfg: cfg, machines: filepath.Join(state, "machines"), group: "/sandlot-" + tag(state), slots: map[int]sandlot.ID{}, live: map[*machine]struct{}{}}
	if e.cgroups, err = hostos.DetectCgroups(); err != nil {
		return nil, sandlot.Wrap(err, sandlot.CodeUnsupported, "%v", err)
	}
	if err := hostos.BecomeSubreaper(); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(e.machines, 0o700); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(e.emptyRoot(), 0o711); err != nil {
		return nil, err
	}
	if err := e.installAgent(); err != nil {
		return nil, err
	}
	if _, err := hostos.BlankDisk(ctx, state, sandlot.DefaultSize.DiskGB); err != nil {
		return nil, err
	}
	recs, err := e.records()
	if err != nil {
		return nil, err
	}
	for _, r := range recs {
		if r.Slot > 0 {
			e.slots[r.Slot] = r.ID
		}
	}
	return e, nil
}

// RunDir is where an engine with this state directory, an absolute path, keeps its mount points.
func RunDir(stateDir string) string { return "/run/sandlot/" + tag(stateDir) }

// tag tells apart what several servers of one host make outside their state directories.
func tag(stateDir string) string {
	sum := sha256.Sum256([]byte(stateDir))
	return hex.EncodeToString(sum[:4])
}

// Name implements engine.Engine.
func (e *Engine) Name() string { return Name }

// Capabilities implements engine.Engine.
func (e *Engine) Capabilities() engine.Capabilities {
	return engine.Capabilities{Isolation: sandlot.IsolationGVisor, Survives: true, Resize: true}
}

// Close implements engine.Engine.
func (e *Engine) Close() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	for m := range e.live {
		m.release()
	}
	clear(e.live)
	return nil
}

// keep remembers a machine that was handed out.
func (e *Engine) keep(m *machine) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.live[m] = struct{}{}
}

// forget frees what a removed machine held here.
func (e *Engine) forget(m *machine) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.live, m)
	if e.slots[m.rec.Slot] == m.rec.ID {
		delete(e.slots, m.rec.Slot)
	}
}

// Remove removes what the engine itself keeps on the host outside StateDir. Its machines must be gone.
func (e *Engine) Remove(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, reapTimeout) // somebody's group below ours would keep it for ever
	defer cancel()
	err := e.cgroups.Group(e.group).Remove(ctx)
	return errors.Join(err, os.RemoveAll(e.cfg.RunDir))
}

func (e *Engine) emptyRoot() string        { return filepath.Join(e.cfg.RunDir, "root") }
func (e *Engine) agentPath() string        { return filepath.Join(e.cfg.RunDir, "agent") }
func (e *Engine) dir(id sandlot.ID) string { return filepath.Join(e.machines, string(id)) }
func (e *Engine) run(id sandlot.ID) string { return filepath.Join(e.cfg.RunDir, string(id)) }

func (e *Engine) cgroup(id sandlot.ID) *hostos.Cgroup {
	return e.cgroups.Group(e.group + "/" + string(id))
}

// installAgent puts the agent where machines can hard-link it, so that all of them share its pages. A
// running machine keeps the file that it was started with.
func (e *Engine) installAgent() error {
	src, err := os.Open(e.cfg.Agent)
	if err != nil {
		return err
	}
	defer src.Close()
	tmp := e.agentPath() + ".new"
	dst, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o555)
	if err != nil {
		return err
	}
	_, err = io.Copy(dst, src)
	if cerr := dst.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(tmp, e.agentPath())
	}
	if err != nil {
		os.Remove(tmp)
		return fmt.Errorf("install the agent: %w", err)
	}
	return nil
}

// Every machine has 65,536 host uids of its own, above all that a host hands out (subuid ranges end lower),
// so that even a gVisor that was broken out of cannot touch another machine's files.
const (
	uidFirst = 0x40000000
	uidRange = 0x10000
	maxSlots = 0x3fff
)

func uidBase(slot int) int { return uidFirst + slot*uidRange }

func (e *Engine) takeSlot(id sandlot.ID) (int, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for s := 1; s < maxSlots; s++ {
		if _, used := e.slots[s]; !used {
			e.slots[s] = id
			return s, nil
		}
	}
	return 0, sandlot.Errorf(sandlot.CodeCapacity, "this host has no room for another sandbox: all %d uid ranges are taken", maxSlots)
}
