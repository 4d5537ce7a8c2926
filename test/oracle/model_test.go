// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

// This file is the model: for one client and one address it goes through all
// objects and says what a connection must come to, by the words of Kubernetes'
// documentation. It knows nothing of package balance, keeps nothing between two
// questions and is as slow as it likes.

// objects is a cluster as its API server knows it. The objects are immutable.
type objects struct {
	node     *corev1.Node
	services map[string]*corev1.Service
	slices   map[string]*discoveryv1.EndpointSlice
}

// place is where a client may connect to.
type place struct {
	at       netip.AddrPort
	protocol corev1.Protocol
}

func (p place) String() string { return fmt.Sprintf("%s/%s", p.at, p.protocol) }

// Kinds of places of a Service.
const (
	clusterIP    = "ClusterIP"
	nodePort     = "NodePort"
	loadBalancer = "LoadBalancer"
	externalIP   = "ExternalIP"
)

// claim is a service port that wants a place.
type claim struct {
	service *corev1.Service
	port    corev1.ServicePort
	kind    string
}

func (c *claim) name() string {
	return fmt.Sprintf("%s:%s/%s", c.service.Name, c.port.Name, c.port.Protocol)
}

// claimOn returns who has a place: of several the first by name; nil: nobody.
func (o *objects) claimOn(p place) *claim {
	var best *claim
	for _, c := range o.claimsOn(p) {
		if best == nil || c.name() < best.name() {
			best = c
		}
	}
	return best
}

// claimsOn returns who wants a place.
func (o *objects) claimsOn(p place) (out []*claim) {
	for _, s := range o.services {
		for _, port := range s.Spec.Ports {
			if kind := o.kindOf(s, port, p); kind != "" {
				out = append(out, &claim{s, port, kind})
			}
		}
	}
	return out
}

// kindOf says as what a service port has a place, "" where it has not.
func (o *objects) kindOf(s *corev1.Service, port corev1.ServicePort, p place) string {
	if s.Spec.Type == corev1.ServiceTypeExternalName || s.Spec.ClusterIP == corev1.ClusterIPNone || port.Protocol != p.protocol {
		return ""
	}
	if _, other := s.Labels["service.kubernetes.io/service-proxy-name"]; other {
		return ""
	}
	// a Service is there in the families of its cluster IPs only
	sameFamily := false
	for _, ip := range s.Spec.ClusterIPs {
		sameFamily = sameFamily || netip.MustParseAddr(ip).Is4() == p.at.Addr().Is4()
	}
	if !sameFamily {
		return ""
	}
	text := p.at.Addr().String()
	open := s.Spec.Type == corev1.ServiceTypeNodePort || s.Spec.Type == corev1.ServiceTypeLoadBalancer
	if open && port.NodePort == int32(p.at.Port()) && o.nodeHas(text) {
		return nodePort
	}
	if port.Port != int32(p.at.Port()) {
		return ""
	}
	if slices.Contains(s.Spec.ClusterIPs, text) {
		return clusterIP
	}
	if s.Spec.Type == corev1.ServiceTypeLoadBalancer {
		for _, in := range s.Status.LoadBalancer.Ingress {
			if in.IP == text && (in.IPMode == nil || *in.IPMode == corev1.LoadBalancerIPModeVIP) {
				return loadBalancer
			}
		}
	}
	if slices.Contains(s.Spec.ExternalIPs, text) {
		return externalIP
	}
	return ""
}

func (o *objects) nodeHas(ip string) bool {
	return slices.ContainsFunc(o.node.Status.Addresses, func(a corev1.NodeAddress) bool {
		return a.Type == corev1.NodeInternalIP && a.Address == ip
	})
}

// Ends of a connection.
type end string

const (
	reaches  end = "reaches" // one of the backends
	isPlain  end = "is not translated"
	isRefuse end = "is refused"
	isDrop   end = "gets no answer"
)

// verdict is what must come of connections.
type verdict struct {
	end      end
	backends []string // sorted, where the end is reaches
	sticks   bool     // to one of them
	claim    *claim   // nil: nobody has the place
	packets  bool     // translated packet by packet, also for a pod
}

func (v *verdict) String() string {
	s := string(v.end)
	if v.end == reaches {
		s += " " + strings.Join(v.backends, " ")
	}
	if v.sticks {
		s += ", and stays with one"
	}
	return s
}

// expect is the verdict for a client with that address.
func (o *objects) expect(client string, from netip.Addr, p place) verdict {
	c := o.claimOn(p)
	v := verdict{claim: c}
	inside := client != outside
	if c == nil || !inside && c.kind == clusterIP {
		v.end = isPlain
		if !inside && !slices.Contains(nodeIPs, p.at.Addr()) {
			v.end = isDrop // the node has no such address, and is no router
		}
		return v
	}
	ranges := c.service.Spec.LoadBalancerSourceRanges
	if c.kind == loadBalancer && len(ranges) > 0 {
		if client == insideNode {
			v.end = isPlain // its own packets go to the balancer
			return v
		}
		v.packets = true
		if !within(from, ranges) {
			v.end = isDrop
			return v
		}
	}
	v.packets = v.packets || !inside
	local := policyIsLocal(c, inside)
	v.backends = o.backendsOf(c, p.at.Addr().Is4(), local)
	switch {
	case len(v.backends) > 0:
		v.end = reaches
		v.sticks = c.service.Spec.SessionAffinity == corev1.ServiceAffinityClientIP
	case !inside && local:
		v.end = isDrop // another node may have one
	default:
		v.end = isRefuse
	}
	return v
}

func within(a netip.Addr, ranges []string) bool {
	return slices.ContainsFunc(ranges, func(s string) bool { return netip.MustParsePrefix(strings.TrimSpace(s)).Contains(a) })
}

// policyIsLocal: the internal policy is for cluster IPs, the external one for
// what comes from outside to all others; clients inside have them as Cluster.
func policyIsLocal(c *claim, inside bool) bool {
	s := c.service.Spec
	if c.kind == clusterIP {
		return s.InternalTrafficPolicy != nil && *s.InternalTrafficPolicy == corev1.ServiceInternalTrafficPolicyLocal
	}
	return !inside && s.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal
}

// candidate is an endpoint of a service port: all that any slice says of its
// address and number together.
type candidate struct {
	ready, draining bool // draining: terminating and serving
	here            bool // on this node
	zones, nodes    []string
}

// backendsOf are the names of the backends that a connection may get.
func (o *objects) backendsOf(c *claim, v4, local bool) []string {
	all := o.candidates(c, v4)
	var ready, draining []string
	allForNodes, allForZones := true, true
	var forNode, forZone []string
	zone := o.node.Labels[corev1.LabelTopologyZone]
	for name, x := range all {
		switch {
		case local && !x.here:
		case x.ready:
			ready = append(ready, name)
			allForNodes = allForNodes && len(x.nodes) > 0
			allForZones = allForZones && len(x.zones) > 0
			if slices.Contains(x.nodes, o.node.Name) {
				forNode = append(forNode, name)
			}
			if zone != "" && slices.Contains(x.zones, zone) {
				forZone = append(forZone, name)
			}
		case x.draining:
			draining = append(draining, name)
		}
	}
	out := ready
	switch {
	case len(ready) == 0:
		out = draining
	case local: // hints do not count
	case allForNodes && len(forNode) > 0:
		out = forNode
	case allForZones && len(forZone) > 0:
		out = forZone
	}
	slices.Sort(out)
	return out
}

func (o *objects) candidates(c *claim, v4 bool) map[string]candidate {
	out := map[string]candidate{}
	for _, s := range o.slices {
		if s.Labels[discoveryv1.LabelServiceName] != c.service.Name || (s.AddressType == discoveryv1.AddressTypeIPv4) != v4 {
			continue
		}
		for _, p := range s.Ports {
			if p.Port == nil || *p.Name != c.port.Name || *p.Protocol != c.port.Protocol {
				continue
			}
			for _, e := range s.Endpoints {
				name := netip.AddrPortFrom(netip.MustParseAddr(e.Addresses[0]), uint16(*p.Port)).String()
				out[name] = out[name].and(o.candidate(c, &e))
			}
		}
	}
	return out
}

// and is for an endpoint that is in two slices while it moves.
func (x candidate) and(y candidate) candidate {
	if x.ready || !y.ready && x.draining {
		return x
	}
	return y
}

func (o *objects) candidate(c *claim, e *discoveryv1.Endpoint) candidate {
	is := func(flag *bool, unknown bool) bool {
		if flag == nil {
			return unknown
		}
		return *flag
	}
	x := candidate{ready: is(e.Conditions.Ready, true)}
	serving := is(e.Conditions.Serving, x.ready)
	x.draining = !x.ready && serving && is(e.Conditions.Terminating, false)
	x.ready = x.ready || c.service.Spec.PublishNotReadyAddresses
	x.here = e.NodeName != nil && *e.NodeName == o.node.Name
	if e.Hints != nil {
		for _, z := range e.Hints.ForZones {
			x.zones = append(x.zones, z.Name)
		}
		for _, n := range e.Hints.ForNodes {
			x.nodes = append(x.nodes, n.Name)
		}
	}
	return x
}

// everywhere are all places that Services of random can have.
func everywhere() []place {
	var out []place
	add := func(as []netip.Addr, ports []uint16) {
		for _, a := range as {
			for _, p := range ports {
				for _, protocol := range []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP} {
					out = append(out, place{netip.AddrPortFrom(a, p), protocol})
				}
			}
		}
	}
	add(flat(clusterIPs...), servicePorts)
	add(flat(balancerIPs...), servicePorts)
	add(nodeIPs, nodePorts)
	return out
}
