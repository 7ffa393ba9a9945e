package agent

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"sandlot/internal/wire"
)

const (
	readyPatience = 45 * time.Second // of Boot.Ready; the engine's with the whole start is longer
	// startGrace is how long a start command without a check must run to count as started, unless it ends well.
	startGrace = 200 * time.Millisecond
	startWords = 800 // bytes of its output in an error
)

// startTemplate runs Boot.Start and waits for Boot.Ready. An error has the end of what the command said.
func (a *Agent) startTemplate(ctx context.Context) error {
	boot := a.cfg.Boot
	if len(boot.Start) == 0 {
		return nil
	}
	env := &identity{env: boot.Env}
	p, err := a.startBackground(env, &wire.Exec{Argv: boot.Start, Background: true})
	if err != nil {
		return fmt.Errorf("agent: start: %w", err)
	}
	if len(boot.Ready) == 0 {
		select {
		case <-p.done:
			return p.startFailed()
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(startGrace):
			return nil
		}
	}
	ctx, cancel := context.WithTimeout(ctx, readyPatience)
	defer cancel()
	wait, done := 10*time.Millisecond, p.done
	for {
		out, err := a.collect(ctx, env, &wire.Exec{Argv: boot.Ready, Collect: 4096, TimeoutMS: 10_000})
		if err != nil {
			return fmt.Errorf("agent: ready: %w", err)
		}
		said := clip(string(out.stdout.data)+string(out.stderr.data), 512)
		code := out.exit.ExitCode
		out.stdout.free()
		out.stderr.free()
		if code == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("agent: the template's start command was not ready within %s; the check ended with code %d and said: %q; the command said: %q",
				readyPatience, code, said, p.lastWords())
		case <-done:
			if err := p.startFailed(); err != nil {
				return err
			}
			done = nil
		case <-time.After(wait):
		}
		wait = min(wait*2, 200*time.Millisecond)
	}
}

// startFailed is nil when the start command, which has ended, ended well: it may have left a daemon.
func (p *proc) startFailed() error {
	code, _ := p.exit()
	if code == 0 {
		return nil
	}
	return fmt.Errorf("agent: the template's start command ended with code %d before it was ready and said: %q", code, p.lastWords())
}

// lastWords is the end of a background process's output. When it has ended, all of it is waited for, for a moment.
func (p *proc) lastWords() string {
	select {
	case <-p.done:
		limit := time.After(time.Second)
		for over := false; !over; {
			_, ended, changed := p.log.state()
			if ended {
				break
			}
			select {
			case <-changed:
			case <-limit:
				over = true
			}
		}
	default:
	}
	f, err := os.Open(p.log.path)
	if err != nil {
		return ""
	}
	defer f.Close()
	size, _, _ := p.log.state()
	b, _ := io.ReadAll(io.NewSectionReader(f, max(0, size-startWords), startWords))
	return strings.ToValidUTF8(strings.TrimSpace(string(b)), "�")
}
