package main

import (
	_ "unsafe" // for go:linkname

	"gvisor.dev/gvisor/pkg/seccomp/precompiledseccomp"
	"gvisor.dev/gvisor/runsc/boot/filter"
)

//go:generate go run ./gen

// precompiledPrograms is the filter package's own table. The Go module publishes it empty (only gVisor's
// Bazel build fills it), so each boot would compile the same seccomp program again, 20 to 30 ms of a cold
// start. The sandbox logs "Loaded precompiled" when an entry was used.
//
//go:linkname precompiledPrograms gvisor.dev/gvisor/runsc/boot/filter.precompiledPrograms
var precompiledPrograms map[string]precompiledseccomp.Program

// registerFilters adds the programs of filters_gen.go. Only a boot needs them, so nothing happens at init.
func registerFilters() {
	filter.ListPrecompiled() // runs the package's Once, which would replace the table later
	for _, p := range generatedFilters() {
		precompiledPrograms[p.Name] = p
	}
}
