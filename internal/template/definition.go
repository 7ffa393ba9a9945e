package template

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"

	"github.com/pelletier/go-toml/v2"

	"sandlot"
)

// definitionFile is the one file that each definition folder has.
const definitionFile = "template.toml"

const (
	maxDefinitionBytes = 64 << 10
	maxSteps           = 64
	maxFromDepth       = 8
)

// definition is a parsed template.toml. The folder's name is the template's.
type definition struct {
	Description string            `toml:"description"`
	Contents    []string          `toml:"contents"`
	Kernels     []string          `toml:"kernels"`
	Size        sizeDef           `toml:"size"`
	Env         map[string]string `toml:"env"`
	Start       []string          `toml:"start"`
	Ready       []string          `toml:"ready"`
	From        fromDef           `toml:"from"`
	Steps       []stepDef         `toml:"step"`

	name string
	dir  string
}

type sizeDef struct {
	VCPU     int `toml:"vcpu"`
	MemoryMB int `toml:"memory_mb"`
	DiskGB   int `toml:"disk_gb"`
}

// fromDef says where the root comes from: at most one of these; none means an empty root.
type fromDef struct {
	Debian   *debianSource `toml:"debian"`
	Ubuntu   *ubuntuSource `toml:"ubuntu"`
	OCI      *ociSource    `toml:"oci"`
	Template string        `toml:"template"` // a sibling definition folder, or one of the store; or NAME@DIGEST of the store
}

// stepDef is one [[step]]: exactly one of its fields is set.
type stepDef struct {
	Apt   aptStep   `toml:"apt"`
	Pip   *pipStep  `toml:"pip"`
	NPM   npmStep   `toml:"npm"`
	GoMod *modStep  `toml:"gomod"`
	Files filesStep `toml:"files"`
	Run   runStep   `toml:"run"`
}

var (
	envName    = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)
	kernelName = regexp.MustCompile(`^[a-z][a-z0-9]{0,31}$`)
)

// loadDefinition reads and checks dir/template.toml. Unknown keys are errors.
func loadDefinition(dir string) (*definition, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	name, err := sandlot.ParseName(filepath.Base(dir))
	if err != nil {
		return nil, fmt.Errorf("the definition folder's name is the template's: %w", err)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	data, err := readInput(root, definitionFile, maxDefinitionBytes)
	if err != nil {
		return nil, err
	}
	def, err := parseDefinition(name, data)
	if err != nil {
		return nil, fmt.Errorf("%s/%s: %w", name, definitionFile, err)
	}
	def.dir = dir
	return def, nil
}

func parseDefinition(name string, data []byte) (*definition, error) {
	def := &definition{name: name}
	d := toml.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(def); err != nil {
		var strict *toml.StrictMissingError
		var bad *toml.DecodeError
		switch {
		case errors.As(err, &strict):
			return nil, fmt.Errorf("unknown key:\n%s", strict.String())
		case errors.As(err, &bad):
			return nil, fmt.Errorf("not valid:\n%s", bad.String())
		}
		return nil, err
	}
	return def, def.check()
}

func (def *definition) check() error {
	if s := def.Size; s != (sizeDef{}) && (s.VCPU < 1 || s.VCPU > 256 || s.MemoryMB < 64 || s.MemoryMB > 1<<20 || s.DiskGB < 1 || s.DiskGB > 4096) {
		return fmt.Errorf("size: vcpu is 1 to 256, memory_mb 64 to %d, disk_gb 1 to 4096", 1<<20)
	}
	for _, k := range def.Kernels {
		if !kernelName.MatchString(k) {
			return fmt.Errorf("kernels: %q is not the name of a language", k)
		}
	}
	size := 0
	for k, v := range def.Env {
		if !envName.MatchString(k) || bytes.ContainsRune([]byte(v), 0) {
			return fmt.Errorf("env: %q is not a variable's name, or its value has a NUL", k)
		}
		size += len(k) + len(v)
	}
	if len(def.Env) > sandlot.MaxEnvVars || size > sandlot.MaxEnvBytes {
		return fmt.Errorf("env: at most %d variables of %d bytes together", sandlot.MaxEnvVars, sandlot.MaxEnvBytes)
	}
	if err := def.From.check(); err != nil {
		return fmt.Errorf("from: %w", err)
	}
	if len(def.Steps) > maxSteps {
		return fmt.Errorf("step: at most %d", maxSteps)
	}
	for i, s := range def.Steps {
		st, err := s.step()
		if err == nil {
			err = st.check()
		}
		if err != nil {
			return fmt.Errorf("step %d: %w", i+1, err)
		}
	}
	return nil
}

func (f *fromDef) check() error {
	sources := f.sources()
	if len(sources) > 1 || len(sources) == 1 && f.Template != "" {
		return errors.New("debian, ubuntu, oci or template, not both")
	}
	if f.Template != "" {
		_, _, _, err := refFile(f.Template)
		return err
	}
	if len(sources) == 1 {
		return sources[0].check()
	}
	return nil
}

// sources returns what fills the root; none: another template does, or nothing.
func (f *fromDef) sources() (found []source) {
	if f.Debian != nil {
		found = append(found, f.Debian)
	}
	if f.Ubuntu != nil {
		found = append(found, f.Ubuntu)
	}
	if f.OCI != nil {
		found = append(found, f.OCI)
	}
	return found
}

// step returns the one step that s describes.
func (s *stepDef) step() (step, error) {
	var found []step
	if s.Apt != nil {
		found = append(found, s.Apt)
	}
	if s.Pip != nil {
		found = append(found, s.Pip)
	}
	if s.NPM != nil {
		found = append(found, s.NPM)
	}
	if s.GoMod != nil {
		found = append(found, s.GoMod)
	}
	if s.Files != nil {
		found = append(found, s.Files)
	}
	if s.Run != "" {
		found = append(found, s.Run)
	}
	if len(found) != 1 {
		return nil, errors.New("each step has exactly one of apt, pip, npm, gomod, files, run")
	}
	return found[0], nil
}

// template is what the manifest says of def, without the image.
func (def *definition) template() sandlot.Template {
	env := map[string]string{"LANG": "C.UTF-8"}
	maps.Copy(env, def.Env)
	size := sandlot.Size(def.Size)
	if def.Size == (sizeDef{}) {
		size = sandlot.DefaultSize
	}
	return sandlot.Template{
		Name:        def.name,
		Description: def.Description,
		Contents:    slices.Clone(def.Contents),
		Kernels:     slices.Clone(def.Kernels),
		Size:        size,
		Env:         env,
		Start:       slices.Clone(def.Start),
		Ready:       slices.Clone(def.Ready),
	}
}

// readInput reads one regular file of a definition folder: never through a link that leaves it, never
// blocking on a FIFO, never a device.
func readInput(root *os.Root, name string, limit int64) ([]byte, error) {
	f, err := openInput(root, name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return nil, err
	}
	if int64(len(data)) > limit {
		return nil, fmt.Errorf("%s is over %d bytes", name, limit)
	}
	return data, nil
}
