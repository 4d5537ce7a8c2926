// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/weft-mesh/weft/internal/datapath/node"
	pt "github.com/weft-mesh/weft/internal/datapath/packettest"
	"github.com/weft-mesh/weft/internal/datapath/pin"
	"github.com/weft-mesh/weft/internal/datapath/pod"
	"github.com/weft-mesh/weft/internal/datapath/setting"
)

const (
	idA, idB, world = pt.IdentityA, pt.IdentityB, pt.IdentityWorld

	external = pin.KernelServiceFlagSERVICE_EXTERNAL
	local    = pin.KernelServiceFlagSERVICE_LOCAL
	ranges   = pin.KernelServiceFlagSERVICE_SOURCE_RANGES

	// onePort is the only port that clients without a port of their own get.
	onePort = 22222
	// nearSet and farSet are the numbers of the first service's sets.
	nearSet, farSet = 2, 3
	// masqueradePort is the only one of masqueraded connections.
	masqueradePort = 12345
)

// fixture is a node with two pods and all programs.
type fixture struct {
	*pt.Node
	pods     *pod.Datapath
	programs map[string]*ebpf.Program
}

func newFixture(t testing.TB, change func(*setting.Node)) *fixture {
	t.Helper()
	return newSized(t, pt.Sizes(), change)
}

func newSized(t testing.TB, sizes pin.Sizes, change func(*setting.Node)) *fixture {
	t.Helper()
	n := pt.New(t, sizes)
	s := n.Settings()
	s.FirstPort, s.LastPort, s.ServiceFirstPort, s.ServiceLastPort = masqueradePort, masqueradePort, onePort, onePort
	if change != nil {
		change(&s)
	}
	pods, err := pod.Load(n.Maps, s)
	check(t, err)
	t.Cleanup(func() { pods.Close() })
	nodes, err := node.Load(n.Maps, s)
	check(t, err)
	t.Cleanup(func() { nodes.Close() })
	f := &fixture{Node: n, pods: pods, programs: map[string]*ebpf.Program{}}
	n.Do(func() error {
		if err := nodes.Attach(node.Device{Name: pt.Uplink, Ifindex: n.Ifindex(pt.Uplink)}, nil); err != nil {
			return err
		}
		for _, ep := range f.endpoints() {
			if err := pods.Attach(ep); err != nil {
				return err
			}
		}
		return nil
	})
	attached, err := n.Maps.Attachments()
	check(t, err)
	for _, a := range attached {
		p, err := ebpf.NewProgramFromID(ebpf.ProgramID(a.ProgramID))
		check(t, err)
		t.Cleanup(func() { p.Close() })
		f.programs[a.Program] = p
	}
	return f
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// endpoints are pods A and B.
func (f *fixture) endpoints() []*pod.Endpoint {
	a, b := pt.Families[0], pt.Families[1]
	return []*pod.Endpoint{
		{Device: pt.PodA, Ifindex: f.Ifindex(pt.PodA), MAC: pt.MACA, HostMAC: pt.HostMACA, IPs: []netip.Addr{a.A, b.A}, Identity: idA},
		{Device: pt.PodB, Ifindex: f.Ifindex(pt.PodB), MAC: pt.MACB, HostMAC: pt.HostMACB, IPs: []netip.Addr{a.B, b.B}, Identity: idB},
	}
}

// subject gives pod A a policy that the tables do not have, so that it forbids
// everything, or none.
func (f *fixture) subject(t testing.TB, number uint32) {
	t.Helper()
	ep := f.endpoints()[0]
	check(t, f.pods.SetSubject(ep.IPs, ep.Ifindex, number))
}

// at is where a packet meets the datapath.
type at struct{ program, device string }

var (
	fromA      = at{"from_pod", pt.PodA}
	fromB      = at{"from_pod", pt.PodB}
	toA        = at{"to_pod", pt.PodA}
	fromUplink = at{"from_uplink", pt.Uplink}
)

func (f *fixture) frame(t *testing.T, where at, frame []byte, w pt.Want) pt.Out {
	t.Helper()
	return f.Step(t, f.programs[where.program], pt.In{Device: where.device, Frame: frame}, w)
}

func (f *fixture) step(t *testing.T, where at, p pt.Packet, w pt.Want) pt.Out {
	t.Helper()
	return f.frame(t, where, p.Bytes(), w)
}

// send runs a packet of which nothing is asked.
func (f *fixture) send(where at, p pt.Packet) pt.Out {
	out := f.Run(f.programs[where.program], pt.In{Device: where.device, Frame: p.Bytes()})
	f.Forget()
	return out
}

func each(t *testing.T, f func(*testing.T, pt.Family)) {
	for _, fam := range pt.Families {
		t.Run(fam.Name, func(t *testing.T) { f(t, fam) })
	}
}

// protocols runs f for TCP and UDP.
func protocols(t *testing.T, f func(*testing.T, uint8)) {
	t.Run("TCP", func(t *testing.T) { f(t, pt.TCP) })
	t.Run("UDP", func(t *testing.T) { f(t, pt.UDP) })
}

// clusterIP is an address of a service, balancer one of a load balancer.
func clusterIP(f pt.Family) netip.AddrPort {
	if f.V6 {
		return netip.MustParseAddrPort("[fd00:10:96::10]:80")
	}
	return netip.MustParseAddrPort("10.96.0.10:80")
}

func balancer(f pt.Family) netip.AddrPort {
	if f.V6 {
		return netip.MustParseAddrPort("[2001:db8:2::10]:80")
	}
	return netip.MustParseAddrPort("192.0.2.10:80")
}

func nodePort(f pt.Family) netip.AddrPort { return netip.AddrPortFrom(f.Node, 30080) }

// target is a backend's address and port.
func target(a netip.Addr) netip.AddrPort { return netip.AddrPortFrom(a, 8080) }

// request is what pod A sends to a frontend.
func request(f pt.Family, protocol uint8, to netip.AddrPort) pt.Packet {
	p := pt.Packet{
		EthSrc: pt.MACA, EthDst: pt.HostMACA, Src: f.A, Dst: to.Addr(), TTL: 64, DF: true,
		Protocol: protocol, Sport: 40000, Dport: to.Port(),
	}
	if protocol == pt.TCP {
		p.Flags = pt.SYN
	} else {
		p.Payload = []byte("who is it?!")
	}
	return p
}

// outside is what a client outside sends to a frontend.
func outside(f pt.Family, protocol uint8, to netip.AddrPort) pt.Packet {
	return request(f, protocol, to).With(func(p *pt.Packet) { p.Src, p.EthSrc, p.EthDst = f.World, pt.MACOther, pt.MACNode })
}

// sentTo is p with another destination.
func sentTo(p pt.Packet, to netip.AddrPort) pt.Packet {
	p.Dst, p.Dport = to.Addr(), to.Port()
	return p
}

// sentFrom is p with another source.
func sentFrom(p pt.Packet, from netip.AddrPort) pt.Packet {
	p.Src, p.Sport = from.Addr(), from.Port()
	return p
}

// macs is p with other hardware addresses.
func macs(p pt.Packet, src, dst net.HardwareAddr) pt.Packet {
	p.EthSrc, p.EthDst = src, dst
	return p
}

// flags is p with other TCP flags, where it is TCP.
func flags(p pt.Packet, f uint8) pt.Packet {
	if p.Protocol == pt.TCP {
		p.Flags = f
	}
	return p
}

// delivered is the frame as the pod behind these MAC addresses gets it, or as it
// goes to the next hop where they are nil and stay.
func delivered(p pt.Packet, dst, src net.HardwareAddr) []byte {
	return p.With(func(p *pt.Packet) {
		p.TTL--
		if dst != nil {
			p.EthDst, p.EthSrc = dst, src
		}
	}).Bytes()
}

// icmpError is what from tells the sender of p about it.
func icmpError(f pt.Family, p pt.Packet, from netip.Addr) pt.Packet {
	kind, code := uint8(3), uint8(4)
	if f.V6 {
		kind, code = 2, 0
	}
	return pt.Packet{
		EthSrc: p.EthDst, EthDst: p.EthSrc, Src: from, Dst: p.Src, TTL: 60,
		Protocol: f.ICMP, Type: kind, Code: code, Rest: 1300, Payload: p.L3(),
	}
}

// about is the error e about p as one about to: the quoted L4 checksum stays.
func about(f pt.Family, e, p, to pt.Packet) pt.Packet {
	before, after := p.L3(), to.L3()
	off := 20
	if f.V6 {
		off = 40
	}
	off += map[uint8]int{pt.TCP: 16, pt.UDP: 6}[p.Protocol]
	copy(after[off:off+2], before[off:off+2])
	e.Payload = after
	return e
}

// answerOf is the node's own ICMP answer to p.
func answerOf(f pt.Family, p pt.Packet, from netip.Addr, kind, code uint8, rest uint32) []byte {
	quote := p.L3()
	long := 20 + 20
	if f.V6 {
		long = 40 + 20
	}
	if len(quote) < long {
		quote = quote[:long-12]
	}
	return pt.Packet{
		EthSrc: p.EthDst, EthDst: p.EthSrc, Src: from, Dst: p.Src, TTL: 64,
		Protocol: f.ICMP, Type: kind, Code: code, Rest: rest, Payload: quote[:min(len(quote), long)],
	}.Bytes()
}

func refused(f pt.Family, p pt.Packet) []byte {
	if f.V6 {
		return answerOf(f, p, p.Dst, 1, 4, 0)
	}
	return answerOf(f, p, p.Dst, 3, 3, 0)
}

func expired(f pt.Family, p pt.Packet) []byte {
	if f.V6 {
		return answerOf(f, p, f.Node, 3, 0, 0)
	}
	return answerOf(f, p, f.Node, 11, 0, 0)
}

func tooBig(f pt.Family, p pt.Packet, mtu uint32) []byte {
	if f.V6 {
		return answerOf(f, p, f.Node, 2, 0, mtu)
	}
	return answerOf(f, p, f.Node, 3, 4, mtu)
}

func payload(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i * 7)
	}
	return b
}

func sorted(rows ...string) []string {
	slices.Sort(rows)
	return rows
}

func dropped(reason string, events ...string) pt.Want {
	return pt.Want{Verdict: pt.Drop, Count: []string{reason}, Events: events}
}
