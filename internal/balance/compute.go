// SPDX-License-Identifier: Apache-2.0

package balance

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/weft-mesh/weft/internal/state"
)

// Node is the node that the service ports are computed for.
type Node struct {
	Name string
	IPs  []netip.Addr // where its NodePorts are
	Zone string       // empty where the node has none
}

// NodeOf reads a row.
func NodeOf(n *state.Node) Node {
	return Node{Name: n.Name, IPs: n.IPs, Zone: n.Labels[corev1.LabelTopologyZone]}
}

// Input is one Service and all that it depends on. Nothing of it is changed, and
// the result refers to parts of it.
type Input struct {
	Service *state.Service
	// Slices are the EndpointSlices of the Service, in any order; those of other
	// Services are skipped.
	Slices []*state.Endpoint
	Node   Node
}

// computation is the work on one Input.
type computation struct {
	in        *Input
	problems  []Problem
	service   problems            // those of the Service
	slices    []*state.Endpoint   // those of the input that count
	endpoints []*endpoint         // in order of address
	ready     map[netip.Addr]bool // ready endpoints of this node; nil: not counted
}

// Compute returns the service ports of one Service, in order of name and
// protocol, and what of it had to be left out, in order. It follows kube-proxy
// of Kubernetes 1.36; comments name the file where a rule comes from. There are
// none for a Service that is headless, an ExternalName or served by another
// proxy (ShouldSkipService in pkg/proxy/util/utils.go). A service port without
// any backend is there: connections to it are refused.
//
// Services that claim the same address and port are not told from one another
// here.
func Compute(in Input) ([]ServicePort, []Problem) {
	if !served(in.Service) {
		return nil, nil
	}
	c := &computation{in: &in}
	c.service = problems{object: "Service " + state.Key(in.Service.Namespace, in.Service.Name), list: &c.problems}
	as := c.addressesOf()
	if len(clusterIPs(in.Service.Spec)) == 0 {
		c.service.add("spec.clusterIP", "", "an address, or None")
	}
	base, ok := c.common()
	if !ok {
		as.balancer = nil
	}
	var out []ServicePort
	if len(as.cluster) > 0 {
		c.collect()
		out = c.ports(&base, &as)
	}
	sortProblems(c.problems)
	return out, c.problems
}

func served(s *state.Service) bool {
	if s == nil || s.Spec == nil || s.Spec.Type == corev1.ServiceTypeExternalName {
		return false
	}
	_, other := s.Labels[proxyNameLabel]
	return !other && !slices.Contains(clusterIPs(s.Spec), corev1.ClusterIPNone)
}

// common returns what all ports have, and whether LoadBalancer frontends can be
// served.
func (c *computation) common() (ServicePort, bool) {
	spec := c.in.Service.Spec
	p := ServicePort{Name: Name{Namespace: c.in.Service.Namespace, Service: c.in.Service.Name}}
	p.Affinity = c.affinity()
	p.LocalExternal = externalLocal(spec)
	ranges, ok := c.sourceRanges()
	p.SourceRanges = ranges
	// NeedsHealthCheck in pkg/api/v1/service/util.go.
	if n := spec.HealthCheckNodePort; n != 0 && spec.Type == corev1.ServiceTypeLoadBalancer && p.LocalExternal {
		if p.HealthCheckPort, _ = portNumber(&n); p.HealthCheckPort == 0 {
			c.service.add("spec.healthCheckNodePort", n, "1 to 65535")
		}
	}
	return p, ok
}

// externalLocal is ExternalPolicyLocal in pkg/api/v1/service/util.go.
func externalLocal(spec *corev1.ServiceSpec) bool {
	accessible := spec.Type == corev1.ServiceTypeLoadBalancer || spec.Type == corev1.ServiceTypeNodePort || len(spec.ExternalIPs) > 0
	return accessible && spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal
}

// affinity is 0 for none.
func (c *computation) affinity() time.Duration {
	const day = 86400
	spec := c.in.Service.Spec
	switch spec.SessionAffinity {
	case corev1.ServiceAffinityClientIP:
	case "", corev1.ServiceAffinityNone:
		return 0
	default:
		c.service.add("spec.sessionAffinity", string(spec.SessionAffinity), "None or ClientIP")
		return 0
	}
	seconds := corev1.DefaultClientIPServiceAffinitySeconds
	if a := spec.SessionAffinityConfig; a != nil && a.ClientIP != nil && a.ClientIP.TimeoutSeconds != nil {
		if t := *a.ClientIP.TimeoutSeconds; t >= 1 && t <= day {
			seconds = t
		} else {
			c.service.add("spec.sessionAffinityConfig.clientIP.timeoutSeconds", t, fmt.Sprintf("1 to %d seconds; taken as %d", day, seconds))
		}
	}
	return time.Duration(seconds) * time.Second
}

// ports computes the service ports from what they have in common.
func (c *computation) ports(base *ServicePort, as *addresses) []ServicePort {
	given := c.in.Service.Spec.Ports
	order := make([]int, len(given))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return comparePorts(&given[a], &given[b]) })
	if base.HealthCheckPort != 0 {
		c.ready = map[netip.Addr]bool{}
	}
	out := make([]ServicePort, 0, len(given))
	for _, i := range order {
		if !c.checkPort(i, &given[i]) {
			continue
		}
		p := *base
		p.Name.Port, p.Name.Protocol = given[i].Name, orTCP(given[i].Protocol)
		p.Frontends = c.frontendsOf(as, &given[i])
		if c.taken(i, out, &p) {
			continue
		}
		c.fill(&p, as)
		out = append(out, p)
	}
	for i := range out {
		out[i].LocalReady = c.localReady()
	}
	return out
}

func comparePorts(a, b *corev1.ServicePort) int {
	return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(orTCP(a.Protocol), orTCP(b.Protocol)),
		cmp.Compare(a.Port, b.Port), cmp.Compare(a.NodePort, b.NodePort))
}

// checkPort says whether a port can be served.
func (c *computation) checkPort(i int, port *corev1.ServicePort) bool {
	field := func(name string) string { return fmt.Sprintf("spec.ports[%d].%s", i, name) }
	switch port.Protocol {
	case "", corev1.ProtocolTCP, corev1.ProtocolUDP:
	case corev1.ProtocolSCTP:
		c.service.add(field("protocol"), string(port.Protocol), "TCP or UDP: weft does not translate SCTP")
		return false
	default:
		c.service.add(field("protocol"), string(port.Protocol), "TCP or UDP")
		return false
	}
	if _, ok := portNumber(&port.Port); !ok {
		c.service.add(field("port"), port.Port, "1 to 65535")
		return false
	}
	if _, ok := portNumber(&port.NodePort); !ok && port.NodePort != 0 {
		c.service.add(field("nodePort"), port.NodePort, "1 to 65535")
	}
	return true
}

// taken says whether another port of the Service has p's name already, and
// takes the frontends from p that others have.
func (c *computation) taken(i int, others []ServicePort, p *ServicePort) bool {
	for j := range others {
		o := &others[j]
		if o.Name == p.Name {
			c.service.add(fmt.Sprintf("spec.ports[%d].name", i), p.Name.Port, "a name that no other port of this protocol has")
			return true
		}
		if o.Name.Protocol != p.Name.Protocol {
			continue
		}
		p.Frontends = slices.DeleteFunc(p.Frontends, func(f Frontend) bool {
			both := slices.ContainsFunc(o.Frontends, f.same)
			if both {
				c.service.add(fmt.Sprintf("spec.ports[%d]", i), netip.AddrPortFrom(f.Addr, f.Port), fmt.Sprintf("an address and port that port %q does not have", o.Name.Port))
			}
			return both
		})
	}
	return len(p.Frontends) == 0
}

// fill computes the backends of p. A family without a cluster address has none.
//
// The sets are those of pkg/proxy/iptables/proxier.go, syncProxyRules: the
// cluster IP goes to the chain of the internal policy; external addresses go to
// KUBE-EXT, which sends what comes from pods and from the node itself to the
// chain of policy Cluster, and the rest to that of the external policy.
func (c *computation) fill(p *ServicePort, as *addresses) {
	spec := c.in.Service.Spec
	internalLocal := spec.InternalTrafficPolicy != nil && *spec.InternalTrafficPolicy == corev1.ServiceInternalTrafficPolicyLocal
	external := slices.ContainsFunc(p.Frontends, func(f Frontend) bool { return f.Kind.External() })
	cluster, local := []Backend{}, []Backend{}
	for _, of := range byFamily(c.targets(p.Name.Port, p.Name.Protocol), as) {
		if external || !internalLocal {
			cluster = clusterSet(cluster, of, c.in.Node)
		}
		if internalLocal || external && p.LocalExternal {
			local = localSet(local, of)
		}
		c.countReady(of)
	}
	p.Internal = cluster
	if internalLocal {
		p.Internal = local
	}
	if !external {
		return
	}
	p.Cluster, p.External = cluster, cluster
	if p.LocalExternal {
		p.External = local
	}
}

// byFamily cuts targets, which are in order of address, into those of IPv4 and
// those of IPv6, without the families that as has not.
func byFamily(ts []target, as *addresses) [][]target {
	n := 0
	for n < len(ts) && ts[n].backend.Addr.Is4() {
		n++
	}
	var out [][]target
	v4, v6 := as.families()
	if v4 {
		out = append(out, ts[:n])
	}
	if v6 {
		out = append(out, ts[n:])
	}
	return out
}

// countReady and localReady count distinct addresses, as LocalReadyEndpoints in
// pkg/proxy/endpointschangetracker.go; localReady is that of the family which
// has more.
func (c *computation) countReady(of []target) {
	if c.ready == nil {
		return
	}
	for _, t := range of {
		if t.local && t.ready() {
			c.ready[t.backend.Addr] = true
		}
	}
}

func (c *computation) localReady() int {
	v4 := 0
	for a := range c.ready {
		if a.Is4() {
			v4++
		}
	}
	return max(v4, len(c.ready)-v4)
}
