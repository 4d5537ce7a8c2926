// SPDX-License-Identifier: Apache-2.0

package model

import (
	"net/netip"

	corev1 "k8s.io/api/core/v1"
)

// Outside returns the addresses that the network outside of the cluster leads to
// its nodes, those of load balancers and external IPs, each with the nodes that
// it leads to: all, or, where externalTrafficPolicy is Local, those that have a
// ready endpoint, as long as there is one.
func (c *Cluster) Outside() map[netip.Addr][]Node {
	out := map[netip.Addr][]Node{}
	for _, id := range c.IDs("Service") {
		svc, ok := c.objects[id].(*corev1.Service)
		if !ok || !accessible(&svc.Spec) {
			continue
		}
		var nodes []Node
		for _, ip := range outsideIPs(svc) {
			if c.isNode(ip) {
				continue
			}
			if nodes == nil {
				nodes = c.answering(svc)
			}
			out[ip] = nodes
		}
	}
	return out
}

func outsideIPs(svc *corev1.Service) []netip.Addr {
	texts := svc.Spec.ExternalIPs
	for _, in := range svc.Status.LoadBalancer.Ingress {
		if in.IPMode == nil || *in.IPMode == corev1.LoadBalancerIPModeVIP {
			texts = append(texts[:len(texts):len(texts)], in.IP)
		}
	}
	var ips []netip.Addr
	for _, text := range texts {
		if ip, err := netip.ParseAddr(text); err == nil {
			ips = append(ips, ip)
		}
	}
	return ips
}

func (c *Cluster) isNode(ip netip.Addr) bool {
	for _, n := range c.cfg.Nodes {
		for _, a := range n.IPs {
			if a == ip {
				return true
			}
		}
	}
	return false
}

// answering are the nodes that a load balancer of svc finds healthy.
func (c *Cluster) answering(svc *corev1.Service) []Node {
	if svc.Spec.ExternalTrafficPolicy != corev1.ServiceExternalTrafficPolicyLocal {
		return c.cfg.Nodes
	}
	ready := map[string]bool{}
	for _, s := range c.slicesOf(svc) {
		for _, e := range s.Endpoints {
			if *e.Conditions.Ready {
				ready[*e.NodeName] = true
			}
		}
	}
	var nodes []Node
	for _, n := range c.cfg.Nodes {
		if ready[n.Name] {
			nodes = append(nodes, n)
		}
	}
	if nodes == nil {
		return c.cfg.Nodes
	}
	return nodes
}
