package sandlot

// EgressMode is what a sandbox may reach.
type EgressMode string

const (
	EgressOpen      EgressMode = "open"
	EgressAllowlist EgressMode = "allowlist"
	EgressNone      EgressMode = "none"
)

// Egress is a sandbox's outbound policy.
type Egress struct {
	Mode  EgressMode `json:"mode"`
	Hosts []string   `json:"hosts,omitempty"` // names, "*." wildcards, IPs, CIDRs; allowlist only
}
