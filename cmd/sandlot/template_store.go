package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"sandlot"
	"sandlot/internal/template"
)

// storeFlags name a template store of this host. A server that reads it sees what changes. Without one, commands
// are about the project's templates on a server.
type storeFlags struct {
	Store string `help:"A template store of this host; without, the server's." placeholder:"DIR" env:"SANDLOT_TEMPLATES"`
}

// templateImportCmd makes a template of an OCI image.
type templateImportCmd struct {
	storeFlags `embed:""`

	Cache    string   `help:"Cached layers; default beside the store." placeholder:"DIR" type:"path"`
	Name     string   `help:"The template's name; default the image's." placeholder:"NAME"`
	Platform string   `help:"Which of the image's; default this host's." placeholder:"OS/ARCH"`
	Digest   string   `help:"What the image must be." placeholder:"sha256:…"`
	Kernel   []string `help:"A language whose kernel starts ahead." placeholder:"NAME"`
	Start    bool     `help:"Run the image's own command in each sandbox."`
	Image    string   `arg:"" help:"A reference in a registry; or a folder with an OCI layout, or a tar of docker save, when it begins with / or ."`
}

// Run prints NAME@DIGEST of what it made.
func (x *templateImportCmd) Run(ctx context.Context, s *streams, r *templateCmd) error {
	if x.Store == "" {
		return x.remote(ctx, s, r)
	}
	if x.Cache == "" {
		x.Cache = filepath.Join(filepath.Dir(x.Store), "cache")
	}
	store, err := template.Open(x.Store)
	if err != nil {
		return err
	}
	spec := template.ImportSpec{Name: x.Name, Digest: x.Digest, Platform: x.Platform, Kernels: x.Kernel, ImageStart: x.Start}
	if isPath(x.Image) {
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

// isPath tells a path from a reference.
func isPath(image string) bool { return strings.HasPrefix(image, "/") || strings.HasPrefix(image, ".") }

// remote imports on the server, which takes images of public registries.
func (x *templateImportCmd) remote(ctx context.Context, s *streams, r *templateCmd) error {
	if isPath(x.Image) {
		return errors.New("a server imports from registries only: give --store to import a file on its host")
	}
	c, err := r.client()
	if err != nil {
		return err
	}
	req := &remoteBuild{Name: x.Name, Stream: true, From: map[string]any{"oci": x.Image, "image_start": x.Start}}
	if req.Name == "" {
		req.Name = imageName(x.Image)
	}
	if x.Digest != "" && !strings.Contains(x.Image, "@") {
		req.From["oci"] = x.Image + "@" + x.Digest
	}
	if x.Platform != "" {
		req.From["platform"] = x.Platform
	}
	if len(x.Kernel) > 0 {
		req.From["kernels"] = x.Kernel
	}
	return buildRemote(ctx, s, c, r.JSON, req)
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
func (x *templateInspectCmd) Run(ctx context.Context, s *streams, r *templateCmd) error {
	if x.Store == "" {
		return x.remote(ctx, s, r)
	}
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
	return printTemplate(s, t, versions)
}

// remote shows what the server says.
func (x *templateInspectCmd) remote(ctx context.Context, s *streams, r *templateCmd) error {
	c, err := r.client()
	if err != nil {
		return err
	}
	var t struct {
		sandlot.Template
		Versions []sandlot.Template `json:"versions"`
	}
	raw, err := c.call(ctx, http.MethodGet, c.templates(x.Template), nil, nil, &t)
	if err != nil {
		return err
	}
	if r.JSON {
		return printJSON(s.out, raw)
	}
	return printTemplate(s, t.Template, t.Versions)
}

func printTemplate(s *streams, t sandlot.Template, versions []sandlot.Template) error {
	now := time.Now()
	rows := [][]string{
		{"digest", t.Digest}, {"description", t.Description}, {"contents", strings.Join(t.Contents, ", ")},
		{"kernels", strings.Join(append(t.Kernels, "bash"), " ")},
		{"default size", fmt.Sprintf("%d vCPU, %d MB, %d GB", t.Size.VCPU, t.Size.MemoryMB, t.Size.DiskGB)},
		{"start", strings.Join(t.Start, " ")}, {"ready", strings.Join(t.Ready, " ")}, {"built", ago(t.BuiltAt, now)},
	}
	for _, v := range versions {
		rows = append(rows, []string{"version", v.Digest + ", " + size(v.ImageBytes) + ", built " + ago(v.BuiltAt, now)})
	}
	for _, r := range rows {
		r[1] = printable(r[1])
	}
	return table(s.out, []string{"name", printable(t.Name)}, rows)
}

// templateRmCmd removes templates, or versions of them.
type templateRmCmd struct {
	storeFlags `embed:""`

	Templates []string `arg:"" help:"NAME for all its versions, or NAME@sha256:…"`
}

// Run removes what it can. Sandboxes that run from an image keep it until they end.
func (x *templateRmCmd) Run(ctx context.Context, s *streams, r *templateCmd) error {
	if x.Store == "" {
		return x.remote(ctx, s, r)
	}
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

func (x *templateRmCmd) remote(ctx context.Context, s *streams, r *templateCmd) error {
	c, err := r.client()
	if err != nil {
		return err
	}
	for _, ref := range x.Templates {
		if _, err := c.call(ctx, http.MethodDelete, c.templates(ref), nil, nil, nil); err != nil {
			return err
		}
		fmt.Fprintln(s.out, ref)
	}
	return nil
}
