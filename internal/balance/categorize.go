// SPDX-License-Identifier: Apache-2.0

package balance

import (
	"slices"

	discoveryv1 "k8s.io/api/discovery/v1"
)

// Which of the targets may be chosen: CategorizeEndpoints of kube-proxy
// (pkg/proxy/topology.go), once for each service port and address family.

// clusterSet appends what the policy Cluster gives to out: the ready targets
// that topology leaves, or else all that serve while they terminate.
func clusterSet(out []Backend, of []target, node Node) []Backend {
	n := len(out)
	out = choose(out, of, byHints(of, node))
	if len(out) == n {
		out = choose(out, of, func(t target) bool { return !t.ready() })
	}
	return out
}

// localSet appends what the policy Local gives to out: the ready targets of
// this node, or else those of this node that serve while they terminate. Hints
// do not count here.
func localSet(out []Backend, of []target) []Backend {
	n := len(out)
	out = choose(out, of, func(t target) bool { return t.local && t.ready() })
	if len(out) == n {
		out = choose(out, of, func(t target) bool { return t.local && !t.ready() })
	}
	return out
}

func choose(out []Backend, of []target, want func(target) bool) []Backend {
	n := 0
	for _, t := range of {
		if want(t) {
			n++
		}
	}
	out = slices.Grow(out, n)
	for _, t := range of {
		if want(t) {
			b := t.backend
			b.Port = t.port
			out = append(out, b)
		}
	}
	return out
}

// byHints returns which ready targets this node should use
// (topologyModeFromHints and availableForTopology in kube-proxy). Hints for
// nodes come before hints for zones; either count only where each ready target
// has one and one of these is for this node. The Service's trafficDistribution
// is not looked at: the EndpointSlice controller turned it into hints.
func byHints(of []target, node Node) func(target) bool {
	some, allNodes, allZones, forNode, forZone := false, true, true, false, false
	for _, t := range of {
		if !t.ready() {
			continue
		}
		some = true
		allNodes = allNodes && t.hints != nil && len(t.hints.ForNodes) > 0
		allZones = allZones && t.hints != nil && len(t.hints.ForZones) > 0
		forNode = forNode || t.forNode(node.Name)
		forZone = forZone || t.forZone(node.Zone)
	}
	switch {
	case some && allNodes && forNode:
		return func(t target) bool { return t.ready() && t.forNode(node.Name) }
	case some && allZones && forZone:
		return func(t target) bool { return t.ready() && t.forZone(node.Zone) }
	}
	return target.ready
}

func (e *endpoint) forNode(name string) bool {
	return e.hints != nil && name != "" && slices.ContainsFunc(e.hints.ForNodes, func(h discoveryv1.ForNode) bool { return h.Name == name })
}

func (e *endpoint) forZone(zone string) bool {
	return e.hints != nil && zone != "" && slices.ContainsFunc(e.hints.ForZones, func(h discoveryv1.ForZone) bool { return h.Name == zone })
}
