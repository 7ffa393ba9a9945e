package template

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"sandlot"
	"sandlot/internal/engine"
)

// Box runs the programs of a definition that nobody vouches for, each in a sandbox of its own.
type Box interface {
	// Run runs p to its end and leaves nothing of its sandbox. The program's own failure is an engine.ExitError.
	Run(ctx context.Context, p engine.Program) error
	// Try makes a sandbox of a finished template, its start command running and its check passed, and removes it.
	Try(ctx context.Context, t sandlot.Template) error
}

const (
	// stepTimeout is how long one program may run.
	stepTimeout = 30 * time.Minute
	// boxMemory and boxDisk are a build sandbox's; its CPUs are at most boxCPUs and this host's.
	boxMemory = 4096
	boxDisk   = 20
	boxCPUs   = 4
)

// notKept are what is each sandbox's own, or belongs to one run: no layer has any of it.
var notKept = []string{".sandlot", "dev", "proc", "run", "sys", "tmp", "workspace"}

// boxed runs j's program in a sandbox of gVisor whose image is the stack, and puts what it changed into the
// layer. j's folders and covering files are a layer of their own on top, which no later step sees.
func (w *work) boxed(ctx context.Context, j job) error {
	const inputs = "boxed"
	top := filepath.Join(w.temp, inputs)
	covered := make(map[string]bool)
	for from, name := range j.Binds {
		to := filepath.Join(top, buildDir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(to), 0o755), os.Rename(from, to)); err != nil {
			return err
		}
	}
	for name, content := range j.Files {
		to := filepath.Join(top, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(to), 0o755), os.WriteFile(to, []byte(content), 0o755)); err != nil {
			return err
		}
		covered[strings.TrimPrefix(name, "/")] = true
	}
	stack := w.stack
	stack.Upper, stack.Work = "", ""
	if len(j.Binds)+len(j.Files) > 0 {
		rel, err := filepath.Rel(stack.Dir, top)
		if err != nil {
			return err
		}
		stack.Lowers = append([]string{rel}, stack.Lowers...)
	}
	image := filepath.Join(w.temp, "boxed.erofs")
	if err := makeImage(ctx, stack, image, defaultMaxImage, w.out); err != nil {
		return fmt.Errorf("the image that the step starts from: %w", err)
	}
	defer os.Remove(image)
	ctx, cancel := context.WithTimeoutCause(ctx, stepTimeout, fmt.Errorf("the step ran for over %s", stepTimeout))
	defer cancel()
	var said tailWriter
	err := w.box.Run(ctx, engine.Program{
		Image: image,
		Size:  sandlot.Size{VCPU: min(boxCPUs, max(1, runtime.NumCPU())), MemoryMB: boxMemory, DiskGB: boxDisk},
		Argv:  j.Argv, Env: j.Env, Out: io.MultiWriter(w.out, &said), Serve: j.serve,
		Changes: func(r io.Reader) error {
			return w.send(ctx, actionLayers, func(t *tree) error { return addChanges(t, r, covered) })
		},
	})
	var exit engine.ExitError
	if errors.As(err, &exit) {
		if line := said.last(); line != "" {
			return fmt.Errorf("%w: %s", err, line)
		}
	}
	return err
}

// addChanges rewrites what a program changed as a layer. The tar is a stranger's, as a registry's layers are.
func addChanges(t *tree, r io.Reader, covered map[string]bool) error {
	tr := tar.NewReader(&cappedReader{r: r, left: maxLayerStream, what: "what the step changed"})
	var left leftOut
	gone := make(map[string]bool) // whiteouts: the guest's kernel has them all as links of one
	for n := 0; ; n++ {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if n > maxTreeEntries {
			return sandlot.Errorf(sandlot.CodeTooLarge, "a step changes at most %d files", maxTreeEntries)
		}
		name, err := layerPath(h.Name)
		if err != nil {
			return err
		}
		if h.Typeflag == tar.TypeChar && h.Devmajor == 0 && h.Devminor == 0 ||
			h.Typeflag == tar.TypeLink && gone[path.Clean(h.Linkname)] {
			gone[name], h.Typeflag = true, tar.TypeChar
		}
		top, _, _ := strings.Cut(name, "/")
		if name == "." || covered[name] || slices.Contains(notKept, top) {
			continue
		}
		if strings.HasPrefix(path.Base(name), whiteout) {
			return badImage("%q: a layer cannot hold a name that begins with %s", name, whiteout)
		}
		switch h.Typeflag {
		case tar.TypeChar:
			if !gone[name] {
				continue
			}
			if err := addWhiteout(t, path.Join(path.Dir(name), whiteout+path.Base(name)), path.Base(name)); err != nil {
				return err
			}
			continue
		case tar.TypeDir:
			if h.PAXRecords[engine.OpaqueRecord] == "y" {
				if err := addWhiteout(t, path.Join(name, opaque), whiteout+".opq"); err != nil {
					return err
				}
			}
		case tar.TypeLink:
			target, err := layerPath(h.Linkname)
			if err != nil {
				return err
			}
			if top, _, _ := strings.Cut(target, "/"); slices.Contains(notKept, top) {
				return badImage("%q is a hard link to /%s, which no layer keeps: copy the file instead", name, target)
			}
		}
		if err := addLayerEntry(t, h, tr, &left); err != nil {
			return err
		}
	}
}
