// SPDX-License-Identifier: Apache-2.0

// Package model is the lab's cluster without any input or output: applied
// objects in, pods to start and stop out, and the objects that agents see. It
// does what API server, scheduler and controllers do in a real cluster, as far
// as the lab needs it.
package model

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/weft-mesh/weft/internal/source/manifest"
	"github.com/weft-mesh/weft/internal/state"
)

// Object is any Kubernetes object.
type Object interface {
	metav1.Object
	runtime.Object
}

// ID names an object. Namespace is empty for a kind without namespaces.
type ID = manifest.Ref

func namespaceID(name string) ID { return ID{Kind: "Namespace", Name: name} }

func nodeID(name string) ID { return ID{Kind: "Node", Name: name} }

// Node is a node of the lab.
type Node struct {
	Name     string
	IPs      []netip.Addr
	PodCIDRs []netip.Prefix
}

// Config are the fixed things of a cluster; every field is required.
type Config struct {
	Nodes []Node
	// Suffix returns a short string that makes the name of a Deployment's pod
	// unique: lower-case letters and digits.
	Suffix func() string
	// UID returns a new unique identifier.
	UID func() string
	// Now is the time that pods are stamped with.
	Now func() metav1.Time
}

// Cluster is not safe for use by several goroutines.
type Cluster struct {
	cfg     Config
	objects map[ID]Object
	pods    map[string]*Pod     // by NAMESPACE/NAME
	created int                 // pods so far, their order of age
	packed  map[string]*packing // slices of Services, by NAMESPACE/NAME
}

// Pod is a pod that was scheduled.
type Pod struct {
	Object   *corev1.Pod // with spec.nodeName; the status is what SetStatus made it
	Owner    ID          // Deployment, or the Pod itself
	Deleting bool
	hash     string // of what it was made from
	age      int    // smaller is older
}

// Key is NAMESPACE/NAME.
func (p *Pod) Key() string { return p.Object.Namespace + "/" + p.Object.Name }

// available tells whether the pod has been ready for that long.
func (p *Pod) available(now metav1.Time, minReady time.Duration) bool {
	for _, c := range p.Object.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue && now.Sub(c.LastTransitionTime.Time) >= minReady
		}
	}
	return false
}

// Ready tells whether the pod's Ready condition is true.
func (p *Pod) Ready() bool { return IsReady(p.Object) }

// IsReady tells whether a pod's Ready condition is true.
func IsReady(p *corev1.Pod) bool {
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// New returns a cluster with its nodes and the namespace "default".
func New(cfg Config) *Cluster {
	c := &Cluster{cfg: cfg, objects: map[ID]Object{}, pods: map[string]*Pod{}, packed: map[string]*packing{}}
	ns := &corev1.Namespace{TypeMeta: typeMeta("v1", "Namespace"), ObjectMeta: metav1.ObjectMeta{Name: metav1.NamespaceDefault}}
	defaultNamespace(ns)
	c.objects[namespaceID(ns.Name)] = ns
	return c
}

// Clone returns a cluster that shares nothing with c that either may change.
func (c *Cluster) Clone() *Cluster {
	n := &Cluster{cfg: c.cfg, objects: maps.Clone(c.objects), pods: make(map[string]*Pod, len(c.pods)), created: c.created, packed: maps.Clone(c.packed)}
	for k, p := range c.pods {
		q := *p
		q.Object = p.Object.DeepCopy()
		n.pods[k] = &q
	}
	return n
}

// Outcome is what became of one applied or deleted object.
type Outcome string

// Outcomes.
const (
	Created   Outcome = "created"
	Changed   Outcome = "changed"
	Unchanged Outcome = "unchanged"
	Deleted   Outcome = "deleted"
	Missing   Outcome = "not there"
)

// Change is an object and what became of it.
type Change struct {
	ID      ID
	Outcome Outcome
}

// Apply takes all objects in, or none of them: then the errors say why.
func (c *Cluster) Apply(objects []manifest.Object) ([]Change, []state.SourceError) {
	next := c.Clone()
	changes, errs := next.apply(objects)
	if len(errs) > 0 {
		return nil, errs
	}
	c.objects = next.objects
	return changes, nil
}

func (c *Cluster) apply(objects []manifest.Object) ([]Change, []state.SourceError) {
	var changes []Change
	var errs []state.SourceError
	seen := map[ID]manifest.Object{}
	for _, m := range objects {
		if first, ok := seen[m.Ref]; ok {
			errs = append(errs, state.SourceError{File: m.File, Document: m.Document, Field: "metadata.name", Message: manifest.Duplicate(m.Ref, first.File, first.Document)})
			continue
		}
		o, ok := m.Typed.DeepCopyObject().(Object)
		if !ok {
			errs = append(errs, state.SourceError{File: m.File, Document: m.Document, Message: fmt.Sprintf("%T has no metadata", m.Typed)})
			continue
		}
		seen[m.Ref] = m
		o.SetNamespace(m.Namespace)
		fillDefaults(o)
		changes = append(changes, Change{ID: m.Ref, Outcome: outcome(c.objects[m.Ref], o)})
		c.objects[m.Ref] = o
	}
	for _, change := range changes {
		errs = append(errs, c.validate(seen[change.ID], c.objects[change.ID])...)
	}
	if len(errs) == 0 {
		errs = c.assignServices(changes, seen)
	}
	return changes, errs
}

// outcome compares what was applied; addresses that the lab gave to a Service
// are no difference.
func outcome(old, now Object) Outcome {
	if old == nil {
		return Created
	}
	if svc, ok := now.(*corev1.Service); ok {
		inherit(old.(*corev1.Service), svc)
	}
	if equality.Semantic.DeepEqual(old, now) {
		return Unchanged
	}
	return Changed
}

// Delete takes objects away, all or none; a namespace goes with everything in
// it. An object that is not there is no error.
func (c *Cluster) Delete(objects []manifest.Object) ([]Change, []state.SourceError) {
	for _, m := range objects {
		if m.Ref == namespaceID(metav1.NamespaceDefault) {
			return nil, []state.SourceError{{File: m.File, Document: m.Document, Field: "metadata.name",
				Message: `"default": this namespace is always there and cannot be deleted`}}
		}
	}
	changes := make([]Change, 0, len(objects))
	for _, m := range objects {
		if c.objects[m.Ref] == nil {
			changes = append(changes, Change{ID: m.Ref, Outcome: Missing})
			continue
		}
		delete(c.objects, m.Ref)
		delete(c.packed, m.Namespace+"/"+m.Name)
		changes = append(changes, Change{ID: m.Ref, Outcome: Deleted})
		if m.Ref == namespaceID(m.Name) {
			maps.DeleteFunc(c.objects, func(id ID, _ Object) bool { return id.Namespace == m.Name })
		}
	}
	return changes, nil
}

// Get returns an applied object, nil where there is none.
func (c *Cluster) Get(id ID) Object { return c.objects[id] }

// IDs returns the names of all applied objects of a kind, sorted.
func (c *Cluster) IDs(kind string) []ID {
	var ids []ID
	for id := range c.objects {
		if id.Kind == kind {
			ids = append(ids, id)
		}
	}
	sortIDs(ids)
	return ids
}

func sortIDs(ids []ID) {
	slices.SortFunc(ids, func(a, b ID) int { return strings.Compare(a.String(), b.String()) })
}

// Pod returns a pod by NAMESPACE/NAME, nil where there is none.
func (c *Cluster) Pod(key string) *Pod { return c.pods[key] }

// Pods returns all pods, those that are being deleted included, by name.
func (c *Cluster) Pods() []*Pod {
	pods := slices.Collect(maps.Values(c.pods))
	slices.SortFunc(pods, func(a, b *Pod) int { return strings.Compare(a.Key(), b.Key()) })
	return pods
}

// PodsOf returns the pods of an owner, oldest first.
func (c *Cluster) PodsOf(owner ID) []*Pod {
	var pods []*Pod
	for _, p := range c.pods {
		if p.Owner == owner {
			pods = append(pods, p)
		}
	}
	slices.SortFunc(pods, func(a, b *Pod) int { return a.age - b.age })
	return pods
}

// SetStatus changes the status of a pod; a pod that is gone is no error. It
// notes when the pod became ready or unready.
func (c *Cluster) SetStatus(key string, change func(*corev1.PodStatus)) {
	p, ok := c.pods[key]
	if !ok {
		return
	}
	since := map[corev1.PodConditionType]corev1.PodCondition{}
	for _, condition := range p.Object.Status.Conditions {
		since[condition.Type] = condition
	}
	change(&p.Object.Status)
	for i := range p.Object.Status.Conditions {
		now := &p.Object.Status.Conditions[i]
		now.LastTransitionTime = c.cfg.Now()
		if before, ok := since[now.Type]; ok && before.Status == now.Status {
			now.LastTransitionTime = before.LastTransitionTime
		}
	}
}

// Gone takes away a pod whose processes and addresses are no more.
func (c *Cluster) Gone(key string) { delete(c.pods, key) }

func typeMeta(version, kind string) metav1.TypeMeta {
	return metav1.TypeMeta{APIVersion: version, Kind: kind}
}
