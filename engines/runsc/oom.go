package main

import (
	"context"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	_ "unsafe" // for go:linkname

	"gvisor.dev/gvisor/pkg/abi/linux"
	"gvisor.dev/gvisor/pkg/errors/linuxerr"
	"gvisor.dev/gvisor/pkg/sentry/kernel"
	"gvisor.dev/gvisor/pkg/sentry/mm"
)

// A guest's memory is a file of the sentry. When the host's kernel ends a program for want of memory, its pages stay
// charged until the sentry lets go of them, and until then the host ends the next: all programs, the process that
// they are forked from, at last the sentry. So the sentry keeps its guest below the limit by itself: before memory
// is handed out it looks whether there is some, ends the largest program when there is not, and has others wait.

// hold is asked before a guest is given memory; patch puts it in. It may wait, and refuses with an error.
//
//go:linkname hold gvisor.dev/gvisor/pkg/sentry/pgalloc.hold
var hold func(ctx context.Context, length uint64) error

// holdFile is asked before a file in memory grows.
//
//go:linkname holdFile gvisor.dev/gvisor/pkg/sentry/pgalloc.holdFile
var holdFile func(length uint64) error

// residentSize is a MemoryManager's size in bytes, read without its lock, which somebody who waits in hold has.
//
//go:linkname residentSize gvisor.dev/gvisor/pkg/sentry/mm.residentSize
var residentSize func(*mm.MemoryManager) uint64

const (
	mostAllowed = 32 << 20         // handed out without another look, in bytes
	floor       = 4 << 20          // free at least, or a program ends
	fileFloor   = 48 << 20         // free at least, or a file in memory does not grow: no end of a program would make room
	largest     = 1 << 50          // request; what is more has no room either
	look        = time.Millisecond // between two looks while memory is scarce
	settle      = 10               // looks without a change after a program is gone, before the next one ends
	stubborn    = time.Second      // for a program that ended to go, before the next one ends
	patience    = 10 * time.Second // for somebody who waits for memory
)

// What a refused request gets.
var (
	errNoMemory     error = linuxerr.ENOMEM
	errFileTooLarge error = linuxerr.ENOSPC
)

// requester is who asks for memory.
type requester interface {
	vital() bool  // it must never wait: without it the sandbox is lost
	killed() bool // it is ending
}

// victim is a program that was told to end.
type victim interface {
	gone() bool // its memory is given back, or about to be
}

// keeper decides who gets memory.
type keeper struct {
	free   func() int64  // bytes
	end    func() victim // ends the largest program; nil: there is none
	budget atomic.Int64  // bytes that may be handed out before the next look

	mu     sync.Mutex
	relief chan struct{} // closed when there is room again; nil while nobody waits
}

// ask lets length bytes be handed out, or says why not.
func (k *keeper) ask(length int64, who func() requester) error {
	if k.budget.Add(-length) >= 0 || k.grant(length, floor) {
		return nil
	}
	r := who()
	relief := k.relieve(length)
	if r.vital() {
		return nil
	}
	if length > mostAllowed {
		return errNoMemory // who wants much at once gets nothing, rather than that others end for it
	}
	begun := time.Now()
	for !k.grant(length, floor) {
		if r.killed() {
			return nil // an error would have it end by another signal; it asks for this once
		}
		if time.Since(begun) > patience {
			return errNoMemory
		}
		select {
		case <-relief:
			relief = k.relieve(length)
		case <-time.After(2 * look): // for killed
		}
	}
	return nil
}

// askFile lets a file in memory grow by length bytes, or says why not.
func (k *keeper) askFile(length int64) error {
	if k.budget.Add(-length) >= 0 || k.grant(length, fileFloor) {
		return nil
	}
	return errFileTooLarge
}

// grant looks whether length bytes are there above least, and how many more until the next look.
func (k *keeper) grant(length, least int64) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	left := k.free() - length
	if left < least {
		k.budget.Store(0)
		return false
	}
	k.budget.Store(min(left/4, mostAllowed))
	return true
}

// relieve has programs end until there is room, and returns what is closed then. A large request alone ends nobody.
func (k *keeper) relieve(length int64) <-chan struct{} {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.relief == nil {
		k.relief = make(chan struct{})
		if length > mostAllowed {
			length = 0
		}
		go k.endPrograms(floor + length)
	}
	return k.relief
}

// endPrograms ends one program after the other until there are enough bytes, or no program.
func (k *keeper) endPrograms(enough int64) {
	for {
		free := k.free()
		if free >= enough {
			break
		}
		v := k.end()
		if v == nil {
			time.Sleep(settle * look) // those who wait look again, and would be back at once
			break
		}
		// Looks are counted, not only time: a sandbox out of its share of CPU stands still as a whole.
		begun := time.Now()
		for still := 0; free < enough && still < settle && time.Since(begun) < stubborn; still++ {
			time.Sleep(look)
			now := k.free()
			if now > free || !v.gone() {
				still = 0
			}
			free = now
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	close(k.relief)
	k.relief = nil
}

// keepMemory makes the sentry keep its guest within the cgroup's limit.
func keepMemory() {
	g := gauge{usage: usageFD, limit: limitFD, stat: statFD}
	var of atomic.Pointer[kernel.Kernel]
	k := &keeper{free: g.free, end: func() victim { return endLargest(of.Load()) }}
	holdFile = func(length uint64) error { return k.askFile(int64(min(length, largest))) }
	hold = func(ctx context.Context, length uint64) error {
		return k.ask(int64(min(length, largest)), func() requester {
			t, _ := ctx.Value(kernel.CtxTask).(*kernel.Task)
			if t == nil {
				return sentryItself{}
			}
			of.Store(t.Kernel())
			return task{t}
		})
	}
}

// sentryItself asks for memory that is no program's.
type sentryItself struct{}

func (sentryItself) vital() bool  { return true }
func (sentryItself) killed() bool { return false }

// task asks on its own goroutine.
type task struct{ *kernel.Task }

func (t task) killed() bool { return t.Killed() }

// vital is true of the agent, and of its children as long as they share its memory.
func (t task) vital() bool {
	init := t.Kernel().GlobalInit()
	return init == nil || t.ThreadGroup() == init || t.MemoryManager() == memoryOf(init.Leader())
}

// memoryOf is a task's memory; nil when it has let go of it.
func memoryOf(t *kernel.Task) (m *mm.MemoryManager) {
	t.WithMuLocked(func(t *kernel.Task) { m = t.MemoryManager() })
	return m
}

// program is a victim.
type program struct{ memory *mm.MemoryManager }

func (p program) gone() bool { return residentSize(p.memory) == 0 }

// endLargest ends the program with the largest memory, whoever shares it, and counts it.
func endLargest(k *kernel.Kernel) victim {
	if k == nil {
		return nil
	}
	init := k.GlobalInit()
	if init == nil {
		return nil
	}
	spared := memoryOf(init.Leader())
	users := make(map[*mm.MemoryManager][]*kernel.ThreadGroup)
	var biggest *mm.MemoryManager
	var size uint64
	for _, t := range k.RootPIDNamespace().Tasks() {
		m := memoryOf(t)
		if m == nil || m == spared || t.ThreadGroup() == init || t.ExitState() != kernel.TaskExitNone ||
			t.PendingSignals()&linux.SignalSetOf(linux.SIGKILL) != 0 {
			continue
		}
		users[m] = append(users[m], t.ThreadGroup())
		if n := residentSize(m); n > size || biggest == nil {
			biggest, size = m, n
		}
	}
	if biggest == nil {
		return nil
	}
	var last *kernel.ThreadGroup
	for _, tg := range users[biggest] {
		if tg != last { // threads of a program mostly come one after the other; a second signal does no harm
			_ = tg.SendSignal(kernel.SignalInfoPriv(linux.SIGKILL)) // fails when it has just ended
		}
		last = tg
	}
	_, _ = syscall.Write(killsFD, []byte{'.'}) // the file may be missing, or the disk full
	return program{biggest}
}
