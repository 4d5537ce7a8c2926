// SPDX-License-Identifier: Apache-2.0

package packettest

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weft-mesh/weft/internal/addr"
	"github.com/weft-mesh/weft/internal/datapath/pin"
)

// Service is a service port as the tables have it.
type Service struct {
	Frontends []netip.AddrPort
	Protocol  uint8
	Near, Far []netip.AddrPort // backends for clients of this node, and from elsewhere
	Flags     pin.KernelServiceFlag
	Affinity  time.Duration
	Ranges    []netip.Prefix // of clients
}

// serviceMaps are those that Serve writes.
var serviceMaps = []string{"weft_services", "weft_slots", "weft_backends", "weft_members", "weft_source_ranges"}

// Serve makes these all the services that there are. Backends are numbered from
// 1 in their order of appearance.
func (n *Node) Serve(services ...Service) {
	n.t.Helper()
	n.empty(serviceMaps...)
	numbers := map[pin.KernelBackend]uint32{}
	for i, s := range services {
		id := uint32(i + 1)
		v := pin.KernelService{Id: id, Flags: uint32(s.Flags), Affinity: uint32(s.Affinity / time.Second)}
		v.Near.Id, v.Near.Count = 2*id, uint32(len(s.Near))
		v.Far.Id, v.Far.Count = 2*id+1, uint32(len(s.Far))
		n.set(numbers, v.Near.Id, s.Protocol, s.Near)
		n.set(numbers, v.Far.Id, s.Protocol, s.Far)
		for _, r := range s.Ranges {
			n.addRange(id, r)
		}
		for _, f := range s.Frontends {
			k := pin.KernelServiceKey{Addr: pin.KernelAddr{B: addr.To16(f.Addr())}, Port: HostPort(f.Port()), Protocol: s.Protocol}
			n.check(n.Maps.Map("weft_services").Put(&k, &v), "enter a service")
		}
	}
}

func (n *Node) set(numbers map[pin.KernelBackend]uint32, id uint32, protocol uint8, backends []netip.AddrPort) {
	n.t.Helper()
	for i, b := range backends {
		v := pin.KernelBackend{Addr: pin.KernelAddr{B: addr.To16(b.Addr())}, Port: HostPort(b.Port()), Protocol: protocol}
		number, ok := numbers[v]
		if !ok {
			number = uint32(len(numbers) + 1)
			numbers[v] = number
			n.check(n.Maps.Map("weft_backends").Put(number, &v), "enter a backend")
		}
		n.check(n.Maps.Map("weft_slots").Put(&pin.KernelSlotKey{Set: id, Slot: uint32(i)}, number), "enter a slot")
		n.check(n.Maps.Map("weft_members").Put(&pin.KernelMemberKey{Set: id, Backend: number}, uint8(1)), "enter a member")
	}
}

func (n *Node) addRange(service uint32, r netip.Prefix) {
	n.t.Helper()
	bits := r.Bits()
	if r.Addr().Is4() {
		bits += 96
	}
	b := addr.To16(r.Addr())
	key := append(append(nativeUint32(uint32(32+bits)), nativeUint32(service)...), b[:]...)
	n.check(n.Maps.Map("weft_source_ranges").Put(key, uint8(1)), "enter a source range")
}

// AddBackend gives the only slot of the services' first set to another backend,
// under a number that none had.
func (n *Node) AddBackend(set uint32, protocol uint8, b netip.AddrPort) {
	n.t.Helper()
	const number = 1000
	v := pin.KernelBackend{Addr: pin.KernelAddr{B: addr.To16(b.Addr())}, Port: HostPort(b.Port()), Protocol: protocol}
	n.check(n.Maps.Map("weft_backends").Put(uint32(number), &v), "enter a backend")
	n.check(n.Maps.Map("weft_slots").Put(&pin.KernelSlotKey{Set: set}, uint32(number)), "enter a slot")
}

// DropBackend forgets the backend of this number.
func (n *Node) DropBackend(number uint32) {
	n.t.Helper()
	n.check(n.Maps.Map("weft_backends").Delete(number), "delete a backend")
}

func (n *Node) empty(maps ...string) {
	n.t.Helper()
	for _, name := range maps {
		m := n.Maps.Map(name)
		key := make([]byte, m.KeySize())
		for m.NextKey(nil, &key) == nil {
			n.check(m.Delete(key), "empty "+name)
		}
	}
}

// EditFlows changes every half of a translated connection; now is the kernel's
// clock in seconds.
func (n *Node) EditFlows(edit func(k *pin.KernelFlowKey, v *pin.KernelServiceFlow, now uint32)) {
	n.t.Helper()
	now, m := n.now(), n.Maps.Map("weft_service_flows")
	for k, v := range n.flows(m) {
		edit(&k, &v, now)
		n.check(m.Update(&k, &v, ebpf.UpdateExist), "change a flow")
	}
}

func (n *Node) now() uint32 {
	n.t.Helper()
	var ts unix.Timespec
	n.check(unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts), "read the clock")
	return uint32(ts.Sec)
}

// AgeAffinity makes clients that stay with a backend be silent for so long.
func (n *Node) AgeAffinity(ago time.Duration) {
	n.t.Helper()
	m := n.Maps.Map("weft_affinity")
	keys, err := n.affinities(m)
	n.check(err, "walk affinities")
	for _, k := range keys {
		var v pin.KernelAffinity
		n.check(m.Lookup(&k, &v), "read an affinity")
		v.Last = n.now() - uint32(ago/time.Second)
		n.check(m.Put(&k, &v), "change an affinity")
	}
}

func (n *Node) affinities(m *ebpf.Map) (keys []pin.KernelAffinityKey, err error) {
	var (
		k  pin.KernelAffinityKey
		v  pin.KernelAffinity
		it = m.Iterate()
	)
	for it.Next(&k, &v) {
		keys = append(keys, k)
	}
	return keys, it.Err()
}

// DropFlows deletes the halves of translated connections that which says.
func (n *Node) DropFlows(which func(*pin.KernelServiceFlow) bool) {
	n.t.Helper()
	m := n.Maps.Map("weft_service_flows")
	for k, v := range n.flows(m) {
		if which(&v) {
			n.check(m.Delete(&k), "delete a flow")
		}
	}
}

func (n *Node) flows(m *ebpf.Map) map[pin.KernelFlowKey]pin.KernelServiceFlow {
	n.t.Helper()
	var (
		k   pin.KernelFlowKey
		v   pin.KernelServiceFlow
		out = map[pin.KernelFlowKey]pin.KernelServiceFlow{}
		it  = m.Iterate()
	)
	for it.Next(&k, &v) {
		out[k] = v
	}
	n.check(it.Err(), "walk flows of services")
	return out
}

var flowFlagNames = []struct {
	flag pin.KernelServiceFlowFlag
	name string
}{
	{pin.KernelServiceFlowFlagFLOW_REPLY, "reply"}, {pin.KernelServiceFlowFlagFLOW_SNAT, "snat"}, {pin.KernelServiceFlowFlagFLOW_DSR, "dsr"},
	{pin.KernelServiceFlowFlagFLOW_HAIRPIN, "hairpin"}, {pin.KernelServiceFlowFlagFLOW_ANSWERED, "answered"},
	{pin.KernelServiceFlowFlagFLOW_ESTABLISHED, "established"}, {pin.KernelServiceFlowFlagFLOW_FIN, "fin"},
	{pin.KernelServiceFlowFlagFLOW_FIN_BACK, "fin-back"}, {pin.KernelServiceFlowFlagFLOW_RST, "rst"}, {pin.KernelServiceFlowFlagFLOW_RST_BACK, "rst-back"},
}

// Flows lists the halves of translated connections, each as
// "tcp SRC>DST is SRC>DST reply,snat", sorted.
func (n *Node) Flows() (out []string) {
	n.t.Helper()
	for k, v := range n.flows(n.Maps.Map("weft_service_flows")) {
		var flags []string
		for _, f := range flowFlagNames {
			if v.Flags&uint32(f.flag) != 0 {
				flags = append(flags, f.name)
			}
		}
		s := fmt.Sprintf("%s %s>%s is %s>%s", protocol(k.Protocol), end(k.Src, k.Sport), end(k.Dst, k.Dport), end(v.Src, v.Sport), end(v.Dst, v.Dport))
		out = append(out, strings.TrimSpace(s+" "+strings.Join(flags, ",")))
	}
	slices.Sort(out)
	return out
}

// FlowRows names both halves of the connection of p that becomes to, as Flows
// does; flags are those of the requests' half and of the answers'.
func FlowRows(p, to Packet, flags, back string) []string {
	row := func(a, b Packet, flags string) string {
		conn := b.Conn()
		return strings.TrimSpace(a.Conn() + " is " + conn[strings.Index(conn, " ")+1:] + " " + flags)
	}
	rows := []string{row(p, to, flags), row(to.Reply(), p.Reply(), strings.TrimSuffix("reply,"+back, ","))}
	slices.Sort(rows)
	return rows
}

// Serve makes these all the services in the tables of maps, and forgets the
// connections to others, whose backends have the same numbers.
func Serve(t testing.TB, maps *pin.Maps, services ...Service) {
	t.Helper()
	n := &Node{Maps: maps, t: t}
	n.Serve(services...)
	n.empty("weft_service_flows")
}
