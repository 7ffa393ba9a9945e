package gvisor

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"sandlot"
	"sandlot/internal/engine"
	"sandlot/internal/wire"
)

// capabilities of root inside a sandbox. They exist in gVisor's kernel alone: outside, the sandbox is an
// unprivileged uid. NET_RAW and what only serves real devices or kernels is left out.
var capabilities = []string{
	"CAP_AUDIT_WRITE", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_DAC_READ_SEARCH", "CAP_FOWNER", "CAP_FSETID",
	"CAP_IPC_LOCK", "CAP_KILL", "CAP_MKNOD", "CAP_NET_ADMIN", "CAP_NET_BIND_SERVICE", "CAP_SETFCAP",
	"CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_ADMIN", "CAP_SYS_CHROOT", "CAP_SYS_NICE",
	"CAP_SYS_PTRACE", "CAP_SYS_RESOURCE",
}

// outerPIDs is the host's limit for one machine. It is generous, because meeting it ends the whole sandbox:
// what guests meet is sandlot.MaxProcesses inside, and each of those costs gVisor up to two host tasks.
const outerPIDs = 6 * sandlot.MaxProcesses

// pooledWeight is a machine's share of CPU, in percent of a claimed one's, until it is claimed: filling the
// pool stays out of the way of work.
const pooledWeight = 10

// writeBundle writes the OCI bundle.
func (e *Engine) writeBundle(spec engine.Spec, slot int) error {
	memory := int64(spec.Size.MemoryMB) << 20
	uid := uint32(uidBase(slot))
	env := []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	for _, k := range slices.Sorted(maps.Keys(spec.Template.Env)) {
		env = append(env, k+"="+spec.Template.Env[k])
	}
	run := e.run(spec.ID)
	s := specs.Spec{
		Version:  specs.Version,
		Hostname: string(spec.ID),
		Root:     &specs.Root{Path: e.emptyRoot()},
		Process: &specs.Process{
			Args: []string{wire.AgentPath, wire.BootPath},
			Env:  env,
			Cwd:  "/",
			Capabilities: &specs.LinuxCapabilities{
				Bounding: capabilities, Effective: capabilities, Permitted: capabilities,
			},
			Rlimits: []specs.POSIXRlimit{
				{Type: "RLIMIT_NPROC", Hard: sandlot.MaxProcesses, Soft: sandlot.MaxProcesses},
				{Type: "RLIMIT_NOFILE", Hard: 65536, Soft: 65536},
				{Type: "RLIMIT_CORE"},
			},
		},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc"},
			{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"ro", "nosuid", "noexec", "nodev"}},
			{Destination: "/dev/shm", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "nodev", "mode=1777", fmt.Sprintf("size=%d", memory/4)}},
			{Destination: "/workspace", Type: "bind", Source: filepath.Join(run, "disk", "workspace"), Options: []string{"rw", "nosuid", "nodev"}},
			{Destination: wire.GuestDir, Type: "bind", Source: filepath.Join(run, "guest"), Options: []string{"ro", "nosuid", "nodev"}},
		},
		Annotations: map[string]string{
			"dev.gvisor.spec.rootfs.source":  spec.Template.Image,
			"dev.gvisor.spec.rootfs.type":    "erofs",
			"dev.gvisor.spec.rootfs.overlay": "dir=" + filepath.Join(run, "disk", "upper"),
			"dev.gvisor.spec.rootfs.options": fmt.Sprintf("size=%dg", spec.Size.DiskGB),
		},
		Linux: &specs.Linux{
			UIDMappings: []specs.LinuxIDMapping{{ContainerID: 0, HostID: uid, Size: uidRange}},
			GIDMappings: []specs.LinuxIDMapping{{ContainerID: 0, HostID: uid, Size: uidRange}},
			Namespaces: []specs.LinuxNamespace{
				{Type: specs.PIDNamespace}, {Type: specs.IPCNamespace}, {Type: specs.UTSNamespace},
				{Type: specs.MountNamespace}, {Type: specs.UserNamespace},
				{Type: specs.NetworkNamespace, Path: filepath.Join(run, "netns")},
			},
		},
	}
	b, err := json.Marshal(s)
	if err != nil {
		return err
	}
	dir := filepath.Join(e.dir(spec.ID), "bundle")
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "config.json"), b, 0o600)
}

// runscArgs are the flags of every runsc call for a machine.
func (e *Engine) runscArgs(spec engine.Spec) []string {
	dir := e.dir(spec.ID)
	return []string{
		"--root=" + filepath.Join(dir, "runsc"),
		"--log=" + filepath.Join(dir, "runsc.log"), "--log-format=json",
		"--network=sandbox",
		"--ignore-cgroups",               // the machine's is made already; our runsc joins it
		"--host-uds=open",                // the agent dials its socket; it can make none
		"--file-access-mounts=exclusive", // nobody else writes to /workspace, so gVisor may cache it
		"--allow-suid",                   // sudo
		"--overlay2=root:dir=" + filepath.Join(e.run(spec.ID), "disk", "upper") + fmt.Sprintf(",size=%dg", spec.Size.DiskGB),
	}
}
