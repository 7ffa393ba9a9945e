// Package failpoint names the instants at which a test makes the program fail, stall or die.
//
// A package declares its points once (Declare) and passes each of them by Hit at the step it names. Hit
// costs one atomic load until somebody arms a specification: a test directly, or the server when its
// configuration allows failpoints and EnvVar is set. A production configuration does not allow them.
package failpoint

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// EnvVar holds the specification that ArmFromEnv arms.
const EnvVar = "SANDLOT_FAILPOINTS"

// ErrInjected is what a point armed with "error" returns, wrapped with the point's name.
var ErrInjected = errors.New("injected failure")

type action struct {
	what  string // "kill", "error", "sleep"
	sleep time.Duration
	nth   int64 // 0: at each hit, else only at the nth
	hits  atomic.Int64
}

var (
	armed    atomic.Pointer[map[string]*action]
	mu       sync.Mutex
	declared = map[string]bool{}
)

// Declare adds names to the list that Names returns. It is meant for package-level variables:
//
//	var _ = failpoint.Declare("service.create.claimed", …)
func Declare(names ...string) struct{} {
	mu.Lock()
	defer mu.Unlock()
	for _, n := range names {
		declared[n] = true
	}
	return struct{}{}
}

// Names lists every declared point of the packages linked into this program, sorted.
func Names() []string {
	mu.Lock()
	defer mu.Unlock()
	names := make([]string, 0, len(declared))
	for n := range declared {
		names = append(names, n)
	}
	slices.Sort(names)
	return names
}

// Hit does what is armed for name: nothing, return an error, sleep, or kill this process with SIGKILL.
func Hit(ctx context.Context, name string) error {
	table := armed.Load()
	if table == nil {
		return nil
	}
	a := (*table)[name]
	if a == nil {
		return nil
	}
	if n := a.hits.Add(1); a.nth != 0 && n != a.nth {
		return nil
	}
	switch a.what {
	case "kill":
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {} // the signal is on its way; nothing after the point may run
	case "sleep":
		t := time.NewTimer(a.sleep)
		defer t.Stop()
		select {
		case <-t.C:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return fmt.Errorf("failpoint %s: %w", name, ErrInjected)
}

// Arm replaces what is armed with spec, "name=ACTION[@N][,…]" where ACTION is kill, error or sleep:DURATION
// and @N limits it to the Nth hit. It returns a function that disarms everything. A name that is not
// declared is an error, so that a renamed point cannot leave a test that no longer tests.
func Arm(spec string) (disarm func(), err error) {
	table := map[string]*action{}
	for part := range strings.SplitSeq(spec, ",") {
		part = strings.TrimSpace(part)
		if part == "" {
			continue
		}
		name, act, ok := strings.Cut(part, "=")
		mu.Lock()
		known := declared[name]
		mu.Unlock()
		if !ok || !known {
			return nil, fmt.Errorf("failpoint: %q names no declared point", part)
		}
		a := &action{}
		if before, n, ok := strings.Cut(act, "@"); ok {
			if a.nth, err = strconv.ParseInt(n, 10, 64); err != nil || a.nth < 1 {
				return nil, fmt.Errorf("failpoint: %q has no count after @", part)
			}
			act = before
		}
		what, arg, _ := strings.Cut(act, ":")
		switch what {
		case "kill", "error":
		case "sleep":
			if a.sleep, err = time.ParseDuration(arg); err != nil {
				return nil, fmt.Errorf("failpoint: %q: %w", part, err)
			}
		default:
			return nil, fmt.Errorf("failpoint: %q has no known action", part)
		}
		a.what = what
		table[name] = a
	}
	armed.Store(&table)
	return func() { armed.Store(nil) }, nil
}

// ArmFromEnv arms EnvVar's specification when it is set. The caller asks its configuration first.
func ArmFromEnv() error {
	spec := os.Getenv(EnvVar)
	if spec == "" {
		return nil
	}
	_, err := Arm(spec)
	return err
}
