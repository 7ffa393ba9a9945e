package main

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"time"

	"sandlot"
	"sandlot/internal/template"
)

// templateCmd builds and lists templates.
type templateCmd struct {
	remote `embed:""`

	Ls    templateLsCmd    `cmd:"" aliases:"list" help:"List the server's templates."`
	Build templateBuildCmd `cmd:"" help:"Build templates on this host; --help says how." passthrough:""`

	Import  templateImportCmd  `cmd:"" help:"Make a template of an OCI image: of a registry, a layout, or docker save."`
	Inspect templateInspectCmd `cmd:"" help:"Show all that a store says of a template, and its versions."`
	Rm      templateRmCmd      `cmd:"" aliases:"delete" help:"Remove templates, or versions of them, from a store."`
}

type templateLsCmd struct{}

// templateView is a template as the API shows it.
type templateView struct {
	Name    string       `json:"name"`
	Digest  string       `json:"digest"`
	Kernels []string     `json:"kernels"`
	Size    sandlot.Size `json:"default_size"`
	Bytes   int64        `json:"image_bytes"`
	BuiltAt time.Time    `json:"built_at"`
	Pool    struct {
		Target  int `json:"target"`
		Ready   int `json:"ready"`
		Filling int `json:"filling"`
	} `json:"pool"`
}

func (x *templateLsCmd) Run(ctx context.Context, s *streams, r *templateCmd) error {
	c, err := r.client()
	if err != nil {
		return err
	}
	var answer struct {
		Templates []templateView `json:"templates"`
	}
	raw, err := c.call(ctx, http.MethodGet, c.sandboxes("templates"), nil, nil, &answer)
	if err != nil {
		return err
	}
	if r.JSON {
		return printJSON(s.out, raw)
	}
	now := time.Now()
	rows := make([][]string, 0, len(answer.Templates))
	for _, t := range answer.Templates {
		digest := strings.TrimPrefix(t.Digest, "sha256:")
		rows = append(rows, []string{
			t.Name, digest[:min(12, len(digest))],
			fmt.Sprintf("%d vCPU, %d MB, %d GB", t.Size.VCPU, t.Size.MemoryMB, t.Size.DiskGB),
			strings.Join(t.Kernels, " "), size(t.Bytes), ago(t.BuiltAt, now), fmt.Sprintf("%d of %d", t.Pool.Ready, t.Pool.Target),
		})
	}
	return table(s.out, []string{"NAME", "DIGEST", "DEFAULT SIZE", "KERNELS", "IMAGE", "BUILT", "POOL"}, rows)
}

// templateBuildCmd hands its arguments to the template builder, which has its own help.
type templateBuildCmd struct {
	Args []string `arg:"" optional:"" help:"--store DIR --cache DIR DEFINITION-FOLDER…"`
}

func (x *templateBuildCmd) Run(s *streams) error {
	if code := template.BuildMain(x.Args, s.out, s.err); code != 0 {
		return exitCode(code)
	}
	return nil
}
