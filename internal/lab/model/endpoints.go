// SPDX-License-Identifier: Apache-2.0

package model

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"
)

const (
	// maxEndpoints is how many endpoints the controller puts into one slice.
	maxEndpoints = 100
	// managedBy is what the controller calls itself.
	managedBy = "endpointslice-controller.k8s.io"
)

// packing says which endpoint of a Service is in which of its slices. An
// endpoint stays where it is as long as its ports do, so that a change of one
// endpoint is a change of one slice.
type packing struct {
	group map[string]string // family and ports, by name of the slice
	at    map[string]string // name of the slice, by family and pod
}

// slot is an endpoint that is to be in some slice.
type slot struct {
	family   corev1.IPFamily
	key      string // of family and pod
	group    string // of family and ports
	ports    []discoveryv1.EndpointPort
	endpoint discoveryv1.Endpoint
}

// slicesOf computes the endpoint slices of a Service with a selector, as the
// endpointslice controller of Kubernetes does.
func (c *Cluster) slicesOf(svc *corev1.Service) []*discoveryv1.EndpointSlice {
	if len(svc.Spec.Selector) == 0 || svc.Spec.Type == corev1.ServiceTypeExternalName {
		return nil
	}
	var slots []slot
	sel := labels.SelectorFromSet(svc.Spec.Selector)
	for _, p := range c.Pods() {
		if p.Object.Namespace != svc.Namespace || !sel.Matches(labels.Set(p.Object.Labels)) || ended(p.Object) {
			continue
		}
		ports := endpointPorts(svc, p.Object)
		for _, family := range svc.Spec.IPFamilies {
			if ip := addressOf(p.Object, family); ip != "" {
				slots = append(slots, slot{
					family: family, key: string(family) + "|" + p.Key(), group: string(family) + portsKey(ports),
					ports: ports, endpoint: c.endpoint(svc, p, ip),
				})
			}
		}
	}
	return c.pack(svc, slots)
}

// pack puts endpoints into slices of at most maxEndpoints. A family without
// endpoints has one empty slice.
func (c *Cluster) pack(svc *corev1.Service, slots []slot) []*discoveryv1.EndpointSlice {
	before := c.packed[svc.Namespace+"/"+svc.Name]
	next := &packing{group: map[string]string{}, at: map[string]string{}}
	out := map[string]*discoveryv1.EndpointSlice{}
	put := func(name string, s slot) {
		if out[name] == nil {
			out[name] = newSlice(svc, s.family, name, s.ports)
			next.group[name] = s.group
		}
		out[name].Endpoints = append(out[name].Endpoints, s.endpoint)
		next.at[s.key] = name
	}
	var homeless []slot
	for _, s := range slots {
		if before != nil && before.at[s.key] != "" && before.group[before.at[s.key]] == s.group {
			put(before.at[s.key], s)
		} else {
			homeless = append(homeless, s)
		}
	}
	for _, s := range homeless {
		put(c.sliceName(svc, s, out, next), s)
	}
	for _, family := range svc.Spec.IPFamilies {
		empty := !slices.ContainsFunc(slots, func(s slot) bool { return s.family == family })
		if name := c.freeSliceName(svc, family, out); empty {
			out[name] = newSlice(svc, family, name, nil)
		}
	}
	c.packed[svc.Namespace+"/"+svc.Name] = next
	return slices.SortedFunc(maps.Values(out), func(a, b *discoveryv1.EndpointSlice) int { return strings.Compare(a.Name, b.Name) })
}

// sliceName is the fullest slice with the same ports that has room, or a new one.
func (c *Cluster) sliceName(svc *corev1.Service, s slot, out map[string]*discoveryv1.EndpointSlice, p *packing) string {
	best := ""
	for _, name := range slices.Sorted(maps.Keys(out)) {
		n := len(out[name].Endpoints)
		if p.group[name] == s.group && n < maxEndpoints && (best == "" || n > len(out[best].Endpoints)) {
			best = name
		}
	}
	if best == "" {
		return c.freeSliceName(svc, s.family, out)
	}
	return best
}

// freeSliceName is SERVICE-ipv4, or else SERVICE-ipv4-2 and so on, one that
// neither the Service's other slices have nor one that somebody wrote.
func (c *Cluster) freeSliceName(svc *corev1.Service, family corev1.IPFamily, out map[string]*discoveryv1.EndpointSlice) string {
	base := svc.Name + "-" + strings.ToLower(string(family))
	name := base
	for n := 2; out[name] != nil || c.objects[sliceID(svc.Namespace, name)] != nil; n++ {
		name = fmt.Sprintf("%s-%d", base, n)
	}
	return name
}

func sliceID(namespace, name string) ID {
	return ID{Group: discoveryv1.GroupName, Kind: "EndpointSlice", Namespace: namespace, Name: name}
}

func newSlice(svc *corev1.Service, family corev1.IPFamily, name string, ports []discoveryv1.EndpointPort) *discoveryv1.EndpointSlice {
	l := maps.Clone(svc.Labels)
	if l == nil {
		l = map[string]string{}
	}
	l[discoveryv1.LabelServiceName] = svc.Name
	l[discoveryv1.LabelManagedBy] = managedBy
	if delete(l, corev1.IsHeadlessService); svc.Spec.ClusterIP == corev1.ClusterIPNone {
		l[corev1.IsHeadlessService] = ""
	}
	return &discoveryv1.EndpointSlice{
		TypeMeta:    typeMeta("discovery.k8s.io/v1", "EndpointSlice"),
		ObjectMeta:  metav1.ObjectMeta{Namespace: svc.Namespace, Name: name, Labels: l},
		AddressType: discoveryv1.AddressType(family),
		Endpoints:   []discoveryv1.Endpoint{},
		Ports:       ports,
	}
}

func (c *Cluster) endpoint(svc *corev1.Service, p *Pod, ip string) discoveryv1.Endpoint {
	serving := p.Ready()
	e := discoveryv1.Endpoint{
		Addresses: []string{ip},
		Conditions: discoveryv1.EndpointConditions{
			Ready:       ptr(serving && !p.Deleting || svc.Spec.PublishNotReadyAddresses),
			Serving:     ptr(serving),
			Terminating: ptr(p.Deleting),
		},
		NodeName:  ptr(p.Object.Spec.NodeName),
		TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: p.Object.Namespace, Name: p.Object.Name, UID: p.Object.UID},
	}
	if zone := c.nodeLabels(p.Object.Spec.NodeName)[corev1.LabelTopologyZone]; zone != "" {
		e.Zone = ptr(zone)
	}
	if p.Object.Spec.Hostname != "" && p.Object.Spec.Subdomain == svc.Name {
		e.Hostname = ptr(p.Object.Spec.Hostname)
	}
	e.Hints = hints(svc, &e)
	return e
}

// hints say for whom a ready endpoint is, where the Service prefers a short way.
func hints(svc *corev1.Service, e *discoveryv1.Endpoint) *discoveryv1.EndpointHints {
	if svc.Spec.TrafficDistribution == nil || !*e.Conditions.Ready || e.Zone == nil && *svc.Spec.TrafficDistribution != corev1.ServiceTrafficDistributionPreferSameNode {
		return nil
	}
	h := &discoveryv1.EndpointHints{}
	if e.Zone != nil {
		h.ForZones = []discoveryv1.ForZone{{Name: *e.Zone}}
	}
	if *svc.Spec.TrafficDistribution == corev1.ServiceTrafficDistributionPreferSameNode {
		h.ForNodes = []discoveryv1.ForNode{{Name: *e.NodeName}}
	}
	return h
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
