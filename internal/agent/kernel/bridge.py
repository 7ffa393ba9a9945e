"""Sandlot's Python kernel: runs the cells that come over fd 3. doc.go beside this file says what is said there.

Only the standard library is imported at the start. IPython, where a template has it, comes in when a cell has a
magic or a !command that it alone understands.
"""

import __future__
import ast
import builtins
import codecs
import contextlib
import faulthandler
import io
import json
import linecache
import os
import re
import signal
import socket
import sys
import threading
import time
import types
import warnings

__name__ = "sandlot"  # "__main__" is the cells'
PID = os.getpid()
HERE = __file__ if "__file__" in globals() else "<bridge>"
MAX_TEXT = 1 << 20  # characters of one text/plain
MAX_TRACEBACK = 64 << 10  # characters
MAX_MESSAGE = 32 << 20  # bytes of one message
FLUSH_S = 0.01  # the longest that output waits in this process
KEPT_SOURCES = 1000  # cells whose source tracebacks can still show


# Output. A program may print a line a microsecond, and a write is expensive in a user-space kernel: what follows
# another within FLUSH_S, or does not end a line, waits in a buffer for a thread that empties it then. Whatever could
# let somebody else write to the same pipe (fork, exec, a subprocess) empties it first.


def _escape(e):
    """Bytes that came in by surrogateescape go out as they were; another lone surrogate is written as \\udxxx."""
    if not isinstance(e, UnicodeEncodeError):
        raise e
    out = b""
    for c in e.object[e.start : e.end]:
        n = ord(c)
        out += bytes([n - 0xDC00]) if 0xDC80 <= n <= 0xDCFF else b"\\u%04x" % n
    return out, e.end


codecs.register_error("sandlot", _escape)


class Output(io.TextIOWrapper):
    def __init__(self, fd):
        raw = io.FileIO(fd, "w", closefd=False)
        super().__init__(io.BufferedWriter(raw, 8192), encoding="utf-8", errors="sandlot", newline="\n", write_through=True)
        self.name_, self.flushed, self.waiting = ("<stdout>", "<stderr>")[fd - 1], 0.0, False

    def write(self, s):
        n = super().write(s)
        if s.endswith("\n") and time.monotonic() - self.flushed > FLUSH_S:
            self.flush()
        elif not self.waiting:
            self.waiting = True
            flusher.wake()
        return n

    def flush(self):
        self.waiting = False
        self.flushed = time.monotonic()
        super().flush()
    close = flush  # a later cell will want to print


class Flusher:
    """Empties the buffers FLUSH_S after they were first left with something in them."""

    def __init__(self):
        self.event, self.thread = threading.Event(), None

    def wake(self):
        if self.thread is None:
            try:
                thread = threading.Thread(target=self.loop, name="sandlot-output", daemon=True)
                thread.start()
            except Exception:  # there may be no more threads
                return flush()
            self.thread = thread
        self.event.set()

    def loop(self):
        while True:
            self.event.wait()
            self.event.clear()
            time.sleep(FLUSH_S)
            flush()


def flush():
    for f in (stdout, stderr):
        with contextlib.suppress(OSError, ValueError):  # the cell closed it
            f.flush()


flusher = Flusher()
stdout, stderr = Output(1), Output(2)


def _exit(status, _exit=os._exit):
    flush()  # what was printed is not lost
    _exit(status)


os._exit = _exit


def _forked():
    flusher.thread = None
    flusher.event = threading.Event()


os.register_at_fork(before=flush, after_in_child=_forked)
_SPAWN = frozenset(("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "os.spawn", "pty.spawn"))


def _audit(event, _args):
    if event in _SPAWN:
        flush()


# Messages.


class Channel:
    def __init__(self):
        self.sock = socket.socket(fileno=3)
        self.sock.set_inheritable(False)
        self.lock = threading.Lock()
        self.reader = self.sock.makefile("rb")
        self.kept = b""

    def send(self, message, keep=False):
        """Sends a message. One to keep goes with the next: each write wakes the agent, which is dear."""
        if os.getpid() != PID:
            return  # a child that a cell forked has no say
        b = json.dumps(message, allow_nan=False).encode("ascii") + b"\n"
        if len(b) > MAX_MESSAGE:
            raise ValueError(f"a result of {len(b) >> 20} MiB is too large to show: write it to a file instead")
        with interrupts.held():
            with self.lock:
                b, self.kept = self.kept + b, b""
                if keep and len(b) < 65536:
                    self.kept = b
                    return
                try:
                    self.sock.sendall(b)
                except OSError:  # nobody listens any more
                    os._exit(1)


class Interrupts:
    """SIGINT raises KeyboardInterrupt in a cell and does nothing between cells or in the middle of a message."""
    def __init__(self):
        self.running, self.depth, self.pending = False, 0, False
        self.main = threading.get_ident()

    def handle(self, _sig, _frame):
        if not self.running:
            return
        if self.depth:
            self.pending = True
            return
        raise KeyboardInterrupt

    def held(self):
        return self if threading.get_ident() == self.main else contextlib.nullcontext()

    def __enter__(self):
        self.depth += 1

    def __exit__(self, *exc):
        self.depth -= 1
        if self.pending and not self.depth:
            self.pending = False
            if self.running:
                raise KeyboardInterrupt


interrupts = Interrupts()
channel = Channel()
current = {"id": 0, "count": 0}


# Values.

_METHODS = {
    "_repr_html_": "text/html", "_repr_markdown_": "text/markdown", "_repr_latex_": "text/latex",
    "_repr_svg_": "image/svg+xml", "_repr_png_": "image/png", "_repr_jpeg_": "image/jpeg",
    "_repr_pdf_": "application/pdf", "_repr_json_": "application/json", "_repr_javascript_": "application/javascript",
}


def method(obj, name):
    """An object's own method of that name: not a class's, nor one that a proxy makes up for any name."""
    if isinstance(obj, type):
        return None
    try:
        if getattr(obj, "_sandlot_no_such_name_", None) is not None:
            return None
        m = getattr(obj, name, None)
    except Exception:
        return None
    return m if callable(m) else None


def encode(value):
    """A value as it goes into a message, or None when there is none."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict):
        value = value[0]  # with metadata, which nobody asks for
    if isinstance(value, (bytes, bytearray, memoryview)):
        import base64
        return base64.b64encode(value).decode("ascii")
    return value


_CONTAINERS = (list, tuple, dict, set, frozenset)


def plain(obj):
    """repr, with classes and objects that have none of their own as IPython shows them."""
    kind = type(obj)
    if isinstance(obj, type) and kind.__repr__ is type.__repr__:
        return obj.__qualname__ if obj.__module__ == "builtins" else f"{obj.__module__}.{obj.__qualname__}"
    if kind.__repr__ is object.__repr__:
        return f"<{kind.__module__}.{kind.__qualname__} at {id(obj):#x}>"
    return repr(obj)


def pretty(obj, width=79):
    """plain, with containers too long for a line broken up as IPython does."""
    if type(obj) not in _CONTAINERS:
        return plain(obj)
    from itertools import islice
    most, above = 1000, set()

    def walk(o, indent):
        kind = type(o)
        if kind not in _CONTAINERS or not o:
            return plain(o)
        head, tail = {list: "[]", tuple: "()", dict: "{}", set: "{}", frozenset: ("frozenset({", "})")}[kind]
        if id(o) in above:
            return head + "..." + tail
        above.add(id(o))
        inner, items = indent + len(head), []
        if kind is dict:
            for k, v in islice(o.items(), most):
                key = plain(k) + ": "
                items.append(key + walk(v, inner + len(key)))
        else:
            values = o
            if kind in (set, frozenset):
                with contextlib.suppress(Exception):
                    values = sorted(o)
            items = [walk(v, inner) for v in islice(values, most)]
        if len(o) > most:
            items.append("...")
        above.discard(id(o))
        end = "," if kind is tuple and len(o) == 1 else ""
        flat = head + ", ".join(items) + end + tail
        if "\n" not in flat and indent + len(flat) <= width:
            return flat
        return head + (",\n" + " " * inner).join(items) + end + tail

    return walk(obj, 0)


def text_of(obj):
    m = method(obj, "_repr_pretty_")
    if m is not None and "IPython.lib.pretty" in sys.modules:
        s = sys.modules["IPython.lib.pretty"].pretty(obj)
    else:
        s = pretty(obj)
    return s if len(s) <= MAX_TEXT else s[:MAX_TEXT] + f"\n… {len(s) - MAX_TEXT} more characters"


def bundle(obj, include=None, exclude=None):
    """An object's representations by media type: none when it has shown itself."""
    data = {}
    m = method(obj, "_ipython_display_")
    if m is not None:
        m()
        return data

    def ask(name, **kw):
        m = method(obj, name)
        try:
            return m and encode(m(**kw))
        except Exception as e:
            print(describe(e)[2], file=stderr)  # and the value is shown without it
            return None

    got = ask("_repr_mimebundle_", include=include, exclude=exclude)
    if isinstance(got, dict):
        data.update((str(k), encode(v)) for k, v in got.items())
    for name, mime in _METHODS.items():
        v = None if mime in data else ask(name)
        if v is not None:
            data[mime] = v
    if "matplotlib.figure" in sys.modules and isinstance(obj, sys.modules["matplotlib.figure"].Figure):
        data["image/png"] = figures.png(obj)
        figures.close(obj)
    if "plotly.basedatatypes" in sys.modules and isinstance(obj, sys.modules["plotly.basedatatypes"].BaseFigure):
        data.setdefault("application/vnd.plotly.v1+json", json.loads(obj.to_json()))
    if "text/plain" not in data:
        data["text/plain"] = text_of(obj)
    if include:
        data = {k: v for k, v in data.items() if k in include}
    return {k: v for k, v in data.items() if k not in (exclude or ())}


def publish(data, main=False):
    clean = {}
    if not data:
        return
    for mime, v in data.items():
        if mime.endswith("json"):
            try:
                json.dumps(v, allow_nan=False)
            except (TypeError, ValueError):
                v = json.loads(json.dumps(v, default=str), parse_constant=lambda c: c)  # NaN has no JSON
        elif not isinstance(v, str):
            v = str(v)
        else:
            v = v.rstrip("\n") if mime.startswith("image/") and mime != "image/svg+xml" else v
        clean[mime] = v
    flush()  # what was printed before it comes before it
    channel.send({"type": "result", "id": current["id"], "main": main, "data": clean}, keep=main)


class Handle:
    """What display(display_id=…) returns: an update is shown as another result."""

    def __init__(self, display_id=None):
        self.display_id = display_id or os.urandom(8).hex()

    def display(self, obj, **kw):
        display(obj, **kw)

    update = display


def display(*objs, include=None, exclude=None, raw=False, display_id=None, metadata=None, transient=None, clear=False, **_kw):
    """Shows values as results of the cell, in the forms that they have."""
    for obj in objs:
        publish(dict(obj) if raw else bundle(obj, include, exclude))
    if display_id is not None:
        return Handle(None if display_id is True else display_id)
    return None


class Figures:
    """matplotlib's: each that is open when show() is called or when the cell ends is a result, once."""

    def png(self, fig):
        buf = io.BytesIO()
        fig.savefig(buf, format="png", bbox_inches="tight")
        return encode(buf.getvalue())

    def managers(self):
        helpers = sys.modules.get("matplotlib._pylab_helpers")
        return helpers.Gcf.get_all_fig_managers() if helpers else []

    def close(self, fig):
        if any(m.canvas.figure is fig for m in self.managers()):
            sys.modules["matplotlib._pylab_helpers"].Gcf.destroy_fig(fig)

    def show(self):
        for fig in [m.canvas.figure for m in self.managers()]:
            try:
                publish({"text/plain": repr(fig), "image/png": self.png(fig)})
            finally:
                self.close(fig)


figures = Figures()


# Modules that are told about this kernel when they are first imported.


def _pyplot(m):
    if not os.environ.get("MPLBACKEND"):
        m.switch_backend("agg")
    m.show = lambda *_args, **_kw: figures.show()


def _display_functions(m):
    m.display, m.DisplayHandle = display, Handle
    m.update_display = lambda obj, *, display_id, **kw: display(obj, **kw)
    m.publish_display_data = lambda data, *a, **kw: publish(dict(data))
    m.clear_output = lambda wait=False: None


def _plotly(m):
    m.BaseFigure.show = lambda self, *_args, **_kw: display(self)
    m.BaseFigure._ipython_display_ = None  # it wants a browser


def _inspect(m):
    getfile = m.getfile

    def of_cell(obj):
        """A class that a cell defined has the cell for a file."""
        if isinstance(obj, type) and obj.__module__ == "__main__":
            head = re.compile(rf"^\s*class\s+{re.escape(obj.__name__)}\b", re.M)
            for name in reversed(state["sources"]):
                if head.search("".join(linecache.getlines(name))):
                    return name
        return getfile(obj)

    m.getfile = of_cell


HOOKS = {
    "matplotlib.pyplot": _pyplot,
    "IPython.core.display_functions": _display_functions,
    "plotly.basedatatypes": _plotly,
    "getpass": lambda m: setattr(m, "getpass", _input),
    "inspect": _inspect,
}


class Finder:
    """Runs HOOKS after the module's own code."""

    def find_spec(self, name, path=None, target=None):
        if name not in HOOKS:
            return None
        spec = next(filter(None, (f.find_spec(name, path, target) for f in sys.meta_path if f is not self)), None)
        if spec is None or spec.loader is None:
            return spec
        loader, exec_module = spec.loader, spec.loader.exec_module

        def hooked(module):
            exec_module(module)
            try:
                HOOKS[name](module)
            except Exception as e:
                print(f"{name} may not show what it should: {e}", file=stderr)

        loader.exec_module = hooked
        return spec


# Cells.

main = types.ModuleType("__main__")
main.__dict__.update(__builtins__=builtins, display=display)
space = main.__dict__
_FUTURE = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
state = {"flags": 0, "loop": None, "shell": None, "sources": []}

NO_STDIN = "a cell has no stdin: put the value into the code, or use a terminal"


def _input(prompt="", *_args, **_kw):
    print(prompt, end="", file=stdout, flush=True)
    raise EOFError(NO_STDIN)


class NoStdin(io.TextIOWrapper):
    """sys.stdin: /dev/null, and it stays when exit() closes it."""

    def close(self):
        pass


_MAGIC = re.compile(r"^\s*%(matplotlib|config|load_ext|autoreload)\b.*$", re.M)
_LOOKS = re.compile(r"^\s*(?:[\w., ]+=\s*)?[%!?]|\?\s*$", re.M)


class Magics:
    """The magics there are without IPython."""

    def system(self, line, **kw):
        import subprocess
        p = subprocess.run(["bash", "-c", line], stdin=subprocess.DEVNULL, **kw)
        space["_exit_code"] = p.returncode
        return p.stdout

    def getoutput(self, line):
        return self.system(line, stdout=-1, text=True, errors="replace").splitlines()

    def magic(self, name, rest):
        if name in ("pip", "python", "python3"):
            self.system(("%s -m pip " % sys.executable if name == "pip" else sys.executable + " ") + rest)
        elif name == "cd":
            os.chdir(os.path.expanduser(rest or "~"))
            print(os.getcwd())
        elif name == "pwd":
            return os.getcwd()
        elif name == "env" and "=" in rest:
            k, v = (x.strip() for x in rest.split("=", 1))
            os.environ[k] = v
            print(f"env: {k}={v}")
        elif name == "env":
            return os.environ.get(rest) if rest else dict(os.environ)
        elif name == "time":
            begun, cpu = time.perf_counter(), time.process_time()
            try:
                return eval(compile(rest, "<time>", "eval"), space)
            except SyntaxError:
                exec(compile(rest, "<time>", "exec"), space)
            finally:
                print(f"CPU times: {time.process_time() - cpu:.3f} s\nWall time: {time.perf_counter() - begun:.3f} s")
        else:
            raise NameError(f"there is no %{name} here: install IPython for it (%pip install ipython)")

    def transform(self, code):
        if code.lstrip().startswith(("%%bash", "%%sh")):
            return f"__sandlot__.system({code.lstrip().split(chr(10), 1)[-1]!r})"
        out = []
        for line in code.split("\n"):
            m = re.match(r"^(\s*)(?:([\w., ]+?)\s*=\s*)?([%!])\s*(.*)$", line)
            if not m:
                out.append(line)
                continue
            indent, to, kind, rest = m.groups()
            to = f"{to} = " if to else ""
            if kind == "!":
                out.append(f"{indent}{to}__sandlot__.{'getoutput' if to else 'system'}({rest!r})")
            else:
                name, _, rest = rest.partition(" ")
                out.append(f"{indent}{to}__sandlot__.magic({name!r}, {rest.strip()!r})")
        return "\n".join(out)


def shell():
    """IPython's shell over this kernel's names, or None where there is no IPython."""
    if state["shell"] is None or isinstance(state["shell"], Magics):
        try:
            from IPython.core.history import HistoryManager
            from IPython.core.interactiveshell import InteractiveShell
        except ImportError:
            space["__sandlot__"] = state["shell"] = Magics()
            return state["shell"]
        HistoryManager.enabled = False
        keep = sys.displayhook, sys.excepthook, builtins.display
        names = set(space)
        s = InteractiveShell.instance(user_module=main, user_ns=space, colors="nocolor")
        sys.displayhook, sys.excepthook, builtins.display = keep
        for name in set(space) - names:
            if not name.startswith("_"):
                space.pop(name)  # In, Out, exit and others that a plain kernel has not
        space["get_ipython"] = s.get_ipython
        s.system = lambda line: Magics().system(s.var_expand(line, depth=1))  # IPython's own keeps an interrupt to itself
        s.history_manager.enabled = False
        s.register_magic_function(lambda line: None, "line", "matplotlib")
        state["shell"] = s
    return state["shell"]


def _get_ipython():
    s = shell()
    return None if isinstance(s, Magics) else s


def parse(code, filename):
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | state["flags"]

    def tree(code):
        return compile(code, filename, "exec", flags | ast.PyCF_ONLY_AST, dont_inherit=True)

    code = code.removeprefix("\ufeff")
    try:
        return tree(code), code
    except SyntaxError as e:
        if isinstance(e, IndentationError):
            import textwrap
            less = textwrap.dedent(code)
            if less != code:
                return parse(less, filename)
        if not _LOOKS.search(code):
            raise
        less = _MAGIC.sub("pass", code)
        if less != code:
            return parse(less, filename)
        s = shell()
        other = s.transform(code) if isinstance(s, Magics) else s.transform_cell(code)
        if other.strip() == code.strip():
            raise
        return tree(other), other


def remember(filename, code):
    linecache.cache[filename] = (len(code), None, code.splitlines(True), filename)
    state["sources"].append(filename)
    if len(state["sources"]) > KEPT_SOURCES:
        linecache.cache.pop(state["sources"].pop(0), None)


COROUTINE = 0x80  # in co_flags: code with an await of its own


def prepare(tree, filename, mode):
    code = compile(tree, filename, mode, ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | state["flags"], dont_inherit=True)
    state["flags"] |= code.co_flags & _FUTURE
    return code


async def within(codes):
    """Runs all of a cell in the loop: what has no await itself may still make tasks for what has."""
    value = None
    for code in codes:
        value = eval(code, space)
        if code.co_flags & COROUTINE:
            value = await value
    return value


def awaited(coro):
    import asyncio
    loop = state["loop"]
    if loop is None or loop.is_closed():
        loop = state["loop"] = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    task = loop.create_task(coro)
    try:
        return loop.run_until_complete(task)
    except BaseException:
        if not task.done():
            task.cancel()
            with contextlib.suppress(BaseException):
                loop.run_until_complete(asyncio.wait([task], timeout=1))
            if task.cancelled():
                try:
                    task.result()
                except asyncio.CancelledError as e:
                    raise KeyboardInterrupt().with_traceback(e.__traceback__) from None  # says where it waited
        raise


def execute(code):
    filename = f"<cell {current['count']}>"
    remember(filename, code)
    tree, shown = parse(code, filename)
    if shown is not code:
        remember(filename, shown)
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr) and not shown.rstrip().endswith(";"):
        last = tree.body.pop()
    codes = [prepare(tree, filename, "exec")]
    if last is not None:
        codes.append(prepare(ast.Expression(last.value), filename, "eval"))
    if any(code.co_flags & COROUTINE for code in codes):
        value = awaited(within(codes))
    else:
        for code in codes:
            value = eval(code, space)
    if last is not None and value is not None:
        space["___"], space["__"], space["_"] = space.get("__"), space.get("_"), value
        publish(bundle(value), main=True)


def describe(e):
    """name, value and traceback of an exception, without this program's own frames."""
    import traceback
    if isinstance(e, SystemExit):
        return "SystemExit", "" if e.code is None else str(e.code), ""
    tb = first = e.__traceback__
    while tb is not None and not tb.tb_frame.f_code.co_filename.startswith("<cell "):
        tb = tb.tb_next  # this program's, and the event loop's
    if tb is None and isinstance(e, KeyboardInterrupt):
        return "KeyboardInterrupt", "", "KeyboardInterrupt"
    if tb is None:  # a value that cannot be shown
        tb = first
        while tb is not None and tb.tb_frame.f_code.co_filename == HERE:
            tb = tb.tb_next
    try:
        value = str(e)
    except Exception:
        value = "<its str() failed>"
    try:
        lines = traceback.TracebackException(type(e), e, tb).format()
        text = "".join(line for line in lines if not line.startswith(f'  File "{HERE}"'))
    except Exception as other:
        text = f"{type(e).__name__}: {value}\n(no traceback: {type(other).__name__})\n"
    if len(text) > MAX_TRACEBACK:
        text = text[: MAX_TRACEBACK // 2] + "\n…\n" + text[-MAX_TRACEBACK // 2 :]
    return type(e).__name__, value[:MAX_TRACEBACK], text.rstrip("\n")


def fail(e):
    try:
        name, value, traceback = describe(e)
    except Exception:
        name, value, traceback = "Exception", "an error that cannot be described", ""
    e.__traceback__ = None  # lets go of the frames
    channel.send({"type": "error", "id": current["id"], "name": name, "value": value, "traceback": traceback})


def child(e):
    """Ends a process that a cell forked and that came back here."""
    status = 0
    if isinstance(e, SystemExit):
        status = e.code if isinstance(e.code, int) else 0 if e.code is None else 1
    elif e is not None:
        print(describe(e)[2], file=stderr)
        status = 1
    flush()
    os._exit(status & 0xFF)


def heal(kept=dict(vars(builtins)), now=vars(builtins), callable=callable):
    """Brings back what a cell deleted from builtins or replaced by what cannot be called: all here needs it."""
    for name, value in kept.items():
        if name not in now or callable(value) and not callable(now[name]):
            now[name] = value


def run(message):
    current["id"] = message["id"]
    current["count"] += 1
    caught, told = None, False
    interrupts.pending = False
    interrupts.running = True
    try:
        try:
            try:
                execute(message["code"])
            except BaseException as e:
                heal()
                caught = e
                if os.getpid() == PID:
                    flush()
                    fail(e)
                    told = True
            if os.getpid() != PID:
                child(caught)
            heal()
            figures.show()
        finally:
            interrupts.running = False
    except BaseException as e:  # an interrupt while an error was told, a figure that fails
        if os.getpid() != PID:
            child(e)
        if not told:
            e.__context__ = None  # what could not be told is not tried again
            fail(e)
    flush()
    if "ctypes" in sys.modules:
        with contextlib.suppress(Exception):
            sys.modules["ctypes"].CDLL(None).fflush(None)  # C code's own buffers
    if signal.getsignal(signal.SIGINT) != interrupts.handle:
        signal.signal(signal.SIGINT, interrupts.handle)  # a cell's own handler is for that cell
    channel.send({"type": "done", "id": message["id"], "count": current["count"]})


def identity(message):
    current["count"] = 0  # what ran before was nobody's
    for k, v in message.get("env", {}).items():
        with contextlib.suppress(ValueError):
            os.environ[k] = v
    seed = bytes.fromhex(message.get("seed", ""))
    if seed and "random" in sys.modules:
        sys.modules["random"].seed(seed + os.urandom(32))
    if seed and "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(list(os.urandom(64)))
    time.tzset()


def serve():
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__ = stdout, stderr
    sys.stdin = sys.__stdin__ = NoStdin(io.BufferedReader(io.FileIO(0, closefd=False), 512), encoding="utf-8")
    sys.modules["__main__"] = main
    sys.argv = [""]
    sys.path.insert(0, "")
    builtins.input, builtins.display = _input, display
    space["get_ipython"] = _get_ipython
    sys.meta_path.insert(0, Finder())
    sys.addaudithook(_audit)
    # The one thread that a cell did not start is Flusher's, and fork may come at any time for that.
    warnings.filterwarnings("ignore", message=".*use of fork\\(\\) may lead to deadlocks", category=DeprecationWarning)
    signal.signal(signal.SIGINT, interrupts.handle)
    faulthandler.enable(file=2)
    channel.send({"type": "ready"})
    for line in channel.reader:
        message = json.loads(line)
        if message["op"] == "run":
            run(message)
        elif message["op"] == "identity":
            identity(message)
    __import__("atexit")._run_exitfuncs()
    flush()
    os._exit(0)


serve()
