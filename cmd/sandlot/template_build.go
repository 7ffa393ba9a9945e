package main

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"
	"unicode/utf8"

	"sandlot"
	"sandlot/internal/engine"
	"sandlot/internal/engine/gvisor"
	"sandlot/internal/template"
)

// templateBuildCmd builds templates: into a store of this host, or on a server.
type templateBuildCmd struct {
	storeFlags `embed:""`

	Cache   string `help:"Cached layers; default beside the store." placeholder:"DIR" type:"path"`
	Fresh   bool   `help:"Take nothing from the cache: packages as they are today."`
	Verbose bool   `short:"v" help:"Print the output of each step."`
	Sandbox bool   `negatable:"" default:"true" help:"Run the steps' programs in sandboxes. Without, a definition can do to this host what it likes: only for your own."`
	Runsc   string `help:"The pinned runsc; default beside this program." placeholder:"FILE"`
	Agent   string `help:"The agent's binary; default beside this program." placeholder:"FILE"`

	Definitions []string `arg:"" help:"Folders with a template.toml, whose names are the templates'; or names below ./templates."`
}

// Run prints NAME DIGEST of each, as it is done.
func (x *templateBuildCmd) Run(ctx context.Context, s *streams, r *templateCmd) error {
	for i, d := range x.Definitions {
		x.Definitions[i] = definitionDir(d)
	}
	if x.Store == "" {
		return x.remote(ctx, s, r)
	}
	store, err := template.Open(x.Store)
	if err != nil {
		return err
	}
	if x.Cache == "" {
		x.Cache = filepath.Join(filepath.Dir(x.Store), "cache")
	}
	opts := template.Options{CacheDir: x.Cache, Store: store, Log: s.err, Fresh: x.Fresh, Verbose: x.Verbose}
	if x.Sandbox {
		box, end, err := openBox(ctx, x.Cache, x.Runsc, x.Agent)
		if err != nil {
			return err
		}
		defer end()
		opts.Box = box
	}
	for _, dir := range x.Definitions {
		t, err := template.Build(ctx, dir, opts)
		if err != nil {
			return err
		}
		if r.JSON {
			err = json.NewEncoder(s.out).Encode(t)
		} else {
			_, err = fmt.Fprintf(s.out, "%s %s\n", t.Name, t.Digest)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// definitionDir is a folder as it is given, or one below ./templates when that is what has a definition.
func definitionDir(arg string) string {
	there := func(dir string) bool {
		_, err := os.Lstat(filepath.Join(dir, "template.toml"))
		return err == nil
	}
	if below := filepath.Join("templates", arg); !there(arg) && !strings.ContainsRune(arg, filepath.Separator) && there(below) {
		return below
	}
	return arg
}

// openBox makes an engine for builds, in the cache's folder. One command at a time has it; what a killed one
// left there is removed first.
func openBox(ctx context.Context, cache, runsc, agent string) (box engine.Box, end func(), err error) {
	exe, err := os.Executable()
	if err != nil {
		return box, nil, err
	}
	for p, name := range map[*string]string{&runsc: "runsc", &agent: "sandlot-agent"} {
		if *p == "" {
			*p = filepath.Join(filepath.Dir(exe), name)
		}
		if _, err := os.Stat(*p); err != nil {
			return box, nil, fmt.Errorf("building in sandboxes needs %s: %w; --no-sandbox builds without, a definition that you would run as root", name, err)
		}
	}
	state := filepath.Join(cache, "sandboxes")
	if err := os.MkdirAll(state, 0o700); err != nil {
		return box, nil, err
	}
	unlock, err := lockState(state)
	for errors.Is(ctx.Err(), nil) && sandlot.ErrorCode(err) == sandlot.CodeConflict { // another build
		time.Sleep(200 * time.Millisecond)
		unlock, err = lockState(state)
	}
	if err != nil {
		return box, nil, err
	}
	eng, err := gvisor.New(ctx, gvisor.Config{StateDir: state, Runsc: runsc, Agent: agent})
	if err != nil {
		unlock()
		return box, nil, err
	}
	end = func() {
		_ = eng.Remove(context.WithoutCancel(ctx)) // bounded by itself; the next build tries again
		unlock()
	}
	left, err := eng.List(ctx)
	for _, rec := range left {
		err = errors.Join(err, eng.Reap(ctx, rec))
	}
	if err != nil {
		end()
		return box, nil, err
	}
	return engine.Box{Engine: eng}, end, nil
}

// remote builds on the server.
func (x *templateBuildCmd) remote(ctx context.Context, s *streams, r *templateCmd) error {
	c, err := r.client()
	if err != nil {
		return err
	}
	if !x.Sandbox {
		return errors.New("--no-sandbox is for a store of this host: give --store")
	}
	for _, dir := range x.Definitions {
		req, err := readDefinition(dir)
		if err != nil {
			return err
		}
		if err := buildRemote(ctx, s, c, r.JSON, req); err != nil {
			return err
		}
	}
	return nil
}

// remoteBuild is the body of a build.
type remoteBuild struct {
	Name       string         `json:"name"`
	Definition string         `json:"definition,omitempty"`
	Files      []remoteFile   `json:"files,omitempty"`
	From       map[string]any `json:"from,omitempty"`
	Stream     bool           `json:"stream"`
}

type remoteFile struct {
	Path          string  `json:"path"`
	Content       *string `json:"content,omitempty"`
	ContentBase64 *string `json:"content_base64,omitempty"`
	Executable    bool    `json:"executable,omitempty"`
}

// maxUpload bounds a definition's files together, so that base64 of them fits a JSON body.
const maxUpload = sandlot.MaxBodyBytes / 2

// readDefinition reads a definition's folder: regular files only.
func readDefinition(dir string) (*remoteBuild, error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	req := &remoteBuild{Name: filepath.Base(abs), Stream: true}
	root, err := os.OpenRoot(abs)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	total := int64(0)
	err = fs.WalkDir(root.FS(), ".", func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		if !info.Mode().IsRegular() {
			return fmt.Errorf("%s is not a regular file: a server takes no others", p)
		}
		if total += info.Size(); total > maxUpload {
			return fmt.Errorf("the definition has over %d KiB of files: have a step fetch what is large, or build on the server's host with --store", maxUpload>>10)
		}
		b, err := fs.ReadFile(root.FS(), p)
		if err != nil {
			return err
		}
		if p == "template.toml" {
			req.Definition = string(b)
			return nil
		}
		f := remoteFile{Path: filepath.ToSlash(p), Executable: info.Mode()&0o111 != 0}
		if text := string(b); utf8.ValidString(text) {
			f.Content = &text
		} else {
			coded := base64.StdEncoding.EncodeToString(b)
			f.ContentBase64 = &coded
		}
		req.Files = append(req.Files, f)
		return nil
	})
	if err == nil && req.Definition == "" {
		err = fmt.Errorf("%s has no template.toml", dir)
	}
	return req, err
}

// buildRemote asks for a build and prints its log on standard error, and what came of it.
func buildRemote(ctx context.Context, s *streams, c *client, asJSON bool, req *remoteBuild) error {
	var end struct {
		Type, Line, State, Name, Digest string
		Error                           *struct{ Code, Message string }
	}
	err := c.stream(ctx, http.MethodPost, c.sandboxes("templates"), nil, req, func(data []byte) error {
		end.Type, end.Line = "", ""
		if err := json.Unmarshal(data, &end); err != nil {
			return fmt.Errorf("an event cannot be read: %w", err)
		}
		if end.Type == "log" {
			fmt.Fprintln(s.err, printable(end.Line))
		}
		if end.Type == "end" && asJSON {
			return printJSON(s.out, data)
		}
		return nil
	})
	switch {
	case err != nil:
		return err
	case end.Error != nil:
		return fmt.Errorf("%s (%s)", printable(end.Error.Message), printable(end.Error.Code))
	case end.Type != "end":
		return errors.New("the stream broke off; the build goes on")
	case !asJSON:
		_, err = fmt.Fprintf(s.out, "%s %s\n", printable(end.Name), printable(end.Digest))
	}
	return err
}
