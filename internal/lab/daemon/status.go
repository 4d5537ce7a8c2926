// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"cmp"
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/weft-mesh/weft/internal/lab/api"
	"github.com/weft-mesh/weft/internal/lab/model"
)

// askTime is how long an agent has to say whether it is ready.
const askTime = time.Second

func (l *Lab) status(ctx context.Context) api.Status {
	st := api.Status{
		Lab: l.cfg.Name, Dir: l.layout.Dir(), Tunnel: l.cfg.Tunnel, MTU: l.cfg.MTU,
		Underlay: l.layout.UnderlayNetNS(), Nodes: l.nodeStatus(ctx),
		Deployments: []api.Deployment{}, Pods: []api.Pod{}, Services: []api.Service{},
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	st.Generation = l.folder.Generation()
	for _, id := range l.cluster.IDs("Deployment") {
		if d, ok := l.cluster.Get(id).(*appsv1.Deployment); ok {
			st.Deployments = append(st.Deployments, l.deploymentStatus(id, d))
		}
	}
	for _, p := range l.cluster.Pods() {
		st.Pods = append(st.Pods, l.podStatus(p))
	}
	endpoints := readyEndpoints(l.cluster.Objects())
	for _, id := range l.cluster.IDs("Service") {
		if svc, ok := l.cluster.Get(id).(*corev1.Service); ok {
			st.Services = append(st.Services, serviceStatus(svc, endpoints[svc.Namespace+"/"+svc.Name]))
		}
	}
	return st
}

func (l *Lab) nodeStatus(ctx context.Context) []api.Node {
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	out := make([]api.Node, len(l.nodes))
	var wg sync.WaitGroup
	for i, n := range l.nodes {
		wg.Go(func() { out[i] = n.status(ctx) })
	}
	wg.Wait()
	return out
}

func (n *labNode) status(ctx context.Context) api.Node {
	s := api.Node{Name: n.Name, NetNS: n.netns, Socket: n.lab.layout.NodeSocket(n.Name), Agent: n.agent.State()}
	for _, ip := range n.IPs {
		s.IPs = append(s.IPs, ip.String())
	}
	for _, p := range n.PodCIDRs {
		s.PodCIDRs = append(s.PodCIDRs, p.String())
	}
	switch {
	case s.Agent.Process != "running":
		s.Message = s.Agent.LastExit
	default:
		err := n.agent.Ready(ctx)
		s.Ready = err == nil
		if err != nil {
			s.Message = err.Error()
		}
	}
	return s
}

func (l *Lab) deploymentStatus(id model.ID, d *appsv1.Deployment) api.Deployment {
	s := api.Deployment{Namespace: id.Namespace, Name: id.Name, Wanted: int(*d.Spec.Replicas)}
	for _, p := range l.cluster.PodsOf(id) {
		if p.Deleting {
			continue
		}
		s.Pods++
		if p.Ready() {
			s.Ready++
		}
	}
	return s
}

func (l *Lab) podStatus(p *model.Pod) api.Pod {
	o := p.Object
	s := api.Pod{
		Namespace: o.Namespace, Name: o.Name, Node: o.Spec.NodeName, IPs: []string{},
		Phase: string(o.Status.Phase), Ready: p.Ready(), Terminating: p.Deleting,
		Labels: o.Labels, ServiceAccount: o.Spec.ServiceAccountName,
		Cgroup: l.layout.PodCgroup(o.Spec.NodeName, o.Namespace, o.Name),
	}
	for _, ip := range o.Status.PodIPs {
		s.IPs = append(s.IPs, ip.IP)
	}
	for _, cs := range slices.Concat(o.Status.InitContainerStatuses, o.Status.ContainerStatuses) {
		s.Restarts += int(cs.RestartCount)
	}
	if !s.Ready && o.Status.Phase != corev1.PodSucceeded {
		s.Message = model.Why(o)
	}
	if w := l.workers[p.Key()]; w != nil {
		s.NetNS, s.ContainerID = filepath.Base(w.inside("").NetNS), w.id
	}
	return s
}

func readyEndpoints(objects []model.Object) map[string]int {
	pods := map[string]map[string]bool{}
	for _, o := range objects {
		s, ok := o.(*discoveryv1.EndpointSlice)
		if !ok {
			continue
		}
		key := s.Namespace + "/" + s.Labels[discoveryv1.LabelServiceName]
		if pods[key] == nil {
			pods[key] = map[string]bool{}
		}
		for _, e := range s.Endpoints {
			if e.Conditions.Ready == nil || *e.Conditions.Ready {
				name := e.Addresses[0]
				if e.TargetRef != nil {
					name = e.TargetRef.Name
				}
				pods[key][name] = true
			}
		}
	}
	n := make(map[string]int, len(pods))
	for key, set := range pods {
		n[key] = len(set)
	}
	return n
}

func serviceStatus(svc *corev1.Service, endpoints int) api.Service {
	s := api.Service{Namespace: svc.Namespace, Name: svc.Name, Type: string(svc.Spec.Type), IPs: svc.Spec.ClusterIPs, Endpoints: endpoints, Ports: []string{}}
	s.External = slices.Clone(svc.Spec.ExternalIPs)
	for _, in := range svc.Status.LoadBalancer.Ingress {
		s.External = append(s.External, cmp.Or(in.IP, in.Hostname))
	}
	for _, p := range svc.Spec.Ports {
		port := fmt.Sprint(p.Port)
		if p.NodePort != 0 {
			port += fmt.Sprintf(":%d", p.NodePort)
		}
		s.Ports = append(s.Ports, port+"/"+string(p.Protocol))
	}
	return s
}

// target finds the container that "NS/POD" or "NS/deploy/NAME" means; an empty
// container is the pod's first.
func (l *Lab) target(name, container string) (*api.Target, error) {
	w, err := l.findPod(name)
	if err != nil {
		return nil, err
	}
	all := slices.Concat(w.pod.Spec.Containers, w.pod.Spec.InitContainers)
	i := 0
	if container != "" {
		i = slices.IndexFunc(all, func(ct corev1.Container) bool { return ct.Name == container })
	}
	if i < 0 {
		var names []string
		for _, ct := range all {
			names = append(names, ct.Name)
		}
		return nil, fmt.Errorf("pod %s has no container %q: want one of %s", w.key, container, strings.Join(names, ", "))
	}
	ct := &all[i]
	t := &api.Target{Pod: w.key, Node: w.node.Name, Container: ct.Name, Log: w.logPath(ct.Name)}
	if pid := w.pid(ct.Name); pid != 0 {
		t.Running, t.Spec = true, w.insideRunning(ct, pid)
	}
	return t, nil
}

func (l *Lab) findPod(name string) (*worker, error) {
	parts := strings.Split(name, "/")
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case len(parts) == 2:
		if w := l.workers[name]; w != nil {
			return w, nil
		}
		return nil, fmt.Errorf("there is no pod %s", name)
	case len(parts) == 3 && (parts[1] == "deploy" || parts[1] == "deployment"):
		return l.readyPodOf(model.ID{Group: "apps", Kind: "Deployment", Namespace: parts[0], Name: parts[2]})
	}
	return nil, fmt.Errorf("pod %q: want NAMESPACE/POD or NAMESPACE/deploy/NAME", name)
}

// readyPodOf returns the oldest ready pod of a Deployment; l.mu is held.
func (l *Lab) readyPodOf(id model.ID) (*worker, error) {
	if l.cluster.Get(id) == nil {
		return nil, fmt.Errorf("there is no %s", id)
	}
	for _, p := range l.cluster.PodsOf(id) {
		if w := l.workers[p.Key()]; w != nil && p.Ready() && !p.Deleting {
			return w, nil
		}
	}
	return nil, fmt.Errorf("%s has no ready pod", id)
}
