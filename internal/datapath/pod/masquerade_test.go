// SPDX-License-Identifier: Apache-2.0

package pod

import (
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

// onePort leaves masquerading a single port, so that the test knows it.
const onePort = 12345

func withOnePort(s *setting.Node) { s.FirstPort, s.LastPort = onePort, onePort }

func natRow(f pt.Family, p pt.Packet) string {
	proto, sport, dport := "udp", p.Sport, p.Dport
	switch p.Protocol {
	case pt.TCP:
		proto = "tcp"
	case pt.ICMP:
		proto, sport, dport = "icmp", uint16(p.Rest>>16), 0
	case pt.ICMPv6:
		proto, sport, dport = "icmp6", uint16(p.Rest>>16), 0
	}
	return fmt.Sprintf("%s %s %d>%s", proto, netip.AddrPortFrom(p.Dst, dport), onePort, netip.AddrPortFrom(p.Src, sport))
}

// masqueraded is what the first packet of a connection to the outside does.
func masqueraded(f pt.Family, p pt.Packet) pt.Want {
	return pt.Want{
		Verdict: pt.Redirect, Frame: toWorld(f, p, onePort), Count: []string{"world"},
		Events: []string{p.Event("new egress", idA, world)}, Conns: conn(p, "1/0 nat 12345"), NAT: []string{natRow(f, p)},
	}
}

func TestMasquerade(t *testing.T) {
	fix := newFixture(t, withOnePort)
	vxlan := fixture{fix.Node, load(t, fix.Node, func(s *setting.Node) { withOnePort(s); tunnel(fix.Node)(s) })}
	each(t, func(t *testing.T, f pt.Family) {
		for name, p := range map[string]pt.Packet{
			"TCP":                      syn(f, f.World),
			"TCP, odd payload":         syn(f, f.World).With(func(p *pt.Packet) { p.Flags, p.Payload = pt.SYN, payload(77) }),
			"UDP":                      datagram(f, f.World),
			"UDP without a checksum":   datagram(f, f.World).With(func(p *pt.Packet) { p.NoChecksum = true }),
			"UDP, nothing in it":       datagram(f, f.World).With(func(p *pt.Packet) { p.Payload = nil }),
			"echo":                     echo(f, f.World),
			"port stays what it was":   datagram(f, f.World).With(func(p *pt.Packet) { p.Sport = onePort }),
			"TTL of 2":                 datagram(f, f.World).With(func(p *pt.Packet) { p.TTL = 2 }),
			"TTL of 255":               datagram(f, f.World).With(func(p *pt.Packet) { p.TTL = 255 }),
			"UDP as long as the MTU":   datagram(f, f.World).With(func(p *pt.Packet) { p.Payload = payload(1452) }),
			"to an odd address of all": datagram(f, f.World).With(func(p *pt.Packet) { p.Dport = 65535 }),
		} {
			t.Run(name, func(t *testing.T) {
				if name == "UDP without a checksum" && f.V6 {
					t.Log("IPv6 has none without, but the datapath must not make one")
				}
				fix.Reset()
				w := masqueraded(f, p)
				if name == "TCP" || name == "TCP, odd payload" {
					w.Conns = conn(p, "1/0 nat 12345")
				}
				if len(p.Payload) == 1452 && f.V6 {
					p.Payload = p.Payload[:1432]
					w = masqueraded(f, p)
				}
				fix.fromA(t, p, w)
				// again: the same port, no new entry
				w.Events, w.Conns = nil, conn(p, "2/0 nat 12345")
				fix.fromA(t, p, w)
			})
		}
		t.Run("another node, where the underlay does not know pods", func(t *testing.T) {
			fix.Reset()
			p := datagram(f, f.OtherNode)
			w := masqueraded(f, p)
			w.Events = []string{p.Event("new egress", idA, pt.IdentityRemoteNode)}
			vxlan.fromA(t, p, w)
		})
	})
}

// TestMasqueradeRandom compares many rewritten packets, byte by byte, with ones
// built from scratch: incremental checksums are wrong rarely or always.
func TestMasqueradeRandom(t *testing.T) {
	fix := newFixture(t, withOnePort)
	rnd := rand.New(rand.NewPCG(1, 2))
	each(t, func(t *testing.T, f pt.Family) {
		for i := range 400 {
			p := datagram(f, f.World)
			if i%2 == 0 {
				p.Protocol, p.Flags = pt.TCP, pt.SYN
			}
			if i%5 == 0 {
				p = echo(f, f.World)
			}
			p.Sport, p.Dport, p.Rest = uint16(rnd.Uint32()|1), uint16(rnd.Uint32()|1), rnd.Uint32()
			p.TTL, p.ID = uint8(2+rnd.IntN(254)), uint32(rnd.IntN(65536))
			p.Payload = make([]byte, rnd.IntN(64))
			for j := range p.Payload {
				p.Payload[j] = byte(rnd.Uint32())
			}
			fix.Reset()
			got := fix.Run(fix.objects.FromPod, pt.In{Device: pt.PodA, Frame: p.Bytes()})
			if d := cmp.Diff(hex.Dump(toWorld(f, p, onePort)), hex.Dump(got.Frame)); d != "" {
				t.Fatalf("packet %d (-want +got):\n%s", i, d)
			}
		}
	})
}

func TestMasqueradeRefuses(t *testing.T) {
	fix := newFixture(t, withOnePort)
	bare := fixture{fix.Node, load(t, fix.Node, func(s *setting.Node) { s.IPv4, s.IPv6 = netip.Addr{}, netip.Addr{} })}
	each(t, func(t *testing.T, f pt.Family) {
		for _, c := range []struct {
			name, reason string
			fix          fixture
			packet       pt.Packet
		}{
			{"SCTP", "masquerade-protocol", fix, syn(f, f.World).With(func(p *pt.Packet) { p.Protocol, p.Flags = pt.SCTP, 0 })},
			{"GRE", "masquerade-protocol", fix, syn(f, f.World).With(func(p *pt.Packet) { p.Protocol, p.Flags, p.Payload = 47, 0, payload(8) })},
			{"ICMP that is no echo", "masquerade-protocol", fix, echo(f, f.World).With(func(p *pt.Packet) { p.Type = f.Echo + 5 })},
			{"echo reply to nothing", "masquerade-protocol", fix, echo(f, f.World).With(func(p *pt.Packet) { p.Type = f.Answer })},
			{"node without an address", "masquerade-address", bare, datagram(f, f.World)},
		} {
			t.Run(c.name, func(t *testing.T) {
				fix.Reset()
				w := dropped(c.reason, c.packet.Event("new egress", idA, world), c.packet.Event("drop("+c.reason+") egress", idA, world))
				w.Conns = conn(c.packet, "1/0")
				c.fix.fromA(t, c.packet, w)
			})
		}
	})
}

func TestMasqueradeExhaustion(t *testing.T) {
	fix := newFixture(t, withOnePort)
	each(t, func(t *testing.T, f pt.Family) {
		fix.Reset()
		first := datagram(f, f.World)
		fix.fromA(t, first, masqueraded(f, first))
		second := first.With(func(p *pt.Packet) { p.Sport = 40001 })
		fix.fromA(t, second, pt.Want{
			Verdict: pt.Drop, Count: []string{"masquerade-exhausted"}, NAT: []string{natRow(f, first)},
			Events: []string{second.Event("new egress", idA, world), second.Event("drop(masquerade-exhausted) egress", idA, world)},
			Conns:  []string{first.Conn() + " 1/0 nat 12345", second.Conn() + " 1/0"},
		})
		// the same port is free towards another port, and for another protocol
		elsewhere := first.With(func(p *pt.Packet) { p.Dport = 54 })
		w := masqueraded(f, elsewhere)
		w.Conns = []string{first.Conn() + " 1/0 nat 12345", elsewhere.Conn() + " 1/0 nat 12345", second.Conn() + " 1/0"}
		w.NAT = []string{natRow(f, first), natRow(f, elsewhere)}
		fix.fromA(t, elsewhere, w)
	})
}

// TestPortIsReclaimed: a connection that is over does not hold its port until
// the collector comes.
func TestPortIsReclaimed(t *testing.T) {
	fix := newFixture(t, withOnePort)
	each(t, func(t *testing.T, f pt.Family) {
		old := datagram(f, f.World)
		for name, over := range map[string]bool{"over": true, "alive": false} {
			t.Run(name, func(t *testing.T) {
				fix.Reset()
				ago := time.Duration(0)
				if over {
					ago = time.Hour
				}
				fix.Masquerade(old, onePort, ago)
				p := old.With(func(p *pt.Packet) { p.Sport++ })
				w := masqueraded(f, p)
				if !over {
					w = dropped("masquerade-exhausted", p.Event("new egress", idA, world), p.Event("drop(masquerade-exhausted) egress", idA, world))
					w.Conns, w.NAT = conn(p, "1/0"), []string{natRow(f, old)}
				}
				w.Conns = append([]string{old.Conn() + " 1/0 nat 12345"}, w.Conns...)
				fix.fromA(t, p, w)
			})
		}
	})
}

// TestReplyIsNotMasqueraded: what came to the pod's own address from outside is
// answered from it.
func TestReplyIsNotMasqueraded(t *testing.T) {
	fix := newFixture(t, withOnePort)
	each(t, func(t *testing.T, f pt.Family) {
		fix.Reset()
		in := datagram(f, f.World).Reply()
		fix.Run(fix.objects.ToPod, pt.In{Device: pt.PodA, Frame: in.Bytes()})
		fix.Forget()
		out := datagram(f, f.World)
		fix.fromA(t, out, pt.Want{
			Verdict: pt.Redirect, Frame: delivered(out, nil, nil), Count: []string{"world"}, Conns: conn(in, "1/1 replied"),
		})
	})
}

// fragments cuts a datagram of 2,000 bytes in three.
func fragments(p pt.Packet) (first, second, third pt.Packet) {
	p.DF, p.ID, p.Payload = false, 0xbeef, payload(2000)
	cut := func(from, to int) pt.Packet {
		return p.With(func(p *pt.Packet) { p.Fragment = &pt.Fragment{From: from, To: to} })
	}
	return cut(0, 800), cut(800, 1600), cut(1600, 2008)
}

func TestFragmentsToWorld(t *testing.T) {
	fix := newFixture(t, withOnePort)
	each(t, func(t *testing.T, f pt.Family) {
		first, second, third := fragments(datagram(f, f.World))
		unknown := func(p pt.Packet) pt.Want {
			return dropped("fragment-unknown", p.With(func(p *pt.Packet) { p.Sport, p.Dport = 0, 0 }).Event("drop(fragment-unknown) egress", idA, world))
		}
		fix.Reset()
		fix.fromA(t, second, unknown(second))
		w := masqueraded(f, first)
		fix.fromA(t, first, w)
		for i, p := range []pt.Packet{third, second} {
			w.Frame, w.Events, w.Conns = toWorld(f, p, onePort), nil, conn(p, fmt.Sprintf("%d/0 nat 12345", i+2))
			fix.fromA(t, p, w)
		}
		// another datagram is another matter
		other := second.With(func(p *pt.Packet) { p.ID++ })
		w = unknown(other)
		w.Conns, w.NAT = conn(first, "3/0 nat 12345"), []string{natRow(f, first)}
		fix.fromA(t, other, w)
	})
}

func TestFragmentsToPod(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family) {
		first, second, third := fragments(datagram(f, f.B))
		fix.Reset()
		pass := func(p pt.Packet) pt.Want {
			return pt.Want{Verdict: pt.Redirect, Frame: delivered(p, pt.MACB, pt.HostMACB), Count: []string{"local-pod"}}
		}
		fix.fromA(t, second, pass(second)) // no port matters here: it passes, uncounted
		w := pass(first)
		w.Events, w.Conns = []string{first.Event("new egress", idA, idB)}, conn(first, "1/0")
		fix.fromA(t, first, w)
		w = pass(third)
		w.Conns = conn(first, "2/0")
		fix.fromA(t, third, w)
	})
}

// TestFragmentsNotMasqueraded: without translation a later fragment may come
// first.
func TestFragmentsNotMasqueraded(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family) {
		for _, dst := range []netip.Addr{f.Excluded, f.RemotePod} {
			fix.Reset()
			_, second, _ := fragments(datagram(f, dst))
			way := "world"
			if dst == f.RemotePod {
				way = "remote-node"
			}
			fix.fromA(t, second, pt.Want{Verdict: pt.Redirect, Frame: delivered(second, nil, nil), Count: []string{way}})
		}
	})
}

// TestErrorToWorld: a pod's ICMP error about an answer that was translated.
func TestErrorToWorld(t *testing.T) {
	fix := newFixture(t, withOnePort)
	each(t, func(t *testing.T, f pt.Family) {
		for name, out := range map[string]pt.Packet{"UDP": datagram(f, f.World), "TCP": syn(f, f.World), "echo": echo(f, f.World)} {
			t.Run(name, func(t *testing.T) {
				fix.Reset()
				fix.fromA(t, out, masqueraded(f, out))
				answer := out.Reply()
				e := unreachable(f, answer)
				want := e
				want.Src = f.Node
				want.Payload = quoteAs(f, answer, func(p *pt.Packet) {
					p.Dst, p.Dport = f.Node, onePort
					if p.Protocol == f.ICMP {
						p.Rest = onePort<<16 | p.Rest&0xffff
					}
				})
				fix.fromA(t, e, pt.Want{
					Verdict: pt.Redirect, Frame: delivered(want, nil, nil), Count: []string{"world"},
					Conns: conn(out, "1/0 nat 12345"), NAT: []string{natRow(f, out)},
				})
			})
		}
	})
}

// quoteAs is the quoted packet after change, but for its L4 checksum, which
// stays.
func quoteAs(f pt.Family, p pt.Packet, change func(*pt.Packet)) []byte {
	before, after := p.L3(), p.With(change).L3()
	off := 20
	if f.V6 {
		off = 40
	}
	switch p.Protocol {
	case pt.TCP:
		off += 16
	case pt.UDP:
		off += 6
	default:
		off += 2
	}
	copy(after[off:off+2], before[off:off+2])
	return after
}

// TestErrorToPod: an ICMP error between two pods of the node.
func TestErrorToPod(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family) {
		in := datagram(f, f.A).With(func(p *pt.Packet) { p.Src, p.EthSrc, p.EthDst = f.B, pt.MACB, pt.HostMACB })
		good := unreachable(f, in)
		headers := 20
		if f.V6 {
			headers = 40
		}
		for _, c := range []struct {
			name    string
			change  func(*pt.Packet)
			matched bool
		}{
			{"as it should be", func(p *pt.Packet) {}, true},
			{"eight bytes quoted", func(p *pt.Packet) { p.Payload = p.Payload[:headers+8] }, true},
			{"seven bytes quoted", func(p *pt.Packet) { p.Payload = p.Payload[:headers+7] }, false},
			{"nothing quoted", func(p *pt.Packet) { p.Payload = nil }, false},
			{"about another port", func(p *pt.Packet) { p.Payload = unreachable(f, in.With(func(p *pt.Packet) { p.Dport++ })).Payload }, false},
			{"about another protocol", func(p *pt.Packet) {
				p.Payload = unreachable(f, in.With(func(p *pt.Packet) { p.Protocol = pt.TCP })).Payload
			}, false},
			{"about another pod's packet", func(p *pt.Packet) {
				p.Payload = unreachable(f, in.With(func(p *pt.Packet) { p.Dst = f.Unused })).Payload
			}, false},
			{"about its own packet", func(p *pt.Packet) { p.Payload = in.Reply().L3() }, false},
			{"quoting another version", func(p *pt.Packet) { p.Payload = append([]byte(nil), p.Payload...); p.Payload[0] ^= 0x20 }, false},
			{"about a later fragment", func(p *pt.Packet) {
				_, second, _ := fragments(in)
				p.Payload = second.L3()[:headers+8]
			}, false},
		} {
			t.Run(c.name, func(t *testing.T) {
				fix.Reset()
				fix.Run(fix.objects.FromPod, pt.In{Device: pt.PodB, Frame: in.Bytes()})
				fix.Forget()
				e := good.With(c.change)
				w := dropped("icmp-unmatched", e.Event("drop(icmp-unmatched) egress", idA, idB))
				if c.matched {
					w = pt.Want{Verdict: pt.Redirect, Frame: delivered(e, pt.MACB, pt.HostMACB), Count: []string{"local-pod"}}
				}
				w.Conns = conn(in, "1/0")
				fix.fromA(t, e, w)
			})
		}
		t.Run("about a later fragment whose first was seen", func(t *testing.T) {
			fix.Reset()
			first, second, _ := fragments(in)
			fix.Run(fix.objects.FromPod, pt.In{Device: pt.PodB, Frame: first.Bytes()})
			fix.Forget()
			e := good.With(func(p *pt.Packet) { p.Payload = second.L3()[:headers+8] })
			if f.V6 {
				e.Payload = second.L3()[:headers+8+8] // behind the fragment header
			}
			fix.fromA(t, e, pt.Want{
				Verdict: pt.Redirect, Frame: delivered(e, pt.MACB, pt.HostMACB), Count: []string{"local-pod"}, Conns: conn(in, "1/0"),
			})
		})
		t.Run("about a protocol without ports", func(t *testing.T) {
			fix.Reset()
			gre := in.With(func(p *pt.Packet) { p.Protocol, p.Payload = 47, payload(16) })
			fix.Run(fix.objects.FromPod, pt.In{Device: pt.PodB, Frame: gre.Bytes()})
			fix.Forget()
			e := unreachable(f, gre)
			fix.fromA(t, e, pt.Want{
				Verdict: pt.Redirect, Frame: delivered(e, pt.MACB, pt.HostMACB), Count: []string{"local-pod"}, Conns: conn(gre, "1/0"),
			})
		})
	})
}
