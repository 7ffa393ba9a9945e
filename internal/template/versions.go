package template

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"sandlot"
)

// keepVersions is how many versions of a name stay when a new one is built, the current one among them.
const keepVersions = 5

// UseBy has the store ask inUse, with NAME@DIGEST, before it removes a version. It is called once, before the store
// is shared.
func (s *Store) UseBy(inUse func(ref string) bool) { s.inUse = inUse }

// Project returns the store of one project's own templates, a folder of this one's. Names in it are of that
// project alone.
func (s *Store) Project(id sandlot.ID) (*Store, error) {
	if _, err := sandlot.ParseID(string(id)); err != nil {
		return nil, err
	}
	p, err := Open(filepath.Join(s.dir, "projects", string(id)))
	if err != nil {
		return nil, err
	}
	p.inUse = s.inUse
	return p, nil
}

// HasProject says whether a project has ever had a template, without making it a store.
func (s *Store) HasProject(id sandlot.ID) bool {
	_, err := os.Lstat(filepath.Join(s.dir, "projects", string(id)))
	return err == nil
}

// Versions returns all versions of a template, the newest first. Errors: CodeInvalidRequest, CodeNotFound.
func (s *Store) Versions(name string) ([]sandlot.Template, error) {
	if _, err := sandlot.ParseName(name); err != nil {
		return nil, err
	}
	refs, err := s.versionRefs(name)
	if err != nil {
		return nil, err
	}
	var list []sandlot.Template
	for _, ref := range refs {
		m, err := s.manifest(ref)
		if sandlot.ErrorCode(err) == sandlot.CodeNotFound {
			continue // removed meanwhile
		}
		if err != nil {
			return nil, err
		}
		list = append(list, m.Template)
	}
	if len(list) == 0 {
		return nil, sandlot.Errorf(sandlot.CodeNotFound, "no template %s", name)
	}
	// What the name stands for comes first: an older image may have been built again.
	current := ""
	if m, err := s.manifest(name); err == nil {
		current = m.Digest
	}
	slices.SortStableFunc(list, func(a, b sandlot.Template) int {
		if (a.Digest == current) != (b.Digest == current) {
			if a.Digest == current {
				return -1
			}
			return 1
		}
		return b.BuiltAt.Compare(a.BuiltAt)
	})
	return list, nil
}

// versionRefs lists the versions of name as NAME@DIGEST.
func (s *Store) versionRefs(name string) ([]string, error) {
	found, err := fs.Glob(os.DirFS(filepath.Join(s.dir, "refs")), name+"@*.json") // a name has no pattern characters
	if err != nil {
		return nil, err
	}
	var refs []string
	for _, file := range found {
		_, hex, _ := strings.Cut(strings.TrimSuffix(file, ".json"), "@")
		if ref := name + "@sha256:" + hex; digestForm.MatchString("sha256:" + hex) {
			refs = append(refs, ref)
		}
	}
	return refs, nil
}

// Remove takes a name and all its versions, or one version (name@digest), out of the store, and each image
// that nothing names any more. When the version that the name stands for goes, the newest that is left takes its
// place. A version that is in use is not removed, nor is anything then: CodeConflict. Killed at any instant,
// the name stands for one of its versions or is gone.
func (s *Store) Remove(ctx context.Context, ref string) error {
	file, name, digest, err := refFile(ref)
	if err != nil {
		return err
	}
	lock, err := lockFile(ctx, filepath.Join(s.dir, "lock"))
	if err != nil {
		return err
	}
	defer lock.Close()
	refs := filepath.Join(s.dir, "refs")
	if _, err := os.Lstat(filepath.Join(refs, file)); errors.Is(err, fs.ErrNotExist) {
		return sandlot.Errorf(sandlot.CodeNotFound, "no template %s", ref)
	}
	going := []string{ref}
	if digest == "" {
		if going, err = s.versionRefs(name); err != nil {
			return err
		}
	}
	for _, r := range going {
		if s.inUse != nil && s.inUse(r) {
			return sandlot.Errorf(sandlot.CodeConflict, "%s is in use by a sandbox: close it first", r).With("template", r)
		}
	}
	if digest == "" {
		err = os.Remove(filepath.Join(refs, file))
	} else {
		err = s.demote(name, digest)
	}
	for _, r := range going {
		if err != nil {
			return err
		}
		version, _, _, _ := refFile(r) // checked by versionRefs or above
		err = os.Remove(filepath.Join(refs, version))
	}
	return errors.Join(err, s.collect(name, false))
}

// demote has name stand for its newest version but digest, or for nothing when there is none.
func (s *Store) demote(name, digest string) error {
	m, err := s.manifest(name)
	if err != nil || m.Digest != digest {
		return nil // it stands for another one, or for nothing that is valid
	}
	list, err := s.Versions(name)
	if err != nil {
		return err
	}
	refs := filepath.Join(s.dir, "refs")
	if len(list) < 2 { // the first is digest itself
		return os.Remove(filepath.Join(refs, name+".json"))
	}
	file, _, _, err := refFile(name + "@" + list[1].Digest)
	if err != nil {
		return err
	}
	data, err := s.readRef(file)
	if err != nil {
		return err
	}
	return s.writeRef(name+".json", data)
}

// collect removes what nothing names: images, and what killed writers left. With trim it removes the oldest
// versions of name over keepVersions first. The lock is held.
func (s *Store) collect(name string, trim bool) error {
	refs := filepath.Join(s.dir, "refs")
	if trim {
		list, err := s.Versions(name)
		if err != nil {
			return err
		}
		for i, v := range list {
			ref := name + "@" + v.Digest
			if i < keepVersions || s.inUse != nil && s.inUse(ref) {
				continue
			}
			file, _, _, err := refFile(ref)
			if err != nil {
				return err
			}
			if err := os.Remove(filepath.Join(refs, file)); err != nil {
				return err
			}
		}
	}
	entries, err := os.ReadDir(refs)
	if err != nil {
		return err
	}
	used := make(map[string]bool) // by the names of version refs: a manifest that is not valid keeps its image
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), ".new-") {
			if err := os.Remove(filepath.Join(refs, e.Name())); err != nil {
				return err
			}
		}
		if _, hex, ok := strings.Cut(strings.TrimSuffix(e.Name(), ".json"), "@"); ok {
			used["sha256-"+hex+".erofs"] = true
		}
	}
	blobs, err := os.ReadDir(filepath.Join(s.dir, "blobs"))
	if err != nil {
		return err
	}
	for _, b := range blobs {
		if !used[b.Name()] {
			if err := os.RemoveAll(filepath.Join(s.dir, "blobs", b.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}
