package main

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"strings"
	"time"

	"github.com/coder/websocket"
)

// terminalEcho types a key into a terminal's WebSocket and waits until the terminal shows it.
func terminalEcho(ctx context.Context, b *bench) error {
	s, sb, err := b.box(ctx)
	if err != nil {
		return err
	}
	var t struct {
		SessionID string `json:"session_id"`
	}
	if err := s.Call(ctx, http.MethodPost, "/"+sb.ID+"/terminal", map[string]any{"cmd": []string{"cat"}}, &t); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	url := "ws" + strings.TrimPrefix(s.URL, "http") + "/api/v1/projects/default/sandboxes/" + sb.ID + "/terminal/" + t.SessionID + "/ws"
	c, _, err := websocket.Dial(ctx, url, &websocket.DialOptions{HTTPHeader: http.Header{"Authorization": {"Bearer " + s.Token}}})
	if err != nil {
		return err
	}
	defer func() { _ = c.CloseNow() }()
	var echo []float64
	for i := range b.n(300) {
		time.Sleep(pause)
		key := []byte{byte('a' + i%26)}
		begun := time.Now()
		if err := c.Write(ctx, websocket.MessageBinary, key); err != nil {
			return err
		}
		_, shown, err := c.Read(ctx)
		if err != nil {
			return err
		}
		if !bytes.Equal(shown, key) {
			return errors.New("the terminal did not show what was typed")
		}
		echo = append(echo, ms(time.Since(begun)))
	}
	b.metric("terminal_echo", "ms", echo) // bar: <= 3
	return s.Delete(ctx, sb.ID)
}
