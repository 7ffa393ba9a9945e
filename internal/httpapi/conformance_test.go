package httpapi

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/rogpeppe/go-internal/txtar"

	"sandlot"
)

// TestConformance plays the wire scripts.
func TestConformance(t *testing.T) {
	files, err := filepath.Glob("../../conformance/project/*.txtar")
	if err != nil || len(files) == 0 {
		t.Fatalf("%v, %v", files, err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txtar"), func(t *testing.T) {
			ar, err := txtar.ParseFile(file)
			if err != nil {
				t.Fatal(err)
			}
			want := map[string]string{}
			for _, f := range ar.Files {
				want[f.Name] = string(f.Data)
			}
			w := newWorld(t, Limits{})
			p := &player{w: w, vars: map[string]string{"{sandboxes}": boxes}}
			out := &txtar.Archive{Comment: ar.Comment}
			for n := 1; ; n++ {
				name := strconv.Itoa(n)
				request, ok := want[name+".request"]
				if !ok {
					break
				}
				got := p.play(request)
				out.Files = append(out.Files, txtar.File{Name: name + ".request", Data: []byte(request)}, txtar.File{Name: name + ".response", Data: []byte(got)})
				if d := cmp.Diff(want[name+".response"], got); d != "" && !*update {
					t.Errorf("answer %d is another (-want +got)\n%s", n, d)
				}
			}
			if *update {
				if err := os.WriteFile(file, txtar.Format(out), 0o644); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// player sends requests and writes answers as the scripts have them.
type player struct {
	w    *world
	vars map[string]string
}

func (p *player) play(request string) string {
	for k, v := range p.vars {
		request = strings.ReplaceAll(request, k, v)
	}
	head, body, _ := strings.Cut(request, "\n\n")
	lines := strings.Split(strings.TrimSpace(head), "\n")
	method, path, _ := strings.Cut(lines[0], " ")
	var header []string
	for _, l := range lines[1:] {
		k, v, _ := strings.Cut(l, ": ")
		header = append(header, k, v)
	}
	a := p.w.do(method, path, strings.TrimSuffix(body, "\n"), header...)
	var out strings.Builder
	fmt.Fprintln(&out, a.status)
	for _, k := range []string{"Content-Type", "Content-Range", "Allow", "Retry-After", "Idempotency-Replayed"} {
		if v := a.header.Get(k); v != "" {
			fmt.Fprintf(&out, "%s: %s\n", k, v)
		}
	}
	if len(a.body) > 0 {
		fmt.Fprintf(&out, "\n%s\n", strings.TrimSuffix(p.normal(a), "\n"))
	}
	return out.String()
}

func (p *player) normal(a answer) string {
	switch a.header.Get("Content-Type") {
	case "application/json":
		return p.value(a.body, true)
	case "text/event-stream":
		var out []string
		for line := range strings.SplitSeq(strings.TrimSpace(string(a.body)), "\n") {
			if data, ok := strings.CutPrefix(line, "data: "); ok {
				out = append(out, "data: "+p.value([]byte(data), false), "")
			}
		}
		return strings.Join(out, "\n")
	}
	return string(a.body)
}

func (p *player) value(b []byte, indent bool) string {
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber()
	var v any
	if err := d.Decode(&v); err != nil {
		p.w.t.Errorf("not JSON: %q", b)
		return string(b)
	}
	if m, ok := v.(map[string]any); ok {
		if id, ok := m["id"].(string); ok && strings.HasPrefix(id, "sbx") {
			p.vars["{id}"] = id
		}
		if sid, ok := m["session_id"].(string); ok {
			p.vars["{sid}"] = sid
		}
		if pid, ok := m["pid"].(json.Number); ok {
			p.vars["{pid}"] = pid.String()
		}
	}
	v = p.scrub("", v)
	var out strings.Builder
	e := json.NewEncoder(&out)
	e.SetEscapeHTML(false)
	if indent {
		e.SetIndent("", "  ")
	}
	_ = e.Encode(v)
	return strings.TrimSpace(out.String())
}

var timestamp = regexp.MustCompile(`^\d{4}-\d\d-\d\dT[\d:.]+(Z|[+-]\d\d:\d\d)$`)

func (p *player) scrub(key string, v any) any {
	switch v := v.(type) {
	case map[string]any:
		for k := range v {
			v[k] = p.scrub(k, v[k])
		}
	case []any:
		for i := range v {
			v[i] = p.scrub(key, v[i])
		}
	case bool:
		if key == "from_pool" {
			return "{from_pool}"
		}
	case json.Number:
		switch {
		case strings.HasSuffix(key, "_ms") || strings.HasSuffix(key, "_seconds"):
			return 0
		case key == "pid":
			return "{pid}"
		case key == "next_cursor":
			return "{cursor}"
		}
	case string:
		switch key {
		case "request_id":
			return "{request}"
		case "engine", "isolation", "source":
			return "{" + key + "}"
		case "digest", "template_digest":
			return "{digest}"
		case "preview_token":
			return "{secret}"
		case "next_cursor":
			return "{cursor}"
		case "session_id":
			return "{sid}"
		case "user", "group":
			return "{" + key + "}" // the memory engine's processes are the test's own
		}
		if key == "id" && strings.HasPrefix(v, sandlot.PrefixBuild) {
			return "{build}"
		}
		if timestamp.MatchString(v) {
			return "{time}"
		}
		if id := p.vars["{id}"]; id != "" {
			v = strings.ReplaceAll(v, id, "{id}")
		}
		if sid := p.vars["{sid}"]; sid != "" {
			v = strings.ReplaceAll(v, sid, "{sid}")
		}
		if pid := p.vars["{pid}"]; pid != "" && key == "log_path" {
			v = regexp.MustCompile(`[^/]+$`).ReplaceAllString(v, "{log}")
		}
		return v
	}
	return v
}
