// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	policyv1alpha2 "sigs.k8s.io/network-policy-api/apis/v1alpha2"

	"github.com/weft-mesh/weft/internal/datapath/ipcache"
	pt "github.com/weft-mesh/weft/internal/datapath/packettest"
	"github.com/weft-mesh/weft/internal/identity"
	"github.com/weft-mesh/weft/internal/policy"
	"github.com/weft-mesh/weft/internal/state"
)

const (
	clusters            = 80
	connectionsOfSingle = 300 // for each of the two families
)

// TestDifferential: random policies, compiled and installed; random connections
// through the programs as they are loaded, and through Trace. Verdict and rule
// must be the same.
func TestDifferential(t *testing.T) {
	fix := newFixture(t, nil)
	verdicts, drops, rules := 0, 0, map[uint32]bool{}
	for seed := range uint64(clusters) {
		w := newCluster(fix, seed)
		w.install(t)
		for i := range connectionsOfSingle * len(pt.Families) {
			f := pt.Families[i%2]
			if i%200 == 0 {
				fix.Reset()
			}
			from, to := w.pair(f)
			p := w.packet(from.addr, to.addr, uint16(20000+i))
			want := w.trace(from, to, p)
			got := fix.send(t, p)
			if got != want {
				t.Fatalf("seed %d: %s (%s to %s): the programs say %v, Trace says %v", seed, p.Conn(), from.name, to.name, got, want)
			}
			verdicts++
			if want != passed {
				drops++
				rules[want.rule] = true
			}
		}
	}
	t.Logf("%d verdicts, %d of them drops, by %d rules", verdicts, drops, len(rules))
	if drops < verdicts/10 || drops > verdicts*9/10 {
		t.Errorf("%d of %d are drops: the policies say too little", drops, verdicts)
	}
}

// party is an end of connections.
type party struct {
	name string
	addr netip.Addr
	id   uint64
	pod  int // of cluster.pods, for one of this node; else -1
}

// cluster is random policies about the pods and addresses of the fixture.
type cluster struct {
	*rand.Rand
	fix     *fixture
	input   policy.Input
	result  *policy.Result
	parties map[bool][]party // by V6
}

var (
	appNames = []string{"web", "db", "client"}
	teams    = []string{"a", "b"}
)

func newCluster(fix *fixture, seed uint64) *cluster {
	w := &cluster{Rand: rand.New(rand.NewPCG(seed, 9)), fix: fix, parties: map[bool][]party{}}
	v4, v6 := pt.Families[0], pt.Families[1]
	w.addPod("pod-a", pt.IdentityA, true, v4.A, v6.A)
	w.addPod("pod-b", pt.IdentityB, true, v4.B, v6.B)
	r4, r6 := v4.RemotePod, v6.RemotePod
	for i := range 4 {
		r4, r6 = r4.Next(), r6.Next()
		w.addPod(fmt.Sprintf("remote-%d", i), pt.IdentityRemotePods+uint64(i), false, r4, r6)
	}
	for _, f := range pt.Families {
		w.parties[f.V6] = append(w.parties[f.V6],
			party{"own node", f.Node, identity.Node, -1}, party{"other node", f.OtherNode, identity.RemoteNode, -1},
			party{"outside", f.World, identity.World, -1}, party{"outside, not masqueraded", f.Excluded, identity.World, -1},
			party{"nobody yet", r4, identity.Unknown, -1})
		last := &w.parties[f.V6][len(w.parties[f.V6])-1]
		last.addr = r4.Next()
		if f.V6 {
			last.addr = r6.Next()
		}
	}
	for i := range 2 + w.IntN(8) {
		if w.IntN(3) > 0 {
			w.input.Policies = append(w.input.Policies, w.networkPolicy(fmt.Sprintf("p%d", i)))
		} else {
			w.input.Policies = append(w.input.Policies, w.clusterPolicy(fmt.Sprintf("p%d", i)))
		}
	}
	w.result = policy.Compile(w.input)
	return w
}

func of[T any](w *cluster, values ...T) T { return values[w.IntN(len(values))] }

func (w *cluster) addPod(name string, id uint64, isLocal bool, ips ...netip.Addr) {
	namespace := of(w, "shop", "bank")
	w.input.Identities = append(w.input.Identities, &state.Identity{
		ID: id, Namespace: namespace, NamespaceLabels: map[string]string{"team": of(w, teams...)},
		ServiceAccount: "default", Labels: map[string]string{"app": of(w, appNames...)},
	})
	p := policy.Pod{Namespace: namespace, Name: name, IPs: ips, Identity: id, Local: isLocal}
	for _, port := range []uint16{80, 443, 8080} {
		if w.IntN(2) == 0 {
			p.Ports = append(p.Ports, state.Port{Name: of(w, "http", "admin"), Port: port, Protocol: of(w, corev1.ProtocolTCP, corev1.ProtocolUDP)})
		}
	}
	w.input.Pods = append(w.input.Pods, p)
	at := -1
	if isLocal {
		at = len(w.input.Pods) - 1
	}
	for _, a := range ips {
		w.parties[a.Is6()] = append(w.parties[a.Is6()], party{name, a, id, at})
	}
}

func (w *cluster) selector() *metav1.LabelSelector {
	switch w.IntN(4) {
	case 0:
		return &metav1.LabelSelector{}
	case 1:
		return &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "app", Operator: metav1.LabelSelectorOpNotIn, Values: []string{of(w, appNames...)}}}}
	}
	return &metav1.LabelSelector{MatchLabels: map[string]string{"app": of(w, appNames...)}}
}

func (w *cluster) namespaces() *metav1.LabelSelector {
	return of(w, &metav1.LabelSelector{}, &metav1.LabelSelector{MatchLabels: map[string]string{"team": of(w, teams...)}})
}

// cidr is one that some of the parties are in.
func (w *cluster) cidr() netip.Prefix {
	list := w.parties[w.IntN(2) == 0]
	a := list[w.IntN(len(list))].addr
	bits := of(w, 0, 8, 16, 24, 29, 31, 32)
	if a.Is6() {
		bits = of(w, 0, 16, 32, 48, 64, 125, 128)
	}
	return netip.PrefixFrom(a, bits).Masked()
}

func (w *cluster) block() *networkingv1.IPBlock {
	outer := w.cidr()
	b := &networkingv1.IPBlock{CIDR: outer.String()}
	for range w.IntN(3) {
		if inner := w.cidr(); inner.Bits() > outer.Bits() && outer.Contains(inner.Addr()) {
			b.Except = append(b.Except, inner.String())
		}
	}
	return b
}

func (w *cluster) peers() []networkingv1.NetworkPolicyPeer {
	var out []networkingv1.NetworkPolicyPeer
	for range w.IntN(3) {
		switch w.IntN(3) {
		case 0:
			out = append(out, networkingv1.NetworkPolicyPeer{IPBlock: w.block()})
		case 1:
			out = append(out, networkingv1.NetworkPolicyPeer{PodSelector: w.selector()})
		default:
			out = append(out, networkingv1.NetworkPolicyPeer{PodSelector: w.selector(), NamespaceSelector: w.namespaces()})
		}
	}
	return out
}

var portNumbers = []uint16{79, 80, 81, 443, 8000, 8080, 8191, 8192, 65535}

func (w *cluster) ports() []networkingv1.NetworkPolicyPort {
	var out []networkingv1.NetworkPolicyPort
	for range w.IntN(3) {
		proto := of(w, corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP)
		p := networkingv1.NetworkPolicyPort{Protocol: &proto}
		first := int32(of(w, portNumbers...))
		port := of(w, intstr.FromInt32(first), intstr.FromInt32(first), intstr.FromString("http"))
		if w.IntN(4) > 0 {
			p.Port = &port
		}
		if end := int32(of(w, portNumbers...)); p.Port != nil && port.Type == intstr.Int && end >= first && w.IntN(2) == 0 {
			p.EndPort = &end
		}
		out = append(out, p)
	}
	return out
}

func (w *cluster) networkPolicy(name string) *state.Policy {
	spec := &networkingv1.NetworkPolicySpec{PodSelector: *w.selector()}
	spec.PolicyTypes = of(w, []networkingv1.PolicyType{"Ingress"}, []networkingv1.PolicyType{"Egress"}, []networkingv1.PolicyType{"Ingress", "Egress"})
	for range w.IntN(3) {
		spec.Ingress = append(spec.Ingress, networkingv1.NetworkPolicyIngressRule{From: w.peers(), Ports: w.ports()})
		spec.Egress = append(spec.Egress, networkingv1.NetworkPolicyEgressRule{To: w.peers(), Ports: w.ports()})
	}
	return &state.Policy{Kind: "NetworkPolicy", Namespace: of(w, "shop", "bank"), Name: name, NetworkPolicy: spec}
}

func (w *cluster) protocols() []policyv1alpha2.ClusterNetworkPolicyProtocol {
	first := int32(of(w, portNumbers...))
	port := policyv1alpha2.Port{Number: first}
	if end := int32(of(w, portNumbers...)); end > first {
		port = policyv1alpha2.Port{Range: &policyv1alpha2.PortRange{Start: first, End: end}}
	}
	switch w.IntN(4) {
	case 0:
		return []policyv1alpha2.ClusterNetworkPolicyProtocol{{TCP: &policyv1alpha2.ClusterNetworkPolicyProtocolTCP{DestinationPort: &port}}}
	case 1:
		return []policyv1alpha2.ClusterNetworkPolicyProtocol{{UDP: &policyv1alpha2.ClusterNetworkPolicyProtocolUDP{DestinationPort: &port}}}
	}
	return nil
}

func (w *cluster) clusterPolicy(name string) *state.Policy {
	actions := []policyv1alpha2.ClusterNetworkPolicyRuleAction{"Accept", "Deny", "Pass"}
	spec := &policyv1alpha2.ClusterNetworkPolicySpec{
		Tier: of(w, policyv1alpha2.AdminTier, policyv1alpha2.BaselineTier), Priority: int32(w.IntN(3)),
		Subject: policyv1alpha2.ClusterNetworkPolicySubject{Namespaces: w.namespaces()},
	}
	for range w.IntN(4) {
		to := policyv1alpha2.ClusterNetworkPolicyEgressPeer{Namespaces: w.namespaces()}
		switch w.IntN(4) {
		case 0:
			to = policyv1alpha2.ClusterNetworkPolicyEgressPeer{Networks: []policyv1alpha2.CIDR{policyv1alpha2.CIDR(w.cidr().String())}}
		case 1:
			to = policyv1alpha2.ClusterNetworkPolicyEgressPeer{Nodes: &metav1.LabelSelector{}}
		}
		spec.Egress = append(spec.Egress, policyv1alpha2.ClusterNetworkPolicyEgressRule{
			Action: of(w, actions...), To: []policyv1alpha2.ClusterNetworkPolicyEgressPeer{to}, Protocols: w.protocols(),
		})
	}
	for range w.IntN(4) {
		spec.Ingress = append(spec.Ingress, policyv1alpha2.ClusterNetworkPolicyIngressRule{
			Action: of(w, actions...), Protocols: w.protocols(),
			From: []policyv1alpha2.ClusterNetworkPolicyIngressPeer{{Pods: &policyv1alpha2.NamespacedPod{NamespaceSelector: *w.namespaces(), PodSelector: *w.selector()}}},
		})
	}
	return &state.Policy{Kind: "ClusterNetworkPolicy", Name: name, ClusterNetworkPolicy: spec}
}

// install puts the compiled policies in the kernel, as the enforcer does.
func (w *cluster) install(t *testing.T) {
	t.Helper()
	w.fix.install(t, 1, nil, nil)
	for _, c := range w.result.Prefixes {
		check(t, w.fix.SetClass(c.Prefix, c.Number))
	}
	numbers := map[policy.SubjectKey]uint32{}
	for key, s := range w.result.Subjects {
		numbers[key] = uint32(len(numbers) + 1)
		if s.Ingress {
			numbers[key] |= ingressBit
		}
		if s.Egress {
			numbers[key] |= egressBit
		}
		check(t, w.fix.Install(numbers[key], s.Entries))
	}
	for i := range w.input.Pods {
		if p := &w.input.Pods[i]; p.Local {
			w.fix.subject(t, i, numbers[w.result.Endpoints[p.ID()]])
		}
	}
	for _, list := range w.parties {
		for _, p := range list {
			if p.pod < 0 && (p.id >= identity.First || p.id == identity.Unknown) {
				w.fix.know(t, p.addr, p.id, ipcache.Pod)
			}
		}
	}
}

// pair is two parties, of which one at least is a pod of this node.
func (w *cluster) pair(f pt.Family) (from, to party) {
	list := w.parties[f.V6]
	for {
		from, to = list[w.IntN(len(list))], list[w.IntN(len(list))]
		if from.addr != to.addr && (from.pod >= 0 || to.pod >= 0) {
			return from, to
		}
	}
}

func (w *cluster) packet(src, dst netip.Addr, sport uint16) pt.Packet {
	port := of(w, portNumbers...)
	switch w.IntN(6) {
	case 0:
		return ping(src, dst).With(func(p *pt.Packet) { p.Rest = uint32(sport) << 16 })
	case 1, 2:
		return udp(src, dst, port).With(func(p *pt.Packet) { p.Sport = sport })
	}
	return tcp(src, dst, port).With(func(p *pt.Packet) { p.Sport = sport })
}

// trace is what the compiled policy says.
func (w *cluster) trace(from, to party, p pt.Packet) outcome {
	end := func(x party) policy.Party {
		out := policy.Party{Identity: x.id, Addr: x.addr}
		if x.pod >= 0 {
			out.Endpoint = w.input.Pods[x.pod].ID()
		}
		return out
	}
	port := p.Dport
	if p.Protocol == pt.ICMP || p.Protocol == pt.ICMPv6 {
		port = 0
	}
	d := w.result.Trace(end(from), end(to), p.Protocol, port)
	key, ok := w.result.Endpoints[end(from).Endpoint]
	if ok && to.id == identity.Unknown && w.result.Subjects[key].Egress {
		return outcome{"identity-unknown", 0}
	}
	if d.Egress.Verdict != policy.Allow {
		return denied(d.Egress.Rule.Number)
	}
	key, ok = w.result.Endpoints[end(to).Endpoint]
	if ok && from.id == identity.Unknown && w.result.Subjects[key].Ingress {
		return outcome{"identity-unknown", 0}
	}
	if d.Ingress.Verdict != policy.Allow {
		return denied(d.Ingress.Rule.Number)
	}
	return passed
}
