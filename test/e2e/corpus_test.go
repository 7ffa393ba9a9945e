package e2e

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/txtar"

	"sandlot/test/live"
)

// script is one file of conformance/run-code: cells of one context, and what each must answer.
type script struct {
	language string
	unlike   map[string]bool     // cells that IPython answers otherwise
	cells    []map[string]string // by kind: "code", "stdout", "media" …
}

var extensions = map[string]bool{"py": true, "js": true, "ts": true, "sh": true}

func readScript(t *testing.T, file string) script {
	t.Helper()
	a, err := txtar.ParseFile(file)
	if err != nil {
		t.Fatal(err)
	}
	s := script{unlike: map[string]bool{}}
	for line := range strings.Lines(string(a.Comment)) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
		switch key {
		case "language":
			s.language = value
		case "unlike IPython":
			for _, n := range strings.Fields(value) {
				s.unlike[n] = true
			}
		}
	}
	for _, f := range a.Files {
		n, kind, _ := strings.Cut(f.Name, ".")
		if extensions[kind] {
			kind = "code"
			s.cells = append(s.cells, map[string]string{})
		}
		if n != fmt.Sprint(len(s.cells)) || s.cells[len(s.cells)-1][kind] != "" {
			t.Fatalf("%s: %s is out of order", file, f.Name)
		}
		s.cells[len(s.cells)-1][kind] = strings.TrimSuffix(string(f.Data), "\n")
	}
	if s.language == "" || len(s.cells) == 0 {
		t.Fatalf("%s has no language or no cells", file)
	}
	return s
}

// addresses differ from run to run.
var addresses = regexp.MustCompile(`\b0x[0-9a-f]{6,}|id='\d+'`)

func steady(s string) string {
	return addresses.ReplaceAllStringFunc(s, func(a string) string {
		if a[0] == 'i' {
			return "id='…'"
		}
		return "0x…"
	})
}

// kinds is an answer in the script's own terms.
func kinds(a answer) map[string]string {
	got := map[string]string{"stdout": a.Stdout, "stderr": a.Stderr}
	var media []string
	short := map[string]string{"text/plain": "text", "text/html": "html", "text/markdown": "markdown", "text/latex": "latex", "image/svg+xml": "svg"}
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
		got[k] = strings.TrimSuffix(steady(v), "\n")
	}
	return got
}

// The corpus: what each cell prints, gives and raises. What a cell does not mention it must not do.
func TestCorpus(t *testing.T) {
	files, err := filepath.Glob("../../conformance/run-code/*.txtar")
	if err != nil || len(files) < 8 {
		t.Fatal("no corpus:", files, err)
	}
	cells := 0
	for _, file := range files {
		s := readScript(t, file)
		cells += len(s.cells)
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txtar"), func(t *testing.T) {
			t.Parallel()
			template := "base"
			if s.language == "python" {
				template = "python-3.12"
			}
			b := live.New(t, map[string]any{"template": template})
			in := map[string]any{"language": s.language}
			if s.language != "bash" && s.language != "python" {
				in["context_id"] = "corpus"
			}
			for i, c := range s.cells {
				got := kinds(code(t, b, c["code"], in))
				for _, kind := range []string{"stdout", "stderr", "media", "text", "html", "markdown", "latex", "svg", "error", "traceback"} {
					if pattern, ok := c[kind+"~"]; ok {
						if !regexp.MustCompile(`^(?:` + pattern + `)$`).MatchString(got[kind]) {
							t.Errorf("cell %d (%.60q): %s is %.600q, not like %q", i+1, c["code"], kind, got[kind], pattern)
						}
						continue
					}
					// A value's longer forms and a traceback that leads through others' files are not in the corpus.
					optional := kind == "html" || kind == "svg" || kind == "markdown" || kind == "latex" || kind == "traceback" || kind == "error" && c["error~"] != ""
					if want, ok := c[kind]; (ok || !optional) && got[kind] != want {
						t.Errorf("cell %d (%.60q): %s is %.600q, want %.600q", i+1, c["code"], kind, got[kind], want)
					}
				}
			}
			if s.language == "python" {
				compareIPython(t, b, s)
			}
		})
	}
	if cells < 150 {
		t.Errorf("the corpus has %d cells", cells)
	}
}

// compareIPython runs the same cells in IPython itself, in the same template, and holds the corpus against it.
func compareIPython(t *testing.T, b live.Box, s script) {
	t.Helper()
	program, err := os.ReadFile("../../conformance/run-code/ipython.py")
	if err != nil {
		t.Fatal(err)
	}
	var codes []string
	for _, c := range s.cells {
		codes = append(codes, c["code"])
	}
	input, err := json.Marshal(codes)
	if err != nil {
		t.Fatal(err)
	}
	b.Put(t, "/tmp/ipython.py", program)
	b.Put(t, "/tmp/cells.json", input)
	r := b.Run(t, "cd /workspace && python3 /tmp/ipython.py </tmp/cells.json", map[string]any{"timeout_s": 120})
	var answers [][]any
	if err := json.Unmarshal([]byte(r.Stdout), &answers); err != nil || len(answers) != len(s.cells) {
		t.Fatalf("IPython: %v: %d answers of %d; exit %d, %.500q", err, len(answers), len(s.cells), r.ExitCode, r.Stderr)
	}
	for i, a := range answers {
		c := s.cells[i]
		text, _ := a[0].(string)
		name, _ := a[1].(string)
		wantName, _, _ := strings.Cut(c["error"]+c["error~"], ":")
		media := c["media"][strings.LastIndexByte(c["media"], '\n')+1:]
		want := c["text"]
		if text == "" && name == "" { // IPython counts only the last expression's value
			want, wantName = "", ""
		}
		var mimes []string
		for _, m := range a[2].([]any) {
			mimes = append(mimes, m.(string))
		}
		same := steady(text) == want && name == wantName && (len(mimes) == 0 || slices.Contains(strings.Split(c["media"], "\n"), strings.Join(mimes, " ")))
		if n := fmt.Sprint(i + 1); same == s.unlike[n] && (!same || text != "") {
			t.Errorf("cell %s (%.60q): IPython gives %.200q %q %v, the corpus %.200q %q %q; unlike IPython: %t", n, c["code"], text, name, mimes, want, wantName, media, s.unlike[n])
		}
	}
}
