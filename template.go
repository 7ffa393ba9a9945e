package sandlot

import "time"

// Template is a named, versioned root filesystem with its defaults. Digest addresses the one read-only
// EROFS image, which every engine uses unchanged.
type Template struct {
	Name        string            `json:"name"`
	Digest      string            `json:"digest"` // sha256:<64 hex> of the image file
	Description string            `json:"description"`
	Contents    []string          `json:"contents"` // what people find in it: "CPython 3.12.3", "git 2.47", …
	Kernels     []string          `json:"kernels"`  // run-code languages besides bash
	Size        Size              `json:"default_size"`
	Env         map[string]string `json:"env,omitempty"`   // for every process inside
	Start       []string          `json:"start,omitempty"` // argv run by the agent before the machine is ready
	Ready       []string          `json:"ready,omitempty"` // argv that exits 0 when Start is up
	ImageBytes  int64             `json:"image_bytes"`
	BuiltAt     time.Time         `json:"built_at"`
	BuildMS     int64             `json:"build_ms"`
	Image       string            `json:"-"` // absolute path of the image on this host
}
