package gvisor

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"sandlot"
	"sandlot/internal/engine"
	"sandlot/internal/hostos"
)

// record is record.json: what is needed to adopt or reap a machine.
type record struct {
	engine.Record
	Slot    int            `json:"slot"`
	Secret  string         `json:"secret"`
	Sandbox hostos.Process `json:"sandbox"` // zero until the machine is ready
}

const maxRecord = 64 << 10

// writeRecord replaces record.json. It is not synced: a machine does not outlive its host.
func (e *Engine) writeRecord(r record) error {
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	path := filepath.Join(e.dir(r.ID), "record.json")
	if err := os.WriteFile(path+".new", b, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// readRecord reads a machine's record. A directory without a readable one is a machine that was never
// finished: it has its ID and nothing more.
func (e *Engine) readRecord(id sandlot.ID) (record, error) {
	none := record{Record: engine.Record{ID: id, Engine: Name}}
	f, err := os.Open(filepath.Join(e.dir(id), "record.json"))
	if errors.Is(err, fs.ErrNotExist) {
		if !e.exists(id) {
			return none, sandlot.Errorf(sandlot.CodeNotFound, "there is no machine %s", id)
		}
		return none, nil
	}
	if err != nil {
		return none, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxRecord))
	if err != nil {
		return none, err
	}
	var r record
	if json.Unmarshal(b, &r) != nil || r.ID != id {
		return none, nil
	}
	return r, nil
}

// ids are all machines that there is anything of: a directory, a run directory, a cgroup. Somebody may have removed
// one and not the others.
func (e *Engine) ids() ([]sandlot.ID, error) {
	found := map[sandlot.ID]bool{}
	for _, dir := range []string{e.machines, e.cfg.RunDir} {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		for _, ent := range entries {
			// The run directory has other things in it, too.
			if id, err := sandlot.ParseID(ent.Name()); err == nil && ent.IsDir() && (dir == e.machines || isMachine(id)) {
				found[id] = true
			}
		}
	}
	for _, name := range e.cgroups.Group(e.group).Children() {
		if id, err := sandlot.ParseID(name); err == nil && isMachine(id) {
			found[id] = true
		}
	}
	return slices.Sorted(maps.Keys(found)), nil
}

// isMachine says whether an id is one that a node gives to a machine.
func isMachine(id sandlot.ID) bool {
	return strings.HasPrefix(string(id), sandlot.PrefixSandbox) && len(id) == len(sandlot.PrefixSandbox)+20
}

// exists says whether there is anything of a machine.
func (e *Engine) exists(id sandlot.ID) bool {
	for _, dir := range []string{e.dir(id), e.run(id)} {
		if _, err := os.Lstat(dir); err == nil {
			return true
		}
	}
	return slices.Contains(e.cgroups.Group(e.group).Children(), string(id))
}

func (e *Engine) records() ([]record, error) {
	ids, err := e.ids()
	if err != nil {
		return nil, err
	}
	var recs []record
	for _, id := range ids {
		r, err := e.readRecord(id)
		if sandlot.ErrorCode(err) == sandlot.CodeNotFound {
			continue // removed meanwhile
		}
		if err != nil {
			return nil, err
		}
		recs = append(recs, r)
	}
	return recs, nil
}

// List implements engine.Engine.
func (e *Engine) List(context.Context) ([]engine.Record, error) {
	recs, err := e.records()
	if err != nil {
		return nil, err
	}
	out := make([]engine.Record, len(recs))
	for i, r := range recs {
		out[i] = r.Record
	}
	return out, nil
}

// reapTimeout bounds the removal of one machine. A killed process that does not end within it hangs in the
// kernel; the record stays, and the next try may succeed.
const reapTimeout = 20 * time.Second
