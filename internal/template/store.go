package template

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"sandlot"
	"sandlot/internal/failpoint"
)

// Store keeps finished templates:
//
//	DIR/blobs/sha256-<hex>.erofs   an image, named by its content, never changed
//	DIR/refs/<name>.json           the manifest that a name stands for now
//	DIR/refs/<name>@<hex>.json     the same, for each version that was ever built and not removed
//	DIR/lock                       held while something is added or removed
//
// Manifests are data like any other: bounded, checked, and never followed out of the folder. An image's
// content is hashed once, when it is added.
type Store struct {
	dir   string
	inUse func(ref string) bool // says whether a version is; nil: none is
}

// manifest is the content of a ref.
type manifest struct {
	sandlot.Template
	Key      string `json:"key"`
	ImageKey string `json:"image_key"`
}

const maxManifestBytes = 512 << 10

var digestForm = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)

// Open opens the store at dir and makes it where there is none.
func Open(dir string) (*Store, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	for _, d := range []string{"blobs", "refs"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return nil, err
		}
	}
	return &Store{dir: dir}, nil
}

// List returns the template that each name stands for now, sorted by name. A manifest that is not valid is an
// error, and the others are returned beside it.
func (s *Store) List() ([]sandlot.Template, error) {
	entries, err := os.ReadDir(filepath.Join(s.dir, "refs"))
	if err != nil {
		return nil, err
	}
	var list []sandlot.Template
	var broken []error
	for _, e := range entries {
		name, ok := strings.CutSuffix(e.Name(), ".json")
		if !ok || strings.Contains(name, "@") || strings.HasPrefix(name, ".") {
			continue
		}
		m, err := s.manifest(name)
		if err != nil {
			broken = append(broken, err)
			continue
		}
		list = append(list, m.Template)
	}
	slices.SortFunc(list, func(a, b sandlot.Template) int { return strings.Compare(a.Name, b.Name) })
	return list, errors.Join(broken...)
}

// Get returns a template by name, or one version of it by name@digest. Image is the absolute path of its
// image, which exists. Errors: CodeInvalidRequest, CodeNotFound, internal ones.
func (s *Store) Get(ref string) (sandlot.Template, error) {
	m, err := s.manifest(ref)
	if err != nil {
		return sandlot.Template{}, err
	}
	return m.Template, nil
}

// refFile checks a reference and returns its file's name and its parts.
func refFile(ref string) (file, name, digest string, err error) {
	name, digest, versioned := strings.Cut(ref, "@")
	if _, err := sandlot.ParseName(name); err != nil {
		return "", "", "", err
	}
	if !versioned {
		return name + ".json", name, "", nil
	}
	if !digestForm.MatchString(digest) {
		return "", "", "", sandlot.Errorf(sandlot.CodeInvalidRequest, "a template's version is sha256: and 64 hexadecimal digits")
	}
	return name + "@" + strings.TrimPrefix(digest, "sha256:") + ".json", name, digest, nil
}

// manifest reads a ref. A version may be removed between the reading of a name and of its image: then the name
// stands for another by now.
func (s *Store) manifest(ref string) (m *manifest, err error) {
	for range 3 {
		if m, err = s.readManifest(ref); !errors.Is(err, fs.ErrNotExist) {
			break
		}
	}
	return m, err
}

func (s *Store) readManifest(ref string) (*manifest, error) {
	file, name, digest, err := refFile(ref)
	if err != nil {
		return nil, err
	}
	data, err := s.readRef(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, sandlot.Errorf(sandlot.CodeNotFound, "no template %s", ref)
	}
	if err != nil {
		return nil, fmt.Errorf("template %s: %w", ref, err)
	}
	var m manifest
	if err := json.Unmarshal(data, &m); err != nil {
		return nil, fmt.Errorf("template %s: its manifest: %w", ref, err)
	}
	if m.Name != name || !digestForm.MatchString(m.Digest) || digest != "" && m.Digest != digest {
		return nil, fmt.Errorf("template %s: its manifest is of another template", ref)
	}
	m.Image = s.blob(m.Digest)
	info, err := os.Lstat(m.Image)
	if err != nil {
		return nil, fmt.Errorf("template %s: its image: %w", ref, err)
	}
	if !info.Mode().IsRegular() || info.Size() != m.ImageBytes {
		return nil, fmt.Errorf("template %s: its image is not a file of %d bytes", ref, m.ImageBytes)
	}
	return &m, nil
}

// readRef reads a manifest: a regular file itself, never a link, FIFO or device, and bounded. file comes from
// refFile, so it is one component.
func (s *Store) readRef(file string) ([]byte, error) {
	f, err := os.OpenFile(filepath.Join(s.dir, "refs", file), os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > maxManifestBytes {
		return nil, fmt.Errorf("its manifest is not a regular file of at most %d bytes", maxManifestBytes)
	}
	return io.ReadAll(io.LimitReader(f, maxManifestBytes))
}

func (s *Store) blob(digest string) string {
	return filepath.Join(s.dir, "blobs", strings.Replace(digest, ":", "-", 1)+".erofs")
}

// newBlob is an image that is being written; under the lock there is one at most.
const newBlob = ".new.erofs"

var _ = failpoint.Declare("template.store.written", "template.store.named", "template.store.versioned")

// add puts an image that write makes into the store, completes m and makes m.Name stand for it. When another
// version of the name has the same root file system (ImageKey), its image is taken and write is not called,
// unless fresh. try, which may be nil, sees the template before its name stands for it, and may refuse it.
//
// Killed at any instant, the store has the old version under the name or the new one; what else is left is
// unnamed, and goes with the next add or Remove. Versions over keepVersions go, oldest first, but those in use.
func (s *Store) add(ctx context.Context, m *manifest, started time.Time, fresh bool, write func(file string) error, try func(sandlot.Template) error) (err error) {
	lock, err := lockFile(ctx, filepath.Join(s.dir, "lock"))
	if err != nil {
		return err
	}
	defer lock.Close()
	defer func() {
		if cerr := s.collect(m.Name, err == nil); err == nil {
			err = cerr
		}
	}()
	if old := s.versionWith(m.Name, m.ImageKey); old != nil && !fresh {
		m.Digest, m.ImageBytes = old.Digest, old.ImageBytes
	} else if err := s.addBlob(m, write); err != nil {
		return err
	}
	m.Image = s.blob(m.Digest)
	if err := failpoint.Hit(ctx, "template.store.named"); err != nil {
		return err
	}
	if try != nil {
		if err := try(m.Template); err != nil {
			return err
		}
	}
	m.BuildMS = time.Since(started).Milliseconds()
	data, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return err
	}
	if len(data) > maxManifestBytes {
		return fmt.Errorf("the manifest is over %d bytes", maxManifestBytes)
	}
	version, _, _, err := refFile(m.Name + "@" + m.Digest)
	if err != nil {
		return err
	}
	for _, file := range []string{version, m.Name + ".json"} {
		if err := s.writeRef(file, append(data, '\n')); err != nil {
			return err
		}
		if err := failpoint.Hit(ctx, "template.store.versioned"); err != nil {
			return err
		}
	}
	return nil
}

// versionWith returns a version of name whose root file system has this key, or nil.
func (s *Store) versionWith(name, imageKey string) *manifest {
	found, err := fs.Glob(os.DirFS(filepath.Join(s.dir, "refs")), name+"@*.json") // a name has no pattern characters
	if err != nil {
		return nil
	}
	for _, file := range found {
		_, hex, _ := strings.Cut(strings.TrimSuffix(file, ".json"), "@")
		if m, err := s.manifest(name + "@sha256:" + hex); err == nil && m.ImageKey == imageKey {
			return m
		}
	}
	return nil
}

// addBlob has write make an image and gives it its name.
func (s *Store) addBlob(m *manifest, write func(file string) error) (err error) {
	tmp := filepath.Join(s.dir, "blobs", newBlob)
	if err := os.RemoveAll(tmp); err != nil { // of a build that was killed
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(tmp))
		}
	}()
	if err := write(tmp); err != nil {
		return err
	}
	if err := failpoint.Hit(context.Background(), "template.store.written"); err != nil {
		return err
	}
	f, err := os.OpenFile(tmp, os.O_RDONLY|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	h := sha256.New()
	if m.ImageBytes, err = io.Copy(h, f); err != nil {
		return err
	}
	m.Digest = "sha256:" + hex.EncodeToString(h.Sum(nil))
	if err := f.Chmod(0o444); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := os.Rename(tmp, s.blob(m.Digest)); err != nil {
		return err
	}
	return syncDir(filepath.Join(s.dir, "blobs"))
}

// writeRef replaces one manifest: either the old or the new one is there at any instant.
func (s *Store) writeRef(file string, data []byte) error {
	dir := filepath.Join(s.dir, "refs")
	f, err := os.CreateTemp(dir, ".new-*")
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Chmod(0o644)
	}
	if err == nil {
		err = f.Sync()
	}
	err = errors.Join(err, f.Close())
	if err == nil {
		err = os.Rename(f.Name(), filepath.Join(dir, file))
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return syncDir(dir)
}

func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}
