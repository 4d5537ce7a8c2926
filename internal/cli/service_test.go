// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"context"
	"io"
	"net"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
)

// serviceNode answers the calls about Services and the deny list.
type serviceNode struct {
	weftv1.UnimplementedNodeServer
	traced chan *weftv1.TraceServiceRequest
	denied chan *weftv1.DeniedRequest
	empty  bool
}

func sampleFrontends() []*weftv1.ServiceFrontend {
	return []*weftv1.ServiceFrontend{
		{Kind: "ClusterIP", Address: "10.96.0.20", Port: 80, Near: "internal"},
		{Kind: "NodePort", Address: "172.30.0.1", Port: 30080, Near: "cluster", Far: "external"},
		{Kind: "NodePort", Address: "fd00:172:30::1", Port: 30080, Near: "cluster", Far: "external"},
		{Kind: "LoadBalancer", Address: "172.31.0.5", Port: 80, Near: "cluster", Far: "external"},
	}
}

func (n *serviceNode) ListServices(context.Context, *weftv1.ListServicesRequest) (*weftv1.ListServicesResponse, error) {
	return &weftv1.ListServicesResponse{Services: []*weftv1.ServiceSummary{
		{Namespace: "kube-system", Name: "dns", Type: "ClusterIP", Ports: []*weftv1.ServicePortSummary{
			{Name: "dns", Protocol: "UDP", Frontends: []*weftv1.ServiceFrontend{{Kind: "ClusterIP", Address: "10.96.0.10", Port: 53, Near: "internal"}}, Near: 2},
			{Name: "dns-tcp", Protocol: "TCP", Frontends: []*weftv1.ServiceFrontend{{Kind: "ClusterIP", Address: "fd00:10:96::a", Port: 53, Near: "internal"}}},
		}},
		{Namespace: "shop", Name: "db", Type: "ClusterIP", NotServed: "headless, names only"},
		{Namespace: "shop", Name: "sctp", Type: "ClusterIP", Problems: []string{`spec.ports[0].protocol: "SCTP": want TCP or UDP: weft does not translate SCTP`}},
		{Namespace: "shop", Name: "web", Type: "LoadBalancer", Ports: []*weftv1.ServicePortSummary{
			{Protocol: "TCP", Frontends: sampleFrontends(), Near: 2, Far: 1, External: true, AffinitySeconds: 10800},
		}},
	}}, nil
}

func (n *serviceNode) ShowService(_ context.Context, r *weftv1.ShowServiceRequest) (*weftv1.ShowServiceResponse, error) {
	switch r.Service {
	case "shop/db":
		return &weftv1.ShowServiceResponse{Node: "node1", Namespace: "shop", Name: "db", Type: "ClusterIP", NotServed: "headless, names only"}, nil
	case "shop/web":
	default:
		return nil, status.Errorf(codes.NotFound, "no Service %q: want NAMESPACE/NAME", r.Service)
	}
	use := func(internal, external float64, whyInternal, whyExternal string) []*weftv1.BackendUse {
		return []*weftv1.BackendUse{
			{Set: "internal", Chosen: whyInternal == "", Share: internal, WhyNot: whyInternal},
			{Set: "cluster", Chosen: whyInternal == "", Share: internal, WhyNot: whyInternal},
			{Set: "external", Chosen: whyExternal == "", Share: external, WhyNot: whyExternal},
		}
	}
	const elsewhere = "not on this node, and the policy is Local"
	return &weftv1.ShowServiceResponse{
		Node: "node1", Namespace: "shop", Name: "web", Type: "LoadBalancer", InternalTrafficPolicy: "Cluster", ExternalTrafficPolicy: "Local",
		SourceRanges: []string{"203.0.113.0/24"}, AffinitySeconds: 5400, HealthCheckPort: 31000, LocalReady: 1,
		Problems: []string{`spec.externalIPs[0]: "127.0.0.1": want a unicast address, neither loopback nor link-local`},
		Ports: []*weftv1.ServicePort{
			{
				Name: "http", Protocol: "TCP", Id: 7, AffinityClients: 3, Connections: 1234, Frontends: sampleFrontends(),
				Sets: []*weftv1.ServiceSet{
					{Name: "internal", Ids: []uint32{4}, Backends: 3, Rule: "ready ones"},
					{Name: "cluster", Ids: []uint32{4}, Backends: 3, Rule: "ready ones"},
					{Name: "external", Ids: []uint32{5, 6}, Backends: 1, Rule: "ready ones of this node", Maglev: 251},
				},
				Backends: []*weftv1.ServiceBackend{
					{Address: "10.244.1.5", Port: 8080, Pod: "shop/web-0", Node: "node1", Zone: "a", State: "active", Id: 11, Connections: 1000, Uses: use(1./3, 1, "", "")},
					{Address: "10.244.2.5", Port: 8080, Pod: "shop/web-1", Node: "node2", Zone: "b", State: "active", Id: 12, Connections: 234, Uses: use(1./3, 0, "", elsewhere)},
					{Address: "10.244.2.6", Port: 8080, Pod: "shop/web-2", Node: "node2", Zone: "b", State: "terminating", Uses: use(0, 0, "terminating, and others are ready", elsewhere)},
					{Address: "10.244.2.7", Port: 8080, Node: "node2", State: "not ready", Uses: use(0, 0, "not ready", "not ready")},
				},
			},
			{Protocol: "UDP", Frontends: sampleFrontends()[:1], Sets: []*weftv1.ServiceSet{{Name: "internal", Rule: "none is ready"}}},
		},
	}, nil
}

func (n *serviceNode) TraceService(_ context.Context, r *weftv1.TraceServiceRequest) (*weftv1.TraceServiceResponse, error) {
	n.traced <- r
	web0 := &weftv1.TraceBackend{Address: "10.244.1.5", Port: 8080, Pod: "shop/web-0", Node: "node1", State: "active", Share: 1}
	out := &weftv1.TraceServiceResponse{
		Node: "node1", Verdict: "backend", Namespace: "shop", Service: "web", PortName: "http",
		Client:   &weftv1.TraceClient{Kind: "pod", Pod: "shop/client", Address: "10.244.1.9", Node: "node1"},
		Frontend: sampleFrontends()[0], Set: "internal", SetWhy: "the client is on this node; ready ones",
		Choice: "affinity", ChoiceWhy: "it had this one before, for 1h29m10s more", Backends: []*weftv1.TraceBackend{web0},
		Where: "socket", WhereWhy: "as the socket connects or sends; its packets go to the backend", Source: "the client's address",
	}
	switch r.From {
	case "shop/client":
		return out, nil
	case "outside":
		out.Client, out.Frontend, out.Set, out.SetWhy = &weftv1.TraceClient{Kind: "outside"}, sampleFrontends()[1], "external", "the client is from elsewhere; ready ones"
		out.Choice, out.ChoiceWhy = "maglev", "by the client's address and port, of 251 entries"
		out.Backends = append(out.Backends, &weftv1.TraceBackend{Address: "10.244.2.5", Port: 8080, State: "active", Share: 0.5019})
		out.Backends[0].Share = 0.4981
		out.Where, out.WhereWhy = "xdp", "as it arrives, by XDP native on eth0"
		out.Source = "the client's address towards backends of this node, an address of this node towards others (SNAT)"
		return out, nil
	case "203.0.113.9:4000":
		out.Client = &weftv1.TraceClient{Kind: "outside", Address: "203.0.113.9", Port: 4000}
		out.Verdict, out.Reason, out.Choice, out.ChoiceWhy, out.Backends, out.Source = "dropped", "source-range", "", "", nil, ""
		return out, nil
	case "node":
		return &weftv1.TraceServiceResponse{Node: "node1", Verdict: "no-service", Client: &weftv1.TraceClient{Kind: "node", Node: "node1"}}, nil
	}
	return nil, status.Errorf(codes.NotFound, "no pod %q: want NAMESPACE/NAME, node, outside, or an address with or without a port", r.From)
}

func (n *serviceNode) DumpServices(context.Context, *weftv1.DumpServicesRequest) (*weftv1.DumpServicesResponse, error) {
	return &weftv1.DumpServicesResponse{Text: "services\n  10.96.0.20:80/TCP\n"}, nil
}

func (n *serviceNode) AddDenied(_ context.Context, r *weftv1.DeniedRequest) (*weftv1.DeniedResponse, error) {
	n.denied <- r
	if r.Cidrs[0] == "10.244.1.0/24" {
		return nil, status.Error(codes.InvalidArgument, "network 10.244.1.0/24: holds addresses of 10.244.1.0/24, the pods of node node1")
	}
	return &weftv1.DeniedResponse{Changed: 1}, nil
}

func (n *serviceNode) DeleteDenied(_ context.Context, r *weftv1.DeniedRequest) (*weftv1.DeniedResponse, error) {
	n.denied <- r
	return &weftv1.DeniedResponse{Changed: uint32(len(r.Cidrs))}, nil
}

func (n *serviceNode) ListDenied(context.Context, *weftv1.ListDeniedRequest) (*weftv1.ListDeniedResponse, error) {
	r := &weftv1.ListDeniedResponse{MaxEntries: 16384, Where: "XDP native on eth0"}
	if !n.empty {
		r.Networks = []*weftv1.DeniedNetwork{
			{Cidr: "198.51.100.0/24", Packets: 12, Bytes: 720},
			{Cidr: "172.30.0.7/32", Problem: "holds 172.30.0.7, an address of node node7"},
		}
	}
	return r, nil
}

// serveServices runs the API for the test, at $WEFT_SOCKET.
func serveServices(t *testing.T) *serviceNode {
	t.Helper()
	n := &serviceNode{traced: make(chan *weftv1.TraceServiceRequest, 1), denied: make(chan *weftv1.DeniedRequest, 1)}
	path := filepath.Join(t.TempDir(), "weft.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	weftv1.RegisterNodeServer(s, n)
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	t.Cleanup(func() {
		s.Stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	t.Setenv(socketEnv, path)
	return n
}

func runService(t *testing.T, args ...string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	s := IO{In: strings.NewReader(""), Out: &out, Err: io.Discard}
	root := &cobra.Command{Use: "weft", SilenceUsage: true, SilenceErrors: true}
	root.AddCommand(newServiceCommand(s), newDenyCommand(s))
	root.SetOut(&out)
	root.SetArgs(args)
	err := root.ExecuteContext(t.Context())
	return out.String(), err
}

func TestServiceHelp(t *testing.T) {
	for _, c := range []string{"service", "service list", "service show", "service trace", "service dump", "deny", "deny add", "deny del", "deny list"} {
		out, err := runService(t, append(strings.Fields(c), "--help")...)
		if err != nil {
			t.Fatal(err)
		}
		golden(t, "help-"+strings.ReplaceAll(c, " ", "-"), out)
	}
}

func TestServiceOutput(t *testing.T) {
	n := serveServices(t)
	for name, args := range map[string]string{
		"service-list": "service list", "service-show": "service show shop/web", "service-show-headless": "service show shop/db",
		"service-trace":         "service trace --from shop/client 10.96.0.20:80",
		"service-trace-outside": "service trace --from outside 172.30.0.1:30080/tcp",
		"service-trace-dropped": "service trace --from 203.0.113.9:4000 10.96.0.20:80",
		"service-trace-none":    "service trace --from node 172.30.0.1:80",
		"deny-list":             "deny list",
	} {
		for _, format := range []string{"table", "json"} {
			out, err := runService(t, append(strings.Fields(args), "-o", format)...)
			if err != nil {
				t.Fatal(err)
			}
			golden(t, name+"-"+format, out)
			if strings.Contains(args, "trace") {
				<-n.traced
			}
		}
	}
	n.empty = true
	if out, err := runService(t, "deny", "list"); err != nil || out != "0 of 16384 networks, dropped by XDP native on eth0.\n" {
		t.Errorf("got %q, %v", out, err)
	}
	if out, err := runService(t, "service", "dump"); err != nil || out != "services\n  10.96.0.20:80/TCP\n" {
		t.Errorf("got %q, %v", out, err)
	}
}

func TestServiceAsks(t *testing.T) {
	n := serveServices(t)
	if _, err := runService(t, "service", "trace", "--from", "shop/client", "[::ffff:10.96.0.10]:53/udp"); err != nil {
		t.Fatal(err)
	}
	if r := <-n.traced; r.Address != "10.96.0.10" || r.Port != 53 || r.Protocol != "UDP" {
		t.Errorf("asked %v", r)
	}
	if out, err := runService(t, "deny", "add", "198.51.100.0/24", "2001:db8::1"); err != nil || out != "added 1 network\n" {
		t.Errorf("got %q, %v", out, err)
	}
	if r := <-n.denied; strings.Join(r.Cidrs, " ") != "198.51.100.0/24 2001:db8::1" {
		t.Errorf("asked %v", r)
	}
	if out, err := runService(t, "deny", "del", "198.51.100.0/24", "2001:db8::1"); err != nil || out != "deleted 2 networks\n" {
		t.Errorf("got %q, %v", out, err)
	}
}

func TestServiceErrors(t *testing.T) {
	serveServices(t)
	const want = "want IP:PORT or IP:PORT/PROTOCOL, such as 10.96.0.20:80 or [fd00::1]:53/UDP"
	for args, want := range map[string]string{
		"service list -o yaml":                         `output "yaml": want table or json`,
		"service show":                                 "accepts 1 arg(s), received 0",
		"service show web":                             `no Service "web": want NAMESPACE/NAME`,
		"service trace 10.96.0.20:80":                  `required flag(s) "from" not set`,
		"service trace --from node":                    "accepts 1 arg(s), received 0",
		"service trace --from node 10.96.0.20":         `address "10.96.0.20": ` + want,
		"service trace --from node web:80":             `address "web:80": ` + want,
		"service trace --from node 10.96.0.20:0":       `address "10.96.0.20:0": ` + want,
		"service trace --from node fd00::1:80/UDP":     `address "fd00::1:80/UDP": ` + want,
		"service trace --from node 10.96.0.20:80/ICMP": `protocol "ICMP": want TCP, UDP or SCTP`,
		"service trace --from shop/x 10.96.0.20:80":    `no pod "shop/x": want NAMESPACE/NAME, node, outside, or an address with or without a port`,
		"deny add":               "requires at least 1 arg(s), only received 0",
		"deny add 10.0.0.0/33":   `network "10.0.0.0/33": want a CIDR such as 198.51.100.0/24, or an address`,
		"deny del host":          `network "host": want a CIDR such as 198.51.100.0/24, or an address`,
		"deny add 10.244.1.0/24": "network 10.244.1.0/24: holds addresses of 10.244.1.0/24, the pods of node node1",
	} {
		out, err := runService(t, strings.Fields(args)...)
		if err == nil || err.Error() != want || out != "" {
			t.Errorf("weft %s: got %v, want %q, and printed %q", args, err, want, out)
		}
	}
}
