// SPDX-License-Identifier: Apache-2.0

package model

import (
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// Objects returns the cluster as its agents see it: nodes, namespaces, pods with
// their status, services and their endpoint slices, and everything that the lab
// just passes on. Deployments are not in it: their pods are.
func (c *Cluster) Objects() []Object {
	var out []Object
	for _, n := range c.cfg.Nodes {
		out = append(out, nodeObject(n))
	}
	ids := make([]ID, 0, len(c.objects))
	for id := range c.objects {
		ids = append(ids, id)
	}
	sortIDs(ids)
	for _, id := range ids {
		switch o := c.objects[id].(type) {
		case *corev1.Pod, *appsv1.Deployment:
		case *corev1.Service:
			out = append(out, o)
			for _, s := range c.slicesOf(o) {
				out = append(out, s)
			}
		default:
			out = append(out, o)
		}
	}
	for _, p := range c.Pods() {
		out = append(out, p.Object.DeepCopy())
	}
	return out
}

func (c *Cluster) nodeNames() string {
	names := make([]string, 0, len(c.cfg.Nodes))
	for _, n := range c.cfg.Nodes {
		names = append(names, n.Name)
	}
	return strings.Join(names, ", ")
}

func nodeLabels(name string) map[string]string {
	return map[string]string{
		corev1.LabelHostname:   name,
		corev1.LabelOSStable:   "linux",
		corev1.LabelArchStable: runtime.GOARCH,
	}
}

func nodeObject(n Node) *corev1.Node {
	o := &corev1.Node{TypeMeta: typeMeta("v1", "Node"), ObjectMeta: metav1.ObjectMeta{Name: n.Name, Labels: nodeLabels(n.Name)}}
	for _, p := range n.PodCIDRs {
		o.Spec.PodCIDRs = append(o.Spec.PodCIDRs, p.String())
	}
	o.Spec.PodCIDR = o.Spec.PodCIDRs[0]
	o.Status.Addresses = append(o.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeHostName, Address: n.Name})
	for _, ip := range n.IPs {
		o.Status.Addresses = append(o.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: ip.String()})
	}
	return o
}

// slicesOf computes the endpoint slices of a Service with a selector: one for
// each address family and set of target ports.
func (c *Cluster) slicesOf(svc *corev1.Service) []*discoveryv1.EndpointSlice {
	if len(svc.Spec.Selector) == 0 || svc.Spec.Type == corev1.ServiceTypeExternalName {
		return nil
	}
	sel := labels.SelectorFromSet(svc.Spec.Selector)
	byName := map[string]*discoveryv1.EndpointSlice{}
	var order []string
	for _, p := range c.Pods() {
		if p.Object.Namespace != svc.Namespace || !sel.Matches(labels.Set(p.Object.Labels)) || ended(p.Object) {
			continue
		}
		ports := endpointPorts(svc, p.Object)
		for _, family := range svc.Spec.IPFamilies {
			ip := addressOf(p.Object, family)
			if ip == "" {
				continue
			}
			key := string(family) + portsKey(ports)
			if byName[key] == nil {
				byName[key] = newSlice(svc, family, ports)
				order = append(order, key)
			}
			byName[key].Endpoints = append(byName[key].Endpoints, endpoint(svc, p, ip))
		}
	}
	return named(svc, byName, order)
}

// named gives the slices their names: SERVICE-ipv4, and SERVICE-ipv4-2 for
// another set of ports. A Service without endpoints has one empty slice for each
// family.
func named(svc *corev1.Service, byKey map[string]*discoveryv1.EndpointSlice, order []string) []*discoveryv1.EndpointSlice {
	var out []*discoveryv1.EndpointSlice
	for _, family := range svc.Spec.IPFamilies {
		n := 0
		for _, key := range order {
			s := byKey[key]
			if s.AddressType != discoveryv1.AddressType(family) {
				continue
			}
			if n++; n > 1 {
				s.Name = fmt.Sprintf("%s-%d", s.Name, n)
			}
			out = append(out, s)
		}
		if n == 0 {
			out = append(out, newSlice(svc, family, nil))
		}
	}
	return out
}

func newSlice(svc *corev1.Service, family corev1.IPFamily, ports []discoveryv1.EndpointPort) *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{
		TypeMeta: typeMeta("discovery.k8s.io/v1", "EndpointSlice"),
		ObjectMeta: metav1.ObjectMeta{
			Namespace: svc.Namespace,
			Name:      svc.Name + "-" + strings.ToLower(string(family)),
			Labels: map[string]string{
				discoveryv1.LabelServiceName: svc.Name,
				discoveryv1.LabelManagedBy:   "lab.weft",
			},
		},
		AddressType: discoveryv1.AddressType(family),
		Endpoints:   []discoveryv1.Endpoint{},
		Ports:       ports,
	}
}

func endpoint(svc *corev1.Service, p *Pod, ip string) discoveryv1.Endpoint {
	serving := p.Ready()
	return discoveryv1.Endpoint{
		Addresses: []string{ip},
		Conditions: discoveryv1.EndpointConditions{
			Ready:       ptr(serving && !p.Deleting || svc.Spec.PublishNotReadyAddresses),
			Serving:     ptr(serving),
			Terminating: ptr(p.Deleting),
		},
		NodeName:  ptr(p.Object.Spec.NodeName),
		TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: p.Object.Namespace, Name: p.Object.Name, UID: p.Object.UID},
	}
}

func ended(p *corev1.Pod) bool {
	return p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed
}

func addressOf(p *corev1.Pod, family corev1.IPFamily) string {
	for _, ip := range p.Status.PodIPs {
		if a, err := netip.ParseAddr(ip.IP); err == nil && familyOf(a) == family {
			return ip.IP
		}
	}
	return ""
}

// endpointPorts resolves the target ports of svc on one pod; a named port that
// the pod does not have is left out.
func endpointPorts(svc *corev1.Service, p *corev1.Pod) []discoveryv1.EndpointPort {
	var ports []discoveryv1.EndpointPort
	for _, sp := range svc.Spec.Ports {
		port := sp.TargetPort.IntVal
		if sp.TargetPort.Type == intstr.String {
			port = namedPort(p, sp.TargetPort.StrVal, sp.Protocol)
		}
		if port == 0 {
			continue
		}
		ports = append(ports, discoveryv1.EndpointPort{Name: ptr(sp.Name), Port: ptr(port), Protocol: ptr(sp.Protocol), AppProtocol: sp.AppProtocol})
	}
	return ports
}

func namedPort(p *corev1.Pod, name string, protocol corev1.Protocol) int32 {
	for _, ct := range p.Spec.Containers {
		i := slices.IndexFunc(ct.Ports, func(cp corev1.ContainerPort) bool { return cp.Name == name && cp.Protocol == protocol })
		if i >= 0 {
			return ct.Ports[i].ContainerPort
		}
	}
	return 0
}

func portsKey(ports []discoveryv1.EndpointPort) string {
	var b strings.Builder
	for _, p := range ports {
		fmt.Fprintf(&b, "|%s/%d/%s", *p.Name, *p.Port, *p.Protocol)
	}
	return b.String()
}
