// SPDX-License-Identifier: Apache-2.0

package pod

import (
	"testing"

	pt "github.com/weft-mesh/weft/internal/datapath/packettest"
)

// fromNode is the good packet of a process of the node to pod A.
func fromNode(f pt.Family) pt.Packet {
	return syn(f, f.A).With(func(p *pt.Packet) { p.Src, p.EthSrc, p.EthDst = f.Node, pt.HostMACA, pt.MACA })
}

func TestToPod(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family) {
		good := fromNode(f)
		pass := func(p pt.Packet) pt.Want {
			return pt.Want{
				Verdict: pt.Pass, Count: []string{"from-node"},
				Events: []string{p.Event("new ingress", pt.IdentityNode, idA)}, Conns: conn(p, "1/0"),
			}
		}
		_, later, _ := fragments(good.With(func(p *pt.Packet) { p.Protocol, p.Flags = pt.UDP, 0 }))
		for _, c := range []struct {
			name   string
			packet pt.Packet
			want   func(pt.Packet) pt.Want
		}{
			{"TCP", good, pass},
			{"UDP", good.With(func(p *pt.Packet) { p.Protocol, p.Flags = pt.UDP, 0 }), pass},
			{"TTL of 1", good.With(func(p *pt.Packet) { p.TTL = 1 }), pass},
			{"later fragment without its first", later, func(pt.Packet) pt.Want { return pt.Want{Verdict: pt.Pass, Count: []string{"from-node"}} }},
			{"multicast", good.With(func(p *pt.Packet) { p.Dst = f.Multicast }), func(pt.Packet) pt.Want {
				return pt.Want{Verdict: pt.Pass, Count: []string{"multicast-ignored"}}
			}},
			{"another pod's address", good.With(func(p *pt.Packet) { p.Dst = f.B }), func(p pt.Packet) pt.Want {
				return dropped("unknown-pod", p.Event("drop(unknown-pod) ingress", pt.IdentityNode, idB))
			}},
			{"nobody's address", good.With(func(p *pt.Packet) { p.Dst = f.Unused }), func(p pt.Packet) pt.Want {
				return dropped("unknown-pod", p.Event("drop(unknown-pod) ingress", pt.IdentityNode, world))
			}},
			{"ICMP error about nothing", unreachable(f, datagram(f, f.Node)), func(p pt.Packet) pt.Want {
				return dropped("icmp-unmatched", p.Event("drop(icmp-unmatched) ingress", pt.IdentityNode, idA))
			}},
		} {
			t.Run(c.name, func(t *testing.T) {
				fix.Reset()
				fix.toA(t, c.packet, c.want(c.packet))
			})
		}
		t.Run("answer and ICMP error to the pod's own connection", func(t *testing.T) {
			fix.Reset()
			out := datagram(f, f.Node)
			fix.Run(fix.objects.FromPod, pt.In{Device: pt.PodA, Frame: out.Bytes()})
			fix.Forget()
			fix.toA(t, out.Reply(), pt.Want{Verdict: pt.Pass, Count: []string{"from-node"}, Conns: conn(out, "1/1 replied")})
			fix.toA(t, unreachable(f, out), pt.Want{Verdict: pt.Pass, Count: []string{"from-node"}, Conns: conn(out, "1/1 replied")})
		})
		t.Run("truncated", func(t *testing.T) {
			fix.Reset()
			frame := setLength(good.Bytes()[:len(good.Bytes())-9], f.V6)
			fix.Step(t, fix.objects.ToPod, pt.In{Device: pt.PodA, Frame: frame}, dropped("malformed",
				good.With(func(p *pt.Packet) { p.Sport, p.Dport = 0, 0 }).Event("drop(malformed) ingress", pt.IdentityNode, idA)))
		})
	})
}
