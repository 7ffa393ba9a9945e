package template

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestParseDefinition(t *testing.T) {
	def, err := parseDefinition("x", []byte(`
description = "d"
contents = ["a"]
kernels = ["python"]
start = ["/bin/a", "b"]
[env]
K = "v"
[from.debian]
suite = "trixie"
[[step]]
apt = ["git", "g++", "libc6=2.41-12"]
[[step]]
run = "true"
[[step]]
[[step.files]]
dest = "/etc/x"
content = ""
`))
	if err != nil {
		t.Fatal(err)
	}
	if got := def.template(); got.Size.DiskGB != 5 || got.Env["K"] != "v" || got.Env["LANG"] != "C.UTF-8" || got.Start[1] != "b" {
		t.Errorf("template() = %+v", got)
	}
	if len(def.Steps) != 3 || def.From.Debian.Components[0] != "main" {
		t.Errorf("steps %+v, from %+v", def.Steps, def.From)
	}
}

func TestParseDefinitionRefuses(t *testing.T) {
	const mod = "[[step]]\n[step.gomod]\nmodule = \"example.com/m\"\nversion = \"v1.0.0\"\nsum = \"h1:IX2O3LJUL0AjYsROGZ4aNENTEb3c/Ll/0b9Yb/8P61Q=\"\n"
	for name, tt := range map[string]struct{ text, want string }{
		"unknown key":          {"descriptoin = 'x'", "unknown key"},
		"unknown nested key":   {"[from.debian]\nsuite = 'trixie'\nmirror = 'x'", "unknown key"},
		"not toml":             {"description = ", "not valid"},
		"two sources":          {"[from]\ntemplate = 'base'\n[from.debian]\nsuite = 'trixie'", "not both"},
		"parent elsewhere":     {"[from]\ntemplate = '../x'", "name"},
		"suite is an option":   {"[from.debian]\nsuite = '--x'", "suite"},
		"component":            {"[from.debian]\nsuite = 'trixie'\ncomponents = ['main x']", "component"},
		"package is an option": {"[[step]]\napt = ['-y']", "package"},
		"no package":           {"[[step]]\napt = []", "no package"},
		"empty step":           {"[[step]]", "exactly one"},
		"two kinds":            {"[[step]]\napt = ['git']\nrun = 'true'", "exactly one"},
		"dest relative":        {"[[step]]\n[[step.files]]\ndest = 'etc/x'\ncontent = ''", "absolute"},
		"dest leaves":          {"[[step]]\n[[step.files]]\ndest = '/../etc/x'\ncontent = ''", "leaves"},
		"src leaves":           {"[[step]]\n[[step.files]]\ndest = '/etc/x'\nsrc = 'a/../../x'", "leaves"},
		"src absolute":         {"[[step]]\n[[step.files]]\ndest = '/etc/x'\nsrc = '/etc/passwd'", "absolute"},
		"src and content":      {"[[step]]\n[[step.files]]\ndest = '/etc/x'\nsrc = 'a'\ncontent = ''", "exactly one"},
		"mode":                 {"[[step]]\n[[step.files]]\ndest = '/etc/x'\ncontent = ''\nmode = 'rw'", "octal"},
		"owner":                {"[[step]]\n[[step.files]]\ndest = '/etc/x'\ncontent = ''\nowner = '0'", "owner"},
		"root is no file":      {"[[step]]\n[[step.files]]\ndest = '/'\ncontent = ''", "folder"},
		"pip python":           {"[[step]]\n[step.pip]\nrequirements = 'r'\npython = 'python3'", "python"},
		"npm version range":    {"[[step]]\n[[step.npm]]\nname = 'x'\nversion = '^1.0.0'\nintegrity = ''\ndest = '/x'", "exact"},
		"npm integrity":        {"[[step]]\n[[step.npm]]\nname = 'x'\nversion = '1.0.0'\nintegrity = 'sha1-x'\ndest = '/x'", "integrity"},
		"module path leaves":   {mod + "path = '../x'\ndest = '/x'", "leaves"},
		"module format":        {mod + "path = 'x'\nformat = 'zip'\ndest = '/x'", "format"},
		"module dest":          {mod + "path = 'x'\ndest = 'x'", "absolute"},
		"env name":             {"[env]\n'A=B' = 'x'", "env"},
		"kernel":               {"kernels = ['Python 3']", "language"},
		"size":                 {"[size]\nvcpu = 0\nmemory_mb = 1024\ndisk_gb = 5", "size"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := parseDefinition("x", []byte(tt.text))
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want one with %q", err, tt.want)
			}
		})
	}
}

func TestLoadDefinitionRefuses(t *testing.T) {
	dir := t.TempDir()
	for name, prepare := range map[string]func(string) error{
		"Upper":  func(d string) error { return os.WriteFile(filepath.Join(d, definitionFile), nil, 0o600) },
		"link":   func(d string) error { return os.Symlink("/etc/passwd", filepath.Join(d, definitionFile)) },
		"folder": func(d string) error { return os.Mkdir(filepath.Join(d, definitionFile), 0o700) },
		"huge": func(d string) error {
			return os.WriteFile(filepath.Join(d, definitionFile), []byte(strings.Repeat("# x\n", maxDefinitionBytes)), 0o600)
		},
		"none": func(string) error { return nil },
	} {
		d := filepath.Join(dir, name)
		if err := os.Mkdir(d, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := prepare(d); err != nil {
			t.Fatal(err)
		}
		if _, err := loadDefinition(d); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

// The definitions that Sandlot ships must load; building them takes minutes and is ./dev build's.
func TestShippedDefinitionsLoad(t *testing.T) {
	dirs, err := filepath.Glob("../../templates/*")
	if err != nil || len(dirs) == 0 {
		t.Fatalf("no definitions: %v", err)
	}
	for _, dir := range dirs {
		def, err := loadDefinition(dir)
		if err != nil {
			t.Error(err)
			continue
		}
		p, err := newPlan(def, &Options{})
		if err != nil {
			t.Error(err)
			continue
		}
		p.close()
		if def.Description == "" || len(def.Contents) == 0 || len(def.Kernels) == 0 {
			t.Errorf("%s: description, contents and kernels are for people to read", def.name)
		}
	}
}
