package runcode

import (
	"slices"
	"strings"
	"testing"
)

// Every file of the corpus can be read, and there are enough cells.
func TestScripts(t *testing.T) {
	all, err := Scripts()
	if err != nil {
		t.Fatal(err)
	}
	cells, languages := 0, map[string]bool{}
	for _, s := range all {
		cells += len(s.Cells)
		languages[s.Language] = true
	}
	if cells < 150 || len(languages) != len(extensions) {
		t.Errorf("%d cells in %v", cells, languages)
	}
}

func TestParseRefuses(t *testing.T) {
	for _, text := range []string{
		"", "language: python\n", "language: python\n-- 2.py --\n", "language: python\n-- 1.js --\n", "language: python\n-- 1.stdout --\n",
		"language: python\n-- 1.py --\n-- 1.stout --\n", "language: python\n-- 1.py --\n-- 1.text --\n-- 1.text --\n",
		"language: python\n-- 1.py --\n-- 1.text~ --\n(\n",
	} {
		if s, err := parse("x", []byte(text)); err == nil {
			t.Errorf("%q is taken: %v", text, s)
		}
	}
}

// A cell that does what its script does not say is told, each time for that reason only.
func TestCheck(t *testing.T) {
	c := Cell{"code": "x", "stdout": "a", "media": "text/html text/plain", "text": "<x at 0x…>", "error~": "E: .*"}
	good := func() Answer {
		return Answer{Stdout: "a\n", Results: []map[string]any{{"text/plain": "<x at 0x7fabc1>", "text/html": "<b>"}}, Error: &Failure{"E", "v", "t"}}
	}
	if p := c.Check(good()); len(p) != 0 {
		t.Fatal(p)
	}
	for kind, spoil := range map[string]func(*Answer){
		"stdout": func(a *Answer) { a.Stdout = "b" },
		"stderr": func(a *Answer) { a.Stderr = "w" },
		"media":  func(a *Answer) { delete(a.Results[0], "text/html") },
		"text":   func(a *Answer) { a.Results[0]["text/plain"] = "y" },
		"error":  func(a *Answer) { a.Error.Name = "F" },
	} {
		a := good()
		spoil(&a)
		if p := c.Check(a); len(p) != 1 || !strings.HasPrefix(p[0], kind+" is ") {
			t.Errorf("%s: %q", kind, p)
		}
	}
	if p := c.Check(Answer{}); !slices.ContainsFunc(p, func(s string) bool { return strings.HasPrefix(s, "error is") }) {
		t.Error("no error is no problem:", p)
	}
}
