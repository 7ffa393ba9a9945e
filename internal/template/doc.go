// Package template builds templates from their text definitions and keeps them in a store.
//
// A definition is a folder with a template.toml: where the root comes from, then ordered steps. Each step
// makes one layer, kept in a cache under a key of all that went into it: the builder's version, the step,
// the content of its input files, and the layer below. The stacked layers become one read-only EROFS image,
// addressed by its sha256, that every engine uses unchanged.
//
// # What is trusted
//
// A definition is built in one of two ways, and Options.Box says in which.
//
// With a Box, nobody vouches for it. Each program that a step runs (run, apt, pip's install) runs in a gVisor sandbox
// of its own (box.go), made from what was built so far, with the isolation and the limits that every sandbox
// has: no network, 4 GB of memory, 20 GB of disk, 30 minutes. What it changed is read from gVisor's own kernel
// as a tar and rewritten entry by entry, as a registry's layers are; the folders of each layer are written by
// a child process whose root is the image (child.go). Downloads are done outside, of what a definition pins by hash (pip,
// npm, gomod, oci), and for apt, which runs inside with the image's own keys, by a server that fetches from
// the archives of Debian and Ubuntu and nowhere else (archives.go). A start command and its check are tried in a
// sandbox before the template gets its name. With Stranger, a caller of the API wrote it: registries must then be
// public and are asked without this host's credentials, no folder beside the definition counts, and all layers
// together have a bound.
//
// Without a Box, a definition is trusted as the program that builds it is: those that ship with it are. Programs run
// on this host's kernel: own mount, process, IPC and host-name namespaces, own network namespace except for apt, the image as root directory, no
// device files, and no capability that leads out of there. That keeps accidents and archives in, not a
// determined program: build this way only what you would run as root. It is there because it is faster
// (docs/RATIONALE.md has the figures).
//
// In both, what a step brings in is not trusted: archives are rewritten entry by entry (tree.go) and unpacked by the
// child, so no path, link, device or owner in one can name anything of the host. The child's mounts live in its
// own mount namespace and vanish with it, whenever and however it ends. The root of a debian or ubuntu source is made by
// this host from those archives, in both. Layers of the two ways are never taken for each other.
//
// Where packages come from (mirror, proxy, certificates) is this host's own configuration of apt, pip, npm and
// go, read at build time. It is not part of a key: a definition names what it wants, not from where.
package template
