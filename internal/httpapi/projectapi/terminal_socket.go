package projectapi

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/coder/websocket"

	"sandlot"
	"sandlot/internal/httpapi/route"
	"sandlot/internal/wire"
)

const maxSocketMessage = 96 << 10 // bytes of a client's message: an input as JSON

// socketMessage is a text message of the WebSocket, either way.
type socketMessage struct {
	Type     string `json:"type"`
	Cols     int    `json:"cols,omitempty"`
	Rows     int    `json:"rows,omitempty"`
	Data     string `json:"data,omitempty"`
	Bytes    int64  `json:"bytes,omitempty"`
	ExitCode *int   `json:"exit_code,omitempty"`
	Signal   string `json:"signal,omitempty"`
	Error    any    `json:"error,omitempty"`
}

// upgradable refuses what websocket.Accept would, in the envelope of errors. A page of another origin has no token to send
// (a browser's WebSocket sets no such header, and no cookie stands for it), and may not connect all the same.
func upgradable(r *http.Request) error {
	h := r.Header
	if !hasToken(h, "Connection", "upgrade") || !hasToken(h, "Upgrade", "websocket") || h.Get("Sec-WebSocket-Version") != "13" ||
		len(h.Values("Sec-WebSocket-Key")) != 1 {
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "this path is a WebSocket, version 13: connect with a client of those, or read …/stream")
	}
	origin := h.Get("Origin")
	if origin == "" {
		return nil
	}
	u, err := url.Parse(origin)
	if err != nil || !strings.EqualFold(u.Host, r.Host) {
		return sandlot.Errorf(sandlot.CodeForbidden, "a page of another origin may not connect")
	}
	return nil
}

// hasToken looks for a word in a header that lists some.
func hasToken(h http.Header, name, token string) bool {
	for _, v := range h.Values(name) {
		for word := range strings.SplitSeq(v, ",") {
			if strings.EqualFold(strings.TrimSpace(word), token) {
				return true
			}
		}
	}
	return false
}

func (a api) terminalSocket(q *route.Request) error {
	id, err := q.SandboxID()
	if err != nil {
		return err
	}
	if err := upgradable(q.R); err != nil {
		return err
	}
	ctx, cancel := q.Stream()
	defer cancel()
	s, err := a.service.TerminalStream(ctx, q.Grant, id, q.R.PathValue("sid"))
	if err != nil {
		return route.Cause(ctx, err)
	}
	defer s.Close()
	c, err := websocket.Accept(q.W, q.R, &websocket.AcceptOptions{CompressionMode: websocket.CompressionDisabled})
	if err != nil {
		return nil // it has answered
	}
	defer func() { _ = c.CloseNow() }()
	c.SetReadLimit(maxSocketMessage)
	t := socket{a: a, q: q, c: c, id: id, sid: q.R.PathValue("sid")}
	go func() {
		defer cancel()
		t.read(ctx)
	}()
	go t.beat(ctx, cancel)
	err = watchTerminal(s, func(b []byte) error { return t.write(websocket.MessageBinary, b) },
		func(n int64) error { return t.say(socketMessage{Type: "skipped", Bytes: n}) },
		func(x wire.Exit) error {
			return t.say(socketMessage{Type: "exit", ExitCode: &x.ExitCode, Signal: x.Signal})
		})
	t.end(ctx, route.Cause(ctx, err))
	return nil
}

// socket is one viewer's WebSocket. A cancelled context would end it without a close code, so what it writes and reads has
// other bounds: a beat's time, and the call's end.
type socket struct {
	a   api
	q   *route.Request
	c   *websocket.Conn
	id  sandlot.ID
	sid string
}

// end says why it ends. A client that went away is told nothing.
func (t socket) end(ctx context.Context, err error) {
	code, why := websocket.StatusNormalClosure, "the terminal has ended"
	if err != nil {
		if errors.Is(context.Cause(ctx), context.Canceled) {
			return
		}
		_, body := route.Failure(err, t.q.ID)
		if t.say(socketMessage{Type: "error", Error: body}) != nil {
			return
		}
		switch sandlot.ErrorCode(err) {
		case sandlot.CodeShuttingDown:
			code, why = websocket.StatusGoingAway, "the server is stopping"
		case sandlot.CodeUnauthorized, sandlot.CodeForbidden:
			code, why = websocket.StatusPolicyViolation, "the token does not permit this any more"
		default:
			code, why = websocket.StatusInternalError, "the terminal cannot be watched any more"
		}
	}
	_ = t.c.Close(code, why)
}

// write gives the client a beat's time to take a message.
func (t socket) write(kind websocket.MessageType, b []byte) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.q.Context()), t.q.Beat)
	defer cancel()
	return t.c.Write(ctx, kind, b)
}

func (t socket) say(m socketMessage) error {
	b, err := json.Marshal(m)
	if err != nil {
		return err
	}
	return t.write(websocket.MessageText, b)
}

// beat ends the stream of a client that does not answer pings.
func (t socket) beat(ctx context.Context, gone func()) {
	tick := time.NewTicker(t.q.Beat)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		pinging, cancel := context.WithTimeout(context.WithoutCancel(ctx), t.q.Beat)
		err := t.c.Ping(pinging)
		cancel()
		if err != nil {
			gone()
			return
		}
	}
}

// read does what the client says until it goes away. What cannot be done is told and changes nothing.
func (t socket) read(ctx context.Context) {
	for {
		kind, b, err := t.c.Read(context.WithoutCancel(ctx)) // CloseNow ends it
		if err != nil || ctx.Err() != nil {
			return
		}
		if kind == websocket.MessageText {
			err = t.order(ctx, b)
		} else {
			err = t.a.service.TerminalInput(ctx, t.q.Grant, t.id, t.sid, b)
		}
		if err == nil {
			continue
		}
		if ctx.Err() != nil {
			return
		}
		_, body := route.Failure(err, t.q.ID)
		if t.say(socketMessage{Type: "error", Error: body}) != nil {
			return
		}
	}
}

func (t socket) order(ctx context.Context, b []byte) error {
	var m socketMessage
	if json.Unmarshal(b, &m) != nil {
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "a text message is a JSON object; bytes to type go into binary messages")
	}
	switch m.Type {
	case "resize":
		return t.a.service.ResizeTerminal(ctx, t.q.Grant, t.id, t.sid, m.Cols, m.Rows)
	case "input":
		return t.a.service.TerminalInput(ctx, t.q.Grant, t.id, t.sid, []byte(m.Data))
	}
	return sandlot.Errorf(sandlot.CodeInvalidRequest, "a text message's type is resize or input").With("field", "type")
}
