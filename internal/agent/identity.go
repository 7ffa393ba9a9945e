package agent

import (
	"fmt"
	"maps"
	"net/http"
	"os"
	"runtime"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"sandlot"
	"sandlot/internal/wire"

	"golang.org/x/sys/unix"
)

const clockSlack = 500 * time.Millisecond

// serveIdentity makes the machine somebody's sandbox, once. The same identity again is fine, another is not.
func (a *Agent) serveIdentity(w http.ResponseWriter, r *http.Request) error {
	var in wire.Identity
	if err := readJSON(r, &in); err != nil {
		return err
	}
	if _, err := sandlot.ParseID(in.ID); err != nil {
		return err
	}
	if err := checkEnv(in.Env); err != nil {
		return err
	}
	if in.Hostname != "" {
		if _, err := sandlot.ParseName(in.Hostname); err != nil {
			return err
		}
	}
	if in.MachineID != "" && (len(in.MachineID) != 32 || strings.Trim(in.MachineID, "0123456789abcdef") != "") {
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "a machine id has 32 lower-case hex digits")
	}
	a.idMu.Lock()
	defer a.idMu.Unlock()
	if id := a.identity.Load(); id != nil {
		if id.id != in.ID {
			return sandlot.Errorf(sandlot.CodeConflict, "the machine is another sandbox already")
		}
		w.WriteHeader(http.StatusNoContent)
		return nil
	}
	if a.root == "" && os.Getpid() == 1 {
		stir(in.Entropy)
		a.setClock(in.Now)
		a.settle(in.Hostname, in.MachineID)
	}
	env := maps.Clone(a.cfg.Boot.Env)
	if env == nil {
		env = make(map[string]string, len(in.Env))
	}
	maps.Copy(env, in.Env)
	id := &identity{id: in.ID, env: env}
	a.identity.Store(id)
	w.WriteHeader(http.StatusNoContent)
	a.kernels.identifyLater(id)
	return nil
}

// settle names the machine, where that is not its name already. It is called by prepare, and then under idMu.
func (a *Agent) settle(hostname, machineID string) {
	if hostname != "" && hostname != a.hostname {
		if err := unix.Sethostname([]byte(hostname)); err != nil {
			a.log.Warn("set the hostname", "err", err)
		}
		a.put(a.etc+"/hostname", hostname+"\n")
		a.put(a.etc+"/hosts", fmt.Sprintf("127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n127.0.1.1 %s\n", hostname))
		a.hostname = hostname
	}
	if machineID != "" && machineID != a.machineID {
		a.put(a.etc+"/machine-id", machineID+"\n")
		a.machineID = machineID
	}
}

// setClock sets the clock where it is off. A kernel that does not allow it is left as it is: gVisor, for one,
// has no clock of its own.
func (a *Agent) setClock(now time.Time) {
	off := time.Since(now.Round(0))
	if now.IsZero() || off < clockSlack && off > -clockSlack {
		return
	}
	tv := unix.NsecToTimeval(now.UnixNano())
	if err := unix.Settimeofday(&tv); err != nil {
		a.log.Debug("set the clock", "err", err, "off", off)
	}
}

// put writes a small file of the system's, whatever the image has in its place.
func (a *Agent) put(path, content string) {
	const flags = os.O_WRONLY | os.O_CREATE | os.O_TRUNC | syscall.O_NOFOLLOW | syscall.O_NONBLOCK
	f, err := os.OpenFile(path, flags, 0o644) //nolint:gosec // everybody reads these
	if err == nil {
		if st, serr := f.Stat(); serr != nil || !st.Mode().IsRegular() {
			_ = f.Close()
			err = syscall.EINVAL
		}
	}
	if err != nil { // a link, a FIFO, a device: put a file in its place
		_ = os.Remove(path)
		if f, err = os.OpenFile(path, flags|os.O_EXCL, 0o644); err != nil { //nolint:gosec // as above
			a.log.Warn("write", "file", path, "err", err)
			return
		}
	}
	if _, err := f.WriteString(content); err != nil {
		a.log.Warn("write", "file", path, "err", err)
	}
	_ = f.Close()
}

// stir adds entropy to the kernel's pool, and credits it where that is allowed.
func stir(entropy []byte) {
	if len(entropy) == 0 {
		return
	}
	f, err := os.OpenFile("/dev/urandom", os.O_WRONLY, 0)
	if err != nil {
		return
	}
	defer func() { _ = f.Close() }()
	_, _ = f.Write(entropy)
	var info struct { // struct rand_pool_info
		bits, size int32
		buf        [64]byte
	}
	n := copy(info.buf[:], entropy)
	info.bits, info.size = int32(n*8), int32(n) //nolint:gosec // at most 64
	_, _, _ = syscall.Syscall(syscall.SYS_IOCTL, f.Fd(), unix.RNDADDENTROPY, uintptr(unsafe.Pointer(&info)))
	// Reseed now, not at the kernel's leisure: what starts next must not draw from the restored pool.
	_, _, _ = syscall.Syscall(syscall.SYS_IOCTL, f.Fd(), unix.RNDRESEEDCRNG, 0)
}

func (a *Agent) health() wire.Health {
	h := wire.Health{UptimeMS: time.Since(a.started).Milliseconds(), Goroutines: runtime.NumGoroutine()}
	if id := a.identity.Load(); id != nil {
		h.ID = id.id
	}
	if dir, err := os.Open("/proc/self/fd"); err == nil {
		names, _ := dir.Readdirnames(-1)
		_ = dir.Close()
		h.FDs = len(names) - 1
	}
	return h
}
