package node

import (
	"context"
	"sync"
)

// eventBacklog is how far a reader may fall behind before it is cut off.
const eventBacklog = 1024

// broadcaster sends each event to every subscriber. The zero value is ready.
type broadcaster struct {
	mu   sync.Mutex
	subs map[chan Event]struct{}
}

func (b *broadcaster) subscribe(ctx context.Context) <-chan Event {
	ch := make(chan Event, eventBacklog)
	b.mu.Lock()
	if b.subs == nil {
		b.subs = map[chan Event]struct{}{}
	}
	b.subs[ch] = struct{}{}
	b.mu.Unlock()
	context.AfterFunc(ctx, func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.end(ch)
	})
	return ch
}

// end closes a subscription once. b.mu is held.
func (b *broadcaster) end(ch chan Event) {
	if _, ok := b.subs[ch]; ok {
		delete(b.subs, ch)
		close(ch)
	}
}

func (b *broadcaster) send(e Event) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for ch := range b.subs {
		select {
		case ch <- e:
		default:
			b.end(ch)
		}
	}
}

func (b *broadcaster) closeAll() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for ch := range b.subs {
		b.end(ch)
	}
}
