package template

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"sandlot"
)

// addParent adds the layers of the template that def is made from, and gives def what it inherits. A name is
// the definition folder beside def's or, where there is none, the store's template of that name as it is now;
// a version (NAME@DIGEST) is always the store's.
func (p *plan) addParent(def *definition, below []string) error {
	ref := def.From.Template
	dir := filepath.Join(filepath.Dir(def.dir), ref)
	if _, err := os.Lstat(filepath.Join(dir, definitionFile)); err == nil && !strings.Contains(ref, "@") && !p.stranger {
		parent, err := loadDefinition(dir)
		if err != nil {
			return err
		}
		if err := p.addDefinition(parent, below); err != nil {
			return err
		}
		inherit(def, parent)
		return nil
	}
	if p.store == nil {
		return errors.New("there is no such definition beside this one, and no store to look in")
	}
	m, err := p.store.manifest(ref)
	if p.bases != nil && sandlot.ErrorCode(err) == sandlot.CodeNotFound {
		m, err = p.bases.manifest(ref)
	}
	if sandlot.ErrorCode(err) == sandlot.CodeNotFound {
		return fmt.Errorf("%w, and no definition of it beside this one: build or import it first", err)
	}
	if err != nil {
		return err
	}
	src := &builtSource{Digest: m.Digest, name: m.Name, image: m.Image}
	if err := p.add(layer{title: src.title(), apply: src.fill}, src.kind(), src); err != nil {
		return err
	}
	inherit(def, &definition{Env: m.Env, Kernels: m.Kernels, Size: sizeDef(m.Size), Start: m.Start, Ready: m.Ready})
	return nil
}

// builtSource is a root from a template's finished image.
type builtSource struct {
	Digest string

	name, image string
}

func (s *builtSource) kind() string  { return "template" }
func (s *builtSource) title() string { return "template " + s.name + "@" + shortDigest(s.Digest) }
func (s *builtSource) check() error  { return nil }

// fill unpacks the image: its layers may have left the cache long ago, and not every kernel mounts EROFS.
func (s *builtSource) fill(ctx context.Context, w *work) error {
	fsck, err := exec.LookPath("fsck.erofs")
	if err != nil {
		return errors.New("this host has no fsck.erofs; install erofs-utils")
	}
	if _, err := os.Lstat(s.image); errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%s was removed from the store meanwhile", s.name)
	}
	j := job{
		Action: actionHost,
		Argv:   []string{fsck, "--extract=" + w.upper, "--overwrite", "--preserve", s.image},
		Env:    os.Environ(),
	}
	return runJob(ctx, j, nil, w.out)
}
