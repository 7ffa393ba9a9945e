package template

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"strings"
)

// ubuntuSource is a root from Ubuntu's archive, made as Debian's is.
type ubuntuSource struct {
	Suite      string   `toml:"suite"`
	Components []string `toml:"components"` // default: main, universe
}

func (s *ubuntuSource) kind() string  { return "ubuntu" }
func (s *ubuntuSource) title() string { return "ubuntu " + s.Suite }

func (s *ubuntuSource) check() error {
	if len(s.Components) == 0 {
		s.Components = []string{"main", "universe"}
	}
	names := debianSource{Suite: s.Suite, Components: s.Components}
	if err := names.check(); err != nil {
		return fmt.Errorf("ubuntu: %w", err)
	}
	return nil
}

// ubuntuKeyring is at the same place in an image of Ubuntu's, where apt looks for it later.
const ubuntuKeyring = "/usr/share/keyrings/ubuntu-archive-keyring.gpg"

func (s *ubuntuSource) fill(ctx context.Context, w *work) error {
	if _, err := os.Stat(ubuntuKeyring); errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("this host has no %s to check Ubuntu's archive with; install ubuntu-keyring (on Debian: ubuntu-archive-keyring)", ubuntuKeyring)
	}
	lines, err := s.archives(ctx, w.temp)
	if err != nil {
		return err
	}
	return debootstrap(ctx, w, s.Suite, s.Components, lines)
}

// archives returns the sources.list lines of s.Suite: at the archives that this host's own apt uses when it is
// Ubuntu, else at Ubuntu's own.
func (s *ubuntuSource) archives(ctx context.Context, dir string) ([]string, error) {
	data, err := os.ReadFile("/etc/os-release")
	if err != nil {
		return nil, err
	}
	release := parseOSRelease(string(data))
	if release["ID"] == "ubuntu" {
		out, err := runHost(ctx, dir, "apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE)", "Created-By: Packages")
		if err != nil {
			return nil, err
		}
		if lines := debianLines(string(out), release["VERSION_CODENAME"], s.Suite, s.Components); len(lines) > 0 {
			return signedBy(lines), nil
		}
	}
	archive, security := "http://archive.ubuntu.com/ubuntu", "http://security.ubuntu.com/ubuntu"
	if runtime.GOARCH != "amd64" {
		archive = "http://ports.ubuntu.com/ubuntu-ports"
		security = archive
	}
	lines := debianLines(fmt.Sprintf("%s x\n%s x-updates\n%s x-security\n", archive, archive, security), "x", s.Suite, s.Components)
	return signedBy(lines), nil
}

func signedBy(lines []string) []string {
	for i, l := range lines {
		lines[i] = strings.Replace(l, "deb ", "deb [signed-by="+ubuntuKeyring+"] ", 1)
	}
	return lines
}
