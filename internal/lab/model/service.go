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

// Ranges of the addresses and ports that Services get.
var (
	serviceIPv4 = netip.MustParsePrefix("10.96.0.0/16")
	serviceIPv6 = netip.MustParsePrefix("fd00:10:96::/112")
)

const (
	// firstService leaves room for the addresses that clusters give by hand
	// (API server, DNS).
	firstService  = 16
	firstNodePort = 30000
	lastNodePort  = 32767
)

// inherit keeps what the lab assigned to the old version of a Service and the
// new version leaves open.
func inherit(old, now *corev1.Service) {
	o, n := &old.Spec, &now.Spec
	if n.ClusterIP == "" && len(n.ClusterIPs) == 0 && n.Type != corev1.ServiceTypeExternalName && sameFamilies(o, n) {
		n.ClusterIP, n.ClusterIPs = o.ClusterIP, slices.Clone(o.ClusterIPs)
		n.IPFamilies, n.IPFamilyPolicy = slices.Clone(o.IPFamilies), o.IPFamilyPolicy
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
}

// sameFamilies tells whether n, as written, would get the families that o has.
func sameFamilies(o, n *corev1.ServiceSpec) bool {
	return slices.Equal(wantedFamilies(o), wantedFamilies(n))
}

func hasNodePorts(s *corev1.ServiceSpec) bool {
	return s.Type == corev1.ServiceTypeNodePort || s.Type == corev1.ServiceTypeLoadBalancer
}

// wantedFamilies are those of ClusterIPs; the lab is dual stack with IPv4 first.
func wantedFamilies(s *corev1.ServiceSpec) []corev1.IPFamily {
	families := slices.Clone(s.IPFamilies)
	if len(families) == 0 {
		families = []corev1.IPFamily{corev1.IPv4Protocol}
	}
	dual := s.IPFamilyPolicy != nil && *s.IPFamilyPolicy != corev1.IPFamilyPolicySingleStack
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
	var errs []state.SourceError
	ips, ports := map[netip.Addr]ID{}, map[int32]ID{}
	for _, id := range c.IDs("Service") {
		svc := c.objects[id].(*corev1.Service)
		for _, ip := range givenIPs(&svc.Spec) {
			if other, ok := ips[ip]; ok {
				m, applied := objects[id]
				if !applied {
					m, other = objects[other], id
				}
				errs = append(errs, state.SourceError{File: m.File, Document: m.Document, Field: "spec.clusterIP",
					Message: fmt.Sprintf("%q: is the address of %s already", ip, other)})
			}
			ips[ip] = id
		}
		for _, p := range svc.Spec.Ports {
			if p.NodePort != 0 {
				ports[p.NodePort] = id
			}
		}
	}
	for _, change := range changes {
		if svc, ok := c.objects[change.ID].(*corev1.Service); ok && change.Outcome != Unchanged {
			assignIPs(&svc.Spec, change.ID, ips)
			assignNodePorts(&svc.Spec, change.ID, ports)
		}
	}
	return errs
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

func assignIPs(s *corev1.ServiceSpec, id ID, used map[netip.Addr]ID) {
	if s.Type == corev1.ServiceTypeExternalName {
		return
	}
	families := wantedFamilies(s)
	given := givenIPs(s)
	headless := s.ClusterIP == corev1.ClusterIPNone
	if len(given) > 0 && len(s.IPFamilies) == 0 {
		families = nil
		for _, ip := range given {
			families = append(families, familyOf(ip))
		}
	}
	s.IPFamilies = families
	if s.IPFamilyPolicy == nil {
		s.IPFamilyPolicy = ptr(corev1.IPFamilyPolicySingleStack)
		if len(families) > 1 {
			s.IPFamilyPolicy = ptr(corev1.IPFamilyPolicyRequireDualStack)
		}
	}
	if headless {
		s.ClusterIPs = []string{corev1.ClusterIPNone}
		return
	}
	for _, family := range families[min(len(given), len(families)):] {
		ip := freeIP(family, used)
		used[ip] = id
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

// freeIP takes the lowest address that is not used. The ranges hold 65,000, far
// more than a lab has Services.
func freeIP(family corev1.IPFamily, used map[netip.Addr]ID) netip.Addr {
	prefix := serviceIPv4
	if family == corev1.IPv6Protocol {
		prefix = serviceIPv6
	}
	ip := prefix.Addr()
	for range firstService {
		ip = ip.Next()
	}
	for {
		if _, ok := used[ip]; !ok {
			return ip
		}
		ip = ip.Next()
	}
}

func assignNodePorts(s *corev1.ServiceSpec, id ID, used map[int32]ID) {
	if !hasNodePorts(s) || (s.AllocateLoadBalancerNodePorts != nil && !*s.AllocateLoadBalancerNodePorts) {
		return
	}
	next := int32(firstNodePort)
	for i := range s.Ports {
		for s.Ports[i].NodePort == 0 && next <= lastNodePort {
			if _, ok := used[next]; !ok {
				s.Ports[i].NodePort = next
				used[next] = id
			}
			next++
		}
	}
}
