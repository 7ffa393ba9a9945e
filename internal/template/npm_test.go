package template

import (
	"crypto/sha512"
	"encoding/base64"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
)

func TestNPMDownload(t *testing.T) {
	archive := gzipped(t, layerTar(t, file("package/bin/x", "x")))
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/npm/@scope/tool/-/tool-1.2.3.tgz" {
			http.NotFound(w, r)
			return
		}
		w.Write(archive)
	}))
	defer server.Close()
	t.Setenv("npm_config_registry", server.URL+"/npm/")
	sum := sha512.Sum512(archive)
	good := npmPackage{Name: "@scope/tool", Version: "1.2.3", Dest: "/opt", Integrity: "sha512-" + base64.StdEncoding.EncodeToString(sum[:])}
	dir := t.TempDir()
	if err := downloadPackages(t.Context(), dir, []npmPackage{good}); err != nil {
		t.Fatal(err)
	}
	got, err := names(t, func(tr *tree) error { return good.add(tr, filepath.Join(dir, "scope-tool-1.2.3.tgz")) })
	if err != nil || strings.Join(got, " ") != "opt/bin/x" {
		t.Errorf("%q, %v", got, err)
	}
	missing := good
	missing.Version = "9.9.9"
	if err := downloadPackages(t.Context(), dir, []npmPackage{missing}); err == nil || !strings.Contains(err.Error(), "404") {
		t.Errorf("a version that is not there: %v", err)
	}
	t.Setenv("npm_config_registry", "http://198.51.100.1/")
	if err := downloadPackages(t.Context(), t.TempDir(), []npmPackage{good}); err == nil || !strings.Contains(err.Error(), "https") {
		t.Errorf("plain HTTP: %v", err)
	}
}
