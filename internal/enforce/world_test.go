// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"path/filepath"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	policyv1alpha2 "sigs.k8s.io/network-policy-api/apis/v1alpha2"

	"github.com/weft-mesh/weft/internal/identity"
	"github.com/weft-mesh/weft/internal/policy"
	"github.com/weft-mesh/weft/internal/state"
)

// world is a cluster of two nodes, whose node1 is enforced.
type world struct {
	*testing.T
	*Enforcer
	kernel     *kernel
	tables     *state.Tables
	identities *identity.Allocator
	settled    int    // how often the enforcer waited for identities
	onSettle   func() // what the rest of the agent does meanwhile
	reports    []error
}

func newWorld(t *testing.T) *world {
	t.Helper()
	tables, err := state.New()
	check(t, err)
	ids, err := identity.New(filepath.Join(t.TempDir(), "identities.json"), tables, identity.Options{})
	check(t, err)
	w := &world{T: t, kernel: newKernel(), tables: tables, identities: ids}
	w.start(nil)
	txn := tables.DB.WriteTxn(tables.Namespaces)
	_, _, err = tables.Namespaces.Insert(txn, &state.Namespace{Name: "shop", Labels: map[string]string{"team": "a"}})
	check(t, err)
	txn.Commit()
	return w
}

// start is a new agent over the maps that are there.
func (w *world) start(known map[netip.Addr]uint64) {
	w.Helper()
	e, err := New(Config{
		Node: "node1", Tables: w.tables, Identities: w.identities, Kernel: w.kernel, Endpoints: pods{w.kernel},
		Log: slog.New(slog.DiscardHandler), Known: known,
		Settled: func(context.Context) error {
			w.settled++
			if w.onSettle != nil {
				w.onSettle()
			}
			return nil
		},
		Generation: func() uint64 { return 7 },
		Report:     func(err error) { w.reports = append(w.reports, err) },
	})
	check(w, err)
	w.Enforcer = e
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func local(n int) netip.Addr  { return netip.AddrFrom4([4]byte{10, 244, 1, byte(n)}) }
func remote(n int) netip.Addr { return netip.AddrFrom4([4]byte{10, 244, 2, byte(n)}) }

// workload is the row of a pod of shop, app=APP.
func (w *world) workload(name, node, app string, ip netip.Addr, ports ...state.Port) {
	w.Helper()
	txn := w.tables.DB.WriteTxn(w.tables.Workloads)
	_, _, err := w.tables.Workloads.Insert(txn, &state.Workload{
		Namespace: "shop", Name: name, Node: node, IPs: []netip.Addr{ip}, Labels: map[string]string{"app": app},
		ServiceAccount: "default", Phase: "Running", Ports: ports,
	})
	check(w, err)
	txn.Commit()
}

// pod is what the CNI server hands over.
func (w *world) pod(name, app string, n int) *state.Pod {
	w.Helper()
	id, err := w.identities.Assign("shop", map[string]string{"team": "a"}, "default", map[string]string{"app": app})
	check(w, err)
	return &state.Pod{ContainerID: name, Namespace: "shop", Name: name, IPs: []netip.Addr{local(n)}, Ifindex: 10 + n, Identity: id}
}

// add attaches a pod of this node as the CNI server does.
func (w *world) add(p *state.Pod) {
	w.Helper()
	check(w, w.Attach(p, func(subject uint32) error {
		w.kernel.attach(p.IPs, p.Ifindex, subject)
		return nil
	}))
	txn := w.tables.DB.WriteTxn(w.tables.Pods)
	_, _, err := w.tables.Pods.Insert(txn, p)
	check(w, err)
	txn.Commit()
}

// populate makes pods on both nodes: local 2.. and remote 2.., app by number.
func (w *world) populate(locals, remotes int) {
	w.Helper()
	for i := range remotes {
		w.workload(fmt.Sprintf("r%d", i+2), "node2", apps[i%len(apps)], remote(i+2))
	}
	for i := range locals {
		name, app := fmt.Sprintf("l%d", i+2), apps[i%len(apps)]
		w.workload(name, "node1", app, local(i+2), state.Port{Name: "http", Port: 80, Protocol: corev1.ProtocolTCP})
		w.add(w.pod(name, app, i+2))
	}
}

var apps = []string{"web", "db", "client"}

// policies replaces all policies.
func (w *world) policies(ps ...*state.Policy) {
	w.Helper()
	txn := w.tables.DB.WriteTxn(w.tables.Policies)
	check(w, w.tables.Policies.DeleteAll(txn))
	for _, p := range ps {
		_, _, err := w.tables.Policies.Insert(txn, p)
		check(w, err)
	}
	txn.Commit()
}

func appSelector(app string) metav1.LabelSelector {
	return metav1.LabelSelector{MatchLabels: map[string]string{"app": app}}
}

// allowFrom is a NetworkPolicy: pods of app accept connections from blocks.
func allowFrom(name, app string, port int32, blocks ...*networkingv1.IPBlock) *state.Policy {
	rule := networkingv1.NetworkPolicyIngressRule{}
	for _, b := range blocks {
		rule.From = append(rule.From, networkingv1.NetworkPolicyPeer{IPBlock: b})
	}
	if port != 0 {
		p := intstr.FromInt32(port)
		rule.Ports = []networkingv1.NetworkPolicyPort{{Port: &p}}
	}
	return &state.Policy{Kind: "NetworkPolicy", Namespace: "shop", Name: name, NetworkPolicy: &networkingv1.NetworkPolicySpec{
		PodSelector: appSelector(app), PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeIngress},
		Ingress: []networkingv1.NetworkPolicyIngressRule{rule},
	}}
}

// allowApp is a NetworkPolicy: pods of app accept connections from another app.
func allowApp(name, app, from string) *state.Policy {
	p := allowFrom(name, app, 0)
	s := appSelector(from)
	p.NetworkPolicy.Ingress[0].From = []networkingv1.NetworkPolicyPeer{{PodSelector: &s}}
	return p
}

func block(cidr string, except ...string) *networkingv1.IPBlock {
	return &networkingv1.IPBlock{CIDR: cidr, Except: except}
}

// generator makes random policies. Values are few, so that things meet.
type generator struct{ *rand.Rand }

var cidrs = []string{"0.0.0.0/0", "10.0.0.0/8", "10.244.0.0/16", "10.244.2.0/24", "10.244.2.2/32", "10.244.2.0/30", "192.0.2.0/24", "192.0.2.128/25", "192.0.2.200/32"}

func one[T any](g generator, of ...T) T { return of[g.IntN(len(of))] }

func (g generator) block() *networkingv1.IPBlock {
	b := block(one(g, cidrs...))
	outer := netip.MustParsePrefix(b.CIDR)
	for _, c := range cidrs {
		p := netip.MustParsePrefix(c)
		if p.Bits() > outer.Bits() && outer.Contains(p.Addr()) && g.IntN(4) == 0 {
			b.Except = append(b.Except, c)
		}
	}
	return b
}

func (g generator) peer() networkingv1.NetworkPolicyPeer {
	if g.IntN(3) > 0 {
		return networkingv1.NetworkPolicyPeer{IPBlock: g.block()}
	}
	s := appSelector(one(g, apps...))
	return networkingv1.NetworkPolicyPeer{PodSelector: &s}
}

func (g generator) ports() []networkingv1.NetworkPolicyPort {
	p := one(g, intstr.FromInt32(80), intstr.FromInt32(443), intstr.FromString("http"))
	port := networkingv1.NetworkPolicyPort{Port: &p}
	if end := int32(100); p.IntVal == 80 && g.IntN(2) == 0 {
		port.EndPort = &end
	}
	return one(g, nil, []networkingv1.NetworkPolicyPort{port})
}

func (g generator) networkPolicy(name string) *state.Policy {
	spec := &networkingv1.NetworkPolicySpec{PodSelector: appSelector(one(g, apps...))}
	if g.IntN(3) > 0 {
		spec.PolicyTypes = append(spec.PolicyTypes, networkingv1.PolicyTypeIngress)
		for range g.IntN(3) {
			spec.Ingress = append(spec.Ingress, networkingv1.NetworkPolicyIngressRule{From: []networkingv1.NetworkPolicyPeer{g.peer(), g.peer()}, Ports: g.ports()})
		}
	}
	if g.IntN(2) > 0 || len(spec.PolicyTypes) == 0 {
		spec.PolicyTypes = append(spec.PolicyTypes, networkingv1.PolicyTypeEgress)
		for range g.IntN(3) {
			spec.Egress = append(spec.Egress, networkingv1.NetworkPolicyEgressRule{To: []networkingv1.NetworkPolicyPeer{g.peer()}, Ports: g.ports()})
		}
	}
	return &state.Policy{Kind: "NetworkPolicy", Namespace: "shop", Name: name, NetworkPolicy: spec}
}

func (g generator) clusterPolicy(name string) *state.Policy {
	all := metav1.LabelSelector{}
	pods := appSelector(one(g, apps...))
	spec := &policyv1alpha2.ClusterNetworkPolicySpec{
		Tier: one(g, policyv1alpha2.AdminTier, policyv1alpha2.BaselineTier), Priority: int32(g.IntN(3)),
		Subject: policyv1alpha2.ClusterNetworkPolicySubject{Pods: &policyv1alpha2.NamespacedPod{NamespaceSelector: all, PodSelector: pods}},
	}
	actions := []policyv1alpha2.ClusterNetworkPolicyRuleAction{"Accept", "Deny", "Pass"}
	for range g.IntN(3) {
		spec.Egress = append(spec.Egress, policyv1alpha2.ClusterNetworkPolicyEgressRule{
			Action: one(g, actions...),
			To:     []policyv1alpha2.ClusterNetworkPolicyEgressPeer{{Networks: []policyv1alpha2.CIDR{policyv1alpha2.CIDR(one(g, cidrs...))}}},
		})
	}
	for range g.IntN(2) {
		spec.Ingress = append(spec.Ingress, policyv1alpha2.ClusterNetworkPolicyIngressRule{
			Action: one(g, actions...),
			From: []policyv1alpha2.ClusterNetworkPolicyIngressPeer{{Pods: &policyv1alpha2.NamespacedPod{
				NamespaceSelector: all, PodSelector: appSelector(one(g, apps...)),
			}}},
		})
	}
	return &state.Policy{Kind: "ClusterNetworkPolicy", Name: name, ClusterNetworkPolicy: spec}
}

// change replaces one of the policies, or adds or removes one.
func (g generator) change(ps []*state.Policy) []*state.Policy {
	out := append([]*state.Policy{}, ps...)
	at := g.IntN(6)
	name := fmt.Sprintf("p%d", at)
	p := g.networkPolicy(name)
	if at >= 4 {
		p = g.clusterPolicy(name)
	}
	for i := range out {
		if out[i].Name != name {
			continue
		}
		if g.IntN(3) == 0 {
			return append(out[:i], out[i+1:]...)
		}
		out[i] = p
		return out
	}
	return append(out, p)
}

// peers are all that pods may meet: every identity there is, at its addresses.
func (w *world) questions() []question {
	var out []question
	_, pods, err := w.State()
	check(w, err)
	ask := func(id uint64, a netip.Addr) {
		for _, d := range []policy.Direction{policy.Egress, policy.Ingress} {
			out = append(out, question{d, id, a, 6, 80}, question{d, id, a, 6, 90}, question{d, id, a, 6, 443}, question{d, id, a, 17, 80}, question{d, id, a, 1, 0})
		}
	}
	for _, p := range pods {
		for _, a := range p.IPs {
			ask(p.Identity, a)
		}
	}
	for _, a := range []string{"192.0.2.1", "192.0.2.129", "192.0.2.200", "10.9.9.9", "203.0.113.1"} {
		ask(identity.World, netip.MustParseAddr(a))
	}
	ask(identity.RemoteNode, netip.MustParseAddr("172.30.0.2"))
	return out
}

// answers are the verdicts of one pod on all questions.
func (w *world) answers(pod netip.Addr, qs []question) string {
	text := make([]byte, 0, 16*len(qs))
	for _, q := range qs {
		text = append(append(text, w.kernel.answer(pod, q)...), ';')
	}
	return string(text)
}
