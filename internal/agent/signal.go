package agent

import (
	"strconv"
	"strings"
	"syscall"

	"sandlot"

	"golang.org/x/sys/unix"
)

// parseSignal reads "SIGTERM", "TERM", "term" or a number from 1 to 64.
func parseSignal(s string) (syscall.Signal, error) {
	if n, err := strconv.Atoi(s); err == nil {
		if n >= 1 && n <= 64 {
			return syscall.Signal(n), nil
		}
	} else if len(s) <= 16 {
		name := strings.ToUpper(s)
		if !strings.HasPrefix(name, "SIG") {
			name = "SIG" + name
		}
		if sig := unix.SignalNum(name); sig != 0 {
			return sig, nil
		}
	}
	return 0, sandlot.Errorf(sandlot.CodeInvalidRequest, "no such signal: give a name like SIGTERM or a number from 1 to 64")
}
