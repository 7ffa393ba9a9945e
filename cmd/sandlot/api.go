package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	stdlog "log"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"sandlot"
	"sandlot/internal/authz"
	"sandlot/internal/failpoint"
	"sandlot/internal/httpapi"
	"sandlot/internal/node"
	"sandlot/internal/service"
	"sandlot/internal/store/sqlite"
)

// apiConfig is what the HTTP half is told.
type apiConfig struct {
	config
	Data string `json:"data"` // the database's directory
	UID  int    `json:"uid"`
	GID  int    `json:"gid"`
	Node string `json:"node"` // the node's socket
	Jail string `json:"jail"` // an empty directory that becomes its root
}

// serveAPICmd is the HTTP half. It starts as root in a mount namespace of its own, and leaves both the
// host's files and root behind before it reads the first byte from the network.
type serveAPICmd struct{}

func (*serveAPICmd) Run(ctx context.Context, s *streams) error {
	in := bufio.NewReader(s.in)
	line, err := in.ReadBytes('\n')
	if err != nil {
		return fmt.Errorf("serve-api is started by serve: %w", err)
	}
	var c apiConfig
	if err := json.Unmarshal(line, &c); err != nil {
		return err
	}
	log, err := newLogger(s.err, c.LogLevel)
	if err != nil {
		return err
	}
	if c.AllowFailpoints {
		if err := failpoint.ArmFromEnv(); err != nil {
			return err
		}
	}
	ln, err := net.FileListener(os.NewFile(3, "listener"))
	if err != nil {
		return err
	}
	// net/http tells the standard logger what a guest sends without being asked: not at a guest's pleasure.
	stdlog.SetFlags(0)
	stdlog.SetOutput(slog.NewLogLogger(log.Handler(), slog.LevelDebug).Writer())
	unix.CloseOnExec(3)
	news := os.NewFile(4, "news")
	unix.CloseOnExec(4)
	if err := enterJail(&c); err != nil {
		return fmt.Errorf("leave root: %w", err)
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	acks := make(chan struct{}, 1)
	go func() {
		for {
			if _, err := in.ReadBytes('\n'); err != nil {
				// The parent is gone, and the node with it: nothing can be answered any more, and whoever
				// starts next needs the address. What was acknowledged is in the database.
				os.Exit(1)
			}
			acks <- struct{}{}
		}
	}()
	tell := json.NewEncoder(news)
	host := node.NewClient(c.Node)
	defer host.Close()
	return runAPI(ctx, c, host, ln, log.With("half", "api"), func(secret sandlot.Secret) error {
		if err := tell.Encode(apiNews{Owner: secret.Reveal()}); err != nil {
			return err
		}
		select {
		case <-acks:
			return nil
		case <-ctx.Done():
			return errors.New("the owner's token was not kept")
		}
	})
}

// enterJail makes an empty tmpfs with the database's directory, the node's socket, name resolution and
// certificates this process's whole filesystem, then becomes an ordinary user who can gain nothing any more.
// c's paths are those inside from then on.
func enterJail(c *apiConfig) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	if err := os.MkdirAll(c.Jail, 0o711); err != nil {
		return err
	}
	const flags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	if err := unix.Mount("tmpfs", c.Jail, "tmpfs", flags, "mode=0755,size=1m"); err != nil {
		return err
	}
	if err := bindInto(c.Jail, c.Data, "data", true, flags); err != nil {
		return err
	}
	if err := bindInto(c.Jail, c.Node, "node.sock", false, flags); err != nil {
		return err
	}
	for _, p := range []string{"/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl/certs", "/usr/share/ca-certificates"} {
		fi, err := os.Stat(p)
		if err != nil {
			continue // a host without it works without it
		}
		if err := bindInto(c.Jail, p, p, fi.IsDir(), flags|unix.MS_RDONLY); err != nil {
			return err
		}
	}
	if err := errors.Join(os.MkdirAll(filepath.Join(c.Jail, "tmp"), 0o755), os.Chmod(filepath.Join(c.Jail, "tmp"), 0o1777|os.ModeSticky)); err != nil {
		return err
	}
	if err := errors.Join(unix.Chroot(c.Jail), unix.Chdir("/")); err != nil {
		return err
	}
	c.Data, c.Node = "/data", "/node.sock"
	// Go applies these to all threads.
	if err := errors.Join(syscall.Setgroups(nil), syscall.Setresgid(c.GID, c.GID, c.GID), syscall.Setresuid(c.UID, c.UID, c.UID)); err != nil {
		return err
	}
	if _, _, errno := syscall.AllThreadsSyscall6(syscall.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0, 0); errno != 0 {
		return errno
	}
	return nil
}

// bindInto shows src at name below the jail.
func bindInto(jail, src, name string, dir bool, flags uintptr) error {
	dst := filepath.Join(jail, name)
	if err := os.MkdirAll(filepath.Dir(dst), 0o755); err != nil {
		return err
	}
	if dir {
		if err := os.MkdirAll(dst, 0o755); err != nil {
			return err
		}
	} else if err := os.WriteFile(dst, nil, 0o644); err != nil {
		return err
	}
	if err := unix.Mount(src, dst, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("show %s: %w", src, err)
	}
	// A bind takes its flags in a second step only.
	return unix.Mount("", dst, "", unix.MS_REMOUNT|unix.MS_BIND|flags, "")
}

// startTimeout bounds the take-over of what an earlier process left.
const startTimeout = 2 * time.Minute

// runAPI serves HTTP on ln until ctx ends. keepOwner gets the first token before it becomes valid.
func runAPI(ctx context.Context, c apiConfig, host node.Node, ln net.Listener, log *slog.Logger, keepOwner func(sandlot.Secret) error) error {
	db, err := sqlite.Open(ctx, c.Data)
	if err != nil {
		return err
	}
	defer db.Close()
	az := authz.New(db, time.Now)
	svc := service.New(service.Config{
		Store: db, Node: host, Authz: az, Log: log, MaxSandboxes: c.MaxSandboxes, DefaultTemplate: c.DefaultTemplate,
	})
	if err := svc.FirstStart(ctx, keepOwner); err != nil {
		return err
	}
	srv := httpapi.NewServer(httpapi.New(httpapi.Config{
		Service: svc, Authz: az, Log: log, Version: version, OpenMetrics: c.OpenMetrics,
		Limits: httpapi.Limits{RequestsPerSecond: c.RatePerSecond, Burst: c.RateBurst},
	}))
	served := make(chan error, 1)
	go func() { served <- srv.Serve(ln) }() // /readyz says no until the start is over
	begun := time.Now()
	start, cancel := context.WithTimeout(ctx, startTimeout)
	err = svc.Start(start)
	cancel()
	if err != nil {
		_ = srv.Shutdown(ctx)
		<-served
		return err
	}
	log.Info("ready", "after", time.Since(begun).Round(time.Millisecond))
	select {
	case err := <-served:
		return err
	case <-ctx.Done():
	}
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Duration(c.StopTimeout))
	defer cancel()
	err = srv.Shutdown(grace)
	svc.Close(grace) // sandboxes go on
	return errors.Join(err, <-served)
}
