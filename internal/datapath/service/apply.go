// SPDX-License-Identifier: Apache-2.0

package service

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weft-mesh/weft/internal/balance"
	"github.com/weft-mesh/weft/internal/balance/maglev"
	"github.com/weft-mesh/weft/internal/datapath/pin"
)

// Change is what a service port shall be. Want is nil for one that is gone, and
// must not be changed afterwards.
type Change struct {
	Name balance.Name
	Want *balance.ServicePort
}

// Left is a backend that a service port does not use any more. It is in the
// kernel, where old connections find it, until Release.
type Left struct {
	Name             balance.Name // only the protocol of one that an earlier agent left
	Service, Backend uint32       // their numbers
	At               netip.AddrPort
}

// Outcome is what came of changes.
type Outcome struct {
	Left    []Left // backends of ports that are gone, too
	Changed int    // ports written
}

// Error is why a service port is not in force as wanted. What was in force before
// still is; where a Frontend is named, only that is missing.
type Error struct {
	Name     balance.Name
	Map      string // the map that refused
	Size     int    // entries that it holds at most
	Frontend netip.AddrPort
	Err      error
}

func (e *Error) Error() string {
	at := ""
	if e.Frontend.IsValid() {
		at = " at " + e.Frontend.String()
	}
	if errors.Is(e.Err, unix.E2BIG) || errors.Is(e.Err, unix.ENOSPC) {
		return fmt.Sprintf("service port %s%s: map %s is full: it holds %d entries", NameOf(e.Name), at, e.Map, e.Size)
	}
	return fmt.Sprintf("service port %s%s: write map %s: %v", NameOf(e.Name), at, e.Map, e.Err)
}

func (e *Error) Unwrap() error { return e.Err }

// NameOf is how people know a service port: NAMESPACE/NAME:PORT/PROTOCOL, without
// :PORT where it has no name.
func NameOf(n balance.Name) string {
	s := n.Namespace + "/" + n.Service
	if n.Port != "" {
		s += ":" + n.Port
	}
	return s + "/" + string(n.Protocol)
}

// Conflict is a frontend that two service ports want.
type Conflict struct {
	Loser, Winner balance.Name
	Frontend      netip.AddrPort
}

// Apply makes changes, as many as can be: Errors tells which are not in force.
func (w *Writer) Apply(changes []Change) Outcome {
	w.mu.Lock()
	defer w.mu.Unlock()
	round := &round{w: w}
	dirty := map[*port]*balance.ServicePort{}
	var order []*port
	touch := func(p *port, want *balance.ServicePort) {
		if _, ok := dirty[p]; !ok {
			order = append(order, p)
		}
		dirty[p] = want
	}
	for _, c := range changes {
		p := w.portOf(c)
		if p == nil {
			continue
		}
		for _, other := range w.claim(p, c.Want) {
			if _, ok := dirty[other]; !ok {
				touch(other, other.want)
			}
		}
		touch(p, c.Want)
	}
	for _, p := range order {
		want := dirty[p]
		p.want = want
		round.plans = append(round.plans, newPlan(p, want, w.won(p), w.options.Maglev))
	}
	round.run()
	round.out.Left = w.tellLeft()
	return round.out
}

func (w *Writer) tellLeft() []Left {
	out := w.left
	w.left = nil
	return out
}

// linger keeps a backend that no set holds.
func (w *Writer) linger(l Left) {
	w.lingers[l.Backend] = l
	w.left = append(w.left, l)
}

// Release lets Collect remove backends that have left.
func (w *Writer) Release(list []Left) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, l := range list {
		if _, ok := w.lingers[l.Backend]; ok {
			delete(w.lingers, l.Backend)
			w.garbage.backends = append(w.garbage.backends, l.Backend)
		}
	}
}

// portOf returns the port of a change, a new one where there is none yet; nil
// where nothing is to be done.
func (w *Writer) portOf(c Change) *port {
	p := w.ports[c.Name]
	if p == nil && c.Want != nil {
		p = &port{name: c.Name}
		w.takeOver(p, c.Want)
		w.ports[c.Name] = p
	}
	return p
}

// claim notes which frontends a port wants, and returns the other ports that win
// or lose one by it.
func (w *Writer) claim(p *port, want *balance.ServicePort) []*port {
	var keys []serviceKey
	if want != nil {
		keys = make([]serviceKey, 0, len(want.Frontends))
		for i := range want.Frontends {
			keys = append(keys, keyOf(&want.Frontends[i], want.Name.Protocol))
		}
	}
	if slices.Equal(keys, p.claims) {
		return nil
	}
	var others []*port
	for _, k := range p.claims {
		if !slices.Contains(keys, k) {
			others = appendPort(others, w.leave(p, k))
		}
	}
	for _, k := range keys {
		if !slices.Contains(p.claims, k) {
			others = appendPort(others, w.enter(p, k))
		}
	}
	p.claims = keys
	return others
}

func appendPort(list []*port, p *port) []*port {
	if p == nil {
		return list
	}
	return append(list, p)
}

// enter adds a port to those that want a frontend: the first by name gets it. It
// returns the one that loses it.
func (w *Writer) enter(p *port, k serviceKey) *port {
	owner := w.owners[k]
	if owner == nil {
		w.owners[k] = p
		return nil
	}
	if compareNames(&owner.name, &p.name) < 0 {
		w.rivals[k] = append(w.rivals[k], p)
		return nil
	}
	w.owners[k] = p
	w.rivals[k] = append(w.rivals[k], owner)
	return owner
}

// leave is the opposite; it returns the port that gets the frontend.
func (w *Writer) leave(p *port, k serviceKey) *port {
	rest := w.rivals[k]
	if w.owners[k] != p {
		w.setRivals(k, slices.DeleteFunc(rest, func(r *port) bool { return r == p }))
		return nil
	}
	if len(rest) == 0 {
		delete(w.owners, k)
		return nil
	}
	heir := slices.MinFunc(rest, func(a, b *port) int { return compareNames(&a.name, &b.name) })
	w.owners[k] = heir
	w.setRivals(k, slices.DeleteFunc(rest, func(r *port) bool { return r == heir }))
	return heir
}

func (w *Writer) setRivals(k serviceKey, list []*port) {
	if len(list) == 0 {
		delete(w.rivals, k)
		return
	}
	w.rivals[k] = list
}

// won returns the frontends that a port gets.
func (w *Writer) won(p *port) []serviceKey {
	if len(w.rivals) == 0 {
		return p.claims
	}
	var out []serviceKey
	for _, k := range p.claims {
		if w.owners[k] == p {
			out = append(out, k)
		}
	}
	return out
}

func compareNames(a, b *balance.Name) int {
	return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Service, b.Service), cmp.Compare(a.Port, b.Port), cmp.Compare(a.Protocol, b.Protocol))
}

// round makes many plans at once.
type round struct {
	w     *Writer
	plans []*plan
	out   Outcome
}

func (r *round) run() {
	for _, x := range r.plans {
		r.w.number(x)
	}
	r.addBackends()
	r.addSlots()
	r.addMembers()
	r.addRanges()
	r.addTables()
	r.changeSlots()
	r.switchFrontends()
	r.dropFrontends()
	r.dropMembers()
	r.dropRanges()
	r.swapTables()
	for _, x := range r.plans {
		r.finish(x)
	}
}

// number gives numbers to what is new.
func (w *Writer) number(x *plan) {
	if x.port.id == 0 {
		x.port.id = w.next.service
		w.next.service++
		x.ranges = rangesOf(x.port.id, rangesWanted(x.want))
	}
	for _, b := range x.makes {
		b.id = w.next.backend
		w.next.backend++
	}
	for _, s := range x.fresh {
		s.id = w.next.set
		w.next.set++
	}
}

func rangesWanted(want *balance.ServicePort) []netip.Prefix {
	if want == nil {
		return nil
	}
	return want.SourceRanges
}

// writes are entries for one map, each of a plan.
type writes[K comparable, V any] struct {
	keys   []K
	values []V
	plans  []*plan
}

func (b *writes[K, V]) add(x *plan, k K, v V) {
	b.keys, b.values, b.plans = append(b.keys, k), append(b.values, v), append(b.plans, x)
}

// run writes the entries; refused is called with one that could not be, and says
// whether all others of its plan are to be left out.
func (b *writes[K, V]) run(to interface {
	put([]K, []V) (int, error)
}, count *uint64, refused func(x *plan, k K, err error) (whole bool)) {
	for len(b.keys) > 0 {
		n, err := to.put(b.keys, b.values)
		*count += uint64(n)
		if err == nil {
			return
		}
		x := b.plans[n]
		whole := refused(x, b.keys[n], err)
		b.keys, b.values, b.plans = b.keys[n+1:], b.values[n+1:], b.plans[n+1:]
		for whole && len(b.plans) > 0 && b.plans[0] == x {
			b.keys, b.values, b.plans = b.keys[1:], b.values[1:], b.plans[1:]
		}
	}
}

// refuse is for entries without which nothing of a plan is made. What was written
// of it makes room for others at once: no program can find it yet.
func refuse[K any](w *Writer, name string, size int) func(*plan, K, error) bool {
	return func(x *plan, _ K, err error) bool {
		x.err = &Error{Name: x.port.name, Map: name, Size: size, Err: err}
		w.undo(x)
		return true
	}
}

// good calls f with the plans that are still to be made.
func (r *round) good(f func(*plan)) {
	for _, x := range r.plans {
		if x.err == nil {
			f(x)
		}
	}
}

func (r *round) addBackends() {
	var b writes[uint32, pin.KernelBackend]
	r.good(func(x *plan) {
		for _, m := range x.makes {
			v := pin.KernelBackend{Addr: kernelAddr(m.at.Addr()), Port: networkOrder(m.at.Port()), Protocol: protocols[x.port.name.Protocol]}
			b.add(x, m.id, v)
			m.here = true
		}
	})
	b.run(r.w.kernel.backends, &r.w.writes.Backends, refuse[uint32](r.w, "backends", r.w.kernel.backends.size()))
}

func (r *round) addSlots() {
	var b writes[slotKey, uint32]
	r.good(func(x *plan) {
		for _, s := range x.fresh {
			for i, m := range s.slots {
				b.add(x, slotKey{Set: s.id, Slot: uint32(i)}, m.id)
			}
			s.written = len(s.slots)
		}
		for _, e := range x.edits {
			for _, i := range e.changed {
				if i >= len(e.set.slots) {
					b.add(x, slotKey{Set: e.set.id, Slot: uint32(i)}, e.slots[i].id)
					e.set.written = max(e.set.written, i+1)
				}
			}
		}
	})
	b.run(r.w.kernel.slots, &r.w.writes.Slots, refuse[slotKey](r.w, "slots", r.w.kernel.slots.size()))
}

func (r *round) addMembers() {
	var b writes[memberKey, uint8]
	r.good(func(x *plan) {
		if x.header.affinity == 0 {
			return
		}
		for s := range x.sets.each {
			list := s.after()
			switch {
			case s.members && s.edit != nil:
				list = s.edit.added
			case s.members:
				list = nil
			}
			for _, m := range list {
				b.add(x, memberKey{Set: s.id, Backend: m.id}, 1)
			}
		}
	})
	b.run(r.w.kernel.members, &r.w.writes.Members, refuse[memberKey](r.w, "members", r.w.kernel.members.size()))
}

func (r *round) addRanges() {
	var b writes[rangeKey, uint8]
	r.good(func(x *plan) {
		for _, k := range missing(x.ranges, x.port.ranges) {
			b.add(x, k, 1)
		}
	})
	b.run(r.w.kernel.ranges, &r.w.writes.Ranges, refuse[rangeKey](r.w, "source_ranges", r.w.kernel.ranges.size()))
}

// missing returns those of a that b lacks; both are in order.
func missing(a, b []rangeKey) []rangeKey {
	var out []rangeKey
	for _, k := range a {
		if _, ok := slices.BinarySearchFunc(b, k, compareRanges); !ok {
			out = append(out, k)
		}
	}
	return out
}

func compareRanges(a, b rangeKey) int {
	return cmp.Or(cmp.Compare(a.Service, b.Service), slices.Compare(a.Addr[:], b.Addr[:]), cmp.Compare(a.Prefixlen, b.Prefixlen))
}

// tablesAtOnce bounds the memory of tables that are built but not written yet, in
// entries.
const tablesAtOnce = 1 << 22

// addTables writes the tables of sets that have none.
func (r *round) addTables() {
	r.writeTables(func(s *set) bool { return s.table == 0 })
}

// swapTables writes those of sets whose backends have changed.
func (r *round) swapTables() {
	r.writeTables(func(s *set) bool { return s.table != 0 && (s.edit != nil || s.suspect && !r.w.sameTable(s)) })
}

func (r *round) writeTables(which func(*set) bool) {
	var b writes[uint32, []uint32]
	entries := 0
	flush := func() {
		b.run(r.w.kernel.maglev, &r.w.writes.Tables, r.noTable)
		b, entries = writes[uint32, []uint32]{}, 0
	}
	r.good(func(x *plan) {
		for s := range x.sets.each {
			if s.wish == 0 || !which(s) {
				continue
			}
			b.add(x, s.id, r.w.buildTable(s.after(), s.wish))
			r.w.setTable(s, s.wish)
			s.suspect = false
			if entries += int(s.wish); entries >= tablesAtOnce {
				flush()
			}
		}
	})
	flush()
}

// noTable has the far clients of a set choose at random. Where its frontends
// still know a table, the kernel does the same as it does not find one.
func (r *round) noTable(x *plan, id uint32, err error) bool {
	for s := range x.sets.each {
		if s.id == id {
			s.wish = 0
			r.w.setTable(s, 0)
			r.w.garbage.tables = append(r.w.garbage.tables, s)
		}
	}
	x.part = append(x.part, &Error{Name: x.port.name, Map: "maglev", Size: r.w.kernel.maglev.size(), Err: err})
	return false
}

// MaglevStats is what tables cost.
type MaglevStats struct {
	Tables  int
	Bytes   uint64        // of the kernel's memory
	Built   uint64        // since the start
	Elapsed time.Duration // building them
}

// setTable notes that a set has a table of n entries.
func (w *Writer) setTable(s *set, n uint32) {
	const entry = 8 // bytes: elements of arrays are rounded up to that
	if s.table != 0 {
		w.maglev.Tables--
		w.maglev.Bytes -= entry * uint64(s.table)
	}
	if n != 0 {
		w.maglev.Tables++
		w.maglev.Bytes += entry * uint64(n)
	}
	s.table = n
}

func (w *Writer) buildTable(slots []*backend, size uint32) []uint32 {
	start := time.Now()
	list := make([]netip.AddrPort, len(slots))
	for i, b := range slots {
		list[i] = b.at
	}
	out := make([]uint32, size)
	table, err := maglev.Build(list, size)
	if err != nil {
		panic(err) // sizes are those of maglev.SizeFor
	}
	for i, n := range table {
		out[i] = slots[n].id
	}
	w.maglev.Built++
	w.maglev.Elapsed += time.Since(start)
	return out
}

// sameTable says whether a table of an earlier agent is what this one would
// build: that one may have died before it did.
func (w *Writer) sameTable(s *set) bool {
	s.suspect = false
	have, err := w.kernel.maglev.read(s.id)
	return err == nil && slices.Equal(have, w.buildTable(s.slots, s.table))
}

func (r *round) changeSlots() {
	var b writes[slotKey, uint32]
	r.good(func(x *plan) {
		for _, e := range x.edits {
			for _, i := range e.changed {
				if i < len(e.set.slots) {
					b.add(x, slotKey{Set: e.set.id, Slot: uint32(i)}, e.slots[i].id)
				}
			}
		}
	})
	// Entries that are there are replaced even in a full map. Where even that
	// fails, the next attempt builds another set.
	b.run(r.w.kernel.slots, &r.w.writes.Slots, func(x *plan, k slotKey, err error) bool {
		for _, e := range x.edits {
			e.set.broken = e.set.broken || e.set.id == k.Set
		}
		x.part = append(x.part, &Error{Name: x.port.name, Map: "slots", Size: r.w.kernel.slots.size(), Err: err})
		return false
	})
}

func (r *round) switchFrontends() {
	var b writes[serviceKey, pin.KernelService]
	r.good(func(x *plan) {
		if x.want == nil {
			return
		}
		for i := range x.want.Frontends {
			f := &x.want.Frontends[i]
			k := keyOf(f, x.want.Name.Protocol)
			if r.w.owners[k] != x.port {
				continue
			}
			v := x.value(f)
			now, ok := r.w.inForce[k]
			if ok && now.value == v {
				r.w.inForce[k] = frontend{x.port, v}
				continue
			}
			b.add(x, k, v)
		}
	})
	keys, values, plans := b.keys, b.values, b.plans
	failed := map[serviceKey]bool{}
	b.run(r.w.kernel.services, &r.w.writes.Services, func(x *plan, k serviceKey, err error) bool {
		failed[k] = true
		if _, ok := r.w.inForce[k]; ok {
			x.stuck = true
		}
		x.part = append(x.part, &Error{Name: x.port.name, Map: "services", Size: r.w.kernel.services.size(), Frontend: frontendOf(&k), Err: err})
		return false
	})
	for i, k := range keys {
		if !failed[k] {
			r.w.inForce[k] = frontend{plans[i].port, values[i]}
		}
	}
}

// dropFrontends removes those that no port wants, or none could take over.
func (r *round) dropFrontends() {
	var gone []serviceKey
	r.good(func(x *plan) {
		for _, k := range x.port.keys {
			if r.w.inForce[k].port == x.port && !slices.Contains(x.keys, k) {
				gone = append(gone, k)
			}
		}
		x.port.keys = slices.DeleteFunc(slices.Clone(x.keys), func(k serviceKey) bool { return r.w.inForce[k].port != x.port })
	})
	n, err := r.w.kernel.services.remove(gone)
	r.w.writes.Services += uint64(n)
	for _, k := range gone[:n] {
		delete(r.w.inForce, k)
	}
	if err != nil {
		r.w.garbage.frontends = append(r.w.garbage.frontends, gone[n:]...)
	}
}

func (r *round) dropMembers() {
	var gone []member
	r.good(func(x *plan) {
		for s := range x.sets.each {
			switch {
			case s.members && x.header.affinity == 0:
				gone = appendMembers(gone, s, s.slots)
			case s.members && s.edit != nil:
				gone = appendMembers(gone, s, s.edit.removed)
			}
		}
	})
	_ = r.w.removeMembers(gone)
}

// member is a backend of a set with affinity.
type member struct {
	set     *set
	backend *backend
}

func appendMembers(to []member, s *set, list []*backend) []member {
	for _, b := range list {
		to = append(to, member{s, b})
	}
	return to
}

// removeMembers leaves what fails to Collect.
func (w *Writer) removeMembers(gone []member) error {
	keys := make([]memberKey, 0, len(gone))
	for _, m := range gone {
		keys = append(keys, memberKey{Set: m.set.id, Backend: m.backend.id})
	}
	n, err := w.kernel.members.remove(keys)
	w.writes.Members += uint64(n)
	w.garbage.members = append(w.garbage.members, gone[n:]...)
	return err
}

// ownRange is a source range of a port.
type ownRange struct {
	port *port
	key  rangeKey
}

func appendRanges(to []ownRange, p *port, list []rangeKey) []ownRange {
	for _, k := range list {
		to = append(to, ownRange{p, k})
	}
	return to
}

// dropRanges removes those that a port has no more. Where it has none any more,
// programs may still look for one.
func (r *round) dropRanges() {
	var gone []ownRange
	r.good(func(x *plan) {
		old := missing(x.port.ranges, x.ranges)
		if len(x.ranges) == 0 {
			r.w.garbage.ranges = appendRanges(r.w.garbage.ranges, x.port, old)
			return
		}
		gone = appendRanges(gone, x.port, old)
	})
	_ = r.w.removeRanges(gone)
}

// removeRanges leaves what fails to Collect.
func (w *Writer) removeRanges(gone []ownRange) error {
	keys := make([]rangeKey, 0, len(gone))
	for _, g := range gone {
		keys = append(keys, g.key)
	}
	n, err := w.kernel.ranges.remove(keys)
	w.writes.Ranges += uint64(n)
	w.garbage.ranges = append(w.garbage.ranges, gone[n:]...)
	return err
}

// undo removes what was written of a plan that is not made.
func (w *Writer) undo(x *plan) {
	g := garbage{sets: x.fresh, ranges: appendRanges(nil, x.port, missing(x.ranges, x.port.ranges))}
	for s := range x.sets.each {
		if x.header.affinity != 0 && !s.members && !slices.Contains(x.fresh, s) {
			g.members = appendMembers(g.members, s, s.after())
		}
	}
	for _, s := range x.fresh {
		g.members = appendMembers(g.members, s, s.slots)
	}
	for _, e := range x.edits {
		g.members = appendMembers(g.members, e.set, e.added)
		g.shrunk = append(g.shrunk, shrunk{e.set, e.written}) // programs may know of those before
		e.set.edit = nil
	}
	for _, b := range x.makes {
		if b.here {
			g.backends = append(g.backends, b.id)
			b.here = false
		}
	}
	w.sweepPool(x.port)
	_ = w.collect(g) // what fails is left to Collect
}

// shrink has Collect remove the slots of a set from n on.
func (w *Writer) shrink(s *set, n int) {
	if s.written > n {
		w.garbage.shrunk = append(w.garbage.shrunk, shrunk{s, n})
	}
}

// sweepPool lets go of the backends of a port that are in none of its sets.
func (w *Writer) sweepPool(p *port) {
	p.pool = slices.DeleteFunc(p.pool, func(b *backend) bool {
		if b.refs == 0 && b.here {
			w.linger(Left{p.name, p.id, b.id, b.at})
		}
		return b.refs == 0
	})
}

// finish notes that a plan is made, or why not.
func (r *round) finish(x *plan) {
	p := x.port
	p.errs = x.part
	if x.err != nil {
		p.errs = append(p.errs, x.err)
	} else {
		r.commit(x)
	}
	delete(r.w.failing, p)
	if len(p.errs) > 0 {
		r.w.failing[p] = true
	}
	if x.want == nil && x.err == nil {
		delete(r.w.ports, p.name)
	}
}

func (r *round) commit(x *plan) {
	p := x.port
	r.out.Changed++
	for _, s := range x.fresh {
		for _, b := range s.slots {
			b.refs++
		}
	}
	for _, e := range x.edits {
		for _, b := range e.added {
			b.refs++
		}
	}
	loose := false
	for _, e := range x.edits {
		loose = release(e.removed) || loose
		e.set.list, e.set.slots, e.set.edit = e.list, e.slots, nil
		r.w.shrink(e.set, len(e.slots))
	}
	for s := range p.sets.each {
		if !x.sets.has(s) {
			r.w.garbage.sets = append(r.w.garbage.sets, s)
			loose = release(s.slots) || loose
		}
	}
	r.settle(x)
	if loose {
		r.w.sweepPool(p)
	}
	p.sets, p.header, p.ranges, p.stuck = x.sets, x.header, x.ranges, x.stuck
}

// settle notes what the sets of a port are now.
func (r *round) settle(x *plan) {
	for f := range x.sets {
		for role, s := range x.sets[f] {
			if s == nil {
				continue
			}
			s.list = cut([][]balance.Backend{x.want.Internal, x.want.Cluster, x.want.External}[role], f)
			s.members = x.header.affinity != 0
			if s.table != 0 && s.wish == 0 {
				r.w.garbage.tables = append(r.w.garbage.tables, s)
				r.w.setTable(s, 0)
			}
		}
	}
}

// release says whether no set holds one of them any more.
func release(list []*backend) (loose bool) {
	for _, b := range list {
		b.refs--
		loose = loose || b.refs == 0
	}
	return loose
}

// Errors returns why service ports are not in force as wanted, in order.
func (w *Writer) Errors() []*Error {
	w.mu.Lock()
	defer w.mu.Unlock()
	var out []*Error
	for p := range w.failing {
		out = append(out, p.errs...)
	}
	slices.SortFunc(out, func(a, b *Error) int {
		return cmp.Or(compareNames(&a.Name, &b.Name), a.Frontend.Compare(b.Frontend), cmp.Compare(a.Map, b.Map))
	})
	return out
}

// Retries returns the changes that would mend the errors.
func (w *Writer) Retries() []Change {
	w.mu.Lock()
	defer w.mu.Unlock()
	var out []Change
	for _, p := range slices.SortedFunc(maps.Keys(w.failing), func(a, b *port) int { return compareNames(&a.name, &b.name) }) {
		out = append(out, Change{p.name, p.want})
	}
	return out
}

// Conflicts returns the frontends that more than one service port wants, in
// order of the loser.
func (w *Writer) Conflicts() []Conflict {
	w.mu.Lock()
	defer w.mu.Unlock()
	var out []Conflict
	for k, list := range w.rivals {
		for _, p := range list {
			out = append(out, Conflict{p.name, w.owners[k].name, frontendOf(&k)})
		}
	}
	slices.SortFunc(out, func(a, b Conflict) int {
		return cmp.Or(compareNames(&a.Loser, &b.Loser), a.Frontend.Compare(b.Frontend))
	})
	return out
}
