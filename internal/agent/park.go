package agent

import (
	"errors"
	"runtime"
	"slices"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A process costs a fork, 60 calls that reset signal handlers, two pipes and their registration, before its
// execve. None of that depends on what will run, so it is done ahead: one child of the agent is always parked in a
// read of a pipe, with its outputs, session and signals in place. An exec that fits gives it the rest (user,
// directory, execve) as a table of system calls in shared memory and wakes it.
//
// The parked child shares the agent's memory, as a vfork's child does, and must therefore never run Go: it
// interprets its table (park_amd64.s), with all signals blocked until its execve. It shares no descriptors: it
// closes what it has of the agent's at once. One parked child serves one exec. Whatever does not fit, or when
// none is parked, is forked as ever.

// call is an entry of the table: a system call and, once it was made, its result.
type call struct {
	number uintptr
	args   [6]uintptr
	result int64
}

const (
	orFail = 1 << 32 // in number: an error of this call ends the child

	parkCalls  = 128     // entries of a table
	parkBytes  = 1 << 18 // for the table, argv, env and paths
	parkFDs    = 512     // the child's own two descriptors; below are none, above neither
	parkBefore = 3
)

// parked is a child that waits to become a process.
type parked struct {
	pid            int
	status         <-chan syscall.WaitStatus
	stdout, stderr *pipe
	wake           int // writing a byte lets it go on
	failed         int // a byte comes from it when a call failed, an end when execve worked
	mem            []byte
	calls          []call
	used           int // of calls
	next           int // free bytes of mem
	spent          bool
}

// errUnfit says that a command is too large for a parked child.
var errUnfit = errors.New("too large for a parked child")

// parking keeps one child parked.
type parking struct {
	slot    chan *parked
	filling atomic.Bool
	pid     atomic.Int64 // of the parked child, 0 when there is none
	off     atomic.Bool
}

// fillPatience is how long an exec waits for a child that is just being parked: less than a fork would take.
const fillPatience = 2 * time.Millisecond

// take returns the parked child, or nil. The caller uses it or gives it back; fill is called when the answer to its
// exec is on its way.
func (k *parking) take() *parked {
	if k == nil {
		return nil
	}
	var p *parked
	select {
	case p = <-k.slot:
	default:
		if !k.filling.Load() {
			return nil
		}
		late := time.NewTimer(fillPatience)
		defer late.Stop()
		select {
		case p = <-k.slot:
		case <-late.C:
			return nil
		}
	}
	k.pid.Store(0)
	select {
	case <-p.status: // somebody inside killed it
		p.drop()
		freeMemory(p.mem)
		return nil
	default:
		return p
	}
}

// child is the parked child's pid, 0 when there is none.
func (k *parking) child() int {
	if k == nil {
		return 0
	}
	return int(k.pid.Load())
}

// give takes back a child that did not become a process, and parks it again when it still can.
func (k *parking) give(p *parked) {
	if p.spent {
		_ = p.stdout.r.Close()
		_ = p.stderr.r.Close()
		return
	}
	k.put(p)
}

// fill parks a child when there is none. A machine where that does not work is not asked again.
func (k *parking) fill() {
	if k == nil || k.off.Load() || !k.filling.CompareAndSwap(false, true) {
		return
	}
	defer k.filling.Store(false)
	if len(k.slot) > 0 {
		return
	}
	p, err := park()
	if err != nil {
		k.off.Store(!temporary(err))
		return
	}
	k.put(p)
}

// put makes p the parked child, unless there is one.
func (k *parking) put(p *parked) {
	select {
	case k.slot <- p:
		k.pid.Store(int64(p.pid))
	default:
		p.drop()
		go func() {
			<-p.status
			freeMemory(p.mem)
		}()
	}
}

func temporary(err error) bool {
	errno, ok := err.(syscall.Errno) //nolint:errorlint // park returns a bare one
	return ok && (errno == syscall.EAGAIN || errno == syscall.ENOMEM || errno == syscall.EMFILE)
}

// spareMemory keeps shared memory for the next child. It is no sync.Pool: the collector empties those, and what was
// mapped would stay mapped.
var spareMemory = make(chan []byte, 2)

func takeMemory() ([]byte, error) {
	select {
	case m := <-spareMemory:
		clear(m[:parkCalls*int(unsafe.Sizeof(call{}))]) // the table; the rest is written before it is read
		return m, nil
	default:
		return syscall.Mmap(-1, 0, parkBytes, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	}
}

// freeMemory takes back memory that no child uses any more.
func freeMemory(m []byte) {
	select {
	case spareMemory <- m:
	default:
		_ = syscall.Munmap(m)
	}
}

// park forks a child and leaves it waiting.
func park() (_ *parked, err error) {
	null, err := devNull()
	if err != nil {
		return nil, err
	}
	p := &parked{next: parkCalls * int(unsafe.Sizeof(call{}))}
	if p.mem, err = takeMemory(); err != nil {
		return nil, err
	}
	p.calls = unsafe.Slice((*call)(unsafe.Pointer(&p.mem[0])), parkCalls)
	var fds [4]int // wake's ends, failed's ends
	for i := range fds {
		fds[i] = -1
	}
	defer func() {
		if err != nil {
			for _, fd := range fds {
				if fd >= 0 {
					_ = syscall.Close(fd)
				}
			}
			for _, q := range []*pipe{p.stdout, p.stderr} {
				if q != nil {
					q.drop()
				}
			}
			freeMemory(p.mem)
		}
	}()
	if p.stdout, err = newPipe(); err != nil {
		return nil, err
	}
	if p.stderr, err = newPipe(); err != nil {
		return nil, err
	}
	if err = syscall.Pipe2(fds[:2], syscall.O_CLOEXEC); err != nil {
		return nil, err
	}
	if err = syscall.Pipe2(fds[2:], syscall.O_CLOEXEC); err != nil {
		return nil, err
	}
	if slices.Max([]int{int(null.Fd()), p.stdout.w, p.stderr.w, fds[0], fds[3]}) >= parkFDs {
		return nil, syscall.EMFILE
	}
	const waits, fails = parkFDs, parkFDs + 1
	p.add(orFail|syscall.SYS_DUP3, null.Fd(), 0, 0)
	p.add(orFail|syscall.SYS_DUP3, uintptr(p.stdout.w), 1, 0)
	p.add(orFail|syscall.SYS_DUP3, uintptr(p.stderr.w), 2, 0)
	p.add(orFail|syscall.SYS_DUP3, uintptr(fds[0]), waits, syscall.O_CLOEXEC)
	p.add(orFail|syscall.SYS_DUP3, uintptr(fds[3]), fails, syscall.O_CLOEXEC)
	p.add(orFail|unix.SYS_CLOSE_RANGE, parkBefore, waits-1, 0)
	p.add(orFail|unix.SYS_CLOSE_RANGE, fails+1, uintptr(^uint32(0)), 0)
	p.add(orFail | syscall.SYS_SETSID)
	zeros, scratch := p.bytes(make([]byte, 64)), p.bytes(make([]byte, 8))
	for sig := uintptr(1); sig <= 64; sig++ {
		if sig != uintptr(syscall.SIGKILL) && sig != uintptr(syscall.SIGSTOP) {
			p.add(syscall.SYS_RT_SIGACTION, sig, zeros, 0, 8)
		}
	}
	p.add(orFail|syscall.SYS_READ, waits, scratch, 1)
	fail := &p.calls[parkCalls-2]
	*fail = call{number: syscall.SYS_WRITE, args: [6]uintptr{fails, scratch, 1}}
	p.calls[parkCalls-1] = call{number: syscall.SYS_EXIT_GROUP, args: [6]uintptr{127}}
	p.pid, p.status, err = children().clone(&p.calls[0], fail)
	if err != nil {
		return nil, err
	}
	_ = syscall.Close(fds[0])
	_ = syscall.Close(fds[3])
	p.stdout.started()
	p.stderr.started()
	p.wake, p.failed = fds[1], fds[2]
	return p, nil
}

// add appends a call to the table.
func (p *parked) add(number uintptr, args ...uintptr) {
	c := &p.calls[p.used]
	c.number = number
	copy(c.args[:], args)
	p.used++
}

// bytes copies b into the shared memory, aligned, and returns its address. The caller has checked room.
func (p *parked) bytes(b []byte) uintptr {
	p.next = (p.next + 7) &^ 7
	at := p.mem[p.next : p.next+len(b)]
	copy(at, b)
	p.next += len(b)
	return uintptr(unsafe.Pointer(&at[0]))
}

func (p *parked) str(s string) uintptr { return p.bytes(append([]byte(s), 0)) }

// strs copies a vector of strings as execve takes it.
func (p *parked) strs(list []string) uintptr {
	v := make([]uintptr, len(list)+1)
	for i, s := range list {
		v[i] = p.str(s)
	}
	return p.bytes(unsafe.Slice((*byte)(unsafe.Pointer(&v[0])), len(v)*8))
}

// fits says whether a command's strings have room in the shared memory.
func (p *parked) fits(path string, argv, env []string, dir string) bool {
	need := len(path) + len(dir) + 256
	for _, list := range [][]string{argv, env} {
		for _, s := range list {
			need += len(s) + 24 // its end, alignment and place in the vector
		}
	}
	return need < len(p.mem)-p.next-4096
}

// exec makes the child a process, and returns execve's or another call's error as syscall.ForkExec does. The
// child is used up either way.
func (p *parked) exec(path string, argv []string, attr *syscall.ProcAttr) error {
	p.spent = true
	first := p.used
	if c := attr.Sys.Credential; c != nil {
		groups := uintptr(0)
		if len(c.Groups) > 0 {
			groups = p.bytes(unsafe.Slice((*byte)(unsafe.Pointer(&c.Groups[0])), len(c.Groups)*4))
		}
		p.add(orFail|syscall.SYS_SETGROUPS, uintptr(len(c.Groups)), groups)
		p.add(orFail|syscall.SYS_SETGID, uintptr(c.Gid))
		p.add(orFail|syscall.SYS_SETUID, uintptr(c.Uid))
	}
	p.add(orFail|syscall.SYS_CHDIR, p.str(attr.Dir))
	p.add(orFail|syscall.SYS_RT_SIGPROCMASK, uintptr(unix.SIG_SETMASK), p.bytes(make([]byte, 8)), 0, 8)
	p.add(orFail|syscall.SYS_EXECVE, p.str(path), p.strs(argv), p.strs(attr.Env))
	_, err := syscall.Write(p.wake, []byte{1})
	_ = syscall.Close(p.wake)
	var b [1]byte
	n := 0
	for err == nil {
		if n, err = syscall.Read(p.failed, b[:]); err == syscall.EINTR { //nolint:errorlint // a bare Errno
			err = nil
			continue
		}
		break
	}
	_ = syscall.Close(p.failed)
	if err != nil {
		<-p.status // nobody reads the other ends: it is dead
	}
	if err != nil || n == 0 {
		freeMemory(p.mem) // execve left it
		return err
	}
	err = syscall.EINVAL
	for _, c := range p.calls[first:p.used] {
		if c.result < 0 {
			err = syscall.Errno(-c.result)
			break
		}
	}
	<-p.status // it only exits now
	freeMemory(p.mem)
	return err
}

// drop lets go of a child. One that lives exits: its read ends, and the empty entries behind it read nothing from
// nowhere until the table's last, which exits.
func (p *parked) drop() {
	_ = syscall.Close(p.wake)
	_ = syscall.Close(p.failed)
	_ = p.stdout.r.Close()
	_ = p.stderr.r.Close()
}

// clone forks a child that interprets a table.
func (r *reaper) clone(script, fail *call) (int, <-chan syscall.WaitStatus, error) {
	return r.born(func() (pid int, err error) {
		r.do(func() {
			// A signal handler would run Go on the caller's stack.
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			all, old := ^uint64(0), uint64(0)
			const size = unsafe.Sizeof(all)
			_, _, _ = syscall.RawSyscall6(syscall.SYS_RT_SIGPROCMASK, unix.SIG_SETMASK, uintptr(unsafe.Pointer(&all)), uintptr(unsafe.Pointer(&old)), size, 0, 0)
			n := clonePark(script, fail)
			_, _, _ = syscall.RawSyscall6(syscall.SYS_RT_SIGPROCMASK, unix.SIG_SETMASK, uintptr(unsafe.Pointer(&old)), 0, size, 0, 0)
			if pid = int(n); n < 0 {
				err = syscall.Errno(-n)
			}
		})
		return pid, err
	})
}
