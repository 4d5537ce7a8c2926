// SPDX-License-Identifier: Apache-2.0

package manifest

import (
	"fmt"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// checkService fills in the type, the traffic policies, the affinity, the list
// of cluster IPs, and protocol and target of each port.
func checkService(p *problems, s *corev1.Service) {
	spec, path := &s.Spec, field.NewPath("spec")
	serviceDefaults(spec)
	oneOf(p, path.Child("type"), spec.Type, corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort,
		corev1.ServiceTypeLoadBalancer, corev1.ServiceTypeExternalName)
	oneOf(p, path.Child("sessionAffinity"), spec.SessionAffinity, corev1.ServiceAffinityNone, corev1.ServiceAffinityClientIP)
	if spec.ExternalTrafficPolicy != "" {
		oneOf(p, path.Child("externalTrafficPolicy"), spec.ExternalTrafficPolicy, corev1.ServiceExternalTrafficPolicyCluster,
			corev1.ServiceExternalTrafficPolicyLocal)
	}
	oneOf(p, path.Child("internalTrafficPolicy"), *spec.InternalTrafficPolicy, corev1.ServiceInternalTrafficPolicyCluster,
		corev1.ServiceInternalTrafficPolicyLocal)
	if a := spec.SessionAffinityConfig; a != nil && a.ClientIP != nil && a.ClientIP.TimeoutSeconds != nil {
		const day = 86400
		if t := *a.ClientIP.TimeoutSeconds; t < 1 || t > day {
			p.add(path.Child("sessionAffinityConfig", "clientIP", "timeoutSeconds"), t, fmt.Sprintf("1 to %d seconds", day))
		}
	}
	checkLabels(p, path.Child("selector"), spec.Selector)
	checkServiceAddresses(p, path, spec)
	checkServicePorts(p, path, spec)
	if spec.Type == corev1.ServiceTypeExternalName {
		p.text(path.Child("externalName"), spec.ExternalName, validation.IsDNS1123Subdomain)
	}
	for i, in := range s.Status.LoadBalancer.Ingress {
		checkIngress(p, field.NewPath("status", "loadBalancer", "ingress").Index(i), in)
	}
}

// checkIngress checks an address of a load balancer.
func checkIngress(p *problems, path *field.Path, in corev1.LoadBalancerIngress) {
	if in.IP != "" {
		checkAddr(p, path.Child("ip"), in.IP)
	}
	if in.IPMode != nil {
		oneOf(p, path.Child("ipMode"), *in.IPMode, corev1.LoadBalancerIPModeVIP, corev1.LoadBalancerIPModeProxy)
	}
}

func serviceDefaults(spec *corev1.ServiceSpec) {
	if spec.Type == "" {
		spec.Type = corev1.ServiceTypeClusterIP
	}
	if spec.SessionAffinity == "" {
		spec.SessionAffinity = corev1.ServiceAffinityNone
	}
	if spec.InternalTrafficPolicy == nil {
		cluster := corev1.ServiceInternalTrafficPolicyCluster
		spec.InternalTrafficPolicy = &cluster
	}
	if spec.ExternalTrafficPolicy == "" && (spec.Type == corev1.ServiceTypeNodePort || spec.Type == corev1.ServiceTypeLoadBalancer) {
		spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyCluster
	}
	if len(spec.ClusterIPs) == 0 && spec.ClusterIP != "" {
		spec.ClusterIPs = []string{spec.ClusterIP}
	}
	if spec.ClusterIP == "" && len(spec.ClusterIPs) > 0 {
		spec.ClusterIP = spec.ClusterIPs[0]
	}
	for i := range spec.Ports {
		if port := &spec.Ports[i]; port.TargetPort == (intstr.IntOrString{}) {
			port.TargetPort = intstr.FromInt32(port.Port)
		}
	}
}

func checkServiceAddresses(p *problems, path *field.Path, spec *corev1.ServiceSpec) {
	if len(spec.ClusterIPs) > 0 && spec.ClusterIP != spec.ClusterIPs[0] {
		p.add(path.Child("clusterIP"), spec.ClusterIP, "the first of clusterIPs, "+spec.ClusterIPs[0])
	}
	headless := spec.ClusterIP == corev1.ClusterIPNone
	var families []bool
	for i, ip := range spec.ClusterIPs {
		if headless && i == 0 {
			continue
		}
		families = append(families, checkAddr(p, path.Child("clusterIPs").Index(i), ip).Is4())
	}
	if headless && len(spec.ClusterIPs) > 1 {
		p.add(path.Child("clusterIPs"), spec.ClusterIPs, "nothing beside None")
	} else if p.ok() {
		checkFamilies(p, path.Child("clusterIPs"), spec.ClusterIPs, families)
	}
	for i, ip := range spec.ExternalIPs {
		checkAddr(p, path.Child("externalIPs").Index(i), ip)
	}
	for i, c := range spec.LoadBalancerSourceRanges {
		checkPrefix(p, path.Child("loadBalancerSourceRanges").Index(i), c)
	}
	for i, f := range spec.IPFamilies {
		oneOf(p, path.Child("ipFamilies").Index(i), f, corev1.IPv4Protocol, corev1.IPv6Protocol)
	}
}

func checkServicePorts(p *problems, path *field.Path, spec *corev1.ServiceSpec) {
	needsPorts := spec.Type != corev1.ServiceTypeExternalName && spec.ClusterIP != corev1.ClusterIPNone
	if len(spec.Ports) == 0 && needsPorts {
		p.missing(path.Child("ports"), "at least one port")
	}
	reachable := spec.Type == corev1.ServiceTypeNodePort || spec.Type == corev1.ServiceTypeLoadBalancer
	var names, pairs []string
	for i := range spec.Ports {
		port, at := &spec.Ports[i], path.Child("ports").Index(i)
		checkPort(p, at.Child("port"), port.Port)
		checkProtocol(p, at.Child("protocol"), &port.Protocol)
		if port.TargetPort != intstr.FromInt32(port.Port) {
			checkPortOrName(p, at.Child("targetPort"), port.TargetPort)
		}
		switch {
		case port.NodePort != 0 && !reachable:
			p.add(at.Child("nodePort"), port.NodePort, "no nodePort in a Service of type "+string(spec.Type))
		case port.NodePort != 0:
			checkPort(p, at.Child("nodePort"), port.NodePort)
		}
		if port.Name == "" && len(spec.Ports) > 1 {
			p.missing(at.Child("name"), "a name for each of several ports")
		} else if port.Name != "" {
			p.text(at.Child("name"), port.Name, validation.IsDNS1123Label)
		}
		names = append(names, port.Name)
		pairs = append(pairs, fmt.Sprintf("%d/%s", port.Port, port.Protocol))
	}
	unique(p, func(i int) *field.Path { return path.Child("ports").Index(i).Child("name") }, names)
	unique(p, func(i int) *field.Path { return path.Child("ports").Index(i).Child("port") }, pairs)
}

// checkEndpointSlice fills in the protocol of each port.
func checkEndpointSlice(p *problems, s *discoveryv1.EndpointSlice) {
	oneOf(p, field.NewPath("addressType"), s.AddressType, discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6, discoveryv1.AddressTypeFQDN)
	for i, e := range s.Endpoints {
		at := field.NewPath("endpoints").Index(i).Child("addresses")
		if len(e.Addresses) == 0 {
			p.missing(at, "at least one address")
		}
		for j, a := range e.Addresses {
			checkEndpointAddress(p, at.Index(j), a, s.AddressType)
		}
	}
	for i := range s.Ports {
		port, at := &s.Ports[i], field.NewPath("ports").Index(i)
		if port.Protocol == nil {
			tcp := corev1.ProtocolTCP
			port.Protocol = &tcp
		}
		checkProtocol(p, at.Child("protocol"), port.Protocol)
		if port.Port != nil {
			checkPort(p, at.Child("port"), *port.Port)
		}
	}
}

func checkEndpointAddress(p *problems, path *field.Path, s string, t discoveryv1.AddressType) {
	if t == discoveryv1.AddressTypeFQDN {
		p.text(path, s, validation.IsDNS1123Subdomain)
		return
	}
	a := checkAddr(p, path, s)
	if a.IsValid() && a.Is4() != (t == discoveryv1.AddressTypeIPv4) {
		p.add(path, s, fmt.Sprintf("an %s address, as addressType says", t))
	}
}

// checkNetworkPolicy fills in the policy types and the protocol of each port.
func checkNetworkPolicy(p *problems, np *networkingv1.NetworkPolicy) {
	spec, path := &np.Spec, field.NewPath("spec")
	checkSelector(p, path.Child("podSelector"), &spec.PodSelector)
	if len(spec.PolicyTypes) == 0 {
		spec.PolicyTypes = []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}
		if len(spec.Egress) > 0 {
			spec.PolicyTypes = append(spec.PolicyTypes, networkingv1.PolicyTypeEgress)
		}
	}
	for i, t := range spec.PolicyTypes {
		oneOf(p, path.Child("policyTypes").Index(i), t, networkingv1.PolicyTypeIngress, networkingv1.PolicyTypeEgress)
	}
	for i := range spec.Ingress {
		at := path.Child("ingress").Index(i)
		checkPolicyPorts(p, at.Child("ports"), spec.Ingress[i].Ports)
		checkPeers(p, at.Child("from"), spec.Ingress[i].From)
	}
	for i := range spec.Egress {
		at := path.Child("egress").Index(i)
		checkPolicyPorts(p, at.Child("ports"), spec.Egress[i].Ports)
		checkPeers(p, at.Child("to"), spec.Egress[i].To)
	}
}

func checkPolicyPorts(p *problems, path *field.Path, ports []networkingv1.NetworkPolicyPort) {
	for i := range ports {
		port, at := &ports[i], path.Index(i)
		if port.Protocol == nil {
			tcp := corev1.ProtocolTCP
			port.Protocol = &tcp
		}
		checkProtocol(p, at.Child("protocol"), port.Protocol)
		if port.Port != nil {
			checkPortOrName(p, at.Child("port"), *port.Port)
		}
		if port.EndPort == nil {
			continue
		}
		checkPort(p, at.Child("endPort"), *port.EndPort)
		switch {
		case port.Port == nil || port.Port.Type != intstr.Int:
			p.add(at.Child("endPort"), *port.EndPort, "a number in port beside it")
		case *port.EndPort < port.Port.IntVal:
			p.add(at.Child("endPort"), *port.EndPort, fmt.Sprintf("no less than port, %d", port.Port.IntVal))
		}
	}
}

func checkPeers(p *problems, path *field.Path, peers []networkingv1.NetworkPolicyPeer) {
	for i, peer := range peers {
		at := path.Index(i)
		checkSelector(p, at.Child("podSelector"), peer.PodSelector)
		checkSelector(p, at.Child("namespaceSelector"), peer.NamespaceSelector)
		switch {
		case peer.IPBlock == nil && peer.PodSelector == nil && peer.NamespaceSelector == nil:
			p.missing(at, "ipBlock, podSelector or namespaceSelector")
		case peer.IPBlock != nil && (peer.PodSelector != nil || peer.NamespaceSelector != nil):
			p.say(at.Child("ipBlock"), "%s beside a selector: want either", show(peer.IPBlock.CIDR))
		case peer.IPBlock != nil:
			checkIPBlock(p, at.Child("ipBlock"), peer.IPBlock)
		}
	}
}

func checkIPBlock(p *problems, path *field.Path, b *networkingv1.IPBlock) {
	cidr := checkPrefix(p, path.Child("cidr"), b.CIDR)
	for i, s := range b.Except {
		at := path.Child("except").Index(i)
		if e := checkPrefix(p, at, s); e.IsValid() && cidr.IsValid() && !within(e, cidr) {
			p.add(at, s, "a CIDR strictly inside of "+b.CIDR)
		}
	}
}

// within is true where a is a proper part of b.
func within(a, b netip.Prefix) bool { return a.Bits() > b.Bits() && b.Contains(a.Addr()) }
