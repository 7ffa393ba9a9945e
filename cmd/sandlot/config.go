package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"time"

	"github.com/pelletier/go-toml/v2"

	"sandlot"
	"sandlot/internal/engine/gvisor"
	"sandlot/internal/engine/memory"
)

// config is the server's one configuration. A file (--config, TOML) sets what flags do not; unknown keys
// are errors.
type config struct {
	Listen    string `toml:"listen"`
	StateDir  string `toml:"state_dir"`
	Templates string `toml:"templates"` // the template store; "" for state_dir/templates
	Runsc     string `toml:"runsc"`     // "" for the one beside this binary
	Agent     string `toml:"agent"`     // "" for the one beside this binary
	User      string `toml:"user"`      // of the HTTP half; "" for "sandlot" where it exists, else uid 64738

	// Engine is "gvisor", or "memory": no isolation at all, for tests on loopback.
	Engine string `toml:"engine"`

	Pool            map[string]int `toml:"pool"` // template → machines kept ready; "" keys none
	MaxSandboxes    int            `toml:"max_sandboxes"`
	MaxMachines     int            `toml:"max_machines"`
	MemoryFloorMB   int64          `toml:"memory_floor_mb"`
	DiskFloorMB     int64          `toml:"disk_floor_mb"`
	DefaultTemplate string         `toml:"default_template"`

	// RatePerSecond and RateBurst bound each token's requests.
	RatePerSecond float64 `toml:"rate_per_second"`
	RateBurst     int     `toml:"rate_burst"`

	OpenMetrics bool `toml:"open_metrics"` // /metrics without a token

	StopTimeout duration `toml:"stop_timeout"` // for open streams at a stop
	LogLevel    string   `toml:"log_level"`    // debug, info, warn, error

	// AllowFailpoints lets the environment arm failpoints. For tests.
	AllowFailpoints bool `toml:"allow_failpoints"`
}

// duration reads "10s".
type duration time.Duration

func (d *duration) UnmarshalText(b []byte) error {
	v, err := time.ParseDuration(string(b))
	*d = duration(v)
	return err
}

func (d duration) MarshalText() ([]byte, error) { return []byte(time.Duration(d).String()), nil }

// fallbackUID is the HTTP half's uid where no user "sandlot" exists: above what distributions hand out, and
// below the uid ranges of sandboxes.
const fallbackUID = 64738

func defaultConfig() config {
	return config{
		Listen:      "127.0.0.1:8720",
		StateDir:    "/var/lib/sandlot",
		Engine:      gvisor.Name,
		StopTimeout: duration(10 * time.Second),
		LogLevel:    "info",
	}
}

// loadConfig reads file over the defaults.
func loadConfig(file string) (config, error) {
	c := defaultConfig()
	if file == "" {
		return c, nil
	}
	b, err := os.ReadFile(file)
	if err != nil {
		return c, err
	}
	d := toml.NewDecoder(bytes.NewReader(b)).DisallowUnknownFields()
	if err := d.Decode(&c); err != nil {
		var strict *toml.StrictMissingError
		if errors.As(err, &strict) {
			return c, fmt.Errorf("%s has unknown keys:\n%s", file, strict.String())
		}
		return c, fmt.Errorf("%s: %w", file, err)
	}
	return c, nil
}

// finish makes paths absolute, fills what depends on others, and checks.
func (c *config) finish() error {
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	beside := filepath.Dir(exe)
	if c.StateDir, err = filepath.Abs(c.StateDir); err != nil {
		return err
	}
	for p, def := range map[*string]string{
		&c.Templates: filepath.Join(c.StateDir, "templates"),
		&c.Runsc:     filepath.Join(beside, "runsc"),
		&c.Agent:     filepath.Join(beside, "sandlot-agent"),
	} {
		if *p == "" {
			*p = def
		}
		if *p, err = filepath.Abs(*p); err != nil {
			return err
		}
	}
	switch {
	case c.Engine != gvisor.Name && c.Engine != memory.Name:
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "engine %q: there are %q and %q", c.Engine, gvisor.Name, memory.Name)
	case c.Engine == gvisor.Name && os.Geteuid() != 0:
		return sandlot.Errorf(sandlot.CodeUnsupported, "the gvisor engine needs root: run `sandlot serve` with sudo")
	}
	for name, n := range c.Pool {
		if _, err := sandlot.ParseName(name); err != nil || n < 0 || n > 1000 {
			return sandlot.Errorf(sandlot.CodeInvalidRequest, "pool.%q = %d: a template's name and 0 to 1000 machines are wanted", name, n)
		}
	}
	return nil
}

func (c *config) nodeDir() string   { return filepath.Join(c.StateDir, "node") }
func (c *config) apiDir() string    { return filepath.Join(c.StateDir, "api") }
func (c *config) tokenFile() string { return filepath.Join(c.StateDir, "owner.token") }

// apiUID is the HTTP half's uid and gid.
func (c *config) apiUID() (uid, gid int, err error) {
	name := c.User
	if name == "" {
		name = "sandlot"
	}
	u, err := user.Lookup(name)
	if err != nil {
		if c.User != "" {
			return 0, 0, sandlot.Wrap(err, sandlot.CodeInvalidRequest, "there is no user %q for the HTTP half", name)
		}
		return fallbackUID, fallbackUID, nil
	}
	uid, err = strconv.Atoi(u.Uid)
	if err != nil {
		return 0, 0, err
	}
	gid, err = strconv.Atoi(u.Gid)
	if err == nil && uid == 0 {
		err = sandlot.Errorf(sandlot.CodeInvalidRequest, "the HTTP half must not be root")
	}
	return uid, gid, err
}
