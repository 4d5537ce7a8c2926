// SPDX-License-Identifier: Apache-2.0

package node

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	pt "github.com/weft-mesh/weft/internal/datapath/packettest"
	"github.com/weft-mesh/weft/internal/datapath/setting"
)

const (
	idA, world = pt.IdentityA, pt.IdentityWorld
	natPort    = 12345
)

type fixture struct {
	*pt.Node
	*Datapath
}

func newFixture(t *testing.T, change func(*setting.Node)) fixture {
	t.Helper()
	n := pt.New(t, pt.Sizes())
	return fixture{n, load(t, n, change)}
}

func load(t *testing.T, n *pt.Node, change func(*setting.Node)) *Datapath {
	t.Helper()
	s := n.Settings()
	if change != nil {
		change(&s)
	}
	d, err := Load(n.Maps, s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

func (fix fixture) fromUplink(t *testing.T, p pt.Packet, w pt.Want) pt.Out {
	t.Helper()
	return fix.Step(t, fix.objects.FromUplink, pt.In{Device: pt.Uplink, Frame: p.Bytes()}, w)
}

// in is the good packet: a pod of another node opens a connection to pod A.
func in(f pt.Family) pt.Packet {
	return pt.Packet{
		EthSrc: pt.MACOther, EthDst: pt.MACNode, Src: f.RemotePod, Dst: f.A, TTL: 64, DF: true,
		Protocol: pt.TCP, Sport: 40000, Dport: 80, Flags: pt.SYN,
	}
}

// out is what pod A sent to the outside before, masqueraded or not.
func out(f pt.Family, protocol uint8) pt.Packet {
	p := pt.Packet{Src: f.A, Dst: f.World, TTL: 64, Protocol: protocol, Sport: 40000, Dport: 53, Payload: []byte("who is it")}
	switch protocol {
	case pt.TCP:
		p.Flags = pt.SYN
	case f.ICMP:
		p.Sport, p.Dport, p.Type, p.Rest = 0, 0, f.Echo, 0x1234_0001
	}
	return p
}

// wire is p as it is on the wire: from the node, with its port.
func wire(f pt.Family, p pt.Packet) pt.Packet {
	p.Src = f.Node
	if p.Protocol == f.ICMP {
		p.Rest = natPort<<16 | p.Rest&0xffff
	} else {
		p.Sport = natPort
	}
	return p
}

// answer is the answer to p, as the next hop sends it.
func answer(p pt.Packet) pt.Packet {
	r := p.Reply()
	r.EthSrc, r.EthDst, r.TTL = pt.MACOther, pt.MACNode, 50
	if r.Protocol == pt.TCP {
		r.Flags = pt.SYN | pt.ACK
	}
	return r
}

func toPodA(p pt.Packet) []byte {
	return p.With(func(p *pt.Packet) { p.TTL--; p.EthDst, p.EthSrc = pt.MACA, pt.HostMACA }).Bytes()
}

func natRow(f pt.Family, p pt.Packet) string {
	proto, sport, dport := map[uint8]string{pt.TCP: "tcp", pt.UDP: "udp", pt.ICMP: "icmp", pt.ICMPv6: "icmp6"}[p.Protocol], p.Sport, p.Dport
	if p.Protocol == f.ICMP {
		sport, dport = uint16(p.Rest>>16), 0
	}
	return fmt.Sprintf("%s %s %d>%s", proto, netip.AddrPortFrom(p.Dst, dport), natPort, netip.AddrPortFrom(p.Src, sport))
}

func each(t *testing.T, f func(*testing.T, pt.Family)) {
	for _, fam := range pt.Families {
		t.Run(fam.Name, func(t *testing.T) { f(t, fam) })
	}
}

func payload(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i * 7)
	}
	return b
}

func dropped(reason string, events ...string) pt.Want {
	return pt.Want{Verdict: pt.Drop, Count: []string{reason}, Events: events}
}

// TestIn: the uplink, one changed field a case. What comes through the tunnel
// needs an outer header, which BPF_PROG_TEST_RUN cannot give: see packettest/wire.
func TestIn(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family) {
		good := in(f)
		pass := func(p pt.Packet, src uint64) pt.Want {
			return pt.Want{
				Verdict: pt.Redirect, Frame: toPodA(p), Count: []string{"from-wire"},
				Events: []string{p.Event("new ingress", src, idA)}, Conns: []string{p.Conn() + " 1/0"},
			}
		}
		drop := func(p pt.Packet, reason string, src, dst uint64) pt.Want {
			return dropped(reason, p.Event("drop("+reason+") ingress", src, dst))
		}
		later := good.With(func(p *pt.Packet) {
			p.Protocol, p.DF, p.ID, p.Payload, p.Fragment = pt.UDP, false, 9, payload(1000), &pt.Fragment{From: 504, To: 1008}
		})
		for _, c := range []struct {
			name   string
			change func(*pt.Packet)
			want   func(pt.Packet) pt.Want
		}{
			{"from a pod of another node", func(*pt.Packet) {}, func(p pt.Packet) pt.Want { return pass(p, pt.IdentityRemotePods) }},
			{"from outside", func(p *pt.Packet) { p.Src = f.World }, func(p pt.Packet) pt.Want { return pass(p, world) }},
			{"from another node", func(p *pt.Packet) { p.Src = f.OtherNode }, func(p pt.Packet) pt.Want { return pass(p, pt.IdentityRemoteNode) }},
			{"UDP", func(p *pt.Packet) { p.Protocol, p.Flags = pt.UDP, 0 }, func(p pt.Packet) pt.Want { return pass(p, pt.IdentityRemotePods) }},
			{"SCTP", func(p *pt.Packet) { p.Protocol, p.Flags = pt.SCTP, 0 }, func(p pt.Packet) pt.Want { return pass(p, pt.IdentityRemotePods) }},
			{"echo", func(p *pt.Packet) { p.Protocol, p.Type, p.Rest = f.ICMP, f.Echo, 7<<16 }, func(p pt.Packet) pt.Want { return pass(p, pt.IdentityRemotePods) }},
			{"later fragment without its first", func(p *pt.Packet) { *p = later }, func(p pt.Packet) pt.Want {
				return pt.Want{Verdict: pt.Redirect, Frame: toPodA(p), Count: []string{"from-wire"}}
			}},
			{"source is a pod of this node", func(p *pt.Packet) { p.Src = f.B }, func(p pt.Packet) pt.Want { return drop(p, "spoofed-address", pt.IdentityB, idA) }},
			{"source is the pod itself", func(p *pt.Packet) { p.Src = f.A }, func(p pt.Packet) pt.Want { return drop(p, "spoofed-address", idA, idA) }},
			{"source is this node", func(p *pt.Packet) { p.Src = f.Node }, func(p pt.Packet) pt.Want { return drop(p, "spoofed-address", pt.IdentityNode, idA) }},
			{"source is in this node's pod CIDR", func(p *pt.Packet) { p.Src = f.Unused }, func(p pt.Packet) pt.Want { return drop(p, "spoofed-address", world, idA) }},
			{"source is loopback", func(p *pt.Packet) { p.Src = loopback(f) }, func(p pt.Packet) pt.Want { return drop(p, "spoofed-address", world, idA) }},
			{"for another machine", func(p *pt.Packet) { p.EthDst = pt.MACOther }, func(pt.Packet) pt.Want { return pt.Want{Verdict: pt.Next} }},
			{"no such pod", func(p *pt.Packet) { p.Dst = f.Unused }, func(p pt.Packet) pt.Want {
				return drop(p, "unknown-pod", pt.IdentityRemotePods, world)
			}},
			{"TTL of 1", func(p *pt.Packet) { p.TTL = 1 }, func(p pt.Packet) pt.Want {
				return drop(p, "ttl-expired", pt.IdentityRemotePods, idA)
			}},
			{"ICMP error about nothing", func(p *pt.Packet) {
				*p = unreachable(f, out(f, pt.UDP), f.World)
			}, func(p pt.Packet) pt.Want { return drop(p, "icmp-unmatched", world, idA) }},
			{"for the node itself", func(p *pt.Packet) { p.Dst = f.Node }, func(pt.Packet) pt.Want { return pt.Want{Verdict: pt.Next} }},
			{"for somebody else", func(p *pt.Packet) { p.Dst = f.World }, func(pt.Packet) pt.Want { return pt.Want{Verdict: pt.Next} }},
			{"multicast", func(p *pt.Packet) { p.Dst = f.Multicast }, func(pt.Packet) pt.Want { return pt.Want{Verdict: pt.Next} }},
		} {
			t.Run(c.name, func(t *testing.T) {
				fix.Reset()
				p := good.With(c.change)
				fix.fromUplink(t, p, c.want(p))
			})
		}
	})
}

func loopback(f pt.Family) netip.Addr {
	if f.V6 {
		return netip.IPv6Loopback()
	}
	return netip.MustParseAddr("127.0.0.1")
}

// TestTunnelOnly: with a tunnel, pods of other nodes come through it alone, and
// nothing comes through it without the outer header of a node.
func TestTunnelOnly(t *testing.T) {
	fix := newFixture(t, func(s *setting.Node) { s.TunnelIfindex = 9 })
	each(t, func(t *testing.T, f pt.Family) {
		p := in(f)
		fix.Reset()
		fix.fromUplink(t, p, dropped("spoofed-address", p.Event("drop(spoofed-address) ingress", pt.IdentityRemotePods, idA)))
		fix.Step(t, fix.objects.FromTunnel, pt.In{Device: pt.Tunnel, Frame: p.Bytes()}, dropped("tunnel-forged", p.Event("drop(tunnel-forged) ingress", pt.IdentityRemotePods, idA)))
		p.Src = f.World
		fix.fromUplink(t, p, pt.Want{
			Verdict: pt.Redirect, Frame: toPodA(p), Count: []string{"from-wire"}, Events: []string{p.Event("new ingress", world, idA)}, Conns: []string{p.Conn() + " 1/0"},
		})
	})
}

// TestUnreadable: on the uplink what cannot be read is the kernel's business, in
// the tunnel nobody else's.
func TestUnreadable(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family) {
		good := in(f).Bytes()
		for name, c := range map[string]struct {
			frame  []byte
			reason string
		}{
			"VLAN":              {append(append(append([]byte(nil), good[:12]...), 0x81, 0), good[14:]...), "ethertype"},
			"ARP":               {append(append(append([]byte(nil), good[:12]...), 0x08, 6), good[14:]...), "ethertype"},
			"wrong version":     {append(append(append([]byte(nil), good[:14]...), good[14]^0x20), good[15:]...), "malformed"},
			"TCP cut off":       {cut(good, 9, f.V6), "malformed"},
			"longer than it is": {good[:len(good)-1], "malformed"},
		} {
			t.Run(name, func(t *testing.T) {
				fix.Reset()
				fix.Step(t, fix.objects.FromUplink, pt.In{Device: pt.Uplink, Frame: c.frame}, pt.Want{Verdict: pt.Next})
				got := fix.Run(fix.objects.FromTunnel, pt.In{Device: pt.Tunnel, Frame: c.frame})
				fix.Reset()
				if len(got.Events) != 1 {
					t.Fatalf("tunnel: verdict %d, %d events, want a drop", got.Verdict, len(got.Events))
				}
				fix.Step(t, fix.objects.FromTunnel, pt.In{Device: pt.Tunnel, Frame: c.frame}, dropped(c.reason, pt.FormatEvent(got.Events[0])))
			})
		}
	})
}

// cut takes n bytes off the end and makes the IP length agree.
func cut(frame []byte, n int, v6 bool) []byte {
	b := append([]byte(nil), frame[:len(frame)-n]...)
	if v6 {
		binary.BigEndian.PutUint16(b[18:], uint16(len(b)-54))
	} else {
		binary.BigEndian.PutUint16(b[16:], uint16(len(b)-14))
	}
	return b
}

func TestAnswers(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family) {
		for name, p := range map[string]pt.Packet{
			"TCP": out(f, pt.TCP), "UDP": out(f, pt.UDP), "echo": out(f, f.ICMP),
			"UDP without a checksum": out(f, pt.UDP).With(func(p *pt.Packet) { p.NoChecksum = true }),
			"port stays what it was": out(f, pt.UDP).With(func(p *pt.Packet) { p.Sport = natPort }),
		} {
			t.Run(name, func(t *testing.T) {
				fix.Reset()
				fix.Masquerade(p, natPort, 0)
				fix.fromUplink(t, answer(wire(f, p)), pt.Want{
					Verdict: pt.Redirect, Frame: toPodA(answer(p)), Count: []string{"from-wire"},
					Conns: []string{p.Conn() + " 1/1 replied nat 12345"}, NAT: []string{natRow(f, p)},
				})
			})
		}
	})
}

func TestAnswersRandom(t *testing.T) {
	fix := newFixture(t, nil)
	rnd := rand.New(rand.NewPCG(5, 6))
	each(t, func(t *testing.T, f pt.Family) {
		for i := range 300 {
			p := out(f, []uint8{pt.TCP, pt.UDP, f.ICMP}[i%3])
			if p.Protocol != f.ICMP {
				p.Sport, p.Dport = uint16(rnd.Uint32()|1), uint16(rnd.Uint32()|1)
			}
			p.Rest, p.ID = rnd.Uint32(), uint32(rnd.IntN(65536))
			p.Payload = make([]byte, rnd.IntN(64))
			for j := range p.Payload {
				p.Payload[j] = byte(rnd.Uint32())
			}
			fix.Reset()
			fix.Masquerade(p, natPort, 0)
			got := fix.Run(fix.objects.FromUplink, pt.In{Device: pt.Uplink, Frame: answer(wire(f, p)).Bytes()})
			if d := cmp.Diff(hex.Dump(toPodA(answer(p))), hex.Dump(got.Frame)); d != "" {
				t.Fatalf("packet %d (-want +got):\n%s", i, d)
			}
		}
	})
}

// TestNotAnAnswer: what looks like an answer to a masqueraded connection, but is
// not, is for the node's own stack, untouched and uncounted.
func TestNotAnAnswer(t *testing.T) {
	fix := newFixture(t, nil)
	off := load(t, fix.Node, func(s *setting.Node) { s.Masquerade = false })
	each(t, func(t *testing.T, f pt.Family) {
		for _, c := range []struct {
			name     string
			protocol uint8
			ago      time.Duration
			datapath *Datapath
			change   func(*pt.Packet)
		}{
			{"other port of the node", pt.UDP, 0, fix.Datapath, func(p *pt.Packet) { p.Dport++ }},
			{"other port outside", pt.UDP, 0, fix.Datapath, func(p *pt.Packet) { p.Sport++ }},
			{"other address outside", pt.UDP, 0, fix.Datapath, func(p *pt.Packet) { p.Src = f.Excluded }},
			{"other protocol", pt.UDP, 0, fix.Datapath, func(p *pt.Packet) { p.Protocol = pt.TCP }},
			{"other identifier of an echo", f.ICMP, 0, fix.Datapath, func(p *pt.Packet) { p.Rest += 1 << 16 }},
			{"echo request with the same identifier", f.ICMP, 0, fix.Datapath, func(p *pt.Packet) { p.Type = f.Echo }},
			{"SYN", pt.TCP, 0, fix.Datapath, func(p *pt.Packet) { p.Flags = pt.SYN }},
			{"UDP that is over", pt.UDP, time.Hour, fix.Datapath, func(p *pt.Packet) {}},
			{"TCP that is over", pt.TCP, 7 * time.Hour, fix.Datapath, func(p *pt.Packet) { p.Flags = pt.ACK }},
			{"no masquerading", pt.UDP, 0, off, func(p *pt.Packet) {}},
			{"fragment without its first", pt.UDP, 0, fix.Datapath, func(p *pt.Packet) {
				p.DF, p.Payload, p.Fragment = false, payload(1000), &pt.Fragment{From: 504, To: 1008}
			}},
			{"SCTP", pt.UDP, 0, fix.Datapath, func(p *pt.Packet) { p.Protocol = pt.SCTP }},
		} {
			t.Run(c.name, func(t *testing.T) {
				fix.Reset()
				p := out(f, c.protocol)
				fix.Masquerade(p, natPort, c.ago)
				fixture{fix.Node, c.datapath}.fromUplink(t, answer(wire(f, p)).With(c.change), pt.Want{
					Verdict: pt.Next, Conns: []string{p.Conn() + " 1/0 nat 12345"}, NAT: []string{natRow(f, p)},
				})
			})
		}
	})
}

func TestAnswerInFragments(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family) {
		fix.Reset()
		p := out(f, pt.UDP)
		fix.Masquerade(p, natPort, 0)
		part := func(p pt.Packet, from, to int) pt.Packet {
			p = answer(p)
			p.ID, p.Payload, p.Fragment = 0xbeef, payload(2000), &pt.Fragment{From: from, To: to}
			return p
		}
		for i, b := range [][2]int{{0, 800}, {1600, 2008}, {800, 1600}} {
			fix.fromUplink(t, part(wire(f, p), b[0], b[1]), pt.Want{
				Verdict: pt.Redirect, Frame: toPodA(part(p, b[0], b[1])), Count: []string{"from-wire"},
				Conns: []string{p.Conn() + fmt.Sprintf(" 1/%d replied nat 12345", i+1)}, NAT: []string{natRow(f, p)},
			})
		}
	})
}

// unreachable is an ICMP error of from about packet p.
func unreachable(f pt.Family, p pt.Packet, from netip.Addr) pt.Packet {
	kind, code := uint8(3), uint8(4)
	if f.V6 {
		kind, code = 2, 0
	}
	return pt.Packet{
		EthSrc: pt.MACOther, EthDst: pt.MACNode, Src: from, Dst: p.Src, TTL: 60,
		Protocol: f.ICMP, Type: kind, Code: code, Rest: 1300, Payload: p.L3(),
	}
}

// quoteAs is the quoted packet after change, but for its L4 checksum, which
// stays.
func quoteAs(f pt.Family, before, after pt.Packet) []byte {
	b, a := before.L3(), after.L3()
	off := 20
	if f.V6 {
		off = 40
	}
	off += map[uint8]int{pt.TCP: 16, pt.UDP: 6, f.ICMP: 2}[before.Protocol]
	copy(a[off:off+2], b[off:off+2])
	return a
}

// TestErrorAboutMasqueraded: a router outside says that a packet was too big;
// the pod must learn it as if it had sent the packet itself.
func TestErrorAboutMasqueraded(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family) {
		router := f.Excluded
		for name, protocol := range map[string]uint8{"TCP": pt.TCP, "UDP": pt.UDP, "echo": f.ICMP} {
			t.Run(name, func(t *testing.T) {
				fix.Reset()
				p := out(f, protocol)
				fix.Masquerade(p, natPort, 0)
				e := unreachable(f, wire(f, p), router)
				want := e.With(func(e *pt.Packet) { e.Dst, e.Payload = f.A, quoteAs(f, wire(f, p), p) })
				fix.fromUplink(t, e, pt.Want{
					Verdict: pt.Redirect, Frame: toPodA(want), Count: []string{"from-wire"},
					Conns: []string{p.Conn() + " 1/0 nat 12345"}, NAT: []string{natRow(f, p)},
				})
				// about the node's own packet
				own := unreachable(f, wire(f, p).With(func(p *pt.Packet) { p.Sport, p.Rest = 999, 999<<16 }), router)
				fix.fromUplink(t, own, pt.Want{Verdict: pt.Next, Conns: []string{p.Conn() + " 1/0 nat 12345"}, NAT: []string{natRow(f, p)}})
			})
		}
		t.Run("not masqueraded", func(t *testing.T) {
			fix.Reset()
			p := out(f, pt.UDP).With(func(p *pt.Packet) { p.Src, p.Dst = f.A, f.RemotePod })
			r := answer(p).With(func(r *pt.Packet) { r.Src, r.Dst = p.Dst, p.Src })
			fix.Run(fix.objects.FromUplink, pt.In{Device: pt.Uplink, Frame: r.Bytes()})
			fix.Forget()
			e := unreachable(f, p, router)
			fix.fromUplink(t, e, pt.Want{Verdict: pt.Redirect, Frame: toPodA(e), Count: []string{"from-wire"}, Conns: []string{r.Conn() + " 1/0"}})
		})
	})
}

func TestToTunnel(t *testing.T) {
	fix := newFixture(t, func(s *setting.Node) { s.TunnelIfindex = 9 })
	const mark = 0x77ef0001
	run := func(t *testing.T, in pt.In, w pt.Want) {
		t.Helper()
		fix.Reset()
		in.Device = pt.Tunnel
		fix.Step(t, fix.objects.ToTunnel, in, w)
	}
	each(t, func(t *testing.T, f pt.Family) {
		good := in(f).With(func(p *pt.Packet) { p.Src, p.Dst = f.Gateway, f.RemotePod })
		t.Run("a pod's, encapsulated already", func(t *testing.T) {
			run(t, pt.In{Frame: good.Bytes(), Mark: mark}, pt.Want{Verdict: pt.Next})
		})
		t.Run("the node's own", func(t *testing.T) {
			run(t, pt.In{Frame: good.Bytes()}, pt.Want{Verdict: pt.Next, Count: []string{"from-node"}})
		})
		t.Run("another mark", func(t *testing.T) {
			run(t, pt.In{Frame: good.Bytes(), Mark: 1}, pt.Want{Verdict: pt.Next, Mark: 1, Count: []string{"from-node"}})
		})
		for name, dst := range map[string]netip.Addr{"outside": f.World, "another node": f.OtherNode, "this node": f.Node, "its own pod": f.A} {
			t.Run("to "+name, func(t *testing.T) {
				p := good.With(func(p *pt.Packet) { p.Dst = dst })
				id := map[string]uint64{"outside": world, "another node": pt.IdentityRemoteNode, "this node": pt.IdentityNode, "its own pod": idA}[name]
				run(t, pt.In{Frame: p.Bytes()}, dropped("no-next-hop", p.Event("drop(no-next-hop) egress", world, id)))
			})
		}
		t.Run("multicast", func(t *testing.T) {
			p := good.With(func(p *pt.Packet) { p.Dst = f.Multicast })
			run(t, pt.In{Frame: p.Bytes()}, pt.Want{Verdict: pt.Drop, Count: []string{"multicast-ignored"}})
		})
		t.Run("no address of the other node", func(t *testing.T) {
			fix.ForgetNextHops(f)
			run(t, pt.In{Frame: good.Bytes()}, dropped("no-next-hop", good.Event("drop(no-next-hop) egress", world, pt.IdentityRemotePods)))
		})
	})
}
