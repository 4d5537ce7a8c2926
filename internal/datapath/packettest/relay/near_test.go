// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	pt "github.com/weft-mesh/weft/internal/datapath/packettest"
	"github.com/weft-mesh/weft/internal/datapath/pin"
	"github.com/weft-mesh/weft/internal/datapath/setting"
)

// near makes the cluster IP, the node port and the balancer address frontends of
// backends for pods of this node.
func near(f pt.Family, protocol uint8, backends ...netip.AddrPort) pt.Service {
	return pt.Service{Frontends: []netip.AddrPort{clusterIP(f), nodePort(f), balancer(f)}, Protocol: protocol, Near: backends, Flags: external}
}

// TestNear: a pod reaches backends of every kind, and their answers reach it, as
// if the frontend were the other end.
func TestNear(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family) {
		protocols(t, func(t *testing.T, protocol uint8) {
			for _, c := range []struct {
				name     string
				backend  netip.Addr
				identity uint64
				way      string
				back     at
				backWay  string
			}{
				{"pod of the node", f.B, idB, "local-pod", fromB, "local-pod"},
				{"pod of another node", f.RemotePod, pt.IdentityRemotePods, "remote-node", fromUplink, "from-wire"},
				{"process of another node", f.OtherNode, pt.IdentityRemoteNode, "remote-node", fromUplink, "from-wire"},
				{"process of the node", f.Node, pt.IdentityNode, "to-node", toA, "from-node"},
				{"outside, not masqueraded", f.Excluded, world, "world", fromUplink, "from-wire"},
			} {
				for _, frontend := range []netip.AddrPort{clusterIP(f), nodePort(f), balancer(f)} {
					t.Run(c.name+" by "+frontend.String(), func(t *testing.T) {
						fix.Reset()
						fix.Serve(near(f, protocol, target(c.backend)))
						p := request(f, protocol, frontend)
						to := sentTo(p, target(c.backend))
						w := pt.Want{
							Verdict: pt.Redirect, Frame: delivered(to, nil, nil), Count: []string{c.way}, Events: []string{to.Event("new egress", idA, c.identity)},
							Conns: []string{to.Conn() + " 1/0 service"}, Flows: pt.FlowRows(p, to, "", ""),
						}
						switch c.backend {
						case f.B:
							w.Frame = delivered(to, pt.MACB, pt.HostMACB)
						case f.Node:
							w.Verdict, w.Frame = pt.Pass, to.Bytes()
						}
						fix.step(t, fromA, p, w)

						r := flags(macs(to.Reply(), pt.MACOther, pt.MACNode), pt.SYN|pt.ACK)
						seen := sentFrom(r, frontend)
						w = pt.Want{
							Verdict: pt.Redirect, Frame: delivered(seen, pt.MACA, pt.HostMACA), Count: []string{c.backWay},
							Conns: []string{to.Conn() + " 1/1 replied,service"}, Flows: pt.FlowRows(p, to, "answered", "answered"),
						}
						switch c.backend {
						case f.B:
							r = macs(r, pt.MACB, pt.HostMACB)
						case f.Node:
							r, seen = macs(r, pt.HostMACA, pt.MACA), macs(seen, pt.HostMACA, pt.MACA)
							w.Verdict, w.Frame = pt.Pass, seen.Bytes()
						}
						fix.step(t, c.back, r, w)
					})
				}
			}
		})
	})
}

// TestNearMasqueraded: a backend outside of the cluster sees the node, and the
// pod sees the frontend.
func TestNearMasqueraded(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family) {
		protocols(t, func(t *testing.T, protocol uint8) {
			fix.Reset()
			fix.Serve(near(f, protocol, target(f.World)))
			p := request(f, protocol, clusterIP(f))
			to := sentTo(p, target(f.World))
			wire := sentFrom(to, netip.AddrPortFrom(f.Node, masqueradePort))
			nat := strings.Replace(sentFrom(to, to.AddrPortDst()).Conn(), ">"+to.AddrPortDst().String(), " 12345>"+to.AddrPortSrc().String(), 1)
			fix.step(t, fromA, p, pt.Want{
				Verdict: pt.Redirect, Frame: delivered(wire, nil, nil), Count: []string{"world"}, Events: []string{to.Event("new egress", idA, world)},
				Conns: []string{to.Conn() + " 1/0 service nat 12345"}, Flows: pt.FlowRows(p, to, "", ""), NAT: []string{nat},
			})
			r := flags(macs(wire.Reply(), pt.MACOther, pt.MACNode), pt.SYN|pt.ACK)
			fix.step(t, fromUplink, r, pt.Want{
				Verdict: pt.Redirect, Frame: delivered(sentTo(sentFrom(r, clusterIP(f)), p.AddrPortSrc()), pt.MACA, pt.HostMACA), Count: []string{"from-wire"},
				Conns: []string{to.Conn() + " 1/1 replied,service nat 12345"}, Flows: pt.FlowRows(p, to, "answered", "answered"), NAT: []string{nat},
			})
			// a router outside about the request
			e := macs(icmpError(f, wire, f.Excluded), pt.MACOther, pt.MACNode)
			w := e.With(func(e *pt.Packet) { e.Dst = f.A })
			fix.step(t, fromUplink, e, pt.Want{
				Verdict: pt.Redirect, Frame: delivered(about(f, w, wire, p), pt.MACA, pt.HostMACA), Count: []string{"from-wire"},
				Conns: []string{to.Conn() + " 1/1 replied,service nat 12345"}, Flows: pt.FlowRows(p, to, "answered", "answered"), NAT: []string{nat},
			})
			// and the pod about the answer
			e = icmpError(f, macs(sentTo(sentFrom(r, clusterIP(f)), p.AddrPortSrc()), pt.HostMACA, pt.MACA), f.A)
			w = e.With(func(e *pt.Packet) { e.Src, e.Dst = f.Node, f.World })
			fix.step(t, fromA, e, pt.Want{
				Verdict: pt.Redirect, Frame: delivered(about(f, w, sentTo(sentFrom(r, clusterIP(f)), p.AddrPortSrc()), r), nil, nil), Count: []string{"world"},
				Conns: []string{to.Conn() + " 1/1 replied,service nat 12345"}, Flows: pt.FlowRows(p, to, "answered", "answered"), NAT: []string{nat},
			})
		})
	})
}

// TestChecksums: many packets of random content, rewritten both ways, are what
// they would be if they had been built so.
func TestChecksums(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family) {
		for i := range 200 {
			protocol := []uint8{pt.TCP, pt.UDP}[i%2]
			fix.Reset()
			fix.Serve(near(f, protocol, netip.AddrPortFrom(f.B, uint16(i*331+1))))
			p := request(f, protocol, clusterIP(f)).With(func(p *pt.Packet) {
				p.Sport, p.ID, p.TTL, p.NoChecksum = uint16(i*7919+1), uint32(i*97), uint8(2+i), i%8 == 1
				p.Payload = payload(i)
			})
			to := sentTo(p, netip.AddrPortFrom(f.B, uint16(i*331+1)))
			out := fix.send(fromA, p)
			if string(out.Frame) != string(delivered(to, pt.MACB, pt.HostMACB)) {
				t.Fatalf("request %d: %s is not right", i, p.Conn())
			}
			r := flags(macs(to.Reply(), pt.MACB, pt.HostMACB), pt.SYN|pt.ACK)
			out = fix.send(fromB, r)
			if string(out.Frame) != string(delivered(sentFrom(r, clusterIP(f)), pt.MACA, pt.HostMACA)) {
				t.Fatalf("answer %d: %s is not right", i, r.Conn())
			}
		}
	})
}

// TestHairpin: a pod that calls its own service is the gateway to itself, and no
// policy forbids that.
func TestHairpin(t *testing.T) {
	for name, change := range map[string]func(*setting.Node){"native": nil, "tunnel": func(s *setting.Node) { s.TunnelIfindex = 9 }} {
		t.Run(name, func(t *testing.T) {
			fix := newFixture(t, change)
			fix.subject(t, 1<<31|1<<30|1)
			each(t, func(t *testing.T, f pt.Family) {
				protocols(t, func(t *testing.T, protocol uint8) { testHairpin(t, fix, f, protocol) })
			})
		})
	}
}

func testHairpin(t *testing.T, fix *fixture, f pt.Family, protocol uint8) {
	fix.Reset()
	fix.Serve(near(f, protocol, target(f.A)))
	p := request(f, protocol, clusterIP(f))
	to := sentTo(sentFrom(p, netip.AddrPortFrom(f.Gateway, onePort)), target(f.A))
	fix.step(t, fromA, p, pt.Want{
		Verdict: pt.Redirect, Frame: delivered(to, pt.MACA, pt.HostMACA), Count: []string{"local-pod"}, Events: []string{to.Event("new ingress", world, idA)},
		Conns: []string{to.Conn() + " 1/0"}, Flows: pt.FlowRows(p, to, "snat,hairpin", "snat,hairpin"),
	})
	r := flags(macs(to.Reply(), pt.MACA, pt.HostMACA), pt.SYN|pt.ACK)
	seen := sentTo(sentFrom(r, clusterIP(f)), p.AddrPortSrc())
	w := pt.Want{
		Verdict: pt.Redirect, Frame: delivered(seen, pt.MACA, pt.HostMACA), Count: []string{"local-pod"},
		Conns: []string{to.Conn() + " 1/1 replied"}, Flows: pt.FlowRows(p, to, "snat,hairpin,answered", "snat,hairpin,answered"),
	}
	fix.step(t, fromA, r, w)
	// its errors about both
	e := icmpError(f, macs(to, pt.HostMACA, pt.MACA), f.A)
	w.Frame = delivered(about(f, e.With(func(e *pt.Packet) { e.Src, e.Dst = clusterIP(f).Addr(), f.A }), to, p), pt.MACA, pt.HostMACA)
	fix.step(t, fromA, e, w)
	e = icmpError(f, macs(seen, pt.HostMACA, pt.MACA), f.A)
	w.Frame = delivered(about(f, e.With(func(e *pt.Packet) { e.Src, e.Dst = f.Gateway, f.A }), seen, r), pt.MACA, pt.HostMACA)
	fix.step(t, fromA, e, w)
	// at its last hop it gets an answer
	last := p.With(func(p *pt.Packet) { p.TTL = 1 })
	w.Frame, w.Count, w.Events = expired(f, last), []string{"ttl-expired", "answered"}, []string{last.Event("drop(ttl-expired) egress", idA, world)}
	fix.step(t, fromA, last, w)
}

// TestNoBackend: who asks for a service without backends learns it at once.
func TestNoBackend(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family) {
		protocols(t, func(t *testing.T, protocol uint8) {
			fix.Reset()
			fix.Serve(near(f, protocol))
			p := request(f, protocol, clusterIP(f))
			fix.step(t, fromA, p, pt.Want{
				Verdict: pt.Redirect, Frame: refused(f, p), Count: []string{"no-backend", "answered"}, Events: []string{p.Event("drop(no-backend) egress", idA, world)},
			})
		})
	})
}

// TestNotTranslated: what is no request to a frontend goes its way.
func TestNotTranslated(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family) {
		fix.Serve(near(f, pt.TCP, target(f.B)))
		excluded := netip.AddrPortFrom(f.Excluded, 80)
		for name, p := range map[string]pt.Packet{
			"another port":     request(f, pt.TCP, netip.AddrPortFrom(f.Excluded, 81)),
			"another protocol": request(f, pt.UDP, excluded),
			"echo": request(f, pt.TCP, excluded).With(func(p *pt.Packet) {
				p.Protocol, p.Flags, p.Sport, p.Dport, p.Type, p.Rest = f.ICMP, 0, 0, 0, f.Echo, 7<<16
			}),
			"SCTP": request(f, pt.SCTP, excluded),
		} {
			t.Run(name, func(t *testing.T) {
				fix.Reset()
				fix.Serve(pt.Service{Frontends: []netip.AddrPort{excluded}, Protocol: pt.TCP, Near: []netip.AddrPort{target(f.B)}})
				fix.step(t, fromA, p, pt.Want{
					Verdict: pt.Redirect, Frame: delivered(p, nil, nil), Count: []string{"world"}, Events: []string{p.Event("new egress", idA, world)},
					Conns: []string{p.Conn() + " 1/0"},
				})
			})
		}
	})
}

// TestRefusedNear: a packet that goes nowhere leaves no connection behind, and an
// answer to it quotes it as it was sent.
func TestRefusedNear(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family) {
		p := request(f, pt.UDP, clusterIP(f))
		to := sentTo(p, target(f.RemotePod))
		t.Run("policy", func(t *testing.T) {
			fix.Reset()
			fix.Serve(near(f, pt.UDP, target(f.RemotePod)))
			fix.subject(t, 1<<30|1)
			fix.step(t, fromA, p, dropped("policy", to.Event("drop(policy) egress", idA, pt.IdentityRemotePods)))
			fix.subject(t, 0)
		})
		t.Run("source range", func(t *testing.T) {
			fix.Reset()
			s := near(f, pt.UDP, target(f.RemotePod))
			s.Flags, s.Ranges = external|ranges, []netip.Prefix{netip.PrefixFrom(f.B, f.B.BitLen())}
			fix.Serve(s)
			fix.step(t, fromA, p, dropped("source-range", p.Event("drop(source-range) egress", idA, world)))
			s.Ranges = append(s.Ranges, netip.PrefixFrom(f.A, f.A.BitLen()-8).Masked())
			fix.Serve(s)
			fix.step(t, fromA, p, pt.Want{
				Verdict: pt.Redirect, Frame: delivered(to, nil, nil), Count: []string{"remote-node"}, Events: []string{to.Event("new egress", idA, pt.IdentityRemotePods)},
				Conns: []string{to.Conn() + " 1/0 service"}, Flows: pt.FlowRows(p, to, "", ""),
			})
		})
		fix.Serve(near(f, pt.UDP, target(f.RemotePod)))
		t.Run("TTL of 1", func(t *testing.T) {
			fix.Reset()
			p := p.With(func(p *pt.Packet) { p.TTL = 1 })
			fix.step(t, fromA, p, pt.Want{
				Verdict: pt.Redirect, Frame: expired(f, p), Count: []string{"ttl-expired", "answered"}, Events: []string{p.Event("drop(ttl-expired) egress", idA, world)},
			})
		})
		t.Run("too big", func(t *testing.T) {
			fix.Reset()
			p := p.With(func(p *pt.Packet) { p.Payload = payload(1473) })
			to := sentTo(p, target(f.RemotePod))
			fix.step(t, fromA, p, pt.Want{
				Verdict: pt.Redirect, Frame: tooBig(f, p, 1500), Count: []string{"too-big", "answered"},
				Events: []string{to.Event("new egress", idA, pt.IdentityRemotePods), p.Event("drop(too-big) egress", idA, world)},
				Conns:  []string{to.Conn() + " 1/0 service"}, Flows: pt.FlowRows(p, to, "", ""),
			})
		})
		t.Run("no such pod", func(t *testing.T) {
			fix.Reset()
			fix.Serve(near(f, pt.UDP, target(f.Unused)))
			to := sentTo(p, target(f.Unused))
			fix.step(t, fromA, p, dropped("unknown-pod", to.Event("drop(unknown-pod) egress", idA, world)))
		})
	})
}

// TestQuota: no pod makes more translated connections than it may have.
func TestQuota(t *testing.T) {
	fix := newFixture(t, func(s *setting.Node) { s.MaxPerPod = 10 })
	each(t, func(t *testing.T, f pt.Family) {
		fix.Reset()
		fix.Serve(near(f, pt.UDP, target(f.B)))
		for i := range 30 {
			fix.send(fromA, request(f, pt.UDP, clusterIP(f)).With(func(p *pt.Packet) { p.Sport += uint16(i) }))
		}
		if got := len(fix.Flows()); got != 20 {
			t.Errorf("%d halves of connections, want 20", got)
		}
	})
}

// TestErrorsNear: who is told about a packet of a translated connection is told
// about the packet that it sent.
func TestErrorsNear(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family) {
		protocols(t, func(t *testing.T, protocol uint8) {
			p := request(f, protocol, clusterIP(f))
			for _, c := range []struct {
				name          string
				backend, from netip.Addr
				at            at
				way           string
				seen          netip.Addr
			}{
				{"backend of the node", f.B, f.B, fromB, "local-pod", clusterIP(f).Addr()},
				{"backend of another node", f.RemotePod, f.RemotePod, fromUplink, "from-wire", clusterIP(f).Addr()},
				{"router on the way", f.RemotePod, f.World, fromUplink, "from-wire", f.World},
				{"process of the node", f.Node, f.Node, toA, "from-node", clusterIP(f).Addr()},
			} {
				t.Run(c.name, func(t *testing.T) {
					fix.Reset()
					fix.Serve(near(f, protocol, target(c.backend)))
					to := sentTo(p, target(c.backend))
					fix.send(fromA, p)
					e := icmpError(f, macs(to, pt.MACNode, pt.MACOther), c.from)
					seen := about(f, e.With(func(e *pt.Packet) { e.Src = c.seen }), to, p)
					w := pt.Want{
						Verdict: pt.Redirect, Frame: delivered(seen, pt.MACA, pt.HostMACA), Count: []string{c.way},
						Conns: []string{to.Conn() + " 1/0 service"}, Flows: pt.FlowRows(p, to, "", ""),
					}
					switch c.at {
					case fromB:
						e = macs(e, pt.MACB, pt.HostMACB)
					case toA:
						w.Verdict, w.Frame = pt.Pass, seen.Bytes()
					}
					fix.step(t, c.at, e, w)
				})
			}
			t.Run("client about an answer", func(t *testing.T) {
				fix.Reset()
				fix.Serve(near(f, protocol, target(f.B)))
				to := sentTo(p, target(f.B))
				fix.send(fromA, p)
				r := flags(macs(to.Reply(), pt.HostMACA, pt.MACA), pt.SYN|pt.ACK)
				seen := sentFrom(r, clusterIP(f))
				e := icmpError(f, seen, f.A)
				w := pt.Want{
					Verdict: pt.Redirect, Frame: delivered(about(f, e.With(func(e *pt.Packet) { e.Dst = f.B }), seen, r), pt.MACB, pt.HostMACB),
					Count: []string{"local-pod"}, Conns: []string{to.Conn() + " 1/0 service"}, Flows: pt.FlowRows(p, to, "", ""),
				}
				fix.step(t, fromA, e, w)
				// the other pod speaks of a connection that is not its own
				e = macs(e, pt.MACB, pt.HostMACB)
				e.Src = f.B
				w = dropped("icmp-unmatched", e.Event("drop(icmp-unmatched) egress", idB, world))
				w.Conns, w.Flows = []string{to.Conn() + " 1/0 service"}, pt.FlowRows(p, to, "", "")
				fix.step(t, fromB, e, w)
			})
		})
	})
}

// fragments cuts a datagram of 2,000 bytes in three.
func fragments(p pt.Packet) (parts []pt.Packet) {
	p.DF, p.ID, p.Payload = false, 0xbeef, payload(2000)
	for _, b := range [][2]int{{0, 800}, {1600, 2008}, {800, 1600}} {
		parts = append(parts, p.With(func(p *pt.Packet) { p.Fragment = &pt.Fragment{From: b[0], To: b[1]} }))
	}
	return parts
}

func TestFragmentsNear(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family) {
		fix.Reset()
		fix.Serve(near(f, pt.UDP, target(f.B)))
		p := request(f, pt.UDP, clusterIP(f))
		to := sentTo(p, target(f.B))
		for i, part := range fragments(p) {
			w := pt.Want{
				Verdict: pt.Redirect, Frame: delivered(sentTo(part, target(f.B)), pt.MACB, pt.HostMACB), Count: []string{"local-pod"},
				Conns: []string{to.Conn() + " " + string(rune('1'+i)) + "/0 service"}, Flows: pt.FlowRows(p, to, "", ""),
			}
			if i == 0 {
				w.Events = []string{to.Event("new egress", idA, idB)}
			}
			fix.step(t, fromA, part, w)
		}
		r := macs(to.Reply(), pt.MACB, pt.HostMACB)
		for i, part := range fragments(r) {
			fix.step(t, fromB, part, pt.Want{
				Verdict: pt.Redirect, Frame: delivered(sentFrom(part, clusterIP(f)), pt.MACA, pt.HostMACA), Count: []string{"local-pod"},
				Conns: []string{to.Conn() + " 3/" + string(rune('1'+i)) + " replied,service"}, Flows: pt.FlowRows(p, to, "answered", "answered"),
			})
		}
	})
}

// TestSamePorts: where a client's port is in use towards the backend, its
// connection gets another one, and keeps its address.
func TestSamePorts(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family) {
		protocols(t, func(t *testing.T, protocol uint8) {
			one, two := request(f, protocol, clusterIP(f)), request(f, protocol, balancer(f))
			to := sentTo(one, target(f.B))
			other := to.With(func(p *pt.Packet) { p.Sport = onePort })
			t.Run("two frontends", func(t *testing.T) {
				fix.Reset()
				fix.Serve(near(f, protocol, target(f.B)))
				fix.send(fromA, one)
				fix.step(t, fromA, two, pt.Want{
					Verdict: pt.Redirect, Frame: delivered(other, pt.MACB, pt.HostMACB), Count: []string{"local-pod"}, Events: []string{other.Event("new egress", idA, idB)},
					Conns: sorted(to.Conn()+" 1/0 service", other.Conn()+" 1/0 service"),
					Flows: sorted(append(pt.FlowRows(one, to, "", ""), pt.FlowRows(two, other, "", "")...)...),
				})
				r := flags(macs(other.Reply(), pt.MACB, pt.HostMACB), pt.SYN|pt.ACK)
				out := fix.send(fromB, r)
				if want := delivered(sentTo(sentFrom(r, balancer(f)), two.AddrPortSrc()), pt.MACA, pt.HostMACA); string(out.Frame) != string(want) {
					t.Errorf("the answer is % x, want % x", out.Frame, want)
				}
				// there is no third port
				three := request(f, protocol, nodePort(f))
				w := dropped("service-ports", three.Event("drop(service-ports) egress", idA, pt.IdentityNode))
				w.Conns = sorted(to.Conn()+" 1/0 service", other.Conn()+" 1/1 replied,service")
				w.Flows = sorted(append(pt.FlowRows(one, to, "", ""), pt.FlowRows(two, other, "answered", "answered")...)...)
				fix.step(t, fromA, three, w)
			})
			t.Run("a direct connection", func(t *testing.T) {
				fix.Reset()
				fix.Serve(near(f, protocol, target(f.B)))
				fix.send(fromA, to)
				fix.step(t, fromA, one, pt.Want{
					Verdict: pt.Redirect, Frame: delivered(other, pt.MACB, pt.HostMACB), Count: []string{"local-pod"}, Events: []string{other.Event("new egress", idA, idB)},
					Conns: sorted(to.Conn()+" 1/0", other.Conn()+" 1/0 service"), Flows: pt.FlowRows(one, other, "", ""),
				})
			})
		})
	})
}

// TestReselect: which packets on an old tuple go to the backend of before, and
// which to one that is there now.
func TestReselect(t *testing.T) {
	fix := newFixture(t, nil)
	age := func(seconds uint32) func(*pin.KernelFlowKey, *pin.KernelServiceFlow, uint32) {
		return func(_ *pin.KernelFlowKey, v *pin.KernelServiceFlow, now uint32) { v.LastSeen = now - seconds }
	}
	set := func(flags pin.KernelServiceFlowFlag) func(*pin.KernelFlowKey, *pin.KernelServiceFlow, uint32) {
		return func(_ *pin.KernelFlowKey, v *pin.KernelServiceFlow, _ uint32) { v.Flags |= uint32(flags) }
	}
	nothing := func(*pin.KernelFlowKey, *pin.KernelServiceFlow, uint32) {}
	for _, c := range []struct {
		name     string
		protocol uint8
		flags    uint8 // of the packet
		edit     func(*pin.KernelFlowKey, *pin.KernelServiceFlow, uint32)
		gone     bool // the backend
		again    bool // selected
	}{
		{"a SYN again", pt.TCP, pt.SYN, nothing, false, false},
		{"a SYN again, backend gone", pt.TCP, pt.SYN, nothing, true, true},
		{"a SYN after FINs", pt.TCP, pt.SYN, set(pin.KernelServiceFlowFlagFLOW_FIN | pin.KernelServiceFlowFlagFLOW_FIN_BACK), false, true},
		{"a SYN after the client's FIN", pt.TCP, pt.SYN, set(pin.KernelServiceFlowFlagFLOW_FIN), false, true},
		{"a SYN after the backend's RST", pt.TCP, pt.SYN, set(pin.KernelServiceFlowFlagFLOW_RST_BACK), false, true},
		{"a SYN after a minute", pt.TCP, pt.SYN, age(70), false, true},
		{"a SYN on a connection that lives", pt.TCP, pt.SYN, set(pin.KernelServiceFlowFlagFLOW_ANSWERED | pin.KernelServiceFlowFlagFLOW_ESTABLISHED), false, false},
		{"an ACK, backend gone", pt.TCP, pt.ACK, nothing, true, false},
		{"an ACK after FINs", pt.TCP, pt.ACK, set(pin.KernelServiceFlowFlagFLOW_FIN | pin.KernelServiceFlowFlagFLOW_FIN_BACK), false, false},
		{"an ACK much later", pt.TCP, pt.ACK, age(70), false, true},
		{"a datagram again", pt.UDP, 0, nothing, false, false},
		{"a datagram, backend gone", pt.UDP, 0, nothing, true, true},
		{"a datagram much later", pt.UDP, 0, age(70), false, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			each(t, func(t *testing.T, f pt.Family) {
				fix.Reset()
				fix.Serve(near(f, c.protocol, target(f.B)))
				p := request(f, c.protocol, clusterIP(f))
				fix.send(fromA, p)
				fix.EditFlows(c.edit)
				fix.AddBackend(nearSet, c.protocol, target(f.RemotePod))
				if c.gone {
					fix.DropBackend(1)
				}
				was, is := sentTo(p, target(f.B)), sentTo(p, target(f.RemotePod))
				out := fix.send(fromA, flags(p, c.flags))
				want, rows := delivered(flags(was, c.flags), pt.MACB, pt.HostMACB), was
				if c.again {
					want, rows = delivered(flags(is, c.flags), nil, nil), is
				}
				if string(out.Frame) != string(want) {
					t.Errorf("verdict %d, frame\n% x, want\n% x", out.Verdict, out.Frame, want)
				}
				if got := fix.Flows(); len(got) != 2 || !strings.HasPrefix(got[0]+got[1], strings.TrimSuffix(pt.FlowRows(p, rows, "", "")[0], " ")) {
					t.Errorf("flows %v", got)
				}
			})
		})
	}
}

// TestGoneService: a connection outlives its frontend; datagrams do not.
func TestGoneService(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family) {
		fix.Reset()
		fix.Serve(near(f, pt.TCP, target(f.B)))
		p := request(f, pt.TCP, clusterIP(f))
		fix.send(fromA, p)
		fix.Serve()
		out := fix.send(fromA, flags(p, pt.ACK))
		if want := delivered(sentTo(flags(p, pt.ACK), target(f.B)), pt.MACB, pt.HostMACB); string(out.Frame) != string(want) {
			t.Errorf("the packet became % x, want % x", out.Frame, want)
		}
	})
}

// TestClosing: both halves know how the connection ends.
func TestClosing(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family) {
		p := request(f, pt.TCP, clusterIP(f))
		to := sentTo(p, target(f.B))
		r := macs(to.Reply(), pt.MACB, pt.HostMACB)
		client := func(fl uint8) { fix.send(fromA, flags(p, fl)) }
		backend := func(fl uint8) { fix.send(fromB, flags(r, fl)) }
		begin := func() {
			fix.Reset()
			fix.Serve(near(f, pt.TCP, target(f.B)))
			client(pt.SYN)
			backend(pt.SYN | pt.ACK)
			client(pt.ACK)
		}
		expect := func(flags, back string) {
			t.Helper()
			want := pt.FlowRows(p, to, strings.TrimSuffix("answered,established,"+flags, ","), strings.TrimSuffix("answered,established,"+back, ","))
			if got := fix.Flows(); strings.Join(got, "\n") != strings.Join(want, "\n") {
				t.Errorf("flows %v, want %v", got, want)
			}
		}
		begin()
		expect("", "")
		client(pt.FIN | pt.ACK)
		expect("fin", "fin-back")
		backend(pt.FIN | pt.ACK)
		expect("fin,fin-back", "fin,fin-back")
		begin()
		backend(pt.RST)
		expect("rst-back", "rst")
		// the backend goes on: that RST was none
		backend(pt.ACK)
		expect("", "")
		client(pt.RST)
		expect("rst", "rst-back")
		backend(pt.ACK)
		expect("rst", "rst-back")
	})
}

// TestMend: half a connection becomes a whole one again.
func TestMend(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family) {
		fix.Reset()
		fix.Serve(near(f, pt.TCP, target(f.B)))
		p := request(f, pt.TCP, clusterIP(f))
		to := sentTo(p, target(f.B))
		fix.send(fromA, p)
		fix.DropFlows(func(v *pin.KernelServiceFlow) bool {
			return v.Flags&uint32(pin.KernelServiceFlowFlagFLOW_REPLY) != 0
		})
		fix.EditFlows(func(_ *pin.KernelFlowKey, v *pin.KernelServiceFlow, now uint32) { v.LastSeen = now - 5 })
		fix.send(fromA, p)
		if got, want := fix.Flows(), pt.FlowRows(p, to, "", ""); strings.Join(got, "\n") != strings.Join(want, "\n") {
			t.Errorf("flows %v, want %v", got, want)
		}
	})
}

// TestFull: where there is no room for a connection there is not half of one.
func TestFull(t *testing.T) {
	sizes := pt.Sizes()
	sizes.ServiceFlows = 5
	fix := newSized(t, sizes, nil)
	each(t, func(t *testing.T, f pt.Family) {
		fix.Reset()
		fix.Serve(near(f, pt.UDP, target(f.B)))
		for i := range 2 {
			fix.send(fromA, request(f, pt.UDP, clusterIP(f)).With(func(p *pt.Packet) { p.Sport += uint16(i) }))
		}
		conns, flows := fix.Conns(), fix.Flows()
		p := request(f, pt.UDP, clusterIP(f)).With(func(p *pt.Packet) { p.Sport = 50000 })
		w := dropped("service-full", p.Event("drop(service-full) egress", idA, world))
		w.Conns, w.Flows = conns, flows
		fix.step(t, fromA, p, w)
	})
}

// TestAffinity: a client stays with its backend, until it is long silent.
func TestAffinity(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family) {
		fix.Reset()
		s := near(f, pt.UDP, target(f.B), target(f.RemotePod), target(f.OtherNode))
		s.Affinity = time.Hour
		fix.Serve(s)
		first := ""
		for i := range 40 {
			out := fix.send(fromA, request(f, pt.UDP, clusterIP(f)).With(func(p *pt.Packet) { p.Sport += uint16(i) }))
			dst := string(out.Frame[30:34])
			if f.V6 {
				dst = string(out.Frame[38:54])
			}
			if first == "" {
				first = dst
			}
			if dst != first {
				t.Fatalf("connection %d went to another backend", i)
			}
		}
	})
}
