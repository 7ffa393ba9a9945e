package httpapi

import (
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// meter measures requests. Its labels are the table's operation ids and status classes: bounded whatever
// callers send.
type meter struct {
	seconds  *prometheus.HistogramVec
	registry *prometheus.Registry
	handler  http.Handler
}

func newMeter(more []prometheus.Collector) *meter {
	m := &meter{
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "sandlot_http_request_seconds", Help: "Time of requests by operation and class of status.",
			Buckets: []float64{.001, .004, .016, .064, .25, 1, 4, 16, 64},
		}, []string{"op", "status"}),
		registry: prometheus.NewRegistry(),
	}
	m.registry.MustRegister(m.seconds, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	m.registry.MustRegister(more...)
	m.handler = promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{})
	return m
}

func (m *meter) observe(op string, status int, took time.Duration) {
	class := "none"
	if status >= 100 && status < 600 {
		class = string(rune('0'+status/100)) + "xx"
	}
	m.seconds.WithLabelValues(op, class).Observe(took.Seconds())
}
