package template

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"syscall"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"

	"sandlot"
)

// registryStore is a repository of a registry. The operator's references are asked for with the credentials
// of this host's docker configuration. A stranger's are not, and reach public addresses only, also after a
// redirect: else any caller could read this host's networks through it.
type registryStore struct {
	ref    name.Reference
	puller *remote.Puller
	client *registryTransport
	stall  time.Duration // between two pieces of a blob
}

func openRegistry(reference string, stranger bool) (imageStore, error) {
	ref, err := name.ParseReference(reference)
	if err != nil {
		return nil, badImage("%v", err)
	}
	client := &registryTransport{direct: newRegistryTransport(), proxied: newRegistryTransport(), stranger: stranger}
	client.direct.Proxy = nil
	var keys authn.Keychain = authn.DefaultKeychain
	if stranger {
		keys = anonymous{}
		client.direct.DialContext = (&net.Dialer{Timeout: dialTime, Control: publicOnly}).DialContext
	}
	puller, err := remote.NewPuller(remote.WithAuthFromKeychain(keys), remote.WithTransport(client), remote.WithUserAgent("sandlot"))
	if err != nil {
		return nil, err
	}
	return &registryStore{ref: ref, puller: puller, client: client, stall: answerTime}, nil
}

type anonymous struct{}

func (anonymous) Resolve(authn.Resource) (authn.Authenticator, error) { return authn.Anonymous, nil }

const (
	dialTime   = 10 * time.Second
	answerTime = 60 * time.Second
)

func newRegistryTransport() *http.Transport {
	return &http.Transport{
		Proxy:                  http.ProxyFromEnvironment,
		DialContext:            (&net.Dialer{Timeout: dialTime}).DialContext,
		TLSHandshakeTimeout:    dialTime,
		ResponseHeaderTimeout:  answerTime,
		MaxResponseHeaderBytes: 1 << 20,
		DisableCompression:     true, // digests are of what is sent
		ForceAttemptHTTP2:      true,
	}
}

// registryTransport sends no plain HTTP but over loopback, where only this host listens. Where this host uses a
// proxy, that one decides which addresses can be reached.
type registryTransport struct {
	direct, proxied *http.Transport
	stranger        bool
}

func (t *registryTransport) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.URL.Scheme != "https" && !isLoopback(req.URL) {
		return nil, badImage("%s is asked for over plain HTTP: a registry must speak HTTPS, unless it is on loopback", req.URL.Host)
	}
	if t.stranger {
		// Here and not when dialing: a proxy may dial for us.
		if ip, err := netip.ParseAddr(req.URL.Hostname()); err == nil && !isPublic(ip) || isLoopback(req.URL) {
			return nil, notPublic(req.URL.Hostname())
		}
	}
	if proxy, err := http.ProxyFromEnvironment(req); err != nil || proxy != nil {
		return t.proxied.RoundTrip(req) // which tells of the error
	}
	return t.direct.RoundTrip(req)
}

func isLoopback(u *url.URL) bool {
	host := u.Hostname()
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.Unmap().IsLoopback()
}

func notPublic(host string) error {
	return badImage("the registry's address %s is not a public one", host)
}

// publicOnly refuses to connect, after names are resolved, to what is not on the public Internet.
func publicOnly(_, address string, _ syscall.RawConn) error {
	ap, err := netip.ParseAddrPort(address)
	if err != nil || !isPublic(ap.Addr()) {
		return notPublic(address)
	}
	return nil
}

// notPublicNets is what IsPrivate and the like leave out: this network, shared (CGNAT), protocol assignments,
// documentation, benchmarks, reserved; NAT64, 6to4 and Teredo, which wrap any IPv4 address; documentation.
var notPublicNets = func() (list []netip.Prefix) {
	for s := range strings.FieldsSeq(`0.0.0.0/8 100.64.0.0/10 192.0.0.0/24 192.0.2.0/24 192.88.99.0/24 198.18.0.0/15
		198.51.100.0/24 203.0.113.0/24 240.0.0.0/4 64:ff9b::/96 64:ff9b:1::/48 100::/64 2001::/23 2001:db8::/32 2002::/16 3fff::/20 fec0::/10 ::/96`) {
		list = append(list, netip.MustParsePrefix(s))
	}
	return list
}()

func isPublic(ip netip.Addr) bool {
	ip = ip.Unmap().WithZone("")
	if !ip.IsGlobalUnicast() || ip.IsPrivate() {
		return false
	}
	for _, p := range notPublicNets {
		if p.Contains(ip) {
			return false
		}
	}
	return true
}

func (s *registryStore) close() {
	s.client.direct.CloseIdleConnections()
	s.client.proxied.CloseIdleConnections()
}

func (s *registryStore) digest(ctx context.Context) (string, error) {
	d, err := s.puller.Get(ctx, s.ref)
	if err != nil {
		return "", s.explain(err)
	}
	return d.Digest.String(), nil
}

func (s *registryStore) manifest(ctx context.Context, digest string) ([]byte, error) {
	d, err := s.puller.Get(ctx, s.ref.Context().Digest(digest))
	if err != nil {
		return nil, s.explain(err)
	}
	return d.Manifest, nil
}

func (s *registryStore) blob(ctx context.Context, d v1.Descriptor) (io.ReadCloser, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	l, err := s.puller.Layer(ctx, s.ref.Context().Digest(d.Digest.String()))
	if err != nil {
		cancel(nil)
		return nil, s.explain(err)
	}
	r, err := l.Compressed()
	if err != nil {
		cancel(nil)
		return nil, s.explain(err)
	}
	b := &blobReader{ReadCloser: r, store: s, cancel: cancel, cause: func() error { return context.Cause(ctx) }}
	b.timer = time.AfterFunc(s.stall, func() {
		cancel(sandlot.Errorf(sandlot.CodeUnavailable, "the registry of %s stopped sending", s.ref))
	})
	return b, nil
}

// blobReader gives up when a registry sends nothing for some time: the builder's lock is held meanwhile.
type blobReader struct {
	io.ReadCloser
	store  *registryStore
	timer  *time.Timer
	cancel context.CancelCauseFunc
	cause  func() error
}

func (b *blobReader) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.timer.Reset(b.store.stall)
	if err != nil && !errors.Is(err, io.EOF) {
		if cause := b.cause(); cause != nil {
			return n, cause
		}
		if strings.Contains(err.Error(), "error verifying") { // the library's, which has no type
			return n, badImage("the registry sent another blob: %.300v", err)
		}
		return n, b.store.explain(err)
	}
	return n, err
}

func (b *blobReader) Close() error {
	b.timer.Stop()
	defer b.cancel(nil)
	return b.ReadCloser.Close()
}

// explain turns a registry's error into one for the caller.
func (s *registryStore) explain(err error) error {
	var own *sandlot.Error
	if errors.As(err, &own) {
		return own
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	var answer *transport.Error
	if errors.As(err, &answer) {
		switch answer.StatusCode {
		case http.StatusNotFound:
			return sandlot.Errorf(sandlot.CodeNotFound, "the registry has no image %s", s.ref)
		case http.StatusUnauthorized, http.StatusForbidden:
			return badImage("the registry does not give %s to this host: log in with `docker login %s`, or check the name", s.ref, s.ref.Context().RegistryStr())
		case http.StatusTooManyRequests:
			return sandlot.Errorf(sandlot.CodeUnavailable, "the registry answers %d: too many requests; try again later", answer.StatusCode)
		}
		return sandlot.Errorf(sandlot.CodeUnavailable, "the registry answers %d for %s", answer.StatusCode, s.ref)
	}
	return sandlot.Errorf(sandlot.CodeUnavailable, "%s", fmt.Sprintf("the registry of %s does not answer: %.500v", s.ref, err))
}
