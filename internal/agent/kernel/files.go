package kernel

import "embed"

// Files holds the bridges.
//
//go:embed bridge.py bridge.mjs
var Files embed.FS
