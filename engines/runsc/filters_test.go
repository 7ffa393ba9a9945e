package main

import (
	"os"
	"slices"
	"testing"

	"gvisor.dev/gvisor/pkg/seccomp/precompiledseccomp"
	"gvisor.dev/gvisor/pkg/sentry/platform"
	"gvisor.dev/gvisor/runsc/boot/filter"
	"gvisor.dev/gvisor/runsc/boot/filter/config"
)

func TestFilterForOurFlagsIsRegistered(t *testing.T) {
	registerFilters()
	for _, name := range []string{"systrap", "kvm"} {
		c, err := platform.Lookup(name)
		if err != nil {
			t.Fatal(err)
		}
		for _, info := range c.PrecompiledSeccompInfo() {
			opt := config.Options{Platform: info, HostFilesystem: true}
			p, ok := filter.GetPrecompiled(opt.ConfigKey())
			if !ok {
				t.Fatalf("no program for %s; have %v (was gen run without cgo?)", opt.ConfigKey(), filter.ListPrecompiled())
			}
			if _, err := p.RenderInstructions(opt.Vars()); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}

// A filters_gen.go left over from another gVisor version would install the wrong rules: rendered for this
// process, each program must be what gVisor compiles in this process.
func TestGeneratedFiltersAreCurrent(t *testing.T) {
	all, err := config.PrecompiledPrograms()
	if err != nil {
		t.Fatal(err)
	}
	current := make(map[string]precompiledseccomp.Program)
	for _, p := range all {
		current[p.Name] = p
	}
	for _, p := range generatedFilters() {
		values := make(precompiledseccomp.Values)
		for name := range p.VarOffsets {
			values[name] = 7
		}
		values.SetUint64("self_pid", uint64(os.Getpid()))
		got, err := p.RenderInstructions(values)
		if err != nil {
			t.Fatalf("%s: %v", p.Name, err)
		}
		want, err := current[p.Name].RenderInstructions(values)
		if err != nil {
			t.Fatalf("%s: %v", p.Name, err)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s differs from what gVisor compiles now", p.Name)
		}
	}
}

func TestCommand(t *testing.T) {
	for _, tt := range []struct {
		args []string
		want string
	}{
		{nil, ""},
		{[]string{"--root=/boot", "--debug=true", "boot", "--bundle=/x", "id"}, "boot"},
		{[]string{"--root=/x", "create", "boot"}, "create"},
		{[]string{"-version"}, ""},
	} {
		if got := command(tt.args); got != tt.want {
			t.Errorf("command(%q) = %q, want %q", tt.args, got, tt.want)
		}
	}
}
