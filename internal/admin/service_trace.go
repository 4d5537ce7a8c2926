// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
	"github.com/weft-mesh/weft/internal/balance"
	"github.com/weft-mesh/weft/internal/balance/maglev"
	"github.com/weft-mesh/weft/internal/datapath/service"
	"github.com/weft-mesh/weft/internal/datapath/xdp"
	"github.com/weft-mesh/weft/internal/state"
)

// TraceService implements weftv1.NodeServer.
func (n *node) TraceService(_ context.Context, req *weftv1.TraceServiceRequest) (*weftv1.TraceServiceResponse, error) {
	s, err := n.services()
	if err != nil {
		return nil, err
	}
	to, protocol, err := parseTo(req)
	if err != nil {
		return nil, err
	}
	c, err := n.client(req.From, to.Addr().Is4())
	if err != nil {
		return nil, err
	}
	t := &trace{node: n, services: s, client: c, to: to, protocol: protocol, out: &weftv1.TraceServiceResponse{
		Node: n.providers.Node, Client: c.describe(),
	}}
	if err := t.run(); err != nil {
		return nil, err
	}
	return t.out, nil
}

func parseTo(req *weftv1.TraceServiceRequest) (netip.AddrPort, corev1.Protocol, error) {
	a, err := netip.ParseAddr(req.Address)
	if err != nil {
		return netip.AddrPort{}, "", status.Errorf(codes.InvalidArgument, "address %q: want an IP address", req.Address)
	}
	if req.Port == 0 || req.Port > 65535 {
		return netip.AddrPort{}, "", status.Errorf(codes.InvalidArgument, "port %d: want 1 to 65535", req.Port)
	}
	if _, ok := serviceProtocols[corev1.Protocol(req.Protocol)]; !ok {
		return netip.AddrPort{}, "", status.Errorf(codes.InvalidArgument, "protocol %q: want TCP, UDP or SCTP", req.Protocol)
	}
	return netip.AddrPortFrom(a.Unmap(), uint16(req.Port)), corev1.Protocol(req.Protocol), nil
}

var serviceProtocols = map[corev1.Protocol]uint8{corev1.ProtocolTCP: 6, corev1.ProtocolUDP: 17, corev1.ProtocolSCTP: 132}

// serviceClient is who connects.
type serviceClient struct {
	kind  string // "pod", "node" or "outside"
	pod   string // NS/POD
	addr  netip.Addr
	port  uint16 // 0: any
	node  string // that it is on; empty for outside
	near  bool   // on this node
	netns string // of a pod of this node; empty: the node's
}

func (c *serviceClient) describe() *weftv1.TraceClient {
	d := &weftv1.TraceClient{Kind: c.kind, Pod: c.pod, Port: uint32(c.port), Node: c.node}
	if c.addr.IsValid() {
		d.Address = c.addr.String()
	}
	return d
}

// client finds out who is meant.
func (n *node) client(from string, v4 bool) (*serviceClient, error) {
	switch from {
	case "outside":
		return &serviceClient{kind: "outside"}, nil
	case "node":
		return &serviceClient{kind: "node", node: n.providers.Node, near: true}, nil
	}
	if a, err := netip.ParseAddrPort(from); err == nil {
		return n.clientAt(a.Addr().Unmap(), a.Port(), v4)
	}
	if a, err := netip.ParseAddr(from); err == nil {
		return n.clientAt(a.Unmap(), 0, v4)
	}
	tables := n.providers.Tables
	txn := tables.DB.ReadTxn()
	for p := range tables.Pods.All(txn) {
		if state.Key(p.Namespace, p.Name) == from {
			c, err := n.clientPod(from, n.providers.Node, p.IPs, v4)
			if err == nil {
				c.netns = p.Netns
			}
			return c, err
		}
	}
	w, _, ok := tables.Workloads.Get(txn, state.WorkloadByName.Query(from))
	if !ok {
		return nil, status.Errorf(codes.NotFound, "no pod %q: want NAMESPACE/NAME, node, outside, or an address with or without a port", from)
	}
	if w.HostNetwork {
		return &serviceClient{kind: "pod", pod: from, node: w.Node, near: w.Node == n.providers.Node}, nil
	}
	return n.clientPod(from, w.Node, w.IPs, v4)
}

func (n *node) clientPod(name, node string, ips []netip.Addr, v4 bool) (*serviceClient, error) {
	if len(ips) == 0 {
		return nil, status.Errorf(codes.FailedPrecondition, "pod %s has no address yet", name)
	}
	i := slices.IndexFunc(ips, func(a netip.Addr) bool { return a.Is4() == v4 })
	if i < 0 {
		return nil, status.Errorf(codes.InvalidArgument, "pod %s has no %s address", name, familyName(v4))
	}
	return &serviceClient{kind: "pod", pod: name, addr: ips[i], node: node, near: node == n.providers.Node}, nil
}

func familyName(v4 bool) string {
	if v4 {
		return "IPv4"
	}
	return "IPv6"
}

// clientAt finds out whose address it is.
func (n *node) clientAt(a netip.Addr, port uint16, v4 bool) (*serviceClient, error) {
	if a.Is4() != v4 {
		return nil, status.Errorf(codes.InvalidArgument, "from %s: want an %s address, as the one that it connects to", a, familyName(v4))
	}
	tables := n.providers.Tables
	txn := tables.DB.ReadTxn()
	c := &serviceClient{kind: "outside", addr: a, port: port}
	for p := range tables.Pods.All(txn) {
		if slices.Contains(p.IPs, a) {
			c.kind, c.pod, c.node, c.near, c.netns = "pod", state.Key(p.Namespace, p.Name), n.providers.Node, true, p.Netns
			return c, nil
		}
	}
	for w := range tables.Workloads.All(txn) {
		if !w.HostNetwork && slices.Contains(w.IPs, a) {
			c.kind, c.pod, c.node, c.near = "pod", state.Key(w.Namespace, w.Name), w.Node, w.Node == n.providers.Node
			return c, nil
		}
	}
	for row := range tables.Nodes.All(txn) {
		if slices.Contains(row.IPs, a) {
			c.kind, c.node, c.near = "node", row.Name, row.Name == n.providers.Node
		}
	}
	return c, nil
}

// trace is the work on one question.
type trace struct {
	node     *node
	services Services
	client   *serviceClient
	to       netip.AddrPort
	protocol corev1.Protocol
	out      *weftv1.TraceServiceResponse

	port     balance.ServicePort
	frontend balance.Frontend
	set      balance.Set
	backends []balance.Backend // of the set and the family
	kernel   service.InForce
}

func (t *trace) run() error {
	if !t.find() {
		t.out.Verdict = "no-service"
		return nil
	}
	if !t.client.near && t.client.node != "" && !t.arrives() {
		who := "node " + t.client.node + " translates what its processes send"
		if t.client.kind == "pod" {
			who = "pod " + t.client.pod + " is on node " + t.client.node
		}
		return status.Errorf(codes.FailedPrecondition, "%s: ask the agent there", who)
	}
	t.out.Namespace, t.out.Service, t.out.PortName = t.port.Name.Namespace, t.port.Name.Service, t.port.Name.Port
	t.out.Frontend = frontend(t.frontend)
	t.where()
	if why := t.untranslated(); why != "" {
		t.out.Verdict, t.out.Where, t.out.WhereWhy = "no-service", "", why
		return nil
	}
	var err error
	if t.kernel, err = t.services.Kernel(t.port.Name); err != nil {
		return status.Error(codes.Internal, err.Error())
	}
	t.choose()
	return nil
}

// untranslated says why the client's packets to the frontend go on as they are;
// empty where they do not.
func (t *trace) untranslated() string {
	switch {
	case !t.client.near && !t.frontend.Kind.External():
		return "a cluster address is for pods and nodes: what comes from elsewhere is not translated"
	case t.client.near && t.ranges() != nil && (t.client.kind == "node" || !t.client.addr.IsValid()):
		return "the Service has source ranges: what processes of the node send goes to the load balancer"
	}
	return ""
}

// find looks for the frontend.
func (t *trace) find() bool {
	for _, p := range t.services.Ports("", "") {
		for _, f := range p.Frontends {
			if f.Addr == t.to.Addr() && f.Port == t.to.Port() && p.Name.Protocol == t.protocol {
				t.port, t.frontend = p, f
				return true
			}
		}
	}
	return false
}

// arrives says whether what another node's pods and processes send to the
// frontend gets here untranslated: it is an address of this node.
func (t *trace) arrives() bool { return t.frontend.Kind == balance.NodePort }

// ranges are the clients that the frontend is for; nil: all.
func (t *trace) ranges() []netip.Prefix {
	if t.frontend.Kind == balance.LoadBalancer {
		return t.port.SourceRanges
	}
	return nil
}

// where says what translates.
func (t *trace) where() {
	switch {
	case !t.client.near:
		t.edge()
	case t.ranges() != nil:
		t.out.Where, t.out.WhereWhy = "pod", "packet by packet, for who may connect depends on the packet's source address"
	default:
		t.out.Where, t.out.WhereWhy = "socket", "as the socket connects or sends; its packets go to the backend"
	}
}

// edge says what translates packets from outside, once the backend is known: XDP
// has those of other nodes only.
func (t *trace) edge() {
	e := t.node.edge()
	t.out.Where = "tcx"
	at := "as it arrives at " + e.Device
	here, there := t.nodes()
	switch {
	case e.XDP == xdp.Off:
		t.out.WhereWhy = at + "; XDP is off"
	case e.Tunnel:
		t.out.WhereWhy = at + "; XDP does not send through tunnels"
	case !there:
		t.out.WhereWhy = at + "; XDP is for backends of other nodes"
	case t.node.edge().DSR:
		t.out.WhereWhy = at + "; XDP sends on what follows to other nodes"
	case here:
		t.out.Where, t.out.WhereWhy = "xdp or tcx", at+": XDP has the backends of other nodes, tcx those of this one"
	default:
		t.out.Where, t.out.WhereWhy = "xdp", at+", in "+e.XDP+" mode"
	}
}

// nodes says whether there are backends here, and elsewhere, to choose from.
func (t *trace) nodes() (here, there bool) {
	for _, b := range t.out.Backends {
		if b.Node == t.node.providers.Node {
			here = true
		} else {
			there = true
		}
	}
	return here, there
}

// choose says which backend it is.
func (t *trace) choose() {
	t.set = t.frontend.Kind.Far()
	if t.client.near {
		t.set = t.frontend.Kind.Near()
	}
	in, _ := t.services.Input(t.port.Name.Namespace, t.port.Name.Service)
	for _, s := range t.port.Sets() {
		if s.Name == t.set && in.Service != nil {
			v4, v6 := balance.Rule(in, s, balance.Explain(in, &t.port))
			t.out.Set, t.out.SetWhy = string(s.Name), t.setWhy(v4, v6)
			t.backends = ofFamily(s.Backends, t.to.Addr().Is4())
		}
	}
	if ranges := t.ranges(); ranges != nil && t.client.addr.IsValid() &&
		!slices.ContainsFunc(ranges, func(p netip.Prefix) bool { return p.Contains(t.client.addr) }) {
		t.out.Verdict, t.out.Reason = "dropped", "source-range"
		return
	}
	if len(t.backends) == 0 {
		t.out.Verdict, t.out.Reason = "refused", "no-backend"
		if !t.client.near && t.port.LocalExternal { // a balancer in front of the nodes will try another
			t.out.Verdict = "dropped"
		}
		return
	}
	t.out.Verdict = "backend"
	t.pick()
	if !t.client.near {
		t.edge()
	}
	t.source()
}

func (t *trace) setWhy(v4, v6 string) string {
	rule, near := v6, "from elsewhere"
	if t.to.Addr().Is4() {
		rule = v4
	}
	if t.client.near {
		near = "on this node"
	}
	why := fmt.Sprintf("the client is %s; %s", near, rule)
	if ranges := t.ranges(); ranges != nil && !t.client.addr.IsValid() {
		why += fmt.Sprintf("; for clients in %v only", ranges)
	}
	return why
}

// pick takes the steps of service_backend in bpf/lib/service.h.
func (t *trace) pick() {
	if a, ok := t.affinity(); ok {
		t.out.Choice, t.out.ChoiceWhy = "affinity", fmt.Sprintf("it had this one before, for %s more", a.Left.Truncate(time.Second))
		t.give(a.Backend)
		return
	}
	table := table(t.kernel.Sets[t.set], t.to.Addr().Is4())
	switch {
	case len(t.backends) == 1:
		t.out.Choice, t.out.ChoiceWhy = "only", "the only one of the set"
		t.all(nil)
	case !t.client.near && len(table) > 0 && t.client.addr.IsValid() && t.client.port != 0:
		slot := maglev.Hash(netip.AddrPortFrom(t.client.addr, t.client.port), t.to, serviceProtocols[t.protocol]) % uint32(len(table))
		t.out.Choice, t.out.ChoiceWhy = "maglev", fmt.Sprintf("entry %d of %d", slot, len(table))
		t.give(table[slot])
	case !t.client.near && len(table) > 0:
		t.out.Choice, t.out.ChoiceWhy = "maglev", fmt.Sprintf("by the client's address and port, of %d entries", len(table))
		t.all(table)
	default:
		t.out.Choice, t.out.ChoiceWhy = "random", fmt.Sprintf("one of %d", len(t.backends))
		t.all(nil)
	}
}

// affinity finds the backend that the client is kept with.
func (t *trace) affinity() (service.Affinity, bool) {
	if t.port.Affinity == 0 {
		return service.Affinity{}, false
	}
	number, known := uint64(0), false
	if cookie := t.node.providers.Cookie; cookie != nil && t.out.Where == "socket" {
		var err error
		number, err = cookie(t.client.netns)
		known = err == nil
	}
	for _, a := range t.kernel.Affinity {
		same := a.Client.IsValid() && a.Client == t.client.addr
		if t.out.Where == "socket" {
			same = known && !a.Client.IsValid() && a.Number == number
		}
		if same && slices.ContainsFunc(t.backends, func(b balance.Backend) bool { return t.number(b) == a.Backend }) {
			return a, true
		}
	}
	return service.Affinity{}, false
}

func (t *trace) number(b balance.Backend) uint32 {
	return t.kernel.Backends[netip.AddrPortFrom(b.Addr, b.Port)].ID
}

// give answers with the backend of this number.
func (t *trace) give(number uint32) {
	for _, b := range t.backends {
		if t.number(b) == number {
			t.out.Backends = append(t.out.Backends, traceBackend(b, 1))
		}
	}
}

// all answers with those of the set.
func (t *trace) all(table []uint32) {
	counts := countEntries(table)
	for _, b := range t.backends {
		share := 1 / float64(len(t.backends))
		if len(table) > 0 {
			share = float64(counts[t.number(b)]) / float64(len(table))
		}
		t.out.Backends = append(t.out.Backends, traceBackend(b, share))
	}
}

func traceBackend(b balance.Backend, share float64) *weftv1.TraceBackend {
	return &weftv1.TraceBackend{Address: b.Addr.String(), Port: uint32(b.Port), Pod: b.Pod, Node: b.Node, State: string(b.State), Share: share}
}

// source says what becomes of the client's address.
func (t *trace) source() {
	here, there := t.nodes()
	switch {
	case t.client.near && t.out.Where != "socket" && slices.ContainsFunc(t.out.Backends, func(b *weftv1.TraceBackend) bool { return b.Address == t.client.addr.String() }):
		t.out.Source = "of a connection to itself the gateway's address"
	case t.client.near || !there:
		t.out.Source = "the client's address"
	case t.node.edge().DSR && t.client.node == "":
		t.out.Source = "the client's address; a backend of another node answers by itself (DSR)"
	case here:
		t.out.Source = "the client's address towards backends of this node, an address of this node towards others (SNAT)"
	default:
		t.out.Source = "an address of this node (SNAT)"
	}
}
