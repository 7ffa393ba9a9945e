package agent

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"

	"sandlot"
	"sandlot/internal/wire"
)

const maxLine = 48 << 20 // bytes of a kernel's message

// kernelProc is one kernel: a process and the channel to it. Whoever has its context's turn may use it; kill and
// wake are anybody's.
type kernelProc struct {
	p      *proc
	sock   *os.File
	fd     int // sock's
	stdout *output
	stderr *output

	in         *bufio.Reader
	line       []byte
	id         int64 // of the cell that runs
	count      int   // as the kernel counts
	identified bool
	peak       int64 // bytes of memory, as last seen
}

// message is what a kernel says.
type message struct {
	Type      string          `json:"type"`
	ID        int64           `json:"id"`
	Main      bool            `json:"main"`
	Data      json.RawMessage `json:"data"`
	Name      string          `json:"name"`
	Value     string          `json:"value"`
	Traceback string          `json:"traceback"`
	Count     int             `json:"count"`
}

// Bytes of an error's parts. JSON may take six for each, and all of it goes into one frame.
const (
	maxErrorName  = 256
	maxErrorValue = 32 << 10
	maxTraceback  = 128 << 10
)

func (m *message) failure() *wire.CellError {
	return &wire.CellError{
		Name: clipText(m.Name, maxErrorName), Value: clipText(m.Value, maxErrorValue), Traceback: clipText(m.Traceback, maxTraceback),
	}
}

// clipText cuts between characters.
func clipText(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return strings.ToValidUTF8(s[:n], "") + "…"
}

// start starts a kernel for a language. It answers when await says so.
func (ks *kernels) start(id *identity, language, cwd string) (*kernelProc, error) {
	if err := ks.install(); err != nil {
		return nil, sandlot.Wrap(err, sandlot.CodeInternal, "the kernels' programs could not be written")
	}
	argv, err := ks.a.kernelArgv(language)
	if err != nil {
		return nil, err
	}
	u, err := ks.a.account("")
	if err != nil {
		return nil, err
	}
	null, err := devNull()
	if err != nil {
		return nil, noPipes(err)
	}
	ends, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, noPipes(err)
	}
	defer func() { _ = syscall.Close(ends[1]) }()
	k := &kernelProc{fd: ends[0], identified: true}
	if err = syscall.SetNonblock(k.fd, true); err == nil {
		k.sock = os.NewFile(uintptr(k.fd), "kernel")
		if k.stdout, err = newOutput(ks.a.procs); err == nil {
			if k.stderr, err = newOutput(ks.a.procs); err != nil {
				k.stdout.pipe.drop()
			}
		}
	}
	if err != nil {
		_ = syscall.Close(k.fd)
		return nil, noPipes(err)
	}
	k.in = bufio.NewReaderSize(said{k}, 4<<10)
	k.p, err = ks.a.launch(id, u, &wire.Exec{Argv: argv, Cwd: cwd}, nil, []int{int(null.Fd()), k.stdout.pipe.w, k.stderr.pipe.w, ends[1]}, nil, nil)
	if err != nil {
		k.stdout.pipe.drop()
		k.stderr.pipe.drop()
		_ = k.sock.Close()
		var ns *notStarted
		if errors.As(err, &ns) {
			return nil, sandlot.Errorf(sandlot.CodeUnsupported, "the %s kernel cannot be started: %s", language, trimLine(ns.Message))
		}
		return nil, err
	}
	k.stdout.watch()
	k.stderr.watch()
	go func() {
		<-k.p.done
		k.wake()
	}()
	return k, nil
}

// wake lets a reader of the channel look around.
func (k *kernelProc) wake() { _ = k.sock.SetReadDeadline(time.Unix(1, 0)) }

// await waits until the kernel can take a cell.
func (k *kernelProc) await(deadline time.Time) error {
	for {
		_ = k.sock.SetReadDeadline(deadline)
		m, err := k.next()
		if err == nil && m.Type == "ready" {
			return nil
		}
		if err == nil || errors.Is(err, os.ErrDeadlineExceeded) && (!k.p.running() || time.Now().Before(deadline)) {
			continue
		}
		k.kill()
		return err
	}
}

var errKernelEnded = errors.New("agent: the kernel has ended")

// said is the channel as a reader. A process that a cell forked may hold the other end open for longer than the
// kernel lives, so the end of the channel is not waited for.
type said struct{ k *kernelProc }

func (s said) Read(b []byte) (int, error) {
	if s.k.p.running() {
		n, err := s.k.sock.Read(b)
		if n > 0 || err != nil && errors.Is(err, os.ErrDeadlineExceeded) {
			return n, err
		}
		return 0, errKernelEnded
	}
	for {
		n, err := syscall.Read(s.k.fd, b)
		if err == syscall.EINTR { //nolint:errorlint // a bare Errno
			continue
		}
		if n > 0 && err == nil {
			return n, nil
		}
		return 0, errKernelEnded
	}
}

// next returns the next message. What cannot be read is the kernel's end.
func (k *kernelProc) next() (*message, error) {
	for {
		part, err := k.in.ReadSlice('\n')
		if len(k.line)+len(part) > maxLine {
			return nil, errKernelEnded
		}
		if err == nil && len(k.line) == 0 {
			return parseMessage(part)
		}
		k.line = append(k.line, part...)
		switch {
		case errors.Is(err, bufio.ErrBufferFull):
			continue
		case err != nil:
			return nil, err
		}
		line := k.line
		k.line = nil // it may be large
		return parseMessage(line)
	}
}

func parseMessage(line []byte) (*message, error) {
	m := new(message)
	if json.Unmarshal(line, m) != nil {
		return nil, errKernelEnded
	}
	return m, nil
}

// run is the message that asks for a cell.
func (k *kernelProc) run(cell *wire.Cell) []byte {
	k.id++
	return line(map[string]any{"op": "run", "id": k.id, "code": cell.Code, "language": cell.Language})
}

// identity is the message that says whose the kernel is.
func (k *kernelProc) identity(id *identity) []byte {
	k.identified, k.count = true, 0
	var seed [64]byte
	_, _ = rand.Read(seed[:])
	return line(map[string]any{"op": "identity", "env": id.env, "seed": hex.EncodeToString(seed[:])})
}

func line(v any) []byte {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil { // ends the line
		panic(err) // strings always marshal
	}
	return b.Bytes()
}

// send writes to the kernel, which has until deadline to read. It does not tell of failure: a kernel that ends
// or does not listen is found by who waits for its answer.
func (k *kernelProc) send(b []byte, deadline time.Time) {
	_ = k.sock.SetWriteDeadline(deadline)
	if len(b) <= 32<<10 {
		_, _ = k.sock.Write(b)
		return
	}
	go func() { _, _ = k.sock.Write(b) }() // it may have to say something before it can read
}

// begin gives the outputs to a cell.
func (k *kernelProc) begin(out *cellOutput) {
	k.stdout.begin(out.stdout)
	k.stderr.begin(out.stderr)
}

// finish takes from the outputs what was written until now. What comes later is the next cell's.
func (k *kernelProc) finish() {
	k.stdout.finish()
	k.stderr.finish()
}

// discard lets go of a kernel that is dead.
func (k *kernelProc) discard() {
	k.stdout.discard()
	k.stderr.discard()
	_ = k.sock.Close()
}

// kill ends the kernel with everything that kept its session, and waits for it.
func (k *kernelProc) kill() {
	// A session's number is not given to another process while the session has members: where the leader is gone
	// but a process has its pid, nothing of the session is left.
	if k.p.running() || !isDir("/proc/"+itoa(k.p.pid)) {
		killTree(k.p.pid)
	}
	<-k.p.done
}

// sample looks at how much memory the kernel has.
func (k *kernelProc) sample() {
	b, err := readSmall("/proc/"+itoa(k.p.pid)+"/statm", 256)
	if err != nil {
		return
	}
	var size, resident int64
	if _, err := fmt.Sscan(string(b), &size, &resident); err == nil {
		k.peak = resident * int64(os.Getpagesize())
	}
}

// fate says how the process ended.
func (k *kernelProc) fate() string {
	select {
	case <-k.p.done:
	default:
		return "it does not answer"
	}
	code, signal := k.p.exit()
	if signal != "" {
		return "it was ended by " + signal
	}
	return "it ended with exit status " + itoa(code)
}

// epitaph is the error of the cell in which the kernel died.
func (k *kernelProc) epitaph() *wire.CellError {
	_, signal := k.p.exit()
	if total := memoryTotal(); signal == "SIGKILL" && total > 0 && k.peak > total/5*2 {
		return &wire.CellError{Name: "OutOfMemory", Value: fmt.Sprintf(
			"the sandbox ran out of memory: the kernel had %d MiB of %d MiB when it was ended; variables are lost", k.peak>>20, total>>20)}
	}
	return &wire.CellError{Name: "KernelDied", Value: "the kernel died: " + k.fate() + "; variables are lost"}
}

// memoryTotal is the sandbox's memory in bytes, 0 when that is not known.
func memoryTotal() int64 {
	b, err := readSmall("/proc/meminfo", 8<<10)
	if err != nil {
		return 0
	}
	var kb int64
	if _, after, ok := strings.Cut(string(b), "MemTotal:"); ok {
		_, _ = fmt.Sscan(after, &kb)
	}
	return kb << 10
}
