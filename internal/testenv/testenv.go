// Package testenv finds what tests on the real host need, and takes the census of what they leave there.
package testenv

import (
	"bufio"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sandlot"
	"sandlot/internal/engine/gvisor"
	"sandlot/internal/template"
)

// The variables that ./dev test sets.
const (
	BinVar       = "SANDLOT_BIN"       // directory of sandlot, sandlot-agent and runsc
	TemplatesVar = "SANDLOT_TEMPLATES" // directory of the template store
)

// Root skips a test that cannot run without root. ./dev test counts skips.
func Root(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIP: needs root")
	}
}

// Bin returns the path of a built binary.
func Bin(t testing.TB, name string) string {
	t.Helper()
	dir := os.Getenv(BinVar)
	if dir == "" {
		t.Skipf("SKIP: needs %s; run ./dev test", BinVar)
	}
	path := filepath.Join(dir, name)
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("%s is not built: %v", name, err)
	}
	return path
}

// TemplatesDir is the template store's directory.
func TemplatesDir(t testing.TB) string {
	t.Helper()
	dir := os.Getenv(TemplatesVar)
	if dir == "" {
		t.Skipf("SKIP: needs %s; run ./dev test", TemplatesVar)
	}
	return dir
}

// Templates opens the template store.
func Templates(t testing.TB) *template.Store {
	t.Helper()
	s, err := template.Open(TemplatesDir(t))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// Template returns a built template.
func Template(t testing.TB, name string) sandlot.Template {
	t.Helper()
	tpl, err := Templates(t).Get(name)
	if err != nil {
		t.Fatal(err)
	}
	return tpl
}

// Census lists, sorted, everything of this host that belongs to the machines of a node's state directory:
// files, mounts, loop devices, cgroups and the processes in them.
func Census(t testing.TB, nodeDir string) []string {
	t.Helper()
	found, err := Owned(nodeDir)
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// Owned is Census where there is no test.
func Owned(nodeDir string) ([]string, error) {
	run := gvisor.RunDir(nodeDir)
	tag := filepath.Base(run)
	found := []string{}
	for _, dir := range []string{filepath.Join(nodeDir, "machines"), run} {
		entries, err := os.ReadDir(dir)
		if err != nil && !os.IsNotExist(err) {
			return nil, err
		}
		for _, e := range entries {
			found = append(found, "file "+filepath.Join(dir, e.Name()))
		}
	}
	mounts, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	defer mounts.Close()
	for sc := bufio.NewScanner(mounts); sc.Scan(); {
		f := strings.Fields(sc.Text())
		if len(f) > 4 && (strings.HasPrefix(f[4], run+"/") || strings.HasPrefix(f[4], nodeDir+"/")) {
			found = append(found, "mount "+f[4])
		}
	}
	backing, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, p := range backing {
		if b, err := os.ReadFile(p); err == nil && strings.HasPrefix(string(b), nodeDir+"/") {
			found = append(found, "loop "+strings.TrimSpace(string(b)))
		}
	}
	groups, _ := filepath.Glob("/sys/fs/cgroup/*/sandlot-" + tag + "/*/cgroup.procs")
	v2, _ := filepath.Glob("/sys/fs/cgroup/sandlot-" + tag + "/*/cgroup.procs")
	for _, p := range append(groups, v2...) {
		found = append(found, "cgroup "+filepath.Dir(p))
		b, _ := os.ReadFile(p)
		for pid := range strings.FieldsSeq(string(b)) {
			found = append(found, "process "+pid+" of "+filepath.Dir(p))
		}
	}
	slices.Sort(found)
	return found, nil
}
