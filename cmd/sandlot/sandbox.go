package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"sandlot"
)

// sandboxCmd creates and uses sandboxes.
type sandboxCmd struct {
	remote `embed:""`

	Create  createCmd  `cmd:"" help:"Create a sandbox and print its id."`
	Ls      lsCmd      `cmd:"" aliases:"list" help:"List sandboxes."`
	Get     getCmd     `cmd:"" help:"Show one sandbox."`
	Exec    execCmd    `cmd:"" help:"Run a command in a sandbox."`
	Run     runCmd     `cmd:"" help:"Create a sandbox, run a command in it, delete it."`
	RunCode codeCmd    `cmd:"" help:"Run code in a sandbox as a notebook cell does, and print its results."`
	Shell   shellCmd   `cmd:"" help:"Open a terminal in a sandbox; Ctrl-] leaves it."`
	Cp      cpCmd      `cmd:"" help:"Copy files into or out of a sandbox."`
	Rm      rmCmd      `cmd:"" aliases:"delete" help:"Delete sandboxes."`
	Ps      psCmd      `cmd:"" help:"List a sandbox's processes."`
	Kill    killCmd    `cmd:"" help:"Signal a process of a sandbox."`
	Logs    logsCmd    `cmd:"" help:"Show what happened to a sandbox."`
	Metrics metricsCmd `cmd:"" help:"Show a sandbox's measurements."`
	Timeout timeoutCmd `cmd:"" help:"Set when a sandbox ends, counted from now."`
}

// sandboxView is a sandbox as the API shows it.
type sandboxView struct {
	ID           string            `json:"id"`
	Name         string            `json:"name"`
	Template     string            `json:"template"`
	State        sandlot.State     `json:"state"`
	Reason       string            `json:"reason"`
	Detail       string            `json:"detail"`
	Isolation    string            `json:"isolation"`
	VCPU         int               `json:"vcpu"`
	MemoryMB     int               `json:"memory_mb"`
	DiskGB       int               `json:"disk_gb"`
	IdleTimeoutS int               `json:"idle_timeout_s"`
	LifetimeS    int               `json:"lifetime_s"`
	Metadata     map[string]string `json:"metadata"`
	CreatedAt    time.Time         `json:"created_at"`
	ExpiresAt    time.Time         `json:"expires_at"`
	Timings      sandlot.Timings   `json:"timings"`
}

// createFlags are what a new sandbox can be asked to be.
type createFlags struct {
	Template    string        `short:"t" help:"The template." placeholder:"NAME"`
	VCPU        int           `name:"vcpu" help:"CPUs." placeholder:"N"`
	MemoryMB    int           `name:"memory-mb" help:"Memory in MiB." placeholder:"N"`
	DiskGB      int           `name:"disk-gb" help:"Disk in GiB." placeholder:"N"`
	IdleTimeout time.Duration `help:"End after this much idleness." placeholder:"5m"`
	Lifetime    time.Duration `help:"End after this long at most." placeholder:"1h"`
	Env         []string      `short:"e" sep:"none" help:"A variable of every command; K alone takes its value from here." placeholder:"K=V"`
	Metadata    []string      `short:"m" sep:"none" help:"A label, for listing." placeholder:"K=V"`
	Name        string        `help:"A name for people." placeholder:"NAME"`
	Isolation   string        `help:"How it is kept from the host: gvisor, microvm." placeholder:"KIND"`
	Egress      string        `help:"What it may reach: open, none, or allowed hosts with commas between." placeholder:"MODE"`
	Key         string        `name:"idempotency-key" help:"Make a repeated create answer with the first one's sandbox." placeholder:"KEY"`
}

type egressBody struct {
	Mode  string   `json:"mode"`
	Hosts []string `json:"hosts,omitempty"`
}

type createBody struct {
	Template     string            `json:"template,omitempty"`
	Name         string            `json:"name,omitempty"`
	VCPU         int               `json:"vcpu,omitempty"`
	MemoryMB     int               `json:"memory_mb,omitempty"`
	DiskGB       int               `json:"disk_gb,omitempty"`
	IdleTimeoutS int               `json:"idle_timeout_s,omitempty"`
	LifetimeS    int               `json:"lifetime_s,omitempty"`
	Env          map[string]string `json:"env,omitempty"`
	Metadata     map[string]string `json:"metadata,omitempty"`
	Egress       *egressBody       `json:"egress,omitempty"`
	Isolation    string            `json:"isolation,omitempty"`
}

func (f *createFlags) body() (b createBody, err error) {
	b = createBody{
		Template: f.Template, Name: f.Name, VCPU: f.VCPU, MemoryMB: f.MemoryMB, DiskGB: f.DiskGB, Isolation: f.Isolation,
	}
	if b.IdleTimeoutS, err = seconds("--idle-timeout", f.IdleTimeout); err != nil {
		return b, err
	}
	if b.LifetimeS, err = seconds("--lifetime", f.Lifetime); err != nil {
		return b, err
	}
	if b.Env, err = pairs("-e", f.Env, os.LookupEnv); err != nil {
		return b, err
	}
	if b.Metadata, err = pairs("-m", f.Metadata, nil); err != nil {
		return b, err
	}
	switch f.Egress {
	case "":
	case string(sandlot.EgressOpen), string(sandlot.EgressNone):
		b.Egress = &egressBody{Mode: f.Egress}
	default:
		b.Egress = &egressBody{Mode: string(sandlot.EgressAllowlist), Hosts: strings.Split(f.Egress, ",")}
	}
	return b, nil
}

// seconds is a duration as the API counts it. 0 means not given.
func seconds(flag string, d time.Duration) (int, error) {
	if d%time.Second != 0 || d < 0 {
		return 0, fmt.Errorf("%s counts in whole seconds", flag)
	}
	return int(d / time.Second), nil
}

// pairs reads K=V flags. K alone is looked up where that is allowed.
func pairs(flag string, list []string, lookup func(string) (string, bool)) (map[string]string, error) {
	if len(list) == 0 {
		return nil, nil
	}
	out := make(map[string]string, len(list))
	for _, kv := range list {
		k, v, ok := strings.Cut(kv, "=")
		if !ok && lookup != nil {
			v, ok = lookup(k)
		}
		if !ok || k == "" {
			return nil, fmt.Errorf("%s wants K=V, and got %q", flag, k)
		}
		out[k] = v
	}
	return out, nil
}

// create makes a sandbox.
func (f *createFlags) create(ctx context.Context, c *client) (sb sandboxView, raw json.RawMessage, err error) {
	b, err := f.body()
	if err != nil {
		return sb, nil, err
	}
	var h http.Header
	if f.Key != "" {
		h = http.Header{"Idempotency-Key": {f.Key}}
	}
	raw, err = c.callWith(ctx, http.MethodPost, c.sandboxes(), nil, h, b, &sb)
	return sb, raw, err
}

type createCmd struct{ createFlags }

// Run prints the id alone on stdout, so that a script can keep it.
func (x *createCmd) Run(ctx context.Context, s *streams, r *sandboxCmd) error {
	c, err := r.client()
	if err != nil {
		return err
	}
	sb, raw, err := x.create(ctx, c)
	if err != nil {
		return err
	}
	if r.JSON {
		return printJSON(s.out, raw)
	}
	fmt.Fprintf(s.err, "%s, %d vCPU, %d MB, %d GB, ready in %.1f ms (%s)\n",
		printable(sb.Template), sb.VCPU, sb.MemoryMB, sb.DiskGB, sb.Timings.TotalMS, printable(sb.Timings.Source))
	_, err = fmt.Fprintln(s.out, sb.ID)
	return err
}

type lsCmd struct {
	All      bool     `short:"a" help:"Also those that ended in the last day."`
	Metadata []string `short:"m" sep:"none" help:"Only those with this label." placeholder:"K=V"`
}

// list is one page, or all pages in one.
type list struct {
	Sandboxes []json.RawMessage `json:"sandboxes"`
	Next      string            `json:"next_cursor,omitempty"`
}

// sandboxList reads every page.
func (c *client) sandboxList(ctx context.Context, query url.Values) (list, error) {
	var all list
	for {
		var page list
		if _, err := c.call(ctx, http.MethodGet, c.sandboxes(), query, nil, &page); err != nil {
			return all, err
		}
		all.Sandboxes = append(all.Sandboxes, page.Sandboxes...)
		if page.Next == "" {
			return all, nil
		}
		if query == nil {
			query = url.Values{}
		}
		query.Set("cursor", page.Next)
	}
}

func (x *lsCmd) Run(ctx context.Context, s *streams, r *sandboxCmd) error {
	c, err := r.client()
	if err != nil {
		return err
	}
	q := url.Values{}
	if x.All {
		q.Set("all", "1")
	}
	labels, err := pairs("-m", x.Metadata, nil)
	if err != nil {
		return err
	}
	for k, v := range labels {
		q.Set("metadata."+k, v)
	}
	all, err := c.sandboxList(ctx, q)
	if err != nil {
		return err
	}
	if r.JSON {
		if all.Sandboxes == nil {
			all.Sandboxes = []json.RawMessage{}
		}
		raw, err := json.Marshal(all)
		if err != nil {
			return err
		}
		return printJSON(s.out, raw)
	}
	now := time.Now()
	rows := make([][]string, 0, len(all.Sandboxes))
	for _, raw := range all.Sandboxes {
		var sb sandboxView
		if err := json.Unmarshal(raw, &sb); err != nil {
			return fmt.Errorf("the answer cannot be read: %w", err)
		}
		state := string(sb.State)
		if sb.Reason != "" {
			state += " (" + sb.Reason + ")"
		}
		ends := ""
		if !sb.State.Terminal() {
			ends = "in " + span(sb.ExpiresAt.Sub(now))
		}
		rows = append(rows, []string{sb.ID, sb.Name, sb.Template, state, fmt.Sprintf("%d vCPU, %d MB", sb.VCPU, sb.MemoryMB), ago(sb.CreatedAt, now), ends})
	}
	return table(s.out, []string{"ID", "NAME", "TEMPLATE", "STATE", "SIZE", "CREATED", "ENDS"}, rows)
}

type getCmd struct {
	ID string `arg:"" help:"The sandbox."`
}

func (x *getCmd) Run(ctx context.Context, s *streams, r *sandboxCmd) error {
	c, err := r.client()
	if err != nil {
		return err
	}
	var sb sandboxView
	raw, err := c.call(ctx, http.MethodGet, c.sandboxes(x.ID), nil, nil, &sb)
	if err != nil {
		return err
	}
	if r.JSON {
		return printJSON(s.out, raw)
	}
	now := time.Now()
	rows := [][]string{
		{"id", sb.ID}, {"name", sb.Name}, {"template", sb.Template}, {"state", string(sb.State)},
		{"reason", strings.TrimSpace(sb.Reason + " " + sb.Detail)},
		{"isolation", sb.Isolation},
		{"size", fmt.Sprintf("%d vCPU, %d MB, %d GB", sb.VCPU, sb.MemoryMB, sb.DiskGB)},
		{"created", ago(sb.CreatedAt, now)},
		{"idle timeout", (time.Duration(sb.IdleTimeoutS) * time.Second).String()},
		{"lifetime", (time.Duration(sb.LifetimeS) * time.Second).String()},
	}
	for k, v := range sb.Metadata {
		rows = append(rows, []string{"label " + k, v})
	}
	return table(s.out, []string{"FIELD", "VALUE"}, rows)
}

type rmCmd struct {
	IDs []string `arg:"" optional:"" name:"id" help:"The sandboxes."`
	All bool     `help:"Every sandbox of the project."`
}

func (x *rmCmd) Run(ctx context.Context, s *streams, r *sandboxCmd) error {
	c, err := r.client()
	if err != nil {
		return err
	}
	ids := x.IDs
	switch {
	case x.All && len(ids) > 0:
		return errors.New("give ids or --all, not both")
	case !x.All && len(ids) == 0:
		return errors.New("say which: sandlot sandbox rm ID…, or --all")
	case x.All:
		all, err := c.sandboxList(ctx, nil)
		if err != nil {
			return err
		}
		for _, raw := range all.Sandboxes {
			var sb sandboxView
			if err := json.Unmarshal(raw, &sb); err != nil {
				return fmt.Errorf("the answer cannot be read: %w", err)
			}
			ids = append(ids, sb.ID)
		}
	}
	var errs []error
	for _, id := range ids {
		raw, err := c.call(ctx, http.MethodDelete, c.sandboxes(id), nil, nil, nil)
		switch {
		case err != nil:
			errs = append(errs, fmt.Errorf("%s: %w", printable(id), err))
			continue
		case r.JSON:
			err = printJSON(s.out, raw)
		default:
			_, err = fmt.Fprintln(s.out, id)
		}
		if err != nil {
			return err
		}
	}
	return errors.Join(errs...)
}

type timeoutCmd struct {
	ID       string        `arg:"" help:"The sandbox."`
	Idle     time.Duration `help:"End after this much idleness." placeholder:"5m"`
	Lifetime time.Duration `help:"End after this long at most, from now." placeholder:"1h"`
}

func (x *timeoutCmd) Run(ctx context.Context, s *streams, r *sandboxCmd) error {
	c, err := r.client()
	if err != nil {
		return err
	}
	var in struct {
		Idle     int `json:"idle_timeout_s,omitempty"`
		Lifetime int `json:"lifetime_s,omitempty"`
	}
	if in.Idle, err = seconds("--idle", x.Idle); err != nil {
		return err
	}
	if in.Lifetime, err = seconds("--lifetime", x.Lifetime); err != nil {
		return err
	}
	if in.Idle == 0 && in.Lifetime == 0 {
		return errors.New("say --idle, --lifetime or both")
	}
	var sb sandboxView
	raw, err := c.call(ctx, http.MethodPost, c.sandboxes(x.ID, "timeout"), nil, in, &sb)
	if err != nil {
		return err
	}
	if r.JSON {
		return printJSON(s.out, raw)
	}
	_, err = fmt.Fprintf(s.out, "ends after %s idle, in %s at most\n", time.Duration(sb.IdleTimeoutS)*time.Second, span(time.Until(sb.ExpiresAt)))
	return err
}
