package main

import (
	"math"
	"os"
	"path/filepath"
	"strconv"
	"testing"
)

func TestGauge(t *testing.T) {
	const mb = 1 << 20
	v1 := "cache 500\ninactive_file 10485760\nactive_file 5242880\ntotal_inactive_file 10485760\ntotal_active_file 5242880\n"
	v2 := "anon 1\nfile 500\ninactive_file 10485760\nactive_file 5242880\nslab 9\n"
	for _, c := range []struct {
		name, limit, usage, stat string
		want                     int64
	}{
		{"plenty", strconv.Itoa(1024 * mb), strconv.Itoa(100 * mb), v1, (1024-100)*mb - memoryReserve},
		{"scarce, version 1", strconv.Itoa(320 * mb), strconv.Itoa(250 * mb), v1, (320-250+15)*mb - memoryReserve},
		{"scarce, version 2", strconv.Itoa(320 * mb), strconv.Itoa(250*mb) + "\n", v2, (320-250+15)*mb - memoryReserve},
		{"beyond", strconv.Itoa(320 * mb), strconv.Itoa(300 * mb), "", (320-300)*mb - memoryReserve},
		{"no limit", "max\n", strconv.Itoa(250 * mb), v2, math.MaxInt64},
		{"nonsense", "1", "x", "", math.MaxInt64},
	} {
		dir := t.TempDir()
		fd := func(name, content string) int {
			p := filepath.Join(dir, name)
			if err := os.WriteFile(p, []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
			f, err := os.Open(p)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { f.Close() })
			return int(f.Fd())
		}
		g := gauge{limit: fd("limit", c.limit), usage: fd("usage", c.usage), stat: fd("stat", c.stat)}
		if got := g.free(); got != c.want {
			t.Errorf("%s: %d bytes free, want %d", c.name, got, c.want)
		}
	}
	if got := (gauge{-1, -1, -1}).free(); got != math.MaxInt64 {
		t.Errorf("closed files: %d", got)
	}
}

func TestMemoryFiles(t *testing.T) {
	root := t.TempDir()
	for _, p := range []string{"memory/m/memory.limit_in_bytes", "two/memory.max"} {
		p = filepath.Join(root, p)
		if err := os.MkdirAll(filepath.Dir(p), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for proc, want := range map[string][3]string{
		"1:cpu:/m\n4:memory:/m\n0::/\n": {filepath.Join(root, "memory/m"), "memory.usage_in_bytes", "memory.limit_in_bytes"},
		"0::/two\n":                     {filepath.Join(root, "two"), "memory.current", "memory.max"},
		"4:memory:/gone\n0::/gone\n":    {},
		"":                              {},
	} {
		dir, usage, limit := memoryFiles(root, []byte(proc))
		if got := [3]string{dir, usage, limit}; got != want {
			t.Errorf("%q: %q, want %q", proc, got, want)
		}
	}
}

func TestOpenKillsLeavesNoTrace(t *testing.T) {
	p := filepath.Join(t.TempDir(), "kills")
	t.Setenv(killsVar, p)
	if err := openKills(); err == nil {
		t.Error("a file that is not there was opened")
	}
	if v, ok := os.LookupEnv(killsVar); ok {
		t.Errorf("the variable is still there: %q", v)
	}
}
