package hostos

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// Process names a process of this boot for certain: a pid is reused, a pid with its start time is not.
type Process struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // clock ticks since boot, field 22 of /proc/pid/stat
}

// FindProcess reads the start time of pid. It fails with os.ErrNotExist when there is none or it is a zombie.
func FindProcess(pid int) (Process, error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return Process{}, fmt.Errorf("process %d: %w", pid, os.ErrNotExist)
	}
	// The command's name is in parentheses and may hold anything, so fields count from the last ')'.
	i := bytes.LastIndexByte(b, ')')
	fields := bytes.Fields(b[i+1:])
	if i < 0 || len(fields) < 20 {
		return Process{}, fmt.Errorf("process %d: unreadable stat", pid)
	}
	if fields[0][0] == 'Z' || fields[0][0] == 'X' {
		return Process{}, fmt.Errorf("process %d is dead: %w", pid, os.ErrNotExist)
	}
	start, err := strconv.ParseUint(string(fields[19]), 10, 64)
	if err != nil {
		return Process{}, fmt.Errorf("process %d: %w", pid, err)
	}
	return Process{PID: pid, Start: start}, nil
}

// Alive says whether exactly this process still runs.
func (p Process) Alive() bool {
	q, err := FindProcess(p.PID)
	return err == nil && q == p
}

// Handle is an open pidfd: it means this process and no other, whatever becomes of the pid.
type Handle struct {
	f *os.File
	p Process
}

// Open opens a handle on p. It fails with os.ErrNotExist when p does not run any more.
func (p Process) Open() (*Handle, error) {
	fd, err := unix.PidfdOpen(p.PID, unix.PIDFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("process %d: %w", p.PID, os.ErrNotExist)
	}
	h := &Handle{f: os.NewFile(uintptr(fd), "pidfd"), p: p}
	if !p.Alive() { // the pid was another's already when it was opened
		h.f.Close()
		return nil, fmt.Errorf("process %d is gone: %w", p.PID, os.ErrNotExist)
	}
	return h, nil
}

// Kill sends SIGKILL. A process that is dead already is no error.
func (h *Handle) Kill() error {
	rc, err := h.f.SyscallConn()
	if err != nil {
		return err
	}
	var kerr error
	if err := rc.Control(func(fd uintptr) { kerr = unix.PidfdSendSignal(int(fd), unix.SIGKILL, nil, 0) }); err != nil {
		return err
	}
	if errors.Is(kerr, unix.ESRCH) {
		return nil
	}
	return kerr
}

// Wait returns when the process is dead, and reaps it when it is this process's child. It holds no thread
// while it waits. It fails when the handle is closed first.
func (h *Handle) Wait() error {
	rc, err := h.f.SyscallConn()
	if err != nil {
		return err
	}
	return rc.Read(func(fd uintptr) bool {
		err := unix.Waitid(unix.P_PIDFD, int(fd), nil, unix.WEXITED|unix.WNOHANG, nil)
		switch {
		case errors.Is(err, unix.ECHILD): // not ours to reap: readable means dead
			fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
			n, _ := unix.Poll(fds, 0)
			return n > 0
		case err != nil:
			return true
		}
		// WNOHANG gives no error for a child that still runs; only its state tells.
		return !h.p.Alive()
	})
}

// Close lets go of the process without harming it.
func (h *Handle) Close() error { return h.f.Close() }

// BecomeSubreaper makes orphaned descendants this process's children, so that they can be reaped at once
// instead of whenever the host's init comes round.
func BecomeSubreaper() error {
	return unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
}

// poll calls done every step until it says true, or ctx ends.
func poll(ctx context.Context, step time.Duration, done func() (bool, error)) error {
	for {
		ok, err := done()
		if ok || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(step):
		}
	}
}
