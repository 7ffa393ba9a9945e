package node

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"sandlot"
	"sandlot/internal/engine"
)

// visibleCPUs is how many CPUs a machine shows at least: gVisor never shows fewer than two. A machine from
// the pool serves any request whose size it can honestly show; its limits are set at the claim.
const visibleCPUs = 2

// Filling stays out of the way of work: a fill waits until no create came for quiet, but no longer than
// patience, and goes on one machine at a time.
const (
	quiet    = 150 * time.Millisecond
	patience = time.Second
	// backoff after a failed fill.
	backoff = 5 * time.Second
)

// pools keeps, per template, machines that are ready to be claimed.
type pools struct {
	mu      sync.Mutex
	target  map[string]int
	free    map[string][]*held
	filling map[string]int
	last    time.Time     // of the last create
	wake    chan struct{} // capacity 1
}

func (p *pools) init(target map[string]int) {
	p.target = maps.Clone(target)
	if p.target == nil {
		p.target = map[string]int{}
	}
	p.free = map[string][]*held{}
	p.filling = map[string]int{}
	p.wake = make(chan struct{}, 1)
}

func (p *pools) kick() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

func (p *pools) ready() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for _, ms := range p.free {
		n += len(ms)
	}
	return n
}

func (p *pools) info(name string) PoolInfo {
	p.mu.Lock()
	defer p.mu.Unlock()
	return PoolInfo{Target: p.target[name], Ready: len(p.free[name]), Filling: p.filling[name]}
}

// take removes the oldest machine that fits.
func (p *pools) take(name string, fits func(*held) bool) *held {
	p.mu.Lock()
	p.last = time.Now()
	p.mu.Unlock()
	return p.remove(name, fits)
}

// remove is take for other ends than a create's.
func (p *pools) remove(name string, fits func(*held) bool) *held {
	p.mu.Lock()
	defer p.mu.Unlock()
	i := slices.IndexFunc(p.free[name], fits)
	if i < 0 {
		return nil
	}
	m := p.free[name][i]
	p.free[name] = slices.Delete(p.free[name], i, i+1)
	return m
}

// drop forgets a machine that died in the pool.
func (p *pools) drop(m *held) {
	p.mu.Lock()
	defer p.mu.Unlock()
	name := m.Record().Template
	p.free[name] = slices.DeleteFunc(p.free[name], func(x *held) bool { return x == m })
	p.kick()
}

// drain empties all pools and sets their targets to none.
func (p *pools) drain() []*held {
	p.mu.Lock()
	defer p.mu.Unlock()
	var all []*held
	for _, ms := range p.free {
		all = append(all, ms...)
	}
	clear(p.free)
	clear(p.target)
	return all
}

// next picks the template that is furthest below its target.
func (p *pools) next() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	best, most := "", 0
	for _, name := range slices.Sorted(maps.Keys(p.target)) {
		if short := p.target[name] - len(p.free[name]) - p.filling[name]; short > most {
			best, most = name, short
		}
	}
	if best != "" {
		p.filling[best]++
	}
	return best
}

// calm says how long a fill should still wait.
func (p *pools) calm(waited time.Duration) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	return min(quiet-time.Since(p.last), patience-waited)
}

// claim takes a ready machine for a request, or nil. What does not match the template any more is removed.
func (h *Host) claim(ctx context.Context, eng engine.Engine, tpl sandlot.Template, size sandlot.Size) *held {
	for {
		m := h.pools.take(tpl.Name, func(m *held) bool {
			has := m.Record().Size
			return m.eng == eng && m.Record().Digest == tpl.Digest && size.DiskGB == has.DiskGB &&
				(size == has || eng.Capabilities().Resize && size.MemoryMB <= has.MemoryMB && size.VCPU <= max(visibleCPUs, has.VCPU))
		})
		h.pools.kick()
		if m == nil {
			return nil
		}
		if err := m.Resize(ctx, size); err != nil {
			h.cfg.Log.Warn("a pooled machine could not be claimed", "machine", m.Record().ID, "err", err)
			h.discard(m)
			continue
		}
		h.mu.Lock()
		_, alive := h.machines[m.Record().ID]
		if alive {
			m.pooled = false
		}
		h.mu.Unlock()
		if alive {
			return m
		}
	}
}

// discard destroys a machine that is in no pool and nobody's.
func (h *Host) discard(m *held) {
	if err := h.remove(context.Background(), m); err != nil { // bounded by the engine
		h.cfg.Log.Error("a machine could not be removed", "machine", m.Record().ID, "err", err)
	}
}

// fill keeps the pools at their targets until ctx ends.
func (h *Host) fill(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-h.pools.wake:
		}
		for ctx.Err() == nil && h.fillOne(ctx) {
		}
	}
}

// fillOne makes one machine, and says whether more may be wanted.
func (h *Host) fillOne(ctx context.Context) bool {
	if h.admit() != nil { // starting or full: what changes that kicks
		return false
	}
	name := h.pools.next()
	if name == "" {
		return false
	}
	m, err := h.pooledMachine(ctx, name)
	h.pools.mu.Lock()
	h.pools.filling[name]--
	late := ctx.Err() != nil
	if err == nil && !late {
		h.pools.free[name] = append(h.pools.free[name], m)
	}
	h.pools.mu.Unlock()
	switch {
	case err == nil && late:
		h.discard(m)
	case err != nil && ctx.Err() == nil:
		h.cfg.Log.Error("the pool could not be filled", "template", name, "err", err)
		select {
		case <-ctx.Done():
		case <-time.After(backoff):
		}
	}
	return true
}

func (h *Host) pooledMachine(ctx context.Context, name string) (*held, error) {
	begun := time.Now()
	for {
		wait := h.pools.calm(time.Since(begun))
		if wait <= 0 {
			break
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-time.After(wait):
		}
	}
	tpl, err := h.cfg.Templates.Get(name)
	if err != nil {
		return nil, err
	}
	select {
	case h.boots <- struct{}{}:
		defer func() { <-h.boots }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	h.evictStale(tpl)
	m, _, err := h.make(ctx, h.cfg.Engines[0], engine.Spec{
		ID: sandlot.NewID(sandlot.PrefixSandbox), Template: tpl, Size: tpl.Size, Pooled: true,
	})
	return m, err
}

// templatesEvery is how often the pools look for new templates and new versions.
const templatesEvery = 5 * time.Second

// follow keeps the pools at the templates as they are: of each name the newest version, and where the
// configuration names none, of each template of the store. Templates are built by other processes too.
func (h *Host) follow(ctx context.Context) {
	tick := time.NewTicker(templatesEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			h.followTemplates()
		}
	}
}

func (h *Host) followTemplates() {
	list, err := h.cfg.Templates.List()
	if err != nil {
		h.cfg.Log.Warn("templates could not be read", "err", err)
	}
	there := make(map[string]bool, len(list))
	for _, t := range list {
		there[t.Name] = true
		h.evictStale(t)
	}
	if h.cfg.Pool != nil || h.cfg.PoolEach == 0 || err != nil {
		return
	}
	h.pools.mu.Lock()
	var gone []*held
	for name := range there {
		h.pools.target[name] = h.cfg.PoolEach
	}
	for name := range h.pools.target {
		if !there[name] {
			delete(h.pools.target, name)
			gone = append(gone, h.pools.free[name]...)
			delete(h.pools.free, name)
		}
	}
	h.pools.mu.Unlock()
	for _, m := range gone {
		h.discard(m)
	}
	h.pools.kick()
}

// evictStale removes pooled machines of an older build of a template.
func (h *Host) evictStale(tpl sandlot.Template) {
	for {
		m := h.pools.remove(tpl.Name, func(m *held) bool { return m.Record().Digest != tpl.Digest })
		if m == nil {
			return
		}
		h.discard(m)
		h.pools.kick()
	}
}
