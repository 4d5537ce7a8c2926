// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"context"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/weft-mesh/weft/internal/addr"
	"github.com/weft-mesh/weft/internal/datapath/ipcache"
	"github.com/weft-mesh/weft/internal/datapath/node"
	pt "github.com/weft-mesh/weft/internal/datapath/packettest"
	"github.com/weft-mesh/weft/internal/datapath/pin"
	"github.com/weft-mesh/weft/internal/datapath/pod"
	policymap "github.com/weft-mesh/weft/internal/datapath/policy"
	"github.com/weft-mesh/weft/internal/datapath/reason"
	"github.com/weft-mesh/weft/internal/datapath/setting"
	"github.com/weft-mesh/weft/internal/policy"
)

// SUBJECT_INGRESS and SUBJECT_EGRESS of bpf/lib/policy.h.
const (
	ingressBit = 1 << 31
	egressBit  = 1 << 30
)

// fixture is a node with two pods, all programs loaded and attached.
type fixture struct {
	*pt.Node
	*policymap.Map
	pods       *pod.Datapath
	fromPod    *ebpf.Program
	toPod      *ebpf.Program
	fromUplink *ebpf.Program
}

func newFixture(t *testing.T, change func(*setting.Node)) *fixture {
	t.Helper()
	sizes := pt.Sizes()
	sizes.Policy, sizes.Classes = 4096, 256
	n := pt.New(t, sizes)
	s := n.Settings()
	if change != nil {
		change(&s)
	}
	pods, err := pod.Load(n.Maps, s)
	check(t, err)
	t.Cleanup(func() { pods.Close() })
	nodes, err := node.Load(n.Maps, s)
	check(t, err)
	t.Cleanup(func() { nodes.Close() })
	f := &fixture{Node: n, Map: policymap.New(n.Maps), pods: pods}
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
		switch a.Program {
		case "from_pod":
			f.fromPod = p
		case "to_pod":
			f.toPod = p
		case "from_uplink":
			f.fromUplink = p
		}
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
		{Device: pt.PodA, Ifindex: f.Ifindex(pt.PodA), MAC: pt.MACA, HostMAC: pt.HostMACA, IPs: []netip.Addr{a.A, b.A}, Identity: pt.IdentityA},
		{Device: pt.PodB, Ifindex: f.Ifindex(pt.PodB), MAC: pt.MACB, HostMAC: pt.HostMACB, IPs: []netip.Addr{a.B, b.B}, Identity: pt.IdentityB},
	}
}

// subject gives a pod, 0 for A and 1 for B, a policy.
func (f *fixture) subject(t testing.TB, which int, number uint32) {
	t.Helper()
	ep := f.endpoints()[which]
	check(t, f.pods.SetSubject(ep.IPs, ep.Ifindex, number))
}

// install replaces all subjects and classes.
func (f *fixture) install(t testing.TB, subject uint32, entries []policy.Entry, classes map[netip.Prefix]uint64) {
	t.Helper()
	check(t, f.Prune(func(uint32) bool { return false }))
	old, err := f.Classes()
	check(t, err)
	for p := range old {
		check(t, f.DeleteClass(p))
	}
	for p, n := range classes {
		check(t, f.SetClass(p, n))
	}
	check(t, f.Install(subject, entries))
}

// know sets the identity of an address.
func (f *fixture) know(t testing.TB, a netip.Addr, id uint64, flags ipcache.Flags) {
	t.Helper()
	e := ipcache.Entry{Identity: id, Flags: flags, NextHop4: pt.Families[0].OtherNode, NextHop6: pt.Families[1].OtherNode}
	check(t, ipcache.New(f.Maps).Update(context.Background(), addr.Host(a), e))
}

// outcome is what became of a packet.
type outcome struct {
	drop string // reason; empty where it went its way
	rule uint32
}

var passed = outcome{}

func denied(rule uint32) outcome { return outcome{"policy", rule} }

// send runs the program that a packet meets first: its source says which.
func (f *fixture) send(t testing.TB, p pt.Packet) outcome {
	t.Helper()
	fam := family(p)
	prog, device := f.fromUplink, pt.Uplink
	p.EthSrc, p.EthDst = pt.MACOther, pt.MACNode
	switch p.Src {
	case fam.A:
		prog, device, p.EthSrc, p.EthDst = f.fromPod, pt.PodA, pt.MACA, pt.HostMACA
	case fam.B:
		prog, device, p.EthSrc, p.EthDst = f.fromPod, pt.PodB, pt.MACB, pt.HostMACB
	case fam.Node:
		prog, device, p.EthSrc, p.EthDst = f.toPod, pt.PodA, pt.HostMACA, pt.MACA
		if p.Dst == fam.B {
			device, p.EthSrc, p.EthDst = pt.PodB, pt.HostMACB, pt.MACB
		}
	}
	out := f.Run(prog, pt.In{Device: device, Frame: p.Bytes()})
	var got outcome
	for _, e := range out.Events {
		if e.Type == uint8(pin.KernelEventTypeEVENT_DROP) {
			got = outcome{reason.Name(e.Reason), e.Rule}
		}
	}
	if dropped := out.Verdict == pt.Drop; dropped != (got != passed) {
		t.Fatalf("%s: verdict %d and events %v", p.Conn(), out.Verdict, out.Events)
	}
	return got
}

func family(p pt.Packet) pt.Family {
	if p.V6() {
		return pt.Families[1]
	}
	return pt.Families[0]
}

// tcp is a SYN, udp a datagram, ping an echo request.
func tcp(src, dst netip.Addr, port uint16) pt.Packet {
	return pt.Packet{Src: src, Dst: dst, TTL: 64, DF: true, Protocol: pt.TCP, Sport: 40000, Dport: port, Flags: pt.SYN}
}

func udp(src, dst netip.Addr, port uint16) pt.Packet {
	return pt.Packet{Src: src, Dst: dst, TTL: 64, Protocol: pt.UDP, Sport: 40000, Dport: port, Payload: []byte("who is it")}
}

func ping(src, dst netip.Addr) pt.Packet {
	f := family(pt.Packet{Src: src})
	return pt.Packet{Src: src, Dst: dst, TTL: 64, Protocol: f.ICMP, Type: f.Echo, Rest: 80<<16 | 1, Payload: []byte("ping")}
}

func each(t *testing.T, f func(*testing.T, pt.Family)) {
	for _, fam := range pt.Families {
		t.Run(fam.Name, func(t *testing.T) { f(t, fam) })
	}
}
