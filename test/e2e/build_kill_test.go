package e2e

import (
	"context"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"sandlot/internal/devserver"
	"sandlot/internal/template"
	"sandlot/internal/testenv"
	"sandlot/test/live"
)

// ownServer starts a server with a store of its own that has the base template. Its end checks that nothing is left.
func ownServer(t *testing.T, pool map[string]int) (*devserver.Server, *template.Store) {
	t.Helper()
	testenv.Root(t)
	base := testenv.Template(t, "base")
	dir := t.TempDir()
	hex := strings.TrimPrefix(base.Digest, "sha256:")
	refs := filepath.Join(filepath.Dir(filepath.Dir(base.Image)), "refs")
	for from, to := range map[string]string{
		base.Image:                               "blobs/sha256-" + hex + ".erofs",
		filepath.Join(refs, "base.json"):         "refs/base.json",
		filepath.Join(refs, "base@"+hex+".json"): "refs/base@" + hex + ".json",
	} {
		to = filepath.Join(dir, "store", to)
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			t.Fatal(err)
		}
		if os.Link(from, to) == nil {
			continue
		}
		if out, err := exec.Command("cp", "--reflink=auto", from, to).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	store, err := template.Open(filepath.Join(dir, "store"))
	if err != nil {
		t.Fatal(err)
	}
	state := filepath.Join(dir, "state")
	if err := os.Mkdir(state, 0o755); err != nil {
		t.Fatal(err)
	}
	s, err := devserver.Start(t.Context(), devserver.Config{
		Bin: filepath.Dir(testenv.Bin(t, "sandlot")), Templates: filepath.Join(dir, "store"), StateDir: state, Engine: "gvisor", Pool: pool,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Stop(); err != nil {
			t.Error(err)
		}
		bin := filepath.Dir(testenv.Bin(t, "sandlot"))
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if out, err := exec.CommandContext(ctx, filepath.Join(bin, "sandlot"), "reap", "--state-dir", state).CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
		if left, err := testenv.Owned(s.NodeDir()); err != nil || len(left) > 0 {
			t.Errorf("left on the host: %q, %v", left, err)
		}
	})
	return s, store
}

// TestKilledServerLeavesNoBuild kills a server while a step runs: the next one has no machine of it, no template, no
// definition, and builds again.
func TestKilledServerLeavesNoBuild(t *testing.T) {
	s, _ := ownServer(t, map[string]int{})
	req := map[string]any{"name": "half", "definition": "[from]\ntemplate = \"base\"\n[[step]]\nrun = \"echo begun; sleep 1000\"\n"}
	var b buildEnd
	if err := s.Call(t.Context(), http.MethodPost, "/templates", req, &b); err != nil {
		t.Fatal(err)
	}
	live.Eventually(t, 2*time.Minute, "the step's output", func() bool {
		return s.Call(t.Context(), http.MethodGet, ownTemplates+"/builds/"+b.ID, nil, &b) == nil && slices.Contains(b.Log, "begun")
	})
	if machines, err := os.ReadDir(filepath.Join(s.NodeDir(), "machines")); err != nil || len(machines) != 1 {
		t.Errorf("the step runs in %d machines, %v", len(machines), err)
	}
	s.Kill()
	if err := s.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{"machines", "build-cache/uploads"} {
		if left, err := os.ReadDir(filepath.Join(s.NodeDir(), dir)); len(left) > 0 {
			t.Errorf("%s has %v, %v", dir, left, err)
		}
	}
	if err := s.Call(t.Context(), http.MethodGet, ownTemplates+"/half", nil, nil); err == nil {
		t.Error("the killed build left a template")
	}
	end := buildStream(t, s, map[string]any{"name": "half", "definition": "[from]\ntemplate = \"base\"\n[[step]]\nrun = \"echo begun\"\n"})
	if end.State != "succeeded" {
		t.Errorf("the next build ended as %+v", end)
	}
}

// TestPoolFollowsTheStore builds a template with a start command into a store that a server reads: its pool has
// machines in which the command runs already, and goes on to each new version.
func TestPoolFollowsTheStore(t *testing.T) {
	s, store := ownServer(t, map[string]int{"web": 1})
	defs := t.TempDir()
	for _, hello := range []string{"one", "two"} {
		for p, content := range map[string]string{"template.toml": webTemplate, "web/hello.txt": hello} {
			p = filepath.Join(defs, "web", p)
			if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(p, []byte(content), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		built, err := template.Build(t.Context(), filepath.Join(defs, "web"), template.Options{CacheDir: filepath.Join(filepath.Dir(s.StateDir()), "cache"), Store: store})
		if err != nil {
			t.Fatal(err)
		}
		live.Eventually(t, 2*time.Minute, "a machine of version "+hello+" in the pool", func() bool {
			var list struct {
				Templates []struct {
					Name, Digest string
					Pool         struct{ Ready int }
				}
			}
			if err := s.Call(t.Context(), http.MethodGet, "/templates", nil, &list); err != nil {
				t.Fatal(err)
			}
			for _, tpl := range list.Templates {
				if tpl.Name == "web" && tpl.Digest == built.Digest && tpl.Pool.Ready == 1 {
					entries, err := os.ReadDir(filepath.Join(s.NodeDir(), "machines"))
					if err != nil || len(entries) == 0 {
						return false
					}
					record, _ := os.ReadFile(filepath.Join(s.NodeDir(), "machines", entries[0].Name(), "record.json"))
					return strings.Contains(string(record), built.Digest)
				}
			}
			return false
		})
		sb, err := s.Create(t.Context(), map[string]any{"template": "web"})
		if err != nil {
			t.Fatal(err)
		}
		if !sb.Timings.FromPool {
			t.Errorf("version %s: the sandbox is not from the pool", hello)
		}
		r, err := s.Exec(t.Context(), sb.ID, map[string]any{"cmd": `python3 -c "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8000/hello.txt').read().decode())"`})
		if err != nil || strings.TrimSpace(r.Stdout) != hello {
			t.Errorf("version %s: the server says %+v, %v", hello, r, err)
		}
		if err := s.Delete(t.Context(), sb.ID); err != nil {
			t.Error(err)
		}
	}
}
