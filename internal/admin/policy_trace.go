// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"context"
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

// TracePolicy implements weftv1.NodeServer.
func (n *node) TracePolicy(_ context.Context, req *weftv1.TracePolicyRequest) (*weftv1.TracePolicyResponse, error) {
	f, err := n.inForce()
	if err != nil {
		return nil, err
	}
	protocol, err := parseProtocol(req.Protocol)
	if err != nil {
		return nil, err
	}
	if req.Port > 65535 {
		return nil, status.Errorf(codes.InvalidArgument, "port %d: want 0 to 65535", req.Port)
	}
	from, err := f.ends(req.From)
	if err != nil {
		return nil, err
	}
	to, err := f.ends(req.To)
	if err != nil {
		return nil, err
	}
	r := &weftv1.TracePolicyResponse{Node: f.node}
	for _, a := range from {
		for _, b := range to {
			if a.party.Addr.Is4() == b.party.Addr.Is4() {
				r.Paths = append(r.Paths, f.path(a, b, protocol, uint16(req.Port)))
			}
		}
	}
	if len(r.Paths) == 0 {
		return nil, status.Errorf(codes.InvalidArgument, "%s and %s have no addresses of the same family", req.From, req.To)
	}
	return r, nil
}

func parseProtocol(name string) (uint8, error) {
	if p, ok := protocols[name]; ok {
		return p, nil
	}
	p, err := strconv.ParseUint(name, 10, 8)
	if err != nil || p == 0 {
		return 0, status.Errorf(codes.InvalidArgument, "protocol %q: want TCP, UDP, SCTP, ICMP, ICMPv6 or a number from 1 to 255", name)
	}
	return uint8(p), nil
}

// end is an end of a connection as this node sees it.
type end struct {
	party policy.Party
	pod   string // NS/POD
	node  string // that the pod is on, or that it is
	judge bool   // a pod with an address of its own: its node judges it
}

// ends finds out who is meant by NS/POD or an address: one end for each
// address.
func (f *inForce) ends(name string) ([]end, error) {
	if a, err := netip.ParseAddr(name); err == nil {
		return []end{f.endOf(a.Unmap().WithZone(""))}, nil
	}
	txn := f.tables.DB.ReadTxn()
	var out []end
	for i := range f.pods {
		if p := &f.pods[i]; state.Key(p.Namespace, p.Name) == name {
			for _, a := range p.IPs {
				out = append(out, f.podEnd(p, a))
			}
		}
	}
	if w, _, ok := f.tables.Workloads.Get(txn, state.WorkloadByName.Query(name)); ok && len(out) == 0 {
		if len(w.IPs) == 0 {
			return nil, status.Errorf(codes.FailedPrecondition, "pod %s has no address yet", name)
		}
		for _, a := range w.IPs {
			e := f.endOf(a)
			e.pod = name
			out = append(out, e)
		}
	}
	if len(out) == 0 {
		return nil, status.Errorf(codes.NotFound, "no pod %q: want NAMESPACE/NAME or an address", name)
	}
	return out, nil
}

func (f *inForce) podEnd(p *policy.Pod, a netip.Addr) end {
	e := end{party: policy.Party{Endpoint: p.ID(), Identity: p.Identity, Addr: a}, pod: state.Key(p.Namespace, p.Name), judge: true}
	if p.Local {
		e.node = f.node
	} else if w, _, ok := f.tables.Workloads.Get(f.tables.DB.ReadTxn(), state.WorkloadByName.Query(e.pod)); ok {
		e.node = w.Node
	}
	return e
}

// endOf finds out whose address it is.
func (f *inForce) endOf(a netip.Addr) end {
	for i := range f.pods {
		if slices.Contains(f.pods[i].IPs, a) {
			return f.podEnd(&f.pods[i], a)
		}
	}
	e := end{party: policy.Party{Identity: identity.World, Addr: a}}
	for n := range f.tables.Nodes.All(f.tables.DB.ReadTxn()) {
		if slices.Contains(n.IPs, a) {
			e.node, e.party.Identity = n.Name, identity.RemoteNode
			if n.Name == f.node {
				e.party.Identity = identity.Node
			}
			return e
		}
		if slices.ContainsFunc(n.PodCIDRs, func(p netip.Prefix) bool { return p.Contains(a) }) && n.Name != f.node {
			e.node, e.party.Identity = n.Name, identity.Unknown
		}
	}
	return e
}

// path judges a connection.
func (f *inForce) path(from, to end, protocol uint8, port uint16) *weftv1.PolicyPath {
	d := f.Trace(from.party, to.party, protocol, port)
	p := &weftv1.PolicyPath{From: from.describe(), To: to.describe(), Egress: f.side(from, to, d.Egress), Ingress: f.side(to, from, d.Ingress)}
	if f.waits(from, to) {
		p.Ingress.Verdict, p.Ingress.Rule, p.Ingress.Tier, p.Ingress.Reason = policy.Deny.String(), "", "", "identity-unknown"
	}
	p.Verdict = "allowed"
	for _, s := range []*weftv1.TraceSide{p.Egress, p.Ingress} {
		if s.Node != "" && !s.Here {
			p.Verdict = "unknown"
		}
	}
	for _, s := range []*weftv1.TraceSide{p.Egress, p.Ingress} {
		if s.Verdict == policy.Deny.String() {
			p.Verdict = "denied"
		}
	}
	return p
}

// waits is true where the datapath drops until it knows who sends.
func (f *inForce) waits(from, to end) bool {
	key, ok := f.Endpoints[to.party.Endpoint]
	return ok && from.party.Identity == identity.Unknown && f.Subjects[key].Ingress
}

// side is what is known here of the verdict on one end.
func (f *inForce) side(of, peer end, found policy.Finding) *weftv1.TraceSide {
	if !of.judge {
		return &weftv1.TraceSide{}
	}
	s := &weftv1.TraceSide{Node: of.node, Here: of.node == f.node}
	if !s.Here {
		return s
	}
	s.Verdict, s.Tier, s.Rule = found.Verdict.String(), tierName(found.Rule, found.Verdict), ruleText(found.Rule, found.Verdict)
	if found.Verdict == policy.Deny {
		s.Reason = "policy"
	}
	if peer.party.Identity == identity.Node {
		own := f.Rule(policy.RuleOwnNode)
		s.Verdict, s.Tier, s.Rule, s.Reason = policy.Allow.String(), "", own.String(), ""
	}
	return s
}

func (e end) describe() *weftv1.TraceEnd {
	t := &weftv1.TraceEnd{Ip: e.party.Addr.String(), Pod: e.pod, Node: e.node, Identity: e.party.Identity, Kind: "pod"}
	if e.party.Identity < identity.First {
		t.Kind = identity.Name(e.party.Identity)
	}
	return t
}
