package hostos

import (
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// MakeNetns makes a network namespace with nothing in it but its loopback device, and binds it to path, which
// keeps it alive until Unmount(path).
func MakeNetns(path string) error {
	f, err := os.OpenFile(path, os.O_RDONLY|os.O_CREATE|os.O_EXCL, 0o400)
	if err != nil {
		return err
	}
	f.Close()
	done := make(chan error, 1)
	go func() {
		// The thread leaves the host's namespace for good: it is never unlocked, so it ends with the goroutine.
		runtime.LockOSThread()
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			done <- fmt.Errorf("network namespace: %w", err)
			return
		}
		if err := loopbackUp(); err != nil {
			done <- fmt.Errorf("network namespace: loopback: %w", err)
			return
		}
		src := fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid())
		done <- unix.Mount(src, path, "", unix.MS_BIND, "")
	}()
	return <-done
}

// loopbackUp gives the thread's network namespace 127.0.0.1 and ::1.
func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	lo, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	lo.SetUint16(unix.IFF_UP)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, lo)
}
