// SPDX-License-Identifier: Apache-2.0

package balance

import (
	"fmt"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/weft-mesh/weft/internal/state"
)

// here is the node of the tests.
var here = Node{
	Name: "node1", Zone: "a",
	IPs: []netip.Addr{netip.MustParseAddr("172.30.0.1"), netip.MustParseAddr("fd00:172:30::1")},
}

// service is a good ClusterIP service of one port, changed by edit.
func service(edit ...func(*state.Service)) *state.Service {
	s := &state.Service{
		Namespace: "shop", Name: "web",
		Spec: &corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, ClusterIP: "10.96.0.10", ClusterIPs: []string{"10.96.0.10"},
			Ports: []corev1.ServicePort{{Port: 80, Protocol: corev1.ProtocolTCP}},
		},
	}
	for _, e := range edit {
		e(s)
	}
	return s
}

func spec(edit func(*corev1.ServiceSpec)) func(*state.Service) {
	return func(s *state.Service) { edit(s.Spec) }
}

// balancer makes the service one of type LoadBalancer with node port 30080 and
// the given addresses.
func balancer(ips ...string) func(*state.Service) {
	return func(s *state.Service) {
		s.Spec.Type = corev1.ServiceTypeLoadBalancer
		s.Spec.Ports[0].NodePort = 30080
		s.Status = &corev1.ServiceStatus{}
		for _, ip := range ips {
			s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{IP: ip})
		}
	}
}

var (
	externalPolicyLocal = spec(func(s *corev1.ServiceSpec) { s.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal })
	internalPolicyLocal = spec(func(s *corev1.ServiceSpec) { s.InternalTrafficPolicy = new(corev1.ServiceInternalTrafficPolicyLocal) })
	dualStack           = spec(func(s *corev1.ServiceSpec) { s.ClusterIPs = append(s.ClusterIPs, "fd00:10:96::10") })
)

// slice is an EndpointSlice. Its family is that of the first endpoint; port is
// "NAME:NUMBER[/PROTOCOL]".
func slice(name, port string, es ...discoveryv1.Endpoint) *state.Endpoint {
	s := &discoveryv1.EndpointSlice{AddressType: discoveryv1.AddressTypeIPv4, Endpoints: es}
	if len(es) > 0 && strings.Contains(es[0].Addresses[0], ":") {
		s.AddressType = discoveryv1.AddressTypeIPv6
	}
	port, protocol, _ := strings.Cut(port, "/")
	if protocol == "" {
		protocol = "TCP"
	}
	portName, number, _ := strings.Cut(port, ":")
	var n int32
	if _, err := fmt.Sscan(number, &n); err != nil {
		panic(err)
	}
	s.Ports = []discoveryv1.EndpointPort{{Name: &portName, Port: &n, Protocol: new(corev1.Protocol(protocol))}}
	return &state.Endpoint{Namespace: "shop", Name: name, Service: "web", Slice: s}
}

// ep is an endpoint from "ADDRESS NODE FLAG…": flags are ready, serving, terminating with
// "=true" or "=false", zone=Z (hint) and node=N (hint). NODE may be "-".
func ep(line string) discoveryv1.Endpoint {
	words := strings.Fields(line)
	e := discoveryv1.Endpoint{Addresses: words[:1]}
	if words[1] != "-" {
		e.NodeName = &words[1]
	}
	hints := &discoveryv1.EndpointHints{}
	for _, w := range words[2:] {
		k, v, _ := strings.Cut(w, "=")
		switch k {
		case "ready":
			e.Conditions.Ready = new(v == "true")
		case "serving":
			e.Conditions.Serving = new(v == "true")
		case "terminating":
			e.Conditions.Terminating = new(v == "true")
		case "zone":
			hints.ForZones = append(hints.ForZones, discoveryv1.ForZone{Name: v})
		case "node":
			hints.ForNodes = append(hints.ForNodes, discoveryv1.ForNode{Name: v})
		default:
			panic(w)
		}
		if k == "zone" || k == "node" {
			e.Hints = hints
		}
	}
	return e
}

func inSlice(lines ...string) []*state.Endpoint {
	var es []discoveryv1.Endpoint
	for _, l := range lines {
		es = append(es, ep(l))
	}
	return []*state.Endpoint{slice("web-1", ":8080", es...)}
}

// show is a service port in lines: "frontend KIND ADDRESS:PORT", then for each
// set that is not nil "SET: ADDRESS:PORT …", terminating ones in brackets.
func show(ps []ServicePort) string {
	var b strings.Builder
	for _, p := range ps {
		fmt.Fprintf(&b, "%s/%s:%s/%s\n", p.Name.Namespace, p.Name.Service, p.Name.Port, p.Name.Protocol)
		for _, f := range p.Frontends {
			fmt.Fprintf(&b, "%s %s\n", f.Kind, netip.AddrPortFrom(f.Addr, f.Port))
		}
		showSet(&b, "internal", p.Internal)
		showSet(&b, "cluster", p.Cluster)
		showSet(&b, "external", p.External)
		if p.Affinity != 0 {
			fmt.Fprintf(&b, "affinity %s\n", p.Affinity)
		}
		if p.SourceRanges != nil {
			fmt.Fprintf(&b, "from %v\n", p.SourceRanges)
		}
		if p.LocalExternal {
			fmt.Fprintln(&b, "local")
		}
		if p.HealthCheckPort != 0 {
			fmt.Fprintf(&b, "health %d: %d\n", p.HealthCheckPort, p.LocalReady)
		}
	}
	return b.String()
}

func showSet(b *strings.Builder, name string, set []Backend) {
	if set == nil {
		return
	}
	b.WriteString(name + ":")
	for _, x := range set {
		f := " %s"
		if x.State == Terminating {
			f = " (%s)"
		}
		fmt.Fprintf(b, f, netip.AddrPortFrom(x.Addr, x.Port))
	}
	b.WriteString("\n")
}

type ruleTest struct {
	name     string
	service  *state.Service
	slices   []*state.Endpoint
	node     *Node  // here, if nil
	want     string // as show prints
	problems []string
}

func (tt ruleTest) run(t *testing.T) {
	in := Input{Service: tt.service, Slices: tt.slices, Node: here}
	if tt.node != nil {
		in.Node = *tt.node
	}
	ports, problems := Compute(in)
	want := ""
	for line := range strings.Lines(tt.want) {
		if line = strings.TrimSpace(line); line != "" {
			want += line + "\n"
		}
	}
	if d := cmp.Diff(want, show(ports)); d != "" {
		t.Errorf("service ports (-want +got):\n%s", d)
	}
	var said []string
	for _, p := range problems {
		said = append(said, p.String())
	}
	if d := cmp.Diff(tt.problems, said); d != "" {
		t.Errorf("problems (-want +got):\n%s", d)
	}
}

func run(t *testing.T, tests []ruleTest) {
	for _, tt := range tests {
		t.Run(tt.name, tt.run)
	}
}

func TestBackend(t *testing.T) {
	e := ep("10.244.2.7 node2")
	e.Zone = new("b")
	e.TargetRef = &corev1.ObjectReference{Kind: "Pod", Name: "web-0"}
	ports, _ := Compute(Input{Service: service(), Node: here, Slices: []*state.Endpoint{slice("web-1", ":8080", e)}})
	want := []Backend{{Addr: netip.MustParseAddr("10.244.2.7"), Port: 8080, Node: "node2", Zone: "b", Pod: "shop/web-0", State: Active}}
	if d := cmp.Diff(want, ports[0].Internal, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); d != "" {
		t.Errorf("backends (-want +got):\n%s", d)
	}
}

func TestNodeOf(t *testing.T) {
	n := NodeOf(&state.Node{Name: "node1", IPs: here.IPs, Labels: map[string]string{"topology.kubernetes.io/zone": "a"}})
	if n.Name != "node1" || n.Zone != "a" || len(n.IPs) != 2 {
		t.Errorf("the node is %+v", n)
	}
}

func TestFrontends(t *testing.T) {
	run(t, []ruleTest{
		{
			name: "a cluster IP without endpoints refuses", service: service(),
			want: "shop/web:/TCP\nClusterIP 10.96.0.10:80\ninternal:\n",
		},
		{
			name: "clusterIP alone is as good as clusterIPs", service: service(spec(func(s *corev1.ServiceSpec) { s.ClusterIPs = nil })),
			want: "shop/web:/TCP\nClusterIP 10.96.0.10:80\ninternal:\n",
		},
		{
			name: "no protocol is TCP", service: service(spec(func(s *corev1.ServiceSpec) { s.Ports[0].Protocol = "" })),
			want: "shop/web:/TCP\nClusterIP 10.96.0.10:80\ninternal:\n",
		},
		{
			name: "headless has none", service: service(spec(func(s *corev1.ServiceSpec) { s.ClusterIP, s.ClusterIPs = "None", []string{"None"} })),
			slices: inSlice("10.244.1.2 node1"),
		},
		{
			name: "ExternalName has none", service: service(spec(func(s *corev1.ServiceSpec) { s.Type, s.ExternalName = corev1.ServiceTypeExternalName, "example.com" })),
		},
		{
			name: "another proxy's", service: service(func(s *state.Service) { s.Labels = map[string]string{proxyNameLabel: "mesh"} }),
			slices: inSlice("10.244.1.2 node1"),
		},
		{
			name: "no cluster IP", service: service(spec(func(s *corev1.ServiceSpec) { s.ClusterIP, s.ClusterIPs = "", nil })),
			problems: []string{`Service shop/web: spec.clusterIP: "": want an address, or None`},
		},
		{
			name:    "node port on each address of the node's families, load balancer by status",
			service: service(balancer("203.0.113.9"), dualStack),
			slices:  inSlice("10.244.1.2 node1"),
			want: `shop/web:/TCP
				ClusterIP 10.96.0.10:80
				ClusterIP [fd00:10:96::10]:80
				NodePort 172.30.0.1:30080
				NodePort [fd00:172:30::1]:30080
				LoadBalancer 203.0.113.9:80
				internal: 10.244.1.2:8080
				cluster: 10.244.1.2:8080
				external: 10.244.1.2:8080`,
		},
		{
			name:    "a family without a cluster IP has nothing",
			service: service(balancer("203.0.113.9", "2001:db8::9"), spec(func(s *corev1.ServiceSpec) { s.ExternalIPs = []string{"2001:db8::8", "198.51.100.1"} })),
			slices:  append(inSlice("10.244.1.2 node1"), slice("web-2", ":8080", ep("fd00:10:244:1::2 node1"))),
			want: `shop/web:/TCP
				ClusterIP 10.96.0.10:80
				NodePort 172.30.0.1:30080
				ExternalIP 198.51.100.1:80
				LoadBalancer 203.0.113.9:80
				internal: 10.244.1.2:8080
				cluster: 10.244.1.2:8080
				external: 10.244.1.2:8080`,
		},
		{
			name: "addresses of the node in any form", service: service(balancer()),
			node: &Node{Name: "node1", IPs: []netip.Addr{{}, netip.MustParseAddr("::ffff:172.30.0.1"), netip.MustParseAddr("172.30.0.1"), netip.MustParseAddr("::ffff:172.30.0.2")}},
			want: "shop/web:/TCP\nClusterIP 10.96.0.10:80\nNodePort 172.30.0.1:30080\nNodePort 172.30.0.2:30080\ninternal:\ncluster:\nexternal:\n",
		},
		{
			name: "ipMode Proxy, host names and loadBalancerIP are no frontends",
			service: service(balancer("203.0.113.9", "203.0.113.10", ""), func(s *state.Service) {
				s.Spec.Ports[0].NodePort = 0
				s.Spec.LoadBalancerIP = "203.0.113.11"
				in := s.Status.LoadBalancer.Ingress
				in[0].IPMode = new(corev1.LoadBalancerIPModeProxy)
				in[1].IPMode = new(corev1.LoadBalancerIPModeVIP)
				in[2].Hostname = "lb.example.com"
			}),
			want: "shop/web:/TCP\nClusterIP 10.96.0.10:80\nLoadBalancer 203.0.113.10:80\ninternal:\ncluster:\nexternal:\n",
		},
		{
			name: "what is left of another type is not looked at",
			service: service(balancer("203.0.113.9"), spec(func(s *corev1.ServiceSpec) {
				s.Type, s.HealthCheckNodePort, s.ExternalTrafficPolicy = corev1.ServiceTypeClusterIP, 32000, corev1.ServiceExternalTrafficPolicyLocal
				s.LoadBalancerSourceRanges = []string{"10.0.0.0/8"}
			})),
			want: "shop/web:/TCP\nClusterIP 10.96.0.10:80\ninternal:\n",
		},
		{
			name: "one address twice: ranges stay in force",
			service: service(balancer("203.0.113.9"), spec(func(s *corev1.ServiceSpec) {
				s.ExternalIPs, s.Ports[0].NodePort = []string{"203.0.113.9", "10.96.0.10"}, 0
			})),
			want: "shop/web:/TCP\nClusterIP 10.96.0.10:80\nLoadBalancer 203.0.113.9:80\ninternal:\ncluster:\nexternal:\n",
		},
		{
			name: "frontends at addresses that nobody may serve",
			service: service(balancer("224.0.0.1", "0.0.0.0", "2001:db8::9%eth0"), spec(func(s *corev1.ServiceSpec) {
				s.ExternalIPs = []string{"127.0.0.1", "fe80::1", "1.2.3", "::ffff:1.2.3.4", "255.255.255.255"}
				s.Ports[0].NodePort = 0
			})),
			want: "shop/web:/TCP\nClusterIP 10.96.0.10:80\ninternal:\n",
			problems: []string{
				`Service shop/web: spec.externalIPs[0]: "127.0.0.1": want ` + unicast,
				`Service shop/web: spec.externalIPs[1]: "fe80::1": want ` + unicast,
				`Service shop/web: spec.externalIPs[2]: "1.2.3": want an IPv4 or IPv6 address`,
				`Service shop/web: spec.externalIPs[3]: "::ffff:1.2.3.4": want a plain IPv4 or IPv6 address`,
				`Service shop/web: spec.externalIPs[4]: "255.255.255.255": want ` + unicast,
				`Service shop/web: status.loadBalancer.ingress[0].ip: "224.0.0.1": want ` + unicast,
				`Service shop/web: status.loadBalancer.ingress[1].ip: "0.0.0.0": want ` + unicast,
				`Service shop/web: status.loadBalancer.ingress[2].ip: "2001:db8::9%eth0": want a plain IPv4 or IPv6 address`,
			},
		},
	})
}

func TestPorts(t *testing.T) {
	ports := func(ps ...corev1.ServicePort) func(*state.Service) {
		return spec(func(s *corev1.ServiceSpec) { s.Type, s.Ports = corev1.ServiceTypeNodePort, ps })
	}
	run(t, []ruleTest{
		{
			name: "by name and protocol",
			service: service(ports(corev1.ServicePort{Name: "dns", Port: 53, Protocol: "UDP"}, corev1.ServicePort{Name: "dns", Port: 53, Protocol: "TCP"},
				corev1.ServicePort{Name: "web", Port: 80, Protocol: "TCP"})),
			slices: []*state.Endpoint{slice("1", "dns:5353/UDP", ep("10.244.1.2 -")), slice("2", "dns:5354/TCP", ep("10.244.1.3 -")), slice("3", ":80", ep("10.244.1.4 -"))},
			want: `shop/web:dns/TCP
				ClusterIP 10.96.0.10:53
				internal: 10.244.1.3:5354
				shop/web:dns/UDP
				ClusterIP 10.96.0.10:53
				internal: 10.244.1.2:5353
				shop/web:web/TCP
				ClusterIP 10.96.0.10:80
				internal:`,
		},
		{
			name: "a named port has two numbers", service: service(),
			slices: []*state.Endpoint{slice("1", ":8081", ep("10.244.1.3 -"), ep("10.244.1.9 -")), slice("2", ":8080", ep("10.244.1.2 -"), ep("10.244.1.4 -"), ep("10.244.1.3 -"))},
			want:   "shop/web:/TCP\nClusterIP 10.96.0.10:80\ninternal: 10.244.1.2:8080 10.244.1.3:8080 10.244.1.3:8081 10.244.1.4:8080 10.244.1.9:8081\n",
		},
		{
			name:    "SCTP is refused, the other ports are served",
			service: service(ports(corev1.ServicePort{Name: "s", Port: 80, Protocol: "SCTP"}, corev1.ServicePort{Name: "t", Port: 80, Protocol: "TCP"}, corev1.ServicePort{Name: "x", Port: 80, Protocol: "DCCP"})),
			want:    "shop/web:t/TCP\nClusterIP 10.96.0.10:80\ninternal:\n",
			problems: []string{
				`Service shop/web: spec.ports[0].protocol: "SCTP": want TCP or UDP: weft does not translate SCTP`,
				`Service shop/web: spec.ports[2].protocol: "DCCP": want TCP or UDP`,
			},
		},
		{
			name:    "numbers that are none",
			service: service(ports(corev1.ServicePort{Name: "a", Port: 0}, corev1.ServicePort{Name: "b", Port: 65536}, corev1.ServicePort{Name: "c", Port: 80, NodePort: -1})),
			slices:  []*state.Endpoint{slice("1", "c:0", ep("10.244.1.2 -")), slice("2", "c:70000", ep("10.244.1.2 -"))},
			want:    "shop/web:c/TCP\nClusterIP 10.96.0.10:80\ninternal:\n",
			problems: []string{
				`EndpointSlice shop/1: ports[0].port: 0: want 1 to 65535`,
				`EndpointSlice shop/2: ports[0].port: 70000: want 1 to 65535`,
				`Service shop/web: spec.ports[0].port: 0: want 1 to 65535`,
				`Service shop/web: spec.ports[1].port: 65536: want 1 to 65535`,
				`Service shop/web: spec.ports[2].nodePort: -1: want 1 to 65535`,
			},
		},
		{
			name: "ports that are in one another's way",
			service: service(ports(corev1.ServicePort{Name: "b", Port: 80}, corev1.ServicePort{Name: "a", Port: 80, NodePort: 30080}, corev1.ServicePort{Name: "c", Port: 81, NodePort: 30080},
				corev1.ServicePort{Name: "c", Port: 82}, corev1.ServicePort{Name: "u", Port: 80, NodePort: 30080, Protocol: "UDP"})),
			want: `shop/web:a/TCP
				ClusterIP 10.96.0.10:80
				NodePort 172.30.0.1:30080
				internal:
				cluster:
				external:
				shop/web:c/TCP
				ClusterIP 10.96.0.10:81
				internal:
				shop/web:u/UDP
				ClusterIP 10.96.0.10:80
				NodePort 172.30.0.1:30080
				internal:
				cluster:
				external:`,
			problems: []string{
				`Service shop/web: spec.ports[0]: 10.96.0.10:80: want an address and port that port "a" does not have`,
				`Service shop/web: spec.ports[2]: 172.30.0.1:30080: want an address and port that port "a" does not have`,
				`Service shop/web: spec.ports[3].name: "c": want a name that no other port of this protocol has`,
			},
		},
	})
}

func TestConditions(t *testing.T) {
	publish := spec(func(s *corev1.ServiceSpec) { s.PublishNotReadyAddresses = true })
	const head = "shop/web:/TCP\nClusterIP 10.96.0.10:80\n"
	run(t, []ruleTest{
		{
			name: "nothing said is ready", service: service(), slices: inSlice("10.244.1.2 -"),
			want: head + "internal: 10.244.1.2:8080",
		},
		{
			name: "not ready", service: service(), slices: inSlice("10.244.1.2 - ready=false", "10.244.1.3 - ready=false serving=true", "10.244.1.4 - ready=true"),
			want: head + "internal: 10.244.1.4:8080",
		},
		{
			name: "terminating ones rest while one is ready", service: service(),
			slices: inSlice("10.244.1.2 - ready=false serving=true terminating=true", "10.244.1.3 - ready=true serving=true terminating=false"),
			want:   head + "internal: 10.244.1.3:8080",
		},
		{
			name: "terminating ones that serve, where none is ready", service: service(),
			slices: inSlice("10.244.1.2 - ready=false serving=true terminating=true", "10.244.1.3 - ready=false serving=false terminating=true", "10.244.1.4 - ready=false serving=true", "10.244.1.5 - ready=false terminating=true"),
			want:   head + "internal: (10.244.1.2:8080)",
		},
		{
			name: "ready although it terminates", service: service(), slices: inSlice("10.244.1.2 - ready=true serving=false terminating=true"),
			want: head + "internal: 10.244.1.2:8080",
		},
		{
			name: "publishNotReadyAddresses", service: service(publish), slices: inSlice("10.244.1.2 - ready=false", "10.244.1.3 - ready=false serving=false terminating=true"),
			want: head + "internal: 10.244.1.2:8080 10.244.1.3:8080",
		},
		{
			name: "families fall back each by itself", service: service(dualStack),
			slices: append(inSlice("10.244.1.2 - ready=false serving=true terminating=true"), slice("web-2", ":8080", ep("fd00:10:244:1::2 -"))),
			want:   "shop/web:/TCP\nClusterIP 10.96.0.10:80\nClusterIP [fd00:10:96::10]:80\ninternal: (10.244.1.2:8080) [fd00:10:244:1::2]:8080",
		},
	})
}

func TestPolicies(t *testing.T) {
	external := func(policies ...func(*state.Service)) *state.Service {
		ip := spec(func(s *corev1.ServiceSpec) { s.ExternalIPs = []string{"198.51.100.1"} })
		return service(append([]func(*state.Service){ip}, policies...)...)
	}
	const head = "shop/web:/TCP\nClusterIP 10.96.0.10:80\n"
	const both = head + "ExternalIP 198.51.100.1:80\n"
	two := inSlice("10.244.1.2 node1", "10.244.2.2 node2")
	run(t, []ruleTest{
		{
			name: "internal Local", service: service(internalPolicyLocal), slices: two,
			want: head + "internal: 10.244.1.2:8080",
		},
		{
			name: "internal Local without a local one", service: service(internalPolicyLocal), slices: inSlice("10.244.2.2 node2", "10.244.2.3 -"),
			want: head + "internal:",
		},
		{
			name: "internal Local does not bind external frontends", service: external(internalPolicyLocal), slices: two,
			want: both + "internal: 10.244.1.2:8080\ncluster: 10.244.1.2:8080 10.244.2.2:8080\nexternal: 10.244.1.2:8080 10.244.2.2:8080",
		},
		{
			name: "external Local binds clients from outside", service: external(externalPolicyLocal), slices: two,
			want: both + "internal: 10.244.1.2:8080 10.244.2.2:8080\ncluster: 10.244.1.2:8080 10.244.2.2:8080\nexternal: 10.244.1.2:8080\nlocal",
		},
		{
			name: "external Local without a local one", service: external(externalPolicyLocal), slices: inSlice("10.244.2.2 node2"),
			want: both + "internal: 10.244.2.2:8080\ncluster: 10.244.2.2:8080\nexternal:\nlocal",
		},
		{
			name: "both Local", service: external(externalPolicyLocal, internalPolicyLocal), slices: two,
			want: both + "internal: 10.244.1.2:8080\ncluster: 10.244.1.2:8080 10.244.2.2:8080\nexternal: 10.244.1.2:8080\nlocal",
		},
		{
			name: "the local set falls back to terminating ones by itself", service: external(externalPolicyLocal),
			slices: inSlice("10.244.1.2 node1 ready=false serving=true terminating=true", "10.244.2.2 node2"),
			want:   both + "internal: 10.244.2.2:8080\ncluster: 10.244.2.2:8080\nexternal: (10.244.1.2:8080)\nlocal",
		},
		{
			name: "a node without a name has no local ones", service: service(internalPolicyLocal), node: &Node{}, slices: inSlice("10.244.1.2 -"),
			want: head + "internal:",
		},
		{
			name: "external Local without external frontends", service: service(externalPolicyLocal), slices: two,
			want: head + "internal: 10.244.1.2:8080 10.244.2.2:8080",
		},
	})
}

func TestHints(t *testing.T) {
	const head = "shop/web:/TCP\nClusterIP 10.96.0.10:80\n"
	all := head + "internal: 10.244.1.2:8080 10.244.2.2:8080"
	zones := inSlice("10.244.1.2 node2 zone=a", "10.244.2.2 node1 zone=b")
	run(t, []ruleTest{
		{name: "own zone", service: service(), slices: zones, want: head + "internal: 10.244.1.2:8080"},
		{name: "several zones", service: service(), slices: inSlice("10.244.1.2 - zone=b zone=a", "10.244.2.2 - zone=a"), want: all},
		{name: "one without hints", service: service(), slices: inSlice("10.244.1.2 - zone=a", "10.244.2.2 -"), want: all},
		{name: "none for our zone", service: service(), slices: inSlice("10.244.1.2 - zone=b", "10.244.2.2 - zone=c"), want: all},
		{name: "hints for no zone", service: service(), slices: inSlice("10.244.1.2 - zone=", "10.244.2.2 - zone=b"), node: &Node{Name: "node1"}, want: all},
		{name: "the node has no zone", service: service(), slices: zones, node: &Node{Name: "node1"}, want: all},
		{
			name: "one that is not ready needs no hint", service: service(),
			slices: inSlice("10.244.1.2 - zone=a", "10.244.2.2 - zone=b", "10.244.3.2 - ready=false serving=true terminating=true"),
			want:   head + "internal: 10.244.1.2:8080",
		},
		{
			name: "one that is not ready does not make a zone", service: service(),
			slices: inSlice("10.244.1.2 - zone=b", "10.244.2.2 - zone=b", "10.244.3.2 - zone=a ready=false serving=true terminating=true"),
			want:   all,
		},
		{
			name: "terminating ones have no topology", service: service(),
			slices: inSlice("10.244.1.2 - zone=a ready=false serving=true terminating=true", "10.244.2.2 - zone=b ready=false serving=true terminating=true"),
			want:   head + "internal: (10.244.1.2:8080) (10.244.2.2:8080)",
		},
		{
			name: "node before zone", service: service(), slices: inSlice("10.244.1.2 - node=node2 zone=a", "10.244.2.2 - node=node1 zone=b"),
			want: head + "internal: 10.244.2.2:8080",
		},
		{
			name: "zone where none is for the node", service: service(), slices: inSlice("10.244.1.2 - node=node2 zone=a", "10.244.2.2 - node=node3 zone=b"),
			want: head + "internal: 10.244.1.2:8080",
		},
		{name: "node hints on some only", service: service(), slices: inSlice("10.244.1.2 - node=node1", "10.244.2.2 -"), want: all},
		{
			name: "Local does not look at hints", service: service(internalPolicyLocal), slices: zones,
			want: head + "internal: 10.244.2.2:8080",
		},
		{
			name: "families have their own hints", service: service(dualStack),
			slices: append(inSlice("10.244.1.2 - zone=a", "10.244.2.2 - zone=b"), slice("6", ":8080", ep("fd00:10:244:1::2 -"), ep("fd00:10:244:2::2 -"))),
			want:   head + "ClusterIP [fd00:10:96::10]:80\ninternal: 10.244.1.2:8080 [fd00:10:244:1::2]:8080 [fd00:10:244:2::2]:8080",
		},
	})
}

func TestSlices(t *testing.T) {
	const head = "shop/web:/TCP\nClusterIP 10.96.0.10:80\n"
	change := func(edit func(*state.Endpoint)) []*state.Endpoint {
		s := inSlice("10.244.1.2 node1")
		edit(s[0])
		return s
	}
	run(t, []ruleTest{
		{
			name: "an endpoint in two slices is one", service: service(),
			slices: []*state.Endpoint{slice("1", ":8080", ep("10.244.1.2 node1"), ep("10.244.1.3 node1")), slice("2", ":8080", ep("10.244.1.2 node1"))},
			want:   head + "internal: 10.244.1.2:8080 10.244.1.3:8080",
		},
		{
			name: "of two that differ the ready one counts", service: service(),
			slices: []*state.Endpoint{slice("1", ":8080", ep("10.244.1.2 node1 ready=false serving=true terminating=true")), slice("2", ":8080", ep("10.244.1.2 node1")), slice("3", ":8080", ep("10.244.1.2 node1 ready=false"))},
			want:   head + "internal: 10.244.1.2:8080",
		},
		{
			name: "of two that differ the local one counts", service: service(internalPolicyLocal),
			slices: []*state.Endpoint{slice("1", ":8080", ep("10.244.1.2 a")), slice("2", ":8080", ep("10.244.1.2 node1")), slice("3", ":8080", ep("10.244.1.2 z"))},
			want:   head + "internal: 10.244.1.2:8080",
		},
		{
			name: "only the first address of an endpoint counts", service: service(),
			slices: change(func(e *state.Endpoint) {
				e.Slice.Endpoints[0].Addresses = []string{"10.244.1.2", "10.244.1.3"}
				e.Slice.Endpoints = append(e.Slice.Endpoints, discoveryv1.Endpoint{})
			}),
			want: head + "internal: 10.244.1.2:8080",
		},
		{
			name: "a port without name and protocol is the unnamed TCP one", service: service(),
			slices: change(func(e *state.Endpoint) { e.Slice.Ports[0].Name, e.Slice.Ports[0].Protocol = nil, nil }),
			want:   head + "internal: 10.244.1.2:8080",
		},
		{
			name: "a port without number", service: service(),
			slices: change(func(e *state.Endpoint) { e.Slice.Ports[0].Port = nil }), want: head + "internal:",
		},
		{
			name: "FQDN", service: service(),
			slices: change(func(e *state.Endpoint) {
				e.Slice.AddressType, e.Slice.Endpoints[0].Addresses = discoveryv1.AddressTypeFQDN, []string{"example.com"}
			}),
			want: head + "internal:",
		},
		{name: "another Service's", service: service(), slices: change(func(e *state.Endpoint) { e.Service = "db" }), want: head + "internal:"},
		{name: "another namespace's", service: service(), slices: change(func(e *state.Endpoint) { e.Namespace = "db" }), want: head + "internal:"},
		{
			name: "a headless Service's", service: service(),
			slices: change(func(e *state.Endpoint) { e.Slice.Labels = map[string]string{corev1.IsHeadlessService: ""} }), want: head + "internal:",
		},
		{
			name: "addresses that no pod has", service: service(dualStack),
			slices: append(inSlice("127.0.0.1 -", "169.254.169.254 -", "224.0.0.1 -", "0.0.0.0 -", "10.244.1.2 -", "fd00::1 -", "010.1.1.1 -", "127.0.0.2 - ready=false"), slice("6", ":1", ep("fe80::1 -"), ep("10.244.1.3 -"))),
			want:   head + "ClusterIP [fd00:10:96::10]:80\ninternal: 10.244.1.2:8080",
			problems: []string{
				`EndpointSlice shop/6: endpoints[0].addresses[0]: "fe80::1": want ` + unicast,
				`EndpointSlice shop/6: endpoints[1].addresses[0]: "10.244.1.3": want an IPv6 address, as addressType says`,
				`EndpointSlice shop/web-1: endpoints[0].addresses[0]: "127.0.0.1": want ` + unicast,
				`EndpointSlice shop/web-1: endpoints[1].addresses[0]: "169.254.169.254": want ` + unicast,
				`EndpointSlice shop/web-1: endpoints[2].addresses[0]: "224.0.0.1": want ` + unicast,
				`EndpointSlice shop/web-1: endpoints[3].addresses[0]: "0.0.0.0": want ` + unicast,
				`EndpointSlice shop/web-1: endpoints[5].addresses[0]: "fd00::1": want an IPv4 address, as addressType says`,
				`EndpointSlice shop/web-1: endpoints[6].addresses[0]: "010.1.1.1": want an IPv4 or IPv6 address`,
			},
		},
	})
}

// TestTwins has endpoints of one address that differ in what Kubernetes does not
// say which counts: it must be the same one in each order.
func TestTwins(t *testing.T) {
	with := func(line, zone, pod string) *state.Endpoint {
		e := ep("10.244.1.2 " + line)
		e.Zone, e.TargetRef = &zone, &corev1.ObjectReference{Kind: "Pod", Name: pod}
		return slice("web-1", ":8080", e, ep("10.244.1.3 - zone=b"))
	}
	for _, tt := range []struct {
		name  string
		twins []*state.Endpoint
	}{
		{"pod", []*state.Endpoint{with("-", "a", "web-0"), with("-", "a", "web-1")}},
		{"zone", []*state.Endpoint{with("-", "a", "web-0"), with("-", "b", "web-0")}},
		{"node", []*state.Endpoint{with("node2", "a", "web-0"), with("node3", "a", "web-0")}},
		{"zone hints", []*state.Endpoint{with("- zone=a", "a", "web-0"), with("- zone=b", "a", "web-0")}},
		{"no hints", []*state.Endpoint{with("- zone=a", "a", "web-0"), with("-", "a", "web-0")}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			one, _ := Compute(Input{Service: service(), Node: here, Slices: tt.twins})
			other, _ := Compute(Input{Service: service(), Node: here, Slices: []*state.Endpoint{tt.twins[1], tt.twins[0]}})
			if !reflect.DeepEqual(one, other) {
				t.Errorf("the backends are %v and %v", one[0].Internal, other[0].Internal)
			}
		})
	}
}

func TestAffinity(t *testing.T) {
	clientIP := func(seconds *int32) *state.Service {
		return service(spec(func(s *corev1.ServiceSpec) {
			s.SessionAffinity = corev1.ServiceAffinityClientIP
			if seconds != nil {
				s.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: seconds}}
			}
		}))
	}
	for _, tt := range []struct {
		service *state.Service
		want    time.Duration
		problem string
	}{
		{service: service()},
		{service: clientIP(nil), want: 3 * time.Hour},
		{service: clientIP(new(int32(5))), want: 5 * time.Second},
		{service: clientIP(new(int32(86400))), want: 24 * time.Hour},
		{service: clientIP(new(int32(0))), want: 3 * time.Hour, problem: "Service shop/web: spec.sessionAffinityConfig.clientIP.timeoutSeconds: 0: want 1 to 86400 seconds; taken as 10800"},
		{service: clientIP(new(int32(86401))), want: 3 * time.Hour, problem: "Service shop/web: spec.sessionAffinityConfig.clientIP.timeoutSeconds: 86401: want 1 to 86400 seconds; taken as 10800"},
		{
			service: service(spec(func(s *corev1.ServiceSpec) { s.SessionAffinity = "Cookie" })),
			problem: `Service shop/web: spec.sessionAffinity: "Cookie": want None or ClientIP`,
		},
	} {
		ports, problems := Compute(Input{Service: tt.service, Node: here})
		if got := ports[0].Affinity; got != tt.want {
			t.Errorf("the affinity of %+v is %s, want %s", tt.service.Spec.SessionAffinityConfig, got, tt.want)
		}
		said := ""
		for _, p := range problems {
			said += p.String()
		}
		if said != tt.problem {
			t.Errorf("the problem is %q, want %q", said, tt.problem)
		}
	}
}

func TestSourceRanges(t *testing.T) {
	ranges := func(rs ...string) *state.Service {
		return service(balancer("203.0.113.9"), spec(func(s *corev1.ServiceSpec) { s.LoadBalancerSourceRanges, s.Ports[0].NodePort = rs, 0 }))
	}
	const head = "shop/web:/TCP\nClusterIP 10.96.0.10:80\n"
	const lb = head + "LoadBalancer 203.0.113.9:80\ninternal:\ncluster:\nexternal:\n"
	run(t, []ruleTest{
		{name: "masked, in order, once", service: ranges("192.168.1.9/16", " 10.0.0.0/8 ", "2001:db8::/32", "10.1.2.3/8"), want: lb + "from [10.0.0.0/8 192.168.0.0/16 2001:db8::/32]"},
		{
			name: "a bad one is left out", service: ranges("10.0.0.0/8", "10.0.0.1"), want: lb + "from [10.0.0.0/8]",
			problems: []string{`Service shop/web: spec.loadBalancerSourceRanges[1]: "10.0.0.1": want a CIDR`},
		},
		{
			name: "only bad ones: nobody is let in", service: ranges("x", "::ffff:10.0.0.0/104"), want: head + "internal:",
			problems: []string{
				`Service shop/web: spec.loadBalancerSourceRanges[0]: "x": want a CIDR`,
				`Service shop/web: spec.loadBalancerSourceRanges[1]: "::ffff:10.0.0.0/104": want a CIDR`,
			},
		},
	})
}

func TestHealthCheck(t *testing.T) {
	health := spec(func(s *corev1.ServiceSpec) { s.HealthCheckNodePort, s.Ports[0].NodePort = 32000, 0 })
	second := spec(func(s *corev1.ServiceSpec) {
		s.Ports[0].Name = "a"
		s.Ports = append(s.Ports, corev1.ServicePort{Name: "b", Port: 81})
	})
	const head = "shop/web:/TCP\nClusterIP 10.96.0.10:80\n"
	run(t, []ruleTest{
		{
			name: "none with policy Cluster", service: service(balancer(), health), want: head + "internal:",
		},
		{
			name: "none for another type", service: service(balancer(), health, externalPolicyLocal, spec(func(s *corev1.ServiceSpec) { s.Type = corev1.ServiceTypeNodePort })),
			want: head + "internal:\nlocal",
		},
		{
			name: "ready and local ones count", service: service(balancer(), health, externalPolicyLocal),
			slices: inSlice("10.244.1.2 node1", "10.244.1.3 node1 ready=false serving=true terminating=true", "10.244.2.2 node2", "10.244.1.4 node1"),
			want:   head + "internal: 10.244.1.2:8080 10.244.1.4:8080 10.244.2.2:8080\nlocal\nhealth 32000: 2",
		},
		{
			name: "pods count once for all ports and families", service: service(balancer(), health, externalPolicyLocal, second, dualStack),
			slices: []*state.Endpoint{
				slice("1", "a:80", ep("10.244.1.2 node1")), slice("2", "b:81", ep("10.244.1.2 node1"), ep("10.244.1.3 node1")),
				slice("3", "a:80", ep("fd00:10:244:1::2 node1")), slice("4", "other:80", ep("10.244.1.9 node1")),
			},
			want: `shop/web:a/TCP
				ClusterIP 10.96.0.10:80
				ClusterIP [fd00:10:96::10]:80
				internal: 10.244.1.2:80 [fd00:10:244:1::2]:80
				local
				health 32000: 2
				shop/web:b/TCP
				ClusterIP 10.96.0.10:81
				ClusterIP [fd00:10:96::10]:81
				internal: 10.244.1.2:81 10.244.1.3:81
				local
				health 32000: 2`,
		},
		{
			name:    "a number that is none",
			service: service(balancer(), health, externalPolicyLocal, spec(func(s *corev1.ServiceSpec) { s.HealthCheckNodePort = 65536 })),
			want:    head + "internal:\nlocal", problems: []string{"Service shop/web: spec.healthCheckNodePort: 65536: want 1 to 65535"},
		},
	})
}
