package wire

import (
	"bytes"
	"errors"
	"io"
	"testing"
)

func TestFrames(t *testing.T) {
	var b []byte
	b = AppendFrame(b, FrameStdout, []byte("hello"))
	b = AppendFrame(b, FramePing, nil)
	b = AppendFrame(b, FrameStderr, make([]byte, MaxFrame+1))
	r := bytes.NewReader(b)
	for _, want := range []struct {
		kind byte
		n    int
	}{{FrameStdout, 5}, {FramePing, 0}, {FrameStderr, MaxFrame}, {FrameStderr, 1}} {
		kind, p, err := ReadFrame(r, nil)
		if kind != want.kind || len(p) != want.n || err != nil {
			t.Errorf("got %d, %d bytes, %v; want %+v", kind, len(p), err, want)
		}
	}
	if _, _, err := ReadFrame(r, nil); !errors.Is(err, io.EOF) {
		t.Errorf("at the end: %v", err)
	}
	for _, cut := range []string{"\x01", "\x01\x00\x00\x00\x05hell", "\x01\x00\x00\x00\x05"} {
		if _, _, err := ReadFrame(bytes.NewReader([]byte(cut)), nil); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("%q: %v", cut, err)
		}
	}
}

func FuzzReadFrame(f *testing.F) {
	f.Add(AppendFrame(nil, FrameExit, []byte("{}")))
	f.Add([]byte("\x01\xff\xff\xff\xff"))
	f.Fuzz(func(t *testing.T, b []byte) {
		r := bytes.NewReader(b)
		var buf []byte
		for {
			kind, p, err := ReadFrame(r, buf)
			if err != nil {
				return
			}
			if len(p) > MaxFrame || len(p) > len(b) {
				t.Fatalf("%d bytes of payload from %d", len(p), len(b))
			}
			if back := AppendFrame(nil, kind, p); !bytes.Contains(b, back) {
				t.Fatalf("%x is not in the input", back)
			}
			buf = p
		}
	})
}
