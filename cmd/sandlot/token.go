package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"
)

// tokenCmd manages tokens.
type tokenCmd struct {
	remote `embed:""`

	Create tokenCreateCmd `cmd:"" help:"Make a token and print its secret, once."`
	Ls     tokenLsCmd     `cmd:"" aliases:"list" help:"List tokens, without their secrets."`
	Revoke tokenRevokeCmd `cmd:"" aliases:"rm" help:"End tokens at once."`
}

const tokensPath = "/api/v1/tokens"

// tokenView is a token as the API shows it.
type tokenView struct {
	ID        string    `json:"id"`
	Name      string    `json:"name"`
	Project   string    `json:"project"`
	Role      string    `json:"role"`
	Scopes    []string  `json:"scopes"`
	CreatedAt time.Time `json:"created_at"`
	ExpiresAt time.Time `json:"expires_at"`
	RevokedAt time.Time `json:"revoked_at"`
	Token     string    `json:"token"`
}

type tokenCreateCmd struct {
	Name        string        `arg:"" help:"A name for people."`
	Role        string        `placeholder:"ROLE" help:"owner, admin, developer or readonly. Default: developer."`
	Scopes      []string      `name:"scope" placeholder:"SCOPE" help:"sandboxes:read, sandboxes:write, sandboxes:* or admin. Default: sandboxes:*."`
	Expires     time.Duration `placeholder:"720h" help:"How long it is valid. Default: until it is revoked."`
	AllProjects bool          `help:"For every project of the organization, not --project's alone."`
}

func (x *tokenCreateCmd) Run(ctx context.Context, s *streams, r *tokenCmd) error {
	c, err := r.client()
	if err != nil {
		return err
	}
	in := struct {
		Name       string   `json:"name"`
		Project    string   `json:"project,omitempty"`
		Role       string   `json:"role,omitempty"`
		Scopes     []string `json:"scopes,omitempty"`
		ExpiresInS int      `json:"expires_in_s,omitempty"`
	}{Name: x.Name, Role: x.Role, Scopes: x.Scopes}
	if !x.AllProjects {
		in.Project = c.project
	}
	if in.ExpiresInS, err = seconds("--expires", x.Expires); err != nil {
		return err
	}
	var t tokenView
	raw, err := c.call(ctx, http.MethodPost, tokensPath, nil, in, &t)
	if err != nil {
		return err
	}
	if r.JSON {
		return printJSON(s.out, raw)
	}
	fmt.Fprintf(s.err, "%s, %s, %s; the secret is shown this once:\n", t.ID, printable(t.Role), printable(strings.Join(t.Scopes, " ")))
	_, err = fmt.Fprintln(s.out, t.Token)
	return err
}

type tokenLsCmd struct{}

func (x *tokenLsCmd) Run(ctx context.Context, s *streams, r *tokenCmd) error {
	c, err := r.client()
	if err != nil {
		return err
	}
	var answer struct {
		Tokens []tokenView `json:"tokens"`
	}
	raw, err := c.call(ctx, http.MethodGet, tokensPath, nil, nil, &answer)
	if err != nil {
		return err
	}
	if r.JSON {
		return printJSON(s.out, raw)
	}
	now := time.Now()
	rows := make([][]string, 0, len(answer.Tokens))
	for _, t := range answer.Tokens {
		state := "valid"
		switch {
		case !t.RevokedAt.IsZero():
			state = "revoked " + ago(t.RevokedAt, now)
		case !t.ExpiresAt.IsZero() && t.ExpiresAt.Before(now):
			state = "expired " + ago(t.ExpiresAt, now)
		case !t.ExpiresAt.IsZero():
			state = "expires in " + span(t.ExpiresAt.Sub(now))
		}
		project := t.Project
		if project == "" {
			project = "(all)"
		}
		rows = append(rows, []string{t.ID, t.Name, project, t.Role, strings.Join(t.Scopes, " "), ago(t.CreatedAt, now), state})
	}
	return table(s.out, []string{"ID", "NAME", "PROJECT", "ROLE", "SCOPES", "CREATED", "STATE"}, rows)
}

type tokenRevokeCmd struct {
	IDs []string `arg:"" name:"id" help:"The tokens' ids (not their secrets)."`
}

func (x *tokenRevokeCmd) Run(ctx context.Context, s *streams, r *tokenCmd) error {
	c, err := r.client()
	if err != nil {
		return err
	}
	var errs []error
	for _, id := range x.IDs {
		if _, err := c.call(ctx, http.MethodDelete, under(tokensPath, id), nil, nil, nil); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", printable(id), err))
			continue
		}
		if r.JSON { // the API answers with nothing
			b, err := json.Marshal(map[string]string{"id": id})
			if err != nil {
				return err
			}
			if err := printJSON(s.out, b); err != nil {
				return err
			}
			continue
		}
		fmt.Fprintln(s.out, id)
	}
	return errors.Join(errs...)
}
