package main

import (
	"bytes"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// gVisor sets up cgroups by itself, in every hierarchy that is mounted, and moves its processes through them:
// 20 ms of a start of 150. Sandlot makes a machine's cgroup ahead and only has runsc join it, so runsc is told
// --ignore-cgroups, and learns here, from the cgroup it is in, what it would have read there.

// cgroupsVar lists the cgroup.procs files to join, with ':' between them.
const cgroupsVar = "SANDLOT_CGROUPS"

// joinCgroups moves this process, and so all that it starts, where cgroupsVar says.
func joinCgroups() error {
	list := os.Getenv(cgroupsVar)
	if list == "" {
		return nil
	}
	if err := os.Unsetenv(cgroupsVar); err != nil {
		return err
	}
	for file := range strings.SplitSeq(list, ":") {
		if err := os.WriteFile(file, []byte("0"), 0); err != nil {
			return err
		}
	}
	return nil
}

// limitArgs puts the limits of the cgroup that boot runs in into its arguments. runsc writes --total-memory and
// its value as two arguments, and writes them as one when boot starts itself again: those are right already.
func limitArgs(args []string, memory, cpus int64) []string {
	var out []string
	for i := 0; i < len(args); i++ {
		if args[i] != "--total-memory" || i+1 == len(args) {
			out = append(out, args[i])
			continue
		}
		i++
		total := args[i]
		if n, err := strconv.ParseInt(total, 10, 64); err == nil && memory > 0 && memory < n {
			total = strconv.FormatInt(memory, 10)
		}
		if cpus > 0 {
			out = append(out, "--cpu-num", strconv.FormatInt(cpus, 10))
		}
		out = append(out, "--total-memory", total)
	}
	return out
}

// minCPUs is what gVisor shows at least: with one, programs leave out locks that they need.
const minCPUs = 2

// cgroupLimits reads the memory limit in bytes and the CPUs to show, at most have, of the cgroups in
// procCgroup, a content of /proc/self/cgroup. Zero means none or unknown.
func cgroupLimits(root string, procCgroup []byte, have int64) (memory, cpus int64) {
	read := func(path ...string) []string {
		b, _ := os.ReadFile(filepath.Join(append([]string{root}, path...)...))
		return strings.Fields(string(b))
	}
	number := func(fields []string, i int) int64 {
		if i >= len(fields) {
			return 0
		}
		n, _ := strconv.ParseInt(fields[i], 10, 64) // "max" is none
		return max(0, n)
	}
	var quota, period int64
	for line := range bytes.Lines(procCgroup) {
		parts := strings.SplitN(strings.TrimSpace(string(line)), ":", 3)
		if len(parts) != 3 {
			continue
		}
		path := parts[2]
		if parts[0] == "0" { // version 2
			if n := number(read(path, "memory.max"), 0); n > 0 {
				memory = n
			}
			if f := read(path, "cpu.max"); len(f) == 2 {
				quota, period = number(f, 0), number(f, 1)
			}
			continue
		}
		for controller := range strings.SplitSeq(parts[1], ",") {
			switch controller {
			case "memory":
				memory = number(read("memory", path, "memory.limit_in_bytes"), 0)
			case "cpu":
				quota = number(read("cpu", path, "cpu.cfs_quota_us"), 0)
				period = number(read("cpu", path, "cpu.cfs_period_us"), 0)
			}
		}
	}
	if quota > 0 && period > 0 {
		cpus = min(have, max(minCPUs, int64(math.Ceil(float64(quota)/float64(period)))))
	}
	return memory, cpus
}
