// SPDX-License-Identifier: Apache-2.0

package model

import (
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/weft-mesh/weft/internal/source/manifest"
	"github.com/weft-mesh/weft/internal/state"
)

// ranges are the addresses that Services get.
type ranges map[corev1.IPFamily]netip.Prefix

func (r ranges) contain(ip netip.Addr) bool { return r[familyOf(ip)].Contains(ip) }

// clusterRanges are those of cluster addresses.
func clusterRanges() ranges {
	return ranges{corev1.IPv4Protocol: netip.MustParsePrefix("10.96.0.0/16"), corev1.IPv6Protocol: netip.MustParsePrefix("fd00:10:96::/112")}
}

// balancerRanges are those of load balancers.
func balancerRanges() ranges {
	return ranges{corev1.IPv4Protocol: netip.MustParsePrefix("172.31.0.0/24"), corev1.IPv6Protocol: netip.MustParsePrefix("fd00:172:31::/64")}
}

const (
	// firstService leaves room for the addresses that clusters give by hand
	// (API server, DNS).
	firstService  = 16
	firstBalancer = 1
	firstNodePort = 30000
	lastNodePort  = 32767
)

// allocation is what the Services of a cluster use.
type allocation struct {
	ips       map[netip.Addr]ID // of ClusterIPs
	balancers map[netip.Addr]ID // of status.loadBalancer
	ports     map[int32]ID      // of nodes
	errs      []state.SourceError
	objects   map[ID]manifest.Object // where what is applied was written
}

// inherit keeps what the lab assigned to the old version of a Service and the
// new version leaves open.
func inherit(old, now *corev1.Service) {
	o, n := &old.Spec, &now.Spec
	if n.ClusterIP == "" && len(n.ClusterIPs) == 0 && n.Type != corev1.ServiceTypeExternalName {
		inheritIPs(o, n)
	}
	if !hasNodePorts(n) {
		return
	}
	for i := range n.Ports {
		for _, p := range o.Ports {
			if n.Ports[i].NodePort == 0 && p.Name == n.Ports[i].Name && p.Port == n.Ports[i].Port && p.Protocol == n.Ports[i].Protocol {
				n.Ports[i].NodePort = p.NodePort
			}
		}
	}
	if n.HealthCheckNodePort == 0 && checksHealth(n) {
		n.HealthCheckNodePort = o.HealthCheckNodePort
	}
	if n.Type == corev1.ServiceTypeLoadBalancer && len(now.Status.LoadBalancer.Ingress) == 0 && slices.Equal(n.IPFamilies, o.IPFamilies) {
		now.Status = *old.Status.DeepCopy()
	}
}

// inheritIPs keeps the addresses of the families that stay.
func inheritIPs(o, n *corev1.ServiceSpec) {
	families := wantedFamilies(n)
	if slices.Equal(families, o.IPFamilies) {
		n.ClusterIP, n.ClusterIPs = o.ClusterIP, slices.Clone(o.ClusterIPs)
		n.IPFamilies, n.IPFamilyPolicy = slices.Clone(o.IPFamilies), o.IPFamilyPolicy
		return
	}
	if len(families) > 0 && len(o.IPFamilies) > 0 && families[0] == o.IPFamilies[0] && o.ClusterIP != "" && o.ClusterIP != corev1.ClusterIPNone {
		n.ClusterIP, n.ClusterIPs, n.IPFamilies = o.ClusterIP, []string{o.ClusterIP}, families
	}
}

func hasNodePorts(s *corev1.ServiceSpec) bool {
	return s.Type == corev1.ServiceTypeNodePort || s.Type == corev1.ServiceTypeLoadBalancer
}

// checksHealth tells whether load balancers ask the nodes for their health.
func checksHealth(s *corev1.ServiceSpec) bool {
	return s.Type == corev1.ServiceTypeLoadBalancer && s.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal
}

// wantedFamilies are those of ClusterIPs; the lab is dual stack with IPv4 first.
func wantedFamilies(s *corev1.ServiceSpec) []corev1.IPFamily {
	families := slices.Clone(s.IPFamilies)
	for _, ip := range givenIPs(s)[min(len(families), len(givenIPs(s))):] {
		families = append(families, familyOf(ip))
	}
	if len(families) == 0 {
		families = []corev1.IPFamily{corev1.IPv4Protocol}
	}
	dual := s.IPFamilyPolicy != nil && *s.IPFamilyPolicy != corev1.IPFamilyPolicySingleStack
	// Nobody knows the families of endpoints that others write.
	dual = dual || s.IPFamilyPolicy == nil && len(s.IPFamilies) == 0 && s.ClusterIP == corev1.ClusterIPNone && len(s.Selector) == 0
	if dual && len(families) == 1 {
		if families[0] == corev1.IPv4Protocol {
			return append(families, corev1.IPv6Protocol)
		}
		return append(families, corev1.IPv4Protocol)
	}
	return families
}

// assignServices gives addresses and node ports to the Services that were
// changed and have none.
func (c *Cluster) assignServices(changes []Change, objects map[ID]manifest.Object) []state.SourceError {
	a := &allocation{ips: map[netip.Addr]ID{}, balancers: map[netip.Addr]ID{}, ports: map[int32]ID{}, objects: objects}
	for _, id := range c.IDs("Service") {
		if svc, ok := c.objects[id].(*corev1.Service); ok {
			a.take(id, svc)
		}
	}
	for _, change := range changes {
		if svc, ok := c.objects[change.ID].(*corev1.Service); ok && change.Outcome != Unchanged && len(a.errs) == 0 {
			a.assign(change.ID, svc)
		}
	}
	return a.errs
}

// take notes what a Service has, and refuses what two have.
func (a *allocation) take(id ID, svc *corev1.Service) {
	for _, ip := range givenIPs(&svc.Spec) {
		if other, taken := a.ips[ip]; taken {
			a.conflict(id, other, "spec.clusterIP", fmt.Sprintf("%q: is the address of ", ip))
		}
		a.ips[ip] = id
	}
	for i, p := range svc.Spec.Ports {
		a.takePort(id, fmt.Sprintf("spec.ports[%d].nodePort", i), p.NodePort)
	}
	a.takePort(id, "spec.healthCheckNodePort", svc.Spec.HealthCheckNodePort)
	for _, in := range svc.Status.LoadBalancer.Ingress {
		if ip, err := netip.ParseAddr(in.IP); err == nil {
			a.balancers[ip] = id // two may share one, with different ports
		}
	}
}

func (a *allocation) takePort(id ID, field string, port int32) {
	if port == 0 {
		return
	}
	if other, taken := a.ports[port]; taken && other != id {
		a.conflict(id, other, field, fmt.Sprintf("%d: is a node port of ", port))
	}
	a.ports[port] = id
}

// conflict blames whichever of two Services was applied now.
func (a *allocation) conflict(id, other ID, field, what string) {
	m, applied := a.objects[id]
	if !applied {
		m, other = a.objects[other], id
	}
	a.errs = append(a.errs, state.SourceError{File: m.File, Document: m.Document, Field: field, Message: what + other.String() + " already"})
}

func (a *allocation) fail(id ID, field, message string) {
	m := a.objects[id]
	a.errs = append(a.errs, state.SourceError{File: m.File, Document: m.Document, Field: field, Message: message})
}

func (a *allocation) assign(id ID, svc *corev1.Service) {
	if svc.Spec.Type == corev1.ServiceTypeExternalName {
		return
	}
	a.assignIPs(id, &svc.Spec)
	a.assignNodePorts(id, &svc.Spec)
	if svc.Spec.Type == corev1.ServiceTypeLoadBalancer {
		a.assignBalancer(id, svc)
	}
}

// givenIPs are the cluster addresses that are written in s.
func givenIPs(s *corev1.ServiceSpec) []netip.Addr {
	all := s.ClusterIPs
	if len(all) == 0 {
		all = []string{s.ClusterIP}
	}
	var ips []netip.Addr
	for _, text := range all {
		if ip, err := netip.ParseAddr(text); err == nil {
			ips = append(ips, ip)
		}
	}
	return ips
}

func (a *allocation) assignIPs(id ID, s *corev1.ServiceSpec) {
	s.IPFamilies = wantedFamilies(s)
	if s.IPFamilyPolicy == nil {
		s.IPFamilyPolicy = ptr(corev1.IPFamilyPolicySingleStack)
		if len(s.IPFamilies) > 1 {
			s.IPFamilyPolicy = ptr(corev1.IPFamilyPolicyRequireDualStack)
		}
	}
	if s.ClusterIP == corev1.ClusterIPNone {
		s.ClusterIPs = []string{corev1.ClusterIPNone}
		return
	}
	given := givenIPs(s)
	for _, family := range s.IPFamilies[min(len(given), len(s.IPFamilies)):] {
		ip, ok := free(clusterRanges()[family], firstService, a.ips)
		if !ok {
			a.fail(id, "spec.clusterIP", fmt.Sprintf("no address of %s is left", clusterRanges()[family]))
			return
		}
		a.ips[ip] = id
		given = append(given, ip)
	}
	s.ClusterIPs = nil
	for _, ip := range given {
		s.ClusterIPs = append(s.ClusterIPs, ip.String())
	}
	s.ClusterIP = s.ClusterIPs[0]
}

func familyOf(ip netip.Addr) corev1.IPFamily {
	if ip.Is4() {
		return corev1.IPv4Protocol
	}
	return corev1.IPv6Protocol
}

// free finds the lowest address of a range, from the first'th on, that is not
// used.
func free(within netip.Prefix, first int, used map[netip.Addr]ID) (netip.Addr, bool) {
	ip := within.Addr()
	for range first {
		ip = ip.Next()
	}
	for {
		if _, taken := used[ip]; !taken {
			return ip, within.Contains(ip.Next()) // the last one of IPv4 is for broadcasts
		}
		ip = ip.Next()
	}
}

func (a *allocation) assignNodePorts(id ID, s *corev1.ServiceSpec) {
	if hasNodePorts(s) && (s.AllocateLoadBalancerNodePorts == nil || *s.AllocateLoadBalancerNodePorts) {
		for i := range s.Ports {
			if s.Ports[i].NodePort == 0 {
				s.Ports[i].NodePort = a.nodePort(id, fmt.Sprintf("spec.ports[%d].nodePort", i))
			}
		}
	}
	if checksHealth(s) && s.HealthCheckNodePort == 0 {
		s.HealthCheckNodePort = a.nodePort(id, "spec.healthCheckNodePort")
	}
}

func (a *allocation) nodePort(id ID, field string) int32 {
	for port := int32(firstNodePort); port <= lastNodePort; port++ {
		if _, taken := a.ports[port]; !taken {
			a.ports[port] = id
			return port
		}
	}
	a.fail(id, field, fmt.Sprintf("no node port from %d to %d is left", firstNodePort, lastNodePort))
	return 0
}

// assignBalancer is the cloud provider's part: an address for each family, to
// which the outside world has a route.
func (a *allocation) assignBalancer(id ID, svc *corev1.Service) {
	ingress := svc.Status.LoadBalancer.Ingress
	if len(ingress) == 0 && svc.Spec.LoadBalancerIP != "" {
		ingress = append(ingress, corev1.LoadBalancerIngress{IP: svc.Spec.LoadBalancerIP})
	}
	if len(ingress) == 0 {
		for _, family := range svc.Spec.IPFamilies {
			ip, ok := free(balancerRanges()[family], firstBalancer, a.balancers)
			if !ok {
				a.fail(id, "status.loadBalancer.ingress", fmt.Sprintf("no address of %s is left", balancerRanges()[family]))
				return
			}
			a.balancers[ip] = id
			ingress = append(ingress, corev1.LoadBalancerIngress{IP: ip.String()})
		}
	}
	for i := range ingress {
		if ingress[i].IP != "" && ingress[i].IPMode == nil {
			ingress[i].IPMode = ptr(corev1.LoadBalancerIPModeVIP)
		}
	}
	svc.Status.LoadBalancer.Ingress = ingress
}
