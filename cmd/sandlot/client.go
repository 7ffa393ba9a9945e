package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"syscall"
	"time"

	"sandlot"
)

// remote are the flags of every command that talks to a server.
type remote struct {
	URL     string         `env:"SANDLOT_URL" placeholder:"URL" help:"The server."`
	Token   sandlot.Secret `env:"SANDLOT_TOKEN" placeholder:"TOKEN" help:"The token; better in the environment, where other users do not see it."`
	Project string         `env:"SANDLOT_PROJECT" placeholder:"REF" help:"The project."`
	JSON    bool           `name:"json" help:"Print the API's JSON."`
}

// client makes a client of what the flags and the environment say.
func (r *remote) client() (*client, error) {
	for _, v := range []struct{ value, flag, name string }{
		{r.URL, "--url", "SANDLOT_URL"}, {r.Token.Reveal(), "--token", "SANDLOT_TOKEN"}, {r.Project, "--project", "SANDLOT_PROJECT"},
	} {
		if v.value == "" {
			return nil, fmt.Errorf("%s is not set: run `source .sandlot/env` where `./dev up` was run, or give %s", v.name, v.flag)
		}
	}
	return newClient(r.URL, r.Project, r.Token)
}

// client is a caller of the Project API.
type client struct {
	base    string // without a slash at the end
	project string
	token   sandlot.Secret
	http    *http.Client
}

func newClient(base, project string, token sandlot.Secret) (*client, error) {
	u, err := url.Parse(base)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return nil, fmt.Errorf("the server's URL %q does not look like http://HOST:PORT", base)
	}
	return &client{
		base: strings.TrimRight(base, "/"), project: project, token: token,
		http: &http.Client{
			Transport: &http.Transport{
				Proxy:                 http.ProxyFromEnvironment,
				DialContext:           (&net.Dialer{Timeout: 10 * time.Second, KeepAlive: 15 * time.Second}).DialContext,
				TLSHandshakeTimeout:   10 * time.Second,
				MaxIdleConnsPerHost:   32,
				IdleConnTimeout:       90 * time.Second,
				ExpectContinueTimeout: time.Second,
				DisableCompression:    true, // archives are asked for as they are
			},
			// A redirect would carry the token elsewhere.
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
	}, nil
}

// Bounds of what a server may send.
const (
	maxAnswer = 160 << 20 // a synchronous exec's two outputs of 10 MiB, each byte escaped
	maxEvent  = 48 << 20  // one event of a stream: a result has up to 32 MiB
	maxError  = 64 << 10
)

// apiError is the error envelope of an answer.
type apiError struct {
	Status    int
	Code      sandlot.Code
	Message   string
	RequestID string
}

func (e *apiError) Error() string {
	s := printable(e.Message) + " (" + string(e.Code)
	if e.RequestID != "" {
		s += ", request " + printable(e.RequestID)
	}
	return s + ")"
}

// isNotFound says whether the server has no such thing.
func isNotFound(err error) bool {
	var e *apiError
	return errors.As(err, &e) && e.Code == sandlot.CodeNotFound
}

// readError reads the envelope of a failed answer.
func readError(resp *http.Response) error {
	b, _ := io.ReadAll(io.LimitReader(resp.Body, maxError))
	e := parseEnvelope(b)
	if e == nil {
		e = &apiError{Code: sandlot.CodeInternal, Message: "the server answered " + resp.Status}
	}
	if e.RequestID == "" {
		e.RequestID = resp.Header.Get("X-Request-Id")
	}
	e.Status = resp.StatusCode
	return e
}

// parseEnvelope reads {"error":{…}}; nil when it is none.
func parseEnvelope(b []byte) *apiError {
	var v struct {
		Error struct {
			Code      sandlot.Code `json:"code"`
			Message   string       `json:"message"`
			RequestID string       `json:"request_id"`
		} `json:"error"`
	}
	if json.Unmarshal(b, &v) != nil || v.Error.Code == "" {
		return nil
	}
	return &apiError{Code: v.Error.Code, Message: v.Error.Message, RequestID: v.Error.RequestID}
}

// sandboxes is a path below the project's sandboxes; every part is escaped.
func (c *client) sandboxes(parts ...string) string {
	return under("/api/v1/projects/"+url.PathEscape(c.project)+"/sandboxes", parts...)
}

// templates is a path below the project's templates.
func (c *client) templates(parts ...string) string {
	return under("/api/v1/projects/"+url.PathEscape(c.project)+"/templates", parts...)
}

// under is a path below another; every part is escaped, so that none can become two.
func under(path string, parts ...string) string {
	for _, part := range parts {
		if part == "." || part == ".." { // the client library would resolve them
			part = strings.ReplaceAll(part, ".", "%2E")
		} else {
			part = url.PathEscape(part)
		}
		path += "/" + part
	}
	return path
}

// do sends a request. The answer's status is one of success; its body is the caller's to close.
func (c *client) do(ctx context.Context, method, path string, query url.Values, header http.Header, body io.Reader, length int64) (*http.Response, error) {
	target := c.base + path
	if len(query) > 0 {
		target += "?" + query.Encode()
	}
	req, err := http.NewRequestWithContext(ctx, method, target, body)
	if err != nil {
		return nil, err
	}
	if length >= 0 && body != nil {
		req.ContentLength = length
	}
	for k, v := range header {
		req.Header[k] = v
	}
	req.Header.Set("Authorization", "Bearer "+c.token.Reveal())
	req.Header.Set("User-Agent", "sandlot/"+version)
	resp, err := c.http.Do(req)
	if err != nil {
		if errors.Is(err, syscall.ECONNREFUSED) {
			return nil, fmt.Errorf("no server answers at %s: start one with `./dev up`, or set SANDLOT_URL", c.base)
		}
		var u *url.Error
		if errors.As(err, &u) { // the URL is known, and long
			err = u.Err
		}
		return nil, fmt.Errorf("%s: %w", c.base, err)
	}
	if resp.StatusCode/100 != 2 {
		defer resp.Body.Close()
		return nil, readError(resp)
	}
	return resp, nil
}

// call sends in as JSON (nil: no body) and returns the JSON answer, also decoded into out unless it is nil.
func (c *client) call(ctx context.Context, method, path string, query url.Values, in, out any) (json.RawMessage, error) {
	return c.callWith(ctx, method, path, query, nil, in, out)
}

func (c *client) callWith(ctx context.Context, method, path string, query url.Values, header http.Header, in, out any) (json.RawMessage, error) {
	var body io.Reader
	length := int64(-1)
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return nil, err
		}
		body, length = bytes.NewReader(b), int64(len(b))
		header = header.Clone()
		if header == nil {
			header = http.Header{}
		}
		header.Set("Content-Type", "application/json")
	}
	resp, err := c.do(ctx, method, path, query, header, body, length)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("the answer broke off: %w", err)
	case len(b) > maxAnswer:
		return nil, fmt.Errorf("the answer has more than %d bytes", maxAnswer)
	case out == nil || len(b) == 0:
		return b, nil
	}
	if err := json.Unmarshal(b, out); err != nil {
		return nil, fmt.Errorf("the answer cannot be read: %w", err)
	}
	return b, nil
}

// stream sends in as JSON and gives each event of the answer's stream to each, until the stream ends or
// each fails. A nil error means that the server ended the stream in order.
func (c *client) stream(ctx context.Context, method, path string, query url.Values, in any, each func(data []byte) error) error {
	var body io.Reader
	length := int64(-1)
	header := http.Header{"Accept": {"text/event-stream"}}
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return err
		}
		body, length = bytes.NewReader(b), int64(len(b))
		header.Set("Content-Type", "application/json")
	}
	resp, err := c.do(ctx, method, path, query, header, body, length)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	return readEvents(resp.Body, each)
}
