package template

import (
	"bytes"
	"context"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"

	"sandlot"
)

// What a registry must not make of an import.
func TestImportRegistryRefuses(t *testing.T) {
	b := newBuilder(t)
	asked := make(chan string, 100)
	inner := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { asked <- r.URL.Path }))
	defer inner.Close()
	var answer http.HandlerFunc
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { answer(w, r) }))
	defer server.Close()
	local := strings.TrimPrefix(server.URL, "http://") + "/a/b:c"
	wrong := strings.Split(local, ":c")[0] + "@" + digestOf([]byte("other"))

	status := func(code int) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/v2/" {
				return
			}
			w.WriteHeader(code)
		}
	}
	for name, tt := range map[string]struct {
		spec   ImportSpec
		answer http.HandlerFunc
		code   sandlot.Code
		want   string
	}{
		"not there":                     {ImportSpec{Reference: local}, status(404), sandlot.CodeNotFound, "no image"},
		"not allowed":                   {ImportSpec{Reference: local}, status(403), sandlot.CodeInvalidRequest, "docker login"},
		"broken":                        {ImportSpec{Reference: local}, status(501), sandlot.CodeUnavailable, "answers 501"},
		"another":                       {ImportSpec{Reference: wrong}, func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, `{"schemaVersion":2}`) }, "", "digest"},
		"endless":                       {ImportSpec{Reference: wrong}, func(w http.ResponseWriter, _ *http.Request) { io.Copy(w, io.LimitReader(zeros{}, 64<<20)) }, "", ""},
		"no reference":                  {ImportSpec{Reference: "Not A Reference"}, nil, sandlot.CodeInvalidRequest, "reference"},
		"two places":                    {ImportSpec{Reference: local, Layout: "/tmp"}, nil, sandlot.CodeInvalidRequest, "exactly one"},
		"a stranger's path":             {ImportSpec{Layout: "/etc", Stranger: true}, nil, sandlot.CodeInvalidRequest, "only an image in a registry"},
		"a stranger's loopback":         {ImportSpec{Reference: local, Stranger: true}, nil, sandlot.CodeInvalidRequest, "not a public one"},
		"a stranger's name of loopback": {ImportSpec{Reference: "localhost:1/a", Stranger: true}, nil, sandlot.CodeInvalidRequest, "not a public one"},
		"a stranger's metadata service": {ImportSpec{Reference: "169.254.169.254/a/b", Stranger: true}, nil, sandlot.CodeInvalidRequest, "not a public one"},
		"plain HTTP elsewhere":          {ImportSpec{Reference: "192.168.77.1:5000/a"}, nil, sandlot.CodeInvalidRequest, "must speak HTTPS"},
		"a redirect to plain HTTP": {ImportSpec{Reference: local}, func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path != "/v2/" {
				http.Redirect(w, r, "http://198.51.100.1/x", http.StatusTemporaryRedirect)
			}
		}, sandlot.CodeInvalidRequest, "must speak HTTPS"},
		"tokens from plain HTTP": {ImportSpec{Reference: local}, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("WWW-Authenticate", `Bearer realm="http://198.51.100.1/token",service="x"`)
			w.WriteHeader(401)
		}, sandlot.CodeInvalidRequest, "must speak HTTPS"},
	} {
		t.Run(name, func(t *testing.T) {
			answer = tt.answer
			if answer == nil {
				answer = func(_ http.ResponseWriter, r *http.Request) { t.Errorf("the registry was asked for %s", r.URL.Path) }
			}
			_, err := imported(t, b, tt.spec)
			if err == nil || !strings.Contains(err.Error(), tt.want) || tt.code != "" && sandlot.ErrorCode(err) != tt.code {
				t.Errorf("error %v (%s), want %s with %q", err, sandlot.ErrorCode(err), tt.code, tt.want)
			}
		})
	}
}

func TestPublicAddresses(t *testing.T) {
	for a, want := range map[string]bool{
		"8.8.8.8": true, "2606:4700::1111": true, "127.0.0.1": false, "10.1.2.3": false, "172.31.0.1": false, "192.168.0.1": false,
		"169.254.169.254": false, "100.64.0.1": false, "0.0.0.0": false, "224.0.0.1": false, "255.255.255.255": false,
		"::1": false, "::": false, "fe80::1": false, "fd00::1": false, "::ffff:10.0.0.1": false, "::ffff:8.8.8.8": true,
		"64:ff9b::a00:1": false, "2002:a00:1::": false, "::7f00:1": false,
	} {
		if got := isPublic(netip.MustParseAddr(a)); got != want {
			t.Errorf("isPublic(%s) = %t", a, got)
		}
	}
	if err := publicOnly("tcp", "10.0.0.1:443", nil); err == nil {
		t.Error("a private address is dialed for a stranger")
	}
	if err := publicOnly("tcp", "[2606:4700::1111]:443", nil); err != nil {
		t.Error(err)
	}
}

// A registry that stops in the middle of a layer, or gives another one, is told of as such.
func TestRegistryBlobs(t *testing.T) {
	reg := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	content := layerTar(t, file("a", strings.Repeat("x", 64<<10)))
	img := imageOf(t, v1.Config{}, content)
	release := make(chan struct{})
	var mode string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet || !strings.Contains(r.URL.Path, "/blobs/") {
			reg.ServeHTTP(w, r)
			return
		}
		switch mode {
		case "stops":
			w.Header().Set("Content-Length", "100000")
			w.Write(content[:1000])
			w.(http.Flusher).Flush()
			<-release
		case "cut":
			w.Header().Set("Content-Length", "100000")
			w.Write(content[:1000])
		case "other":
			w.Write(bytes.Repeat([]byte("y"), 300))
		}
	}))
	defer server.Close()
	defer close(release)
	ref, err := name.ParseReference(strings.TrimPrefix(server.URL, "http://") + "/a:b")
	if err == nil {
		err = remote.Write(ref, img)
	}
	if err != nil {
		t.Fatal(err)
	}
	manifest, err := img.Manifest()
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		mode, want string
		code       sandlot.Code
	}{
		{"stops", "stopped sending", sandlot.CodeUnavailable},
		{"cut", "does not answer", sandlot.CodeUnavailable},
		{"other", "another blob", sandlot.CodeInvalidRequest},
	} {
		mode = tt.mode
		st, err := openRegistry(ref.String(), false)
		if err != nil {
			t.Fatal(err)
		}
		st.(*registryStore).stall = 50 * time.Millisecond
		if tt.mode != "stops" {
			st.(*registryStore).stall = time.Hour
		}
		r, err := st.blob(t.Context(), manifest.Layers[0])
		if err == nil {
			_, err = io.Copy(io.Discard, r)
			r.Close()
		}
		st.close()
		if err == nil || !strings.Contains(err.Error(), tt.want) || sandlot.ErrorCode(err) != tt.code {
			t.Errorf("%s: error %v", tt.mode, err)
		}
	}
}

func TestImportStopsWithItsContext(t *testing.T) {
	b := newBuilder(t)
	entered := make(chan struct{})
	release := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/v2/" {
			close(entered)
			<-release
		}
	}))
	defer server.Close()
	defer close(release)
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-entered; cancel() }()
	_, err := Import(ctx, ImportSpec{Name: "x", Reference: strings.TrimPrefix(server.URL, "http://") + "/a"}, Options{CacheDir: b.cache, Store: b.store})
	if ctx.Err() == nil || err == nil || !strings.Contains(err.Error(), "context canceled") {
		t.Errorf("error %v", err)
	}
}
