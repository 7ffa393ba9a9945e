// Package memory is an engine without isolation: each machine is a real agent in this process, on a
// temporary directory, and what it starts are ordinary processes of this host. It exists for tests and for
// measuring everything above the engine; nobody's code but one's own may run in it.
package memory

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"sandlot"
	"sandlot/internal/agent"
	"sandlot/internal/engine"
	"sandlot/internal/engine/channel"
	"sandlot/internal/wire"
)

// Name is this engine's, in records and answers.
const Name = "memory"

// Engine implements engine.Engine.
type Engine struct {
	dir string

	mu       sync.Mutex
	machines map[sandlot.ID]*machine
	closed   bool
}

var _ engine.Engine = (*Engine)(nil)

// New makes an engine that keeps its machines' directories below dir.
func New(dir string) *Engine { return &Engine{dir: dir, machines: map[sandlot.ID]*machine{}} }

// Name implements engine.Engine.
func (e *Engine) Name() string { return Name }

// Capabilities implements engine.Engine.
func (e *Engine) Capabilities() engine.Capabilities {
	return engine.Capabilities{Isolation: sandlot.IsolationNone, Resize: true}
}

// Create implements engine.Engine.
func (e *Engine) Create(ctx context.Context, spec engine.Spec) (engine.Machine, engine.Parts, error) {
	if _, err := sandlot.ParseID(string(spec.ID)); err != nil {
		return nil, engine.Parts{}, err
	}
	if err := ctx.Err(); err != nil {
		return nil, engine.Parts{}, err
	}
	m := &machine{
		e: e, dir: filepath.Join(e.dir, string(spec.ID)), secret: channel.NewSecret(), env: spec.Template.Env, kernels: spec.Template.Kernels,
		want: make(chan net.Conn), done: make(chan struct{}),
		rec: engine.Record{
			ID: spec.ID, Engine: Name, Template: spec.Template.Name, Digest: spec.Template.Digest,
			Size: spec.Size, Created: time.Now(),
		},
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed || e.machines[spec.ID] != nil {
		return nil, engine.Parts{}, fmt.Errorf("machine %s exists, or the engine is closed", spec.ID)
	}
	e.machines[spec.ID] = m
	return m, engine.Parts{}, nil
}

// List implements engine.Engine: what is left of machines are directories.
func (e *Engine) List(context.Context) ([]engine.Record, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	var recs []engine.Record
	for _, m := range e.machines {
		recs = append(recs, m.rec)
	}
	entries, err := os.ReadDir(e.dir)
	if err != nil && !os.IsNotExist(err) {
		return nil, err
	}
	for _, ent := range entries {
		id, err := sandlot.ParseID(ent.Name())
		if err == nil && ent.IsDir() && e.machines[id] == nil {
			recs = append(recs, engine.Record{ID: id, Engine: Name})
		}
	}
	slices.SortFunc(recs, func(a, b engine.Record) int { return strings.Compare(string(a.ID), string(b.ID)) })
	return recs, nil
}

// Adopt implements engine.Engine. No machine outlives its process.
func (e *Engine) Adopt(_ context.Context, rec engine.Record) (engine.Machine, error) {
	return nil, sandlot.Errorf(sandlot.CodeNotFound, "machine %s ended with the process that made it", rec.ID)
}

// Reap implements engine.Engine.
func (e *Engine) Reap(ctx context.Context, rec engine.Record) error {
	if _, err := sandlot.ParseID(string(rec.ID)); err != nil {
		return err
	}
	e.mu.Lock()
	m := e.machines[rec.ID]
	e.mu.Unlock()
	if m != nil {
		return m.Destroy(ctx)
	}
	return os.RemoveAll(filepath.Join(e.dir, string(rec.ID)))
}

// Close implements engine.Engine: its machines cannot go on without it.
func (e *Engine) Close() error {
	e.mu.Lock()
	e.closed = true
	var all []*machine
	for _, m := range e.machines {
		all = append(all, m)
	}
	e.mu.Unlock()
	for _, m := range all {
		if err := m.Destroy(context.Background()); err != nil {
			return err
		}
	}
	return nil
}

// machine implements engine.Machine. Its agent starts with the first Dial, so that a thousand idle ones cost little.
type machine struct {
	e       *Engine
	rec     engine.Record
	dir     string
	secret  string
	env     map[string]string
	kernels []string
	want    chan net.Conn // the agent's ends of streams that somebody dialled

	mu     sync.Mutex
	agent  *agent.Agent
	ended  chan struct{} // closed when agent.Run returned
	dead   bool
	exit   engine.Exit
	done   chan struct{}
	remove sync.Mutex
}

func (m *machine) Record() engine.Record { return m.rec }
func (m *machine) Done() <-chan struct{} { return m.done }

func (m *machine) Exit() engine.Exit {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.exit
}

// start runs the agent once.
func (m *machine) start() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.dead {
		return sandlot.Errorf(sandlot.CodeSandboxUnhealthy, "the sandbox has ended")
	}
	if m.agent != nil {
		return nil
	}
	if err := os.MkdirAll(m.dir, 0o700); err != nil {
		return err
	}
	a, err := agent.New(agent.Config{
		Boot: wire.Boot{Secret: m.secret, Env: m.env, Kernels: m.kernels},
		Root: m.dir,
		Dial: func(ctx context.Context) (net.Conn, error) {
			select {
			case c := <-m.want:
				return c, nil
			case <-ctx.Done():
				return nil, context.Cause(ctx)
			}
		},
	})
	if err != nil {
		return err
	}
	m.agent, m.ended = a, make(chan struct{})
	go func() {
		defer close(m.ended)
		err := a.Run(context.Background()) // ends with Close
		m.end(engine.Exit{Detail: fmt.Sprintf("the agent ended: %v", err)})
	}()
	return nil
}

// end marks the machine dead, once.
func (m *machine) end(exit engine.Exit) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.dead {
		m.dead, m.exit = true, exit
		close(m.done)
	}
}

// Kill makes the machine die by itself, as a crash does.
func (m *machine) Kill() {
	m.end(engine.Exit{Detail: "killed"})
	m.stop()
}

func (m *machine) stop() {
	m.mu.Lock()
	a, ended := m.agent, m.ended
	m.mu.Unlock()
	if a != nil {
		a.Close()
		<-ended
	}
}

// Dial implements engine.Machine.
func (m *machine) Dial(ctx context.Context) (net.Conn, error) {
	if err := m.start(); err != nil {
		return nil, err
	}
	host, guest, err := channel.Pair()
	if err != nil {
		return nil, err
	}
	select {
	case m.want <- guest:
	case <-m.done:
		host.Close()
		guest.Close()
		return nil, sandlot.Errorf(sandlot.CodeSandboxUnhealthy, "the sandbox has ended")
	case <-ctx.Done():
		host.Close()
		guest.Close()
		return nil, sandlot.Wrap(context.Cause(ctx), sandlot.CodeTimeout, "gave up waiting for the agent inside the sandbox")
	}
	hello := make([]byte, wire.HelloLen)
	_ = host.SetReadDeadline(time.Now().Add(5 * time.Second))
	if _, err := io.ReadFull(host, hello); err != nil || string(hello) != wire.HelloMagic+m.secret+"\n" {
		host.Close()
		return nil, sandlot.Wrap(err, sandlot.CodeSandboxUnhealthy, "the agent inside the sandbox said no hello")
	}
	_ = host.SetReadDeadline(time.Time{})
	return host, nil
}

// Resize implements engine.Machine. There are no limits to set.
func (m *machine) Resize(context.Context, sandlot.Size) error { return m.alive() }

func (m *machine) alive() error {
	select {
	case <-m.done:
		return sandlot.Errorf(sandlot.CodeSandboxUnhealthy, "the sandbox has ended")
	default:
		return nil
	}
}

// Usage implements engine.Machine. Nothing is accounted for one machine alone.
func (m *machine) Usage(context.Context) (engine.Usage, error) {
	return engine.Usage{At: time.Now(), DiskTotal: int64(m.rec.Size.DiskGB) << 30}, m.alive()
}

// Destroy implements engine.Machine.
func (m *machine) Destroy(context.Context) error {
	m.remove.Lock()
	defer m.remove.Unlock()
	m.end(engine.Exit{Requested: true})
	m.stop()
	if err := os.RemoveAll(m.dir); err != nil {
		return err
	}
	m.e.mu.Lock()
	defer m.e.mu.Unlock()
	if m.e.machines[m.rec.ID] == m {
		delete(m.e.machines, m.rec.ID)
	}
	return nil
}
