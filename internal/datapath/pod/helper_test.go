// SPDX-License-Identifier: Apache-2.0

package pod

import (
	"net"
	"net/netip"
	"testing"

	pt "github.com/weft-mesh/weft/internal/datapath/packettest"
	"github.com/weft-mesh/weft/internal/datapath/pin"
	"github.com/weft-mesh/weft/internal/datapath/setting"
)

// fixture is a node with the pod programs loaded.
type fixture struct {
	*pt.Node
	*Datapath
}

func newFixture(t *testing.T, change func(*setting.Node)) fixture {
	t.Helper()
	return newSizedFixture(t, pt.Sizes(), change)
}

func newSizedFixture(t *testing.T, sizes pin.Sizes, change func(*setting.Node)) fixture {
	t.Helper()
	n := pt.New(t, sizes)
	s := n.Settings()
	if change != nil {
		change(&s)
	}
	d, err := Load(n.Maps, s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return fixture{n, d}
}

func tunnel(n *pt.Node) func(*setting.Node) {
	return func(s *setting.Node) { s.TunnelIfindex = n.Ifindex(pt.Tunnel) }
}

// fromA sends a packet of pod A, toA one that the node's stack sends to it.
func (f fixture) fromA(t *testing.T, p pt.Packet, w pt.Want) pt.Out {
	t.Helper()
	return f.Step(t, f.objects.FromPod, pt.In{Device: pt.PodA, Frame: p.Bytes()}, w)
}

func (f fixture) toA(t *testing.T, p pt.Packet, w pt.Want) pt.Out {
	t.Helper()
	return f.Step(t, f.objects.ToPod, pt.In{Device: pt.PodA, Frame: p.Bytes()}, w)
}

// syn is the good packet: pod A opens a connection to dst.
func syn(f pt.Family, dst netip.Addr) pt.Packet {
	return pt.Packet{
		EthSrc: pt.MACA, EthDst: pt.HostMACA, Src: f.A, Dst: dst, TTL: 64, DF: true,
		Protocol: pt.TCP, Sport: 40000, Dport: 80, Flags: pt.SYN,
	}
}

func datagram(f pt.Family, dst netip.Addr) pt.Packet {
	return syn(f, dst).With(func(p *pt.Packet) { p.Protocol, p.Flags, p.Dport, p.Payload = pt.UDP, 0, 53, []byte("who is it") })
}

func echo(f pt.Family, dst netip.Addr) pt.Packet {
	return syn(f, dst).With(func(p *pt.Packet) {
		p.Protocol, p.Flags, p.Sport, p.Dport = f.ICMP, 0, 0, 0
		p.Type, p.Rest, p.Payload = f.Echo, 0x1234_0001, []byte("ping")
	})
}

// delivered is the frame as the destination pod gets it, or as it goes to the
// next hop where the MAC addresses are nil and stay.
func delivered(p pt.Packet, dst, src net.HardwareAddr) []byte {
	return p.With(func(p *pt.Packet) {
		p.TTL--
		if dst != nil {
			p.EthDst, p.EthSrc = dst, src
		}
	}).Bytes()
}

// toWorld is what pod A's packet looks like on the wire with the node's
// address and port.
func toWorld(f pt.Family, p pt.Packet, port uint16) []byte {
	return delivered(p.With(func(p *pt.Packet) {
		p.Src = f.Node
		if p.Protocol == f.ICMP {
			p.Rest = uint32(port)<<16 | p.Rest&0xffff
		} else {
			p.Sport = port
		}
	}), nil, nil)
}

// icmpError is the frame with which the node tells pod A about its packet.
func icmpError(f pt.Family, about pt.Packet, kind, code uint8, rest uint32) []byte {
	quote := about.L3()
	long := 20 + 20
	if f.V6 {
		long = 40 + 20
	}
	if len(quote) < long {
		quote = quote[:long-12]
	}
	return pt.Packet{
		EthSrc: about.EthDst, EthDst: about.EthSrc, Src: f.Node, Dst: about.Src, TTL: 64,
		Protocol: f.ICMP, Type: kind, Code: code, Rest: rest, Payload: quote[:min(len(quote), long)],
	}.Bytes()
}

func timeExceeded(f pt.Family, about pt.Packet) []byte {
	if f.V6 {
		return icmpError(f, about, 3, 0, 0)
	}
	return icmpError(f, about, 11, 0, 0)
}

func tooBig(f pt.Family, about pt.Packet, mtu uint32) []byte {
	if f.V6 {
		return icmpError(f, about, 2, 0, mtu)
	}
	return icmpError(f, about, 3, 4, mtu)
}

// each runs a test for both IP versions.
func each(t *testing.T, f func(*testing.T, pt.Family)) {
	for _, fam := range pt.Families {
		t.Run(fam.Name, func(t *testing.T) { f(t, fam) })
	}
}

func dropped(reason string, e ...string) pt.Want {
	return pt.Want{Verdict: pt.Drop, Count: []string{reason}, Events: e}
}

func payload(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i * 7)
	}
	return b
}

func conn(p pt.Packet, rest string) []string { return []string{p.Conn() + " " + rest} }
