package template

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"sandlot"
)

// Options say where a build keeps things.
type Options struct {
	CacheDir string    // layers; a disk file system that overlayfs takes (ext4, xfs, btrfs)
	Store    *Store    // where the result goes
	Log      io.Writer // progress lines; nil for none
	Verbose  bool      // also the output of each step
	Fresh    bool      // make every layer anew: the packages of today

	// Box is where programs run, and means that nobody vouches for the definition; nil: programs run on this
	// host, for definitions that are trusted as the program itself is.
	Box Box

	// Stranger: the definition came from a caller who is not this host's operator. It needs a Box, it may not name
	// folders beside its own, and registries see it without this host's credentials.
	Stranger bool
	// Bases are templates to build from besides Store's; may be nil.
	Bases *Store

	MaxImageBytes int64 // default: 16 GiB
	MaxCacheBytes int64 // of all layers, what is longest unused goes first; and of one build's. 0: no bound
}

// StepError says which step of a build failed. "image" is the writing of the image, "start" the start command
// with its check.
type StepError struct {
	Step string
	Err  error
}

func (e *StepError) Error() string { return "step " + e.Step + ": " + e.Err.Error() }
func (e *StepError) Unwrap() error { return e.Err }

const defaultMaxImage = 16 << 30

// Build makes the template that the folder defDir defines and puts it into opts.Store.
//
// Prerequisites: root; mkfs.erofs and what the steps use (mmdebstrap, apt, pip, npm, go) on this host.
// On success the store has the image and a manifest that names it; when nothing changed since the last build
// that is found out from the keys alone. On failure the error names the step, and neither store nor cache has
// anything half made: finished layers stay cached.
func Build(ctx context.Context, defDir string, opts Options) (sandlot.Template, error) {
	t, err := build(ctx, defDir, opts)
	if err != nil {
		return sandlot.Template{}, fmt.Errorf("template %s: %w", filepath.Base(defDir), err)
	}
	return t, nil
}

func build(ctx context.Context, defDir string, opts Options) (sandlot.Template, error) {
	def, err := loadDefinition(defDir)
	if err != nil {
		return sandlot.Template{}, err
	}
	return buildDefinition(ctx, def, opts)
}

func buildDefinition(ctx context.Context, def *definition, opts Options) (sandlot.Template, error) {
	if opts.Log == nil {
		opts.Log = io.Discard
	}
	if opts.MaxImageBytes == 0 {
		opts.MaxImageBytes = defaultMaxImage
	}
	if opts.Stranger && opts.Box == nil {
		return sandlot.Template{}, sandlot.Errorf(sandlot.CodeUnsupported, "this host has no sandboxes to build in")
	}
	started := time.Now()
	p, err := newPlan(def, &opts)
	if err != nil {
		return sandlot.Template{}, err
	}
	defer p.close()
	log := &progress{w: opts.Log, name: def.name, started: started}
	if !opts.Fresh {
		if m, err := opts.Store.manifest(def.name); err == nil && m.Key == p.key {
			log.say("up to date, %s", m.Digest)
			return m.Template, nil
		}
	}
	c, err := openCache(ctx, opts.CacheDir)
	if err != nil {
		return sandlot.Template{}, err
	}
	defer c.close()
	defer c.prune(opts.MaxCacheBytes)

	var lowers []string
	var bytes int64
	for i, l := range p.layers {
		title := fmt.Sprintf("[%d/%d] %s", i+1, len(p.layers)+1, l.title)
		if !opts.Fresh && c.has(l.key) {
			log.say("%s: cached", title)
		} else if err := c.make(ctx, l, lowers, log, title, &opts); err != nil {
			return sandlot.Template{}, &StepError{l.title, err}
		}
		lowers = append([]string{c.layerDir(l.key)}, lowers...)
		if bytes += c.size(l.key); opts.MaxCacheBytes > 0 && bytes > opts.MaxCacheBytes {
			return sandlot.Template{}, &StepError{l.title, sandlot.Errorf(sandlot.CodeTooLarge, "the layers are over %d MiB", opts.MaxCacheBytes>>20)}
		}
	}

	m := manifest{Template: def.template(), Key: p.key, ImageKey: p.imageKey}
	for _, l := range p.layers {
		if l.config == nil {
			continue
		}
		meta, err := c.meta(l.key)
		if err == nil {
			err = l.config(meta, &m.Template, log)
		}
		if err != nil {
			return sandlot.Template{}, &StepError{l.title, err}
		}
	}
	m.BuiltAt = time.Now().UTC().Truncate(time.Second)
	title := fmt.Sprintf("[%d/%d] image", len(p.layers)+1, len(p.layers)+1)
	err = opts.Store.add(ctx, &m, started, opts.Fresh, func(file string) error {
		return c.during(ctx, log, title, opts.Verbose, func(ctx context.Context, out io.Writer) error {
			return makeImage(ctx, c.stack(lowers), file, opts.MaxImageBytes, out)
		})
	}, func(t sandlot.Template) error { return opts.try(ctx, t, log) })
	if err != nil {
		if !errors.As(err, new(*StepError)) {
			err = &StepError{"image", err}
		}
		return sandlot.Template{}, err
	}
	log.say("done, %s, %d MiB, %.1f s", m.Digest, m.ImageBytes>>20, time.Since(started).Seconds())
	return m.Template, nil
}

// try starts a sandbox of a template that has a start command, where there is something to start it with.
func (o *Options) try(ctx context.Context, t sandlot.Template, log *progress) error {
	if o.Box == nil || len(t.Start) == 0 {
		return nil
	}
	began := time.Now()
	log.say("start command and check")
	if err := o.Box.Try(ctx, t); err != nil {
		return &StepError{"start", err}
	}
	log.say("start command and check: %.1f s", time.Since(began).Seconds())
	return nil
}

// layer is one step of a plan.
type layer struct {
	title  string
	key    string
	def    *os.Root
	inputs []input
	apply  func(ctx context.Context, w *work) error
	// config, when there is one, gives t what the layer's meta says and t does not.
	config func(meta []byte, t *sandlot.Template, log *progress) error
}

// plan is all that a build does, with the keys: made from the definition and its input files alone.
type plan struct {
	layers   []layer
	imageKey string // of the root file system
	key      string // of the root file system and the manifest
	roots    []*os.Root
	store    *Store // of templates to build from; may be nil
	bases    *Store // and more of them; may be nil
	boxed    bool   // programs run in sandboxes
	stranger bool   // as in Options
}

func (p *plan) close() {
	for _, r := range p.roots {
		r.Close()
	}
}

func newPlan(def *definition, o *Options) (*plan, error) {
	p := &plan{store: o.Store, bases: o.Bases, boxed: o.Box != nil, stranger: o.Stranger}
	if err := p.addDefinition(def, nil); err != nil {
		p.close()
		return nil, err
	}
	err := p.addBuiltin(actionFinish)
	if err == nil {
		p.imageKey = p.last()
		meta := def.template()
		p.key, err = hashJSON(struct {
			ImageKey string
			Template sandlot.Template
		}{p.imageKey, meta})
	}
	if err != nil {
		p.close()
		return nil, err
	}
	return p, nil
}

func (p *plan) last() string {
	if len(p.layers) == 0 {
		return ""
	}
	return p.layers[len(p.layers)-1].key
}

// addDefinition adds def's layers, those of the template that it is made from first. below are the names of
// the templates made from def.
func (p *plan) addDefinition(def *definition, below []string) error {
	if slices.Contains(below, def.name) || len(below) >= maxFromDepth {
		return fmt.Errorf("from: %v is a circle, or more than %d deep", append(below, def.name), maxFromDepth)
	}
	root, err := os.OpenRoot(def.dir)
	if err != nil {
		return err
	}
	p.roots = append(p.roots, root)
	if def.From.Template != "" {
		if err := p.addParent(def, append(below, def.name)); err != nil {
			return fmt.Errorf("from %s: %w", def.From.Template, err)
		}
	} else {
		for _, src := range def.From.sources() {
			l := layer{title: src.title(), def: root, apply: src.fill}
			if s, ok := src.(*ociSource); ok {
				l.config = s.config
				s.stranger = s.stranger || p.stranger
			}
			if err := p.add(l, src.kind(), src); err != nil {
				return err
			}
		}
		if err := p.addBuiltin(actionPrepare); err != nil {
			return err
		}
	}
	for i, s := range def.Steps {
		st, err := s.step()
		if err != nil {
			return err
		}
		in, err := st.inputs(root)
		if err != nil {
			return fmt.Errorf("step %d (%s): %w", i+1, st.title(), err)
		}
		if err := p.add(layer{title: st.title(), def: root, inputs: in, apply: st.apply}, p.kind(st), st); err != nil {
			return err
		}
	}
	return nil
}

// inherit gives def its parent's environment, kernels, size and start command where it has none of its own.
func inherit(def, parent *definition) {
	for k, v := range parent.Env {
		if _, ok := def.Env[k]; !ok {
			if def.Env == nil {
				def.Env = make(map[string]string)
			}
			def.Env[k] = v
		}
	}
	if def.Kernels == nil {
		def.Kernels = parent.Kernels
	}
	if def.Size == (sizeDef{}) {
		def.Size = parent.Size
	}
	if def.Start == nil {
		def.Start, def.Ready = parent.Start, parent.Ready
	}
}

// kind is the step's in a key: no layer that was made for a stranger is taken for a definition that is trusted.
func (p *plan) kind(s step) string {
	if p.boxed {
		return s.kind() + " boxed"
	}
	return s.kind()
}

func (p *plan) add(l layer, kind string, step any) (err error) {
	l.key, err = layerKey(p.last(), kind, step, l.inputs)
	p.layers = append(p.layers, l)
	return err
}

// addBuiltin adds a layer that each template has.
func (p *plan) addBuiltin(action string) error {
	return p.add(layer{title: action, apply: func(ctx context.Context, w *work) error {
		j := w.stack
		j.Action = action
		return runJob(ctx, j, nil, w.out)
	}}, action, nil)
}

// progress writes one line at a time.
type progress struct {
	mu      sync.Mutex
	w       io.Writer
	name    string
	started time.Time
}

func (p *progress) say(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	fmt.Fprintf(p.w, "%6.1fs %s: %s\n", time.Since(p.started).Seconds(), p.name, fmt.Sprintf(format, args...))
}

// during runs one step: it announces it, says every quarter of a minute that it goes on, stops it when the
// disk is nearly full, and prints the end of its output when it fails.
func (c *cache) during(ctx context.Context, log *progress, title string, verbose bool, do func(context.Context, io.Writer) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var tail tailWriter
	out := io.Writer(&tail)
	if verbose {
		out = io.MultiWriter(&tail, log.w)
	}
	began := time.Now()
	log.say("%s", title)
	done := make(chan struct{})
	var watcher sync.WaitGroup
	watcher.Go(func() {
		for n := 1; ; n++ {
			select {
			case <-done:
				return
			case <-time.After(time.Second):
			}
			if n%15 == 0 {
				log.say("%s: still at it after %d s", title, n)
			}
			if err := c.checkSpace(); err != nil {
				cancel(err)
			}
		}
	})
	err := do(ctx, out)
	close(done)
	watcher.Wait()
	if cause := context.Cause(ctx); err != nil && cause != nil {
		err = cause
	}
	if err != nil {
		if !verbose && !errors.Is(err, context.Canceled) {
			log.say("%s: failed, the end of its output:\n%s", title, tail.String())
		}
		return err
	}
	log.say("%s: %.1f s", title, time.Since(began).Seconds())
	return nil
}
