// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
	"net/netip"
	"slices"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"
	policyv1alpha2 "sigs.k8s.io/network-policy-api/apis/v1alpha2"

	"github.com/weft-mesh/weft/internal/state"
)

// The oracle is the API's documentation, written down as directly as possible:
// it walks the policies for each single connection. It shares no code with the
// compiler.

// end is one end of a connection as the oracle sees it.
type end struct {
	pod  *Pod
	id   *state.Identity // nil outside of pods
	node *state.Node     // nil outside of remote nodes
	ip   netip.Addr
}

type question struct {
	from, to end
	protocol uint8
	port     uint16
}

func selects(s *metav1.LabelSelector, set map[string]string) bool {
	sel, err := metav1.LabelSelectorAsSelector(s)
	return err == nil && sel.Matches(labels.Set(set))
}

// oracle returns the verdict of the policies of one end and the rule or rules
// that may be named for it: a NetworkPolicy's allow may be any that matches.
func oracle(policies []*state.Policy, d Direction, q question) (Verdict, []string) {
	self, other := q.from, q.to
	if d == Ingress {
		self, other = q.to, q.from
	}
	if self.pod == nil {
		return Allow, []string{"no rule allows"}
	}
	if v, rule := walkTier(policies, policyv1alpha2.AdminTier, d, self, other, q); v == Allow || v == Deny {
		return v, []string{rule}
	}
	isolated := false
	var allows []string
	for _, p := range policies {
		if p.NetworkPolicy == nil || p.Namespace != self.id.Namespace || !selects(&p.NetworkPolicy.PodSelector, self.id.Labels) {
			continue
		}
		applies, rules := networkPolicyAllows(p, d, other, q)
		isolated = isolated || applies
		allows = append(allows, rules...)
	}
	switch {
	case len(allows) > 0:
		return Allow, allows
	case isolated:
		return Deny, []string{"no rule allows"}
	}
	switch v, rule := walkTier(policies, policyv1alpha2.BaselineTier, d, self, other, q); v {
	case Allow, Pass: // behind the baseline tier all is allowed
		return Allow, []string{rule}
	case Deny:
		return Deny, []string{rule}
	}
	return Allow, []string{"no rule allows"}
}

func networkPolicyAllows(p *state.Policy, d Direction, other end, q question) (applies bool, rules []string) {
	spec := p.NetworkPolicy
	applies = slices.Contains(spec.PolicyTypes, map[Direction]networkingv1.PolicyType{Egress: "Egress", Ingress: "Ingress"}[d])
	if len(spec.PolicyTypes) == 0 {
		applies = d == Ingress || len(spec.Egress) > 0
	}
	if !applies {
		return false, nil
	}
	say := func(i int, peers []networkingv1.NetworkPolicyPeer, ports []networkingv1.NetworkPolicyPort) {
		peer := len(peers) == 0 || slices.ContainsFunc(peers, func(x networkingv1.NetworkPolicyPeer) bool { return peerMatches(x, p.Namespace, other) })
		port := len(ports) == 0 || slices.ContainsFunc(ports, func(x networkingv1.NetworkPolicyPort) bool { return portMatches(x, q) })
		if peer && port {
			rules = append(rules, Rule{Number: firstRule, Policy: Ref{p.Kind, p.Namespace, p.Name}, Direction: d, Index: i}.String())
		}
	}
	if d == Ingress {
		for i, r := range spec.Ingress {
			say(i, r.From, r.Ports)
		}
	} else {
		for i, r := range spec.Egress {
			say(i, r.To, r.Ports)
		}
	}
	return true, rules
}

func peerMatches(x networkingv1.NetworkPolicyPeer, namespace string, other end) bool {
	if x.IPBlock != nil {
		in := netip.MustParsePrefix(x.IPBlock.CIDR).Contains(other.ip)
		for _, e := range x.IPBlock.Except {
			in = in && !netip.MustParsePrefix(e).Contains(other.ip)
		}
		return in
	}
	if other.id == nil {
		return false
	}
	ns := other.id.Namespace == namespace
	if x.NamespaceSelector != nil {
		ns = selects(x.NamespaceSelector, other.id.NamespaceLabels)
	}
	return ns && (x.PodSelector == nil || selects(x.PodSelector, other.id.Labels))
}

func portMatches(x networkingv1.NetworkPolicyPort, q question) bool {
	protocol := "TCP"
	if x.Protocol != nil {
		protocol = string(*x.Protocol)
	}
	if map[string]uint8{"TCP": 6, "UDP": 17, "SCTP": 132}[protocol] != q.protocol {
		return false
	}
	switch {
	case x.Port == nil:
		return true
	case x.Port.Type == intstr.String:
		return hasNamed(q, protocol, x.Port.StrVal)
	case x.EndPort != nil:
		return int32(q.port) >= x.Port.IntVal && int32(q.port) <= *x.EndPort
	}
	return int32(q.port) == x.Port.IntVal
}

// hasNamed is true where the connection goes to the port of that name.
func hasNamed(q question, protocol, name string) bool {
	return q.to.pod != nil && slices.ContainsFunc(q.to.pod.Ports, func(p state.Port) bool {
		number := map[string]uint8{"TCP": 6, "UDP": 17, "SCTP": 132}[string(p.Protocol)]
		return p.Name == name && (protocol == "" || protocol == string(p.Protocol)) && number == q.protocol && p.Port == q.port
	})
}

// walkTier returns what the first matching rule of a tier says.
func walkTier(policies []*state.Policy, tier policyv1alpha2.Tier, d Direction, self, other end, q question) (Verdict, string) {
	var in []*state.Policy
	for _, p := range policies {
		if c := p.ClusterNetworkPolicy; c != nil && c.Tier == tier && clusterSelects(c.Subject.Namespaces, c.Subject.Pods, self.id) {
			in = append(in, p)
		}
	}
	slices.SortFunc(in, func(a, b *state.Policy) int {
		return cmp.Or(cmp.Compare(a.ClusterNetworkPolicy.Priority, b.ClusterNetworkPolicy.Priority), cmp.Compare(a.Name, b.Name))
	})
	for _, p := range in {
		rules := egressRules(p.ClusterNetworkPolicy)
		if d == Ingress {
			rules = ingressRules(p.ClusterNetworkPolicy)
		}
		for i, r := range rules {
			if v := clusterVerdict(r, other, q); v != NoVerdict {
				return v, Rule{Number: firstRule, Policy: Ref{p.Kind, "", p.Name}, Direction: d, Index: i, Name: r.Name}.String()
			}
		}
	}
	return NoVerdict, ""
}

func egressRules(c *policyv1alpha2.ClusterNetworkPolicySpec) []policyv1alpha2.ClusterNetworkPolicyEgressRule {
	return c.Egress
}

func ingressRules(c *policyv1alpha2.ClusterNetworkPolicySpec) []policyv1alpha2.ClusterNetworkPolicyEgressRule {
	var out []policyv1alpha2.ClusterNetworkPolicyEgressRule
	for _, r := range c.Ingress {
		e := policyv1alpha2.ClusterNetworkPolicyEgressRule{Name: r.Name, Action: r.Action, Protocols: r.Protocols}
		for _, f := range r.From {
			e.To = append(e.To, policyv1alpha2.ClusterNetworkPolicyEgressPeer{Namespaces: f.Namespaces, Pods: f.Pods})
		}
		out = append(out, e)
	}
	return out
}

// clusterVerdict is NoVerdict for a rule that does not match. A rule with
// domain names, which are not supported, fails closed.
func clusterVerdict(r policyv1alpha2.ClusterNetworkPolicyEgressRule, other end, q question) Verdict {
	v := map[policyv1alpha2.ClusterNetworkPolicyRuleAction]Verdict{"Accept": Allow, "Deny": Deny, "Pass": Pass}[r.Action]
	if slices.ContainsFunc(r.To, func(x policyv1alpha2.ClusterNetworkPolicyEgressPeer) bool { return len(x.DomainNames) > 0 }) {
		if v == Allow {
			return NoVerdict
		}
		return Deny
	}
	peer := slices.ContainsFunc(r.To, func(x policyv1alpha2.ClusterNetworkPolicyEgressPeer) bool {
		for _, n := range x.Networks {
			if netip.MustParsePrefix(string(n)).Contains(other.ip) {
				return true
			}
		}
		if x.Nodes != nil {
			return other.node != nil && selects(x.Nodes, other.node.Labels)
		}
		return other.id != nil && clusterSelects(x.Namespaces, x.Pods, other.id)
	})
	protocol := len(r.Protocols) == 0 || slices.ContainsFunc(r.Protocols, func(x policyv1alpha2.ClusterNetworkPolicyProtocol) bool {
		switch {
		case x.TCP != nil:
			return q.protocol == TCP && clusterPort(x.TCP.DestinationPort, q.port)
		case x.UDP != nil:
			return q.protocol == UDP && clusterPort(x.UDP.DestinationPort, q.port)
		case x.SCTP != nil:
			return q.protocol == SCTP && clusterPort(x.SCTP.DestinationPort, q.port)
		}
		return hasNamed(q, "", x.DestinationNamedPort)
	})
	if peer && protocol {
		return v
	}
	return NoVerdict
}

func clusterPort(p *policyv1alpha2.Port, port uint16) bool {
	switch {
	case p == nil:
		return true
	case p.Range != nil:
		return int32(port) >= p.Range.Start && int32(port) <= p.Range.End
	}
	return int32(port) == p.Number
}

func clusterSelects(namespaces *metav1.LabelSelector, pods *policyv1alpha2.NamespacedPod, id *state.Identity) bool {
	if namespaces != nil {
		return selects(namespaces, id.NamespaceLabels)
	}
	return pods != nil && selects(&pods.NamespaceSelector, id.NamespaceLabels) && selects(&pods.PodSelector, id.Labels)
}
