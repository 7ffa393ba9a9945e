// Package runcode reads the cells of this folder and holds answers against them. README.md says what a script is.
package runcode

import (
	"embed"
	"fmt"
	"io/fs"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/txtar"
)

//go:embed *.txtar
var scripts embed.FS

// Script is one file: cells of one context, in their order.
type Script struct {
	Name     string // the file's, without .txtar
	Language string
	Needs    []string        // modules that the language must have
	Unlike   map[string]bool // numbers of cells that IPython answers otherwise
	Cells    []Cell
}

// Cell is code and what it must answer, by kind: "code", "stdout", "media" …
type Cell map[string]string

// Answer is what a cell printed, gave and raised.
type Answer struct {
	Stdout, Stderr string
	Results        []map[string]any // values by media type
	Error          *Failure
}

// Failure is the error of a cell.
type Failure struct{ Name, Value, Traceback string }

// Runner runs a cell in a context, which it makes when there is none.
type Runner interface {
	Run(t *testing.T, context, language, code string) Answer
}

// Scripts reads all of them.
func Scripts() ([]Script, error) {
	names, err := fs.Glob(scripts, "*.txtar")
	if err != nil {
		return nil, err
	}
	var all []Script
	for _, name := range names {
		b, err := scripts.ReadFile(name)
		if err != nil {
			return nil, err
		}
		s, err := parse(strings.TrimSuffix(name, ".txtar"), b)
		if err != nil {
			return nil, err
		}
		all = append(all, s)
	}
	return all, nil
}

var extensions = map[string]string{"python": "py", "javascript": "js", "typescript": "ts", "bash": "sh"}

// kinds are the parts of an answer. The optional ones count where a script gives them.
var kinds = map[string]bool{
	"stdout": true, "stderr": true, "media": true, "text": true, "error": true,
	"html": false, "markdown": false, "latex": false, "svg": false, "traceback": false,
}

func parse(name string, content []byte) (Script, error) {
	a := txtar.Parse(content)
	s := Script{Name: name, Unlike: map[string]bool{}}
	for line := range strings.Lines(string(a.Comment)) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
		switch key {
		case "language":
			s.Language = value
		case "needs":
			s.Needs = strings.Fields(value)
		case "unlike IPython":
			for _, n := range strings.Fields(value) {
				s.Unlike[n] = true
			}
		}
	}
	for _, f := range a.Files {
		n, kind, _ := strings.Cut(f.Name, ".")
		if kind == extensions[s.Language] {
			kind = "code"
			s.Cells = append(s.Cells, Cell{})
		}
		_, known := kinds[strings.TrimSuffix(kind, "~")]
		if n != fmt.Sprint(len(s.Cells)) || kind != "code" && !known {
			return s, fmt.Errorf("%s.txtar: %s is out of order or unknown", name, f.Name)
		}
		c := s.Cells[len(s.Cells)-1]
		if _, twice := c[kind]; twice {
			return s, fmt.Errorf("%s.txtar: %s is there twice", name, f.Name)
		}
		c[kind] = strings.TrimSuffix(string(f.Data), "\n")
		if strings.HasSuffix(kind, "~") {
			if _, err := regexp.Compile(c[kind]); err != nil {
				return s, fmt.Errorf("%s.txtar: %s: %w", name, f.Name, err)
			}
		}
	}
	if s.Language == "" || len(s.Cells) == 0 {
		return s, fmt.Errorf("%s.txtar has no language or no cells", name)
	}
	return s, nil
}

// Play runs a script's cells in a context and reports each answer that is not as written.
func (s Script) Play(t *testing.T, r Runner, context string) {
	t.Helper()
	for i, c := range s.Cells {
		for _, problem := range c.Check(r.Run(t, context, s.Language, c["code"])) {
			t.Errorf("cell %d (%.60q): %s", i+1, c["code"], problem)
		}
	}
}

// Check says what an answer has that the cell must not give, or lacks.
func (c Cell) Check(a Answer) []string {
	var problems []string
	got := a.kinds()
	for _, kind := range slices.Sorted(maps.Keys(kinds)) {
		if pattern, ok := c[kind+"~"]; ok {
			if !regexp.MustCompile(`^(?:` + pattern + `)$`).MatchString(got[kind]) {
				problems = append(problems, fmt.Sprintf("%s is %.600q, not like %q", kind, got[kind], pattern))
			}
		} else if want, ok := c[kind]; (ok || kinds[kind]) && got[kind] != want {
			problems = append(problems, fmt.Sprintf("%s is %.600q, want %.600q", kind, got[kind], want))
		}
	}
	return problems
}

var short = map[string]string{
	"text/plain": "text", "text/html": "html", "text/markdown": "markdown", "text/latex": "latex", "image/svg+xml": "svg",
}

// kinds is an answer in a script's terms.
func (a Answer) kinds() map[string]string {
	got := map[string]string{"stdout": a.Stdout, "stderr": a.Stderr}
	var media []string
	for _, r := range a.Results {
		media = append(media, strings.Join(slices.Sorted(maps.Keys(r)), " "))
		for mime, kind := range short {
			if v, ok := r[mime].(string); ok {
				got[kind] = v
			}
		}
	}
	got["media"] = strings.Join(media, "\n")
	if a.Error != nil {
		got["error"], got["traceback"] = a.Error.Name+": "+a.Error.Value, a.Error.Traceback
	}
	for k, v := range got {
		got[k] = strings.TrimSuffix(Steady(v), "\n")
	}
	return got
}

var addresses = regexp.MustCompile(`\b0x[0-9a-f]{6,}|id='\d+'`)

// Steady replaces what differs from run to run: addresses of objects.
func Steady(s string) string {
	return addresses.ReplaceAllStringFunc(s, func(a string) string {
		if a[0] == 'i' {
			return "id='…'"
		}
		return "0x…"
	})
}
