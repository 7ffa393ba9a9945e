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
	"time"
	"unicode/utf8"

	"sandlot"
)

// execFlags are how a command is to run.
type execFlags struct {
	User    string        `short:"u" help:"The user inside." placeholder:"USER"`
	Workdir string        `short:"w" help:"The directory inside." placeholder:"DIR"`
	Timeout time.Duration `help:"End the command after this long." placeholder:"60s"`
	Stdin   bool          `short:"i" help:"Give it this command's standard input."`
}

type execBody struct {
	Cmd        any               `json:"cmd"`
	Cwd        string            `json:"cwd,omitempty"`
	Env        map[string]string `json:"env,omitempty"`
	User       string            `json:"user,omitempty"`
	TimeoutS   int               `json:"timeout_s,omitempty"`
	Stdin      string            `json:"stdin,omitempty"`
	Stream     bool              `json:"stream,omitempty"`
	Background bool              `json:"background,omitempty"`
}

// execEvent is one event of a stream.
type execEvent struct {
	Type     string  `json:"type"`
	Data     string  `json:"data"`
	Base64   *string `json:"data_base64"`
	ExitCode *int    `json:"exit_code"`
	TimedOut bool    `json:"timed_out"`
}

// body makes the request. One argument is a shell line, as in the API; several are a program and its
// arguments.
func (f *execFlags) body(command []string, in io.Reader) (b execBody, err error) {
	if len(command) > 0 && command[0] == "--" {
		command = command[1:]
	}
	switch len(command) {
	case 0:
		return b, errors.New("say what to run: … -- COMMAND ARGS")
	case 1:
		b.Cmd = command[0]
	default:
		b.Cmd = command
	}
	b.Cwd, b.User = f.Workdir, f.User
	if b.TimeoutS, err = seconds("--timeout", f.Timeout); err != nil {
		return b, err
	}
	if f.Stdin {
		data, err := io.ReadAll(io.LimitReader(in, sandlot.MaxStdinBytes+1))
		switch {
		case err != nil:
			return b, fmt.Errorf("standard input: %w", err)
		case len(data) > sandlot.MaxStdinBytes:
			return b, fmt.Errorf("standard input has more than %d KiB: copy it in with `sandlot sandbox cp - ID:FILE` and redirect from there", sandlot.MaxStdinBytes>>10)
		case !utf8.Valid(data):
			return b, errors.New("standard input is not UTF-8 text: copy it in with `sandlot sandbox cp - ID:FILE` and redirect from there")
		}
		b.Stdin = string(data)
	}
	return b, nil
}

// follow runs the command and copies what it prints to s as it comes. A status other than 0 is an exitCode.
func (c *client) follow(ctx context.Context, id string, b execBody, s *streams) error {
	b.Stream = true
	var exit *execEvent
	err := c.stream(ctx, http.MethodPost, c.sandboxes(id, "exec"), nil, b, func(data []byte) error {
		var e execEvent
		if err := json.Unmarshal(data, &e); err != nil {
			return fmt.Errorf("an event of the stream cannot be read: %w", err)
		}
		switch e.Type {
		case "stdout":
			return e.write(s.out)
		case "stderr":
			return e.write(s.err)
		case "exit":
			exit = &e
		case "error":
			if failed := parseEnvelope(data); failed != nil {
				return failed
			}
			return errors.New("the server reported an error that cannot be read")
		}
		return nil // a type of a later version
	})
	switch {
	case ctx.Err() != nil:
		return exitCode(130)
	case err != nil:
		return err
	case exit == nil || exit.ExitCode == nil:
		return errors.New("the stream ended before the command did")
	case exit.TimedOut:
		fmt.Fprintln(s.err, "sandlot: the command ran out of its time and was ended")
		return exitCode(124)
	case *exit.ExitCode != 0:
		return exitCode(*exit.ExitCode)
	}
	return nil
}

func (e *execEvent) write(w io.Writer) error {
	if e.Base64 == nil {
		_, err := io.WriteString(w, e.Data)
		return err
	}
	b, err := base64.StdEncoding.DecodeString(*e.Base64)
	if err != nil {
		return fmt.Errorf("an event of the stream cannot be read: %w", err)
	}
	_, err = w.Write(b)
	return err
}

type execCmd struct {
	execFlags
	Env        []string `short:"e" sep:"none" help:"A variable; K alone takes its value from here." placeholder:"K=V"`
	Background bool     `short:"d" help:"Leave it running, and print its pid and log file."`
	ID         string   `arg:"" help:"The sandbox."`
	Command    []string `arg:"" passthrough:"partial" help:"What to run. One argument is a line for bash; several are a program and its arguments."`
}

// Run ends with the command's own exit status.
func (x *execCmd) Run(ctx context.Context, s *streams, r *sandboxCmd) error {
	c, err := r.client()
	if err != nil {
		return err
	}
	b, err := x.body(x.Command, s.in)
	if err != nil {
		return err
	}
	if b.Env, err = pairs("-e", x.Env, os.LookupEnv); err != nil {
		return err
	}
	switch {
	case x.Background:
		return c.background(ctx, x.ID, b, s, r.JSON)
	case r.JSON:
		return c.collect(ctx, x.ID, b, s)
	}
	return c.follow(ctx, x.ID, b, s)
}

// background starts the command and prints where it is.
func (c *client) background(ctx context.Context, id string, b execBody, s *streams, asJSON bool) error {
	b.Background = true
	var started struct {
		PID     int    `json:"pid"`
		LogPath string `json:"log_path"`
	}
	raw, err := c.call(ctx, http.MethodPost, c.sandboxes(id, "exec"), nil, b, &started)
	if err != nil {
		return err
	}
	if asJSON {
		return printJSON(s.out, raw)
	}
	_, err = fmt.Fprintf(s.out, "%d\t%s\n", started.PID, printable(started.LogPath))
	return err
}

// collect runs the command to its end and prints the API's answer.
func (c *client) collect(ctx context.Context, id string, b execBody, s *streams) error {
	var done execEvent
	raw, err := c.call(ctx, http.MethodPost, c.sandboxes(id, "exec"), nil, b, &done)
	if ctx.Err() != nil {
		return exitCode(130)
	}
	if err != nil {
		return err
	}
	if err := printJSON(s.out, raw); err != nil {
		return err
	}
	if done.ExitCode != nil && *done.ExitCode != 0 {
		return exitCode(*done.ExitCode)
	}
	return nil
}

type runCmd struct {
	createFlags
	execFlags
	Keep    bool     `help:"Do not delete the sandbox at the end; its id is printed on stderr."`
	Command []string `arg:"" passthrough:"partial" help:"What to run. One argument is a line for bash; several are a program and its arguments."`
}

// Run deletes the sandbox at the end, whatever that is: also after Ctrl-C.
func (x *runCmd) Run(ctx context.Context, s *streams, r *sandboxCmd) (err error) {
	c, err := r.client()
	if err != nil {
		return err
	}
	b, err := x.execFlags.body(x.Command, s.in)
	if err != nil {
		return err
	}
	sb, err := x.begin(ctx, c)
	if err != nil {
		return err
	}
	if x.Keep {
		fmt.Fprintln(s.err, sb.ID)
	} else {
		defer func() {
			end, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
			defer cancel()
			if _, derr := c.call(end, http.MethodDelete, c.sandboxes(sb.ID), nil, nil, nil); derr != nil {
				fmt.Fprintf(s.err, "sandlot: sandbox %s was not deleted: %v\n", sb.ID, derr)
				if err == nil {
					err = exitCode(1)
				}
			}
		}()
	}
	switch {
	case ctx.Err() != nil: // meanwhile
		return exitCode(130)
	case r.JSON:
		return c.collect(ctx, sb.ID, b, s)
	}
	return c.follow(ctx, sb.ID, b, s)
}

// createGrace is how long a create goes on after Ctrl-C: an answer that is not awaited would leave a
// sandbox that nobody knows.
const createGrace = 10 * time.Second

func (x *runCmd) begin(ctx context.Context, c *client) (sandboxView, error) {
	bound, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(createGrace, cancel) })()
	sb, _, err := x.create(bound, c)
	if err != nil && ctx.Err() != nil {
		err = exitCode(130)
	}
	return sb, err
}
