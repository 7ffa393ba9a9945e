package main

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func TestCgroupLimits(t *testing.T) {
	root := t.TempDir()
	for path, content := range map[string]string{
		"memory/m/memory.limit_in_bytes": "1073741824\n",
		"cpu/m/cpu.cfs_quota_us":         "300000\n",
		"cpu/m/cpu.cfs_period_us":        "100000\n",
		"cpu/free/cpu.cfs_quota_us":      "-1\n",
		"cpu/free/cpu.cfs_period_us":     "100000\n",
		"two/memory.max":                 "536870912\n",
		"two/cpu.max":                    "100000 100000\n",
		"open/memory.max":                "max\n",
		"open/cpu.max":                   "max 100000\n",
	} {
		p := filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(p), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		name, proc   string
		have         int64
		memory, cpus int64
	}{
		{"v1", "4:memory:/m\n1:cpu:/m\n0::/\n", 8, 1 << 30, 3},
		{"v1, fewer CPUs", "4:memory:/m\n1:cpu,cpuacct:/m\n", 2, 1 << 30, 2},
		{"v1, no quota", "1:cpu:/free\n", 8, 0, 0},
		{"v2, never one CPU", "0::/two\n", 8, 512 << 20, 2},
		{"v2, no limits", "0::/open\n", 8, 0, 0},
		{"none", "", 8, 0, 0},
		{"nonsense", "x\n::\n7:memory\n", 8, 0, 0},
	} {
		memory, cpus := cgroupLimits(root, []byte(c.proc), c.have)
		if memory != c.memory || cpus != c.cpus {
			t.Errorf("%s: %d bytes, %d CPUs; want %d, %d", c.name, memory, cpus, c.memory, c.cpus)
		}
	}
}

func TestLimitArgs(t *testing.T) {
	for _, c := range []struct {
		in           []string
		memory, cpus int64
		want         []string
	}{
		{[]string{"boot", "--total-memory", "900", "id"}, 500, 2, []string{"boot", "--cpu-num", "2", "--total-memory", "500", "id"}},
		{[]string{"boot", "--total-memory", "900", "id"}, 9000, 0, []string{"boot", "--total-memory", "900", "id"}},
		{[]string{"boot", "--total-memory=500", "id"}, 500, 2, []string{"boot", "--total-memory=500", "id"}}, // the second start
		{[]string{"boot", "--total-memory"}, 500, 2, []string{"boot", "--total-memory"}},
	} {
		if got := limitArgs(c.in, c.memory, c.cpus); !slices.Equal(got, c.want) {
			t.Errorf("%q: %q, want %q", c.in, got, c.want)
		}
	}
}

func TestJoinCgroupsLeavesNoTrace(t *testing.T) {
	a, b := filepath.Join(t.TempDir(), "a"), filepath.Join(t.TempDir(), "b")
	t.Setenv(cgroupsVar, a+":"+b)
	if err := joinCgroups(); err != nil {
		t.Fatal(err)
	}
	for _, f := range []string{a, b} {
		if got, err := os.ReadFile(f); err != nil || string(got) != "0" {
			t.Errorf("%q, %v", got, err)
		}
	}
	if v, ok := os.LookupEnv(cgroupsVar); ok {
		t.Errorf("the variable is still there: %q", v)
	}
}
