// SPDX-License-Identifier: Apache-2.0

package pod

import (
	"net"
	"net/netip"
	"testing"

	pt "github.com/weft-mesh/weft/internal/datapath/packettest"
)

var broadcast = net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}

func TestARP(t *testing.T) {
	fix := newFixture(t, nil)
	f := pt.Families[0]
	good := pt.ARP{
		EthSrc: pt.MACA, EthDst: broadcast, Operation: 1, SenderMAC: pt.MACA, SenderIP: f.A,
		TargetMAC: make(net.HardwareAddr, 6), TargetIP: f.Gateway,
	}
	answer := pt.ARP{
		EthSrc: pt.HostMACA, EthDst: pt.MACA, Operation: 2, SenderMAC: pt.HostMACA, SenderIP: f.Gateway,
		TargetMAC: pt.MACA, TargetIP: f.A,
	}.Bytes()
	answered := pt.Want{Verdict: pt.Redirect, Frame: answer, Count: []string{"answered"}}
	ignored := pt.Want{Verdict: pt.Drop, Count: []string{"multicast-ignored"}}
	spoofed := func(src, dst string, id string) pt.Want {
		return dropped("spoofed-address", "drop(spoofed-address) egress 0 "+src+":0>"+dst+":0 "+id+">3")
	}
	for _, c := range []struct {
		name   string
		frame  []byte
		device string
		want   pt.Want
	}{
		{"for the gateway", good.Bytes(), pt.PodA, answered},
		{"by unicast", good.With(func(a *pt.ARP) { a.EthDst = pt.HostMACA }).Bytes(), pt.PodA, answered},
		{"for another address", good.With(func(a *pt.ARP) { a.TargetIP = f.B }).Bytes(), pt.PodA, ignored},
		{"announcement", good.With(func(a *pt.ARP) { a.TargetIP = f.A }).Bytes(), pt.PodA, ignored},
		{"unasked reply", good.With(func(a *pt.ARP) { a.Operation = 2 }).Bytes(), pt.PodA, ignored},
		{"from another pod's address", good.With(func(a *pt.ARP) { a.SenderIP = f.B }).Bytes(), pt.PodA, spoofed("10.244.1.6", "10.244.1.1", "301")},
		{"from nobody's address", good.With(func(a *pt.ARP) { a.SenderIP = f.Unused }).Bytes(), pt.PodA, spoofed("10.244.1.99", "10.244.1.1", "3")},
		{"by another pod", good.Bytes(), pt.PodB, spoofed("10.244.1.5", "10.244.1.1", "300")},
		{"cut off", good.Bytes()[:14+27], pt.PodA, dropped("malformed", "drop(malformed) egress 0 [::]:0>[::]:0 3>3")},
	} {
		t.Run(c.name, func(t *testing.T) {
			fix.Reset()
			fix.Step(t, fix.objects.FromPod, pt.In{Device: c.device, Frame: c.frame}, c.want)
		})
	}
	t.Run("to the pod", func(t *testing.T) {
		fix.Reset()
		fix.Step(t, fix.objects.ToPod, pt.In{Device: pt.PodA, Frame: good.Bytes()}, pt.Want{Verdict: pt.Pass})
	})
}

// solicitation asks for target as pod A's stack does; kernels put their own
// link-layer address into an option, but not where they have no address yet.
func solicitation(f pt.Family, src, target netip.Addr) pt.Packet {
	option := append([]byte{1, 1}, pt.MACA...)
	if src.IsUnspecified() {
		option = nil
	}
	b := target.As16()
	group := netip.AddrFrom16([16]byte{0xff, 2, 11: 1, 12: 0xff, 13: b[13], 14: b[14], 15: b[15]})
	return pt.Packet{
		EthSrc: pt.MACA, EthDst: net.HardwareAddr{0x33, 0x33, 0xff, b[13], b[14], b[15]},
		Src: src, Dst: group, TTL: 255, Protocol: pt.ICMPv6, Type: 135,
		Payload: append(append([]byte(nil), b[:]...), option...),
	}
}

// advertisement answers for the gateway.
func advertisement(f pt.Family, to netip.Addr) []byte {
	g := f.Gateway.As16()
	return pt.Packet{
		EthSrc: pt.HostMACA, EthDst: pt.MACA, Src: f.Gateway, Dst: to, TTL: 255, Protocol: pt.ICMPv6, Type: 136,
		Rest: 0xe0000000, Payload: append(append(append([]byte(nil), g[:]...), 2, 1), pt.HostMACA...),
	}.Bytes()
}

func TestND(t *testing.T) {
	fix := newFixture(t, nil)
	f := pt.Families[1]
	linkLocal := netip.MustParseAddr("fe80::1234")
	good := solicitation(f, f.A, f.Gateway)
	answered := func(to netip.Addr) pt.Want {
		return pt.Want{Verdict: pt.Redirect, Frame: advertisement(f, to), Count: []string{"answered"}}
	}
	ignored := pt.Want{Verdict: pt.Drop, Count: []string{"multicast-ignored"}}
	spoofed := func(p pt.Packet, id uint64) pt.Want {
		return dropped("spoofed-address", p.Event("drop(spoofed-address) egress", id, world))
	}
	unicast := func(p *pt.Packet) { p.EthDst, p.Dst = pt.HostMACA, f.Gateway }
	for _, c := range []struct {
		name   string
		packet pt.Packet
		device string
		want   func(pt.Packet) pt.Want
	}{
		{"for the gateway", good, pt.PodA, func(pt.Packet) pt.Want { return answered(f.A) }},
		{"by unicast", good.With(unicast), pt.PodA, func(pt.Packet) pt.Want { return answered(f.A) }},
		// what Linux probes a neighbour with that it knows
		{"by unicast from a link-local address", solicitation(f, linkLocal, f.Gateway).With(unicast), pt.PodA, func(pt.Packet) pt.Want { return answered(linkLocal) }},
		{"without an option", good.With(func(p *pt.Packet) { p.Payload = p.Payload[:16] }), pt.PodA, func(pt.Packet) pt.Want { return answered(f.A) }},
		{"with more options", good.With(func(p *pt.Packet) { p.Payload = append(p.Payload, 14, 1, 1, 2, 3, 4, 5, 6) }), pt.PodA, func(pt.Packet) pt.Want { return answered(f.A) }},
		{"for another address", solicitation(f, f.A, f.B), pt.PodA, func(pt.Packet) pt.Want { return ignored }},
		{"duplicate address detection", solicitation(f, netip.IPv6Unspecified(), f.A), pt.PodA, func(pt.Packet) pt.Want { return ignored }},
		{"duplicate address detection of the gateway", solicitation(f, netip.IPv6Unspecified(), f.Gateway), pt.PodA, func(pt.Packet) pt.Want { return ignored }},
		{"from another pod's address", good.With(func(p *pt.Packet) { p.Src = f.B }), pt.PodA, func(p pt.Packet) pt.Want { return spoofed(p, idB) }},
		{"by another pod", good, pt.PodB, func(p pt.Packet) pt.Want { return spoofed(p, idA) }},
		{"cut off", good.With(func(p *pt.Packet) { p.Payload = p.Payload[:15] }), pt.PodA, func(p pt.Packet) pt.Want {
			return dropped("malformed", p.Event("drop(malformed) egress", idA, world))
		}},
		{"router solicitation", good.With(func(p *pt.Packet) { p.Type, p.Dst, p.Payload = 133, netip.MustParseAddr("ff02::2"), nil }), pt.PodA, func(pt.Packet) pt.Want { return ignored }},
		{"advertisement", good.With(func(p *pt.Packet) { p.Type, p.Dst = 136, netip.MustParseAddr("ff02::1") }), pt.PodA, func(pt.Packet) pt.Want { return ignored }},
	} {
		t.Run(c.name, func(t *testing.T) {
			fix.Reset()
			fix.Step(t, fix.objects.FromPod, pt.In{Device: c.device, Frame: c.packet.Bytes()}, c.want(c.packet))
		})
	}
}
