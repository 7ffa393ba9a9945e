// Package e2e uses a real server as its documents say, with real sandboxes.
package e2e

import (
	"context"
	"encoding/json"
	"os/exec"
	"strings"
	"testing"
	"time"

	"sandlot/test/live"
)

func TestMain(m *testing.M) {
	live.Pool = map[string]int{"base": 2, "python-3.12": 1}
	live.Main(m)
}

// curl runs a documented line as a person would who pastes it, with their host, project and id in it.
func curl(t *testing.T, line, id string) map[string]any {
	t.Helper()
	s := live.Server(t)
	if _, err := exec.LookPath("curl"); err != nil {
		t.Skip("SKIP: needs curl")
	}
	all := s.URL + "/api/v1/projects/<ref>/sandboxes"
	line = strings.NewReplacer("https://host.ulewicz.space/api/v1/projects/<ref>/sandboxes", all, " .../sandboxes", " "+all).Replace(line)
	line = strings.NewReplacer("<ref>", "default", "<id>", id).Replace(line)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "bash", "-c", line)
	cmd.Env = append(cmd.Environ(), "HOSTBASE_TOKEN="+s.Token)
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s: %v", line, err)
	}
	var answer map[string]any
	if err := json.Unmarshal(out, &answer); err != nil {
		t.Fatalf("%s answered %q", line, out)
	}
	return answer
}

func TestQuickstart(t *testing.T) {
	made := curl(t, `curl -X POST https://host.ulewicz.space/api/v1/projects/<ref>/sandboxes \
  -H "Authorization: Bearer $HOSTBASE_TOKEN" -H "Content-Type: application/json" \
  -d '{"template":"python-3.12"}'`, "")
	id, _ := made["id"].(string)
	timings, _ := made["timings"].(map[string]any)
	if !strings.HasPrefix(id, "sbx") || made["state"] != "running" || timings["from_pool"] != true || timings["total_ms"] == nil {
		t.Fatalf("create: %v", made)
	}
	ran := curl(t, `curl -X POST .../sandboxes/<id>/exec -H "Authorization: Bearer $HOSTBASE_TOKEN" \
  -d '{"cmd":"python3 -c \"print(1+1)\""}'`, id)
	if ran["exit_code"] != 0.0 || ran["stdout"] != "2\n" || ran["stderr"] != "" {
		t.Errorf("exec: %v", ran)
	}
	gone := curl(t, `curl -X DELETE .../sandboxes/<id> -H "Authorization: Bearer $HOSTBASE_TOKEN"`, id)
	if gone["state"] != "stopped" || gone["reason"] != "deleted" {
		t.Errorf("delete: %v", gone)
	}
	if again := curl(t, `curl -X DELETE .../sandboxes/<id> -H "Authorization: Bearer $HOSTBASE_TOKEN"`, id); again["state"] != "stopped" {
		t.Errorf("second delete: %v", again)
	}
}

func TestTemplates(t *testing.T) {
	t.Parallel()
	python := live.New(t, map[string]any{"template": "python-3.12"})
	if got := python.Out(t, `python3 -c 'import sys, numpy, pandas; print(sys.version_info[:2], numpy.arange(5).sum(), pandas.Series([1, 2]).mean())'`); got != "(3, 12) 10 1.5" {
		t.Errorf("python-3.12 says %q", got)
	}
	base := live.New(t, nil)
	if got := base.Out(t, []string{"node", "-e", "console.log([1, 2, 3].map(x => x * 2).join())"}); got != "2,4,6" {
		t.Errorf("node says %q", got)
	}
	if got := base.Out(t, "python3 -c 'print(1+1)' && git --version | cut -d' ' -f1,2 && echo '{\"a\":7}' | jq .a"); got != "2\ngit version\n7" {
		t.Errorf("base says %q", got)
	}
	var list struct {
		Templates []struct {
			Name, Digest string
			Pool         struct{ Target int }
		}
	}
	if err := base.Call(t.Context(), "GET", "/templates", nil, &list); err != nil {
		t.Fatal(err)
	}
	names := map[string]int{}
	for _, tpl := range list.Templates {
		names[tpl.Name] = tpl.Pool.Target
	}
	if names["base"] != 2 || names["python-3.12"] != 1 {
		t.Errorf("templates: %v", list)
	}
}
