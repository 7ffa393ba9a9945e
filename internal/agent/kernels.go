package agent

import (
	"errors"
	"io/fs"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"sandlot"
	"sandlot/internal/wire"
)

const (
	maxContexts = 64
	kernelDir   = "/run/sandlot/kernel" // root's, and nobody else writes there

	pythonBridge = "bridge.py"
	scriptBridge = "bridge.mjs"

	compiledBridge = "bridge.pyc"

	// aheadPatience bounds each of two things that are done before the first hello. What does not work out then is
	// done when somebody asks.
	aheadPatience = 5 * time.Second
)

// kernels are the contexts of a sandbox: one kernel process each, so that none ever waits for another.
type kernels struct {
	a *Agent

	install  func() error // writes the bridges, once
	compiled stamp        // of the interpreter that compiledBridge is for; set before anybody asks for a kernel

	mu       sync.Mutex
	closed   bool
	contexts map[string]*kernelContext
	passing  map[*kernelContext]struct{} // of cells that keep nothing
	unused   *kernelProc                 // started ahead, before anybody asked for it
}

func newKernels(a *Agent, bridges fs.FS) *kernels {
	ks := &kernels{a: a, contexts: make(map[string]*kernelContext), passing: make(map[*kernelContext]struct{})}
	ks.install = sync.OnceValue(func() error { return a.installBridges(bridges) })
	return ks
}

// installBridges puts the kernels' programs where user code cannot change them.
func (a *Agent) installBridges(bridges fs.FS) error {
	for i := 1; i <= len(kernelDir); i++ {
		if i == len(kernelDir) || kernelDir[i] == '/' {
			if err := a.ownDir(a.inside(kernelDir[:i])); err != nil {
				return err
			}
		}
	}
	for _, name := range []string{pythonBridge, scriptBridge} {
		b, err := fs.ReadFile(bridges, name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		if err := a.installBridge(name, b); err != nil {
			return err
		}
	}
	return nil
}

// ownDir makes a directory of the system's, whatever the image has in its place: behind a link there could be one
// that user code writes to.
func (a *Agent) ownDir(dir string) error {
	st, err := os.Lstat(dir)
	if err == nil && !st.IsDir() {
		if err := os.Remove(dir); err != nil {
			return err
		}
	}
	if err != nil || !st.IsDir() {
		if err := os.Mkdir(dir, 0o755); err != nil { //nolint:gosec // the sandbox's user runs what is in it
			return err
		}
	}
	if !a.switchUser {
		return nil
	}
	return errors.Join(os.Chown(dir, 0, 0), os.Chmod(dir, 0o755)) //nolint:gosec // as above
}

func (a *Agent) installBridge(name string, content []byte) error {
	name = a.inside(kernelDir + "/" + name)
	_ = os.Remove(name)
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL|syscall.O_NOFOLLOW, 0o444)
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	return errors.Join(err, f.Close())
}

// compileBridge prints a program as Python's byte code.
const compileBridge = `import sys, importlib.util, marshal
code = compile(open(sys.argv[1], "rb").read(), sys.argv[2], "exec", dont_inherit=True)
sys.stdout.buffer.write(importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code))`

// compile leaves the Python kernel as byte code: a kernel that has to compile it starts more slowly, and keeps a
// tenth more memory for as long as it lives. It is for the very interpreter that made it. No user code has run yet.
func (ks *kernels) compile(id *identity) {
	argv, err := ks.a.kernelArgv("python")
	if err != nil {
		return
	}
	made := ks.a.inside(kernelDir + "/" + compiledBridge)
	out, err := ks.a.collect(ks.a.ctx, id, &wire.Exec{
		Argv: []string{argv[0], "-I", "-c", compileBridge, argv[1], made}, Collect: 4 << 20, TimeoutMS: aheadPatience.Milliseconds(),
	})
	if err != nil {
		return
	}
	defer out.stdout.free()
	defer out.stderr.free()
	if out.exit.ExitCode == 0 && !out.stdout.truncated && ks.a.installBridge(compiledBridge, out.stdout.data) == nil {
		ks.compiled = stampOf(argv[0])
	}
}

// kernelArgv is the program that runs a language's cells.
func (a *Agent) kernelArgv(language string) ([]string, error) {
	programs, bridge := []string{"node", "bun"}, scriptBridge
	if language == "python" {
		programs, bridge = []string{"python3"}, pythonBridge
	}
	// The template's PATH, not the sandbox's: a variable of the sandbox does not choose its kernel.
	search := defaultPath
	if p := a.cfg.Boot.Env["PATH"]; p != "" {
		search = p
	}
	env := []string{"PATH=/usr/local/bin:" + search}
	for _, program := range programs {
		if path, err := a.find(program, a.inside(workspace), env); err == nil {
			file := a.inside(kernelDir + "/" + bridge)
			if !isFile(file) {
				break
			}
			if ks := a.kernels; bridge == pythonBridge && ks.compiled != (stamp{}) && ks.compiled == stampOf(path) {
				file = a.inside(kernelDir + "/" + compiledBridge)
			}
			return []string{path, file}, nil
		}
	}
	have := append(slices.Clone(a.cfg.Boot.Kernels), "bash")
	return nil, sandlot.Errorf(sandlot.CodeUnsupported, "there is no %s in this sandbox: it looks for %s; its template runs %s",
		language, strings.Join(programs, " or "), strings.Join(have, ", "))
}

// validContext allows what fits a path's segment.
func validContext(id string) bool {
	for i := range len(id) {
		c := id[i]
		if !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || i > 0 && (c == '-' || c == '_' || c == '.')) {
			return false
		}
	}
	return id != "" && len(id) <= 64
}

// kernelLanguage is the language of the kernel that runs code of a language.
func kernelLanguage(language string) string {
	if language == "typescript" {
		return "javascript"
	}
	return language
}

// open returns the context of a name, and makes it when there is none. language "" is the context's own, or
// python.
func (ks *kernels) open(id, language, cwd string, fresh bool) (*kernelContext, error) {
	if !validContext(id) {
		return nil, sandlot.Errorf(sandlot.CodeInvalidRequest, "a context's id has 1 to 64 letters, digits, '-', '_' and '.', and begins with a letter or digit")
	}
	if kernelLanguage(language) == "bash" {
		return nil, sandlot.Errorf(sandlot.CodeInvalidRequest, "bash keeps no state: leave the context out")
	}
	ks.mu.Lock()
	defer ks.mu.Unlock()
	if c := ks.contexts[id]; c != nil {
		switch {
		case fresh:
			return nil, sandlot.Errorf(sandlot.CodeConflict, "there is a context %s already", id)
		case language != "" && kernelLanguage(language) != c.language:
			return nil, sandlot.Errorf(sandlot.CodeInvalidRequest, "context %s runs %s: use another context for %s", id, c.language, language)
		}
		return c, nil
	}
	if ks.closed {
		return nil, sandlot.Errorf(sandlot.CodeSandboxUnhealthy, "the agent is closing")
	}
	if len(ks.contexts) >= maxContexts {
		return nil, sandlot.Errorf(sandlot.CodeRateLimited, "the sandbox has %d contexts, which is the limit: delete one first", maxContexts).With("retry_after_s", 1)
	}
	c := newContext(ks, id, language, cwd)
	ks.contexts[id] = c
	return c, nil
}

// pass makes the context of one cell that keeps nothing.
func (ks *kernels) pass(language string) (*kernelContext, error) {
	ks.mu.Lock()
	defer ks.mu.Unlock()
	if ks.closed {
		return nil, sandlot.Errorf(sandlot.CodeSandboxUnhealthy, "the agent is closing")
	}
	if len(ks.passing) >= maxContexts {
		return nil, sandlot.Errorf(sandlot.CodeRateLimited, "%d cells without a context run at the same time, which is the limit", maxContexts).With("retry_after_s", 1)
	}
	c := newContext(ks, "", language, "")
	ks.passing[c] = struct{}{}
	return c, nil
}

// passed ends a context of pass.
func (ks *kernels) passed(c *kernelContext) {
	ks.mu.Lock()
	delete(ks.passing, c)
	ks.mu.Unlock()
	c.end(endDeleted)
}

func (ks *kernels) get(id string) (*kernelContext, error) {
	ks.mu.Lock()
	defer ks.mu.Unlock()
	if c := ks.contexts[id]; c != nil {
		return c, nil
	}
	return nil, sandlot.Errorf(sandlot.CodeNotFound, "no context %q", clip(id, 64))
}

// remove takes a context out, and ends its kernel.
func (ks *kernels) remove(id string) error {
	ks.mu.Lock()
	c := ks.contexts[id]
	delete(ks.contexts, id)
	ks.mu.Unlock()
	if c == nil {
		return sandlot.Errorf(sandlot.CodeNotFound, "no context %q", clip(id, 64))
	}
	c.end(endDeleted)
	return nil
}

func (ks *kernels) list() []wire.Context {
	ks.mu.Lock()
	all := make([]*kernelContext, 0, len(ks.contexts))
	for _, c := range ks.contexts {
		all = append(all, c)
	}
	ks.mu.Unlock()
	out := make([]wire.Context, 0, len(all))
	for _, c := range all {
		out = append(out, c.describe())
	}
	slices.SortFunc(out, func(x, y wire.Context) int {
		if n := x.CreatedAt.Compare(y.CreatedAt); n != 0 {
			return n
		}
		return strings.Compare(x.ID, y.ID)
	})
	return out
}

// ahead is the pid of the kernel that runs although nobody has asked for it yet, 0 when there is none.
func (ks *kernels) ahead() int {
	ks.mu.Lock()
	defer ks.mu.Unlock()
	if ks.unused != nil && ks.unused.p.running() {
		return ks.unused.p.pid
	}
	return 0
}

// taken says that somebody uses k.
func (ks *kernels) taken(k *kernelProc) {
	ks.mu.Lock()
	if ks.unused == k {
		ks.unused = nil
	}
	ks.mu.Unlock()
}

// prestart starts the default context's kernel while nobody waits, and walks a cell's path in it once.
func (ks *kernels) prestart() {
	id := &identity{env: ks.a.cfg.Boot.Env}
	if ks.install() == nil {
		ks.compile(id)
	}
	c, err := ks.open(wire.DefaultContext, "python", "", false)
	if err != nil {
		return
	}
	c.turn <- struct{}{}
	defer c.release()
	end, err := c.run(ks.a.ctx, id, &wire.Cell{Language: "python", TimeoutMS: aheadPatience.Milliseconds()}, new(cellOutput), true)
	k := c.current()
	if err != nil || end.Error != nil || k == nil {
		ks.a.log.Warn("the kernel could not be started ahead", "err", err, "said", end.Error)
		ks.mu.Lock()
		delete(ks.contexts, wire.DefaultContext)
		ks.mu.Unlock()
		c.end(endDeleted)
		return
	}
	k.identified = false
	c.mu.Lock()
	c.count = 0
	c.mu.Unlock()
	ks.mu.Lock()
	ks.unused = k
	ks.mu.Unlock()
}

// quietTime is how long a kernel that was started ahead is left alone after the claim: what comes first is
// somebody's command, and the processor is its.
const quietTime = 50 * time.Millisecond

func (ks *kernels) identifyLater(id *identity) {
	if ks.ahead() != 0 {
		time.AfterFunc(quietTime, func() { ks.identify(id) })
	}
}

// identify tells a kernel that was started ahead whose it is now. A cell that comes first does it itself.
func (ks *kernels) identify(id *identity) {
	c, err := ks.get(wire.DefaultContext)
	if err != nil {
		return
	}
	select {
	case c.turn <- struct{}{}:
	default:
		return
	}
	defer c.release()
	if k := c.current(); k != nil && !k.identified {
		k.send(k.identity(id), time.Now().Add(interruptGrace))
	}
}

// close ends all kernels; their processes end with the agent's others.
func (ks *kernels) close() {
	ks.mu.Lock()
	ks.closed = true
	ks.mu.Unlock()
}
