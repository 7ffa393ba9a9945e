package guest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"time"
	"unicode/utf8"

	"sandlot"
	"sandlot/internal/wire"
)

const (
	cellGrace   = 75 * time.Second // beyond a cell's own time, twice: its turn, its kernel's start, its interrupt
	maxContexts = 1024             // in one answer
	maxCount    = 1 << 30          // cells of a context
)

// CellResult is a cell that has ended.
type CellResult struct {
	wire.CellEnd
	Stdout, Stderr []byte
	Results        []wire.Result
}

// RunCell runs a cell to its end and keeps the first c.Collect bytes of each output, sandlot.MaxOutputBytes when
// it is 0. A cancelled ctx interrupts the cell.
// Fails with CodeInvalidRequest, CodeTooLarge, CodeRateLimited, CodeUnsupported, CodeTimeout (its turn did not
// come), CodeNotFound (its context was deleted meanwhile) or CodeConflict (no identity yet).
func (c *Client) RunCell(ctx context.Context, cell wire.Cell) (CellResult, error) {
	if cell.Collect <= 0 || cell.Collect > sandlot.MaxOutputBytes {
		cell.Collect = sandlot.MaxOutputBytes
	}
	s, err := c.Cell(ctx, cell)
	if err != nil {
		return CellResult{}, err
	}
	defer s.Close()
	var out CellResult
	for {
		kind, payload, err := s.Next()
		if errors.Is(err, io.EOF) {
			out.CellEnd = s.end
			return out, nil
		}
		if err != nil {
			return CellResult{}, err
		}
		switch kind {
		case wire.FrameResult:
			out.Results = append(out.Results, s.result)
		case wire.FrameStdout, wire.FrameStderr:
			to := &out.Stdout
			if kind == wire.FrameStderr {
				to = &out.Stderr
			}
			if int64(len(*to)+len(payload)) > cell.Collect {
				return CellResult{}, nonsense("it sent more output than was asked for")
			}
			*to = append(*to, payload...)
		}
	}
}

// CellStream is a cell's frames. Next and Close are one goroutine's; Close may come from another.
type CellStream struct {
	*frameStream
	pieces  []byte
	count   int
	total   int
	result  wire.Result
	end     wire.CellEnd
	isEnded bool
}

// Cell starts a cell. It streams until the cell ends; Close or a cancelled ctx interrupts it. Codes as of RunCell.
func (c *Client) Cell(ctx context.Context, cell wire.Cell) (*CellStream, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(cell); err != nil {
		return nil, sandlot.Wrap(err, sandlot.CodeInvalidRequest, "the cell cannot be written as JSON")
	}
	q := request{method: http.MethodPost, path: wire.PathCells, body: bytes.NewReader(b.Bytes()), size: int64(b.Len())}
	whole := 2*time.Duration(cell.TimeoutMS)*time.Millisecond + cellGrace
	fs, err := c.open(ctx, q, whole, cell.Collect > 0)
	if err != nil {
		return nil, err
	}
	return &CellStream{frameStream: fs}, nil
}

// Result is the last one that came, when Next returned FrameResult.
func (s *CellStream) Result() wire.Result { return s.result }

// End is how the cell ended, after Next returned io.EOF.
func (s *CellStream) End() wire.CellEnd { return s.end }

// Next returns the next frame: FrameStdout and FrameStderr with their payload, which is good until the next call,
// FramePing, FrameResult when a result is whole, and at last FrameCell. After that it returns io.EOF.
func (s *CellStream) Next() (kind byte, payload []byte, err error) {
	if s.isEnded {
		return 0, nil, io.EOF
	}
	for {
		kind, payload, err = s.read()
		if err != nil {
			return 0, nil, err
		}
		switch kind {
		case wire.FrameStdout, wire.FrameStderr, wire.FramePing:
			return kind, payload, nil
		case wire.FrameResult:
			whole, err := s.piece(payload)
			if err != nil {
				return 0, nil, err
			}
			if whole {
				return kind, nil, nil
			}
		case wire.FrameCell:
			if s.pieces != nil || json.Unmarshal(payload, &s.end) != nil || !validEnd(&s.end) {
				return 0, nil, nonsense("its cell's end is impossible")
			}
			s.isEnded = true
			s.finish()
			return kind, nil, nil
		default:
			return 0, nil, nonsense("a frame of kind %d where none belongs", kind)
		}
	}
}

// piece takes a piece of a result, and says whether it was the last.
func (s *CellStream) piece(b []byte) (bool, error) {
	if len(b) == 0 || b[0] > 1 {
		return false, nonsense("a result's piece is not one")
	}
	if s.total += len(b) - 1; len(s.pieces)+len(b)-1 > wire.MaxResultBytes || s.total > 2*wire.MaxResultBytes {
		return false, nonsense("its results are too large")
	}
	whole := b[1:]
	if s.pieces != nil || b[0] == 0 {
		s.pieces = append(s.pieces, whole...)
		whole = s.pieces
	}
	if b[0] == 0 {
		return false, nil
	}
	s.pieces = nil
	if s.count++; s.count > wire.MaxResults {
		return false, nonsense("it sent too many results")
	}
	return true, s.decode(whole)
}

// decode reads a result.
func (s *CellStream) decode(b []byte) (err error) {
	if s.result, err = wire.DecodeResult(b); err != nil {
		return nonsense("%v", err)
	}
	return nil
}

func validEnd(e *wire.CellEnd) bool {
	if e.Context != "" && !validContext(e.Context) || e.ExecutionCount < 0 || e.ExecutionCount > maxCount || e.DurationUS < 0 || e.ResultsDropped < 0 {
		return false
	}
	if e.Error != nil {
		// Names are shown in one line; value and traceback are output, as the guest printed it.
		e.Error.Name = sanitize(e.Error.Name, maxMessage)
		if !utf8.ValidString(e.Error.Value) || !utf8.ValidString(e.Error.Traceback) {
			return false
		}
	}
	return true
}

func validContext(id string) bool {
	for i := range len(id) {
		c := id[i]
		if !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || i > 0 && (c == '-' || c == '_' || c == '.')) {
			return false
		}
	}
	return id != "" && len(id) <= 64
}

var (
	contextStates    = map[string]bool{"starting": true, "idle": true, "busy": true, "dead": true}
	contextLanguages = map[string]bool{"python": true, "javascript": true}
)

func checkContext(x *wire.Context) error {
	if !validContext(x.ID) || !contextStates[x.State] || !contextLanguages[x.Language] || !validLog(x.Cwd) || x.Cwd == "" ||
		x.PID < 0 || x.PID > maxPID || x.ExecutionCount < 0 || x.ExecutionCount > maxCount ||
		x.CreatedAt.Year() < 1970 || x.CreatedAt.Year() > 9999 || x.LastUsedAt.Year() < 1970 || x.LastUsedAt.Year() > 9999 {
		return nonsense("it tells of an impossible context")
	}
	return nil
}

// Contexts lists the contexts, oldest first.
func (c *Client) Contexts(ctx context.Context) ([]wire.Context, error) {
	var out []wire.Context
	if err := c.call(ctx, request{method: http.MethodGet, path: wire.PathContexts}, nil, &out); err != nil {
		return nil, err
	}
	if len(out) > maxContexts {
		return nil, nonsense("it lists too many contexts")
	}
	for i := range out {
		if err := checkContext(&out[i]); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// NewContext makes a context and starts its kernel.
// Fails with CodeInvalidRequest, CodeConflict (there is one of that name), CodeRateLimited or CodeUnsupported.
func (c *Client) NewContext(ctx context.Context, in wire.NewContext) (wire.Context, error) {
	return c.oneContext(ctx, request{method: http.MethodPost, path: wire.PathContexts}, in)
}

// RestartContext gives a context a new kernel. Fails with CodeNotFound or CodeRateLimited.
func (c *Client) RestartContext(ctx context.Context, id string) (wire.Context, error) {
	return c.oneContext(ctx, request{method: http.MethodPost, path: wire.PathContexts + "/" + id + "/restart"}, nil)
}

func (c *Client) oneContext(ctx context.Context, q request, in any) (wire.Context, error) {
	var out wire.Context
	if err := c.callFor(ctx, 2*callTimeout, q, in, &out); err != nil {
		return wire.Context{}, err
	}
	return out, checkContext(&out)
}

// InterruptContext interrupts the cell that runs in a context, if one does. Fails with CodeNotFound.
func (c *Client) InterruptContext(ctx context.Context, id string) error {
	return c.call(ctx, request{method: http.MethodPost, path: wire.PathContexts + "/" + id + "/interrupt"}, nil, nil)
}

// DeleteContext ends a context with all that runs in it. Fails with CodeNotFound.
func (c *Client) DeleteContext(ctx context.Context, id string) error {
	return c.call(ctx, request{method: http.MethodDelete, path: wire.PathContexts + "/" + id}, nil, nil)
}
