// Command sandlot-agent is the first process inside a sandbox. It is built static:
//
//	CGO_ENABLED=0 go build -trimpath -tags nethttpomithttp2 -ldflags "-s -w" ./cmd/sandlot-agent
//
// It reads wire.BootPath, or the file that its only argument names. In a template's build the host also starts it
// as `sandlot-agent forward ADDR SOCKET PROGRAM…` (agent.Forward).
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"runtime/debug"

	"sandlot/internal/agent"
	"sandlot/internal/wire"
)

func main() {
	// A sandbox pays for the agent's memory and threads: few of both.
	runtime.GOMAXPROCS(2)
	debug.SetGCPercent(50)
	debug.SetMemoryLimit(192 << 20)
	if len(os.Args) > 4 && os.Args[1] == wire.ForwardMode {
		code, err := agent.Forward(os.Args[2], os.Args[3], os.Args[4:])
		if err != nil {
			fmt.Fprintln(os.Stderr, "sandlot-agent:", err)
			code = max(code, 1)
		}
		os.Exit(code)
	}
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "sandlot-agent:", err)
		os.Exit(1)
	}
}

func run() error {
	path := wire.BootPath
	if len(os.Args) > 1 {
		path = os.Args[1]
	}
	b, err := os.ReadFile(path) //nolint:gosec // the operator's own argument
	if err != nil {
		return err
	}
	var boot wire.Boot
	if err := json.Unmarshal(b, &boot); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	if os.Getpid() == 1 {
		agent.BecomeInit()
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	a, err := agent.New(agent.Config{Boot: boot, Log: log})
	if err != nil {
		return err
	}
	return a.Run(context.Background())
}
