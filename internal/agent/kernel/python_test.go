package kernel

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// A cell may break what it likes in its own interpreter: the next one runs, is heard, and has its errors described.
func TestPythonSurvives(t *testing.T) {
	t.Parallel()
	for name, code := range map[string]string{
		"builtins deleted":  "import builtins\nfor name in list(vars(builtins)): delattr(builtins, name)",
		"builtins replaced": "import builtins\nbuiltins.len = builtins.isinstance = builtins.repr = builtins.str = builtins.print = None",
		"stdout closed":     "import sys\nsys.stdout.close(); sys.stderr.close()",
		"stdin closed":      "exit()",
		"excepthook":        "import sys\nsys.excepthook = sys.displayhook = None",
		"SIGINT":            "import signal\nsignal.signal(signal.SIGINT, signal.SIG_DFL)",
		"linecache":         "import linecache\nlinecache.clearcache()",
		"loop closed":       "import asyncio\nawait asyncio.sleep(0)\nasyncio.get_running_loop().stop()",
		"names deleted":     "globals().clear()",
		"switch interval":   "import sys\nsys.setrecursionlimit(60)",
		"atexit":            "import atexit\natexit.register(lambda: 1 / 0)",
		"metaclass": "class M(type):\n    @property\n    def __name__(cls): raise ValueError\nclass E(Exception, metaclass=M):\n" +
			"    def __str__(self): raise ValueError\nraise E",
		"no error at all": "class E(BaseException):\n    __class__ = property(lambda self: 1 / 0)\nraise E",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := start(t, "python")
			p.run("python", code)
			if a := p.run("python", "print('heard')\n6 * 7"); text(a) != "42" || a.Stdout != "heard\n" || a.Error != nil {
				t.Errorf("then: %+v, error %+v", a, a.Error)
			}
			if a := p.run("python", "1 / 0"); a.Error == nil || a.Error.Name != "ZeroDivisionError" || !strings.Contains(a.Error.Traceback, "ZeroDivisionError: division by zero") {
				t.Errorf("and then: %+v, error %+v", a, a.Error)
			}
			if err := p.cmd.Process.Signal(os.Interrupt); err != nil { // between two cells
				t.Fatal(err)
			}
			if a := p.run("python", "'still'"); text(a) != "'still'" {
				t.Errorf("after an interrupt between cells: %+v, error %+v", a, a.Error)
			}
		})
	}
}

// What a kernel cannot survive ends it, and it says nothing untrue before.
func TestPythonDies(t *testing.T) {
	t.Parallel()
	for code, stderr := range map[string]string{
		"import os\nprint('last words')\nos._exit(3)":                     "",
		"print('last words')\nimport ctypes\nctypes.string_at(0)":         `(?s)Fatal Python error: Segmentation fault.*File "<cell 1>", line 3 in <module>.*`,
		"import os\nprint('last words', flush=True)\nos.close(3)":         "",
		"import os, signal\nprint('last words')\nos.kill(os.getpid(), 9)": "",
	} {
		p := start(t, "python")
		a := p.run("python", code)
		if a.Error == nil || a.Error.Name != "dead" || len(a.Results) != 0 || !regexp.MustCompile(`^(?:`+stderr+`)$`).MatchString(a.Stderr) {
			t.Errorf("%q: %+v, error %+v", code, a, a.Error)
		}
		if a.Stdout != "last words\n" && !strings.Contains(code, "9)") { // nobody can write after that one
			t.Errorf("%q: stdout %q", code, a.Stdout)
		}
	}
}

func TestPythonInterrupt(t *testing.T) {
	t.Parallel()
	p := start(t, "python")
	p.run("python", "kept = 5\nimport asyncio, time")
	for _, code := range []string{
		"print('go')\nwhile True: pass",
		"print('go')\ntime.sleep(1000)",
		"print('go')\nawait asyncio.sleep(1000)",
		"async def spin():\n    print('go')\n    while True: pass\nawait spin()",
		"class R:\n    def __repr__(self):\n        print('go')\n        while True: pass\nR()",
		"class E(Exception):\n    def __str__(self):\n        print('go')\n        while True: pass\nraise E",
		"import subprocess\nsubprocess.run(['sh', '-c', 'echo go; exec sleep 1000'])",
		"import threading\nprint('go')\nt = threading.Event()\nt.wait()",
		"!echo go; sleep 1000",
	} {
		p.begin("python", code)
		p.interrupt("go")
		a := p.end()
		if a.Error == nil || a.Error.Name != "KeyboardInterrupt" && !strings.Contains(code, "class E") || len(a.Results) != 0 {
			t.Errorf("%q: %+v, error %+v", code, a, a.Error)
		}
		if a := p.run("python", "kept"); text(a) != "5" {
			t.Fatalf("after %q: %+v, error %+v", code, a, a.Error)
		}
	}
	// Where it waited is told, and a second interrupt reaches a cell that caught the first.
	p.begin("python", "print('go')\nawait asyncio.sleep(1000)")
	p.interrupt("go")
	if a := p.end(); !strings.Contains(a.Error.Traceback, `line 2, in <module>`) {
		t.Errorf("traceback %q", a.Error.Traceback)
	}
	p.begin("python", "try:\n    print('go')\n    time.sleep(1000)\nexcept KeyboardInterrupt:\n    print('caught')\n    time.sleep(1000)")
	p.interrupt("go")
	p.interrupt("caught")
	if a := p.end(); a.Error == nil || a.Error.Name != "KeyboardInterrupt" {
		t.Errorf("the second: %+v, error %+v", a, a.Error)
	}
}

// A kernel that was started ahead becomes somebody's.
func TestPythonIdentity(t *testing.T) {
	t.Parallel()
	var draws [2]string
	for i := range draws {
		p := start(t, "python", "OLD=1")
		p.run("python", "import random\nrandom.seed(1)")
		p.send(map[string]any{"op": "identity", "env": map[string]string{"NEW": "2", "bad\x00name": "x", "TZ": "UTC-3"}, "seed": strings.Repeat("0f", 64)})
		p.id++
		p.send(map[string]any{"op": "run", "id": p.id, "code": "import os, time\nos.environ['OLD'], os.environ['NEW'], os.popen('echo $NEW').read(), time.localtime().tm_gmtoff"})
		for m := p.next(); m != nil && m.Type != "done"; m = p.next() {
			if m.Type == "error" || m.Type == "result" && m.Data["text/plain"] != `('1', '2', '2\n', 10800)` {
				t.Errorf("%+v", m)
			}
		}
		p.id++
		p.send(map[string]any{"op": "run", "id": p.id, "code": "random.random()"})
		for m := p.next(); m != nil; m = p.next() {
			if m.Type == "done" {
				if m.Count != 2 { // what ran before was nobody's
					t.Error("count", m.Count)
				}
				break
			}
			draws[i], _ = m.Data["text/plain"].(string)
		}
	}
	if draws[0] == "" || draws[0] == draws[1] {
		t.Error("two kernels draw", draws)
	}
}

// Output keeps its order among writers of one stream, bytes pass as they are, and large output passes whole.
func TestPythonOutput(t *testing.T) {
	t.Parallel()
	p := start(t, "python")
	a := p.run("python", `import os, subprocess, sys
for i in range(20):
    print("p", i, end=" ")
    subprocess.run(["echo", "c"])
    os.write(1, b"w\n") if not sys.stdout.flush() else None
    os.system("echo s")
    if os.fork() == 0:
        print("f")
        os._exit(0)
    os.wait()`)
	var want strings.Builder
	for i := range 20 {
		fmt.Fprintf(&want, "p %d c\nw\ns\nf\n", i)
	}
	if a.Stdout != want.String() || a.Error != nil {
		t.Errorf("%q, error %+v", a.Stdout, a.Error)
	}
	if a := p.run("python", "for i in range(200000): print(i)"); strings.Count(a.Stdout, "\n") != 200000 || !strings.HasSuffix(a.Stdout, "\n199999\n") {
		t.Errorf("%d bytes", len(a.Stdout))
	}
	p.begin("python", `print("\udcff\ud800é"); sys.stdout.buffer.write(b"\xfe\n"); None`)
	for m := p.next(); m != nil && m.Type != "done"; m = p.next() {
		t.Errorf("%+v", m)
	}
	p.drain()
	if got := p.said[0].String(); got != "\xff\\ud800é\n\xfe\n" {
		t.Errorf("%q", got)
	}
}

// Children that a cell forks have no say in the channel, and one that comes back to the bridge ends.
func TestPythonFork(t *testing.T) {
	t.Parallel()
	p := start(t, "python")
	for code, want := range map[string]string{
		"import os\nchild = os.fork()\nif child: os.waitpid(child, 0)\n'only one'":                                                             "'only one'",
		"import os\nif os.fork() == 0: raise SystemExit(7)\nos.waitstatus_to_exitcode(os.wait()[1])":                                           "7",
		"import os\nif os.fork() == 0: 1 / 0\nos.waitstatus_to_exitcode(os.wait()[1])":                                                         "1",
		"import multiprocessing\ndef f(x): return x * x\nwith multiprocessing.get_context('fork').Pool(2) as pool: r = pool.map(f, [2, 3])\nr": "[4, 9]",
		"import os\nif os.fork() == 0:\n    display('never')\n    raise SystemExit\nos.waitstatus_to_exitcode(os.wait()[1])":                   "0",
	} {
		if a := p.run("python", code); text(a) != want || len(a.Results) != 1 || a.Error != nil {
			t.Errorf("%q: %+v, error %+v", code, a, a.Error)
		}
	}
}

// Results are bounded, and a value that is too large is an error that says so.
func TestPythonLargeResults(t *testing.T) {
	t.Parallel()
	p := start(t, "python")
	if a := p.run("python", "'x' * 50_000_000"); len(text(a)) > 2<<20 || !strings.HasSuffix(text(a), "more characters") {
		t.Errorf("%d bytes", len(text(a)))
	}
	if a := p.run("python", "class E(Exception): pass\nraise E('v' * 50_000_000)"); a.Error == nil || a.Error.Name != "E" || len(a.Error.Value)+len(a.Error.Traceback) > 1<<20 {
		t.Errorf("error %.300v", a.Error)
	}
	if a := p.run("python", "display({'text/html': 'h' * 50_000_000}, raw=True)"); a.Error == nil || !strings.Contains(a.Error.Value, "too large to show") {
		t.Errorf("%d results, error %+v", len(a.Results), a.Error)
	}
	if a := p.run("python", "x = []\nfor i in range(5000): x = [x]\nx"); a.Error == nil || a.Error.Name != "RecursionError" {
		t.Errorf("%d results, error %.300v", len(a.Results), a.Error)
	}
	if a := p.run("python", "#"+strings.Repeat("x", 5<<20)+"\n2"); text(a) != "2" {
		t.Errorf("%+v, error %+v", a, a.Error)
	}
}

// A closed channel ends the kernel as a program ends: with what it registered for that.
func TestPythonEnd(t *testing.T) {
	t.Parallel()
	p := start(t, "python")
	mark := filepath.Join(t.TempDir(), "mark")
	p.run("python", fmt.Sprintf("import atexit\natexit.register(open, %q, 'w')", mark))
	p.hangUp()
	if _, err := os.Stat(mark); err != nil {
		t.Error(err)
	}
}

// The set of magics there is where IPython is not.
func TestPythonWithoutIPython(t *testing.T) {
	t.Parallel()
	// A package of that name that cannot be imported is the nearest thing to none, whatever python has.
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "IPython.py"), []byte("raise ImportError('none')"), 0o600); err != nil {
		t.Fatal(err)
	}
	p := start(t, "python", "PYTHONPATH="+dir)
	for code, want := range map[string]string{
		"x = !echo a; echo b\nx": "['a', 'b']",
		"%env NAME=3\n%env NAME": "'3'",
		"%time 1 + 1":            "2",
		"%%bash\nexit 4":         "",
		"_exit_code":             "",
		"%cd /\n%pwd":            "'/'",
		"%matplotlib inline\n5":  "5",
		"for i in range(2):\n    !true\n_exit_code": "0",
		"get_ipython() is None":                     "True",
	} {
		if want == "" {
			continue
		}
		if a := p.run("python", code); text(a) != want || a.Error != nil {
			t.Errorf("%q: %+v, error %+v", code, a, a.Error)
		}
	}
	p.run("python", "%%bash\necho out\nexit 4")
	if a := p.run("python", "_exit_code"); text(a) != "4" {
		t.Errorf("%+v, error %+v", a, a.Error)
	}
	if a := p.run("python", "%timeit 1"); a.Error == nil || !strings.Contains(a.Error.Value, "install IPython") {
		t.Errorf("%+v, error %+v", a, a.Error)
	}
}

// Nothing but the standard library is loaded before a cell wants more.
func TestPythonStartsSmall(t *testing.T) {
	t.Parallel()
	p := start(t, "python")
	if a := p.run("python", "import sys\n[m for m in sys.modules if m.split('.')[0] in ('IPython', 'numpy', 'asyncio', 'inspect', 'subprocess', 'traceback')]"); text(a) != "[]" {
		t.Errorf("%+v, error %+v", a, a.Error)
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", p.cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	var kb int
	for line := range strings.Lines(string(b)) {
		_, _ = fmt.Sscanf(line, "Pss: %d kB", &kb)
	}
	if kb == 0 || kb > 15<<10 {
		t.Errorf("an idle kernel has %d kB PSS", kb)
	}
}
