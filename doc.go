// Package sandlot holds the nouns of Sandlot, one file per noun, standard library only.
//
// The map, from the outside in; data flows one way, down, and events come back up:
//
//	cmd/sandlot            the binary: server, CLI
//	internal/httpapi       HTTP: decode, bound, encode; one thin translation per dialect
//	internal/authz         who may do what; the only place that compares tenants
//	internal/service       the use cases: quotas, lifecycle, activity, ledger
//	internal/store         what is remembered (SQLite)
//	internal/guest         the host's client of the agent protocol
//	internal/node          the host: pool, adopt and reap, sampling; the half that is root
//	internal/engine        what isolates a sandbox (gvisor, memory)
//	internal/wire          the words that guest and agent share
//	internal/agent         the first process inside each sandbox (cmd/sandlot-agent)
//	internal/template      builds and keeps the read-only root images
//
// Import direction: root ← internal ← cmd. Only httpapi knows HTTP statuses, only engine/* and hostos
// make system calls about machines, only authz compares tenants.
package sandlot
