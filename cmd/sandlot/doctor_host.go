package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"sandlot/internal/hostos"
)

// probeTimeout bounds each program that a check runs.
const probeTimeout = 10 * time.Second

// examine runs every check. None of them changes the host.
func examine(ctx context.Context, runsc, stateDir string) []finding {
	return []finding{
		checkRoot(),
		checkKernel(),
		checkRunsc(ctx, runsc),
		checkCgroups(),
		checkLoop(),
		checkFilesystem("ext4", "the capped disk of each sandbox"),
		checkTool("mkfs.ext4", "the capped disk of each sandbox", "e2fsprogs", statusFail),
		checkUserns(ctx),
		checkNetns(ctx),
		checkRun(),
		checkTool("mkfs.erofs", "building templates", "erofs-utils", statusWarn),
		checkTool("mmdebstrap", "building templates", "mmdebstrap", statusWarn),
		checkOverlay(),
		checkNFTables(),
		checkKVM(),
		checkMemory(),
		checkDisk(stateDir),
		checkPIDs(),
		checkFDs(),
	}
}

func verdict(ok bool, otherwise string) string {
	if ok {
		return statusOK
	}
	return otherwise
}

func checkRoot() finding {
	uid := os.Geteuid()
	return finding{
		Name: "root", Status: verdict(uid == 0, statusFail), Detail: fmt.Sprintf("uid %d", uid),
		For: "mounts, namespaces and cgroups of the node half", Fix: "run as root, or use the systemd unit",
	}
}

func checkKernel() finding {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return finding{Name: "kernel", Status: statusWarn, Detail: err.Error(), For: "pidfd, loop and mount calls"}
	}
	release := unix.ByteSliceToString(u.Release[:])
	return finding{
		Name: "kernel", Status: verdict(atLeast(release, 5, 8), statusFail), Detail: "Linux " + release + " " + runtime.GOARCH,
		For: "pidfd, loop and mount calls (5.8 and up)", Fix: "boot a newer kernel: Debian 12 and Ubuntu 22.04 have one",
	}
}

// atLeast compares the first two numbers of a kernel release.
func atLeast(release string, major, minor int) bool {
	var a, b int
	if n, _ := fmt.Sscanf(release, "%d.%d", &a, &b); n != 2 {
		return false
	}
	return a > major || a == major && b >= minor
}

// findRunsc is the binary that serve would use: the one beside this program.
func findRunsc(given string) (string, error) {
	if given == "" {
		self, err := os.Executable()
		if err != nil {
			return "", err
		}
		given = filepath.Join(filepath.Dir(self), "runsc")
	}
	if !isProgram(given) {
		return "", fmt.Errorf("%s is not there", given)
	}
	return given, nil
}

func isProgram(path string) bool {
	fi, err := os.Stat(path)
	return err == nil && fi.Mode().IsRegular() && fi.Mode()&0o111 != 0
}

func checkRunsc(ctx context.Context, given string) finding {
	f := finding{Name: "runsc", Status: statusFail, For: "isolation: gVisor at the pinned version", Fix: "./dev build makes it"}
	path, err := findRunsc(given)
	if err != nil {
		f.Detail = err.Error()
		return f
	}
	out, err := probe(ctx, nil, path, "--version")
	if err != nil {
		f.Detail = path + ": " + err.Error()
		return f
	}
	f.Status, f.Detail = statusOK, path+", "+lines(out)[0]
	return f
}

func checkCgroups() finding {
	f := finding{Name: "cgroups", For: "memory, CPU and process limits", Status: statusFail,
		Fix: "mount cgroup v2 at /sys/fs/cgroup with the cpu, memory and pids controllers (systemd does)"}
	g, err := hostos.DetectCgroups()
	if err != nil {
		f.Detail = err.Error()
		return f
	}
	f.Status, f.Detail = statusOK, "version 1: memory, cpu, cpuacct, pids"
	if g.V2 {
		f.Detail = "version 2: memory, cpu, pids"
	}
	return f
}

func checkLoop() finding {
	f := finding{Name: "loop devices", For: "the capped disk of each sandbox", Status: statusFail, Fix: "modprobe loop"}
	c, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		f.Detail = err.Error()
		return f
	}
	c.Close()
	f.Status, f.Detail = statusOK, "/dev/loop-control opens"
	return f
}

// checkFilesystem says whether the kernel has a filesystem now. A module that is not loaded is loaded by the mount.
func checkFilesystem(name, purpose string) finding {
	f := finding{Name: name, For: purpose, Status: statusFail, Fix: "modprobe " + name}
	b, err := os.ReadFile("/proc/filesystems")
	if err != nil {
		f.Detail = err.Error()
		return f
	}
	for _, l := range lines(b) {
		if strings.TrimSpace(strings.TrimPrefix(l, "nodev")) == name {
			f.Status, f.Detail = statusOK, "in the kernel"
			return f
		}
	}
	var u unix.Utsname
	_ = unix.Uname(&u)
	found, _ := filepath.Glob("/lib/modules/" + unix.ByteSliceToString(u.Release[:]) + "/kernel/fs/" + name + "*/" + name + ".ko*")
	if len(found) > 0 {
		f.Status, f.Detail = statusOK, "a module, not loaded yet"
		return f
	}
	f.Detail = "the kernel has no " + name
	return f
}

func checkOverlay() finding {
	f := checkFilesystem("overlay", "stacking a template's layers while it is built")
	if f.Status == statusFail {
		f.Status = statusWarn
	}
	return f
}

func checkTool(name, purpose, pkg, missing string) finding {
	path, err := lookTool(name)
	f := finding{Name: name, Status: verdict(err == nil, missing), Detail: path, For: purpose, Fix: install(pkg)}
	if err != nil {
		f.Detail = "not found"
	}
	return f
}

// lookTool searches the PATH and where administrators' tools are.
func lookTool(name string) (string, error) {
	if p, err := exec.LookPath(name); err == nil {
		return p, nil
	}
	for _, dir := range []string{"/usr/sbin", "/sbin", "/usr/local/sbin"} {
		if p := filepath.Join(dir, name); isProgram(p) {
			return p, nil
		}
	}
	return "", exec.ErrNotFound
}

func checkUserns(ctx context.Context) finding {
	f := finding{Name: "user namespaces", For: "each sandbox's own range of host users", Status: statusFail,
		Fix: "sysctl -w user.max_user_namespaces=16384"}
	limit := readInt("/proc/sys/user/max_user_namespaces")
	// The range is the one that the first machine would have.
	_, err := probe(ctx, &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0x40010000, Size: 65536}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0x40010000, Size: 65536}},
	}, "/bin/true")
	if err != nil {
		f.Detail = fmt.Sprintf("limit %d: %v", limit, err)
		return f
	}
	f.Status, f.Detail = statusOK, fmt.Sprintf("up to %d", limit)
	return f
}

func checkNetns(ctx context.Context) finding {
	f := finding{Name: "network namespaces", For: "one closed network per sandbox", Status: statusFail,
		Fix: "a kernel with CONFIG_NET_NS, and sysctl -w user.max_net_namespaces=16384"}
	if _, err := probe(ctx, &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}, "/bin/true"); err != nil {
		f.Detail = err.Error()
		return f
	}
	f.Status, f.Detail = statusOK, fmt.Sprintf("up to %d", readInt("/proc/sys/user/max_net_namespaces"))
	return f
}

func checkRun() finding {
	f := finding{Name: "/run", For: "mount points and sockets of running sandboxes", Status: statusFail,
		Fix: "mount -t tmpfs -o mode=755 tmpfs /run"}
	if err := unix.Access("/run", unix.W_OK|unix.X_OK); err != nil {
		f.Detail = "not writable: " + err.Error()
		return f
	}
	f.Status, f.Detail = statusOK, "writable"
	return f
}

func checkNFTables() finding {
	f := finding{Name: "nftables", For: "the egress guard, which this version does not have yet", Status: statusWarn, Fix: install("nftables")}
	path, err := lookTool("nft")
	s, nerr := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if nerr == nil {
		unix.Close(s)
	}
	switch {
	case nerr != nil:
		f.Detail, f.Fix = "the kernel has no netfilter netlink: "+nerr.Error(), "modprobe nfnetlink nf_tables"
	case err != nil:
		f.Status, f.Detail = statusOK, "netlink answers; no nft program"
	default:
		f.Status, f.Detail = statusOK, "netlink answers; "+path
	}
	return f
}

func checkKVM() finding {
	f := finding{Name: "KVM", For: "microVM engines, which this version does not have yet; gVisor runs without", Status: statusWarn,
		Fix: "modprobe kvm_intel or kvm_amd; on a virtual machine, turn nested virtualization on"}
	k, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		f.Detail = err.Error()
		return f
	}
	k.Close()
	f.Status, f.Detail = statusOK, "/dev/kvm opens"
	return f
}

func checkMemory() finding {
	f := finding{Name: "memory", For: "room for sandboxes", Status: statusWarn, Fix: "2 GiB and up is sensible"}
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		f.Detail = err.Error()
		return f
	}
	mib := map[string]int64{}
	for _, l := range lines(b) {
		k, v, _ := strings.Cut(l, ":")
		kb, _ := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(v), " kB"), 10, 64)
		mib[k] = kb >> 10
	}
	f.Detail = fmt.Sprintf("%d MiB, %d MiB available", mib["MemTotal"], mib["MemAvailable"])
	f.Status = verdict(mib["MemTotal"] >= 1900, statusWarn)
	return f
}

func checkDisk(dir string) finding {
	f := finding{Name: "disk", For: "templates and sandboxes' disks, which grow as they are written", Status: statusWarn,
		Fix: "put the state directory where 20 GiB and more are free"}
	if dir == "" {
		dir = "/var/lib"
	}
	free, err := hostos.DiskFree(dir)
	if err != nil {
		f.Detail = err.Error()
		return f
	}
	f.Detail = fmt.Sprintf("%d GiB free at %s", free>>30, dir)
	f.Status = verdict(free >= 10<<30, statusWarn)
	return f
}

func checkPIDs() finding {
	n := readInt("/proc/sys/kernel/pid_max")
	return finding{Name: "process ids", Status: verdict(n >= 32768, statusWarn), Detail: fmt.Sprintf("kernel.pid_max %d", n),
		For: "the host tasks of all sandboxes together", Fix: "sysctl -w kernel.pid_max=4194304"}
}

func checkFDs() finding {
	f := finding{Name: "open files", For: "sockets and handles of all sandboxes together", Status: statusWarn, Fix: "LimitNOFILE=1048576 in the unit, or ulimit -n"}
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		f.Detail = err.Error()
		return f
	}
	f.Status, f.Detail = verdict(l.Max >= 65536, statusWarn), fmt.Sprintf("limit %d", l.Max)
	return f
}

// readInt reads a number of /proc; -1 when there is none.
func readInt(path string) int64 {
	b, err := os.ReadFile(path)
	if err != nil {
		return -1
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	if err != nil {
		return -1
	}
	return n
}

// probe runs a program and returns a bounded part of what it printed.
func probe(ctx context.Context, attr *syscall.SysProcAttr, name string, args ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.SysProcAttr = attr
	var out bytes.Buffer
	cmd.Stdout = &out
	if err := cmd.Run(); err != nil {
		return nil, err
	}
	return out.Bytes()[:min(out.Len(), 4<<10)], nil
}
