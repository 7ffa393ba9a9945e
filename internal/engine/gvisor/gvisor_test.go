package gvisor_test

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sandlot"
	"sandlot/internal/engine"
	"sandlot/internal/engine/enginetest"
	"sandlot/internal/engine/gvisor"
	"sandlot/internal/hostos"
	"sandlot/internal/testenv"
)

// nodeDir makes a state directory and removes what the engine keeps outside it.
func nodeDir(t *testing.T) string {
	testenv.Root(t)
	dir := t.TempDir()
	t.Cleanup(func() {
		if e, err := gvisor.New(context.Background(), config(t, dir)); err == nil {
			if err := e.Remove(context.Background()); err != nil {
				t.Error(err)
			}
		}
	})
	return dir
}

func config(t *testing.T, dir string) gvisor.Config {
	return gvisor.Config{StateDir: dir, Runsc: testenv.Bin(t, "runsc"), Agent: testenv.Bin(t, "sandlot-agent")}
}

func open(t *testing.T, dir string) *gvisor.Engine {
	t.Helper()
	e, err := gvisor.New(t.Context(), config(t, dir))
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func TestEngine(t *testing.T) {
	tpl := testenv.Template(t, "base")
	dir := nodeDir(t)
	enginetest.Run(t, enginetest.Harness{
		Open:     func(t *testing.T) engine.Engine { return open(t, dir) },
		Template: tpl,
		Machines: filepath.Join(dir, "machines"),
		Census:   func(t *testing.T) []string { return testenv.Census(t, dir) },
		Kill: func(t *testing.T, m engine.Machine) {
			if err := unix.Kill(sandboxPID(t, dir, m), unix.SIGKILL); err != nil {
				t.Fatal(err)
			}
		},
	})
}

// TestFreedSpaceGoesBackToTheHost checks that a guest which writes and removes a large file does not keep the
// host's disk: sizes are promises, and only what is used may be taken.
func TestFreedSpaceGoesBackToTheHost(t *testing.T) {
	dir := nodeDir(t)
	e := open(t, dir)
	m, _, err := e.Create(t.Context(), engine.Spec{ID: sandlot.NewID(sandlot.PrefixSandbox), Template: testenv.Template(t, "base"), Size: sandlot.DefaultSize})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := m.Destroy(context.Background()); err != nil {
			t.Error(err)
		}
	}()
	c := enginetest.Client(t, m)
	enginetest.Identify(t, c, m.Record().ID)
	image := filepath.Join(dir, "machines", string(m.Record().ID), "disk.img")
	enginetest.Sh(t, c, "head -c 600M /dev/urandom > big && sync")
	full, err := hostos.Allocated(image)
	if err != nil || full < 500<<20 {
		t.Fatalf("the image takes %d bytes after 600 MB were written (%v)", full, err)
	}
	enginetest.Sh(t, c, "rm big && sync")
	for range 100 {
		if _, err := m.Usage(t.Context()); err != nil {
			t.Fatal(err)
		}
		if full, err = hostos.Allocated(image); err == nil && full < 300<<20 {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
	t.Errorf("the image still takes %d bytes", full)
}

// sandboxPID reads the pid of a machine's sandbox process from its record.
func sandboxPID(t *testing.T, dir string, m engine.Machine) int {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, "machines", string(m.Record().ID), "record.json"))
	if err != nil {
		t.Fatal(err)
	}
	var rec struct {
		Sandbox struct{ PID int } `json:"sandbox"`
	}
	if err := json.Unmarshal(b, &rec); err != nil || rec.Sandbox.PID == 0 {
		t.Fatalf("record: %s, %v", b, err)
	}
	return rec.Sandbox.PID
}
