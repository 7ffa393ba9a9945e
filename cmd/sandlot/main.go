// Command sandlot is the server and its command line.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/alecthomas/kong"

	"sandlot"
)

// version is set by the linker.
var version = "dev"

// streams are what a command talks to, so that tests can hold them.
type streams struct {
	in       io.Reader
	out, err io.Writer
}

// cli is the command line. Each command has a Run method with any of context.Context and *streams as
// parameters.
type cli struct {
	Serve    serveCmd    `cmd:"" help:"Run the server: the HTTP half and the node half."`
	ServeAPI serveAPICmd `cmd:"" name:"serve-api" hidden:"" help:"The HTTP half; serve starts it."`
	Reap     reapCmd     `cmd:"" help:"Remove every machine of a state directory whose server is not running."`
	Doctor   doctorCmd   `cmd:"" help:"Say what this host can do, and what to install."`
	Sandbox  sandboxCmd  `cmd:"" aliases:"sbx" help:"Create and use sandboxes."`
	Template templateCmd `cmd:"" help:"Build and list templates."`
	Token    tokenCmd    `cmd:"" help:"Create, list and revoke tokens."`
	Complete completeCmd `cmd:"" name:"completion" help:"Print a shell completion script."`

	Version kong.VersionFlag `help:"Print the version."`
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	os.Exit(run(ctx, os.Args[1:], &streams{os.Stdin, os.Stdout, os.Stderr}))
}

// exitCode is an error that only carries a status: a command inside a sandbox failed, and has said so itself.
type exitCode int

func (e exitCode) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

// run parses args and runs the command. It returns the process's exit status: 0, 1 on a failure, 2 on a
// wrong command line, or the status of a command inside a sandbox.
func run(ctx context.Context, args []string, s *streams) int {
	var c cli
	exited := -1
	p, err := kong.New(&c,
		kong.Name("sandlot"),
		kong.Description("Sandboxes for AI agents on any Linux machine."),
		kong.Writers(s.out, s.err),
		kong.Exit(func(code int) { exited = code }),
		kong.Vars{"version": version},
		kong.BindTo(ctx, (*context.Context)(nil)),
		kong.Bind(s),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true}),
	)
	if err != nil {
		fmt.Fprintln(s.err, "sandlot:", err)
		return 1
	}
	k, err := p.Parse(args)
	if exited >= 0 { // help or version
		return exited
	}
	if err != nil {
		fmt.Fprintf(s.err, "sandlot: %v\nTry `sandlot --help`.\n", err)
		return 2
	}
	err = k.Run()
	var code exitCode
	switch {
	case err == nil:
		return 0
	case errors.As(err, &code):
		return int(code)
	}
	var e *sandlot.Error
	if errors.As(err, &e) {
		fmt.Fprintf(s.err, "sandlot: %s (%s)\n", e.Message, e.Code)
	} else {
		fmt.Fprintln(s.err, "sandlot:", err)
	}
	return 1
}
