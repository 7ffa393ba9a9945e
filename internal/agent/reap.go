package agent

import (
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"
)

// reaper starts processes and collects their exit statuses. As PID 1 it is the only one that waits: for
// every child, adopted orphans included. Elsewhere it waits for each pid alone, because other children of
// the process are not its own.
type reaper struct {
	all  bool
	mu   sync.Mutex
	wait map[int]chan<- syscall.WaitStatus
	// A child may be dead before fork's caller has told its pid. While a fork is under way, statuses of
	// unknown pids are kept; when none is, they can only be orphans'.
	forking int
	early   map[int]earlyStatus

	jobs chan<- func() // for the threads that fork into the group; nil: any thread forks
}

type earlyStatus struct {
	status syscall.WaitStatus
	at     time.Time
}

// children is the process's reaper: wait4(-1) is a thing of the whole process.
var children = sync.OnceValue(func() *reaper {
	r := &reaper{
		all:   os.Getpid() == 1,
		wait:  make(map[int]chan<- syscall.WaitStatus),
		early: make(map[int]earlyStatus),
	}
	if r.all {
		dead := make(chan os.Signal, 1)
		signal.Notify(dead, syscall.SIGCHLD)
		go func() {
			for range dead {
				r.reap()
			}
		}()
	}
	return r
})

// start forks and executes. The status comes on the channel once, when the process has been reaped.
func (r *reaper) start(path string, argv []string, attr *syscall.ProcAttr) (int, <-chan syscall.WaitStatus, error) {
	if !r.all {
		done := make(chan syscall.WaitStatus, 1)
		pid, err := syscall.ForkExec(path, argv, attr)
		if err == nil {
			go func() { done <- waitPID(pid) }()
		}
		return pid, done, err
	}
	return r.born(func() (int, error) { return r.fork(path, argv, attr) })
}

// born runs fork, which makes a child, and registers the child for its status. Only for PID 1.
func (r *reaper) born(fork func() (int, error)) (int, <-chan syscall.WaitStatus, error) {
	done := make(chan syscall.WaitStatus, 1)
	began := time.Now()
	r.mu.Lock()
	r.forking++
	r.mu.Unlock()
	pid, err := fork()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.forking--
	if err == nil {
		// A status older than this fork is of an earlier process with the same pid.
		if e, ok := r.early[pid]; ok && e.at.After(began) {
			done <- e.status
		} else {
			r.wait[pid] = done
		}
		delete(r.early, pid)
	}
	if r.forking == 0 {
		clear(r.early)
	}
	return pid, done, err
}

// reap collects every dead child.
func (r *reaper) reap() {
	for {
		var ws syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &ws, syscall.WNOHANG, nil)
		if err == syscall.EINTR {
			continue
		}
		if err != nil || pid <= 0 {
			return
		}
		r.mu.Lock()
		if done, ok := r.wait[pid]; ok {
			delete(r.wait, pid)
			done <- ws
		} else if r.forking > 0 {
			r.early[pid] = earlyStatus{ws, time.Now()}
			r.prune()
		}
		r.mu.Unlock()
	}
}

// prune bounds the kept statuses under a storm of orphans and forks without a pause. A fork takes
// milliseconds; ten seconds are for a machine that stood still.
func (r *reaper) prune() {
	if len(r.early) < 4096 {
		return
	}
	for pid, e := range r.early {
		if time.Since(e.at) > 10*time.Second {
			delete(r.early, pid)
		}
	}
}

func waitPID(pid int) syscall.WaitStatus {
	for {
		var ws syscall.WaitStatus
		if _, err := syscall.Wait4(pid, &ws, 0, nil); err != syscall.EINTR {
			return ws
		}
	}
}
