// SPDX-License-Identifier: Apache-2.0

package balance

import (
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/weft-mesh/weft/internal/state"
)

// NotServed says why a Service has no service ports on any node; empty where it
// should have some.
func NotServed(s *state.Service) string {
	proxy, other := s.Labels[proxyNameLabel]
	switch {
	case s.Spec.Type == corev1.ServiceTypeExternalName:
		return "a name only, of " + s.Spec.ExternalName
	case other:
		return "left to another proxy, " + proxy
	case slices.Contains(clusterIPs(s.Spec), corev1.ClusterIPNone):
		return "headless, names only"
	}
	return ""
}

// Set names one of the sets of a ServicePort.
type Set string

// The sets, named as the fields of ServicePort.
const (
	InternalSet Set = "internal"
	ClusterSet  Set = "cluster"
	ExternalSet Set = "external"
)

// Sets are those that p has, each with its backends.
func (p *ServicePort) Sets() []NamedSet {
	out := []NamedSet{{InternalSet, p.Internal}}
	if slices.ContainsFunc(p.Frontends, func(f Frontend) bool { return f.Kind.External() }) {
		out = append(out, NamedSet{ClusterSet, p.Cluster}, NamedSet{ExternalSet, p.External})
	}
	return out
}

// NamedSet is a set of backends with its name.
type NamedSet struct {
	Name     Set
	Backends []Backend
}

// Near is the set of clients on this node.
func (k Kind) Near() Set {
	if k.External() {
		return ClusterSet
	}
	return InternalSet
}

// Far is the set of clients from elsewhere; empty for a ClusterIP, which is not
// for them.
func (k Kind) Far() Set {
	if k.External() {
		return ExternalSet
	}
	return ""
}

// NotReady is the state of an endpoint that is never chosen.
const NotReady State = "not ready"

// Why an endpoint is not in a set.
const (
	WhyNotReady    = "not ready"
	WhyTerminating = "terminating, and others are ready"
	WhyElsewhere   = "not on this node, and the policy is Local"
	WhyNodeHints   = "hints are for other nodes"
	WhyZoneHints   = "hints are for other zones"
	WhyFamily      = "the Service has no address of its family"
)

// Explained is an endpoint of a service port.
type Explained struct {
	Backend // State may be NotReady
	// Why not, for each set that the service port has and the endpoint is not in.
	Why map[Set]string
}

// Explain returns every endpoint of a service port that Compute returned for in,
// in order of address and port, with why it is not chosen where it is not.
func Explain(in Input, p *ServicePort) []Explained {
	c := &computation{in: &in}
	c.service = problems{list: &c.problems}
	as := c.addressesOf()
	c.collect()
	serving := c.targets(p.Name.Port, p.Name.Protocol)
	var out []Explained
	for _, t := range serving {
		b := t.backend
		b.Port = t.port
		out = append(out, Explained{Backend: b})
	}
	for _, b := range c.notReady(p) {
		if !slices.ContainsFunc(out, func(x Explained) bool { return x.Addr == b.Addr && x.Port == b.Port }) {
			out = append(out, Explained{Backend: b})
		}
	}
	slices.SortFunc(out, func(a, b Explained) int {
		return (&Backend{Addr: a.Addr, Port: a.Port}).compare(&Backend{Addr: b.Addr, Port: b.Port})
	})
	e := explainer{service: in.Service.Spec, node: in.Node}
	e.v4, e.v6 = as.families()
	for _, s := range p.Sets() {
		e.explain(out, s, serving)
	}
	return out
}

func (b *Backend) compare(o *Backend) int {
	return netip.AddrPortFrom(b.Addr, b.Port).Compare(netip.AddrPortFrom(o.Addr, o.Port))
}

// notReady returns the endpoints that collect leaves out for their state.
func (c *computation) notReady(p *ServicePort) []Backend {
	numbers := c.numbers(p.Name.Port, p.Name.Protocol)
	var out []Backend
	for i, row := range c.in.Slices {
		if !c.relevant(row) {
			continue
		}
		for j := range row.Slice.Endpoints {
			from := &row.Slice.Endpoints[j]
			if c.stateOf(&from.Conditions) != "" || len(from.Addresses) == 0 {
				continue
			}
			a, want := usable(from.Addresses[0])
			if want != "" || a.Is4() != (row.Slice.AddressType == discoveryv1.AddressTypeIPv4) {
				continue
			}
			for _, n := range numbers[i] {
				b := backendOf(from, row.Namespace, a, NotReady)
				b.Port = n
				out = append(out, b)
			}
		}
	}
	return out
}

// explainer knows the rules of one Service on one node.
type explainer struct {
	service *corev1.ServiceSpec
	node    Node
	v4, v6  bool // families that the Service has
}

func (e *explainer) explain(out []Explained, s NamedSet, serving []target) {
	for i := range out {
		x := &out[i]
		if slices.ContainsFunc(s.Backends, func(b Backend) bool { return b.Addr == x.Addr && b.Port == x.Port }) {
			continue
		}
		if x.Why == nil {
			x.Why = map[Set]string{}
		}
		x.Why[s.Name] = e.why(x, s.Name, serving)
	}
}

func (e *explainer) why(x *Explained, s Set, serving []target) string {
	switch {
	case x.Addr.Is4() && !e.v4 || x.Addr.Is6() && !e.v6:
		return WhyFamily
	case x.State == NotReady:
		return WhyNotReady
	case e.local(s) && x.Node != e.node.Name:
		return WhyElsewhere
	case x.State == Terminating:
		return WhyTerminating
	}
	for _, t := range serving {
		if t.ready() && t.backend.Addr.Is4() == x.Addr.Is4() && t.forNode(e.node.Name) {
			return WhyNodeHints
		}
	}
	return WhyZoneHints
}

// local says whether a set is of this node only.
func (e *explainer) local(s Set) bool {
	switch s {
	case InternalSet:
		p := e.service.InternalTrafficPolicy
		return p != nil && *p == corev1.ServiceInternalTrafficPolicyLocal
	case ExternalSet:
		return externalLocal(e.service)
	}
	return false
}

// Rule says which endpoints are in a set, of what Explain returned, for each
// family; empty for one that the Service has not.
func Rule(in Input, s NamedSet, all []Explained) (v4, v6 string) {
	e := explainer{service: in.Service.Spec, node: in.Node}
	c := &computation{in: &in}
	c.service = problems{list: &c.problems}
	as := c.addressesOf()
	e.v4, e.v6 = as.families()
	if e.v4 {
		v4 = e.rule(s, all, netip.Addr.Is4)
	}
	if e.v6 {
		v6 = e.rule(s, all, netip.Addr.Is6)
	}
	return v4, v6
}

func (e *explainer) rule(s NamedSet, all []Explained, family func(netip.Addr) bool) string {
	where := ""
	if e.local(s.Name) {
		where = " of this node"
	}
	text := "none is ready" + where
	for _, x := range all {
		if !family(x.Addr) {
			continue
		}
		switch why, left := x.Why[s.Name]; {
		case why == WhyNodeHints:
			return "ready ones with hints for this node"
		case why == WhyZoneHints:
			return "ready ones with hints for zone " + e.node.Zone
		case !left && x.State == Terminating:
			text = "terminating ones" + where + ", for none is ready"
		case !left:
			text = "ready ones" + where
		}
	}
	return text
}
