// SPDX-License-Identifier: Apache-2.0

package model

import (
	"cmp"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"maps"
	"slices"
	"strconv"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
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
	end := metav1.NewTime(c.cfg.Now().Add(time.Duration(*p.Object.Spec.TerminationGracePeriodSeconds) * time.Second))
	p.Object.DeletionTimestamp = &end
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

// planDeployment scales a Deployment or takes one step of a rolling update: no
// more pods beyond those wanted than maxSurge says, and no fewer available ones
// than maxUnavailable says.
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
		surge, unavailable := margins(d)
		limit = want + surge
		available := c.countAvailable(d, current)
		least := want - unavailable
		spare := len(old) + len(current) - least - (len(current) - available)
		stop = append(stop, c.retire(d, old, available+c.countAvailable(d, old)-least, spare)...)
	}
	for n := len(current); n < want && n+len(old) < limit; n++ {
		start = append(start, c.newPod(id, c.templateMeta(id, d, hash), d.Spec.Template.Spec, hash))
	}
	return start, stop
}

// margins are how many pods more than wanted an update may have, and how many
// available ones it may miss. Both are not 0 together.
func margins(d *appsv1.Deployment) (surge, unavailable int) {
	quarter := intstr.FromString("25%")
	maxSurge, maxUnavailable := &quarter, &quarter
	if r := d.Spec.Strategy.RollingUpdate; r != nil {
		maxSurge, maxUnavailable = cmp.Or(r.MaxSurge, maxSurge), cmp.Or(r.MaxUnavailable, maxUnavailable)
	}
	want := int(*d.Spec.Replicas)
	surge, _ = intstr.GetScaledValueFromIntOrPercent(maxSurge, want, true) // validated
	unavailable, _ = intstr.GetScaledValueFromIntOrPercent(maxUnavailable, want, false)
	if surge == 0 && unavailable == 0 {
		unavailable = 1
	}
	return surge, min(unavailable, want)
}

func minReady(d *appsv1.Deployment) time.Duration {
	return time.Duration(d.Spec.MinReadySeconds) * time.Second
}

func (c *Cluster) countAvailable(d *appsv1.Deployment, pods []*Pod) int {
	n, now := 0, c.cfg.Now()
	for _, p := range pods {
		if p.available(now, minReady(d)) {
			n++
		}
	}
	return n
}

// Wake returns how long it takes until a pod has been ready for as long as its
// Deployment wants; 0 where no pod waits for that.
func (c *Cluster) Wake() time.Duration {
	var next time.Duration
	now := c.cfg.Now()
	for _, p := range c.pods {
		d, ok := c.objects[p.Owner].(*appsv1.Deployment)
		if !ok || p.Deleting || !p.Ready() || p.available(now, minReady(d)) {
			continue
		}
		for _, condition := range p.Object.Status.Conditions {
			left := minReady(d) - now.Sub(condition.LastTransitionTime.Time)
			if condition.Type == corev1.PodReady && (next == 0 || left < next) {
				next = left
			}
		}
	}
	return next
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

// retire chooses pods of an older template to stop: up to spare that are not
// available, and so many available ones as can be missed.
func (c *Cluster) retire(d *appsv1.Deployment, old []*Pod, spareAvailable, spare int) []*Pod {
	var stop []*Pod
	now := c.cfg.Now()
	for _, p := range old {
		switch {
		case !p.available(now, minReady(d)):
			if spare > 0 {
				stop = append(stop, p)
				spare--
			}
		case spareAvailable > 0:
			stop = append(stop, p)
			spareAvailable--
		}
	}
	return stop
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
		if sel.Matches(labels.Set(c.nodeLabels(n.Name))) {
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
