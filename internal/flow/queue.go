// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"maps"
	"slices"
	"sync"

	"google.golang.org/protobuf/types/known/timestamppb"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
)

// Where events are lost; the values of Lost.where.
const (
	WhereKernelRing = "kernel-ring" // the agent read too slowly
	WhereObserver   = "observer"    // the client read too slowly
)

// queue is what waits for one client: at most limit items. When it is full,
// the following items are only counted, until the client has taken all that
// waits; then it gets one Lost for its own flows and one for each CPU whose
// kernel ring lost events in that time, so that nothing goes missing unsaid.
type queue struct {
	filter *filter
	wake   chan struct{} // holds a token when there is something to take
	limit  int

	mu     sync.Mutex
	items  []*weftv1.ObserveResponse // protected by mu
	missed missed                    // protected by mu
	lost   uint64                    // flows not delivered in all; protected by mu
}

// missed is what came while the queue was full.
type missed struct {
	flows    uint64
	from, to *timestamppb.Timestamp // of the first and last flow
	kernel   map[uint32]*weftv1.Lost
}

func newQueue(f *filter, limit int) *queue {
	return &queue{filter: f, limit: limit, wake: make(chan struct{}, 1)}
}

// push adds an item if the client wants it. It never blocks.
func (q *queue) push(r *weftv1.ObserveResponse) {
	if !q.filter.wants(r) {
		return
	}
	q.mu.Lock()
	if q.missed.empty() && len(q.items) < q.limit {
		q.items = append(q.items, r)
	} else {
		q.missed.add(r)
		if r.GetFlow() != nil {
			q.lost++
		}
	}
	q.mu.Unlock()
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// take returns all that waits, and what was lost after it. The slice given
// is used for what comes next.
func (q *queue) take(empty []*weftv1.ObserveResponse) []*weftv1.ObserveResponse {
	q.mu.Lock()
	defer q.mu.Unlock()
	items := q.items
	clear(empty)
	q.items = empty[:0]
	if !q.missed.empty() {
		items = append(items, q.missed.items()...)
		q.missed = missed{}
	}
	return items
}

// dropped returns how many flows the client has lost by itself.
func (q *queue) dropped() uint64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.lost
}

func (m *missed) empty() bool { return m.flows == 0 && len(m.kernel) == 0 }

func (m *missed) add(r *weftv1.ObserveResponse) {
	if f := r.GetFlow(); f != nil {
		if m.flows == 0 {
			m.from = f.Time
		}
		m.flows++
		m.to = f.Time
		return
	}
	l := r.GetLost()
	if m.kernel == nil {
		m.kernel = map[uint32]*weftv1.Lost{}
	}
	sum := m.kernel[l.Cpu]
	if sum == nil {
		sum = &weftv1.Lost{Where: l.Where, Cpu: l.Cpu, From: l.From}
		m.kernel[l.Cpu] = sum
	}
	sum.Count += l.Count
	sum.To = l.To
}

func (m *missed) items() []*weftv1.ObserveResponse {
	var out []*weftv1.ObserveResponse
	if m.flows > 0 {
		out = append(out, lostItem(&weftv1.Lost{Count: m.flows, Where: WhereObserver, From: m.from, To: m.to}))
	}
	for _, cpu := range slices.Sorted(maps.Keys(m.kernel)) {
		out = append(out, lostItem(m.kernel[cpu]))
	}
	return out
}

func lostItem(l *weftv1.Lost) *weftv1.ObserveResponse {
	return &weftv1.ObserveResponse{Item: &weftv1.ObserveResponse_Lost{Lost: l}}
}
