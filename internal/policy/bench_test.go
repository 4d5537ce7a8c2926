// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"net/netip"
	"runtime"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/weft-mesh/weft/internal/state"
)

// crowd is a cluster of n identities with a pod each, of which the first local
// ones are on this node, and n policies.
func crowd(n, local int, policy func(i int) *networkingv1.NetworkPolicySpec) Input {
	var in Input
	for i := range n {
		id := &state.Identity{ID: 256 + uint64(i), Namespace: "shop", NamespaceLabels: map[string]string{"kubernetes.io/metadata.name": "shop"},
			Labels: map[string]string{"app": fmt.Sprint("a", i), "group": fmt.Sprint("g", i%10), "tier": fmt.Sprint("t", i%3), "env": "prod"}}
		in.Identities = append(in.Identities, id)
		in.Pods = append(in.Pods, Pod{Namespace: "shop", Name: fmt.Sprint("p", i), Identity: id.ID, Local: i < local,
			IPs:   []netip.Addr{netip.AddrFrom4([4]byte{10, 244, byte(i >> 8), byte(i)})},
			Ports: []state.Port{{Name: "http", Port: uint16(8000 + i%7), Protocol: corev1.ProtocolTCP}}})
		in.Policies = append(in.Policies, &state.Policy{Kind: "NetworkPolicy", Namespace: "shop", Name: fmt.Sprint("n", i), NetworkPolicy: policy(i)})
	}
	return in
}

func ports(first, last int32) []networkingv1.NetworkPolicyPort {
	tcp, n := corev1.ProtocolTCP, intstr.FromInt32(first)
	return []networkingv1.NetworkPolicyPort{{Protocol: &tcp, Port: &n, EndPort: &last}}
}

func byLabel(key, value string) metav1.LabelSelector {
	return metav1.LabelSelector{MatchLabels: map[string]string{key: value}}
}

// crowds are the loads of the benchmark.
var crowds = []struct {
	name  string
	local int
	spec  func(i int) *networkingv1.NetworkPolicySpec
}{
	// Each pod is selected by one policy that lets a tenth of all in.
	{"own", 100, func(i int) *networkingv1.NetworkPolicySpec {
		from := byLabel("group", fmt.Sprint("g", i%10))
		return &networkingv1.NetworkPolicySpec{PodSelector: byLabel("app", fmt.Sprint("a", i)), Ingress: []networkingv1.NetworkPolicyIngressRule{
			{From: []networkingv1.NetworkPolicyPeer{{PodSelector: &from}}, Ports: ports(80, 80)}}}
	}},
	{"own, all local", 1000, func(i int) *networkingv1.NetworkPolicySpec {
		from := byLabel("group", fmt.Sprint("g", i%10))
		return &networkingv1.NetworkPolicySpec{PodSelector: byLabel("app", fmt.Sprint("a", i)), Ingress: []networkingv1.NetworkPolicyIngressRule{
			{From: []networkingv1.NetworkPolicyPeer{{PodSelector: &from}}, Ports: ports(80, 80)}}}
	}},
	// Every policy selects every pod; each lets one identity in on one port of
	// its own.
	{"all select all", 100, func(i int) *networkingv1.NetworkPolicySpec {
		from := byLabel("app", fmt.Sprint("a", i))
		return &networkingv1.NetworkPolicySpec{PodSelector: byLabel("env", "prod"), Ingress: []networkingv1.NetworkPolicyIngressRule{
			{From: []networkingv1.NetworkPolicyPeer{{PodSelector: &from}}, Ports: ports(1000+int32(i), 1000+int32(i))}}}
	}},
	// Every policy selects every pod and lets a third of all in on a range of
	// ports of its own.
	{"all select all, many match", 100, func(i int) *networkingv1.NetworkPolicySpec {
		from := byLabel("tier", fmt.Sprint("t", i%3))
		return &networkingv1.NetworkPolicySpec{PodSelector: byLabel("env", "prod"), Ingress: []networkingv1.NetworkPolicyIngressRule{
			{From: []networkingv1.NetworkPolicyPeer{{PodSelector: &from}}, Ports: ports(1000+int32(i), 1010+int32(i))}}}
	}},
	// Every policy selects every pod, lets everyone in on a port of its own and a
	// tenth of all on another.
	{"all select all, everyone", 100, func(i int) *networkingv1.NetworkPolicySpec {
		from := byLabel("group", fmt.Sprint("g", i%10))
		return &networkingv1.NetworkPolicySpec{PodSelector: byLabel("env", "prod"), Ingress: []networkingv1.NetworkPolicyIngressRule{
			{Ports: ports(1000+int32(i)*2, 1000+int32(i)*2)},
			{From: []networkingv1.NetworkPolicyPeer{{PodSelector: &from}}, Ports: ports(1001+int32(i)*2, 1001+int32(i)*2)}}}
	}},
	// Egress to a block each, with an exception, and to everyone on named ports.
	{"blocks", 100, func(i int) *networkingv1.NetworkPolicySpec {
		cidr := fmt.Sprintf("10.%d.%d.0/24", 100+i/256, i%256)
		name := intstr.FromString("http")
		return &networkingv1.NetworkPolicySpec{PodSelector: byLabel("group", fmt.Sprint("g", i%10)), PolicyTypes: []networkingv1.PolicyType{"Egress"},
			Egress: []networkingv1.NetworkPolicyEgressRule{
				{To: []networkingv1.NetworkPolicyPeer{{IPBlock: &networkingv1.IPBlock{CIDR: cidr, Except: []string{fmt.Sprintf("10.%d.%d.16/28", 100+i/256, i%256)}}}}},
				{To: []networkingv1.NetworkPolicyPeer{{PodSelector: &metav1.LabelSelector{}}}, Ports: []networkingv1.NetworkPolicyPort{{Port: &name}}},
			}}
	}},
}

func entriesOf(r *Result) (n int) {
	for _, s := range r.Subjects {
		n += len(s.Entries)
	}
	return n
}

func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// BenchmarkCompile compiles 1,000 policies and 1,000 identities from scratch.
func BenchmarkCompile(b *testing.B) {
	for _, x := range crowds {
		b.Run(x.name, func(b *testing.B) {
			in := crowd(1000, x.local, x.spec)
			before := heap()
			var c Compiler
			r := c.Compile(in)
			kept := heap() - before
			for b.Loop() {
				Compile(in)
			}
			b.ReportMetric(float64(entriesOf(r)), "entries")
			b.ReportMetric(float64(len(r.Subjects)), "subjects")
			b.ReportMetric(float64(kept)/(1<<20), "MiB-kept")
			runtime.KeepAlive(&c)
		})
	}
}

// BenchmarkChange compiles after one policy of 1,000 has changed.
func BenchmarkChange(b *testing.B) {
	for _, x := range crowds {
		b.Run(x.name, func(b *testing.B) {
			in := crowd(1000, x.local, x.spec)
			var c Compiler
			c.Compile(in)
			versions := [2]*state.Policy{}
			for i := range versions {
				p := *in.Policies[17]
				p.NetworkPolicy = x.spec(17)
				p.NetworkPolicy.Ingress = append(p.NetworkPolicy.Ingress, networkingv1.NetworkPolicyIngressRule{Ports: ports(int32(i+5), int32(i+5))})
				versions[i] = &p
			}
			i := 0
			for b.Loop() {
				in.Policies[17] = versions[i%2]
				c.Compile(in)
				i++
			}
		})
	}
}

// BenchmarkNewPod compiles after a pod with a new identity has come.
func BenchmarkNewPod(b *testing.B) {
	in := crowd(1000, 100, crowds[0].spec)
	var c Compiler
	c.Compile(in)
	i := uint64(0)
	for b.Loop() {
		id := *in.Identities[0]
		id.ID = 5000 + i
		next := in
		next.Identities = append(next.Identities[:len(next.Identities):len(next.Identities)], &id)
		c.Compile(next)
		i++
	}
}
