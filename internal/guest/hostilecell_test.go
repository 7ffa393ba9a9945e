package guest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"sandlot"
	"sandlot/internal/wire"
)

var hostileCell = wire.Cell{Language: "python", Code: "1", Collect: 1 << 20, TimeoutMS: 1000}

// ADVERSARIAL 11, of cells: what is not a cell's answer is none, and costs no more memory than one.
func TestHostileCells(t *testing.T) {
	end := frame(wire.FrameCell, `{"context":"c","execution_count":1}`)
	piece := func(last byte, b string) string { return frame(wire.FrameResult, string(last)+b) }
	for _, c := range []struct {
		name, answer string
		more         func(io.Writer) bool
	}{
		{"a piece without its first byte", head + frame(wire.FrameResult, ""), nil},
		{"a piece that is neither", head + piece(2, "{}"), nil},
		{"endless pieces", head, flood(piece(0, strings.Repeat("x", 1<<18)))},
		{"endless results", head, flood(piece(1, `{"data":{"text/plain":"x"}}`))},
		{"an end inside a result", head + piece(0, "{") + end, nil},
		{"no JSON", head + piece(1, "{") + end, nil},
		{"a value that is no text", head + piece(1, `{"data":{"text/html":{}}}`) + end, nil},
		{"a media type that is none", head + piece(1, `{"data":{"text":"x"}}`) + end, nil},
		{"a media type with a line's end", head + piece(1, `{"data":{"text/plain\n\nevent: x":"x"}}`) + end, nil},
		{"a picture that is none", head + piece(1, `{"data":{"image/png":"<script>"}}`) + end, nil},
		{"deep JSON", head + piece(1, `{"data":{"application/json":`+strings.Repeat("[", 5000)+strings.Repeat("]", 5000)+`}}`) + end, nil},
		{"too many representations", head + piece(1, `{"data":{`+manyMedia()+`}}`) + end, nil},
		{"too much output", head, flood(frame(wire.FrameStdout, strings.Repeat("o", 1<<18)))},
		{"a context that is none", head + frame(wire.FrameCell, `{"context":"../x"}`), nil},
		{"a negative count", head + frame(wire.FrameCell, `{"execution_count":-1}`), nil},
		{"a negative time", head + frame(wire.FrameCell, `{"duration_us":-1}`), nil},
		{"another call's frame", head + frame(wire.FrameExit, `{}`), nil},
		{"no end", respond(200, frame(wire.FrameStdout, "x")), nil},
	} {
		begun := time.Now()
		_, err := fake(t, c.answer, c.more).RunCell(t.Context(), hostileCell)
		if sandlot.ErrorCode(err) != sandlot.CodeSandboxUnhealthy || len(err.Error()) > 2000 || strings.ContainsAny(err.Error(), "\x00\x1b\n") {
			t.Errorf("%s: %v", c.name, err)
		}
		if took := time.Since(begun); took > 20*time.Second {
			t.Errorf("%s took %s", c.name, took)
		}
	}
	r, err := fake(t, head+piece(0, `{"data":{"text/plain":"a`)+piece(1, `\ud800"},"main":true}`)+
		frame(wire.FrameCell, `{"context":"c","execution_count":2,"error":{"name":"E\u001b[31m\n","value":"v","traceback":"\u001b[0mt"}}`), nil).RunCell(t.Context(), hostileCell)
	if err != nil || len(r.Results) != 1 || r.Results[0].Data["text/plain"] != "a\uFFFD" || !r.Results[0].Main || r.ExecutionCount != 2 || strings.ContainsAny(r.Error.Name, "\x1b\n") {
		t.Errorf("control: %+v, %v", r, err)
	}
	for _, body := range []string{
		`[{"id":"../x","language":"python","state":"idle","cwd":"/"}]`, `[{"id":"x","language":"<b>","state":"idle","cwd":"/"}]`,
		`[{"id":"x","language":"python","state":"evil","cwd":"/"}]`, `[{"id":"x","language":"python","state":"idle","cwd":"/a\u001b[31m"}]`,
		`[{"id":"x","language":"python","state":"idle","cwd":"/","pid":-1}]`, `[` + strings.Repeat(`{},`, 2000) + `{}]`,
	} {
		if _, err := fake(t, respond(200, body), nil).Contexts(t.Context()); sandlot.ErrorCode(err) != sandlot.CodeSandboxUnhealthy {
			t.Errorf("%.80s: %v", body, err)
		}
	}
}

func manyMedia() string {
	var b strings.Builder
	for i := range 100 {
		fmt.Fprintf(&b, `"text/x%d":"",`, i)
	}
	return strings.TrimSuffix(b.String(), ",")
}

func FuzzCellStream(f *testing.F) {
	f.Add([]byte(frame(wire.FrameResult, "\x00{\"data\":{}") + frame(wire.FrameResult, "\x01}") + frame(wire.FrameCell, `{"execution_count":1}`)))
	f.Fuzz(func(t *testing.T, b []byte) {
		c := New(func(context.Context) (net.Conn, error) {
			ours, theirs := net.Pipe()
			go func() { _, _ = io.Copy(io.Discard, theirs) }()
			go func() {
				_, _ = io.WriteString(theirs, respond(200, string(b)))
				_ = theirs.Close()
			}()
			return ours, nil
		})
		defer c.Close()
		res, err := c.RunCell(t.Context(), wire.Cell{Collect: 1000})
		if err == nil && (len(res.Stdout) > 1000 || res.ExecutionCount < 0) {
			t.Errorf("%+v", res.CellEnd)
		}
		if err != nil && !errors.As(err, new(*sandlot.Error)) {
			t.Errorf("an error without a code: %v", err)
		}
	})
}
