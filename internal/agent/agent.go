// Package agent is the first process inside a sandbox: it starts, watches and reaps processes, works on
// files as the sandbox's user, and answers the host over streams that it dials itself.
//
// It uses the standard library, x/sys and fsnotify only, and keeps still while nobody asks it anything. As
// PID 1 it reaps every orphan; anywhere else (tests, the memory engine) only what it started.
package agent

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"sandlot"
	"sandlot/internal/agent/kernel"
	"sandlot/internal/wire"

	"golang.org/x/sys/unix"
)

const (
	maxProcesses  = 256     // started by the agent and running at the same time
	keptProcesses = 256     // finished ones that are still listed
	maxJSON       = 2 << 20 // bytes of a JSON body
	maxWatches    = 32      // at the same time
	workspace     = "/workspace"
	defaultUser   = "user"
)

// Config is what an agent needs.
type Config struct {
	Boot wire.Boot

	// Root is a directory that stands for the sandbox's "/": paths of files are resolved beneath it, a
	// process's working directory too, and users are never switched. Empty: the real "/".
	Root string

	// Dial opens a stream to the host; the agent says the hello on it. It may block until the host wants a
	// stream, which keeps an idle agent nearly free. nil: dial Boot.Socket.
	Dial func(ctx context.Context) (net.Conn, error)

	// Bridges has the kernels' programs. nil: the real ones.
	Bridges fs.FS

	Log *slog.Logger // nil: discard
}

// Agent serves one sandbox.
type Agent struct {
	cfg     Config
	log     *slog.Logger
	started time.Time

	root       string // cfg.Root, absolute; "" is the real "/"
	files      tree
	users      *users
	switchUser bool // processes and file work take on the asked user's identity
	etc        string
	logDir     string // as guest path, of background processes

	procs     *table
	kernels   *kernels
	terminals *terminals
	parking   *parking     // nil: every process is forked when it is asked for
	captured  atomic.Int64 // bytes of outputs that collect holds
	limits    limits
	logLimit  int64
	watches   atomic.Int32
	logSeq    atomic.Int64

	idMu                sync.Mutex // serialises Identify
	hostname, machineID string     // as they were set last
	identity            atomic.Pointer[identity]

	srv    *http.Server
	ctx    context.Context // ends with Close
	cancel context.CancelFunc
}

// identity is what Identify left. It is never changed.
type identity struct {
	id  string
	env map[string]string // the template's and the sandbox's
}

// New checks cfg and makes an agent that does nothing until Run.
func New(cfg Config) (*Agent, error) {
	if len(cfg.Boot.Secret) != wire.SecretLen {
		return nil, fmt.Errorf("agent: the secret has %d characters, not %d", len(cfg.Boot.Secret), wire.SecretLen)
	}
	if cfg.Dial == nil && cfg.Boot.Socket == "" {
		return nil, errors.New("agent: neither a socket nor a dial function")
	}
	a := &Agent{
		cfg:        cfg,
		log:        cfg.Log,
		started:    time.Now(),
		files:      hostTree{},
		etc:        "/etc",
		logDir:     "var/log/sandlot",
		switchUser: cfg.Root == "" && os.Geteuid() == 0,
		procs:      newTable(),
		limits:     archiveLimits,
		logLimit:   maxLog,
	}
	if a.log == nil {
		a.log = slog.New(slog.DiscardHandler)
	}
	if cfg.Root != "" {
		root, err := filepath.Abs(cfg.Root)
		if err != nil {
			return nil, fmt.Errorf("agent: root: %w", err)
		}
		a.root, a.files, a.etc = root, &rootTree{dir: root}, filepath.Join(root, "etc")
	}
	if cfg.Dial == nil {
		var d net.Dialer
		a.cfg.Dial = func(ctx context.Context) (net.Conn, error) { return d.DialContext(ctx, "unix", cfg.Boot.Socket) }
	}
	a.users = newUsers(a.etc)
	bridges := cfg.Bridges
	if bridges == nil {
		bridges = kernel.Files
	}
	a.kernels = newKernels(a, bridges)
	a.terminals = newTerminals(a)
	a.ctx, a.cancel = context.WithCancel(context.Background())
	a.srv = &http.Server{
		Handler:        a.handler(),
		MaxHeaderBytes: 16 << 10,
		ErrorLog:       slog.NewLogLogger(a.log.Handler(), slog.LevelDebug),
		// No read timeouts: a stream may be parked for days before its first request, and whoever sends one
		// is the host, which closes its end when it gives up.
	}
	return a, nil
}

// Run starts the template's program, waits until it is ready, then serves until ctx or the agent ends. It
// returns nil after Close or ctx's end.
func (a *Agent) Run(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { _ = a.Close() })
	defer stop()
	if err := a.prepare(); err != nil {
		return err
	}
	if limit := a.cfg.Boot.MaxProcesses; limit > 0 && a.root == "" && os.Getpid() == 1 {
		if err := children().confine(limit); err != nil {
			a.log.Warn("processes are not limited", "err", err)
		}
	}
	if err := a.startTemplate(a.ctx); err != nil {
		if a.ctx.Err() != nil {
			return nil
		}
		return err
	}
	if canPark && a.root == "" && os.Getpid() == 1 {
		a.parking = &parking{slot: make(chan *parked, 1)}
	}
	if a.cfg.Boot.Warm {
		a.warm(a.ctx)
		a.parking.fill()
		if slices.Contains(a.cfg.Boot.Kernels, "python") {
			a.kernels.prestart()
		}
	}
	l := newListener(a.ctx, a.cfg.Dial, a.cfg.Boot.Secret, a.log)
	a.srv.ConnState = l.track
	err := a.srv.Serve(l)
	_ = l.Close()
	if errors.Is(err, http.ErrServerClosed) || a.ctx.Err() != nil {
		return nil
	}
	return err
}

// Close ends the agent: its streams, and every process it started with all that kept its session.
func (a *Agent) Close() error {
	a.cancel()
	a.kernels.close()
	err := a.srv.Close()
	a.procs.close(a.root == "")
	if t, ok := a.files.(*rootTree); ok {
		t.close()
	}
	return err
}

// prepare makes the directories that everything else takes for granted.
func (a *Agent) prepare() error {
	if a.root == "" {
		if os.Getpid() == 1 {
			// gVisor puts a tmpfs on an empty /tmp, whose files would be the sandbox's memory, without a limit.
			// The image's own is on its disk.
			_ = unix.Unmount("/tmp", unix.MNT_DETACH)
			a.settle(a.cfg.Boot.Hostname, a.cfg.Boot.MachineID)
		}
		return nil
	}
	for _, dir := range []string{"workspace", "home/user", "root", "tmp", "etc"} {
		if err := os.MkdirAll(filepath.Join(a.root, dir), 0o755); err != nil {
			return fmt.Errorf("agent: %w", err)
		}
	}
	return nil
}

// ready returns the identity, or the error of a call that came before it.
func (a *Agent) ready() (*identity, error) {
	if id := a.identity.Load(); id != nil {
		return id, nil
	}
	return nil, sandlot.Errorf(sandlot.CodeConflict, "the machine has no identity yet")
}
