package agent

import (
	"encoding/json"
	"net/http"
	"sync"
	"time"

	"sandlot/internal/wire"
)

// frameWriter sends frames as they come, each flushed at once, and a ping after each silence. Its methods may
// be called from several goroutines; after the first failed write the rest are dropped and gone is called.
type frameWriter struct {
	mu   sync.Mutex
	w    http.ResponseWriter
	rc   *http.ResponseController
	buf  []byte
	err  error
	last time.Time
	gone func()
	ping *time.Timer
	end  bool
	some bool // was sent
}

func newFrameWriter(w http.ResponseWriter, gone func()) *frameWriter {
	w.Header().Set("Content-Type", "application/octet-stream")
	fw := &frameWriter{w: w, rc: http.NewResponseController(w), gone: gone, last: time.Now()}
	fw.ping = time.AfterFunc(pingAfter, fw.tick)
	return fw
}

func (fw *frameWriter) tick() {
	fw.mu.Lock()
	defer fw.mu.Unlock()
	if fw.end || fw.err != nil {
		return
	}
	if time.Since(fw.last) >= pingAfter {
		_ = fw.write(wire.FramePing, nil)
	}
	fw.ping.Reset(pingAfter - time.Since(fw.last))
}

// frame sends one frame.
func (fw *frameWriter) frame(kind byte, payload []byte) error {
	fw.mu.Lock()
	defer fw.mu.Unlock()
	return fw.write(kind, payload)
}

func (fw *frameWriter) json(kind byte, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // wire's types always marshal
	}
	_ = fw.frame(kind, b)
}

func (fw *frameWriter) write(kind byte, payload []byte) error {
	if fw.err != nil || fw.end {
		return fw.err
	}
	fw.buf = wire.AppendFrame(fw.buf[:0], kind, payload)
	return fw.flush(fw.buf)
}

func (fw *frameWriter) flush(frames []byte) error {
	fw.some = true
	_, fw.err = fw.w.Write(frames)
	if fw.err == nil {
		fw.err = fw.rc.Flush()
	}
	if fw.err != nil {
		fw.gone()
	}
	fw.last = time.Now()
	return fw.err
}

// raw sends frames as they are.
func (fw *frameWriter) raw(frames []byte) error {
	fw.mu.Lock()
	defer fw.mu.Unlock()
	if fw.err != nil || fw.end {
		return fw.err
	}
	return fw.flush(frames)
}

// refuse ends the frames before the first, and says whether it could.
func (fw *frameWriter) refuse() bool {
	fw.mu.Lock()
	defer fw.mu.Unlock()
	fw.end = fw.end || !fw.some
	return !fw.some
}

// close stops the pings: w must not be written to after the handler has returned.
func (fw *frameWriter) close() {
	fw.mu.Lock()
	fw.end = true
	fw.mu.Unlock()
	fw.ping.Stop()
}
