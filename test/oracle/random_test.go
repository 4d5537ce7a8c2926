// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

const (
	namespace = "shop"
	thisNode  = "node1"
	otherNode = "node2"
)

var zones = []string{"a", "b"}

// random makes objects that an API server would accept: few names and addresses,
// so that they meet often.
type random struct{ *rand.Rand }

func (r random) chance(percent int) bool { return r.IntN(100) < percent }

func pick[T any](r random, of ...T) T { return of[r.IntN(len(of))] }

// some returns a few of a list, in its order.
func some[T any](r random, of []T, percent int) (out []T) {
	for _, x := range of {
		if r.chance(percent) {
			out = append(out, x)
		}
	}
	return out
}

// key returns a key of a map, "" where it is empty.
func key[V any](r random, m map[string]V) string {
	if len(m) == 0 {
		return ""
	}
	return pick(r, slices.Sorted(maps.Keys(m))...)
}

func (r random) start() *objects {
	o := &objects{services: map[string]*corev1.Service{}, slices: map[string]*discoveryv1.EndpointSlice{}}
	o.node = &corev1.Node{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Node"}, ObjectMeta: metav1.ObjectMeta{Name: thisNode}}
	r.changeNode(o)
	return o
}

// change returns the objects a moment later, and what was done.
func (r random) change(before *objects) (*objects, []string) {
	o := &objects{before.node, maps.Clone(before.services), maps.Clone(before.slices)}
	var did []string
	for range 1 + r.IntN(3) {
		did = append(did, r.mutate(o))
	}
	return o, did
}

func (r random) mutate(o *objects) string {
	switch n := r.IntN(100); {
	case n < 4:
		r.changeNode(o)
		return "change the node"
	case n < 14 || len(o.services) == 0:
		return r.addService(o)
	case n < 18 || len(o.services) > 7:
		name := key(r, o.services)
		delete(o.services, name)
		return "delete Service " + name
	case n < 48:
		name := key(r, o.services)
		s := o.services[name].DeepCopy()
		did := r.changeService(o, s)
		r.fit(o, s)
		o.services[name] = s
		return did + " of Service " + name
	case n < 60 || len(o.slices) == 0:
		return r.addSlice(o)
	case n < 64 || len(o.slices) > 14:
		name := key(r, o.slices)
		delete(o.slices, name)
		return "delete EndpointSlice " + name
	case n < 70:
		return r.moveEndpoints(o)
	case n < 73:
		return r.hintAnew(o)
	}
	name := key(r, o.slices)
	s := o.slices[name].DeepCopy()
	did := r.changeSlice(o, s)
	o.slices[name] = s
	return did + " of EndpointSlice " + name
}

// changeNode changes what a node's Services depend on.
func (r random) changeNode(o *objects) {
	n := o.node.DeepCopy()
	n.Labels = map[string]string{}
	if zone := pick(r, "a", "b", "a", ""); zone != "" {
		n.Labels[corev1.LabelTopologyZone] = zone
	}
	n.Status.Addresses = nil
	as := nodeIPs[:2]
	if r.chance(40) {
		as = nodeIPs
	}
	for _, a := range as {
		n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a.String()})
	}
	o.node = n
}

func (r random) addService(o *objects) string {
	name := string(rune('a' + r.IntN(9)))
	did := "add Service "
	if o.services[name] != nil {
		did = "recreate Service "
	}
	s := &corev1.Service{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Service"}, ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: namespace}}
	delete(o.services, name)
	r.addresses(o, s)
	s.Spec.Type = pick(r, corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort, corev1.ServiceTypeLoadBalancer, corev1.ServiceTypeLoadBalancer)
	s.Spec.SessionAffinity = pick(r, corev1.ServiceAffinityNone, corev1.ServiceAffinityNone, corev1.ServiceAffinityClientIP)
	s.Spec.InternalTrafficPolicy = new(pick(r, corev1.ServiceInternalTrafficPolicyCluster, corev1.ServiceInternalTrafficPolicyCluster, corev1.ServiceInternalTrafficPolicyLocal))
	r.external(s)
	for range 1 + r.IntN(2) {
		r.addPort(o, s)
	}
	r.fit(o, s)
	o.services[name] = s
	if len(o.slices) < 12 && r.chance(70) {
		r.addSliceOf(o, name)
	}
	return did + name
}

// addresses gives a Service cluster IPs that no other one has.
func (r random) addresses(o *objects, s *corev1.Service) {
	var taken []string
	for _, other := range o.services {
		if other.Name != s.Name {
			taken = append(taken, other.Spec.ClusterIPs...)
		}
	}
	free := func(as []netip.Addr) string {
		for {
			if a := pick(r, as...).String(); !slices.Contains(taken, a) {
				return a
			}
		}
	}
	v4, v6 := free(clusterIPs[0]), free(clusterIPs[1])
	s.Spec.ClusterIPs = pick(r, []string{v4, v6}, []string{v4, v6}, []string{v6, v4}, []string{v4}, []string{v6})
	if r.chance(4) {
		s.Spec.ClusterIPs = []string{corev1.ClusterIPNone}
	}
	s.Spec.ClusterIP = s.Spec.ClusterIPs[0]
}

func (r random) external(s *corev1.Service) {
	s.Spec.ExternalTrafficPolicy = pick(r, corev1.ServiceExternalTrafficPolicyCluster, corev1.ServiceExternalTrafficPolicyLocal)
	s.Spec.ExternalIPs, s.Status.LoadBalancer.Ingress, s.Spec.LoadBalancerSourceRanges = nil, nil, nil
	all := flat(balancerIPs...)
	if r.chance(30) {
		for _, a := range some(r, all, 30) {
			s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, a.String())
		}
	}
	if r.chance(5) {
		s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, pick(r, clusterIPs[0]...).String())
	}
	for _, a := range some(r, all, 30) {
		in := corev1.LoadBalancerIngress{IP: a.String(), IPMode: pick(r, nil, nil, nil, new(corev1.LoadBalancerIPModeVIP), new(corev1.LoadBalancerIPModeProxy))}
		s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, in)
	}
	if r.chance(40) {
		s.Spec.LoadBalancerSourceRanges = some(r, []string{"198.51.100.0/24", "198.51.100.8/32", " 10.244.0.0/16", "2001:db8::/32", "2001:db8::7/128", "fd00::/8", "0.0.0.0/0", "::/0"}, 30)
	}
}

var portNames = []string{"web", "dns", "z"}

// addPort adds a port with a name and number of its own.
func (r random) addPort(o *objects, s *corev1.Service) {
	p := corev1.ServicePort{Name: pick(r, portNames...), Protocol: pick(r, corev1.ProtocolTCP, corev1.ProtocolUDP)}
	p.Port = int32(pick(r, servicePorts...))
	p.TargetPort = intstr.FromString(p.Name)
	same := func(q corev1.ServicePort) bool {
		return q.Name == p.Name || q.Port == p.Port && q.Protocol == p.Protocol
	}
	if !slices.ContainsFunc(s.Spec.Ports, same) {
		s.Spec.Ports = append(s.Spec.Ports, p)
	}
}

// fit makes a Service valid after a change: node ports that it has alone, and no
// fields of another type.
func (r random) fit(o *objects, s *corev1.Service) {
	open := s.Spec.Type == corev1.ServiceTypeNodePort || s.Spec.Type == corev1.ServiceTypeLoadBalancer
	taken := map[string]bool{}
	for _, other := range o.services {
		for _, p := range other.Spec.Ports {
			if other.Name != s.Name {
				taken[fmt.Sprint(p.NodePort, p.Protocol)] = true
			}
		}
	}
	for i := range s.Spec.Ports {
		p := &s.Spec.Ports[i]
		if p.NodePort == 0 && open && r.chance(80) {
			p.NodePort = int32(pick(r, nodePorts...))
		}
		if k := fmt.Sprint(p.NodePort, p.Protocol); !open || taken[k] {
			p.NodePort = 0
		} else {
			taken[k] = true
		}
	}
	if !open && len(s.Spec.ExternalIPs) == 0 {
		s.Spec.ExternalTrafficPolicy = ""
	} else if s.Spec.ExternalTrafficPolicy == "" {
		s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyCluster
	}
	if s.Spec.Type != corev1.ServiceTypeLoadBalancer {
		s.Status.LoadBalancer.Ingress, s.Spec.LoadBalancerSourceRanges = nil, nil
	}
	if s.Spec.ClusterIP == corev1.ClusterIPNone {
		s.Spec.Type = corev1.ServiceTypeClusterIP
		s.Status.LoadBalancer.Ingress, s.Spec.LoadBalancerSourceRanges = nil, nil
		for i := range s.Spec.Ports {
			s.Spec.Ports[i].NodePort = 0
		}
	}
	s.Spec.SessionAffinityConfig = nil
	if s.Spec.SessionAffinity == corev1.ServiceAffinityClientIP {
		s.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: new(int32(10800))}}
	}
}

func (r random) changeService(o *objects, s *corev1.Service) string {
	spec := &s.Spec
	switch r.IntN(12) {
	case 0:
		r.addresses(o, s)
		return "change addresses"
	case 1:
		spec.Type = pick(r, corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort, corev1.ServiceTypeLoadBalancer)
		return "change type"
	case 2, 3:
		spec.InternalTrafficPolicy = new(pick(r, corev1.ServiceInternalTrafficPolicyCluster, corev1.ServiceInternalTrafficPolicyLocal))
		return "change internalTrafficPolicy"
	case 4, 5:
		spec.ExternalTrafficPolicy = pick(r, corev1.ServiceExternalTrafficPolicyCluster, corev1.ServiceExternalTrafficPolicyLocal)
		return "change externalTrafficPolicy"
	case 6:
		spec.SessionAffinity = pick(r, corev1.ServiceAffinityNone, corev1.ServiceAffinityClientIP)
		return "change sessionAffinity"
	case 7:
		spec.PublishNotReadyAddresses = r.chance(30)
		return "change publishNotReadyAddresses"
	case 8:
		r.external(s)
		return "change external addresses"
	case 9:
		r.addPort(o, s)
		return "add a port"
	case 10:
		if len(spec.Ports) > 1 {
			i := r.IntN(len(spec.Ports))
			spec.Ports = slices.Delete(spec.Ports, i, i+1)
		}
		return "remove a port"
	}
	if r.chance(20) {
		s.Labels = pick(r, nil, nil, map[string]string{"service.kubernetes.io/service-proxy-name": "mesh"})
		return "change labels"
	}
	p := &spec.Ports[r.IntN(len(spec.Ports))]
	p.NodePort = 0 // fit gives another one
	return "change a node port"
}

func (r random) addSlice(o *objects) string { return r.addSliceOf(o, key(r, o.services)) }

func (r random) addSliceOf(o *objects, service string) string {
	name := fmt.Sprintf("%s-%d", service, r.IntN(4))
	if old := o.slices[name]; old != nil {
		service = old.Labels[discoveryv1.LabelServiceName]
	}
	s := &discoveryv1.EndpointSlice{
		TypeMeta:    metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
		ObjectMeta:  metav1.ObjectMeta{Name: name, Namespace: namespace, Labels: map[string]string{discoveryv1.LabelServiceName: service}},
		AddressType: pick(r, discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6),
	}
	delete(o.slices, name)
	r.slicePorts(o, s)
	for range r.IntN(6) {
		r.addEndpoint(o, s)
	}
	o.slices[name] = s
	return "write EndpointSlice " + name
}

// slicePorts are those of the Service, most of them.
func (r random) slicePorts(o *objects, s *discoveryv1.EndpointSlice) {
	s.Ports = nil
	for _, name := range portNames {
		for _, protocol := range []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP} {
			if r.chance(90) {
				s.Ports = append(s.Ports, discoveryv1.EndpointPort{Name: new(name), Protocol: new(protocol), Port: new(int32(pick(r, targetPorts...)))})
			}
		}
	}
}

// addEndpoint adds an address that the slice has not. What other slices of the
// Service say of its node and hints, this one says too.
func (r random) addEndpoint(o *objects, s *discoveryv1.EndpointSlice) {
	fam := 0
	if s.AddressType == discoveryv1.AddressTypeIPv6 {
		fam = 1
	}
	i := r.IntN(len(localPods) + len(remotePods))
	e := discoveryv1.Endpoint{NodeName: new(thisNode)}
	if i < len(localPods) {
		e.Addresses = []string{localPods[i][fam].String()}
	} else {
		e.Addresses, e.NodeName = []string{remotePods[i-len(localPods)][fam].String()}, new(otherNode)
	}
	if r.chance(5) {
		e.NodeName = nil
	}
	if slices.ContainsFunc(s.Endpoints, func(x discoveryv1.Endpoint) bool { return x.Addresses[0] == e.Addresses[0] }) {
		return
	}
	e.Conditions = r.conditions()
	if hinted := r.hinted(o, s); hinted || r.chance(10) {
		e.Hints = r.hints()
	}
	r.agree(o, s, &e)
	s.Endpoints = append(s.Endpoints, e)
}

// agree has e say what the Service's other slices do.
func (r random) agree(o *objects, s *discoveryv1.EndpointSlice, e *discoveryv1.Endpoint) {
	for _, name := range slices.Sorted(maps.Keys(o.slices)) {
		other := o.slices[name]
		if other.Name == s.Name || other.Labels[discoveryv1.LabelServiceName] != s.Labels[discoveryv1.LabelServiceName] {
			continue
		}
		for _, x := range other.Endpoints {
			if x.Addresses[0] == e.Addresses[0] {
				e.NodeName, e.Hints = x.NodeName, x.Hints
			}
		}
	}
}

func (r random) conditions() discoveryv1.EndpointConditions {
	yes, no := new(true), new(false)
	switch r.IntN(10) {
	case 0:
		return discoveryv1.EndpointConditions{}
	case 1, 2:
		return discoveryv1.EndpointConditions{Ready: no, Serving: yes, Terminating: yes}
	case 3:
		return discoveryv1.EndpointConditions{Ready: no, Serving: no, Terminating: pick(r, yes, no)}
	case 4:
		return discoveryv1.EndpointConditions{Ready: pick(r, nil, yes, no), Serving: pick(r, nil, yes, no), Terminating: pick(r, nil, yes, no)}
	}
	return discoveryv1.EndpointConditions{Ready: yes, Serving: yes, Terminating: no}
}

// hinted says whether the controller gives hints to the Service's endpoints.
func (r random) hinted(o *objects, s *discoveryv1.EndpointSlice) bool {
	return strings.ContainsAny(s.Labels[discoveryv1.LabelServiceName], "bdf") && r.chance(95)
}

func (r random) hints() *discoveryv1.EndpointHints {
	h := &discoveryv1.EndpointHints{}
	if r.chance(95) {
		h.ForZones = []discoveryv1.ForZone{{Name: pick(r, zones...)}}
	}
	if r.chance(40) {
		h.ForNodes = []discoveryv1.ForNode{{Name: pick(r, thisNode, otherNode)}}
	}
	return h
}

// hintAnew has the controller give other hints to all endpoints of a Service.
func (r random) hintAnew(o *objects) string {
	service := key(r, o.services)
	given := map[string]*discoveryv1.EndpointHints{}
	without := r.chance(30)
	for _, name := range slices.Sorted(maps.Keys(o.slices)) {
		if o.slices[name].Labels[discoveryv1.LabelServiceName] != service {
			continue
		}
		s := o.slices[name].DeepCopy()
		for i := range s.Endpoints {
			e := &s.Endpoints[i]
			if _, ok := given[e.Addresses[0]]; !ok && !without {
				given[e.Addresses[0]] = r.hints()
			}
			e.Hints = given[e.Addresses[0]]
		}
		o.slices[name] = s
	}
	return "change the hints of Service " + service
}

func (r random) changeSlice(o *objects, s *discoveryv1.EndpointSlice) string {
	if len(s.Endpoints) == 0 || r.chance(25) {
		r.addEndpoint(o, s)
		return "add an endpoint"
	}
	i := r.IntN(len(s.Endpoints))
	switch r.IntN(8) {
	case 0, 1:
		s.Endpoints = slices.Delete(s.Endpoints, i, i+1)
		return "remove an endpoint"
	case 2:
		r.slicePorts(o, s)
		return "change the ports"
	case 3:
		for j := range s.Endpoints {
			s.Endpoints[j].Conditions = discoveryv1.EndpointConditions{Ready: new(false), Serving: new(true), Terminating: new(true)}
		}
		return "terminate all endpoints"
	case 4:
		s.Endpoints = nil
		return "remove all endpoints"
	}
	s.Endpoints[i].Conditions = r.conditions()
	return "change an endpoint"
}

// moveEndpoints splits a slice, merges two, or gives one to another Service.
func (r random) moveEndpoints(o *objects) string {
	name := key(r, o.slices)
	s := o.slices[name].DeepCopy()
	o.slices[name] = s
	service := s.Labels[discoveryv1.LabelServiceName]
	if r.chance(20) {
		to := key(r, o.services)
		s.Labels[discoveryv1.LabelServiceName] = to
		s.Endpoints = slices.Clone(s.Endpoints)
		for i := range s.Endpoints {
			r.agree(o, s, &s.Endpoints[i])
		}
		return "give EndpointSlice " + name + " to Service " + to
	}
	half := len(s.Endpoints) / 2
	to := fmt.Sprintf("%s-%d", service, r.IntN(4))
	t := o.slices[to]
	switch {
	case to == name || len(s.Endpoints) < 2:
		return "nothing"
	case t == nil:
		t = s.DeepCopy()
		t.Name, t.Endpoints = to, slices.Clone(s.Endpoints[half:])
		s.Endpoints = s.Endpoints[:half:half]
		o.slices[to] = t
		return "split EndpointSlice " + name + ", half to " + to
	case t.AddressType != s.AddressType || t.Labels[discoveryv1.LabelServiceName] != service:
		return "nothing"
	}
	t = t.DeepCopy()
	for _, e := range s.Endpoints {
		if !slices.ContainsFunc(t.Endpoints, func(x discoveryv1.Endpoint) bool { return x.Addresses[0] == e.Addresses[0] }) {
			t.Endpoints = append(t.Endpoints, e)
		}
	}
	o.slices[to] = t
	delete(o.slices, name)
	return "merge EndpointSlice " + name + " into " + to
}
