package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path"
	"strings"
	"time"

	"sandlot"
	"sandlot/internal/template"
)

// storeFlags name a template store of this host. A server that reads it sees what changes.
type storeFlags struct {
	Store string `required:"" help:"The template store." placeholder:"DIR" type:"path" env:"SANDLOT_TEMPLATES"`
}

// templateImportCmd makes a template of an OCI image.
type templateImportCmd struct {
	storeFlags `embed:""`

	Cache    string   `required:"" help:"Cached layers." placeholder:"DIR" type:"path"`
	Name     string   `help:"The template's name; default the image's." placeholder:"NAME"`
	Platform string   `help:"Which of the image's; default this host's." placeholder:"OS/ARCH"`
	Digest   string   `help:"What the image must be." placeholder:"sha256:…"`
	Kernel   []string `help:"A language whose kernel starts ahead." placeholder:"NAME"`
	Start    bool     `help:"Run the image's own command in each sandbox."`
	Image    string   `arg:"" help:"A reference in a registry; or a folder with an OCI layout, or a tar of docker save, when it begins with / or ."`
}

// Run prints NAME@DIGEST of what it made.
func (x *templateImportCmd) Run(ctx context.Context, s *streams, r *templateCmd) error {
	store, err := template.Open(x.Store)
	if err != nil {
		return err
	}
	spec := template.ImportSpec{Name: x.Name, Digest: x.Digest, Platform: x.Platform, Kernels: x.Kernel, ImageStart: x.Start}
	if strings.HasPrefix(x.Image, "/") || strings.HasPrefix(x.Image, ".") {
		st, err := os.Stat(x.Image)
		switch {
		case err != nil:
			return err
		case st.IsDir():
			spec.Layout = x.Image
		default:
			spec.Archive = x.Image
		}
	} else {
		spec.Reference = x.Image
	}
	if spec.Name == "" {
		spec.Name = imageName(x.Image)
	}
	t, err := template.Import(ctx, spec, template.Options{CacheDir: x.Cache, Store: store, Log: s.err})
	if err != nil {
		return err
	}
	return printVersion(s, r.JSON, t)
}

// imageName is the last part of a reference or path, without tag, digest and suffix.
func imageName(image string) string {
	name, _, _ := strings.Cut(image, "@")
	name = path.Base(name)
	name, _, _ = strings.Cut(name, ":")
	return strings.ToLower(strings.TrimSuffix(name, ".tar"))
}

func printVersion(s *streams, asJSON bool, t sandlot.Template) error {
	if asJSON {
		return json.NewEncoder(s.out).Encode(t)
	}
	_, err := fmt.Fprintf(s.out, "%s@%s\n", t.Name, t.Digest)
	return err
}

// templateInspectCmd shows all that a store says of a template and its versions.
type templateInspectCmd struct {
	storeFlags `embed:""`

	Template string `arg:"" help:"NAME, or NAME@sha256:…"`
}

// Run prints the manifest as JSON, or as lines with the versions below.
func (x *templateInspectCmd) Run(s *streams, r *templateCmd) error {
	store, err := template.Open(x.Store)
	if err != nil {
		return err
	}
	t, err := store.Get(x.Template)
	if err != nil {
		return err
	}
	if r.JSON {
		return json.NewEncoder(s.out).Encode(t)
	}
	versions, err := store.Versions(t.Name)
	if err != nil {
		return err
	}
	now := time.Now()
	rows := [][]string{
		{"name", t.Name}, {"digest", t.Digest}, {"description", t.Description}, {"contents", strings.Join(t.Contents, ", ")},
		{"kernels", strings.Join(append(t.Kernels, "bash"), " ")},
		{"default size", fmt.Sprintf("%d vCPU, %d MB, %d GB", t.Size.VCPU, t.Size.MemoryMB, t.Size.DiskGB)},
		{"start", strings.Join(t.Start, " ")}, {"ready", strings.Join(t.Ready, " ")}, {"built", ago(t.BuiltAt, now)},
	}
	for _, v := range versions {
		rows = append(rows, []string{"version", v.Digest + ", built " + ago(v.BuiltAt, now)})
	}
	return table(s.out, []string{"", t.Name}, rows)
}

// templateRmCmd removes templates, or versions of them.
type templateRmCmd struct {
	storeFlags `embed:""`

	Templates []string `arg:"" help:"NAME for all its versions, or NAME@sha256:…"`
}

// Run removes what it can. Sandboxes that run from an image keep it until they end.
func (x *templateRmCmd) Run(ctx context.Context, s *streams) error {
	store, err := template.Open(x.Store)
	if err != nil {
		return err
	}
	for _, ref := range x.Templates {
		if err := store.Remove(ctx, ref); err != nil {
			return err
		}
		fmt.Fprintln(s.out, ref)
	}
	return nil
}
