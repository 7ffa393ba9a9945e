package agent

import (
	"io"
	"net/http"
	"strconv"
	"syscall"
	"time"

	"sandlot"
	"sandlot/internal/wire"
)

const maxBench = 64 << 30 // bytes through one stream

// serveSink reads bytes and forgets them: what the channel can do towards the guest.
func serveSink(w http.ResponseWriter, r *http.Request) error {
	bp := blocks.Get().(*[]byte)
	defer blocks.Put(bp)
	for {
		if _, err := r.Body.Read(*bp); err == io.EOF { //nolint:errorlint // Read's own
			break
		} else if err != nil {
			return sandlot.Wrap(err, sandlot.CodeInvalidRequest, "the body ended early")
		}
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// serveSource sends ?bytes= zeros: what the channel can do towards the host.
func serveSource(w http.ResponseWriter, r *http.Request) error {
	n, err := strconv.ParseInt(r.URL.Query().Get("bytes"), 10, 64)
	if err != nil || n < 0 || n > maxBench {
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "bytes is a number from 0 to %d", int64(maxBench))
	}
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Content-Length", strconv.FormatInt(n, 10))
	bp := blocks.Get().(*[]byte)
	defer blocks.Put(bp)
	clear(*bp)
	for n > 0 {
		k, err := w.Write((*bp)[:min(n, block)])
		if err != nil {
			return nil //nolint:nilerr // the host went away
		}
		n -= int64(k)
	}
	return nil
}

// serveForkExec starts a process with /dev/null for all three and tells how long fork, exec, run and reap took.
func (a *Agent) serveForkExec(w http.ResponseWriter, r *http.Request) error {
	id, err := a.ready()
	if err != nil {
		return err
	}
	var e wire.Exec
	if err := readJSON(r, &e); err != nil {
		return err
	}
	if err := checkExec(&e); err != nil {
		return err
	}
	u, err := a.account(e.User)
	if err != nil {
		return err
	}
	fd, err := syscall.Open("/dev/null", syscall.O_RDWR|syscall.O_CLOEXEC, 0)
	if err != nil {
		return noPipes(err)
	}
	defer func() { _ = syscall.Close(fd) }()
	began := time.Now()
	p, err := a.launch(id, u, &e, nil, []int{fd, fd, fd}, nil, nil)
	if err != nil {
		return sandlot.Wrap(err, sandlot.CodeInvalidRequest, "%s", trimLine(err.Error()))
	}
	select {
	case <-p.done:
	case <-r.Context().Done():
		killTree(p.pid)
		<-p.done
	}
	return answerJSON(w, wire.Bench{DurationUS: p.ended.Sub(began).Microseconds()})
}
