package guest

import (
	"bytes"
	"context"
	"net/http"
	"net/url"

	"sandlot"
	"sandlot/internal/wire"
)

const (
	maxTerminals = 256 // in one answer
	maxWindow    = 1000
	maxViewers   = 1 << 10
)

func terminalPath(id, what string) string {
	p := wire.PathTerminals + "/" + url.PathEscape(id)
	if what != "" {
		p += "/" + what
	}
	return p
}

// NewTerminal starts a terminal. Fails with CodeInvalidRequest, CodeConflict or CodeRateLimited.
func (c *Client) NewTerminal(ctx context.Context, in wire.NewTerminal) (wire.Terminal, error) {
	var out wire.Terminal
	if err := c.call(ctx, request{method: http.MethodPost, path: wire.PathTerminals}, in, &out); err != nil {
		return wire.Terminal{}, err
	}
	if !validTerminal(out) || out.ID != in.ID {
		return wire.Terminal{}, nonsense("it started an impossible terminal")
	}
	return out, nil
}

// Terminals lists the terminals, oldest first.
func (c *Client) Terminals(ctx context.Context) ([]wire.Terminal, error) {
	var out []wire.Terminal
	if err := c.call(ctx, request{method: http.MethodGet, path: wire.PathTerminals}, nil, &out); err != nil {
		return nil, err
	}
	if len(out) > maxTerminals {
		return nil, nonsense("it lists too many terminals")
	}
	for _, t := range out {
		if !validTerminal(t) {
			return nil, nonsense("it lists an impossible terminal")
		}
	}
	return out, nil
}

func validTerminal(t wire.Terminal) bool {
	id := sandlot.ID(t.ID)
	_, err := sandlot.ParseID(string(id))
	return err == nil && t.PID > 0 && t.PID <= maxPID && t.Cols > 0 && t.Cols <= maxWindow && t.Rows > 0 && t.Rows <= maxWindow &&
		t.Viewers >= 0 && t.Viewers <= maxViewers && (t.ExitCode == nil || *t.ExitCode >= 0 && *t.ExitCode <= 255)
}

// TerminalStream replays what a terminal showed last and goes on until it ends; its Next may return FrameSkipped too. Fails
// with CodeNotFound or CodeRateLimited.
func (c *Client) TerminalStream(ctx context.Context, id string) (*ExecStream, error) {
	s, err := c.frames(ctx, request{method: http.MethodGet, path: terminalPath(id, "stream")}, 0, false)
	if err == nil {
		s.viewer = true
	}
	return s, err
}

// TerminalInput types b. Fails with CodeNotFound, CodeConflict (it has ended) or CodeTimeout (its program does not read).
func (c *Client) TerminalInput(ctx context.Context, id string, b []byte) error {
	ctx, cancel := context.WithTimeoutCause(ctx, callTimeout, errNoAnswer)
	defer cancel()
	resp, err := c.send(ctx, c.calls, request{method: http.MethodPost, path: terminalPath(id, "input"), body: bytes.NewReader(b), size: int64(len(b))})
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

// ResizeTerminal fails with CodeNotFound, CodeInvalidRequest or CodeConflict.
func (c *Client) ResizeTerminal(ctx context.Context, id string, size wire.WindowSize) error {
	return c.call(ctx, request{method: http.MethodPost, path: terminalPath(id, "resize")}, size, nil)
}

// CloseTerminal hangs a terminal up, and kills what does not go. Fails with CodeNotFound.
func (c *Client) CloseTerminal(ctx context.Context, id string) error {
	return c.call(ctx, request{method: http.MethodDelete, path: terminalPath(id, "")}, nil, nil)
}
