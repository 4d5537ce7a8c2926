// SPDX-License-Identifier: Apache-2.0

package model

import (
	"fmt"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
)

// Container returns the status of a container by name, which is added if it is
// not there.
func Container(list *[]corev1.ContainerStatus, name string) *corev1.ContainerStatus {
	i := slices.IndexFunc(*list, func(s corev1.ContainerStatus) bool { return s.Name == name })
	if i < 0 {
		i = len(*list)
		*list = append(*list, corev1.ContainerStatus{Name: name})
	}
	return &(*list)[i]
}

// Summarize sets phase and Ready condition of a pod from the status of its
// containers.
func Summarize(spec *corev1.PodSpec, st *corev1.PodStatus) {
	running, ended, failed, ready := 0, 0, 0, 0
	for _, cs := range st.ContainerStatuses {
		if cs.State.Running != nil {
			running++
		}
		if cs.Ready {
			ready++
		}
		if t := cs.State.Terminated; t != nil {
			ended++
			if t.ExitCode != 0 {
				failed++
			}
		}
	}
	initFailed := false
	for _, cs := range st.InitContainerStatuses {
		if t := cs.State.Terminated; t != nil && t.ExitCode != 0 && spec.RestartPolicy == corev1.RestartPolicyNever {
			initFailed = true
		}
	}
	switch {
	case initFailed, ended == len(spec.Containers) && failed > 0:
		st.Phase = corev1.PodFailed
	case ended == len(spec.Containers):
		st.Phase = corev1.PodSucceeded
	case len(st.ContainerStatuses) == len(spec.Containers):
		st.Phase = corev1.PodRunning
	default:
		st.Phase = corev1.PodPending
	}
	condition := corev1.PodCondition{Type: corev1.PodReady, Status: corev1.ConditionFalse}
	if ready == len(spec.Containers) && st.Phase == corev1.PodRunning {
		condition.Status = corev1.ConditionTrue
	}
	st.Conditions = []corev1.PodCondition{condition}
}

// Lack is something that was applied or deleted and is not in force yet.
type Lack struct {
	ID  ID
	Pod string // NAMESPACE/NAME, where it is about one
	// Node of the pod.
	Node string
	Why  string
	// Final says that waiting will not help.
	Final bool
}

// Lacks says what is not yet as these objects want it, or, for objects that
// were deleted, what is left of them.
func (c *Cluster) Lacks(ids []ID) []Lack {
	var lacks []Lack
	for _, id := range ids {
		if id.Kind == "Namespace" && c.objects[id] == nil {
			lacks = append(lacks, c.remains(func(p *Pod) bool { return p.Object.Namespace == id.Name }, id)...)
			continue
		}
		if id.Kind != "Deployment" && id.Kind != "Pod" {
			continue
		}
		switch o := c.objects[id].(type) {
		case *appsv1.Deployment:
			lacks = append(lacks, c.deploymentLacks(id, o)...)
		case *corev1.Pod:
			lacks = append(lacks, c.podLacks(id, o)...)
		case nil:
			lacks = append(lacks, c.remains(func(p *Pod) bool { return p.Owner == id }, id)...)
		}
	}
	return lacks
}

func (c *Cluster) remains(of func(*Pod) bool, id ID) []Lack {
	var lacks []Lack
	for _, p := range c.Pods() {
		if of(p) {
			lacks = append(lacks, p.lack(id, "is terminating"))
		}
	}
	return lacks
}

func (p *Pod) lack(id ID, why string) Lack {
	return Lack{ID: id, Pod: p.Key(), Node: p.Object.Spec.NodeName, Why: why}
}

func (c *Cluster) deploymentLacks(id ID, d *appsv1.Deployment) []Lack {
	var lacks []Lack
	hash, ready, now := hashOf(d.Spec.Template), 0, c.cfg.Now()
	for _, p := range c.PodsOf(id) {
		switch {
		case p.Deleting:
			lacks = append(lacks, p.lack(id, "is terminating"))
		case p.hash != hash:
			lacks = append(lacks, p.lack(id, "is of an older template"))
		case !p.Ready():
			lacks = append(lacks, p.lack(id, Why(p.Object)))
		case !p.available(now, minReady(d)):
			lacks = append(lacks, p.lack(id, "has not been ready for minReadySeconds"))
		default:
			ready++
		}
	}
	if want := int(*d.Spec.Replicas); ready != want && len(lacks) == 0 {
		lacks = append(lacks, Lack{ID: id, Why: fmt.Sprintf("%d of %d pods are ready", ready, want)})
	}
	return lacks
}

func (c *Cluster) podLacks(id ID, o *corev1.Pod) []Lack {
	p := c.pods[id.Namespace+"/"+id.Name]
	switch {
	case p == nil:
		return []Lack{{ID: id, Why: "is not scheduled yet"}}
	case p.Deleting:
		return []Lack{p.lack(id, "is terminating")}
	case p.hash != hashOf(o.Spec):
		return []Lack{p.lack(id, "is of an older version")}
	case p.Ready(), p.Object.Status.Phase == corev1.PodSucceeded:
		return nil
	}
	l := p.lack(id, Why(p.Object))
	l.Final = p.Object.Status.Phase == corev1.PodFailed
	return []Lack{l}
}

// Why says in a few words why a pod is not ready.
func Why(p *corev1.Pod) string {
	if p.Status.Message != "" {
		return p.Status.Message
	}
	for _, list := range [][]corev1.ContainerStatus{p.Status.InitContainerStatuses, p.Status.ContainerStatuses} {
		for _, cs := range list {
			if why := whyContainer(cs); why != "" {
				return why
			}
		}
	}
	if len(p.Status.PodIPs) == 0 {
		return "is not wired yet"
	}
	return "is not started yet"
}

func whyContainer(cs corev1.ContainerStatus) string {
	switch {
	case cs.State.Terminated != nil && cs.State.Terminated.ExitCode != 0:
		return fmt.Sprintf("container %s ended with exit code %d", cs.Name, cs.State.Terminated.ExitCode)
	case cs.State.Waiting != nil && cs.LastTerminationState.Terminated != nil:
		return fmt.Sprintf("container %s ended with exit code %d and is restarted (%d times so far)",
			cs.Name, cs.LastTerminationState.Terminated.ExitCode, cs.RestartCount)
	case cs.State.Waiting != nil:
		return fmt.Sprintf("container %s: %s", cs.Name, cs.State.Waiting.Message)
	case cs.State.Running != nil && !cs.Ready:
		return fmt.Sprintf("container %s runs and is not ready", cs.Name)
	}
	return ""
}
