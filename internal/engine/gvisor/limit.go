package gvisor

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"sandlot"
	"sandlot/internal/wire"
)

// programsFirst makes the host's kernel end a sandbox's programs, and neither gVisor's kernel nor the agent,
// when the sandbox reaches its memory's limit: the sandbox goes on then. When the whole host runs out of memory
// they are the first to go, too.
//
// gVisor runs each program in a process of the host, forked from one that it made when it started. That one gets
// the score, which those that come inherit; the agent, all that has run so far, has its process already. Raising
// a score needs no privilege, lowering one does.
func (e *Engine) programsFirst(id sandlot.ID) {
	pids, err := e.cgroup(id).PIDs()
	if err != nil {
		return
	}
	agent := []byte("/" + filepath.Base(wire.AgentPath) + "\n")
	raised := false
	for _, pid := range pids {
		dir := "/proc/" + strconv.Itoa(pid)
		if cmdline, err := os.ReadFile(dir + "/cmdline"); err != nil || len(cmdline) > 0 {
			continue // gVisor's kernel and gofer
		}
		if maps, err := os.ReadFile(dir + "/maps"); err != nil || bytes.Contains(maps, agent) {
			continue
		}
		if os.WriteFile(dir+"/oom_score_adj", []byte("1000"), 0) == nil {
			raised = true
		}
	}
	if !raised {
		e.cfg.Log.Warn("a sandbox that runs out of memory may end: no process that its programs come from was found", "machine", id)
	}
}

// limited checks that a machine is in its cgroup: another runsc than ours joins none, and would run it without limits.
func (e *Engine) limited(id sandlot.ID, pid int) error {
	pids, err := e.cgroup(id).PIDs()
	if err == nil && !slices.Contains(pids, pid) {
		err = sandlot.Errorf(sandlot.CodeUnsupported, "%s does not join the cgroup of a sandbox: it is not the runsc that ./dev build makes", e.cfg.Runsc)
	}
	return err
}
