// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"net/netip"

	"github.com/weft-mesh/weft/internal/policy"
	"github.com/weft-mesh/weft/internal/state"
)

// podLink is where a pod of this node is attached.
type podLink struct {
	ips     []netip.Addr
	ifindex int
}

// input reads the tables, and lists the pods of this node.
func (e *Enforcer) input() (policy.Input, map[policy.EndpointID]podLink, error) {
	t := e.cfg.Tables
	txn := t.DB.ReadTxn()
	in := policy.Input{Class: e.class}
	for p := range t.Policies.All(txn) {
		in.Policies = append(in.Policies, p)
	}
	for n := range t.Nodes.All(txn) {
		in.Nodes = append(in.Nodes, n)
	}
	var workloads []*state.Workload
	ports := map[string][]state.Port{}
	for w := range t.Workloads.All(txn) {
		workloads = append(workloads, w)
		ports[state.Key(w.Namespace, w.Name)] = w.Ports
	}
	ids, err := e.cfg.Identities.AssignWorkloads(t, txn, workloads)
	if err != nil {
		return in, nil, err
	}
	links := map[policy.EndpointID]podLink{}
	local := func(p *state.Pod) {
		id := policy.Endpoint(p.Namespace, p.Name, p.IPs)
		if _, ok := links[id]; ok {
			return
		}
		links[id] = podLink{p.IPs, p.Ifindex}
		in.Pods = append(in.Pods, policy.Pod{
			Namespace: p.Namespace, Name: p.Name, IPs: p.IPs, Identity: p.Identity,
			Ports: ports[state.Key(p.Namespace, p.Name)], Local: true,
		})
	}
	for p := range t.Pods.All(txn) {
		if next := e.pending[p.ContainerID]; next != nil && next.Identity == p.Identity {
			delete(e.pending, p.ContainerID)
		}
		if next := e.pending[p.ContainerID]; next != nil {
			p = next // it is about to take on another identity
		}
		local(p)
	}
	for _, p := range e.pending {
		local(p)
	}
	for i, w := range workloads {
		_, attached := links[policy.Endpoint(w.Namespace, w.Name, w.IPs)]
		if !attached && e.hasPod(w) {
			in.Pods = append(in.Pods, policy.Pod{
				Namespace: w.Namespace, Name: w.Name, IPs: w.IPs, Identity: ids[i], Ports: w.Ports,
			})
		}
	}
	// after the assignment, which may have made some
	for i := range t.Identities.All(t.DB.ReadTxn()) {
		in.Identities = append(in.Identities, i)
	}
	return in, links, nil
}

// hasPod is true for a pod of another node, and for one of this node as long as
// those that an earlier agent wired are not all attached again.
func (e *Enforcer) hasPod(w *state.Workload) bool {
	return (w.Node != e.cfg.Node || e.adopted != nil) && w.Node != "" && !w.HostNetwork && len(w.IPs) > 0 &&
		w.Phase != "Succeeded" && w.Phase != "Failed"
}

// class numbers a prefix; the number is its own for as long as it is in the
// kernel.
func (e *Enforcer) class(p netip.Prefix) uint64 {
	if n, ok := e.classes[p]; ok {
		return n
	}
	if n, ok := e.numbered[p]; ok {
		return n
	}
	n := e.nextClass
	e.nextClass++
	e.numbered[p] = n
	return n
}
