package e2e

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"sandlot"
	"sandlot/internal/devserver"
	"sandlot/internal/template"
	"sandlot/internal/testenv"
	"sandlot/test/live"
)

const typedFile = `interface Point { x: number; y: number }
const p: Point = { x: 3, y: 4 };
console.log(Math.hypot(p.x, p.y) as number);
`

const enumFile = `enum Colour { Red = 3, Green }
class Box { constructor(public n: number) {} }
console.log(Colour[4], new Box(Colour.Red).n);
`

func TestNodeTemplate(t *testing.T) {
	t.Parallel()
	testenv.Template(t, "node-22")
	b := live.New(t, map[string]any{"template": "node-22"})
	b.Put(t, "/workspace/typed.ts", []byte(typedFile))
	b.Put(t, "/workspace/enum.ts", []byte(enumFile))
	for cmd, want := range map[string]string{
		"node -v":                                "v22.23.5",
		"npm -v":                                 "10.9.9",
		"npx --version":                          "10.9.9",
		"node typed.ts 2>/dev/null":              "5",
		"tsx typed.ts":                           "5",
		"tsx enum.ts":                            "Green 3",
		"npm root -g":                            "/home/user/.local/lib/node_modules",
		"git --version | cut -c1-11":             "git version",
		"curl --version | cut -c1-4 | head -n 1": "curl",
		"mkdir p && cd p && npm init -y >/dev/null && npm pkg get version":                                      `"1.0.0"`,
		`node -e 'require("https"); console.log(require("crypto").createHash("md5").update("").digest("hex"))'`: "d41d8cd98f00b204e9800998ecf8427e",
		"sudo node -e 'console.log(process.getuid())'":                                                          "0",
	} {
		if got := b.Out(t, cmd); got != want {
			t.Errorf("%s: %q, want %q", cmd, got, want)
		}
	}
}

func TestBunTemplate(t *testing.T) {
	t.Parallel()
	testenv.Template(t, "bun-1")
	b := live.New(t, map[string]any{"template": "bun-1"})
	b.Put(t, "/workspace/typed.ts", []byte(typedFile))
	b.Put(t, "/workspace/enum.ts", []byte(enumFile))
	b.Put(t, "/workspace/some.test.ts", []byte(`import { test, expect } from "bun:test"; test("adds", () => expect(1 + 1).toBe(2));`))
	for cmd, want := range map[string]string{
		"bun -v":                                 "1.4.5",
		"bunx --version":                         "1.4.5",
		"bun typed.ts":                           "5",
		"bun enum.ts":                            "Green 3",
		"bun test 2>&1 | grep -o '[0-9] pass'":   "1 pass",
		"git --version | cut -c1-11":             "git version",
		"curl --version | cut -c1-4 | head -n 1": "curl",
	} {
		if got := b.Out(t, cmd); got != want {
			t.Errorf("%s: %q, want %q", cmd, got, want)
		}
	}
}

// Cells run in each template that says so, with the types taken away and what needs more than that.
func TestTemplatesRunTypeScriptCells(t *testing.T) {
	t.Parallel()
	for _, tpl := range []string{"base", "node-22", "bun-1"} {
		t.Run(tpl, func(t *testing.T) {
			t.Parallel()
			kernels := testenv.Template(t, tpl).Kernels
			if !slices.Contains(kernels, "javascript") || !slices.Contains(kernels, "typescript") {
				t.Errorf("kernels %q", kernels)
			}
			b := live.New(t, map[string]any{"template": tpl})
			for source, want := range map[string]string{
				"const y: number = 5; y as number * 2":   "10",
				"enum Colour { Red = 3 }; Colour.Red":    "3",
				"await Promise.resolve<string>('x' + 1)": "'x1'",
			} {
				if a := code(t, b, source, inLanguage("typescript")); a.text() != want {
					t.Errorf("%s: %+v %+v", source, a, a.Error)
				}
			}
			if a := code(t, b, "[1, 2].map(x => x * 2).join()", inLanguage("javascript")); a.text() != "'2,4'" {
				t.Errorf("javascript: %+v %+v", a, a.Error)
			}
		})
	}
}

func TestBaseRunsTypeScript(t *testing.T) {
	t.Parallel()
	b := live.New(t, nil)
	b.Put(t, "/workspace/typed.ts", []byte(typedFile))
	if got := b.Out(t, "node typed.ts 2>/dev/null && npm -v"); got != "5\n10.9.9" {
		t.Errorf("base says %q", got)
	}
}

// rootOf is a layer with programs of this host and the libraries that they need, and more files.
func rootOf(t *testing.T, programs []string, files map[string]string) v1.Layer {
	t.Helper()
	paths := make(map[string]bool)
	library := regexp.MustCompile(`(/\S+) \(0x`)
	for _, p := range programs {
		found, err := exec.LookPath(p)
		if err != nil {
			t.Fatal(err)
		}
		paths[found] = true
		out, err := exec.Command("ldd", found).CombinedOutput()
		if err != nil {
			t.Fatalf("ldd %s: %v\n%s", found, err, out)
		}
		for _, m := range library.FindAllStringSubmatch(string(out), -1) {
			paths[m[1]] = true
		}
	}
	var b bytes.Buffer
	tw := tar.NewWriter(&b)
	add := func(name string, mode int64, content []byte) {
		err := tw.WriteHeader(&tar.Header{Name: strings.TrimPrefix(name, "/"), Typeflag: tar.TypeReg, Mode: mode, Size: int64(len(content))})
		if err == nil {
			_, err = tw.Write(content)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if len(programs) > 0 {
		for _, link := range []string{"bin", "lib", "lib64"} {
			err := tw.WriteHeader(&tar.Header{Name: "usr/" + link + "/", Typeflag: tar.TypeDir, Mode: 0o755})
			if err == nil {
				err = tw.WriteHeader(&tar.Header{Name: link, Typeflag: tar.TypeSymlink, Linkname: "usr/" + link})
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	for p := range paths {
		content, err := os.ReadFile(p)
		if err != nil {
			t.Fatal(err)
		}
		add(p, 0o755, content)
	}
	for p, content := range files {
		mode := int64(0o644)
		if strings.HasPrefix(content, "#!") {
			mode = 0o755
		}
		add(p, mode, []byte(content))
	}
	if err := tw.Close(); err != nil {
		t.Fatal(err)
	}
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b.Bytes())), nil })
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func imageWith(t *testing.T, config v1.Config, layers ...v1.Layer) v1.Image {
	t.Helper()
	img, err := mutate.AppendLayers(empty.Image, layers...)
	if err == nil {
		img, err = mutate.ConfigFile(img, configOf(t, img, config))
	}
	if err != nil {
		t.Fatal(err)
	}
	return img
}

func configOf(t *testing.T, img v1.Image, config v1.Config) *v1.ConfigFile {
	t.Helper()
	file, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	file = file.DeepCopy()
	file.OS, file.Architecture, file.Config = "linux", runtime.GOARCH, config
	return file
}

// Images from a registry, a layout and `docker save` become templates whose sandboxes run: one with bash, one
// that has no more than sh, one like Ubuntu's with steps on it, and one without any shell.
func TestImportedImagesRun(t *testing.T) {
	t.Parallel()
	testenv.Root(t)
	bin := filepath.Dir(testenv.Bin(t, "sandlot"))
	dir := t.TempDir()
	store, err := template.Open(filepath.Join(dir, "store"))
	if err != nil {
		t.Fatal(err)
	}
	var built bytes.Buffer
	opts := template.Options{CacheDir: filepath.Join(dir, "cache"), Store: store, Log: &built}
	done := func(_ sandlot.Template, err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("%v\n%s", err, &built)
		}
	}

	small := []string{"cat", "id", "ls", "sleep", "true"}
	reg := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	defer reg.Close()
	ref, err := name.ParseReference(strings.TrimPrefix(reg.URL, "http://") + "/team/app:1")
	if err != nil {
		t.Fatal(err)
	}
	img := imageWith(t, v1.Config{
		Env: []string{"GREETING=hello", "PATH=/opt/app:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
		Cmd: []string{"serve"}, WorkingDir: "/opt/app", User: "app",
	},
		rootOf(t, append(small, "bash", "sh"), map[string]string{"opt/app/serve": "#!/bin/sh\necho \"$GREETING from $PWD\" >/workspace/started\nexec sleep 100000\n", "secret": "of the first layer", "etc/os-release": "ID=first\n"}),
		rootOf(t, nil, map[string]string{".wh.secret": "", "etc/os-release": "ID=second\n"}))
	if err := remote.Write(ref, img); err != nil {
		t.Fatal(err)
	}
	done(template.Import(t.Context(), template.ImportSpec{Name: "app", Reference: ref.String(), ImageStart: true, Ready: []string{"/bin/sh", "-c", "test -s /workspace/started"}}, opts))

	saved := filepath.Join(dir, "saved.tar")
	if err := tarball.WriteToFile(saved, ref, imageWith(t, v1.Config{}, rootOf(t, append(small, "sh"), nil))); err != nil {
		t.Fatal(err)
	}
	done(template.Import(t.Context(), template.ImportSpec{Name: "only-sh", Archive: saved}, opts))
	if err := tarball.WriteToFile(saved, ref, imageWith(t, v1.Config{}, rootOf(t, small, nil))); err != nil {
		t.Fatal(err)
	}
	done(template.Import(t.Context(), template.ImportSpec{Name: "no-shell", Archive: saved}, opts))

	// The recipe of template ubuntu with a small root in place of its archive's.
	recipe, err := os.ReadFile("../../templates/ubuntu/template.toml")
	if err != nil {
		t.Fatal(err)
	}
	ubuntu := imageWith(t, v1.Config{}, rootOf(t, append(small, "bash", "sh"), map[string]string{
		"etc/os-release":  "ID=ubuntu\nVERSION_ID=\"24.04\"\n",
		"etc/passwd":      "root:x:0:0:root:/root:/bin/bash\nubuntu:x:1000:1000:Ubuntu:/home/ubuntu:/bin/bash\n",
		"usr/bin/python3": "#!/bin/sh\nexit 0\n",
	}))
	digest, err := ubuntu.Digest()
	if err != nil {
		t.Fatal(err)
	}
	folder := filepath.Join(dir, "defs", "ubuntu")
	images, err := layout.Write(filepath.Join(folder, "image"), empty.Index)
	if err == nil {
		err = images.AppendImage(ubuntu)
	}
	if err != nil {
		t.Fatal(err)
	}
	text := strings.Replace(string(recipe), "[from.ubuntu]\nsuite = \"noble\"\n", fmt.Sprintf("[from.oci]\nlayout = \"image\"\ndigest = %q\n", digest), 1)
	text = regexp.MustCompile(`(?s)\[\[step\]\]\napt = \[.*?\n\]\n`).ReplaceAllString(text, "")
	if err := os.WriteFile(filepath.Join(folder, "template.toml"), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	done(template.Build(t.Context(), folder, opts))

	state := t.TempDir()
	s, err := devserver.Start(t.Context(), devserver.Config{Bin: bin, Templates: filepath.Join(dir, "store"), StateDir: state, Engine: "gvisor", Pool: map[string]int{"app": 1}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Stop(); err != nil {
			t.Errorf("%v\n%s", err, s.Log())
		}
	})
	for tpl, runs := range map[string][]struct {
		cmd  any
		want string
	}{
		"app": {
			{"id -un; id -u; echo $GREETING; cat /workspace/started /etc/os-release", "user\n1000\nhello\nhello from /opt/app\nID=second\n"},
			{"cat /secret 2>&1; ls -d ~ /workspace", "cat: /secret: No such file or directory\n/home/user\n/workspace\n"},
			{"echo kept > /workspace/x && cat /workspace/x", "kept\n"},
		},
		"only-sh":  {{"echo $((6 * 7)); id -un", "42\nuser\n"}},
		"no-shell": {{[]string{"id", "-un"}, "user\n"}},
		"ubuntu":   {{". /etc/os-release; echo $ID $VERSION_ID; id -un", "ubuntu 24.04\nuser\n"}},
	} {
		t.Run(tpl, func(t *testing.T) {
			sb, err := s.Create(t.Context(), map[string]any{"template": tpl})
			if err != nil {
				t.Fatalf("create: %v\n%s", err, s.Log())
			}
			defer func() {
				ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), time.Minute)
				defer cancel()
				if err := s.Delete(ctx, sb.ID); err != nil {
					t.Error(err)
				}
			}()
			for _, r := range runs {
				got, err := s.Exec(t.Context(), sb.ID, map[string]any{"cmd": r.cmd})
				if err != nil || got.Stdout != r.want {
					t.Errorf("%v: %v, %+v, want %q", r.cmd, err, got, r.want)
				}
			}
		})
	}
}
