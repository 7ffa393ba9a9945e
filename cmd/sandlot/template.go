package main

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"time"

	"sandlot"
)

// templateCmd builds and lists templates.
type templateCmd struct {
	remote `embed:""`

	Ls    templateLsCmd    `cmd:"" aliases:"list" help:"List the templates that a project can use."`
	Build templateBuildCmd `cmd:"" help:"Build templates of their definitions: into a store with --store, else on the server."`

	Import  templateImportCmd  `cmd:"" help:"Make a template of an OCI image: of a registry, a layout, or docker save."`
	Inspect templateInspectCmd `cmd:"" help:"Show a template with its versions: of a store with --store, else of the server."`
	Rm      templateRmCmd      `cmd:"" aliases:"delete" help:"Remove templates, or versions of them: from a store with --store, else the project's."`
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
	Own     bool         `json:"own"`
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
			strings.Join(t.Kernels, " "), size(t.Bytes), ago(t.BuiltAt, now), t.of(), fmt.Sprintf("%d of %d", t.Pool.Ready, t.Pool.Target),
		})
	}
	return table(s.out, []string{"NAME", "DIGEST", "DEFAULT SIZE", "KERNELS", "IMAGE", "BUILT", "OF", "POOL"}, rows)
}

// of says whose the template is.
func (t *templateView) of() string {
	if t.Own {
		return "project"
	}
	return "server"
}
