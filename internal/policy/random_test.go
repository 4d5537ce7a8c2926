// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	policyv1alpha2 "sigs.k8s.io/network-policy-api/apis/v1alpha2"

	"github.com/weft-mesh/weft/internal/identity"
	"github.com/weft-mesh/weft/internal/state"
)

// world is a random cluster with random policies. Values are few, so that
// things meet.
type world struct {
	*rand.Rand
	in   Input
	ends []end
}

func one[T any](w *world, of ...T) T { return of[w.IntN(len(of))] }

func (w *world) chance(percent int) bool { return w.IntN(100) < percent }

// some returns up to n things.
func some[T any](w *world, n int, f func() T) []T {
	var out []T
	for range w.IntN(n + 1) {
		out = append(out, f())
	}
	return out
}

func (w *world) labels() map[string]string {
	m := map[string]string{}
	for _, k := range []string{"a", "b"} {
		if w.chance(60) {
			m[k] = one(w, "x", "y", "z")
		}
	}
	return m
}

func (w *world) selector() *metav1.LabelSelector {
	s := &metav1.LabelSelector{}
	if w.chance(30) {
		s.MatchLabels = map[string]string{one(w, "a", "b"): one(w, "x", "y", "z")}
	}
	if w.chance(40) {
		e := metav1.LabelSelectorRequirement{Key: one(w, "a", "b", "c"),
			Operator: one(w, metav1.LabelSelectorOpIn, metav1.LabelSelectorOpNotIn, metav1.LabelSelectorOpExists, metav1.LabelSelectorOpDoesNotExist)}
		if e.Operator == metav1.LabelSelectorOpIn || e.Operator == metav1.LabelSelectorOpNotIn {
			e.Values = append(some(w, 1, func() string { return "x" }), one(w, "y", "z"))
		}
		s.MatchExpressions = append(s.MatchExpressions, e)
	}
	return s
}

func (w *world) cidr() string {
	return one(w, "10.0.0.0/8", "10.0.1.0/24", "10.0.1.4/30", "10.0.1.5/32", "10.0.2.0/23", "0.0.0.0/0", "::/0", "fd00::/8", "fd00:1::/64",
		"192.0.2.0/24", "::/80", "172.16.0.0/12")
}

// except returns CIDRs, all within 10.0.0.0/8 or the like where that can be.
func (w *world) block() *networkingv1.IPBlock {
	b := &networkingv1.IPBlock{CIDR: w.cidr()}
	outer := netip.MustParsePrefix(b.CIDR)
	for range 4 {
		if e := netip.MustParsePrefix(w.cidr()); w.chance(50) && e.Bits() > outer.Bits() && outer.Contains(e.Addr()) {
			b.Except = append(b.Except, e.String())
		}
	}
	return b
}

func (w *world) peer() networkingv1.NetworkPolicyPeer {
	switch w.IntN(4) {
	case 0:
		return networkingv1.NetworkPolicyPeer{IPBlock: w.block()}
	case 1:
		return networkingv1.NetworkPolicyPeer{PodSelector: w.selector()}
	case 2:
		return networkingv1.NetworkPolicyPeer{NamespaceSelector: w.selector()}
	}
	return networkingv1.NetworkPolicyPeer{NamespaceSelector: w.selector(), PodSelector: w.selector()}
}

var names = []string{"http", "dns", "admin"}

func (w *world) port() networkingv1.NetworkPolicyPort {
	protocol := one(w, corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP)
	p := networkingv1.NetworkPolicyPort{}
	if w.chance(80) {
		p.Protocol = &protocol
	}
	first := int32(w.IntN(12) + 78)
	switch w.IntN(4) {
	case 0:
		n := intstr.FromInt32(first)
		p.Port = &n
	case 1:
		n, last := intstr.FromInt32(first), first+int32(w.IntN(20))
		if w.chance(20) {
			last = 65535
		}
		p.Port, p.EndPort = &n, &last
	case 2:
		n := intstr.FromString(one(w, names...))
		p.Port = &n
	}
	return p
}

func (w *world) networkPolicy(i int) *state.Policy {
	spec := &networkingv1.NetworkPolicySpec{PodSelector: *w.selector()}
	spec.PolicyTypes = one(w, nil, []networkingv1.PolicyType{"Ingress"}, []networkingv1.PolicyType{"Egress"}, []networkingv1.PolicyType{"Ingress", "Egress"})
	spec.Ingress = some(w, 3, func() networkingv1.NetworkPolicyIngressRule {
		return networkingv1.NetworkPolicyIngressRule{From: some(w, 3, w.peer), Ports: some(w, 3, w.port)}
	})
	spec.Egress = some(w, 3, func() networkingv1.NetworkPolicyEgressRule {
		return networkingv1.NetworkPolicyEgressRule{To: some(w, 3, w.peer), Ports: some(w, 3, w.port)}
	})
	return &state.Policy{Kind: "NetworkPolicy", Namespace: one(w, "n0", "n1", "n2"), Name: fmt.Sprintf("p%d", i), NetworkPolicy: spec}
}

func (w *world) namespacedPod() *policyv1alpha2.NamespacedPod {
	return &policyv1alpha2.NamespacedPod{NamespaceSelector: *w.selector(), PodSelector: *w.selector()}
}

func (w *world) egressPeer() policyv1alpha2.ClusterNetworkPolicyEgressPeer {
	switch n := w.IntN(20); {
	case n < 7:
		return policyv1alpha2.ClusterNetworkPolicyEgressPeer{Namespaces: w.selector()}
	case n < 12:
		return policyv1alpha2.ClusterNetworkPolicyEgressPeer{Pods: w.namespacedPod()}
	case n < 15:
		return policyv1alpha2.ClusterNetworkPolicyEgressPeer{Nodes: w.selector()}
	case n < 19:
		return policyv1alpha2.ClusterNetworkPolicyEgressPeer{Networks: []policyv1alpha2.CIDR{policyv1alpha2.CIDR(w.cidr()), policyv1alpha2.CIDR(w.cidr())}}
	}
	return policyv1alpha2.ClusterNetworkPolicyEgressPeer{DomainNames: []policyv1alpha2.DomainName{"example.com"}}
}

func (w *world) ingressPeer() policyv1alpha2.ClusterNetworkPolicyIngressPeer {
	if w.chance(50) {
		return policyv1alpha2.ClusterNetworkPolicyIngressPeer{Namespaces: w.selector()}
	}
	return policyv1alpha2.ClusterNetworkPolicyIngressPeer{Pods: w.namespacedPod()}
}

func (w *world) protocol() policyv1alpha2.ClusterNetworkPolicyProtocol {
	var port *policyv1alpha2.Port
	first := int32(w.IntN(12) + 78)
	switch w.IntN(3) {
	case 0:
		port = &policyv1alpha2.Port{Number: first}
	case 1:
		port = &policyv1alpha2.Port{Range: &policyv1alpha2.PortRange{Start: first, End: first + 1 + int32(w.IntN(9))}}
	}
	switch w.IntN(4) {
	case 0:
		return policyv1alpha2.ClusterNetworkPolicyProtocol{TCP: &policyv1alpha2.ClusterNetworkPolicyProtocolTCP{DestinationPort: port}}
	case 1:
		return policyv1alpha2.ClusterNetworkPolicyProtocol{UDP: &policyv1alpha2.ClusterNetworkPolicyProtocolUDP{DestinationPort: port}}
	case 2:
		return policyv1alpha2.ClusterNetworkPolicyProtocol{SCTP: &policyv1alpha2.ClusterNetworkPolicyProtocolSCTP{DestinationPort: port}}
	}
	return policyv1alpha2.ClusterNetworkPolicyProtocol{DestinationNamedPort: one(w, names...)}
}

func (w *world) action() policyv1alpha2.ClusterNetworkPolicyRuleAction {
	return one(w, policyv1alpha2.ClusterNetworkPolicyRuleActionAccept, policyv1alpha2.ClusterNetworkPolicyRuleActionDeny,
		policyv1alpha2.ClusterNetworkPolicyRuleActionPass)
}

func (w *world) clusterPolicy(i int) *state.Policy {
	spec := &policyv1alpha2.ClusterNetworkPolicySpec{Tier: one(w, policyv1alpha2.AdminTier, policyv1alpha2.BaselineTier), Priority: int32(w.IntN(4))}
	if w.chance(50) {
		spec.Subject.Namespaces = w.selector()
	} else {
		spec.Subject.Pods = w.namespacedPod()
	}
	spec.Ingress = some(w, 3, func() policyv1alpha2.ClusterNetworkPolicyIngressRule {
		return policyv1alpha2.ClusterNetworkPolicyIngressRule{Name: one(w, "", "r"), Action: w.action(),
			From: append(some(w, 1, w.ingressPeer), w.ingressPeer()), Protocols: some(w, 2, w.protocol)}
	})
	spec.Egress = some(w, 3, func() policyv1alpha2.ClusterNetworkPolicyEgressRule {
		return policyv1alpha2.ClusterNetworkPolicyEgressRule{Name: one(w, "", "r"), Action: w.action(),
			To: append(some(w, 1, w.egressPeer), w.egressPeer()), Protocols: some(w, 2, w.protocol)}
	})
	return &state.Policy{Kind: "ClusterNetworkPolicy", Name: fmt.Sprintf("c%d", i), ClusterNetworkPolicy: spec}
}

func (w *world) containerPorts() []state.Port {
	return some(w, 4, func() state.Port {
		return state.Port{Name: one(w, names...), Port: uint16(w.IntN(12) + 78), Protocol: one(w, corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP)}
	})
}

// newWorld makes a cluster of 8 pods, two remote nodes and some addresses
// outside.
func newWorld(seed uint64) *world {
	w := &world{Rand: rand.New(rand.NewPCG(seed, 1))}
	namespaces := map[string]map[string]string{"n0": w.labels(), "n1": w.labels(), "n2": w.labels()}
	for i := range 8 {
		ns := one(w, "n0", "n1", "n2")
		id := &state.Identity{ID: identity.First + uint64(i), Namespace: ns, NamespaceLabels: namespaces[ns], Labels: w.labels()}
		w.in.Identities = append(w.in.Identities, id)
		w.in.Pods = append(w.in.Pods, Pod{Namespace: ns, Name: fmt.Sprintf("pod%d", i), Identity: id.ID, Ports: w.containerPorts(), Local: i < 6,
			IPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 0, 1, byte(2 + i)}), netip.MustParseAddr(fmt.Sprintf("fd00:1::%d", 2+i))}})
	}
	for i := range 2 {
		n := &state.Node{Name: fmt.Sprintf("node%d", i), Labels: w.labels(), IPs: []netip.Addr{netip.AddrFrom4([4]byte{172, 16, 0, byte(1 + i)})}}
		w.in.Nodes = append(w.in.Nodes, n)
		w.ends = append(w.ends, end{node: n, ip: n.IPs[0]})
	}
	for i := range w.in.Pods {
		for _, ip := range w.in.Pods[i].IPs {
			w.ends = append(w.ends, end{pod: &w.in.Pods[i], id: w.in.Identities[i], ip: ip})
		}
	}
	for _, a := range []string{"192.0.2.1", "10.0.1.1", "10.0.3.1", "198.51.100.1", "2001:db8::1", "fd00:1::1"} {
		w.ends = append(w.ends, end{ip: netip.MustParseAddr(a)})
	}
	for i := range w.IntN(8) {
		w.in.Policies = append(w.in.Policies, w.networkPolicy(i))
	}
	for i := range w.IntN(5) {
		w.in.Policies = append(w.in.Policies, w.clusterPolicy(i))
	}
	return w
}

func (w *world) question() question {
	q := question{from: one(w, w.ends...), to: one(w, w.ends...), protocol: one(w, TCP, TCP, UDP, SCTP, 1), port: uint16(77 + w.IntN(32))}
	if w.chance(10) {
		q.port = one[uint16](w, 0, 1, 65535, 32768)
	}
	if q.protocol == 1 {
		q.port = 0
	}
	return q
}

func party(e end) Party {
	p := Party{Identity: identity.World, Addr: e.ip}
	switch {
	case e.pod != nil:
		p.Identity, p.Endpoint = e.pod.Identity, e.pod.ID()
	case e.node != nil:
		p.Identity = identity.RemoteNode
	}
	return p
}

// check asks one random question of one world.
func (w *world) check(t *testing.T, r *Result) {
	t.Helper()
	q := w.question()
	if q.from.pod != nil && q.from.pod == q.to.pod {
		return
	}
	got := r.Trace(party(q.from), party(q.to), q.protocol, q.port)
	for _, side := range []struct {
		d   Direction
		f   Finding
		end end
	}{{Egress, got.Egress, q.from}, {Ingress, got.Ingress, q.to}} {
		if side.end.pod == nil || !side.end.pod.Local {
			continue
		}
		verdict, rules := oracle(w.in.Policies, side.d, q)
		if side.f.Verdict != verdict || !slices.Contains(rules, side.f.Rule.String()) {
			t.Errorf("%s from %s to %s, protocol %d port %d: %s by %s; oracle: %s by one of %q", side.d, q.from.ip, q.to.ip, q.protocol, q.port,
				side.f.Verdict, side.f.Rule, verdict, rules)
		}
	}
}

func TestCompiledPoliciesSayWhatTheAPISays(t *testing.T) {
	worlds, questions := 1500, 300
	if testing.Short() {
		worlds = 150
	}
	var c Compiler
	for seed := range worlds {
		w := newWorld(uint64(seed))
		r := Compile(w.in)
		for range questions {
			w.check(t, r)
		}
		if again := c.Compile(w.in); !reflect.DeepEqual(r, again) {
			t.Errorf("seed %d: a compiler that has compiled before gives another result", seed)
		}
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

func TestOrderOfInputDoesNotMatter(t *testing.T) {
	for seed := range uint64(200) {
		w := newWorld(seed)
		r := Compile(w.in)
		w.Shuffle(len(w.in.Policies), reflect.Swapper(w.in.Policies))
		w.Shuffle(len(w.in.Identities), reflect.Swapper(w.in.Identities))
		pods := slices.Clone(w.in.Pods)
		w.Shuffle(len(pods), reflect.Swapper(pods))
		w.in.Pods = pods
		w.Shuffle(len(w.in.Nodes), reflect.Swapper(w.in.Nodes))
		if again := Compile(w.in); !reflect.DeepEqual(r, again) {
			t.Fatalf("seed %d: another order gives another result", seed)
		}
	}
}

// TestCompilerKeepsUp changes one thing at a time in a world and compares with
// a compiler that starts anew.
func TestCompilerKeepsUp(t *testing.T) {
	for seed := range uint64(60) {
		w := newWorld(seed)
		var c Compiler
		for step := range 20 {
			w.change(step)
			got, want := c.Compile(w.in), Compile(w.in)
			if !reflect.DeepEqual(got, want) {
				t.Fatalf("seed %d, step %d: differs from a compiler that starts anew", seed, step)
			}
		}
	}
}

// change edits the world, without a change to a row that is there.
func (w *world) change(step int) {
	in := &w.in
	in.Policies, in.Identities, in.Pods = slices.Clone(in.Policies), slices.Clone(in.Identities), slices.Clone(in.Pods)
	pod := w.IntN(len(in.Pods))
	switch w.IntN(7) {
	case 0:
		in.Policies = append(in.Policies, w.networkPolicy(100+step))
	case 1:
		in.Policies = append(in.Policies, w.clusterPolicy(100+step))
	case 2:
		if len(in.Policies) > 0 {
			in.Policies = slices.Delete(in.Policies, 0, 1)
		}
	case 3:
		id := *in.Identities[w.IntN(len(in.Identities))]
		id.ID, id.Labels = 1000+uint64(step), w.labels()
		in.Identities = append(in.Identities, &id)
		in.Pods[pod].Identity = id.ID
	case 4:
		in.Pods[pod].Ports = w.containerPorts()
	case 5:
		in.Pods[pod].Local = !in.Pods[pod].Local
	case 6:
		in.Pods[pod].Identity = one(w, in.Identities...).ID
	}
}
