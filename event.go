package sandlot

import "time"

// Event is one line of a sandbox's log.
type Event struct {
	At      time.Time      `json:"at"`
	Sandbox ID             `json:"-"`
	Kind    string         `json:"type"` // "lifecycle", "egress", "kernel", "abuse"
	Name    string         `json:"event"`
	Message string         `json:"message,omitempty"`
	Fields  map[string]any `json:"fields,omitempty"`
}
