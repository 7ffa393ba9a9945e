package httpapi

import (
	"context"
	"net/http"
	"time"

	"sandlot"
	"sandlot/internal/authz"
	"sandlot/internal/httpapi/route"
)

type statusBody struct {
	Status string `json:"status" enum:"ok"`
}

// system is what is about the server itself.
func (a *API) system() []*route.Operation {
	metrics := authz.Manage
	if a.open {
		metrics = 0
	}
	return []*route.Operation{
		{
			ID: "health", Method: http.MethodGet, Path: "/healthz", Tag: "server", Status: http.StatusOK, Response: statusBody{},
			Summary: "Whether the process answers",
			Handle:  func(q *route.Request) error { return q.JSON(statusBody{"ok"}) },
		},
		{
			ID: "ready", Method: http.MethodGet, Path: "/readyz", Tag: "server", Status: http.StatusOK, Response: statusBody{},
			Summary: "Whether sandboxes can be made: the node answers and was reconciled, the store can be written",
			Codes:   []sandlot.Code{sandlot.CodeUnavailable, sandlot.CodeTimeout},
			Handle: func(q *route.Request) error {
				if a.drain.Err() != nil {
					return route.ErrShuttingDown
				}
				ctx, cancel := context.WithTimeout(q.Context(), 5*time.Second)
				defer cancel()
				if err := a.service.Ready(ctx); err != nil {
					return err
				}
				return q.JSON(statusBody{"ok"})
			},
		},
		{
			ID: "prometheus", Method: http.MethodGet, Path: "/metrics", Tag: "server", Action: metrics, Status: http.StatusOK, Raw: "text/plain",
			Summary: "Measurements for Prometheus",
			Handle: func(q *route.Request) error {
				a.meter.handler.ServeHTTP(q.W, q.R)
				return nil
			},
		},
		{
			ID: "openapi", Method: http.MethodGet, Path: "/api/openapi.json", Tag: "server", Status: http.StatusOK, Raw: "application/json",
			Summary: "This document",
			Handle: func(q *route.Request) error {
				q.W.Header().Set("Content-Type", "application/json")
				_, err := q.W.Write(a.doc)
				return err
			},
		},
	}
}
