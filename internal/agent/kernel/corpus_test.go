package kernel

import (
	"os/exec"
	"strings"
	"testing"

	runcode "sandlot/conformance/run-code"
)

// The corpus against the bridges alone: test/e2e plays it once more through a server.
func TestCorpus(t *testing.T) {
	scripts, err := runcode.Scripts()
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range scripts {
		if s.Language == "bash" {
			continue // has no kernel
		}
		t.Run(s.Name, func(t *testing.T) {
			t.Parallel()
			for _, module := range s.Needs {
				if s.Language == "python" && exec.Command(python(), "-c", "import "+module).Run() != nil { //nolint:gosec,noctx // of the corpus
					t.Skipf("%s has no %s: SANDLOT_PYTHON may name one that has", python(), module)
				}
			}
			kernels := native{}
			if e := kernels.Run(t, "corpus", s.Language, "1").Error; e != nil && s.Language == "typescript" && strings.Contains(e.Value, "it needs Node 22.13 or later") {
				t.Skip("SANDLOT_NODE may name a newer one: " + e.Value)
			}
			delete(kernels, "corpus")
			s.Play(t, kernels, "corpus")
		})
	}
}
