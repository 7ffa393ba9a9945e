package e2e

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"sandlot/internal/devserver"
	"sandlot/internal/testenv"
	"sandlot/test/live"
)

const ownTemplates = "/api/v1/projects/default/templates"

type buildEnd struct {
	ID, Name, State, Digest, Step string
	Error                         struct{ Code, Message string }
	Log                           []string
}

// buildStream builds a template of the project and returns its last event with the log.
func buildStream(t *testing.T, s *devserver.Server, req map[string]any) buildEnd {
	t.Helper()
	req["stream"] = true
	body, err := json.Marshal(req)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := s.Request(t.Context(), http.MethodPost, "/templates", strings.NewReader(string(body)))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var end buildEnd
	var lines []string
	sc := bufio.NewScanner(resp.Body)
	for sc.Scan() {
		data, ok := strings.CutPrefix(sc.Text(), "data: ")
		if !ok {
			continue
		}
		var e struct {
			Type, Line string
			buildEnd
		}
		if err := json.Unmarshal([]byte(data), &e); err != nil {
			t.Fatal(err)
		}
		if e.Type == "log" {
			lines = append(lines, e.Line)
		} else {
			end = e.buildEnd
		}
	}
	if err := sc.Err(); err != nil {
		t.Fatal(err)
	}
	end.Log = lines
	return end
}

const webTemplate = `
description = "a web server"
start = ["python3", "-m", "http.server", "8000", "--directory", "/srv/web"]
ready = ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/hello.txt')"]
env = { GREETING = "hi" }
[from]
template = "base"
[size]
vcpu = 1
memory_mb = 512
disk_gb = 3
[[step]]
[[step.files]]
dest = "/srv/web"
src = "web"
[[step]]
run = "echo $((6*7)) >/srv/web/answer.txt; id -u; uname -a"
`

// TestOwnTemplates builds templates of a project from what a caller sends: in sandboxes, with versions, a start
// command, and failures that say what failed.
func TestOwnTemplates(t *testing.T) {
	t.Parallel()
	s := live.Server(t)
	files := func(hello string) []map[string]any {
		return []map[string]any{{"path": "web/hello.txt", "content": hello}}
	}
	first := buildStream(t, s, map[string]any{"name": "web", "definition": webTemplate, "files": files("one")})
	if first.State != "succeeded" || first.Digest == "" {
		t.Fatalf("the build ended as %+v\n%s", first, s.Log())
	}
	if log := strings.Join(first.Log, "\n"); !strings.Contains(log, "start command and check") || !strings.Contains(log, "Linux") {
		t.Errorf("the log has neither the steps' output nor what is done:\n%s", log)
	}
	defer func() {
		if err := s.Call(t.Context(), http.MethodDelete, ownTemplates+"/web", nil, nil); err != nil {
			t.Error("removing the template:", err)
		}
		if _, err := s.Create(t.Context(), map[string]any{"template": "web"}); err == nil {
			t.Error("a removed template still makes sandboxes")
		}
		if left, err := filepath.Glob(filepath.Join(s.NodeDir(), "templates/projects/*/blobs/*")); err != nil || len(left) > 0 {
			t.Errorf("images are left: %v, %v", left, err)
		}
		live.Eventually(t, time.Minute, "the end of the last definition's folder", func() bool {
			left, err := os.ReadDir(filepath.Join(s.NodeDir(), "build-cache/uploads"))
			return err == nil && len(left) == 0
		})
	}()
	get := `python3 -c "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8000/%s').read().decode().strip())"`
	t.Run("started", func(t *testing.T) {
		b := live.New(t, map[string]any{"template": "web"})
		if got := b.Out(t, fmt.Sprintf(get, "hello.txt")); got != "one" {
			t.Errorf("the server says %q", got)
		}
		if got := b.Out(t, fmt.Sprintf(get, "answer.txt")+"; echo $GREETING; nproc"); !strings.HasPrefix(got, "42\nhi\n") {
			t.Errorf("the template has %q", got)
		}
	})
	t.Run("versions", func(t *testing.T) {
		second := buildStream(t, s, map[string]any{"name": "web", "definition": webTemplate, "files": files("two")})
		if second.State != "succeeded" || second.Digest == first.Digest {
			t.Fatalf("the build ended as %+v", second)
		}
		old := live.New(t, map[string]any{"template": "web@" + first.Digest})
		if got := old.Out(t, fmt.Sprintf(get, "hello.txt")); got != "one" {
			t.Errorf("the old version says %q", got)
		}
		if got := live.New(t, map[string]any{"template": "web"}).Out(t, fmt.Sprintf(get, "hello.txt")); got != "two" {
			t.Errorf("the name says %q", got)
		}
		var detail struct {
			Digest   string
			Own      bool
			Versions []struct{ Digest string }
		}
		if err := s.Call(t.Context(), http.MethodGet, ownTemplates+"/web", nil, &detail); err != nil {
			t.Fatal(err)
		}
		if !detail.Own || detail.Digest != second.Digest || len(detail.Versions) != 2 || detail.Versions[1].Digest != first.Digest {
			t.Errorf("the template is shown as %+v", detail)
		}
		var status *devserver.StatusError
		err := s.Call(t.Context(), http.MethodDelete, ownTemplates+"/"+url.PathEscape("web@"+first.Digest), nil, nil)
		if !errors.As(err, &status) || status.Status != http.StatusConflict {
			t.Errorf("removing a version in use: %v", err)
		}
	})
	t.Run("command line", func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "cli")
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "template.toml"), []byte("[from]\ntemplate = \"web\"\n[[step]]\nrun = \"echo from the step\"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		cli := func(args ...string) string {
			cmd := exec.CommandContext(t.Context(), testenv.Bin(t, "sandlot"), append([]string{"template"}, args...)...)
			cmd.Env = []string{"SANDLOT_URL=" + s.URL, "SANDLOT_TOKEN=" + s.Token, "SANDLOT_PROJECT=default"}
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Errorf("%q: %v: %s", args, err, out)
			}
			return string(out)
		}
		for _, step := range []struct {
			args []string
			want string
		}{
			{[]string{"build", dir}, "from the step"}, {[]string{"list"}, "project"}, {[]string{"inspect", "cli"}, "http.server"},
			{[]string{"inspect", "--json", "base"}, `"own": false`}, {[]string{"rm", "cli"}, "cli"},
		} {
			if out := cli(step.args...); !strings.Contains(out, step.want) {
				t.Errorf("%q says %q, without %q", step.args, out, step.want)
			}
		}
	})
	t.Run("start that fails", func(t *testing.T) {
		end := buildStream(t, s, map[string]any{"name": "broken", "definition": "start = [\"bash\", \"-c\", \"echo no database; exit 9\"]\n[from]\ntemplate = \"web\"\n"})
		if end.State != "failed" || end.Step != "start" || !strings.Contains(end.Error.Message, "code 9") || !strings.Contains(end.Error.Message, "no database") {
			t.Errorf("the build ended as %+v", end)
		}
	})
	t.Run("step that fails", func(t *testing.T) {
		end := buildStream(t, s, map[string]any{"name": "broken", "definition": "[from]\ntemplate = \"base\"\n[[step]]\nrun = \"ls /nowhere\"\n"})
		if end.State != "failed" || end.Step != "run ls /nowhere" || end.Error.Code != "invalid_request" || !strings.Contains(end.Error.Message, "No such file") {
			t.Errorf("the build ended as %+v", end)
		}
		if err := s.Call(t.Context(), http.MethodGet, ownTemplates+"/broken", nil, nil); err == nil {
			t.Error("a failed build left a template")
		}
	})
	t.Run("one at a time, and its end", func(t *testing.T) {
		slow := map[string]any{"name": "slow", "definition": "[from]\ntemplate = \"base\"\n[[step]]\nrun = \"echo begun; sleep 1000\"\n"}
		var b buildEnd
		if err := s.Call(t.Context(), http.MethodPost, "/templates", slow, &b); err != nil || b.State != "running" {
			t.Fatalf("%+v, %v", b, err)
		}
		at := ownTemplates + "/builds/" + b.ID
		live.Eventually(t, time.Minute, "the step's output", func() bool {
			return s.Call(t.Context(), http.MethodGet, at, nil, &b) == nil && slices.Contains(b.Log, "begun")
		})
		var status *devserver.StatusError
		if err := s.Call(t.Context(), http.MethodPost, "/templates", slow, nil); !errors.As(err, &status) || status.Code != "conflict" {
			t.Errorf("a second build: %v", err)
		}
		if err := s.Call(t.Context(), http.MethodDelete, at, nil, nil); err != nil {
			t.Error(err)
		}
		live.Eventually(t, time.Minute, "the build's end", func() bool {
			return s.Call(t.Context(), http.MethodGet, at, nil, &b) == nil && b.State == "failed"
		})
	})
	t.Run("what a caller may not name", func(t *testing.T) {
		for definition, want := range map[string]string{
			"[from]\ntemplate = \"../base\"\n":                                                                     "name",
			"[from.oci]\nreference = \"127.0.0.1:1/x@sha256:" + strings.Repeat("0", 64) + "\"\n":                   "",
			"[from.oci]\narchive = \"../../../etc/passwd\"\ndigest = \"sha256:" + strings.Repeat("0", 64) + "\"\n": "",
			"nonsense = 1\n": "unknown key",
		} {
			end := buildStream(t, s, map[string]any{"name": "bad", "definition": definition})
			if end.State != "failed" || end.Error.Code == "internal" || !strings.Contains(end.Error.Message, want) {
				t.Errorf("%q ended as %+v", definition, end)
			}
			if strings.Contains(end.Error.Message, s.StateDir()) {
				t.Errorf("the error tells where the server keeps things: %s", end.Error.Message)
			}
		}
		end := buildStream(t, s, map[string]any{"name": "base", "definition": "description = \"mine\"\n"})
		if end.State != "failed" || end.Error.Code != "conflict" {
			t.Errorf("a template with a shared one's name ended as %+v", end)
		}
		end = buildStream(t, s, map[string]any{"name": "bad", "definition": "description = \"x\"\n", "files": []map[string]any{{"path": "../x", "content": ""}}})
		if end.State != "failed" || end.Error.Code != "invalid_request" {
			t.Errorf("a file outside ended as %+v", end)
		}
	})
}
