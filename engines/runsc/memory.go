package main

import (
	"bytes"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// The sentry keeps files open that it could not open in its root: those of its cgroup, which boot opens while it
// still sees the host's, and the count of kills, which run opens. They keep these numbers through each exec of a
// start, above those that runsc hands to its processes, and below 64: a larger table of descriptors waits for an RCU
// grace period of the host's kernel, 11 ms here, when threads share it.
const (
	killsFD = 60 + iota // one byte is written to it for each program that was ended
	usageFD
	limitFD
	statFD
)

// killsVar names the file of kills for run.
const killsVar = "SANDLOT_KILLS"

// memoryReserve is what the host's limit of a machine is above what its guest may have: the kernel of the sandbox,
// and what programs touch of memory that they were given before, may go that far. It is internal/engine/gvisor's number, too.
const memoryReserve = 64 << 20

// openKills opens the file of kills that killsVar names, for boot, which inherits it.
func openKills() error {
	path := os.Getenv(killsVar)
	if path == "" {
		return nil
	}
	if err := os.Unsetenv(killsVar); err != nil {
		return err
	}
	return openAt(path, syscall.O_WRONLY|syscall.O_APPEND, killsFD)
}

// openAt opens a file as the descriptor number fd, which exec leaves open.
func openAt(path string, flags, fd int) error {
	got, err := syscall.Open(path, flags|syscall.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: path, Err: err}
	}
	defer syscall.Close(got)
	if err := syscall.Dup3(got, fd, 0); err != nil {
		return os.NewSyscallError("dup3", err)
	}
	return nil
}

// openMemory opens the memory accounting of the cgroups in procCgroup, a content of /proc/self/cgroup. A later stage
// of boot sees no cgroups any more and keeps what an earlier one opened. It says whether all is open.
func openMemory(root string, procCgroup []byte) bool {
	dir, usage, limit := memoryFiles(root, procCgroup)
	if dir == "" {
		var st syscall.Stat_t
		return syscall.Fstat(usageFD, &st) == nil && syscall.Fstat(limitFD, &st) == nil && syscall.Fstat(statFD, &st) == nil
	}
	return openAt(filepath.Join(dir, usage), syscall.O_RDONLY, usageFD) == nil &&
		openAt(filepath.Join(dir, limit), syscall.O_RDONLY, limitFD) == nil &&
		openAt(filepath.Join(dir, "memory.stat"), syscall.O_RDONLY, statFD) == nil
}

// memoryFiles finds the cgroup that counts memory, and how its files are called. An empty dir means that there is none.
func memoryFiles(root string, procCgroup []byte) (dir, usage, limit string) {
	for line := range bytes.Lines(procCgroup) {
		parts := strings.SplitN(strings.TrimSpace(string(line)), ":", 3)
		if len(parts) != 3 {
			continue
		}
		d, u, l := filepath.Join(root, "memory", parts[2]), "memory.usage_in_bytes", "memory.limit_in_bytes"
		if parts[0] == "0" {
			d, u, l = filepath.Join(root, parts[2]), "memory.current", "memory.max"
		} else if parts[1] != "memory" {
			continue
		}
		if _, err := os.Stat(filepath.Join(d, l)); err == nil {
			return d, u, l
		}
	}
	return "", "", ""
}

// gauge reads the memory accounting of a cgroup of either version.
type gauge struct{ usage, limit, stat int } // descriptors

// plenty is the free memory from which on nobody asks what of the used memory is page cache.
const plenty = 2 * mostAllowed

// free is how many bytes the guest may still have: of its limit without the reserve, less what is used for anything
// but page cache, which goes by itself. What cannot be read counts as no limit.
func (g gauge) free() int64 {
	var buf [8 << 10]byte
	number := func(fd int) (int64, bool) {
		n, err := syscall.Pread(fd, buf[:64], 0)
		if err != nil {
			return 0, false
		}
		v, err := strconv.ParseInt(string(bytes.TrimSpace(buf[:n])), 10, 64) // "max" is none
		return v, err == nil
	}
	usage, ok := number(g.usage)
	limit, ok2 := number(g.limit)
	if !ok || !ok2 || limit < memoryReserve {
		return math.MaxInt64
	}
	free := limit - memoryReserve - usage
	if free >= plenty {
		return free
	}
	n, err := syscall.Pread(g.stat, buf[:], 0)
	if err != nil {
		return free
	}
	return free + pageCache(buf[:n])
}

// pageCache is the number of bytes in files of the host, of a memory.stat.
func pageCache(stat []byte) int64 {
	var sum int64
	for line := range bytes.Lines(stat) {
		key, value, _ := bytes.Cut(bytes.TrimSpace(line), []byte(" "))
		if k := string(key); k == "inactive_file" || k == "active_file" {
			n, _ := strconv.ParseInt(string(value), 10, 64)
			sum += max(0, n)
		}
	}
	return sum
}
