// Command runsc is gVisor's own command line at the version that Sandlot pins, with six changes: the
// sentry's seccomp filters are compiled ahead (filters.go), an idle sandbox keeps still (idle.go), a sandbox joins
// a cgroup that exists (limits.go), its processes do not wait for what only the last of them uses (start.go),
// it ends programs by itself when memory is scarce (oom.go), and "tar rootfs-upper" keeps what a build needs (patch).
//
// It is a nested module so that gVisor's dependencies never meet the server's. Build it without cgo (the
// filters of a cgo build are wider and have another key):
//
//	CGO_ENABLED=0 go run ./gen && go run ./patch && CGO_ENABLED=0 go build -modfile=patched.mod .
//
// ./dev build does both and keeps the result by the content of this folder.
package main

import (
	"fmt"
	"os"
	"runtime"

	"gvisor.dev/gvisor/runsc/cli/maincli"
)

func main() {
	switch command(os.Args[1:]) {
	case "boot":
		registerFilters()
		keepStill()
		own, _ := os.ReadFile("/proc/self/cgroup")
		memory, cpus := cgroupLimits("/sys/fs/cgroup", own, int64(runtime.NumCPU()))
		os.Args = limitArgs(os.Args, max(0, memory-memoryReserve), cpus)
		if openMemory("/sys/fs/cgroup", own) {
			keepMemory()
		}
		if registerMembarrier != nil && lastBoot(os.Args) {
			registerMembarrier()
		}
	case "run":
		err := joinCgroups()
		if err == nil {
			err = openKills()
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "runsc:", err)
			os.Exit(128)
		}
	}
	maincli.Main()
}

// command returns the first argument that is not a flag. runsc starts its sandbox process itself and
// writes each flag as --name=value, so for "boot" no flag's value can be mistaken for a command.
func command(args []string) string {
	for _, a := range args {
		if len(a) > 0 && a[0] != '-' {
			return a
		}
	}
	return ""
}
