package service

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"maps"
	"time"

	"sandlot"
	"sandlot/internal/authz"
	"sandlot/internal/failpoint"
	"sandlot/internal/node"
	"sandlot/internal/store"
	"sandlot/internal/wire"
)

var _ = failpoint.Declare("service.create.reserved", "service.create.claimed", "service.create.identified",
	"service.create.acknowledged")

// undoTimeout bounds the removal of a machine whose create failed.
const undoTimeout = 30 * time.Second

// Created is a new sandbox. PreviewToken is set for private previews: the only time it is shown.
type Created struct {
	Sandbox      sandlot.Sandbox
	PreviewToken sandlot.Secret
	Replayed     bool // the answer to an earlier request with this Idempotency-Key
}

// Create makes a sandbox that runs.
//
// On success it is acknowledged: row, first events, usage interval and idempotency key are stored. On
// failure nothing is left: the machine is destroyed and the quota's place given back; after a crash of
// this process in between, Start has the node remove the machine, because no row names it.
//
// Codes: invalid_request, not_found (template), unsupported, quota_exceeded, capacity, conflict, timeout,
// unavailable.
func (s *Service) Create(ctx context.Context, g authz.Grant, req CreateRequest) (Created, error) {
	if req.Received.IsZero() {
		req.Received = time.Now()
	}
	if s.closing.Load() || !s.ready.Load() {
		return Created{}, errNotReady
	}
	plan := s.plan(g.Org)
	if req.Template == "" {
		req.Template = s.deflt
	}
	t, err := s.template(ctx, g.Project.ID, req.Template)
	if err != nil {
		return Created{}, err
	}
	if err := req.validate(t, plan); err != nil {
		return Created{}, err
	}
	if req.Key != "" {
		return s.once(ctx, g, req, func() (Created, error) { return s.create(ctx, g, req, plan) })
	}
	return s.create(ctx, g, req, plan)
}

func (s *Service) create(ctx context.Context, g authz.Grant, req CreateRequest, plan sandlot.Plan) (_ Created, err error) {
	if err := s.allowance(ctx, g.Org, plan); err != nil {
		return Created{}, err
	}
	if err := s.quota.reserve(g.Org.ID, plan); err != nil {
		s.meter.refused(sandlot.ErrorCode(err))
		return Created{}, err
	}
	undo := undoStack{func(context.Context) { s.quota.release(g.Org.ID) }}
	defer func() { undo.run(ctx) }()
	if err := failpoint.Hit(ctx, "service.create.reserved"); err != nil {
		return Created{}, err
	}

	l, made, err := s.claim(ctx, g, req)
	if err != nil {
		return Created{}, err
	}
	undo = append(undo, func(ctx context.Context) {
		if err := s.node.Destroy(ctx, made.ID); err != nil {
			s.log.Error("a machine could not be removed after a failed create", "sandbox", made.ID, "error", err)
		}
	}, func(context.Context) { s.forget(l) })
	if err := failpoint.Hit(ctx, "service.create.claimed"); err != nil {
		return Created{}, err
	}

	identified := time.Now()
	if err := l.guest.Identify(ctx, identity(made, g, req)); err != nil {
		return Created{}, sandlot.Wrap(err, sandlot.ErrorCode(err), "the new machine did not take its identity")
	}
	if err := failpoint.Hit(ctx, "service.create.identified"); err != nil {
		return Created{}, err
	}

	l.mu.Lock()
	l.sb.Timings.AgentMS += millis(time.Since(identified))
	l.sb.Timings.TotalMS = millis(time.Since(req.Received))
	sb := l.sb
	l.mu.Unlock()
	sb.State = sandlot.StateRunning
	now := sb.CreatedAt
	running, closed := l.event(now, "running", ""), l.event(now, "network_closed", "the network is closed: this version has no guard, so the egress policy is kept but nothing is reachable")
	running.Fields = map[string]any{"source": sb.Timings.Source, "engine": sb.Engine}
	closed.Kind = "egress"
	commit, cancel := detached(ctx, 10*time.Second) // a commit that is interrupted may have happened
	defer cancel()
	if err := s.store.InsertSandbox(commit, store.Creation{
		Sandbox: sb, Org: g.Org.ID, Events: []sandlot.Event{running, closed}, Key: req.Key, BodyHash: req.BodyHash,
		Interval: sandlot.UsageInterval{
			Sandbox: sb.ID, Project: sb.Project, Org: g.Org.ID, VCPU: sb.Size.VCPU, MemoryMB: sb.Size.MemoryMB,
			State: sandlot.StateRunning, Start: now,
		},
	}); err != nil {
		// A commit that was not answered may have happened; its row must not say "running" for a machine
		// that the undo destroys.
		_, _ = s.store.EndSandbox(commit, store.End{
			ID: sb.ID, State: sandlot.StateFailed, Reason: sandlot.ReasonCrashed, Detail: "the create was undone", At: now, Billed: now,
			Event: l.event(now, "failed", "the create was undone"),
		})
		return Created{}, err
	}
	undo = nil // acknowledged: from here it is the lifecycle's

	l.mu.Lock()
	l.sb.State, l.expected = sandlot.StateRunning, false
	l.sb.Timings.TotalMS = millis(time.Since(req.Received))
	sb, exited := l.sb, l.exited
	l.mu.Unlock()
	if exited != nil {
		s.crashed(commit, l, *exited)
		return Created{}, sandlot.Errorf(sandlot.CodeSandboxUnhealthy, "the new machine died at once").With("id", string(sb.ID))
	}
	at, _ := l.deadline()
	s.arm(at)
	s.meter.created(sb)
	if err := failpoint.Hit(ctx, "service.create.acknowledged"); err != nil {
		return Created{}, err
	}
	return Created{Sandbox: sb, PreviewToken: s.previewToken(sb)}, nil
}

// claim asks the node for a machine and makes it known here, so that Reconcile keeps it.
func (s *Service) claim(ctx context.Context, g authz.Grant, req CreateRequest) (*live, node.Created, error) {
	s.createGate.RLock()
	defer s.createGate.RUnlock()
	made, err := s.node.Create(ctx, node.CreateRequest{
		Template: req.Template, Project: g.Project.ID, Isolation: req.Isolation,
		Size: sandlot.Size{VCPU: req.VCPU, MemoryMB: req.MemoryMB, DiskGB: req.DiskGB},
	})
	if err != nil {
		if made.ID != "" { // it failed after a machine was made
			undoStack{func(ctx context.Context) { _ = s.node.Destroy(ctx, made.ID) }}.run(ctx)
		}
		return nil, made, err
	}
	now := s.clock.Now().Truncate(time.Millisecond)
	l := s.newLive(sandlot.Sandbox{
		ID: made.ID, Project: g.Project.ID, CreatedBy: g.Token.ID, Name: req.Name, Template: made.Template.Name,
		TemplateDigest: made.Template.Digest, Isolation: made.Isolation, Engine: made.Engine, Size: made.Size,
		State: sandlot.StateStarting, IdleTimeout: req.IdleTimeout, Lifetime: req.Lifetime, Env: names(req.Env),
		Metadata: req.Metadata, Egress: req.Egress, Preview: req.Preview, CreatedAt: now, ExpiresAt: now.Add(req.Lifetime),
		LastActiveAt: now, Timings: made.Timings,
	}, g.Org.ID)
	l.expected = true
	s.mu.Lock()
	s.live[made.ID] = l
	s.mu.Unlock()
	return l, made, nil
}

// forget drops a record and its connections.
func (s *Service) forget(l *live) {
	s.mu.Lock()
	delete(s.live, l.id)
	s.mu.Unlock()
	l.closeGuest()
}

// names keeps variables' names: their values may be secrets and live in the machine only.
func names(env map[string]string) map[string]string {
	out := make(map[string]string, len(env))
	for k := range env {
		out[k] = ""
	}
	return out
}

// identity is fresh for each sandbox: nothing in it comes from the template or an earlier one. Hostname and
// machine ID are the machine's own since it booted.
func identity(made node.Created, g authz.Grant, req CreateRequest) wire.Identity {
	entropy := make([]byte, 64)
	_, _ = rand.Read(entropy) // never fails
	env := make(map[string]string, len(req.Env)+3)
	maps.Copy(env, req.Env)
	env["SANDBOX_ID"], env["SANDBOX_TEMPLATE"], env["SANDBOX_PROJECT"] = string(made.ID), made.Template.Name, g.Project.Ref
	return wire.Identity{
		ID: string(made.ID), Entropy: entropy, Now: time.Now(), Env: env,
	}
}

// previewToken derives a private preview's token: nothing of it is stored.
func (s *Service) previewToken(sb sandlot.Sandbox) sandlot.Secret {
	if sb.Preview != "private" {
		return ""
	}
	m := hmac.New(sha256.New, s.secret)
	m.Write([]byte("preview\x00" + string(sb.ID)))
	return sandlot.Secret("hbp_" + base64.RawURLEncoding.EncodeToString(m.Sum(nil)))
}

// undoStack is what a failed create takes back, last first. Success empties it.
type undoStack []func(context.Context)

func (u undoStack) run(ctx context.Context) {
	if len(u) == 0 {
		return
	}
	ctx, cancel := detached(ctx, undoTimeout)
	defer cancel()
	for i := len(u) - 1; i >= 0; i-- {
		u[i](ctx)
	}
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// allowance refuses a create when a plan's hard limit for the month is used up.
func (s *Service) allowance(ctx context.Context, org sandlot.Org, plan sandlot.Plan) error {
	if !plan.HardLimit {
		return nil
	}
	u, err := s.Usage(ctx, authz.Grant{Principal: authz.Principal{Org: org}})
	if err != nil {
		return err
	}
	if u.Org.VCPUHours() < plan.IncludedVCPUHours && u.Org.GBHours() < plan.IncludedGBHours {
		return nil
	}
	return sandlot.Errorf(sandlot.CodeQuotaExceeded, "plan %s's allowance for this month is used up", plan.Name).
		With("limit", map[string]any{"vcpu_hours": plan.IncludedVCPUHours, "gb_hours": plan.IncludedGBHours}).
		With("used", map[string]any{"vcpu_hours": u.Org.VCPUHours(), "gb_hours": u.Org.GBHours()})
}
