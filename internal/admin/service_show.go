// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"context"
	"net/netip"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
	"github.com/weft-mesh/weft/internal/balance"
	"github.com/weft-mesh/weft/internal/datapath/service"
	"github.com/weft-mesh/weft/internal/state"
)

// ShowService implements weftv1.NodeServer.
func (n *node) ShowService(_ context.Context, req *weftv1.ShowServiceRequest) (*weftv1.ShowServiceResponse, error) {
	s, err := n.services()
	if err != nil {
		return nil, err
	}
	tables := n.providers.Tables
	row, _, ok := tables.Services.Get(tables.DB.ReadTxn(), state.ServiceByName.Query(req.Service))
	if !ok {
		return nil, status.Errorf(codes.NotFound, "no Service %q: want NAMESPACE/NAME", req.Service)
	}
	r := &weftv1.ShowServiceResponse{
		Node: n.providers.Node, Namespace: row.Namespace, Name: row.Name, Type: typeOf(row.Spec), NotServed: balance.NotServed(row),
		Problems: problemsOf(s, tables)[req.Service],
	}
	if r.NotServed != "" {
		return r, nil
	}
	r.InternalTrafficPolicy = "Cluster"
	if p := row.Spec.InternalTrafficPolicy; p != nil {
		r.InternalTrafficPolicy = string(*p)
	}
	in, ok := s.Input(row.Namespace, row.Name)
	if !ok {
		return r, nil // it has just come
	}
	ports := s.Ports(row.Namespace, row.Name)
	for i := range ports {
		port, err := showPort(s, in, &ports[i])
		if err != nil {
			return nil, status.Error(codes.Internal, err.Error())
		}
		r.Ports = append(r.Ports, port)
		common(r, &ports[i])
	}
	return r, nil
}

// common takes what is the same for all ports of a Service.
func common(r *weftv1.ShowServiceResponse, p *balance.ServicePort) {
	r.AffinitySeconds = uint32(p.Affinity / time.Second)
	r.HealthCheckPort, r.LocalReady = uint32(p.HealthCheckPort), uint32(p.LocalReady)
	r.SourceRanges = nil
	for _, x := range p.SourceRanges {
		r.SourceRanges = append(r.SourceRanges, x.String())
	}
	if slices.ContainsFunc(p.Frontends, func(f balance.Frontend) bool { return f.Kind.External() }) {
		r.ExternalTrafficPolicy = "Cluster"
		if p.LocalExternal {
			r.ExternalTrafficPolicy = "Local"
		}
	}
}

func showPort(s Services, in balance.Input, p *balance.ServicePort) (*weftv1.ServicePort, error) {
	k, err := s.Kernel(p.Name)
	if err != nil {
		return nil, err
	}
	out := &weftv1.ServicePort{Name: p.Name.Port, Protocol: string(p.Name.Protocol), Id: k.ID, AffinityClients: uint32(len(k.Affinity))}
	for _, f := range p.Frontends {
		out.Frontends = append(out.Frontends, frontend(f))
	}
	all := balance.Explain(in, p)
	for _, set := range p.Sets() {
		in4, in6 := balance.Rule(in, set, all)
		out.Sets = append(out.Sets, &weftv1.ServiceSet{
			Name: string(set.Name), Ids: k.Sets[set.Name].IDs, Backends: uint32(len(set.Backends)),
			Rule: bothFamilies(in4, in6), Maglev: uint32(max(len(k.Sets[set.Name].IPv4), len(k.Sets[set.Name].IPv6))),
		})
	}
	shares := sharesOf(p, &k)
	for i := range all {
		b := showBackend(&all[i], p, &k, shares)
		out.Connections += b.Connections
		out.Backends = append(out.Backends, b)
	}
	return out, nil
}

// bothFamilies says once what is the same.
func bothFamilies(v4, v6 string) string {
	switch {
	case v4 == v6 || v6 == "":
		return v4
	case v4 == "":
		return v6
	}
	return "IPv4: " + v4 + "; IPv6: " + strings.TrimSpace(v6)
}

// sharesOf returns how often a set gives each of its backends.
func sharesOf(p *balance.ServicePort, k *service.InForce) map[balance.Set]map[netip.AddrPort]float64 {
	out := map[balance.Set]map[netip.AddrPort]float64{}
	for _, s := range p.Sets() {
		shares := map[netip.AddrPort]float64{}
		for _, v4 := range []bool{true, false} {
			of := ofFamily(s.Backends, v4)
			counts := countEntries(table(k.Sets[s.Name], v4))
			for _, b := range of {
				at := netip.AddrPortFrom(b.Addr, b.Port)
				shares[at] = 1 / float64(len(of))
				if size := len(table(k.Sets[s.Name], v4)); size > 0 {
					shares[at] = float64(counts[k.Backends[at].ID]) / float64(size)
				}
			}
		}
		out[s.Name] = shares
	}
	return out
}

// table is the Maglev table of a family; nil where the choice is random.
func table(s service.Sets, v4 bool) []uint32 {
	if v4 {
		return s.IPv4
	}
	return s.IPv6
}

func countEntries(table []uint32) map[uint32]int {
	out := map[uint32]int{}
	for _, b := range table {
		out[b]++
	}
	return out
}

func ofFamily(bs []balance.Backend, v4 bool) []balance.Backend {
	var out []balance.Backend
	for _, b := range bs {
		if b.Addr.Is4() == v4 {
			out = append(out, b)
		}
	}
	return out
}

func showBackend(x *balance.Explained, p *balance.ServicePort, k *service.InForce, shares map[balance.Set]map[netip.AddrPort]float64) *weftv1.ServiceBackend {
	at := netip.AddrPortFrom(x.Addr, x.Port)
	b := &weftv1.ServiceBackend{
		Address: x.Addr.String(), Port: uint32(x.Port), Pod: x.Pod, Node: x.Node, Zone: x.Zone, State: string(x.State),
		Id: k.Backends[at].ID, Connections: k.Backends[at].Hits,
	}
	for _, s := range p.Sets() {
		why, left := x.Why[s.Name]
		b.Uses = append(b.Uses, &weftv1.BackendUse{Set: string(s.Name), Chosen: !left, Share: shares[s.Name][at], WhyNot: why})
	}
	return b
}
