package service

import (
	"github.com/prometheus/client_golang/prometheus"

	"sandlot"
)

// Meter counts what the service does. Labels are closed sets: no id, name or path is ever one.
type Meter struct {
	createSeconds *prometheus.HistogramVec
	refusals      *prometheus.CounterVec
	ends          *prometheus.CounterVec
	alive         prometheus.GaugeFunc
}

func newMeter(alive func() int) Meter {
	return Meter{
		createSeconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "sandlot_create_seconds", Help: "Time of successful creates, from receipt of the request.",
			Buckets: []float64{.002, .004, .008, .015, .03, .06, .125, .25, .5, 1, 2, 4, 8},
		}, []string{"source"}),
		refusals: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "sandlot_create_refused_total", Help: "Creates refused for lack of room, by code.",
		}, []string{"code"}),
		ends: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "sandlot_sandboxes_ended_total", Help: "Sandboxes that ended, by reason.",
		}, []string{"reason"}),
		alive: prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "sandlot_sandboxes_alive", Help: "Sandboxes that hold a place of the quota.",
		}, func() float64 { return float64(alive()) }),
	}
}

// Collectors are what /metrics shows of the service.
func (s *Service) Collectors() []prometheus.Collector {
	return []prometheus.Collector{s.meter.createSeconds, s.meter.refusals, s.meter.ends, s.meter.alive}
}

func (m *Meter) created(sb sandlot.Sandbox) {
	source := sb.Timings.Source
	switch source {
	case "pool", "snapshot", "cold":
	default:
		source = "other"
	}
	m.createSeconds.WithLabelValues(source).Observe(sb.Timings.TotalMS / 1000)
}

func (m *Meter) refused(code sandlot.Code) { m.refusals.WithLabelValues(string(code)).Inc() }

func (m *Meter) ended(sb sandlot.Sandbox) { m.ends.WithLabelValues(string(sb.Reason)).Inc() }
