package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"sandlot"
	"sandlot/internal/engine"
	"sandlot/internal/engine/memory"
	"sandlot/internal/node"
)

// oneTemplate is a template store for the memory engine, which needs no image.
type oneTemplate struct{}

func (oneTemplate) List() ([]sandlot.Template, error) {
	return []sandlot.Template{{
		Name: "base", Digest: "sha256:" + strings.Repeat("0", 64), Kernels: []string{"python"}, Size: sandlot.DefaultSize, BuiltAt: time.Now(),
	}}, nil
}

func (o oneTemplate) Get(ref string) (sandlot.Template, error) {
	all, _ := o.List()
	if ref != all[0].Name {
		return sandlot.Template{}, sandlot.Errorf(sandlot.CodeNotFound, "there is no template %q", ref)
	}
	return all[0], nil
}

// TestAgainstTheServer goes through the commands with the server itself, on the memory engine: what the
// fake API of the other tests promises is what the server does.
func TestAgainstTheServer(t *testing.T) {
	ctx, stop := context.WithCancel(t.Context())
	log := slog.New(slog.DiscardHandler)
	host := node.NewHost(node.Config{Engines: []engine.Engine{memory.New(t.TempDir())}, Templates: oneTemplate{}, MemoryFloor: 1, Log: log})
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := apiConfig{config: defaultConfig(), Data: t.TempDir()}
	c.StopTimeout = duration(time.Second)
	owner := make(chan sandlot.Secret, 1)
	served := make(chan error, 1)
	go func() {
		served <- runAPI(ctx, c, host, ln, log, func(s sandlot.Secret) error { owner <- s; return nil })
	}()
	defer func() {
		stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
		host.Close()
	}()
	select {
	case s := <-owner:
		t.Setenv("SANDLOT_TOKEN", s.Reveal())
	case err := <-served:
		t.Fatal(err)
	}
	t.Setenv("SANDLOT_URL", "http://"+ln.Addr().String())
	t.Setenv("SANDLOT_PROJECT", "default")
	cli := func(in string, args ...string) (int, string, string) {
		var out, errs bytes.Buffer
		code := run(t.Context(), args, &streams{strings.NewReader(in), &out, &errs})
		return code, out.String(), errs.String()
	}
	want := func(out, in string, args ...string) {
		t.Helper()
		if code, got, errs := cli(in, args...); code != 0 || !strings.Contains(got, out) {
			t.Errorf("%v: exit %d, %.200q, %q", args, code, got, errs)
		}
	}
	var id string
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(20 * time.Millisecond) { // until it has started
		code, out, errs := cli("", "sandbox", "create", "-m", "team=a", "-e", "A=1", "--idle-timeout", "10m")
		if id = strings.TrimSpace(out); code == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal(errs)
		}
	}
	want(id, "", "sandbox", "ls", "-m", "team=a")
	want(id, "", "sandbox", "get", id)
	want("1 x\n", "", "sandbox", "exec", id, "-e", "B=x", "--", "bash", "-c", "echo $A $B")
	want("in", "in", "sandbox", "exec", "-i", id, "--", "cat")
	want("a\xffb", "", "sandbox", "exec", id, `printf 'a\377b'`)
	if code, out, errs := cli("", "sandbox", "exec", id, "echo out; echo err >&2; exit 7"); code != 7 || out != "out\n" || errs != "err\n" {
		t.Errorf("exec: %d, %q, %q", code, out, errs)
	}
	if code, _, errs := cli("", "sandbox", "exec", id, "--timeout", "1s", "--", "sleep", "60"); code != 124 {
		t.Errorf("a command out of its time: exit %d, %q", code, errs)
	}
	want("7\n'a'\n", "x = 7; print(x)\n'a'", "sandbox", "run-code", id)
	want("8\n", "x + 1", "sandbox", "run-code", id, "-c", "default")
	pictures := filepath.Join(t.TempDir(), "made")
	want("one\n", `display({"text/plain": "one", "image/png": "iVBORw=="}, raw=True)`, "sandbox", "run-code", "--out", pictures, id)
	if b, err := os.ReadFile(filepath.Join(pictures, "result-1.png")); err != nil || string(b) != "\x89PNG" {
		t.Errorf("a picture: %q, %v", b, err)
	}
	if code, out, errs := cli("1/0", "sandbox", "run-code", id); code != 1 || out != "" || !strings.Contains(errs, "ZeroDivisionError: division by zero") {
		t.Errorf("code that fails: exit %d, %q, %q", code, out, errs)
	}
	if code, out, errs := cli("echo out; exit 3", "sandbox", "run-code", "-l", "bash", "--json", id); code != 1 || !strings.Contains(out, "exit status 3") {
		t.Errorf("code that fails, as JSON: exit %d, %q, %q", code, out, errs)
	}
	big := strings.Repeat("0123456789abcdef", 1<<18) // 4 MiB
	want("", big, "sandbox", "cp", "-", id+":big")
	if code, out, errs := cli("", "sandbox", "cp", id+":big", "-"); code != 0 || out != big {
		t.Errorf("cp of 4 MiB back: exit %d, %d bytes, %q", code, len(out), errs)
	}
	here := t.TempDir()
	write(t, filepath.Join(here, "tree", "sub", "run.sh"), "#!/bin/sh\necho ran\n", 0o755)
	write(t, filepath.Join(here, "tree", "empty"), "", 0o644)
	want("", "", "sandbox", "cp", here+"/tree", id+":tree")
	want("", "", "sandbox", "cp", here+"/tree/sub/run.sh", id+":one.sh")
	want("ran\nran\n", "", "sandbox", "exec", id, "tree/sub/run.sh; ./one.sh")
	want("", "", "sandbox", "cp", id+":tree", here+"/back")
	if fi, err := os.Stat(filepath.Join(here, "back", "sub", "run.sh")); err != nil || fi.Mode() != fs.FileMode(0o755) {
		t.Errorf("back: %v, %v", fi, err)
	}
	_, out, _ := cli("", "sandbox", "exec", "-d", "--json", id, "sleep 60")
	var started struct{ PID json.Number }
	if err := json.Unmarshal([]byte(out), &started); err != nil {
		t.Fatalf("%v: %q", err, out)
	}
	want("sleep", "", "sandbox", "ps", id)
	want("", "", "sandbox", "kill", id, started.PID.String(), "-s", "KILL")
	want("10m0s", "", "sandbox", "timeout", id, "--idle", "10m")
	want("lifecycle", "", "sandbox", "logs", id)
	want("CPU", "", "sandbox", "metrics", id, "--since", "1m")
	want("base", "", "template", "ls")
	want("", "", "token", "create", "ci", "--scope", "sandboxes:read", "--expires", "1h")
	want("ci", "", "token", "ls")
	want("7 9\n", "", "sandbox", "run", "-e", "X=7", "--", `echo $X $((X + 2))`)
	want(id, "", "sandbox", "rm", id)
	want("stopped (deleted)", "", "sandbox", "ls", "--all")
	if code, _, errs := cli("", "sandbox", "exec", id, "true"); code != 1 || !strings.Contains(errs, "the sandbox is stopped (sandbox_not_running, request ") {
		t.Errorf("after its end: exit %d, %q", code, errs)
	}
}
