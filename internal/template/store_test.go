package template

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"sandlot"
)

func openStore(t *testing.T) *Store {
	t.Helper()
	s, err := Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// put adds a template whose image is content.
func put(t *testing.T, s *Store, name, content string) sandlot.Template {
	t.Helper()
	m := manifest{Template: sandlot.Template{Name: name, Size: sandlot.DefaultSize, BuiltAt: time.Now()}, Key: "k-" + content, ImageKey: "i-" + content}
	err := s.add(context.Background(), &m, time.Now(), false, func(file string) error {
		return os.WriteFile(file, []byte(content), 0o600)
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return m.Template
}

func TestStore(t *testing.T) {
	s := openStore(t)
	one := put(t, s, "b", "one")
	two := put(t, s, "b", "two")
	same := put(t, s, "a", "two")
	if two.Digest != same.Digest || one.Digest == two.Digest {
		t.Errorf("digests %s %s %s", one.Digest, two.Digest, same.Digest)
	}
	list, err := s.List()
	if err != nil || len(list) != 2 || list[0].Name != "a" || list[1].Digest != two.Digest {
		t.Fatalf("List() = %+v, %v", list, err)
	}
	for _, want := range []sandlot.Template{one, two} {
		got, err := s.Get("b@" + want.Digest)
		if err != nil || got.Digest != want.Digest || !filepath.IsAbs(got.Image) {
			t.Errorf("Get(b@%s) = %+v, %v", want.Digest, got, err)
		}
		if info, err := os.Stat(got.Image); err != nil || info.Mode().Perm() != 0o444 || info.Size() != got.ImageBytes {
			t.Errorf("image of %s: %v, %v", want.Digest, info, err)
		}
	}
	ctx := context.Background()
	if versions, err := s.Versions("b"); err != nil || len(versions) != 2 || versions[0].Digest != two.Digest {
		t.Errorf("Versions = %+v, %v", versions, err)
	}
	if err := s.Remove(ctx, "b@"+two.Digest); err != nil {
		t.Error(err)
	}
	if got, err := s.Get("b"); err != nil || got.Digest != one.Digest {
		t.Errorf("after its newest version went, b is %+v, %v", got, err)
	}
	three := put(t, s, "b", "three")
	if err := s.Remove(ctx, "b@"+one.Digest); err != nil {
		t.Error(err)
	}
	if got, err := s.Get("b"); err != nil || got.Digest != three.Digest {
		t.Errorf("after an old version went, b is %+v, %v", got, err)
	}
	if _, err := os.Lstat(one.Image); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the image of a removed version: %v", err)
	}
	if err := s.Remove(ctx, "b"); err != nil {
		t.Error(err)
	}
	if _, err := s.Get("b"); sandlot.ErrorCode(err) != sandlot.CodeNotFound {
		t.Errorf("Get after Remove: %v", err)
	}
	if _, err := s.Get("a"); err != nil {
		t.Errorf("a shared its image with b: %v", err)
	}
	if err := s.Remove(ctx, "b"); sandlot.ErrorCode(err) != sandlot.CodeNotFound {
		t.Errorf("Remove twice: %v", err)
	}
}

func TestStoreRefusesNames(t *testing.T) {
	s := openStore(t)
	got := put(t, s, "x", "x")
	if err := os.Rename(filepath.Join(s.dir, "refs/x.json"), filepath.Join(s.dir, "x.json")); err != nil {
		t.Fatal(err)
	}
	for _, ref := range []string{
		"", ".", "..", "../x", "/x", "x/../../x", "refs/../../x", "X", "x y", "x\x00", "@", "@" + got.Digest, "x@", "x@sha256:",
		"x@" + strings.ToUpper(got.Digest), "x@sha256:" + strings.Repeat("/", 64), "x@../../x", strings.Repeat("x", 64),
	} {
		if _, err := s.Get(ref); sandlot.ErrorCode(err) != sandlot.CodeInvalidRequest {
			t.Errorf("Get(%q): %v", ref, err)
		}
		if err := s.Remove(context.Background(), ref); sandlot.ErrorCode(err) != sandlot.CodeInvalidRequest {
			t.Errorf("Remove(%q): %v", ref, err)
		}
	}
}

func TestStoreRefusesHostileRefs(t *testing.T) {
	for name, spoil := range map[string]func(refs, ref string) error{
		"link to a good manifest": func(refs, ref string) error {
			return errors.Join(os.Rename(ref, refs+"/../good"), os.Symlink("../good", ref))
		},
		"link to a device": func(_, ref string) error { return errors.Join(os.Remove(ref), os.Symlink("/dev/zero", ref)) },
		"FIFO":             func(_, ref string) error { return errors.Join(os.Remove(ref), mkfifo(ref)) },
		"folder":           func(_, ref string) error { return errors.Join(os.Remove(ref), os.Mkdir(ref, 0o700)) },
		"huge":             func(_, ref string) error { return os.Truncate(ref, maxManifestBytes+1) },
		"not JSON":         func(_, ref string) error { return os.WriteFile(ref, []byte("{"), 0o600) },
		"other name":       func(_, ref string) error { return edit(ref, `"name": "x"`, `"name": "y"`) },
		"digest is a path": func(_, ref string) error { return edit(ref, "sha256:", "../../../x:") },
		"no image":         func(refs, _ string) error { return os.RemoveAll(refs + "/../blobs") },
		"image is a link": func(refs, _ string) error {
			found, _ := filepath.Glob(refs + "/../blobs/*")
			return errors.Join(os.Rename(found[0], refs+"/../blob"), os.Symlink("../blob", found[0]))
		},
		"image is cut": func(refs, _ string) error {
			found, _ := filepath.Glob(refs + "/../blobs/*")
			return os.Truncate(found[0], 1)
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := openStore(t)
			put(t, s, "x", "content")
			refs := filepath.Join(s.dir, "refs")
			if err := spoil(refs, filepath.Join(refs, "x.json")); err != nil {
				t.Fatal(err)
			}
			if got, err := s.Get("x"); err == nil {
				t.Errorf("Get = %+v", got)
			}
			if list, err := s.List(); err == nil || len(list) != 0 {
				t.Errorf("List = %+v, %v", list, err)
			}
		})
	}
}

func edit(file, from, to string) error {
	data, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	return os.WriteFile(file, []byte(strings.Replace(string(data), from, to, 1)), 0o600)
}

func TestStoreOneBrokenRefHidesNoOther(t *testing.T) {
	s := openStore(t)
	put(t, s, "good", "g")
	bad := put(t, s, "bad", "b")
	if err := os.WriteFile(filepath.Join(s.dir, "refs/bad.json"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if list, err := s.List(); err == nil || len(list) != 1 || list[0].Name != "good" {
		t.Errorf("List = %+v, %v", list, err)
	}
	if err := s.Remove(context.Background(), "good"); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(bad.Image); err != nil {
		t.Errorf("removing one template took the image of a broken one: %v", err)
	}
}

func TestStoreFailedWriteLeavesNothing(t *testing.T) {
	s := openStore(t)
	before := put(t, s, "x", "old")
	m := manifest{Template: sandlot.Template{Name: "x"}, ImageKey: "other"}
	broken := errors.New("no")
	err := s.add(context.Background(), &m, time.Now(), false, func(file string) error {
		return errors.Join(os.WriteFile(file, []byte("half"), 0o600), broken)
	}, nil)
	if !errors.Is(err, broken) {
		t.Errorf("error %v", err)
	}
	if got, err := s.Get("x"); err != nil || got.Digest != before.Digest {
		t.Errorf("Get = %+v, %v", got, err)
	}
	for dir, want := range map[string]int{"blobs": 1, "refs": 2} {
		if entries, err := os.ReadDir(filepath.Join(s.dir, dir)); err != nil || len(entries) != want {
			t.Errorf("%s holds %v, %v", dir, entries, err)
		}
	}
}

// Readers see the old template or the new one, whole, at any instant.
func TestStoreHammerReplaceWhileRead(t *testing.T) {
	s := openStore(t)
	put(t, s, "x", "0")
	stop := make(chan struct{})
	var readers sync.WaitGroup
	for range 3 {
		readers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if _, err := s.Get("x"); err != nil {
					t.Errorf("Get: %v", err)
					return
				}
			}
		})
	}
	var writers sync.WaitGroup
	for w := range 2 {
		writers.Go(func() {
			for i := range 20 {
				put(t, s, "x", fmt.Sprint(w, i))
			}
		})
	}
	writers.Wait()
	close(stop)
	readers.Wait()
}
