// SPDX-License-Identifier: Apache-2.0

package netpolapi

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"

	jsonpatch "github.com/evanphx/json-patch/v5"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"

	"github.com/weft-mesh/weft/test/proberlab"
)

// labClient is the API server that the conformance tests talk to: what they
// create, change and delete is made so in the lab, and in force when the call
// returns. It has the methods that the tests use; the others panic.
type labClient struct {
	client.Client
	lab    *proberlab.Lab
	nodes  int
	scheme *runtime.Scheme

	mu      sync.Mutex
	family  int                                          // protected by mu; of status.podIP: 4 or 6
	objects proberlab.Objects                            // protected by mu
	stored  map[proberlab.Ref]*unstructured.Unstructured // protected by mu; the objects with the kinds of the tests
}

// newLabClient needs a lab that is up, with that many nodes.
func newLabClient(l *proberlab.Lab, nodes int, scheme *runtime.Scheme) *labClient {
	return &labClient{
		lab: l, nodes: nodes, scheme: scheme, family: 4,
		objects: proberlab.Objects{}, stored: map[proberlab.Ref]*unstructured.Unstructured{},
	}
}

func (c *labClient) setFamily(family int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.family = family
}

// Get implements client.Reader.
func (c *labClient) Get(_ context.Context, key client.ObjectKey, obj client.Object, _ ...client.GetOption) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	gvk, err := apiutil.GVKForObject(obj, c.scheme)
	if err != nil {
		return err
	}
	u, ok := c.stored[proberlab.Ref{Kind: gvk.Kind, Namespace: key.Namespace, Name: key.Name}]
	if !ok {
		return apierrors.NewNotFound(schema.GroupResource{Group: gvk.Group, Resource: gvk.Kind}, key.Name)
	}
	u = u.DeepCopy()
	if err := c.status(u); err != nil {
		return err
	}
	return into(u, obj)
}

// status adds what the lab knows to a pod or StatefulSet.
func (c *labClient) status(u *unstructured.Unstructured) error {
	key := u.GetNamespace() + "/" + u.GetName()
	switch u.GetKind() {
	case "Pod":
		ip, err := c.lab.Address(key, c.family)
		if err != nil {
			return err
		}
		return unstructured.SetNestedField(u.Object, ip.String(), "status", "podIP")
	case "StatefulSet":
		ready := int64(0)
		for name, p := range c.lab.Pods() {
			if p.Ready && strings.HasPrefix(name, key+"-") {
				ready++
			}
		}
		return unstructured.SetNestedField(u.Object, ready, "status", "readyReplicas")
	}
	return nil
}

// Create implements client.Writer.
func (c *labClient) Create(ctx context.Context, obj client.Object, _ ...client.CreateOption) error {
	return c.put(ctx, obj)
}

// Update implements client.Writer.
func (c *labClient) Update(ctx context.Context, obj client.Object, _ ...client.UpdateOption) error {
	return c.put(ctx, obj)
}

func (c *labClient) put(ctx context.Context, obj client.Object) error {
	u, err := c.unstructured(obj)
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.store(u); err != nil {
		return err
	}
	return c.lab.Sync(ctx, c.objects)
}

// store takes an object in; a StatefulSet becomes its pods.
func (c *labClient) store(u *unstructured.Unstructured) error {
	c.stored[proberlab.RefOf(u)] = u
	if u.GetKind() != "StatefulSet" {
		c.objects.Put(u)
		return nil
	}
	var set appsv1.StatefulSet
	if err := into(u, &set); err != nil {
		return err
	}
	for i := range int(*set.Spec.Replicas) {
		pod, err := c.unstructured(c.podOf(&set, i))
		if err != nil {
			return err
		}
		if err := c.store(pod); err != nil {
			return err
		}
	}
	return nil
}

// Patch implements client.Writer, for merge patches.
func (c *labClient) Patch(ctx context.Context, obj client.Object, patch client.Patch, _ ...client.PatchOption) error {
	change, err := patch.Data(obj)
	if err != nil {
		return err
	}
	u, err := c.unstructured(obj)
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	old, ok := c.stored[proberlab.RefOf(u)]
	if !ok {
		return fmt.Errorf("patch %s: it is not there", proberlab.RefOf(u))
	}
	before, err := json.Marshal(old)
	if err != nil {
		return err
	}
	after, err := jsonpatch.MergePatch(before, change)
	if err != nil {
		return fmt.Errorf("patch %s: %w", proberlab.RefOf(u), err)
	}
	changed := &unstructured.Unstructured{}
	if err := changed.UnmarshalJSON(after); err != nil {
		return fmt.Errorf("patch %s: %w", proberlab.RefOf(u), err)
	}
	if err := c.store(changed); err != nil {
		return err
	}
	return c.lab.Sync(ctx, c.objects)
}

// Delete implements client.Writer.
func (c *labClient) Delete(ctx context.Context, obj client.Object, _ ...client.DeleteOption) error {
	u, err := c.unstructured(obj)
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	r := proberlab.RefOf(u)
	if c.stored[r] == nil {
		return apierrors.NewNotFound(schema.GroupResource{Resource: r.Kind}, r.Name)
	}
	delete(c.stored, r)
	delete(c.objects, r)
	return c.lab.Sync(ctx, c.objects)
}

// unstructured is a copy of obj with its kind, and without a status.
func (c *labClient) unstructured(obj client.Object) (*unstructured.Unstructured, error) {
	gvk, err := apiutil.GVKForObject(obj, c.scheme)
	if err != nil {
		return nil, err
	}
	m, err := runtime.DefaultUnstructuredConverter.ToUnstructured(obj)
	if err != nil {
		return nil, fmt.Errorf("convert a %s: %w", gvk.Kind, err)
	}
	u := (&unstructured.Unstructured{Object: m}).DeepCopy()
	u.SetGroupVersionKind(gvk)
	unstructured.RemoveNestedField(u.Object, "status")
	return u, nil
}

func into(u *unstructured.Unstructured, obj client.Object) error {
	if out, ok := obj.(*unstructured.Unstructured); ok {
		out.Object = u.Object
		return nil
	}
	return runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, obj)
}

// podOf is pod i of a StatefulSet, with the labels that Kubernetes gives it and
// one prober in place of its containers.
//
// The pods of a set are on different nodes, those in a node's network the other
// way round than the rest: the tests have harry-potter-1 denied the node of
// centaur-1, and a pod's own node is always allowed.
func (c *labClient) podOf(set *appsv1.StatefulSet, i int) *corev1.Pod {
	spec := set.Spec.Template.Spec
	name := fmt.Sprintf("%s-%d", set.Name, i)
	node := i
	if spec.HostNetwork {
		node = i + 1
	}
	grace := int64(0)
	p := &corev1.Pod{}
	p.Namespace, p.Name = set.Namespace, name
	p.Labels = map[string]string{"statefulset.kubernetes.io/pod-name": name, "apps.kubernetes.io/pod-index": fmt.Sprint(i)}
	for k, v := range set.Spec.Template.Labels {
		p.Labels[k] = v
	}
	served := portsOf(spec.Containers)
	ct := c.lab.Container(set.Namespace+"/"+name, served["tcp"], served["udp"], served["sctp"])
	for _, old := range spec.Containers {
		ct.Ports = append(ct.Ports, old.Ports...)
	}
	p.Spec = corev1.PodSpec{
		HostNetwork: spec.HostNetwork, NodeName: fmt.Sprintf("node%d", node%c.nodes+1),
		Containers: []corev1.Container{ct}, TerminationGracePeriodSeconds: &grace,
	}
	return p
}

// portsOf finds which ports the containers of agnhost would serve, by protocol.
func portsOf(containers []corev1.Container) map[string][]int {
	served := map[string][]int{}
	add := func(protocol, port string) {
		var n int
		if _, err := fmt.Sscan(port, &n); err == nil {
			served[protocol] = append(served[protocol], n)
		}
	}
	for _, ct := range containers {
		for _, e := range ct.Env {
			if port, ok := strings.CutPrefix(e.Name, "SERVE_SCTP_PORT_"); ok {
				add("sctp", port)
			}
		}
		words := strings.Fields(strings.Join(ct.Command, " "))
		for i, w := range words[:max(0, len(words)-1)] {
			switch {
			case w == "--udp-port":
				add("udp", words[i+1])
			case w == "--port" && slices.Contains(words, "--udp"):
				add("udp", words[i+1])
			case w == "--port":
				add("tcp", words[i+1])
			}
		}
	}
	return served
}
