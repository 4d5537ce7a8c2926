// SPDX-License-Identifier: Apache-2.0

package pod

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weft-mesh/weft/internal/addr"
	"github.com/weft-mesh/weft/internal/datapath/conntrack"
	pt "github.com/weft-mesh/weft/internal/datapath/packettest"
	"github.com/weft-mesh/weft/internal/datapath/pin"
	"github.com/weft-mesh/weft/internal/datapath/setting"
)

// fromB sends the answer of pod B to pod A's packet p.
func fromB(p pt.Packet, flags uint8) pt.Packet {
	r := p.Reply()
	r.EthSrc, r.EthDst, r.Flags = pt.MACB, pt.HostMACB, flags
	return r
}

// say is one packet of a conversation between pods A and B, and what it does to
// the connection.
type say struct {
	reply bool
	flags uint8
	event string
	conn  string
}

func (fix fixture) converse(t *testing.T, f pt.Family, says []say) {
	t.Helper()
	open := syn(f, f.B)
	for i, s := range says {
		p, device, src, dst := open.With(func(p *pt.Packet) { p.Flags = s.flags }), pt.PodA, uint64(idA), uint64(idB)
		mac, host := pt.MACB, pt.HostMACB
		if s.reply {
			p, device, src, dst, mac, host = fromB(open, s.flags), pt.PodB, idB, idA, pt.MACA, pt.HostMACA
		}
		w := pt.Want{Verdict: pt.Redirect, Frame: delivered(p, mac, host), Count: []string{"local-pod"}, Conns: conn(open, s.conn)}
		if s.event != "" {
			w.Events = []string{p.Event(s.event+" egress", src, dst)}
		}
		out := fix.Step(t, fix.objects.FromPod, pt.In{Device: device, Frame: p.Bytes()}, w)
		for _, e := range out.Events {
			if s.event != "new" && (e.Packets != uint64(i+1) || e.Bytes != uint64((i+1)*len(p.Bytes()))) {
				t.Errorf("%s event counts %d packets, %d bytes: want %d, %d", s.event, e.Packets, e.Bytes, i+1, (i+1)*len(p.Bytes()))
			}
			if e.TcpFlags != s.flags {
				t.Errorf("event has flags %#x, want %#x", e.TcpFlags, s.flags)
			}
		}
	}
}

func TestTCPStates(t *testing.T) {
	fix := newFixture(t, nil)
	const synAck = pt.SYN | pt.ACK
	for name, says := range map[string][]say{
		"open and close": {
			{false, pt.SYN, "new", "1/0"},
			{true, synAck, "", "1/1 replied"},
			{false, pt.ACK, "", "2/1 replied,established"},
			{false, pt.FIN | pt.ACK, "", "3/1 replied,established,fin"},
			{true, pt.ACK, "", "3/2 replied,established,fin"},
			{true, pt.FIN | pt.ACK, "close", "3/3 replied,established,fin,fin-reply,closed"},
			{false, pt.ACK, "", "4/3 replied,established,fin,fin-reply,closed"},
		},
		"closed by the responder first": {
			{false, pt.SYN, "new", "1/0"},
			{true, synAck, "", "1/1 replied"},
			{true, pt.FIN | pt.ACK, "", "1/2 replied,fin-reply"},
			{false, pt.FIN | pt.ACK, "close", "2/2 replied,established,fin,fin-reply,closed"},
			{false, pt.FIN | pt.ACK, "", "3/2 replied,established,fin,fin-reply,closed"},
		},
		"refused": {
			{false, pt.SYN, "new", "1/0"},
			{true, pt.RST | pt.ACK, "close", "1/1 replied,rst,closed"},
			{true, pt.RST | pt.ACK, "", "1/2 replied,rst,closed"},
		},
		"seen in mid-stream": {
			{false, pt.ACK, "new", "1/0"},
			{true, pt.ACK, "", "1/1 replied"},
			{false, pt.ACK, "", "2/1 replied,established"},
		},
		"reset that the receiver does not accept": {
			{false, pt.SYN, "new", "1/0"},
			{true, synAck, "", "1/1 replied"},
			{false, pt.ACK, "", "2/1 replied,established"},
			{true, pt.RST, "close", "2/2 replied,established,rst,closed"},
			{false, pt.ACK, "", "3/2 replied,established,rst,closed,alive"},
			{false, pt.ACK, "", "4/2 replied,established,rst,closed,alive"},
			{true, pt.ACK, "", "4/3 replied,established"},
			{true, pt.RST, "close", "4/4 replied,established,rst,closed"},
		},
		"ACK before the answer": {
			{false, pt.SYN, "new", "1/0"},
			{false, pt.ACK, "", "2/0"},
			{true, synAck, "", "2/1 replied"},
		},
		"SYN again": {
			{false, pt.SYN, "new", "1/0"},
			{false, pt.SYN, "", "2/0"},
			{true, synAck, "", "2/1 replied"},
			{true, synAck, "", "2/2 replied"},
			{false, pt.ACK, "", "3/2 replied,established"},
			{false, pt.SYN, "", "4/2 replied,established"}, // an old duplicate
		},
	} {
		t.Run(name, func(t *testing.T) {
			each(t, func(t *testing.T, f pt.Family) {
				fix.Reset()
				fix.converse(t, f, says)
			})
		})
	}
}

// TestPortReuse: a SYN makes a new connection of one that is closing.
func TestPortReuse(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family) {
		for _, closing := range []uint8{pt.RST, pt.FIN | pt.ACK} {
			fix.Reset()
			p := syn(f, f.B)
			for _, flags := range []uint8{pt.SYN, closing} {
				fix.Run(fix.objects.FromPod, pt.In{Device: pt.PodA, Frame: p.With(func(p *pt.Packet) { p.Flags = flags }).Bytes()})
			}
			fix.Forget()
			fix.fromA(t, p, pt.Want{
				Verdict: pt.Redirect, Frame: delivered(p, pt.MACB, pt.HostMACB), Count: []string{"local-pod"},
				Events: []string{p.Event("new egress", idA, idB)}, Conns: conn(p, "1/0"),
			})
		}
	})
}

// TestSYNFromTheOtherEnd: something that only looked like a connection does not
// decide who began the real one.
func TestSYNFromTheOtherEnd(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family) {
		stray := syn(f, f.B).With(func(p *pt.Packet) { p.Flags = pt.ACK })
		for _, answered := range []bool{false, true} {
			fix.Reset()
			fix.Run(fix.objects.FromPod, pt.In{Device: pt.PodA, Frame: stray.Bytes()})
			if answered {
				fix.Run(fix.objects.FromPod, pt.In{Device: pt.PodB, Frame: fromB(stray, pt.ACK).Bytes()})
			}
			fix.Forget()
			r := fromB(stray, pt.SYN)
			w := pt.Want{
				Verdict: pt.Redirect, Frame: delivered(r, pt.MACA, pt.HostMACA), Count: []string{"local-pod"},
				Events: []string{r.Event("new egress", idB, idA)}, Conns: conn(r, "1/0"),
			}
			if answered {
				w.Events, w.Conns = nil, conn(stray, "1/2 replied")
			}
			fix.Step(t, fix.objects.FromPod, pt.In{Device: pt.PodB, Frame: r.Bytes()}, w)
		}
	})
}

func nowSeconds(t *testing.T) uint32 {
	t.Helper()
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		t.Fatal(err)
	}
	return uint32(ts.Sec)
}

func kernelAddr(a netip.Addr) pin.KernelAddr { return pin.KernelAddr{B: addr.To16(a)} }

// entry returns the connection of p, looked up by the key that Go makes.
func (fix fixture) entry(t *testing.T, p pt.Packet) (pin.KernelCtKey, pin.KernelCtEntry) {
	t.Helper()
	sport, dport := p.Sport, p.Dport
	if p.Protocol == pt.ICMP || p.Protocol == pt.ICMPv6 {
		sport, dport = uint16(p.Rest>>16), uint16(p.Rest>>16)
	}
	k := conntrack.Key(kernelAddr(p.Src), kernelAddr(p.Dst), pt.HostPort(sport), pt.HostPort(dport), p.Protocol)
	var e pin.KernelCtEntry
	if err := fix.Maps.Map("weft_conntrack").Lookup(&k, &e); err != nil {
		t.Fatalf("connection %s: %v", p.Conn(), err)
	}
	return k, e
}

// age changes the times of the connection of p.
func (fix fixture) age(t *testing.T, p pt.Packet, change func(*pin.KernelCtEntry)) {
	t.Helper()
	k, e := fix.entry(t, p)
	change(&e)
	if err := fix.Maps.Map("weft_conntrack").Put(&k, &e); err != nil {
		t.Fatal(err)
	}
}

// TestExpiry: a packet meets a connection just before and just after the end of
// its lifetime.
func TestExpiry(t *testing.T) {
	lifetimes := setting.Lifetimes{
		TCPSyn: 100 * time.Second, TCPEstablished: 200 * time.Second, TCPClosing: 300 * time.Second,
		UDP: 400 * time.Second, UDPReplied: 500 * time.Second, Other: 600 * time.Second,
	}
	fix := newFixture(t, func(s *setting.Node) { s.Lifetimes = lifetimes })
	each(t, func(t *testing.T, f pt.Family) {
		tcp, udp, icmp := syn(f, f.B).With(func(p *pt.Packet) { p.Flags = pt.PSH | pt.ACK }), datagram(f, f.B), echo(f, f.B)
		flag := func(fs ...pin.KernelCtFlag) (n uint32) {
			for _, f := range fs {
				n |= uint32(f)
			}
			return n
		}
		for _, c := range []struct {
			name   string
			packet pt.Packet
			flags  uint32
			want   time.Duration
		}{
			{"TCP handshake", tcp, flag(pin.KernelCtFlagCT_REPLIED), lifetimes.TCPSyn},
			{"TCP established", tcp, flag(pin.KernelCtFlagCT_REPLIED, pin.KernelCtFlagCT_ESTABLISHED), lifetimes.TCPEstablished},
			{"TCP half closed", tcp, flag(pin.KernelCtFlagCT_ESTABLISHED, pin.KernelCtFlagCT_FIN_ORIG), lifetimes.TCPEstablished},
			{"TCP closed", tcp, flag(pin.KernelCtFlagCT_ESTABLISHED, pin.KernelCtFlagCT_FIN_ORIG, pin.KernelCtFlagCT_FIN_REPLY), lifetimes.TCPClosing},
			{"TCP reset", tcp, flag(pin.KernelCtFlagCT_RST), lifetimes.TCPClosing},
			{"UDP", udp, 0, lifetimes.UDP},
			{"UDP replied", udp, flag(pin.KernelCtFlagCT_REPLIED), lifetimes.UDPReplied},
			{"ICMP", icmp, 0, lifetimes.Other},
		} {
			t.Run(c.name, func(t *testing.T) {
				for _, expired := range []bool{false, true} {
					fix.Reset()
					fix.Run(fix.objects.FromPod, pt.In{Device: pt.PodA, Frame: c.packet.Bytes()})
					ago := uint32(c.want/time.Second) - 5
					if expired {
						ago += 10
					}
					_, e := fix.entry(t, c.packet)
					fromA := e.Flags & uint32(pin.KernelCtFlagCT_FROM_A)
					fix.age(t, c.packet, func(e *pin.KernelCtEntry) {
						e.LastSeen = nowSeconds(t) - ago
						e.Flags = c.flags | fromA | uint32(pin.KernelCtFlagCT_CLOSED)
					})
					out := fix.Run(fix.objects.FromPod, pt.In{Device: pt.PodA, Frame: c.packet.Bytes()})
					_, e = fix.entry(t, c.packet)
					if now := nowSeconds(t); now-e.LastSeen > 2 {
						t.Errorf("expired %t: last seen %d s ago", expired, now-e.LastSeen)
					}
					if isNew := e.Packets[0] == 1 && len(out.Events) == 1; isNew != expired {
						t.Errorf("%d s after the last packet, lifetime %v: %d packets, %d events", ago, c.want, e.Packets[0], len(out.Events))
					}
				}
			})
		}
		t.Run("the responder begins anew", func(t *testing.T) {
			fix.Reset()
			fix.fromA(t, udp, pt.Want{
				Verdict: pt.Redirect, Frame: delivered(udp, pt.MACB, pt.HostMACB), Count: []string{"local-pod"},
				Events: []string{udp.Event("new egress", idA, idB)}, Conns: conn(udp, "1/0"),
			})
			fix.age(t, udp, func(e *pin.KernelCtEntry) { e.LastSeen = nowSeconds(t) - 405 })
			r := fromB(udp, 0)
			fix.Step(t, fix.objects.FromPod, pt.In{Device: pt.PodB, Frame: r.Bytes()}, pt.Want{
				Verdict: pt.Redirect, Frame: delivered(r, pt.MACA, pt.HostMACA), Count: []string{"local-pod"},
				Events: []string{r.Event("new egress", idB, idA)}, Conns: conn(r, "1/0"),
			})
		})
	})
}

func TestUpdateEvent(t *testing.T) {
	fix := newFixture(t, func(s *setting.Node) { s.ReportInterval = 10 * time.Second })
	off := fixture{fix.Node, load(t, fix.Node, func(s *setting.Node) { s.ReportInterval = 0 })}
	each(t, func(t *testing.T, f pt.Family) {
		p := datagram(f, f.B)
		way := pt.Want{Verdict: pt.Redirect, Frame: delivered(p, pt.MACB, pt.HostMACB), Count: []string{"local-pod"}}
		w := way
		fix.Reset()
		w.Events, w.Conns = []string{p.Event("new egress", idA, idB)}, conn(p, "1/0")
		fix.fromA(t, p, w)
		w.Events, w.Conns = nil, conn(p, "2/0")
		fix.fromA(t, p, w)
		longAgo := func(e *pin.KernelCtEntry) { e.LastReport -= 10 }
		fix.age(t, p, longAgo)
		w.Events, w.Conns = nil, conn(p, "3/0")
		off.fromA(t, p, w)
		w.Events, w.Conns = []string{p.Event("update egress", idA, idB)}, conn(p, "4/0")
		out := fix.fromA(t, p, w)
		if n := uint64(len(p.Bytes())); len(out.Events) == 1 && (out.Events[0].Packets != 4 || out.Events[0].Bytes != 4*n) {
			t.Errorf("update of %d packets, %d bytes: want 4, %d", out.Events[0].Packets, out.Events[0].Bytes, 4*n)
		}
		w.Events, w.Conns = nil, conn(p, "5/0")
		fix.fromA(t, p, w)
		// an answer reports in its own direction, with both together
		fix.age(t, p, longAgo)
		r := fromB(p, 0)
		fix.Step(t, fix.objects.FromPod, pt.In{Device: pt.PodB, Frame: r.Bytes()}, pt.Want{
			Verdict: pt.Redirect, Frame: delivered(r, pt.MACA, pt.HostMACA), Count: []string{"local-pod"},
			Events: []string{r.Event("update egress", idB, idA)}, Conns: conn(p, "5/1 replied"),
		})
	})
}

// TestConntrackFull: what is known goes on, what is new is dropped by name.
func TestConntrackFull(t *testing.T) {
	const room = 8
	sizes := pt.Sizes()
	sizes.Conntrack = room
	fix := newSizedFixture(t, sizes, nil)
	each(t, func(t *testing.T, f pt.Family) {
		fix.Reset()
		p := datagram(f, f.B)
		for i := range room {
			q := p.With(func(p *pt.Packet) { p.Sport += uint16(i) })
			if out := fix.Run(fix.objects.FromPod, pt.In{Device: pt.PodA, Frame: q.Bytes()}); out.Verdict != pt.Redirect {
				t.Fatalf("connection %d of %d: verdict %d", i, room, out.Verdict)
			}
		}
		fix.Forget()
		full := fix.Conns()
		late := p.With(func(p *pt.Packet) { p.Sport += room })
		w := dropped("conntrack-full", late.Event("drop(conntrack-full) egress", idA, idB))
		w.Conns = full
		fix.fromA(t, late, w)
		if out := fix.Run(fix.objects.FromPod, pt.In{Device: pt.PodA, Frame: p.Bytes()}); out.Verdict != pt.Redirect || len(out.Events) != 0 {
			t.Errorf("a connection that is known: verdict %d, %d events", out.Verdict, len(out.Events))
		}
	})
}

// TestQuota: one address may have so many connections; another's are its own.
func TestQuota(t *testing.T) {
	const quota = 3
	fix := newFixture(t, func(s *setting.Node) { s.MaxPerPod = quota })
	each(t, func(t *testing.T, f pt.Family) {
		fix.Reset()
		p := datagram(f, f.B)
		for i := range quota {
			q := p.With(func(p *pt.Packet) { p.Sport += uint16(i) })
			if out := fix.Run(fix.objects.FromPod, pt.In{Device: pt.PodA, Frame: q.Bytes()}); out.Verdict != pt.Redirect {
				t.Fatalf("connection %d of %d: verdict %d", i, quota, out.Verdict)
			}
		}
		fix.Forget()
		conns := fix.Conns()
		late := p.With(func(p *pt.Packet) { p.Sport += quota })
		w := dropped("conntrack-quota", late.Event("drop(conntrack-quota) egress", idA, idB))
		w.Conns = conns
		fix.fromA(t, late, w)
		other := fromB(late, 0)
		if out := fix.Run(fix.objects.FromPod, pt.In{Device: pt.PodB, Frame: other.Bytes()}); out.Verdict != pt.Redirect {
			t.Errorf("the other pod: verdict %d", out.Verdict)
		}
	})
}

// TestKeys: Go finds every connection under the key that the kernel made, from
// either end.
func TestKeys(t *testing.T) {
	fix := newFixture(t, nil)
	rnd := rand.New(rand.NewPCG(3, 4))
	each(t, func(t *testing.T, f pt.Family) {
		for range 200 {
			fix.Reset()
			p := datagram(f, randomAddr(rnd, f))
			p.Sport, p.Dport = uint16(rnd.Uint32()), uint16(rnd.Uint32())
			switch rnd.IntN(3) {
			case 0:
				p.Protocol = pt.TCP
			case 1:
				p = echo(f, p.Dst)
				p.Rest = rnd.Uint32()
			}
			fix.Run(fix.objects.FromPod, pt.In{Device: pt.PodA, Frame: p.Bytes()})
			fix.entry(t, p)
			fix.entry(t, p.Reply())
		}
		t.Run("same address at both ends", func(t *testing.T) {
			for _, ports := range [][2]uint16{{1, 256}, {256, 1}, {7, 7}} {
				fix.Reset()
				p := datagram(f, f.A)
				p.Sport, p.Dport = ports[0], ports[1]
				fix.Run(fix.objects.FromPod, pt.In{Device: pt.PodA, Frame: p.Bytes()})
				fix.entry(t, p)
				fix.entry(t, p.Reply())
			}
		})
	})
}

// randomAddr is an address outside of the cluster.
func randomAddr(rnd *rand.Rand, f pt.Family) netip.Addr {
	if !f.V6 {
		return netip.AddrFrom4([4]byte{byte(1 + rnd.IntN(9)), byte(rnd.Uint32()), byte(rnd.Uint32()), byte(rnd.Uint32())})
	}
	b := f.World.As16()
	for i := 2; i < 16; i++ {
		b[i] = byte(rnd.Uint32())
	}
	return netip.AddrFrom16(b)
}

func TestSettingsReachTheProgram(t *testing.T) {
	n := pt.New(t, pt.Sizes())
	f := pt.Families[0]
	for first := uint16(20000); first < 20003; first++ {
		fix := fixture{n, load(t, n, func(s *setting.Node) { s.FirstPort, s.LastPort = first, first })}
		n.Reset()
		p := datagram(f, f.World)
		fix.fromA(t, p, pt.Want{
			Verdict: pt.Redirect, Frame: toWorld(f, p, first), Count: []string{"world"}, Events: []string{p.Event("new egress", idA, world)},
			Conns: conn(p, fmt.Sprintf("1/0 nat %d", first)), NAT: []string{fmt.Sprintf("udp 198.51.100.7:53 %d>10.244.1.5:40000", first)},
		})
	}
}

// TestQuotaIsGivenBack: a pod may have one connection at a time, and opens one
// after the other: a closed one stays in the table and counts no more, whichever
// end began it or closed it.
func TestQuotaIsGivenBack(t *testing.T) {
	fix := newFixture(t, func(s *setting.Node) { s.MaxPerPod = 1 })
	each(t, func(t *testing.T, f pt.Family) {
		fix.Reset()
		for i := range uint16(4) {
			out := syn(f, f.Node).With(func(p *pt.Packet) { p.Sport += i })
			in := out.Reply().With(func(p *pt.Packet) { p.Flags = pt.RST | pt.ACK })
			if i%2 == 1 { // the node's process begins
				in.Flags, out.Flags = pt.SYN, pt.RST|pt.ACK
			}
			steps := []func() pt.Out{
				func() pt.Out { return fix.Run(fix.objects.FromPod, pt.In{Device: pt.PodA, Frame: out.Bytes()}) },
				func() pt.Out { return fix.Run(fix.objects.ToPod, pt.In{Device: pt.PodA, Frame: in.Bytes()}) },
			}
			if i%2 == 1 {
				slices.Reverse(steps)
			}
			for n, step := range steps {
				if got := step(); got.Verdict != pt.Pass {
					t.Errorf("connection %d, packet %d: verdict %d", i, n, got.Verdict)
				}
			}
		}
	})
}
