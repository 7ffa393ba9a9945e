package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"text/tabwriter"
	"time"

	"sandlot"
	"sandlot/internal/hostos"
)

// doctorCmd says what this host can do and what to install.
type doctorCmd struct {
	JSON     bool   `name:"json" help:"Print JSON."`
	StateDir string `placeholder:"DIR" help:"Also name machines of this state directory that could not be removed."`
	Runsc    string `placeholder:"FILE" help:"The runsc binary to look at. Default: the one beside this program, which serve uses."`
}

// Verdicts of a check.
const (
	statusOK   = "ok"
	statusWarn = "warn" // something is slower or missing, sandboxes run
	statusFail = "fail" // sandboxes cannot run
)

// finding is the result of one check.
type finding struct {
	Name   string `json:"name"`
	Status string `json:"status"`
	Detail string `json:"detail"`        // what is there
	For    string `json:"for"`           // what needs it
	Fix    string `json:"fix,omitempty"` // the package or command that mends it
}

// leftover is a machine's directory without a living process.
type leftover struct {
	ID    string        `json:"id"`
	Path  string        `json:"path"`
	Age   time.Duration `json:"-"`
	Hours float64       `json:"age_hours"`
}

type diagnosis struct {
	OK       bool       `json:"ok"` // sandboxes can run
	Checks   []finding  `json:"checks"`
	Leftover []leftover `json:"leftover_machines,omitempty"`
}

// Run prints the diagnosis. It fails when something required is missing.
func (c *doctorCmd) Run(ctx context.Context, s *streams) error {
	d := diagnosis{OK: true, Checks: examine(ctx, c.Runsc, c.StateDir)}
	for _, f := range d.Checks {
		d.OK = d.OK && f.Status != statusFail
	}
	if c.StateDir != "" {
		var err error
		if d.Leftover, err = leftovers(c.StateDir, time.Now()); err != nil {
			return err
		}
	}
	if c.JSON {
		enc := json.NewEncoder(s.out)
		enc.SetIndent("", "  ")
		if err := enc.Encode(d); err != nil {
			return err
		}
	} else if err := d.print(s.out); err != nil {
		return err
	}
	if !d.OK {
		return exitCode(1)
	}
	return nil
}

func (d diagnosis) print(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	for _, f := range d.Checks {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", f.Status, f.Name, printable(f.Detail), f.For)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, f := range d.Checks {
		if f.Status != statusOK && f.Fix != "" {
			fmt.Fprintf(w, "\n%s: %s", f.Name, f.Fix)
		}
	}
	fmt.Fprintln(w)
	for _, l := range d.Leftover {
		fmt.Fprintf(w, "machine %s has no process and was not removed (%.1f h old): stop the server, then run `sandlot reap` for this state directory\n", l.ID, l.Hours)
	}
	verdict := "This host can run sandboxes."
	if !d.OK {
		verdict = "This host cannot run sandboxes yet."
	}
	_, err := fmt.Fprintln(w, verdict)
	return err
}

// settle is how old a machine's directory must be before it counts as left over: a younger one may be
// about to start.
const settle = 2 * time.Minute

// leftovers names machines of a state directory that have no living process.
func leftovers(stateDir string, now time.Time) ([]leftover, error) {
	dir := filepath.Join(stateDir, "node", "machines")
	entries, err := os.ReadDir(dir)
	if os.IsNotExist(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var out []leftover
	for _, e := range entries {
		id, err := sandlot.ParseID(e.Name())
		if err != nil || !e.IsDir() {
			continue
		}
		path := filepath.Join(dir, e.Name())
		fi, err := os.Stat(path)
		if err != nil || machineAlive(path) {
			continue
		}
		if age := now.Sub(fi.ModTime()); age >= settle {
			out = append(out, leftover{ID: string(id), Path: path, Age: age, Hours: age.Hours()})
		}
	}
	return out, nil
}

// machineAlive says whether the process in a machine's record runs.
func machineAlive(dir string) bool {
	f, err := os.Open(filepath.Join(dir, "record.json"))
	if err != nil {
		return false
	}
	defer f.Close()
	var rec struct {
		Sandbox hostos.Process `json:"sandbox"`
	}
	if json.NewDecoder(io.LimitReader(f, 64<<10)).Decode(&rec) != nil {
		return false
	}
	return rec.Sandbox.PID > 0 && rec.Sandbox.Alive()
}

// install words the package that brings a program.
func install(pkg string) string { return "apt-get install " + pkg }

func lines(b []byte) []string { return strings.Split(strings.TrimSpace(string(b)), "\n") }
