package main

import (
	"context"
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"

	"sandlot/internal/devserver"
)

// start returns a server with this engine and pool, the running one when it is the same.
func (b *bench) start(ctx context.Context, engine string, pool map[string]int) (*devserver.Server, error) {
	key := fmt.Sprint(engine, pool)
	if b.srv != nil && b.key == key {
		return b.srv, nil
	}
	if err := b.stopServer(); err != nil {
		return nil, err
	}
	state, err := os.MkdirTemp(b.dir, "state-")
	if err != nil {
		return nil, err
	}
	b.srv, err = devserver.Start(ctx, devserver.Config{
		Bin: b.bin, Templates: b.templates, StateDir: state, Engine: engine, Pool: pool, Options: `log_level = "warn"`,
	})
	if err != nil {
		b.srv = nil
		return nil, err
	}
	b.key = key
	return b.srv, nil
}

func (b *bench) stopServer() error {
	s := b.srv
	if s == nil {
		return nil
	}
	b.srv = nil
	return s.Stop()
}

func kernelRelease() string {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return "unknown kernel"
	}
	return unix.ByteSliceToString(u.Sysname[:]) + " " + unix.ByteSliceToString(u.Release[:])
}

func cpus() int { return runtime.NumCPU() }
