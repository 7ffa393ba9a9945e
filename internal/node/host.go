package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"sandlot"
	"sandlot/internal/engine"
	"sandlot/internal/failpoint"
)

var _ = failpoint.Declare("node.create.made", "node.claim.taken", "node.destroy.begun", "node.reconcile.listed")

// templates is what Host needs of the template store.
type templates interface {
	List() ([]sandlot.Template, error)
	Get(ref string) (sandlot.Template, error)
}

// Config makes a Host.
type Config struct {
	Engines     []engine.Engine // the first is the default
	Templates   templates
	Pool        map[string]int // template name → machines to keep ready
	PoolEach    int            // where Pool is nil: the same for each of Templates, those that are added later too
	Builds      *Builds        // projects' own templates; nil: none
	MaxMachines int            // 0: no bound but the host's memory
	MemoryFloor int64          // bytes that must be available for a create; 0 for DefaultMemoryFloor
	Log         *slog.Logger
}

// DefaultMemoryFloor keeps the host alive: sandboxes' memory is overcommitted, since most use a few percent
// of what they may.
const DefaultMemoryFloor = 512 << 20

// Host implements Node on this machine.
type Host struct {
	cfg    Config
	boots  chan struct{} // one token for each machine that is being made
	pools  pools
	events broadcaster

	mu         sync.Mutex
	reconciled bool
	closed     bool
	machines   map[sandlot.ID]*held // claimed and pooled
	making     int
	ooms       map[sandlot.ID]int64
	building   map[sandlot.ID]*building // by project

	work   sync.WaitGroup // watchers and fills
	cancel context.CancelFunc
	life   <-chan struct{}
}

// held is a machine in this process's hands.
type held struct {
	engine.Machine
	eng    engine.Engine
	pooled bool
	last   sandlot.Sample // for the CPU share
}

var _ Node = (*Host)(nil)

// NewHost makes a host. It does nothing until Reconcile.
func NewHost(cfg Config) *Host {
	if cfg.MemoryFloor == 0 {
		cfg.MemoryFloor = DefaultMemoryFloor
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	ctx, cancel := context.WithCancel(context.Background()) // ends with Close
	h := &Host{
		cfg:      cfg,
		boots:    make(chan struct{}, max(2, runtime.NumCPU())),
		machines: map[sandlot.ID]*held{},
		ooms:     map[sandlot.ID]int64{},
		building: map[sandlot.ID]*building{},
		cancel:   cancel,
		life:     ctx.Done(),
	}
	h.pools.init(cfg.Pool)
	if cfg.Builds != nil { // what a killed process was about to build
		if err := os.RemoveAll(filepath.Join(cfg.Builds.CacheDir, "uploads")); err != nil {
			cfg.Log.Warn("old definitions could not be removed", "err", err)
		}
	}
	h.followTemplates()
	h.work.Go(func() { h.fill(ctx) })
	h.work.Go(func() { h.follow(ctx) })
	return h
}

// Close lets go of all machines: claimed ones run on and are adopted by the next Reconcile. Pooled ones
// are destroyed.
func (h *Host) Close() error {
	h.mu.Lock()
	h.closed = true
	h.mu.Unlock()
	h.cancel()
	var errs []error
	for _, m := range h.pools.drain() {
		errs = append(errs, m.Destroy(context.Background()))
	}
	h.events.closeAll()
	h.work.Wait()
	for _, e := range h.cfg.Engines {
		errs = append(errs, e.Close())
	}
	return errors.Join(errs...)
}

// pick finds the engine for an isolation.
func (h *Host) pick(iso sandlot.Isolation) (engine.Engine, error) {
	for _, e := range h.cfg.Engines {
		if iso == "" || e.Capabilities().Isolation == iso {
			return e, nil
		}
	}
	return nil, sandlot.Errorf(sandlot.CodeUnsupported, "this host offers no isolation %q: ask for %q, or see `sandlot doctor`",
		string(iso), string(h.cfg.Engines[0].Capabilities().Isolation))
}

// Create implements Node.
func (h *Host) Create(ctx context.Context, req CreateRequest) (Created, error) {
	eng, err := h.pick(req.Isolation)
	if err != nil {
		return Created{}, err
	}
	tpl, err := h.template(req.Project, req.Template)
	if err != nil {
		return Created{}, err
	}
	if req.Size == (sandlot.Size{}) {
		req.Size = tpl.Size
	}
	if err := h.admit(); err != nil {
		return Created{}, err
	}
	out := Created{Engine: eng.Name(), Isolation: eng.Capabilities().Isolation, Template: tpl, Size: req.Size}
	begun := time.Now()
	if m := h.claim(ctx, eng, tpl, req.Size); m != nil {
		out.ID = m.Record().ID
		out.Timings = sandlot.Timings{FromPool: true, Source: "pool", QueueMS: ms(time.Since(begun))}
		return out, failpoint.Hit(ctx, "node.claim.taken")
	}
	select {
	case h.boots <- struct{}{}:
		defer func() { <-h.boots }()
	case <-ctx.Done():
		return Created{}, sandlot.Wrap(context.Cause(ctx), sandlot.CodeTimeout, "gave up waiting for this host to have time")
	}
	queued := time.Since(begun)
	m, parts, err := h.make(ctx, eng, engine.Spec{ID: sandlot.NewID(sandlot.PrefixSandbox), Template: tpl, Size: req.Size})
	if err != nil {
		return Created{}, err
	}
	out.ID = m.Record().ID
	out.Timings = sandlot.Timings{
		Source: "cold", QueueMS: ms(queued), DiskMS: ms(parts.Disk), NetworkMS: ms(parts.Network),
		BootMS: ms(parts.Boot), AgentMS: ms(parts.Agent),
	}
	return out, nil
}

// admit refuses a create that the host has no room for.
func (h *Host) admit() error {
	h.mu.Lock()
	reconciled, closed, n := h.reconciled, h.closed, len(h.machines)+h.making
	h.mu.Unlock()
	full := func(format string, args ...any) error {
		return sandlot.Errorf(sandlot.CodeCapacity, format, args...).With("retry_after_s", 5)
	}
	switch {
	case closed:
		return full("this host is shutting down")
	case !reconciled:
		return full("this host is starting")
	case h.cfg.MaxMachines > 0 && n-h.pools.ready() >= h.cfg.MaxMachines:
		return full("this host has its %d sandboxes", h.cfg.MaxMachines)
	}
	free, err := memAvailable()
	if err != nil {
		return err
	}
	if free < h.cfg.MemoryFloor {
		return full("this host's memory is nearly full: %d MB available of a floor of %d MB", free>>20, h.cfg.MemoryFloor>>20)
	}
	return nil
}

// make makes a machine and puts it in this host's hands.
func (h *Host) make(ctx context.Context, eng engine.Engine, spec engine.Spec) (*held, engine.Parts, error) {
	h.mu.Lock()
	h.making++
	h.mu.Unlock()
	m, parts, err := eng.Create(ctx, spec)
	h.mu.Lock()
	h.making--
	var hm *held
	if err == nil {
		hm = h.hold(m, eng, spec.Pooled)
	}
	h.mu.Unlock()
	if err != nil {
		return nil, parts, err
	}
	if err := failpoint.Hit(ctx, "node.create.made"); err != nil {
		h.discard(hm)
		return nil, parts, err
	}
	return hm, parts, nil
}

// hold registers a machine and watches it. h.mu is held.
func (h *Host) hold(m engine.Machine, eng engine.Engine, pooled bool) *held {
	hm := &held{Machine: m, eng: eng, pooled: pooled}
	id := m.Record().ID
	h.machines[id] = hm
	h.work.Go(func() {
		select {
		case <-m.Done():
		case <-h.life:
			return
		}
		exit := m.Exit()
		h.mu.Lock()
		wasPooled := hm.pooled
		if h.machines[id] == hm {
			delete(h.machines, id)
		}
		h.mu.Unlock()
		if exit.Requested {
			return
		}
		h.pools.drop(hm)
		detail := exit.Detail
		if len(exit.Log) > 0 {
			detail += ": " + strconv.QuoteToASCII(string(exit.Log))
		}
		detail = detail[:min(len(detail), maxDetail)]
		h.cfg.Log.Warn("a machine ended by itself", "machine", id, "pooled", wasPooled, "detail", detail)
		if err := m.Destroy(context.Background()); err != nil { // bounded by the engine
			h.cfg.Log.Error("the remains of a machine could not be removed", "machine", id, "err", err)
		}
		if !wasPooled {
			h.events.send(Event{Kind: EventExited, ID: id, Detail: detail})
		}
	})
	return hm
}

const maxDetail = 4 << 10

// claimed finds a machine that somebody has claimed.
func (h *Host) claimed(id sandlot.ID) (*held, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	m := h.machines[id]
	if m == nil || m.pooled {
		return nil, sandlot.Errorf(sandlot.CodeNotFound, "there is no machine %s", id)
	}
	return m, nil
}

// Destroy implements Node.
func (h *Host) Destroy(ctx context.Context, id sandlot.ID) error {
	m, err := h.claimed(id)
	if err != nil {
		return nil
	}
	if err := failpoint.Hit(ctx, "node.destroy.begun"); err != nil {
		return err
	}
	return h.remove(ctx, m)
}

// remove destroys a machine and forgets it.
func (h *Host) remove(ctx context.Context, m *held) error {
	if err := m.Destroy(ctx); err != nil {
		return err
	}
	id := m.Record().ID
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.machines[id] == m {
		delete(h.machines, id)
	}
	delete(h.ooms, id)
	h.pools.kick() // a pool that the host had no room for may be filled now
	return nil
}

// Dial implements Node.
func (h *Host) Dial(ctx context.Context, id sandlot.ID) (net.Conn, error) {
	m, err := h.claimed(id)
	if err != nil {
		return nil, err
	}
	return m.Dial(ctx)
}

// Samples implements Node.
func (h *Host) Samples(ctx context.Context, ids []sandlot.ID) (map[sandlot.ID]sandlot.Sample, error) {
	out := make(map[sandlot.ID]sandlot.Sample, len(ids))
	for _, id := range ids {
		m, err := h.claimed(id)
		if err != nil {
			continue
		}
		u, err := m.Usage(ctx)
		if err != nil {
			continue // it is just dying; its event follows
		}
		s := sandlot.Sample{
			At: u.At, CPUMS: u.CPU.Milliseconds(), MemoryBytes: u.MemoryBytes,
			NetRxBytes: u.NetRxBytes, NetTxBytes: u.NetTxBytes, DiskUsed: u.DiskUsed, DiskTotal: u.DiskTotal,
		}
		h.mu.Lock()
		if d := s.At.Sub(m.last.At); !m.last.At.IsZero() && d > 0 {
			s.CPUPercent = 100 * float64(s.CPUMS-m.last.CPUMS) / float64(max(1, d.Milliseconds()))
		}
		m.last = s
		kills := u.OOMKills - h.ooms[id]
		h.ooms[id] = u.OOMKills
		h.mu.Unlock()
		if kills > 0 {
			h.events.send(Event{Kind: EventOOM, ID: id, Detail: fmt.Sprintf("%d processes were ended for want of memory", kills)})
		}
		out[id] = s
	}
	return out, nil
}

// Events implements Node.
func (h *Host) Events(ctx context.Context) (<-chan Event, error) { return h.events.subscribe(ctx), nil }

// Machines implements Node.
func (h *Host) Machines(context.Context) ([]Machine, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := make([]Machine, 0, len(h.machines))
	for id, m := range h.machines {
		out = append(out, Machine{ID: id, Engine: m.eng.Name(), Pooled: m.pooled, Created: m.Record().Created})
	}
	return out, nil
}

// Info implements Node.
func (h *Host) Info(context.Context) (Info, error) {
	info := Info{CPUs: runtime.NumCPU(), Memory: memTotal()}
	for i, e := range h.cfg.Engines {
		info.Engines = append(info.Engines, EngineInfo{Name: e.Name(), Isolation: e.Capabilities().Isolation, Default: i == 0})
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	info.Machines = len(h.machines)
	return info, nil
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// memInfo reads one line of /proc/meminfo, in bytes.
func memInfo(key string) (int64, error) {
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, key+":"); ok {
			kb, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
			return kb << 10, err
		}
	}
	return 0, fmt.Errorf("/proc/meminfo has no %s", key)
}

func memAvailable() (int64, error) { return memInfo("MemAvailable") }

func memTotal() int64 {
	n, _ := memInfo("MemTotal")
	return n
}
