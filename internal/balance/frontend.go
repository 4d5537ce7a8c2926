// SPDX-License-Identifier: Apache-2.0

package balance

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// addresses are where all ports of one Service are.
type addresses struct {
	cluster, external, balancer []netip.Addr
	nodes                       []netip.Addr
}

// families of the cluster addresses. kube-proxy serves a Service in these only,
// also on its external addresses (pkg/proxy/servicechangetracker.go,
// serviceToServiceMap).
func (a *addresses) families() (v4, v6 bool) {
	for _, x := range a.cluster {
		v4, v6 = v4 || x.Is4(), v6 || x.Is6()
	}
	return v4, v6
}

// addressesOf reads the addresses of the Service; those of the other family
// than its cluster addresses are left out without a word, as kube-proxy does.
func (c *computation) addressesOf() addresses {
	spec := c.in.Service.Spec
	var a addresses
	for i, s := range clusterIPs(spec) {
		a.cluster = c.address(a.cluster, fmt.Sprintf("spec.clusterIPs[%d]", i), s)
	}
	for i, s := range spec.ExternalIPs {
		a.external = c.address(a.external, fmt.Sprintf("spec.externalIPs[%d]", i), s)
	}
	// The API server clears the status of a Service that is of this type no more.
	if c.in.Service.Status != nil && spec.Type == corev1.ServiceTypeLoadBalancer {
		for i, g := range c.in.Service.Status.LoadBalancer.Ingress {
			if g.IP != "" && (g.IPMode == nil || *g.IPMode == corev1.LoadBalancerIPModeVIP) {
				a.balancer = c.address(a.balancer, fmt.Sprintf("status.loadBalancer.ingress[%d].ip", i), g.IP)
			}
		}
	}
	for _, ip := range c.in.Node.IPs {
		if ip = ip.Unmap(); ip.IsValid() {
			a.nodes = append(a.nodes, ip.WithZone(""))
		}
	}
	v4, v6 := a.families()
	foreign := func(x netip.Addr) bool { return x.Is4() && !v4 || x.Is6() && !v6 }
	a.external = slices.DeleteFunc(a.external, foreign)
	a.balancer = slices.DeleteFunc(a.balancer, foreign)
	a.nodes = slices.DeleteFunc(a.nodes, foreign)
	return a
}

func (c *computation) address(to []netip.Addr, field, s string) []netip.Addr {
	a, want := usable(s)
	if want != "" {
		c.service.add(field, s, want)
		return to
	}
	return append(to, a)
}

func clusterIPs(spec *corev1.ServiceSpec) []string {
	if len(spec.ClusterIPs) == 0 && spec.ClusterIP != "" {
		return []string{spec.ClusterIP}
	}
	return spec.ClusterIPs
}

// frontendsOf returns the frontends of one port, in order. Of several with the
// same address and port the first that is added stays: a LoadBalancer wins over
// an ExternalIP, for it may have source ranges.
func (c *computation) frontendsOf(a *addresses, port *corev1.ServicePort) []Frontend {
	number, nodePort := uint16(port.Port), uint16(0)
	reachable := c.in.Service.Spec.Type == corev1.ServiceTypeNodePort || c.in.Service.Spec.Type == corev1.ServiceTypeLoadBalancer
	if n, ok := portNumber(&port.NodePort); ok && reachable {
		nodePort = n
	}
	out := make([]Frontend, 0, len(a.cluster)+len(a.external)+len(a.balancer)+len(a.nodes))
	add := func(kind Kind, port uint16, as []netip.Addr) {
		for _, x := range as {
			if f := (Frontend{Addr: x, Port: port, Kind: kind}); port != 0 && !slices.ContainsFunc(out, f.same) {
				out = append(out, f)
			}
		}
	}
	add(ClusterIP, number, a.cluster)
	add(NodePort, nodePort, a.nodes)
	add(LoadBalancer, number, a.balancer)
	add(ExternalIP, number, a.external)
	slices.SortFunc(out, func(x, y Frontend) int {
		return cmp.Or(cmp.Compare(x.Kind.order(), y.Kind.order()), x.Addr.Compare(y.Addr), cmp.Compare(x.Port, y.Port))
	})
	return out
}

func (f Frontend) same(o Frontend) bool { return f.Addr == o.Addr && f.Port == o.Port }

func (k Kind) order() int {
	return slices.Index([]Kind{ClusterIP, NodePort, ExternalIP, LoadBalancer}, k)
}

// sourceRanges returns the ranges and whether LoadBalancer frontends can be
// served: not if there are ranges and none of them can be read. White space is
// allowed around them (pkg/proxy/serviceport.go, newBaseServiceInfo).
func (c *computation) sourceRanges() (ranges []netip.Prefix, ok bool) {
	if c.in.Service.Spec.Type != corev1.ServiceTypeLoadBalancer {
		return nil, true
	}
	given := c.in.Service.Spec.LoadBalancerSourceRanges
	for i, s := range given {
		p, err := netip.ParsePrefix(strings.TrimSpace(s))
		if err != nil || p.Addr().Is4In6() {
			c.service.add(fmt.Sprintf("spec.loadBalancerSourceRanges[%d]", i), s, "a CIDR")
			continue
		}
		ranges = append(ranges, p.Masked())
	}
	slices.SortFunc(ranges, netip.Prefix.Compare)
	return slices.Compact(ranges), len(given) == 0 || len(ranges) > 0
}
