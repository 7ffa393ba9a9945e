// Command runsc is gVisor's own command line at the version that Sandlot pins, with the sentry's seccomp
// filters compiled ahead.
//
// It is a nested module so that gVisor's dependencies never meet the server's. Build it without cgo (the
// filters of a cgo build are wider and have another key):
//
//	CGO_ENABLED=0 go run ./gen && CGO_ENABLED=0 go build .
//
// ./dev build does both and keeps the result by the content of this folder.
package main

import (
	"os"

	"gvisor.dev/gvisor/runsc/cli/maincli"
)

func main() {
	if command(os.Args[1:]) == "boot" {
		registerFilters()
		keepStill()
	}
	maincli.Main()
}

// command returns the first argument that is not a flag. runsc starts its sandbox process itself and
// writes each flag as --name=value, so for "boot" no flag's value can be mistaken for a command.
func command(args []string) string {
	for _, a := range args {
		if len(a) > 0 && a[0] != '-' {
			return a
		}
	}
	return ""
}
