package service

import (
	"sync"

	"sandlot"
)

// quota counts sandboxes that are alive or being made. A place is taken before the node is asked and
// given back when the machine is gone, so the count is never below what exists.
type quota struct {
	host int // 0: no bound

	mu    sync.Mutex
	total int
	orgs  map[sandlot.ID]int
}

func newQuota(host int) *quota { return &quota{host: host, orgs: map[sandlot.ID]int{}} }

func (q *quota) reset() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.total = 0
	clear(q.orgs)
}

// adopt counts a sandbox that exists already, whatever the bounds say.
func (q *quota) adopt(org sandlot.ID) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.total++
	q.orgs[org]++
}

// reserve takes a place. Codes: quota_exceeded, capacity.
func (q *quota) reserve(org sandlot.ID, plan sandlot.Plan) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if used := q.orgs[org]; plan.Concurrent > 0 && used >= plan.Concurrent {
		return sandlot.Errorf(sandlot.CodeQuotaExceeded, "plan %s allows %d sandboxes at once: close one", plan.Name, plan.Concurrent).
			With("limit", plan.Concurrent).With("used", used).With("retry_after_s", 5)
	}
	if q.host > 0 && q.total >= q.host {
		return sandlot.Errorf(sandlot.CodeCapacity, "this host has no room for another sandbox now").With("retry_after_s", 5)
	}
	q.total++
	q.orgs[org]++
	return nil
}

// release gives a place back.
func (q *quota) release(org sandlot.ID) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.total--
	if q.orgs[org]--; q.orgs[org] == 0 {
		delete(q.orgs, org)
	}
}

// count is for measuring.
func (q *quota) count() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.total
}
