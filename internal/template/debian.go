package template

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// debianSource is a root from Debian's archive, made by mmdebstrap: the packages that are always there and
// apt, without documentation.
type debianSource struct {
	Suite      string   `toml:"suite"`
	Components []string `toml:"components"` // default: main
}

var (
	suiteName   = regexp.MustCompile(`^[a-z][a-z0-9.-]{0,40}$`)
	packageName = regexp.MustCompile(`^[a-z0-9][a-z0-9+.-]*(=[A-Za-z0-9][A-Za-z0-9+.:~-]*)?$`)
)

func (s *debianSource) kind() string  { return "debian" }
func (s *debianSource) title() string { return "debian " + s.Suite }

func (s *debianSource) check() error {
	if !suiteName.MatchString(s.Suite) {
		return fmt.Errorf("debian: %q is not the name of a suite", s.Suite)
	}
	if len(s.Components) == 0 {
		s.Components = []string{"main"}
	}
	for _, c := range s.Components {
		if !suiteName.MatchString(c) {
			return fmt.Errorf("debian: %q is not the name of a component", c)
		}
	}
	return nil
}

func (s *debianSource) fill(ctx context.Context, w *work) error {
	lines, err := s.archives(ctx, w.temp)
	if err != nil {
		return err
	}
	return debootstrap(ctx, w, s.Suite, s.Components, lines)
}

// debootstrap makes the root of a suite from the archives that lines name; none means the suite's own.
func debootstrap(ctx context.Context, w *work, suite string, components, lines []string) error {
	argv := []string{
		"mmdebstrap", "--mode=root", "--format=directory", "--variant=minbase",
		"--components=" + strings.Join(components, ","),
		"--dpkgopt=path-exclude=/usr/share/man/*",
		"--dpkgopt=path-exclude=/usr/share/info/*",
		"--dpkgopt=path-exclude=/usr/share/doc/*",
		"--dpkgopt=path-include=/usr/share/doc/*/copyright",
		"--dpkgopt=path-exclude=/usr/share/locale/*/*",
		suite, w.upper,
	}
	env := append(os.Environ(), "SOURCE_DATE_EPOCH="+strconv.Itoa(imageTime), "TMPDIR="+w.temp)
	j := job{Action: actionHost, Argv: append(argv, lines...), Env: env, network: true}
	return runJob(ctx, j, nil, w.out)
}

// archives returns the sources.list lines of s.Suite at the archives that this host's own apt uses. On a host
// that is not Debian there are none, and mmdebstrap takes Debian's own.
func (s *debianSource) archives(ctx context.Context, dir string) ([]string, error) {
	data, err := os.ReadFile("/etc/os-release")
	if err != nil {
		return nil, err
	}
	release := parseOSRelease(string(data))
	if release["ID"] != "debian" {
		return nil, nil
	}
	out, err := runHost(ctx, dir, "apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE)", "Created-By: Packages")
	if err != nil {
		return nil, err
	}
	return debianLines(string(out), release["VERSION_CODENAME"], s.Suite, s.Components), nil
}

// debianLines turns the host's own index targets ("URI suite" lines) into lines for suite. A host of the
// development suite has neither updates nor a security archive.
func debianLines(targets, hostSuite, suite string, components []string) []string {
	uri := make(map[string]string)
	for line := range strings.Lines(targets) {
		f := strings.Fields(line)
		if len(f) == 2 && uri[f[1]] == "" {
			uri[f[1]] = f[0]
		}
	}
	var lines []string
	for _, pocket := range []string{"", "-updates", "-security"} {
		if u := uri[hostSuite+pocket]; u != "" {
			lines = append(lines, fmt.Sprintf("deb %s %s%s %s", u, suite, pocket, strings.Join(components, " ")))
		}
	}
	return lines
}

func parseOSRelease(data string) map[string]string {
	found := make(map[string]string)
	for line := range strings.Lines(data) {
		if k, v, ok := strings.Cut(strings.TrimSpace(line), "="); ok {
			found[k] = strings.Trim(v, `"'`)
		}
	}
	return found
}

// aptStep installs Debian packages from the archives that the image names.
type aptStep []string

func (s aptStep) kind() string                     { return "apt" }
func (s aptStep) title() string                    { return fmt.Sprintf("apt, %d packages", len(s)) }
func (s aptStep) inputs(*os.Root) ([]input, error) { return nil, nil }

func (s aptStep) check() error {
	if len(s) == 0 {
		return errors.New("apt: no package")
	}
	for _, p := range s {
		if !packageName.MatchString(p) {
			return fmt.Errorf("apt: %q is not the name of a package", p)
		}
	}
	return nil
}

// aptScript installs its arguments. Package scripts must not start services: policy-rc.d says so.
const aptScript = `apt-get update -qq
apt-get install -y -qq --no-install-recommends -o Dpkg::Use-Pty=0 "$@"
apt-get clean
rm -rf /var/lib/apt/lists/*`

func (s aptStep) apply(ctx context.Context, w *work) error {
	packages := slices.Sorted(slices.Values(s))
	if w.box != nil {
		return s.applyBoxed(ctx, w, packages)
	}
	files := map[string]string{
		"/usr/sbin/policy-rc.d": "#!/bin/sh\nexit 101\n",
	}
	// The network and the way to the archive are the host's.
	for _, p := range []string{"/etc/resolv.conf", "/etc/hosts"} {
		data, err := os.ReadFile(p)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		files[p] = string(data)
	}
	conf, err := runHost(ctx, w.temp, "apt-config", "dump")
	if err != nil {
		return err
	}
	settings := acquireSettings(string(conf))
	if ca, err := os.ReadFile("/etc/ssl/certs/ca-certificates.crt"); err == nil {
		const at = "/etc/sandlot-build-ca.crt"
		files[at] = string(ca)
		settings += fmt.Sprintf("Acquire::https::CaInfo %q;\n", at)
	}
	files["/etc/apt/apt.conf.d/00sandlot-build"] = settings
	env := make(map[string]string)
	for _, k := range []string{"http_proxy", "https_proxy", "ftp_proxy", "no_proxy"} {
		for _, k := range []string{k, strings.ToUpper(k)} {
			if v, ok := os.LookupEnv(k); ok {
				env[k] = v
			}
		}
	}
	return w.exec(ctx, job{
		Argv:    append([]string{"/bin/sh", "-euc", aptScript, "apt"}, packages...),
		Env:     buildEnv(env),
		Files:   files,
		network: true,
	})
}

// acquireSettings keeps the lines of `apt-config dump` that say how to reach an archive: proxies, time-outs,
// date checks. Files and programs of the host that others name mean nothing inside the image.
func acquireSettings(dump string) string {
	var b strings.Builder
	lines := bufio.NewScanner(strings.NewReader(dump))
	for lines.Scan() {
		l := lines.Text()
		name, value, _ := strings.Cut(l, " ")
		if !strings.HasPrefix(name, "Acquire::") || value == `"";` || strings.Contains(value, `"/`) {
			continue
		}
		for _, keep := range []string{
			"Acquire::http::", "Acquire::https::", "Acquire::Check-", "Acquire::Retries", "Acquire::ForceIPv",
		} {
			if strings.HasPrefix(name, keep) && !strings.Contains(name, "Auto-Detect") {
				b.WriteString(l + "\n")
				break
			}
		}
	}
	return b.String()
}
