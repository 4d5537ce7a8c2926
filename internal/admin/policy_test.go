// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
	"github.com/weft-mesh/weft/internal/enforce"
	"github.com/weft-mesh/weft/internal/policy"
	"github.com/weft-mesh/weft/internal/state"
)

// TestEffective: the first effect that matches is the winner of the lookups.
func TestEffective(t *testing.T) {
	protocolsOf := []uint8{1, policy.TCP, policy.UDP}
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 3))
		entries := randomEntries(r)
		effects := effective(entries)
		s := &policy.Subject{Entries: entries}
		for range 300 {
			proto, port := protocolsOf[r.IntN(3)], uint16(r.IntN(64))
			peers := []uint64{0, uint64(300 + r.IntN(2)), policy.FirstClass + uint64(r.IntN(2))}
			for _, admin := range []bool{true, false} {
				want := policy.Outcome{Rank: policy.RankNone}
				for _, p := range peers {
					if e, ok := s.Lookup(policy.Egress, p, proto, port); ok && outcomeOf(&e, admin).Rank < want.Rank {
						want = outcomeOf(&e, admin)
					}
				}
				if got := firstEffect(effects, peers, proto, port, admin); got != want {
					t.Fatalf("seed %d: peers %v, protocol %d, port %d, admin %t: %+v, want %+v", seed, peers, proto, port, admin, got, want)
				}
			}
		}
	}
}

// randomEntries are of one direction, over ports 0 to 63; equal ranks are equal
// outcomes.
func randomEntries(r *rand.Rand) []policy.Entry {
	outcome := func() policy.Outcome {
		rank := uint32(r.IntN(8))
		if rank == 0 {
			return policy.Outcome{Rank: policy.RankNone}
		}
		return policy.Outcome{Rank: rank, Rule: rank + 100, Verdict: policy.Verdict(1 + rank%2)}
	}
	made := map[string]policy.Entry{}
	for range 30 {
		e := policy.Entry{
			Direction: policy.Egress, Peer: []uint64{0, 300, 301, policy.FirstClass, policy.FirstClass + 1}[r.IntN(5)],
			Admin: outcome(), Lower: outcome(),
		}
		if r.IntN(6) > 0 {
			e.Protocol, e.Bits = []uint8{policy.TCP, policy.UDP}[r.IntN(2)], 8
		}
		if e.Bits == 8 && r.IntN(5) > 0 {
			n := 10 + r.IntN(7)
			e.Bits += uint8(n)
			e.Port = uint16(r.IntN(64)) >> (16 - n) << (16 - n)
		}
		made[fmt.Sprint(e.Peer, e.Protocol, e.Bits, e.Port)] = e
	}
	var out []policy.Entry
	for _, e := range made {
		out = append(out, e)
	}
	slices.SortFunc(out, func(a, b policy.Entry) int {
		return cmp.Or(cmp.Compare(a.Peer, b.Peer), cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.Port, b.Port), cmp.Compare(a.Bits, b.Bits))
	})
	return out
}

func firstEffect(effects []*effect, peers []uint64, proto uint8, port uint16, admin bool) policy.Outcome {
	holds := func(spans []span) bool {
		return slices.ContainsFunc(spans, func(s span) bool { return s.first <= port && port <= s.last })
	}
	for _, e := range effects {
		if e.admin != admin || !slices.Contains(peers, e.peer) || e.protocol != 0 && e.protocol != proto || !holds(e.ports) {
			continue
		}
		if slices.ContainsFunc(e.except, func(x portsOf) bool { return x.protocol == proto && holds(x.ports) }) {
			continue
		}
		return e.outcome
	}
	return policy.Outcome{Rank: policy.RankNone}
}

// inForcePolicy is a Policy of a test.
type inForcePolicy struct {
	status enforce.Status
	result *policy.Result
	pods   []policy.Pod
}

func (p *inForcePolicy) Status() enforce.Status { return p.status }

func (p *inForcePolicy) State() (*policy.Result, []policy.Pod, error) {
	if p.result == nil {
		return nil, nil, enforce.ErrNotYet
	}
	return p.result, p.pods, nil
}

// shop is two pods of node1 and one of node2; web accepts TCP 80 from client and
// from a part of the outside.
func shop(t *testing.T) (Providers, *inForcePolicy) {
	t.Helper()
	p := providers(t)
	ip := netip.MustParseAddr
	pod := func(name string, id uint64, local bool, a ...netip.Addr) policy.Pod {
		return policy.Pod{Namespace: "shop", Name: name, Identity: id, IPs: a, Local: local}
	}
	port, proto := intstr.FromInt32(80), corev1.ProtocolTCP
	row := &state.Policy{Kind: "NetworkPolicy", Namespace: "shop", Name: "web", NetworkPolicy: &networkingv1.NetworkPolicySpec{
		PodSelector: metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}},
		Ingress: []networkingv1.NetworkPolicyIngressRule{{
			From: []networkingv1.NetworkPolicyPeer{
				{PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "client"}}},
				{IPBlock: &networkingv1.IPBlock{CIDR: "192.0.2.0/24", Except: []string{"192.0.2.128/25"}}},
			},
			Ports: []networkingv1.NetworkPolicyPort{{Port: &port, Protocol: &proto}},
		}},
	}}
	f := &inForcePolicy{pods: []policy.Pod{
		pod("web", 256, true, ip("10.244.1.2"), ip("fd00:10:244:1::2")), pod("client", 257, true, ip("10.244.1.3")), pod("far", 257, false, ip("10.244.2.2")),
	}}
	in := policy.Input{Policies: []*state.Policy{row}, Pods: f.pods}
	txn := p.Tables.DB.WriteTxn(p.Tables.Identities, p.Tables.Policies, p.Tables.Workloads, p.Tables.Nodes)
	for id, app := range map[uint64]string{256: "web", 257: "client"} {
		i := &state.Identity{ID: id, Namespace: "shop", ServiceAccount: "default", Labels: map[string]string{"app": app}}
		in.Identities = append(in.Identities, i)
		p.Tables.Identities.Insert(txn, i)
	}
	p.Tables.Policies.Insert(txn, row)
	p.Tables.Workloads.Insert(txn, &state.Workload{Namespace: "shop", Name: "far", Node: "node2", IPs: f.pods[2].IPs})
	p.Tables.Workloads.Insert(txn, &state.Workload{Namespace: "shop", Name: "host", Node: "node2", HostNetwork: true, IPs: []netip.Addr{ip("172.30.0.2")}})
	p.Tables.Workloads.Insert(txn, &state.Workload{Namespace: "shop", Name: "new", Node: "node2"})
	p.Tables.Nodes.Insert(txn, &state.Node{Name: "node1", IPs: []netip.Addr{ip("172.30.0.1")}, PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24")}})
	p.Tables.Nodes.Insert(txn, &state.Node{Name: "node2", IPs: []netip.Addr{ip("172.30.0.2")}, PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.2.0/24")}})
	txn.Commit()
	f.result = policy.Compile(in)
	p.Node, p.Policy = "node1", func() (Policy, error) { return f, nil }
	return p, f
}

func TestTracePolicy(t *testing.T) {
	p, _ := shop(t)
	s := start(t, sock(t), p)
	c := client(t, s.path)
	for _, x := range []struct{ from, to, protocol, want string }{
		{"shop/client", "shop/web", "TCP", "allowed: egress allow (no rule forbids, default) on node1, ingress allow (NetworkPolicy shop/web ingress[0], network-policy) on node1"},
		{"shop/client", "shop/web", "UDP", "denied: egress allow (no rule forbids, default) on node1, ingress deny (no rule allows, network-policy) on node1 policy"},
		{"shop/far", "shop/web", "TCP", "unknown: egress on node2, ingress allow (NetworkPolicy shop/web ingress[0], network-policy) on node1"},
		{"shop/far", "shop/web", "132", "denied: egress on node2, ingress deny (no rule allows, network-policy) on node1 policy"},
		{"shop/web", "shop/far", "TCP", "unknown: egress allow (no rule forbids, default) on node1, ingress on node2"},
		{"shop/web", "192.0.2.7", "TCP", "allowed: egress allow (no rule forbids, default) on node1, ingress not judged"},
		{"192.0.2.7", "shop/web", "TCP", "allowed: egress not judged, ingress allow (NetworkPolicy shop/web ingress[0], network-policy) on node1"},
		{"192.0.2.200", "shop/web", "TCP", "denied: egress not judged, ingress deny (no rule allows, network-policy) on node1 policy"},
		{"::ffff:192.0.2.7", "10.244.1.2", "TCP", "allowed: egress not judged, ingress allow (NetworkPolicy shop/web ingress[0], network-policy) on node1"},
		{"172.30.0.1", "shop/web", "ICMP", "allowed: egress not judged, ingress allow (the pod's own node, ) on node1"},
		{"shop/host", "shop/web", "TCP", "denied: egress not judged, ingress deny (no rule allows, network-policy) on node1 policy"},
		{"10.244.2.99", "shop/web", "TCP", "denied: egress not judged, ingress deny (, ) on node1 identity-unknown"},
		{"shop/web", "shop/web", "TCP", "allowed: egress allow (no rule forbids, default) on node1, ingress allow (no rule forbids, default) on node1"},
	} {
		r, err := c.TracePolicy(t.Context(), &weftv1.TracePolicyRequest{From: x.from, To: x.to, Protocol: x.protocol, Port: 80})
		if err != nil {
			t.Errorf("%s to %s: %v", x.from, x.to, err)
			continue
		}
		if got := pathText(r.Paths[0]); got != x.want {
			t.Errorf("%s to %s, %s: %s\nwant %s", x.from, x.to, x.protocol, got, x.want)
		}
	}
	for _, x := range []struct {
		from, to, protocol string
		port               uint32
		code               codes.Code
	}{
		{"shop/none", "shop/web", "TCP", 80, codes.NotFound},
		{"web", "shop/web", "TCP", 80, codes.NotFound},
		{"shop/new", "shop/web", "TCP", 80, codes.FailedPrecondition},
		{"shop/client", "fd00:10:244:1::2", "TCP", 80, codes.InvalidArgument},
		{"shop/client", "shop/web", "tcp", 80, codes.InvalidArgument},
		{"shop/client", "shop/web", "0", 80, codes.InvalidArgument},
		{"shop/client", "shop/web", "TCP", 65536, codes.InvalidArgument},
	} {
		if _, err := c.TracePolicy(t.Context(), &weftv1.TracePolicyRequest{From: x.from, To: x.to, Protocol: x.protocol, Port: x.port}); status.Code(err) != x.code {
			t.Errorf("%+v: %v", x, err)
		}
	}
}

func pathText(p *weftv1.PolicyPath) string {
	side := func(s *weftv1.TraceSide) string {
		switch {
		case s.Node == "":
			return "not judged"
		case !s.Here:
			return "on " + s.Node
		}
		return strings.TrimSpace(fmt.Sprintf("%s (%s, %s) on %s %s", s.Verdict, s.Rule, s.Tier, s.Node, s.Reason))
	}
	return fmt.Sprintf("%s: egress %s, ingress %s", p.Verdict, side(p.Egress), side(p.Ingress))
}

func TestShowPolicy(t *testing.T) {
	p, _ := shop(t)
	s := start(t, sock(t), p)
	c := client(t, s.path)
	r, err := c.ShowPolicy(t.Context(), &weftv1.ShowPolicyRequest{Pod: "shop/web"})
	if err != nil {
		t.Fatal(err)
	}
	if r.Egress || !r.Ingress || r.Identity != 256 || len(r.Ips) != 2 || !slices.Equal(r.Policies, []string{"NetworkPolicy shop/web"}) {
		t.Errorf("got %v", r)
	}
	var rows []string
	for _, e := range r.Entries {
		if e.Direction == "ingress" {
			x := e.Peer
			rows = append(rows, fmt.Sprintf("%s %s%v%s%v %s%v%v %s %s", x.Kind, x.Namespace, x.Pods, x.Cidr, x.Without, e.Protocol, e.Ports, e.Except, e.Verdict, e.Rule))
		}
	}
	want := []string{
		"node [][] any[][] allow the pod's own node",
		"pods shop[shop/client shop/far][] TCP[80][] allow NetworkPolicy shop/web ingress[0]",
		"cidr []192.0.2.0/24[192.0.2.128/25] TCP[80][] allow NetworkPolicy shop/web ingress[0]",
		"any [][] any[][] deny no rule allows",
	}
	if !slices.Equal(rows, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(rows, "\n"), strings.Join(want, "\n"))
	}
	r, err = c.ShowPolicy(t.Context(), &weftv1.ShowPolicyRequest{Pod: "shop/client"})
	if err != nil || len(r.Policies) != 0 || len(r.Entries) != 0 {
		t.Errorf("client: %v, %v", r, err)
	}
	if _, err = c.ShowPolicy(t.Context(), &weftv1.ShowPolicyRequest{Pod: "shop/far"}); status.Code(err) != codes.NotFound {
		t.Errorf("a pod of another node: %v", err)
	}
	list, err := c.ListPolicies(t.Context(), &weftv1.ListPoliciesRequest{})
	if err != nil || len(list.Policies) != 1 || list.Policies[0].Tier != "network-policy" || !slices.Equal(list.Policies[0].Pods, []string{"shop/web"}) {
		t.Errorf("list %v, %v", list, err)
	}
}

func TestPolicyStatus(t *testing.T) {
	p, f := shop(t)
	s := start(t, sock(t), p)
	c := client(t, s.path)
	r, err := c.PolicyStatus(t.Context(), &weftv1.PolicyStatusRequest{})
	if err != nil || r.Error != enforce.ErrNotYet.Error() || r.Changed != nil {
		t.Errorf("before the first: %v, %v", r, err)
	}
	f.status = enforce.Status{Revision: 4, Generation: 9, Changed: time.Unix(100, 0), Entries: 7, MaxEntries: 64, Problems: []policy.Problem{{Policy: policy.Ref{Kind: "K", Name: "n"}, Message: "m"}}}
	r, err = c.PolicyStatus(t.Context(), &weftv1.PolicyStatusRequest{})
	if err != nil || r.Error != "" || r.Revision != 4 || r.Generation != 9 || r.Changed.AsTime().Unix() != 100 || r.Entries != 7 || r.MaxEntries != 64 || !slices.Equal(r.Problems, []string{"K n: m"}) {
		t.Errorf("got %v, %v", r, err)
	}
	f.result = nil
	if _, err := c.ListPolicies(t.Context(), &weftv1.ListPoliciesRequest{}); status.Code(err) != codes.Unavailable {
		t.Errorf("list: %v", err)
	}
	bare := start(t, sock(t), providers(t))
	if _, err := client(t, bare.path).PolicyStatus(t.Context(), &weftv1.PolicyStatusRequest{}); status.Code(err) != codes.Unimplemented {
		t.Errorf("without policy: %v", err)
	}
}
