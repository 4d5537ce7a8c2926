// SPDX-License-Identifier: Apache-2.0

package flow

import weftv1 "github.com/weft-mesh/weft/api/weft/v1"

// ring keeps the newest items, at most as many as it was made for.
type ring struct {
	items []*weftv1.ObserveResponse
	start int // of the oldest, once the ring is full
	limit int
}

func newRing(limit int) *ring { return &ring{limit: limit} }

func (r *ring) add(i *weftv1.ObserveResponse) {
	if len(r.items) < r.limit {
		r.items = append(r.items, i)
		return
	}
	if r.limit == 0 {
		return
	}
	r.items[r.start] = i
	r.start = (r.start + 1) % r.limit
}

// all returns the items, oldest first, in a slice of the caller's own.
func (r *ring) all() []*weftv1.ObserveResponse {
	out := make([]*weftv1.ObserveResponse, 0, len(r.items))
	out = append(out, r.items[r.start:]...)
	return append(out, r.items[:r.start]...)
}
