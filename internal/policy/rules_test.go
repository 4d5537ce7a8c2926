// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	networkingv1 "k8s.io/api/networking/v1"
	policyv1alpha2 "sigs.k8s.io/network-policy-api/apis/v1alpha2"
	"sigs.k8s.io/yaml"

	"github.com/weft-mesh/weft/internal/identity"
	"github.com/weft-mesh/weft/internal/state"
)

// The cluster of the tables: pods a and b in namespace shop, c in namespace
// bank, each on this node and with a port http of another number; a node far,
// and an address out on the internet.
var (
	tablePods = []Pod{
		{Namespace: "shop", Name: "a", Identity: 256, Local: true, IPs: ips("10.0.1.1", "fd00::1:1"), Ports: []state.Port{{Name: "http", Port: 8001, Protocol: "TCP"}}},
		{Namespace: "shop", Name: "b", Identity: 257, Local: true, IPs: ips("10.0.1.2", "fd00::1:2"), Ports: []state.Port{{Name: "http", Port: 8002, Protocol: "TCP"}, {Name: "dns", Port: 53, Protocol: "UDP"}}},
		{Namespace: "bank", Name: "c", Identity: 258, Local: true, IPs: ips("10.0.2.3", "fd00::2:3"), Ports: []state.Port{{Name: "http", Port: 8003, Protocol: "TCP"}, {Name: "http", Port: 9003, Protocol: "TCP"}}},
	}
	tableIDs = []*state.Identity{
		{ID: 256, Namespace: "shop", NamespaceLabels: map[string]string{"team": "sales"}, Labels: map[string]string{"app": "a", "web": "yes"}},
		{ID: 257, Namespace: "shop", NamespaceLabels: map[string]string{"team": "sales"}, Labels: map[string]string{"app": "b"}},
		{ID: 258, Namespace: "bank", NamespaceLabels: map[string]string{"team": "money"}, Labels: map[string]string{"app": "c", "web": "no"}},
	}
	tableNodes = []*state.Node{{Name: "far", Labels: map[string]string{"zone": "z"}, IPs: ips("172.30.0.2")}}
)

func ips(texts ...string) []netip.Addr {
	var out []netip.Addr
	for _, t := range texts {
		out = append(out, netip.MustParseAddr(t))
	}
	return out
}

// rulesTests are policies in short form: a line "shop/x:" or "x:" (a
// ClusterNetworkPolicy) followed by the YAML of the spec. Each line of says is
// "FROM TO PORT VERDICT [RULE]", with a, b, c, far, node (the pods' own) or an
// address; a6 is a's other address.
var rulesTests = []struct {
	name     string
	policies map[string]string
	says     []string
	problems []string
}{
	{name: "no policy allows everything", says: []string{"a b 80/TCP allow", "192.0.2.1 a 1/ICMP allow"}},
	{name: "an empty podSelector selects the whole namespace and no other",
		policies: map[string]string{"shop/p": `{podSelector: {}}`},
		says:     []string{"c a 80/TCP deny no rule allows", "a b 80/TCP deny", "a c 80/TCP allow", "a 192.0.2.1 80/TCP allow"}},
	{name: "an empty ingress rule allows everyone, on every protocol",
		policies: map[string]string{"shop/p": `{podSelector: {}, ingress: [{}]}`},
		says:     []string{"c a 80/TCP allow NetworkPolicy shop/p ingress[0]", "192.0.2.1 a 0/ICMP allow NetworkPolicy shop/p ingress[0]"}},
	{name: "policyTypes defaults to Ingress, and Egress where there are egress rules",
		policies: map[string]string{"shop/p": `{podSelector: {matchLabels: {app: a}}, egress: [{to: [{podSelector: {}}]}]}`},
		says:     []string{"a b 80/TCP allow NetworkPolicy shop/p egress[0]", "a c 80/TCP deny no rule allows", "b a 80/TCP deny"}},
	{name: "policyTypes of Egress alone leaves ingress open, whatever rules there are",
		policies: map[string]string{"shop/p": `{podSelector: {}, policyTypes: [Egress], ingress: [{from: [{podSelector: {matchLabels: {app: none}}}]}]}`},
		says:     []string{"c a 80/TCP allow", "a c 80/TCP deny"}},
	{name: "ports without peers allow everyone on them",
		policies: map[string]string{"shop/p": `{podSelector: {}, ingress: [{ports: [{port: 80}, {protocol: UDP}]}]}`},
		says:     []string{"c a 80/TCP allow", "c a 81/TCP deny", "c a 7/UDP allow", "c a 80/SCTP deny", "c a 0/ICMP deny"}},
	{name: "podSelector alone means the policy's namespace",
		policies: map[string]string{"shop/p": `{podSelector: {}, ingress: [{from: [{podSelector: {}}]}]}`},
		says:     []string{"b a 80/TCP allow", "c a 80/TCP deny", "10.0.1.9 a 80/TCP deny"}},
	{name: "namespaceSelector alone means all pods of the namespaces",
		policies: map[string]string{"shop/p": `{podSelector: {}, ingress: [{from: [{namespaceSelector: {matchLabels: {team: money}}}]}]}`},
		says:     []string{"c a 80/TCP allow", "b a 80/TCP deny"}},
	{name: "both selectors in one peer are an and, in two an or",
		policies: map[string]string{
			"shop/and": `{podSelector: {matchLabels: {app: a}}, ingress: [{from: [{namespaceSelector: {matchLabels: {team: money}}, podSelector: {matchLabels: {web: "yes"}}}]}]}`,
			"shop/or":  `{podSelector: {matchLabels: {app: b}}, ingress: [{from: [{namespaceSelector: {matchLabels: {team: money}}}, {podSelector: {matchLabels: {web: "yes"}}}]}]}`},
		says: []string{"c a 80/TCP deny", "b a 80/TCP deny", "c b 80/TCP allow", "a b 80/TCP allow"}},
	{name: "an empty namespaceSelector is all pods of the cluster, nothing outside",
		policies: map[string]string{"shop/p": `{podSelector: {}, ingress: [{from: [{namespaceSelector: {}}]}]}`},
		says:     []string{"c a 80/TCP allow", "192.0.2.1 a 80/TCP deny", "far a 80/TCP deny"}},
	{name: "matchExpressions: NotIn and DoesNotExist match where the label is absent",
		policies: map[string]string{
			"shop/p": `{podSelector: {matchLabels: {app: a}}, ingress: [{from: [{namespaceSelector: {}, podSelector: {matchExpressions: [{key: web, operator: NotIn, values: ["no"]}]}}]}]}`,
			"bank/p": `{podSelector: {}, ingress: [{from: [{namespaceSelector: {}, podSelector: {matchExpressions: [{key: web, operator: DoesNotExist}]}}]}]}`},
		says: []string{"b a 80/TCP allow", "c a 80/TCP deny", "b c 80/TCP allow", "a c 80/TCP deny"}},
	{name: "matchExpressions: In and Exists need the label",
		policies: map[string]string{
			"shop/p": `{podSelector: {matchExpressions: [{key: web, operator: Exists}]}, ingress: [{from: [{namespaceSelector: {}, podSelector: {matchExpressions: [{key: app, operator: In, values: [x, c]}]}}]}]}`},
		says: []string{"c a 80/TCP allow", "b a 80/TCP deny", "a b 80/TCP allow"}},
	{name: "an ipBlock without its exceptions, pods and nodes included",
		policies: map[string]string{"shop/p": `{podSelector: {matchLabels: {app: a}}, policyTypes: [Egress], egress: [{to: [{ipBlock: {cidr: 10.0.0.0/8, except: [10.0.2.0/24]}}, {ipBlock: {cidr: 172.30.0.0/24}}]}]}`},
		says:     []string{"a b 80/TCP allow", "a c 80/TCP deny", "a 10.9.9.9 80/TCP allow", "a far 80/TCP allow", "a 192.0.2.1 80/TCP deny", "a b6 80/TCP deny"}},
	{name: "an exception of one block is no exception of another",
		policies: map[string]string{"shop/p": `{podSelector: {}, ingress: [{from: [{ipBlock: {cidr: 10.0.0.0/8, except: [10.5.0.0/16]}}]}, {from: [{ipBlock: {cidr: 10.5.1.0/24}}], ports: [{port: 80}]}]}`},
		says:     []string{"10.5.0.1 a 80/TCP deny", "10.5.1.1 a 80/TCP allow NetworkPolicy shop/p ingress[1]", "10.5.1.1 a 81/TCP deny", "10.6.0.1 a 81/TCP allow"}},
	{name: "0.0.0.0/0 is all of IPv4, ::/0 all of IPv6",
		policies: map[string]string{
			"shop/four": `{podSelector: {matchLabels: {app: a}}, ingress: [{from: [{ipBlock: {cidr: 0.0.0.0/0}}]}]}`,
			"shop/six":  `{podSelector: {matchLabels: {app: b}}, ingress: [{from: [{ipBlock: {cidr: "::/0"}}]}]}`},
		says: []string{"192.0.2.1 a 80/TCP allow", "2001:db8::1 a 80/TCP deny", "192.0.2.1 b 80/TCP deny", "2001:db8::1 b 80/TCP allow"}},
	{name: "endPort",
		policies: map[string]string{"shop/p": `{podSelector: {}, ingress: [{ports: [{port: 1000, endPort: 2000}, {protocol: SCTP, port: 65535, endPort: 65535}]}]}`},
		says:     []string{"c a 999/TCP deny", "c a 1000/TCP allow", "c a 1500/TCP allow", "c a 2000/TCP allow", "c a 2001/TCP deny", "c a 1500/UDP deny", "c a 65535/SCTP allow", "c a 65534/SCTP deny"}},
	{name: "a named port of ingress is each pod's own",
		policies: map[string]string{"shop/p": `{podSelector: {}, ingress: [{ports: [{port: http}]}]}`},
		says:     []string{"c a 8001/TCP allow", "c a 8002/TCP deny", "c b 8002/TCP allow", "c b 8001/TCP deny", "c a 8001/UDP deny"}},
	{name: "a named port of egress is that of the pod it leads to, all its numbers",
		policies: map[string]string{"shop/p": `{podSelector: {matchLabels: {app: a}}, policyTypes: [Egress], egress: [{to: [{namespaceSelector: {}}], ports: [{port: http}]}]}`},
		says:     []string{"a b 8002/TCP allow", "a b 8003/TCP deny", "a c 8003/TCP allow", "a c 9003/TCP allow", "a c6 8003/TCP allow", "a 192.0.2.1 8003/TCP deny"}},
	{name: "a named port has a protocol",
		policies: map[string]string{"shop/p": `{podSelector: {matchLabels: {app: b}}, ingress: [{ports: [{port: dns}, {port: http, protocol: UDP}]}]}`},
		says:     []string{"a b 53/TCP deny", "a b 53/UDP deny", "a b 8002/UDP deny"}},
	{name: "policies add up",
		policies: map[string]string{
			"shop/one": `{podSelector: {}, ingress: [{ports: [{port: 80}]}]}`,
			"shop/two": `{podSelector: {}, ingress: [{ports: [{port: 80, endPort: 90}]}]}`},
		says: []string{"c a 80/TCP allow NetworkPolicy shop/one ingress[0]", "c a 85/TCP allow NetworkPolicy shop/two ingress[0]", "c a 91/TCP deny"}},
	{name: "a pod reaches its node and the node it, whatever the policies",
		policies: map[string]string{"shop/p": `{podSelector: {}, policyTypes: [Ingress, Egress]}`,
			"c": `{tier: Admin, priority: 0, subject: {namespaces: {}}, egress: [{action: Deny, to: [{networks: [0.0.0.0/0]}]}]}`},
		says: []string{"node a 80/TCP allow the pod's own node", "a node 80/TCP allow the pod's own node", "far a 80/TCP deny"}},
	{name: "a pod reaches itself",
		policies: map[string]string{"shop/p": `{podSelector: {}, policyTypes: [Ingress, Egress]}`},
		says:     []string{"a a 80/TCP allow"}},
	{name: "the admin tier decides before a NetworkPolicy",
		policies: map[string]string{
			"shop/p": `{podSelector: {}, ingress: [{ports: [{port: 80}]}]}`,
			"deny":   `{tier: Admin, priority: 10, subject: {namespaces: {}}, ingress: [{name: no bank, action: Deny, from: [{namespaces: {matchLabels: {team: money}}}], protocols: [{tcp: {destinationPort: {number: 80}}}]}]}`,
			"accept": `{tier: Admin, priority: 20, subject: {namespaces: {}}, ingress: [{action: Accept, from: [{namespaces: {}}], protocols: [{tcp: {destinationPort: {range: {start: 80, end: 90}}}}]}]}`},
		says: []string{"c a 80/TCP deny ClusterNetworkPolicy deny ingress[0] (no bank)", "c a 81/TCP allow ClusterNetworkPolicy accept ingress[0]",
			"b a 80/TCP allow ClusterNetworkPolicy accept ingress[0]", "192.0.2.1 a 80/TCP allow NetworkPolicy shop/p ingress[0]", "192.0.2.1 a 81/TCP deny"}},
	{name: "less priority first, then the name, then the order of the rules",
		policies: map[string]string{
			"z": `{tier: Admin, priority: 1, subject: {namespaces: {}}, ingress: [{action: Accept, from: [{namespaces: {}}], protocols: [{tcp: {destinationPort: {number: 1}}}]}, {action: Deny, from: [{namespaces: {}}], protocols: [{tcp: {destinationPort: {range: {start: 1, end: 2}}}}]}]}`,
			"b": `{tier: Admin, priority: 2, subject: {namespaces: {}}, ingress: [{action: Accept, from: [{namespaces: {}}], protocols: [{tcp: {destinationPort: {range: {start: 1, end: 3}}}}]}]}`,
			"c": `{tier: Admin, priority: 2, subject: {namespaces: {}}, ingress: [{action: Deny, from: [{namespaces: {}}]}]}`},
		says: []string{"c a 1/TCP allow ClusterNetworkPolicy z ingress[0]", "c a 2/TCP deny ClusterNetworkPolicy z ingress[1]",
			"c a 3/TCP allow ClusterNetworkPolicy b ingress[0]", "c a 4/TCP deny ClusterNetworkPolicy c ingress[0]"}},
	{name: "Pass goes on to NetworkPolicy, past the rest of the admin tier, also where another kind of peer matches",
		policies: map[string]string{
			"shop/p": `{podSelector: {matchLabels: {app: a}}, policyTypes: [Egress], egress: [{to: [{podSelector: {}}]}]}`,
			"pass":   `{tier: Admin, priority: 1, subject: {namespaces: {}}, egress: [{action: Pass, to: [{namespaces: {}}]}]}`,
			"deny":   `{tier: Admin, priority: 2, subject: {namespaces: {}}, egress: [{action: Deny, to: [{networks: [0.0.0.0/0]}]}]}`},
		says: []string{"a b 80/TCP allow NetworkPolicy shop/p egress[0]", "a c 80/TCP deny no rule allows", "b c 80/TCP allow no rule allows",
			"b 192.0.2.1 80/TCP deny ClusterNetworkPolicy deny egress[0]"}},
	{name: "the baseline tier holds where no NetworkPolicy selects the pod",
		policies: map[string]string{
			"shop/p": `{podSelector: {matchLabels: {app: a}}, ingress: [{ports: [{port: 80}]}]}`,
			"base":   `{tier: Baseline, priority: 1, subject: {namespaces: {}}, ingress: [{action: Pass, from: [{pods: {namespaceSelector: {}, podSelector: {matchLabels: {app: b}}}}]}, {action: Deny, from: [{namespaces: {}}]}]}`},
		says: []string{"c a 80/TCP allow NetworkPolicy shop/p ingress[0]", "c a 81/TCP deny no rule allows", "c b 80/TCP deny ClusterNetworkPolicy base ingress[1]",
			"b c 80/TCP allow ClusterNetworkPolicy base ingress[0]", "192.0.2.1 b 80/TCP allow no rule allows"}},
	{name: "a subject of pods",
		policies: map[string]string{"p": `{tier: Admin, priority: 1, subject: {pods: {namespaceSelector: {matchLabels: {team: sales}}, podSelector: {matchLabels: {app: b}}}}, ingress: [{action: Deny, from: [{namespaces: {}}]}]}`},
		says:     []string{"c b 80/TCP deny", "c a 80/TCP allow", "a c 80/TCP allow"}},
	{name: "nodes by label",
		policies: map[string]string{"p": `{tier: Admin, priority: 1, subject: {namespaces: {}}, egress: [{action: Deny, to: [{nodes: {matchLabels: {zone: z}}}]}]}`},
		says:     []string{"a far 80/TCP deny ClusterNetworkPolicy p egress[0]", "a 172.30.0.3 80/TCP allow"}},
	{name: "a destination's named port of a ClusterNetworkPolicy, whatever the protocol",
		policies: map[string]string{"p": `{tier: Admin, priority: 1, subject: {pods: {namespaceSelector: {}, podSelector: {matchLabels: {app: a}}}}, egress: [{action: Deny, to: [{namespaces: {}}], protocols: [{destinationNamedPort: dns}]}]}`},
		says:     []string{"a b 53/UDP deny", "a b 53/TCP allow", "a c 53/UDP allow"}},
	{name: "domain names fail closed: an Accept matches nothing",
		policies: map[string]string{"p": `{tier: Admin, priority: 1, subject: {namespaces: {}}, egress: [{action: Accept, to: [{domainNames: [example.com]}, {namespaces: {}}]}, {action: Deny, to: [{networks: [0.0.0.0/0]}]}]}`},
		says:     []string{"a b 80/TCP deny", "a 192.0.2.1 80/TCP deny"},
		problems: []string{"ClusterNetworkPolicy p: egress[0]: peer 0 has domainNames, which are not supported; the rule accepts nothing"}},
	{name: "a peer that is not known fails closed: a Deny or Pass denies everything",
		policies: map[string]string{"p": `{tier: Admin, priority: 1, subject: {namespaces: {}}, ingress: [{name: x, action: Pass, from: [{}]}]}`},
		says:     []string{"a b 80/TCP deny ClusterNetworkPolicy p ingress[0] (x)", "192.0.2.1 a 0/ICMP deny"},
		problems: []string{"ClusterNetworkPolicy p: ingress[0] (x): peer 0 has 0 known fields: want one of namespaces, pods, nodes and networks; the rule denies everything"}},
	{name: "what is not valid in a NetworkPolicy allows nothing",
		policies: map[string]string{"shop/p": `{podSelector: {}, ingress: [{from: [{}]}, {ports: [{protocol: ICMP}]}, {ports: [{port: http, endPort: 90}]}, {from: [{ipBlock: {cidr: x}}]}]}`},
		says:     []string{"c a 80/TCP deny", "c a 8001/TCP deny"},
		problems: []string{
			"NetworkPolicy shop/p: ingress[0], peer 0: is empty: want ipBlock, podSelector or namespaceSelector; it matches nothing",
			`NetworkPolicy shop/p: ingress[1], port 0: protocol "ICMP": want TCP, UDP or SCTP; it matches nothing`,
			`NetworkPolicy shop/p: ingress[2], port 0: endPort 90 beside the name "http": want a number in port; it matches nothing`,
			`NetworkPolicy shop/p: ingress[3], peer 0: ipBlock: "x": want a CIDR; it matches nothing`,
		}},
	{name: "a podSelector that is not valid isolates the namespace",
		policies: map[string]string{"shop/p": `{podSelector: {matchExpressions: [{key: a, operator: Is}]}, ingress: [{}]}`},
		says:     []string{"c a 80/TCP deny", "a c 80/TCP allow"},
		problems: []string{`NetworkPolicy shop/p: podSelector: operator "Is" on label a: want In, NotIn, Exists or DoesNotExist; it selects every pod of the namespace and allows nothing`}},
	{name: "a subject that is not valid selects nothing",
		policies: map[string]string{"p": `{tier: Admin, priority: 1, subject: {}, ingress: [{action: Accept, from: [{namespaces: {}}]}]}`, "q": `{tier: Best, priority: 1, subject: {namespaces: {}}}`},
		says:     []string{"c a 80/TCP allow no rule allows"},
		problems: []string{`ClusterNetworkPolicy q: tier "Best": want Admin or Baseline; it is not enforced`, "ClusterNetworkPolicy p: subject: is empty: want namespaces or pods; it selects no pod"}},
}

func tableInput(t *testing.T, policies map[string]string) Input {
	t.Helper()
	in := Input{Pods: tablePods, Identities: tableIDs, Nodes: tableNodes}
	for name, text := range policies {
		p := &state.Policy{Kind: "ClusterNetworkPolicy", Name: name, ClusterNetworkPolicy: &policyv1alpha2.ClusterNetworkPolicySpec{}}
		var spec any = p.ClusterNetworkPolicy
		if ns, n, namespaced := strings.Cut(name, "/"); namespaced {
			p = &state.Policy{Kind: "NetworkPolicy", Namespace: ns, Name: n, NetworkPolicy: &networkingv1.NetworkPolicySpec{}}
			spec = p.NetworkPolicy
		}
		if err := yaml.UnmarshalStrict([]byte(text), spec); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		in.Policies = append(in.Policies, p)
	}
	return in
}

func tableParty(name string) Party {
	for i := range tablePods {
		p := &tablePods[i]
		if strings.TrimSuffix(name, "6") == p.Name {
			return Party{Endpoint: p.ID(), Identity: p.Identity, Addr: p.IPs[strings.Count(name, "6")]}
		}
	}
	switch name {
	case "node":
		return Party{Identity: identity.Node, Addr: netip.MustParseAddr("172.30.0.1")}
	case "far":
		return Party{Identity: identity.RemoteNode, Addr: tableNodes[0].IPs[0]}
	}
	return Party{Identity: identity.World, Addr: netip.MustParseAddr(name)}
}

// say asks r what a line asks and returns the line with the answer.
func say(t *testing.T, r *Result, line string) string {
	t.Helper()
	f := strings.Fields(line)
	text, protocol, _ := strings.Cut(f[2], "/")
	port, err := strconv.ParseUint(text, 10, 16)
	if err != nil {
		t.Fatalf("line %q: %v", line, err)
	}
	number, ok := protocolByName(protocol)
	if !ok {
		number, port = 1, 0
	}
	d := r.Trace(tableParty(f[0]), tableParty(f[1]), number, uint16(port))
	verdict, rule := Allow, d.Ingress.Rule
	if !d.Ingress.Judged || d.Egress.Verdict == Deny {
		rule = d.Egress.Rule
	}
	if !d.Allowed {
		verdict = Deny
	}
	said := strings.Join([]string{f[0], f[1], f[2], verdict.String()}, " ")
	if len(f) > 4 {
		said += " " + rule.String()
	}
	return said
}

func TestRules(t *testing.T) {
	for _, c := range rulesTests {
		t.Run(c.name, func(t *testing.T) {
			r := Compile(tableInput(t, c.policies))
			for _, line := range c.says {
				if got := say(t, r, line); got != line {
					t.Errorf("got  %s\nwant %s", got, line)
				}
			}
			var problems []string
			for _, p := range r.Problems {
				problems = append(problems, p.String())
			}
			if !slices.Equal(problems, c.problems) {
				t.Errorf("problems %q, want %q", problems, c.problems)
			}
		})
	}
}

// entryText is an entry as one line.
func entryText(r *Result, e Entry) string {
	peer := fmt.Sprint(e.Peer)
	for _, c := range r.Prefixes {
		if c.Number == e.Peer {
			peer = c.Prefix.String()
		}
	}
	first, last := e.PortRange()
	s := fmt.Sprintf("%s %s %d:%d-%d", e.Direction, peer, e.Protocol, first, last)
	for _, o := range []Outcome{e.Admin, e.Lower} {
		s += " " + o.Verdict.String()
	}
	return s
}

// TestEntriesAreFew has the whole of small subjects.
func TestEntriesAreFew(t *testing.T) {
	const egressOpen = "egress 0 0:0-65535 none allow|egress 1 0:0-65535 allow none|"
	const ingressOpen = "|ingress 0 0:0-65535 none allow|ingress 1 0:0-65535 allow none"
	for _, c := range []struct{ name, policy, want string }{
		{"isolated", `{podSelector: {}}`, "ingress 0 0:0-65535 none deny|ingress 1 0:0-65535 allow none"},
		{"all ports of a range that a prefix is", `{podSelector: {}, ingress: [{ports: [{port: 1024, endPort: 2047}]}]}`,
			"ingress 0 0:0-65535 none deny|ingress 0 6:1024-2047 none allow|ingress 1 0:0-65535 allow none"},
		{"ports side by side in one rule", `{podSelector: {}, ingress: [{ports: [{port: 80}, {port: 81}, {port: 82, endPort: 83}]}]}`,
			"ingress 0 0:0-65535 none deny|ingress 0 6:80-83 none allow|ingress 1 0:0-65535 allow none"},
		{"all but one port", `{podSelector: {}, ingress: [{ports: [{port: 1, endPort: 65535}]}]}`,
			"ingress 0 0:0-65535 none deny|ingress 0 6:0-65535 none allow|ingress 0 6:0-0 none deny|ingress 1 0:0-65535 allow none"},
		{"a peer that everyone's rule is before", `{podSelector: {}, ingress: [{ports: [{port: 80}]}, {from: [{podSelector: {}}], ports: [{port: 80}]}]}`,
			"ingress 0 0:0-65535 none deny|ingress 0 6:80-80 none allow|ingress 1 0:0-65535 allow none"},
		{"a peer with a hole that everyone's rule fills", `{podSelector: {}, ingress: [{ports: [{port: 80}]}, {from: [{podSelector: {matchLabels: {app: b}}}]}]}`,
			"ingress 0 0:0-65535 none deny|ingress 0 6:80-80 none allow|ingress 1 0:0-65535 allow none|ingress 257 0:0-65535 none allow"},
		{"a rule in two parts", `{podSelector: {}, ingress: [{from: [{podSelector: {matchLabels: {app: b}}}, {ipBlock: {cidr: 192.0.2.0/24}}], ports: [{port: 8000}, {port: http}]}]}`,
			"ingress 0 0:0-65535 none deny|ingress 1 0:0-65535 allow none|ingress 257 6:8000-8001 none allow|ingress 192.0.2.0/24 6:8000-8001 none allow"},
		{"an egress rule in two parts", `{podSelector: {}, policyTypes: [Egress], egress: [{to: [{ipBlock: {cidr: 10.0.1.0/31}}], ports: [{port: 8000}, {port: http}]}]}`,
			"egress 0 0:0-65535 none deny|egress 1 0:0-65535 allow none|egress 10.0.1.0/31 6:8000-8000 none allow|egress 10.0.1.1/32 6:8000-8001 none allow" + ingressOpen},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := Compile(tableInput(t, map[string]string{"shop/p": c.policy}))
			var got []string
			for _, e := range r.Subjects[r.Endpoints[tablePods[0].ID()]].Entries {
				got = append(got, entryText(r, e))
			}
			want := c.want
			if strings.HasPrefix(want, "ingress") {
				want = egressOpen + want
			}
			if text := strings.Join(got, "|"); text != want {
				t.Errorf("entries\n%s\nwant\n%s", text, want)
			}
		})
	}
}

// TestSubjectsAreShared: pods that the same policies concern in the same way
// have one subject; named ports part them.
func TestSubjectsAreShared(t *testing.T) {
	r := Compile(tableInput(t, map[string]string{"shop/p": `{podSelector: {}, ingress: [{ports: [{port: 80}]}]}`}))
	a, b := tablePods[0].ID(), tablePods[1].ID()
	if len(r.Subjects) != 1 || r.Endpoints[a] != r.Endpoints[b] {
		t.Errorf("%d subjects, want one", len(r.Subjects))
	}
	if _, there := r.Endpoints[tablePods[2].ID()]; there {
		t.Error("a pod that no policy concerns has a subject")
	}
	if got := fmt.Sprint(r.Selected[a]); got != "[NetworkPolicy shop/p]" {
		t.Errorf("selected by %s", got)
	}
	r = Compile(tableInput(t, map[string]string{"shop/p": `{podSelector: {}, ingress: [{ports: [{port: http}]}]}`}))
	if r.Endpoints[a] == r.Endpoints[b] {
		t.Error("pods with different numbers for a name share a subject")
	}
}

func TestPodOfUnknownIdentityIsIsolated(t *testing.T) {
	in := tableInput(t, nil)
	in.Identities = in.Identities[1:]
	r := Compile(in)
	if got := say(t, r, "c a 80/TCP deny"); got != "c a 80/TCP deny" {
		t.Errorf("got %s", got)
	}
	if len(r.Problems) != 1 {
		t.Errorf("problems %v, want one", r.Problems)
	}
}

// TestNumbersThatCollide gives rules with the same hash different numbers, that
// do not depend on what was compiled before.
func TestNumbersThatCollide(t *testing.T) {
	names := map[uint32]string{}
	one := func(name string) *parsed {
		ref := Ref{"NetworkPolicy", "shop", name}
		return &parsed{ref: ref, rules: []parsedRule{{Rule: Rule{Policy: ref, Direction: Ingress}}}}
	}
	numberOf := func(numbers map[ruleKey]uint32, p *parsed) uint32 { return numbers[keyOf(p.rules[0].Rule)] }
	for i := range 1 << 20 {
		b := one(fmt.Sprint("p", i))
		n := numberOf(number([]*parsed{b}), b)
		first, collides := names[n]
		names[n] = b.ref.Name
		if !collides {
			continue
		}
		a := one(first)
		numbers := number([]*parsed{a, b})
		if numberOf(numbers, a) != n || numberOf(numbers, b) != n+1 {
			t.Errorf("numbers %v, want %d and the next", numbers, n)
		}
		both := tableInput(t, map[string]string{
			"shop/" + a.ref.Name: `{podSelector: {}, ingress: [{ports: [{port: 80}]}]}`,
			"shop/" + b.ref.Name: `{podSelector: {}, ingress: [{ports: [{port: 443}]}]}`})
		for _, row := range both.Policies {
			var c Compiler
			only := both
			only.Policies = []*state.Policy{row}
			c.Compile(only)
			if r := c.Compile(both); !reflect.DeepEqual(r, Compile(both)) || len(r.Rules) != 4 {
				t.Errorf("%d rules, want 2 and the built-in ones, as compiled anew", len(r.Rules))
			}
		}
		return
	}
	t.Fatal("no two names with the same hash")
}
