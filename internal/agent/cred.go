package agent

import (
	"fmt"
	"runtime"
	"syscall"
	"unsafe"
)

// as runs f with u's rights to files. On Linux identity belongs to a thread: a locked one takes on u's
// effective ids (file rights follow them) and comes back through its real and saved ids, which stay root's.
// A thread that could not come back is never used again: its goroutine ends while locked.
//
// f must not start goroutines that touch files, and should be short: it holds a thread.
func (a *Agent) as(u *user, f func() error) error {
	if !a.switchUser || u.uid == 0 {
		return f()
	}
	res := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		err := become(u)
		if err == nil {
			err = guarded(f)
		}
		if back := unbecome(); back != nil {
			res <- fmt.Errorf("agent: return to root: %w", back)
			return
		}
		runtime.UnlockOSThread()
		res <- err
	}()
	return <-res
}

// guarded turns f's panic into an error, so that the thread is given back as root's.
func guarded(f func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("agent: panic: %v", v)
		}
	}()
	return f()
}

const keepID = ^uintptr(0) // "leave as it is"

func become(u *user) error {
	if err := setGroups(u.groups); err != nil {
		return err
	}
	if _, _, e := syscall.RawSyscall(syscall.SYS_SETRESGID, keepID, uintptr(u.gid), keepID); e != 0 {
		return e
	}
	if _, _, e := syscall.RawSyscall(syscall.SYS_SETRESUID, keepID, uintptr(u.uid), keepID); e != 0 {
		return e
	}
	return nil
}

func unbecome() error {
	if _, _, e := syscall.RawSyscall(syscall.SYS_SETRESUID, keepID, 0, keepID); e != 0 {
		return e
	}
	if _, _, e := syscall.RawSyscall(syscall.SYS_SETRESGID, keepID, 0, keepID); e != 0 {
		return e
	}
	return setGroups(nil)
}

func setGroups(groups []uint32) error {
	var p unsafe.Pointer
	if len(groups) > 0 {
		p = unsafe.Pointer(&groups[0])
	}
	if _, _, e := syscall.RawSyscall(syscall.SYS_SETGROUPS, uintptr(len(groups)), uintptr(p), 0); e != 0 {
		return e
	}
	return nil
}
