package hostos

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Cgroups is the host's cgroup layout: version 2 where /sys/fs/cgroup itself is a cgroup2 mount, version 1
// (one mount per controller) elsewhere, hybrid hosts included.
type Cgroups struct {
	V2    bool
	roots []string // v2: one; v1: every controller's mount
}

const cgroupRoot = "/sys/fs/cgroup"

// v1Controllers are those that limits and accounting need.
var v1Controllers = []string{"memory", "cpu", "cpuacct", "pids"}

// DetectCgroups reads the layout. It fails when a controller that Sandlot needs is not mounted.
func DetectCgroups() (*Cgroups, error) {
	var fs unix.Statfs_t
	if err := unix.Statfs(cgroupRoot, &fs); err != nil {
		return nil, fmt.Errorf("cgroups: %s: %w (mount cgroups first)", cgroupRoot, err)
	}
	if fs.Type == unix.CGROUP2_SUPER_MAGIC {
		b, err := os.ReadFile(filepath.Join(cgroupRoot, "cgroup.controllers"))
		if err != nil {
			return nil, err
		}
		for _, c := range []string{"memory", "cpu", "pids"} {
			if !strings.Contains(" "+strings.TrimSpace(string(b))+" ", " "+c+" ") {
				return nil, fmt.Errorf("cgroups: controller %q is not available in %s", c, cgroupRoot)
			}
		}
		return &Cgroups{V2: true, roots: []string{cgroupRoot}}, nil
	}
	c := &Cgroups{}
	for _, name := range v1Controllers {
		if _, err := os.Stat(filepath.Join(cgroupRoot, name, "cgroup.procs")); err != nil {
			return nil, fmt.Errorf("cgroups: controller %q is not mounted at %s/%s", name, cgroupRoot, name)
		}
	}
	// A helper may put a machine below every mounted hierarchy, so all of them are cleaned.
	dirs, err := os.ReadDir(cgroupRoot)
	if err != nil {
		return nil, err
	}
	for _, d := range dirs {
		p := filepath.Join(cgroupRoot, d.Name())
		if d.IsDir() {
			if _, err := os.Stat(filepath.Join(p, "cgroup.procs")); err == nil {
				c.roots = append(c.roots, p)
			}
		}
	}
	return c, nil
}

// Cgroup is one group in the layout, named by its path below the root.
type Cgroup struct {
	all  *Cgroups
	path string // "/a/b"
}

// Group names a cgroup; it need not exist.
func (c *Cgroups) Group(path string) *Cgroup { return &Cgroup{all: c, path: filepath.Join("/", path)} }

// Path is the group's name below the root of every hierarchy.
func (g *Cgroup) Path() string { return g.path }

func (g *Cgroup) file(controller, name string) string {
	if g.all.V2 {
		return filepath.Join(cgroupRoot, g.path, name)
	}
	return filepath.Join(cgroupRoot, controller, g.path, name)
}

func (g *Cgroup) write(controller, name, value string) error {
	return os.WriteFile(g.file(controller, name), []byte(value), 0)
}

func (g *Cgroup) readInt(controller, name string) (int64, error) {
	b, err := os.ReadFile(g.file(controller, name))
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
}

// readKey reads "key value" lines.
func (g *Cgroup) readKey(controller, name, key string) (int64, error) {
	b, err := os.ReadFile(g.file(controller, name))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if k, v, ok := strings.Cut(strings.TrimSpace(line), " "); ok && k == key {
			return strconv.ParseInt(v, 10, 64)
		}
	}
	return 0, fmt.Errorf("%s has no %q", name, key)
}

// Limits of a group. Zero leaves a limit as it is.
type Limits struct {
	MemoryBytes int64
	CPUMilli    int64 // 1000 is one CPU
	PIDs        int64
}

// cpuPeriod is the kernel's default bandwidth period, in µs.
const cpuPeriod = 100_000

// Make creates the group in every hierarchy that it needs and sets its limits.
func (g *Cgroup) Make(l Limits) error {
	if g.all.V2 {
		// Controllers are handed down level by level.
		dir := cgroupRoot
		for _, part := range strings.Split(strings.Trim(g.path, "/"), "/") {
			if err := os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+cpu +memory +pids"), 0); err != nil {
				return fmt.Errorf("cgroup %s: %w", dir, err)
			}
			dir = filepath.Join(dir, part)
			if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
				return err
			}
		}
		return g.Set(l)
	}
	for _, c := range v1Controllers {
		if err := os.MkdirAll(g.file(c, ""), 0o755); err != nil {
			return err
		}
	}
	return g.Set(l)
}

// Set changes limits of a living group.
func (g *Cgroup) Set(l Limits) error {
	if l.MemoryBytes > 0 {
		name := "memory.limit_in_bytes"
		if g.all.V2 {
			name = "memory.max"
		}
		if err := g.write("memory", name, strconv.FormatInt(l.MemoryBytes, 10)); err != nil {
			return err
		}
	}
	if l.CPUMilli > 0 {
		quota := strconv.FormatInt(l.CPUMilli*cpuPeriod/1000, 10)
		var err error
		if g.all.V2 {
			err = g.write("cpu", "cpu.max", quota+" "+strconv.Itoa(cpuPeriod))
		} else {
			err = g.write("cpu", "cpu.cfs_quota_us", quota)
		}
		if err != nil {
			return err
		}
	}
	if l.PIDs > 0 {
		return g.write("pids", "pids.max", strconv.FormatInt(l.PIDs, 10))
	}
	return nil
}

// SetWeight sets the share of CPU under contention; 100 is everybody's. It never limits an idle host.
func (g *Cgroup) SetWeight(percent int64) error {
	if g.all.V2 {
		return g.write("cpu", "cpu.weight", strconv.FormatInt(max(1, percent), 10))
	}
	return g.write("cpu", "cpu.shares", strconv.FormatInt(max(2, percent*1024/100), 10))
}

// Unthrottle takes the CPU limit away: what is to end must run for that.
func (g *Cgroup) Unthrottle() error {
	if g.all.V2 {
		return g.write("cpu", "cpu.max", "max")
	}
	return g.write("cpu", "cpu.cfs_quota_us", "-1")
}

// ProcFiles are the files that a process writes "0" to in order to join the group.
func (g *Cgroup) ProcFiles() []string {
	if g.all.V2 {
		return []string{g.file("", "cgroup.procs")}
	}
	var files []string
	for _, c := range v1Controllers {
		files = append(files, g.file(c, "cgroup.procs"))
	}
	return files
}

// CgroupUsage is a group's accounting.
type CgroupUsage struct {
	CPU         time.Duration
	MemoryBytes int64 // without the page cache that can go at once
	OOMKills    int64
}

// Usage reads the group's accounting.
func (g *Cgroup) Usage() (CgroupUsage, error) {
	var u CgroupUsage
	if g.all.V2 {
		us, err := g.readKey("", "cpu.stat", "usage_usec")
		if err != nil {
			return u, err
		}
		u.CPU = time.Duration(us) * time.Microsecond
		mem, err := g.readInt("", "memory.current")
		if err != nil {
			return u, err
		}
		cache, _ := g.readKey("", "memory.stat", "inactive_file")
		u.MemoryBytes = max(0, mem-cache)
		u.OOMKills, _ = g.readKey("", "memory.events", "oom_kill")
		return u, nil
	}
	ns, err := g.readInt("cpuacct", "cpuacct.usage")
	if err != nil {
		return u, err
	}
	u.CPU = time.Duration(ns)
	mem, err := g.readInt("memory", "memory.usage_in_bytes")
	if err != nil {
		return u, err
	}
	cache, _ := g.readKey("memory", "memory.stat", "total_inactive_file")
	u.MemoryBytes = max(0, mem-cache)
	u.OOMKills, _ = g.readKey("memory", "memory.oom_control", "oom_kill")
	return u, nil
}

// PIDs lists the group's processes in any hierarchy.
func (g *Cgroup) PIDs() ([]int, error) {
	seen := map[int]bool{}
	var pids []int
	for _, root := range g.all.roots {
		b, err := os.ReadFile(filepath.Join(root, g.path, "cgroup.procs"))
		if err != nil {
			continue // not in this hierarchy
		}
		for _, f := range strings.Fields(string(b)) {
			if pid, err := strconv.Atoi(f); err == nil && pid > 0 && !seen[pid] {
				seen[pid] = true
				pids = append(pids, pid)
			}
		}
	}
	return pids, nil
}

// Kill ends every process of the group, also those that it is forking meanwhile, and waits until none is left.
func (g *Cgroup) Kill(ctx context.Context) error {
	self := os.Getpid()
	return poll(ctx, time.Millisecond, func() (bool, error) {
		pids, err := g.PIDs()
		if err != nil {
			return false, err
		}
		left := 0
		for _, pid := range pids {
			if pid == self {
				continue
			}
			left++
			if err := unix.Kill(pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
				return false, fmt.Errorf("kill %d of cgroup %s: %w", pid, g.path, err)
			}
			// It may have been orphaned to us: reap it.
			_, _ = unix.Wait4(pid, nil, unix.WNOHANG, nil)
		}
		return left == 0, nil
	})
}

// Children lists the names of the groups right below, of any hierarchy.
func (g *Cgroup) Children() []string {
	found := map[string]bool{}
	for _, root := range g.all.roots {
		entries, err := os.ReadDir(filepath.Join(root, g.path))
		if err != nil {
			continue // not in this hierarchy
		}
		for _, e := range entries {
			if e.IsDir() {
				found[e.Name()] = true
			}
		}
	}
	return slices.Sorted(maps.Keys(found))
}

// Remove removes the group from every hierarchy. One that does not exist is no error.
func (g *Cgroup) Remove(ctx context.Context) error {
	for _, root := range g.all.roots {
		dir := filepath.Join(root, g.path)
		err := poll(ctx, 2*time.Millisecond, func() (bool, error) {
			err := unix.Rmdir(dir)
			switch {
			case err == nil, errors.Is(err, unix.ENOENT):
				return true, nil
			case errors.Is(err, unix.EBUSY): // the last process is still on its way out
				return false, nil
			}
			return false, fmt.Errorf("cgroup %s: %w", dir, err)
		})
		if err != nil {
			return err
		}
	}
	return nil
}
