package main

import (
	"context"
	"fmt"
	"os"

	"sandlot"
	"sandlot/internal/engine/gvisor"
)

// reapCmd removes what a server that is not running left on the host.
type reapCmd struct {
	StateDir string `help:"The server's state directory." required:"" placeholder:"DIR"`
	Runsc    string `help:"The pinned runsc." placeholder:"FILE"`
	Agent    string `help:"The agent's binary." placeholder:"FILE"`
}

func (cmd *reapCmd) Run(ctx context.Context, s *streams) error {
	c := defaultConfig()
	c.StateDir, c.Runsc, c.Agent = cmd.StateDir, cmd.Runsc, cmd.Agent
	if err := c.finish(); err != nil {
		return err
	}
	if _, err := os.Stat(c.nodeDir()); os.IsNotExist(err) {
		return nil
	}
	unlock, err := lockState(c.StateDir)
	if err != nil {
		return err
	}
	defer unlock()
	eng, err := gvisor.New(ctx, gvisor.Config{StateDir: c.nodeDir(), Runsc: c.Runsc, Agent: c.Agent})
	if err != nil {
		return err
	}
	recs, err := eng.List(ctx)
	if err != nil {
		return err
	}
	failed := 0
	for _, r := range recs {
		if err := eng.Reap(ctx, r); err != nil {
			failed++
			fmt.Fprintf(s.err, "%s: %v\n", r.ID, err)
		}
	}
	if failed > 0 {
		return sandlot.Errorf(sandlot.CodeInternal, "%d of %d machines could not be removed", failed, len(recs))
	}
	if err := eng.Remove(ctx); err != nil {
		return err
	}
	fmt.Fprintf(s.out, "removed %d machines\n", len(recs))
	return nil
}
