// Package template builds templates from their text definitions and keeps them in a store.
//
// A definition is a folder with a template.toml: where the root comes from, then ordered steps. Each step
// makes one layer, kept in a cache under a key of all that went into it: the builder's version, the step,
// the content of its input files, and the layer below. The stacked layers become one read-only EROFS image,
// addressed by its sha256, that every engine uses unchanged.
//
// # What is trusted
//
// A definition is trusted like the program that builds it. What a step brings in is not: archives are
// rewritten entry by entry (tree.go; layers of images: ociimage.go, layers.go) and unpacked by a child process whose root is the image (child.go), so
// no path, link, device or owner in one can name anything of the host. The child's mounts live in its own
// mount namespace and vanish with it, whenever and however it ends.
//
// For now, steps that run programs (apt, pip's install, run) run them on this host's kernel: own mount,
// process, IPC and host-name namespaces, own network namespace except for apt, the image as root directory, no
// device files, and no capability that leads out of there. That keeps accidents and archives in, not a
// determined program: build only definitions that you would run as root. Building inside a sandbox, for
// definitions from strangers, replaces child.go's exec action when it comes.
//
// Where packages come from (mirror, proxy, certificates) is this host's own configuration of apt, pip, npm and
// go, read at build time. It is not part of a key: a definition names what it wants, not from where.
package template
