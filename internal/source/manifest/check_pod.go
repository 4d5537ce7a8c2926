// SPDX-License-Identifier: Apache-2.0

package manifest

import (
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// hostPortRefusal is what a hostPort gets. Only the form that Kubernetes itself
// fills in for host-network pods (hostPort = containerPort) means nothing and
// passes.
const hostPortRefusal = "hostPort is not supported; use a Service of type NodePort or hostNetwork"

func checkNode(p *problems, n *corev1.Node) {
	spec := field.NewPath("spec")
	switch {
	case len(n.Spec.PodCIDRs) == 0 && n.Spec.PodCIDR != "":
		n.Spec.PodCIDRs = []string{n.Spec.PodCIDR}
	case n.Spec.PodCIDR != "" && n.Spec.PodCIDR != n.Spec.PodCIDRs[0]:
		p.add(spec.Child("podCIDR"), n.Spec.PodCIDR, "the first of podCIDRs, "+n.Spec.PodCIDRs[0])
	}
	var families []bool
	for i, c := range n.Spec.PodCIDRs {
		families = append(families, checkPrefix(p, spec.Child("podCIDRs").Index(i), c).Addr().Is4())
	}
	if p.ok() {
		checkFamilies(p, spec.Child("podCIDRs"), n.Spec.PodCIDRs, families)
	}
	for i, a := range n.Status.Addresses {
		at := field.NewPath("status", "addresses").Index(i)
		if a.Type == corev1.NodeInternalIP || a.Type == corev1.NodeExternalIP {
			checkAddr(p, at.Child("address"), a.Address)
		}
		oneOf(p, at.Child("type"), a.Type, corev1.NodeInternalIP, corev1.NodeExternalIP, corev1.NodeHostName,
			corev1.NodeInternalDNS, corev1.NodeExternalDNS)
	}
}

// checkNamespace gives the namespace the label that Kubernetes gives it.
func checkNamespace(p *problems, n *corev1.Namespace) {
	if v, ok := n.Labels[corev1.LabelMetadataName]; ok && v != n.Name {
		p.add(field.NewPath("metadata", "labels").Key(corev1.LabelMetadataName), v, "the name of the namespace, "+n.Name)
	}
	if n.Labels == nil {
		n.Labels = map[string]string{}
	}
	n.Labels[corev1.LabelMetadataName] = n.Name
}

func checkPod(p *problems, pod *corev1.Pod) {
	checkPodSpec(p, field.NewPath("spec"), &pod.Spec)
	status := field.NewPath("status")
	if pod.Status.Phase != "" {
		oneOf(p, status.Child("phase"), pod.Status.Phase, corev1.PodPending, corev1.PodRunning, corev1.PodSucceeded,
			corev1.PodFailed, corev1.PodUnknown)
	}
	switch {
	case len(pod.Status.PodIPs) == 0 && pod.Status.PodIP != "":
		pod.Status.PodIPs = []corev1.PodIP{{IP: pod.Status.PodIP}}
	case pod.Status.PodIP != "" && pod.Status.PodIP != pod.Status.PodIPs[0].IP:
		p.add(status.Child("podIP"), pod.Status.PodIP, "the first of podIPs, "+pod.Status.PodIPs[0].IP)
	}
	var families []bool
	var ips []string
	for i, ip := range pod.Status.PodIPs {
		families = append(families, checkAddr(p, status.Child("podIPs").Index(i).Child("ip"), ip.IP).Is4())
		ips = append(ips, ip.IP)
	}
	if p.ok() {
		checkFamilies(p, status.Child("podIPs"), ips, families)
	}
}

// checkPodSpec fills in the service account and the protocols of ports.
func checkPodSpec(p *problems, path *field.Path, spec *corev1.PodSpec) {
	if spec.ServiceAccountName == "" {
		spec.ServiceAccountName = spec.DeprecatedServiceAccount
	}
	if spec.ServiceAccountName == "" {
		spec.ServiceAccountName = "default"
	}
	p.text(path.Child("serviceAccountName"), spec.ServiceAccountName, validation.IsDNS1123Subdomain)
	if spec.NodeName != "" {
		p.text(path.Child("nodeName"), spec.NodeName, validation.IsDNS1123Subdomain)
	}
	checkLabels(p, path.Child("nodeSelector"), spec.NodeSelector)
	if spec.RestartPolicy != "" {
		oneOf(p, path.Child("restartPolicy"), spec.RestartPolicy, corev1.RestartPolicyAlways, corev1.RestartPolicyOnFailure,
			corev1.RestartPolicyNever)
	}
	if len(spec.Containers) == 0 {
		p.missing(path.Child("containers"), "at least one container")
	}
	var names []string
	for i := range spec.InitContainers {
		checkContainer(p, path.Child("initContainers").Index(i), &spec.InitContainers[i], spec.HostNetwork)
		names = append(names, spec.InitContainers[i].Name)
	}
	for i := range spec.Containers {
		checkContainer(p, path.Child("containers").Index(i), &spec.Containers[i], spec.HostNetwork)
		names = append(names, spec.Containers[i].Name)
	}
	unique(p, func(i int) *field.Path {
		if n := len(spec.InitContainers); i >= n {
			return path.Child("containers").Index(i - n).Child("name")
		}
		return path.Child("initContainers").Index(i).Child("name")
	}, names)
}

func checkContainer(p *problems, path *field.Path, c *corev1.Container, hostNetwork bool) {
	if c.Name == "" {
		p.missing(path.Child("name"), "the name of the container")
	} else {
		p.text(path.Child("name"), c.Name, validation.IsDNS1123Label)
	}
	var names []string
	for i := range c.Ports {
		port := &c.Ports[i]
		at := path.Child("ports").Index(i)
		checkPort(p, at.Child("containerPort"), port.ContainerPort)
		checkProtocol(p, at.Child("protocol"), &port.Protocol)
		if port.HostPort != 0 && !(hostNetwork && port.HostPort == port.ContainerPort) {
			p.say(at.Child("hostPort"), "%d in container %q: %s", port.HostPort, c.Name, hostPortRefusal)
		}
		if port.Name != "" {
			p.text(at.Child("name"), port.Name, validation.IsValidPortName)
		}
		names = append(names, port.Name)
	}
	unique(p, func(i int) *field.Path { return path.Child("ports").Index(i).Child("name") }, names)
	for i, e := range c.Env {
		p.text(path.Child("env").Index(i).Child("name"), e.Name, validation.IsRelaxedEnvVarName)
	}
}

// checkDeployment fills in one replica.
func checkDeployment(p *problems, d *appsv1.Deployment) {
	spec := field.NewPath("spec")
	if d.Spec.Replicas == nil {
		d.Spec.Replicas = new(int32)
		*d.Spec.Replicas = 1
	}
	if *d.Spec.Replicas < 0 {
		p.add(spec.Child("replicas"), *d.Spec.Replicas, "no less than 0")
	}
	template := spec.Child("template")
	checkLabels(p, template.Child("metadata", "labels"), d.Spec.Template.Labels)
	checkPodSpec(p, template.Child("spec"), &d.Spec.Template.Spec)
	if d.Spec.Selector == nil || len(d.Spec.Selector.MatchLabels)+len(d.Spec.Selector.MatchExpressions) == 0 {
		p.missing(spec.Child("selector"), "the labels of the pods of the template")
		return
	}
	checkSelector(p, spec.Child("selector"), d.Spec.Selector)
	if !p.ok() {
		return
	}
	s, err := metav1.LabelSelectorAsSelector(d.Spec.Selector)
	if err != nil {
		p.say(spec.Child("selector"), "%v", err)
		return
	}
	if !s.Matches(labels.Set(d.Spec.Template.Labels)) {
		p.add(template.Child("metadata", "labels"), d.Spec.Template.Labels, "labels that spec.selector matches: "+s.String())
	}
}
