// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"net/netip"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	policyv1alpha2 "sigs.k8s.io/network-policy-api/apis/v1alpha2"

	"github.com/weft-mesh/weft/internal/addr"
	"github.com/weft-mesh/weft/internal/state"
)

// parsed is a policy without anything of the cluster. It is immutable.
type parsed struct {
	ref      Ref
	tier     Tier
	priority int32 // of a ClusterNetworkPolicy
	subject  podSet
	isolates [3]bool // by Direction: a pod that is selected needs a rule that allows
	rules    []parsedRule
	problems []string
}

// parsedRule is a rule; Number of its rule is not set yet.
type parsedRule struct {
	Rule
	any   bool // matches every peer; peers is empty
	peers []peer
	ports []span   // by number
	named []string // ports by name; see portName
}

// peer is one entry of a rule's from or to: one of its fields is set.
type peer struct {
	pods  *podSet
	block *block
	nodes selector // not nil
}

// block is a CIDR with parts cut out.
type block struct {
	cidr   netip.Prefix
	except []netip.Prefix
}

func (b block) covers(p netip.Prefix) bool {
	if !within(b.cidr, p) {
		return false
	}
	for _, e := range b.except {
		if within(e, p) {
			return false
		}
	}
	return true
}

// within is true where all of inner is in outer.
func within(outer, inner netip.Prefix) bool {
	return outer.Bits() <= inner.Bits() && outer.Contains(inner.Addr())
}

// span is a range of ports of a protocol. Protocol 0 is any protocol, and then
// the range is whole.
type span struct {
	protocol    uint8
	first, last uint16
}

var everything = span{0, 0, 65535}

// portName is how a named port is looked up: "TCP/http", or "/http" for
// whatever protocol the container says.
func portName(protocol, name string) string { return protocol + "/" + name }

// parse reads a policy. What cannot be enforced as written is a problem; the
// policy then does no less than what it says should be kept out.
func parse(p *state.Policy) *parsed {
	out := &parsed{ref: Ref{Kind: p.Kind, Namespace: p.Namespace, Name: p.Name}}
	switch {
	case p.NetworkPolicy != nil:
		out.tier = NetworkPolicyTier
		out.networkPolicy(p.NetworkPolicy)
	case p.ClusterNetworkPolicy != nil:
		out.clusterNetworkPolicy(p.ClusterNetworkPolicy)
	default:
		out.problem("has no spec: it is not enforced")
	}
	return out
}

func (p *parsed) problem(format string, args ...any) {
	p.problems = append(p.problems, fmt.Sprintf(format, args...))
}

func (p *parsed) networkPolicy(spec *networkingv1.NetworkPolicySpec) {
	types := spec.PolicyTypes
	if len(types) == 0 {
		types = []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}
		if len(spec.Egress) > 0 {
			types = append(types, networkingv1.PolicyTypeEgress)
		}
	}
	for _, t := range types {
		switch t {
		case networkingv1.PolicyTypeIngress:
			p.isolates[Ingress] = true
		case networkingv1.PolicyTypeEgress:
			p.isolates[Egress] = true
		default:
			p.problem("policyTypes has %q: want Ingress or Egress", t)
		}
	}
	p.subject.namespace = p.ref.Namespace
	sel, err := newSelector(&spec.PodSelector)
	if err != nil {
		p.problem("podSelector: %v; it selects every pod of the namespace and allows nothing", err)
		return
	}
	p.subject.pods = sel
	if p.isolates[Ingress] {
		for i, r := range spec.Ingress {
			p.allowRule(Ingress, i, r.From, r.Ports)
		}
	}
	if p.isolates[Egress] {
		for i, r := range spec.Egress {
			p.allowRule(Egress, i, r.To, r.Ports)
		}
	}
}

// allowRule adds a rule of a NetworkPolicy. A peer or port that is not valid
// matches nothing.
func (p *parsed) allowRule(d Direction, index int, peers []networkingv1.NetworkPolicyPeer, ports []networkingv1.NetworkPolicyPort) {
	r := parsedRule{Rule: Rule{Policy: p.ref, Tier: p.tier, Direction: d, Index: index, Verdict: Allow}, any: len(peers) == 0}
	for i, x := range peers {
		if got, err := p.networkPolicyPeer(&x); err != nil {
			p.problem("%s[%d], peer %d: %v; it matches nothing", d, index, i, err)
		} else {
			r.peers = append(r.peers, got)
		}
	}
	if len(ports) == 0 {
		r.ports = []span{everything}
	}
	for i, x := range ports {
		if err := r.addPort(&x); err != nil {
			p.problem("%s[%d], port %d: %v; it matches nothing", d, index, i, err)
		}
	}
	p.rules = append(p.rules, r)
}

func (p *parsed) networkPolicyPeer(x *networkingv1.NetworkPolicyPeer) (peer, error) {
	if x.IPBlock != nil {
		if x.PodSelector != nil || x.NamespaceSelector != nil {
			return peer{}, fmt.Errorf("ipBlock beside a selector: want either")
		}
		return newBlock(x.IPBlock.CIDR, x.IPBlock.Except)
	}
	if x.PodSelector == nil && x.NamespaceSelector == nil {
		return peer{}, fmt.Errorf("is empty: want ipBlock, podSelector or namespaceSelector")
	}
	s := podSet{namespace: p.ref.Namespace}
	if x.NamespaceSelector != nil {
		sel, err := newSelector(x.NamespaceSelector)
		if err != nil {
			return peer{}, fmt.Errorf("namespaceSelector: %w", err)
		}
		s.any, s.namespaces = true, sel
	}
	if x.PodSelector != nil {
		sel, err := newSelector(x.PodSelector)
		if err != nil {
			return peer{}, fmt.Errorf("podSelector: %w", err)
		}
		s.pods = sel
	}
	return peer{pods: &s}, nil
}

func newBlock(cidr string, except []string) (peer, error) {
	c, err := parsePrefix(cidr)
	if err != nil {
		return peer{}, fmt.Errorf("ipBlock: %w", err)
	}
	b := &block{cidr: c}
	for _, s := range except {
		e, err := parsePrefix(s)
		if err != nil {
			return peer{}, fmt.Errorf("ipBlock except: %w", err)
		}
		b.except = append(b.except, e)
	}
	return peer{block: b}, nil
}

// parsePrefix reads a CIDR into the one form that the package uses: masked,
// IPv4 as IPv4.
func parsePrefix(s string) (netip.Prefix, error) {
	p, err := netip.ParsePrefix(s)
	if err != nil {
		return netip.Prefix{}, fmt.Errorf("%q: want a CIDR", s)
	}
	return addr.PrefixFrom16(addr.PrefixTo16(p)), nil
}

func (r *parsedRule) addPort(x *networkingv1.NetworkPolicyPort) error {
	name := "TCP"
	if x.Protocol != nil {
		name = string(*x.Protocol)
	}
	protocol, ok := protocolByName(name)
	if !ok {
		return fmt.Errorf("protocol %q: want TCP, UDP or SCTP", name)
	}
	switch {
	case x.Port == nil && x.EndPort == nil:
		r.ports = append(r.ports, span{protocol, 0, 65535})
	case x.Port == nil:
		return fmt.Errorf("endPort %d without port", *x.EndPort)
	case x.Port.Type == intstr.String && x.EndPort != nil:
		return fmt.Errorf("endPort %d beside the name %q: want a number in port", *x.EndPort, x.Port.StrVal)
	case x.Port.Type == intstr.String:
		r.named = append(r.named, portName(name, x.Port.StrVal))
	case x.EndPort != nil:
		return r.addSpan(protocol, x.Port.IntVal, *x.EndPort)
	default:
		return r.addSpan(protocol, x.Port.IntVal, x.Port.IntVal)
	}
	return nil
}

func (r *parsedRule) addSpan(protocol uint8, first, last int32) error {
	if first < 1 || last > 65535 || first > last {
		return fmt.Errorf("ports %d to %d: want 1 to 65535, in this order", first, last)
	}
	r.ports = append(r.ports, span{protocol, uint16(first), uint16(last)})
	return nil
}

func (p *parsed) clusterNetworkPolicy(spec *policyv1alpha2.ClusterNetworkPolicySpec) {
	switch spec.Tier {
	case policyv1alpha2.AdminTier:
		p.tier = AdminTier
	case policyv1alpha2.BaselineTier:
		p.tier = BaselineTier
	default:
		p.problem("tier %q: want Admin or Baseline; it is not enforced", spec.Tier)
		return
	}
	p.priority = spec.Priority
	subject, err := newPodSet(spec.Subject.Namespaces, spec.Subject.Pods)
	if err != nil {
		p.problem("subject: %v; it selects no pod", err)
		return
	}
	p.subject = *subject
	for i, r := range spec.Ingress {
		p.clusterRule(Ingress, i, clusterRule{r.Name, r.Action, ingressPeers(r.From), r.Protocols})
	}
	for i, r := range spec.Egress {
		p.clusterRule(Egress, i, clusterRule{r.Name, r.Action, r.To, r.Protocols})
	}
}

// newPodSet reads the two ways in which subjects and peers select pods.
func newPodSet(namespaces *metav1.LabelSelector, pods *policyv1alpha2.NamespacedPod) (*podSet, error) {
	s := &podSet{any: true}
	var err error
	switch {
	case namespaces != nil && pods != nil:
		return nil, fmt.Errorf("has both namespaces and pods: want one")
	case namespaces != nil:
		if s.namespaces, err = newSelector(namespaces); err != nil {
			return nil, fmt.Errorf("namespaces: %w", err)
		}
	case pods != nil:
		if s.namespaces, err = newSelector(&pods.NamespaceSelector); err != nil {
			return nil, fmt.Errorf("pods.namespaceSelector: %w", err)
		}
		if s.pods, err = newSelector(&pods.PodSelector); err != nil {
			return nil, fmt.Errorf("pods.podSelector: %w", err)
		}
	default:
		return nil, fmt.Errorf("is empty: want namespaces or pods")
	}
	return s, nil
}

// clusterRule is an ingress or egress rule of a ClusterNetworkPolicy.
type clusterRule struct {
	name      string
	action    policyv1alpha2.ClusterNetworkPolicyRuleAction
	peers     []policyv1alpha2.ClusterNetworkPolicyEgressPeer
	protocols []policyv1alpha2.ClusterNetworkPolicyProtocol
}

// ingressPeers makes peers of egress rules, which can do more, of those of
// ingress rules.
func ingressPeers(from []policyv1alpha2.ClusterNetworkPolicyIngressPeer) []policyv1alpha2.ClusterNetworkPolicyEgressPeer {
	out := make([]policyv1alpha2.ClusterNetworkPolicyEgressPeer, len(from))
	for i, f := range from {
		out[i] = policyv1alpha2.ClusterNetworkPolicyEgressPeer{Namespaces: f.Namespaces, Pods: f.Pods}
	}
	return out
}

// clusterRule adds a rule. One with a part that weft cannot enforce fails
// closed as the API says: an Accept matches nothing, a Deny or Pass becomes a
// Deny of everything.
func (p *parsed) clusterRule(d Direction, index int, x clusterRule) {
	r := parsedRule{Rule: Rule{Policy: p.ref, Tier: p.tier, Direction: d, Index: index, Name: x.name}}
	err := r.read(x)
	if err != nil && r.Verdict == Allow {
		p.problem("%s: %v; the rule accepts nothing", r.Rule.place(), err)
		return
	}
	if err != nil {
		p.problem("%s: %v; the rule denies everything", r.Rule.place(), err)
		r.Verdict, r.any, r.peers, r.ports, r.named = Deny, true, nil, []span{everything}, nil
	}
	p.rules = append(p.rules, r)
}

// read fills in verdict, peers and ports. The verdict is set first, also where
// the rest is in error.
func (r *parsedRule) read(x clusterRule) error {
	switch x.action {
	case policyv1alpha2.ClusterNetworkPolicyRuleActionAccept:
		r.Verdict = Allow
	case policyv1alpha2.ClusterNetworkPolicyRuleActionDeny:
		r.Verdict = Deny
	case policyv1alpha2.ClusterNetworkPolicyRuleActionPass:
		r.Verdict = Pass
	default:
		r.Verdict = Deny
		return fmt.Errorf("action %q: want Accept, Deny or Pass", x.action)
	}
	if len(x.peers) == 0 {
		return fmt.Errorf("has no peer: want at least one")
	}
	for i, one := range x.peers {
		peers, err := clusterPeer(&one)
		if err != nil {
			return fmt.Errorf("peer %d %w", i, err)
		}
		r.peers = append(r.peers, peers...)
	}
	if len(x.protocols) == 0 {
		r.ports = []span{everything}
	}
	for i, one := range x.protocols {
		if err := r.addProtocol(&one); err != nil {
			return fmt.Errorf("protocol %d %w", i, err)
		}
	}
	return nil
}

func clusterPeer(x *policyv1alpha2.ClusterNetworkPolicyEgressPeer) ([]peer, error) {
	set := 0
	for _, there := range []bool{x.Namespaces != nil, x.Pods != nil, x.Nodes != nil, len(x.Networks) > 0, len(x.DomainNames) > 0} {
		if there {
			set++
		}
	}
	switch {
	case set != 1:
		return nil, fmt.Errorf("has %d known fields: want one of namespaces, pods, nodes and networks", set)
	case len(x.DomainNames) > 0:
		return nil, fmt.Errorf("has domainNames, which are not supported")
	case x.Nodes != nil:
		sel, err := newSelector(x.Nodes)
		return []peer{{nodes: sel}}, err
	case len(x.Networks) > 0:
		var peers []peer
		for _, n := range x.Networks {
			p, err := newBlock(string(n), nil)
			if err != nil {
				return nil, err
			}
			peers = append(peers, p)
		}
		return peers, nil
	}
	s, err := newPodSet(x.Namespaces, x.Pods)
	return []peer{{pods: s}}, err
}

func (r *parsedRule) addProtocol(x *policyv1alpha2.ClusterNetworkPolicyProtocol) error {
	var port *policyv1alpha2.Port
	var protocol uint8
	set := 0
	if x.TCP != nil {
		protocol, port, set = TCP, x.TCP.DestinationPort, set+1
	}
	if x.UDP != nil {
		protocol, port, set = UDP, x.UDP.DestinationPort, set+1
	}
	if x.SCTP != nil {
		protocol, port, set = SCTP, x.SCTP.DestinationPort, set+1
	}
	if x.DestinationNamedPort != "" {
		set++
	}
	switch {
	case set != 1:
		return fmt.Errorf("has %d known fields: want one of tcp, udp, sctp and destinationNamedPort", set)
	case x.DestinationNamedPort != "":
		r.named = append(r.named, portName("", x.DestinationNamedPort))
		return nil
	case port == nil:
		r.ports = append(r.ports, span{protocol, 0, 65535})
		return nil
	case port.Range != nil && port.Number != 0:
		return fmt.Errorf("has both a number and a range: want one")
	case port.Range != nil:
		return r.addSpan(protocol, port.Range.Start, port.Range.End)
	}
	return r.addSpan(protocol, port.Number, port.Number)
}
