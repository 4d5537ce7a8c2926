// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/weft-mesh/weft/internal/policy"
)

// kernel is the maps as the datapath reads them. It counts every change of a
// single entry and shows the state after it to see.
type kernel struct {
	entries   map[uint32]map[policy.Entry]policy.Entry // by subject and prefix
	classes   map[netip.Prefix]uint64
	endpoints map[netip.Addr]uint32 // attached pods
	ifindexes map[netip.Addr]int
	used      map[uint32]bool // subjects that have ever been
	max       int             // entries
	changes   int
	failAt    int // the change that is refused, from 1; 0 for none
	see       func()
}

func newKernel() *kernel {
	return &kernel{
		entries: map[uint32]map[policy.Entry]policy.Entry{}, classes: map[netip.Prefix]uint64{},
		endpoints: map[netip.Addr]uint32{}, ifindexes: map[netip.Addr]int{}, used: map[uint32]bool{}, max: 1 << 20, see: func() {},
	}
}

var errRefused = errors.New("refused")

func (k *kernel) change(f func()) error {
	k.changes++
	if k.failAt != 0 && k.changes >= k.failAt {
		return errRefused
	}
	f()
	k.see()
	return nil
}

// prefixOf is the key of an entry: without what it says.
func prefixOf(e policy.Entry) policy.Entry {
	e.Admin, e.Lower = policy.Outcome{}, policy.Outcome{}
	return e
}

func (k *kernel) count() int {
	n := 0
	for _, m := range k.entries {
		n += len(m)
	}
	return n
}

func (k *kernel) Install(subject uint32, entries []policy.Entry) error {
	for i, e := range entries {
		err := error(nil)
		if _, there := k.entries[subject][prefixOf(e)]; !there && k.count() >= k.max {
			err = errors.New("no space left")
		}
		if err == nil {
			err = k.change(func() {
				if k.entries[subject] == nil {
					k.entries[subject] = map[policy.Entry]policy.Entry{}
				}
				k.entries[subject][prefixOf(e)] = e
				k.used[subject] = true
			})
		}
		if err != nil {
			for _, e := range entries[:i] {
				delete(k.entries[subject], prefixOf(e))
				k.see()
			}
			if len(k.entries[subject]) == 0 {
				delete(k.entries, subject)
			}
			return fmt.Errorf("write policy entry: %w", err)
		}
	}
	return nil
}

func (k *kernel) Remove(subject uint32, entries []policy.Entry) error {
	for _, e := range entries {
		if err := k.change(func() { delete(k.entries[subject], prefixOf(e)) }); err != nil {
			return err
		}
	}
	if len(k.entries[subject]) == 0 {
		delete(k.entries, subject)
	}
	return nil
}

func (k *kernel) Prune(keep func(uint32) bool) error {
	for n, m := range k.entries {
		if keep(n) {
			continue
		}
		if err := k.Remove(n, slices.Collect(maps.Values(m))); err != nil {
			return err
		}
	}
	return nil
}

func (k *kernel) Subjects() (map[uint32][]policy.Entry, error) {
	out := map[uint32][]policy.Entry{}
	for n, m := range k.entries {
		out[n] = slices.Collect(maps.Values(m))
	}
	return out, nil
}

func (k *kernel) SetClass(p netip.Prefix, class uint64) error {
	return k.change(func() { k.classes[p] = class })
}

func (k *kernel) DeleteClass(p netip.Prefix) error {
	return k.change(func() { delete(k.classes, p) })
}

func (k *kernel) Classes() (map[netip.Prefix]uint64, error) { return maps.Clone(k.classes), nil }
func (k *kernel) MaxEntries() int                           { return k.max }

func (k *kernel) SetSubject(ips []netip.Addr, ifindex int, subject uint32) error {
	for _, a := range ips {
		if k.ifindexes[a] != ifindex || k.endpoints[a] == subject {
			continue
		}
		if err := k.change(func() { k.endpoints[a] = subject }); err != nil {
			return err
		}
	}
	return nil
}

// pods is the map of endpoints.
type pods struct{ *kernel }

func (p pods) Subjects() (map[uint32]bool, error) {
	out := map[uint32]bool{}
	for _, n := range p.endpoints {
		out[n] = true
	}
	return out, nil
}

// attach is what the datapath does with a new pod.
func (k *kernel) attach(ips []netip.Addr, ifindex int, subject uint32) {
	for _, a := range ips {
		k.endpoints[a], k.ifindexes[a] = subject, ifindex
	}
	k.see()
}

// classOf is the longest prefix match of weft_cidr.
func (k *kernel) classOf(a netip.Addr) uint64 {
	class, bits := policy.AnyPeer, -1
	for p, n := range k.classes {
		if p.Bits() > bits && p.Contains(a) {
			class, bits = n, p.Bits()
		}
	}
	return class
}

// lookup is the longest prefix match of weft_policy.
func (k *kernel) lookup(subject uint32, q question, peer uint64) (best policy.Entry, ok bool) {
	for p, e := range k.entries[subject] {
		first, last := p.PortRange()
		if p.Direction != q.direction || p.Peer != peer || p.Bits > 0 && p.Protocol != q.protocol || q.port < first || q.port > last {
			continue
		}
		if !ok || p.Bits > best.Bits {
			best, ok = e, true
		}
	}
	return best, ok
}

// question is a new connection of a pod.
type question struct {
	direction policy.Direction
	identity  uint64 // of the peer
	addr      netip.Addr
	protocol  uint8
	port      uint16
}

// answer is policy_side of bpf/lib/policy.h: the verdict and the rule.
func (k *kernel) answer(pod netip.Addr, q question) string {
	subject := k.endpoints[pod]
	if subject == 0 {
		return "allow 0"
	}
	admin := policy.Outcome{Rank: policy.RankNone}
	lower := admin
	for _, peer := range []uint64{policy.AnyPeer, q.identity, k.classOf(q.addr)} {
		e, ok := k.lookup(subject, q, peer)
		if ok && e.Admin.Rank < admin.Rank {
			admin = e.Admin
		}
		if ok && e.Lower.Rank < lower.Rank {
			lower = e.Lower
		}
	}
	if admin.Verdict != policy.Allow && admin.Verdict != policy.Deny {
		admin = lower
	}
	if admin.Verdict != policy.Allow {
		admin.Verdict = policy.Deny
	}
	return fmt.Sprintf("%s %d", admin.Verdict, admin.Rule)
}
