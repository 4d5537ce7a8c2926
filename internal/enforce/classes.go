// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"net/netip"

	"github.com/weft-mesh/weft/internal/policy"
)

// leavingClasses returns, for each class that is in from and not in to, the
// class of to that its addresses fall into without it; policy.AnyPeer where
// there is none.
func leavingClasses(from, to map[netip.Prefix]uint64) map[uint64]uint64 {
	out := map[uint64]uint64{}
	for p, n := range from {
		if _, ok := to[p]; !ok {
			out[n] = parent(p, to)
		}
	}
	return out
}

// parent returns the class of the longest prefix of classes that holds p.
func parent(p netip.Prefix, classes map[netip.Prefix]uint64) uint64 {
	best, bits := policy.AnyPeer, -1
	for q, n := range classes {
		if q.Bits() > bits && q.Bits() <= p.Bits() && q.Contains(p.Addr()) {
			best, bits = n, q.Bits()
		}
	}
	return best
}

// inherited makes, for each class of parents that entries do not speak of, the
// entries of its parent. A class without a parent needs none: entries for any
// peer apply to it as they did.
func inherited(entries []policy.Entry, parents map[uint64]uint64) []policy.Entry {
	if len(parents) == 0 {
		return nil
	}
	known := map[uint64]bool{}
	for _, e := range entries {
		known[e.Peer] = true
	}
	var out []policy.Entry
	for class, parent := range parents {
		if known[class] || parent == policy.AnyPeer {
			continue
		}
		for _, e := range entries {
			if e.Peer == parent {
				e.Peer = class
				out = append(out, e)
			}
		}
	}
	return out
}

func inherit(entries []policy.Entry, parents map[uint64]uint64) []policy.Entry {
	return append(entries[:len(entries):len(entries)], inherited(entries, parents)...)
}
