package agent

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"sandlot"
	"sandlot/internal/wire"

	"golang.org/x/sys/unix"
)

// notStarted says that a shell would have printed Message and exited with Code.
type notStarted struct {
	Code    int // 126 or 127
	Message string
}

func (e *notStarted) Error() string { return e.Message }

// devNull is every foreground process's stdin that has none.
var devNull = sync.OnceValues(func() (*os.File, error) { return os.Open(os.DevNull) })

// pipe is what a process writes into: w is the child's end, blocking; r is ours, pollable.
type pipe struct {
	r     *os.File
	fd    int // r's
	w     int
	ended bool // drain has seen the end
}

func newPipe() (*pipe, error) {
	var p [2]int
	if err := syscall.Pipe2(p[:], syscall.O_CLOEXEC); err != nil {
		return nil, err
	}
	if err := syscall.SetNonblock(p[0], true); err != nil {
		_ = syscall.Close(p[0])
		_ = syscall.Close(p[1])
		return nil, err
	}
	return &pipe{r: os.NewFile(uintptr(p[0]), "|0"), fd: p[0], w: p[1]}, nil
}

// started closes the child's end in the agent.
func (p *pipe) started() { _ = syscall.Close(p.w) }

// drop closes both ends when there is no child.
func (p *pipe) drop() {
	_ = syscall.Close(p.w)
	_ = p.r.Close()
}

// launch starts e with the given stdin, stdout, stderr and more descriptors, and registers the process. ready, when it is not nil,
// is a parked child that e may become instead of a new fork; it has its own. A *notStarted error is the command's
// own fault, any other is the request's or the agent's.
func (a *Agent) launch(id *identity, u *user, e *wire.Exec, ready *parked, fds []int, log *outputLog, in *stdin) (*proc, error) {
	return a.launchIn(id, u, e, ready, fds, log, in, false)
}

// launchIn is launch; with tty, the process's stdin becomes its session's controlling terminal.
func (a *Agent) launchIn(id *identity, u *user, e *wire.Exec, ready *parked, fds []int, log *outputLog, in *stdin, tty bool) (*proc, error) {
	dir := workspace
	if e.Cwd != "" {
		name, err := resolve(e.Cwd)
		if err != nil {
			return nil, err
		}
		dir = shown(name)
	}
	env := a.environment(u, id, e.Env)
	path, err := a.find(e.Argv[0], a.inside(dir), env)
	if err != nil {
		// A missing directory comes before a missing program, as it would in a shell.
		if err := a.checkDir(u, dir); err != nil {
			return nil, err
		}
		return nil, err
	}
	attr := &syscall.ProcAttr{
		Dir:   a.inside(dir),
		Env:   env,
		Files: make([]uintptr, len(fds)),
		Sys:   &syscall.SysProcAttr{Setsid: true, Setctty: tty}, // Ctty: 0
	}
	for i, fd := range fds {
		attr.Files[i] = uintptr(fd)
	}
	if a.switchUser {
		attr.Sys.Credential = u.credential()
	}
	if ready != nil && !ready.fits(path, e.Argv, env, attr.Dir) {
		return nil, errUnfit
	}
	p := newProc(e, u)
	p.log, p.stdin = log, in
	if err := a.procs.reserve(); err != nil {
		return nil, err
	}
	var pid int
	var status <-chan syscall.WaitStatus
	if ready != nil {
		pid, status, err = ready.pid, ready.status, ready.exec(path, e.Argv, attr)
	} else {
		pid, status, err = children().start(path, e.Argv, attr)
	}
	if err != nil {
		a.procs.release()
		if err := a.checkDir(u, dir); err != nil {
			return nil, err
		}
		if !filepath.IsAbs(path) {
			path = a.inside(dir) + "/" + path
		}
		return nil, blame(e.Argv[0], path, err)
	}
	p.pid = pid
	a.procs.add(p)
	go func() {
		p.finish(<-status)
		a.procs.finished(p)
	}()
	return p, nil
}

// find looks argv[0] up in the PATH that the process will have.
func (a *Agent) find(name, dir string, env []string) (string, error) {
	if strings.IndexByte(name, '/') >= 0 {
		if a.root != "" && filepath.IsAbs(name) {
			// The memory engine's sandbox has its own files and the machine's programs.
			if in := a.inside(name); isFile(in) {
				return in, nil
			}
		}
		return name, nil // execve resolves it after chdir
	}
	search := defaultPath
	for _, kv := range env {
		if v, ok := strings.CutPrefix(kv, "PATH="); ok {
			search = v
		}
	}
	denied := false
	for d := range strings.SplitSeq(search, ":") {
		if d == "" || d[0] != '/' {
			d = filepath.Join(dir, d)
		}
		full := d + "/" + name
		var st syscall.Stat_t
		if syscall.Stat(full, &st) != nil || st.Mode&syscall.S_IFMT != syscall.S_IFREG {
			continue
		}
		if st.Mode&0o111 != 0 {
			return full, nil
		}
		denied = true
	}
	if denied {
		return "", &notStarted{126, fmt.Sprintf("bash: %s: Permission denied\n", clip(name, 256))}
	}
	return "", &notStarted{127, fmt.Sprintf("bash: %s: command not found\n", clip(name, 256))}
}

func isFile(path string) bool {
	var st syscall.Stat_t
	return syscall.Stat(path, &st) == nil && st.Mode&syscall.S_IFMT == syscall.S_IFREG
}

func isDir(path string) bool {
	var st syscall.Stat_t
	return syscall.Stat(path, &st) == nil && st.Mode&syscall.S_IFMT == syscall.S_IFDIR
}

// checkDir says what is wrong with a working directory, as its user would see it.
func (a *Agent) checkDir(u *user, dir string) error {
	err := a.as(u, func() error {
		var st syscall.Stat_t
		if err := syscall.Stat(a.inside(dir), &st); err != nil {
			return err
		}
		if st.Mode&syscall.S_IFMT != syscall.S_IFDIR {
			return syscall.ENOTDIR
		}
		// Searching it tells whether chdir would work: access(2) would ask for the real user.
		return syscall.Stat(a.inside(dir)+"/.", &st)
	})
	var errno syscall.Errno
	if !errors.As(err, &errno) {
		return err
	}
	dir = clip(dir, 256)
	switch errno {
	case syscall.ENOENT:
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "cwd %q does not exist", dir)
	case syscall.ENOTDIR:
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "cwd %q is not a directory", dir)
	case syscall.EACCES:
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "cwd %q is not open to user %s", dir, u.name)
	}
	return sandlot.Wrap(err, sandlot.CodeInvalidRequest, "cwd %q cannot be used", dir)
}

// blame translates execve's error into what bash says.
func blame(name, path string, err error) error {
	short := clip(name, 256)
	errno, _ := err.(syscall.Errno) //nolint:errorlint // ForkExec returns a bare Errno
	switch errno {
	case syscall.ENOENT:
		if isFile(path) { // the interpreter is missing
			return &notStarted{127, fmt.Sprintf("bash: %s: cannot execute: required file not found\n", short)}
		}
		return &notStarted{127, fmt.Sprintf("bash: %s: No such file or directory\n", short)}
	case syscall.ENOTDIR, syscall.ELOOP, syscall.ENAMETOOLONG:
		return &notStarted{127, fmt.Sprintf("bash: %s: %s\n", short, sentence(errno))}
	case syscall.EACCES, syscall.EPERM:
		if isDir(path) {
			return &notStarted{126, fmt.Sprintf("bash: %s: Is a directory\n", short)}
		}
		return &notStarted{126, fmt.Sprintf("bash: %s: Permission denied\n", short)}
	case syscall.ENOEXEC:
		return &notStarted{126, fmt.Sprintf("bash: %s: cannot execute binary file: Exec format error\n", short)}
	case syscall.E2BIG:
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "argv and env together are too long for execve, or one argument is over 128 KiB")
	case syscall.EAGAIN, syscall.ENOMEM, syscall.EMFILE, syscall.ENFILE:
		return sandlot.Wrap(err, sandlot.CodeRateLimited, "the sandbox has no room for another process: %s", sentence(errno)).With("retry_after_s", 1)
	}
	return sandlot.Wrap(err, sandlot.CodeInternal, "the process could not be started: %s", sentence(errno))
}

func sentence(e syscall.Errno) string {
	s := e.Error()
	return strings.ToUpper(s[:1]) + s[1:]
}

// killTree ends the groups of processes that led a session, and all that kept the session.
func killTree(leaders ...int) {
	sessions := make(map[int]bool, len(leaders))
	for _, pid := range leaders {
		if pid > 1 {
			sessions[pid] = true
			_ = syscall.Kill(-pid, syscall.SIGKILL)
		}
	}
	// What called setpgid left the group but not the session. It may fork while it is being killed.
	for range 5 {
		found := false
		for other := range pids() {
			if sid, err := unix.Getsid(other); err != nil || !sessions[sid] {
				continue
			}
			if st, ok := readStat(other); ok && st.state != 'Z' && st.state != 'X' {
				found = true
				_ = syscall.Kill(other, syscall.SIGKILL)
			}
		}
		if !found {
			return
		}
		time.Sleep(time.Millisecond)
	}
}
