package node

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"sandlot"
	"sandlot/internal/engine"
	"sandlot/internal/template"
)

// What one project's templates may take.
const (
	maxProjectTemplates  = 20
	maxProjectBytes      = 32 << 30 // images of all versions
	maxProjectImage      = 8 << 30
	maxBuildCache        = 24 << 30 // layers of all projects' builds, and of one
	maxDefinitionFiles   = 200
	maxBuildsAtOnce      = 4 // on this host; they take turns, one step at a time
	buildTimeout         = 30 * time.Minute
	maxBuildErrorMessage = 4 << 10

	tryVCPU, tryMemoryMB, tryDiskGB = 4, 4096, 20
)

// Builds is where a host keeps projects' templates and builds them.
type Builds struct {
	Projects *template.Store // its Project(id) is one project's
	Shared   *template.Store // everybody's templates, to build from
	CacheDir string          // layers, and definitions while they are built
}

// BuildRequest asks for a template of a project: from a definition, or from an image of a registry.
type BuildRequest struct {
	Project    sandlot.ID
	Name       string
	Definition string // template.toml
	Files      []BuildFile
	Import     *ImportRequest // instead of Definition
}

// BuildFile is one file of a definition's folder.
type BuildFile struct {
	Path       string // relative, without ".."
	Executable bool
	Data       []byte
}

// ImportRequest names an image. See template.ImportSpec.
type ImportRequest struct {
	Reference, Digest, Platform string
	Kernels                     []string
	Size                        sandlot.Size
	Env                         map[string]string
	Start, Ready                []string
	ImageStart                  bool
}

// buildNews is one line of a build's answer: a line of its log, or its end.
type buildNews struct {
	Log     string            `json:"log,omitempty"`
	Done    *sandlot.Template `json:"done,omitempty"`
	Failure *failure          `json:"failure,omitempty"`
}

var errNoBuilds = sandlot.Errorf(sandlot.CodeUnsupported, "this host builds no templates")

// projectStore returns a project's store, or nil when it has none and make is false.
func (h *Host) projectStore(project sandlot.ID, create bool) (*template.Store, error) {
	if h.cfg.Builds == nil {
		if create {
			return nil, errNoBuilds
		}
		return nil, nil
	}
	if project == "" || !create && !h.cfg.Builds.Projects.HasProject(project) {
		return nil, nil
	}
	return h.cfg.Builds.Projects.Project(project)
}

// template finds a project's own template, or else everybody's.
func (h *Host) template(project sandlot.ID, ref string) (sandlot.Template, error) {
	own, err := h.projectStore(project, false)
	if err != nil {
		return sandlot.Template{}, err
	}
	if own != nil {
		if t, err := own.Get(ref); sandlot.ErrorCode(err) != sandlot.CodeNotFound {
			return t, err
		}
	}
	return h.cfg.Templates.Get(ref)
}

// Templates implements Node.
func (h *Host) Templates(_ context.Context, project sandlot.ID) ([]TemplateInfo, error) {
	ts, err := h.cfg.Templates.List()
	if err != nil {
		return nil, err
	}
	out := make([]TemplateInfo, 0, len(ts))
	own, err := h.projectStore(project, false)
	if err != nil {
		return nil, err
	}
	if own != nil {
		mine, err := own.List()
		if err != nil {
			return nil, err
		}
		for _, t := range mine {
			out = append(out, TemplateInfo{Template: t, Own: true})
			ts = slices.DeleteFunc(ts, func(b sandlot.Template) bool { return b.Name == t.Name })
		}
	}
	for _, t := range ts {
		out = append(out, TemplateInfo{Template: t, Pool: h.pools.info(t.Name)})
	}
	slices.SortFunc(out, func(a, b TemplateInfo) int { return strings.Compare(a.Name, b.Name) })
	return out, nil
}

// Versions implements Node.
func (h *Host) Versions(_ context.Context, project sandlot.ID, name string) ([]TemplateInfo, error) {
	own, err := h.projectStore(project, false)
	if err != nil {
		return nil, err
	}
	if own != nil {
		list, err := own.Versions(name)
		if sandlot.ErrorCode(err) != sandlot.CodeNotFound {
			return infos(list, true), err
		}
	}
	if s, ok := h.cfg.Templates.(interface {
		Versions(name string) ([]sandlot.Template, error)
	}); ok {
		list, err := s.Versions(name)
		out := infos(list, false)
		if len(out) > 0 {
			out[0].Pool = h.pools.info(name)
		}
		return out, err
	}
	t, err := h.cfg.Templates.Get(name)
	if err != nil {
		return nil, err
	}
	return infos([]sandlot.Template{t}, false), nil
}

func infos(list []sandlot.Template, own bool) []TemplateInfo {
	out := make([]TemplateInfo, len(list))
	for i, t := range list {
		out[i] = TemplateInfo{Template: t, Own: own}
	}
	return out
}

// RemoveTemplate implements Node.
func (h *Host) RemoveTemplate(ctx context.Context, project sandlot.ID, ref string) error {
	own, err := h.projectStore(project, false)
	if err != nil {
		return err
	}
	err = sandlot.Errorf(sandlot.CodeNotFound, "no template %.100q", ref)
	if own != nil {
		err = own.Remove(ctx, ref)
	}
	if sandlot.ErrorCode(err) == sandlot.CodeNotFound {
		if _, gerr := h.cfg.Templates.Get(ref); gerr == nil {
			return sandlot.Errorf(sandlot.CodeForbidden, "template %s is this server's, not the project's: its operator removes it with `sandlot template rm`", ref)
		}
	}
	return err
}

// UsesTemplate says whether a machine of this host was made from a version, NAME@DIGEST.
func (h *Host) UsesTemplate(ref string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, m := range h.machines {
		if r := m.Record(); r.Template+"@"+r.Digest == ref {
			return true
		}
	}
	return false
}

// BuildTemplate implements Node.
func (h *Host) BuildTemplate(ctx context.Context, req BuildRequest, log func(line string)) (sandlot.Template, error) {
	own, err := h.projectStore(req.Project, true)
	if err != nil {
		return sandlot.Template{}, err
	}
	if own == nil {
		return sandlot.Template{}, sandlot.Errorf(sandlot.CodeInvalidRequest, "a build is for a project")
	}
	if err := h.mayBuild(own, req.Name); err != nil {
		return sandlot.Template{}, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, buildTimeout, sandlot.Errorf(sandlot.CodeTimeout, "a build takes at most %s", buildTimeout))
	defer cancel()
	ended := make(chan struct{})
	defer close(ended)
	go func() {
		select {
		case <-h.life:
			cancel()
		case <-ended:
		}
	}()
	done, err := h.beginBuild(ctx, req.Project)
	if err != nil {
		return sandlot.Template{}, err
	}
	defer done()
	opts := template.Options{
		CacheDir: h.cfg.Builds.CacheDir, Store: own, Bases: h.cfg.Builds.Shared, Log: &lineWriter{line: log}, Verbose: true,
		Box: hostBox{h}, Stranger: true, MaxImageBytes: maxProjectImage, MaxCacheBytes: maxBuildCache,
	}
	var t sandlot.Template
	if in := req.Import; in != nil {
		t, err = template.Import(ctx, template.ImportSpec{
			Name: req.Name, Reference: in.Reference, Digest: in.Digest, Platform: in.Platform, Kernels: in.Kernels, Size: in.Size,
			Env: in.Env, Start: in.Start, Ready: in.Ready, ImageStart: in.ImageStart, Stranger: true,
		}, opts)
	} else {
		t, err = h.buildDefinition(ctx, req, opts)
	}
	if err != nil {
		return sandlot.Template{}, h.buildError(ctx, err)
	}
	return t, nil
}

// mayBuild checks a project's bounds before anything is done.
func (h *Host) mayBuild(own *template.Store, name string) error {
	if _, err := sandlot.ParseName(name); err != nil {
		return err
	}
	if _, err := h.cfg.Templates.Get(name); err == nil {
		return sandlot.Errorf(sandlot.CodeConflict, "%s is one of this server's templates: choose another name", name).With("field", "name")
	}
	list, err := own.List()
	if err != nil {
		return err
	}
	var bytes int64
	known := false
	for _, t := range list {
		known = known || t.Name == name
		versions, err := own.Versions(t.Name)
		if err != nil {
			return err
		}
		for _, v := range versions {
			bytes += v.ImageBytes
		}
	}
	if !known && len(list) >= maxProjectTemplates {
		return sandlot.Errorf(sandlot.CodeQuotaExceeded, "a project has at most %d templates: remove one", maxProjectTemplates).
			With("limit", maxProjectTemplates).With("used", len(list))
	}
	if bytes > maxProjectBytes-maxProjectImage {
		return sandlot.Errorf(sandlot.CodeQuotaExceeded, "a project's templates take at most %d GiB with all versions: remove some", maxProjectBytes>>30).
			With("limit", int64(maxProjectBytes)).With("used", bytes)
	}
	return nil
}

// building is a project's build under way.
type building struct {
	ctx  context.Context //nolint:containedctx // says whether the build is being undone
	done chan struct{}
}

// beginBuild takes the project's place and one of the host's. A build that was cancelled is waited for: its caller
// does not see that it is still being undone.
func (h *Host) beginBuild(ctx context.Context, project sandlot.ID) (done func(), err error) {
	for {
		b, before, err := h.tryBuild(ctx, project)
		if err != nil {
			return nil, err
		}
		if before == nil {
			return func() {
				h.mu.Lock()
				delete(h.building, project)
				h.mu.Unlock()
				close(b.done)
				h.work.Done()
			}, nil
		}
		select {
		case <-before.done:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

func (h *Host) tryBuild(ctx context.Context, project sandlot.ID) (b, before *building, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	before = h.building[project]
	switch {
	case h.closed:
		return nil, nil, sandlot.Errorf(sandlot.CodeCapacity, "this host is shutting down").With("retry_after_s", 5)
	case before != nil && before.ctx.Err() != nil:
		return nil, before, nil
	case before != nil:
		return nil, nil, sandlot.Errorf(sandlot.CodeConflict, "the project has a build under way: wait for its end").With("retry_after_s", 10)
	case len(h.building) >= maxBuildsAtOnce:
		return nil, nil, sandlot.Errorf(sandlot.CodeCapacity, "this host has %d builds under way", maxBuildsAtOnce).With("retry_after_s", 30)
	}
	b = &building{ctx: ctx, done: make(chan struct{})}
	h.building[project] = b
	h.work.Add(1)
	return b, nil, nil
}

// buildDefinition writes the definition's folder, builds it and removes it.
func (h *Host) buildDefinition(ctx context.Context, req BuildRequest, opts template.Options) (t sandlot.Template, err error) {
	if len(req.Files) > maxDefinitionFiles {
		return t, sandlot.Errorf(sandlot.CodeInvalidRequest, "files: at most %d", maxDefinitionFiles)
	}
	uploads := filepath.Join(h.cfg.Builds.CacheDir, "uploads")
	if err := os.MkdirAll(uploads, 0o700); err != nil {
		return t, err
	}
	tmp, err := os.MkdirTemp(uploads, "")
	if err != nil {
		return t, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
	dir := filepath.Join(tmp, req.Name)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return t, err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return t, err
	}
	defer root.Close()
	files := append([]BuildFile{{Path: "template.toml", Data: []byte(req.Definition)}}, req.Files...)
	for _, f := range files {
		if !fs.ValidPath(f.Path) || f.Path == "." || len(f.Path) > sandlot.MaxPathBytes {
			return t, sandlot.Errorf(sandlot.CodeInvalidRequest, "files: %.100q is not a relative path without . and ..", f.Path).With("field", "files")
		}
		mode := fs.FileMode(0o644)
		if f.Executable {
			mode = 0o755
		}
		if err := root.MkdirAll(path.Dir(f.Path), 0o755); err != nil {
			return t, badFile(f.Path, err)
		}
		w, err := root.OpenFile(f.Path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
		if err != nil {
			return t, badFile(f.Path, err)
		}
		_, err = w.Write(f.Data)
		if err := errors.Join(err, w.Close()); err != nil {
			return t, err
		}
	}
	return template.Build(ctx, dir, opts)
}

func badFile(path string, err error) error {
	if errors.Is(err, fs.ErrExist) {
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "files: %.100q is given twice, or is template.toml", path).With("field", "files")
	}
	return sandlot.Wrap(err, sandlot.CodeInvalidRequest, "files: %.100q cannot be written: is it a folder of another?", path).With("field", "files")
}

// buildError is a build's failure as its caller may read it. What failed is the caller's own definition, unless
// the error says otherwise.
func (h *Host) buildError(ctx context.Context, err error) error {
	code := sandlot.CodeInvalidRequest
	message := err.Error()
	var e *sandlot.Error
	if errors.As(err, &e) && e.Code != sandlot.CodeInternal {
		code = e.Code
	}
	if cause := context.Cause(ctx); cause != nil {
		code, message = sandlot.CodeTimeout, "the build was ended"
		if errors.As(cause, &e) {
			code, message = e.Code, e.Message
		}
	}
	h.cfg.Log.Info("a build failed", "err", err)
	message = strings.ReplaceAll(message, h.cfg.Builds.CacheDir, "")
	out := sandlot.Wrap(err, code, "%s", strings.ToValidUTF8(message[:min(len(message), maxBuildErrorMessage)], "�"))
	var step *template.StepError
	if errors.As(err, &step) {
		return out.With("step", step.Step)
	}
	return out
}

// lineWriter gives line whole lines, each of bounded length.
type lineWriter struct {
	mu   sync.Mutex
	buf  []byte
	line func(string)
}

const maxLogLine = 2000

func (w *lineWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range p {
		if c != '\n' && len(w.buf) < maxLogLine {
			w.buf = append(w.buf, c)
			continue
		}
		w.line(strings.ToValidUTF8(string(w.buf), "�"))
		w.buf = w.buf[:0]
		if c != '\n' {
			w.buf = append(w.buf, c)
		}
	}
	return len(p), nil
}

// hostBox runs builds' programs in machines of this host, which Reconcile knows as it knows those of a pool:
// after a kill they are removed as those are.
type hostBox struct{ h *Host }

var _ template.Box = hostBox{}

func (b hostBox) create(ctx context.Context, spec engine.Spec) (engine.Machine, error) {
	h := b.h
	if err := h.admit(); err != nil {
		return nil, err
	}
	select {
	case h.boots <- struct{}{}:
		defer func() { <-h.boots }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	h.mu.Lock()
	h.making++
	h.mu.Unlock()
	eng := h.cfg.Engines[0]
	m, _, err := eng.Create(ctx, spec)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.making--
	if err != nil {
		return nil, err
	}
	h.hold(m, eng, true)
	return m, nil
}

// Run implements template.Box.
func (b hostBox) Run(ctx context.Context, p engine.Program) error {
	return engine.RunProgram(ctx, p, b.create)
}

// Try implements template.Box. The size that a definition asks for is only what its sandboxes get where a plan
// allows it.
func (b hostBox) Try(ctx context.Context, t sandlot.Template) error {
	t.Size = sandlot.Size{VCPU: min(t.Size.VCPU, tryVCPU), MemoryMB: min(t.Size.MemoryMB, tryMemoryMB), DiskGB: min(t.Size.DiskGB, tryDiskGB)}
	m, err := b.create(ctx, engine.Spec{ID: sandlot.NewID(sandlot.PrefixSandbox), Template: t, Size: t.Size})
	if err != nil {
		return err
	}
	if err := m.Destroy(context.WithoutCancel(ctx)); err != nil { // bounded by the engine
		return fmt.Errorf("the trial of the start command: %w", err)
	}
	return nil
}
