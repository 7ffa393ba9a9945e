package httpapi

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"time"
)

// TestTransfersDoNotGrowMemory: 96 MiB up and down, by far more than may be held.
func TestTransfersDoNotGrowMemory(t *testing.T) {
	const size = 96 << 20
	w := newWorld(t, Limits{})
	files := w.url + boxes + "/" + w.create(`{}`) + "/files/content?path=big"
	var before, now, most runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	watch := make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-watch:
				return
			case <-time.After(20 * time.Millisecond):
				runtime.ReadMemStats(&now)
				if now.HeapInuse > most.HeapInuse {
					most = now
				}
			}
		}
	}()
	sum := sha256.New()
	src := io.TeeReader(io.LimitReader(rand.NewChaCha8([32]byte{7}), size), sum)
	for _, c := range []struct {
		method string
		body   io.Reader
		length int64
	}{{"PUT", src, size}, {"GET", nil, 0}} {
		req, err := http.NewRequest(c.method, files, c.body)
		if err != nil {
			t.Fatal(err)
		}
		req.ContentLength = c.length
		req.Header.Set("Authorization", "Bearer "+w.token)
		start := time.Now()
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		got := sha256.New()
		n, err := io.Copy(got, resp.Body)
		_ = resp.Body.Close()
		t.Logf("%s %.0f MB/s", c.method, size/1e6/time.Since(start).Seconds())
		if err != nil || resp.StatusCode >= 300 {
			t.Fatalf("%s: %d, %v", c.method, resp.StatusCode, err)
		}
		if c.method == "GET" && (n != size || !bytes.Equal(got.Sum(nil), sum.Sum(nil))) {
			t.Errorf("%d other bytes came back", n)
		}
	}
	close(watch)
	<-done
	if grown := int64(most.HeapInuse) - int64(before.HeapInuse); grown > 16<<20 {
		t.Errorf("the heap grew by %d MiB", grown>>20)
	}
}

func TestFileLimits(t *testing.T) {
	w := newWorld(t, Limits{})
	files := boxes + "/" + w.create(`{}`) + "/files/"
	req, _ := http.NewRequest("PUT", w.url+files+"content?path=x", io.LimitReader(zeros{}, 300<<20))
	req.ContentLength = 300 << 20
	req.Header.Set("Authorization", "Bearer "+w.token)
	req.Header.Set("Expect", "100-continue")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusRequestEntityTooLarge {
		t.Errorf("300 MiB: %d", resp.StatusCode)
	}
	w.do("PUT", files+"content?path=d%2fe%2ff", "0123456789")
	for rng, want := range map[string]string{
		"": "200 0123456789", "bytes=2-4": "206 234", "bytes=7-": "206 789", "bytes=-2": "206 89", "bytes=5-500": "206 56789",
		"bytes=10-": "416", "bytes=4-2": "416", "bytes=0-1,3-4": "416", "lines=1": "416",
	} {
		a := w.do("GET", files+"content?path=d/e/f", "", "Range", rng)
		got := fmt.Sprintf("%d %s", a.status, a.body)
		if a.status == 416 {
			got = "416"
			if a.code(t) != "range_not_satisfiable" || a.header.Get("Content-Range") != "bytes */10" {
				t.Errorf("%s: %s %s", rng, a.body, a.header.Get("Content-Range"))
			}
		}
		if got != want {
			t.Errorf("%q: %s, want %s", rng, got, want)
		}
	}
	a := w.do("HEAD", files+"content?path=d/e/f", "")
	if a.status != 200 || a.header.Get("Content-Length") != "10" || a.header.Get("Last-Modified") == "" {
		t.Errorf("HEAD: %d %v", a.status, a.header)
	}
	w.do("PUT", files+"content?path=empty", "")
	if a := w.do("HEAD", files+"content?path=empty", ""); a.status != 200 || a.header.Get("Content-Length") != "0" {
		t.Errorf("HEAD of an empty file: %d %v", a.status, a.header)
	}
	if a := w.do("HEAD", files+"content?path=nothing", ""); a.status != 404 {
		t.Errorf("HEAD of nothing: %d", a.status)
	}
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }

// TestSecretsStayInside: adversarial item 34. A canary in every place where a secret may travel is in no
// log, no metric, no answer that did not ask for it, and not on the disk.
func TestSecretsStayInside(t *testing.T) {
	w := newWorld(t, Limits{})
	const canary = "CANARY7f3a9c"
	id := w.create(`{"env":{"KEY":"` + canary + `"},"preview":"private"}`)
	exec := boxes + "/" + id + "/exec"
	if a := w.do("POST", exec, `{"cmd":"printenv KEY"}`); !strings.Contains(string(a.body), canary) { // the control
		t.Fatalf("%s", a.body)
	}
	w.do("POST", exec, `{"cmd":"true","env":{"K":"`+canary+`"},"stdin":"`+canary+`"}`)
	w.do("POST", exec, `{"cmd":["/no/`+canary+`"]}`)
	w.do("POST", exec, `{"cmd":"`+canary+`","cwd":"/no/`+canary+`"}`)
	w.do("PUT", boxes+"/"+id+"/files/content?path=f", canary)
	w.do("GET", boxes+"/"+id+"/files/content?path="+canary, "")
	w.do("GET", "/"+canary+"?token="+canary, "", "X-Request-Id", "a b "+canary, "Cookie", canary)
	w.do("POST", boxes, `{"env":{"1X":"`+canary+`"}}`)
	w.do("POST", boxes, `{"env":{"A":"`+canary+`\u0000"}}`)
	w.as("sl_"+canary+strings.Repeat("A", 31), "GET", boxes, "")
	w.do("GET", boxes+"/"+id, "", "Idempotency-Key", canary)
	outputs := map[string]string{
		"log":     w.log.String(),
		"metrics": string(w.do("GET", "/metrics", "").body),
		"get":     string(w.do("GET", boxes+"/"+id, "").body),
		"list":    string(w.do("GET", boxes+"?all=1", "").body),
		"logs":    string(w.do("GET", boxes+"/"+id+"/logs", "").body),
		"tokens":  string(w.do("GET", "/api/v1/tokens", "").body),
		"whoami":  string(w.do("GET", "/api/v1/whoami", "").body),
	}
	for name, b := range w.diskFiles() {
		outputs[name] = b
	}
	for name, out := range outputs {
		for _, secret := range []string{canary, w.token} {
			if strings.Contains(out, secret) {
				i := strings.Index(out, secret)
				t.Errorf("%s has a secret: …%s…", name, out[max(0, i-100):i+20])
			}
		}
		if name != "" && out == "" {
			t.Errorf("%s is empty: nothing was tested", name)
		}
	}
}
