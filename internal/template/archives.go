package template

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path"
	"strings"
	"sync/atomic"
	"time"

	"sandlot"
	"sandlot/internal/engine"
)

// maxArchiveBytes is what one apt step may fetch.
const maxArchiveBytes = 8 << 30

// archives answers an apt inside a sandbox, at http://engine.BuildAddr/HOST/PATH: it fetches from the package
// archives of Debian and Ubuntu and nowhere else, whatever the image names. What is fetched apt checks against
// the image's keys.
type archives struct {
	base   map[string]string // "HOST/FOLDER" → URL of the archive, without a slash at its end
	client *http.Client
	left   atomic.Int64 // bytes
}

// officialArchives are the archives' own names. Where this host's apt uses a mirror, the mirror stands for them.
var officialArchives = map[string][]string{
	"debian":          {"deb.debian.org/debian", "ftp.debian.org/debian", "http.debian.net/debian"},
	"debian-security": {"deb.debian.org/debian-security", "security.debian.org/debian-security", "security.debian.org"},
	"ubuntu":          {"archive.ubuntu.com/ubuntu"},
	"ubuntu-security": {"security.ubuntu.com/ubuntu"},
	"ubuntu-ports":    {"ports.ubuntu.com/ubuntu-ports"},
}

// newArchives reads from this host's apt, where it has one, which mirrors and proxy lead to the archives.
func newArchives(ctx context.Context, dir string) (*archives, error) {
	a := &archives{base: make(map[string]string)}
	a.left.Store(maxArchiveBytes)
	for _, names := range officialArchives {
		for _, n := range names {
			a.base[n] = "http://" + names[0]
		}
	}
	transport := &http.Transport{
		Proxy: http.ProxyFromEnvironment, MaxIdleConnsPerHost: 8, IdleConnTimeout: time.Minute,
		TLSHandshakeTimeout: dialTime, ResponseHeaderTimeout: answerTime, MaxResponseHeaderBytes: 1 << 20,
	}
	a.client = &http.Client{Transport: transport}
	if _, err := exec.LookPath("apt-get"); err != nil {
		return a, nil
	}
	if err := a.addMirrors(ctx, dir); err != nil {
		return nil, err
	}
	conf, err := runHost(ctx, dir, "apt-config", "dump")
	if err != nil {
		return nil, err
	}
	if proxy := aptProxy(string(conf)); proxy != nil {
		transport.Proxy = http.ProxyURL(proxy)
	}
	return a, nil
}

// addMirrors adds the archives of this host's own release.
func (a *archives) addMirrors(ctx context.Context, dir string) error {
	data, err := os.ReadFile("/etc/os-release")
	if err != nil {
		return err
	}
	release := parseOSRelease(string(data))
	id, suite := release["ID"], release["VERSION_CODENAME"]
	if officialArchives[id] == nil || suite == "" {
		return nil
	}
	out, err := runHost(ctx, dir, "apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE)", "Created-By: Packages")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(out)) {
		f := strings.Fields(line)
		if len(f) != 2 || f[1] != suite && f[1] != suite+"-updates" && f[1] != suite+"-security" {
			continue
		}
		u, err := url.Parse(strings.TrimRight(f[0], "/"))
		if err != nil || u.Scheme != "http" && u.Scheme != "https" {
			continue
		}
		a.base[u.Host+u.Path] = u.String()
		names := officialArchives[id]
		if strings.HasSuffix(f[1], "-security") {
			names = officialArchives[id+"-security"]
		}
		for _, n := range names {
			a.base[n] = u.String()
		}
	}
	return nil
}

// aptProxy finds the proxy that `apt-config dump` names.
func aptProxy(dump string) *url.URL {
	for line := range strings.Lines(dump) {
		value, ok := strings.CutPrefix(line, "Acquire::http::Proxy ")
		if !ok {
			continue
		}
		u, err := url.Parse(strings.Trim(strings.TrimSpace(value), `";`))
		if err == nil && u.Host != "" {
			return u
		}
	}
	return nil
}

// find returns the URL that a request's path stands for.
func (a *archives) find(p string) (string, bool) {
	p = strings.TrimPrefix(p, "/")
	if len(p) > sandlot.MaxPathBytes || p != strings.TrimPrefix(path.Clean("/"+p), "/") {
		return "", false
	}
	for dir := path.Dir(p); dir != "."; dir = path.Dir(dir) {
		if base, ok := a.base[dir]; ok {
			return base + (&url.URL{Path: strings.TrimPrefix(p, dir)}).EscapedPath(), true
		}
	}
	return "", false
}

func (a *archives) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		http.Error(w, "only GET", http.StatusMethodNotAllowed)
		return
	}
	to, ok := a.find(r.URL.Path)
	if !ok {
		http.Error(w, "a build reaches the archives of Debian and Ubuntu only", http.StatusForbidden)
		return
	}
	req, err := http.NewRequestWithContext(r.Context(), r.Method, to, nil)
	if err != nil {
		http.Error(w, "bad path", http.StatusBadRequest)
		return
	}
	for _, h := range []string{"Range", "If-Range", "If-Modified-Since", "Cache-Control"} {
		if v := r.Header.Get(h); v != "" {
			req.Header.Set(h, v)
		}
	}
	resp, err := a.client.Do(req)
	if err != nil {
		http.Error(w, fmt.Sprintf("the archive cannot be reached: %v", err), http.StatusBadGateway)
		return
	}
	defer resp.Body.Close()
	for _, h := range []string{"Content-Type", "Content-Length", "Content-Range", "Last-Modified", "Accept-Ranges"} {
		if v := resp.Header.Get(h); v != "" {
			w.Header().Set(h, v)
		}
	}
	w.WriteHeader(resp.StatusCode)
	_, _ = io.Copy(w, &meteredReader{r: resp.Body, left: &a.left}) // apt sees a short answer and says so
}

// meteredReader ends with an error when all of a step's allowance is used.
type meteredReader struct {
	r    io.Reader
	left *atomic.Int64
}

func (m *meteredReader) Read(p []byte) (int, error) {
	n, err := m.r.Read(p)
	if m.left.Add(-int64(n)) < 0 {
		return 0, fmt.Errorf("a step fetches at most %d bytes", int64(maxArchiveBytes))
	}
	return n, err
}

// boxedAptScript is aptScript for a sandbox: the image's own sources, reached through archives.
const boxedAptScript = `mkdir -p ` + buildDir + `/sources
for f in /etc/apt/sources.list /etc/apt/sources.list.d/*.list /etc/apt/sources.list.d/*.sources; do
  if [ -f "$f" ]; then sed -E 's#https?://#http://` + engine.BuildAddr + `/#g' "$f" >` + buildDir + `/sources/"${f##*/}"; fi
done
apt() { apt-get -o Dir::Etc::sourcelist=` + buildDir + `/none -o Dir::Etc::sourceparts=` + buildDir + `/sources -o APT::Sandbox::User=root -o Acquire::Retries=3 "$@"; }
apt update -qq
apt install -y -qq --no-install-recommends -o Dpkg::Use-Pty=0 "$@"
apt-get clean
rm -rf /var/lib/apt/lists/*`

// applyBoxed is apply where the image's own apt is a stranger's program.
func (s aptStep) applyBoxed(ctx context.Context, w *work, packages []string) error {
	reach, err := newArchives(ctx, w.temp)
	if err != nil {
		return err
	}
	return w.exec(ctx, job{
		Argv:  append([]string{"/bin/sh", "-euc", boxedAptScript, "apt"}, packages...),
		Env:   buildEnv(nil),
		Files: map[string]string{"/usr/sbin/policy-rc.d": "#!/bin/sh\nexit 101\n"},
		serve: reach,
	})
}
