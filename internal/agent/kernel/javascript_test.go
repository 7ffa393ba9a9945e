package kernel

import (
	"strings"
	"testing"
)

// Cells of one context whose declarations come again, in all the ways that the reader of code could misread.
func TestJavaScriptDeclarations(t *testing.T) {
	t.Parallel()
	p := start(t, "javascript")
	for _, c := range []struct{ code, want string }{
		{"const a = 1; let b = 2; class C { m() { return 3 } }\n[a, b, new C().m()]", "[ 1, 2, 3 ]"},
		{"const a = 4; let b = 5; class C { m() { return 6 } }\n[a, b, new C().m()]", "[ 4, 5, 6 ]"},
		{"class A { m() { return '}' } }\n(1, 2)", "2"}, // not a call of A
		{"class A extends (class { n() { return 7 } }) { m() { return `}${{}}` } }\n[new A().n()]", "[ 7 ]"},
		{"class Ä extends Array {}\nnew Ä() instanceof Array", "true"},
		{"let q = 5", ""},
		{"let q\nq", ""}, // it is undefined once more
		{"let q = 6; let w;\nq", "6"},
		{"let i = 4; let r = i++ / 2; const s = 'a/b'; [i, r, s]", "[ 5, 2, 'a/b' ]"},
		{"if (true) /['\"`]/.test('x')\nconst t = `a${ { x: `n${1}` }.x }b`; t", "'an1b'"},
		{`const re = /[/"]/g; const u = "v"; u`, "'v'"},
		{"const o = { return: 8 }; o.return / 2 / 1", "4"},
		{"const m = 2\nconst m2 = m ** 3 / 2 / 1\nm2", "4"},
		{"for (const x of [1]) { let y = x }\nlet y = 5\ny", "5"},
		{"var v = 1; { const v = 2 } v", "1"},
		{"/* const */ // let\nconst h = 1 // class x\nh", "1"},
		{"const x1 = 1, x2 = `\nconst zz = 1\n`; x2", `'\nconst zz = 1\n'`},
		{"const { d, e: { f = 4 } = {} } = { d: 1 }, [g, ...k] = [1, 2, 3]; [d, f, g, k]", "[ 1, 4, 1, [ 2, 3 ] ]"},
		{"const gen = function* () { yield 1 }; [...gen()]", "[ 1 ]"},
		{"async function later() { return 9 }\nawait later()", "9"},
		{"const r2 = await Promise.resolve({ z: 1 }); r2.z", "1"},
		{"r2.z", "1"},
		{"for await (const x of [1, 2]) globalThis.lastOne = x\nlastOne", "2"},
		{"import path, { join as j } from 'node:path'\nimport * as os from \"os\"; import 'fs'\n[j('a', 'b'), path.sep, typeof os.cpus]", "[ 'a/b', '/', 'function' ]"},
		{"import 'node:fs'", ""},
		{"export const z = 3; z", "3"},
		{"export default { k: 1 }", "{ k: 1 }"},
		{"export default function foo() { return 7 }\nfoo()", "7"},
		{"#!/usr/bin/env node\n1", "1"},
		{"{ a: 1 }", "{ a: 1 }"},
		{"{ let inner = 1 }", ""},
		{"label: for (;;) { break label }", ""},
		{"async () => await 1; 3", "3"},
		{"Promise.resolve(8)", "8"},
	} {
		if a := p.run("javascript", c.code); text(a) != strings.ReplaceAll(c.want, "\n", `\n`) || a.Error != nil || a.Stderr != "" {
			t.Errorf("%q: %+v, want %s, error %+v", c.code, a, c.want, a.Error)
		}
	}
}

// Errors name lines of the cell, show its own text, and have nothing of the bridge in them.
func TestJavaScriptErrors(t *testing.T) {
	t.Parallel()
	p := start(t, "javascript")
	for _, c := range []struct{ code, name, traceback string }{
		{"\n\nthrow new TypeError('x')", "TypeError", "TypeError: x\n    at cell 1:3:7"},
		{"\nlet y = ;", "SyntaxError", "cell 2:2\nlet y = ;\n        ^\n\nSyntaxError: Unexpected token ';'"},
		{"throw new Error('c', { cause: new Error('why') })", "Error", "Error: c\n    at cell 3:1:7\n  [cause]: Error: why\n    at cell 3:1:31"},
		{"await null\n\nawait Promise.reject(new RangeError('later'))", "RangeError", "RangeError: later\n    at cell 4:3:"},
		{"throw { a: 1 }", "Error", "{ a: 1 }"},
		{"throw undefined", "Error", "undefined"},
		{"throw Object.create(null, { name: { get() { throw 1 } } })", "Error", "[Object: null prototype] {}"},
		{"Promise.reject(new Error('nobody caught')); await new Promise(() => {})", "Error", "Error: nobody caught\n    at cell 8:1:"},
		{"await import('./no-such.mjs')", "Error", "Error [ERR_MODULE_NOT_FOUND]: Cannot find module "},
	} {
		a := p.run("javascript", c.code)
		if a.Error == nil || a.Error.Name != c.name || !strings.HasPrefix(a.Error.Traceback, c.traceback) {
			t.Errorf("%q: %+v, error %+v", c.code, a, a.Error)
			continue
		}
		if strings.Contains(a.Error.Traceback, "node:") || strings.Contains(a.Error.Traceback, "bridge") {
			t.Errorf("%q: traceback %s", c.code, a.Error.Traceback)
		}
	}
	if a := p.run("javascript", "console.error(new Error('logged'))"); a.Stderr != "Error: logged\n    at cell 10:1:15\n" {
		t.Errorf("%q", a.Stderr)
	}
	p.run("javascript", "setTimeout(() => { throw new Error('timer') }, 1); 1")
	if a := p.run("javascript", "await new Promise((r) => setTimeout(r, 1000))"); a.Error == nil || a.Error.Value != "timer" {
		if !strings.Contains(a.Stderr, "Uncaught Error: timer") { // it may come between the two
			t.Errorf("%+v, error %+v", a, a.Error)
		}
	}
	if a := p.run("javascript", "6 * 7"); text(a) != "42" {
		t.Errorf("%+v, error %+v", a, a.Error)
	}
}

func TestJavaScriptValues(t *testing.T) {
	t.Parallel()
	p := start(t, "javascript")
	for code, media := range map[string]string{
		"({ a: [1, null, 'x'] })":   "application/json text/plain",
		"[undefined]":               "text/plain",
		"new Map()":                 "text/plain",
		"({ get a() { throw 1 } })": "text/plain",
		"Array(3e6).fill(1)":        "text/plain", // too large to be worth more
		"const circle = {}; circle.me = circle; circle":      "text/plain",
		"({ toMimeBundle: () => ({ 'text/html': '<b>' }) })": "text/html text/plain",
		"display({ 'image/png': new Uint8Array([1, 2]) })":   "image/png",
		"display(5)": "text/plain",
		"let deep = []; for (let i = 0; i < 1e5; i++) deep = [deep]; deep": "text/plain",
	} {
		a := p.run("javascript", code)
		if len(a.Results) != 1 || a.Error != nil {
			t.Errorf("%q: %d results, error %+v", code, len(a.Results), a.Error)
			continue
		}
		for mime := range a.Results[0] {
			if !strings.Contains(media, mime) || len(strings.Fields(media)) != len(a.Results[0]) {
				t.Errorf("%q: %s is there", code, mime)
			}
		}
	}
	if a := p.run("javascript", "display({ 'text/html': 'x'.repeat(5e7) })"); a.Error == nil || !strings.Contains(a.Error.Value, "too large to show") {
		t.Errorf("error %.300v", a.Error)
	}
	if a := p.run("javascript", "'x'.repeat(5e6)"); len(text(a)) > 2<<20 {
		t.Errorf("%d bytes", len(text(a)))
	}
	a := p.run("javascript", "for (let i = 0; i < 50000; i++) console.log(i)\nprocess.stdout.write('end')")
	if strings.Count(a.Stdout, "\n") != 50000 || !strings.HasSuffix(a.Stdout, "\n49999\nend") {
		t.Errorf("%d bytes of output", len(a.Stdout))
	}
}

func TestJavaScriptInterrupt(t *testing.T) {
	t.Parallel()
	p := start(t, "javascript")
	p.run("javascript", "const kept = 5")
	// Where the interrupt cuts off a stream's own code the stream is lost: so the first writes without one.
	for _, code := range []string{
		"require('fs').writeSync(1, 'go'); while (true);",
		"setTimeout(() => process.stdout.write('go'), 1); await new Promise(() => {})",
		"let turns = 0; const forever = async () => { for (;;) { await new Promise((r) => setTimeout(r, 10)); if (!turns++) process.stdout.write('go') } }; await forever()",
	} {
		p.begin("javascript", code)
		p.interrupt("go")
		a := p.end()
		if a.Error == nil || a.Error.Name != "Interrupted" {
			t.Errorf("%q: %+v, error %+v", code, a, a.Error)
		}
		if a := p.run("javascript", "kept"); text(a) != "5" {
			t.Fatalf("after %q: %+v, error %+v", code, a, a.Error)
		}
	}
}

// The end of the process is told first, with everything that was printed.
func TestJavaScriptExit(t *testing.T) {
	t.Parallel()
	p := start(t, "javascript")
	a := p.run("javascript", "console.log('x'.repeat(1e6)); process.exit(3)")
	if a.Error == nil || a.Error.Name != "Exit" || a.Error.Value != "3" || len(a.Stdout) != 1e6+1 {
		t.Errorf("%d bytes, error %+v", len(a.Stdout), a.Error)
	}
	if m := p.next(); m != nil {
		t.Errorf("after its end it says %+v", m)
	}
}

// With "final" a cell ends as a program does, when nothing is left to wait for.
func TestJavaScriptFinal(t *testing.T) {
	t.Parallel()
	p := start(t, "javascript")
	p.id++
	p.send(map[string]any{"op": "run", "id": p.id, "final": true, "code": "setTimeout(() => console.log('late'), 20); 4"})
	if a := p.end(); a.Stdout != "late\n" || text(a) != "4" || a.Error != nil {
		t.Errorf("%+v, error %+v", a, a.Error)
	}
	if m := p.next(); m != nil {
		t.Errorf("after its end it says %+v", m)
	}
}
