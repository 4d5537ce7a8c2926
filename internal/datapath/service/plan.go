// SPDX-License-Identifier: Apache-2.0

package service

import (
	"math"
	"net/netip"
	"slices"
	"time"

	"github.com/weft-mesh/weft/internal/addr"
	"github.com/weft-mesh/weft/internal/balance"
	"github.com/weft-mesh/weft/internal/balance/maglev"
	"github.com/weft-mesh/weft/internal/datapath/pin"
)

// plan is a change of one port, worked out but not made.
type plan struct {
	port   *port
	want   *balance.ServicePort // nil: the port goes
	err    *Error               // nothing of it is made
	part   []*Error             // of what is missing where the rest is made
	header header
	ranges []rangeKey
	sets   sets
	fresh  []*set     // not there before
	edits  []*edit    // that change in place
	makes  []*backend // not there before
	keys   []serviceKey
	stuck  bool
}

// edit is a change of a set in place.
type edit struct {
	set     *set
	written int // slots of it before
	list    []balance.Backend
	slots   []*backend
	changed []int // slots that hold another backend, appended ones too
	added   []*backend
	removed []*backend
}

func newPlan(p *port, want *balance.ServicePort, keys []serviceKey, withTables bool) *plan {
	x := &plan{port: p, want: want, keys: keys}
	if want == nil {
		return x
	}
	x.header = headerOf(want)
	x.ranges = rangesOf(p.id, want.SourceRanges)
	for f := range x.sets {
		x.planFamily(f, withTables)
	}
	return x
}

func headerOf(want *balance.ServicePort) header {
	h := header{local: want.LocalExternal}
	if want.Affinity > 0 {
		h.affinity = uint32(max(1, min(want.Affinity/time.Second, math.MaxInt32)))
	}
	return h
}

// group are the roles with the same backends.
type group struct {
	list  []balance.Backend
	has   [roles]bool
	table uint32
	found *set
}

// planFamily finds or makes the sets of a family.
func (x *plan) planFamily(family int, withTables bool) {
	var space [roles]group
	groups := space[:groupsOf(&space, x.want, family)]
	now := &x.port.sets[family]
	for i := range groups {
		if g := &groups[i]; withTables && g.has[external] {
			g.table = maglev.SizeFor(len(g.list))
		}
	}
	for i := range groups {
		groups[i].keep(now)
	}
	for i := range groups {
		g := &groups[i]
		if g.found == nil && x.header == x.port.header {
			x.change(g, now)
		}
	}
	for i := range groups {
		x.assign(&groups[i], family)
	}
}

// assign gives the roles of a group their set, a new one where none is found.
func (x *plan) assign(g *group, family int) {
	if g.found == nil {
		g.found = &set{list: g.list, slots: x.resolve(g.list)}
		x.fresh = append(x.fresh, g.found)
	}
	for r, has := range g.has {
		if has {
			x.sets[family][r] = g.found
		}
	}
	g.found.wish = g.table
	g.found.taken = false
}

// groupsOf finds the roles that the frontends of a family need, those with the
// same backends together, those without any left out. It returns how many groups
// there are.
func groupsOf(out *[roles]group, want *balance.ServicePort, fam int) int {
	var need [roles]bool
	for i := range want.Frontends {
		f := &want.Frontends[i]
		if family(f.Addr) != fam {
			continue
		}
		if f.Kind.External() {
			need[cluster], need[external] = true, true
		} else {
			need[internal] = true
		}
	}
	n := 0
	for r, list := range [roles][]balance.Backend{want.Internal, want.Cluster, want.External} {
		list = cut(list, fam)
		if !need[r] || len(list) == 0 {
			continue
		}
		i := slices.IndexFunc(out[:n], func(g group) bool { return sameList(g.list, list) })
		if i < 0 {
			i = n
			out[n].list = list
			n++
		}
		out[i].has[r] = true
	}
	return n
}

func sameList(a, b []balance.Backend) bool {
	if len(a) != len(b) {
		return false
	}
	if len(a) > 0 && &a[0] == &b[0] {
		return true
	}
	for i := range a {
		if a[i].Addr != b[i].Addr || a[i].Port != b[i].Port {
			return false
		}
	}
	return true
}

// keep looks for a set that one of the group's roles has and that is as wanted.
func (g *group) keep(now *[roles]*set) {
	for r, s := range now {
		if g.found == nil && g.has[r] && s != nil && !s.taken && !s.broken && g.sizeFits(s) && sameList(s.list, g.list) {
			s.taken, g.found = true, s
		}
	}
}

// change looks for one that becomes so in place.
func (x *plan) change(g *group, now *[roles]*set) {
	for r, s := range now {
		if g.found == nil && g.has[r] && s != nil && !s.taken && !s.broken && g.owns(now, s) && g.canEdit(s) {
			s.taken, g.found = true, s
			x.edit(s, g.list)
		}
	}
}

// sizeFits says whether frontends that know the size of a table can go on doing
// so: another size needs another set.
func (g *group) sizeFits(s *set) bool { return g.table == 0 || s.table == 0 || s.table == g.table }

// owns says whether no role beside those of the group has the set now.
func (g *group) owns(now *[roles]*set, s *set) bool {
	for r := range now {
		if now[r] == s && !g.has[r] {
			return false
		}
	}
	return true
}

// canEdit says whether a set changes in place: one backend in two, or a fourth of
// many. More than that is switched at once.
func (g *group) canEdit(s *set) bool {
	if s.fixed || !g.sizeFits(s) {
		return false
	}
	n := 0
	merge(s.list, g.list, func(before, after *balance.Backend) {
		if before == nil || after == nil {
			n++
		}
	})
	return n <= max(2, max(len(s.list), len(g.list))/4)
}

// merge calls f for each backend of both lists, nil for the one that lacks it.
func merge(a, b []balance.Backend, f func(a, b *balance.Backend)) {
	for len(a) > 0 || len(b) > 0 {
		order := 0
		switch {
		case len(a) == 0:
			order = 1
		case len(b) == 0:
			order = -1
		case a[0].Addr != b[0].Addr || a[0].Port != b[0].Port:
			order = atOf(&a[0]).Compare(atOf(&b[0]))
		}
		switch order {
		case 0:
			f(&a[0], &b[0])
			a, b = a[1:], b[1:]
		case -1:
			f(&a[0], nil)
			a = a[1:]
		default:
			f(nil, &b[0])
			b = b[1:]
		}
	}
}

// edit plans a change in place.
func (x *plan) edit(s *set, list []balance.Backend) {
	var added []balance.Backend
	gone := map[netip.AddrPort]bool{}
	merge(s.list, list, func(before, after *balance.Backend) {
		switch {
		case after == nil:
			gone[atOf(before)] = true
		case before == nil:
			added = append(added, *after)
		}
	})
	e := &edit{set: s, written: s.written, list: list, slots: slices.Clone(s.slots), added: x.resolve(added)}
	var free []int
	for i, b := range s.slots {
		if len(gone) > 0 && gone[b.at] {
			free = append(free, i)
			e.removed = append(e.removed, b)
		}
	}
	coming := e.added
	for len(free) > 0 && len(coming) > 0 {
		e.place(free[0], coming[0])
		free, coming = free[1:], coming[1:]
	}
	for _, b := range coming {
		e.slots = append(e.slots, nil)
		e.place(len(e.slots)-1, b)
	}
	for _, i := range slices.Backward(free) {
		last := len(e.slots) - 1
		if i != last {
			e.place(i, e.slots[last])
		}
		e.slots = e.slots[:last]
	}
	e.changed = slices.DeleteFunc(e.changed, func(i int) bool { return i >= len(e.slots) })
	x.edits = append(x.edits, e)
	s.edit = e
}

func (e *edit) place(i int, b *backend) {
	e.slots[i] = b
	e.changed = append(e.changed, i)
}

// resolve returns the backends of a list, those that are new too.
func (x *plan) resolve(list []balance.Backend) []*backend {
	p := x.port
	out := make([]*backend, len(list))
	var fresh []*backend
	at := 0
	for i := range list {
		want := atOf(&list[i])
		at = seek(p.pool, at, want)
		if at < len(p.pool) && p.pool[at].at == want {
			out[i] = p.pool[at]
			continue
		}
		out[i] = &backend{at: want}
		fresh = append(fresh, out[i])
	}
	if len(fresh) > 0 {
		p.pool = mergePool(p.pool, fresh)
		x.makes = append(x.makes, fresh...)
	}
	return out
}

// seek returns the first place from at on that is not before want: the next one
// when both lists have about the same, else by bisection.
func seek(pool []*backend, at int, want netip.AddrPort) int {
	if at < len(pool) && pool[at].at == want {
		return at
	}
	if at+1 < len(pool) && pool[at+1].at == want {
		return at + 1
	}
	n, _ := slices.BinarySearchFunc(pool[at:], want, func(b *backend, at netip.AddrPort) int { return b.at.Compare(at) })
	return at + n
}

func mergePool(pool, fresh []*backend) []*backend {
	if len(pool) == 0 {
		return fresh
	}
	out := make([]*backend, 0, len(pool)+len(fresh))
	for len(pool) > 0 && len(fresh) > 0 {
		if pool[0].at.Compare(fresh[0].at) < 0 {
			out, pool = append(out, pool[0]), pool[1:]
		} else {
			out, fresh = append(out, fresh[0]), fresh[1:]
		}
	}
	return append(append(out, pool...), fresh...)
}

// rangesOf returns the keys of source ranges, in order. Clients of IPv4 have
// addresses in ::ffff:0:0/96; a range of IPv6 around that is cut into those
// beside it.
func rangesOf(id uint32, list []netip.Prefix) []rangeKey {
	var out []rangeKey
	for _, p := range list {
		for _, p := range withoutMapped(p) {
			b, bits := addr.PrefixTo16(p)
			k := rangeKey{Prefixlen: 32 + uint32(bits), Service: id}
			for i := range k.Addr {
				k.Addr[i] = nativeWord(b[4*i:])
			}
			out = append(out, k)
		}
	}
	slices.SortFunc(out, compareRanges)
	return slices.Compact(out)
}

var mapped = netip.MustParsePrefix("::ffff:0:0/96")

func withoutMapped(p netip.Prefix) []netip.Prefix {
	if p.Addr().Is4() || p.Bits() >= mapped.Bits() || !p.Contains(mapped.Addr()) {
		return []netip.Prefix{p}
	}
	var out []netip.Prefix
	for bits := p.Bits() + 1; bits <= mapped.Bits(); bits++ {
		b := mapped.Addr().As16()
		b[(bits-1)/8] ^= 0x80 >> ((bits - 1) % 8)
		out = append(out, netip.PrefixFrom(netip.AddrFrom16(b), bits).Masked())
	}
	return out
}

// value is what a frontend shall hold.
func (x *plan) value(f *balance.Frontend) pin.KernelService {
	of := &x.sets[family(f.Addr)]
	v := pin.KernelService{Id: x.port.id, Affinity: x.header.affinity}
	near := of[internal]
	if f.Kind.External() {
		near = of[cluster]
		v.Flags |= uint32(pin.KernelServiceFlagSERVICE_EXTERNAL)
		if x.header.local {
			v.Flags |= uint32(pin.KernelServiceFlagSERVICE_LOCAL)
		}
		if far := of[external]; far != nil {
			v.Far.Id, v.Far.Count, v.Maglev = far.id, uint32(far.count()), far.wish
		}
	}
	if f.Kind == balance.LoadBalancer && len(x.want.SourceRanges) > 0 {
		v.Flags |= uint32(pin.KernelServiceFlagSERVICE_SOURCE_RANGES)
	}
	if near != nil {
		v.Near.Id, v.Near.Count = near.id, uint32(near.count())
	}
	return v
}

// count is how many backends a set has after the change.
func (s *set) count() int { return len(s.after()) }

// after are its slots after the change.
func (s *set) after() []*backend {
	if s.edit != nil {
		return s.edit.slots
	}
	return s.slots
}
