package agent

import (
	"bytes"
	"context"
	"errors"
	"os"
	"slices"
	"syscall"
	"time"

	"sandlot"

	"golang.org/x/sys/unix"
)

const (
	inputPatience = 5 * time.Second // for a program that does not read
	maxDiscard    = 4 << 20         // bytes; kernels keep far less
)

// write types b. Whoever interrupts a program that does not read gets through: what it has not read is discarded, as
// a terminal does at an interrupt. gVisor's keeps it, and has no room for the key then.
func (t *terminal) write(ctx context.Context, b []byte) error {
	ctx, cancel := context.WithTimeout(ctx, inputPatience)
	defer cancel()
	if t.unread.Load() {
		if at := t.interrupts(b); at >= 0 {
			b = b[at:]
			t.discard()
		}
	}
	n, err := t.in.write(ctx, b)
	t.unread.Store(errors.Is(err, os.ErrDeadlineExceeded))
	switch {
	case err == nil:
		return nil
	case errors.Is(err, os.ErrDeadlineExceeded):
		return sandlot.Errorf(sandlot.CodeTimeout, "the terminal's program does not read; %d of %d bytes were typed; Ctrl-C interrupts it", n, len(b)).With("written", n)
	}
	return sandlot.Wrap(err, sandlot.CodeConflict, "the terminal has ended")
}

// interrupts finds a key that the terminal makes a signal of; -1 when b has none.
func (t *terminal) interrupts(b []byte) int {
	at := -1
	t.control(func(fd int) {
		tio, err := unix.IoctlGetTermios(fd, unix.TCGETS)
		if err != nil || tio.Lflag&unix.ISIG == 0 {
			return
		}
		keys := []byte{tio.Cc[unix.VINTR], tio.Cc[unix.VQUIT], tio.Cc[unix.VSUSP]}
		at = bytes.IndexFunc(b, func(r rune) bool { return r > 0 && r < 0x80 && slices.Contains(keys, byte(r)) })
	})
	return at
}

// discard reads what the program has not.
func (t *terminal) discard() {
	n, err := 0, error(nil)
	t.control(func(fd int) { n, err = unix.IoctlGetInt(fd, unix.TIOCGPTN) })
	if err != nil {
		return
	}
	fd, err := syscall.Open("/dev/pts/"+itoa(n), syscall.O_RDONLY|syscall.O_NOCTTY|syscall.O_NONBLOCK|syscall.O_CLOEXEC, 0)
	if err != nil {
		return
	}
	defer func() { _ = syscall.Close(fd) }()
	buf := make([]byte, 64<<10)
	for left := maxDiscard; left > 0; {
		n, err := syscall.Read(fd, buf)
		if err != nil || n <= 0 {
			return
		}
		left -= n
	}
}

// control gives the terminal's descriptor to f while it is open.
func (t *terminal) control(f func(fd int)) {
	if raw, err := t.master.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) { f(int(fd)) })
	}
}
