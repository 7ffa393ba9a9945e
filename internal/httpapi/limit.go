package httpapi

import (
	"sync"
	"time"

	"golang.org/x/time/rate"

	"sandlot"
)

// callersKept bounds the memory of rate limits; those that have not called for callersIdle go first.
const (
	callersKept = 10_000
	callersIdle = time.Minute
)

// callers bounds what each token does at once.
type callers struct {
	limits Limits
	mu     sync.Mutex
	byID   map[sandlot.ID]*caller
}

type caller struct {
	rate    *rate.Limiter
	streams int
	last    time.Time
}

func newCallers(l Limits) *callers { return &callers{limits: l, byID: map[sandlot.ID]*caller{}} }

// enter counts a request, and a stream until release.
func (c *callers) enter(id sandlot.ID, stream bool) (release func(), err error) {
	now := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	k := c.byID[id]
	if k == nil {
		if len(c.byID) >= callersKept {
			for old, v := range c.byID {
				if v.streams == 0 && now.Sub(v.last) > callersIdle {
					delete(c.byID, old)
				}
			}
		}
		k = &caller{rate: rate.NewLimiter(rate.Limit(c.limits.RequestsPerSecond), c.limits.Burst)}
		c.byID[id] = k
	}
	k.last = now
	if !k.rate.AllowN(now, 1) {
		wait := max(1, int(1/c.limits.RequestsPerSecond+0.999))
		return nil, sandlot.Errorf(sandlot.CodeRateLimited, "more than %g requests a second with this token: wait", c.limits.RequestsPerSecond).With("retry_after_s", wait)
	}
	if !stream {
		return func() {}, nil
	}
	if k.streams >= c.limits.Streams {
		return nil, sandlot.Errorf(sandlot.CodeRateLimited, "%d streams are open with this token: close one", k.streams).
			With("limit", c.limits.Streams).With("retry_after_s", 5)
	}
	k.streams++
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		k.streams--
	}, nil
}
