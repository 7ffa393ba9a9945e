package template

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"sandlot/internal/engine"
)

// rewritten returns what addChanges makes of a tar, as "TYPE NAME".
func rewritten(t *testing.T, entries ...tar.Header) ([]string, error) {
	t.Helper()
	var in, out bytes.Buffer
	w := tar.NewWriter(&in)
	for _, h := range entries {
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	tr := newTree(&out)
	if err := addChanges(tr, &in, map[string]bool{"usr/sbin/policy-rc.d": true}); err != nil {
		return nil, err
	}
	if err := tr.close(); err != nil {
		t.Fatal(err)
	}
	var names []string
	for r := tar.NewReader(&out); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return names, nil
		}
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, string(h.Typeflag)+" "+h.Name)
	}
}

func TestChangesBecomeALayer(t *testing.T) {
	got, err := rewritten(t,
		tar.Header{Name: "./", Typeflag: tar.TypeDir, Mode: 0o755},
		tar.Header{Name: "./run/", Typeflag: tar.TypeDir}, tar.Header{Name: "./run/white", Typeflag: tar.TypeChar},
		tar.Header{Name: "./etc/", Typeflag: tar.TypeDir}, tar.Header{Name: "./etc/a", Typeflag: tar.TypeReg},
		tar.Header{Name: "./etc/b", Typeflag: tar.TypeLink, Linkname: "./etc/a"},
		tar.Header{Name: "./etc/gone", Typeflag: tar.TypeLink, Linkname: "./run/white"}, // whiteouts are links of one
		tar.Header{Name: "./etc/also", Typeflag: tar.TypeChar},
		tar.Header{Name: "./etc/null", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 3},
		tar.Header{Name: "./etc/fifo", Typeflag: tar.TypeFifo},
		tar.Header{Name: "./etc/l", Typeflag: tar.TypeSymlink, Linkname: "/proc/1/root"},
		tar.Header{Name: "./opt/", Typeflag: tar.TypeDir, PAXRecords: map[string]string{engine.OpaqueRecord: "y"}},
		tar.Header{Name: "./tmp/x", Typeflag: tar.TypeReg}, tar.Header{Name: "./.sandlot/agent", Typeflag: tar.TypeReg},
		tar.Header{Name: "./usr/sbin/policy-rc.d", Typeflag: tar.TypeReg},
	)
	want := []string{"5 etc", "0 etc/a", "1 etc/b", "0 etc/.wh.gone", "0 etc/.wh.also", "2 etc/l", "0 opt/.wh..wh..opq", "5 opt"}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("got %q, %v\nwant %q", got, err, want)
	}
}

func TestChangesAreRefused(t *testing.T) {
	for name, h := range map[string]tar.Header{
		"a path outside":         {Name: "./../etc/passwd", Typeflag: tar.TypeReg},
		"a whiteout's name":      {Name: "./etc/.wh.passwd", Typeflag: tar.TypeReg},
		"a link outside":         {Name: "./etc/a", Typeflag: tar.TypeLink, Linkname: "../../etc/passwd"},
		"a link to what goes":    {Name: "./etc/a", Typeflag: tar.TypeLink, Linkname: "./tmp/a"},
		"an owner that is none":  {Name: "./etc/a", Typeflag: tar.TypeReg, Uid: -1},
		"a type that is unknown": {Name: "./etc/a", Typeflag: 'Z'},
	} {
		if got, err := rewritten(t, h); err == nil {
			t.Errorf("%s became %q", name, got)
		}
	}
}

// TestArchivesReachNothingElse asks the server of apt steps for all sorts of things.
func TestArchivesReachNothingElse(t *testing.T) {
	upstream := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, r.Method+" "+r.URL.EscapedPath()+" "+r.Header.Get("Authorization")+r.Header.Get("Range"))
	}))
	defer upstream.Close()
	a := &archives{base: map[string]string{"deb.example/debian": upstream.URL + "/mirror"}, client: upstream.Client()}
	a.left.Store(1 << 10)
	ask := func(method, target string) (int, string) {
		r := httptest.NewRequest(method, "http://"+engine.BuildAddr+"/x", nil)
		r.URL.Path = target
		r.Header.Set("Authorization", "secret")
		r.Header.Set("Range", "bytes=1-")
		w := httptest.NewRecorder()
		a.ServeHTTP(w, r)
		return w.Code, w.Body.String()
	}
	if code, body := ask(http.MethodGet, "/deb.example/debian/pool/a b_1%2.deb"); code != 200 || body != "GET /mirror/pool/a%20b_1%252.deb bytes=1-" {
		t.Errorf("a package: %d %q", code, body)
	}
	for _, target := range []string{
		"/", "", "/deb.example/debian", "/deb.example/debianother/x", "/deb.example/x", "/169.254.169.254/latest/meta-data",
		"/deb.example/debian/../../secret", "/deb.example/debian//x", "/deb.example/debian/./x", "//deb.example/debian/x", "/" + strings.Repeat("a/", 5000),
	} {
		if code, body := ask(http.MethodGet, target); code != http.StatusForbidden {
			t.Errorf("%.100q: %d %q", target, code, body)
		}
	}
	if code, _ := ask(http.MethodPost, "/deb.example/debian/x"); code != http.StatusMethodNotAllowed {
		t.Errorf("POST: %d", code)
	}
	a.left.Store(3)
	if _, body := ask(http.MethodGet, "/deb.example/debian/x"); body != "" {
		t.Errorf("over the allowance came %q", body)
	}
}
