// Sandlot's JavaScript and TypeScript kernel, for Node and Bun: runs the cells that come over fd 3. doc.go beside
// this file says what is said there.
import fs from "node:fs";
import module from "node:module";
import path from "node:path";
import { inspect, types } from "node:util";
import vm from "node:vm";

const CONTROL = 3;
const MAX_TEXT = 1 << 20; // characters of one text/plain
const MAX_MESSAGE = 32 << 20; // bytes of one message
const MAX_JSON = 4 << 20; // characters of one application/json: a value beyond it has its text only
const inBun = typeof Bun !== "undefined";
const here = import.meta.url;

let cell = { id: 0, count: 0, lines: [] };
const moved = new Set(); // cells whose lines are not where their code has them
let interrupt = null; // rejects the cell that runs

function send(message) {
  const b = Buffer.from(JSON.stringify(message) + "\n");
  if (b.length > MAX_MESSAGE) throw new RangeError("a result of " + (b.length >> 20) + " MiB is too large to show: write it to a file instead");
  for (let at = 0; at < b.length; ) at += fs.writeSync(CONTROL, b, at);
}

// Values.

const looksLikeBundle = (v) => v && typeof v === "object" && Object.keys(v).length > 0 && Object.keys(v).every((k) => /^[a-z]+\/[\w.+-]+$/.test(k));

function isPlain(v, depth = 0) {
  if (v === null || ["string", "boolean"].includes(typeof v)) return true;
  if (typeof v === "number") return Number.isFinite(v);
  if (typeof v !== "object" || depth > 32) return false;
  if (Array.isArray(v)) return v.every((x) => isPlain(x, depth + 1));
  const proto = Object.getPrototypeOf(v);
  return (proto === null || Object.getPrototypeOf(proto) === null) && Object.values(v).every((x) => isPlain(x, depth + 1));
}

function bundle(v) {
  const data = {};
  let json = false;
  try {
    const own = v && typeof v === "object" && typeof v.toMimeBundle === "function" ? v.toMimeBundle() : null;
    if (own && looksLikeBundle(own)) Object.assign(data, own);
    json = v && typeof v === "object" && !data["application/json"] && isPlain(v) && JSON.stringify(v).length <= MAX_JSON;
  } catch { /* a getter or a proxy that throws: its text is shown */ }
  let text = v instanceof Error && typeof v.stack === "string" && !Object.keys(v).length ? clean(v.stack) : inspect(v, { maxArrayLength: 1000, maxStringLength: MAX_TEXT });
  if (text.length > MAX_TEXT) text = text.slice(0, MAX_TEXT) + "\n… " + (text.length - MAX_TEXT) + " more characters";
  data["text/plain"] ??= text;
  if (json) data["application/json"] = v;
  return data;
}

function publish(data, main) {
  for (const [k, v] of Object.entries(data)) {
    if (v instanceof Uint8Array) data[k] = Buffer.from(v).toString("base64");
    else if (typeof v !== "string" && !k.endsWith("json")) data[k] = String(v);
  }
  send({ type: "result", id: cell.id, main, data });
}

// display shows a value, or a bundle of representations by media type, as a result of the cell.
globalThis.display = (v) => publish(looksLikeBundle(v) ? { ...v } : bundle(v), false);

function fail(e) {
  if (e && e.code === "ERR_SCRIPT_EXECUTION_INTERRUPTED") e = new Interrupted();
  if (inBun && e instanceof AggregateError && e.errors?.[0]?.name === "BuildMessage") e = e.errors[0];
  if (inBun && e?.name === "BuildMessage") {
    const at = e.position ? `cell ${cell.count}:${e.position.line}\n${e.position.lineText}\n${" ".repeat(Math.max(0, e.position.column - 1))}^\n\n` : "";
    e = Object.assign(new SyntaxError(e.message), { stack: `${at}SyntaxError: ${e.message}` });
  }
  const isError = e instanceof Error || Object.prototype.toString.call(e) === "[object Error]";
  let name = "Error", value, traceback;
  try {
    name = isError ? String(e.name || e.constructor?.name || "Error") : "Error";
    value = isError ? String(e.message) : typeof e === "string" ? e : inspect(e);
    traceback = isError && typeof e.stack === "string" ? clean(e.stack) : value;
    for (let c = e?.cause, n = 0; n < 8 && c instanceof Error && typeof c.stack === "string"; c = c.cause, n++) traceback += "\n  [cause]: " + clean(c.stack);
  } catch {
    value = traceback = "an error that cannot be shown";
  }
  send({ type: "error", id: cell.id, name, value: value.slice(0, 65536), traceback: traceback.slice(0, 65536) });
}

// clean cuts a stack where this program's own part of it begins.
function clean(stack) {
  let lines = stack.split("\n");
  const own = /^cell (\d+):(\d+)$/.exec(lines[0]); // of a syntax error: the line that follows is as it was rewritten
  if (own && +own[1] === cell.count && cell.lines[own[2] - 1]?.length === lines[1]?.length) lines[1] = cell.lines[own[2] - 1];
  lines = lines.map((l) => l.replace(/\bcell (\d+):\d+(?::\d+)?/, (all, n) => (moved.has(+n) ? `cell ${n}` : all)));
  // Frames of the function around a cell that awaits are below its last line.
  lines = lines.filter((l) => { const m = /^\s+at .*?\bcell (\d+):(\d+):\d+\)?$/.exec(l); return !m || +m[1] !== cell.count || +m[2] <= cell.lines.length; });
  const at = lines.findIndex((l) => /^\s+at /.test(l) && (l.includes(here) || l.includes("bridge.mjs") || /runInThisContext/.test(l) || /\(?node:(vm|repl|internal|domain)/.test(l)));
  return (at < 0 ? lines : lines.slice(0, at)).join("\n").trimEnd();
}

class Interrupted extends Error {
  constructor() {
    super("the cell was interrupted");
    this.name = "Interrupted";
    this.stack = "Interrupted: the cell was interrupted";
  }
}

// Code. Node's REPL evaluates it, for its top-level await; Bun's transpiler has a mode for it. What either leaves
// is done here: declarations that may come again in a later cell, and imports.

// statements finds those at the top of code that begin with one of the words, by reading over strings, templates,
// comments, regular expressions and brackets. end is where the body of a class ends.
function statements(code) {
  const found = [];
  const stack = [];
  let start = true; // a statement may begin here
  let value = false; // a "/" here divides
  let last = ""; // the word before this, if it is next to it
  let i = 0;
  const n = code.length;
  while (i < n) {
    const c = code[i];
    if (c === "\n") { if (!stack.length) start = true; i++; continue; }
    if (/\s/.test(c)) { i++; continue; }
    if (c === "/" && code[i + 1] === "/") { while (i < n && code[i] !== "\n") i++; continue; }
    if (c === "/" && code[i + 1] === "*") { const e = code.indexOf("*/", i + 2); i = e < 0 ? n : e + 2; continue; }
    if (c === '"' || c === "'") {
      for (i++; i < n && code[i] !== c && code[i] !== "\n"; i++) if (code[i] === "\\") i++;
      i++; value = true; start = false; continue;
    }
    if (c === "`" || (c === "}" && stack.at(-1) === "`")) {
      if (c === "}") stack.pop();
      for (i++; i < n && code[i] !== "`"; i++) {
        if (code[i] === "\\") i++;
        else if (code[i] === "$" && code[i + 1] === "{") { stack.push("`"); i++; break; }
      }
      i++; value = stack.at(-1) !== "`" || code[i - 1] !== "{"; start = false; continue;
    }
    if (c === "/" && !value) {
      let set = false;
      for (i++; i < n && code[i] !== "\n" && (set || code[i] !== "/"); i++) {
        if (code[i] === "\\") i++;
        else if (code[i] === "[") set = true;
        else if (code[i] === "]") set = false;
      }
      for (i++; i < n && /\w/.test(code[i]); i++);
      value = true; start = false; continue;
    }
    if (/[\w$\u0080-\uffff]/.test(c)) {
      const at = i, member = code[i - 1] === "." && code[i - 2] !== ".";
      for (; i < n && /[\w$\u0080-\uffff]/.test(code[i]); i++);
      const word = code.slice(at, i);
      last = member ? "" : word;
      if (start && !stack.length && ["const", "let", "class", "import", "export"].includes(word)) found.push({ word, at });
      value = member || !/^(?:return|typeof|case|in|of|do|else|void|delete|throw|new|instanceof|yield|await)$/.test(word);
      start = /^(?:export|default)$/.test(word) ? start : false;
      continue;
    }
    if ("([{".includes(c)) {
      stack.push(c === "(" && /^(?:if|while|for|with)$/.test(last) ? "if" : c);
      value = start = false;
    } else if (")]}".includes(c)) {
      value = stack.pop() !== "if" && c !== "}"; // after if (…) a "/" begins a regular expression
      start = c === "}" && !stack.length;
      if (start && found.at(-1)?.word === "class") found.at(-1).end ??= i + 1;
    } else {
      const twice = (c === "+" || c === "-") && code[i + 1] === c;
      if (twice) i++;
      else value = false; // x++ is a value still
      start = c === ";" && !stack.length;
    }
    last = "";
    i++;
  }
  return found;
}

const IMPORT = /^import\s+(?:type\s+[^;'"]*?from\s*["'][^"']+["']|(?:([^;'"]*?)\s+from\s*)?(["'])([^"'\n]+)\2(?:\s*with\s*(\{[^}]*\}))?)\s*;?/;

function importOf(clause, from, attributes) {
  const load = `await import(${JSON.stringify(from)}${attributes ? `, {with: ${attributes}}` : ""})`;
  if (!clause) return `void (${load});`;
  const names = [];
  let rest = clause.trim(), space = null;
  const first = /^([\w$]+)\s*(?:,\s*|$)/.exec(rest);
  if (first) { names.push(`default: ${first[1]}`); rest = rest.slice(first[0].length).trim(); }
  const star = /^\*\s*as\s+([\w$]+)$/.exec(rest);
  if (star) space = star[1];
  else if (rest.startsWith("{")) {
    for (const part of rest.slice(1, -1).split(",")) {
      const m = /^\s*(?:type\s+)?([\w$]+|"[^"]*")(?:\s+as\s+([\w$]+))?\s*$/.exec(part);
      if (m && !/^\s*type\s/.test(part)) names.push(m[2] ? `${m[1]}: ${m[2]}` : m[1]);
    }
  }
  if (space && names.length) return `var ${space} = ${load}, {${names.join(", ")}} = ${space};`;
  return space ? `var ${space} = ${load};` : `var {${names.join(", ")}} = ${load};`;
}

// rewrite turns what may stand only once, or only in a module, into what may come again: const and let become var,
// a class a variable's value, an import a dynamic one. Lines stay where they are. words: those alone.
function rewrite(code, words) {
  let out = "", at = 0;
  for (const s of statements(code)) {
    if (s.at < at || (words && !words.includes(s.word))) continue;
    const rest = code.slice(s.at);
    let end = null;
    let to = null, length = s.word.length;
    if (s.word === "const" && !/^const\s+enum\b/.test(rest)) to = "var  ";
    else if (s.word === "let") {
      const bare = /^let(\s+[\w$\u0080-\uffff]+)(?=[ \t]*(?:;|$|\n\s*(?![=,])))/.exec(rest); // is undefined once more
      if (bare) { to = `var${bare[1]} = void 0`; length = bare[0].length; }
      else if (/^let\s*[\w$[{\u0080-\uffff]/.test(rest)) to = "var";
    }
    else if (s.word === "export") { const m = /^export\s+(?:(default\s+)(?!(?:async\s+)?function\b\s*\*?\s*[\w$]|class\s+(?!extends\b)[\w$])|default\s+)?(?=[\w$({["'`])/.exec(rest); if (m) { to = m[1] ? "_ = " : ""; length = m[0].length; } }
    else if (s.word === "class") { const m = /^class\s+([\w$\u0080-\uffff]+)/.exec(rest); if (m && m[1] !== "extends") { to = `var ${m[1]} = class`; end = s.end; } }
    else if (s.word === "import" && !/^import\s*[.(]/.test(rest)) {
      const m = IMPORT.exec(rest);
      if (m) { to = m[3] ? importOf(m[1], m[3], m[4]) : ""; length = m[0].length; to += "\n".repeat(m[0].split("\n").length - 1); }
    }
    if (to === null) continue;
    out += code.slice(at, s.at) + to;
    at = s.at + length;
    if (end) { out += code.slice(at, end) + ";"; at = end; } // or a "(" on the next line would call it
  }
  return out + code.slice(at);
}

// That Node's own TypeScript is young is no news to who asked for it.
const warn = process.emitWarning;
process.emitWarning = (w, ...rest) => (String(w).includes("stripTypeScriptTypes") ? undefined : warn.call(process, w, ...rest));

function plain(code, language) {
  if (language !== "typescript") return code;
  if (typeof module.stripTypeScriptTypes !== "function") throw new Error("this Node has no TypeScript: it needs Node 22.13 or later, as in template node-22");
  try {
    return module.stripTypeScriptTypes(code, { mode: "strip" });
  } catch (e) {
    if (e?.code !== "ERR_UNSUPPORTED_TYPESCRIPT_SYNTAX") throw e;
    return module.stripTypeScriptTypes(code, { mode: "transform" }); // enum, namespace, parameter properties
  }
}

// parenthesized makes an object of what could be a block.
function parenthesized(js) {
  if (/^\s*\{/.test(js) && !/;\s*$/.test(js)) {
    try { new vm.Script(`(${js}\n)`); return `(${js}\n)`; } catch { /* a block, not an object */ }
  }
  return js;
}

async function makeEvaluator() {
  globalThis.require = module.createRequire(path.join(process.cwd(), "cell.js"));
  if (inBun) {
    const transpilers = {};
    const options = () => ({ filename: `cell ${cell.count}`, importModuleDynamically: vm.constants?.USE_MAIN_CONTEXT_DEFAULT_LOADER });
    return async (code, language) => {
      // The transpiler moves lines and tells nobody where to, so what does not need it runs as it is.
      if (language !== "typescript" && !/\b(?:await|import|export)\b/.test(code)) {
        let plain = null;
        try { plain = new vm.Script(parenthesized(rewrite(code)), options()); } catch { /* the transpiler says what is wrong, or it is JSX */ }
        if (plain) return plain.runInThisContext();
      }
      const t = (transpilers[language] ??= new Bun.Transpiler({ loader: language === "typescript" ? "tsx" : "jsx", replMode: true, target: "bun" }));
      const js = t.transformSync(rewrite(code, ["export"]));
      moved.add(cell.count);
      const made = await vm.runInThisContext(js, options());
      const value = made && typeof made === "object" && "value" in made ? made.value : undefined;
      return types.isModuleNamespaceObject(value) && /(?:^|\n)\s*import\s*["'][^\n]*\s*$/.test(code) ? undefined : value;
    };
  }
  const { default: repl } = await import("node:repl");
  const { PassThrough } = await import("node:stream");
  const output = new PassThrough();
  output.on("data", (b) => process.stderr.write(b)); // what a timer throws after its cell
  const r = repl.start({ prompt: "", input: new PassThrough(), output, terminal: false, useGlobal: true, breakEvalOnSigint: true, ignoreUndefined: true });
  r.removeAllListeners("SIGINT");
  // What a cell prints of an error has no frames of this program either.
  const head = (e) => (/^ERR_/.test(e.code) && !e.name.includes("[") ? `${e.name} [${e.code}]: ${e.message}` : Error.prototype.toString.call(e));
  Error.prepareStackTrace = (e, frames) => clean([head(e), ...frames.map((f) => "    at " + f)].join("\n"));
  r.underscoreAssigned = true; // it is ours to set
  // What code throws, at once or where it awaits, reaches the REPL's domain and not its callback; so does what a
  // timer throws later.
  let thrown = null;
  r._domain.removeAllListeners("error");
  r._domain.on("error", (e) => (thrown ? thrown(e) : process.stderr.write("Uncaught " + (e instanceof Error ? clean(e.stack ?? String(e)) : inspect(e)) + "\n")));
  return (code, language) =>
    new Promise((resolve, reject) => {
      const js = parenthesized(rewrite(plain(code, language)));
      thrown = reject;
      // A handler here takes the signal from the one that stops an endless loop. In the instant between the two there is
      // none, and a signal ends the kernel; one in the instant before an await is lost. The agent deals with either.
      process.off("SIGINT", onSigint);
      r.eval(js + "\n", r.context, `cell ${cell.count}`, (err, value) => {
        if (err) reject(err?.err ?? err); // err.err: what a REPL would wait for more lines for
        else resolve({ value });
      });
      process.on("SIGINT", onSigint);
    }).then((v) => v.value).finally(() => { thrown = null; });
}

// Cells.

let evaluate;

async function run(message) {
  cell = { id: message.id, count: cell.count + 1, lines: message.code.split("\n") };
  const stopped = new Promise((_, reject) => { interrupt = reject; });
  stopped.catch(() => {});
  const alive = setInterval(() => {}, 1 << 30); // an await that nothing will end is the cell's, not this program's end
  try {
    evaluate ??= await makeEvaluator();
    const value = await Promise.race([evaluate(message.code, message.language), stopped]);
    if (value !== undefined) { globalThis._ = value; publish(bundle(value), true); }
  } catch (e) {
    fail(e);
  }
  clearInterval(alive);
  interrupt = null;
}

function done() {
  send({ type: "done", id: cell.id, count: cell.count });
}

// What Bun runs without a pause this does not stop, nor what Node does after an await (the REPL's guard is over then):
// the agent replaces the kernel.
const onSigint = () => interrupt?.(new Interrupted());
process.on("SIGINT", onSigint);
process.on("unhandledRejection", (e) => (interrupt ? interrupt(e) : process.stderr.write("Uncaught (in promise) " + inspect(e) + "\n")));
if (inBun) process.on("uncaughtException", (e) => (interrupt ? interrupt(e) : process.stderr.write("Uncaught " + inspect(e) + "\n")));
const exit = process.exit.bind(process);
process.exit = (code) => {
  send({ type: "error", id: cell.id, name: "Exit", value: String(code ?? process.exitCode ?? 0), traceback: "" });
  done();
  exit(code);
};

const read = (buf) => new Promise((resolve, reject) => fs.read(CONTROL, buf, 0, buf.length, null, (e, n) => (e ? reject(e) : resolve(n))));

async function serve() {
  // What is printed is written when a cell is done or ends the process.
  if (!inBun) for (const stream of [process.stdout, process.stderr]) stream._handle?.setBlocking?.(true);
  if (!inBun) evaluate = await makeEvaluator();
  send({ type: "ready" });
  const buf = Buffer.alloc(1 << 16);
  let parts = [];
  for (let n; (n = await read(buf)) > 0; ) {
    let chunk = Buffer.from(buf.subarray(0, n));
    for (let at; (at = chunk.indexOf(10)) >= 0; chunk = chunk.subarray(at + 1)) {
      const message = JSON.parse(Buffer.concat([...parts, chunk.subarray(0, at)]).toString());
      parts = [];
      if (message.op === "identity") Object.assign(process.env, message.env);
      if (message.op !== "run") continue;
      await run(message);
      if (!message.final) { done(); continue; }
      // As a program does, a process of one cell ends when nothing is left to wait for.
      process.once("beforeExit", () => { done(); exit(0); });
      return;
    }
    parts.push(chunk);
  }
  exit(0);
}

serve();
