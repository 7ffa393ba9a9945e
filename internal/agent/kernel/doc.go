// Package kernel holds the programs that run cells inside a sandbox, one a language, and what they and the agent
// say to each other.
//
// A kernel is one process: `python3 …/bridge.py`, or `node …/bridge.mjs` and `bun …/bridge.mjs`. The agent starts it as
// the sandbox's user in a session of its own, with
//
//   - fd 0: /dev/null. input() and the like raise at once, with a message that says that a cell has no stdin.
//   - fd 1, 2: pipes. All output goes here, the language's own as well as that of C code and subprocesses, unbuffered as far as the next process
//     to write could tell, so that the order within a stream is the order in which it was written.
//   - fd 3: a Unix stream socket, close-on-exec, for messages: one JSON object a line, UTF-8, at most 48 MiB.
//
// Agent to kernel:
//
//	{"op":"identity","env":{"K":"V"},"seed":"<128 hex digits>"}
//	    The machine is somebody's now: take env into the process's environment, count cells anew, reseed every random generator that exists
//	    (random, numpy.random when imported; Math.random needs a new process or is reseeded by replacing it). No answer.
//	{"op":"run","id":7,"code":"…","language":"typescript"}
//	    Run a cell. language only says how a JavaScript kernel is to read the code. With "final":true the cell is the
//	    process's only one: done comes when nothing is left to wait for, as a program would end, and then the kernel exits.
//
// Kernel to agent:
//
//	{"type":"ready"}                                       once, when it can take a cell
//	{"type":"result","id":7,"main":true,"data":{"text/plain":"2"}}   a value: of display() (main false) or of the last expression
//	{"type":"error","id":7,"name":"ZeroDivisionError","value":"division by zero","traceback":"Traceback (most recent call last): …"}
//	{"type":"done","id":7,"count":3}                       the cell is over; everything it wrote was written before this; after an error too
//
// SIGINT to the kernel's process group interrupts a cell: Python raises KeyboardInterrupt in it (error "KeyboardInterrupt"), JavaScript
// stops synchronous and awaited code alike (error "Interrupted"). A SIGINT that comes between two cells does nothing. A closed fd 3 ends the kernel.
//
// What a kernel says is a stranger's: the agent bounds each line, and takes a message that it cannot read as the kernel's end.
package kernel
