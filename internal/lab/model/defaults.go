// SPDX-License-Identifier: Apache-2.0

package model

import (
	"maps"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// defaultGrace is how long, in seconds, a pod has between SIGTERM and SIGKILL
// where its manifest does not say.
const defaultGrace = 30

// fillDefaults sets what an API server would set and the lab acts on.
func fillDefaults(o Object) {
	switch o := o.(type) {
	case *corev1.Namespace:
		o.TypeMeta = typeMeta("v1", "Namespace")
		defaultNamespace(o)
	case *corev1.Pod:
		o.TypeMeta = typeMeta("v1", "Pod")
		o.Status = corev1.PodStatus{}
		defaultPodSpec(&o.Spec)
	case *appsv1.Deployment:
		o.TypeMeta = typeMeta("apps/v1", "Deployment")
		o.Status = appsv1.DeploymentStatus{}
		if o.Spec.Replicas == nil {
			o.Spec.Replicas = ptr(int32(1))
		}
		defaultPodSpec(&o.Spec.Template.Spec)
	case *corev1.Service:
		o.TypeMeta = typeMeta("v1", "Service")
		defaultService(o)
	}
}

func defaultNamespace(ns *corev1.Namespace) {
	labels := maps.Clone(ns.Labels)
	if labels == nil {
		labels = map[string]string{}
	}
	labels[corev1.LabelMetadataName] = ns.Name
	ns.Labels = labels
	ns.Status = corev1.NamespaceStatus{Phase: corev1.NamespaceActive}
}

func defaultPodSpec(s *corev1.PodSpec) {
	if s.RestartPolicy == "" {
		s.RestartPolicy = corev1.RestartPolicyAlways
	}
	if s.ServiceAccountName == "" {
		s.ServiceAccountName = "default"
	}
	s.DeprecatedServiceAccount = s.ServiceAccountName
	if s.TerminationGracePeriodSeconds == nil {
		s.TerminationGracePeriodSeconds = ptr(int64(defaultGrace))
	}
	for _, containers := range [][]corev1.Container{s.InitContainers, s.Containers} {
		for i := range containers {
			for j := range containers[i].Ports {
				if containers[i].Ports[j].Protocol == "" {
					containers[i].Ports[j].Protocol = corev1.ProtocolTCP
				}
			}
		}
	}
}

func defaultService(svc *corev1.Service) {
	s := &svc.Spec
	if s.Type == "" {
		s.Type = corev1.ServiceTypeClusterIP
	}
	if s.SessionAffinity == "" {
		s.SessionAffinity = corev1.ServiceAffinityNone
	}
	if s.SessionAffinity == corev1.ServiceAffinityClientIP && (s.SessionAffinityConfig == nil || s.SessionAffinityConfig.ClientIP == nil || s.SessionAffinityConfig.ClientIP.TimeoutSeconds == nil) {
		s.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: ptr(corev1.DefaultClientIPServiceAffinitySeconds)}}
	}
	if s.ExternalTrafficPolicy == "" && accessible(s) {
		s.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyCluster
	}
	if s.Type == corev1.ServiceTypeLoadBalancer && s.AllocateLoadBalancerNodePorts == nil {
		s.AllocateLoadBalancerNodePorts = ptr(true)
	}
	if s.Type == corev1.ServiceTypeExternalName {
		s.InternalTrafficPolicy = nil
	} else if s.InternalTrafficPolicy == nil {
		s.InternalTrafficPolicy = ptr(corev1.ServiceInternalTrafficPolicyCluster)
	}
	for i := range s.Ports {
		p := &s.Ports[i]
		if p.Protocol == "" {
			p.Protocol = corev1.ProtocolTCP
		}
		if p.TargetPort == (intstr.IntOrString{}) || p.TargetPort == intstr.FromString("") {
			p.TargetPort = intstr.FromInt32(p.Port)
		}
	}
	// An address of a load balancer is one that nodes answer for.
	for i := range svc.Status.LoadBalancer.Ingress {
		if in := &svc.Status.LoadBalancer.Ingress[i]; in.IP != "" && in.IPMode == nil {
			in.IPMode = ptr(corev1.LoadBalancerIPModeVIP)
		}
	}
}

func ptr[T any](v T) *T { return &v }
