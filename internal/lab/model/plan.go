// SPDX-License-Identifier: Apache-2.0

package model

import (
	"encoding/json"
	"fmt"
	"hash/fnv"
	"maps"
	"slices"
	"strconv"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
)

// Plan takes the next step towards what was applied: it adds the pods that are
// to be started and marks those that are to be stopped. Call it again whenever
// an object, a pod's readiness or the set of pods changed, until both are empty.
func (c *Cluster) Plan() (start, stop []*Pod) {
	for _, id := range c.IDs("Deployment") {
		started, stopped := c.planDeployment(id, c.objects[id].(*appsv1.Deployment))
		start, stop = append(start, started...), append(stop, stopped...)
	}
	for _, id := range c.IDs("Pod") {
		started, stopped := c.planPod(id, c.objects[id].(*corev1.Pod))
		start, stop = append(start, started...), append(stop, stopped...)
	}
	for _, p := range c.Pods() {
		if c.objects[p.Owner] == nil && !p.Deleting {
			stop = append(stop, p)
		}
	}
	for _, p := range stop {
		c.markDeleting(p)
	}
	return start, stop
}

func (c *Cluster) markDeleting(p *Pod) {
	p.Deleting = true
	p.Object = p.Object.DeepCopy()
	now := c.cfg.Now()
	p.Object.DeletionTimestamp = &now
	p.Object.DeletionGracePeriodSeconds = p.Object.Spec.TerminationGracePeriodSeconds
}

// planPod makes a Pod object a pod. A pod whose spec was changed is stopped, and
// made again once it is gone; other labels and annotations are just taken over.
func (c *Cluster) planPod(id ID, o *corev1.Pod) (start, stop []*Pod) {
	hash := hashOf(o.Spec)
	p, ok := c.pods[id.Namespace+"/"+id.Name]
	switch {
	case !ok:
		return []*Pod{c.newPod(id, o.ObjectMeta, o.Spec, hash)}, nil
	case p.Deleting:
		return nil, nil
	case p.hash != hash || p.Owner != id:
		return nil, []*Pod{p}
	}
	p.Object.Labels, p.Object.Annotations = maps.Clone(o.Labels), maps.Clone(o.Annotations)
	return nil, nil
}

// planDeployment scales a Deployment or takes one step of a rolling update with
// at most one pod more than wanted and none less ready.
func (c *Cluster) planDeployment(id ID, d *appsv1.Deployment) (start, stop []*Pod) {
	hash := hashOf(d.Spec.Template)
	var current, old []*Pod
	terminating := 0
	for _, p := range c.PodsOf(id) {
		switch {
		case p.Deleting:
			terminating++
		case p.hash == hash:
			current = append(current, p)
		default:
			old = append(old, p)
		}
	}
	want := int(*d.Spec.Replicas)
	recreate := d.Spec.Strategy.Type == appsv1.RecreateDeploymentStrategyType
	if recreate && len(old) > 0 {
		return nil, old
	}
	if recreate && len(current) == 0 && terminating > 0 {
		return nil, nil
	}
	stop = append(stop, surplus(current, len(current)-want)...)
	limit := want
	if len(old) > 0 {
		limit = want + 1
		ready := countReady(current) + countReady(old)
		stop = append(stop, retire(old, ready-want, len(old)+len(current)-want)...)
	}
	for n := len(current); n < want && n+len(old) < limit; n++ {
		start = append(start, c.newPod(id, c.templateMeta(id, d, hash), d.Spec.Template.Spec, hash))
	}
	return start, stop
}

// surplus chooses n pods to stop: those that are not ready, then the youngest.
func surplus(pods []*Pod, n int) []*Pod {
	if n <= 0 {
		return nil
	}
	pods = slices.Clone(pods)
	slices.SortStableFunc(pods, func(a, b *Pod) int {
		if a.Ready() != b.Ready() {
			if a.Ready() {
				return 1
			}
			return -1
		}
		return b.age - a.age
	})
	return pods[:min(n, len(pods))]
}

// retire chooses pods of an older template to stop: those that are not ready
// where there are more than wanted, and so many ready ones as can be missed.
func retire(old []*Pod, spareReady, spare int) []*Pod {
	var stop []*Pod
	for _, p := range old {
		switch {
		case !p.Ready() && spare > 0:
			stop = append(stop, p)
			spare--
		case p.Ready() && spareReady > 0:
			stop = append(stop, p)
			spareReady--
			spare--
		}
	}
	return stop
}

func countReady(pods []*Pod) int {
	n := 0
	for _, p := range pods {
		if p.Ready() {
			n++
		}
	}
	return n
}

func (c *Cluster) templateMeta(id ID, d *appsv1.Deployment, hash string) metav1.ObjectMeta {
	l := maps.Clone(d.Spec.Template.Labels)
	if l == nil {
		l = map[string]string{}
	}
	l[appsv1.DefaultDeploymentUniqueLabelKey] = hash
	name := ""
	for name == "" || c.pods[id.Namespace+"/"+name] != nil {
		name = fmt.Sprintf("%s-%s-%s", id.Name, hash, c.cfg.Suffix())
	}
	return metav1.ObjectMeta{Namespace: id.Namespace, Name: name, Labels: l, Annotations: maps.Clone(d.Spec.Template.Annotations)}
}

// newPod adds a pod, scheduled and pending.
func (c *Cluster) newPod(owner ID, meta metav1.ObjectMeta, spec corev1.PodSpec, hash string) *Pod {
	o := &corev1.Pod{TypeMeta: typeMeta("v1", "Pod"), ObjectMeta: *meta.DeepCopy(), Spec: *spec.DeepCopy()}
	o.UID = types.UID(c.cfg.UID())
	o.CreationTimestamp = c.cfg.Now()
	o.Spec.NodeName = c.schedule(owner, &spec)
	o.Status.Phase = corev1.PodPending
	for _, n := range c.cfg.Nodes {
		if n.Name != o.Spec.NodeName {
			continue
		}
		o.Status.HostIP = n.IPs[0].String()
		for _, ip := range n.IPs {
			o.Status.HostIPs = append(o.Status.HostIPs, corev1.HostIP{IP: ip.String()})
		}
	}
	c.created++
	p := &Pod{Object: o, Owner: owner, hash: hash, age: c.created}
	c.pods[p.Key()] = p
	return p
}

// schedule returns the node that has the fewest pods of the owner, then the
// fewest pods at all, then the first.
func (c *Cluster) schedule(owner ID, s *corev1.PodSpec) string {
	if s.NodeName != "" {
		return s.NodeName
	}
	own, all := map[string]int{}, map[string]int{}
	for _, p := range c.pods {
		if p.Deleting {
			continue
		}
		all[p.Object.Spec.NodeName]++
		if p.Owner == owner {
			own[p.Object.Spec.NodeName]++
		}
	}
	best := ""
	for _, n := range c.candidates(s) {
		if best == "" || own[n] < own[best] || (own[n] == own[best] && all[n] < all[best]) {
			best = n
		}
	}
	return best
}

// candidates are the nodes whose labels the pod selects.
func (c *Cluster) candidates(s *corev1.PodSpec) []string {
	sel := labels.SelectorFromSet(s.NodeSelector)
	var names []string
	for _, n := range c.cfg.Nodes {
		if sel.Matches(labels.Set(nodeLabels(n.Name))) {
			names = append(names, n.Name)
		}
	}
	return names
}

func (c *Cluster) hasNode(name string) bool {
	return slices.ContainsFunc(c.cfg.Nodes, func(n Node) bool { return n.Name == name })
}

// hashOf is a short digest of a value, of letters and digits.
func hashOf(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // API types always encode
	}
	h := fnv.New64a()
	h.Write(b)
	return strconv.FormatUint(h.Sum64(), 36)[:10]
}
