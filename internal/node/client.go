package node

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"sandlot"
)

// Client is a Node at the other end of a Unix socket.
type Client struct {
	path  string
	http  *http.Client
	calls sync.WaitGroup // creates that go on without their callers
}

var _ Node = (*Client)(nil)

// NewClient makes a client; it connects when it is used.
func NewClient(path string) *Client {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", path)
	}
	return &Client{path: path, http: &http.Client{Transport: &http.Transport{
		DialContext: dial, DisableCompression: true, MaxIdleConnsPerHost: 16, IdleConnTimeout: time.Minute,
	}}}
}

// Close waits for what goes on behind and closes idle connections.
func (c *Client) Close() error {
	c.calls.Wait()
	c.http.CloseIdleConnections()
	return nil
}

func (c *Client) post(ctx context.Context, method string, in any) (*http.Response, error) {
	body, err := json.Marshal(in)
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://node/"+method, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, unreachable(ctx, err)
	}
	if resp.StatusCode != http.StatusOK {
		defer resp.Body.Close()
		return nil, readFailure(resp.Body)
	}
	return resp, nil
}

func unreachable(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return sandlot.Wrap(err, sandlot.CodeTimeout, "gave up waiting for the node")
	}
	return sandlot.Wrap(err, sandlot.CodeCapacity, "the node is not reachable; it may be restarting").With("retry_after_s", 2)
}

func readFailure(r io.Reader) error {
	var f failure
	if err := json.NewDecoder(io.LimitReader(r, maxNodeBody)).Decode(&f); err != nil || f.Code == "" {
		return sandlot.Wrap(err, sandlot.CodeInternal, "the node gave an answer that cannot be read")
	}
	return &sandlot.Error{Code: f.Code, Message: f.Message, Fields: f.Fields}
}

func call[Out any](ctx context.Context, c *Client, method string, in any) (out Out, err error) {
	resp, err := c.post(ctx, method, in)
	if err != nil {
		return out, err
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(&out); err != nil {
		return out, unreachable(ctx, err)
	}
	return out, nil
}

// Reconcile implements Node.
func (c *Client) Reconcile(ctx context.Context, keep []sandlot.ID) (ReconcileReport, error) {
	return call[ReconcileReport](ctx, c, "reconcile", idsRequest{keep})
}

// createTimeout bounds a create at the node, queueing included.
const createTimeout = 2 * time.Minute

// Create implements Node. A caller that leaves would take with it the answer that names a new machine, and
// nobody would own that machine until the next Reconcile: so the call goes on without its caller, and what it
// makes is destroyed.
func (c *Client) Create(ctx context.Context, req CreateRequest) (Created, error) {
	type answer struct {
		made Created
		err  error
	}
	answers := make(chan answer, 1)
	c.calls.Go(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), createTimeout)
		defer cancel()
		made, err := call[Created](ctx, c, "create", req)
		answers <- answer{made, err}
	})
	select {
	case a := <-answers:
		return a.made, a.err
	case <-ctx.Done():
	}
	c.calls.Go(func() {
		a := <-answers
		if a.err != nil {
			return
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), createTimeout)
		defer cancel()
		_ = c.Destroy(ctx, a.made.ID) // the node logs why it could not
	})
	return Created{}, sandlot.Wrap(context.Cause(ctx), sandlot.CodeTimeout, "gave up waiting for a machine")
}

// Destroy implements Node.
func (c *Client) Destroy(ctx context.Context, id sandlot.ID) error {
	_, err := call[struct{}](ctx, c, "destroy", idRequest{id})
	return err
}

// Samples implements Node.
func (c *Client) Samples(ctx context.Context, ids []sandlot.ID) (map[sandlot.ID]sandlot.Sample, error) {
	return call[map[sandlot.ID]sandlot.Sample](ctx, c, "samples", idsRequest{ids})
}

// Machines implements Node.
func (c *Client) Machines(ctx context.Context) ([]Machine, error) {
	return call[[]Machine](ctx, c, "machines", struct{}{})
}

// Templates implements Node.
func (c *Client) Templates(ctx context.Context, project sandlot.ID) ([]TemplateInfo, error) {
	return call[[]TemplateInfo](ctx, c, "templates", templateRequest{Project: project})
}

// Versions implements Node.
func (c *Client) Versions(ctx context.Context, project sandlot.ID, name string) ([]TemplateInfo, error) {
	return call[[]TemplateInfo](ctx, c, "versions", templateRequest{project, name})
}

// RemoveTemplate implements Node.
func (c *Client) RemoveTemplate(ctx context.Context, project sandlot.ID, ref string) error {
	_, err := call[struct{}](ctx, c, "remove-template", templateRequest{project, ref})
	return err
}

// BuildTemplate implements Node. A caller that leaves ends the build.
func (c *Client) BuildTemplate(ctx context.Context, req BuildRequest, log func(string)) (sandlot.Template, error) {
	resp, err := c.post(ctx, "build", req)
	if err != nil {
		return sandlot.Template{}, err
	}
	defer resp.Body.Close()
	dec := json.NewDecoder(resp.Body)
	for {
		var news buildNews
		switch err := dec.Decode(&news); {
		case err != nil:
			return sandlot.Template{}, unreachable(ctx, err)
		case news.Failure != nil:
			return sandlot.Template{}, &sandlot.Error{Code: news.Failure.Code, Message: news.Failure.Message, Fields: news.Failure.Fields}
		case news.Done != nil:
			return *news.Done, nil
		}
		log(news.Log)
	}
}

// Info implements Node.
func (c *Client) Info(ctx context.Context) (Info, error) {
	return call[Info](ctx, c, "info", struct{}{})
}

// Events implements Node.
func (c *Client) Events(ctx context.Context) (<-chan Event, error) {
	resp, err := c.post(ctx, "events", struct{}{})
	if err != nil {
		return nil, err
	}
	ch := make(chan Event)
	go func() {
		defer close(ch)
		defer resp.Body.Close()
		dec := json.NewDecoder(resp.Body)
		for {
			var e Event
			if dec.Decode(&e) != nil {
				return
			}
			select {
			case ch <- e:
			case <-ctx.Done():
				return
			}
		}
	}()
	return ch, nil
}

// Dial implements Node.
func (c *Client) Dial(ctx context.Context, id sandlot.ID) (net.Conn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, "unix", c.path)
	if err != nil {
		return nil, unreachable(ctx, err)
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	body, err := json.Marshal(idRequest{id})
	if err != nil {
		return nil, err
	}
	if _, err := fmt.Fprintf(conn, "POST /dial HTTP/1.1\r\nHost: node\r\nContent-Length: %d\r\n\r\n%s", len(body), body); err != nil {
		return nil, unreachable(ctx, err)
	}
	buf, oob := make([]byte, 64<<10), make([]byte, unix.CmsgSpace(4))
	n, oobn, _, _, err := conn.(*net.UnixConn).ReadMsgUnix(buf, oob)
	if err != nil {
		return nil, unreachable(ctx, err)
	}
	if n == 0 {
		return nil, unreachable(ctx, io.ErrUnexpectedEOF)
	}
	if !strings.HasPrefix(dialAnswer, string(buf[:min(n, len(dialAnswer))])) {
		resp, err := http.ReadResponse(bufio.NewReader(io.MultiReader(bytes.NewReader(buf[:n]), conn)), nil)
		if err != nil {
			return nil, unreachable(ctx, err)
		}
		defer resp.Body.Close()
		return nil, readFailure(resp.Body)
	}
	return receive(oob[:oobn])
}

// receive makes a connection of the descriptor that came with an answer.
func receive(oob []byte) (net.Conn, error) {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	for _, m := range msgs {
		fds, err := unix.ParseUnixRights(&m)
		if err != nil || len(fds) == 0 {
			continue
		}
		for _, extra := range fds[1:] {
			unix.Close(extra)
		}
		unix.CloseOnExec(fds[0])
		f := os.NewFile(uintptr(fds[0]), "guest")
		defer f.Close()
		return net.FileConn(f)
	}
	return nil, sandlot.Wrap(errors.New("no descriptor in the answer"), sandlot.CodeInternal, "the node passed no stream")
}
