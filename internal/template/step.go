package template

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"regexp"
	"strconv"
	"strings"
)

// A source makes the root that a template's steps build on. Debian's archive is one; whatever else can fill
// an empty folder with a root file system fits. Its exported fields are part of the layer's key.
type source interface {
	kind() string
	title() string
	check() error
	// fill makes the root in w.upper, which is empty.
	fill(ctx context.Context, w *work) error
}

// A step makes one layer. Its exported fields are the definition's, and part of the layer's key.
type step interface {
	kind() string
	title() string
	check() error
	// inputs lists the files of the definition folder that apply uses.
	inputs(def *os.Root) ([]input, error)
	// apply makes the step's changes in w's stack.
	apply(ctx context.Context, w *work) error
}

// work is what a source or step has while it makes its layer.
type work struct {
	def    *os.Root // the definition folder
	inputs []input  // as they were when the key was made
	temp   string   // a folder of the host, removed afterwards
	upper  string   // absolute path of the layer's folder
	stack  job      // Dir, Lowers, Upper, Work and Mount of the layer
	box    Box      // where programs run; nil: on this host
	out    io.Writer

	meta []byte // what apply leaves for the manifest, kept beside the layer
}

// buildEnv is the environment of programs that run inside an image. The fixed date is what
// reproducible-builds tools take for the time of build.
func buildEnv(more map[string]string) []string {
	env := map[string]string{
		"PATH":              "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"HOME":              "/root",
		"LANG":              "C.UTF-8",
		"TERM":              "dumb",
		"DEBIAN_FRONTEND":   "noninteractive",
		"SOURCE_DATE_EPOCH": strconv.Itoa(imageTime),
	}
	maps.Copy(env, more)
	var list []string
	for k, v := range env {
		list = append(list, k+"="+v)
	}
	return list
}

// exec runs a program with the stack as root directory.
func (w *work) exec(ctx context.Context, j job) error {
	if w.box != nil {
		return w.boxed(ctx, j)
	}
	j.Action = actionExec
	j.Dir, j.Lowers, j.Upper, j.Work, j.Mount = w.stack.Dir, w.stack.Lowers, w.stack.Upper, w.stack.Work, w.stack.Mount
	return runJob(ctx, j, nil, w.out)
}

// unpack sends what fill writes into the stack.
func (w *work) unpack(ctx context.Context, fill func(*tree) error) error {
	return w.send(ctx, actionExtract, fill)
}

// send has a child do action with what fill writes.
func (w *work) send(ctx context.Context, action string, fill func(*tree) error) error {
	r, pw := io.Pipe()
	filled := make(chan error, 1)
	go func() {
		t := newTree(pw)
		err := fill(t)
		if err == nil {
			err = t.close()
		}
		pw.CloseWithError(err)
		filled <- err
	}()
	j := w.stack
	j.Action = action
	err := runJob(ctx, j, r, w.out)
	r.Close() // a writer that still waits gets ErrClosedPipe
	if ferr := <-filled; ferr != nil && !errors.Is(ferr, io.ErrClosedPipe) {
		return ferr
	}
	return err
}

// runStep is a shell script, run by root inside the image without network.
type runStep string

func (s runStep) kind() string                     { return "run" }
func (s runStep) inputs(*os.Root) ([]input, error) { return nil, nil }
func (s runStep) check() error                     { return nil }
func (s runStep) apply(ctx context.Context, w *work) error {
	return w.exec(ctx, job{Argv: []string{"/bin/sh", "-euc", string(s)}, Env: buildEnv(nil)})
}

func (s runStep) title() string {
	line, _, _ := strings.Cut(strings.TrimSpace(string(s)), "\n")
	if len(line) > 48 {
		line = line[:48] + "…"
	}
	return "run " + line
}

// filesStep puts files, folders and links into the image.
type filesStep []fileDef

type fileDef struct {
	Dest    string  `toml:"dest"`    // absolute path in the image
	Src     string  `toml:"src"`     // a file or folder of the definition folder,
	Content *string `toml:"content"` // or the content itself,
	Link    string  `toml:"link"`    // or the target of a symbolic link,
	Dir     bool    `toml:"dir"`     // or an empty folder
	Mode    string  `toml:"mode"`    // octal; default: 0644 or, when the source is executable, 0755
	Owner   string  `toml:"owner"`   // "root" (default) or "user"
}

var octalMode = regexp.MustCompile(`^0?[0-7]{3,4}$`)

func (s filesStep) kind() string  { return "files" }
func (s filesStep) title() string { return fmt.Sprintf("files, %d", len(s)) }

func (s filesStep) check() error {
	for _, f := range s {
		if err := f.check(); err != nil {
			return fmt.Errorf("files: %w", err)
		}
	}
	return nil
}

func (f *fileDef) check() error {
	dest, err := destPath(f.Dest)
	if err != nil {
		return err
	}
	given := 0
	for _, set := range []bool{f.Src != "", f.Content != nil, f.Link != "", f.Dir} {
		if set {
			given++
		}
	}
	if given != 1 {
		return fmt.Errorf("%s: exactly one of src, content, link, dir", f.Dest)
	}
	if dest == "." && f.Src == "" {
		return fmt.Errorf("%s: only a folder can go there", f.Dest)
	}
	if f.Src != "" {
		if _, err := imagePath(f.Src); err != nil {
			return err
		}
	}
	if f.Mode != "" && !octalMode.MatchString(f.Mode) {
		return fmt.Errorf("%s: mode is octal, as in \"0644\"", f.Dest)
	}
	if f.Owner != "" && f.Owner != "root" && f.Owner != "user" {
		return fmt.Errorf("%s: owner is root or user", f.Dest)
	}
	return nil
}

func (s filesStep) inputs(def *os.Root) ([]input, error) {
	var all []input
	for _, f := range s {
		if f.Src == "" {
			continue
		}
		in, err := inputsOf(def, path.Clean(f.Src))
		if err != nil {
			return nil, err
		}
		all = append(all, in...)
	}
	return all, nil
}

func (s filesStep) apply(ctx context.Context, w *work) error {
	return w.unpack(ctx, func(t *tree) error {
		left := w.inputs
		for _, f := range s {
			var err error
			if left, err = f.add(t, w.def, left); err != nil {
				return err
			}
		}
		return nil
	})
}

// add puts f into t; left are the inputs of f and what follows it, and add returns them without f's.
func (f *fileDef) add(t *tree, def *os.Root, left []input) ([]input, error) {
	dest, err := destPath(f.Dest)
	if err != nil {
		return nil, err
	}
	o := ownerRoot
	if f.Owner == "user" {
		o = ownerUser
	}
	mode := func(executable bool) int64 {
		if f.Mode != "" {
			m, _ := strconv.ParseInt(f.Mode, 8, 32) // checked by octalMode
			return m
		}
		if executable {
			return 0o755
		}
		return 0o644
	}
	switch {
	case f.Content != nil:
		return left, t.file(dest, mode(false), o, int64(len(*f.Content)), strings.NewReader(*f.Content))
	case f.Link != "":
		return left, t.link(dest, f.Link, o)
	case f.Dir:
		return left, t.dir(dest, mode(true), o)
	}
	src := path.Clean(f.Src)
	for len(left) > 0 && (left[0].Path == src || src == "." || strings.HasPrefix(left[0].Path, src+"/")) {
		in := left[0]
		left = left[1:]
		rel := strings.TrimPrefix(strings.TrimPrefix(in.Path, src), "/")
		to := path.Join(dest, rel)
		switch in.Mode.Type() {
		case fs.ModeDir:
			if to == "." {
				continue
			}
			err = t.dir(to, 0o755, o)
		case fs.ModeSymlink:
			err = t.link(to, in.Link, o)
		default:
			err = addInput(t, def, in, to, mode(in.Mode&0o111 != 0), o)
		}
		if err != nil {
			return nil, err
		}
	}
	return left, nil
}

// addInput copies one input, which must be what the key was made from.
func addInput(t *tree, def *os.Root, in input, to string, mode int64, o owner) error {
	f, err := openInput(def, in.Path)
	if err != nil {
		return err
	}
	defer f.Close()
	sum := newSum(f)
	if err := t.file(to, mode, o, in.Size, sum); err != nil {
		return err
	}
	if sum.hex() != in.Sum {
		return fmt.Errorf("%s changed while the template was being built", in.Path)
	}
	return nil
}
