// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/mattfenwick/cyclonus/pkg/connectivity/probe"
	"github.com/mattfenwick/cyclonus/pkg/generator"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/weft-mesh/weft/test/proberlab"
)

// The grid of cyclonus.
var (
	namespaces = []string{"x", "y", "z"}
	podNames   = []string{"a", "b", "c"}
	ports      = []int{80, 81}
	protocols  = []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP}
)

// cluster is what cyclonus thinks there is: namespaces and pods with labels,
// and policies.
type cluster struct {
	resources *probe.Resources
	policies  []*networkingv1.NetworkPolicy
}

// newCluster is the grid without policies.
func newCluster() *cluster {
	r := &probe.Resources{Namespaces: map[string]map[string]string{}}
	for _, ns := range namespaces {
		r.Namespaces[ns] = withName(ns, map[string]string{"ns": ns})
		for _, name := range podNames {
			r.Pods = append(r.Pods, probe.NewDefaultPod(ns, name, ports, protocols, false, ""))
		}
	}
	return &cluster{resources: r}
}

// withName adds the label that Kubernetes gives every namespace.
func withName(ns string, labels map[string]string) map[string]string {
	labels = maps.Clone(labels)
	if labels == nil {
		labels = map[string]string{}
	}
	labels[corev1.LabelMetadataName] = ns
	return labels
}

func (c *cluster) perform(a *generator.Action) (err error) {
	switch {
	case a.CreatePolicy != nil:
		return c.createPolicy(a.CreatePolicy.Policy)
	case a.UpdatePolicy != nil:
		return c.updatePolicy(a.UpdatePolicy.Policy)
	case a.DeletePolicy != nil:
		return c.deletePolicy(a.DeletePolicy.Namespace, a.DeletePolicy.Name)
	case a.CreateNamespace != nil:
		n := a.CreateNamespace
		c.resources, err = c.resources.CreateNamespace(n.Namespace, withName(n.Namespace, n.Labels))
	case a.SetNamespaceLabels != nil:
		n := a.SetNamespaceLabels
		c.resources, err = c.resources.UpdateNamespaceLabels(n.Namespace, withName(n.Namespace, n.Labels))
	case a.DeleteNamespace != nil:
		c.resources, err = c.resources.DeleteNamespace(a.DeleteNamespace.Namespace)
	case a.CreatePod != nil:
		c.resources, err = c.resources.CreatePod(a.CreatePod.Namespace, a.CreatePod.Pod, a.CreatePod.Labels)
	case a.SetPodLabels != nil:
		c.resources, err = c.resources.SetPodLabels(a.SetPodLabels.Namespace, a.SetPodLabels.Pod, a.SetPodLabels.Labels)
	case a.DeletePod != nil:
		c.resources, err = c.resources.DeletePod(a.DeletePod.Namespace, a.DeletePod.Pod)
	default:
		return fmt.Errorf("action %+v is not known", *a)
	}
	return err
}

func (c *cluster) policy(ns, name string) int {
	return slices.IndexFunc(c.policies, func(p *networkingv1.NetworkPolicy) bool { return p.Namespace == ns && p.Name == name })
}

func (c *cluster) createPolicy(p *networkingv1.NetworkPolicy) error {
	if c.policy(p.Namespace, p.Name) >= 0 {
		return fmt.Errorf("create policy %s/%s: it is there already", p.Namespace, p.Name)
	}
	c.policies = append(c.policies, p)
	return nil
}

func (c *cluster) updatePolicy(p *networkingv1.NetworkPolicy) error {
	i := c.policy(p.Namespace, p.Name)
	if i < 0 {
		return fmt.Errorf("update policy %s/%s: it is not there", p.Namespace, p.Name)
	}
	c.policies[i] = p
	return nil
}

func (c *cluster) deletePolicy(ns, name string) error {
	i := c.policy(ns, name)
	if i < 0 {
		return fmt.Errorf("delete policy %s/%s: it is not there", ns, name)
	}
	c.policies = slices.Delete(c.policies, i, i+1)
	return nil
}

// objects is the cluster as manifests. container makes the container of a pod.
func (c *cluster) objects(container func(pod string, tcp, udp, sctp []int) corev1.Container) proberlab.Objects {
	objects := proberlab.Objects{}
	for ns, labels := range c.resources.Namespaces {
		objects.Put(&corev1.Namespace{
			TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Namespace"},
			ObjectMeta: metav1.ObjectMeta{Name: ns, Labels: labels},
		})
	}
	for _, p := range c.resources.Pods {
		objects.Put(podObject(p, container))
	}
	for _, p := range c.policies {
		p := p.DeepCopy()
		p.TypeMeta = metav1.TypeMeta{APIVersion: "networking.k8s.io/v1", Kind: "NetworkPolicy"}
		objects.Put(p)
	}
	return objects
}

// podObject has one prober in place of cyclonus' container for each port; the
// ports have cyclonus' names.
func podObject(p *probe.Pod, container func(pod string, tcp, udp, sctp []int) corev1.Container) *corev1.Pod {
	served := map[corev1.Protocol][]int{}
	var declared []corev1.ContainerPort
	for _, ct := range p.Containers {
		served[ct.Protocol] = append(served[ct.Protocol], ct.Port)
		declared = append(declared, corev1.ContainerPort{Name: ct.PortName, ContainerPort: int32(ct.Port), Protocol: ct.Protocol})
	}
	ct := container(p.Namespace+"/"+p.Name, served[corev1.ProtocolTCP], served[corev1.ProtocolUDP], served[corev1.ProtocolSCTP])
	ct.Ports = declared
	grace := int64(0)
	return &corev1.Pod{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{Namespace: p.Namespace, Name: p.Name, Labels: p.Labels},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{ct}, TerminationGracePeriodSeconds: &grace},
	}
}

// locate gives the pods the addresses that they have in the lab, of one family.
func (c *cluster) locate(l *proberlab.Lab, family int) error {
	var errs []error
	for _, p := range c.resources.Pods {
		ip, err := l.Address(p.Namespace+"/"+p.Name, family)
		errs = append(errs, err)
		p.IP = ip.String()
	}
	return errors.Join(errs...)
}
