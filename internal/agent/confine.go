package agent

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// gVisor keeps no RLIMIT_NPROC, but its own cgroup file system has the pids controller: a fork in a full group
// fails with EAGAIN. The agent itself stays outside, so that it can always answer and kill.
const (
	cgroupDir = "/sys/fs/cgroup" // an empty directory of sysfs: mounted on for the moment of setting up
	userGroup = cgroupDir + "/user"
	forkers   = 2 // threads that fork into the group
)

// confine makes every process that is started from now on, and what they start, members of one group of at
// most limit processes and threads. Membership is a thread's and is inherited at a fork, so a few threads join
// the group and do all the forking.
func (r *reaper) confine(limit int) error {
	if err := unix.Mount("sandlot", cgroupDir, "cgroup", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "pids"); err != nil {
		return fmt.Errorf("mount the pids controller: %w", err)
	}
	defer func() { _ = unix.Unmount(cgroupDir, unix.MNT_DETACH) }() // the group lives on with its members
	if err := os.Mkdir(userGroup, 0o700); err != nil {
		return err
	}
	// The forking threads count too, and the parked child.
	if err := os.WriteFile(userGroup+"/pids.max", []byte(strconv.Itoa(limit+forkers+1)), 0); err != nil {
		return err
	}
	jobs := make(chan func())
	joined := make(chan error)
	for range forkers {
		go func() {
			// Never unlocked: the runtime starts no other thread from a locked one, and ends it with its goroutine.
			runtime.LockOSThread()
			err := os.WriteFile(userGroup+"/tasks", []byte(strconv.Itoa(unix.Gettid())), 0)
			joined <- err
			if err != nil {
				return
			}
			for job := range jobs {
				job()
			}
		}()
	}
	var errs error
	for range forkers {
		errs = errors.Join(errs, <-joined)
	}
	if errs != nil {
		close(jobs)
		return errs
	}
	r.jobs = jobs
	return nil
}

// fork is syscall.ForkExec, in the group when there is one.
func (r *reaper) fork(path string, argv []string, attr *syscall.ProcAttr) (pid int, err error) {
	r.do(func() { pid, err = syscall.ForkExec(path, argv, attr) })
	return pid, err
}

// do runs job on a thread of the group, when there is one.
func (r *reaper) do(job func()) {
	if r.jobs == nil {
		job()
		return
	}
	done := make(chan struct{})
	r.jobs <- func() {
		job()
		close(done)
	}
	<-done
}
