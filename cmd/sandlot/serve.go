package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"sandlot"
	"sandlot/internal/engine"
	"sandlot/internal/engine/gvisor"
	"sandlot/internal/engine/memory"
	"sandlot/internal/failpoint"
	"sandlot/internal/node"
	"sandlot/internal/template"
)

// serveCmd runs both halves: this process is the node half, which is root; the HTTP half is a child of it
// that is not.
type serveCmd struct {
	Config      string `help:"Configuration file (TOML)." type:"path"`
	Listen      string `help:"Address to listen on." placeholder:"ADDR"`
	StateDir    string `help:"Where everything is kept." placeholder:"DIR"`
	Templates   string `help:"The template store." placeholder:"DIR"`
	Runsc       string `help:"The pinned runsc." placeholder:"FILE"`
	Agent       string `help:"The agent's binary." placeholder:"FILE"`
	Engine      string `help:"gvisor, or memory (no isolation: tests only)."`
	PrintConfig bool   `help:"Print the configuration in force and exit."`
}

func (cmd *serveCmd) Run(ctx context.Context, s *streams) error {
	// Whatever the caller left open is nobody's business who is started from here.
	if err := unix.CloseRange(3, ^uint(0), unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return err
	}
	c, err := loadConfig(cmd.Config)
	if err != nil {
		return err
	}
	for flag, field := range map[*string]*string{
		&cmd.Listen: &c.Listen, &cmd.StateDir: &c.StateDir, &cmd.Templates: &c.Templates,
		&cmd.Runsc: &c.Runsc, &cmd.Agent: &c.Agent, &cmd.Engine: &c.Engine,
	} {
		if *flag != "" {
			*field = *flag
		}
	}
	if err := c.finish(); err != nil {
		return err
	}
	if cmd.PrintConfig {
		return json.NewEncoder(s.out).Encode(c)
	}
	log, err := newLogger(s.err, c.LogLevel)
	if err != nil {
		return err
	}
	return serve(ctx, c, log)
}

func newLogger(w io.Writer, level string) (*slog.Logger, error) {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		return nil, err
	}
	return slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: l})), nil
}

func serve(ctx context.Context, c config, log *slog.Logger) error {
	if c.AllowFailpoints {
		if err := failpoint.ArmFromEnv(); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(c.StateDir, 0o700); err != nil {
		return err
	}
	unlock, err := lockState(c.StateDir)
	if err != nil {
		return err
	}
	defer unlock()
	store, err := template.Open(c.Templates)
	if err != nil {
		return err
	}
	eng, err := newEngine(ctx, c, log)
	if err != nil {
		return err
	}
	own, err := template.Open(filepath.Join(c.nodeDir(), "templates"))
	if err != nil {
		return err
	}
	builds := &node.Builds{Projects: own, Shared: store, CacheDir: filepath.Join(c.nodeDir(), "build-cache")}
	host := node.NewHost(node.Config{
		Engines: []engine.Engine{eng}, Templates: store, Pool: c.Pool, PoolEach: defaultPool, MaxMachines: c.MaxMachines,
		MemoryFloor: c.MemoryFloorMB << 20, Builds: builds, Log: log.With("half", "node"),
	})
	own.UseBy(host.UsesTemplate)
	defer func() {
		if err := host.Close(); err != nil {
			log.Error("the node did not stop cleanly", "err", err)
		}
	}()
	ln, err := listen(ctx, c.Listen)
	if err != nil {
		return sandlot.Wrap(err, sandlot.CodeInvalidRequest, "cannot listen on %s: %v", c.Listen, err)
	}
	defer ln.Close()
	log.Info("listening", "addr", ln.Addr().String(), "state_dir", c.StateDir, "engine", c.Engine, "pid", os.Getpid())
	if c.Engine == memory.Name {
		// Nothing here is root's, and there is nothing to divide.
		return runAPI(ctx, apiConfig{config: c, Data: c.apiDir()}, host, ln, log, func(secret sandlot.Secret) error {
			return writeToken(c.tokenFile(), secret)
		})
	}
	return serveHalves(ctx, c, host, ln, log)
}

// listenPatience is how long the HTTP half of a server that was killed may take to let go of its address.
const listenPatience = 3 * time.Second

func listen(ctx context.Context, addr string) (net.Listener, error) {
	for begun := time.Now(); ; time.Sleep(20 * time.Millisecond) {
		ln, err := new(net.ListenConfig).Listen(ctx, "tcp", addr)
		if !errors.Is(err, unix.EADDRINUSE) || time.Since(begun) > listenPatience {
			return ln, err
		}
	}
}

// newEngine makes the configured engine.
func newEngine(ctx context.Context, c config, log *slog.Logger) (engine.Engine, error) {
	if c.Engine == memory.Name {
		if host, _, err := net.SplitHostPort(c.Listen); err != nil || !net.ParseIP(host).IsLoopback() {
			return nil, sandlot.Errorf(sandlot.CodeInvalidRequest, "the memory engine isolates nothing: it serves loopback addresses only")
		}
		log.Warn("the memory engine isolates nothing: what sandboxes run, this host runs")
		return memory.New(filepath.Join(c.nodeDir(), "machines")), nil
	}
	if err := os.MkdirAll(c.nodeDir(), 0o700); err != nil {
		return nil, err
	}
	return gvisor.New(ctx, gvisor.Config{
		StateDir: c.nodeDir(), Runsc: c.Runsc, Agent: c.Agent, FreeFloor: c.DiskFloorMB << 20, Log: log.With("half", "node"),
	})
}

// defaultPool is how many machines of each template are kept ready where the configuration names none.
const defaultPool = 3

// lockState makes sure that no other server works on the same directory.
func lockState(dir string) (unlock func(), err error) {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, sandlot.Errorf(sandlot.CodeConflict, "another sandlot works on %s: stop it first", dir)
	}
	return func() { f.Close() }, nil
}

// writeToken writes the owner's token for root alone, whole or not at all.
func writeToken(path string, secret sandlot.Secret) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".token-*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	_, err = f.WriteString(secret.Reveal() + "\n")
	if err := errors.Join(err, f.Chmod(0o600), f.Sync(), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}

// serveHalves serves the node on a socket and keeps the HTTP half running until ctx ends.
func serveHalves(ctx context.Context, c config, host *node.Host, ln net.Listener, log *slog.Logger) error {
	uid, gid, err := c.apiUID()
	if err != nil {
		return err
	}
	if err := errors.Join(os.MkdirAll(c.apiDir(), 0o700), chownAll(c.apiDir(), uid, gid)); err != nil {
		return err
	}
	sock := filepath.Join(gvisor.RunDir(c.nodeDir()), "node.sock")
	nodeLn, err := node.Listen(sock, uid)
	if err != nil {
		return err
	}
	// The node outlives the HTTP half's last calls.
	nodeCtx, stopNode := context.WithCancel(context.WithoutCancel(ctx))
	served := make(chan error, 1)
	go func() { served <- node.Serve(nodeCtx, nodeLn, host, uid, log.With("half", "node")) }()
	defer func() {
		stopNode()
		if err := <-served; err != nil {
			log.Error("node socket", "err", err)
		}
		os.Remove(sock)
	}()
	tcp, ok := ln.(*net.TCPListener)
	if !ok {
		return errors.New("not a TCP listener")
	}
	lnFile, err := tcp.File()
	if err != nil {
		return err
	}
	defer lnFile.Close()
	child := apiChild{
		cfg: apiConfig{
			config: c, Data: c.apiDir(), UID: uid, GID: gid, Node: sock,
			Jail: filepath.Join(gvisor.RunDir(c.nodeDir()), "jail"),
		},
		listener: lnFile, log: log,
	}
	wait := 100 * time.Millisecond
	for ctx.Err() == nil {
		begun := time.Now()
		err := child.run(ctx)
		if ctx.Err() != nil {
			break
		}
		if time.Since(begun) > time.Minute {
			wait = 100 * time.Millisecond
		}
		log.Error("the HTTP half ended; it is started again", "err", err, "in", wait)
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		}
		wait = min(2*wait, 5*time.Second)
	}
	return nil
}

// chownAll gives a flat directory and its files to uid. It follows no link.
func chownAll(dir string, uid, gid int) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	errs := []error{os.Lchown(dir, uid, gid)}
	for _, e := range entries {
		errs = append(errs, os.Lchown(filepath.Join(dir, e.Name()), uid, gid))
	}
	return errors.Join(errs...)
}

// apiChild is the HTTP half as its parent sees it. They talk in lines of JSON: the child's standard input
// carries its configuration and then an acknowledgement; its end tells the child that the parent is gone.
type apiChild struct {
	cfg      apiConfig
	listener *os.File
	log      *slog.Logger
}

// apiNews is what the child tells its parent.
type apiNews struct {
	Ready bool   `json:"ready,omitempty"`
	Owner string `json:"owner,omitempty"` // the first token, to be kept before the child commits it
}

// run starts the HTTP half and waits until it ends.
func (a *apiChild) run(ctx context.Context) error {
	news, newsW, err := os.Pipe()
	if err != nil {
		return err
	}
	defer news.Close()
	cmd := exec.Command("/proc/self/exe", "serve-api") // ended below, gently
	cmd.Args[0] = "sandlot"
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "GOTRACEBACK=" + os.Getenv("GOTRACEBACK")}
	if a.cfg.AllowFailpoints {
		cmd.Env = append(cmd.Env, failpoint.EnvVar+"="+os.Getenv(failpoint.EnvVar))
	}
	cmd.Dir = "/"
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	cmd.ExtraFiles = []*os.File{a.listener, newsW} // descriptors 3 and 4
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		newsW.Close()
		return err
	}
	err = cmd.Start()
	newsW.Close()
	if err != nil {
		return err
	}
	if err := json.NewEncoder(stdin).Encode(a.cfg); err != nil {
		a.log.Error("the HTTP half took no configuration", "err", err)
	}
	go func() {
		lines := bufio.NewScanner(news)
		for lines.Scan() {
			var n apiNews
			if json.Unmarshal(lines.Bytes(), &n) != nil {
				continue
			}
			if n.Owner != "" {
				if err := writeToken(a.cfg.tokenFile(), sandlot.Secret(n.Owner)); err != nil {
					a.log.Error("the owner's token could not be written", "err", err)
					stdin.Close() // the child gives up
					return
				}
				fmt.Fprintln(stdin, "ok")
			}
			if n.Ready {
				a.log.Info("ready")
			}
		}
	}()
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	_ = cmd.Process.Signal(syscall.SIGTERM)
	select {
	case err := <-ended:
		return err
	case <-time.After(time.Duration(a.cfg.StopTimeout) + 5*time.Second):
		_ = cmd.Process.Kill()
		return <-ended
	}
}
