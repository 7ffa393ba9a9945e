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

// memoryReserve is how far the host's limit is above the memory of a size, in bytes. gVisor's kernel keeps its guest
// within the size by itself (engines/runsc/oom.go, which has the same number): what goes beyond is on its way out.
const memoryReserve = 64 << 20

// killsVar tells our runsc the file in which it counts the programs that it ends for want of memory.
const killsVar = "SANDLOT_KILLS"

// killsFile has one byte for each program that was ended. It lies on the sandbox's disk, beside the guest's directories.
func (e *Engine) killsFile(id sandlot.ID) string { return filepath.Join(e.run(id), "disk", "kills") }

// kills counts the programs that gVisor's kernel ended for want of memory.
func (e *Engine) kills(id sandlot.ID) int64 {
	fi, err := os.Lstat(e.killsFile(id))
	if err != nil {
		return 0
	}
	return fi.Size()
}

// programsFirst makes the host's kernel end a sandbox's programs, and neither gVisor's kernel nor the agent,
// when the sandbox reaches the host's limit all the same: the sandbox goes on then, mostly. When the whole host runs
// out of memory they are the first to go, too.
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
