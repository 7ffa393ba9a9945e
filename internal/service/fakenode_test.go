package service

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"sandlot"
	"sandlot/internal/node"
	"sandlot/internal/wire"
)

// fakeNode is a node whose machines are HTTP servers on pipes: enough of an agent for the use cases, and
// nothing that blocks outside a synctest bubble.
type fakeNode struct {
	delay   func() time.Duration // of Create and Destroy
	failing func() error         // of Create and of the agent's identity

	mu         sync.Mutex
	reconciled bool
	machines   map[sandlot.ID]*fakeMachine
	most       int // machines at once
	cpu        map[sandlot.ID]float64
	events     chan node.Event
	creates    atomic.Int64
	dials      atomic.Int64
}

func newFakeNode() *fakeNode {
	return &fakeNode{
		machines: map[sandlot.ID]*fakeMachine{}, cpu: map[sandlot.ID]float64{},
		delay: func() time.Duration { return 0 }, failing: func() error { return nil },
	}
}

func jitter(most time.Duration) func() time.Duration {
	return func() time.Duration { return rand.N(most) }
}

type fakeMachine struct {
	conns  chan net.Conn
	done   chan struct{}
	once   sync.Once
	server http.Server
	ident  atomic.Pointer[wire.Identity]
}

func (m *fakeMachine) Accept() (net.Conn, error) {
	select {
	case c := <-m.conns:
		return c, nil
	case <-m.done:
		return nil, net.ErrClosed
	}
}
func (m *fakeMachine) Close() error   { m.once.Do(func() { close(m.done) }); return nil }
func (m *fakeMachine) Addr() net.Addr { return &net.UnixAddr{Name: "fake"} }

func (n *fakeNode) Reconcile(_ context.Context, keep []sandlot.ID) (node.ReconcileReport, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.reconciled = true
	var r node.ReconcileReport
	wanted := map[sandlot.ID]bool{}
	for _, id := range keep {
		wanted[id] = true
		if n.machines[id] != nil {
			r.Adopted = append(r.Adopted, id)
		} else {
			r.Lost = append(r.Lost, id)
		}
	}
	for id, m := range n.machines {
		if !wanted[id] {
			n.drop(id, m)
			r.Reaped++
		}
	}
	return r, nil
}

func (n *fakeNode) Create(ctx context.Context, req node.CreateRequest) (node.Created, error) {
	n.creates.Add(1)
	if err := sleep(ctx, n.delay()); err != nil {
		return node.Created{}, err
	}
	if err := n.failing(); err != nil {
		return node.Created{}, err
	}
	m := &fakeMachine{conns: make(chan net.Conn), done: make(chan struct{})}
	id := sandlot.NewID(sandlot.PrefixSandbox)
	m.server.Handler = n.agent(m)
	go func() { _ = m.server.Serve(m) }()
	n.mu.Lock()
	defer n.mu.Unlock()
	n.machines[id] = m
	n.most = max(n.most, len(n.machines))
	return node.Created{
		ID: id, Engine: "fake", Isolation: sandlot.IsolationNone, Size: req.Size,
		Template: sandlot.Template{Name: req.Template, Digest: "sha256:fake"}, Timings: sandlot.Timings{Source: "pool", FromPool: true},
	}, nil
}

func (n *fakeNode) drop(id sandlot.ID, m *fakeMachine) {
	delete(n.machines, id)
	_ = m.Close()
	_ = m.server.Close()
}

func (n *fakeNode) Destroy(ctx context.Context, id sandlot.ID) error {
	if err := sleep(ctx, n.delay()); err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if m := n.machines[id]; m != nil {
		n.drop(id, m)
	}
	return nil
}

// die is a machine that ends by itself.
func (n *fakeNode) die(id sandlot.ID, detail string) {
	n.mu.Lock()
	if m := n.machines[id]; m != nil {
		n.drop(id, m)
	}
	ch := n.events
	n.mu.Unlock()
	ch <- node.Event{Kind: node.EventExited, ID: id, Detail: detail}
}

func (n *fakeNode) Dial(ctx context.Context, id sandlot.ID) (net.Conn, error) {
	n.dials.Add(1)
	n.mu.Lock()
	m := n.machines[id]
	n.mu.Unlock()
	if m == nil {
		return nil, sandlot.Errorf(sandlot.CodeNotFound, "no such machine")
	}
	ours, theirs := net.Pipe()
	select {
	case m.conns <- &agentEnd{Conn: theirs}:
		return ours, nil
	case <-m.done:
	case <-ctx.Done():
	}
	return nil, sandlot.Errorf(sandlot.CodeSandboxUnhealthy, "the machine is gone")
}

// agentEnd is a stream as an agent has it: its first byte is wire.Take.
type agentEnd struct {
	net.Conn
	taken sync.Once
}

func (c *agentEnd) Read(p []byte) (int, error) {
	var err error
	c.taken.Do(func() {
		var b [1]byte
		if _, err = io.ReadFull(c.Conn, b[:]); err == nil && b[0] != wire.Take {
			err = errors.New("the stream was not taken")
		}
	})
	if err != nil {
		return 0, err
	}
	return c.Conn.Read(p)
}

func (n *fakeNode) Samples(_ context.Context, ids []sandlot.ID) (map[sandlot.ID]sandlot.Sample, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	out := map[sandlot.ID]sandlot.Sample{}
	for _, id := range ids {
		if n.machines[id] != nil {
			out[id] = sandlot.Sample{At: time.Now(), CPUPercent: n.cpu[id], MemoryBytes: 1 << 20, DiskTotal: 5 << 30}
		}
	}
	return out, nil
}

func (n *fakeNode) Events(ctx context.Context) (<-chan node.Event, error) {
	ch, out := make(chan node.Event, 16), make(chan node.Event)
	n.mu.Lock()
	n.events = ch
	n.mu.Unlock()
	go func() {
		defer close(out)
		for {
			select {
			case e := <-ch:
				select {
				case out <- e:
				case <-ctx.Done():
					return
				}
			case <-ctx.Done():
				return
			}
		}
	}()
	return out, nil
}

func (n *fakeNode) Machines(context.Context) ([]node.Machine, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	var out []node.Machine
	for id := range n.machines {
		out = append(out, node.Machine{ID: id})
	}
	return out, nil
}

func (n *fakeNode) Versions(ctx context.Context, _ sandlot.ID, _ string) ([]node.TemplateInfo, error) {
	return n.Templates(ctx, "")
}

func (n *fakeNode) BuildTemplate(ctx context.Context, req node.BuildRequest, log func(string)) (sandlot.Template, error) {
	log("step one")
	if strings.Contains(req.Definition, "wait") {
		<-ctx.Done()
		return sandlot.Template{}, ctx.Err()
	}
	if strings.Contains(req.Definition, "fail") {
		return sandlot.Template{}, sandlot.Errorf(sandlot.CodeInvalidRequest, "step run x: exit status 1").With("step", "run x")
	}
	return sandlot.Template{Name: req.Name, Digest: "sha256:built"}, nil
}

func (n *fakeNode) RemoveTemplate(context.Context, sandlot.ID, string) error { return nil }

func (n *fakeNode) Templates(context.Context, sandlot.ID) ([]node.TemplateInfo, error) {
	return []node.TemplateInfo{{Template: sandlot.Template{Name: "base", Digest: "sha256:fake", Size: sandlot.DefaultSize}}}, nil
}

func (n *fakeNode) Info(context.Context) (node.Info, error) { return node.Info{}, nil }

func (n *fakeNode) alive() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.machines)
}

func (n *fakeNode) agent(m *fakeMachine) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+wire.PathIdentity, func(w http.ResponseWriter, r *http.Request) {
		var id wire.Identity
		if err := json.NewDecoder(r.Body).Decode(&id); err != nil {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		if err := n.failing(); err != nil {
			w.WriteHeader(http.StatusBadRequest)
			_, _ = w.Write([]byte(`{"code":"invalid_request","message":"injected"}`))
			return
		}
		m.ident.Store(&id)
		w.WriteHeader(http.StatusNoContent)
	})
	mux.HandleFunc("GET "+wire.PathStats, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(`{"processes":3}`)) })
	mux.HandleFunc("POST "+wire.PathExec, func(w http.ResponseWriter, r *http.Request) {
		var e wire.Exec
		_ = json.NewDecoder(r.Body).Decode(&e)
		frame(w, wire.FrameStarted, []byte(`{"pid":7}`))
		if len(e.Argv) == 2 && e.Argv[0] == "sleep" {
			w.(http.Flusher).Flush()
			d, _ := time.ParseDuration(e.Argv[1])
			_ = sleep(r.Context(), d)
		}
		frame(w, wire.FrameStdout, []byte("hi\n"))
		frame(w, wire.FrameExit, []byte(`{"exit_code":0,"duration_us":1}`))
	})
	mux.HandleFunc("GET "+wire.PathTerminals+"/{id}/stream", func(w http.ResponseWriter, r *http.Request) {
		frame(w, wire.FrameStarted, []byte(`{"pid":7}`))
		for r.Context().Err() == nil {
			frame(w, wire.FrameStdout, []byte("tick\n"))
			w.(http.Flusher).Flush()
			_ = sleep(r.Context(), 5*time.Second)
		}
	})
	mux.HandleFunc("POST "+wire.PathTerminals+"/{id}/input", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
	return mux
}

func frame(w http.ResponseWriter, kind byte, payload []byte) {
	_, _ = w.Write(wire.AppendFrame(nil, kind, payload))
}
