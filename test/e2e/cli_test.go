package e2e

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"sandlot/internal/testenv"
	"sandlot/test/live"
)

func TestCommandLine(t *testing.T) {
	t.Parallel()
	s := live.Server(t)
	bin := testenv.Bin(t, "sandlot")
	cli := func(stdin string, args ...string) (string, int) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, bin, args...) //nolint:gosec // our own
		cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "SANDLOT_URL=" + s.URL, "SANDLOT_TOKEN=" + s.Token, "SANDLOT_PROJECT=default"}
		cmd.Stdin = strings.NewReader(stdin)
		var stderr strings.Builder
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if cmd.ProcessState == nil {
			t.Fatal(err)
		}
		if stderr.Len() > 0 {
			t.Logf("%v: %s", args, stderr.String())
		}
		return strings.TrimSpace(string(out)), cmd.ProcessState.ExitCode()
	}
	if out, code := cli("", "sandbox", "run", "--template", "base", "echo $((40+2)); exit 5"); out != "42" || code != 5 {
		t.Errorf("run: %q, %d", out, code)
	}
	id, code := cli("", "sandbox", "create", "--template", "base")
	if code != 0 || !strings.HasPrefix(id, "sbx") {
		t.Fatalf("create: %q, %d", id, code)
	}
	defer func() {
		if _, code := cli("", "sandbox", "rm", id); code != 0 {
			t.Error("rm:", code)
		}
	}()
	if out, code := cli("typed", "sandbox", "exec", "-i", id, "tr", "a-z", "A-Z"); out != "TYPED" || code != 0 {
		t.Errorf("exec: %q, %d", out, code)
	}
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "src/sub"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "src/sub/file"), []byte("there and back"), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, code := cli("", "sandbox", "cp", filepath.Join(dir, "src"), id+":copied"); code != 0 {
		t.Fatalf("cp in: %q, %d", out, code)
	}
	if out, code := cli("", "sandbox", "cp", id+":copied", filepath.Join(dir, "back")); code != 0 {
		t.Fatalf("cp out: %q, %d", out, code)
	}
	if got, err := os.ReadFile(filepath.Join(dir, "back/sub/file")); err != nil || string(got) != "there and back" {
		t.Errorf("copied: %q, %v", got, err)
	}
	if out, _ := cli("", "sandbox", "ls"); !strings.Contains(out, id) {
		t.Errorf("ls: %q", out)
	}
	if out, code := cli("", "sandbox", "exec", "sbx00000000000000000000", "true"); code == 0 {
		t.Errorf("exec in no sandbox: %q", out)
	}
}
