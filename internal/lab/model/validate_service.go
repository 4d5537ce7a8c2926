// SPDX-License-Identifier: Apache-2.0

package model

import (
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// validateService wants what an API server wants, beyond the form of each field.
func validateService(k *checker, svc *corev1.Service) {
	s := &svc.Spec
	if s.Type == corev1.ServiceTypeExternalName {
		validateExternalName(k, s)
	} else {
		validateFamilies(k, s)
		validateClusterIPs(k, s)
	}
	validateNodePorts(k, s)
	validatePolicies(k, s)
	validateBalancer(k, svc)
	for i, text := range s.ExternalIPs {
		if ip, err := netip.ParseAddr(text); err == nil && (ip.IsUnspecified() || ip.IsLoopback() || ip.IsLinkLocalUnicast() || ip.IsMulticast()) {
			k.fail(fmt.Sprintf("spec.externalIPs[%d]", i), text, "want an address of the network outside: not an unspecified, loopback, link-local or multicast one")
		}
	}
}

func validateExternalName(k *checker, s *corev1.ServiceSpec) {
	for field, set := range map[string]bool{
		"spec.clusterIP": s.ClusterIP != "" || len(s.ClusterIPs) > 0, "spec.ipFamilies": len(s.IPFamilies) > 0, "spec.ipFamilyPolicy": s.IPFamilyPolicy != nil,
	} {
		if set {
			k.fail(field, "", "want no such field in a Service of type ExternalName, which has no address")
		}
	}
}

func validateFamilies(k *checker, s *corev1.ServiceSpec) {
	if p := s.IPFamilyPolicy; p != nil && *p != corev1.IPFamilyPolicySingleStack && *p != corev1.IPFamilyPolicyPreferDualStack && *p != corev1.IPFamilyPolicyRequireDualStack {
		k.fail("spec.ipFamilyPolicy", string(*p), "want one of SingleStack, PreferDualStack, RequireDualStack")
	}
	single := s.IPFamilyPolicy != nil && *s.IPFamilyPolicy == corev1.IPFamilyPolicySingleStack
	switch n := len(s.IPFamilies); {
	case n > 2 || n == 2 && s.IPFamilies[0] == s.IPFamilies[1]:
		k.fail("spec.ipFamilies", fmt.Sprint(s.IPFamilies), "want each family at most once")
	case n == 2 && single:
		k.fail("spec.ipFamilies", fmt.Sprint(s.IPFamilies), "want one family with ipFamilyPolicy SingleStack")
	}
	if len(s.ClusterIPs) > 1 && single {
		k.fail("spec.clusterIPs", fmt.Sprint(s.ClusterIPs), "want one address with ipFamilyPolicy SingleStack")
	}
}

func validateClusterIPs(k *checker, s *corev1.ServiceSpec) {
	if s.ClusterIP == corev1.ClusterIPNone && s.Type != corev1.ServiceTypeClusterIP {
		k.fail("spec.clusterIP", s.ClusterIP, "want an address, or no such field, in a Service of type %s", s.Type)
	}
	for i, ip := range givenIPs(s) {
		field := fmt.Sprintf("spec.clusterIPs[%d]", i)
		if len(givenIPs(s)) == 1 {
			field = "spec.clusterIP"
		}
		if i < len(s.IPFamilies) && s.IPFamilies[i] != familyOf(ip) {
			k.fail(field, ip.String(), "want an %s address, as ipFamilies says", s.IPFamilies[i])
		}
		if r := clusterRanges(); !r.contain(ip) {
			k.fail(field, ip.String(), "want an address of %s", r[familyOf(ip)])
		}
	}
}

func validateNodePorts(k *checker, s *corev1.ServiceSpec) {
	seen := map[string]bool{}
	for i, p := range s.Ports {
		field := fmt.Sprintf("spec.ports[%d].nodePort", i)
		validateNodePort(k, field, p.NodePort)
		pair := fmt.Sprintf("%d/%s", p.NodePort, p.Protocol)
		if p.NodePort != 0 && seen[pair] {
			k.fail(field, pair, "want each node port once for each protocol")
		}
		seen[pair] = true
	}
	validateNodePort(k, "spec.healthCheckNodePort", s.HealthCheckNodePort)
	if s.HealthCheckNodePort != 0 && !checksHealth(s) {
		k.fail("spec.healthCheckNodePort", fmt.Sprint(s.HealthCheckNodePort), "want no such field but with type LoadBalancer and externalTrafficPolicy Local")
	}
}

func validateNodePort(k *checker, field string, port int32) {
	if port != 0 && (port < firstNodePort || port > lastNodePort) {
		k.fail(field, fmt.Sprint(port), "want %d to %d", firstNodePort, lastNodePort)
	}
}

func validatePolicies(k *checker, s *corev1.ServiceSpec) {
	if s.ExternalTrafficPolicy != "" && !accessible(s) {
		k.fail("spec.externalTrafficPolicy", string(s.ExternalTrafficPolicy), "want no such field in a Service of type %s without externalIPs: nothing comes to it from outside", s.Type)
	}
	if s.SessionAffinityConfig != nil && s.SessionAffinity != corev1.ServiceAffinityClientIP {
		k.fail("spec.sessionAffinityConfig", "", "want no such field with sessionAffinity %s", s.SessionAffinity)
	}
	known := []string{corev1.ServiceTrafficDistributionPreferClose, corev1.ServiceTrafficDistributionPreferSameZone, corev1.ServiceTrafficDistributionPreferSameNode}
	if d := s.TrafficDistribution; d != nil && !slices.Contains(known, *d) {
		k.fail("spec.trafficDistribution", *d, "want one of %v", known)
	}
}

func validateBalancer(k *checker, svc *corev1.Service) {
	s := &svc.Spec
	if s.Type == corev1.ServiceTypeLoadBalancer {
		return
	}
	for field, set := range map[string]bool{
		"spec.loadBalancerSourceRanges": len(s.LoadBalancerSourceRanges) > 0, "spec.loadBalancerClass": s.LoadBalancerClass != nil,
		"spec.loadBalancerIP": s.LoadBalancerIP != "", "spec.allocateLoadBalancerNodePorts": s.AllocateLoadBalancerNodePorts != nil,
		"status.loadBalancer": len(svc.Status.LoadBalancer.Ingress) > 0,
	} {
		if set {
			k.fail(field, "", "want no such field in a Service of type %s: it is for LoadBalancer", s.Type)
		}
	}
}

// accessible tells whether a Service has addresses for the world outside.
func accessible(s *corev1.ServiceSpec) bool {
	return hasNodePorts(s) || s.Type == corev1.ServiceTypeClusterIP && len(s.ExternalIPs) > 0
}
