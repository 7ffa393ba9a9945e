package template_test

import (
	"bytes"
	"context"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"sandlot/internal/engine"
	"sandlot/internal/engine/gvisor"
	"sandlot/internal/template"
	"sandlot/internal/testenv"
)

// boxed has what a build in sandboxes needs, and fails the test on what it leaves.
type boxed struct {
	t     *testing.T
	defs  string
	cache string
	store *template.Store
	eng   *gvisor.Engine
	log   bytes.Buffer
}

func newBoxed(t *testing.T) *boxed {
	t.Helper()
	testenv.Root(t)
	base := testenv.Template(t, "base")
	dir := t.TempDir()
	b := &boxed{t: t, defs: filepath.Join(dir, "defs"), cache: filepath.Join(dir, "cache")}
	// A store of its own, with the base template in it.
	for _, d := range []string{"store/blobs", "store/refs", "state"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	hex := strings.TrimPrefix(base.Digest, "sha256:")
	refs := filepath.Join(filepath.Dir(filepath.Dir(base.Image)), "refs")
	for from, to := range map[string]string{
		base.Image:                               "store/blobs/sha256-" + hex + ".erofs",
		filepath.Join(refs, "base.json"):         "store/refs/base.json",
		filepath.Join(refs, "base@"+hex+".json"): "store/refs/base@" + hex + ".json",
	} {
		if out, err := exec.Command("cp", "--reflink=auto", from, filepath.Join(dir, to)).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	var err error
	if b.store, err = template.Open(filepath.Join(dir, "store")); err != nil {
		t.Fatal(err)
	}
	state := filepath.Join(dir, "state")
	b.eng, err = gvisor.New(t.Context(), gvisor.Config{StateDir: state, Runsc: testenv.Bin(t, "runsc"), Agent: testenv.Bin(t, "sandlot-agent"), FreeFloor: 1 << 30})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if left, err := b.eng.List(context.Background()); err != nil || len(left) > 0 {
			t.Errorf("builds left machines: %v, %v", left, err)
		}
		if err := b.eng.Remove(context.Background()); err != nil {
			t.Error(err)
		}
		if left := testenv.Census(t, state); len(left) > 0 {
			t.Errorf("builds left on this host: %v", left)
		}
	})
	return b
}

// build writes and builds a definition.
func (b *boxed) build(name, text string, files map[string]string) (string, error) {
	b.t.Helper()
	dir := filepath.Join(b.defs, name)
	if files == nil {
		files = map[string]string{}
	}
	files["template.toml"] = text
	for p, content := range files {
		p = filepath.Join(dir, p)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			b.t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(content), 0o644); err != nil {
			b.t.Fatal(err)
		}
	}
	b.log.Reset()
	tpl, err := template.Build(b.t.Context(), dir, template.Options{
		CacheDir: b.cache, Store: b.store, Log: &b.log, Verbose: true, Box: engine.Box{Engine: b.eng},
	})
	return tpl.Image, err
}

// unpack returns a folder with what the image holds.
func unpack(t *testing.T, image string) string {
	t.Helper()
	dir := t.TempDir()
	if out, err := exec.Command("fsck.erofs", "--extract="+dir, "--overwrite", "--preserve", image).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return dir
}

func cat(root, path string) string {
	b, err := os.ReadFile(filepath.Join(root, path))
	if err != nil {
		return err.Error()
	}
	return string(b)
}

func exists(root, path string) bool {
	_, err := os.Lstat(filepath.Join(root, path))
	return err == nil
}

// TestBuildInASandbox builds definitions that nobody vouches for, with one cache.
func TestBuildInASandbox(t *testing.T) {
	b := newBoxed(t)
	t.Run("changes", func(t *testing.T) { boxedChanges(t, b) })
	t.Run("failure", func(t *testing.T) { boxedFailure(t, b) })
	t.Run("packages", func(t *testing.T) { boxedPackages(t, b) })
}

// boxedChanges builds with programs that look for this host, and checks that their changes are the
// layers: new, changed, removed and replaced files, links, modes and owners.
func boxedChanges(t *testing.T, b *boxed) {
	image, err := b.build("boxed", `
[from]
template = "base"
[[step]]
run = '''
dmesg | grep -i gvisor >/etc/kernel-said || cat /proc/version >/etc/kernel-said
ls /sys/class/net >/etc/nets 2>&1 || true
id -u >/etc/build-uid
mkdir -p /opt/keep/sub /opt/old
echo one >/opt/keep/a; echo two >/opt/old/b; ln -s a /opt/keep/link; ln /opt/keep/a /opt/keep/hard
chown user:user /opt/keep/a; chmod 4750 /opt/keep/sub
echo gone >/tmp/x; echo gone >/run/x; echo gone >/workspace/x
rm -rf /usr/share/perl5; rm /etc/debian_version
'''
[[step]]
run = '''
test "$(cat /opt/keep/hard)" = one
test ! -e /etc/debian_version
test ! -e /tmp/x
rm -rf /opt/old; mkdir /opt/old; echo new >/opt/old/c
rm -rf /etc/skel; mkdir /etc/skel
echo more >>/opt/keep/a
'''
`, nil)
	if err != nil {
		t.Fatalf("%v\n%s", err, b.log.String())
	}
	root := unpack(t, image)
	if said := cat(root, "/etc/kernel-said"); !strings.Contains(strings.ToLower(said), "gvisor") {
		t.Errorf("the step did not run in gVisor: %q", said)
	}
	if nets := cat(root, "/etc/nets"); strings.Contains(nets, "eth") {
		t.Errorf("the step has a network: %q", nets)
	}
	for path, want := range map[string]string{"/etc/build-uid": "0\n", "/opt/keep/a": "one\nmore\n", "/opt/old/c": "new\n"} {
		if got := cat(root, path); got != want {
			t.Errorf("%s is %q, want %q", path, got, want)
		}
	}
	for path, want := range map[string]bool{
		"/opt/keep/link": true, "/opt/keep/hard": true, "/opt/old/b": false, "/etc/debian_version": false,
		"/etc/skel": true, "/etc/skel/.bashrc": false, "/workspace/x": false, "/tmp/x": false, "/run/.build": false,
	} {
		if exists(root, path) != want {
			t.Errorf("%s exists: %v, want %v", path, !want, want)
		}
	}
	if fi, err := os.Lstat(filepath.Join(root, "/opt/keep/a")); err != nil || fi.Sys().(*syscall.Stat_t).Uid != 1000 {
		t.Errorf("the owner of /opt/keep/a is lost: %+v, %v", fi, err)
	}
	if fi, err := os.Lstat(filepath.Join(root, "/opt/keep/sub")); err != nil || fi.Mode() != fs.ModeDir|fs.ModeSetuid|0o750 {
		t.Errorf("the mode of /opt/keep/sub is lost: %+v, %v", fi, err)
	}
}

// boxedFailure checks what a builder reads when a step fails: its name, its code, its last words.
func boxedFailure(t *testing.T, b *boxed) {
	_, err := b.build("failing", "[from]\ntemplate = \"base\"\n[[step]]\nrun = 'echo no such luck >&2; exit 7'\n", nil)
	if err == nil || !strings.Contains(err.Error(), "step run echo no such luck") || !strings.Contains(err.Error(), "exit status 7: no such luck") {
		t.Errorf("the error is %v", err)
	}
	if _, err := b.store.Get("failing"); err == nil {
		t.Error("a failed build left a template")
	}
}

// boxedPackages installs with apt and pip, which run in the sandbox and get files from outside.
func boxedPackages(t *testing.T, b *boxed) {
	image, err := b.build("packages", `
[from]
template = "base"
[[step]]
apt = ["figlet"]
[[step]]
[step.pip]
requirements = "requirements.lock"
python = "/usr/bin/python3.13"
[[step]]
run = "python3 -c 'import idna; print(idna.__version__)' >/opt/idna; test ! -e /run/.build"
[[step]]
run = "figlet -v >/opt/figlet; test ! -e /usr/sbin/policy-rc.d; test -z \"$(ls /var/lib/apt/lists)\""
`, map[string]string{"requirements.lock": locked(t, "pip", "idna")})
	if err != nil {
		t.Fatalf("%v\n%s", err, b.log.String())
	}
	root := unpack(t, image)
	if got := cat(root, "/opt/figlet"); !strings.Contains(got, "FIGlet") {
		t.Errorf("figlet said %q", got)
	}
	if got := cat(root, "/opt/idna"); !strings.HasPrefix(got, "3.") {
		t.Errorf("idna said %q", got)
	}
}

// locked takes some packages of the shipped requirements.
func locked(t *testing.T, names ...string) string {
	t.Helper()
	data, err := os.ReadFile("../../templates/python-3.12/requirements.lock")
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	taking := false
	for line := range strings.Lines(string(data)) {
		if name, _, ok := strings.Cut(line, "=="); ok {
			taking = slices.Contains(names, name)
		}
		if taking {
			out.WriteString(line)
		}
	}
	return out.String()
}
