package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/alecthomas/kong"

	"sandlot/internal/hostos"
)

// TestDoctor runs it on this host, whatever that is.
func TestDoctor(t *testing.T) {
	var out, errs strings.Builder
	s := &streams{strings.NewReader(""), &out, &errs}
	code := run(t.Context(), []string{"doctor", "--json"}, s)
	var d diagnosis
	if err := json.Unmarshal([]byte(out.String()), &d); err != nil {
		t.Fatalf("%v: %q %q", err, out.String(), errs.String())
	}
	failed := false
	for _, f := range d.Checks {
		if !slices.Contains([]string{statusOK, statusWarn, statusFail}, f.Status) || f.Name == "" || f.Detail == "" || f.For == "" {
			t.Errorf("incomplete: %+v", f)
		}
		if f.Status != statusOK && f.Fix == "" {
			t.Errorf("no fix: %+v", f)
		}
		failed = failed || f.Status == statusFail
	}
	if d.OK == failed || (code == 1) != failed || len(d.Checks) < 15 {
		t.Errorf("exit %d, ok %v, %d checks, failed %v", code, d.OK, len(d.Checks), failed)
	}
	out.Reset()
	if run(t.Context(), []string{"doctor"}, s) != code || !strings.Contains(out.String(), "This host can") {
		t.Errorf("for people: %q", out.String())
	}
	if !strings.Contains(out.String(), "runsc is not there") || code != 1 { // beside the test's binary there is none
		t.Errorf("a missing runsc: exit %d, %q", code, out.String())
	}
}

func TestLeftovers(t *testing.T) {
	state := t.TempDir()
	machines := filepath.Join(state, "node", "machines")
	self, err := hostos.FindProcess(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	dead := self
	dead.Start++ // the pid was reused
	old := time.Now().Add(-time.Hour)
	for name, record := range map[string]any{
		"sbxalive":  map[string]any{"sandbox": self},
		"sbxdead":   map[string]any{"sandbox": dead},
		"sbxhalf":   nil,
		"sbxbroken": "no record",
		"not-ours":  nil,
	} {
		dir := filepath.Join(machines, name)
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if record != nil {
			b, _ := json.Marshal(record)
			write(t, filepath.Join(dir, "record.json"), string(b), 0o600)
		}
		if err := os.Chtimes(dir, old, old); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(machines, "sbxfresh"), 0o700); err != nil {
		t.Fatal(err)
	}
	got, err := leftovers(state, time.Now())
	var ids []string
	for _, l := range got {
		ids = append(ids, l.ID)
	}
	if want := []string{"sbxbroken", "sbxdead", "sbxhalf"}; err != nil || !slices.Equal(ids, want) {
		t.Errorf("got %v, %v; want %v", ids, err, want)
	}
	var out, errs strings.Builder
	run(t.Context(), []string{"doctor", "--state-dir", state}, &streams{strings.NewReader(""), &out, &errs})
	if !strings.Contains(out.String(), "machine sbxdead has no process") {
		t.Errorf("%q %q", out.String(), errs.String())
	}
	if got, err := leftovers(t.TempDir(), time.Now()); got != nil || err != nil {
		t.Errorf("an empty state directory: %v, %v", got, err)
	}
}

func TestAtLeast(t *testing.T) {
	for release, want := range map[string]bool{"6.1.0-13-amd64": true, "5.8": true, "5.7.19": false, "4.19.0": false, "nonsense": false} {
		if atLeast(release, 5, 8) != want {
			t.Errorf("%s: want %v", release, want)
		}
	}
}

// TestCompletion: the scripts are made of the commands that exist, and shells that are here read them.
func TestCompletion(t *testing.T) {
	for _, shell := range []string{"bash", "zsh", "fish"} {
		var out, errs strings.Builder
		if code := run(t.Context(), []string{"completion", shell}, &streams{strings.NewReader(""), &out, &errs}); code != 0 {
			t.Fatalf("%s: exit %d, %q", shell, code, errs.String())
		}
		for _, w := range []string{"sandbox", "create", "memory-mb", "doctor", "completion"} {
			if !strings.Contains(out.String(), w) {
				t.Errorf("%s: no %q", shell, w)
			}
		}
		if strings.Contains(out.String(), "serve-api") {
			t.Errorf("%s: a hidden command shows", shell)
		}
		path, err := exec.LookPath(shell)
		if err != nil {
			t.Logf("%s is not here: its script was not parsed", shell)
			continue
		}
		cmd := exec.CommandContext(t.Context(), path, "-n")
		cmd.Stdin = strings.NewReader(out.String())
		if msg, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%s -n: %v: %s", shell, err, msg)
		}
	}
	if code := run(t.Context(), []string{"completion", "tcsh"}, &streams{strings.NewReader(""), &strings.Builder{}, &strings.Builder{}}); code != 2 {
		t.Errorf("an unknown shell: exit %d", code)
	}
}

// TestBashCompletes asks bash itself.
func TestBashCompletes(t *testing.T) {
	bash, err := exec.LookPath("bash")
	if err != nil {
		t.Skip("bash is not here")
	}
	var c cli
	p, err := kong.New(&c, kong.Vars{"version": version})
	if err != nil {
		t.Fatal(err)
	}
	var script strings.Builder
	if err := writeCompletion(&script, "bash", p.Model.Node); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		line   string
		want   string // one of the replies
		absent string
	}{
		{"sandlot sand", "sandbox", "token"},
		{"sandlot sandbox cr", "create", "exec"},
		{"sandlot sandbox --url http://x cr", "create", "exec"},
		{"sandlot sandbox create --mem", "--memory-mb", "--all"},
		{"sandlot sandbox create --js", "--json", "--all"},
		{"sandlot sandbox create --template ", "", "create"},
		{"sandlot completion z", "zsh", "bash"},
		{"sandlot sandbox exec x -- l", "", "ls"},
		{"sandlot token ", "revoke", "exec"},
	} {
		words := strings.Split(tt.line, " ")
		quoted := make([]string, len(words))
		for i, w := range words {
			quoted[i] = quoteShell(w)
		}
		src := script.String() + "COMP_WORDS=(" + strings.Join(quoted, " ") + "); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _sandlot; printf '%s\\n' \"${COMPREPLY[@]}\"\n"
		cmd := exec.CommandContext(t.Context(), bash, "--norc", "--noprofile")
		cmd.Stdin = strings.NewReader(src)
		got, err := cmd.CombinedOutput()
		replies := strings.Fields(string(got))
		if err != nil || tt.want != "" && !slices.Contains(replies, tt.want) || tt.want == "" && len(replies) > 0 || slices.Contains(replies, tt.absent) {
			t.Errorf("%q: %q, %v", tt.line, replies, err)
		}
	}
}
