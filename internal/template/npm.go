package template

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"
)

// A host without npm, which is some hundred packages in Debian, still builds what comes from npm's registry:
// the archives are at known addresses, and their integrity is checked whoever fetched them.

const (
	npmRegistry        = "https://registry.npmjs.org"
	maxNPMArchiveBytes = 1 << 30
	npmTime            = 10 * time.Minute // for one archive
)

// downloadPackages puts each package's archive into dir, named as npm pack names it.
func downloadPackages(ctx context.Context, dir string, packages []npmPackage) error {
	client := &http.Client{Transport: newRegistryTransport()}
	defer client.CloseIdleConnections()
	for _, p := range packages {
		if err := p.download(ctx, client, filepath.Join(dir, p.archive())); err != nil {
			return fmt.Errorf("npm %s: %w", p.Name, err)
		}
	}
	return nil
}

// url is where the registry has the package's archive. The registry is the host's choice, as with npm itself.
func (p *npmPackage) url() (string, error) {
	registry := npmRegistry
	for _, v := range []string{"npm_config_registry", "NPM_CONFIG_REGISTRY"} {
		if r := os.Getenv(v); r != "" {
			registry = r
		}
	}
	u, err := url.Parse(registry)
	if err != nil || u.Host == "" || u.Scheme != "https" && !isLoopback(u) {
		return "", fmt.Errorf("%q is not the https address of a registry", registry)
	}
	return u.JoinPath(p.Name, "-", path.Base(p.Name)+"-"+p.Version+".tgz").String(), nil
}

func (p *npmPackage) download(ctx context.Context, client *http.Client, to string) error {
	ctx, cancel := context.WithTimeout(ctx, npmTime)
	defer cancel()
	from, err := p.url()
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, from, nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answers %s", from, strings.TrimSpace(resp.Status))
	}
	f, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, &cappedReader{r: resp.Body, left: maxNPMArchiveBytes, what: "the archive"})
	return errors.Join(err, f.Close())
}
