package e2e

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"sandlot/test/live"
)

// answer is run-code's.
type answer struct {
	ContextID       string `json:"context_id"`
	ExecutionCount  int    `json:"execution_count"`
	Stdout, Stderr  string
	Results         []map[string]any
	Error           *struct{ Name, Value, Traceback string }
	TimedOut        bool `json:"timed_out"`
	StateLost       bool `json:"state_lost"`
	StdoutTruncated bool `json:"stdout_truncated"`
}

func (a answer) text() string {
	if len(a.Results) == 0 {
		return ""
	}
	s, _ := a.Results[len(a.Results)-1]["text/plain"].(string)
	return s
}

func (a answer) failure() string {
	if a.Error == nil {
		return ""
	}
	return a.Error.Name
}

func tryCode(t testing.TB, b live.Box, code string, in ...map[string]any) (a answer, err error) {
	req := map[string]any{"code": code}
	for _, m := range in {
		for k, v := range m {
			req[k] = v
		}
	}
	return a, b.Call(t.Context(), http.MethodPost, "/"+b.ID+"/run-code", req, &a)
}

func code(t testing.TB, b live.Box, code string, in ...map[string]any) answer {
	t.Helper()
	a, err := tryCode(t, b, code, in...)
	if err != nil {
		t.Fatalf("%.100q: %v", code, err)
	}
	return a
}

func inContext(id string) map[string]any { return map[string]any{"context_id": id} }
func withinSeconds(n int) map[string]any { return map[string]any{"timeout_s": n} }
func inLanguage(l string) map[string]any { return map[string]any{"language": l} }

func TestRunCode(t *testing.T) {
	t.Parallel()
	for _, template := range []string{"base", "python-3.12"} {
		t.Run(template, func(t *testing.T) {
			t.Parallel()
			b := live.New(t, map[string]any{"template": template, "env": map[string]string{"GIVEN": "at create"}})
			if a := code(t, b, "import os\nx = 41\nprint('hello')\nx + 1"); a.text() != "42" || a.Stdout != "hello\n" || a.ExecutionCount != 1 || a.ContextID != "default" {
				t.Errorf("%+v", a)
			}
			if a := code(t, b, "x += 1\n(x, os.environ['GIVEN'], os.environ['SANDBOX_ID'], os.getcwd(), os.getuid())"); a.text() != fmt.Sprintf("(42, 'at create', '%s', '/workspace', 1000)", b.ID) || a.ExecutionCount != 2 {
				t.Errorf("%+v", a)
			}
			if a := code(t, b, "x", inContext("other")); a.failure() != "NameError" || a.StateLost {
				t.Errorf("another context: %+v", a)
			}
			if a := code(t, b, "open('/run/sandlot/kernel/bridge.py', 'a')"); a.failure() != "PermissionError" {
				t.Errorf("the kernel's program can be written: %+v", a)
			}
			if a := code(t, b, "echo $GIVEN; exit 3", inLanguage("bash")); a.Stdout != "at create\n" || a.failure() != "ExitError" || a.Error.Value != "exit status 3" {
				t.Errorf("bash: %+v", a)
			}
		})
	}
	_, err := tryCode(t, live.New(t, map[string]any{"template": "python-3.12"}), "1", inLanguage("javascript"))
	refused(t, err, http.StatusNotImplemented, "unsupported")
	if !strings.Contains(fmt.Sprint(err), "python, bash") {
		t.Errorf("the refusal does not say what there is: %v", err)
	}
}

func TestRunCodeJavaScript(t *testing.T) {
	t.Parallel()
	b := live.New(t, map[string]any{"env": map[string]string{"GIVEN": "at create"}})
	js, ts := inLanguage("javascript"), inLanguage("typescript")
	a := code(t, b, "const x = 41; console.log('out'); console.error('err'); x + 1", js)
	if a.text() != "42" || a.Stdout != "out\n" || a.Stderr != "err\n" || a.ContextID != "" || a.ExecutionCount != 1 || a.StateLost || a.Error != nil {
		t.Errorf("%+v %+v", a, a.Error)
	}
	if a = code(t, b, "typeof x + process.env.GIVEN", js); a.text() != "'undefinedat create'" {
		t.Errorf("a cell without a context keeps something: %+v", a)
	}
	if a = code(t, b, "const y: number = 5; y as number * 2", ts); a.text() != "10" {
		t.Errorf("typescript: %+v %+v", a, a.Error)
	}
	if a = code(t, b, "let z = 1; await new Promise(r => setTimeout(r, 10)); z", js, inContext("js")); a.text() != "1" || a.ContextID != "js" {
		t.Errorf("%+v %+v", a, a.Error)
	}
	if a = code(t, b, "z += 1; z", js, inContext("js")); a.text() != "2" || a.ExecutionCount != 2 {
		t.Errorf("%+v %+v", a, a.Error)
	}
	if a = code(t, b, "null.f()", js); a.failure() != "TypeError" {
		t.Errorf("%+v %+v", a, a.Error)
	}
	if a = code(t, b, "for (;;);", js, inContext("js"), withinSeconds(1)); a.failure() != "Timeout" || a.StateLost {
		t.Errorf("%+v %+v", a, a.Error)
	}
	if a = code(t, b, "z", js, inContext("js")); a.text() != "2" {
		t.Errorf("after an interrupt: %+v %+v", a, a.Error)
	}
	if a = code(t, b, "process.exit(3)", js); a.failure() == "" || !strings.Contains(a.Error.Value, "3") {
		t.Errorf("%+v %+v", a, a.Error)
	}
	if got := b.Out(t, "pgrep -fc '[b]ridge.mjs' || true"); got != "1" {
		t.Errorf("%s JavaScript kernels are left, want the context's", got)
	}
}

func TestRunCodePandas(t *testing.T) {
	t.Parallel()
	b := live.New(t, map[string]any{"template": "python-3.12"})
	a := code(t, b, "import pandas as pd\npd.DataFrame({'a': [1, 2]})")
	if html, _ := a.Results[0]["text/html"].(string); !strings.Contains(html, "<table") || !strings.Contains(a.text(), "a\n0  1") {
		t.Errorf("%+v", a)
	}
	a = code(t, b, "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nNone")
	png, _ := a.Results[len(a.Results)-1]["image/png"].(string)
	if raw, err := base64.StdEncoding.DecodeString(png); err != nil || !strings.HasPrefix(string(raw), "\x89PNG") {
		t.Errorf("no chart: %v, %.300v", err, a)
	}
}

// A cell past its time is interrupted and its state kept; a kernel that does not mind is replaced.
func TestRunCodeTimeout(t *testing.T) {
	t.Parallel()
	b := live.New(t, nil)
	a := code(t, b, "x = 7\nprint('begun', flush=True)\nwhile True: pass", withinSeconds(1))
	if a.failure() != "Timeout" || !a.TimedOut || a.StateLost || a.Stdout != "begun\n" {
		t.Errorf("%+v", a)
	}
	if a = code(t, b, "x"); a.text() != "7" {
		t.Errorf("after an interrupt: %+v", a)
	}
	a = code(t, b, "while True:\n  try:\n    while True: sum(range(9))\n  except KeyboardInterrupt: print('no', flush=True)", withinSeconds(1))
	if a.failure() != "Timeout" || !a.StateLost || a.Stdout != "no\n" || !strings.Contains(a.Error.Value, "variables are lost") {
		t.Errorf("%+v %+v", a, a.Error)
	}
	if a = code(t, b, "'x' in globals()"); a.text() != "False" || a.ExecutionCount != 1 {
		t.Errorf("after a replacement: %+v", a)
	}
}

func TestRunCodeClientGone(t *testing.T) {
	t.Parallel()
	b := live.New(t, nil)
	code(t, b, "x = 7")
	ctx, cancel := context.WithCancel(t.Context())
	resp, err := b.Request(ctx, http.MethodPost, "/"+b.ID+"/run-code", body(`{"code":"print('begun', flush=True)\nwhile True: pass","stream":true,"timeout_s":3600}`))
	if err != nil {
		t.Fatal(err)
	}
	if err := live.Events(resp.Body, func(e live.Event) bool { return !strings.Contains(e.Data, "begun") }); err != nil {
		t.Error(err)
	}
	cancel()
	resp.Body.Close()
	if a := code(t, b, "x"); a.text() != "7" || a.ExecutionCount != 3 {
		t.Errorf("%+v", a)
	}
}

// However a kernel dies, the answer says so and the next cell has a new one.
func TestRunCodeKernelDies(t *testing.T) {
	t.Parallel()
	b := live.New(t, nil)
	for _, c := range []struct{ code, name, value string }{
		{"import ctypes; ctypes.string_at(0)", "KernelDied", "SIGSEGV"},
		{"import os; os._exit(3)", "KernelDied", "exit status 3"},
		{"import os; os.abort()", "KernelDied", "SIGABRT"},
		{"import os; os.kill(os.getpid(), 9)", "KernelDied", "SIGKILL"},
		{"import os; os.fork() or __import__('time').sleep(99)\nos._exit(4)", "KernelDied", "exit status 4"},
		{"b = []\nwhile True: b.append(bytearray(b'x' * (16 << 20)))", "OutOfMemory", "memory"},
	} {
		code(t, b, "x = 1")
		a := code(t, b, c.code)
		// Where the kernel says no before it is killed, Python has its own word.
		if name := a.failure(); (name != c.name || !strings.Contains(a.Error.Value, c.value) || !a.StateLost) && !(c.name == "OutOfMemory" && name == "MemoryError") {
			t.Errorf("%s: %+v %+v", c.code, a, a.Error)
		}
		if a = code(t, b, "1+1"); a.text() != "2" || a.StateLost {
			t.Errorf("after %s: %+v", c.code, a)
		}
	}
}

func TestRunCodeForkAndThreads(t *testing.T) {
	t.Parallel()
	b := live.New(t, nil)
	a := code(t, b, "import os, sys\npid = os.fork()\nif pid == 0:\n  print('child', flush=True)\n  sys.exit(0)\nos.waitpid(pid, 0)\nprint('parent')")
	if a.Stdout != "child\nparent\n" || a.Error != nil {
		t.Errorf("fork: %+v %+v", a, a.Error)
	}
	a = code(t, b, "import threading, time\nt = threading.Thread(target=lambda: (time.sleep(.5), print('late')))\nt.start()\nprint('now')")
	if a.Stdout != "now\n" {
		t.Errorf("%+v", a)
	}
	time.Sleep(time.Second)
	if a = code(t, b, "t.join(); print('next')"); a.Stdout != "late\nnext\n" {
		t.Errorf("a thread's late words: %+v", a)
	}
	if a = code(t, b, "import subprocess\np = subprocess.Popen(['sleep', '555'])"); a.Error != nil {
		t.Errorf("%+v", a)
	}
	if a = code(t, b, "p.poll() is None"); a.text() != "True" {
		t.Errorf("a process that a cell left is gone: %+v", a)
	}
}

func TestRunCodeManyContexts(t *testing.T) {
	t.Parallel()
	b := live.New(t, map[string]any{"template": "python-3.12"})
	stuck := make(chan answer, 1)
	go func() {
		a, _ := tryCode(t, b, "while True: pass", inContext("stuck"), withinSeconds(300))
		stuck <- a
	}()
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			a, err := tryCode(t, b, fmt.Sprintf("import time; time.sleep(.2); %d * 2", i), inContext(fmt.Sprint("c", i)))
			if err != nil || a.text() != fmt.Sprint(2*i) {
				t.Errorf("context %d: %v, %+v", i, err, a)
			}
		})
	}
	wg.Wait()
	if _, err := b.Do(t.Context(), http.MethodPost, "/contexts/stuck/interrupt", nil); err != nil {
		t.Error(err)
	}
	if a := <-stuck; a.failure() != "KeyboardInterrupt" {
		t.Errorf("%+v", a)
	}
	var list struct {
		Contexts []struct{ ID, Language, Cwd, State string }
	}
	for _, want := range []int{21, 1} {
		if err := b.Call(t.Context(), http.MethodGet, "/"+b.ID+"/contexts", nil, &list); err != nil {
			t.Fatal(err)
		}
		n := len(list.Contexts)
		if list.Contexts[0].ID == "default" {
			n-- // a pool's machine has it already
		}
		if got := b.Out(t, "pgrep -fc '[b]ridge.py' || true"); n != want || got != fmt.Sprint(len(list.Contexts)) {
			t.Errorf("%d contexts, want %d; %s kernels", n, want, got)
		}
		for _, c := range list.Contexts {
			if c.ID[0] != 'c' {
				continue
			}
			if _, err := b.Do(t.Context(), http.MethodDelete, "/contexts/"+c.ID, nil); err != nil {
				t.Error(err)
			}
		}
	}
}

// A flood is cut where its limit is, with a mark, and kept out of the server's memory.
func TestRunCodeFlood(t *testing.T) {
	t.Parallel()
	b := live.New(t, nil)
	a := code(t, b, "import sys\nfor i in range(100): sys.stdout.write('x' * (1 << 20))\n'end'", withinSeconds(300))
	if len(a.Stdout) < 10<<20 || len(a.Stdout) > 10<<20+200 || !a.StdoutTruncated || !strings.Contains(a.Stdout[len(a.Stdout)-200:], "[sandlot: ") || a.text() != "'end'" {
		t.Errorf("%d bytes, %v, %q, %+v", len(a.Stdout), a.StdoutTruncated, a.Stdout[max(0, len(a.Stdout)-100):], a.Error)
	}
}

func TestRunCodeStream(t *testing.T) {
	t.Parallel()
	b := live.New(t, nil)
	req, _ := json.Marshal(map[string]any{"stream": true, "code": "import time, os\nprint('one', flush=True)\ntime.sleep(.3)\ndisplay(2)\nos.write(1, '€'.encode()[:2]); time.sleep(.3); os.write(1, '€'.encode()[2:] + b'\\xff')\ntime.sleep(.3)\n1/0"})
	resp, err := b.Request(t.Context(), http.MethodPost, "/"+b.ID+"/run-code", body(string(req)))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var types, text string
	if err := live.Events(resp.Body, func(e live.Event) bool {
		if e.Type == "stdout" && strings.HasSuffix(types, "stdout ") {
			types = strings.TrimSuffix(types, "stdout ")
		}
		types += e.Type + " "
		raw, _ := base64.StdEncoding.DecodeString(e.DataBase64)
		text += e.Data + string(raw)
		return true
	}); err != nil {
		t.Error(err)
	}
	if types != "stdout result stdout error end " || text != "one\n€\xff" {
		t.Errorf("%q %q", types, text)
	}
}

// Two sandboxes draw different random numbers, although their kernels started alike and one came from the pool.
func TestRunCodeRandom(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for range 3 {
		b := live.New(t, nil)
		a := code(t, b, "import random, uuid, os, secrets\n(random.random(), str(uuid.uuid4()), secrets.token_hex(4), hash('a'))")
		if a.text() == "" || seen[a.text()] {
			t.Errorf("%+v", a)
		}
		seen[a.text()] = true
	}
}

// What a kernel says is a stranger's: it may not end the agent, nor reach another context.
func TestRunCodeHostileKernel(t *testing.T) {
	t.Parallel()
	b := live.New(t, nil)
	for _, say := range []string{
		`b'no JSON at all\n'`,
		`b'{"type":"done","id":99999999,"count":-5}\n' * 1000`,
		`b'{"type":"result","id":2,"data":{"a":{}}}\n'`,
		`b'{"type":"result","id":2,"data":{"image/png":"no base64!"}}\n'`,
		`b'{"type":"result","id":2,"data":{"text/plain":"x","<script>/y":"z"}}\n'`,
		`b'{"type":"error","id":2,"name":"\\u001b[31mred' + b'x' * 100000 + b'","value":"' + b'y' * 10000000 + b'"}\n'`,
		`b'[' * 1000000 + b'\n'`,
		`b'x' * (60 << 20)`,
	} {
		if _, err := b.Do(t.Context(), http.MethodDelete, "/contexts/evil", nil); err != nil && !strings.Contains(err.Error(), "404") {
			t.Error(err)
		}
		code(t, b, "0", inContext("evil"))
		a, err := tryCode(t, b, "import os\nb = "+say+"\nwhile b: b = b[os.write(3, b):]", inContext("evil"), withinSeconds(20))
		if err != nil {
			t.Errorf("%s: %v", say, err)
		} else if a.Error != nil && len(a.Error.Name) > 1000 {
			t.Errorf("%s: an error's name of %d bytes", say, len(a.Error.Name))
		}
		if a := code(t, b, "1+1"); a.text() != "2" || a.StateLost {
			t.Errorf("after %s: another context: %+v", say, a)
		}
	}
}
