// SPDX-License-Identifier: Apache-2.0

package model

import (
	"maps"
	"runtime"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Objects returns the cluster as its agents see it: nodes, namespaces, pods with
// their status, services and their endpoint slices, and everything that the lab
// just passes on. Deployments are not in it: their pods are.
func (c *Cluster) Objects() []Object {
	var out []Object
	for _, n := range c.cfg.Nodes {
		out = append(out, c.nodeObject(n))
	}
	ids := make([]ID, 0, len(c.objects))
	for id := range c.objects {
		ids = append(ids, id)
	}
	sortIDs(ids)
	for _, id := range ids {
		switch o := c.objects[id].(type) {
		case *corev1.Pod, *appsv1.Deployment, *corev1.Node:
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

// nodeLabels are those of every node and those of its manifest.
func (c *Cluster) nodeLabels(name string) map[string]string {
	l := map[string]string{
		corev1.LabelHostname:   name,
		corev1.LabelOSStable:   "linux",
		corev1.LabelArchStable: runtime.GOARCH,
	}
	if o, ok := c.objects[nodeID(name)]; ok {
		maps.Copy(l, o.GetLabels())
	}
	return l
}

func (c *Cluster) nodeObject(n Node) *corev1.Node {
	o := &corev1.Node{TypeMeta: typeMeta("v1", "Node"), ObjectMeta: metav1.ObjectMeta{Name: n.Name, Labels: c.nodeLabels(n.Name)}}
	if written, ok := c.objects[nodeID(n.Name)]; ok {
		o.Annotations = maps.Clone(written.GetAnnotations())
	}
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
