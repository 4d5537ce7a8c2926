// SPDX-License-Identifier: Apache-2.0

package manifest

import (
	"fmt"
	"regexp"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	policyv1alpha2 "sigs.k8s.io/network-policy-api/apis/v1alpha2"
)

// Limits of the ClusterNetworkPolicy API.
const (
	maxPriority     = 1000
	maxClusterItems = 25 // of rules, peers, protocols, networks and domain names each
	maxRuleName     = 100
)

// requireOfClusterPolicy reports required fields of the tree of a
// ClusterNetworkPolicy that are absent and have a zero value that is valid, so
// that the typed object does not show it. The tree has the right types.
func (p *problems) requireOfClusterPolicy(m map[string]any) {
	spec, _ := m["spec"].(map[string]any)
	path := field.NewPath("spec")
	if spec["priority"] == nil {
		p.missing(path.Child("priority"), fmt.Sprintf("0 to %d; less is evaluated earlier", maxPriority))
	}
	p.requirePodSelector(path.Child("subject"), spec["subject"])
	p.requireOfPeers(path.Child("ingress"), spec["ingress"], "from")
	p.requireOfPeers(path.Child("egress"), spec["egress"], "to")
}

func (p *problems) requireOfPeers(path *field.Path, rules any, list string) {
	all, _ := rules.([]any)
	for i, r := range all {
		rule, _ := r.(map[string]any)
		peers, _ := rule[list].([]any)
		for j, x := range peers {
			p.requirePodSelector(path.Index(i).Child(list).Index(j), x)
		}
	}
}

func (p *problems) requirePodSelector(path *field.Path, v any) {
	m, _ := v.(map[string]any)
	pods, there := m["pods"].(map[string]any)
	if there && pods["podSelector"] == nil {
		p.missing(path.Child("pods", "podSelector"), "a selector; {} selects every pod")
	}
}

func checkClusterNetworkPolicy(p *problems, c *policyv1alpha2.ClusterNetworkPolicy) {
	spec, path := &c.Spec, field.NewPath("spec")
	oneOf(p, path.Child("tier"), spec.Tier, policyv1alpha2.AdminTier, policyv1alpha2.BaselineTier)
	if spec.Priority < 0 || spec.Priority > maxPriority {
		p.add(path.Child("priority"), spec.Priority, fmt.Sprintf("0 to %d", maxPriority))
	}
	subject := path.Child("subject")
	exactlyOne(p, subject, choice{"namespaces", spec.Subject.Namespaces != nil}, choice{"pods", spec.Subject.Pods != nil})
	checkPodChoice(p, subject, spec.Subject.Namespaces, spec.Subject.Pods)
	atMost(p, path.Child("ingress"), len(spec.Ingress))
	for i, r := range spec.Ingress {
		at := path.Child("ingress").Index(i)
		checkClusterRule(p, at, r.Name, r.Action)
		checkProtocols(p, at.Child("protocols"), r.Protocols)
		checkCount(p, at.Child("from"), len(r.From), "at least one peer")
		for j, x := range r.From {
			peer := at.Child("from").Index(j)
			exactlyOne(p, peer, choice{"namespaces", x.Namespaces != nil}, choice{"pods", x.Pods != nil})
			checkPodChoice(p, peer, x.Namespaces, x.Pods)
		}
	}
	atMost(p, path.Child("egress"), len(spec.Egress))
	for i, r := range spec.Egress {
		at := path.Child("egress").Index(i)
		checkClusterRule(p, at, r.Name, r.Action)
		checkProtocols(p, at.Child("protocols"), r.Protocols)
		checkCount(p, at.Child("to"), len(r.To), "at least one peer")
		for j := range r.To {
			checkEgressPeer(p, at.Child("to").Index(j), &r, &r.To[j])
		}
	}
}

// choice is a field of which exactly one of several must be set.
type choice struct {
	name string
	set  bool
}

func exactlyOne(p *problems, path *field.Path, of ...choice) {
	names, set, n := "", "", 0
	for i, c := range of {
		switch {
		case i > 0 && i == len(of)-1:
			names += " or "
		case i > 0:
			names += ", "
		}
		names += c.name
		if c.set {
			n++
			if n > 1 {
				set += " and "
			}
			set += c.name
		}
	}
	switch {
	case n == 0:
		p.missing(path, names)
	case n > 1:
		p.say(path, "has %s: want exactly one of %s", set, names)
	}
}

func atMost(p *problems, path *field.Path, n int) {
	if n > maxClusterItems {
		p.say(path, "%d items: want at most %d", n, maxClusterItems)
	}
}

func checkCount(p *problems, path *field.Path, n int, want string) {
	if n == 0 {
		p.missing(path, want)
	}
	atMost(p, path, n)
}

func checkPodChoice(p *problems, path *field.Path, namespaces *metav1.LabelSelector, pods *policyv1alpha2.NamespacedPod) {
	checkSelector(p, path.Child("namespaces"), namespaces)
	if pods != nil {
		checkSelector(p, path.Child("pods", "namespaceSelector"), &pods.NamespaceSelector)
		checkSelector(p, path.Child("pods", "podSelector"), &pods.PodSelector)
	}
}

func checkClusterRule(p *problems, path *field.Path, name string, action policyv1alpha2.ClusterNetworkPolicyRuleAction) {
	if len(name) > maxRuleName {
		p.add(path.Child("name"), name, fmt.Sprintf("at most %d bytes", maxRuleName))
	}
	oneOf(p, path.Child("action"), action, policyv1alpha2.ClusterNetworkPolicyRuleActionAccept,
		policyv1alpha2.ClusterNetworkPolicyRuleActionDeny, policyv1alpha2.ClusterNetworkPolicyRuleActionPass)
}

func checkEgressPeer(p *problems, path *field.Path, r *policyv1alpha2.ClusterNetworkPolicyEgressRule, x *policyv1alpha2.ClusterNetworkPolicyEgressPeer) {
	exactlyOne(p, path, choice{"namespaces", x.Namespaces != nil}, choice{"pods", x.Pods != nil}, choice{"nodes", x.Nodes != nil},
		choice{"networks", x.Networks != nil}, choice{"domainNames", x.DomainNames != nil})
	checkPodChoice(p, path, x.Namespaces, x.Pods)
	checkSelector(p, path.Child("nodes"), x.Nodes)
	if x.Networks != nil {
		checkCount(p, path.Child("networks"), len(x.Networks), "at least one CIDR")
	}
	texts := make([]string, 0, len(x.Networks))
	for i, n := range x.Networks {
		checkPrefix(p, path.Child("networks").Index(i), string(n))
		texts = append(texts, string(n))
	}
	unique(p, func(i int) *field.Path { return path.Child("networks").Index(i) }, texts)
	checkDomainNames(p, path.Child("domainNames"), r.Action, x.DomainNames)
	if x.Nodes == nil && x.Networks == nil && x.DomainNames == nil {
		return
	}
	for _, protocol := range r.Protocols {
		if protocol.DestinationNamedPort != "" {
			p.say(path, "has no named ports, and the rule names %s: want pods or namespaces, or ports by number", show(protocol.DestinationNamedPort))
		}
	}
}

var domainName = regexp.MustCompile(`^(\*\.)?([a-zA-Z0-9]([-a-zA-Z0-9_]*[a-zA-Z0-9])?\.)+[a-zA-Z0-9]([-a-zA-Z0-9_]*[a-zA-Z0-9])?\.?$`)

func checkDomainNames(p *problems, path *field.Path, action policyv1alpha2.ClusterNetworkPolicyRuleAction, names []policyv1alpha2.DomainName) {
	if names == nil {
		return
	}
	checkCount(p, path, len(names), "at least one domain name")
	if action != policyv1alpha2.ClusterNetworkPolicyRuleActionAccept {
		p.say(path, "in a rule with action %s: want action Accept, or other peers", show(action))
	}
	texts := make([]string, 0, len(names))
	for i, n := range names {
		if !domainName.MatchString(string(n)) {
			p.add(path.Index(i), n, "a domain name such as example.com or *.example.com")
		}
		texts = append(texts, string(n))
	}
	unique(p, func(i int) *field.Path { return path.Index(i) }, texts)
}

func checkProtocols(p *problems, path *field.Path, protocols []policyv1alpha2.ClusterNetworkPolicyProtocol) {
	if protocols == nil {
		return
	}
	checkCount(p, path, len(protocols), "at least one protocol, or no such field for all")
	for i, x := range protocols {
		at := path.Index(i)
		exactlyOne(p, at, choice{"tcp", x.TCP != nil}, choice{"udp", x.UDP != nil}, choice{"sctp", x.SCTP != nil},
			choice{"destinationNamedPort", x.DestinationNamedPort != ""})
		if x.TCP != nil {
			checkClusterPort(p, at.Child("tcp", "destinationPort"), x.TCP.DestinationPort)
		}
		if x.UDP != nil {
			checkClusterPort(p, at.Child("udp", "destinationPort"), x.UDP.DestinationPort)
		}
		if x.SCTP != nil {
			checkClusterPort(p, at.Child("sctp", "destinationPort"), x.SCTP.DestinationPort)
		}
		if x.DestinationNamedPort != "" {
			p.text(at.Child("destinationNamedPort"), x.DestinationNamedPort, validation.IsValidPortName)
		}
	}
}

// checkClusterPort wants a port: a protocol with nothing inside, which the API
// refuses too, is more likely an oversight than a wish for all ports.
func checkClusterPort(p *problems, path *field.Path, port *policyv1alpha2.Port) {
	if port == nil {
		p.missing(path, "a number or a range")
		return
	}
	exactlyOne(p, path, choice{"number", port.Number != 0}, choice{"range", port.Range != nil})
	if port.Number != 0 {
		checkPort(p, path.Child("number"), port.Number)
	}
	if r := port.Range; r != nil {
		checkPort(p, path.Child("range", "start"), r.Start)
		checkPort(p, path.Child("range", "end"), r.End)
		if r.Start >= r.End {
			p.add(path.Child("range", "end"), r.End, fmt.Sprintf("more than start, %d", r.Start))
		}
	}
}
