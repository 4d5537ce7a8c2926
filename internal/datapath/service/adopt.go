// SPDX-License-Identifier: Apache-2.0

package service

import (
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/weft-mesh/weft/internal/balance"
	"github.com/weft-mesh/weft/internal/datapath/pin"
)

// adopted is what the maps held at the start. Ports take from it what is
// theirs; the rest is swept.
type adopted struct {
	backends  map[uint32]pin.KernelBackend
	slots     map[uint32][]uint32 // backends by set, 0 where a slot is absent
	members   map[uint32]map[uint32]bool
	ranges    map[uint32][]rangeKey // by service
	tables    map[uint32]bool       // sets that have one
	frontends map[uint32]int        // how many a service has
	uses      map[uint32]int        // how often frontends refer to a set
	services  map[uint32]bool       // whose number a port has taken
	sets      map[uint32]*set       // that a port has taken
	kept      map[uint32]bool       // backends that a port has taken
}

// adopt reads the maps.
func (w *Writer) adopt() error {
	a := &adopted{
		backends: map[uint32]pin.KernelBackend{}, slots: map[uint32][]uint32{}, members: map[uint32]map[uint32]bool{},
		ranges: map[uint32][]rangeKey{}, tables: map[uint32]bool{}, services: map[uint32]bool{}, uses: map[uint32]int{}, frontends: map[uint32]int{}, sets: map[uint32]*set{}, kept: map[uint32]bool{},
	}
	w.adopted = a
	n := &w.next
	err := w.kernel.services.each(func(k *serviceKey, v *pin.KernelService) error {
		w.inForce[*k] = frontend{value: *v}
		n.service = max(n.service, v.Id+1)
		n.set = max(n.set, v.Near.Id+1, v.Far.Id+1)
		a.frontends[v.Id]++
		a.uses[v.Near.Id]++
		a.uses[v.Far.Id]++
		return nil
	})
	if err != nil {
		return fmt.Errorf("list frontends: %w", err)
	}
	err = w.kernel.backends.each(func(k *uint32, v *pin.KernelBackend) error {
		a.backends[*k] = *v
		n.backend = max(n.backend, *k+1)
		return nil
	})
	if err != nil {
		return fmt.Errorf("list backends: %w", err)
	}
	if err := w.adoptSets(a); err != nil {
		return err
	}
	if err := w.adoptRest(a); err != nil {
		return err
	}
	if len(w.inForce)+len(a.backends)+len(a.slots)+len(a.members)+len(a.ranges)+len(a.tables) == 0 {
		w.adopted = nil // the maps are new
	}
	return nil
}

func (w *Writer) adoptSets(a *adopted) error {
	n := &w.next
	err := w.kernel.slots.each(func(k *slotKey, v *uint32) error {
		list := a.slots[k.Set]
		for len(list) <= int(k.Slot) {
			list = append(list, 0)
		}
		list[k.Slot] = *v
		a.slots[k.Set] = list
		n.set, n.backend = max(n.set, k.Set+1), max(n.backend, *v+1)
		return nil
	})
	if err != nil {
		return fmt.Errorf("list slots: %w", err)
	}
	sets, err := w.kernel.maglev.sets()
	if err != nil {
		return fmt.Errorf("list Maglev tables: %w", err)
	}
	for _, id := range sets {
		a.tables[id] = true
		n.set = max(n.set, id+1)
	}
	return nil
}

func (w *Writer) adoptRest(a *adopted) error {
	n := &w.next
	err := w.kernel.members.each(func(k *memberKey, _ *uint8) error {
		if a.members[k.Set] == nil {
			a.members[k.Set] = map[uint32]bool{}
		}
		a.members[k.Set][k.Backend] = true
		n.set, n.backend = max(n.set, k.Set+1), max(n.backend, k.Backend+1)
		return nil
	})
	if err != nil {
		return fmt.Errorf("list members: %w", err)
	}
	err = w.kernel.ranges.each(func(k *rangeKey, _ *uint8) error {
		a.ranges[k.Service] = append(a.ranges[k.Service], *k)
		n.service = max(n.service, k.Service+1)
		return nil
	})
	if err != nil {
		return fmt.Errorf("list source ranges: %w", err)
	}
	return nil
}

// skipUsed has numbers begin behind those that connections still refer to.
func (w *Writer) skipUsed(m *pin.Maps) error {
	n := &w.next
	use := func(service, backend uint32) {
		n.service, n.backend = max(n.service, service+1), max(n.backend, backend+1)
	}
	if err := walk(m.Map("weft_service_flows"), func(_ *pin.KernelFlowKey, v *pin.KernelServiceFlow) error {
		use(v.Service, v.Backend)
		return nil
	}); err != nil {
		return fmt.Errorf("list flows of services: %w", err)
	}
	if err := walk(m.Map("weft_service_sockets"), func(_ *uint64, v *pin.KernelServiceSocket) error {
		use(v.Service, v.Backend)
		return nil
	}); err != nil {
		return fmt.Errorf("list sockets of services: %w", err)
	}
	if err := walk(m.Map("weft_affinity"), func(k *pin.KernelAffinityKey, v *pin.KernelAffinity) error {
		use(k.Service, v.Backend)
		return nil
	}); err != nil {
		return fmt.Errorf("list affinity: %w", err)
	}
	return nil
}

// takeOver gives a new port what an earlier agent had at its frontends.
func (w *Writer) takeOver(p *port, want *balance.ServicePort) {
	a := w.adopted
	if a == nil {
		return
	}
	if p.id = w.knownAs(want); p.id == 0 {
		return
	}
	a.services[p.id] = true
	p.ranges = a.ranges[p.id]
	slices.SortFunc(p.ranges, compareRanges)
	for i := range want.Frontends {
		f := &want.Frontends[i]
		k := keyOf(f, want.Name.Protocol)
		now, ok := w.inForce[k]
		if ok && now.port == nil && now.value.Id == p.id {
			w.inForce[k] = frontend{p, now.value}
			p.keys = append(p.keys, k)
			p.header.affinity = now.value.Affinity
			w.takeSets(p, f, &now.value)
		}
	}
	w.fixSets(p)
}

// knownAs returns the number that a port has at one of its cluster addresses, or
// else at all of its frontends: other addresses and ports go from one Service to
// another. It is 0 where there is none.
func (w *Writer) knownAs(want *balance.ServicePort) uint32 {
	a := w.adopted
	found := map[uint32]int{}
	for i := range want.Frontends {
		f := &want.Frontends[i]
		now, ok := w.inForce[keyOf(f, want.Name.Protocol)]
		if !ok || now.port != nil || a.services[now.value.Id] {
			continue
		}
		id := now.value.Id
		if found[id]++; f.Kind == balance.ClusterIP || found[id] == a.frontends[id] {
			return id
		}
	}
	return 0
}

// fixSets leaves the sets alone that frontends have which are not the port's any
// more.
func (w *Writer) fixSets(p *port) {
	uses := map[uint32]int{}
	for _, k := range p.keys {
		v := w.inForce[k].value
		uses[v.Near.Id]++
		uses[v.Far.Id]++
	}
	for s := range p.sets.each {
		s.fixed = uses[s.id] != w.adopted.uses[s.id]
	}
}

// takeSets adopts the sets of a frontend.
func (w *Writer) takeSets(p *port, f *balance.Frontend, v *pin.KernelService) {
	a := w.adopted
	to := &p.sets[family(f.Addr)]
	if !f.Kind.External() {
		to[internal] = a.take(p, to[internal], v.Near.Id, v.Near.Count, v)
		return
	}
	p.header.local = v.Flags&uint32(pin.KernelServiceFlagSERVICE_LOCAL) != 0
	to[cluster] = a.take(p, to[cluster], v.Near.Id, v.Near.Count, v)
	to[external] = a.take(p, to[external], v.Far.Id, v.Far.Count, v)
	if s := to[external]; s != nil && a.tables[s.id] && v.Maglev != 0 {
		w.setTable(s, v.Maglev)
		s.suspect = true
		delete(a.tables, s.id)
	}
}

// take adopts a set; nil where it is not sound, for a write of it was cut short,
// or is not like another one of its role that was found before.
func (a *adopted) take(p *port, before *set, id, count uint32, v *pin.KernelService) *set {
	if before != nil || count == 0 {
		return before
	}
	if s := a.sets[id]; s != nil {
		if !slices.Contains(slices.Concat(p.sets[0][:], p.sets[1][:]), s) || len(s.slots) != int(count) {
			return nil
		}
		return s
	}
	ids := a.slots[id]
	if len(ids) < int(count) {
		return nil
	}
	s := &set{id: id, written: len(ids)}
	for _, b := range ids[:count] {
		one := a.takeBackend(p, b)
		if one == nil {
			break
		}
		s.slots = append(s.slots, one)
	}
	if len(s.slots) != int(count) || !s.listSlots() {
		return nil
	}
	s.members = v.Affinity != 0
	for _, b := range s.slots {
		b.refs++
		s.members = s.members && a.members[id][b.id]
	}
	a.sets[id] = s
	return s
}

// takeBackend returns the port's backend of this number.
func (a *adopted) takeBackend(p *port, id uint32) *backend {
	v, ok := a.backends[id]
	if !ok || v.Protocol != protocols[p.name.Protocol] {
		return nil
	}
	at := netip.AddrPortFrom(addrOf(v.Addr), networkOrder(v.Port))
	i, found := slices.BinarySearchFunc(p.pool, at, func(b *backend, at netip.AddrPort) int { return b.at.Compare(at) })
	switch {
	case found && p.pool[i].id == id:
		return p.pool[i]
	case found || a.kept[id]:
		return nil
	}
	b := &backend{at: at, id: id, here: true}
	a.kept[id] = true
	p.pool = slices.Insert(p.pool, i, b)
	return b
}

// listSlots makes the list of a set from its slots; it says whether no backend is
// there twice.
func (s *set) listSlots() bool {
	s.list = make([]balance.Backend, 0, len(s.slots))
	for _, b := range s.slots {
		s.list = append(s.list, balance.Backend{Addr: b.at.Addr(), Port: b.at.Port()})
	}
	compare := func(a, b balance.Backend) int { return atOf(&a).Compare(atOf(&b)) }
	slices.SortFunc(s.list, compare)
	for i := 1; i < len(s.list); i++ {
		if compare(s.list[i-1], s.list[i]) == 0 {
			return false
		}
	}
	return true
}

// leftovers makes garbage of what no port took.
func (w *Writer) leftovers() {
	a, g := w.adopted, &w.garbage
	for id, list := range a.slots {
		s := a.sets[id]
		if s == nil {
			g.shrunk = append(g.shrunk, shrunk{&set{id: id, written: len(list)}, 0})
		} else {
			w.shrink(s, len(s.slots))
		}
	}
	for id := range a.tables {
		s := a.sets[id]
		if s == nil {
			s = &set{id: id}
		}
		g.tables = append(g.tables, s)
	}
	for id, b := range a.backends {
		if !a.kept[id] {
			w.linger(Left{Name: balance.Name{Protocol: corev1.Protocol(protocolName(b.Protocol))}, Backend: id, At: netip.AddrPortFrom(addrOf(b.Addr), networkOrder(b.Port))})
		}
	}
	for id, list := range a.members {
		w.leftMembers(id, list)
	}
	for id, list := range a.ranges {
		if !a.services[id] {
			g.ranges = appendRanges(g.ranges, &port{}, list)
		}
	}
	for _, p := range w.ports {
		w.sweepPool(p)
	}
}

func (w *Writer) leftMembers(id uint32, list map[uint32]bool) {
	s := w.adopted.sets[id]
	if s == nil {
		s = &set{id: id}
	}
	held := map[uint32]bool{}
	for _, b := range s.slots {
		held[b.id] = s.members
	}
	for b := range list {
		if !held[b] {
			w.garbage.members = append(w.garbage.members, member{s, &backend{id: b}})
		}
	}
}
