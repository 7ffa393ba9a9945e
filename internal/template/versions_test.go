package template

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"sandlot"
	"sandlot/internal/failpoint"
)

func TestOldVersionsGo(t *testing.T) {
	s := openStore(t)
	first := put(t, s, "x", "0")
	s.UseBy(func(ref string) bool { return ref == "x@"+first.Digest })
	for _, content := range strings.Split("1 2 3 4 5 6 7 8", " ") {
		put(t, s, "x", content)
	}
	list, err := s.Versions("x")
	if err != nil || len(list) != keepVersions+1 {
		t.Fatalf("%d versions are kept, want %d and the one in use: %v", len(list), keepVersions, err)
	}
	if _, err := s.Get("x@" + first.Digest); err != nil {
		t.Errorf("a version in use went: %v", err)
	}
	if blobs, err := os.ReadDir(filepath.Join(s.dir, "blobs")); err != nil || len(blobs) != len(list) {
		t.Errorf("%d images for %d versions, %v", len(blobs), len(list), err)
	}
	for _, ref := range []string{"x", "x@" + first.Digest} {
		if err := s.Remove(t.Context(), ref); sandlot.ErrorCode(err) != sandlot.CodeConflict {
			t.Errorf("Remove(%s) while it is in use: %v", ref, err)
		}
	}
	if again, err := s.Versions("x"); err != nil || len(again) != len(list) {
		t.Errorf("a refused removal removed something: %d versions, %v", len(again), err)
	}
}

func TestProjectsHaveNamesOfTheirOwn(t *testing.T) {
	s := openStore(t)
	one, err := s.Project("prj1")
	if err != nil {
		t.Fatal(err)
	}
	two, err := s.Project("prj2")
	if err != nil {
		t.Fatal(err)
	}
	put(t, one, "mine", "a")
	for name, other := range map[string]*Store{"another project's": two, "everybody's": s} {
		if _, err := other.Get("mine"); sandlot.ErrorCode(err) != sandlot.CodeNotFound {
			t.Errorf("%s: %v", name, err)
		}
	}
	put(t, s, "shared", "b") // collects what nothing names: not the projects' images
	if _, err := one.Get("mine"); err != nil {
		t.Error(err)
	}
	for _, id := range []sandlot.ID{"", "..", "../x", "a/b", "."} {
		if _, err := s.Project(id); err == nil {
			t.Errorf("a project %q", id)
		}
	}
}

func TestRefusedTemplateLeavesNothing(t *testing.T) {
	s := openStore(t)
	before := put(t, s, "x", "old")
	m := manifest{Template: sandlot.Template{Name: "x"}, ImageKey: "other"}
	no := errors.New("no")
	err := s.add(t.Context(), &m, before.BuiltAt, false, func(file string) error {
		return os.WriteFile(file, []byte("new"), 0o600)
	}, func(sandlot.Template) error { return no })
	if !errors.Is(err, no) {
		t.Errorf("error %v", err)
	}
	if got, err := s.Get("x"); err != nil || got.Digest != before.Digest {
		t.Errorf("Get = %+v, %v", got, err)
	}
	if blobs, err := os.ReadDir(filepath.Join(s.dir, "blobs")); err != nil || len(blobs) != 1 {
		t.Errorf("images %v, %v", blobs, err)
	}
}

// TestStoreKilled kills a process at each point of adding a version, and looks at what the next one finds.
func TestStoreKilled(t *testing.T) {
	if dir := os.Getenv("SANDLOT_TEST_STORE"); dir != "" {
		if err := failpoint.ArmFromEnv(); err != nil {
			t.Fatal(err)
		}
		s, err := Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		put(t, s, "x", "new")
		return
	}
	for _, point := range []string{"template.store.written", "template.store.named", "template.store.versioned"} {
		s := openStore(t)
		before := put(t, s, "x", "old")
		cmd := exec.Command("/proc/self/exe", "-test.run=^TestStoreKilled$")
		cmd.Env = append(os.Environ(), "SANDLOT_TEST_STORE="+s.dir, failpoint.EnvVar+"="+point+"=kill")
		if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(err.Error(), "killed") {
			t.Fatalf("%s: the writer was not killed: %v: %s", point, err, out)
		}
		if got, err := s.Get("x"); err != nil || got.Digest != before.Digest {
			t.Errorf("%s: Get = %+v, %v", point, got, err)
		}
		if list, err := s.List(); err != nil || len(list) != 1 {
			t.Errorf("%s: List = %+v, %v", point, list, err)
		}
		after := put(t, s, "x", "new")
		if got, err := s.Get("x"); err != nil || got.Digest != after.Digest {
			t.Errorf("%s: after another build Get = %+v, %v", point, got, err)
		}
		if blobs, err := os.ReadDir(filepath.Join(s.dir, "blobs")); err != nil || len(blobs) != 2 {
			t.Errorf("%s: images %v, %v", point, blobs, err)
		}
	}
}
