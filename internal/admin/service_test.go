// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
	"github.com/weft-mesh/weft/internal/balance"
	"github.com/weft-mesh/weft/internal/balance/maglev"
	"github.com/weft-mesh/weft/internal/datapath/deny"
	"github.com/weft-mesh/weft/internal/datapath/service"
	"github.com/weft-mesh/weft/internal/datapath/xdp"
	"github.com/weft-mesh/weft/internal/services"
	"github.com/weft-mesh/weft/internal/state"
)

// fakeServices computes service ports from tables, and has a kernel of its own.
type fakeServices struct {
	tables *state.Tables
	node   balance.Node
	kernel map[balance.Name]service.InForce
	status services.Status
	edge   Edge
	err    error
}

func (f *fakeServices) Input(namespace, service string) (balance.Input, bool) {
	txn := f.tables.DB.ReadTxn()
	row, _, ok := f.tables.Services.Get(txn, state.ServiceByName.Query(state.Key(namespace, service)))
	in := balance.Input{Service: row, Node: f.node}
	for e := range f.tables.Endpoints.All(txn) {
		if e.Namespace == namespace && e.Service == service {
			in.Slices = append(in.Slices, e)
		}
	}
	return in, ok
}

func (f *fakeServices) compute(namespace, service string) (ports []balance.ServicePort, problems []balance.Problem) {
	for row := range f.tables.Services.All(f.tables.DB.ReadTxn()) {
		if service != "" && (row.Namespace != namespace || row.Name != service) {
			continue
		}
		in, _ := f.Input(row.Namespace, row.Name)
		p, more := balance.Compute(in)
		ports, problems = append(ports, p...), append(problems, more...)
	}
	return ports, problems
}

func (f *fakeServices) Ports(namespace, service string) []balance.ServicePort {
	p, _ := f.compute(namespace, service)
	return p
}

func (f *fakeServices) Problems() []balance.Problem {
	_, p := f.compute("", "")
	return p
}

func (f *fakeServices) Kernel(n balance.Name) (service.InForce, error) { return f.kernel[n], f.err }

func (f *fakeServices) Dump() (string, error) { return "services\n", f.err }

func (f *fakeServices) Status() services.Status { return f.status }

// endpoint is a pod with an address, on a node in zone a.
func endpoint(pod, ip, node string, ready bool) discoveryv1.Endpoint {
	zone := "a"
	return discoveryv1.Endpoint{
		Addresses: []string{ip}, NodeName: &node, Zone: &zone, Conditions: discoveryv1.EndpointConditions{Ready: &ready},
		TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: "shop", Name: pod},
	}
}

// serviceWorld is a Service of type LoadBalancer, one of each other kind, and
// what the kernel has of the first.
func serviceWorld(t *testing.T) (Providers, *fakeServices) {
	t.Helper()
	p := providers(t)
	ip := netip.MustParseAddr
	f := &fakeServices{tables: p.Tables, node: balance.Node{Name: "node1", Zone: "a", IPs: []netip.Addr{ip("172.30.0.1")}}}
	number, name := int32(8080), ""
	lb := &state.Service{Namespace: "shop", Name: "web", Spec: &corev1.ServiceSpec{
		Type: corev1.ServiceTypeLoadBalancer, ClusterIP: "10.96.0.20", ClusterIPs: []string{"10.96.0.20"},
		Ports:                 []corev1.ServicePort{{Port: 80, NodePort: 30080}},
		ExternalTrafficPolicy: corev1.ServiceExternalTrafficPolicyLocal, HealthCheckNodePort: 31000,
		LoadBalancerSourceRanges: []string{"203.0.113.0/24"}, SessionAffinity: corev1.ServiceAffinityClientIP,
	}, Status: &corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{Ingress: []corev1.LoadBalancerIngress{{IP: "172.31.0.5"}}}}}
	slice := &state.Endpoint{Namespace: "shop", Name: "web-1", Service: "web", Slice: &discoveryv1.EndpointSlice{
		AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Name: &name, Port: &number}},
		Endpoints: []discoveryv1.Endpoint{
			endpoint("web-0", "10.244.1.5", "node1", true), endpoint("web-1", "10.244.2.5", "node2", true), endpoint("web-2", "10.244.2.6", "node2", false),
		},
	}}
	udp := corev1.ServicePort{Name: "dns", Port: 53, Protocol: corev1.ProtocolUDP}
	txn := p.Tables.DB.WriteTxn(p.Tables.Services, p.Tables.Endpoints, p.Tables.Pods, p.Tables.Workloads, p.Tables.Nodes)
	for _, row := range []*state.Service{
		lb,
		{Namespace: "shop", Name: "db", Spec: &corev1.ServiceSpec{ClusterIP: "10.96.0.30", ClusterIPs: []string{"10.96.0.30"}, Ports: []corev1.ServicePort{udp, {Name: "x", Port: 9, Protocol: corev1.ProtocolSCTP}}}},
		{Namespace: "shop", Name: "ext", Spec: &corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "example.com"}},
		{Namespace: "shop", Name: "names", Spec: &corev1.ServiceSpec{ClusterIP: "None", Ports: []corev1.ServicePort{{Port: 80}}}},
	} {
		p.Tables.Services.Insert(txn, row)
	}
	p.Tables.Endpoints.Insert(txn, slice)
	p.Tables.Pods.Insert(txn, &state.Pod{ContainerID: "c", Namespace: "shop", Name: "client", Netns: "/client", IPs: []netip.Addr{ip("10.244.1.9")}})
	for _, w := range []*state.Workload{
		{Namespace: "shop", Name: "far", Node: "node2", IPs: []netip.Addr{ip("10.244.2.9")}},
		{Namespace: "shop", Name: "new", Node: "node2"},
		{Namespace: "shop", Name: "host", Node: "node1", HostNetwork: true, IPs: []netip.Addr{ip("172.30.0.1")}},
	} {
		p.Tables.Workloads.Insert(txn, w)
	}
	for i, n := range []string{"node1", "node2"} {
		p.Tables.Nodes.Insert(txn, &state.Node{
			Name: n, IPs: []netip.Addr{ip(fmt.Sprintf("172.30.0.%d", i+1))}, PodCIDRs: []netip.Prefix{netip.MustParsePrefix(fmt.Sprintf("10.244.%d.0/24", i+1))},
		})
	}
	txn.Commit()
	f.kernel = map[balance.Name]service.InForce{f.Ports("shop", "web")[0].Name: {
		ID: 7, Sets: map[balance.Set]service.Sets{balance.InternalSet: {IDs: []uint32{4}}, balance.ClusterSet: {IDs: []uint32{4}}, balance.ExternalSet: {IDs: []uint32{5}}},
		Backends: map[netip.AddrPort]service.Numbered{
			netip.MustParseAddrPort("10.244.1.5:8080"): {ID: 11, Hits: 5}, netip.MustParseAddrPort("10.244.2.5:8080"): {ID: 12, Hits: 2},
		},
		Affinity: []service.Affinity{{Number: 77, Backend: 12, Left: 90*time.Minute + time.Millisecond}, {Client: ip("10.244.1.9"), Backend: 11, Left: time.Second}},
	}}
	p.Node = "node1"
	p.Services = func() (Services, error) { return f, nil }
	p.Cookie = func(netns string) (uint64, error) {
		if netns == "" {
			return 1, nil
		}
		return 77, nil
	}
	f.edge = Edge{Device: "eth0", XDP: xdp.Native}
	p.Edge = func() Edge { return f.edge }
	return p, f
}

func TestListServices(t *testing.T) {
	p, _ := serviceWorld(t)
	s := start(t, sock(t), p)
	r, err := client(t, s.path).ListServices(t.Context(), &weftv1.ListServicesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, v := range r.Services {
		line := v.Name + " " + v.Type + " " + v.NotServed
		for _, p := range v.Ports {
			line += fmt.Sprintf(" %s/%s %d frontends %d near %d far %t %d", p.Name, p.Protocol, len(p.Frontends), p.Near, p.Far, p.External, p.AffinitySeconds)
		}
		got = append(got, line+" "+strings.Join(v.Problems, ";"))
	}
	want := []string{
		`db ClusterIP  dns/UDP 1 frontends 0 near 0 far false 0 spec.ports[1].protocol: "SCTP": want TCP or UDP: weft does not translate SCTP`,
		"ext ExternalName a name only, of example.com ",
		"names ClusterIP headless, names only ",
		"web LoadBalancer  /TCP 3 frontends 2 near 1 far true 10800 ",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func TestShowService(t *testing.T) {
	p, f := serviceWorld(t)
	s := start(t, sock(t), p)
	c := client(t, s.path)
	r, err := c.ShowService(t.Context(), &weftv1.ShowServiceRequest{Service: "shop/web"})
	if err != nil {
		t.Fatal(err)
	}
	if r.ExternalTrafficPolicy != "Local" || r.InternalTrafficPolicy != "Cluster" || r.HealthCheckPort != 31000 || r.LocalReady != 1 ||
		r.AffinitySeconds != 10800 || !slices.Equal(r.SourceRanges, []string{"203.0.113.0/24"}) || len(r.Ports) != 1 {
		t.Fatalf("got %v", r)
	}
	port := r.Ports[0]
	if port.Id != 7 || port.AffinityClients != 2 || port.Connections != 7 || len(port.Frontends) != 3 {
		t.Errorf("got %v", port)
	}
	var got []string
	for _, s := range port.Sets {
		got = append(got, fmt.Sprintf("%s %v %d %s", s.Name, s.Ids, s.Backends, s.Rule))
	}
	for _, b := range port.Backends {
		line := fmt.Sprintf("%s %s %s %d %d", b.Address, b.Pod, b.State, b.Id, b.Connections)
		for _, u := range b.Uses {
			line += fmt.Sprintf("; %s %t %.2f %s", u.Set, u.Chosen, u.Share, u.WhyNot)
		}
		got = append(got, line)
	}
	want := []string{
		"internal [4] 2 ready ones", "cluster [4] 2 ready ones", "external [5] 1 ready ones of this node",
		"10.244.1.5 shop/web-0 active 11 5; internal true 0.50 ; cluster true 0.50 ; external true 1.00 ",
		"10.244.2.5 shop/web-1 active 12 2; internal true 0.50 ; cluster true 0.50 ; external false 0.00 not on this node, and the policy is Local",
		"10.244.2.6 shop/web-2 not ready 0 0; internal false 0.00 not ready; cluster false 0.00 not ready; external false 0.00 not ready",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if r, err := c.ShowService(t.Context(), &weftv1.ShowServiceRequest{Service: "shop/names"}); err != nil || r.NotServed == "" || len(r.Ports) != 0 {
		t.Errorf("headless: %v, %v", r, err)
	}
	if _, err := c.ShowService(t.Context(), &weftv1.ShowServiceRequest{Service: "web"}); status.Code(err) != codes.NotFound {
		t.Errorf("unknown: %v", err)
	}
	f.err = errors.New("lookup: no such map")
	if _, err := c.ShowService(t.Context(), &weftv1.ShowServiceRequest{Service: "shop/web"}); status.Code(err) != codes.Internal {
		t.Errorf("broken kernel: %v", err)
	}
	bare := start(t, sock(t), providers(t))
	if _, err := client(t, bare.path).ListServices(t.Context(), &weftv1.ListServicesRequest{}); status.Code(err) != codes.Unimplemented {
		t.Errorf("without services: %v", err)
	}
}

func traceText(r *weftv1.TraceServiceResponse) string {
	text := r.Verdict
	if r.Reason != "" {
		text += " " + r.Reason
	}
	for _, b := range r.Backends {
		text += fmt.Sprintf(" %s %.2g", b.Address, b.Share)
	}
	return fmt.Sprintf("%s, set %s, choice %s (%s), at %s, from %s", text, r.Set, r.Choice, r.ChoiceWhy, r.Where, r.Source)
}

func TestTraceService(t *testing.T) {
	p, f := serviceWorld(t)
	s := start(t, sock(t), p)
	c := client(t, s.path)
	ask := func(from, to, protocol string) (string, error) {
		at := netip.MustParseAddrPort(to)
		r, err := c.TraceService(t.Context(), &weftv1.TraceServiceRequest{From: from, Address: at.Addr().String(), Port: uint32(at.Port()), Protocol: protocol})
		if err != nil {
			return "", err
		}
		return traceText(r), nil
	}
	const only = "backend 10.244.1.5 1, set external, choice only (the only one of the set), at tcx, from the client's address"
	for _, x := range []struct{ from, to, want string }{
		{"shop/client", "10.96.0.20:80", "backend 10.244.2.5 1, set internal, choice affinity (it had this one before, for 1h30m0s more), at socket, from the client's address"},
		{"node", "172.30.0.1:30080", "backend 10.244.1.5 0.5 10.244.2.5 0.5, set cluster, choice random (one of 2), at socket, from the client's address"},
		{"shop/host", "10.96.0.20:80", "backend 10.244.1.5 0.5 10.244.2.5 0.5, set internal, choice random (one of 2), at socket, from the client's address"},
		{"10.244.1.9", "172.31.0.5:80", "dropped source-range, set cluster, choice  (), at pod, from "},
		{"shop/host", "172.31.0.5:80", "no-service, set , choice  (), at , from "},
		{"172.30.0.1", "172.31.0.5:80", "no-service, set , choice  (), at , from "},
		{"outside", "172.30.0.1:30080", only},
		{"203.0.113.9:4000", "172.31.0.5:80", only},
		{"198.51.100.1", "172.31.0.5:80", "dropped source-range, set external, choice  (), at tcx, from "},
		{"shop/far", "172.30.0.1:30080", only},
		{"outside", "10.96.0.20:80", "no-service, set , choice  (), at , from "},
		{"outside", "172.30.0.1:81", "no-service, set , choice  (), at , from "},
	} {
		if got, err := ask(x.from, x.to, "TCP"); err != nil || got != x.want {
			t.Errorf("%s to %s: %v\n%s\nwant\n%s", x.from, x.to, err, got, x.want)
		}
	}
	if got, err := ask("shop/client", "10.96.0.30:53", "UDP"); err != nil || got != "refused no-backend, set internal, choice  (), at socket, from " {
		t.Errorf("no backend: %q, %v", got, err)
	}
	for _, x := range []struct {
		from, to, protocol string
		code               codes.Code
	}{
		{"shop/none", "10.96.0.20:80", "TCP", codes.NotFound},
		{"nobody", "10.96.0.20:80", "TCP", codes.NotFound},
		{"shop/new", "10.96.0.20:80", "TCP", codes.FailedPrecondition},
		{"shop/far", "10.96.0.20:80", "TCP", codes.FailedPrecondition},
		{"172.30.0.2", "10.96.0.20:80", "TCP", codes.FailedPrecondition},
		{"shop/client", "[fd00::1]:80", "TCP", codes.InvalidArgument},
		{"2001:db8::1", "10.96.0.20:80", "TCP", codes.InvalidArgument},
		{"outside", "10.96.0.20:80", "ICMP", codes.InvalidArgument},
		{"outside", "10.96.0.20:0", "TCP", codes.InvalidArgument},
	} {
		if _, err := ask(x.from, x.to, x.protocol); status.Code(err) != x.code {
			t.Errorf("%+v: %v", x, err)
		}
	}
	f.err = errors.New("lookup: no such map")
	if _, err := ask("outside", "172.30.0.1:30080", "TCP"); status.Code(err) != codes.Internal {
		t.Errorf("broken kernel: %v", err)
	}
}

// TestTraceMaglev: the entry is the kernel's.
func TestTraceMaglev(t *testing.T) {
	p, f := serviceWorld(t)
	txn := p.Tables.DB.WriteTxn(p.Tables.Services)
	row, _, _ := p.Tables.Services.Get(txn, state.ServiceByName.Query("shop/web"))
	web := *row
	web.Spec = row.Spec.DeepCopy()
	web.Spec.ExternalTrafficPolicy, web.Spec.SessionAffinity = corev1.ServiceExternalTrafficPolicyCluster, corev1.ServiceAffinityNone
	p.Tables.Services.Insert(txn, &web)
	txn.Commit()
	name := f.Ports("shop", "web")[0].Name
	f.kernel[name].Sets[balance.ExternalSet] = service.Sets{IDs: []uint32{5}, IPv4: []uint32{11, 12, 12}}
	f.edge.DSR = true
	s := start(t, sock(t), p)
	c := client(t, s.path)
	req := &weftv1.TraceServiceRequest{From: "198.51.100.1", Address: "172.30.0.1", Port: 30080, Protocol: "TCP"}
	r, err := c.TraceService(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	const dsr = "the client's address; a backend of another node answers by itself (DSR)"
	if got, want := traceText(r), "backend 10.244.1.5 0.33 10.244.2.5 0.67, set external, choice maglev (by the client's address and port, of 3 entries), at tcx, from "+dsr; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	f.edge.DSR = false
	if r, err = c.TraceService(t.Context(), req); err != nil || r.Where != "xdp or tcx" {
		t.Errorf("got %v, %v", r, err)
	}
	at := netip.MustParseAddrPort("172.30.0.1:30080")
	for port := range uint16(50) {
		from := netip.AddrPortFrom(netip.MustParseAddr("198.51.100.1"), 40000+port)
		req.From = from.String()
		slot := maglev.Hash(from, at, 6) % 3
		want := []string{"10.244.1.5", "10.244.2.5", "10.244.2.5"}[slot]
		if r, err = c.TraceService(t.Context(), req); err != nil || len(r.Backends) != 1 || r.Backends[0].Address != want || r.Where != []string{"tcx", "xdp", "xdp"}[slot] {
			t.Errorf("%s: got %v, %v, want %s", from, r, err, want)
		}
	}
}

// fakeDeny is a deny list with room for 3.
type fakeDeny struct{ list []deny.Entry }

func (f *fakeDeny) index(p netip.Prefix) int {
	return slices.IndexFunc(f.list, func(d deny.Entry) bool { return d.Prefix == p })
}

func (f *fakeDeny) Add(p netip.Prefix) (bool, error) {
	if f.index(p) >= 0 {
		return false, nil
	}
	if len(f.list) == 3 {
		return false, errors.New("deny 1.2.3.4/32: the list is full")
	}
	f.list = append(f.list, deny.Entry{Prefix: p, Packets: 3, Bytes: 180})
	return true, nil
}

func (f *fakeDeny) Delete(p netip.Prefix) (bool, error) {
	i := f.index(p)
	if i < 0 {
		return false, nil
	}
	f.list = slices.Delete(f.list, i, i+1)
	return true, nil
}

func (f *fakeDeny) List() ([]deny.Entry, error) { return f.list, nil }
func (f *fakeDeny) Max() int                    { return 3 }

func TestDeny(t *testing.T) {
	p, _ := serviceWorld(t)
	f := &fakeDeny{}
	p.Deny = func() (Deny, error) { return f, nil }
	s := start(t, sock(t), p)
	c := client(t, s.path)
	add := func(cidrs ...string) (uint32, error) {
		r, err := c.AddDenied(t.Context(), &weftv1.DeniedRequest{Cidrs: cidrs})
		return r.GetChanged(), err
	}
	if n, err := add("198.51.100.0/24", "2001:db8::1"); err != nil || n != 2 {
		t.Errorf("add: %d, %v", n, err)
	}
	if n, err := add("198.51.100.0/24", "::ffff:203.0.113.9"); err != nil || n != 1 {
		t.Errorf("add again: %d, %v", n, err)
	}
	for cidr, want := range map[string]codes.Code{
		"": codes.InvalidArgument, "10.0.0.0/33": codes.InvalidArgument, "198.51.100.7/24": codes.InvalidArgument,
		"172.30.0.2": codes.InvalidArgument, "10.244.0.0/16": codes.InvalidArgument, "10.244.2.7/32": codes.InvalidArgument, "0.0.0.0/0": codes.InvalidArgument,
		"1.2.3.4": codes.ResourceExhausted,
	} {
		if _, err := add(cidr); status.Code(err) != want {
			t.Errorf("add %q: %v", cidr, err)
		}
	}
	if len(f.list) != 3 {
		t.Errorf("a refused network changed the list: %v", f.list)
	}
	if _, err := c.DeleteDenied(t.Context(), &weftv1.DeniedRequest{Cidrs: []string{"2001:db8::1", "9.9.9.9"}}); status.Code(err) != codes.NotFound || len(f.list) != 3 {
		t.Errorf("delete what is not there: %v, %v", err, f.list)
	}
	if r, err := c.DeleteDenied(t.Context(), &weftv1.DeniedRequest{Cidrs: []string{"2001:db8::1"}}); err != nil || r.Changed != 1 {
		t.Errorf("delete: %v, %v", r, err)
	}
	f.list = append(f.list, deny.Entry{Prefix: netip.MustParsePrefix("172.30.0.2/32")})
	r, err := c.ListDenied(t.Context(), &weftv1.ListDeniedRequest{})
	if err != nil || r.MaxEntries != 3 || r.Where != "XDP native on eth0" || len(r.Networks) != 3 ||
		r.Networks[0].Packets != 3 || r.Networks[0].Problem != "" || r.Networks[2].Problem != "holds 172.30.0.2, an address of node node2" {
		t.Errorf("list: %v, %v", r, err)
	}
}

func TestDescribeServices(t *testing.T) {
	_, f := serviceWorld(t)
	f.status = services.Status{Services: 2, Ports: 3, Frontends: 9, Backends: 4, Err: errors.New("full"), Changed: time.Unix(100, 0), Sync: 1500 * time.Millisecond, Maglev: service.MaglevStats{Tables: 1, Bytes: 131072}, Flows: service.FlowStats{Live: 6}}
	got := DescribeServices(f, Edge{Device: "eth0", XDP: xdp.Native}, 2)
	if got.Services != 2 || got.SyncSeconds != 1.5 || got.Error != "full" || got.Denied != 2 || len(got.Problems) != 1 || got.External != "snat" || got.Flows != 6 || got.MaglevBytes != 131072 || got.Xdp != "XDP native on eth0" || got.Changed.AsTime().Unix() != 100 {
		t.Errorf("got %v", got)
	}
}

var _ Services = (*services.Driver)(nil)

var _ Deny = (*deny.List)(nil)
