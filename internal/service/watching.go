package service

import (
	"context"
	"time"

	"sandlot"
	"sandlot/internal/authz"
	"sandlot/internal/store"
)

// maxSamples of one answer: a day, an hour of it fine.
const maxSamples = 2000

// Metrics returns a sandbox's samples since a time, oldest first.
func (s *Service) Metrics(ctx context.Context, g authz.Grant, id sandlot.ID, since time.Time) ([]sandlot.Sample, error) {
	if _, err := s.Get(ctx, g, id); err != nil {
		return nil, err
	}
	return s.store.Samples(ctx, id, since, maxSamples)
}

// Logs returns a sandbox's events after a cursor, oldest first, and the next cursor.
func (s *Service) Logs(ctx context.Context, g authz.Grant, id sandlot.ID, after int64, limit int) ([]sandlot.Event, int64, error) {
	if _, err := s.Get(ctx, g, id); err != nil {
		return nil, 0, err
	}
	return s.store.Events(ctx, id, after, limit)
}

// Usage is a month's reserved time so far.
type Usage struct {
	From, To time.Time
	Plan     sandlot.Plan
	Org      sandlot.UsageTotal
	Project  sandlot.UsageTotal // of the grant
	Projects []store.ProjectUsage
}

// Usage sums the grant's organization month to date (UTC), and the grant's project within it.
func (s *Service) Usage(ctx context.Context, g authz.Grant) (Usage, error) {
	now := s.clock.Now()
	u := Usage{From: time.Date(now.Year(), now.Month(), 1, 0, 0, 0, 0, time.UTC), To: now, Plan: s.plan(g.Org)}
	all, err := s.store.Usage(ctx, g.Org.ID, u.From, now)
	if err != nil {
		return u, err
	}
	for _, p := range all {
		u.Org = u.Org.Add(p.Total)
		if g.Owns(p.Project) {
			u.Project = p.Total
		}
	}
	u.Projects = all
	return u, nil
}

// SandboxUsage is what a sandbox has reserved over its life so far.
func (s *Service) SandboxUsage(ctx context.Context, g authz.Grant, id sandlot.ID) (sandlot.UsageTotal, error) {
	if _, err := s.Get(ctx, g, id); err != nil {
		return sandlot.UsageTotal{}, err
	}
	return s.store.SandboxUsage(ctx, id, s.clock.Now())
}
