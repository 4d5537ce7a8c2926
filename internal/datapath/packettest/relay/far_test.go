// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	pt "github.com/weft-mesh/weft/internal/datapath/packettest"
	"github.com/weft-mesh/weft/internal/datapath/pin"
	"github.com/weft-mesh/weft/internal/datapath/setting"
)

// far makes the node port and the balancer address frontends of backends for
// clients from elsewhere.
func far(f pt.Family, protocol uint8, backends ...netip.AddrPort) pt.Service {
	return pt.Service{Frontends: []netip.AddrPort{nodePort(f), balancer(f)}, Protocol: protocol, Far: backends, Flags: external}
}

// snat is p from this node.
func snat(f pt.Family, p pt.Packet) pt.Packet {
	return sentFrom(p, netip.AddrPortFrom(f.Node, onePort))
}

// TestFarLocal: a pod of this node sees the client's own address, and answers
// through here.
func TestFarLocal(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family) {
		protocols(t, func(t *testing.T, protocol uint8) {
			for name, c := range map[string]struct {
				client   netip.Addr
				identity uint64
				way      string
			}{
				"outside":             {f.World, world, "world"},
				"pod of another node": {f.RemotePod, pt.IdentityRemotePods, "remote-node"},
				"another node":        {f.OtherNode, pt.IdentityRemoteNode, "remote-node"},
			} {
				for _, frontend := range []netip.AddrPort{nodePort(f), balancer(f)} {
					t.Run(name+" to "+frontend.String(), func(t *testing.T) {
						fix.Reset()
						fix.Serve(far(f, protocol, target(f.A)))
						p := outside(f, protocol, frontend).With(func(p *pt.Packet) { p.Src = c.client })
						to := sentTo(p, target(f.A))
						fix.step(t, fromUplink, p, pt.Want{
							Verdict: pt.Redirect, Frame: delivered(to, pt.MACA, pt.HostMACA), Count: []string{"from-wire"}, Events: []string{to.Event("new ingress", c.identity, idA)},
							Conns: []string{to.Conn() + " 1/0 service"}, Flows: pt.FlowRows(p, to, "", ""),
						})
						r := flags(macs(to.Reply(), pt.MACA, pt.HostMACA), pt.SYN|pt.ACK)
						w := pt.Want{
							Verdict: pt.Redirect, Frame: delivered(sentFrom(r, frontend), nil, nil), Count: []string{c.way},
							Conns: []string{to.Conn() + " 1/1 replied,service"}, Flows: pt.FlowRows(p, to, "answered", "answered"),
						}
						fix.step(t, fromA, r, w)
						// too long a packet of the pod: it learns that of the packet that it sent
						long := flags(r, pt.ACK).With(func(p *pt.Packet) { p.Payload = payload(1481) })
						w = pt.Want{
							Verdict: pt.Redirect, Frame: tooBig(f, long, 1500), Count: []string{"too-big", "answered"}, Events: []string{long.Event("drop(too-big) egress", idA, c.identity)},
							Conns: []string{to.Conn() + " 1/2 replied,service"}, Flows: w.Flows,
						}
						fix.step(t, fromA, long, w)
						// a router about the answer
						e := macs(icmpError(f, sentFrom(r, frontend), f.Excluded), pt.MACOther, pt.MACNode)
						seen := about(f, e.With(func(e *pt.Packet) { e.Dst = f.A }), sentFrom(r, frontend), r)
						w = pt.Want{
							Verdict: pt.Redirect, Frame: delivered(seen, pt.MACA, pt.HostMACA), Count: []string{"from-wire"}, Conns: w.Conns, Flows: w.Flows,
						}
						fix.step(t, fromUplink, e, w)
						// and the pod about the request
						e = macs(icmpError(f, to, f.A), pt.MACA, pt.HostMACA)
						seen = about(f, e.With(func(e *pt.Packet) { e.Src = frontend.Addr() }), to, p)
						w.Frame, w.Count = delivered(seen, nil, nil), []string{c.way}
						fix.step(t, fromA, e, w)
					})
				}
			}
		})
	})
}

// TestFarRemote: a backend elsewhere sees this node, and its answer goes on to the
// client.
func TestFarRemote(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family) {
		protocols(t, func(t *testing.T, protocol uint8) {
			for name, backend := range map[string]netip.Addr{"pod of another node": f.RemotePod, "process of another node": f.OtherNode, "outside": f.Excluded} {
				for _, frontend := range []netip.AddrPort{nodePort(f), balancer(f)} {
					t.Run(name+" by "+frontend.String(), func(t *testing.T) { testFarRemote(t, fix, f, outside(f, protocol, frontend), target(backend)) })
				}
			}
			t.Run("UDP without a checksum", func(t *testing.T) {
				testFarRemote(t, fix, f, outside(f, pt.UDP, nodePort(f)).With(func(p *pt.Packet) { p.NoChecksum = true }), target(f.RemotePod))
			})
		})
	})
}

func testFarRemote(t *testing.T, fix *fixture, f pt.Family, p pt.Packet, backend netip.AddrPort) {
	fix.Reset()
	fix.Serve(far(f, p.Protocol, backend))
	to := snat(f, sentTo(p, backend))
	w := pt.Want{Verdict: pt.Redirect, Frame: delivered(to, nil, nil), Count: []string{"service"}, Flows: pt.FlowRows(p, to, "snat", "snat")}
	fix.step(t, fromUplink, p, w)
	fix.step(t, fromUplink, p, w)
	r := flags(macs(to.Reply(), pt.MACOther, pt.MACNode), pt.SYN|pt.ACK)
	seen := sentFrom(sentTo(r, p.AddrPortSrc()), p.AddrPortDst())
	w.Frame, w.Flows = delivered(seen, nil, nil), pt.FlowRows(p, to, "snat,answered", "snat,answered")
	fix.step(t, fromUplink, r, w)
	// errors about the request, by the backend and by a router before it
	for _, from := range []netip.Addr{backend.Addr(), f.OtherNode} {
		e := macs(icmpError(f, to, from), pt.MACOther, pt.MACNode)
		seen := about(f, e.With(func(e *pt.Packet) { e.Dst = p.Src }), to, p)
		if from == backend.Addr() {
			seen.Src = p.Dst
		}
		w.Frame = delivered(seen, nil, nil)
		fix.step(t, fromUplink, e, w)
	}
	// and about the answer, by the client and by a router before it
	for _, from := range []netip.Addr{p.Src, f.Excluded} {
		e := macs(icmpError(f, seen, from), pt.MACOther, pt.MACNode)
		w.Frame = delivered(about(f, e.With(func(e *pt.Packet) { e.Src, e.Dst = f.Node, backend.Addr() }), seen, r), nil, nil)
		fix.step(t, fromUplink, e, w)
	}
	if p.Protocol == pt.TCP {
		fix.send(fromUplink, flags(p, pt.ACK))
		fix.send(fromUplink, flags(p, pt.FIN|pt.ACK))
		fix.send(fromUplink, flags(r, pt.FIN|pt.ACK))
		w := pt.FlowRows(p, to, "snat,answered,established,fin,fin-back", "snat,answered,established,fin,fin-back")
		if got := fix.Flows(); strings.Join(got, "\n") != strings.Join(w, "\n") {
			t.Errorf("flows %v, want %v", got, w)
		}
	}
}

// TestFarOwn: a process of this node is the backend.
func TestFarOwn(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family) {
		protocols(t, func(t *testing.T, protocol uint8) {
			fix.Reset()
			fix.Serve(far(f, protocol, target(f.Node)))
			p := outside(f, protocol, balancer(f))
			to := sentTo(p, target(f.Node))
			fix.step(t, fromUplink, p, pt.Want{Verdict: pt.Next, Frame: to.Bytes(), Count: []string{"service"}, Flows: pt.FlowRows(p, to, "", "")})
		})
	})
}

// TestFarNothing: what is for no frontend that clients from elsewhere may use is
// the node's own affair.
func TestFarNothing(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family) {
		internal := near(f, pt.TCP, target(f.A))
		internal.Frontends, internal.Flags = []netip.AddrPort{clusterIP(f)}, 0
		fix.Serve(far(f, pt.TCP, target(f.A)), internal)
		good := outside(f, pt.TCP, balancer(f))
		for name, p := range map[string]pt.Packet{
			"another port":               good.With(func(p *pt.Packet) { p.Dport++ }),
			"another protocol":           outside(f, pt.UDP, balancer(f)),
			"an address of the cluster":  outside(f, pt.TCP, clusterIP(f)),
			"SCTP":                       outside(f, pt.SCTP, balancer(f)),
			"fragment without its first": fragments(outside(f, pt.UDP, balancer(f)))[1],
			"error about nothing":        macs(icmpError(f, good.Reply(), f.Excluded), pt.MACOther, pt.MACNode),
			"echo": good.With(func(p *pt.Packet) {
				p.Protocol, p.Flags, p.Sport, p.Dport, p.Type, p.Rest = f.ICMP, 0, 0, 0, f.Echo, 7<<16
			}),
			"no answer": sentTo(outside(f, pt.TCP, balancer(f)), netip.AddrPortFrom(f.Node, onePort)),
		} {
			t.Run(name, func(t *testing.T) {
				fix.Reset()
				fix.step(t, fromUplink, p, pt.Want{Verdict: pt.Next})
			})
		}
	})
}

// TestFarRefused: what is refused leaves no connection behind.
func TestFarRefused(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family) {
		p := outside(f, pt.TCP, nodePort(f))
		to := sentTo(p, target(f.A))
		drop := func(p pt.Packet, reason string, src, dst uint64) pt.Want {
			return dropped(reason, p.Event("drop("+reason+") ingress", src, dst))
		}
		t.Run("no backend", func(t *testing.T) {
			fix.Reset()
			fix.Serve(far(f, pt.TCP))
			fix.step(t, fromUplink, p, pt.Want{
				Verdict: pt.Redirect, Frame: refused(f, p), Count: []string{"no-backend", "answered"}, Events: []string{p.Event("drop(no-backend) ingress", world, pt.IdentityNode)},
			})
			s := far(f, pt.TCP)
			s.Flags |= local
			fix.Serve(s)
			fix.step(t, fromUplink, p, drop(p, "no-backend", world, pt.IdentityNode))
		})
		t.Run("source range", func(t *testing.T) {
			fix.Reset()
			s := far(f, pt.TCP, target(f.A))
			s.Flags, s.Ranges = external|ranges, []netip.Prefix{netip.PrefixFrom(f.Excluded, f.Excluded.BitLen()-8).Masked()}
			fix.Serve(s)
			fix.step(t, fromUplink, p, drop(p, "source-range", world, pt.IdentityNode))
			p := p.With(func(p *pt.Packet) { p.Src = f.Excluded })
			if out := fix.send(fromUplink, p); out.Verdict != pt.Redirect {
				t.Errorf("verdict %d of a client in the range", out.Verdict)
			}
		})
		t.Run("policy", func(t *testing.T) {
			fix.Reset()
			fix.Serve(far(f, pt.TCP, target(f.A)))
			fix.subject(t, 1<<31|1)
			fix.step(t, fromUplink, p, drop(to, "policy", world, idA))
			fix.subject(t, 0)
		})
		t.Run("forged sources", func(t *testing.T) {
			for src, id := range map[netip.Addr]uint64{f.A: idA, f.Node: pt.IdentityNode, f.Unused: world, loopback(f): world, f.Multicast: world} {
				for _, backend := range []netip.Addr{f.A, f.RemotePod} {
					fix.Reset()
					fix.Serve(far(f, pt.TCP, target(backend)))
					p := p.With(func(p *pt.Packet) { p.Src = src })
					fix.step(t, fromUplink, p, drop(p, "spoofed-address", id, pt.IdentityNode))
				}
			}
		})
		t.Run("no such pod", func(t *testing.T) {
			fix.Reset()
			fix.Serve(far(f, pt.TCP, target(f.Unused)))
			fix.step(t, fromUplink, p, drop(p, "unknown-pod", world, pt.IdentityNode))
		})
		for name, backend := range map[string]netip.Addr{"pod of another node": f.RemotePod, "outside": f.Excluded} {
			t.Run("TTL of 1 to "+name, func(t *testing.T) {
				fix.Reset()
				fix.Serve(far(f, pt.TCP, target(backend)))
				p := p.With(func(p *pt.Packet) { p.TTL = 1 })
				fix.step(t, fromUplink, p, pt.Want{
					Verdict: pt.Redirect, Frame: expired(f, p), Count: []string{"ttl-expired", "answered"}, Events: []string{p.Event("drop(ttl-expired) ingress", world, pt.IdentityNode)},
				})
			})
		}
		t.Run("TTL of 1 to a pod of the node", func(t *testing.T) {
			fix.Reset()
			fix.Serve(far(f, pt.TCP, target(f.A)))
			to := to.With(func(p *pt.Packet) { p.TTL = 1 })
			fix.step(t, fromUplink, p.With(func(p *pt.Packet) { p.TTL = 1 }), drop(to, "ttl-expired", world, idA))
		})
	})
}

// TestForgedFlows: what pods and processes of this node say to each other never
// comes from elsewhere.
func TestForgedFlows(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family) {
		protocols(t, func(t *testing.T, protocol uint8) {
			forge := func(p pt.Packet, src uint64) {
				t.Helper()
				p = flags(macs(p, pt.MACOther, pt.MACNode), pt.ACK)
				conns, flows := fix.Conns(), fix.Flows()
				w := dropped("spoofed-address", p.Event("drop(spoofed-address) ingress", src, identity(f, p.Dst)))
				w.Conns, w.Flows = conns, flows
				fix.step(t, fromUplink, p, w)
			}
			// a pod's request, and the answer that would be the frontend's
			fix.Reset()
			fix.Serve(near(f, protocol, target(f.RemotePod)))
			fix.send(fromA, request(f, protocol, balancer(f)))
			forge(request(f, protocol, balancer(f)), idA)
			for _, backend := range []netip.Addr{f.A, f.Node} {
				fix.Reset()
				fix.Serve(far(f, protocol, target(backend)))
				p := outside(f, protocol, nodePort(f))
				fix.send(fromUplink, p)
				forge(sentTo(p, target(backend)).Reply(), identity(f, backend))
			}
		})
	})
}

func identity(f pt.Family, a netip.Addr) uint64 {
	switch a {
	case f.A:
		return idA
	case f.Node:
		return pt.IdentityNode
	}
	return world
}

func loopback(f pt.Family) netip.Addr {
	if f.V6 {
		return netip.IPv6Loopback()
	}
	return netip.MustParseAddr("127.0.0.1")
}

// TestFarTunnel: through VXLAN a pod of another node sees the gateway, fits less,
// and answers through the tunnel only.
func TestFarTunnel(t *testing.T) {
	tunnel := newFixture(t, nil)
	tunnel = newFixture(t, func(s *setting.Node) { s.TunnelIfindex = tunnel.Ifindex(pt.Tunnel) })
	each(t, func(t *testing.T, f pt.Family) {
		protocols(t, func(t *testing.T, protocol uint8) {
			tunnel.Reset()
			tunnel.Serve(far(f, protocol, target(f.RemotePod)))
			p := outside(f, protocol, nodePort(f))
			to := sentFrom(sentTo(p, target(f.RemotePod)), netip.AddrPortFrom(f.Gateway, onePort))
			w := pt.Want{
				Verdict: pt.Redirect, Mark: 0x77ef0001, Frame: delivered(to, tunnelMAC, tunnelMAC), Count: []string{"service"}, Flows: pt.FlowRows(p, to, "snat", "snat"),
			}
			tunnel.step(t, fromUplink, p, w)
			long := p.With(func(p *pt.Packet) { p.Payload = payload(1450) })
			tunnel.step(t, fromUplink, long, pt.Want{
				Verdict: pt.Redirect, Frame: tooBig(f, long, 1450), Count: []string{"too-big", "answered"}, Flows: w.Flows,
				Events: []string{long.Event("drop(too-big) ingress", world, pt.IdentityNode)},
			})
			// its answer, or that of somebody who pretends, on the underlay
			r := macs(to.Reply(), pt.MACOther, pt.MACNode)
			w = dropped("unknown-pod", r.Event("drop(unknown-pod) ingress", pt.IdentityRemotePods, world))
			w.Flows = pt.FlowRows(p, to, "snat", "snat")
			tunnel.step(t, fromUplink, r, w)
			// a process of the other node does not need the tunnel
			tunnel.Reset()
			tunnel.Serve(far(f, protocol, target(f.OtherNode)))
			to = snat(f, sentTo(p, target(f.OtherNode)))
			tunnel.step(t, fromUplink, p, pt.Want{Verdict: pt.Redirect, Frame: delivered(to, nil, nil), Count: []string{"service"}, Flows: pt.FlowRows(p, to, "snat", "snat")})
			// pods of other nodes do not come by the underlay
			tunnel.Reset()
			p.Src = f.RemotePod
			tunnel.step(t, fromUplink, p, dropped("spoofed-address", p.Event("drop(spoofed-address) ingress", pt.IdentityRemotePods, pt.IdentityNode)))
		})
	})
}

// tunnelMAC is that of everybody in the tunnel.
var tunnelMAC = net.HardwareAddr{0x02, 0x77, 0x65, 0x66, 0x74, 0x01}

// TestFarPorts: a port is one connection's towards a backend, until that is over.
func TestFarPorts(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family) {
		protocols(t, func(t *testing.T, protocol uint8) {
			fix.Reset()
			fix.Serve(far(f, protocol, target(f.RemotePod)))
			one := outside(f, protocol, nodePort(f))
			two := one.With(func(p *pt.Packet) { p.Sport++ })
			to := snat(f, sentTo(one, target(f.RemotePod)))
			fix.send(fromUplink, one)
			w := dropped("service-ports", two.Event("drop(service-ports) ingress", world, pt.IdentityNode))
			w.Flows = pt.FlowRows(one, to, "snat", "snat")
			fix.step(t, fromUplink, two, w)
			fix.EditFlows(func(_ *pin.KernelFlowKey, v *pin.KernelServiceFlow, now uint32) {
				v.LastSeen = now - uint32(time.Hour/time.Second)
			})
			fix.step(t, fromUplink, two, pt.Want{Verdict: pt.Redirect, Frame: delivered(to, nil, nil), Count: []string{"service"}, Flows: pt.FlowRows(two, to, "snat", "snat")})
			// the answer is the second client's
			r := flags(macs(to.Reply(), pt.MACOther, pt.MACNode), pt.SYN|pt.ACK)
			out := fix.send(fromUplink, r)
			if want := delivered(sentFrom(sentTo(r, two.AddrPortSrc()), nodePort(f)), nil, nil); string(out.Frame) != string(want) {
				t.Errorf("the answer is % x, want % x", out.Frame, want)
			}
			// a SYN of the backend is no answer
			fix.Reset()
			fix.send(fromUplink, one)
			begin := flags(r, pt.SYN)
			if protocol == pt.TCP {
				fix.step(t, fromUplink, begin, pt.Want{Verdict: pt.Next, Flows: pt.FlowRows(one, to, "snat", "snat")})
			}
		})
	})
}

// TestFarFragments: a datagram in fragments and its answer go to one backend.
func TestFarFragments(t *testing.T) {
	fix := newFixture(t, func(s *setting.Node) { s.ServiceDSR = true })
	each(t, func(t *testing.T, f pt.Family) {
		fix.Reset()
		fix.Serve(far(f, pt.UDP, target(f.RemotePod)))
		p := outside(f, pt.UDP, nodePort(f))
		to := snat(f, sentTo(p, target(f.RemotePod)))
		w := pt.Want{Verdict: pt.Redirect, Count: []string{"service"}, Flows: pt.FlowRows(p, to, "snat", "snat")}
		for i, part := range fragments(to) {
			w.Frame = delivered(part, nil, nil)
			fix.step(t, fromUplink, fragments(p)[i], w)
		}
		r := macs(to.Reply(), pt.MACOther, pt.MACNode)
		w.Flows = pt.FlowRows(p, to, "snat,answered", "snat,answered")
		for i, part := range fragments(sentFrom(sentTo(r, p.AddrPortSrc()), nodePort(f))) {
			w.Frame = delivered(part, nil, nil)
			fix.step(t, fromUplink, fragments(r)[i], w)
		}
	})
}

// TestFarSpread: connections go to every backend, each to one only.
func TestFarSpread(t *testing.T) {
	fix := newFixture(t, func(s *setting.Node) { s.ServiceFirstPort, s.ServiceLastPort = 20000, 29999 })
	each(t, func(t *testing.T, f pt.Family) {
		fix.Reset()
		fix.Serve(far(f, pt.UDP, target(f.RemotePod), target(f.A), target(f.OtherNode)))
		seen := map[string]int{}
		for i := range 60 {
			p := outside(f, pt.UDP, nodePort(f)).With(func(p *pt.Packet) { p.Sport += uint16(i) })
			first := dst(f, fix.send(fromUplink, p).Frame)
			for range 3 {
				if again := dst(f, fix.send(fromUplink, p).Frame); again != first {
					t.Fatalf("connection %d went to %s, then to %s", i, first, again)
				}
			}
			seen[first]++
		}
		if len(seen) != 3 {
			t.Errorf("backends %v, want three", seen)
		}
	})
}

// dst is the destination of a frame.
func dst(f pt.Family, frame []byte) string {
	a, _ := netip.AddrFromSlice(frame[30:34])
	if f.V6 {
		a, _ = netip.AddrFromSlice(frame[38:54])
	}
	return fmt.Sprint(a)
}

// TestHalves: SYNs that nobody answers do not stay as long as connections do.
func TestHalves(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family) {
		fix.Reset()
		fix.Serve(far(f, pt.TCP, target(f.RemotePod)))
		p := outside(f, pt.TCP, nodePort(f))
		to := snat(f, sentTo(p, target(f.RemotePod)))
		r := flags(macs(to.Reply(), pt.MACOther, pt.MACNode), pt.SYN|pt.ACK)
		later := func(_ *pin.KernelFlowKey, v *pin.KernelServiceFlow, now uint32) { v.LastSeen = now - 70 }
		fix.send(fromUplink, p)
		fix.send(fromUplink, r)
		fix.EditFlows(later)
		if out := fix.send(fromUplink, r); out.Verdict != pt.Next {
			t.Errorf("an answer after 70 s without the client's: verdict %d", out.Verdict)
		}
		fix.Reset()
		fix.send(fromUplink, p)
		fix.send(fromUplink, r)
		fix.send(fromUplink, flags(p, pt.ACK))
		fix.EditFlows(later)
		if out := fix.send(fromUplink, flags(r, pt.ACK)); out.Verdict != pt.Redirect {
			t.Errorf("an answer after 70 s of a connection: verdict %d", out.Verdict)
		}
	})
}

// TestPortsComeAgainLate: the ports of connections towards a backend are some of a
// window, the same one for all Services, that moves on with time: for a minute the
// backend would not take them again.
func TestPortsComeAgainLate(t *testing.T) {
	const first, ports, cycle = 20000, 8000, 80
	closing := 0
	fix := newFixture(t, func(s *setting.Node) {
		s.ServiceFirstPort, s.ServiceLastPort = first, first+ports-1
		closing = int(s.Lifetimes.TCPClosing / time.Second)
	})
	each(t, func(t *testing.T, f pt.Family) {
		fix.Reset()
		s := far(f, pt.TCP, target(f.RemotePod))
		fix.Serve(s)
		began := time.Now()
		for i := range uint16(200) {
			fix.send(fromUplink, outside(f, pt.TCP, nodePort(f)).With(func(p *pt.Packet) { p.Sport += i }))
		}
		took := int(time.Since(began)/time.Second) + 1
		var taken []int
		fix.EditFlows(func(_ *pin.KernelFlowKey, v *pin.KernelServiceFlow, _ uint32) {
			if v.Flags&uint32(pin.KernelServiceFlowFlagFLOW_REPLY) == 0 {
				taken = append(taken, int(pt.HostPort(v.Sport))-first)
			}
		})
		slices.Sort(taken)
		// The rest of the circle is the largest gap between two of them.
		gap := taken[0] + ports - taken[len(taken)-1]
		for i := 1; i < len(taken); i++ {
			gap = max(gap, taken[i]-taken[i-1])
		}
		if window := (closing + took) * ports / cycle; len(taken) != 200 || ports-gap > window {
			t.Errorf("%d connections have ports in %d in a row, want 200 in %d", len(taken), ports-gap, window)
		}
	})
}
