package main

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"path"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

const testToken = "sbt_test"

// fakeAPI speaks the documented Project API, strictly: a parameter or field that the documents do not name
// is refused, as the server refuses it.
type fakeAPI struct {
	t   *testing.T
	srv *httptest.Server

	mu      sync.Mutex
	alive   map[string]createBody
	created int
	deleted []string
	execs   []execBody
	signals []string
	revoked []string
	files   map[string][]byte // absolute path → content; a nil one is a directory
	modes   map[string]int64
	gone    chan struct{} // closed when a client left a running exec
}

func newFakeAPI(t *testing.T) *fakeAPI {
	f := &fakeAPI{
		t: t, alive: map[string]createBody{}, files: map[string][]byte{"/workspace": nil, "/workspace/dir": nil},
		modes: map[string]int64{}, gone: make(chan struct{}),
	}
	const base = "/api/v1/projects/{ref}/sandboxes"
	mux := http.NewServeMux()
	for pattern, h := range map[string]func(http.ResponseWriter, *http.Request) error{
		"POST " + base:                                  f.create,
		"GET " + base:                                   f.list,
		"GET " + base + "/templates":                    f.templates,
		"GET " + base + "/{id}":                         f.get,
		"DELETE " + base + "/{id}":                      f.delete,
		"POST " + base + "/{id}/timeout":                f.timeout,
		"POST " + base + "/{id}/exec":                   f.exec,
		"GET " + base + "/{id}/processes":               f.processes,
		"POST " + base + "/{id}/processes/{pid}/signal": f.signal,
		"GET " + base + "/{id}/logs":                    f.logs,
		"GET " + base + "/{id}/metrics":                 f.metrics,
		"GET " + base + "/{id}/files/stat":              f.stat,
		"GET " + base + "/{id}/files/content":           f.getContent,
		"PUT " + base + "/{id}/files/content":           f.putContent,
		"GET " + base + "/{id}/files/archive":           f.getArchive,
		"PUT " + base + "/{id}/files/archive":           f.putArchive,
		"GET /api/v1/tokens":                            f.tokens,
		"POST /api/v1/tokens":                           f.createToken,
		"DELETE /api/v1/tokens/{id}":                    f.revokeToken,
	} {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			err := f.admit(r)
			if err == nil {
				f.mu.Lock()
				defer f.mu.Unlock()
				err = h(w, r)
			}
			var e *fakeError
			if errors.As(err, &e) {
				w.Header().Set("Content-Type", "application/json")
				w.WriteHeader(e.status)
				fmt.Fprintf(w, `{"error":{"code":%q,"message":%q,"request_id":"req7"}}`, e.code, e.message)
			}
		})
	}
	f.srv = httptest.NewServer(mux)
	t.Cleanup(f.srv.Close)
	return f
}

type fakeError struct {
	status        int
	code, message string
}

func (e *fakeError) Error() string { return e.code }

var (
	errFakeNoSandbox = &fakeError{404, "not_found", "no such sandbox"}
	errFakeNoFile    = &fakeError{404, "not_found", "it does not exist"}
)

func fakeInvalid(format string, args ...any) error {
	return &fakeError{400, "invalid_request", fmt.Sprintf(format, args...)}
}

// admit checks the caller and the project.
func (f *fakeAPI) admit(r *http.Request) error {
	if r.Header.Get("Authorization") != "Bearer "+testToken {
		return &fakeError{401, "unauthorized", "the token is not valid"}
	}
	if ref := r.PathValue("ref"); ref != "" && ref != "default" {
		return &fakeError{404, "not_found", "no such project"}
	}
	return nil
}

// params refuses unknown and doubled query parameters. A name that ends in '.' is a prefix.
func params(r *http.Request, known ...string) error {
	for name, v := range r.URL.Query() {
		ok := slices.ContainsFunc(known, func(k string) bool { return k == name || strings.HasSuffix(k, ".") && strings.HasPrefix(name, k) })
		if !ok || len(v) > 1 {
			return fakeInvalid("unknown query parameter %q", name)
		}
	}
	return nil
}

func body(r *http.Request, v any) error {
	d := json.NewDecoder(r.Body)
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return fakeInvalid("the body: %v", err)
	}
	return nil
}

func answer(w http.ResponseWriter, status int, v any) error {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	return json.NewEncoder(w).Encode(v)
}

func (f *fakeAPI) show(id string) map[string]any {
	b := f.alive[id]
	return map[string]any{
		"id": id, "state": "running", "template": b.Template, "name": b.Name, "vcpu": 1, "memory_mb": 1024, "disk_gb": 5,
		"idle_timeout_s": 300, "lifetime_s": 3600, "metadata": b.Metadata, "created_at": time.Now(), "expires_at": time.Now().Add(time.Hour),
		"timings": map[string]any{"total_ms": 4.2, "source": "pool"},
	}
}

func (f *fakeAPI) create(w http.ResponseWriter, r *http.Request) error {
	if err := params(r); err != nil {
		return err
	}
	var b createBody
	if err := body(r, &b); err != nil {
		return err
	}
	if b.Template == "nope" {
		return &fakeError{404, "not_found", "there is no template nope"}
	}
	f.created++
	id := fmt.Sprintf("sbx%020d", f.created)
	id = strings.ReplaceAll(id, "0", "a")
	f.alive[id] = b
	return answer(w, 201, f.show(id))
}

func (f *fakeAPI) list(w http.ResponseWriter, r *http.Request) error {
	if err := params(r, "all", "state", "metadata.", "limit", "cursor"); err != nil {
		return err
	}
	ids := []string{}
	for id, b := range f.alive {
		if want := r.URL.Query().Get("metadata.team"); want == "" || b.Metadata["team"] == want {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	// One a page, so that paging is always exercised.
	at, _ := slices.BinarySearch(ids, r.URL.Query().Get("cursor"))
	out := map[string]any{"sandboxes": []any{}}
	if at < len(ids) {
		out["sandboxes"] = []any{f.show(ids[at])}
	}
	if at+1 < len(ids) {
		out["next_cursor"] = ids[at+1]
	}
	return answer(w, 200, out)
}

func (f *fakeAPI) known(r *http.Request) error {
	if _, ok := f.alive[r.PathValue("id")]; !ok {
		return errFakeNoSandbox
	}
	return nil
}

func (f *fakeAPI) get(w http.ResponseWriter, r *http.Request) error {
	if err := errors.Join(params(r), f.known(r)); err != nil {
		return err
	}
	return answer(w, 200, f.show(r.PathValue("id")))
}

func (f *fakeAPI) delete(w http.ResponseWriter, r *http.Request) error {
	if err := f.known(r); err != nil {
		return err
	}
	id := r.PathValue("id")
	delete(f.alive, id)
	f.deleted = append(f.deleted, id)
	return answer(w, 200, map[string]any{"id": id, "state": "stopped", "reason": "deleted"})
}

func (f *fakeAPI) timeout(w http.ResponseWriter, r *http.Request) error {
	var b struct {
		Idle     *int `json:"idle_timeout_s"`
		Lifetime *int `json:"lifetime_s"`
	}
	if err := errors.Join(f.known(r), body(r, &b)); err != nil {
		return err
	}
	if b.Idle == nil || *b.Idle != 600 || b.Lifetime != nil {
		return fakeInvalid("this test sets 10 minutes of idleness alone")
	}
	return answer(w, 200, map[string]any{"id": r.PathValue("id"), "idle_timeout_s": 600, "expires_at": time.Now().Add(time.Hour)})
}

func (f *fakeAPI) templates(w http.ResponseWriter, r *http.Request) error {
	return answer(w, 200, map[string]any{"templates": []any{map[string]any{
		"name": "base", "digest": "sha256:0123456789abcdef", "kernels": []string{"python"}, "image_bytes": 5 << 20,
		"default_size": map[string]any{"vcpu": 1, "memory_mb": 1024, "disk_gb": 5}, "pool": map[string]any{"target": 3, "ready": 2},
	}}})
}

func (f *fakeAPI) processes(w http.ResponseWriter, r *http.Request) error {
	return answer(w, 200, map[string]any{"processes": []any{
		map[string]any{"pid": 7, "argv": []string{"sleep", "\x1b[2J9"}, "user": "user", "running": true, "started_at": time.Now()},
		map[string]any{"pid": 8, "argv": []string{"true"}, "user": "user", "running": false, "exit_code": 0, "started_at": time.Now()},
	}})
}

func (f *fakeAPI) signal(w http.ResponseWriter, r *http.Request) error {
	var b struct {
		Signal string `json:"signal"`
	}
	if err := errors.Join(f.known(r), body(r, &b)); err != nil {
		return err
	}
	f.signals = append(f.signals, r.PathValue("pid")+" "+b.Signal)
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (f *fakeAPI) logs(w http.ResponseWriter, r *http.Request) error {
	if err := errors.Join(params(r, "cursor", "limit"), f.known(r)); err != nil {
		return err
	}
	return answer(w, 200, map[string]any{"next_cursor": "1", "events": []any{
		map[string]any{"at": time.Now(), "type": "lifecycle", "event": "created", "fields": map[string]any{"source": "pool"}},
	}})
}

func (f *fakeAPI) metrics(w http.ResponseWriter, r *http.Request) error {
	if err := errors.Join(params(r, "since_s"), f.known(r)); err != nil {
		return err
	}
	return answer(w, 200, map[string]any{"samples": []any{map[string]any{"at": time.Now(), "cpu_percent": 12.5, "memory_bytes": 3 << 20}}})
}

func (f *fakeAPI) tokens(w http.ResponseWriter, r *http.Request) error {
	return answer(w, 200, map[string]any{"tokens": []any{
		map[string]any{"id": "tok1", "name": "ci", "role": "developer", "scopes": []string{"sandboxes:*"}, "created_at": time.Now()},
		map[string]any{"id": "tok2", "name": "old", "role": "readonly", "scopes": []string{}, "created_at": time.Now(), "revoked_at": time.Now()},
	}})
}

func (f *fakeAPI) createToken(w http.ResponseWriter, r *http.Request) error {
	var b struct {
		Name       string   `json:"name"`
		Project    string   `json:"project"`
		Role       string   `json:"role"`
		Scopes     []string `json:"scopes"`
		ExpiresInS int      `json:"expires_in_s"`
	}
	if err := body(r, &b); err != nil {
		return err
	}
	return answer(w, 201, map[string]any{"id": "tok3", "name": b.Name, "project": b.Project, "role": b.Role, "scopes": b.Scopes, "token": "sbt_secret"})
}

func (f *fakeAPI) revokeToken(w http.ResponseWriter, r *http.Request) error {
	if id := r.PathValue("id"); id != "tok1" {
		return &fakeError{404, "not_found", "no such token"}
	}
	f.revoked = append(f.revoked, r.PathValue("id"))
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func inWorkspace(p string) string { return path.Clean(path.Join("/workspace", p)) }

func (f *fakeAPI) at(r *http.Request) (string, error) {
	if err := errors.Join(params(r, "path", "user"), f.known(r)); err != nil {
		return "", err
	}
	p := r.URL.Query().Get("path")
	if strings.HasPrefix(p, "/") {
		return path.Clean(p), nil
	}
	return inWorkspace(p), nil
}

func (f *fakeAPI) stat(w http.ResponseWriter, r *http.Request) error {
	p, err := f.at(r)
	if err != nil {
		return err
	}
	b, ok := f.files[p]
	switch {
	case !ok:
		return errFakeNoFile
	case b == nil:
		return answer(w, 200, map[string]any{"type": "dir", "path": p})
	}
	return answer(w, 200, map[string]any{"type": "file", "path": p, "size": len(b)})
}

func (f *fakeAPI) getContent(w http.ResponseWriter, r *http.Request) error {
	p, err := f.at(r)
	if err != nil {
		return err
	}
	b, ok := f.files[p]
	if !ok || b == nil {
		return errFakeNoFile
	}
	_, err = w.Write(b)
	return err
}

func (f *fakeAPI) putContent(w http.ResponseWriter, r *http.Request) error {
	p, err := f.at(r)
	if err != nil {
		return err
	}
	b, err := io.ReadAll(r.Body)
	if err != nil {
		return err
	}
	if old, ok := f.files[p]; ok && old == nil {
		return fakeInvalid("it is a directory")
	}
	f.files[p] = append([]byte{}, b...)
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (f *fakeAPI) getArchive(w http.ResponseWriter, r *http.Request) error {
	p, err := f.at(r)
	if err != nil {
		return err
	}
	tw := tar.NewWriter(w)
	for name, b := range f.files {
		rel, ok := strings.CutPrefix(name, p+"/")
		if !ok {
			continue
		}
		h := &tar.Header{Name: rel, Typeflag: tar.TypeReg, Size: int64(len(b)), Mode: 0o644 | f.modes[name]}
		if b == nil {
			h = &tar.Header{Name: rel + "/", Typeflag: tar.TypeDir, Mode: 0o755}
		}
		if err := tw.WriteHeader(h); err != nil {
			return err
		}
		if _, err := tw.Write(b); err != nil {
			return err
		}
	}
	return tw.Close()
}

func (f *fakeAPI) putArchive(w http.ResponseWriter, r *http.Request) error {
	p, err := f.at(r)
	if err != nil {
		return err
	}
	f.files[p] = nil
	tr := tar.NewReader(r.Body)
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			w.WriteHeader(http.StatusNoContent)
			return nil
		}
		if err != nil {
			return fakeInvalid("the archive: %v", err)
		}
		name := path.Join(p, h.Name)
		switch h.Typeflag {
		case tar.TypeDir:
			f.files[name] = nil
		case tar.TypeReg:
			b, err := io.ReadAll(tr)
			if err != nil {
				return fakeInvalid("the archive: %v", err)
			}
			f.files[name], f.modes[name] = append([]byte{}, b...), h.Mode
		case tar.TypeSymlink:
			f.files[name] = []byte("-> " + h.Linkname)
		}
	}
}

// cli runs the command line against the fake.
func (f *fakeAPI) cli(in string, args ...string) (code int, stdout, stderr string) {
	f.t.Helper()
	f.t.Setenv("SANDLOT_URL", f.srv.URL)
	f.t.Setenv("SANDLOT_TOKEN", testToken)
	f.t.Setenv("SANDLOT_PROJECT", "default")
	var out, errs bytes.Buffer
	code = run(f.t.Context(), args, &streams{strings.NewReader(in), &out, &errs})
	return code, out.String(), errs.String()
}

// sandbox makes one and returns its id.
func (f *fakeAPI) sandbox() string {
	f.t.Helper()
	code, out, errs := f.cli("", "sandbox", "create")
	if code != 0 {
		f.t.Fatalf("create: %d %s", code, errs)
	}
	return strings.TrimSpace(out)
}
