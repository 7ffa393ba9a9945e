package agent

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
)

// TestParkMemoryIsKeptOrUnmapped is a regression: the memory of parked children was kept in a sync.Pool, and each
// collection forgot a mapping.
func TestParkMemoryIsKeptOrUnmapped(t *testing.T) {
	mapped := func() (kb int) {
		b, err := os.ReadFile("/proc/self/status")
		if err != nil {
			t.Fatal(err)
		}
		_, rest, _ := strings.Cut(string(b), "VmSize:")
		if _, err := fmt.Sscan(rest, &kb); err != nil {
			t.Fatal(err)
		}
		return kb
	}
	round := func() {
		var all [][]byte
		for range 4 { // more than are kept
			m, err := takeMemory()
			if err != nil {
				t.Fatal(err)
			}
			m[0], m[parkBytes-1] = 1, 1
			all = append(all, m)
		}
		for _, m := range all {
			freeMemory(m)
		}
		runtime.GC()
		runtime.GC()
	}
	round()
	before := mapped()
	for range 100 {
		round()
	}
	// Leaking one each round would be 25 MB.
	if grown := mapped() - before; grown > 12<<10 {
		t.Errorf("%d KB more are mapped after 100 rounds", grown)
	}
	m, err := takeMemory()
	if err != nil {
		t.Fatal(err)
	}
	defer freeMemory(m)
	if m[0] != 0 {
		t.Error("a table is taken with what an earlier child left in it")
	}
}
