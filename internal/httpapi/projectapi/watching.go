package projectapi

import (
	"net/http"
	"strconv"
	"time"

	"sandlot"
	"sandlot/internal/authz"
	"sandlot/internal/httpapi/route"
)

type metricsBody struct {
	Samples []sandlot.Sample `json:"samples" doc:"Each 10 s, one a minute after an hour; oldest first"`
	Disk    diskBody         `json:"disk"`
}

type diskBody struct {
	UsedBytes  int64 `json:"used_bytes"`
	TotalBytes int64 `json:"total_bytes"`
}

type logsBody struct {
	Events []sandlot.Event `json:"events" doc:"Oldest first; the last 1,000 are kept"`
	Next   string          `json:"next_cursor" doc:"Pass it as cursor to get what happens from now on"`
}

type usageBody struct {
	From         time.Time      `json:"from"`
	To           time.Time      `json:"to"`
	Plan         planBody       `json:"plan"`
	Project      amountBody     `json:"project"`
	Organization amountBody     `json:"organization"`
	Projects     []projectUsage `json:"projects"`
	Cost         costBody       `json:"cost"`
}

type planBody struct {
	Name      string     `json:"name"`
	Included  amountBody `json:"included"`
	HardLimit bool       `json:"hard_limit" doc:"Beyond the allowance: refused instead of billed"`
}

type amountBody struct {
	VCPUHours float64 `json:"vcpu_hours" doc:"Reserved vCPUs times running time"`
	GBHours   float64 `json:"gb_hours" doc:"Reserved memory times running time"`
	Sandboxes int64   `json:"sandboxes,omitempty"`
}

type projectUsage struct {
	Ref string `json:"ref"`
	amountBody
}

type costBody struct {
	Currency string  `json:"currency" enum:"PLN"`
	VCPU     float64 `json:"vcpu"`
	Memory   float64 `json:"memory"`
	Total    float64 `json:"total" doc:"Net, of the organization, beyond the allowance"`
}

func (a api) watching() []*route.Operation {
	return []*route.Operation{
		{
			ID: "getUsage", Method: http.MethodGet, Path: base + "/usage", Tag: "usage", Action: authz.Read, Response: usageBody{},
			Summary: "This calendar month (UTC) so far, against the plan's allowance", Handle: a.usage,
		},
		{
			ID: "getMetrics", Method: http.MethodGet, Path: base + "/{id}/metrics", Tag: "sandboxes", Action: authz.Read, Response: metricsBody{},
			Summary: "CPU, memory, network, processes and disk over time",
			Params:  []route.Param{{Name: "since_s", Type: "integer", Help: "Only the last so many seconds"}},
			Handle:  a.metrics,
		},
		{
			ID: "getLogs", Method: http.MethodGet, Path: base + "/{id}/logs", Tag: "sandboxes", Action: authz.Read, Response: logsBody{},
			Summary: "What happened to a sandbox",
			Params: []route.Param{
				{Name: "cursor", Help: "next_cursor of an earlier answer"},
				{Name: "limit", Type: "integer", Help: "1 to 1000, default 1000"},
			},
			Handle: a.logs,
		},
	}
}

func orEmpty[T any](s []T) []T {
	if s == nil {
		return []T{}
	}
	return s
}

func (a api) usage(q *route.Request) error {
	u, err := a.service.Usage(q.Context(), q.Grant)
	if err != nil {
		return err
	}
	amount := func(t sandlot.UsageTotal) amountBody { return amountBody{t.VCPUHours(), t.GBHours(), t.Started} }
	out := usageBody{
		From: u.From, To: u.To, Project: amount(u.Project), Organization: amount(u.Org), Projects: []projectUsage{},
		Plan: planBody{Name: u.Plan.Name, Included: amountBody{VCPUHours: u.Plan.IncludedVCPUHours, GBHours: u.Plan.IncludedGBHours}, HardLimit: u.Plan.HardLimit},
		Cost: costBody{
			Currency: "PLN",
			VCPU:     max(0, u.Org.VCPUHours()-u.Plan.IncludedVCPUHours) * u.Plan.VCPUHourPLN,
			Memory:   max(0, u.Org.GBHours()-u.Plan.IncludedGBHours) * u.Plan.GBHourPLN,
		},
	}
	out.Cost.Total = out.Cost.VCPU + out.Cost.Memory
	for _, p := range u.Projects {
		if q.Grant.ReachesProject(sandlot.Project{ID: p.Project, Org: q.Grant.Org.ID}) {
			out.Projects = append(out.Projects, projectUsage{p.Ref, amount(p.Total)})
		}
	}
	return q.JSON(out)
}

func (a api) metrics(q *route.Request) error {
	id, err := q.SandboxID()
	if err != nil {
		return err
	}
	back, err := q.QueryInt("since_s", 0, 1, 30*86400)
	if err != nil {
		return err
	}
	var since time.Time
	if back > 0 {
		since = time.Now().Add(-time.Duration(back) * time.Second)
	}
	samples, err := a.service.Metrics(q.Context(), q.Grant, id, since)
	if err != nil {
		return err
	}
	out := metricsBody{Samples: orEmpty(samples)}
	if n := len(samples); n > 0 {
		out.Disk = diskBody{samples[n-1].DiskUsed, samples[n-1].DiskTotal}
	}
	return q.JSON(out)
}

func (a api) logs(q *route.Request) error {
	id, err := q.SandboxID()
	if err != nil {
		return err
	}
	limit, err := q.QueryInt("limit", 1000, 1, 1000)
	if err != nil {
		return err
	}
	after, err := q.QueryInt("cursor", 0, 0, 1<<62)
	if err != nil {
		return err
	}
	events, last, err := a.service.Logs(q.Context(), q.Grant, id, after, int(limit))
	if err != nil {
		return err
	}
	return q.JSON(logsBody{orEmpty(events), strconv.FormatInt(last, 10)})
}
