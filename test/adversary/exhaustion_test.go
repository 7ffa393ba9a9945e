package adversary

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sandlot"
	"sandlot/internal/devserver"
	"sandlot/test/live"
)

// beside runs attack in one sandbox while a peer works, and checks that the peer's commands come back in a time that has
// something to do with the time that they take in peace: this machine may have one CPU to spare, or less.
func beside(t *testing.T, peer live.Box, during time.Duration) {
	t.Helper()
	quiet := latency(t, peer, 20)
	bound := max(20*quiet, 3*time.Second)
	for begun := time.Now(); time.Since(begun) < during; {
		if slow := latency(t, peer, 5); slow > bound {
			t.Errorf("a peer's command took %s beside the attack, %s without", slow, quiet)
			return
		}
	}
}

// deleted deletes a sandbox under attack in a bounded time.
func deleted(t *testing.T, b live.Box) {
	t.Helper()
	begun := time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if err := b.Delete(ctx, b.ID); err != nil {
		t.Error("delete:", err)
	}
	if took := time.Since(begun); took > 10*time.Second {
		t.Errorf("the delete took %s", took)
	}
}

const threads = `
import threading, time
n = 0
try:
    threading.stack_size(64 << 10)
    while n < 3000:
        threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
        n += 1
    print("no limit", n)
except RuntimeError as e: print("limit", n, e)
import os
for i in range(20):
    try:
        if os.fork() == 0:
            time.sleep(5)
            os._exit(0)
    except OSError as e:
        print(e.strerror)
        break
print(flush=True)
os._exit(0)
`

// SandboxUser/PeerDoS; item 41. Processes and threads have a limit that programs meet as an error, the sandbox goes on,
// and so does everybody else.
func TestProcessLimit(t *testing.T) {
	b, peer := live.New(t, nil), live.New(t, nil)
	for _, user := range []string{"user", "root"} {
		got := b.Run(t, []string{"python3", "-c", threads}, map[string]any{"user": user, "timeout_s": 120})
		var n int
		if _, err := fmt.Sscanf(got.Stdout, "limit %d can't start new thread", &n); err != nil || n < sandlot.MaxProcesses/2 || n > sandlot.MaxProcesses*11/10 ||
			!strings.Contains(got.Stdout, "Resource temporarily unavailable") {
			t.Errorf("%s's threads: %+v", user, got)
		}
		live.Eventually(t, 30*time.Second, "the sandbox answers when the threads are gone", func() bool {
			r, err := b.Try(t, "echo here")
			return err == nil && r.Stdout == "here\n"
		})
	}
	answers(t, peer, "beside the threads")
}

// SandboxUser/PeerDoS and SandboxRoot/PeerDoS; item 41.
func TestForkBomb(t *testing.T) {
	for _, attack := range []string{
		`bomb() { bomb | bomb & }; bomb; sleep 60`,
		`sudo python3 -c "
import os, signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    try: os.fork()
    except OSError: pass"`,
	} {
		b, peer := live.New(t, nil), live.New(t, nil)
		b.Background(t, attack)
		current := cgroupFile(t, b, "pids", "pids.current")
		most := 0
		stop := make(chan struct{})
		var wg sync.WaitGroup
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				case <-time.After(50 * time.Millisecond):
				}
				raw, _ := os.ReadFile(current)
				n, _ := strconv.Atoi(strings.TrimSpace(string(raw)))
				most = max(most, n)
			}
		})
		beside(t, peer, 3*time.Second)
		// Its agent may be slow, and a machine that meets the host's limit of processes ends. The server knows it all the same.
		if sb, err := b.Get(t.Context(), b.ID); err != nil || sb.State != "running" && sb.Reason != "crashed" {
			t.Errorf("%.20s: the attacked sandbox is %+v, %v", attack, sb, err)
		}
		close(stop)
		wg.Wait()
		if most < 50 || most > 6*sandlot.MaxProcesses {
			t.Errorf("%.20s: %d processes on the host at most (control: a bomb has gone off)", attack, most)
		}
		deleted(t, b)
		answers(t, peer, "after the bomb")
	}
	if strings.Contains(live.Server(t).Log(), "runs out of memory may end") {
		t.Error("the server could not tell the host which processes go first")
	}
}

// SandboxRoot/PeerDoS; item 42. Memory without end ends a program, not its sandbox; what is not a program's, such as a
// file system in memory, is full.
func TestMemoryBombs(t *testing.T) {
	peer := live.New(t, nil)
	for _, bomb := range []struct{ name, cmd, says string }{
		{"anonymous", `python3 -c "
b = []
while True: b.append(bytearray(16 << 20))"; echo $?`, "137"},
		{"many programs", `for i in 1 2 3 4 5 6; do python3 -c "
import time
b = bytearray(200 << 20); time.sleep(3)" & done; wait; echo waited`, "waited"},
		{"/tmp and /dev/shm", "head -c 2G /dev/zero > /tmp/fill; head -c 2G /dev/zero > /dev/shm/fill; echo $?; rm /tmp/fill /dev/shm/fill", "1"},
		{"environment", `python3 -c "
import os
try: os.execve('/bin/true', ['true'], {'A%d' % i: 'x' * 120000 for i in range(100)})
except OSError as e: print('refused')"`, "refused"},
		{"mappings", `python3 -c "
import mmap
maps = []
try:
    for i in range(10000): maps.append(mmap.mmap(-1, 4096, prot=1 + (i & 1) * 2))
except (OSError, MemoryError): pass
print('done')"`, "done"},
		{"locked", `python3 -c "
import ctypes, mmap
m = mmap.mmap(-1, 1 << 30)
print(ctypes.CDLL(None).mlock(ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(m))), ctypes.c_size_t(1 << 30)))" ; echo over`, "over"},
		{"page cache", "head -c 300M /dev/zero > fill && cat fill fill | wc -c; rm fill", "629145600"},
	} {
		in := map[string]any{}
		if bomb.name == "page cache" {
			in["memory_mb"] = 256
		}
		b := live.New(t, in)
		r, err := b.Try(t, bomb.cmd, map[string]any{"timeout_s": 100})
		lines := strings.Split(strings.TrimSpace(r.Stdout), "\n")
		if err != nil || lines[len(lines)-1] != bomb.says {
			t.Errorf("%s: %+v, %v", bomb.name, r, err)
		}
		answers(t, b, "after "+bomb.name)
	}
	answers(t, peer, "after others' bombs")

	b := live.New(t, map[string]any{"memory_mb": 256})
	r, err := b.Try(t, "mkdir /m && mount -t tmpfs none /m && head -c 1G /dev/zero > /m/fill", live.Root)
	if err != nil || !strings.Contains(r.Stderr, "No space left on device") {
		t.Errorf("a file system in memory: %+v, %v", r, err)
	}
	answers(t, peer, "after a file system in memory")
	survives(t, b)
}

// SandboxRoot/HostDoS; item 43. A sandbox fills its own disk and nothing else's, by whatever it fills it.
func TestDiskBombs(t *testing.T) {
	peer := live.New(t, nil)
	free := func() uint64 {
		var fs unix.Statfs_t
		if err := unix.Statfs(peer.StateDir(), &fs); err != nil {
			t.Fatal(err)
		}
		return fs.Bavail * uint64(fs.Bsize) //nolint:gosec // positive
	}
	before := free()
	b := live.New(t, map[string]any{"disk_gb": 1})
	full := func(what, cmd, want string) {
		t.Helper()
		r, err := b.Try(t, cmd, live.Root, map[string]any{"timeout_s": 90})
		if err != nil || !strings.Contains(r.Stdout+r.Stderr, want) {
			t.Errorf("%s: %+v, %v", what, r, err)
		}
		answers(t, b, "after "+what)
	}
	full("bytes on both", "head -c 700M /dev/zero > /var/fill; head -c 700M /dev/zero > fill; rm /var/fill fill", "No space left on device")
	full("sparse files", "for i in 1 2 3; do truncate -s 4T sparse$i; done; du -s . | cut -f1; rm sparse*; echo sparse", "sparse")
	full("small files", `timeout 4 python3 -c "
import errno, os
os.mkdir('many')
try:
    for i in range(400000): os.mknod('many/%d' % i)
except OSError as e: print(errno.errorcode[e.errno])"; ls many | wc -l | grep -c '....'`, "1")
	used, err := os.Stat(machineDir(b) + "/disk.img")
	if err != nil || used.Sys() == nil || used.Size() != 1<<30 {
		t.Errorf("the disk on the host: %v, %v", used, err)
	}
	if now := free(); before > now && before-now > 6<<30 { // others work on this host, too
		t.Errorf("%d MB of the host's disk are gone", (before-now)>>20)
	}
	b.Background(t, `for i in 1 2 3 4; do python3 -c "
import os
f = os.open('sync$i', os.O_CREAT | os.O_WRONLY)
while True: os.pwrite(f, b'x' * 4096, 0); os.fsync(f)" & done; wait`)
	beside(t, peer, 3*time.Second)
	deleted(t, b)
}

// SandboxUser/HostDoS; item 44. Output that nobody reads is held nowhere: the program waits, or what it says is cut.
func TestOutputFlood(t *testing.T) {
	b := live.New(t, nil)
	answers(t, b, "before the flood")
	before := b.RSS()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var readers []*http.Response
	for range 4 {
		resp, err := b.Request(ctx, http.MethodPost, "/"+b.ID+"/exec", strings.NewReader(`{"cmd":"exec cat /dev/zero","stream":true,"timeout_s":100}`))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		readers = append(readers, resp)
	}
	buf := make([]byte, 64<<10)
	for _, resp := range readers { // each has begun, and is not read any more
		if n, err := resp.Body.Read(buf); n == 0 {
			t.Fatal("control: no output:", err)
		}
	}
	most := 0.0
	for begun := time.Now(); time.Since(begun) < 4*time.Second; time.Sleep(100 * time.Millisecond) {
		most = max(most, b.RSS())
	}
	if most-before > 64 {
		t.Errorf("four readers that stalled cost the server %.0f MB", most-before)
	}
	cancel()
	live.Eventually(t, 40*time.Second, "the commands end with their readers", func() bool { return b.Out(t, "pgrep -fc '^cat /dev/zero' || true") == "0" })

	var r struct {
		Stdout          string
		StdoutTruncated bool `json:"stdout_truncated"`
		TimedOut        bool `json:"timed_out"`
	}
	if err := b.Call(t.Context(), http.MethodPost, "/"+b.ID+"/exec", map[string]any{"cmd": "yes", "timeout_s": 3}, &r); err != nil {
		t.Fatal(err)
	}
	if !r.TimedOut || !r.StdoutTruncated || len(r.Stdout) != sandlot.MaxOutputBytes {
		t.Errorf("yes for three seconds: %d bytes, truncated %v, timed out %v", len(r.Stdout), r.StdoutTruncated, r.TimedOut)
	}
	_, log := b.Background(t, "timeout 20 yes 'a line that is repeated until there is too much of it, and a little more'", map[string]any{"timeout_s": 30})
	live.Eventually(t, 40*time.Second, "the log of a background process is cut", func() bool {
		return strings.Contains(b.Out(t, "tail -c 200 "+log), "the rest is not kept")
	})
	if n, err := strconv.Atoi(b.Out(t, "stat -c %s "+log)); err != nil || n > 65<<20 {
		t.Errorf("the log has %d bytes, %v", n, err)
	}
	answers(t, b, "after the flood")
}

// Anon/HostDoS and ApiUser/HostDoS; item 45. Clients that keep connections open and say nothing, or too much, cost a
// bounded time and keep nobody else waiting.
func TestConnectionAbuse(t *testing.T) {
	b := live.New(t, nil)
	quiet := latency(t, b, 20)
	before := weigh(t, b.Server)
	addr := strings.TrimPrefix(b.URL, "http://")
	var conns []net.Conn
	defer func() {
		for _, c := range conns {
			c.Close()
		}
	}()
	for i := range 300 {
		c, err := new(net.Dialer).DialContext(t.Context(), "tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, c)
		switch i % 3 {
		case 0: // half a header
			fmt.Fprintf(c, "POST /api/v1/projects/default/sandboxes HTTP/1.1\r\nHost: x\r\nX-Slow: ")
		case 1: // no body that was promised
			fmt.Fprintf(c, "POST /api/v1/projects/default/sandboxes/%s/exec HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Length: 100\r\n\r\n{", b.ID, b.Token)
		}
	}
	pid, _ := b.Background(t, []string{"sleep", "300"})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for range 200 {
		resp, err := b.Request(ctx, http.MethodGet, fmt.Sprintf("/%s/processes/%d/stream", b.ID, pid), nil)
		if err != nil {
			t.Fatal("stream:", err)
		}
		defer resp.Body.Close()
	}
	if open := weigh(t, b.Server).api - before.api; open < 400 {
		t.Errorf("control: %d descriptors for 500 connections", open)
	}
	if busy := latency(t, b, 50); busy > max(20*quiet, 3*time.Second) {
		t.Errorf("a command takes %s beside 500 idle connections, %s without", busy, quiet)
	}
	for i, c := range conns { // the server gives up on them by itself
		if i%3 != 0 {
			continue // bodies and silence have longer times
		}
		_ = c.SetReadDeadline(time.Now().Add(45 * time.Second))
		var last error
		for buf := make([]byte, 4096); last == nil; {
			_, last = c.Read(buf)
		}
		if ne, ok := last.(net.Error); ok && ne.Timeout() { //nolint:errorlint // of Read itself
			t.Fatalf("connection %d is still open after 45 s", i)
		}
	}
	for _, c := range conns {
		c.Close()
	}
	cancel()
	settles(t, b.Server, before)

	deep := strings.Repeat("[", 900_000)
	for what, body := range map[string]string{"deep": `{"cmd":` + deep, "deep and whole": `{"cmd":` + deep + strings.Repeat("]", 100_000) + "}"} {
		_, err := b.Do(t.Context(), http.MethodPost, "/exec", []byte(body))
		refused(t, what, err, 400)
	}
	_, err := b.Do(t.Context(), http.MethodPost, "/exec", []byte(`{"cmd":"`+strings.Repeat("x", 2<<20)+`"}`))
	refused(t, "2 MB of JSON", err, 413)
	var part bytes.Buffer // 600 MB as many short streams: making one would take longer than all the rest
	z := gzip.NewWriter(&part)
	_, _ = z.Write(make([]byte, 4<<20))
	_ = z.Close()
	bomb := bytes.Repeat(part.Bytes(), 150)
	rss := b.RSS()
	_, err = b.Do(t.Context(), http.MethodPut, "/files/archive?path=bomb", bomb, "Content-Encoding", "gzip")
	refused(t, "600 MB of zeros in an archive", err, 400, 413)
	if grown := b.RSS() - rss; grown > 64 {
		t.Errorf("the archive cost the server %.0f MB", grown)
	}
	answers(t, b, "after the abuse")
}

// ApiUser/HostDoS; item 46. Thousands of commands that cannot start, watches that end at once and commands in a sandbox
// that is going away leave nothing in the server.
func TestExecStorm(t *testing.T) {
	b := live.New(t, nil)
	answers(t, b, "before the storm")
	before := weigh(t, b.Server)
	var wg sync.WaitGroup
	var mu sync.Mutex
	codes := map[int]int{}
	for range 16 {
		wg.Go(func() {
			for range 2000 / 16 {
				r, err := b.Try(t, []string{"no-such-program"})
				mu.Lock()
				if err != nil {
					t.Error(err)
				}
				codes[r.ExitCode]++
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	if codes[127] != 2000 {
		t.Errorf("exit codes: %v", codes)
	}
	for range 8 {
		wg.Go(func() {
			for range 12 {
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
				resp, err := b.Request(ctx, http.MethodGet, "/"+b.ID+"/files/watch?path=.", nil)
				if err != nil {
					refused(t, "watch", err, 429)
				} else {
					_ = live.Events(resp.Body, func(live.Event) bool { return false })
					resp.Body.Close()
				}
				cancel()
			}
		})
	}
	wg.Wait()
	dying := live.New(t, nil)
	for range 8 {
		wg.Go(func() {
			for {
				_, err := dying.Try(t, []string{"sleep", "0.05"})
				if err != nil {
					refused(t, "a command in a dying sandbox", err, 404, 409, 500, 502, 503)
					return
				}
			}
		})
	}
	time.Sleep(500 * time.Millisecond)
	if err := dying.Delete(t.Context(), dying.ID); err != nil {
		t.Error(err)
	}
	wg.Wait()
	answers(t, b, "after the storm")
	settles(t, b.Server, before)
	if n, err := strconv.Atoi(b.Out(t, "ls /proc/1/fd | wc -l", live.Root)); err != nil || n > 64 {
		t.Errorf("the agent has %d descriptors open, %v", n, err)
	}
}

// SandboxUser/SelfDoS. Programs that want all the memory there is end: many at once and wave after wave, one after the other, as
// files in memory, and as a thousand small ones. The kernel of their sandbox and its agent do not.
func TestMemoryHogs(t *testing.T) {
	const many = `
import os, time
for i in range(120):
    try:
        if os.fork() == 0:
            b = []
            for j in range(200): b.append(bytearray(1 << 20))
            time.sleep(1)
            os._exit(0)
    except OSError: break
killed = 0
try:
    while True: killed += os.wait()[1] == 9
except OSError: pass
print("killed", killed)
`
	const files = `for i in 1 2 3; do head -c 200M /dev/zero > /dev/shm/$i; echo $?; done; python3 -c "
b = []
while True: b.append(bytearray(1 << 20))"; echo $?; rm -f /dev/shm/*`
	const mapped = `python3 -c "
import mmap, os
maps = []
for i in range(40):
    m = mmap.mmap(-1, 32 << 20)
    for j in range(0, len(m), 4096): m[j] = 1
    maps.append(m)"; echo $?`
	const small = `i=0; while [ $i -lt 1000 ]; do python3 -c "
import time
b = bytearray(4 << 20)
time.sleep(60)" 2>/dev/null & i=$((i+1)); done; sleep 5; kill $(jobs -p) 2>/dev/null; wait; echo done`
	for _, c := range []struct {
		name, cmd string
		memoryMB  int
		times     int
		ends      func(devserver.Result) bool
	}{
		{"many", "python3 -c '" + many + "'", 256, 3, func(r devserver.Result) bool {
			var n int
			_, err := fmt.Sscanf(r.Stdout, "killed %d", &n)
			return r.ExitCode == 137 || err == nil && n > 50
		}},
		{"one", `exec python3 -c "
b = []
while True: b.append(bytearray(16 << 20))"`, 256, 15, func(r devserver.Result) bool { return r.ExitCode == 137 && r.Signal == "SIGKILL" }},
		{"files in memory", files, 256, 3, func(r devserver.Result) bool { return strings.HasSuffix(r.Stdout, "137\n") }},
		{"shared mappings", mapped, 256, 3, func(r devserver.Result) bool { return r.Stdout == "137\n" }},
		{"a thousand", small, 1024, 1, func(r devserver.Result) bool { return r.ExitCode == 137 || strings.Contains(r.Stdout, "done") }},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := live.New(t, map[string]any{"memory_mb": c.memoryMB})
			for i := range c.times {
				r := b.Run(t, c.cmd, map[string]any{"timeout_s": 200})
				if !c.ends(r) {
					t.Errorf("%d: %+v", i, r)
				}
				survives(t, b)
			}
		})
	}
}

// survives checks that a sandbox which was short of memory works. Right after, a command may still be what ends; its agent never is.
func survives(t *testing.T, b live.Box) {
	t.Helper()
	live.Eventually(t, 30*time.Second, "the sandbox works", func() bool {
		r, err := b.Try(t, "echo alive")
		var se *devserver.StatusError
		if err != nil && (!errors.As(err, &se) || se.Status != http.StatusTooManyRequests) {
			t.Fatal("the sandbox is gone:", err)
		}
		return err == nil && r.Stdout == "alive\n"
	})
}
