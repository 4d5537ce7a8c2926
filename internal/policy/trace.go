// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"net/netip"
	"slices"

	"github.com/weft-mesh/weft/internal/addr"
)

// Party is an end of a connection.
type Party struct {
	Endpoint EndpointID // zero for what is no pod, or a pod whose policy is not asked for
	Identity uint64     // as in internal/identity
	Addr     netip.Addr // as on the wire at the pod's interface
}

// Finding is what the policy of one end says.
type Finding struct {
	Judged  bool // false where the end is no endpoint of the result, or no policy concerns it
	Verdict Verdict
	Rule    Rule  // that decided
	Tier    Tier  // of Rule; 0 for the default
	Entry   Entry // that the deciding outcome is from; zero where not Judged
}

// Decision is the verdict on a connection.
type Decision struct {
	Allowed bool
	Egress  Finding // of the policy of the end that opens the connection
	Ingress Finding // of the policy of the other
}

// Trace returns what the datapath decides on a new connection, by the same
// lookups. port is 0 for protocols without. What a pod sends to its own address
// never leaves it and is allowed.
func (r *Result) Trace(from, to Party, protocol uint8, port uint16) Decision {
	d := Decision{
		Egress:  Finding{Verdict: Allow, Rule: r.Rule(RuleNone)},
		Ingress: Finding{Verdict: Allow, Rule: r.Rule(RuleNone)},
	}
	if from.Endpoint == to.Endpoint && from.Endpoint != (EndpointID{}) {
		d.Allowed = true
		return d
	}
	d.Egress = r.judge(Egress, from, to, protocol, port)
	d.Ingress = r.judge(Ingress, to, from, protocol, port)
	d.Allowed = d.Egress.Verdict == Allow && d.Ingress.Verdict == Allow
	return d
}

// judge asks the policy of subject about a connection with peer.
func (r *Result) judge(d Direction, subject, peer Party, protocol uint8, port uint16) Finding {
	f := Finding{Verdict: Allow, Rule: r.Rule(RuleNone)}
	key, ok := r.Endpoints[subject.Endpoint]
	if !ok {
		return f
	}
	s := r.Subjects[key]
	peers := []uint64{peer.Identity, AnyPeer}
	if class, ok := r.classOf.lookup(peer.Addr); ok {
		peers = append(peers, class)
	}
	admin, lower := Entry{Admin: none}, Entry{Lower: none}
	for _, p := range peers {
		e, ok := s.Lookup(d, p, protocol, port)
		if !ok {
			continue
		}
		if e.Admin.Rank < admin.Admin.Rank {
			admin = e
		}
		if e.Lower.Rank < lower.Lower.Rank {
			lower = e
		}
	}
	f.Judged = s.Egress && d == Egress || s.Ingress && d == Ingress
	if v := admin.Admin.Verdict; v == Allow || v == Deny {
		f.Verdict, f.Rule, f.Tier, f.Entry = v, r.Rule(admin.Admin.Rule), AdminTier, admin
		return f
	}
	f.Verdict, f.Rule, f.Entry = lower.Lower.Verdict, r.Rule(lower.Lower.Rule), lower
	f.Tier = f.Rule.Tier
	if lower.Lower.Rank == rankIsolated {
		f.Tier = NetworkPolicyTier
	}
	return f
}

// Lookup returns the entry with the longest prefix, as the kernel's map does.
func (s *Subject) Lookup(d Direction, peer uint64, protocol uint8, port uint16) (Entry, bool) {
	at, _ := slices.BinarySearchFunc(s.Entries, Entry{Direction: d, Peer: peer}, comparePeers)
	var best Entry
	found := false
	for ; at < len(s.Entries) && comparePeers(s.Entries[at], Entry{Direction: d, Peer: peer}) == 0; at++ {
		e := s.Entries[at]
		if e.Bits > 0 && e.Protocol != protocol {
			continue
		}
		if first, last := e.PortRange(); port < first || port > last {
			continue
		}
		if !found || e.Bits > best.Bits {
			best, found = e, true
		}
	}
	return best, found
}

func comparePeers(a, b Entry) int {
	switch {
	case a.Direction != b.Direction:
		return int(a.Direction) - int(b.Direction)
	case a.Peer < b.Peer:
		return -1
	case a.Peer > b.Peer:
		return 1
	}
	return 0
}

// classTable finds the class of an address, in the mapped form that the
// kernel's map has.
type classTable struct {
	numbers map[netip.Prefix]uint64
	lengths []int // of all prefixes, the longest first
}

func newClassTable(classes []Class) classTable {
	t := classTable{numbers: make(map[netip.Prefix]uint64, len(classes))}
	for _, c := range classes {
		a, bits := addr.PrefixTo16(c.Prefix)
		t.numbers[netip.PrefixFrom(netip.AddrFrom16(a), bits)] = c.Number
		t.lengths = append(t.lengths, bits)
	}
	slices.Sort(t.lengths)
	t.lengths = slices.Compact(t.lengths)
	slices.Reverse(t.lengths)
	return t
}

func (t classTable) lookup(a netip.Addr) (uint64, bool) {
	if !a.IsValid() {
		return 0, false
	}
	wide := netip.AddrFrom16(addr.To16(a))
	for _, bits := range t.lengths {
		p, err := wide.Prefix(bits)
		if err != nil {
			continue
		}
		if n, ok := t.numbers[p]; ok {
			return n, true
		}
	}
	return 0, false
}
