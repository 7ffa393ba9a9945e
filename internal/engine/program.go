package engine

import (
	"context"
	"fmt"
	"io"
	"net/http"

	"sandlot"
)

// Program is one step of a template's build: a program of a stranger, which runs as root in a machine that is
// made for it, from what was built so far.
type Program struct {
	Image string // absolute path of an EROFS image
	Size  sandlot.Size
	Argv  []string
	Env   []string
	Out   io.Writer // what it prints; written to by one goroutine at a time
	// Serve, when it is not nil, answers at http://BuildAddr inside the machine: all of the network that the
	// program has. Its callers are strangers.
	Serve http.Handler
	// Changes gets, after the program has ended well, what it changed in the image, as a tar: whiteouts are
	// character devices 0:0, a folder that replaces one has the record OpaqueRecord. The guest's kernel wrote
	// it: nothing in it is to be trusted.
	Changes func(io.Reader) error
}

const (
	// BuildAddr is where Program.Serve answers inside the machine.
	BuildAddr = "127.0.0.1:3142"
	// OpaqueRecord is the PAX record of a folder that hides the image's.
	OpaqueRecord = "SCHILY.xattr.trusted.overlay.opaque"
)

// Runner is a machine that can run a Program without its agent, and tell what it changed.
type Runner interface {
	Machine
	// RunProgram runs p to its end and gives p.Changes what it changed. An error of the program itself is an
	// ExitError.
	RunProgram(ctx context.Context, p Program) error
}

// ExitError says that a program ended with a code other than 0.
type ExitError int

func (e ExitError) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

// RunProgram makes a machine with create, runs p in it and removes the machine, whatever happens.
// Fails with sandlot.CodeUnsupported when its engine cannot run programs.
func RunProgram(ctx context.Context, p Program, create func(context.Context, Spec) (Machine, error)) (err error) {
	m, err := create(ctx, Spec{
		ID:       sandlot.NewID(sandlot.PrefixSandbox),
		Template: sandlot.Template{Name: "build", Image: p.Image},
		Size:     p.Size,
	})
	if err != nil {
		return err
	}
	defer func() {
		if derr := m.Destroy(context.WithoutCancel(ctx)); err == nil { // bounded by the engine
			err = derr
		}
	}()
	r, ok := m.(Runner)
	if !ok {
		return sandlot.Errorf(sandlot.CodeUnsupported, "engine %s cannot build templates", m.Record().Engine)
	}
	return r.RunProgram(ctx, p)
}

// Box runs the programs of builds with an engine that is used for nothing else, such as that of a command line.
type Box struct{ Engine Engine }

// Run implements template.Box.
func (b Box) Run(ctx context.Context, p Program) error {
	return RunProgram(ctx, p, func(ctx context.Context, spec Spec) (Machine, error) {
		m, _, err := b.Engine.Create(ctx, spec)
		return m, err
	})
}

// Try implements template.Box: it makes a machine of t and removes it.
func (b Box) Try(ctx context.Context, t sandlot.Template) error {
	m, _, err := b.Engine.Create(ctx, Spec{ID: sandlot.NewID(sandlot.PrefixSandbox), Template: t, Size: t.Size})
	if err != nil {
		return err
	}
	return m.Destroy(context.WithoutCancel(ctx))
}
