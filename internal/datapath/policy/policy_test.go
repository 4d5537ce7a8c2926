// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/weft-mesh/weft/internal/addr"
	"github.com/weft-mesh/weft/internal/datapath/ipcache"
	pt "github.com/weft-mesh/weft/internal/datapath/packettest"
	"github.com/weft-mesh/weft/internal/datapath/setting"
	"github.com/weft-mesh/weft/internal/identity"
	"github.com/weft-mesh/weft/internal/policy"
)

var none = policy.Outcome{Rank: policy.RankNone}

// Rules have numbers that tell which entry was hit.
func allow(rank, rule uint32) policy.Outcome {
	return policy.Outcome{Rank: rank, Rule: rule, Verdict: policy.Allow}
}
func deny(rank, rule uint32) policy.Outcome {
	return policy.Outcome{Rank: rank, Rule: rule, Verdict: policy.Deny}
}
func pass(rank, rule uint32) policy.Outcome {
	return policy.Outcome{Rank: rank, Rule: rule, Verdict: policy.Pass}
}

// entry is for both directions: see entries.
func entry(peer uint64, admin, lower policy.Outcome) policy.Entry {
	return policy.Entry{Peer: peer, Admin: admin, Lower: lower}
}

// on narrows an entry to ports of a protocol, whose leading bits are given.
func on(e policy.Entry, protocol uint8, port uint16, bits uint8) policy.Entry {
	e.Protocol, e.Port, e.Bits = protocol, port, 8+bits
	return e
}

// entries are what a subject has in both directions.
func entries(es ...policy.Entry) []policy.Entry {
	var out []policy.Entry
	for _, e := range es {
		e.Direction = policy.Egress
		out = append(out, e)
		e.Direction = policy.Ingress
		out = append(out, e)
	}
	return out
}

const (
	class      = policy.FirstClass
	innerClass = policy.FirstClass + 1
)

// TestVerdicts: pod A has the entries; it connects to a peer (egress) and the
// peer to it (ingress), with the same answer.
func TestVerdicts(t *testing.T) {
	fix := newFixture(t, nil)
	isolated := entry(policy.AnyPeer, none, deny(1<<30, 0))
	open := entry(policy.AnyPeer, none, allow(0xfffffffe, 0))
	b, remote := uint64(pt.IdentityB), uint64(pt.IdentityRemotePods)
	type packet func(src, dst netip.Addr) pt.Packet
	at := func(f func(src, dst netip.Addr, port uint16) pt.Packet, port uint16) packet {
		return func(src, dst netip.Addr) pt.Packet { return f(src, dst, port) }
	}
	sctp := func(src, dst netip.Addr) pt.Packet {
		p := tcp(src, dst, 80)
		p.Protocol, p.Flags = pt.SCTP, 0
		return p
	}
	for _, c := range []struct {
		name    string
		peer    func(pt.Family) netip.Addr
		entries []policy.Entry
		packet  packet
		want    outcome
	}{
		{"nobody forbids", podB, entries(open), at(tcp, 80), passed},
		{"nobody allows", podB, entries(isolated), at(tcp, 80), denied(0)},
		{"no entry at all", podB, nil, at(tcp, 80), denied(0)},
		{"a pod of this node", podB, entries(isolated, entry(b, none, allow(1, 20))), at(tcp, 80), passed},
		{"not this pod", podB, entries(isolated, entry(remote, none, allow(1, 20))), at(tcp, 80), denied(0)},
		{"a pod of another node", remotePod, entries(isolated, entry(remote, none, allow(1, 20))), at(tcp, 80), passed},
		{"the outside", world, entries(isolated, entry(identity.World, none, allow(1, 20))), at(tcp, 80), passed},
		{"another node", otherNode, entries(isolated, entry(identity.RemoteNode, none, allow(1, 20))), at(tcp, 80), passed},
		{"the own node, whatever the rules", ownNode, entries(entry(policy.AnyPeer, deny(1, 20), deny(1, 21))), at(tcp, 80), passed},
		{"the own node, without an entry", ownNode, nil, at(tcp, 80), passed},

		{"a port", podB, entries(isolated, on(entry(b, none, allow(1, 20)), pt.TCP, 80, 16)), at(tcp, 80), passed},
		{"the port behind", podB, entries(isolated, on(entry(b, none, allow(1, 20)), pt.TCP, 80, 16)), at(tcp, 81), denied(0)},
		{"another protocol", podB, entries(isolated, on(entry(b, none, allow(1, 20)), pt.TCP, 80, 16)), at(udp, 80), denied(0)},
		{"first of a range", podB, entries(isolated, on(entry(b, none, allow(1, 20)), pt.TCP, 8000, 12)), at(tcp, 8000), passed},
		{"last of a range", podB, entries(isolated, on(entry(b, none, allow(1, 20)), pt.TCP, 8000, 11)), at(tcp, 8031), passed},
		{"behind a range", podB, entries(isolated, on(entry(b, none, allow(1, 20)), pt.TCP, 8000, 11)), at(tcp, 8032), denied(0)},
		{"before a range", podB, entries(isolated, on(entry(b, none, allow(1, 20)), pt.TCP, 8000, 11)), at(tcp, 7999), denied(0)},
		{"the highest port", podB, entries(isolated, on(entry(b, none, allow(1, 20)), pt.TCP, 65535, 16)), at(tcp, 65535), passed},
		{"any port of a protocol", podB, entries(isolated, on(entry(b, none, allow(1, 20)), pt.UDP, 0, 0)), at(udp, 4711), passed},
		{"any port, another protocol", podB, entries(isolated, on(entry(b, none, allow(1, 20)), pt.UDP, 0, 0)), at(tcp, 4711), denied(0)},
		{"the longest prefix", podB, entries(isolated, on(entry(b, none, allow(1, 20)), pt.TCP, 0, 0), on(entry(b, none, deny(2, 21)), pt.TCP, 80, 16)), at(tcp, 80), denied(21)},
		{"SCTP", podB, entries(isolated, on(entry(b, none, allow(1, 20)), pt.SCTP, 80, 16)), sctp, passed},
		{"SCTP is not TCP", podB, entries(isolated, on(entry(b, none, allow(1, 20)), pt.TCP, 80, 16)), sctp, denied(0)},

		{"ICMP by a rule without ports", podB, entries(isolated, entry(b, none, allow(1, 20))), ping, passed},
		{"ICMP by a rule with ports", podB, entries(isolated, on(entry(b, none, allow(1, 20)), pt.TCP, 0, 0), on(entry(b, none, allow(1, 20)), pt.UDP, 0, 0)), ping, denied(0)},
		{"the identifier of an echo is no port", podB, entries(isolated, on(entry(b, none, allow(1, 20)), pt.ICMP, 80, 16), on(entry(b, none, allow(1, 20)), pt.ICMPv6, 80, 16)), ping, denied(0)},

		{"admin denies what a NetworkPolicy allows", podB, entries(isolated, entry(b, deny(1, 30), allow(1, 20))), at(tcp, 80), denied(30)},
		{"admin allows what no NetworkPolicy does", podB, entries(isolated, entry(b, allow(1, 30), none)), at(tcp, 80), passed},
		{"admin of any peer against a NetworkPolicy of the pod", podB, entries(entry(policy.AnyPeer, deny(1, 30), deny(1<<30, 0)), entry(b, none, allow(1, 20))), at(tcp, 80), denied(30)},
		{"the lesser rank: the pod's", podB, entries(entry(policy.AnyPeer, deny(2, 30), deny(1<<30, 0)), entry(b, allow(1, 31), none)), at(tcp, 80), passed},
		{"the lesser rank: any peer's", podB, entries(entry(policy.AnyPeer, deny(1, 30), deny(1<<30, 0)), entry(b, allow(2, 31), none)), at(tcp, 80), denied(30)},
		{"pass, and a NetworkPolicy allows", podB, entries(entry(policy.AnyPeer, deny(2, 30), deny(1<<30, 0)), entry(b, pass(1, 31), allow(1, 20))), at(tcp, 80), passed},
		{"pass, and nobody allows", podB, entries(entry(policy.AnyPeer, allow(2, 30), deny(1<<30, 0)), entry(b, pass(1, 31), none)), at(tcp, 80), denied(0)},
		{"pass that comes too late", podB, entries(entry(policy.AnyPeer, deny(1, 30), deny(1<<30, 0)), entry(b, pass(2, 31), allow(1, 20))), at(tcp, 80), denied(30)},
		{"baseline denies", podB, entries(open, entry(b, none, deny(1<<31, 40))), at(tcp, 80), denied(40)},
		{"isolation comes before baseline", podB, entries(isolated, entry(b, none, allow(1<<31, 40))), at(tcp, 80), denied(0)},

		{"a prefix", remotePod, entries(isolated, entry(class, none, allow(1, 20))), at(tcp, 80), passed},
		{"a prefix within", inner, entries(isolated, entry(class, none, allow(1, 20))), at(tcp, 80), denied(0)},
		{"a prefix within, with an entry", inner, entries(isolated, entry(innerClass, none, allow(1, 20))), at(tcp, 80), passed},
		{"a prefix, and the pod", remotePod, entries(isolated, entry(class, deny(1, 30), none), entry(remote, none, allow(1, 20))), at(tcp, 80), denied(30)},
		{"pass by identity, deny by prefix", remotePod, entries(isolated, entry(class, deny(2, 30), none), entry(remote, pass(1, 31), allow(1, 20))), at(tcp, 80), passed},
		{"a prefix that a pod of this node is in", podB, entries(isolated, entry(class, none, allow(1, 20))), at(tcp, 80), passed},
	} {
		t.Run(c.name, func(t *testing.T) {
			each(t, func(t *testing.T, f pt.Family) {
				fix.install(t, 7|ingressBit, c.entries, classesOf(f))
				fix.subject(t, 0, 7|ingressBit)
				fix.know(t, inner(f), pt.IdentityRemotePods, ipcache.Pod)
				peer := c.peer(f)
				fix.Reset()
				if got := fix.send(t, c.packet(f.A, peer)); got != c.want {
					t.Errorf("egress: %v, want %v", got, c.want)
				}
				fix.Reset()
				if got := fix.send(t, c.packet(peer, f.A)); got != c.want {
					t.Errorf("ingress: %v, want %v", got, c.want)
				}
				// the rules of others are nothing to a pod without
				fix.subject(t, 0, 0)
				fix.Reset()
				if got := fix.send(t, c.packet(peer, f.A)); got != passed {
					t.Errorf("without a subject: %v", got)
				}
				if n := len(fix.Conns()); c.want != passed && n != 1 {
					t.Errorf("%d connections, want one: what is dropped makes none", n)
				}
			})
		})
	}
}

func podB(f pt.Family) netip.Addr      { return f.B }
func remotePod(f pt.Family) netip.Addr { return f.RemotePod }
func world(f pt.Family) netip.Addr     { return f.World }
func otherNode(f pt.Family) netip.Addr { return f.OtherNode }
func ownNode(f pt.Family) netip.Addr   { return f.Node }
func inner(f pt.Family) netip.Addr     { return f.RemotePod.Next() }

// classesOf: all pods are in one prefix, and one of another node in one within.
func classesOf(f pt.Family) map[netip.Prefix]uint64 {
	bits := 16
	if f.V6 {
		bits = 48
	}
	return map[netip.Prefix]uint64{
		netip.PrefixFrom(f.RemotePod, bits).Masked(): class,
		addr.Host(inner(f)):                          innerClass,
	}
}

// TestEachDirection: entries of one direction say nothing about the other.
func TestEachDirection(t *testing.T) {
	fix := newFixture(t, nil)
	es := []policy.Entry{
		{Direction: policy.Egress, Lower: allow(0xfffffffe, 0)},
		{Direction: policy.Ingress, Lower: deny(1<<30, 50)},
	}
	each(t, func(t *testing.T, f pt.Family) {
		fix.install(t, 7|ingressBit, es, nil)
		fix.subject(t, 0, 7|ingressBit)
		fix.Reset()
		if got := fix.send(t, tcp(f.A, f.B, 80)); got != passed {
			t.Errorf("egress: %v", got)
		}
		// and what B answers is let in
		if got := fix.send(t, tcp(f.A, f.B, 80).Reply().With(func(p *pt.Packet) { p.Flags = pt.SYN | pt.ACK })); got != passed {
			t.Errorf("answer: %v", got)
		}
		fix.Reset()
		if got := fix.send(t, tcp(f.B, f.A, 80)); got != denied(50) {
			t.Errorf("ingress: %v", got)
		}
		// both ends have the policy: the one that connects may, the other refuses
		fix.subject(t, 1, 7|ingressBit)
		if got := fix.send(t, tcp(f.A, f.B, 80)); got != denied(50) {
			t.Errorf("both: %v", got)
		}
		fix.subject(t, 1, 0)
	})
}

// TestUnknown: who is not known yet waits where rules could be about him, and
// leaves no connection behind.
func TestUnknown(t *testing.T) {
	fix := newFixture(t, nil)
	es := entries(entry(policy.AnyPeer, none, allow(0xfffffffe, 0)))
	each(t, func(t *testing.T, f pt.Family) {
		fix.know(t, f.RemotePod, identity.Unknown, ipcache.Pod)
		for _, c := range []struct {
			subject uint32
			want    outcome
		}{{0, passed}, {7, passed}, {7 | ingressBit, outcome{"identity-unknown", 0}}} {
			fix.install(t, c.subject|1, es, nil)
			fix.subject(t, 0, c.subject)
			fix.Reset()
			if got := fix.send(t, tcp(f.RemotePod, f.A, 80)); got != c.want {
				t.Errorf("subject %#x: %v, want %v", c.subject, got, c.want)
			}
			if n := len(fix.Conns()); (n == 0) != (c.want != passed) {
				t.Errorf("subject %#x: %d connections", c.subject, n)
			}
		}
		for subject, want := range map[uint32]outcome{0: passed, 7 | ingressBit: passed, 7 | egressBit: {"identity-unknown", 0}} {
			fix.install(t, subject|1, es, nil)
			fix.subject(t, 0, subject)
			fix.Reset()
			if got := fix.send(t, tcp(f.A, f.RemotePod, 80)); got != want {
				t.Errorf("egress of subject %#x: %v, want %v", subject, got, want)
			}
		}
		fix.know(t, f.RemotePod, pt.IdentityRemotePods, ipcache.Pod)
		if got := fix.send(t, tcp(f.RemotePod, f.A, 80)); got != passed {
			t.Errorf("known: %v", got)
		}
	})
}

// TestChange: connections are judged again when the subject of an end is another,
// in both directions, by who began them.
func TestChange(t *testing.T) {
	fix := newFixture(t, nil)
	yes, no := entries(entry(policy.AnyPeer, none, allow(1, 20))), entries(entry(policy.AnyPeer, none, deny(1<<30, 60)))
	install := func(t *testing.T) {
		fix.install(t, 7|ingressBit, yes, nil)
		check(t, fix.Install(8|ingressBit, no))
	}
	each(t, func(t *testing.T, f pt.Family) {
		for name, peer := range map[string]netip.Addr{"same node": f.B, "other node": f.RemotePod, "outside": f.Excluded} {
			for _, outwards := range []bool{true, false} {
				install(t)
				fix.subject(t, 0, 7|ingressBit)
				fix.Reset()
				open := tcp(f.A, peer, 80)
				if !outwards {
					open = tcp(peer, f.A, 80)
				}
				ack := open.With(func(p *pt.Packet) { p.Flags = pt.ACK })
				answer := open.Reply().With(func(p *pt.Packet) { p.Flags = pt.SYN | pt.ACK })
				expect := func(what string, want outcome) {
					t.Helper()
					for _, p := range []pt.Packet{ack, answer, ack} {
						if got := fix.send(t, p); got != want {
							t.Errorf("%s, outwards %t, %s: %s is %v, want %v", name, outwards, what, p.Conn(), got, want)
						}
					}
				}
				fix.send(t, open)
				expect("established", passed)
				fix.subject(t, 0, 8|ingressBit)
				expect("denied by a change", denied(60))
				if c := fix.Conns(); len(c) != 1 || !strings.Contains(c[0], "denied") {
					t.Errorf("%s: connections %v", name, c)
				}
				if got := fix.send(t, quoting(f, answer)); got.drop != "policy" {
					t.Errorf("%s, outwards %t: an ICMP error of a connection that is denied: %v", name, outwards, got)
				}
				fix.subject(t, 0, 0)
				expect("no policy any more", passed)
				fix.subject(t, 0, 8|ingressBit)
				expect("denied again", denied(60))
				fix.subject(t, 0, 7|ingressBit)
				expect("allowed again", passed)
				// a new connection does not take the old one's verdict
				fix.subject(t, 0, 8|ingressBit)
				if got := fix.send(t, open.With(func(p *pt.Packet) { p.Sport++ })); got != denied(60) {
					t.Errorf("%s: new: %v", name, got)
				}
			}
		}
	})
}

// quoting is an ICMP error about a packet, from whoever it was for.
func quoting(f pt.Family, about pt.Packet) pt.Packet {
	p := pt.Packet{Src: about.Dst, Dst: about.Src, TTL: 64, Protocol: f.ICMP, Type: 3, Code: 3, Payload: about.L3()[:40]}
	if f.V6 {
		p.Type, p.Code, p.Payload = 1, 4, about.L3()[:60]
	}
	return p
}

func TestKeepEstablished(t *testing.T) {
	fix := newFixture(t, func(s *setting.Node) { s.KeepEstablished = true })
	each(t, func(t *testing.T, f pt.Family) {
		fix.install(t, 7|ingressBit, entries(entry(policy.AnyPeer, none, allow(1, 20))), nil)
		check(t, fix.Install(8|ingressBit, entries(entry(policy.AnyPeer, none, deny(1<<30, 60)))))
		fix.subject(t, 0, 7|ingressBit)
		fix.Reset()
		fix.send(t, tcp(f.A, f.B, 80))
		fix.subject(t, 0, 8|ingressBit)
		for _, p := range []pt.Packet{tcp(f.A, f.B, 80), tcp(f.A, f.B, 80).Reply()} {
			p.Flags = pt.ACK
			if got := fix.send(t, p); got != passed {
				t.Errorf("%s: %v", p.Conn(), got)
			}
		}
		if got := fix.send(t, tcp(f.A, f.B, 81)); got != denied(60) {
			t.Errorf("new: %v", got)
		}
	})
}

// TestFragments: a later fragment has the verdict of the first, and none where
// that was not seen or did not pass.
func TestFragments(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family) {
		fix.install(t, 7|ingressBit, entries(entry(policy.AnyPeer, none, deny(1<<30, 0)), on(entry(pt.IdentityB, none, allow(1, 20)), pt.UDP, 53, 16)), nil)
		fix.subject(t, 0, 7|ingressBit)
		for port, want := range map[uint16]outcome{53: passed, 54: denied(0)} {
			fix.Reset()
			whole := udp(f.A, f.B, port).With(func(p *pt.Packet) { p.Payload, p.ID = make([]byte, 1000), 77 })
			first := whole.With(func(p *pt.Packet) { p.Fragment = &pt.Fragment{From: 0, To: 512} })
			later := whole.With(func(p *pt.Packet) { p.Fragment = &pt.Fragment{From: 512, To: 1008} })
			if got := fix.send(t, later); got.drop != "fragment-unknown" {
				t.Errorf("port %d: before the first: %v", port, got)
			}
			if got := fix.send(t, first); got != want {
				t.Errorf("port %d: first: %v, want %v", port, got, want)
			}
			if got := fix.send(t, later); (got == passed) != (want == passed) {
				t.Errorf("port %d: behind the first: %v, want %v", port, got, want)
			}
		}
	})
}

// TestMap: what is written is read again, an install that does not fit leaves
// nothing, and Prune keeps what it is told to.
func TestMap(t *testing.T) {
	fix := newFixture(t, nil)
	es := entries(entry(policy.AnyPeer, pass(3, 9), deny(1<<30, 0)), on(entry(1<<40+5, allow(1, 20), none), pt.TCP, 8080, 13))
	check(t, fix.Install(5|ingressBit, es))
	check(t, fix.Install(6, es[:2]))
	got, err := fix.Subjects()
	check(t, err)
	if len(got) != 2 || !sameEntries(got[5|ingressBit], es) || !sameEntries(got[6], es[:2]) {
		t.Errorf("read %+v", got)
	}
	var many []policy.Entry
	for port := range fix.MaxEntries() {
		many = append(many, on(policy.Entry{Direction: policy.Egress, Peer: 300, Lower: allow(1, 20)}, pt.TCP, uint16(port), 16))
	}
	if err := fix.Install(7, many); err == nil || !strings.Contains(err.Error(), "the map holds 4096 in all") {
		t.Errorf("got %v", err)
	}
	check(t, fix.Remove(6, es)) // more than it has
	if got, err = fix.Subjects(); err != nil || len(got) != 1 {
		t.Errorf("left %v, %v", got, err)
	}
	check(t, fix.Prune(func(n uint32) bool { return n == 5|ingressBit }))
	if got, err = fix.Subjects(); err != nil || !sameEntries(got[5|ingressBit], es) {
		t.Errorf("left %v, %v", got, err)
	}
	check(t, fix.Prune(func(uint32) bool { return false }))
	if got, err = fix.Subjects(); err != nil || len(got) != 0 {
		t.Errorf("left %v, %v", got, err)
	}
	classes := classesOf(pt.Families[0])
	maps.Copy(classes, classesOf(pt.Families[1]))
	for p, n := range classes {
		check(t, fix.SetClass(p, n))
	}
	if read, err := fix.Classes(); err != nil || !maps.Equal(read, classes) {
		t.Errorf("classes %v, want %v, %v", read, classes, err)
	}
	for p := range classes {
		check(t, fix.DeleteClass(p))
		check(t, fix.DeleteClass(p))
	}
}

func sameEntries(a, b []policy.Entry) bool {
	return len(a) == len(b) && !slices.ContainsFunc(a, func(e policy.Entry) bool { return !slices.Contains(b, e) })
}

// TestForgotten: the table forgets an idle connection; an answer of the end that
// may not begin one passes all the same, and begins nothing.
func TestForgotten(t *testing.T) {
	fix := newFixture(t, nil)
	es := []policy.Entry{ // A may be asked and may not ask
		{Direction: policy.Egress, Lower: deny(1<<30, 50)},
		{Direction: policy.Ingress, Lower: allow(0xfffffffe, 0)},
	}
	each(t, func(t *testing.T, f pt.Family) {
		fix.install(t, 7|ingressBit, es, nil)
		for _, peer := range []netip.Addr{f.B, f.RemotePod} {
			fix.subject(t, 0, 7|ingressBit)
			fix.Reset()
			open := tcp(peer, f.A, 80)
			answer := open.Reply().With(func(p *pt.Packet) { p.Flags = pt.ACK })
			if got := fix.send(t, answer); got != passed {
				t.Errorf("answer of a forgotten connection: %v", got)
			}
			if c := fix.Conns(); len(c) != 1 {
				t.Errorf("connections %v", c)
			}
			// the asker is still who began: his next packet is no answer
			if got := fix.send(t, open.With(func(p *pt.Packet) { p.Flags = pt.ACK })); got != passed {
				t.Errorf("next packet of the asker: %v", got)
			}
			fix.Reset()
			if got := fix.send(t, open.Reply()); got != denied(50) {
				t.Errorf("a SYN of who may not ask: %v", got)
			}
		}
		// where neither end may begin, nothing passes
		check(t, fix.Install(8|ingressBit, []policy.Entry{
			{Direction: policy.Egress, Lower: deny(1<<30, 50)},
			{Direction: policy.Ingress, Lower: deny(1<<30, 51)},
		}))
		fix.subject(t, 0, 8|ingressBit)
		fix.Reset()
		if got := fix.send(t, tcp(f.A, f.B, 80).With(func(p *pt.Packet) { p.Flags = pt.ACK })); got != denied(50) {
			t.Errorf("an ACK where nobody may begin: %v", got)
		}
		fix.subject(t, 0, 0)
	})
}
