// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	pt "github.com/weft-mesh/weft/internal/datapath/packettest"
	"github.com/weft-mesh/weft/internal/datapath/pin"
	"github.com/weft-mesh/weft/internal/datapath/setting"
)

func withDSR(s *setting.Node) { s.ServiceDSR = true }

// withOption is the frame with the option that names a frontend.
func withOption(frame []byte, frontend netip.AddrPort) []byte {
	a := frontend.Addr()
	if a.Is4() {
		o := append(binary.BigEndian.AppendUint16([]byte{0x9e, 8}, frontend.Port()), a.AsSlice()...)
		out := slices.Insert(slices.Clone(frame), 34, o...)
		out[14] += 2
		binary.BigEndian.PutUint16(out[16:], uint16(len(out)-14))
		setChecksum(out)
		return out
	}
	o := append([]byte{frame[20], 2, 0x1e, 20}, a.AsSlice()...)
	o = append(binary.BigEndian.AppendUint16(o, frontend.Port()), 0, 0)
	out := slices.Insert(slices.Clone(frame), 54, o...)
	out[20] = 60
	binary.BigEndian.PutUint16(out[18:], uint16(len(out)-54))
	return out
}

// setChecksum makes that of an IPv4 header right.
func setChecksum(frame []byte) {
	frame[24], frame[25] = 0, 0
	sum := uint32(0)
	for i := 14; i < 14+int(frame[14]&15)*4; i += 2 {
		sum += uint32(binary.BigEndian.Uint16(frame[i:]))
	}
	for sum>>16 != 0 {
		sum = sum>>16 + sum&0xffff
	}
	binary.BigEndian.PutUint16(frame[24:], ^uint16(sum))
}

func dsrRow(p, to pt.Packet, flags string) []string {
	conn := to.Conn()
	return []string{p.Conn() + " is " + conn[strings.Index(conn, " ")+1:] + " " + flags}
}

// TestDSROut: the client's address stays, and the packet says where it was sent.
func TestDSROut(t *testing.T) {
	fix := newFixture(t, withDSR)
	each(t, func(t *testing.T, f pt.Family) {
		protocols(t, func(t *testing.T, protocol uint8) {
			for _, frontend := range []netip.AddrPort{nodePort(f), balancer(f)} {
				fix.Reset()
				fix.Serve(far(f, protocol, target(f.RemotePod)))
				p := outside(f, protocol, frontend)
				to := sentTo(p, target(f.RemotePod))
				w := pt.Want{Verdict: pt.Redirect, Frame: withOption(delivered(to, nil, nil), frontend), Count: []string{"service"}, Flows: dsrRow(p, to, "dsr")}
				counted(fix, t, p, w)
				if protocol == pt.UDP {
					w.Flows = dsrRow(p, to, "dsr,answered")
				}
				counted(fix, t, p, w)
				if protocol == pt.TCP {
					w.Flows = dsrRow(p, to, "dsr,established")
					w.Frame = delivered(flags(to, pt.ACK), nil, nil)
					counted(fix, t, flags(p, pt.ACK), w)
				} else {
					// what has no room for the option goes without
					long := p.With(func(p *pt.Packet) { p.Payload = payload(1500 - len(p.L3()) + len(p.Payload)) })
					w.Frame = delivered(sentTo(long, target(f.RemotePod)), nil, nil)
					counted(fix, t, long, w)
				}
				// a router about an answer, which this node has not seen
				seen := sentFrom(macs(to.Reply(), pt.MACNode, pt.MACOther), frontend)
				e := macs(icmpError(f, seen, f.Excluded), pt.MACOther, pt.MACNode)
				w.Frame = delivered(about(f, e.With(func(e *pt.Packet) { e.Dst = f.RemotePod }), seen, to.Reply()), nil, nil)
				counted(fix, t, e, w)
			}
		})
	})
}

// counted steps a packet that leaves longer than it came: it is counted so.
func counted(fix *fixture, t *testing.T, p pt.Packet, w pt.Want) {
	t.Helper()
	w.Leaving = true
	fix.step(t, fromUplink, p, w)
}

// TestDSRNot: where DSR cannot be, the node's own address is used.
func TestDSRNot(t *testing.T) {
	fix := newFixture(t, withDSR)
	each(t, func(t *testing.T, f pt.Family) {
		good := outside(f, pt.UDP, nodePort(f))
		room := 1500 - 28 - 8
		if f.V6 {
			room = 1500 - 48 - 24
		}
		for _, c := range []struct {
			name    string
			backend netip.Addr
			packet  pt.Packet
		}{
			{"no room", f.RemotePod, good.With(func(p *pt.Packet) { p.Payload = payload(room + 1) })},
			{"client is a pod", f.RemotePod, good.With(func(p *pt.Packet) { p.Src = f.RemotePod })},
			{"client is a node", f.RemotePod, good.With(func(p *pt.Packet) { p.Src = f.OtherNode })},
			{"backend is outside", f.Excluded, good},
			{"backend is a process of another node", f.OtherNode, good},
		} {
			t.Run(c.name, func(t *testing.T) {
				fix.Reset()
				fix.Serve(far(f, pt.UDP, target(c.backend)))
				to := snat(f, sentTo(c.packet, target(c.backend)))
				fix.step(t, fromUplink, c.packet, pt.Want{
					Verdict: pt.Redirect, Frame: delivered(to, nil, nil), Count: []string{"service"}, Flows: pt.FlowRows(c.packet, to, "snat", "snat"),
				})
			})
		}
		t.Run("exactly room", func(t *testing.T) {
			fix.Reset()
			fix.Serve(far(f, pt.UDP, target(f.RemotePod)))
			p := good.With(func(p *pt.Packet) { p.Payload = payload(room) })
			to := sentTo(p, target(f.RemotePod))
			counted(fix, t, p, pt.Want{Verdict: pt.Redirect, Frame: withOption(delivered(to, nil, nil), nodePort(f)), Count: []string{"service"}, Flows: dsrRow(p, to, "dsr")})
		})
	})
}

// backRow is the half that a backend's node has.
func backRow(p, to pt.Packet, flags string) []string {
	return dsrRow(to.Reply(), p.Reply(), flags)
}

// TestDSRIn: a pod of this node is the backend of another node's client, and
// answers as the frontend.
func TestDSRIn(t *testing.T) {
	fix := newFixture(t, withDSR)
	each(t, func(t *testing.T, f pt.Family) {
		protocols(t, func(t *testing.T, protocol uint8) {
			for _, frontend := range []netip.AddrPort{balancer(f), nodePort(f), netip.AddrPortFrom(f.OtherNode, 30080)} {
				fix.Reset()
				fix.Serve(far(f, protocol, target(f.A)))
				p := outside(f, protocol, frontend)
				to := sentTo(p, target(f.A))
				w := pt.Want{
					Verdict: pt.Redirect, Frame: delivered(to, pt.MACA, pt.HostMACA), Count: []string{"from-wire"}, Events: []string{to.Event("new ingress", world, idA)},
					Conns: []string{to.Conn() + " 1/0 service"}, Flows: backRow(p, to, "reply,dsr"), Leaving: true,
				}
				fix.frame(t, fromUplink, withOption(to.Bytes(), frontend), w)
				// again: nothing new
				w.Events, w.Conns = nil, []string{to.Conn() + " 2/0 service"}
				fix.frame(t, fromUplink, withOption(to.Bytes(), frontend), w)
				r := flags(macs(to.Reply(), pt.MACA, pt.HostMACA), pt.SYN|pt.ACK)
				w = pt.Want{
					Verdict: pt.Redirect, Frame: delivered(sentFrom(r, frontend), nil, nil), Count: []string{"world"},
					Conns: []string{to.Conn() + " 2/1 replied,service"}, Flows: backRow(p, to, "reply,dsr,answered"),
				}
				fix.step(t, fromA, r, w)
				if protocol == pt.TCP {
					w.Frame, w.Count = delivered(flags(to, pt.ACK), pt.MACA, pt.HostMACA), []string{"from-wire"}
					w.Conns, w.Flows = []string{to.Conn() + " 3/1 replied,established,service"}, backRow(p, to, "reply,dsr,answered,established")
					fix.step(t, fromUplink, flags(to, pt.ACK), w)
				}
				// an error of the pod about the request
				e := macs(icmpError(f, to, f.A), pt.MACA, pt.HostMACA)
				w.Frame, w.Count = delivered(about(f, e.With(func(e *pt.Packet) { e.Src = frontend.Addr() }), to, p), nil, nil), []string{"world"}
				fix.step(t, fromA, e, w)
			}
		})
	})
}

// TestDSRStrangers: an option leads no answers where no service is.
func TestDSRStrangers(t *testing.T) {
	fix := newFixture(t, withDSR)
	off := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family) {
		p := outside(f, pt.UDP, target(f.A))
		internal := near(f, pt.UDP, target(f.A))
		internal.Frontends, internal.Flags = []netip.AddrPort{clusterIP(f)}, 0
		plain := func(t *testing.T, fix *fixture, frame []byte, p pt.Packet) {
			t.Helper()
			fix.Reset()
			fix.Serve(far(f, pt.UDP, target(f.A)), internal)
			out := slices.Clone(frame)
			copy(out, delivered(p, pt.MACA, pt.HostMACA)[:12])
			if f.V6 {
				out[21]--
			} else {
				out[22]--
				setChecksum(out)
			}
			fix.frame(t, fromUplink, frame, pt.Want{
				Verdict: pt.Redirect, Frame: out, Count: []string{"from-wire"}, Events: []string{p.Event("new ingress", world, idA)}, Conns: []string{p.Conn() + " 1/0"},
			})
		}
		for name, frontend := range map[string]netip.AddrPort{
			"no frontend":               netip.AddrPortFrom(f.Excluded, 80),
			"another port":              netip.AddrPortFrom(balancer(f).Addr(), 81),
			"an address of the cluster": clusterIP(f),
			"a node port of no node":    netip.AddrPortFrom(f.Excluded, 30080),
			"a pod":                     netip.AddrPortFrom(f.B, 30080),
		} {
			t.Run(name, func(t *testing.T) { plain(t, fix, withOption(p.Bytes(), frontend), p) })
		}
		t.Run("DSR is off", func(t *testing.T) { plain(t, off, withOption(p.Bytes(), balancer(f)), p) })
		t.Run("another option", func(t *testing.T) {
			frame := withOption(p.Bytes(), balancer(f))
			if f.V6 {
				frame[56] = 0x3e
			} else {
				frame[34] = 0x9a
				setChecksum(frame)
			}
			plain(t, fix, frame, p)
		})
		t.Run("forged source", func(t *testing.T) {
			fix.Reset()
			p := p.With(func(p *pt.Packet) { p.Src = f.B })
			fix.frame(t, fromUplink, withOption(p.Bytes(), balancer(f)), dropped("spoofed-address", p.Event("drop(spoofed-address) ingress", idB, idA)))
		})
		t.Run("policy", func(t *testing.T) {
			fix.Reset()
			fix.subject(t, 1<<31|1)
			w := dropped("policy", p.Event("drop(policy) ingress", world, idA))
			w.Frame, w.Leaving = p.Bytes(), true
			fix.frame(t, fromUplink, withOption(p.Bytes(), balancer(f)), w)
			fix.subject(t, 0)
		})
	})
}

// TestDSRTaken: no other frontend gets the answers of a connection that lives.
func TestDSRTaken(t *testing.T) {
	fix := newFixture(t, withDSR)
	each(t, func(t *testing.T, f pt.Family) {
		fix.Reset()
		fix.Serve(far(f, pt.TCP, target(f.A)))
		p := outside(f, pt.TCP, balancer(f))
		to := sentTo(p, target(f.A))
		send := func(frontend netip.AddrPort) {
			fix.Run(fix.programs["from_uplink"], pt.In{Device: pt.Uplink, Frame: withOption(to.Bytes(), frontend)})
			fix.Forget()
		}
		expect := func(frontend netip.AddrPort) {
			t.Helper()
			want := backRow(sentTo(p, frontend), to, "reply,dsr")
			if got := fix.Flows(); !slices.Equal(got, want) {
				t.Errorf("flows %v, want %v", got, want)
			}
		}
		send(balancer(f))
		send(nodePort(f))
		expect(balancer(f))
		fix.EditFlows(func(_ *pin.KernelFlowKey, v *pin.KernelServiceFlow, now uint32) {
			v.LastSeen = now - uint32(time.Hour/time.Second)
		})
		send(nodePort(f))
		expect(nodePort(f))
	})
}
