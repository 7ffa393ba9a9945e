package main

import (
	"errors"
	"sync"
	"sync/atomic"
	"testing"
)

// world is memory of which programs take and, when they end, give back.
type world struct {
	mu       sync.Mutex
	left     int64
	programs []int64 // sizes
	ended    int
}

func (w *world) free() int64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.left
}

func (w *world) end() victim {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.programs) == 0 {
		return nil
	}
	w.left += w.programs[0]
	w.programs = w.programs[1:]
	w.ended++
	return endedAtOnce{}
}

type endedAtOnce struct{}

func (endedAtOnce) gone() bool { return true }

type asker struct {
	isVital  bool
	isKilled atomic.Bool
}

func (a *asker) vital() bool  { return a.isVital }
func (a *asker) killed() bool { return a.isKilled.Load() }

func (w *world) keeper() *keeper { return &keeper{free: w.free, end: w.end} }

func (k *keeper) askAs(a *asker, length int64) error {
	return k.ask(length, func() requester { return a })
}

func TestMemoryIsThere(t *testing.T) {
	w := &world{left: 1 << 30, programs: []int64{1 << 20}}
	k := w.keeper()
	for range 1000 {
		if err := k.askAs(&asker{}, 1<<20); err != nil {
			t.Fatal(err)
		}
	}
	if w.ended != 0 {
		t.Errorf("%d programs ended with memory free", w.ended)
	}
}

func TestProgramsEndForMemory(t *testing.T) {
	w := &world{left: 0, programs: []int64{1 << 20, 1 << 20, 64 << 20, 1 << 20}}
	k := w.keeper()
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if err := k.askAs(&asker{}, 2<<20); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if w.ended != 3 {
		t.Errorf("%d programs ended, want those up to the first that made room", w.ended)
	}
}

func TestWhoDoesNotWait(t *testing.T) {
	w := &world{}
	k := w.keeper()
	if err := k.askAs(&asker{isVital: true}, 2<<20); err != nil {
		t.Error("the agent:", err)
	}
	dying := &asker{}
	dying.isKilled.Store(true)
	if err := k.askAs(dying, 2<<20); err != nil {
		t.Error("who is ending:", err)
	}
}

func TestLargeRequestEndsNobody(t *testing.T) {
	w := &world{left: 100 << 20, programs: []int64{1 << 30}}
	if err := w.keeper().askAs(&asker{}, 200<<20); !errors.Is(err, errNoMemory) || w.ended != 0 {
		t.Errorf("%v, %d programs ended", err, w.ended)
	}
}

func TestFilesLeaveRoom(t *testing.T) {
	w := &world{left: fileFloor + 10<<20, programs: []int64{1 << 30}}
	k := w.keeper()
	if err := k.askFile(1 << 20); err != nil {
		t.Error("with room:", err)
	}
	if err := k.askFile(100 << 20); !errors.Is(err, errFileTooLarge) {
		t.Error("without:", err)
	}
	if w.ended != 0 {
		t.Errorf("%d programs ended for a file", w.ended)
	}
}

// TestMemoryIsWatched fails where the build lacks the change that oom.go needs.
func TestMemoryIsWatched(t *testing.T) {
	if residentSize == nil {
		t.Error("built without -modfile=patched.mod: run `go run ./patch` first")
	}
}
