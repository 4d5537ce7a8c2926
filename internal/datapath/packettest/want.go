// SPDX-License-Identifier: Apache-2.0

package packettest

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/weft-mesh/weft/internal/addr"
	"github.com/weft-mesh/weft/internal/datapath/pin"
	"github.com/weft-mesh/weft/internal/datapath/reason"
)

// Verdicts of tcx programs.
const (
	Next     = -1
	Pass     = 0
	Drop     = 2
	Redirect = 7
)

// Want is everything that a packet is to change. What it does not name must be
// as it was, or empty.
type Want struct {
	Verdict int32
	Frame   []byte   // nil: as it came
	Mark    uint32   // of the skb, afterwards
	Count   []string // counters that count this packet, each once
	Events  []string // see FormatEvent
	Conns   []string // the whole connection table; see Conns
	NAT     []string // the whole masquerading table; see NAT
	Leaving bool     // it is counted as it leaves, which is longer or shorter than it came
	Flows   []string // the whole table of translated connections; see Flows
}

// Step runs prog on one packet and compares all that came of it.
func (n *Node) Step(t testing.TB, prog *ebpf.Program, in In, want Want) Out {
	t.Helper()
	before, counted := n.counters, in.Frame
	if want.Leaving {
		counted = want.Frame
	}
	out := n.Run(prog, in)
	if want.Frame == nil {
		want.Frame = in.Frame
	}
	if out.Verdict != want.Verdict {
		t.Errorf("verdict %d, want %d", out.Verdict, want.Verdict)
	}
	if out.Mark != want.Mark {
		t.Errorf("mark %#x, want %#x", out.Mark, want.Mark)
	}
	if d := cmp.Diff(hex.Dump(want.Frame), hex.Dump(out.Frame)); d != "" {
		t.Errorf("frame (-want +got):\n%s", d)
	}
	n.counters = n.readCounters()
	diff(t, "counters", wantCounters(want, in.Frame), minus(n.counters, before))
	var events []string
	for _, e := range out.Events {
		events = append(events, FormatEvent(e))
		if (e.Type == uint8(pin.KernelEventTypeEVENT_DROP) || e.Type == uint8(pin.KernelEventTypeEVENT_NEW)) && (e.Packets != 1 || e.Bytes != uint64(len(counted))) {
			t.Errorf("event %s counts %d packets, %d bytes: want 1, %d", FormatEvent(e), e.Packets, e.Bytes, len(counted))
		}
		if int(e.Ifindex) != n.devices[in.Device] {
			t.Errorf("event %s names device %d, want %d", FormatEvent(e), e.Ifindex, n.devices[in.Device])
		}
	}
	diff(t, "events", want.Events, events)
	diff(t, "connections", want.Conns, n.Conns())
	diff(t, "masquerading table", want.NAT, n.NAT())
	diff(t, "translated connections", want.Flows, n.Flows())
	return out
}

func diff(t testing.TB, what string, want, got any) {
	t.Helper()
	if d := cmp.Diff(want, got, cmpopts.EquateEmpty()); d != "" {
		t.Errorf("%s (-want +got):\n%s", what, d)
	}
}

// Count is one counter.
type Count struct{ Packets, Bytes uint64 }

// wantCounters: the datapath counts a packet as it came, but an answer as it
// leaves, which is a frame of another length.
func wantCounters(w Want, in []byte) map[string]Count {
	counts := map[string]Count{}
	for _, name := range w.Count {
		size := len(in)
		if name == "answered" || w.Leaving {
			size = len(w.Frame)
		}
		counts[name] = Count{1, uint64(size)}
	}
	return counts
}

func minus(a, b map[string]Count) map[string]Count {
	d := map[string]Count{}
	for name, c := range a {
		if c != b[name] {
			d[name] = Count{c.Packets - b[name].Packets, c.Bytes - b[name].Bytes}
		}
	}
	return d
}

func (n *Node) readCounters() map[string]Count {
	n.t.Helper()
	rows, err := reason.Counts(n.Maps)
	n.check(err, "read counters")
	counts := map[string]Count{}
	for _, r := range rows {
		counts[reason.Name(r.Reason)] = Count{r.Packets, r.Bytes}
	}
	return counts
}

func decodeEvent(raw []byte) pin.KernelEvent {
	if len(raw) < int(unsafe.Sizeof(pin.KernelEvent{})) {
		panic(fmt.Sprintf("event of %d bytes", len(raw)))
	}
	return *(*pin.KernelEvent)(unsafe.Pointer(&raw[0]))
}

var (
	eventTypes = []string{"", "new", "update", "close", "drop"}
	directions = []string{"", "egress", "ingress"}
	protocols  = map[uint8]string{ICMP: "icmp", TCP: "tcp", UDP: "udp", ICMPv6: "icmp6", SCTP: "sctp"}
)

func protocol(p uint8) string {
	if s, ok := protocols[p]; ok {
		return s
	}
	return fmt.Sprint(p)
}

// FormatEvent writes an event as "new egress tcp SRC>DST 300>301", a drop as
// "drop(REASON) egress …".
func FormatEvent(e pin.KernelEvent) string {
	kind := eventTypes[e.Type]
	if e.Reason != 0 {
		kind += "(" + reason.Name(e.Reason) + ")"
	}
	return fmt.Sprintf("%s %s %s %s>%s %d>%d", kind, directions[e.Direction], protocol(e.Protocol),
		end(e.Src, e.Sport), end(e.Dst, e.Dport), e.SrcIdentity, e.DstIdentity)
}

func nativeUint32(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }

// HostPort turns a 16-bit field in network order, as read from memory, into a
// number, and the other way round.
func HostPort(v uint16) uint16 {
	var b [2]byte
	binary.NativeEndian.PutUint16(b[:], v)
	return binary.BigEndian.Uint16(b[:])
}

func end(a pin.KernelAddr, port uint16) netip.AddrPort {
	return netip.AddrPortFrom(addr.From16(a.B), HostPort(port))
}

var flagNames = []struct {
	flag pin.KernelCtFlag
	name string
}{
	{pin.KernelCtFlagCT_REPLIED, "replied"}, {pin.KernelCtFlagCT_ESTABLISHED, "established"},
	{pin.KernelCtFlagCT_FIN_ORIG, "fin"}, {pin.KernelCtFlagCT_FIN_REPLY, "fin-reply"},
	{pin.KernelCtFlagCT_RST, "rst"}, {pin.KernelCtFlagCT_CLOSED, "closed"}, {pin.KernelCtFlagCT_DENIED, "denied"},
	{pin.KernelCtFlagCT_ALIVE_ORIG, "alive"}, {pin.KernelCtFlagCT_ALIVE_REPLY, "alive-reply"},
	{pin.KernelCtFlagCT_SERVICE, "service"},
}

// Conns lists the connection table, each entry as
// "tcp ORIGINATOR>RESPONDER 2/1 replied,established nat 10000", sorted.
func (n *Node) Conns() []string {
	n.t.Helper()
	var (
		k    pin.KernelCtKey
		e    pin.KernelCtEntry
		out  []string
		rows = n.Maps.Map("weft_conntrack").Iterate()
	)
	for rows.Next(&k, &e) {
		out = append(out, formatConn(k, e))
	}
	n.check(rows.Err(), "walk connections")
	slices.Sort(out)
	return out
}

func formatConn(k pin.KernelCtKey, e pin.KernelCtEntry) string {
	from, to := end(k.A, k.A_port), end(k.B, k.B_port)
	if e.Flags&uint32(pin.KernelCtFlagCT_FROM_A) == 0 {
		from, to = to, from
	}
	var flags []string
	for _, f := range flagNames {
		if e.Flags&uint32(f.flag) != 0 {
			flags = append(flags, f.name)
		}
	}
	s := fmt.Sprintf("%s %s>%s %d/%d", protocol(k.Protocol), from, to, e.Packets[0], e.Packets[1])
	if len(flags) > 0 {
		s += " " + strings.Join(flags, ",")
	}
	if e.NatPort != 0 {
		s += fmt.Sprintf(" nat %d", HostPort(uint16(e.NatPort)))
	}
	return s
}

// NAT lists the masquerading table, each entry as "udp REMOTE PORT>POD", sorted.
func (n *Node) NAT() []string {
	n.t.Helper()
	var (
		k    pin.KernelNatKey
		e    pin.KernelNatEntry
		out  []string
		rows = n.Maps.Map("weft_nat").Iterate()
	)
	for rows.Next(&k, &e) {
		out = append(out, fmt.Sprintf("%s %s %d>%s", protocol(k.Protocol), end(k.Remote, k.RemotePort), HostPort(k.NatPort), end(e.Pod, e.PodPort)))
	}
	n.check(rows.Err(), "walk the masquerading table")
	slices.Sort(out)
	return out
}

// Conn names a connection of the packet as Conns does, without counts.
func (p Packet) Conn() string {
	sport, dport := p.ports()
	return fmt.Sprintf("%s %s>%s", protocol(p.Protocol), netip.AddrPortFrom(p.Src, sport), netip.AddrPortFrom(p.Dst, dport))
}

// Event names an event about the packet as FormatEvent does; kind is "new
// egress" or the like.
func (p Packet) Event(kind string, src, dst uint64) string {
	return fmt.Sprintf("%s %s %d>%d", kind, p.Conn(), src, dst)
}

func (p Packet) ports() (uint16, uint16) {
	echo := p.Protocol == ICMP && (p.Type == 8 || p.Type == 0) || p.Protocol == ICMPv6 && (p.Type == 128 || p.Type == 129)
	switch {
	case echo:
		return uint16(p.Rest >> 16), uint16(p.Rest >> 16)
	case p.Protocol == TCP, p.Protocol == UDP, p.Protocol == SCTP:
		return p.Sport, p.Dport
	}
	return 0, 0
}
