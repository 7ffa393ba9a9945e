package main

import "testing"

func TestLastBoot(t *testing.T) {
	for _, c := range []struct {
		args []string
		want bool
	}{
		{[]string{"runsc-sandbox", "--root=/x", "boot", "--apply-caps=true", "--setup-root", "id"}, false},
		{[]string{"runsc-sandbox", "boot", "--setup-root=true", "id"}, false},
		{[]string{"runsc-sandbox", "boot", "--apply-caps=false", "--setup-root=false", "id"}, true},
		{[]string{"runsc-sandbox", "boot", "id"}, true},
	} {
		if got := lastBoot(c.args); got != c.want {
			t.Errorf("%q: %v", c.args, got)
		}
	}
}

// TestPatched fails where the build lacks the change that start.go needs.
func TestPatched(t *testing.T) {
	if registerMembarrier == nil {
		t.Error("built without -modfile=patched.mod: run `go run ./patch` first")
	}
}
