package main

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"sandlot"
)

type psCmd struct {
	ID  string `arg:"" help:"The sandbox."`
	All bool   `short:"a" help:"Also those that have ended."`
}

func (x *psCmd) Run(ctx context.Context, s *streams, r *sandboxCmd) error {
	c, err := r.client()
	if err != nil {
		return err
	}
	var answer struct {
		Processes []struct {
			PID       int       `json:"pid"`
			Argv      []string  `json:"argv"`
			User      string    `json:"user"`
			StartedAt time.Time `json:"started_at"`
			Running   bool      `json:"running"`
			ExitCode  *int      `json:"exit_code"`
			LogPath   string    `json:"log_path"`
		} `json:"processes"`
	}
	raw, err := c.call(ctx, http.MethodGet, c.sandboxes(x.ID, "processes"), nil, nil, &answer)
	if err != nil {
		return err
	}
	if r.JSON {
		return printJSON(s.out, raw)
	}
	now := time.Now()
	var rows [][]string
	for _, p := range answer.Processes {
		state := "running"
		if !p.Running {
			if !x.All {
				continue
			}
			state = "ended"
			if p.ExitCode != nil {
				state = "exit " + strconv.Itoa(*p.ExitCode)
			}
		}
		argv := []rune(strings.Join(p.Argv, " "))
		if len(argv) > 60 {
			argv = append(argv[:59], '…')
		}
		rows = append(rows, []string{strconv.Itoa(p.PID), p.User, state, ago(p.StartedAt, now), string(argv), p.LogPath})
	}
	return table(s.out, []string{"PID", "USER", "STATE", "STARTED", "COMMAND", "LOG"}, rows)
}

type killCmd struct {
	ID     string `arg:"" help:"The sandbox."`
	PID    int    `arg:"" name:"pid" help:"The process, as ps shows it."`
	Signal string `short:"s" default:"TERM" help:"A name or a number." placeholder:"SIG"`
}

func (x *killCmd) Run(ctx context.Context, r *sandboxCmd) error {
	c, err := r.client()
	if err != nil {
		return err
	}
	_, err = c.call(ctx, http.MethodPost, c.sandboxes(x.ID, "processes", strconv.Itoa(x.PID), "signal"), nil, map[string]string{"signal": x.Signal}, nil)
	return err
}

type logsCmd struct {
	ID    string `arg:"" help:"The sandbox."`
	Limit int    `placeholder:"N" help:"At most so many events, the oldest first."`
}

func (x *logsCmd) Run(ctx context.Context, s *streams, r *sandboxCmd) error {
	c, err := r.client()
	if err != nil {
		return err
	}
	q := url.Values{}
	if x.Limit > 0 {
		q.Set("limit", strconv.Itoa(x.Limit))
	}
	var answer struct {
		Events []sandlot.Event `json:"events"`
	}
	raw, err := c.call(ctx, http.MethodGet, c.sandboxes(x.ID, "logs"), q, nil, &answer)
	if err != nil {
		return err
	}
	if r.JSON {
		return printJSON(s.out, raw)
	}
	rows := make([][]string, 0, len(answer.Events))
	for _, e := range answer.Events {
		more := make([]string, 0, len(e.Fields))
		for _, k := range slices.Sorted(maps.Keys(e.Fields)) {
			v, err := json.Marshal(e.Fields[k])
			if err != nil {
				return err
			}
			more = append(more, k+"="+strings.Trim(string(v), `"`))
		}
		rows = append(rows, []string{e.At.Local().Format(time.DateTime), e.Kind, e.Name, strings.TrimSpace(e.Message + " " + strings.Join(more, " "))})
	}
	return table(s.out, []string{"AT", "TYPE", "EVENT", "DETAIL"}, rows)
}

type metricsCmd struct {
	ID    string        `arg:"" help:"The sandbox."`
	Since time.Duration `placeholder:"10m" help:"Only the last so much time."`
}

func (x *metricsCmd) Run(ctx context.Context, s *streams, r *sandboxCmd) error {
	c, err := r.client()
	if err != nil {
		return err
	}
	q := url.Values{}
	since, err := seconds("--since", x.Since)
	if err != nil {
		return err
	}
	if since > 0 {
		q.Set("since_s", strconv.Itoa(since))
	}
	var answer struct {
		Samples []sandlot.Sample `json:"samples"`
	}
	raw, err := c.call(ctx, http.MethodGet, c.sandboxes(x.ID, "metrics"), q, nil, &answer)
	if err != nil {
		return err
	}
	if r.JSON {
		return printJSON(s.out, raw)
	}
	rows := make([][]string, 0, len(answer.Samples))
	for _, m := range answer.Samples {
		rows = append(rows, []string{
			m.At.Local().Format(time.TimeOnly), fmt.Sprintf("%.0f%%", m.CPUPercent), (time.Duration(m.CPUMS) * time.Millisecond).String(),
			size(m.MemoryBytes), strconv.Itoa(m.Processes), size(m.DiskUsed) + " of " + size(m.DiskTotal),
		})
	}
	return table(s.out, []string{"AT", "CPU", "CPU TIME", "MEMORY", "PROCESSES", "DISK"}, rows)
}
