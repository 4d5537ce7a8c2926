// SPDX-License-Identifier: Apache-2.0

package route

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/weft-mesh/weft/internal/identity"
	"github.com/weft-mesh/weft/internal/state"
)

var compare = cmp.Options{
	cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
	cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }),
}

func node(name string, ips, cidrs string) *state.Node {
	n := &state.Node{Name: name}
	for _, s := range strings.Fields(ips) {
		n.IPs = append(n.IPs, netip.MustParseAddr(s))
	}
	for _, s := range strings.Fields(cidrs) {
		n.PodCIDRs = append(n.PodCIDRs, netip.MustParsePrefix(s))
	}
	return n
}

func workload(name, on, phase string, ips ...string) *state.Workload {
	w := &state.Workload{Namespace: "ns", Name: name, Node: on, Phase: phase}
	for _, s := range ips {
		w.IPs = append(w.IPs, netip.MustParseAddr(s))
	}
	return w
}

// numbers gives each workload a number of its own by its name.
func numbers(w *state.Workload) uint64 { return identity.First + uint64(w.Name[0]) }

func twoNodes() Input {
	return Input{
		Node: "n1",
		Nodes: []*state.Node{
			node("n2", "172.30.0.2 fd00:172:30::2", "10.244.2.0/24 fd00:10:244:2::/64"),
			node("n1", "172.30.0.1 fd00:172:30::1", "10.244.1.0/24 fd00:10:244:1::/64"),
		},
		Workloads: []*state.Workload{
			workload("a", "n1", "Running", "10.244.1.5"),
			workload("b", "n2", "Running", "10.244.2.5", "fd00:10:244:2::5"),
		},
		Pods: []*state.Pod{{
			ContainerID: "c1", Namespace: "ns", Name: "a", Identity: 300,
			IPs: []netip.Addr{netip.MustParseAddr("10.244.1.5"), netip.MustParseAddr("fd00:10:244:1::5")},
		}},
		Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.1")},
		Identity:  numbers,
	}
}

// Addresses that every host has, or that mean something on a link only, are no
// way to a node: not as its own, and not as what its row says.
func TestAddressesOfNoNode(t *testing.T) {
	const none = " 127.0.0.1 ::ffff:127.0.0.53 ::1 169.254.20.10 fe80::1 0.0.0.0 :: 224.0.0.1 ff02::1"
	in := twoNodes()
	want := Compute(in)
	in.Nodes = []*state.Node{
		node("n2", "172.30.0.2 fd00:172:30::2"+none, "10.244.2.0/24 fd00:10:244:2::/64"),
		node("n1", "172.30.0.1 fd00:172:30::1"+none, "10.244.1.0/24 fd00:10:244:1::/64"),
	}
	for _, a := range strings.Fields(none) {
		in.Addresses = append(in.Addresses, netip.MustParseAddr(a))
	}
	if diff := cmp.Diff(want, Compute(in), compare); diff != "" {
		t.Errorf("with addresses of no node (-without +with):\n%s", diff)
	}
}

func TestTwoNodes(t *testing.T) {
	h4, h6 := netip.MustParseAddr("172.30.0.2"), netip.MustParseAddr("fd00:172:30::2")
	b := identity.First + 'b'
	own := Entry{Identity: identity.Node, Kind: Node, Local: true}
	remote := Entry{Identity: identity.RemoteNode, Kind: RemoteNode, NextHop4: h4, NextHop6: h6}
	rest := Entry{Identity: identity.Unknown, Kind: PodCIDR, NextHop4: h4, NextHop6: h6}
	gateway := Entry{Identity: identity.RemoteNode, Kind: Pod, NextHop4: h4, NextHop6: h6}
	want := map[string]Entry{
		"172.30.0.1/32": own, "fd00:172:30::1/128": own, "192.0.2.1/32": own,
		"172.30.0.2/32": remote, "fd00:172:30::2/128": remote,
		"10.244.1.5/32":        {Identity: 300, Kind: Pod, Local: true},
		"fd00:10:244:1::5/128": {Identity: 300, Kind: Pod, Local: true},
		"10.244.2.5/32":        {Identity: b, Kind: Pod, NextHop4: h4, NextHop6: h6},
		"fd00:10:244:2::5/128": {Identity: b, Kind: Pod, NextHop4: h4, NextHop6: h6},
		"10.244.1.0/24":        {Identity: identity.Unknown, Kind: PodCIDR, Local: true},
		"fd00:10:244:1::/64":   {Identity: identity.Unknown, Kind: PodCIDR, Local: true},
		"10.244.2.0/24":        rest,
		"fd00:10:244:2::/64":   rest,
	}
	check := func(in Input, routes map[netip.Prefix]Route) {
		t.Helper()
		got := Compute(in)
		byText := map[string]Entry{}
		for p, e := range got.Entries {
			byText[p.String()] = e
		}
		if d := cmp.Diff(want, byText, compare); d != "" {
			t.Errorf("entries, tunnel %v (-want +got):\n%s", in.Tunnel, d)
		}
		if d := cmp.Diff(routes, got.Routes, compare); d != "" {
			t.Errorf("routes, tunnel %v (-want +got):\n%s", in.Tunnel, d)
		}
		if len(got.Conflicts) > 0 {
			t.Errorf("conflicts %q", got.Conflicts)
		}
	}
	p4, p6 := netip.MustParsePrefix("10.244.2.0/24"), netip.MustParsePrefix("fd00:10:244:2::/64")
	check(twoNodes(), map[netip.Prefix]Route{
		p4: {Destination: p4, Node: "n2", Via: h4}, p6: {Destination: p6, Node: "n2", Via: h6},
	})
	for _, s := range []string{"10.244.1.1/32", "fd00:10:244:1::1/128"} {
		want[s] = own
	}
	for _, s := range []string{"10.244.2.1/32", "fd00:10:244:2::1/128"} {
		want[s] = gateway
	}
	in := twoNodes()
	in.Tunnel = true
	check(in, map[netip.Prefix]Route{
		p4: {Destination: p4, Node: "n2", Tunnel: true, Source: netip.MustParseAddr("10.244.1.1")},
		p6: {Destination: p6, Node: "n2", Tunnel: true, Source: netip.MustParseAddr("fd00:10:244:1::1")},
	})
}

// TestClaims changes one thing of two nodes at a time and looks at one address.
func TestClaims(t *testing.T) {
	for _, c := range []struct {
		name     string
		change   func(*Input)
		address  string
		identity uint64 // 0: no entry of its own
		conflict string
	}{
		{"finished pod", func(in *Input) { in.Workloads[1].Phase = "Succeeded" }, "10.244.2.5", 0, ""},
		{"finished and running pod", func(in *Input) {
			in.Workloads = append(in.Workloads, workload("0", "n2", "Failed", "10.244.2.5"))
		}, "10.244.2.5", numbers(workload("b", "", "")), ""},
		{"pending and running pod", func(in *Input) {
			in.Workloads = append(in.Workloads, workload("0", "n2", "Pending", "10.244.2.5"))
		}, "10.244.2.5", numbers(workload("b", "", "")), "10.244.2.5/32: claimed by pod ns/b and by pod ns/0: pod ns/b has it"},
		{"two running pods", func(in *Input) {
			in.Workloads = append(in.Workloads, workload("0", "n3", "Running", "10.244.2.5"))
		}, "10.244.2.5", numbers(workload("0", "", "")), "10.244.2.5/32: claimed by pod ns/0 and by pod ns/b: pod ns/0 has it"},
		{"host network", func(in *Input) {
			w := workload("0", "n2", "Running", "172.30.0.2")
			w.HostNetwork = true
			in.Workloads = append(in.Workloads, w)
		}, "172.30.0.2", identity.RemoteNode, ""},
		{"pod with a node's address", func(in *Input) {
			in.Workloads = append(in.Workloads, workload("0", "n2", "Running", "172.30.0.1"))
		}, "172.30.0.1", identity.Node, "172.30.0.1/32: claimed by node n1 and by pod ns/0: node n1 has it"},
		{"not scheduled", func(in *Input) { in.Workloads[1].Node = "" }, "10.244.2.5", 0, ""},
		{"not wired here", func(in *Input) { in.Pods = nil }, "10.244.1.5", 0, ""},
		{"remote pod in our CIDR", func(in *Input) {
			in.Workloads = append(in.Workloads, workload("0", "n2", "Running", "10.244.1.9"))
		}, "10.244.1.9", 0, ""},
		{"no identity yet", func(in *Input) { in.Identity = func(*state.Workload) uint64 { return 0 } }, "10.244.2.5", identity.Unknown, ""},
		{"two nodes with one address", func(in *Input) { in.Nodes = append(in.Nodes, node("n0", "172.30.0.2", "")) }, "172.30.0.2",
			identity.RemoteNode, "172.30.0.2/32: claimed by node n0 and by node n2: node n0 has it"},
		{"CIDR in our CIDR", func(in *Input) { in.Nodes = append(in.Nodes, node("n3", "172.30.0.3", "10.244.1.0/25")) }, "10.244.1.0",
			0, "pod CIDR 10.244.1.0/25 of node n3: lies in 10.244.1.0/24 of this node: it is left out"},
		{"CIDR of everything", func(in *Input) { in.Nodes = append(in.Nodes, node("n3", "172.30.0.3", "0.0.0.0/0")) }, "8.8.8.8",
			0, "pod CIDR 0.0.0.0/0 of node n3: holds node address 172.30.0.1: it is left out"},
		{"CIDR of two nodes", func(in *Input) { in.Nodes = append(in.Nodes, node("n3", "172.30.0.3", "10.244.2.0/24")) }, "10.244.2.0",
			0, "10.244.2.0/24: claimed by node n2 and by node n3: node n2 has it"},
		{"no address of the family", func(in *Input) { in.Nodes = append(in.Nodes, node("n3", "172.30.0.3", "fd00:3::/64")) }, "fd00:3::",
			0, "pod CIDR fd00:3::/64 of node n3: the node has no address to reach it by: no route"},
	} {
		t.Run(c.name, func(t *testing.T) {
			in := twoNodes()
			c.change(&in)
			got := Compute(in)
			a := netip.MustParseAddr(c.address)
			if e := got.Entries[netip.PrefixFrom(a, a.BitLen())]; e.Identity != c.identity {
				t.Errorf("%s has identity %d, want %d", a, e.Identity, c.identity)
			}
			if text := strings.Join(got.Conflicts, "\n"); text != c.conflict {
				t.Errorf("conflicts %q, want %q", text, c.conflict)
			}
		})
	}
}

// oracle says what an address is by asking each rule of the package comment in
// turn.
func oracle(in Input, a netip.Addr) (id uint64, kind Kind, local bool) {
	for _, n := range in.Nodes {
		for _, ip := range n.IPs {
			if ip == a && n.Name == in.Node {
				return identity.Node, Node, true
			}
		}
	}
	for _, n := range in.Nodes {
		for _, ip := range n.IPs {
			if ip == a {
				return identity.RemoteNode, RemoteNode, false
			}
		}
	}
	var first *state.Pod
	for _, p := range in.Pods {
		if p.IPs[0] == a && (first == nil || p.ContainerID < first.ContainerID) {
			first = p
		}
	}
	if first != nil {
		return first.Identity, Pod, true
	}
	for _, n := range in.Nodes {
		if n.Name == in.Node && n.PodCIDRs[0].Contains(a) {
			return identity.Unknown, PodCIDR, true
		}
	}
	var best *state.Workload
	for _, w := range in.Workloads {
		if w.IPs[0] != a || w.Node == "" || w.Node == in.Node || w.HostNetwork || w.Phase == "Succeeded" {
			continue
		}
		if best == nil || (w.Phase == "Running") != (best.Phase == "Running") && w.Phase == "Running" ||
			w.Phase == best.Phase && w.Name < best.Name {
			best = w
		}
	}
	if best != nil {
		return numbers(best), Pod, false
	}
	for _, n := range in.Nodes {
		if n.PodCIDRs[0].Contains(a) {
			return identity.Unknown, PodCIDR, false
		}
	}
	return 0, 0, false
}

// lookup is a longest-prefix match.
func lookup(entries map[netip.Prefix]Entry, a netip.Addr) Entry {
	for bits := a.BitLen(); bits >= 0; bits-- {
		if e, ok := entries[netip.PrefixFrom(a, bits).Masked()]; ok {
			return e
		}
	}
	return Entry{}
}

func random(rng *rand.Rand) Input {
	in := Input{Node: fmt.Sprintf("n%d", rng.IntN(3)), Identity: numbers}
	ip := func() netip.Addr { return netip.AddrFrom4([4]byte{10, 0, byte(rng.IntN(4)), byte(rng.IntN(6))}) }
	for i := range 3 {
		in.Nodes = append(in.Nodes, &state.Node{
			Name: fmt.Sprintf("n%d", i), IPs: []netip.Addr{netip.AddrFrom4([4]byte{172, 30, 0, byte(i)})},
			PodCIDRs: []netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, byte(i), 0}), 24)},
		})
	}
	phases := []string{"Running", "Pending", "Succeeded"}
	for i := range rng.IntN(20) {
		w := workload(string(rune('a'+i)), []string{"", "n0", "n1", "n2", "n9"}[rng.IntN(5)], phases[rng.IntN(3)])
		w.IPs, w.HostNetwork = []netip.Addr{ip()}, rng.IntN(5) == 0
		in.Workloads = append(in.Workloads, w)
	}
	for i := range rng.IntN(5) {
		in.Pods = append(in.Pods, &state.Pod{ContainerID: fmt.Sprint(rng.Uint64()), Name: fmt.Sprint(i), Identity: 1000 + uint64(i), IPs: []netip.Addr{ip()}})
	}
	rng.Shuffle(len(in.Workloads), func(i, j int) { in.Workloads[i], in.Workloads[j] = in.Workloads[j], in.Workloads[i] })
	return in
}

func TestAgainstOracle(t *testing.T) {
	for seed := range uint64(2000) {
		in := random(rand.New(rand.NewPCG(seed, 7)))
		got := Compute(in)
		for third := range byte(5) {
			for last := range byte(8) {
				checkOracle(t, seed, in, got, netip.AddrFrom4([4]byte{10, 0, third, last}))
			}
		}
		for last := range byte(4) {
			checkOracle(t, seed, in, got, netip.AddrFrom4([4]byte{172, 30, 0, last}))
		}
		if t.Failed() {
			return
		}
	}
}

func checkOracle(t *testing.T, seed uint64, in Input, got Result, a netip.Addr) {
	t.Helper()
	id, kind, local := oracle(in, a)
	e := lookup(got.Entries, a)
	if e.Identity != id || e.Kind != kind || e.Local != local {
		t.Errorf("seed %d, node %s, address %s: %+v, want identity %d, %s, local %v", seed, in.Node, a, e, id, kind, local)
	}
	if e.Local && e.NextHop4.IsValid() {
		t.Errorf("seed %d, address %s: local with next hop %s", seed, a, e.NextHop4)
	}
}
