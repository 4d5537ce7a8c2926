// SPDX-License-Identifier: Apache-2.0

package service

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/weft-mesh/weft/internal/balance"
	"github.com/weft-mesh/weft/internal/balance/maglev"
	"github.com/weft-mesh/weft/internal/datapath/pin"
)

// state is what is wanted of all service ports.
type state map[balance.Name]*balance.ServicePort

// claimOf returns who gets each frontend.
func (s state) claims() map[serviceKey]*balance.ServicePort {
	out := map[serviceKey]*balance.ServicePort{}
	for _, n := range slices.SortedFunc(maps.Keys(s), func(a, b balance.Name) int { return compareNames(&a, &b) }) {
		for i := range s[n].Frontends {
			k := keyOf(&s[n].Frontends[i], n.Protocol)
			if out[k] == nil {
				out[k] = s[n]
			}
		}
	}
	return out
}

func frontendAt(p *balance.ServicePort, k serviceKey) *balance.Frontend {
	for i := range p.Frontends {
		if keyOf(&p.Frontends[i], p.Name.Protocol) == k {
			return &p.Frontends[i]
		}
	}
	return nil
}

// lists are the addresses that near and far clients of a frontend may get.
func lists(p *balance.ServicePort, k serviceKey) (near, far []netip.AddrPort) {
	f := frontendAt(p, k)
	at := func(list []balance.Backend) (out []netip.AddrPort) {
		for _, b := range cut(list, family(f.Addr)) {
			out = append(out, atOf(&b))
		}
		return out
	}
	if f.Kind.External() {
		return at(p.Cluster), at(p.External)
	}
	return at(p.Internal), nil
}

type random struct{ *rand.Rand }

func (r random) chance(n int) bool { return r.IntN(n) == 0 }

// backendsOf makes some backends in order; share is how many of a hundred.
func (r random) backends(share int) []balance.Backend {
	out := []balance.Backend{}
	for i := range 24 {
		if r.IntN(100) >= share {
			continue
		}
		a := netip.AddrFrom4([4]byte{10, 244, 1, byte(i)})
		if i >= 14 {
			a = netip.MustParseAddr(fmt.Sprintf("fd00::%d", i))
		}
		out = append(out, balance.Backend{Addr: a, Port: 8080})
	}
	return out
}

func (r random) some(list []balance.Backend, share int) []balance.Backend {
	out := []balance.Backend{}
	for _, b := range list {
		if r.IntN(100) < share {
			out = append(out, b)
		}
	}
	return out
}

// port makes a service port; those of different services often want the same
// frontend.
func (r random) port(n balance.Name) *balance.ServicePort {
	p := &balance.ServicePort{Name: n}
	add := func(kind balance.Kind, a string, port uint16) {
		f := balance.Frontend{Addr: netip.MustParseAddr(a), Port: port, Kind: kind}
		if !slices.ContainsFunc(p.Frontends, func(o balance.Frontend) bool { return o.Addr == f.Addr && o.Port == f.Port }) {
			p.Frontends = append(p.Frontends, f)
		}
	}
	add(balance.ClusterIP, fmt.Sprintf("10.96.0.%d", r.IntN(8)), 80)
	if r.chance(2) {
		add(balance.ClusterIP, fmt.Sprintf("fd00:96::%d", r.IntN(8)), 80)
	}
	if r.chance(2) {
		port := 30000 + uint16(r.IntN(4))
		add(balance.NodePort, "172.30.0.1", port)
		add(balance.NodePort, "fd00:172:30::1", port)
	}
	if r.chance(3) {
		add(balance.LoadBalancer, "192.0.2.1", 80+uint16(r.IntN(3)))
	}
	r.policy(p)
	r.fill(p, r.backends([]int{0, 10, 50, 90}[r.IntN(4)]))
	return p
}

func (r random) policy(p *balance.ServicePort) {
	p.Affinity, p.SourceRanges = 0, nil
	p.LocalExternal = r.chance(2)
	if r.chance(3) {
		p.Affinity = time.Duration(1+r.IntN(2)) * time.Hour
	}
	if r.chance(3) {
		p.SourceRanges = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.PrefixFrom(netip.AddrFrom4([4]byte{172, byte(r.IntN(3))}), 16)}
	}
}

func (r random) fill(p *balance.ServicePort, all []balance.Backend) {
	p.Internal, p.Cluster, p.External = all, nil, nil
	if r.chance(4) {
		p.Internal = r.some(all, 60)
	}
	if slices.ContainsFunc(p.Frontends, func(f balance.Frontend) bool { return f.Kind.External() }) {
		p.Cluster, p.External = all, all
		if p.LocalExternal {
			p.External = r.some(all, 60)
		}
	}
}

// change returns a like state: some ports come, go or change, most a little.
func (r random) change(s state) (state, []Change) {
	next := maps.Clone(s)
	var changes []Change
	for i := range 6 {
		n := balance.Name{Namespace: "n", Service: string(rune('a' + i)), Protocol: []corev1.Protocol{"TCP", "UDP"}[i%2]}
		old := s[n]
		var want *balance.ServicePort
		switch {
		case !r.chance(2):
			continue
		case old == nil || r.chance(6):
			want = r.port(n)
		case r.chance(8):
		default:
			c := *old
			want = &c
			all := slices.Clone(c.Internal)
			if c.Cluster != nil {
				all = slices.Clone(c.Cluster)
			}
			if r.chance(4) {
				r.policy(want)
			}
			all = r.nudge(all)
			r.fill(want, all)
		}
		changes = append(changes, Change{n, want})
		delete(next, n)
		if want != nil {
			next[n] = want
		}
	}
	return next, changes
}

// nudge adds and removes a few.
func (r random) nudge(list []balance.Backend) []balance.Backend {
	for _, b := range r.backends(6) {
		i := slices.IndexFunc(list, func(o balance.Backend) bool { return o.Addr == b.Addr })
		if i >= 0 {
			list = slices.Delete(list, i, i+1)
		} else {
			list = append(list, b)
		}
	}
	slices.SortFunc(list, func(a, b balance.Backend) int { return atOf(&a).Compare(atOf(&b)) })
	return list
}

// watcher checks the maps after each write.
type watcher struct {
	t      *testing.T
	f      *fake
	before map[serviceKey][]*balance.ServicePort // what was in force or may be
	after  map[serviceKey]*balance.ServicePort
	was    state
	next   state               // after is of
	died   state               // an agent died while it wrote that
	unsure map[serviceKey]bool // frontends that may not be in force
	step   string
	steps  int
}

func (w *watcher) check() {
	w.t.Helper()
	w.steps++
	for k, list := range w.f.held {
		for i := range list {
			w.reaches(k, &list[i])
		}
	}
	for k, v := range w.f.services.m {
		w.only(k, &v)
	}
	for k, after := range w.after {
		befores := w.before[k]
		if len(befores) == 0 || w.unsure[k] {
			continue
		}
		near, far := lists(after, k)
		v, ok := w.f.services.m[k]
		for _, b := range befores {
			n, f := lists(b, k)
			if len(n) == 0 {
				near = nil
			}
			if len(f) == 0 {
				far = nil
			}
		}
		if !ok && (len(near) > 0 || len(far) > 0) {
			w.t.Fatalf("%s: frontend %s is gone for a while", w.step, frontendOf(&k))
		}
		if len(near) > 0 && v.Near.Count == 0 || len(far) > 0 && v.Far.Count == 0 {
			w.t.Fatalf("%s: frontend %s has no backend for a while: %+v", w.step, frontendOf(&k), v)
		}
	}
}

// reaches: whichever number a program draws, also one that read the frontend a
// while ago, it finds a backend.
func (w *watcher) reaches(k serviceKey, v *pin.KernelService) {
	w.t.Helper()
	for r := range v.Near.Count {
		if w.f.backend(v.Near.Id, v.Near.Count, r) == nil {
			w.t.Fatalf("%s: near client %d of %s has no backend: %+v", w.step, r, frontendOf(&k), v)
		}
	}
	for r := range max(v.Far.Count, min(v.Maglev, 50)) {
		if v.Far.Count > 0 && w.f.far(v, r) == nil {
			w.t.Fatalf("%s: far client %d of %s has no backend: %+v", w.step, r, frontendOf(&k), v)
		}
	}
}

// only: no backend that was not and will not be one is reached.
func (w *watcher) only(k serviceKey, v *pin.KernelService) {
	w.t.Helper()
	var near, far []netip.AddrPort
	note := func(p *balance.ServicePort) {
		n, f := lists(p, k)
		near, far = append(near, n...), append(far, f...)
	}
	for _, p := range w.before[k] {
		note(p)
		// what loses a frontend to another port may change before it does
		for _, s := range []state{w.next, w.died} {
			if c := s[p.Name]; c != nil {
				near = append(near, addresses(c.Internal, c.Cluster)...)
				far = append(far, addresses(c.External)...)
			}
		}
	}
	if p := w.after[k]; p != nil {
		note(p)
		// what gets a frontend may change after it does
		if c := w.was[p.Name]; c != nil {
			near = append(near, addresses(c.Internal, c.Cluster)...)
			far = append(far, addresses(c.External)...)
		}
	}
	at := func(b *pin.KernelBackend) netip.AddrPort {
		return netip.AddrPortFrom(addrOf(b.Addr), networkOrder(b.Port))
	}
	for r := range v.Near.Count {
		if b := w.f.backend(v.Near.Id, v.Near.Count, r); !slices.Contains(near, at(b)) {
			w.t.Fatalf("%s: near client of %s reaches %s", w.step, frontendOf(&k), at(b))
		}
	}
	for r := range v.Far.Count {
		if b := w.f.far(v, r); !slices.Contains(far, at(b)) {
			w.t.Fatalf("%s: far client of %s reaches %s", w.step, frontendOf(&k), at(b))
		}
	}
}

func addresses(lists ...[]balance.Backend) (out []netip.AddrPort) {
	for _, l := range lists {
		for _, b := range l {
			out = append(out, atOf(&b))
		}
	}
	return out
}

// equal says what the maps hold beside, or instead of, what is wanted.
func (f *fake) equal(want state, withTables bool) error {
	claims := want.claims()
	slots, backends, members := 0, map[uint32]bool{}, 0
	ranges, tables := map[rangeKey]bool{}, 0
	seen := map[uint32]bool{}
	set := func(k serviceKey, id, count uint32, list []netip.AddrPort, affinity bool) error {
		var have []netip.AddrPort
		for i := range count {
			b, ok := f.slots.m[slotKey{Set: id, Slot: i}]
			if !ok {
				return fmt.Errorf("frontend %s: set %d has no slot %d", frontendOf(&k), id, i)
			}
			v := f.backends.m[b]
			have = append(have, netip.AddrPortFrom(addrOf(v.Addr), networkOrder(v.Port)))
			if v.Protocol != k.Protocol {
				return fmt.Errorf("frontend %s: backend of protocol %d", frontendOf(&k), v.Protocol)
			}
			backends[b] = true
			if _, ok := f.members.m[memberKey{Set: id, Backend: b}]; ok != affinity {
				return fmt.Errorf("frontend %s: member %v, affinity %v", frontendOf(&k), ok, affinity)
			}
		}
		slices.SortFunc(have, netip.AddrPort.Compare)
		if !slices.Equal(have, list) {
			return fmt.Errorf("frontend %s: set %d holds %v, want %v", frontendOf(&k), id, have, list)
		}
		if !seen[id] {
			slots += int(count)
			if affinity {
				members += int(count)
			}
		}
		seen[id] = true
		return nil
	}
	withTable := map[uint32]bool{}
	for k, p := range claims {
		v, ok := f.services.m[k]
		if !ok {
			return fmt.Errorf("frontend %s is absent", frontendOf(&k))
		}
		near, far := lists(p, k)
		if v.Affinity != uint32(p.Affinity/time.Second) {
			return fmt.Errorf("frontend %s: affinity %d", frontendOf(&k), v.Affinity)
		}
		if err := set(k, v.Near.Id, v.Near.Count, near, p.Affinity > 0); err != nil {
			return err
		}
		if err := set(k, v.Far.Id, v.Far.Count, far, p.Affinity > 0); err != nil {
			return err
		}
		if external := frontendAt(p, k).Kind.External(); external != (v.Flags&1 != 0) || (external && p.LocalExternal) != (v.Flags&2 != 0) {
			return fmt.Errorf("frontend %s: flags %d", frontendOf(&k), v.Flags)
		}
		if (v.Maglev != 0) != (withTables && len(far) > 0) {
			return fmt.Errorf("frontend %s: table of %d", frontendOf(&k), v.Maglev)
		}
		if v.Maglev != 0 {
			withTable[v.Far.Id] = true
			table, _ := maglev.Build(far, maglev.SizeFor(len(far)))
			for i, b := range f.maglev.m[v.Far.Id] {
				if x := f.backends.m[b]; netip.AddrPortFrom(addrOf(x.Addr), networkOrder(x.Port)) != far[table[i]] {
					return fmt.Errorf("frontend %s: entry %d of the table is wrong", frontendOf(&k), i)
				}
			}
			if len(f.maglev.m[v.Far.Id]) != len(table) {
				return fmt.Errorf("frontend %s: table of %d, want %d", frontendOf(&k), len(f.maglev.m[v.Far.Id]), len(table))
			}
		}
		for _, r := range rangesOf(v.Id, p.SourceRanges) {
			ranges[r] = true
			if _, ok := f.ranges.m[r]; !ok {
				return fmt.Errorf("frontend %s: no range %s", frontendOf(&k), prefixOf(&r))
			}
		}
	}
	tables = len(withTable)
	if len(f.services.m) != len(claims) {
		return fmt.Errorf("%d frontends, want %d", len(f.services.m), len(claims))
	}
	// ports without a frontend of their own may have more
	if len(claims) < countFrontends(want) {
		return nil
	}
	have := fmt.Sprint(len(f.slots.m), len(f.backends.m), len(f.members.m), len(f.ranges.m), len(f.maglev.m))
	if w := fmt.Sprint(slots, len(backends), members, len(ranges), tables); have != w {
		return fmt.Errorf("slots, backends, members, ranges, tables: %s, want %s", have, w)
	}
	return nil
}

func countFrontends(s state) (n int) {
	for _, p := range s {
		n += len(p.Frontends)
	}
	return n
}

func (s state) changes() []Change {
	var out []Change
	for _, n := range slices.SortedFunc(maps.Keys(s), func(a, b balance.Name) int { return compareNames(&a, &b) }) {
		out = append(out, Change{n, s[n]})
	}
	return out
}

// TestNoGaps makes random changes, restarts and deaths of the agent, and looks at
// the maps after each single write.
func TestNoGaps(t *testing.T) {
	steps := 0
	seeds := uint64(20)
	if testing.Short() {
		seeds = 10
	}
	for seed := range seeds {
		steps += runSequence(t, seed)
	}
	t.Logf("%d writes looked at", steps)
}

func runSequence(t *testing.T, seed uint64) int {
	r := random{rand.New(rand.NewPCG(seed, 7))}
	o := Options{Maglev: seed%6 == 0}
	f := newFake(1 << 20)
	w := &watcher{t: t, f: f}
	f.check = w.check
	start := func() *Writer {
		writer, err := newWriter(f.kernel(), o)
		if err != nil {
			t.Fatal(err)
		}
		return writer
	}
	writer, now := start(), state{}
	var left []Left
	for step := range 30 {
		next, changes := r.change(now)
		w.step = fmt.Sprintf("seed %d step %d", seed, step)
		w.before, w.unsure, w.died = both(now.claims()), nil, nil
		w.after, w.was, w.next = next.claims(), now, next
		crash := r.chance(5)
		if crash {
			f.fuse = 1 + r.IntN(40)
		}
		alive := survives(func() {
			left = append(left, writer.Apply(changes).Left...)
			if !r.chance(3) {
				writer.Release(left)
				left = nil
				must(t, writer.Collect())
			}
		})
		f.fuse = 0
		ids := idsOf(f)
		if !alive || r.chance(6) { // another agent
			w.mayBe(next.claims(), alive)
			if alive {
				w.was = next
			} else {
				w.died = next
			}
			then := next
			if r.chance(2) {
				then, _ = r.change(next)
			}
			w.after, w.next, w.step = then.claims(), then, w.step+" restart"
			writer = start()
			left = writer.Apply(then.changes()).Left
			if alive && maps.Equal(then, next) {
				if now := idsOf(f); !maps.Equal(ids, now) {
					t.Fatalf("%s: numbers changed:\n%v\n%v", w.step, ids, now)
				}
			}
			more, err := writer.Sweep()
			must(t, err)
			left = append(left, more...)
			next = then
		}
		if r.chance(2) {
			writer.Release(left)
			left = nil
			must(t, writer.Collect())
			if err := f.equal(next, o.Maglev); err != nil {
				t.Fatalf("%s: %v", w.step, err)
			}
		}
		now = next
	}
	return w.steps
}

// mayBe is for an agent that was to put claims in force. If it died, some are.
func (w *watcher) mayBe(claims map[serviceKey]*balance.ServicePort, alive bool) {
	if alive {
		w.before = both(claims)
		return
	}
	w.unsure = map[serviceKey]bool{}
	for k := range w.before {
		w.unsure[k] = claims[k] == nil
	}
	for k, p := range claims {
		w.unsure[k] = len(w.before[k]) == 0
		w.before[k] = append(w.before[k], p)
	}
}

func both(claims map[serviceKey]*balance.ServicePort) map[serviceKey][]*balance.ServicePort {
	out := map[serviceKey][]*balance.ServicePort{}
	for k, p := range claims {
		out[k] = []*balance.ServicePort{p}
	}
	return out
}

func survives(f func()) (alive bool) {
	defer func() {
		if e := recover(); e != nil {
			if _, ok := e.(died); !ok {
				panic(e)
			}
		}
	}()
	f()
	return true
}

func idsOf(f *fake) map[serviceKey]uint32 {
	out := map[serviceKey]uint32{}
	for k, v := range f.services.m {
		out[k] = v.Id
	}
	return out
}
