// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/weft-mesh/weft/internal/addr"
	"github.com/weft-mesh/weft/internal/datapath/pin"
)

// kernelMaps are the kernel's maps of Services as they are.
type kernelMaps struct {
	m        *pin.Maps // where slots and backends are looked up, where these are nil
	services map[pin.KernelServiceKey]pin.KernelService
	slots    map[pin.KernelSlotKey]uint32
	backends map[uint32]pin.KernelBackend
	members  map[pin.KernelMemberKey]uint8
	ranges   map[pin.KernelRangeKey]uint8
	tables   map[uint32]uint32
	sockets  map[uint64]pin.KernelServiceSocket
	flows    map[pin.KernelFlowKey]pin.KernelServiceFlow
}

func read[K comparable, V any](m *pin.Maps, name string, to *map[K]V) error {
	*to = map[K]V{}
	var k K
	var v V
	it := m.Map(name).Iterate()
	for it.Next(&k, &v) {
		(*to)[k] = v
	}
	if err := it.Err(); err != nil {
		return fmt.Errorf("read %s: %w", name, err)
	}
	return nil
}

func readMaps(m *pin.Maps) (*kernelMaps, error) {
	k := &kernelMaps{}
	for _, err := range []error{
		read(m, "weft_services", &k.services), read(m, "weft_slots", &k.slots), read(m, "weft_backends", &k.backends),
		read(m, "weft_members", &k.members), read(m, "weft_source_ranges", &k.ranges), read(m, "weft_maglev", &k.tables),
		read(m, "weft_service_sockets", &k.sockets), read(m, "weft_service_flows", &k.flows),
	} {
		if err != nil {
			return nil, err
		}
	}
	return k, nil
}

// settled waits until the maps hold what they must, and nothing else.
func (o *oracle) settled() {
	o.t.Helper()
	for end := time.Now().Add(10 * time.Second); ; {
		k, err := readMaps(o.w.maps)
		wrong := []string{}
		if err == nil {
			wrong = o.wrong(k)
		} else {
			wrong = append(wrong, err.Error()) // an iteration that a deletion broke off
		}
		if len(wrong) == 0 {
			return
		}
		if time.Now().After(end) {
			slices.Sort(wrong)
			o.fail("the maps: %s", strings.Join(wrong, "\n\t"))
		}
		time.Sleep(time.Millisecond)
	}
}

// inForce compares frontends and their sets with the model, as they are the moment
// after Apply.
func (o *oracle) inForce() {
	o.t.Helper()
	k := &kernelMaps{}
	for _, err := range []error{read(o.w.maps, "weft_services", &k.services), read(o.w.maps, "weft_maglev", &k.tables)} {
		o.w.must(err, "read maps")
	}
	k.m = o.w.maps
	a := o.audit(k)
	a.frontends()
	if len(a.found) > 0 {
		o.fail("the maps after Apply: %s", strings.Join(a.found, "\n\t"))
	}
}

func (o *oracle) audit(k *kernelMaps) *audit {
	return &audit{kernelMaps: k, o: o, counts: map[uint32]uint32{}, sets: map[uint32]map[uint32]bool{}, ids: map[uint32]bool{}, sticky: map[uint32]bool{}, withTable: map[uint32]uint32{}}
}

// wrong is what is not as it must be in the maps.
func (o *oracle) wrong(k *kernelMaps) []string {
	a := o.audit(k)
	a.frontends()
	a.losers()
	a.checkSlots()
	a.checkBackends()
	a.checkMembers()
	a.checkRest()
	return a.found
}

// audit is one look at the maps.
type audit struct {
	*kernelMaps
	o         *oracle
	found     []string
	counts    map[uint32]uint32 // of backends of each set
	sets      map[uint32]map[uint32]bool
	ids       map[uint32]bool   // of service ports
	sticky    map[uint32]bool   // sets of frontends with affinity
	withTable map[uint32]uint32 // far sets
}

func (a *audit) note(format string, args ...any) {
	a.found = append(a.found, fmt.Sprintf(format, args...))
}

// frontends: each place that a Service has, with the backends of the model for
// clients inside and outside, and no other.
func (a *audit) frontends() {
	seen := 0
	for _, p := range everywhere() {
		c := a.o.now.claimOn(p)
		k := pin.KernelServiceKey{Addr: pin.KernelAddr{B: addr.To16(p.at.Addr())}, Port: networkOrder(p.at.Port()), Protocol: protocolOf(p)}
		v, ok := a.services[k]
		if ok != (c != nil) {
			a.note("frontend %s: there: %v, want %v", p, ok, c != nil)
		}
		if !ok {
			continue
		}
		seen++
		if c == nil {
			continue
		}
		a.frontend(p, c, &v)
	}
	if seen != len(a.services) {
		a.note("%d frontends, %d of them at places that are", len(a.services), seen)
	}
}

func protocolOf(p place) uint8 {
	if p.protocol == corev1.ProtocolUDP {
		return unix.IPPROTO_UDP
	}
	return unix.IPPROTO_TCP
}

func networkOrder(p uint16) uint16 { return p>>8 | p<<8 }

func (a *audit) frontend(p place, c *claim, v *pin.KernelService) {
	a.ids[v.Id] = true
	a.set(p, "near", v.Near.Id, v.Near.Count, a.o.now.backendsOf(c, p.at.Addr().Is4(), policyIsLocal(c, true)))
	sticky := c.service.Spec.SessionAffinity == corev1.ServiceAffinityClientIP
	if sticky != (v.Affinity != 0) {
		a.note("%s: affinity %d, want it: %v", p, v.Affinity, sticky)
	}
	a.sticky[v.Near.Id] = a.sticky[v.Near.Id] || sticky
	if c.kind == clusterIP {
		if v.Far.Count != 0 || v.Maglev != 0 {
			a.note("%s: a cluster IP has something for clients outside", p)
		}
		return
	}
	a.set(p, "far", v.Far.Id, v.Far.Count, a.o.now.backendsOf(c, p.at.Addr().Is4(), policyIsLocal(c, false)))
	a.sticky[v.Far.Id] = a.sticky[v.Far.Id] || sticky
	if (v.Maglev != 0) != (a.o.maglev && v.Far.Count > 0) {
		a.note("%s: a table of %d, %d backends, Maglev %v", p, v.Maglev, v.Far.Count, a.o.maglev)
	}
	if v.Maglev != 0 {
		a.withTable[v.Far.Id] = v.Maglev
	}
}

// contended says whether a place has more than one claim: who loses it may have
// no other.
func (o *oracle) contended() bool {
	return slices.ContainsFunc(everywhere(), func(p place) bool { return len(o.now.claimsOn(p)) > 1 })
}

// slot returns a slot's backend.
func (k *kernelMaps) slot(at pin.KernelSlotKey) (id uint32, ok bool, b pin.KernelBackend, here bool) {
	if k.m == nil {
		id, ok = k.slots[at]
		b, here = k.backends[id]
		return id, ok, b, here
	}
	ok = k.m.Map("weft_slots").Lookup(at, &id) == nil
	here = k.m.Map("weft_backends").Lookup(id, &b) == nil
	return id, ok, b, here
}

// set compares one with the model.
func (a *audit) set(p place, name string, id, count uint32, want []string) {
	if count == 0 {
		if len(want) > 0 {
			a.note("%s: no backends %s, want %v", p, name, want)
		}
		return
	}
	var got []string
	a.counts[id] = max(a.counts[id], count)
	a.sets[id] = map[uint32]bool{}
	for i := range count {
		b, ok, v, here := a.slot(pin.KernelSlotKey{Set: id, Slot: i})
		if !ok || !here || v.Protocol != protocolOf(p) {
			a.note("%s: slot %d of set %d: %v, backend %d %v of protocol %d", p, i, id, ok, b, here, v.Protocol)
		}
		a.sets[id][b] = true
		got = append(got, netip.AddrPortFrom(addr.From16(v.Addr.B), networkOrder(v.Port)).String())
	}
	if slices.Sort(got); !slices.Equal(got, want) {
		a.note("%s: backends %s %v, want %v", p, name, got, want)
	}
}

// losers: what service ports have for places that others have got is there, too.
func (a *audit) losers() {
	var wanted []string
	sticky := map[string]bool{}
	for _, p := range everywhere() {
		claims := a.o.now.claimsOn(p)
		if len(claims) < 2 {
			continue
		}
		for _, c := range claims {
			for _, inside := range []bool{true, false} {
				set := strings.Join(a.o.now.backendsOf(c, p.at.Addr().Is4(), policyIsLocal(c, inside)), " ") + "/" + string(c.port.Protocol)
				wanted = append(wanted, set)
				sticky[set] = sticky[set] || c.service.Spec.SessionAffinity == corev1.ServiceAffinityClientIP
			}
		}
	}
	if len(wanted) == 0 {
		return
	}
	counts := map[uint32]uint32{}
	for k := range a.slots {
		counts[k.Set] = max(counts[k.Set], k.Slot+1)
	}
	for id, count := range counts {
		if set := a.contents(id, count); slices.Contains(wanted, set) {
			a.keep(id, count, sticky[set])
		}
	}
}

// contents are the backends of a set as text.
func (a *audit) contents(id, count uint32) string {
	var list []string
	protocol := ""
	for i := range count {
		b := a.backends[a.slots[pin.KernelSlotKey{Set: id, Slot: i}]]
		list = append(list, netip.AddrPortFrom(addr.From16(b.Addr.B), networkOrder(b.Port)).String())
		protocol = map[uint8]string{unix.IPPROTO_TCP: "TCP", unix.IPPROTO_UDP: "UDP"}[b.Protocol]
	}
	slices.Sort(list)
	return strings.Join(list, " ") + "/" + protocol
}

// keep takes a set as one that may be there.
func (a *audit) keep(id, count uint32, sticky bool) {
	if _, ok := a.tables[id]; ok && a.o.maglev {
		a.withTable[id] = 1
	}
	if a.sets[id] != nil {
		return
	}
	a.counts[id], a.sets[id], a.sticky[id] = count, map[uint32]bool{}, sticky
	for i := range count {
		a.sets[id][a.slots[pin.KernelSlotKey{Set: id, Slot: i}]] = true
	}
}

func (a *audit) checkSlots() {
	for k, b := range a.slots {
		if k.Slot >= a.counts[k.Set] {
			a.note("slot %d of set %d, which has %d, holds backend %d", k.Slot, k.Set, a.counts[k.Set], b)
		}
	}
}

// checkBackends: one that no set holds stays while datagrams may go to it, as it
// terminates.
func (a *audit) checkBackends() {
	used := map[uint32]bool{}
	for _, set := range a.sets {
		for b := range set {
			used[b] = true
		}
	}
	for id, b := range a.backends {
		at := netip.AddrPortFrom(addr.From16(b.Addr.B), networkOrder(b.Port))
		if !used[id] && (b.Protocol == unix.IPPROTO_TCP || !a.o.now.serves(at)) {
			a.note("backend %d, %s of protocol %d, is in no set", id, at, b.Protocol)
		}
	}
}

// serves says whether an endpoint serves there.
func (o *objects) serves(at netip.AddrPort) bool {
	for _, s := range o.slices {
		for _, p := range s.Ports {
			for i := range s.Endpoints {
				e := &s.Endpoints[i]
				ready := e.Conditions.Ready == nil || *e.Conditions.Ready
				serving := e.Conditions.Serving == nil && ready || e.Conditions.Serving != nil && *e.Conditions.Serving
				if *p.Port == int32(at.Port()) && e.Addresses[0] == at.Addr().String() && serving {
					return true
				}
			}
		}
	}
	return false
}

func (a *audit) checkMembers() {
	for k := range a.members {
		if !a.sticky[k.Set] || !a.sets[k.Set][k.Backend] {
			a.note("backend %d is a member of set %d, which has affinity: %v, and that backend: %v", k.Backend, k.Set, a.sticky[k.Set], a.sets[k.Set][k.Backend])
		}
	}
	for id, set := range a.sets {
		for b := range set {
			if _, ok := a.members[pin.KernelMemberKey{Set: id, Backend: b}]; !ok && a.sticky[id] {
				a.note("backend %d is no member of set %d, which has affinity", b, id)
			}
		}
	}
}

func (a *audit) checkRest() {
	for k := range a.ranges {
		if !a.ids[k.Service] && !a.o.contended() {
			a.note("a source range of service %d, which is none", k.Service)
		}
	}
	for id := range a.tables {
		if a.withTable[id] == 0 {
			a.note("a Maglev table of set %d, whose frontends have none", id)
		}
	}
	for id := range a.withTable {
		if _, ok := a.tables[id]; !ok {
			a.note("no Maglev table of set %d", id)
		}
	}
	for k, f := range a.flows {
		if _, here := a.backends[f.Backend]; !here && k.Protocol == unix.IPPROTO_UDP {
			a.note("datagrams from %s to %s go to backend %d, which is gone", addr.From16(k.Src.B), addr.From16(k.Dst.B), f.Backend)
		}
	}
	for cookie, s := range a.sockets {
		a.note("a socket %d of service %d, but none is open", cookie, s.Service)
	}
}
