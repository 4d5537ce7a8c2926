// SPDX-License-Identifier: Apache-2.0

package xdp

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/weft-mesh/weft/internal/addr"
	"github.com/weft-mesh/weft/internal/datapath/deny"
	pt "github.com/weft-mesh/weft/internal/datapath/packettest"
	"github.com/weft-mesh/weft/internal/datapath/pin"
	"github.com/weft-mesh/weft/internal/datapath/setting"
)

// TestForward: a connection to a backend on another node, both ways.
func TestForward(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family, protocol uint8) {
		fix.reset()
		p := request(f, protocol)
		fix.step(t, p.Bytes(), tx, forwarded(f, p).Bytes(), "service")
		r := answer(forwarded(f, p))
		fix.step(t, r.Bytes(), tx, answered(f, r).Bytes(), "service")
		again := p.With(func(p *pt.Packet) { p.Flags, p.Payload, p.TTL = pt.ACK, payload(1000), 2 })
		fix.step(t, again.Bytes(), tx, forwarded(f, again).Bytes(), "service")
		name, state := "udp", " answered far"
		if protocol == pt.TCP {
			name, state = "tcp", " answered established far"
		}
		client, front := netip.AddrPortFrom(f.World, 40000), netip.AddrPortFrom(f.Node, nodePort)
		node, backend := netip.AddrPortFrom(f.Node, natPort), netip.AddrPortFrom(f.RemotePod, backendPort)
		want := []string{
			fmt.Sprintf("%s %s>%s = %s>%s reply snat%s", name, backend, node, front, client, state),
			fmt.Sprintf("%s %s>%s = %s>%s snat%s", name, client, front, node, backend, state),
		}
		if d := cmp.Diff(want, fix.flows(), cmpopts.SortSlices(func(a, b string) bool { return a < b })); d != "" {
			t.Errorf("flows (-want +got):\n%s", d)
		}
		if h := fix.hits(); h != 1 {
			t.Errorf("%d hits, want 1", h)
		}
	})
}

func payload(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i * 7)
	}
	return b
}

// TestRandom: checksums of any packet, none and the odd 0xffff of UDP included.
func TestRandom(t *testing.T) {
	fix := newFixture(t, nil)
	rnd := rand.New(rand.NewPCG(3, 4))
	each(t, func(t *testing.T, f pt.Family, protocol uint8) {
		fix.reset()
		for range 4000 {
			p := request(f, protocol).With(func(p *pt.Packet) {
				p.Flags, p.TTL, p.ID = pt.ACK, uint8(2+rnd.IntN(254)), uint32(rnd.IntN(65536))
				p.NoChecksum = protocol == pt.UDP && !f.V6 && rnd.IntN(8) == 0
				p.Payload = make([]byte, rnd.IntN(40))
				for i := range p.Payload {
					p.Payload[i] = byte(rnd.Uint32())
				}
			})
			if partialSum(p) == checksum(p) {
				continue // taken for one that is not complete
			}
			fix.step(t, p.Bytes(), tx, forwarded(f, p).Bytes(), "service")
			if t.Failed() {
				t.Fatalf("packet %+v", p)
			}
		}
	})
}

// checksumAt is where the checksum is behind the IP header.
func checksumAt(p pt.Packet) int {
	off := 14 + 20
	if p.V6() {
		off = 14 + 40
	}
	if p.Protocol == pt.TCP {
		return off + 16
	}
	return off + 6
}

func checksum(p pt.Packet) uint16 { return binary.BigEndian.Uint16(p.Bytes()[checksumAt(p):]) }

// partialSum is what a checksum is that a device is to complete.
func partialSum(p pt.Packet) uint16 {
	b, l4 := p.Bytes(), 14+20
	if p.V6() {
		l4 = 14 + 40
	}
	sum := uint64(p.Protocol) + uint64(len(b)-l4)
	src, dst := p.Src.AsSlice(), p.Dst.AsSlice()
	for i := 0; i < len(src); i += 2 {
		sum += uint64(src[i])<<8 | uint64(src[i+1])
		sum += uint64(dst[i])<<8 | uint64(dst[i+1])
	}
	for sum > 0xffff {
		sum = sum&0xffff + sum>>16
	}
	return uint16(sum)
}

// left is a packet that XDP leaves to tcx as it is.
type left struct {
	name   string
	before func(*fixture, pt.Family, uint8)
	change func(*pt.Packet)
	raw    func([]byte) []byte
}

func leftToTCX(f pt.Family) []left {
	replace := func(flags uint32, backends ...netip.AddrPort) func(*fixture, pt.Family, uint8) {
		return func(fix *fixture, f pt.Family, protocol uint8) {
			fix.service(frontend{f.Node, nodePort, protocol, 20, flags, backends})
		}
	}
	remote := netip.AddrPortFrom(f.RemotePod, backendPort)
	return []left{
		{name: "no service", change: func(p *pt.Packet) { p.Dport = 81 }},
		{name: "a service for the cluster alone", before: replace(0, remote)},
		{name: "a local backend", before: replace(external, netip.AddrPortFrom(f.A, backendPort))},
		{name: "a process of the node as backend", before: replace(external, netip.AddrPortFrom(f.Node, backendPort))},
		{name: "a backend outside of the cluster", before: replace(external, netip.AddrPortFrom(f.Excluded, backendPort))},
		{name: "a local backend that has gone", before: replace(external, netip.AddrPortFrom(f.Unused, backendPort))},
		{name: "no backend", before: replace(external)},
		{name: "a client out of the ranges", before: replace(external|uint32(pin.KernelServiceFlagSERVICE_SOURCE_RANGES), remote)},
		{name: "next hop not known", before: func(fix *fixture, f pt.Family, _ uint8) { fix.clear("weft_neighbors") }},
		{name: "TTL of 1", change: func(p *pt.Packet) { p.TTL = 1 }},
		{name: "first fragment", change: func(p *pt.Packet) {
			p.Payload, p.DF, p.Fragment = payload(100), false, &pt.Fragment{From: 0, To: 48}
		}},
		{name: "later fragment", change: func(p *pt.Packet) {
			p.Payload, p.DF, p.Fragment = payload(100), false, &pt.Fragment{From: 48, To: 96}
		}},
		{name: "another protocol", change: func(p *pt.Packet) { p.Protocol = pt.SCTP }},
		{name: "echo", change: func(p *pt.Packet) { p.Protocol, p.Type = f.ICMP, f.Echo }},
		{name: "for another machine", change: func(p *pt.Packet) { p.EthDst = pt.MACOther }},
		{name: "larger than the link", change: func(p *pt.Packet) { p.Payload = payload(1500) }},
		{name: "source is a pod of this node", change: func(p *pt.Packet) { p.Src = f.A }},
		{name: "source is this node", change: func(p *pt.Packet) { p.Src = f.Node }},
		{name: "source is multicast", change: func(p *pt.Packet) { p.Src = f.Multicast }},
		{name: "longer than it is", raw: func(b []byte) []byte { return b[:len(b)-1] }},
		{name: "VLAN", raw: func(b []byte) []byte { return append(append(append([]byte(nil), b[:12]...), 0x81, 0, 0, 1), b[12:]...) }},
		{name: "ARP", raw: func(b []byte) []byte { b[12], b[13] = 8, 6; return b }},
		{name: "wrong version", raw: func(b []byte) []byte { b[14] ^= 0x20; return b }},
		{name: "nothing but Ethernet", raw: func(b []byte) []byte { return b[:14] }},
		{name: "cut off in the IP header", raw: func(b []byte) []byte { return b[:30] }},
		{name: "checksum left to a device"}, // see TestLeft
	}
}

func TestLeft(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family, protocol uint8) {
		cases := leftToTCX(f)
		if f.V6 {
			cases = append(cases, left{name: "an extension header", change: func(p *pt.Packet) { p.Extensions = []pt.Extension{{Protocol: 60}} }})
		} else {
			cases = append(cases, left{name: "IP options", change: func(p *pt.Packet) { p.Options = 4 }})
		}
		for _, c := range cases {
			t.Run(c.name, func(t *testing.T) {
				fix.reset()
				p := request(f, protocol)
				if c.before != nil {
					c.before(fix, f, protocol)
				}
				if c.change != nil {
					c.change(&p)
				}
				b := p.Bytes()
				if c.raw != nil {
					b = c.raw(b)
				}
				if c.name == "checksum left to a device" {
					binary.BigEndian.PutUint16(b[checksumAt(p):], partialSum(p))
				}
				fix.step(t, b, pass, nil, "")
				if fl := fix.flows(); len(fl) != 0 {
					t.Errorf("it left flows: %v", fl)
				}
				if h := fix.hits(); h != 0 {
					t.Errorf("%d hits, want 0: tcx counts them", h)
				}
			})
		}
	})
}

// TestTunnel: with a tunnel only the deny list is XDP's.
func TestTunnel(t *testing.T) {
	fix := newFixture(t, func(s *setting.Node) { s.TunnelIfindex = 9 })
	each(t, func(t *testing.T, f pt.Family, protocol uint8) {
		fix.reset()
		p := request(f, protocol)
		fix.step(t, p.Bytes(), pass, nil, "")
		fix.deny(t, addr.Host(f.World))
		fix.step(t, p.Bytes(), drop, nil, "denied")
	})
}

func (fix *fixture) deny(t *testing.T, prefixes ...netip.Prefix) *deny.List {
	t.Helper()
	l := deny.New(fix.Maps)
	for _, p := range prefixes {
		if _, err := l.Add(p); err != nil {
			t.Fatal(err)
		}
	}
	return l
}

// TestDeny: who is on the list is not heard, whatever it sends; the longest
// network counts.
func TestDeny(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family, protocol uint8) {
		fix.reset()
		all := netip.PrefixFrom(f.World, 0).Masked()
		l := fix.deny(t, addr.Host(f.World), all)
		for name, change := range map[string]func(*pt.Packet){
			"a request": func(*pt.Packet) {},
			"a fragment": func(p *pt.Packet) {
				p.Payload, p.DF, p.Fragment = payload(100), false, &pt.Fragment{From: 48, To: 96}
			},
			"echo":            func(p *pt.Packet) { p.Protocol, p.Type = f.ICMP, f.Echo },
			"a large one":     func(p *pt.Packet) { p.Payload = payload(1500) },
			"TTL of 1":        func(p *pt.Packet) { p.TTL = 1 },
			"for a local pod": func(p *pt.Packet) { p.Dst = f.A },
		} {
			t.Run(name, func(t *testing.T) { fix.step(t, request(f, protocol).With(change).Bytes(), drop, nil, "denied") })
		}
		other := request(f, protocol).With(func(p *pt.Packet) { p.Src = f.Excluded }).Bytes()
		fix.step(t, other, drop, nil, "denied")
		list, err := l.List()
		fix.must(err)
		if len(list) != 2 || list[0].Packets != 1 || list[0].Bytes != uint64(len(other)) || list[1].Packets != 6 {
			t.Errorf("list %+v, want 1 packet of the rest and 6 of the host", list)
		}
		// a list of the other family is none of this one's
		for _, g := range pt.Families {
			if g.V6 != f.V6 {
				p := request(g, protocol)
				fix.step(t, p.Bytes(), tx, forwarded(g, p).Bytes(), "service")
			}
		}
		for _, p := range []netip.Prefix{addr.Host(f.World), all} {
			_, err := l.Delete(p)
			fix.must(err)
		}
		p := request(f, protocol)
		fix.clear("weft_service_flows")
		fix.step(t, p.Bytes(), tx, forwarded(f, p).Bytes(), "service")
	})
}

// TestRanges: a client in loadBalancerSourceRanges is served.
func TestRanges(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family, protocol uint8) {
		fix.reset()
		fix.service(frontend{f.Node, nodePort, protocol, 20, external | uint32(pin.KernelServiceFlagSERVICE_SOURCE_RANGES), []netip.AddrPort{netip.AddrPortFrom(f.RemotePod, backendPort)}})
		fix.put("weft_source_ranges", &pin.KernelRangeKey{Prefixlen: 160, Service: 20, Addr: asUint32s(addr.To16(f.World))}, uint8(1))
		p := request(f, protocol)
		fix.step(t, p.Bytes(), tx, forwarded(f, p).Bytes(), "service")
	})
}

// TestAnswersLeft: answers go back only where they came from, and only while
// they are answers.
func TestAnswersLeft(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family, protocol uint8) {
		fix.reset()
		p := request(f, protocol)
		fix.step(t, p.Bytes(), tx, forwarded(f, p).Bytes(), "service")
		good := answer(forwarded(f, p))
		for name, change := range map[string]func(*pt.Packet){
			"another port":    func(p *pt.Packet) { p.Sport++ },
			"another pod":     func(p *pt.Packet) { p.Src = f.OtherNode },
			"another address": func(p *pt.Packet) { p.Dst = f.World },
		} {
			t.Run(name, func(t *testing.T) { fix.step(t, good.With(change).Bytes(), pass, nil, "") })
		}
		for _, x := range fix.rawFlows() {
			x.value.Mac = [6]byte{}
			fix.put("weft_service_flows", &x.key, &x.value)
		}
		t.Run("client's next hop not known", func(t *testing.T) { fix.step(t, good.Bytes(), pass, nil, "") })
	})
}

// TestOthersFlows: flows that only tcx serves.
func TestOthersFlows(t *testing.T) {
	fix := newFixture(t, nil)
	for name, flags := range map[string]pin.KernelServiceFlowFlag{
		"hairpin": pin.KernelServiceFlowFlagFLOW_SNAT | pin.KernelServiceFlowFlagFLOW_HAIRPIN,
		"near":    0,
		"local":   pin.KernelServiceFlowFlagFLOW_FAR,
		"answer":  pin.KernelServiceFlowFlagFLOW_FAR | pin.KernelServiceFlowFlagFLOW_REPLY,
		"DSR":     pin.KernelServiceFlowFlagFLOW_FAR | pin.KernelServiceFlowFlagFLOW_REPLY | pin.KernelServiceFlowFlagFLOW_DSR,
	} {
		t.Run(name, func(t *testing.T) {
			each(t, func(t *testing.T, f pt.Family, protocol uint8) {
				fix.reset()
				p := request(f, protocol).With(func(p *pt.Packet) { p.Flags = pt.ACK })
				fix.step(t, p.Bytes(), tx, forwarded(f, p).Bytes(), "service")
				for _, x := range fix.rawFlows() {
					x.value.Flags = uint32(flags)
					fix.put("weft_service_flows", &x.key, &x.value)
				}
				fix.step(t, p.Bytes(), pass, nil, "")
			})
		})
	}
}

// TestDSR: with direct server return tcx puts the option on, and XDP carries
// what has none.
func TestDSR(t *testing.T) {
	fix := newFixture(t, func(s *setting.Node) { s.ServiceDSR = true })
	each(t, func(t *testing.T, f pt.Family, protocol uint8) {
		fix.reset()
		p := request(f, protocol)
		fix.step(t, p.Bytes(), pass, nil, "")
		snat := load(t, fix.Node, nil)
		fix.run(snat.objects.FromWire, p.Bytes())
		for _, x := range fix.rawFlows() {
			x.value.Src, x.value.Sport = x.key.Src, x.key.Sport
			if x.value.Flags&uint32(pin.KernelServiceFlowFlagFLOW_REPLY) != 0 {
				fix.must(fix.Maps.Map("weft_service_flows").Delete(&x.key))
				continue
			}
			x.value.Flags = uint32(pin.KernelServiceFlowFlagFLOW_FAR | pin.KernelServiceFlowFlagFLOW_DSR)
			fix.put("weft_service_flows", &x.key, &x.value)
		}
		fix.step(t, p.Bytes(), pass, nil, "")
		later := p.With(func(p *pt.Packet) { p.Flags = pt.ACK })
		if protocol == pt.UDP {
			fix.step(t, later.Bytes(), pass, nil, "")
			return
		}
		want := forwarded(f, later).With(func(p *pt.Packet) { p.Src, p.Sport = f.World, 40000 })
		fix.step(t, later.Bytes(), tx, want.Bytes(), "service")
	})
}

// TestReuse: a SYN on a connection that has ended begins another, at the backend
// that there is now.
func TestReuse(t *testing.T) {
	fix := newFixture(t, nil)
	for _, f := range pt.Families {
		t.Run(f.Name, func(t *testing.T) {
			fix.reset()
			p := request(f, pt.TCP)
			fix.step(t, p.Bytes(), tx, forwarded(f, p).Bytes(), "service")
			rst := p.With(func(p *pt.Packet) { p.Flags = pt.RST })
			fix.step(t, rst.Bytes(), tx, forwarded(f, rst).Bytes(), "service")
			fix.service(frontend{f.Node, nodePort, pt.TCP, 20, external, []netip.AddrPort{netip.AddrPortFrom(f.RemotePod.Next(), backendPort)}})
			want := forwarded(f, p).With(func(p *pt.Packet) { p.Dst = f.RemotePod.Next() })
			fix.step(t, p.Bytes(), tx, want.Bytes(), "service")
			if n := len(fix.flows()); n != 2 {
				t.Errorf("flows %v, want those of the new connection", fix.flows())
			}
		})
	}
}

// TestPortsUsedUp: where no port is left tcx says no.
func TestPortsUsedUp(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family, protocol uint8) {
		fix.reset()
		p := request(f, protocol)
		fix.step(t, p.Bytes(), tx, forwarded(f, p).Bytes(), "service")
		p.Sport++
		fix.step(t, p.Bytes(), pass, nil, "")
		if n, h := len(fix.flows()), fix.hits(); n != 2 || h != 1 {
			t.Errorf("%d flows and %d hits, want 2 and 1", n, h)
		}
	})
}

// TestNextHopGoes: a next hop that is known no more is used for a second at most.
func TestNextHopGoes(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family, protocol uint8) {
		fix.reset()
		p := request(f, protocol)
		fix.step(t, p.Bytes(), tx, forwarded(f, p).Bytes(), "service")
		earlier := func() {
			for _, x := range fix.rawFlows() {
				x.value.LastSeen--
				fix.put("weft_service_flows", &x.key, &x.value)
			}
		}
		earlier()
		fix.neighbor(f.OtherNode, pt.MACA)
		want := forwarded(f, p).With(func(p *pt.Packet) { p.EthDst = pt.MACA })
		fix.step(t, p.Bytes(), tx, want.Bytes(), "service")
		earlier()
		fix.clear("weft_neighbors")
		fix.step(t, p.Bytes(), pass, nil, "")
	})
}
