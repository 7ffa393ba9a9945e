package httpapi

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"sandlot"
	"sandlot/internal/httpapi/route"
)

// TestEnvelopeEverywhere: whatever is wrong, the answer has the one shape.
func TestEnvelopeEverywhere(t *testing.T) {
	w := newWorld(t, Limits{})
	id := w.create(`{}`)
	exec := boxes + "/" + id + "/exec"
	for _, c := range []struct {
		method, path, body string
		status             int
		code               string
	}{
		{"GET", "/", "", 404, "not_found"},
		{"GET", "/api/v1/nothing", "", 404, "not_found"},
		{"GET", "/api/v1//projects", "", 404, "not_found"},
		{"GET", boxes + "/../x", "", 404, "not_found"},
		{"GET", boxes + "/..%2f..%2fetc", "", 404, "not_found"},
		{"GET", boxes + "/%00", "", 404, "not_found"},
		{"GET", boxes + "/" + strings.Repeat("a", 5000), "", 404, "not_found"},
		{"PATCH", boxes, "", 405, "method_not_allowed"},
		{"DELETE", boxes + "/usage", "", 405, "method_not_allowed"},
		{"POST", boxes, `{`, 400, "invalid_request"},
		{"POST", boxes, `[]`, 400, "invalid_request"},
		{"POST", boxes, `null`, 400, "invalid_request"},
		{"POST", boxes, `"x"`, 400, "invalid_request"},
		{"POST", boxes, `{} {}`, 400, "invalid_request"},
		{"POST", boxes, "{\"name\":\"\xff\"}", 400, "invalid_request"},
		{"POST", boxes, `{"vcpu":"two"}`, 400, "invalid_request"},
		{"POST", boxes, `{"vcpu":1e99}`, 400, "invalid_request"},
		{"POST", boxes, `{"vcpu":0}`, 400, "invalid_request"},
		{"POST", boxes, `{"lifetime_s":0}`, 400, "invalid_request"},
		{"POST", boxes, `{"lifetime_s":9223372036854775807}`, 400, "invalid_request"},
		{"POST", boxes, `{"lifetime_s":-9223372036854775808}`, 400, "invalid_request"},
		{"POST", boxes, `{"template":"a","template":"b"}`, 400, "invalid_request"},
		{"POST", boxes, `{"env":{"A":"1","A":"2"}}`, 400, "invalid_request"},
		{"POST", boxes, `{"Template":"a"}`, 400, "invalid_request"},
		{"POST", boxes, `{"templat":"a"}`, 400, "invalid_request"},
		{"POST", boxes, `{"template":"nowhere"}`, 404, "not_found"},
		{"POST", boxes, `{"env":` + strings.Repeat(`{"a":`, 1<<17), 400, "invalid_request"},
		{"POST", boxes, strings.Repeat("[", 1<<20), 400, "invalid_request"},
		{"POST", boxes, `{"name":"` + strings.Repeat("a", 1<<20) + `"}`, 413, "too_large"},
		{"POST", boxes, `{"isolation":"microvm"}`, 501, "unsupported"},
		{"GET", boxes + "?limit=0", "", 400, "invalid_request"},
		{"GET", boxes + "?limit=1&limit=2", "", 400, "invalid_request"},
		{"GET", boxes + "?limt=1", "", 400, "invalid_request"},
		{"GET", boxes + "?cursor=x", "", 400, "invalid_request"},
		{"GET", boxes + "?state=asleep", "", 400, "invalid_request"},
		{"GET", boxes + "?%zz=1", "", 400, "invalid_request"},
		{"POST", exec, "", 400, "invalid_request"},
		{"POST", exec, `{"cmd":""}`, 400, "invalid_request"},
		{"POST", exec, `{"cmd":[]}`, 400, "invalid_request"},
		{"POST", exec, `{"cmd":7}`, 400, "invalid_request"},
		{"POST", exec, `{"cmd":"a","stream":true,"background":true}`, 400, "invalid_request"},
		{"POST", exec, `{"cmd":"a","timeout_s":0}`, 400, "invalid_request"},
		{"POST", exec, `{"cmd":"a","user":"../root"}`, 400, "invalid_request"},
		{"GET", boxes + "/" + id + "/processes/0/stream", "", 404, "not_found"},
		{"GET", boxes + "/" + id + "/processes/x/stream", "", 404, "not_found"},
		{"POST", boxes + "/" + id + "/run-code", `{}`, 400, "invalid_request"},
		{"POST", boxes + "/" + id + "/run-code", `{"code":"1","language":"cobol"}`, 400, "invalid_request"},
		{"POST", boxes + "/" + id + "/run-code", `{"code":"1","context_id":"../x"}`, 400, "invalid_request"},
		{"POST", boxes + "/" + id + "/run-code", `{"code":"1","context_id":"x","language":"bash"}`, 400, "invalid_request"},
		{"POST", boxes + "/" + id + "/run-code", `{"code":"1","timeout_s":0}`, 400, "invalid_request"},
		{"POST", boxes + "/" + id + "/contexts", `{"language":"bash"}`, 400, "invalid_request"},
		{"POST", boxes + "/" + id + "/contexts/nowhere/restart", "", 404, "not_found"},
		{"POST", boxes + "/" + id + "/contexts/..%2fx/interrupt", "", 404, "not_found"},
		{"DELETE", boxes + "/" + id + "/contexts/a%20b", "", 404, "not_found"},
		{"GET", boxes + "/" + id + "/files/content", "", 400, "invalid_request"},
	} {
		a := w.do(c.method, c.path, c.body)
		if a.status != c.status || a.code(t) != c.code {
			t.Errorf("%s %.80s %.60s: %d %s, want %d %s", c.method, c.path, c.body, a.status, a.body, c.status, c.code)
		}
		if len(a.body) > 4096 {
			t.Errorf("%s %.80s: an error of %d bytes", c.method, c.path, len(a.body))
		}
	}
	if a := w.do("POST", boxes, `{"templat":"a"}`); !strings.Contains(string(a.body), `did you mean \"template\"`) {
		t.Errorf("no suggestion: %s", a.body)
	}
}

// TestPathForms: adversarial item 1, the half that no engine is needed for.
func TestPathForms(t *testing.T) {
	w := newWorld(t, Limits{})
	files := boxes + "/" + w.create(`{}`) + "/files/"
	for _, p := range []string{
		"..%2f", "../x", "a/../../b", "..%2f..%2fetc%2fpasswd", "%00", "a%00b", "%c0%ae%c0%ae/x", "a/..", strings.Repeat("a/", 2049), strings.Repeat("b", 256), "",
	} {
		for _, c := range []struct{ method, op string }{
			{"GET", "list"}, {"GET", "stat"}, {"GET", "content"}, {"PUT", "content"}, {"DELETE", "content"}, {"POST", "mkdir"},
			{"GET", "archive"}, {"PUT", "archive"}, {"GET", "watch"},
		} {
			if p == "" && c.op != "content" && c.op != "mkdir" {
				continue // the default is /workspace
			}
			a := w.do(c.method, files+c.op+"?path="+p, "")
			if a.status != http.StatusBadRequest || a.code(t) != "invalid_request" {
				t.Errorf("%s %s %.40q: %d %s", c.method, c.op, p, a.status, a.body)
			}
		}
		if a := w.do("POST", files+"move?path=x&to="+p, ""); a.status != http.StatusBadRequest {
			t.Errorf("move to %.40q: %d %s", p, a.status, a.body)
		}
	}
}

func TestRequestIDs(t *testing.T) {
	w := newWorld(t, Limits{})
	if a := w.do("GET", "/healthz", "", "X-Request-Id", "my-id.7"); a.header.Get("X-Request-Id") != "my-id.7" {
		t.Errorf("not taken over: %q", a.header.Get("X-Request-Id"))
	}
	for _, bad := range []string{"a b", "x\u202ey", strings.Repeat("a", 65), "<script>"} {
		a := w.do("GET", "/nothing", "", "X-Request-Id", bad)
		if got := a.header.Get("X-Request-Id"); got == bad || !strings.HasPrefix(got, "req") {
			t.Errorf("%q became %q", bad, got)
		}
	}
}

func TestPanicIsAnAnswer(t *testing.T) {
	w := newWorld(t, Limits{},
		&route.Operation{ID: "early", Method: "GET", Path: "/early", Status: 200, Handle: func(*route.Request) error { panic("canary-of-the-panic") }},
		&route.Operation{ID: "late", Method: "GET", Path: "/late", Status: 200, Handle: func(q *route.Request) error {
			q.W.Header().Set("Content-Length", "100")
			_, _ = q.W.Write([]byte("half"))
			panic("late")
		}})
	a := w.do("GET", "/early", "")
	if a.status != http.StatusInternalServerError || a.code(t) != "internal" || strings.Contains(string(a.body), "canary") {
		t.Errorf("%d %s", a.status, a.body)
	}
	id := a.header.Get("X-Request-Id")
	if log := w.log.String(); !strings.Contains(log, "canary-of-the-panic") || !strings.Contains(log, id) || !strings.Contains(log, "error_test.go") {
		t.Error("the log has not the panic, its stack and its id")
	}
	resp, err := http.Get(w.url + "/late")
	if err == nil {
		_, err = io.ReadAll(resp.Body)
		_ = resp.Body.Close()
	}
	if err == nil {
		t.Error("half an answer looked whole")
	}
}

func TestRateLimit(t *testing.T) {
	w := newWorld(t, Limits{RequestsPerSecond: 0.2, Burst: 3})
	var limited answer
	for range 5 {
		if a := w.do("GET", "/api/v1/whoami", ""); a.status == http.StatusTooManyRequests {
			limited = a
		}
	}
	if limited.status == 0 || limited.code(t) != "rate_limited" || limited.header.Get("Retry-After") == "" {
		t.Errorf("%d %s", limited.status, limited.body)
	}
	if a := w.as("", "GET", "/healthz", ""); a.status != http.StatusOK {
		t.Errorf("others are not served: %d", a.status)
	}
}

// TestSlowClients: adversarial item 45 in part. A client that sends slowly is cut, and others are served.
func TestSlowClients(t *testing.T) {
	w := newWorld(t, Limits{Stall: 200 * time.Millisecond, Header: 200 * time.Millisecond})
	host := strings.TrimPrefix(w.url, "http://")
	id := w.create(`{}`)
	auth := "Authorization: Bearer " + w.token + "\r\n"
	for name, sent := range map[string]string{
		"header":    "GET /healthz HTTP/1.1\r\nHost: x\r\nX-Slow: ",
		"json body": "POST " + boxes + " HTTP/1.1\r\nHost: x\r\n" + auth + "Content-Length: 100\r\n\r\n{",
		"upload":    "PUT " + boxes + "/" + id + "/files/content?path=x HTTP/1.1\r\nHost: x\r\n" + auth + "Content-Length: 1000\r\n\r\nabc",
		"chunked":   "PUT " + boxes + "/" + id + "/files/content?path=x HTTP/1.1\r\nHost: x\r\n" + auth + "Transfer-Encoding: chunked\r\n\r\n5\r\nabc",
	} {
		t.Run(name, func(t *testing.T) {
			c, err := net.Dial("tcp", host)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = c.Close() }()
			if _, err := io.WriteString(c, sent); err != nil {
				t.Fatal(err)
			}
			_ = c.SetReadDeadline(time.Now().Add(5 * time.Second))
			b, err := io.ReadAll(c)
			if err != nil {
				t.Fatalf("not cut: %v", err)
			}
			if name != "header" && !strings.Contains(string(b), "504") {
				t.Errorf("%.200s", b)
			}
			if a := w.do("GET", "/healthz", ""); a.status != http.StatusOK {
				t.Errorf("others are not served: %d", a.status)
			}
		})
	}
	if a := w.do("GET", boxes+"/"+id+"/files/list", ""); strings.Contains(string(a.body), `"name"`) {
		t.Errorf("a broken upload left something: %s", a.body)
	}
	// huge headers
	c, err := net.Dial("tcp", host)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	go func() {
		_, _ = io.WriteString(c, "GET /healthz HTTP/1.1\r\nHost: x\r\n")
		for range 2000 {
			if _, err := fmt.Fprintf(c, "X-A: %s\r\n", strings.Repeat("a", 1000)); err != nil {
				return
			}
		}
	}()
	if line, _ := bufio.NewReader(c).ReadString('\n'); !strings.Contains(line, "431") {
		t.Errorf("huge headers: %q", line)
	}
}

// TestStorageFault: adversarial item 53 in part. What the store cannot keep is not acknowledged.
func TestStorageFault(t *testing.T) {
	w := newWorld(t, Limits{})
	id := w.create(`{}`)
	if err := w.store.LimitPages(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	var a answer
	for range 300 {
		if a = w.do("POST", boxes, `{"metadata":{"fill":"`+strings.Repeat("x", 8000)+`"}}`); a.status != http.StatusCreated {
			break
		}
	}
	if a.status != http.StatusServiceUnavailable || a.code(t) != string(sandlot.CodeUnavailable) || a.header.Get("Retry-After") == "" {
		t.Errorf("%d %s", a.status, a.body)
	}
	if a := w.do("POST", boxes+"/"+id+"/exec", `{"cmd":"echo ok"}`); a.status != http.StatusOK {
		t.Errorf("an acknowledged sandbox: %d %s", a.status, a.body)
	}
	if err := w.store.LimitPages(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	if a := w.do("POST", boxes, `{}`); a.status != http.StatusCreated {
		t.Errorf("after the fault: %d %s", a.status, a.body)
	}
}
