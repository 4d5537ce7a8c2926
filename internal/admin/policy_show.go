// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strconv"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
	"github.com/weft-mesh/weft/internal/identity"
	"github.com/weft-mesh/weft/internal/policy"
	"github.com/weft-mesh/weft/internal/state"
)

// ShowPolicy implements weftv1.NodeServer.
func (n *node) ShowPolicy(_ context.Context, req *weftv1.ShowPolicyRequest) (*weftv1.ShowPolicyResponse, error) {
	f, err := n.inForce()
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(f.pods, func(p policy.Pod) bool { return p.Local && state.Key(p.Namespace, p.Name) == req.Pod })
	if i < 0 {
		return nil, status.Errorf(codes.NotFound, "pod %q is not one of %s that has an address of its own: want NAMESPACE/NAME", req.Pod, f.node)
	}
	p := &f.pods[i]
	r := &weftv1.ShowPolicyResponse{Namespace: p.Namespace, Name: p.Name, Identity: p.Identity}
	for _, ip := range p.IPs {
		r.Ips = append(r.Ips, ip.String())
	}
	for _, ref := range f.Selected[p.ID()] {
		r.Policies = append(r.Policies, ref.String())
	}
	key, ok := f.Endpoints[p.ID()]
	if !ok {
		return r, nil
	}
	subject := f.Subjects[key]
	r.Egress, r.Ingress = subject.Egress, subject.Ingress
	peers := map[uint64]*weftv1.PolicyPeer{}
	for _, row := range effective(subject.Entries) {
		peer := peers[row.peer]
		if peer == nil {
			peer = f.peer(row.peer)
			peers[row.peer] = peer
		}
		r.Entries = append(r.Entries, f.entry(row, peer))
	}
	return r, nil
}

func (f *inForce) entry(row *effect, peer *weftv1.PolicyPeer) *weftv1.PolicyEntry {
	rule := f.Rule(row.outcome.Rule)
	e := &weftv1.PolicyEntry{
		Direction: row.direction.String(), Peer: peer, Protocol: protocolName(row.protocol),
		Verdict: row.outcome.Verdict.String(), Tier: tierName(rule, row.outcome.Verdict), Rule: ruleText(rule, row.outcome.Verdict),
	}
	e.Ports = portTexts(row.ports, "")
	for _, x := range row.except {
		e.Except = append(e.Except, portTexts(x.ports, "/"+protocolName(x.protocol))...)
	}
	return e
}

// tierName is the tier of a rule; no rule is of the default, or isolates in the
// name of all that select the pod.
func tierName(r policy.Rule, v policy.Verdict) string {
	switch {
	case r.Number != policy.RuleNone:
		return r.Tier.String()
	case v == policy.Deny:
		return policy.NetworkPolicyTier.String()
	}
	return "default"
}

// ruleText names a rule; an allowed connection that no rule is about has the
// default.
func ruleText(r policy.Rule, v policy.Verdict) string {
	if r.Number == policy.RuleNone && v == policy.Allow {
		return "no rule forbids"
	}
	return r.String()
}

// span is a range of ports, both ends included.
type span struct{ first, last uint16 }

func (s span) all() bool { return s == span{0, 65535} }

func portTexts(ports []span, protocol string) []string {
	var out []string
	for _, s := range ports {
		text := strconv.Itoa(int(s.first))
		switch {
		case s.all() && protocol == "":
			return nil
		case s.all():
			text = "any"
		case s.first != s.last:
			text += "-" + strconv.Itoa(int(s.last))
		}
		out = append(out, text+protocol)
	}
	return out
}

// protocolName is "any" for 0.
func protocolName(p uint8) string {
	for name, n := range protocols {
		if n == p {
			return name
		}
	}
	if p == 0 {
		return "any"
	}
	return strconv.Itoa(int(p))
}

// protocols are those that have names here.
var protocols = map[string]uint8{"TCP": policy.TCP, "UDP": policy.UDP, "SCTP": policy.SCTP, "ICMP": 1, "ICMPv6": 58}

// effect is one outcome of a subject, with all connections that it is about.
type effect struct {
	direction policy.Direction
	peer      uint64
	admin     bool // an outcome of the admin tier
	outcome   policy.Outcome
	protocol  uint8 // 0: any
	ports     []span
	except    []portsOf // of narrower entries that would not come first by themselves
}

// portsOf are ports of a protocol.
type portsOf struct {
	protocol uint8
	ports    []span
}

// effective turns entries, of which the longest prefix of a peer counts, into
// effects of which the first that matches counts.
func effective(entries []policy.Entry) []*effect {
	groups := map[effectKey]*effect{}
	var out []*effect
	for i := range entries {
		for _, admin := range []bool{true, false} {
			o := outcomeOf(&entries[i], admin)
			if o.Rank == policy.RankNone {
				continue
			}
			e := &entries[i]
			k := effectKey{e.Direction, e.Peer, admin, o, e.Protocol}
			row := groups[k]
			if row == nil {
				row = &effect{direction: e.Direction, peer: e.Peer, admin: admin, outcome: o, protocol: e.Protocol}
				groups[k] = row
				out = append(out, row)
			}
			row.add(e, entries)
		}
	}
	for _, row := range out {
		row.ports = merged(row.ports)
		for i := range row.except {
			row.except[i].ports = merged(row.except[i].ports)
		}
	}
	slices.SortStableFunc(out, compareEffects)
	return out
}

type effectKey struct {
	direction policy.Direction
	peer      uint64
	admin     bool
	outcome   policy.Outcome
	protocol  uint8
}

func compareEffects(a, b *effect) int {
	tier := func(e *effect) int {
		if e.admin {
			return 0
		}
		return 1
	}
	return cmp.Or(cmp.Compare(a.direction, b.direction), cmp.Compare(tier(a), tier(b)),
		cmp.Compare(a.outcome.Rank, b.outcome.Rank), cmp.Compare(a.peer, b.peer), cmp.Compare(a.protocol, b.protocol))
}

func outcomeOf(e *policy.Entry, admin bool) policy.Outcome {
	if admin {
		return e.Admin
	}
	return e.Lower
}

// add takes in what e is about, without what narrower entries say otherwise.
func (row *effect) add(e *policy.Entry, entries []policy.Entry) {
	first, last := e.PortRange()
	left := []span{{first, last}}
	for i := range entries {
		x := &entries[i]
		if !narrower(x, e) || outcomeOf(x, row.admin).Rank <= row.outcome.Rank {
			continue
		}
		from, to := x.PortRange()
		if e.Bits == 0 {
			row.exclude(x.Protocol, span{from, to})
		} else {
			left = without(left, span{from, to})
		}
	}
	row.ports = append(row.ports, left...)
}

// narrower is true where x is for a part of what e is for.
func narrower(x, e *policy.Entry) bool {
	if x.Direction != e.Direction || x.Peer != e.Peer || x.Bits <= e.Bits {
		return false
	}
	first, last := e.PortRange()
	return e.Bits == 0 || x.Protocol == e.Protocol && x.Port >= first && x.Port <= last
}

func (row *effect) exclude(protocol uint8, s span) {
	for i := range row.except {
		if row.except[i].protocol == protocol {
			row.except[i].ports = append(row.except[i].ports, s)
			return
		}
	}
	row.except = append(row.except, portsOf{protocol, []span{s}})
}

// without cuts s out of spans.
func without(spans []span, s span) []span {
	var out []span
	for _, x := range spans {
		if s.last < x.first || s.first > x.last {
			out = append(out, x)
			continue
		}
		if x.first < s.first {
			out = append(out, span{x.first, s.first - 1})
		}
		if x.last > s.last {
			out = append(out, span{s.last + 1, x.last})
		}
	}
	return out
}

// merged sorts spans and joins those that touch.
func merged(spans []span) []span {
	slices.SortFunc(spans, func(a, b span) int { return cmp.Compare(a.first, b.first) })
	var out []span
	for _, s := range spans {
		if n := len(out); n > 0 && int(s.first) <= int(out[n-1].last)+1 {
			out[n-1].last = max(out[n-1].last, s.last)
			continue
		}
		out = append(out, s)
	}
	return out
}

// peer says who it is.
func (f *inForce) peer(number uint64) *weftv1.PolicyPeer {
	switch {
	case number == policy.AnyPeer:
		return &weftv1.PolicyPeer{Kind: "any"}
	case number >= policy.FirstClass:
		return f.cidrPeer(number)
	case number < identity.First:
		return &weftv1.PolicyPeer{Kind: identity.Name(number), Identity: number}
	}
	p := &weftv1.PolicyPeer{Kind: "pods", Identity: number}
	if row, _, ok := f.tables.Identities.Get(f.tables.DB.ReadTxn(), state.IdentityByID.Query(number)); ok {
		p.Namespace, p.ServiceAccount, p.Labels = row.Namespace, row.ServiceAccount, row.Labels
	}
	for i := range f.pods {
		if f.pods[i].Identity == number {
			p.Pods = append(p.Pods, state.Key(f.pods[i].Namespace, f.pods[i].Name))
		}
	}
	slices.Sort(p.Pods)
	return p
}

// cidrPeer names the prefix of a class, and what of it is another class.
func (f *inForce) cidrPeer(number uint64) *weftv1.PolicyPeer {
	i := slices.IndexFunc(f.Prefixes, func(c policy.Class) bool { return c.Number == number })
	if i < 0 {
		return &weftv1.PolicyPeer{Kind: "cidr", Cidr: fmt.Sprintf("class %d", number)}
	}
	outer := f.Prefixes[i].Prefix
	p := &weftv1.PolicyPeer{Kind: "cidr", Cidr: outer.String()}
	var inner []netip.Prefix
	for _, c := range f.Prefixes {
		if c.Prefix != outer && c.Prefix.Bits() > outer.Bits() && outer.Contains(c.Prefix.Addr()) {
			inner = append(inner, c.Prefix)
		}
	}
	for _, x := range inner {
		if !slices.ContainsFunc(inner, func(y netip.Prefix) bool { return y.Bits() < x.Bits() && y.Contains(x.Addr()) }) {
			p.Without = append(p.Without, x.String())
		}
	}
	return p
}
