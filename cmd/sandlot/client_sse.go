package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
)

// readEvents reads server-sent events and gives the data of each to each, which must not keep it. Lines may
// have any length up to maxEvent for one event; comments and other fields are passed over.
func readEvents(r io.Reader, each func(data []byte) error) error {
	br := bufio.NewReaderSize(r, 64<<10)
	var line, data []byte
	some := false
	for {
		part, err := br.ReadSlice('\n')
		if len(line)+len(part)+len(data) > maxEvent {
			return fmt.Errorf("an event of the stream has more than %d bytes", maxEvent)
		}
		line = append(line, part...)
		if errors.Is(err, bufio.ErrBufferFull) {
			continue
		}
		if err != nil {
			if errors.Is(err, io.EOF) && len(line) == 0 && !some {
				return nil
			}
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return fmt.Errorf("the stream broke off: %w", err)
		}
		line = bytes.TrimRight(line, "\r\n")
		switch value, isData := bytes.CutPrefix(line, []byte("data:")); {
		case len(line) == 0 && some:
			if err := each(data); err != nil {
				return err
			}
			data, some = data[:0], false
		case isData:
			if some {
				data = append(data, '\n')
			}
			data, some = append(data, bytes.TrimPrefix(value, []byte(" "))...), true
		}
		line = line[:0]
	}
}
