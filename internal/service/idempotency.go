package service

import (
	"context"
	"errors"
	"sync"

	"sandlot"
	"sandlot/internal/authz"
	"sandlot/internal/store"
)

// keyring makes concurrent creates with one Idempotency-Key wait for the first. What it holds ends with
// the call; what lasts is in the store, written in the sandbox's own transaction.
type keyring struct {
	mu    sync.Mutex
	calls map[keyName]*keyCall
}

type keyName struct {
	project sandlot.ID
	key     string
}

type keyCall struct {
	hash   [32]byte
	done   chan struct{}
	result Created
	err    error
}

func newKeyring() *keyring { return &keyring{calls: map[keyName]*keyCall{}} }

func errOtherBody() error {
	return sandlot.Errorf(sandlot.CodeConflict, "this Idempotency-Key was used with another body: use a new key")
}

// once runs create for the first of the calls with one key; the others, now or within a day, get its result.
func (s *Service) once(ctx context.Context, g authz.Grant, req CreateRequest, create func() (Created, error)) (Created, error) {
	if err := validKey(req.Key); err != nil {
		return Created{}, err
	}
	name := keyName{g.Project.ID, req.Key}
	for {
		s.keys.mu.Lock()
		if call := s.keys.calls[name]; call != nil {
			s.keys.mu.Unlock()
			if call.hash != req.BodyHash {
				return Created{}, errOtherBody()
			}
			select {
			case <-call.done:
			case <-ctx.Done():
				return Created{}, ctx.Err()
			}
			if canceled(call.err) {
				continue // the first caller went away: somebody else does it
			}
			result := call.result
			result.Replayed = call.err == nil
			return result, call.err
		}
		call := &keyCall{hash: req.BodyHash, done: make(chan struct{}), err: context.Canceled} // if create panics
		s.keys.calls[name] = call
		s.keys.mu.Unlock()
		func() {
			defer func() {
				s.keys.mu.Lock()
				delete(s.keys.calls, name)
				s.keys.mu.Unlock()
				close(call.done)
			}()
			if call.result, call.err = s.replay(ctx, g, req); isNotFound(call.err) {
				call.result, call.err = create()
			}
		}()
		return call.result, call.err
	}
}

// replay answers from the store: the sandbox that the key made, as it is now.
func (s *Service) replay(ctx context.Context, g authz.Grant, req CreateRequest) (Created, error) {
	r, err := s.store.Idempotency(ctx, g.Project.ID, req.Key, s.clock.Now().Add(-store.IdempotencyKept))
	if err != nil {
		return Created{}, err
	}
	if r.BodyHash != req.BodyHash {
		return Created{}, errOtherBody()
	}
	sb, err := s.Get(ctx, g, r.Sandbox)
	if err != nil {
		return Created{}, err
	}
	return Created{Sandbox: sb, PreviewToken: s.previewToken(sb), Replayed: true}, nil
}

func canceled(err error) bool {
	return errors.Is(err, context.Canceled)
}

func validKey(key string) error {
	if len(key) > 255 {
		return sandlot.Errorf(sandlot.CodeInvalidRequest, "an Idempotency-Key has at most 255 characters")
	}
	for i := range len(key) {
		if key[i] < 0x21 || key[i] > 0x7e {
			return sandlot.Errorf(sandlot.CodeInvalidRequest, "an Idempotency-Key has visible ASCII characters only")
		}
	}
	return nil
}
