// Command patch makes a copy of gVisor's module with small changes, and patched.mod, which builds with it:
//
//	go run ./patch && CGO_ENABLED=0 go build -modfile=patched.mod .
//
// Run it in the folder above. It fails when the module does not read as expected, so that a new version cannot
// lose a change in silence. Nothing of the copy is kept in this repository.
package main

import (
	"fmt"
	"io/fs"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

const (
	module = "gvisor.dev/gvisor"
	folder = "gvisor"
	mod    = "patched.mod"
	sum    = "patched.sum"
)

// change replaces one piece of text, which occurs exactly once, in a file of the module.
type change struct {
	file, from, to string
}

var changes = []change{
	// Registering for membarrier(2) waits for an RCU grace period, 11 ms here, and gVisor does it in each of the
	// six processes of a start. Only the last, the sentry, can use it: start.go calls it there.
	{"pkg/sentry/hostmm/membarrier.go", "func init() {", "var registerMembarrier = func() {"},
}

func main() {
	log.SetFlags(0)
	log.SetPrefix("patch: ")
	if err := run(); err != nil {
		log.Fatal(err)
	}
}

func run() error {
	out, err := exec.Command("go", "mod", "download", "-json", module).Output() // a no-op where it is there already
	if err != nil {
		return fmt.Errorf("download %s: %w: %s", module, err, out)
	}
	out, err = exec.Command("go", "list", "-m", "-f", "{{.Dir}}", module).Output()
	if err != nil {
		return fmt.Errorf("find %s: %w", module, err)
	}
	if err := copySources(strings.TrimSpace(string(out))); err != nil {
		return err
	}
	for _, c := range changes {
		path := filepath.Join(folder, c.file)
		src, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if n := strings.Count(string(src), c.from); n != 1 {
			return fmt.Errorf("%s has %q %d times, not once", c.file, c.from, n)
		}
		if err := os.WriteFile(path, []byte(strings.Replace(string(src), c.from, c.to, 1)), 0o644); err != nil {
			return err
		}
	}
	for from, to := range map[string]string{"go.mod": mod, "go.sum": sum} {
		b, err := os.ReadFile(from)
		if err != nil {
			return err
		}
		if to == mod {
			b = fmt.Appendf(b, "\nreplace %s => ./%s\n", module, folder)
		}
		if err := os.WriteFile(to, b, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// copySources copies the module without its tests.
func copySources(dir string) error {
	if err := os.RemoveAll(folder); err != nil {
		return err
	}
	return filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		if d.IsDir() {
			return os.MkdirAll(filepath.Join(folder, rel), 0o755)
		}
		if strings.HasSuffix(path, "_test.go") {
			return nil
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(folder, rel), b, 0o644)
	})
}
