// SPDX-License-Identifier: Apache-2.0

package model

import (
	"fmt"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/weft-mesh/weft/internal/source/manifest"
	"github.com/weft-mesh/weft/internal/state"
)

// checker collects what is wrong with one object.
type checker struct {
	object manifest.Object
	errs   []state.SourceError
}

func (k *checker) fail(field, value, format string, args ...any) {
	message := fmt.Sprintf(format, args...)
	if value != "" {
		message = fmt.Sprintf("%q: %s", value, message)
	}
	k.errs = append(k.errs, state.SourceError{File: k.object.File, Document: k.object.Document, Field: field, Message: message})
}

// validate looks at what only the whole cluster, or the lab, can tell; the form
// of the object was checked when it was decoded.
func (c *Cluster) validate(m manifest.Object, o Object) []state.SourceError {
	k := &checker{object: m}
	id := m.Ref
	if id.Namespace != "" && c.objects[namespaceID(id.Namespace)] == nil {
		k.fail("metadata.namespace", id.Namespace, "there is no such namespace: apply a Namespace too, or use one of %s", c.namespaceNames())
	}
	switch o := o.(type) {
	case *corev1.Node:
		c.validateNode(k, o)
	case *corev1.Service:
		validateService(k, o)
	case *corev1.Pod:
		c.validatePodSpec(k, "spec", &o.Spec)
	case *appsv1.Deployment:
		c.validateDeployment(k, o)
	}
	return k.errs
}

func (c *Cluster) namespaceNames() string {
	var names []string
	for _, id := range c.IDs("Namespace") {
		names = append(names, id.Name)
	}
	return strings.Join(names, ", ")
}

// validateNode wants what a manifest can say about a node that the lab makes.
func (c *Cluster) validateNode(k *checker, n *corev1.Node) {
	if !c.hasNode(n.Name) {
		k.fail("metadata.name", n.Name, "there is no such node: want one of %s (the lab makes the nodes, --nodes of them, and takes their labels from manifests)", c.nodeNames())
	}
	if l, ok := n.Labels[corev1.LabelHostname]; ok && l != n.Name {
		k.fail("metadata.labels["+corev1.LabelHostname+"]", l, "want %q, the name of the node", n.Name)
	}
	if !equality.Semantic.DeepEqual(n.Spec, corev1.NodeSpec{}) {
		k.fail("spec", "", "the lab makes the nodes: want only labels and annotations")
	}
	if !equality.Semantic.DeepEqual(n.Status, corev1.NodeStatus{}) {
		k.fail("status", "", "the lab makes the nodes: want only labels and annotations")
	}
}

func (c *Cluster) validateDeployment(k *checker, d *appsv1.Deployment) {
	if p := d.Spec.Template.Spec.RestartPolicy; p != corev1.RestartPolicyAlways {
		k.fail("spec.template.spec.restartPolicy", string(p), "want Always: the pods of a Deployment do not end")
	}
	if d.Spec.MinReadySeconds < 0 {
		k.fail("spec.minReadySeconds", fmt.Sprint(d.Spec.MinReadySeconds), "want 0 or more")
	}
	if r := d.Spec.Strategy.RollingUpdate; r != nil {
		for name, v := range map[string]*intstr.IntOrString{"maxSurge": r.MaxSurge, "maxUnavailable": r.MaxUnavailable} {
			if v == nil {
				continue
			}
			if n, err := intstr.GetScaledValueFromIntOrPercent(v, 100, true); err != nil || n < 0 {
				k.fail("spec.strategy.rollingUpdate."+name, v.String(), "want a number, 0 or more, or a percentage such as \"25%%\"")
			}
		}
	}
	c.validatePodSpec(k, "spec.template.spec", &d.Spec.Template.Spec)
}

func (c *Cluster) validatePodSpec(k *checker, at string, s *corev1.PodSpec) {
	if len(s.Volumes) > 0 {
		k.fail(at+".volumes", s.Volumes[0].Name, "the lab has no volumes: containers see the host's file system")
	}
	switch s.DNSPolicy {
	case "", corev1.DNSClusterFirst, corev1.DNSClusterFirstWithHostNet, corev1.DNSDefault:
	case corev1.DNSNone:
		if s.DNSConfig == nil || len(s.DNSConfig.Nameservers) == 0 {
			k.fail(at+".dnsConfig.nameservers", "", "want at least one with dnsPolicy None")
		}
	default:
		k.fail(at+".dnsPolicy", string(s.DNSPolicy), "want one of ClusterFirst, ClusterFirstWithHostNet, Default, None")
	}
	if s.NodeName != "" && !c.hasNode(s.NodeName) {
		k.fail(at+".nodeName", s.NodeName, "there is no such node: want one of %s", c.nodeNames())
	}
	if len(c.candidates(s)) == 0 && s.NodeName == "" {
		k.fail(at+".nodeSelector", labels.Set(s.NodeSelector).String(), "no node has these labels: nodes have %s=NAME, with NAME one of %s, and what Node manifests give them", corev1.LabelHostname, c.nodeNames())
	}
	for i := range s.InitContainers {
		field := fmt.Sprintf("%s.initContainers[%d]", at, i)
		if p := s.InitContainers[i].RestartPolicy; p != nil {
			k.fail(field+".restartPolicy", string(*p), "the lab has no sidecar init containers: use one of spec.containers")
		}
		validateContainer(k, field, &s.InitContainers[i])
	}
	for i := range s.Containers {
		field := fmt.Sprintf("%s.containers[%d]", at, i)
		validateContainer(k, field, &s.Containers[i])
	}
}

func validateLifecycle(k *checker, at string, l *corev1.Lifecycle) {
	if l == nil {
		return
	}
	if l.PostStart != nil {
		k.fail(at+".postStart", "", "the lab has no such hook: use the command of the container")
	}
	if l.StopSignal != nil {
		k.fail(at+".stopSignal", string(*l.StopSignal), "the lab always sends SIGTERM")
	}
	if h := l.PreStop; h != nil && (h.Sleep == nil) == (h.Exec == nil) {
		k.fail(at+".preStop", "", "want one of sleep, exec")
	}
}

func validateContainer(k *checker, at string, ct *corev1.Container) {
	if len(ct.Command) == 0 {
		k.fail(at+".command", "", "required: the lab pulls no image and runs this command from the host's file system")
	}
	if len(ct.EnvFrom) > 0 {
		k.fail(at+".envFrom", "", "the lab has no ConfigMaps and Secrets: use env")
	}
	validateLifecycle(k, at+".lifecycle", ct.Lifecycle)
	for i, e := range ct.Env {
		field := fmt.Sprintf("%s.env[%d].valueFrom", at, i)
		if e.ValueFrom == nil {
			continue
		}
		if e.ValueFrom.FieldRef == nil {
			k.fail(field, e.Name, "want fieldRef: the lab knows no other source")
			continue
		}
		if _, err := FieldValue(&corev1.Pod{}, e.ValueFrom.FieldRef.FieldPath); err != nil {
			k.fail(field+".fieldRef.fieldPath", e.ValueFrom.FieldRef.FieldPath, "%v", err)
		}
	}
	probes := map[string]*corev1.Probe{"readinessProbe": ct.ReadinessProbe, "livenessProbe": ct.LivenessProbe, "startupProbe": ct.StartupProbe}
	for name, p := range probes {
		if p != nil && p.HTTPGet == nil && p.TCPSocket == nil && p.Exec == nil {
			k.fail(at+"."+name, "", "want one of httpGet, tcpSocket, exec")
		}
	}
}
