package template

import (
	"archive/tar"
	"archive/zip"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
)

// The steps here fetch pinned packages with the host's own clients, which know the host's registries, and
// check them against the definition before anything is unpacked.

// sumReader hashes what is read through it.
type sumReader struct {
	r io.Reader
	h hash.Hash
}

func newSum(r io.Reader) *sumReader { return &sumReader{r, sha256.New()} }

func (s *sumReader) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	s.h.Write(p[:n])
	return n, err
}

func (s *sumReader) hex() string { return hex.EncodeToString(s.h.Sum(nil)) }

// pipStep installs Python wheels from a locked requirements file: each with its version and sha256.
type pipStep struct {
	Requirements string `toml:"requirements"` // in the definition folder
	Python       string `toml:"python"`       // the interpreter in the image; its name ends in its version
}

var pythonName = regexp.MustCompile(`^/[A-Za-z0-9/._-]*/python(3\.[0-9]{1,2})$`)

func (s *pipStep) kind() string  { return "pip" }
func (s *pipStep) title() string { return "pip " + s.Requirements }

func (s *pipStep) check() error {
	if !pythonName.MatchString(s.Python) {
		return fmt.Errorf("pip: python is a path that ends in a version, as /usr/bin/python3.12, not %q", s.Python)
	}
	_, err := imagePath(s.Requirements)
	return err
}

func (s *pipStep) inputs(def *os.Root) ([]input, error) {
	return inputsOf(def, path.Clean(s.Requirements))
}

const maxRequirements = 1 << 20

// machineNames are the wheel platforms' names of Go's architectures.
var machineNames = map[string]string{"amd64": "x86_64", "arm64": "aarch64"}

// apply downloads on the host and installs inside the image, without network. pip itself must be among the
// requirements: it runs from its own wheel, so the image needs none before.
func (s *pipStep) apply(ctx context.Context, w *work) error {
	lock, err := readInput(w.def, path.Clean(s.Requirements), maxRequirements)
	if err != nil {
		return err
	}
	if err := checkRequirements(lock); err != nil {
		return err
	}
	wheels := filepath.Join(w.temp, "wheels")
	if err := os.Mkdir(wheels, 0o755); err != nil {
		return err
	}
	lockFile := filepath.Join(wheels, "requirements.lock")
	if err := os.WriteFile(lockFile, lock, 0o644); err != nil {
		return err
	}
	pip, err := hostPip(ctx)
	if err != nil {
		return err
	}
	version := pythonName.FindStringSubmatch(s.Python)[1]
	argv := append(pip, "download", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps",
		"--require-hashes", "--only-binary", ":all:", "--dest", wheels, "--requirement", lockFile,
		"--implementation", "cp", "--python-version", version, "--abi", "cp"+strings.ReplaceAll(version, ".", ""), "--abi", "abi3", "--abi", "none")
	machine := machineNames[runtime.GOARCH]
	for _, p := range []string{"manylinux_2_28_", "manylinux_2_17_", "manylinux2014_", "manylinux_2_12_", "manylinux2010_"} {
		argv = append(argv, "--platform", p+machine)
	}
	if _, err := runHost(ctx, w.temp, argv...); err != nil {
		return err
	}
	found, err := filepath.Glob(filepath.Join(wheels, "pip-*.whl"))
	if err != nil || len(found) != 1 {
		return errors.New("pip: the locked requirements must hold pip itself")
	}
	const at = buildDir + "/wheels"
	// What a distribution's packages installed pip cannot take away: its own packages go beside them.
	beside := []string{}
	if path.Dir(s.Python) == "/usr/bin" {
		beside = []string{"--ignore-installed"}
	}
	return w.exec(ctx, job{
		Argv: append([]string{s.Python, path.Join(at, filepath.Base(found[0]), "pip"), "install", "--quiet",
			"--no-index", "--no-deps", "--no-cache-dir", "--no-compile", "--break-system-packages",
			"--root-user-action=ignore", "--disable-pip-version-check", "--only-binary", ":all:",
			"--require-hashes", "--find-links", at, "--requirement", at + "/requirements.lock"}, beside...),
		Env:   buildEnv(map[string]string{"PYTHONDONTWRITEBYTECODE": "1"}),
		Binds: map[string]string{wheels: "wheels"},
	})
}

// hostPip finds a pip on this host to download with.
func hostPip(ctx context.Context) ([]string, error) {
	for _, argv := range [][]string{{"python3", "-m", "pip"}, {"/usr/bin/python3", "-m", "pip"}, {"pip3"}} {
		if exec.CommandContext(ctx, argv[0], append(argv[1:], "--version")...).Run() == nil {
			return argv, nil
		}
	}
	return nil, errors.New("pip: this host has no pip to download with; install python3-pip")
}

// npmStep unpacks packages of the npm registry, each pinned by its integrity.
type npmStep []npmPackage

type npmPackage struct {
	Name      string `toml:"name"`
	Version   string `toml:"version"`   // exact
	Integrity string `toml:"integrity"` // sha512-<base64>, as npm prints it
	Dest      string `toml:"dest"`      // where the package's content goes

	Only []string `toml:"only" json:",omitempty"` // files and folders of the package; default: all
	Arch string   `toml:"arch" json:",omitempty"` // taken on this architecture alone, as amd64; default: on each
}

var (
	npmName    = regexp.MustCompile(`^(@[a-z0-9~][a-z0-9._~-]*/)?[a-z0-9~][a-z0-9._~-]*$`)
	archName   = regexp.MustCompile(`^[a-z0-9]{2,16}$`)
	npmVersion = regexp.MustCompile(`^[0-9]+\.[0-9]+\.[0-9]+([+-][0-9A-Za-z.+-]+)?$`)
)

func (s npmStep) kind() string                     { return "npm" }
func (s npmStep) title() string                    { return fmt.Sprintf("npm, %d packages", len(s)) }
func (s npmStep) inputs(*os.Root) ([]input, error) { return nil, nil }

func (s npmStep) check() error {
	for _, p := range s {
		if !npmName.MatchString(p.Name) || !npmVersion.MatchString(p.Version) {
			return fmt.Errorf("npm: %q at %q: a package's name and its exact version", p.Name, p.Version)
		}
		sum, ok := strings.CutPrefix(p.Integrity, "sha512-")
		if raw, err := base64.StdEncoding.DecodeString(sum); !ok || err != nil || len(raw) != sha512.Size {
			return fmt.Errorf("npm: %s: integrity is sha512- and base64", p.Name)
		}
		if _, err := destPath(p.Dest); err != nil {
			return fmt.Errorf("npm: %s: %w", p.Name, err)
		}
		for _, o := range p.Only {
			if name, err := imagePath(o); err != nil || name != o {
				return fmt.Errorf("npm: %s: only: %q is not a path in the package", p.Name, o)
			}
		}
		if p.Arch != "" && !archName.MatchString(p.Arch) {
			return fmt.Errorf("npm: %s: %q is not an architecture", p.Name, p.Arch)
		}
	}
	return nil
}

func (s npmStep) apply(ctx context.Context, w *work) error {
	argv := []string{"npm", "pack", "--silent", "--ignore-scripts"}
	var packages []npmPackage
	for _, p := range s {
		if p.Arch == "" || p.Arch == runtime.GOARCH {
			packages = append(packages, p)
			argv = append(argv, p.Name+"@"+p.Version)
		}
	}
	if len(packages) == 0 {
		return fmt.Errorf("npm: none of the packages is for %s", runtime.GOARCH)
	}
	dir := filepath.Join(w.temp, "npm")
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	if _, err := exec.LookPath("npm"); err == nil {
		if _, err := runHost(ctx, dir, argv...); err != nil {
			return err
		}
	} else if err := downloadPackages(ctx, dir, packages); err != nil {
		return err
	}
	return w.unpack(ctx, func(t *tree) error {
		for _, p := range packages {
			if err := p.add(t, filepath.Join(dir, p.archive())); err != nil {
				return fmt.Errorf("npm %s: %w", p.Name, err)
			}
		}
		return nil
	})
}

// archive is the name that npm pack gives the package's archive.
func (p *npmPackage) archive() string {
	return strings.ReplaceAll(strings.TrimPrefix(p.Name, "@"), "/", "-") + "-" + p.Version + ".tgz"
}

// add checks the archive's integrity, then puts its files below p.Dest.
func (p *npmPackage) add(t *tree, archive string) error {
	f, err := os.Open(archive)
	if err != nil {
		return err
	}
	defer f.Close()
	h := sha512.New()
	if _, err := io.Copy(h, f); err != nil {
		return err
	}
	if got := "sha512-" + base64.StdEncoding.EncodeToString(h.Sum(nil)); got != p.Integrity {
		return fmt.Errorf("the archive's integrity is %s, want %s", got, p.Integrity)
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return err
	}
	gz, err := gzip.NewReader(f)
	if err != nil {
		return err
	}
	dest, err := destPath(p.Dest)
	if err != nil {
		return err
	}
	return addPackage(t, dest, tar.NewReader(gz), p.Only...)
}

// addPackage copies a package's archive without its first folder, which has any name. npm packages hold
// folders and regular files; nothing else is taken. When only is given, each of it must be there, and nothing
// else is copied.
func addPackage(t *tree, dest string, tr *tar.Reader, only ...string) error {
	missing := make(map[string]bool)
	for _, o := range only {
		missing[o] = true
	}
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			for o := range missing {
				return fmt.Errorf("the package has no %s", o)
			}
			return nil
		}
		if err != nil {
			return err
		}
		name, err := imagePath(h.Name)
		if err != nil {
			return err
		}
		_, rel, ok := strings.Cut(name, "/")
		if !ok {
			continue
		}
		if len(only) > 0 {
			of := slices.IndexFunc(only, func(o string) bool { return rel == o || strings.HasPrefix(rel, o+"/") })
			if of < 0 {
				continue
			}
			delete(missing, only[of])
		}
		to := path.Join(dest, rel)
		switch h.Typeflag {
		case tar.TypeDir:
			err = t.dir(to, 0o755, ownerRoot)
		case tar.TypeReg:
			err = t.file(to, plainMode(h.Mode&0o111 != 0), ownerRoot, h.Size, tr)
		default:
			err = fmt.Errorf("%s: an entry of type %q", name, h.Typeflag)
		}
		if err != nil {
			return err
		}
	}
}

func plainMode(executable bool) int64 {
	if executable {
		return 0o755
	}
	return 0o644
}

// modStep unpacks a folder of a Go module.
type modStep struct {
	Module  string `toml:"module"`
	Version string `toml:"version"` // exact
	Sum     string `toml:"sum"`     // h1:…, as in go.sum
	Path    string `toml:"path"`    // the folder in the module; {arch} stands for amd64, arm64
	Format  string `toml:"format"`  // "" for plain files, or go-embed-python
	Dest    string `toml:"dest"`
}

var (
	modPath    = regexp.MustCompile(`^[a-z0-9][a-z0-9.-]*(/[A-Za-z0-9._~-]+)*$`)
	modVersion = regexp.MustCompile(`^v[0-9]+\.[0-9]+\.[0-9]+[0-9A-Za-z.+-]*$`)
	modSum     = regexp.MustCompile(`^h1:[A-Za-z0-9+/]{43}=$`)
)

func (s *modStep) kind() string                     { return "gomod" }
func (s *modStep) title() string                    { return "go module " + s.Module }
func (s *modStep) inputs(*os.Root) ([]input, error) { return nil, nil }

func (s *modStep) check() error {
	if !modPath.MatchString(s.Module) || !modVersion.MatchString(s.Version) || !modSum.MatchString(s.Sum) {
		return fmt.Errorf("gomod: module, exact version and sum (h1:…) of %q", s.Module)
	}
	if s.Format != "" && s.Format != "go-embed-python" {
		return fmt.Errorf("gomod: no format %q", s.Format)
	}
	if _, err := imagePath(s.Path); err != nil {
		return fmt.Errorf("gomod: path: %w", err)
	}
	if _, err := destPath(s.Dest); err != nil {
		return fmt.Errorf("gomod: %w", err)
	}
	return nil
}

func (s *modStep) apply(ctx context.Context, w *work) error {
	out, err := runHost(ctx, w.temp, "env", "GOVCS=*:off", "go", "mod", "download", "-json", s.Module+"@"+s.Version)
	var mod struct{ Zip, Sum, Error string }
	if jerr := json.Unmarshal(out, &mod); err == nil && jerr != nil {
		err = jerr
	}
	if err != nil {
		return err
	}
	if mod.Sum != s.Sum {
		return fmt.Errorf("%s@%s has sum %s, want %s", s.Module, s.Version, mod.Sum, s.Sum)
	}
	z, err := zip.OpenReader(mod.Zip)
	if err != nil {
		return err
	}
	defer z.Close()
	dest, err := destPath(s.Dest)
	if err != nil {
		return err
	}
	folder := s.Module + "@" + s.Version + "/" + path.Clean(strings.ReplaceAll(s.Path, "{arch}", runtime.GOARCH)) + "/"
	return w.unpack(ctx, func(t *tree) error {
		if s.Format == "go-embed-python" {
			return addEmbedded(t, dest, &z.Reader, folder)
		}
		return addZip(t, dest, &z.Reader, folder)
	})
}

// addZip copies the regular files below folder. A module's zip records neither modes nor links.
func addZip(t *tree, dest string, z *zip.Reader, folder string) error {
	n := 0
	for _, f := range z.File {
		rel, ok := strings.CutPrefix(f.Name, folder)
		if !ok || rel == "" || strings.HasSuffix(rel, "/") {
			continue
		}
		name, err := imagePath(rel)
		if err != nil {
			return err
		}
		n++
		if err := addZipFile(t, path.Join(dest, name), 0o644, f, false, int64(f.UncompressedSize64)); err != nil {
			return err
		}
	}
	if n == 0 {
		return fmt.Errorf("the module has no file below %s", folder)
	}
	return nil
}

func addZipFile(t *tree, to string, mode int64, f *zip.File, zipped bool, size int64) error {
	r, err := f.Open()
	if err != nil {
		return err
	}
	defer r.Close()
	var content io.Reader = r
	if zipped {
		if content, err = gzip.NewReader(r); err != nil {
			return fmt.Errorf("%s: %w", f.Name, err)
		}
	}
	return t.file(to, mode, ownerRoot, size, content)
}

const maxFileList = 8 << 20

// addEmbedded copies a folder in go-embed-python's form: files.json lists names, modes and links, and a
// compressed file has .gz after its name.
func addEmbedded(t *tree, dest string, z *zip.Reader, folder string) error {
	files := make(map[string]*zip.File)
	for _, f := range z.File {
		if rel, ok := strings.CutPrefix(f.Name, folder); ok {
			files[rel] = f
		}
	}
	list, ok := files["files.json"]
	if !ok {
		return fmt.Errorf("the module has no %sfiles.json", folder)
	}
	r, err := list.Open()
	if err != nil {
		return err
	}
	defer r.Close()
	var index struct {
		Files []struct {
			Name       string
			Size       int64
			Perm       fs.FileMode
			Symlink    string
			Compressed bool
		}
	}
	if err := json.NewDecoder(io.LimitReader(r, maxFileList)).Decode(&index); err != nil {
		return fmt.Errorf("files.json: %w", err)
	}
	for _, e := range index.Files {
		name, err := imagePath(e.Name)
		if err != nil {
			return err
		}
		to := path.Join(dest, name)
		switch e.Perm.Type() {
		case fs.ModeDir:
			err = t.dir(to, 0o755, ownerRoot)
		case fs.ModeSymlink:
			err = t.link(to, e.Symlink, ownerRoot)
		case 0:
			entry := e.Name
			if e.Compressed {
				entry += ".gz"
			}
			f, ok := files[entry]
			if !ok {
				return fmt.Errorf("files.json lists %q, which the module lacks", e.Name)
			}
			err = addZipFile(t, to, plainMode(e.Perm&0o111 != 0), f, e.Compressed, e.Size)
		default:
			err = fmt.Errorf("%s: an entry of type %s", e.Name, e.Perm.Type())
		}
		if err != nil {
			return err
		}
	}
	return nil
}
