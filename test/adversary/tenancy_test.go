package adversary

import (
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sandlot/internal/devserver"
	"sandlot/internal/engine/gvisor"
	"sandlot/test/live"
)

// SandboxRoot/Lateral; item 32. Nothing of a sandbox that was deleted is in the ones that come after it, whether they were
// waiting in the pool or get a new disk.
func TestNothingIsLeftForTheNext(t *testing.T) {
	canary := secret()
	first := live.New(t, map[string]any{"env": map[string]string{"LEFT": canary}})
	first.Out(t, fmt.Sprintf(`
echo %[1]s | tee /workspace/c /tmp/c /home/user/c /dev/shm/c /var/tmp/c > /dev/null
sudo sh -c 'echo %[1]s | tee /etc/c /root/c /usr/lib/c >> /etc/passwd'
for i in $(seq 2000); do echo %[1]s; done > /workspace/many; cp /workspace/many /home/user/many; rm /workspace/many; sync
`, canary))
	first.Background(t, []string{"sleep", "60", canary})
	disk := filepath.Join(machineDir(first), "disk.img")
	live.Eventually(t, 20*time.Second, "control: the canary on the disk of the sandbox that wrote it", func() bool {
		unix.Sync()
		return scan(t, disk, canary)
	})
	if err := first.Delete(t.Context(), first.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(disk); !os.IsNotExist(err) {
		t.Errorf("the disk is still there: %v", err)
	}
	for what, in := range map[string]map[string]any{"pool": nil, "pool again": nil, "cold": {"disk_gb": 1}} {
		next := live.New(t, in)
		got := next.Run(t, fmt.Sprintf(`
grep -raIl --exclude-dir=proc --exclude-dir=sys -e %[1]s /workspace /tmp /home /root /etc /var /dev/shm /usr/lib 2>/dev/null
cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null | tr '\0' '\n' | grep -v 'grep\|bash\|cat' | grep -c '^LEFT=\|^%[1]s'
`, canary), live.Root, map[string]any{"timeout_s": 120})
		if strings.TrimSpace(got.Stdout) != "0" {
			t.Errorf("%s: the next sandbox shows %+v", what, got)
		}
		if got := next.Out(t, []string{"python3", "-c", "import mmap\nm = mmap.mmap(-1, 128 << 20)\nprint(m.read(128 << 20).count(0) == 128 << 20)"}); got != "True" {
			t.Errorf("%s: new memory is not zero", what)
		}
		unix.Sync()
		if scan(t, filepath.Join(machineDir(next), "disk.img"), canary) {
			t.Errorf("%s: the canary is on the next sandbox's disk", what)
		}
	}
}

// ApiUser/HostLeak; item 34. What may be a secret is in no log, no record, no metric and no event: values of variables
// are given to the machine and kept nowhere else, their names only; contents of files and output are the sandbox's.
func TestSecretsAreNotKept(t *testing.T) {
	b := live.New(t, nil)
	canaries := map[string]string{"the owner's token": b.Token}
	for _, what := range []string{"create env", "exec env", "file", "stdin", "command", "output", "header", "token", "background env", "query"} {
		canaries[what] = secret()
	}
	label := secret() // metadata is kept, and shown to whoever may list
	box := live.New(t, map[string]any{
		"env": map[string]string{"TOKEN": canaries["create env"]}, "metadata": map[string]string{"label": label}, "disk_gb": 1,
	})
	if got := box.Out(t, "echo $TOKEN $OTHER; cat", map[string]any{"env": map[string]string{"OTHER": canaries["exec env"]}, "stdin": canaries["stdin"]}); !strings.Contains(got, canaries["create env"]) {
		t.Fatalf("control: inside, the variables are %q", got)
	}
	box.Put(t, "secret.txt", []byte(canaries["file"]))
	_ = box.Read(t, "secret.txt")
	box.Out(t, "true "+canaries["command"]+"; echo "+canaries["output"])
	_, _ = box.Try(t, "echo "+canaries["output"]+" >&2; kill -9 $$")
	box.Background(t, []string{"sleep", "30"}, map[string]any{"env": map[string]string{"K": canaries["background env"]}})
	for _, bad := range []string{`{"env":{"A=B":"` + canaries["exec env"] + `"},"cmd":"true"}`, `{"cmd":["true"],"stdin":"` + canaries["stdin"] + `","user":"0:0"}`, `{"cmd":"` + canaries["command"], `{"token":"` + canaries["token"] + `"}`} {
		_, err := box.Do(t.Context(), http.MethodPost, "/exec", []byte(bad))
		refused(t, "a bad request", err, 400)
	}
	for _, auth := range []string{"Bearer " + canaries["token"], "Basic " + canaries["token"], canaries["token"]} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, b.URL+"/api/v1/projects/default/sandboxes/"+box.ID+"?token="+canaries["query"], nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", auth)
		req.Header.Set("Cookie", "session="+canaries["header"])
		req.Header.Set("X-Api-Key", canaries["header"])
		resp, err := b.HTTP.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusUnauthorized {
			t.Errorf("status %d for a wrong token", resp.StatusCode)
		}
	}
	var events, metrics string
	if out, err := box.Do(t.Context(), http.MethodGet, "/logs", nil); err == nil {
		events = string(out)
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, b.URL+"/metrics", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+b.Token)
	if resp, err := b.HTTP.Do(req); err == nil {
		out, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		metrics = string(out)
	}
	kept := map[string]string{"server log": b.Log(), "event log": events, "metrics": metrics}
	// Everything below the state directory and the run directory, but the disks, which are the sandboxes'.
	for _, root := range []string{b.StateDir(), gvisor.RunDir(b.NodeDir())} {
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil {
				return nil //nolint:nilerr // it has just gone
			}
			if d.IsDir() && d.Name() == "disk" {
				return fs.SkipDir
			}
			if fi, err := d.Info(); err != nil || fi.Size() > 16<<20 {
				return nil //nolint:nilerr // a disk, or gone
			}
			if d.Type().IsRegular() && d.Name() != "agent" && d.Name() != "owner.token" {
				content, err := os.ReadFile(path)
				if err == nil {
					kept[path] = string(content)
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for where, content := range kept {
		for what, canary := range canaries {
			if strings.Contains(content, canary) {
				t.Errorf("%s is in the %s", what, where)
			}
		}
	}
	database := ""
	for where, content := range kept {
		if strings.Contains(filepath.Base(where), "sandlot.db") {
			database += content
		}
	}
	if !strings.Contains(database, label) || !strings.Contains(database, "TOKEN") || !strings.Contains(kept["server log"], box.ID) || !strings.Contains(events, "running") || !strings.Contains(metrics, "sandlot_") {
		t.Error("control: what is kept was not found where it is kept")
	}
}

// SandboxRoot/Exfil; items 20, 21 and 26 in small: this version has no way out at all, and says so at once.
func TestNetworkIsClosed(t *testing.T) {
	b := live.New(t, nil)
	s := b.Server
	got := b.Out(t, []string{"python3", "-c", `
import socket, sys, threading, time
server = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=lambda: server.accept()[0].send(b"own"), daemon=True).start()
print(socket.create_connection(server.getsockname(), 5).recv(10).decode())
for host, port in (("1.1.1.1", 53), ("169.254.169.254", 80), ("10.0.0.1", 22), ("127.0.0.1", int(sys.argv[1])), ("172.17.0.1", int(sys.argv[1]))):
    begun = time.time()
    try: socket.create_connection((host, port), 20); print("connected to", host)
    except OSError: print("no" if time.time() - begun < 5 else "slow")
    u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try: u.sendto(b"x", (host, port)); print("sent" if not host.startswith("127.") else "no")
    except OSError: print("no")
begun = time.time()
try: socket.getaddrinfo("example.com", 80); print("resolved")
except OSError: print("no" if time.time() - begun < 10 else "slow")
try: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); print("raw")
except OSError: print("no")
`, strings.TrimPrefix(s.URL[strings.LastIndex(s.URL, ":"):], ":")}, live.Root)
	if got != "own\n"+strings.TrimSpace(strings.Repeat("no\n", 12)) {
		t.Errorf("from inside (control: its own server answers): %q", got)
	}
	if got := b.Out(t, "tail -n +2 /proc/net/route", live.Root); got != "" {
		t.Errorf("there is a route: %q", got)
	}
	nsenter, err := exec.LookPath("nsenter")
	if err != nil {
		t.Skip("SKIP: needs nsenter")
	}
	out, err := exec.CommandContext(t.Context(), nsenter, "--net="+filepath.Join(runDir(b), "netns"), "cat", "/proc/net/dev").CombinedOutput() //nolint:gosec // our own paths
	if err != nil {
		t.Fatalf("nsenter: %v: %s", err, out)
	}
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	if len(lines) != 3 || !strings.HasPrefix(strings.TrimSpace(lines[2]), "lo:") {
		t.Fatalf("the sandbox's network namespace on the host: %s", out)
	}
	if f := strings.Fields(lines[2]); f[2] != "0" || f[10] != "0" {
		t.Errorf("packets were seen on the host's side: %s", lines[2])
	}
}

// ApiUser/Lateral; items 28 and 30 on the real server: another project's token learns nothing of a sandbox.
func TestAnotherProject(t *testing.T) {
	b := live.New(t, nil)
	token := func(role string, scopes ...string) string {
		var out struct{ Token string }
		call(t, b.Server, b.Token, http.MethodPost, "/api/v1/tokens", map[string]any{"name": "t" + role, "project": "stranger", "role": role, "scopes": scopes}, &out)
		if out.Token == "" {
			t.Fatal("no token was made")
		}
		return out.Token
	}
	call(t, b.Server, b.Token, http.MethodPost, "/api/v1/projects", map[string]any{"ref": "stranger"}, nil)
	stranger := token("developer", "sandboxes:*")
	var own struct{ ID string }
	if status := call(t, b.Server, stranger, http.MethodPost, "/api/v1/projects/stranger/sandboxes", map[string]any{"template": "base"}, &own); status != http.StatusCreated {
		t.Fatalf("control: its own sandbox: %d", status)
	}
	defer call(t, b.Server, stranger, http.MethodDelete, "/api/v1/projects/stranger/sandboxes/"+own.ID, nil, nil)
	for _, project := range []string{"stranger", "default"} {
		for _, op := range [][2]string{{"GET", ""}, {"DELETE", ""}, {"POST", "/exec"}, {"GET", "/files/list"}, {"GET", "/logs"}, {"GET", "/metrics"}, {"POST", "/timeout"}, {"GET", "/processes"}} {
			body := map[string]any{"cmd": "true"}
			if op[1] == "/timeout" {
				body = map[string]any{"lifetime_s": 60}
			}
			path := "/api/v1/projects/" + project + "/sandboxes/" + b.ID + op[1]
			if status := call(t, b.Server, stranger, op[0], path, body, nil); status != http.StatusNotFound && (project == "stranger" || status != http.StatusForbidden) {
				t.Errorf("%s %s with another project's token: %d", op[0], path, status)
			}
		}
	}
	answers(t, b, "after a stranger's calls")
}

// call sends a request with a token and returns the status.
func call(t *testing.T, s *devserver.Server, token, method, path string, in, out any) int {
	t.Helper()
	status, err := send(t.Context(), s, token, method, path, in, out)
	if err != nil {
		t.Fatal(err)
	}
	return status
}
