// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"fmt"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/weft-mesh/weft/internal/state"
)

// frontend is where clients connect to.
type frontend struct {
	at       netip.AddrPort
	port     corev1.ServicePort
	external bool
}

// frontends are those that a process of this node can use.
func frontends(s *state.Service) (out []frontend) {
	for _, p := range s.Spec.Ports {
		add := func(a string, port int32, external bool) {
			out = append(out, frontend{netip.AddrPortFrom(netip.MustParseAddr(a), uint16(port)), p, external})
		}
		for _, ip := range s.Spec.ClusterIPs {
			add(ip, p.Port, false)
		}
		for _, ip := range s.Spec.ExternalIPs {
			add(ip, p.Port, true)
		}
		if s.Spec.Type != corev1.ServiceTypeClusterIP {
			for _, a := range nodeAddrs {
				add(a.String(), p.NodePort, true)
			}
		}
		if s.Spec.Type == corev1.ServiceTypeLoadBalancer {
			for _, i := range s.Status.LoadBalancer.Ingress {
				add(i.IP, p.Port, true)
			}
		}
	}
	return out
}

func isTrue(b *bool, otherwise bool) bool {
	if b == nil {
		return otherwise
	}
	return *b
}

// wanted reads the API: those that are ready; where none is, those that end but
// serve; internalTrafficPolicy Local leaves those of this node, for cluster IPs.
func (f frontend) wanted(o *object) map[netip.AddrPort]bool {
	ready, ending := map[netip.AddrPort]bool{}, map[netip.AddrPort]bool{}
	local := !f.external && *o.row.Spec.InternalTrafficPolicy == corev1.ServiceInternalTrafficPolicyLocal
	for _, row := range o.slices {
		for _, port := range row.Slice.Ports {
			if *port.Name != f.port.Name || *port.Protocol != f.port.Protocol || port.Port == nil {
				continue
			}
			for _, e := range row.Slice.Endpoints {
				a := netip.MustParseAddr(e.Addresses[0])
				if a.Is4() != f.at.Addr().Is4() || local && *e.NodeName != thisNode {
					continue
				}
				at := netip.AddrPortFrom(a, uint16(*port.Port))
				isReady := isTrue(e.Conditions.Ready, true)
				switch {
				case isReady:
					ready[at] = true
				case isTrue(e.Conditions.Serving, isReady) && isTrue(e.Conditions.Terminating, false):
					ending[at] = true
				}
			}
		}
	}
	if len(ready) > 0 {
		return ready
	}
	return ending
}

// mutate changes a Service, or its endpoints, or takes both away.
func (r *rig) mutate(name string) {
	r.Helper()
	before := r.world[name]
	var next *object
	switch {
	case before == nil:
		next = &object{row: r.service(name), slices: r.slices(name)}
	case r.random.IntN(8) == 0: // gone
	case r.random.IntN(3) == 0:
		next = &object{row: r.service(name), slices: before.slices}
	default:
		next = &object{row: before.row, slices: r.slices(name)}
	}
	r.write(before, next)
	if next == nil {
		delete(r.world, name)
	} else {
		r.world[name] = next
	}
}

// write makes the tables hold next in place of before, in one transaction.
func (r *rig) write(before, next *object) {
	r.Helper()
	txn := r.tables.DB.WriteTxn(r.tables.Services, r.tables.Endpoints)
	if before != nil {
		if next == nil {
			_, _, err := r.tables.Services.Delete(txn, before.row)
			r.must(err)
		}
		for name, s := range before.slices {
			if next == nil || next.slices[name] == nil {
				_, _, err := r.tables.Endpoints.Delete(txn, s)
				r.must(err)
			}
		}
	}
	if next != nil {
		if before == nil || before.row != next.row {
			_, _, err := r.tables.Services.Insert(txn, next.row)
			r.must(err)
		}
		for name, s := range next.slices {
			if before != nil && before.slices[name] == s {
				continue
			}
			_, _, err := r.tables.Endpoints.Insert(txn, s)
			r.must(err)
		}
	}
	txn.Commit()
}

func pick[T any](r *rig, from ...T) T { return from[r.random.IntN(len(from))] }

// service is a random one; the name decides its addresses, so that none has two.
func (r *rig) service(name string) *state.Service {
	n := int(name[1] - '0')
	s := &corev1.ServiceSpec{
		Type:                  pick(r, corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort, corev1.ServiceTypeLoadBalancer),
		ClusterIPs:            []string{fmt.Sprintf("10.96.0.%d", n+1), fmt.Sprintf("fd00:10:96::%x", n+1)},
		IPFamilies:            []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol},
		SessionAffinity:       pick(r, corev1.ServiceAffinityNone, corev1.ServiceAffinityNone, corev1.ServiceAffinityClientIP),
		InternalTrafficPolicy: new(pick(r, corev1.ServiceInternalTrafficPolicyCluster, corev1.ServiceInternalTrafficPolicyLocal)),
	}
	s.ClusterIP = s.ClusterIPs[0]
	if s.SessionAffinity == corev1.ServiceAffinityClientIP {
		s.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: new(int32(10800))}}
	}
	if s.Type != corev1.ServiceTypeClusterIP {
		s.ExternalTrafficPolicy = pick(r, corev1.ServiceExternalTrafficPolicyCluster, corev1.ServiceExternalTrafficPolicyLocal)
	}
	if r.random.IntN(3) == 0 {
		s.ExternalIPs = []string{fmt.Sprintf("198.51.100.%d", n+1)}
	}
	status := &corev1.ServiceStatus{}
	if s.Type == corev1.ServiceTypeLoadBalancer {
		status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: fmt.Sprintf("172.31.0.%d", n+1)}, {IP: fmt.Sprintf("fd00:172:31::%x", n+1)}}
	}
	for i, protocol := range []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP} {
		if r.random.IntN(4) == 0 && i > 0 {
			continue
		}
		p := corev1.ServicePort{Name: string("ab"[i]), Protocol: protocol, Port: int32(pick(r, 80, 443))}
		if s.Type != corev1.ServiceTypeClusterIP {
			p.NodePort = int32(30000 + 10*n + i)
		}
		s.Ports = append(s.Ports, p)
	}
	return &state.Service{Namespace: "default", Name: name, Spec: s, Status: status}
}

// slices are random ones: one for each family, or two with parts of the endpoints
// and another target port.
func (r *rig) slices(service string) map[string]*state.Endpoint {
	out := map[string]*state.Endpoint{}
	for family, kind := range []discoveryv1.AddressType{discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6} {
		perm := r.random.Perm(backends) // no endpoint is in two slices
		for part := range 1 + r.random.IntN(2) {
			name := fmt.Sprintf("%s-%s-%d", service, kind, part)
			port := int32(pick(r, 8080, 9090))
			s := &discoveryv1.EndpointSlice{
				ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, AddressType: kind,
				Ports: []discoveryv1.EndpointPort{
					{Name: new("a"), Protocol: new(corev1.ProtocolTCP), Port: &port},
					{Name: new("b"), Protocol: new(corev1.ProtocolUDP), Port: &port},
				},
			}
			var mine []int
			mine, perm = perm[:r.random.IntN(3)], perm[2:]
			for _, n := range mine {
				s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
					Addresses: []string{backendAddr(family, n).String()}, NodeName: new(pick(r, thisNode, "node2")), Conditions: r.conditions(),
				})
			}
			out[name] = &state.Endpoint{Namespace: "default", Name: name, Service: service, Slice: s}
		}
	}
	return out
}

// conditions are ready, not said, not ready, ending and serving, or ending.
func (r *rig) conditions() discoveryv1.EndpointConditions {
	c := func(ready, serving, terminating bool) discoveryv1.EndpointConditions {
		return discoveryv1.EndpointConditions{Ready: &ready, Serving: &serving, Terminating: &terminating}
	}
	return pick(r, c(true, true, false), c(true, true, false), discoveryv1.EndpointConditions{}, c(false, false, false), c(false, true, true), c(false, false, true))
}
