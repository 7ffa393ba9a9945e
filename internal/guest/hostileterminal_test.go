package guest

import (
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"sandlot"
	"sandlot/internal/wire"
)

// ADVERSARIAL 11, of terminals.
func TestHostileTerminals(t *testing.T) {
	id := string(sandlot.NewID("trm"))
	in := wire.NewTerminal{ID: id, WindowSize: wire.WindowSize{Cols: 80, Rows: 24}}
	unhealthy := func(what string, err error) {
		t.Helper()
		if sandlot.ErrorCode(err) != sandlot.CodeSandboxUnhealthy || len(err.Error()) > 2000 || strings.ContainsAny(err.Error(), "\x00\x1b\n") {
			t.Errorf("%.100q: %v", what, err)
		}
	}
	fine := `{"id":"` + id + `","pid":7,"argv":["sh"],"user":"user","running":true,"cols":80,"rows":24}`
	if got, err := fake(t, respond(200, fine), nil).NewTerminal(t.Context(), in); err != nil || got.PID != 7 {
		t.Errorf("control: %+v, %v", got, err)
	}
	for _, body := range []string{
		`{}`, `null`, `[]`, `7`, strings.Replace(fine, id, string(sandlot.NewID("trm")), 1), strings.Replace(fine, id, "../x", 1),
		strings.Replace(fine, `"pid":7`, `"pid":-7`, 1), strings.Replace(fine, `"pid":7`, `"pid":99999999`, 1),
		strings.Replace(fine, `"cols":80`, `"cols":0`, 1), strings.Replace(fine, `"rows":24`, `"rows":65536`, 1),
		strings.Replace(fine, `"running":true`, `"exit_code":-1`, 1), strings.Replace(fine, `"running":true`, `"viewers":-1`, 1),
	} {
		_, err := fake(t, respond(200, body), nil).NewTerminal(t.Context(), in)
		unhealthy(body, err)
		if body != `null` { // no terminals
			_, err = fake(t, respond(200, `[`+strings.Repeat(fine+`,`, 300)+body+`]`), nil).Terminals(t.Context())
			unhealthy("a list of many", err)
		}
	}
	started := head + frame(wire.FrameStarted, `{"pid":7}`)
	for _, answer := range []string{
		head + frame(wire.FrameStdout, "x"), started + frame(wire.FrameResult, "x"), started + frame(wire.FrameSkipped, ""),
		started + frame(wire.FrameSkipped, `{"bytes":-1}`), started + frame(wire.FrameSkipped, `{"bytes":0}`), started + frame(wire.FrameSkipped, `{"bytes":1e30}`),
		started + "\x01\xff\xff\xff\xff", started + frame(wire.FrameExit, `{"exit_code":256}`), started + frame(wire.FrameExit, `{"signal":"\u001b[31m"}`), started,
	} {
		s, err := fake(t, answer, nil).TerminalStream(t.Context(), id)
		for err == nil {
			_, _, err = s.Next()
		}
		unhealthy(answer, err)
	}
	// A command's stream misses nothing.
	s, err := fake(t, started+frame(wire.FrameSkipped, `{"bytes":5}`), nil).Exec(t.Context(), wire.Exec{Argv: []string{"x"}, TimeoutMS: 1000})
	for err == nil {
		_, _, err = s.Next()
	}
	unhealthy("a command's", err)
	// Without end: it is the reader's to stop, and nothing grows.
	s, err = fake(t, started, flood(frame(wire.FrameStdout, strings.Repeat("o", 1<<18)))).TerminalStream(t.Context(), id)
	for n := 0; err == nil && n < 64<<20; {
		var b []byte
		_, b, err = s.Next()
		n += len(b)
	}
	if err != nil {
		t.Error(err)
	} else {
		s.Close()
		if _, _, err := s.Next(); err == nil || errors.Is(err, io.EOF) {
			t.Errorf("after Close: %v", err)
		}
	}
	begun := time.Now()
	err = fake(t, "HTTP/1.1 500 X\r\n\r\n", flood(strings.Repeat("e", 1<<16))).TerminalInput(t.Context(), id, []byte("x"))
	unhealthy("input", err)
	unhealthy("resize", fake(t, respond(302, ""), nil).ResizeTerminal(t.Context(), id, in.WindowSize))
	unhealthy("close", fake(t, "", nil).CloseTerminal(t.Context(), id))
	if took := time.Since(begun); took > 20*time.Second {
		t.Errorf("took %s", took)
	}
}
