// SPDX-License-Identifier: Apache-2.0

package pod

import (
	"bytes"
	"encoding/binary"
	"net"
	"net/netip"
	"testing"

	pt "github.com/weft-mesh/weft/internal/datapath/packettest"
	"github.com/weft-mesh/weft/internal/datapath/setting"
)

const (
	idA, idB = pt.IdentityA, pt.IdentityB
	world    = pt.IdentityWorld
)

// TestWays sends the good packet to each kind of destination.
func TestWays(t *testing.T) {
	native := newFixture(t, nil)
	noMasquerade := fixture{native.Node, load(t, native.Node, func(s *setting.Node) { s.Masquerade = false })}
	vxlan := fixture{native.Node, load(t, native.Node, tunnel(native.Node))}
	each(t, func(t *testing.T, f pt.Family) {
		tunnelMAC := net.HardwareAddr{0x02, 0x77, 0x65, 0x66, 0x74, 0x01}
		for _, c := range []struct {
			name     string
			fix      fixture
			dst      netip.Addr
			way      string
			identity uint64
			verdict  int32
			mark     uint32
			frame    func(pt.Packet) []byte
		}{
			{"local pod", native, f.B, "local-pod", idB, pt.Redirect, 0, func(p pt.Packet) []byte { return delivered(p, pt.MACB, pt.HostMACB) }},
			{"remote pod", native, f.RemotePod, "remote-node", pt.IdentityRemotePods, pt.Redirect, 0, func(p pt.Packet) []byte { return delivered(p, nil, nil) }},
			{"remote pod by tunnel", vxlan, f.RemotePod, "tunnel", pt.IdentityRemotePods, pt.Redirect, 0x77ef0001, func(p pt.Packet) []byte { return delivered(p, tunnelMAC, tunnelMAC) }},
			{"remote node", native, f.OtherNode, "remote-node", pt.IdentityRemoteNode, pt.Redirect, 0, func(p pt.Packet) []byte { return delivered(p, nil, nil) }},
			{"own node", native, f.Node, "to-node", pt.IdentityNode, pt.Pass, 0, nil},
			{"excluded from masquerading", native, f.Excluded, "world", world, pt.Redirect, 0, func(p pt.Packet) []byte { return delivered(p, nil, nil) }},
			{"outside, no masquerading", noMasquerade, f.World, "world", world, pt.Redirect, 0, func(p pt.Packet) []byte { return delivered(p, nil, nil) }},
		} {
			t.Run(c.name, func(t *testing.T) {
				native.Reset()
				p := syn(f, c.dst)
				w := pt.Want{
					Verdict: c.verdict, Mark: c.mark, Count: []string{c.way},
					Events: []string{p.Event("new egress", idA, c.identity)}, Conns: conn(p, "1/0"),
				}
				if c.frame != nil {
					w.Frame = c.frame(p)
				}
				c.fix.fromA(t, p, w)
			})
		}
	})
}

func load(t *testing.T, n *pt.Node, change func(*setting.Node)) *Datapath {
	t.Helper()
	s := n.Settings()
	change(&s)
	d, err := Load(n.Maps, s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

// TestFromPodRefuses changes one field of a good packet to a local pod.
func TestFromPodRefuses(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family) {
		good := syn(f, f.B)
		for _, c := range []struct {
			name     string
			reason   string
			change   func(*pt.Packet)
			src, dst uint64
		}{
			{"source is another pod", "spoofed-address", func(p *pt.Packet) { p.Src = f.Unused }, world, idB},
			{"source is the pod next door", "spoofed-address", func(p *pt.Packet) { p.Src, p.Dst = f.B, f.A }, idB, idA},
			{"source is the node", "spoofed-address", func(p *pt.Packet) { p.Src = f.Node }, pt.IdentityNode, idB},
			{"source is outside", "spoofed-address", func(p *pt.Packet) { p.Src = f.World }, world, idB},
			{"source MAC", "spoofed-mac", func(p *pt.Packet) { p.EthSrc = pt.MACB }, idA, idB},
			{"no such pod", "unknown-pod", func(p *pt.Packet) { p.Dst = f.Unused }, idA, world},
		} {
			t.Run(c.name, func(t *testing.T) {
				fix.Reset()
				p := good.With(c.change)
				w := dropped(c.reason)
				w.Events = append(w.Events, p.Event("drop("+c.reason+") egress", c.src, c.dst))
				fix.fromA(t, p, w)
			})
		}
		for _, dst := range unroutable(f) {
			t.Run("to "+dst.String(), func(t *testing.T) {
				fix.Reset()
				p := syn(f, dst)
				fix.fromA(t, p, dropped("unroutable", p.Event("drop(unroutable) egress", idA, world)))
			})
		}
		t.Run("multicast", func(t *testing.T) {
			fix.Reset()
			p := datagram(f, f.Multicast)
			fix.fromA(t, p, pt.Want{Verdict: pt.Drop, Count: []string{"multicast-ignored"}})
		})
	})
}

// unroutable are addresses that mean nothing beyond one host or link.
func unroutable(f pt.Family) []netip.Addr {
	ss := []string{"127.0.0.1", "127.255.0.1", "0.0.0.0"}
	if f.V6 {
		ss = []string{"::1", "::", "fe80::1"}
	}
	var out []netip.Addr
	for _, s := range ss {
		out = append(out, netip.MustParseAddr(s))
	}
	return out
}

// TestTunnelPort: where nodes talk through VXLAN, a pod must not speak to the
// port that a node takes encapsulated packets at.
func TestTunnelPort(t *testing.T) {
	native := newFixture(t, nil)
	vxlan := fixture{native.Node, load(t, native.Node, tunnel(native.Node))}
	each(t, func(t *testing.T, f pt.Family) {
		for _, c := range []struct {
			name   string
			fix    fixture
			dst    netip.Addr
			id     uint64
			denied bool
		}{
			{"own node", vxlan, f.Node, pt.IdentityNode, true},
			{"another node", vxlan, f.OtherNode, pt.IdentityRemoteNode, true},
			{"outside", vxlan, f.World, world, true},
			{"local pod", vxlan, f.B, idB, false},
			{"remote pod", vxlan, f.RemotePod, pt.IdentityRemotePods, false},
			{"no tunnel", native, f.Excluded, world, false},
		} {
			t.Run(c.name, func(t *testing.T) {
				native.Reset()
				p := datagram(f, c.dst).With(func(p *pt.Packet) { p.Dport = 4789 })
				if c.denied {
					c.fix.fromA(t, p, dropped("tunnel-forged", p.Event("drop(tunnel-forged) egress", idA, c.id)))
				} else if out := c.fix.Run(c.fix.objects.FromPod, pt.In{Device: pt.PodA, Frame: p.Bytes()}); out.Verdict != pt.Redirect {
					t.Errorf("verdict %d, want %d", out.Verdict, pt.Redirect)
				}
				// in fragments, as the receiver puts them together
				if first, _, _ := fragments(p); c.denied {
					native.Reset()
					c.fix.fromA(t, first, dropped("tunnel-forged", p.Event("drop(tunnel-forged) egress", idA, c.id)))
				}
			})
		}
	})
}

// TestMalformed damages bytes of a good frame. A frame without a whole IP header
// is refused by BPF_PROG_TEST_RUN itself; packettest/wire sends such.
func TestMalformed(t *testing.T) {
	fix := newFixture(t, nil)
	const none = "::"
	each(t, func(t *testing.T, f pt.Family) {
		l3 := 20
		if f.V6 {
			l3 = 40
		}
		cases := []struct {
			name   string
			damage func([]byte) []byte
			event  string
		}{
			{"version of the other family", func(b []byte) []byte { b[14] ^= 0x20; return b }, none},
			{"TCP header cut off", func(b []byte) []byte { return setLength(b[:14+l3+12], f.V6) }, ""},
			{"no TCP header at all", func(b []byte) []byte { return setLength(b[:14+l3], f.V6) }, ""},
			{"length beyond the frame", func(b []byte) []byte { return growLength(b, f.V6) }, none},
		}
		if !f.V6 {
			cases = append(cases, []struct {
				name   string
				damage func([]byte) []byte
				event  string
			}{
				{"header length below 5", func(b []byte) []byte { b[14] = 0x44; return b }, none},
				{"header length beyond the total", func(b []byte) []byte { b[14] = 0x4f; return b }, none},
				{"total length below the header", func(b []byte) []byte { b[16], b[17] = 0, 19; return b }, none},
			}...)
		}
		for _, c := range cases {
			t.Run(c.name, func(t *testing.T) {
				fix.Reset()
				good := syn(f, f.B)
				frame := c.damage(good.Bytes())
				got := fix.Run(fix.objects.FromPod, pt.In{Device: pt.PodA, Frame: frame})
				fix.Reset()
				if len(got.Events) != 1 {
					t.Fatalf("verdict %d, %d events, want one drop", got.Verdict, len(got.Events))
				}
				fix.Step(t, fix.objects.FromPod, pt.In{Device: pt.PodA, Frame: frame}, dropped("malformed", pt.FormatEvent(got.Events[0])))
				if e := got.Events[0]; c.event == none && e.SrcIdentity != world {
					t.Errorf("%s: addresses of a header that cannot be trusted are reported", pt.FormatEvent(e))
				}
			})
		}
	})
}

// setLength makes the IP length field what the frame has.
func setLength(b []byte, v6 bool) []byte {
	if v6 {
		binary.BigEndian.PutUint16(b[18:], uint16(len(b)-54))
	} else {
		binary.BigEndian.PutUint16(b[16:], uint16(len(b)-14))
	}
	return b
}

// growLength makes the IP length field one more than the frame has.
func growLength(b []byte, v6 bool) []byte {
	if v6 {
		b[19]++
	} else {
		b[17]++
	}
	return b
}

func TestEthertypes(t *testing.T) {
	fix := newFixture(t, nil)
	for name, etherType := range map[string]uint16{"VLAN": 0x8100, "LLDP": 0x88cc, "MPLS": 0x8847, "IEEE 802.3 length": 0x0040} {
		t.Run(name, func(t *testing.T) {
			fix.Reset()
			p := syn(pt.Families[0], pt.Families[0].B)
			p.EtherType = etherType
			const nobody = " egress 0 [::]:0>[::]:0 3>3"
			fix.fromA(t, p, dropped("ethertype", "drop(ethertype)"+nobody))
			fix.Reset()
			fix.toA(t, p, dropped("ethertype", "drop(ethertype) ingress 0 [::]:0>[::]:0 3>3"))
		})
	}
}

func TestMappedAddressInIPv6(t *testing.T) {
	fix := newFixture(t, nil)
	v4, v6 := pt.Families[0], pt.Families[1]
	mapped := func(a netip.Addr) netip.Addr { return netip.AddrFrom16(a.As16()) }
	for name, p := range map[string]pt.Packet{
		"source":      syn(v6, v6.B).With(func(p *pt.Packet) { p.Src = mapped(v4.A) }),
		"destination": syn(v6, v6.B).With(func(p *pt.Packet) { p.Dst = mapped(v4.B) }),
	} {
		t.Run(name, func(t *testing.T) {
			fix.Reset()
			p.EtherType = 0x86dd
			got := fix.Run(fix.objects.FromPod, pt.In{Device: pt.PodA, Frame: p.Bytes()})
			fix.Reset()
			if len(got.Events) != 1 {
				t.Fatalf("verdict %d and %d events, want a drop", got.Verdict, len(got.Events))
			}
			fix.fromA(t, p, dropped("malformed", pt.FormatEvent(got.Events[0])))
		})
	}
}

// TestExtensions puts IPv6 extension headers before the good TCP header.
func TestExtensions(t *testing.T) {
	fix := newFixture(t, nil)
	f := pt.Families[1]
	const hop, routing, fragment, ah, options = 0, 43, 44, 51, 60
	ext := func(ps ...uint8) (out []pt.Extension) {
		for _, p := range ps {
			out = append(out, pt.Extension{Protocol: p})
		}
		return out
	}
	for _, c := range []struct {
		name   string
		exts   []pt.Extension
		reason string // of a drop
	}{
		{"hop-by-hop", ext(hop), ""},
		{"hop-by-hop of 24 bytes", []pt.Extension{{Protocol: hop, Words: 2}}, ""},
		{"routing and destination options", ext(routing, options), ""},
		{"authentication", []pt.Extension{{Protocol: ah, Words: 2}}, ""},
		{"five", ext(hop, options, routing, options, options), ""},
		{"seven", ext(hop, options, routing, options, options, options, options), "ipv6-extension"},
		{"fragment of the whole", ext(fragment), ""},
		{"fragment of a fragment", ext(fragment, fragment), "malformed"},
	} {
		t.Run(c.name, func(t *testing.T) {
			fix.Reset()
			p := syn(f, f.B)
			p.Extensions = c.exts
			if c.reason != "" {
				got := fix.Run(fix.objects.FromPod, pt.In{Device: pt.PodA, Frame: p.Bytes()})
				fix.Reset()
				if len(got.Events) != 1 {
					t.Fatalf("verdict %d and %d events, want a drop", got.Verdict, len(got.Events))
				}
				fix.fromA(t, p, dropped(c.reason, pt.FormatEvent(got.Events[0])))
				return
			}
			fix.fromA(t, p, pt.Want{
				Verdict: pt.Redirect, Frame: delivered(p, pt.MACB, pt.HostMACB), Count: []string{"local-pod"},
				Events: []string{p.Event("new egress", idA, idB)}, Conns: conn(p, "1/0"),
			})
		})
	}
}

func TestProtocolsToPod(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family) {
		for name, p := range map[string]pt.Packet{
			"UDP":            datagram(f, f.B),
			"UDP, no sum":    datagram(f, f.B).With(func(p *pt.Packet) { p.NoChecksum = true }),
			"echo":           echo(f, f.B),
			"SCTP":           syn(f, f.B).With(func(p *pt.Packet) { p.Protocol, p.Flags = pt.SCTP, 0 }),
			"GRE":            syn(f, f.B).With(func(p *pt.Packet) { p.Protocol, p.Flags, p.Payload = 47, 0, []byte("no ports") }),
			"protocol alone": syn(f, f.B).With(func(p *pt.Packet) { p.Protocol, p.Flags = 253, 0 }),
		} {
			t.Run(name, func(t *testing.T) {
				fix.Reset()
				fix.fromA(t, p, pt.Want{
					Verdict: pt.Redirect, Frame: delivered(p, pt.MACB, pt.HostMACB), Count: []string{"local-pod"},
					Events: []string{p.Event("new egress", idA, idB)}, Conns: conn(p, "1/0"),
				})
			})
		}
	})
}

// TestOptions: IPv4 options move everything behind them.
func TestOptions(t *testing.T) {
	fix := newFixture(t, func(s *setting.Node) { s.FirstPort, s.LastPort = 12345, 12345 })
	f := pt.Families[0]
	for _, size := range []int{4, 20, 40} {
		fix.Reset()
		p := datagram(f, f.World)
		p.Options = size
		fix.fromA(t, p, pt.Want{
			Verdict: pt.Redirect, Frame: toWorld(f, p, 12345), Count: []string{"world"},
			Events: []string{p.Event("new egress", idA, world)}, Conns: conn(p, "1/0 nat 12345"),
			NAT: []string{"udp 198.51.100.7:53 12345>10.244.1.5:40000"},
		})
	}
}

// TestTTL: a packet that may not go further is answered, everywhere but at the
// node itself.
func TestTTL(t *testing.T) {
	native := newFixture(t, nil)
	vxlan := fixture{native.Node, load(t, native.Node, tunnel(native.Node))}
	each(t, func(t *testing.T, f pt.Family) {
		for _, c := range []struct {
			name     string
			fix      fixture
			dst      netip.Addr
			identity uint64
		}{
			{"local pod", native, f.B, idB},
			{"remote pod", native, f.RemotePod, pt.IdentityRemotePods},
			{"remote pod by tunnel", vxlan, f.RemotePod, pt.IdentityRemotePods},
			{"outside", native, f.World, world},
		} {
			for _, size := range []int{0, 9, 40, 1000} {
				t.Run(c.name, func(t *testing.T) {
					native.Reset()
					p := datagram(f, c.dst)
					p.TTL, p.Payload = 1, payload(size)
					c.fix.fromA(t, p, pt.Want{
						Verdict: pt.Redirect, Frame: timeExceeded(f, p), Count: []string{"ttl-expired", "answered"},
						Events: []string{p.Event("drop(ttl-expired) egress", idA, c.identity)},
					})
				})
			}
		}
		t.Run("own node", func(t *testing.T) {
			native.Reset()
			p := syn(f, f.Node)
			p.TTL = 1
			native.fromA(t, p, pt.Want{
				Verdict: pt.Pass, Count: []string{"to-node"},
				Events: []string{p.Event("new egress", idA, pt.IdentityNode)}, Conns: conn(p, "1/0"),
			})
		})
	})
}

// TestNoErrorAbout: no ICMP error is sent about an ICMP error or a later
// fragment, nor by a node without an address.
func TestNoErrorAbout(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family) {
		t.Run("ICMP error", func(t *testing.T) {
			fix.Reset()
			in := datagram(f, f.A).With(func(p *pt.Packet) { p.Src, p.Dst = f.B, f.A; p.EthSrc, p.EthDst = pt.MACB, pt.HostMACB })
			fix.Run(fix.objects.FromPod, pt.In{Device: pt.PodB, Frame: in.Bytes()})
			fix.Forget()
			e := unreachable(f, in)
			e.TTL = 1
			fix.fromA(t, e, pt.Want{
				Verdict: pt.Drop, Count: []string{"ttl-expired"}, Events: []string{e.Event("drop(ttl-expired) egress", idA, idB)}, Conns: conn(in, "1/0"),
			})
		})
		t.Run("later fragment", func(t *testing.T) {
			fix.Reset()
			p := datagram(f, f.B).With(func(p *pt.Packet) {
				p.DF, p.ID, p.Payload, p.Fragment = false, 7, payload(1000), &pt.Fragment{From: 512, To: 1008}
			})
			p.TTL = 1
			fix.fromA(t, p, pt.Want{
				Verdict: pt.Drop, Count: []string{"ttl-expired"},
				Events: []string{p.With(func(p *pt.Packet) { p.Sport, p.Dport = 0, 0 }).Event("drop(ttl-expired) egress", idA, idB)},
			})
		})
		t.Run("no address", func(t *testing.T) {
			fix.Reset()
			bare := fixture{fix.Node, load(t, fix.Node, func(s *setting.Node) { s.IPv4, s.IPv6 = netip.Addr{}, netip.Addr{} })}
			p := syn(f, f.B)
			p.TTL = 1
			bare.fromA(t, p, pt.Want{
				Verdict: pt.Drop, Count: []string{"ttl-expired"},
				Events: []string{p.Event("drop(ttl-expired) egress", idA, idB)},
			})
		})
	})
}

// unreachable is the ICMP error "port unreachable" of the receiver of p.
func unreachable(f pt.Family, about pt.Packet) pt.Packet {
	kind, code := uint8(3), uint8(3)
	if f.V6 {
		kind, code = 1, 4
	}
	return pt.Packet{
		EthSrc: pt.MACA, EthDst: pt.HostMACA, Src: about.Dst, Dst: about.Src, TTL: 64,
		Protocol: f.ICMP, Type: kind, Code: code, Payload: about.L3(),
	}
}

// TestTooBig: answered with the MTU of the way that the packet would take.
func TestTooBig(t *testing.T) {
	native := newFixture(t, func(s *setting.Node) { s.UplinkMTU = 1400 })
	vxlan := fixture{native.Node, load(t, native.Node, func(s *setting.Node) {
		tunnel(native.Node)(s)
		s.UplinkMTU, s.TunnelMTU = 1400, 1330
	})}
	each(t, func(t *testing.T, f pt.Family) {
		headers := 28
		if f.V6 {
			headers = 48
		}
		for _, c := range []struct {
			name     string
			fix      fixture
			dst      netip.Addr
			mtu      int
			identity uint64
		}{
			{"remote pod", native, f.RemotePod, 1400, pt.IdentityRemotePods},
			{"remote pod by tunnel", vxlan, f.RemotePod, 1330, pt.IdentityRemotePods},
			{"outside", native, f.World, 1400, world},
			{"outside, with a tunnel", vxlan, f.World, 1400, world},
			{"remote node", native, f.OtherNode, 1400, pt.IdentityRemoteNode},
		} {
			t.Run(c.name, func(t *testing.T) {
				native.Reset()
				p := datagram(f, c.dst)
				p.Payload = payload(c.mtu - headers + 1)
				c.fix.fromA(t, p, pt.Want{
					Verdict: pt.Redirect, Frame: tooBig(f, p, uint32(c.mtu)), Count: []string{"too-big", "answered"},
					Events: []string{p.Event("new egress", idA, c.identity), p.Event("drop(too-big) egress", idA, c.identity)},
					Conns:  conn(p, "1/0"),
				})
				p.Payload = payload(c.mtu - headers)
				if out := c.fix.Run(c.fix.objects.FromPod, pt.In{Device: pt.PodA, Frame: p.Bytes()}); out.Verdict != pt.Redirect || len(out.Events) != 0 {
					t.Errorf("a packet of exactly the MTU: verdict %d, %d events", out.Verdict, len(out.Events))
				}
			})
		}
		t.Run("local pod has no MTU but its own", func(t *testing.T) {
			native.Reset()
			p := datagram(f, f.B)
			p.Payload = payload(3000)
			native.fromA(t, p, pt.Want{
				Verdict: pt.Redirect, Frame: delivered(p, pt.MACB, pt.HostMACB), Count: []string{"local-pod"},
				Events: []string{p.Event("new egress", idA, idB)}, Conns: conn(p, "1/0"),
			})
		})
	})
}

// TestGSO: what counts is the size of the segments, not of the skb.
func TestGSO(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family) {
		headers := 40
		if f.V6 {
			headers = 60
		}
		p := syn(f, f.RemotePod)
		p.Flags, p.Payload = pt.ACK, payload(3000)
		for _, c := range []struct {
			name  string
			size  int
			frame []byte
			count []string
		}{
			{"segments of exactly the MTU", 1500 - headers, delivered(p, nil, nil), []string{"remote-node"}},
			{"segments one byte too long", 1501 - headers, tooBig(f, p, 1500), []string{"too-big", "answered"}},
		} {
			t.Run(c.name, func(t *testing.T) {
				fix.Reset()
				events := []string{p.Event("new egress", idA, pt.IdentityRemotePods)}
				if len(c.count) > 1 {
					events = append(events, p.Event("drop(too-big) egress", idA, pt.IdentityRemotePods))
				}
				fix.Step(t, fix.objects.FromPod, pt.In{Device: pt.PodA, Frame: p.Bytes(), GSOSize: c.size}, pt.Want{
					Verdict: pt.Redirect, Frame: c.frame, Count: c.count, Events: events, Conns: conn(p, "1/0"),
				})
			})
		}
	})
}

func TestNoNextHop(t *testing.T) {
	fix := newFixture(t, nil)
	vxlan := fixture{fix.Node, load(t, fix.Node, tunnel(fix.Node))}
	each(t, func(t *testing.T, f pt.Family) {
		fix.ForgetNextHops(f)
		p := syn(f, f.RemotePod)
		for _, fx := range []fixture{fix, vxlan} {
			fix.Reset()
			fx.fromA(t, p, pt.Want{
				Verdict: pt.Drop, Count: []string{"no-next-hop"}, Conns: conn(p, "1/0"),
				Events: []string{p.Event("new egress", idA, pt.IdentityRemotePods), p.Event("drop(no-next-hop) egress", idA, pt.IdentityRemotePods)},
			})
		}
	})
}

// TestTTLChecksum: decrementing the TTL carries in one of 65,536 header
// checksums; this finds it.
func TestTTLChecksum(t *testing.T) {
	fix := newFixture(t, nil)
	p := datagram(pt.Families[0], pt.Families[0].B)
	interesting := map[uint16]bool{0xfeff: true, 0xfefe: true, 0xff00: true, 0xfffe: true, 0x0000: true, 0x0001: true}
	seen := 0
	for id := range uint32(65536) {
		p.ID = id
		frame := p.Bytes()
		if !interesting[binary.BigEndian.Uint16(frame[24:])] {
			continue
		}
		seen++
		got := fix.Run(fix.objects.FromPod, pt.In{Device: pt.PodA, Frame: frame})
		if want := delivered(p, pt.MACB, pt.HostMACB); !bytes.Equal(want, got.Frame) {
			t.Errorf("header checksum %#04x became %#04x, want %#04x", frame[24:26], got.Frame[24:26], want[24:26])
		}
	}
	if seen < len(interesting)-1 { // 0xffff and 0 are the same sum
		t.Errorf("only %d of %d checksums were met", seen, len(interesting))
	}
}
