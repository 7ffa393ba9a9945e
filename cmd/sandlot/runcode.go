package main

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"sandlot"
)

// codeCmd runs code as a notebook cell does.
type codeCmd struct {
	Language string        `short:"l" help:"python, javascript, typescript or bash." placeholder:"NAME"`
	Context  string        `short:"c" help:"The state to run in." placeholder:"NAME"`
	Timeout  time.Duration `help:"Interrupt the code after this long." placeholder:"60s"`
	Out      string        `help:"Write images and other files among the results into this directory." placeholder:"DIR" type:"path"`
	ID       string        `arg:"" help:"The sandbox."`
	File     string        `arg:"" optional:"" default:"-" help:"The code; - is standard input."`
}

type codeBody struct {
	Code      string `json:"code"`
	Language  string `json:"language,omitempty"`
	ContextID string `json:"context_id,omitempty"`
	TimeoutS  int    `json:"timeout_s,omitempty"`
	Stream    bool   `json:"stream,omitempty"`
}

// Run prints what the code prints, then its results as text. Code that fails is status 1; one that was out of
// time is 124.
func (x *codeCmd) Run(ctx context.Context, s *streams, r *sandboxCmd) error {
	c, err := r.client()
	if err != nil {
		return err
	}
	b := codeBody{Language: x.Language, ContextID: x.Context}
	if b.TimeoutS, err = seconds("--timeout", x.Timeout); err != nil {
		return err
	}
	if b.Code, err = x.read(s.in); err != nil {
		return err
	}
	if b.Language == "" && b.ContextID == "" {
		b.Language = languageOf(x.File)
	}
	if r.JSON {
		return c.collectCode(ctx, x.ID, b, s)
	}
	b.Stream = true
	printer := codePrinter{s: s, out: x.Out}
	err = c.stream(ctx, http.MethodPost, c.sandboxes(x.ID, "run-code"), nil, b, printer.event)
	switch {
	case ctx.Err() != nil:
		return exitCode(130)
	case err != nil:
		return err
	case !printer.ended:
		return errors.New("the stream ended before the code did")
	case printer.timedOut:
		return exitCode(124)
	case printer.failed:
		return exitCode(1)
	}
	return nil
}

func (x *codeCmd) read(in io.Reader) (string, error) {
	if x.File != "-" {
		f, err := os.Open(x.File)
		if err != nil {
			return "", err
		}
		defer func() { _ = f.Close() }()
		in = f
	}
	data, err := io.ReadAll(io.LimitReader(in, sandlot.MaxBodyBytes+1))
	switch {
	case err != nil:
		return "", err
	case len(data) > sandlot.MaxBodyBytes:
		return "", errors.New("the code has more than 1 MiB: copy it in with `sandlot sandbox cp` and run it from there")
	case !utf8.Valid(data):
		return "", errors.New("the code is not UTF-8 text")
	}
	return string(data), nil
}

// languageOf goes by a file's name; what says nothing is the server's default.
func languageOf(file string) string {
	switch strings.ToLower(filepath.Ext(file)) {
	case ".py":
		return "python"
	case ".js", ".mjs", ".cjs":
		return "javascript"
	case ".ts", ".mts":
		return "typescript"
	case ".sh", ".bash":
		return "bash"
	}
	return ""
}

// collectCode runs the code to its end and prints the API's answer.
func (c *client) collectCode(ctx context.Context, id string, b codeBody, s *streams) error {
	var done struct {
		Error    *struct{} `json:"error"`
		TimedOut bool      `json:"timed_out"`
	}
	raw, err := c.call(ctx, http.MethodPost, c.sandboxes(id, "run-code"), nil, b, &done)
	if ctx.Err() != nil {
		return exitCode(130)
	}
	if err != nil {
		return err
	}
	if err := printJSON(s.out, raw); err != nil {
		return err
	}
	switch {
	case done.TimedOut:
		return exitCode(124)
	case done.Error != nil:
		return exitCode(1)
	}
	return nil
}

// codePrinter shows a cell's events.
type codePrinter struct {
	s   *streams
	out string // directory for what is no text; "": it is only named

	files                   int
	failed, timedOut, ended bool
}

func (p *codePrinter) event(data []byte) error {
	var e struct {
		execEvent
		Name, Value, Traceback string
		StateLost              bool `json:"state_lost"`
	}
	var kind struct{ Type string }
	if err := json.Unmarshal(data, &kind); err != nil {
		return fmt.Errorf("an event of the stream cannot be read: %w", err)
	}
	if kind.Type == "result" {
		return p.result(data)
	}
	if err := json.Unmarshal(data, &e); err != nil {
		return fmt.Errorf("an event of the stream cannot be read: %w", err)
	}
	switch e.Type {
	case "stdout":
		return e.write(p.s.out)
	case "stderr":
		return e.write(p.s.err)
	case "error":
		if failed := parseEnvelope(data); failed != nil {
			return failed
		}
		p.failed = true
		text := e.Traceback
		if text == "" || e.Name == "Timeout" {
			text = strings.TrimPrefix(text+"\n", "\n") + e.Name + ": " + e.Value
		}
		_, err := fmt.Fprintln(p.s.err, text)
		return err
	case "end":
		p.ended, p.timedOut = true, e.TimedOut
		if e.StateLost {
			_, err := fmt.Fprintln(p.s.err, "sandlot: the kernel is a new one: variables are lost")
			return err
		}
	}
	return nil // a type of a later version
}

var fileEndings = map[string]string{
	"image/png": ".png", "image/jpeg": ".jpg", "image/svg+xml": ".svg", "image/gif": ".gif", "image/webp": ".webp", "application/pdf": ".pdf", "text/html": ".html",
}

// result prints a value's text, and writes what is better seen into files.
func (p *codePrinter) result(data []byte) error {
	var e map[string]any
	if err := json.Unmarshal(data, &e); err != nil {
		return fmt.Errorf("an event of the stream cannot be read: %w", err)
	}
	if text, ok := e["text/plain"].(string); ok {
		if _, err := fmt.Fprintln(p.s.out, text); err != nil {
			return err
		}
	}
	p.files++
	names := make([]string, 0, len(e))
	for media := range e {
		if fileEndings[media] != "" {
			names = append(names, media)
		}
	}
	slices.Sort(names)
	for _, media := range names {
		text, _ := e[media].(string)
		if p.out == "" {
			if media == "text/html" {
				continue // its text is there
			}
			if _, err := fmt.Fprintf(p.s.err, "sandlot: a result has %s: --out DIR writes it to a file\n", media); err != nil {
				return err
			}
			continue
		}
		b := []byte(text)
		if media != "text/html" && media != "image/svg+xml" {
			var err error
			if b, err = base64.StdEncoding.DecodeString(text); err != nil {
				return fmt.Errorf("a result cannot be read: %w", err)
			}
		}
		if err := os.MkdirAll(p.out, 0o755); err != nil { //nolint:gosec // the user's own directory
			return err
		}
		name := filepath.Join(p.out, fmt.Sprintf("result-%d%s", p.files, fileEndings[media]))
		if err := os.WriteFile(name, b, 0o644); err != nil { //nolint:gosec // as above
			return err
		}
		if _, err := fmt.Fprintln(p.s.err, name); err != nil {
			return err
		}
	}
	return nil
}
