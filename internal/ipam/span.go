// SPDX-License-Identifier: Apache-2.0

package ipam

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"time"
)

// MaxAddresses bounds how many addresses of a pod CIDR are ever used, counted
// from its beginning: far more than a node has pods, and what bounds the memory
// and the file of a large CIDR.
const MaxAddresses = 1 << 16

// skipped is how many addresses at the beginning of a CIDR are never given
// out: the network's own (in IPv6 the subnet router's) and the gateway.
const skipped = 2

// released is an address and when it was released, since boot.
type released struct {
	addr netip.Addr
	at   time.Duration
}

// span is a pod CIDR. It is protected by Pool.mu.
type span struct {
	cidr netip.Prefix
	size int // addresses from offset skipped on that may be given out
	// next is the lowest offset, beyond skipped, that may never have been used.
	next int
	// queue has the addresses that were used and are free, longest-free first.
	queue  []released
	queued map[netip.Addr]struct{}
}

func newSpan(cidr netip.Prefix) (*span, error) {
	if !cidr.IsValid() {
		return nil, fmt.Errorf("pod CIDR %s: want an address and a prefix length", cidr)
	}
	if cidr.Addr().Is4In6() {
		return nil, fmt.Errorf("pod CIDR %s: write it as IPv4", cidr)
	}
	host := cidr.Addr().BitLen() - cidr.Bits()
	if host < 2 {
		return nil, fmt.Errorf("pod CIDR %s: too small, no address is left beside network and gateway", cidr)
	}
	size := MaxAddresses
	if host <= 16 {
		size = 1<<host - skipped
		if cidr.Addr().Is4() {
			size-- // the broadcast address
		}
	}
	return &span{cidr: cidr.Masked(), size: size, queued: map[netip.Addr]struct{}{}}, nil
}

// contains says whether a is one that the span may give out.
func (s *span) contains(a netip.Addr) bool {
	if !s.cidr.Contains(a) {
		return false
	}
	off := offset(s.cidr.Addr(), a)
	return off >= skipped && off < uint64(skipped+s.size)
}

// offset returns a - base. Both are in one prefix; a difference of 2^64 and
// more is cut to the largest number.
func offset(base, a netip.Addr) uint64 {
	b, x := base.As16(), a.As16()
	if binary.BigEndian.Uint64(b[:8]) != binary.BigEndian.Uint64(x[:8]) {
		return ^uint64(0)
	}
	return binary.BigEndian.Uint64(x[8:]) - binary.BigEndian.Uint64(b[8:])
}

// at returns the address at an offset beyond skipped.
func (s *span) at(i int) netip.Addr {
	b := s.cidr.Addr().As16()
	low := binary.BigEndian.Uint64(b[8:]) + uint64(skipped+i)
	binary.BigEndian.PutUint64(b[8:], low)
	a := netip.AddrFrom16(b)
	if s.cidr.Addr().Is4() {
		a = a.Unmap()
	}
	return a
}

// peek returns the address that is to be given out next: one never used, else
// the one released first if that was at limit or before.
func (s *span) peek(taken func(netip.Addr) bool, limit time.Duration) (netip.Addr, bool) {
	for ; s.next < s.size; s.next++ {
		a := s.at(s.next)
		if _, queued := s.queued[a]; !queued && !taken(a) {
			return a, true
		}
	}
	if len(s.queue) == 0 || s.queue[0].at > limit {
		return netip.Addr{}, false
	}
	return s.queue[0].addr, true
}

// take removes the address that peek returned from what is free.
func (s *span) take(a netip.Addr) {
	if len(s.queue) > 0 && s.queue[0].addr == a {
		s.queue = s.queue[1:]
		delete(s.queued, a)
		return
	}
	s.next++
}

// push adds a released address; none of them was released later.
func (s *span) push(r released) {
	s.queue = append(s.queue, r)
	s.queued[r.addr] = struct{}{}
}
