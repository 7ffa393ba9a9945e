package agent

import (
	"bytes"
	"iter"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"sandlot/internal/wire"
)

func itoa(n int) string { return strconv.Itoa(n) }

// pids yields every process of the machine.
func pids() iter.Seq[int] {
	return func(yield func(int) bool) {
		dir, err := os.Open("/proc")
		if err != nil {
			return
		}
		defer func() { _ = dir.Close() }()
		for {
			names, err := dir.Readdirnames(512)
			for _, n := range names {
				if pid, err := strconv.Atoi(n); err == nil && pid > 0 && !yield(pid) {
					return
				}
			}
			if err != nil {
				return
			}
		}
	}
}

type procStat struct {
	state byte
	ticks int64 // after the machine's boot, when it started
}

// readStat reads /proc/pid/stat. The command's name in it may hold anything, so fields count from the last ')'.
func readStat(pid int) (procStat, bool) {
	b, err := os.ReadFile("/proc/" + itoa(pid) + "/stat")
	if err != nil {
		return procStat{}, false
	}
	i := bytes.LastIndexByte(b, ')')
	if i < 0 {
		return procStat{}, false
	}
	f := strings.Fields(string(b[i+1:]))
	if len(f) < 20 {
		return procStat{}, false
	}
	ticks, _ := strconv.ParseInt(f[19], 10, 64)
	return procStat{state: f[0][0], ticks: ticks}, true
}

// describeOther is what listing shows of a process that the agent did not start.
func (a *Agent) describeOther(pid int, booted time.Time) (wire.Process, bool) {
	st, ok := readStat(pid)
	if !ok || st.state == 'Z' || st.state == 'X' {
		return wire.Process{}, false
	}
	dir := "/proc/" + itoa(pid)
	cmd, err := readSmall(dir+"/cmdline", keptArgv)
	if err != nil {
		return wire.Process{}, false
	}
	w := wire.Process{PID: pid, Running: true, StartedAt: booted.Add(time.Duration(st.ticks) * (time.Second / 100))}
	if cmd = bytes.TrimRight(cmd, "\x00"); len(cmd) > 0 {
		w.Argv = strings.Split(string(cmd), "\x00")
	} else if comm, err := readSmall(dir+"/comm", 64); err == nil {
		w.Argv = []string{"[" + strings.TrimSpace(string(comm)) + "]"}
	}
	var fi syscall.Stat_t
	if syscall.Stat(dir, &fi) == nil {
		w.User, _ = a.users.names(fi.Uid, fi.Gid)
	}
	return w, true
}

// booted is when the machine's clock of process starts began.
func booted() time.Time {
	if b, err := readSmall("/proc/uptime", 64); err == nil {
		up, _, _ := strings.Cut(string(b), " ")
		if s, err := strconv.ParseFloat(up, 64); err == nil {
			return time.Now().Add(-time.Duration(s * float64(time.Second)))
		}
	}
	return time.Now()
}
