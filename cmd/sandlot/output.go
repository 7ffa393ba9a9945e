package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"golang.org/x/sys/unix"
)

// printJSON prints the API's answer, indented.
func printJSON(w io.Writer, raw json.RawMessage) error {
	var b bytes.Buffer
	if err := json.Indent(&b, bytes.TrimSpace(raw), "", "  "); err != nil {
		return err
	}
	b.WriteByte('\n')
	_, err := w.Write(b.Bytes())
	return err
}

// table prints rows for people. What others chose (names, arguments, messages) is made printable.
func table(w io.Writer, head []string, rows [][]string) error {
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	fmt.Fprintln(t, strings.Join(head, "\t"))
	for _, row := range rows {
		cells := make([]string, len(row))
		for i, c := range row {
			cells[i] = printable(c)
			if cells[i] == "" {
				cells[i] = "-"
			}
		}
		fmt.Fprintln(t, strings.Join(cells, "\t"))
	}
	return t.Flush()
}

// printable shows a stranger's text so that a terminal obeys nothing in it.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '\uFFFD'
		}
		return r
	}, strings.ToValidUTF8(s, "\uFFFD"))
}

// ago words a past time, "" for none.
func ago(t, now time.Time) string {
	if t.IsZero() {
		return ""
	}
	return span(now.Sub(t)) + " ago"
}

// span words a duration by its largest unit.
func span(d time.Duration) string {
	switch d = max(d, 0); {
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	}
	return fmt.Sprintf("%dd", int(d.Hours()/24))
}

// size words a number of bytes.
func size(n int64) string {
	switch {
	case n < 0:
		return "-"
	case n < 1<<10:
		return fmt.Sprintf("%d B", n)
	case n < 1<<20:
		return fmt.Sprintf("%.0f KiB", float64(n)/(1<<10))
	case n < 1<<30:
		return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
	}
	return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30))
}

// isTerminal says whether a stream is a terminal.
func isTerminal(v any) bool {
	f, ok := v.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

const (
	barFrom  = 1 << 20 // smaller transfers show no bar
	barEvery = 100 * time.Millisecond
	barWidth = 30
)

// progress draws a bar on a terminal. A nil one draws nothing.
type progress struct {
	w     io.Writer
	name  string
	total int64 // -1: unknown
	done  int64
	begun time.Time
	drawn time.Time
}

// newProgress makes a bar for a transfer of total bytes, when w is a terminal and the transfer is large.
func newProgress(w io.Writer, name string, total int64) *progress {
	if !isTerminal(w) || total >= 0 && total <= barFrom {
		return nil
	}
	return &progress{w: w, name: printable(name), total: total, begun: time.Now()}
}

// Write counts; it is for io.TeeReader and io.MultiWriter.
func (p *progress) Write(b []byte) (int, error) {
	p.done += int64(len(b))
	if now := time.Now(); p.done > barFrom && now.Sub(p.drawn) >= barEvery {
		p.drawn = now
		p.draw()
	}
	return len(b), nil
}

func (p *progress) draw() {
	rate := float64(p.done) / max(time.Since(p.begun).Seconds(), 0.001)
	if p.total <= 0 {
		fmt.Fprintf(p.w, "\r\x1b[K%s  %s  %s/s", p.name, size(p.done), size(int64(rate)))
		return
	}
	full := int(barWidth * min(p.done, p.total) / p.total)
	fmt.Fprintf(p.w, "\r\x1b[K%s  [%s%s] %3d%%  %s/s", p.name,
		strings.Repeat("=", full), strings.Repeat(" ", barWidth-full), 100*min(p.done, p.total)/p.total, size(int64(rate)))
}

// through counts what is read from r.
func (p *progress) through(r io.Reader) io.Reader {
	if p == nil {
		return r
	}
	return io.TeeReader(r, p)
}

// finish leaves the last state on its own line.
func (p *progress) finish() {
	if p == nil || p.drawn.IsZero() {
		return
	}
	p.draw()
	fmt.Fprintln(p.w)
}
