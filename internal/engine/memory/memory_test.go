package memory_test

import (
	"os"
	"slices"
	"testing"

	"sandlot"
	"sandlot/internal/engine"
	"sandlot/internal/engine/enginetest"
	"sandlot/internal/engine/memory"
)

func TestEngine(t *testing.T) {
	dir := t.TempDir()
	enginetest.Run(t, enginetest.Harness{
		Open:     func(*testing.T) engine.Engine { return memory.New(dir) },
		Template: sandlot.Template{Name: "base", Digest: "sha256:0", Size: sandlot.DefaultSize},
		Machines: dir,
		Kill:     func(_ *testing.T, m engine.Machine) { m.(interface{ Kill() }).Kill() },
		Census: func(t *testing.T) []string {
			entries, err := os.ReadDir(dir)
			if err != nil {
				t.Fatal(err)
			}
			names := []string{}
			for _, e := range entries {
				names = append(names, e.Name())
			}
			slices.Sort(names)
			return names
		},
	})
}
