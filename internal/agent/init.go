package agent

import (
	"os"
	"os/signal"
	"syscall"

	"sandlot"

	"golang.org/x/sys/unix"
)

// BecomeInit prepares the process to be a machine's first: nothing inside can end it by a signal, nothing it
// was given leaks into what it starts, and user code has a limit of processes.
func BecomeInit() {
	// Notify, not Ignore: what is ignored stays ignored in every process that the agent starts.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGPIPE,
		syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGALRM, syscall.SIGPWR, syscall.SIGXCPU, syscall.SIGXFSZ, syscall.SIGVTALRM,
		syscall.SIGPROF, syscall.SIGTRAP, syscall.SIGABRT)
	syscall.Umask(0o022)
	if err := unix.CloseRange(3, ^uint(0), unix.CLOSE_RANGE_CLOEXEC); err != nil {
		for fd := 3; fd < 256; fd++ {
			syscall.CloseOnExec(fd)
		}
	}
	var lim unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NPROC, &lim) == nil && lim.Cur > sandlot.MaxProcesses {
		// Root, the agent with it, is not bound by it.
		_ = unix.Setrlimit(unix.RLIMIT_NPROC, &unix.Rlimit{Cur: sandlot.MaxProcesses, Max: sandlot.MaxProcesses})
	}
}
