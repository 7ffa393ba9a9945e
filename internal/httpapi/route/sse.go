package route

import (
	"bytes"
	"encoding/json"
	"errors"
	"net/http"
	"sync"
	"time"
	"unicode/utf8"

	"sandlot"
)

// SSE writes server-sent events, each a JSON object on one data line. It sends a comment after each beat of
// silence; a client that takes neither an event nor a comment within a beat is gone.
type SSE struct {
	q    *Request
	rc   *http.ResponseController
	mu   sync.Mutex
	buf  bytes.Buffer
	last time.Time
	err  error
	quit chan struct{}
	once sync.Once
	gone func() // ends the request's work when a write fails
}

// NewSSE begins an event stream. gone is called once when the client is found to be gone. End must be
// called.
func NewSSE(q *Request, gone func()) *SSE {
	h := q.W.Header()
	h.Set("Content-Type", "text/event-stream")
	h.Set("Cache-Control", "no-store")
	h.Set("X-Accel-Buffering", "no")
	s := &SSE{q: q, rc: http.NewResponseController(q.W), last: time.Now(), quit: make(chan struct{}), gone: gone}
	q.W.WriteHeader(http.StatusOK)
	s.mu.Lock()
	s.flush()
	s.mu.Unlock()
	go s.beat()
	return s
}

func (s *SSE) beat() {
	t := time.NewTicker(s.q.Beat)
	defer t.Stop()
	for {
		select {
		case <-s.quit:
			return
		case <-t.C:
		}
		s.mu.Lock()
		if s.err == nil && time.Since(s.last) >= s.q.Beat {
			s.buf.WriteString(": ping\n\n")
			s.flush()
		}
		s.mu.Unlock()
	}
}

// Event sends one event.
func (s *SSE) Event(v any) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return s.err
	}
	s.buf.WriteString("data: ")
	enc := json.NewEncoder(&s.buf)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil { // ends the line
		s.buf.Reset()
		return err
	}
	s.buf.WriteByte('\n')
	s.flush()
	return s.err
}

func (s *SSE) flush() {
	_ = s.rc.SetWriteDeadline(time.Now().Add(s.q.Beat))
	_, err := s.q.W.Write(s.buf.Bytes())
	if err == nil {
		err = s.rc.Flush()
	}
	s.buf.Reset()
	if s.buf.Cap() > 1<<20 {
		s.buf = bytes.Buffer{}
	}
	s.last = time.Now()
	if err != nil {
		s.err = err
		s.once.Do(s.gone)
	}
}

// Error sends the typed last event of a stream that failed.
func (s *SSE) Error(err error) {
	_, body := Failure(err, s.q.ID)
	_ = s.Event(map[string]any{"type": "error", "error": body})
}

// End stops the heartbeat and waits for a write that is under way.
func (s *SSE) End() {
	close(s.quit)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err == nil {
		s.err = errors.New("the stream has ended")
	}
}

// ErrShuttingDown is a stream's last event when the server stops.
var ErrShuttingDown = sandlot.Errorf(sandlot.CodeShuttingDown, "the server is stopping; the sandbox runs on: call again").With("retry_after_s", 5)

// Runes cuts a byte stream into pieces that are whole characters.
type Runes struct{ rest []byte }

// Next takes more bytes and returns what can be sent: text when it is valid UTF-8. A character whose end
// has not come yet waits for it. The result is valid until the next call.
func (r *Runes) Next(b []byte) (data []byte, text bool) {
	if len(r.rest) > 0 {
		b = append(r.rest, b...)
		r.rest = nil
	}
	n := len(b)
	for i := 1; i < utf8.UTFMax && i <= len(b); i++ {
		if c := b[len(b)-i]; utf8.RuneStart(c) {
			if !utf8.FullRune(b[len(b)-i:]) {
				n = len(b) - i
			}
			break
		}
	}
	r.rest = append(r.rest, b[n:]...)
	return b[:n], utf8.Valid(b[:n])
}

// Rest returns what waits for an end that never came.
func (r *Runes) Rest() []byte {
	b := r.rest
	r.rest = nil
	return b
}
