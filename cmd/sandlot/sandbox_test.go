package main

import (
	"encoding/json"
	"net"
	"slices"
	"strings"
	"testing"
)

func TestSandboxCommands(t *testing.T) {
	f := newFakeAPI(t)
	t.Setenv("HOME_OF", "x")
	code, out, errs := f.cli("", "sandbox", "create", "-t", "base", "--vcpu", "2", "--memory-mb", "512", "--disk-gb", "3",
		"--idle-timeout", "5m", "--lifetime", "1h", "-e", "A=1;B=2,3", "-e", "HOME_OF", "-m", "team=a", "--name", "n", "--isolation", "gvisor",
		"--egress", "pypi.org,*.example.com")
	first := strings.TrimSpace(out)
	if code != 0 || !strings.HasPrefix(first, "sbx") || strings.Contains(first, "\n") || !strings.Contains(errs, "4.2 ms (pool)") {
		t.Fatalf("create: %d, %q, %q", code, out, errs)
	}
	got, _ := json.Marshal(f.alive[first])
	want := `{"template":"base","name":"n","vcpu":2,"memory_mb":512,"disk_gb":3,"idle_timeout_s":300,"lifetime_s":3600,` +
		`"env":{"A":"1;B=2,3","HOME_OF":"x"},"metadata":{"team":"a"},"egress":{"mode":"allowlist","hosts":["pypi.org","*.example.com"]},"isolation":"gvisor"}`
	if string(got) != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	second := f.sandbox()

	for _, tt := range []struct {
		args []string
		code int
		out  []string // all contained
		errs string
	}{
		{[]string{"ls"}, 0, []string{"ID", first, second, "2 vCPU"}[:3], ""},
		{[]string{"list", "--all", "-m", "team=a"}, 0, []string{first}, ""},
		{[]string{"get", first}, 0, []string{first, "running", "5m0s", "label team"}, ""},
		{[]string{"ps", first}, 0, []string{"sleep \uFFFD[2J9"}, ""},
		{[]string{"kill", first, "7", "-s", "KILL"}, 0, nil, ""},
		{[]string{"logs", first}, 0, []string{"created", "source=pool"}, ""},
		{[]string{"metrics", first, "--since", "10m"}, 0, []string{"12%", "3.0 MiB"}, ""},
		{[]string{"timeout", first, "--idle", "10m"}, 0, []string{"10m0s"}, ""},
		{[]string{"timeout", first}, 1, nil, "say --idle, --lifetime or both"},
		{[]string{"get", "sbxnone"}, 1, nil, "no such sandbox (not_found, request req7)"},
		{[]string{"rm"}, 1, nil, "say which"},
		{[]string{"rm", "--all", first}, 1, nil, "not both"},
		{[]string{"create", "-m", "novalue"}, 1, nil, "K=V"},
		{[]string{"create", "--vcpu", "x"}, 2, nil, "--vcpu"},
		{[]string{"nonsense"}, 2, nil, "sandlot --help"},
	} {
		code, out, errs := f.cli("", append([]string{"sandbox"}, tt.args...)...)
		for _, s := range tt.out {
			if !strings.Contains(out, s) {
				t.Errorf("%v: %q is not in %q", tt.args, s, out)
			}
		}
		if code != tt.code || !strings.Contains(errs, tt.errs) {
			t.Errorf("%v: exit %d, %q", tt.args, code, errs)
		}
	}
	if !slices.Equal(f.signals, []string{"7 KILL"}) {
		t.Errorf("signals %v", f.signals)
	}
	if code, out, errs := f.cli("", "sandbox", "rm", second, "sbxnone"); code != 1 || out != second+"\n" || !strings.Contains(errs, "sbxnone: no such sandbox") {
		t.Errorf("rm of one that is not there: %d, %q, %q", code, out, errs)
	}
	f.sandbox()
	if code, _, errs := f.cli("", "sandbox", "rm", "--all"); code != 0 || len(f.alive) != 0 {
		t.Errorf("rm --all: %d, %q, left %v", code, errs, f.alive)
	}
}

// TestJSON: with --json every command prints JSON and nothing else on stdout.
func TestJSON(t *testing.T) {
	f := newFakeAPI(t)
	id := f.sandbox()
	for _, args := range [][]string{
		{"sandbox", "create", "--json"},
		{"sandbox", "ls", "--json"},
		{"sandbox", "ls", "--json", "-m", "team=nobody"},
		{"sandbox", "get", id, "--json"},
		{"sandbox", "ps", id, "--json"},
		{"sandbox", "logs", id, "--json"},
		{"sandbox", "metrics", id, "--json"},
		{"sandbox", "timeout", id, "--idle", "10m", "--json"},
		{"sandbox", "exec", "-d", "--json", id, "true"},
		{"sandbox", "cp", "client_test.go", id + ":x", "--json"},
		{"template", "ls", "--json"},
		{"token", "ls", "--json"},
		{"token", "create", "ci", "--json"},
		{"token", "revoke", "tok1", "--json"},
		{"sandbox", "rm", id, "--json"},
		{"doctor", "--json"},
	} {
		code, out, errs := f.cli("", args...)
		if !json.Valid([]byte(out)) || errs != "" || code != 0 && args[0] != "doctor" {
			t.Errorf("%v: exit %d, %q, %q", args, code, out, errs)
		}
	}
}

func TestTokensAndTemplates(t *testing.T) {
	f := newFakeAPI(t)
	code, out, errs := f.cli("", "token", "create", "ci", "--role", "readonly", "--scope", "sandboxes:read", "--expires", "24h")
	if code != 0 || out != "sbt_secret\n" || !strings.Contains(errs, "tok3, readonly, sandboxes:read") {
		t.Errorf("create: %d, %q, %q", code, out, errs)
	}
	if _, out, _ = f.cli("", "token", "ls"); !strings.Contains(out, "revoked 0s ago") || !strings.Contains(out, "valid") {
		t.Errorf("ls: %q", out)
	}
	if code, _, errs := f.cli("", "token", "revoke", "tok1", "tok9"); code != 1 || !strings.Contains(errs, "tok9: no such token") || len(f.revoked) != 1 {
		t.Errorf("revoke: %d, %q", code, errs)
	}
	if _, out, _ = f.cli("", "template", "ls"); !strings.Contains(out, "0123456789ab") || !strings.Contains(out, "2 of 3") {
		t.Errorf("template ls: %q", out)
	}
}

func TestClientErrors(t *testing.T) {
	f := newFakeAPI(t)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	free := "http://" + ln.Addr().String()
	ln.Close()
	for _, tt := range []struct {
		args []string
		want string
	}{
		{[]string{"--token", "wrong"}, "the token is not valid (unauthorized, request req7)"},
		{[]string{"--project", "other"}, "no such project (not_found, request req7)"},
		{[]string{"--url", free}, "./dev up"},
		{[]string{"--url", "localhost"}, "http://HOST:PORT"},
	} {
		code, out, errs := f.cli("", append([]string{"sandbox", "ls"}, tt.args...)...)
		if code != 1 || out != "" || !strings.Contains(errs, tt.want) || strings.Contains(errs, "wrong") {
			t.Errorf("%v: exit %d, %q", tt.args, code, errs)
		}
	}
	for _, name := range []string{"SANDLOT_URL", "SANDLOT_TOKEN", "SANDLOT_PROJECT"} {
		t.Run(name, func(t *testing.T) {
			f.cli("", "--version") // sets the environment
			t.Setenv(name, "")
			var out, errs strings.Builder
			code := run(t.Context(), []string{"sandbox", "ls"}, &streams{strings.NewReader(""), &out, &errs})
			if code != 1 || !strings.Contains(errs.String(), name+" is not set: run `source .sandlot/env`") {
				t.Errorf("exit %d, %q", code, errs.String())
			}
		})
	}
}

// TestHelpShowsNoSecret: the token comes from the environment and appears nowhere.
func TestHelpShowsNoSecret(t *testing.T) {
	f := newFakeAPI(t)
	for _, args := range [][]string{{"--help"}, {"sandbox", "--help"}, {"sandbox", "ls", "--help"}, {"token", "create", "--help"}, {"sandbox", "ls", "--nonsense"}} {
		if _, out, errs := f.cli("", args...); strings.Contains(out+errs, testToken) {
			t.Errorf("%v shows the token: %q", args, out+errs)
		}
	}
}

// TestIDsStayOneSegment: an id from a script cannot become another path.
func TestIDsStayOneSegment(t *testing.T) {
	f := newFakeAPI(t)
	f.sandbox()
	for _, id := range []string{"../tokens", "..", ".", "a/b", "x?all=1", "%2e%2e", ""} {
		if code, out, _ := f.cli("", "sandbox", "rm", id); code == 0 || out != "" || len(f.deleted) > 0 {
			t.Errorf("rm %q: exit %d, %q", id, code, out)
		}
	}
}
