package template

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"

	"sandlot"
)

// ociSource is a root from an OCI or Docker image: exactly one of Reference, Layout and Archive, pinned by
// digest. What the image is, not where it was found, is part of the layer's key.
type ociSource struct {
	Reference string `toml:"reference" json:"-"` // in a registry: NAME[:TAG]@sha256:…, or Digest says the rest
	Layout    string `toml:"layout" json:"-"`    // an OCI layout: a folder in the definition folder
	Archive   string `toml:"archive" json:"-"`   // a tar in the definition folder: of `docker save`, or of a layout
	Digest    string `toml:"digest"`             // of the manifest or index; of the configuration (image ID) for `docker save`
	Platform  string `toml:"platform"`           // as linux/arm64/v8; default: linux and this host's architecture
	Start     bool   `toml:"start" json:"-"`     // Entrypoint and Cmd become the start command

	stranger bool // Reference comes from one: see registryStore
}

var platformForm = regexp.MustCompile(`^linux/[a-z0-9]+(/[a-z0-9]+)?$`)

// importTime is how long getting an image may take.
const importTime = 30 * time.Minute

func (s *ociSource) kind() string { return "oci" }

func (s *ociSource) title() string {
	return "image " + s.where() + " (" + shortDigest(s.Digest) + ")"
}

// where says where the image is, without the digest.
func (s *ociSource) where() string {
	switch {
	case s.Layout != "":
		return path.Base(s.Layout)
	case s.Archive != "":
		return path.Base(s.Archive)
	}
	named, _, _ := strings.Cut(s.Reference, "@")
	return named
}

func shortDigest(d string) string { return d[:min(len(d), len("sha256:")+12)] }

// check checks all but the digest's presence.
func (s *ociSource) checkPlace() error {
	given := 0
	for _, v := range []string{s.Reference, s.Layout, s.Archive} {
		if v != "" {
			given++
		}
	}
	if given != 1 {
		return errors.New("oci: exactly one of reference, layout and archive")
	}
	if s.Platform == "" {
		s.Platform = "linux/" + runtime.GOARCH
	}
	if !platformForm.MatchString(s.Platform) {
		return fmt.Errorf("oci: platform %q is not linux/ARCHITECTURE", s.Platform)
	}
	if s.Reference == "" {
		_, err := imagePath(s.Layout + s.Archive)
		return err
	}
	if len(s.Reference) > 1024 {
		return errors.New("oci: the reference is over 1024 bytes")
	}
	ref, err := name.ParseReference(s.Reference)
	if err != nil {
		return fmt.Errorf("oci: %w", err)
	}
	if d, ok := ref.(name.Digest); ok {
		if s.Digest != "" && s.Digest != d.DigestStr() {
			return errors.New("oci: the reference has another digest than digest says")
		}
		s.Digest = d.DigestStr()
	}
	return nil
}

func (s *ociSource) check() error {
	if err := s.checkPlace(); err != nil {
		return err
	}
	if s.Digest == "" {
		return errors.New("oci: an image is pinned by digest: append @sha256:… to the reference, or set digest (`sandlot template import` finds and prints it)")
	}
	if !digestForm.MatchString(s.Digest) {
		return fmt.Errorf("oci: %q is not sha256: and 64 hexadecimal digits", s.Digest)
	}
	return nil
}

// pin finds out the digest of an image that is named without one.
func (s *ociSource) pin(ctx context.Context, def *os.Root) error {
	if s.Digest != "" {
		return nil
	}
	st, err := s.open(def)
	if err != nil {
		return err
	}
	defer st.close()
	s.Digest, err = st.digest(ctx)
	return err
}

// open opens the place where s's image is.
func (s *ociSource) open(def *os.Root) (imageStore, error) {
	switch {
	case s.Layout != "":
		return openLayout(def, path.Clean(s.Layout))
	case s.Archive != "":
		return openArchive(def, path.Clean(s.Archive))
	}
	return openRegistry(s.Reference, s.stranger)
}

func (s *ociSource) fill(ctx context.Context, w *work) error {
	ctx, cancel := context.WithTimeoutCause(ctx, importTime, sandlot.Errorf(sandlot.CodeTimeout, "the image did not arrive within %v", importTime))
	defer cancel()
	err := s.fillWithin(ctx, w)
	if cause := context.Cause(ctx); err != nil && cause != nil {
		return cause
	}
	return err
}

func (s *ociSource) fillWithin(ctx context.Context, w *work) error {
	st, err := s.open(w.def)
	if err != nil {
		return err
	}
	defer st.close()
	img, err := loadImage(ctx, st, s.Digest, s.Platform)
	if err != nil {
		return err
	}
	if w.meta, err = json.Marshal(img.runConfig()); err != nil {
		return err
	}
	err = w.send(ctx, actionLayers, func(t *tree) error {
		var left leftOut
		for i := range img.layers {
			if err := img.layers[i].copyTo(ctx, t, st, &left); err != nil {
				return fmt.Errorf("layer %d of %d (%s): %w", i+1, len(img.layers), shortDigest(img.layers[i].diffID), err)
			}
		}
		fmt.Fprintf(w.out, "%d layers; left out: %d devices and pipes, %d extended attributes\n", len(img.layers), left.devices, left.xattrs)
		return nil
	})
	if err != nil && isBroken(err) {
		return badImage("%v", err)
	}
	return err
}

// isBroken says whether an error that has no code is the image's fault.
func isBroken(err error) bool {
	var own *sandlot.Error
	if errors.As(err, &own) {
		return false
	}
	for _, of := range []error{tar.ErrHeader, gzip.ErrHeader, gzip.ErrChecksum, io.ErrUnexpectedEOF, zstd.ErrMagicMismatch, zstd.ErrCRCMismatch, zstd.ErrWindowSizeExceeded} {
		if errors.Is(err, of) {
			return true
		}
	}
	// What the child could not unpack.
	return strings.Contains(err.Error(), ": "+layerErrorPrefix) && !strings.Contains(err.Error(), unix.ENOSPC.Error())
}

// runConfig is what a template takes over of an image's configuration.
type runConfig struct {
	Env   []string `json:"env"`
	Start []string `json:"start"` // Entrypoint and Cmd, in WorkingDir
	User  string   `json:"user"`  // not used: everything runs as the template's user
}

func (img *ociImage) runConfig() runConfig {
	c := img.config.Config
	argv := slices.Concat(c.Entrypoint, c.Cmd)
	if len(argv) > 0 && path.IsAbs(c.WorkingDir) && path.Clean(c.WorkingDir) != "/" {
		argv = append([]string{"/bin/sh", "-c", `cd -- "$0" && exec "$@"`, c.WorkingDir}, argv...)
	}
	return runConfig{Env: c.Env, Start: argv, User: c.User}
}

// config gives t what the image's configuration says.
func (s *ociSource) config(meta []byte, t *sandlot.Template, log *progress) error {
	var c runConfig
	if err := json.Unmarshal(meta, &c); err != nil {
		return err
	}
	if c.User != "" && c.User != "root" && c.User != "0" {
		log.say("the image's user %.64q is not used: everything runs as %s, or as root on request", c.User, userName)
	}
	return c.addTo(t, s.Start)
}

// addTo gives t what it has not got itself. Variables that are no use in a template are left out.
func (c *runConfig) addTo(t *sandlot.Template, start bool) error {
	size := 0
	for k, v := range t.Env {
		size += len(k) + len(v)
	}
	for _, kv := range c.Env {
		k, v, ok := strings.Cut(kv, "=")
		if _, has := t.Env[k]; has || !ok || !envName.MatchString(k) || strings.ContainsRune(v, 0) || k == "HOME" || k == "HOSTNAME" || k == "USER" {
			continue
		}
		t.Env[k] = v
		size += len(k) + len(v)
	}
	if len(t.Env) > sandlot.MaxEnvVars || size > sandlot.MaxEnvBytes {
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "the image sets more than %d variables of %d bytes together", sandlot.MaxEnvVars, sandlot.MaxEnvBytes)
	}
	if start && len(t.Start) == 0 {
		if len(c.Start) == 0 {
			return sandlot.Errorf(sandlot.CodeInvalidRequest, "the image has neither an entry point nor a command to start with")
		}
		if err := checkArgv(c.Start); err != nil {
			return err
		}
		t.Start = slices.Clone(c.Start)
	}
	return nil
}

// maxArgvBytes is that of a start command which an image brings.
const maxArgvBytes = 64 << 10

func checkArgv(argv []string) error {
	size := 0
	for _, a := range argv {
		size += len(a) + 1
		if strings.ContainsRune(a, 0) {
			return sandlot.Errorf(sandlot.CodeInvalidRequest, "the image's start command has a NUL")
		}
	}
	if size > maxArgvBytes {
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "the image's start command is over %d bytes", maxArgvBytes)
	}
	return nil
}

// ImportSpec says which image becomes which template. Exactly one of Reference, Layout and Archive is set.
type ImportSpec struct {
	Name        string // of the template
	Description string // default: "Imported from …"

	Reference string // NAME[:TAG][@sha256:…] in a registry
	Layout    string // a folder of this host with an OCI layout
	Archive   string // a tar of this host: of `docker save`, or of an OCI layout
	Digest    string // what it must be; default: what is there now
	Platform  string // default: linux and this host's architecture

	Kernels      []string          // languages whose kernels start ahead; others start when they are asked for
	Size         sandlot.Size      // default: sandlot.DefaultSize
	Env          map[string]string // besides and before the image's
	Start, Ready []string
	ImageStart   bool // the image's Entrypoint and Cmd are the start command when Start is empty

	// Stranger: the caller is not this host's operator. The registry must then be on the public Internet, and
	// it is asked without any credentials of this host.
	Stranger bool
}

// Import makes a template of an image: its layers one on another, then what each template has (account
// "user", /workspace, …). The image needs no user, bash or sudo; without /bin/sh only argument lists can be
// run in it.
//
// On success the store has the template under Name, and its Contents name the image by digest. On failure it
// is as before. Errors: CodeInvalidRequest for a name or an image that cannot be taken, saying why;
// CodeNotFound for an image that is not there; CodeTimeout after 30 minutes; CodeUnavailable when the registry
// does not answer.
func Import(ctx context.Context, spec ImportSpec, opts Options) (sandlot.Template, error) {
	t, err := importImage(ctx, &spec, opts)
	if err != nil {
		return sandlot.Template{}, fmt.Errorf("import %.64q: %w", spec.Name, err)
	}
	return t, nil
}

func importImage(ctx context.Context, spec *ImportSpec, opts Options) (sandlot.Template, error) {
	src := &ociSource{Reference: spec.Reference, Digest: spec.Digest, Platform: spec.Platform, Start: spec.ImageStart, stranger: spec.Stranger}
	dir := "/"
	if p := spec.Layout + spec.Archive; p != "" {
		if spec.Stranger {
			return sandlot.Template{}, sandlot.Errorf(sandlot.CodeInvalidRequest, "only an image in a registry can be imported")
		}
		abs, err := filepath.Abs(p)
		if err != nil {
			return sandlot.Template{}, err
		}
		// The path is the operator's; what lies below it is not.
		if abs, err = filepath.EvalSymlinks(abs); err != nil {
			return sandlot.Template{}, err
		}
		dir = filepath.Dir(abs)
		if spec.Layout != "" {
			src.Layout = filepath.Base(abs)
		}
		if spec.Archive != "" {
			src.Archive = filepath.Base(abs)
		}
	}
	if _, err := sandlot.ParseName(spec.Name); err != nil {
		return sandlot.Template{}, err
	}
	if err := src.checkPlace(); err != nil {
		return sandlot.Template{}, sandlot.Errorf(sandlot.CodeInvalidRequest, "%v", err)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return sandlot.Template{}, err
	}
	defer root.Close()
	if err := src.pin(ctx, root); err != nil {
		return sandlot.Template{}, err
	}
	def := &definition{
		Description: spec.Description,
		Contents:    []string{src.where() + "@" + src.Digest},
		Kernels:     spec.Kernels,
		Size:        sizeDef(spec.Size),
		Env:         spec.Env,
		Start:       spec.Start,
		Ready:       spec.Ready,
		From:        fromDef{OCI: src},
		name:        spec.Name,
		dir:         dir,
	}
	if def.Description == "" {
		def.Description = "Imported from " + src.where()
	}
	if err := def.check(); err != nil {
		return sandlot.Template{}, sandlot.Errorf(sandlot.CodeInvalidRequest, "%v", err)
	}
	t, err := buildDefinition(ctx, def, opts)
	if err != nil && sandlot.ErrorCode(err) == sandlot.CodeInternal && strings.Contains(err.Error(), badAccounts) {
		return t, badImage("%v", err) // the child's error has no code
	}
	return t, err
}

// platformOf parses a platform that check accepted.
func platformOf(s string) v1.Platform {
	part := strings.Split(s, "/")
	p := v1.Platform{OS: part[0], Architecture: part[1]}
	if len(part) > 2 {
		p.Variant = part[2]
	}
	return p
}
