package main

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"sandlot/internal/testenv"
)

// definition writes a definition's folder.
func definition(t *testing.T, name, text string, files map[string]string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), name)
	all := map[string]string{"template.toml": text}
	for p, content := range files {
		all[p] = content
	}
	for p, content := range all {
		p = filepath.Join(dir, p)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestTemplateBuildIntoAStore(t *testing.T) {
	testenv.Root(t)
	dir := definition(t, "tiny", "[[step]]\n[[step.files]]\ndest = \"/opt/a\"\nsrc = \"a\"\n", map[string]string{"a": "1"})
	store := filepath.Join(t.TempDir(), "store")
	for _, tt := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"--no-sandbox", "--store", store, dir}, 0, "tiny sha256:"},
		{[]string{"--no-sandbox", "--store", store, "--json", dir}, 0, `"name":"tiny"`},
		{[]string{"--no-sandbox", "--store", store, dir + "-none"}, 1, "no such file"},
		{[]string{"--store", store, "--runsc", "/nowhere/runsc", dir}, 1, "--no-sandbox"},
		{[]string{"--store", store}, 2, "definitions"},
		{[]string{"--nonsense"}, 2, "unknown flag"},
	} {
		var out, said bytes.Buffer
		code := run(t.Context(), append([]string{"template", "build"}, tt.args...), &streams{in: strings.NewReader(""), out: &out, err: &said})
		if code != tt.code || !strings.Contains(out.String()+said.String(), tt.want) {
			t.Errorf("%v: status %d, want %d and %q: %s%s", tt.args, code, tt.code, tt.want, &out, &said)
		}
	}
	if _, err := os.Stat(filepath.Join(filepath.Dir(store), "cache/layers")); err != nil {
		t.Errorf("the cache is not beside the store: %v", err)
	}
}

func TestTemplateBuildOnAServer(t *testing.T) {
	t.Setenv("SANDLOT_TEMPLATES", "")
	var sent remoteBuild
	answer := `data: {"type":"build","name":"web","state":"running"}` + "\n\n" + `data: {"type":"log","line":"[1/2] a step"}` + "\n\n"
	last := ""
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodPost || r.URL.Path != "/api/v1/projects/default/sandboxes/templates" {
			t.Errorf("%s %s", r.Method, r.URL)
		}
		sent = remoteBuild{}
		if err := json.NewDecoder(r.Body).Decode(&sent); err != nil {
			t.Error(err)
		}
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, answer+last)
	}))
	defer srv.Close()
	dir := definition(t, "web", "description = \"x\"\n", map[string]string{"a/b.txt": "text", "bytes": "\xff\x00"})
	build := func(args ...string) (int, string, string) {
		var out, said bytes.Buffer
		args = append([]string{"template", "--url", srv.URL, "--token", "sl_x", "--project", "default"}, args...)
		code := run(t.Context(), args, &streams{in: strings.NewReader(""), out: &out, err: &said})
		return code, out.String(), said.String()
	}
	last = `data: {"type":"end","name":"web","state":"succeeded","digest":"sha256:d"}` + "\n\n"
	if code, out, said := build("build", dir); code != 0 || out != "web sha256:d\n" || !strings.Contains(said, "[1/2] a step") {
		t.Errorf("status %d, %q, %q", code, out, said)
	}
	if sent.Name != "web" || !sent.Stream || sent.Definition != "description = \"x\"\n" || len(sent.Files) != 2 ||
		*sent.Files[0].Content != "text" || sent.Files[0].Path != "a/b.txt" || *sent.Files[1].ContentBase64 != "/wA=" {
		t.Errorf("sent %+v", sent)
	}
	if code, _, said := build("import", "alpine:3", "--start"); code != 0 || sent.Name != "alpine" || sent.From["oci"] != "alpine:3" || sent.From["image_start"] != true {
		t.Errorf("status %d, %q, sent %+v", code, said, sent)
	}
	last = `data: {"type":"end","name":"web","state":"failed","step":"run x","error":{"code":"invalid_request","message":"step run x: exit status 1"}}` + "\n\n"
	if code, out, said := build("build", dir); code != 1 || out != "" || !strings.Contains(said, "step run x: exit status 1 (invalid_request)") {
		t.Errorf("a failure: status %d, %q, %q", code, out, said)
	}
	last = ""
	if code, _, said := build("build", dir); code != 1 || !strings.Contains(said, "broke off") {
		t.Errorf("a stream without an end: status %d, %q", code, said)
	}
	if code, _, said := build("import", "./saved.tar"); code != 1 || !strings.Contains(said, "--store") {
		t.Errorf("a file: status %d, %q", code, said)
	}
}
