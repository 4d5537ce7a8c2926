// SPDX-License-Identifier: Apache-2.0

package balance

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/weft-mesh/weft/internal/state"
)

// endpoint is an endpoint that could get connections, as all ports of the
// Service share it: backend.Port is not set.
type endpoint struct {
	backend Backend
	local   bool // on this node
	slice   int  // index in computation.slices
	hints   *discoveryv1.EndpointHints
}

func (e *endpoint) ready() bool { return e.backend.State == Active }

// proxyNameLabel on a Service or a slice says that another proxy than the
// cluster's own serves it. kube-proxy watches neither these nor the slices of
// headless Services (cmd/kube-proxy/app/server.go).
const proxyNameLabel = "service.kubernetes.io/service-proxy-name"

// collect takes the endpoints of the slices that may be chosen at all. Those
// that are neither ready nor terminating do not count for anything in
// kube-proxy, so they are left out here.
func (c *computation) collect() {
	for _, row := range c.in.Slices {
		if c.relevant(row) {
			c.collectSlice(row)
		}
	}
	slices.SortFunc(c.endpoints, func(a, b *endpoint) int { return a.backend.Addr.Compare(b.backend.Addr) })
}

func (c *computation) relevant(row *state.Endpoint) bool {
	if row == nil || row.Slice == nil || row.Namespace != c.in.Service.Namespace || row.Service != c.in.Service.Name {
		return false
	}
	_, headless := row.Slice.Labels[corev1.IsHeadlessService]
	_, other := row.Slice.Labels[proxyNameLabel]
	known := row.Slice.AddressType == discoveryv1.AddressTypeIPv4 || row.Slice.AddressType == discoveryv1.AddressTypeIPv6
	return known && !headless && !other
}

// collectSlice takes the first address of each endpoint: the others are
// equivalent by definition of the API, and kube-proxy ignores them
// (pkg/proxy/endpointslicecache.go, addEndpoints).
func (c *computation) collectSlice(row *state.Endpoint) {
	p := problems{object: "EndpointSlice " + state.Key(row.Namespace, row.Name), list: &c.problems}
	index := len(c.slices)
	c.slices = append(c.slices, row)
	checkPorts(p, row.Slice.Ports)
	rows := make([]endpoint, len(row.Slice.Endpoints))
	c.endpoints = slices.Grow(c.endpoints, len(rows))
	for i := range row.Slice.Endpoints {
		from := &row.Slice.Endpoints[i]
		s := c.stateOf(&from.Conditions)
		if s == "" || len(from.Addresses) == 0 {
			continue
		}
		a, want := usable(from.Addresses[0])
		if want == "" && a.Is4() != (row.Slice.AddressType == discoveryv1.AddressTypeIPv4) {
			want = fmt.Sprintf("an %s address, as addressType says", row.Slice.AddressType)
		}
		if want != "" {
			p.add(fmt.Sprintf("endpoints[%d].addresses[0]", i), from.Addresses[0], want)
			continue
		}
		rows[i] = endpoint{backend: backendOf(from, row.Namespace, a, s), slice: index, hints: from.Hints}
		rows[i].local = c.in.Node.Name != "" && rows[i].backend.Node == c.in.Node.Name
		c.endpoints = append(c.endpoints, &rows[i])
	}
}

// checkPorts names the numbers that are none.
func checkPorts(p problems, ports []discoveryv1.EndpointPort) {
	for i := range ports {
		if _, ok := portNumber(ports[i].Port); !ok && ports[i].Port != nil {
			p.add(fmt.Sprintf("ports[%d].port", i), *ports[i].Port, "1 to 65535")
		}
	}
}

func backendOf(from *discoveryv1.Endpoint, namespace string, a netip.Addr, s State) Backend {
	b := Backend{Addr: a, State: s}
	if from.NodeName != nil {
		b.Node = *from.NodeName
	}
	if from.Zone != nil {
		b.Zone = *from.Zone
	}
	if t := from.TargetRef; t != nil && t.Kind == "Pod" {
		b.Pod = state.Key(cmp.Or(t.Namespace, namespace), t.Name)
	}
	return b
}

// stateOf is the state of an endpoint, "" where it must not be chosen. What is
// not set follows the API: ready, serving as it is ready, not terminating.
// (kube-proxy takes serving as true where it is not set.) A ready endpoint is
// ready even when it terminates: the controller says so of those of a Service
// with publishNotReadyAddresses.
func (c *computation) stateOf(e *discoveryv1.EndpointConditions) State {
	ready := e.Ready == nil || *e.Ready || c.in.Service.Spec.PublishNotReadyAddresses
	serving := ready
	if e.Serving != nil {
		serving = *e.Serving
	}
	switch {
	case ready:
		return Active
	case serving && e.Terminating != nil && *e.Terminating:
		return Terminating
	}
	return ""
}

// target is an endpoint with the number that one service port has there.
type target struct {
	*endpoint
	port uint16
}

func (t target) compare(o target) int {
	return cmp.Or(t.backend.Addr.Compare(o.backend.Addr), cmp.Compare(t.port, o.port))
}

// targets returns the endpoints of one service port in order of address and
// port, each once. A port is found by name and protocol; its number may differ
// between slices.
func (c *computation) targets(name string, protocol corev1.Protocol) []target {
	numbers := c.numbers(name, protocol)
	out := make([]target, 0, len(c.endpoints))
	for _, e := range c.endpoints {
		for _, n := range numbers[e.slice] {
			out = append(out, target{e, n})
		}
	}
	slices.SortFunc(out, func(a, b target) int {
		if d := a.compare(b); d != 0 {
			return d
		}
		return prefer(a.endpoint, b.endpoint)
	})
	return slices.CompactFunc(out, func(a, b target) bool { return a.compare(b) == 0 })
}

// numbers returns the numbers of a service port in each slice. A port without a
// number would mean all ports; kube-proxy ignores it, and so does this.
func (c *computation) numbers(name string, protocol corev1.Protocol) [][]uint16 {
	out := make([][]uint16, len(c.slices))
	for i, row := range c.slices {
		for j := range row.Slice.Ports {
			p := &row.Slice.Ports[j]
			if n, ok := portNumber(p.Port); ok && deref(p.Name) == name && orTCP(deref(p.Protocol)) == protocol {
				out[i] = append(out[i], n)
			}
		}
	}
	return out
}

// prefer orders endpoints of one address and port by which of them counts. An
// endpoint may be in two slices while it moves between them. As in kube-proxy a
// local one wins (addEndpoints); where that takes whichever it sees last, the
// ready one wins here, and the rest only makes the order total.
func prefer(a, b *endpoint) int {
	return cmp.Or(
		cmp.Compare(a.backend.State, b.backend.State), // active is before terminating
		-compareBool(a.local, b.local),
		cmp.Compare(a.backend.Pod, b.backend.Pod),
		cmp.Compare(a.backend.Node, b.backend.Node),
		cmp.Compare(a.backend.Zone, b.backend.Zone),
		compareHints(a.hints, b.hints),
	)
}

func compareHints(a, b *discoveryv1.EndpointHints) int {
	if a == nil || b == nil {
		return compareBool(a != nil, b != nil)
	}
	return cmp.Or(
		slices.CompareFunc(a.ForZones, b.ForZones, func(x, y discoveryv1.ForZone) int { return cmp.Compare(x.Name, y.Name) }),
		slices.CompareFunc(a.ForNodes, b.ForNodes, func(x, y discoveryv1.ForNode) int { return cmp.Compare(x.Name, y.Name) }),
	)
}

func compareBool(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	}
	return 1
}

func portNumber(p *int32) (uint16, bool) {
	if p == nil || *p < 1 || *p > 65535 {
		return 0, false
	}
	return uint16(*p), true
}

func orTCP(p corev1.Protocol) corev1.Protocol { return cmp.Or(p, corev1.ProtocolTCP) }

func deref[T any](p *T) T {
	if p == nil {
		var zero T
		return zero
	}
	return *p
}
