// SPDX-License-Identifier: Apache-2.0

package model

import (
	"fmt"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"

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
		k.fail("kind", "Node", "the lab makes the nodes itself: choose their number with --nodes")
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

func (c *Cluster) validateDeployment(k *checker, d *appsv1.Deployment) {
	if p := d.Spec.Template.Spec.RestartPolicy; p != corev1.RestartPolicyAlways {
		k.fail("spec.template.spec.restartPolicy", string(p), "want Always: the pods of a Deployment do not end")
	}
	c.validatePodSpec(k, "spec.template.spec", &d.Spec.Template.Spec)
}

func (c *Cluster) validatePodSpec(k *checker, at string, s *corev1.PodSpec) {
	if len(s.Volumes) > 0 {
		k.fail(at+".volumes", s.Volumes[0].Name, "the lab has no volumes: containers see the host's file system")
	}
	if s.NodeName != "" && !c.hasNode(s.NodeName) {
		k.fail(at+".nodeName", s.NodeName, "there is no such node: want one of %s", c.nodeNames())
	}
	if len(c.candidates(s)) == 0 && s.NodeName == "" {
		k.fail(at+".nodeSelector", labels.Set(s.NodeSelector).String(), "no node has these labels: nodes have %s=NAME, with NAME one of %s", corev1.LabelHostname, c.nodeNames())
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

func validateContainer(k *checker, at string, ct *corev1.Container) {
	if len(ct.Command) == 0 {
		k.fail(at+".command", "", "required: the lab pulls no image and runs this command from the host's file system")
	}
	if len(ct.EnvFrom) > 0 {
		k.fail(at+".envFrom", "", "the lab has no ConfigMaps and Secrets: use env")
	}
	if ct.Lifecycle != nil {
		k.fail(at+".lifecycle", "", "the lab runs no lifecycle hooks")
	}
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
