package main

import (
	"slices"
	_ "unsafe" // for go:linkname
)

// registerMembarrier is what hostmm's init was, before patch made a variable of it.
//
//go:linkname registerMembarrier gvisor.dev/gvisor/pkg/sentry/hostmm.registerMembarrier
var registerMembarrier func()

// lastBoot says whether these arguments of boot are those of the process that becomes the sentry: before, it
// starts itself again to set up its root and to give up capabilities, and a registration does not survive that.
func lastBoot(args []string) bool {
	return !slices.ContainsFunc(args, func(a string) bool {
		switch a {
		case "--setup-root", "--setup-root=true", "--apply-caps", "--apply-caps=true":
			return true
		}
		return false
	})
}
