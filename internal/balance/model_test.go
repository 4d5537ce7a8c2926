// SPDX-License-Identifier: Apache-2.0

package balance

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"sort"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/weft-mesh/weft/internal/state"
)

// This file has a second, dumb implementation of the rules, which answers one
// question at a time and works on text, and compares it with Compute on random
// Services.

// reach says for each frontend, as "ADDRESS:PORT/PROTOCOL inside|outside", what
// a client reaches, as sorted "ADDRESS:PORT".
type reach map[string][]string

// computed is the answer of Compute in that form.
func computed(ports []ServicePort) reach {
	out := reach{}
	for _, p := range ports {
		for _, f := range p.Frontends {
			key := fmt.Sprintf("%s/%s ", netip.AddrPortFrom(f.Addr, f.Port), p.Name.Protocol)
			if f.Kind == ClusterIP {
				out[key+"inside"] = names(p.Internal, f.Addr)
				continue
			}
			out[key+"inside"] = names(p.Cluster, f.Addr)
			out[key+"outside"] = names(p.External, f.Addr)
		}
	}
	return out
}

func names(set []Backend, of netip.Addr) []string {
	out := []string{}
	for _, b := range set {
		if b.Addr.Is4() == of.Is4() {
			out = append(out, netip.AddrPortFrom(b.Addr, b.Port).String())
		}
	}
	sort.Strings(out)
	return out
}

// expected is the answer of the model.
func expected(in Input) reach {
	out := reach{}
	s := in.Service.Spec
	if s.Type == corev1.ServiceTypeExternalName || s.ClusterIP == "None" {
		return out
	}
	itpLocal := s.InternalTrafficPolicy != nil && *s.InternalTrafficPolicy == "Local"
	etpLocal := s.ExternalTrafficPolicy == "Local"
	for _, port := range s.Ports {
		if port.Protocol == "SCTP" {
			continue
		}
		at := func(ip string, number int32, side string, local bool) {
			family := familyOf(ip)
			if !slices.ContainsFunc(s.ClusterIPs, func(c string) bool { return familyOf(c) == family }) {
				return
			}
			key := fmt.Sprintf("%s/%s %s", netip.AddrPortFrom(netip.MustParseAddr(ip), uint16(number)), port.Protocol, side)
			out[key] = reached(in, port.Name, string(port.Protocol), family, local)
		}
		externals := slices.Clone(s.ExternalIPs)
		if in.Service.Status != nil && s.Type == "LoadBalancer" {
			for _, g := range in.Service.Status.LoadBalancer.Ingress {
				if g.IPMode == nil || *g.IPMode != "Proxy" {
					externals = append(externals, g.IP)
				}
			}
		}
		for _, ip := range s.ClusterIPs {
			at(ip, port.Port, "inside", itpLocal)
		}
		for _, ip := range externals {
			at(ip, port.Port, "inside", false)
			at(ip, port.Port, "outside", etpLocal)
		}
		for _, ip := range in.Node.IPs {
			if port.NodePort != 0 {
				at(ip.String(), port.NodePort, "inside", false)
				at(ip.String(), port.NodePort, "outside", etpLocal)
			}
		}
	}
	return out
}

func familyOf(ip string) string {
	if strings.Contains(ip, ":") {
		return "IPv6"
	}
	return "IPv4"
}

// fact is what the model knows of one ADDRESS:PORT.
type fact struct {
	ready, leaving, local bool
	zones, nodes          []string
}

// reached are the backends of one port in one family under one policy.
func reached(in Input, name, protocol, family string, local bool) []string {
	facts := factsOf(in, name, protocol, family)
	pick := func(want func(fact) bool) []string {
		out := []string{}
		for k, f := range facts {
			if want(f) {
				out = append(out, k)
			}
		}
		sort.Strings(out)
		return out
	}
	var tries []func(fact) bool
	if local {
		tries = append(tries, func(f fact) bool { return f.ready && f.local })
		tries = append(tries, func(f fact) bool { return f.leaving && f.local })
	} else {
		ready := pick(func(f fact) bool { return f.ready })
		if len(pick(func(f fact) bool { return f.ready && len(f.nodes) > 0 })) == len(ready) {
			tries = append(tries, func(f fact) bool { return f.ready && slices.Contains(f.nodes, in.Node.Name) })
		}
		if len(pick(func(f fact) bool { return f.ready && len(f.zones) > 0 })) == len(ready) {
			tries = append(tries, func(f fact) bool { return f.ready && slices.Contains(f.zones, in.Node.Zone) })
		}
		tries = append(tries, func(f fact) bool { return f.ready })
		tries = append(tries, func(f fact) bool { return f.leaving })
	}
	for _, t := range tries {
		if got := pick(t); len(got) > 0 {
			return got
		}
	}
	return []string{}
}

func factsOf(in Input, name, protocol, family string) map[string]fact {
	facts := map[string]fact{}
	for _, row := range in.Slices {
		if string(row.Slice.AddressType) != family {
			continue
		}
		for _, p := range row.Slice.Ports {
			if p.Port == nil || *p.Name != name || string(*p.Protocol) != protocol {
				continue
			}
			for _, e := range row.Slice.Endpoints {
				k, f := factOf(in, e, *p.Port)
				old, twice := facts[k]
				if better := f.ready && !old.ready || f.ready == old.ready && f.local && !old.local; (f.ready || f.leaving) && (!twice || better) {
					facts[k] = f
				}
			}
		}
	}
	return facts
}

func factOf(in Input, e discoveryv1.Endpoint, port int32) (string, fact) {
	f := fact{ready: in.Service.Spec.PublishNotReadyAddresses || e.Conditions.Ready == nil || *e.Conditions.Ready}
	serving := e.Conditions.Serving != nil && *e.Conditions.Serving
	f.leaving = !f.ready && serving && e.Conditions.Terminating != nil && *e.Conditions.Terminating
	f.local = e.NodeName != nil && *e.NodeName == in.Node.Name
	if e.Hints != nil {
		for _, z := range e.Hints.ForZones {
			f.zones = append(f.zones, z.Name)
		}
		for _, n := range e.Hints.ForNodes {
			f.nodes = append(f.nodes, n.Name)
		}
	}
	return netip.AddrPortFrom(netip.MustParseAddr(e.Addresses[0]), uint16(port)).String(), f
}

// random makes inputs that the API server would accept.
type random struct{ *rand.Rand }

func (r random) chance(percent int) bool { return r.IntN(100) < percent }

func pickOf[T any](r random, of ...T) T { return of[r.IntN(len(of))] }

// input has few names and addresses, so that they meet often.
func (r random) input() Input {
	in := Input{Service: r.service(), Node: here}
	in.Node.Zone = pickOf(r, "a", "b", "")
	// Hints of an address are the same in all slices: it is not said which count.
	hints := map[string]*discoveryv1.EndpointHints{}
	everywhere := r.chance(70)
	for i := range r.IntN(5) {
		in.Slices = append(in.Slices, r.slice(fmt.Sprintf("web-%d", i), hints, everywhere))
	}
	return in
}

func (r random) service() *state.Service {
	s := &corev1.ServiceSpec{
		Type:                     pickOf(r, corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort, corev1.ServiceTypeLoadBalancer),
		PublishNotReadyAddresses: r.chance(5),
	}
	ips := [][]string{{"10.96.0.10"}, {"fd00:10:96::10"}, {"10.96.0.10", "fd00:10:96::10"}, {"fd00:10:96::10", "10.96.0.10"}, {"None"}}
	s.ClusterIPs = pickOf(r, ips...)
	s.ClusterIP = s.ClusterIPs[0]
	if r.chance(30) {
		s.ExternalIPs = []string{"198.51.100.1", "2001:db8::1"}
	}
	if r.chance(50) {
		s.InternalTrafficPolicy = new(pickOf(r, corev1.ServiceInternalTrafficPolicyCluster, corev1.ServiceInternalTrafficPolicyLocal))
	}
	if s.Type != corev1.ServiceTypeClusterIP || len(s.ExternalIPs) > 0 {
		s.ExternalTrafficPolicy = pickOf(r, corev1.ServiceExternalTrafficPolicyCluster, corev1.ServiceExternalTrafficPolicyLocal)
	}
	row := &state.Service{Namespace: "shop", Name: "web", Spec: s}
	if s.Type == corev1.ServiceTypeLoadBalancer && r.chance(80) {
		row.Status = &corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{Ingress: []corev1.LoadBalancerIngress{{IP: "203.0.113.9"}, {IP: "2001:db8::9"}}}}
		row.Status.LoadBalancer.Ingress[r.IntN(2)].IPMode = pickOf(r, nil, new(corev1.LoadBalancerIPModeProxy), new(corev1.LoadBalancerIPModeVIP))
	}
	for i, name := range []string{"dns", "web", "z"}[:1+r.IntN(3)] {
		p := corev1.ServicePort{Name: name, Port: int32(80 + i), Protocol: r.protocol(), TargetPort: intstr.FromString(name)}
		if s.Type != corev1.ServiceTypeClusterIP && r.chance(80) {
			p.NodePort = int32(30000 + i)
		}
		s.Ports = append(s.Ports, p)
	}
	return row
}

func (r random) protocol() corev1.Protocol {
	return pickOf(r, corev1.ProtocolTCP, corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP)
}

func (r random) slice(name string, hints map[string]*discoveryv1.EndpointHints, everywhere bool) *state.Endpoint {
	s := &discoveryv1.EndpointSlice{AddressType: pickOf(r, discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6)}
	for _, port := range []string{"dns", "web"} {
		for _, protocol := range []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP} {
			if r.chance(80) {
				p := discoveryv1.EndpointPort{Name: new(port), Protocol: new(protocol), Port: new(int32(8080 + r.IntN(2)))}
				if r.chance(5) {
					p.Port = nil
				}
				s.Ports = append(s.Ports, p)
			}
		}
	}
	for range r.IntN(6) {
		s.Endpoints = append(s.Endpoints, r.endpoint(s.AddressType, hints, everywhere))
	}
	return &state.Endpoint{Namespace: "shop", Name: name, Service: "web", Slice: s}
}

func (r random) endpoint(t discoveryv1.AddressType, hints map[string]*discoveryv1.EndpointHints, everywhere bool) discoveryv1.Endpoint {
	a := fmt.Sprintf("10.244.1.%d", 2+r.IntN(8))
	if t == discoveryv1.AddressTypeIPv6 {
		a = fmt.Sprintf("fd00:10:244:1::%d", 2+r.IntN(8))
	}
	e := discoveryv1.Endpoint{Addresses: []string{a}, NodeName: pickOf(r, nil, new("node1"), new("node2"), new("node2"))}
	flag := func() *bool { return pickOf(r, nil, new(true), new(false)) }
	e.Conditions = discoveryv1.EndpointConditions{Ready: flag(), Serving: flag(), Terminating: flag()}
	if r.chance(50) {
		e.Conditions = discoveryv1.EndpointConditions{Ready: new(false), Serving: new(true), Terminating: flag()}
	}
	h, known := hints[a]
	if !known && (everywhere || r.chance(50)) {
		h = &discoveryv1.EndpointHints{}
		if r.chance(90) {
			h.ForZones = []discoveryv1.ForZone{{Name: pickOf(r, "a", "b", "c")}}
		}
		if r.chance(60) {
			h.ForNodes = []discoveryv1.ForNode{{Name: pickOf(r, "node1", "node2")}}
		}
	}
	hints[a], e.Hints = h, h
	return e
}

// shuffled is the same input in another order.
func (r random) shuffled(in Input) Input {
	out := in
	out.Service = &state.Service{Namespace: in.Service.Namespace, Name: in.Service.Name, Spec: in.Service.Spec.DeepCopy(), Status: in.Service.Status.DeepCopy()}
	mix(r, out.Service.Spec.Ports)
	mix(r, out.Service.Spec.ExternalIPs)
	mix(r, out.Service.Spec.ClusterIPs)
	out.Node.IPs = slices.Clone(in.Node.IPs)
	mix(r, out.Node.IPs)
	out.Slices = nil
	for _, row := range in.Slices {
		c := *row
		c.Slice = row.Slice.DeepCopy()
		mix(r, c.Slice.Ports)
		mix(r, c.Slice.Endpoints)
		out.Slices = append(out.Slices, &c)
	}
	mix(r, out.Slices)
	return out
}

func mix[T any](r random, s []T) { r.Shuffle(len(s), func(i, j int) { s[i], s[j] = s[j], s[i] }) }

func TestModel(t *testing.T) {
	var met census
	for seed := range uint64(20000) {
		r := random{rand.New(rand.NewPCG(seed, 4))}
		in := r.input()
		ports, problems := Compute(in)
		if d := cmp.Diff(expected(in), computed(ports)); d != "" {
			t.Fatalf("seed %d: what clients reach (-model +Compute):\n%s", seed, d)
		}
		if slices.ContainsFunc(problems, func(p Problem) bool { return p.Value != `"SCTP"` }) {
			t.Fatalf("seed %d: problems: %v", seed, problems)
		}
		if err := invariant(in, ports); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		if again, _ := Compute(r.shuffled(in)); !reflect.DeepEqual(ports, again) {
			t.Fatalf("seed %d: in another order (-one +other):\n%s", seed, cmp.Diff(show(ports), show(again)))
		}
		met.count(in, ports)
	}
	t.Logf("%+v", met)
	if min(met.Refusing, met.Terminating, met.LocalOnly, met.ByHints) < 500 {
		t.Error("the random Services have too few of what the model knows")
	}
}

// census counts the sets of which there should be some.
type census struct{ Refusing, Terminating, LocalOnly, ByHints int }

func (c *census) count(in Input, ports []ServicePort) {
	for i := range in.Slices {
		in.Slices[i] = &state.Endpoint{Namespace: "shop", Service: "web", Slice: in.Slices[i].Slice.DeepCopy()}
		for j := range in.Slices[i].Slice.Endpoints {
			in.Slices[i].Slice.Endpoints[j].Hints = nil
		}
	}
	plain, _ := Compute(in)
	for i, p := range ports {
		switch {
		case len(p.Internal) == 0:
			c.Refusing++
		case p.Internal[0].State == Terminating:
			c.Terminating++
		}
		if len(p.External) < len(p.Cluster) {
			c.LocalOnly++
		}
		if len(p.Cluster) < len(plain[i].Cluster) {
			c.ByHints++
		}
	}
}

// invariant is what the documentation of ServicePort promises.
func invariant(in Input, ports []ServicePort) error {
	type place struct {
		addr     netip.Addr
		port     uint16
		protocol corev1.Protocol
	}
	seen := map[place]bool{}
	if !slices.IsSortedFunc(ports, func(a, b ServicePort) int {
		return strings.Compare(a.Name.Port+"\x00"+string(a.Name.Protocol), b.Name.Port+"\x00"+string(b.Name.Protocol))
	}) {
		return fmt.Errorf("the ports are not in order: %v", ports)
	}
	for _, p := range ports {
		external := false
		for _, f := range p.Frontends {
			at := place{f.Addr, f.Port, p.Name.Protocol}
			if seen[at] || f.Port == 0 || !f.Addr.IsValid() {
				return fmt.Errorf("frontend %v is twice there, or none", at)
			}
			seen[at] = true
			external = external || f.Kind.External()
		}
		if len(p.Frontends) == 0 || p.Internal == nil || (p.Cluster != nil) != external || (p.External != nil) != external {
			return fmt.Errorf("port %v: %d frontends (external: %v), sets %v, %v, %v", p.Name, len(p.Frontends), external, p.Internal, p.Cluster, p.External)
		}
		if p.Affinity < 0 || (p.HealthCheckPort == 0 && p.LocalReady != 0) {
			return fmt.Errorf("port %v: affinity %s, %d ready", p.Name, p.Affinity, p.LocalReady)
		}
		for _, set := range [][]Backend{p.Internal, p.Cluster, p.External} {
			for i, b := range set {
				if i > 0 && netip.AddrPortFrom(b.Addr, b.Port).Compare(netip.AddrPortFrom(set[i-1].Addr, set[i-1].Port)) <= 0 {
					return fmt.Errorf("port %v: %v comes after %v", p.Name, b, set[i-1])
				}
				if _, want := usable(b.Addr.String()); want != "" || b.Port == 0 || b.State != Active && b.State != Terminating {
					return fmt.Errorf("port %v: backend %v", p.Name, b)
				}
			}
		}
	}
	return nil
}
