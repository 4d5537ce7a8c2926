// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/mattfenwick/cyclonus/pkg/connectivity/probe"
	"github.com/mattfenwick/cyclonus/pkg/generator"
	"github.com/mattfenwick/cyclonus/pkg/matcher"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/weft-mesh/weft/internal/identity"
	"github.com/weft-mesh/weft/internal/policy"
	"github.com/weft-mesh/weft/internal/state"
)

const (
	worlds          = 2000 // of TestDifferential
	verdictsOfWorld = 1000 // random connections in each
	maxShown        = 10   // differences
)

var numbers = map[corev1.Protocol]uint8{corev1.ProtocolTCP: policy.TCP, corev1.ProtocolUDP: policy.UDP, corev1.ProtocolSCTP: policy.SCTP}

// end is an end of connections, as both sides see it.
type end struct {
	party policy.Party
	peer  matcher.TrafficPeer
	ports []state.Port // of a pod
	name  string
}

// both is a cluster as weft's compiler and cyclonus' matcher see it.
type both struct {
	result *policy.Result
	oracle *matcher.Policy
}

func compile(policies []*networkingv1.NetworkPolicy, in policy.Input) both {
	var oracle []*networkingv1.NetworkPolicy
	for _, p := range policies {
		in.Policies = append(in.Policies, &state.Policy{Kind: "NetworkPolicy", Namespace: p.Namespace, Name: p.Name, NetworkPolicy: &p.Spec})
		oracle = append(oracle, forOracle(p))
	}
	return both{policy.Compile(in), matcher.BuildNetworkPolicies(false, oracle)}
}

// differ returns what both say about a connection, and whether that differs.
func (b both) differ(from, to *end, protocol corev1.Protocol, port uint16) (string, bool) {
	traffic := &matcher.Traffic{Source: &from.peer, Destination: &to.peer, ResolvedPort: int(port), Protocol: protocol}
	for _, p := range to.ports {
		if p.Port == port && p.Protocol == protocol {
			traffic.ResolvedPortName = p.Name
		}
	}
	want := b.oracle.IsTrafficAllowed(traffic)
	got := b.result.Trace(from.party, to.party, numbers[protocol], port)
	egress, ingress := got.Egress.Verdict == policy.Allow, got.Ingress.Verdict == policy.Allow
	if egress == want.Egress.IsAllowed() && ingress == want.Ingress.IsAllowed() && got.Allowed == want.IsAllowed() {
		return "", false
	}
	return fmt.Sprintf("%s -> %s %s/%d: egress %t by %s, ingress %t by %s; cyclonus: egress %t, ingress %t", from.name, to.name, protocol, port,
		egress, got.Egress.Rule, ingress, got.Ingress.Rule, want.Egress.IsAllowed(), want.Ingress.IsAllowed()), true
}

// shadow begins the names of labels that forOracle needs: see there.
const shadow = "shadow-"

// forOracle mends the one thing in which cyclonus' matcher is not Kubernetes:
// NotIn matches a label that is not there (labels.Requirement), and with
// cyclonus it does not. Every label has a shadow that is always there.
func forOracle(p *networkingv1.NetworkPolicy) *networkingv1.NetworkPolicy {
	p = p.DeepCopy()
	mend := func(s *metav1.LabelSelector) {
		if s == nil {
			return
		}
		for i := range s.MatchExpressions {
			if e := &s.MatchExpressions[i]; e.Operator == metav1.LabelSelectorOpNotIn {
				e.Key = shadow + e.Key
			}
		}
	}
	mend(&p.Spec.PodSelector)
	peers := func(list []networkingv1.NetworkPolicyPeer) {
		for i := range list {
			mend(list[i].PodSelector)
			mend(list[i].NamespaceSelector)
		}
	}
	for _, r := range p.Spec.Ingress {
		peers(r.From)
	}
	for _, r := range p.Spec.Egress {
		peers(r.To)
	}
	return p
}

// shadowed are labels with their shadows; keys are all that selectors name.
func shadowed(labels map[string]string, keys []string) map[string]string {
	out := map[string]string{}
	for _, k := range keys {
		out[shadow+k] = "no value of any selector"
	}
	for k, v := range labels {
		out[k], out[shadow+k] = v, v
	}
	return out
}

// TestGeneratedCases is the whole of cyclonus without packets: every step of
// every case, every pair of pods on every port, by both families.
func TestGeneratedCases(t *testing.T) {
	verdicts, differences, steps := 0, 0, 0
	began := time.Now()
	for _, tc := range generator.NewTestCaseGenerator(true, "10.244.2.5", namespaces, nil, nil).GenerateAllTestCases() {
		c := newCluster()
		for n, step := range tc.Steps {
			for _, a := range step.Actions {
				if err := c.perform(a); err != nil {
					t.Fatalf("%s, step %d: %v", tc.Description, n+1, err)
				}
			}
			steps++
			for _, family := range []string{"10.244.2.%d", "fd00:10:244:2::%d"} {
				v, d := everyPair(t, c, family, fmt.Sprintf("%s, step %d", tc.Description, n+1))
				verdicts, differences = verdicts+v, differences+d
			}
		}
	}
	t.Logf("%d steps, %d verdicts, %d differences, %.1f s", steps, verdicts, differences, time.Since(began).Seconds())
	if verdicts == 0 {
		t.Error("there was nothing to compare")
	}
}

// everyPair compares all connections within the grid; the first pods have the
// addresses that the cases are about.
func everyPair(t *testing.T, c *cluster, address, what string) (verdicts, differences int) {
	var in policy.Input
	var ends []*end
	for i, p := range c.resources.Pods {
		ends = append(ends, addPod(&in, p, c.resources.Namespaces[p.Namespace], []netip.Addr{netip.MustParseAddr(fmt.Sprintf(address, i+2))}, []string{"pod", "ns"}))
	}
	b := compile(c.policies, in)
	for _, problem := range b.result.Problems {
		t.Errorf("%s: %s", what, problem)
	}
	for _, from := range ends {
		for _, to := range ends {
			for _, p := range to.ports {
				if from == to {
					continue
				}
				verdicts++
				if text, bad := b.differ(from, to, p.Protocol, p.Port); bad {
					if differences++; differences <= maxShown {
						t.Errorf("%s: %s", what, text)
					}
				}
			}
		}
	}
	return verdicts, differences
}

// addPod adds a pod, local and with an identity of its own.
func addPod(in *policy.Input, p *probe.Pod, nsLabels map[string]string, ips []netip.Addr, keys []string) *end {
	id := identity.First + uint64(len(in.Identities))
	in.Identities = append(in.Identities, &state.Identity{ID: id, Namespace: p.Namespace, NamespaceLabels: nsLabels, Labels: p.Labels})
	pod := policy.Pod{Namespace: p.Namespace, Name: p.Name, IPs: ips, Identity: id, Local: true}
	for _, ct := range p.Containers {
		pod.Ports = append(pod.Ports, state.Port{Name: ct.PortName, Port: uint16(ct.Port), Protocol: ct.Protocol})
	}
	in.Pods = append(in.Pods, pod)
	return &end{
		party: policy.Party{Endpoint: pod.ID(), Identity: id, Addr: ips[0]},
		peer: matcher.TrafficPeer{IP: ips[0].String(), Internal: &matcher.InternalPeer{
			Namespace: p.Namespace, NamespaceLabels: shadowed(nsLabels, keys), PodLabels: shadowed(p.Labels, keys),
		}},
		ports: pod.Ports, name: p.Namespace + "/" + p.Name + " (" + ips[0].String() + ")",
	}
}

// world makes random clusters. Values are few, so that things meet.
type world struct{ *rand.Rand }

func pick[T any](w world, of ...T) T { return of[w.IntN(len(of))] }

func (w world) chance(percent int) bool { return w.IntN(100) < percent }

// upTo returns 0 to n things.
func upTo[T any](w world, n int, f func() T) (out []T) {
	for range w.IntN(n + 1) {
		out = append(out, f())
	}
	return out
}

var (
	keys   = []string{"app", "tier", "zone"}
	values = []string{"x", "y", "z"}
	cidrs  = []string{
		"10.244.0.0/16", "10.244.1.0/24", "10.244.1.0/28", "10.244.1.4/30", "10.244.1.5/32", "10.244.2.0/23", "0.0.0.0/0", "192.0.2.0/24", "192.0.2.128/25",
		"fd00:10:244::/48", "fd00:10:244:1::/64", "fd00:10:244:1::4/126", "::/0", "2001:db8::/32",
	}
	portNames = []string{"web", "dns", "admin"}
)

func (w world) labels() map[string]string {
	m := map[string]string{}
	for _, k := range keys {
		if w.chance(55) {
			m[k] = pick(w, values...)
		}
	}
	return m
}

func (w world) selector() *metav1.LabelSelector {
	s := &metav1.LabelSelector{}
	if w.chance(35) {
		s.MatchLabels = map[string]string{pick(w, keys...): pick(w, values...)}
	}
	for range w.IntN(2) {
		e := metav1.LabelSelectorRequirement{
			Key:      pick(w, keys...),
			Operator: pick(w, metav1.LabelSelectorOpIn, metav1.LabelSelectorOpNotIn, metav1.LabelSelectorOpExists, metav1.LabelSelectorOpDoesNotExist),
		}
		if e.Operator == metav1.LabelSelectorOpIn || e.Operator == metav1.LabelSelectorOpNotIn {
			e.Values = slices.Compact([]string{pick(w, values...), pick(w, values...)})
		}
		s.MatchExpressions = append(s.MatchExpressions, e)
	}
	return s
}

func (w world) block() *networkingv1.IPBlock {
	b := &networkingv1.IPBlock{CIDR: pick(w, cidrs...)}
	outer := netip.MustParsePrefix(b.CIDR)
	for _, text := range cidrs {
		p := netip.MustParsePrefix(text)
		if w.chance(30) && p.Bits() > outer.Bits() && outer.Contains(p.Addr()) {
			b.Except = append(b.Except, text)
		}
	}
	return b
}

func (w world) peer() networkingv1.NetworkPolicyPeer {
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

func (w world) port() networkingv1.NetworkPolicyPort {
	p := networkingv1.NetworkPolicyPort{}
	if w.chance(80) {
		protocol := pick(w, protocols...)
		p.Protocol = &protocol
	}
	number := intstr.FromInt32(int32(78 + w.IntN(8)))
	switch w.IntN(5) {
	case 0, 1:
		p.Port = &number
	case 2:
		last := number.IntVal + int32(w.IntN(6))
		if w.chance(20) {
			last = 65535
		}
		p.Port, p.EndPort = &number, &last
	case 3:
		name := intstr.FromString(pick(w, portNames...))
		p.Port = &name
	}
	return p
}

func (w world) policy(i int) *networkingv1.NetworkPolicy {
	in, out := networkingv1.PolicyTypeIngress, networkingv1.PolicyTypeEgress
	p := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: pick(w, namespaces...), Name: fmt.Sprintf("p%d", i)}}
	p.Spec.PodSelector = *w.selector()
	p.Spec.PolicyTypes = pick(w, []networkingv1.PolicyType{in}, []networkingv1.PolicyType{out}, []networkingv1.PolicyType{in, out})
	p.Spec.Ingress = upTo(w, 3, func() networkingv1.NetworkPolicyIngressRule {
		return networkingv1.NetworkPolicyIngressRule{From: upTo(w, 3, w.peer), Ports: upTo(w, 3, w.port)}
	})
	p.Spec.Egress = upTo(w, 3, func() networkingv1.NetworkPolicyEgressRule {
		return networkingv1.NetworkPolicyEgressRule{To: upTo(w, 3, w.peer), Ports: upTo(w, 3, w.port)}
	})
	return p
}

// ends makes pods, among them several that share labels and names for different
// ports, and addresses outside of the cluster. Each address is an end.
func (w world) ends(in *policy.Input) (ends []*end) {
	nsLabels := map[string]map[string]string{}
	for _, ns := range namespaces {
		nsLabels[ns] = w.labels()
	}
	for i := range 10 {
		p := probe.NewPod(pick(w, namespaces...), fmt.Sprintf("pod%d", i), w.labels(), "", nil)
		port := 78
		for _, name := range portNames {
			port += 1 + w.IntN(3) // each number once
			if w.chance(70) {
				p.Containers = append(p.Containers, &probe.Container{Port: port, Protocol: pick(w, protocols...), PortName: name})
			}
		}
		node := 1 + w.IntN(2)
		v4, v6 := netip.MustParseAddr(fmt.Sprintf("10.244.%d.%d", node, i+2)), netip.MustParseAddr(fmt.Sprintf("fd00:10:244:%d::%x", node, i+2))
		e := addPod(in, p, nsLabels[p.Namespace], []netip.Addr{v4, v6}, keys)
		e6 := *e
		e6.party.Addr, e6.peer.IP, e6.name = v6, v6.String(), fmt.Sprintf("%s/%s (%s)", p.Namespace, p.Name, v6)
		ends = append(ends, e, &e6)
	}
	for _, text := range []string{"192.0.2.7", "192.0.2.200", "198.51.100.1", "2001:db8::7", "fd00:10:244:1::ffff"} {
		ip := netip.MustParseAddr(text)
		ends = append(ends, &end{party: policy.Party{Identity: identity.World, Addr: ip}, peer: matcher.TrafficPeer{IP: text}, name: text})
	}
	return ends
}

// TestDifferential compares weft's compiler with cyclonus' matcher on random
// policies, labels and connections. WEFT_SEED repeats a run.
func TestDifferential(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	if text := os.Getenv("WEFT_SEED"); text != "" {
		var err error
		if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	verdicts, denied, differences := 0, 0, 0
	for i := range uint64(worlds) {
		w := world{rand.New(rand.NewPCG(seed, i))}
		var in policy.Input
		ends := w.ends(&in)
		var policies []*networkingv1.NetworkPolicy
		for j := range 1 + w.IntN(12) {
			policies = append(policies, w.policy(j))
		}
		b := compile(policies, in)
		for range verdictsOfWorld {
			from, to := pick(w, ends...), pick(w, ends...)
			if from.party.Endpoint == to.party.Endpoint || from.party.Addr.Is4() != to.party.Addr.Is4() {
				continue // a pod and itself, two worlds, or two families
			}
			protocol, port := pick(w, protocols...), uint16(76+w.IntN(14))
			verdicts++
			if !b.result.Trace(from.party, to.party, numbers[protocol], port).Allowed {
				denied++
			}
			if text, bad := b.differ(from, to, protocol, port); bad {
				if differences++; differences <= maxShown {
					t.Errorf("WEFT_SEED=%d, world %d, %d policies: %s", seed, i, len(policies), text)
				}
			}
		}
	}
	t.Logf("WEFT_SEED=%d: %d worlds, %d verdicts, %d denied, %d differences", seed, worlds, verdicts, denied, differences)
	if denied < verdicts/20 || denied > verdicts*19/20 {
		t.Errorf("%d of %d verdicts deny: the policies are not worth much", denied, verdicts)
	}
}
