package sandlot

import "time"

// Defaults and limits that the documents promise. What an operator may change lives in the configuration;
// what is here is the product.
const (
	DefaultIdleTimeout = 300 * time.Second
	MinIdleTimeout     = 30 * time.Second
	MaxIdleTimeout     = 24 * time.Hour
	DefaultLifetime    = time.Hour
	MinLifetime        = 30 * time.Second
	MaxLifetime        = 24 * time.Hour

	DefaultExecTimeout = 60 * time.Second
	MaxExecTimeout     = 24 * time.Hour

	MaxFileBytes    = 256 << 20 // one file through files/content, and one archive's content
	MaxBodyBytes    = 1 << 20   // a JSON body
	MaxOutputBytes  = 10 << 20  // kept of each of stdout and stderr of a synchronous exec
	MaxEnvVars      = 1000
	MaxEnvBytes     = 256 << 10 // all names and values together
	MaxArgvBytes    = 1 << 20
	MaxPathBytes    = 4096
	MaxNameBytes    = 255 // one path component
	MaxMetadataKeys = 64
	MaxMetadataSize = 16 << 10
	MaxStdinBytes   = 768 << 10 // inside the JSON body of exec

	SampleEvery      = 10 * time.Second
	ActiveCPUPercent = 10 // of one vCPU, within a sample: counts as activity

	MaxProcesses = 1024 // RLIMIT_NPROC of user code inside a sandbox
)
