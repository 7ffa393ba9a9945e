package service

import (
	"strings"
	"time"
	"unicode/utf8"

	"sandlot"
	"sandlot/internal/node"
)

// CreateRequest asks for a sandbox. Zero fields mean the default.
type CreateRequest struct {
	Template    string
	Name        string
	VCPU        int
	MemoryMB    int
	DiskGB      int
	IdleTimeout time.Duration
	Lifetime    time.Duration
	Env         map[string]string
	Metadata    map[string]string
	Egress      sandlot.Egress
	Preview     string
	Isolation   sandlot.Isolation

	Key      string // Idempotency-Key, or empty
	BodyHash [32]byte
	Received time.Time // when the request came in, with its monotonic part
}

func invalid(format string, args ...any) *sandlot.Error {
	return sandlot.Errorf(sandlot.CodeInvalidRequest, format, args...)
}

// bounded is value, or its default when it is zero; an error says the bounds that plan and product set.
func bounded(field string, value, deflt, low, high int) (int, error) {
	if value == 0 {
		value = min(deflt, high)
	}
	if value < low || value > high {
		return 0, invalid("%s must be between %d and %d", field, low, high).With("field", field)
	}
	return value, nil
}

func boundedTime(field string, value, deflt, low, high time.Duration) (time.Duration, error) {
	s, err := bounded(field, int(value/time.Second), int(deflt/time.Second), int(low/time.Second), int(high/time.Second))
	return time.Duration(s) * time.Second, err
}

// validate fills in defaults and refuses what cannot be.
func (r *CreateRequest) validate(t node.TemplateInfo, plan sandlot.Plan) (err error) {
	maxVCPU, maxMemory, maxLife := limit(plan.MaxVCPU, sandlot.MaxVCPU), limit(plan.MaxMemoryMB, sandlot.MaxMemoryMB), plan.MaxLifetime
	if maxLife == 0 {
		maxLife = sandlot.MaxLifetime
	}
	size := t.Size
	if size == (sandlot.Size{}) {
		size = sandlot.DefaultSize
	}
	if r.VCPU, err = bounded("vcpu", r.VCPU, size.VCPU, sandlot.MinVCPU, maxVCPU); err != nil {
		return err
	}
	if r.MemoryMB, err = bounded("memory_mb", r.MemoryMB, size.MemoryMB, sandlot.MinMemoryMB, maxMemory); err != nil {
		return err
	}
	if r.DiskGB, err = bounded("disk_gb", r.DiskGB, size.DiskGB, sandlot.MinDiskGB, sandlot.MaxDiskGB); err != nil {
		return err
	}
	if r.IdleTimeout, err = boundedTime("idle_timeout_s", r.IdleTimeout, sandlot.DefaultIdleTimeout, sandlot.MinIdleTimeout, sandlot.MaxIdleTimeout); err != nil {
		return err
	}
	if r.Lifetime, err = boundedTime("lifetime_s", r.Lifetime, sandlot.DefaultLifetime, sandlot.MinLifetime, maxLife); err != nil {
		return err
	}
	if r.Name != "" {
		if _, err := sandlot.ParseName(r.Name); err != nil {
			return invalid("name: %s", message(err)).With("field", "name")
		}
	}
	if err := validEnv("env", r.Env); err != nil {
		return err
	}
	if err := validMetadata(r.Metadata); err != nil {
		return err
	}
	switch r.Preview {
	case "":
		r.Preview = "public"
	case "public", "private":
	default:
		return invalid(`preview must be "public" or "private"`).With("field", "preview")
	}
	switch r.Isolation {
	case "", sandlot.IsolationGVisor, sandlot.IsolationMicroVM, sandlot.IsolationNone: // the node says what it can do
	default:
		return invalid(`isolation must be "gvisor" or "microvm"`).With("field", "isolation")
	}
	return r.validEgress()
}

func (r *CreateRequest) validEgress() error {
	if len(r.Egress.Hosts) > 0 && r.Egress.Mode == "" {
		r.Egress.Mode = sandlot.EgressAllowlist
	}
	switch r.Egress.Mode {
	case "":
		r.Egress.Mode = sandlot.EgressOpen
	case sandlot.EgressOpen, sandlot.EgressNone, sandlot.EgressAllowlist:
	default:
		return invalid(`egress.mode must be "open", "allowlist" or "none"`).With("field", "egress.mode")
	}
	if r.Egress.Mode != sandlot.EgressAllowlist && len(r.Egress.Hosts) > 0 {
		return invalid("egress.hosts goes with mode allowlist").With("field", "egress.hosts")
	}
	if len(r.Egress.Hosts) > 1000 {
		return invalid("egress.hosts has at most 1000 entries").With("field", "egress.hosts")
	}
	for i, h := range r.Egress.Hosts {
		if h == "" || len(h) > 255 || strings.ContainsFunc(h, notHost) {
			return invalid("egress.hosts[%d] is not a hostname, an address or a CIDR", i).With("field", "egress.hosts")
		}
	}
	return nil
}

func notHost(c rune) bool {
	ok := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.ContainsRune(".-_*:/", c)
	return !ok
}

func limit(plan, product int) int {
	if plan == 0 {
		return product
	}
	return min(plan, product)
}

// validEnv checks variables: names as a shell could set them, values without NUL, both bounded.
func validEnv(field string, env map[string]string) error {
	if len(env) > sandlot.MaxEnvVars {
		return invalid("%s has at most %d variables", field, sandlot.MaxEnvVars).With("field", field)
	}
	total := 0
	for name, value := range env {
		total += len(name) + len(value)
		if !envName(name) {
			return invalid("%s: a name has letters, digits and '_' and does not start with a digit", field).With("field", field)
		}
		if strings.IndexByte(value, 0) >= 0 {
			return invalid("%s: the value of %s has a NUL byte", field, name).With("field", field)
		}
	}
	if total > sandlot.MaxEnvBytes {
		return invalid("%s has %d bytes, the limit is %d", field, total, sandlot.MaxEnvBytes).With("field", field)
	}
	return nil
}

func envName(s string) bool {
	if s == "" || len(s) > 255 || s[0] >= '0' && s[0] <= '9' {
		return false
	}
	for i := range len(s) {
		c := s[i]
		if c != '_' && (c < '0' || c > '9') && (c < 'A' || c > 'Z') && (c < 'a' || c > 'z') {
			return false
		}
	}
	return true
}

func validMetadata(m map[string]string) error {
	if len(m) > sandlot.MaxMetadataKeys {
		return invalid("metadata has at most %d keys", sandlot.MaxMetadataKeys).With("field", "metadata")
	}
	total := 0
	for k, v := range m {
		if k == "" || len(k) > 255 {
			return invalid("metadata: a key has 1 to 255 bytes").With("field", "metadata")
		}
		if strings.IndexByte(k, 0) >= 0 || strings.IndexByte(v, 0) >= 0 {
			return invalid("metadata: keys and values have no NUL byte").With("field", "metadata")
		}
		total += len(k) + len(v)
	}
	if total > sandlot.MaxMetadataSize {
		return invalid("metadata has %d bytes, the limit is %d", total, sandlot.MaxMetadataSize).With("field", "metadata")
	}
	return nil
}

// validPath checks a path of the sandbox's filesystem. Relative ones are below /workspace; absolute ones
// are the sandbox's own, where its user's rights decide. ".." is refused: nobody needs it, and what a path
// with it means differs between readers.
func validPath(field, p string) error {
	fail := func(format string, args ...any) error { return invalid(field+" "+format, args...).With("field", field) }
	switch {
	case p == "":
		return fail("is missing")
	case len(p) > sandlot.MaxPathBytes:
		return fail("has more than %d bytes", sandlot.MaxPathBytes)
	case !utf8.ValidString(p):
		return fail("is not valid UTF-8")
	case strings.IndexByte(p, 0) >= 0:
		return fail("has a NUL byte")
	}
	for part := range strings.SplitSeq(p, "/") {
		switch {
		case len(part) > sandlot.MaxNameBytes:
			return fail("has a component of more than %d bytes", sandlot.MaxNameBytes)
		case part == "..":
			return fail(`has a ".." component: use an absolute path`)
		}
	}
	return nil
}

// message is an error's text for people, without its code.
func message(err error) string {
	var e *sandlot.Error
	if asError(err, &e) {
		return e.Message
	}
	return err.Error()
}
