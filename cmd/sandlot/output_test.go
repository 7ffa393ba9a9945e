package main

import (
	"io"
	"os"
	"strings"
	"testing"
	"time"
)

func TestProgress(t *testing.T) {
	var b strings.Builder
	p := &progress{w: &b, name: "file", total: 10 << 20, begun: time.Now().Add(-time.Second)}
	if n, err := io.Copy(io.Discard, p.through(strings.NewReader(strings.Repeat("x", 5<<20)))); n != 5<<20 || err != nil {
		t.Fatalf("%d, %v", n, err)
	}
	p.finish()
	last := b.String()[strings.LastIndexByte(b.String(), '\r'):]
	if !strings.Contains(last, "file  [===============               ]  50%") || !strings.HasSuffix(last, "/s\n") {
		t.Errorf("half of it: %q", last)
	}
	b.Reset()
	p = &progress{w: &b, name: "stream", total: -1, begun: time.Now()}
	_, _ = io.Copy(io.Discard, p.through(strings.NewReader(strings.Repeat("x", 2<<20))))
	p.finish()
	if !strings.Contains(b.String(), "stream  2.0 MiB") {
		t.Errorf("of unknown length: %q", b.String())
	}
	b.Reset()
	p = &progress{w: &b, name: "small", total: -1, begun: time.Now()}
	_, _ = io.Copy(io.Discard, p.through(strings.NewReader("x")))
	if p.finish(); b.Len() > 0 {
		t.Errorf("a small one shows %q", b.String())
	}
}

func TestProgressIsForTerminals(t *testing.T) {
	tty, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Skipf("no terminals here: %v", err)
	}
	defer tty.Close()
	if newProgress(tty, "x", 2<<20) == nil || newProgress(tty, "x", -1) == nil {
		t.Error("no bar on a terminal")
	}
	if newProgress(tty, "x", 1<<20) != nil {
		t.Error("a bar for a small file")
	}
	if newProgress(&strings.Builder{}, "x", 2<<20) != nil {
		t.Error("a bar in a pipe")
	}
	var none *progress
	if r := strings.NewReader(""); none.through(r) != r {
		t.Error("no bar reads through nothing")
	}
	none.finish()
}

func TestPrintable(t *testing.T) {
	for in, want := range map[string]string{
		"plain ünï":         "plain ünï",
		"\x1b[2J\a\n\t\x7f": "\uFFFD[2J\uFFFD\uFFFD\uFFFD\uFFFD",
		"\xff":              "\uFFFD",
		"a\u202eb":          "a\uFFFDb", // right-to-left override
	} {
		if got := printable(in); got != want {
			t.Errorf("%q: %q", in, got)
		}
	}
}
