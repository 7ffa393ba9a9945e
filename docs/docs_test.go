// Package docs holds the documents; its tests hold them to the tree.
package docs

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

func read(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// TestSpecificationNamesTests: every test that SPECIFICATION names is in the package named before it.
func TestSpecificationNamesTests(t *testing.T) {
	word := regexp.MustCompile("`([^`]+)`")
	name := regexp.MustCompile(`^(Test|Fuzz)[A-Z]`)
	found := 0
	for line := range strings.Lines(read(t, "SPECIFICATION.md")) {
		cells := strings.Split(line, "|")
		if len(cells) != 5 {
			continue
		}
		dir := ""
		for _, m := range word.FindAllStringSubmatch(cells[2], -1) {
			if !name.MatchString(m[1]) {
				dir = filepath.Join("..", m[1])
				if _, err := os.Stat(dir); err != nil {
					t.Errorf("%s is not there", m[1])
				}
				continue
			}
			files, err := filepath.Glob(filepath.Join(dir, "*_test.go"))
			if dir == "" || err != nil || len(files) == 0 {
				t.Errorf("%s: no tests in %q", m[1], dir)
				continue
			}
			ok := false
			for _, f := range files {
				ok = ok || strings.Contains(read(t, f), "\nfunc "+m[1]+"(")
			}
			if !ok {
				t.Errorf("%s has no %s", dir, m[1])
			}
			found++
		}
		if state := strings.TrimSpace(cells[3]); state == "proven" && dir == "" {
			t.Errorf("proven by what? %s", cells[1])
		}
	}
	if found < 30 {
		t.Errorf("only %d tests are named", found)
	}
}

// TestFilesExist: what the documents link to or name as a Go file is in the tree.
func TestFilesExist(t *testing.T) {
	link := regexp.MustCompile(`\]\(([^)#:]+)(#[^)]*)?\)`)
	source := regexp.MustCompile("`([a-z0-9_/-]+\\.go)`")
	docs, err := filepath.Glob("*.md")
	if err != nil || len(docs) < 6 {
		t.Fatalf("%v, %v", docs, err)
	}
	for _, doc := range append(docs, "../README.md", "../CONTRIBUTING.md", "../SECURITY.md") {
		text := read(t, doc)
		for _, m := range link.FindAllStringSubmatch(text, -1) {
			if _, err := os.Stat(filepath.Join(filepath.Dir(doc), m[1])); err != nil {
				t.Errorf("%s links to %s, which is not there", doc, m[1])
			}
		}
		for _, m := range source.FindAllStringSubmatch(text, -1) {
			ok := false
			for _, dir := range []string{"..", "../internal", "../internal/httpapi", "../internal/engine/gvisor", "../internal/service", "../internal/engine", "."} {
				if _, err := os.Stat(filepath.Join(dir, m[1])); err == nil {
					ok = true
				}
			}
			if !ok {
				t.Errorf("%s names %s, which is not there", doc, m[1])
			}
		}
	}
}
