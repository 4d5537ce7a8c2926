// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"context"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"
	corev1 "k8s.io/api/core/v1"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
	"github.com/weft-mesh/weft/internal/balance"
	"github.com/weft-mesh/weft/internal/datapath/service"
	"github.com/weft-mesh/weft/internal/services"
	"github.com/weft-mesh/weft/internal/state"
)

// Services tells which Services are in force on this node; *services.Driver
// does. What it returns stays as it is.
type Services interface {
	// Ports returns the service ports in force, in order of name: those of one
	// Service, or all where both names are empty.
	Ports(namespace, service string) []balance.ServicePort
	// Problems returns what of Services and EndpointSlices is left out.
	Problems() []balance.Problem
	// Input returns what the service ports of a Service are computed from.
	Input(namespace, service string) (balance.Input, bool)
	// Kernel reads what the kernel has of a service port; ID is 0 where it has
	// nothing.
	Kernel(balance.Name) (service.InForce, error)
	// Dump prints the kernel's maps as text.
	Dump() (string, error)
	Status() services.Status
}

// services returns the provider, once there is one.
func (n *node) services() (Services, error) {
	if n.providers.Services == nil {
		return nil, status.Error(codes.Unimplemented, "this agent serves no Services")
	}
	return n.providers.Services()
}

// DescribeServices fills the part of a status that is about Services; denied is
// how many networks are on the deny list.
func DescribeServices(s Services, edge Edge, denied int) *weftv1.ServicesStatus {
	st := s.Status()
	out := &weftv1.ServicesStatus{
		Services: uint32(st.Services), Ports: uint32(st.Ports), Frontends: uint32(st.Frontends), Backends: uint32(st.Backends),
		SyncSeconds: st.Sync.Seconds(), MaglevTables: uint32(st.Maglev.Tables), MaglevBytes: st.Maglev.Bytes,
		External: sourceName(edge.DSR), Xdp: edge.String(), Denied: uint32(denied), Flows: st.Flows.Live, Cut: st.Cut,
	}
	for _, p := range s.Problems() {
		out.Problems = append(out.Problems, p.String())
	}
	if st.Err != nil {
		out.Error = st.Err.Error()
	}
	if !st.Changed.IsZero() {
		out.Changed = timestamppb.New(st.Changed)
	}
	return out
}

func sourceName(dsr bool) string {
	if dsr {
		return "dsr"
	}
	return "snat"
}

// ListServices implements weftv1.NodeServer.
func (n *node) ListServices(context.Context, *weftv1.ListServicesRequest) (*weftv1.ListServicesResponse, error) {
	s, err := n.services()
	if err != nil {
		return nil, err
	}
	ports := map[string][]balance.ServicePort{}
	for _, p := range s.Ports("", "") {
		key := state.Key(p.Name.Namespace, p.Name.Service)
		ports[key] = append(ports[key], p)
	}
	problems := problemsOf(s, n.providers.Tables)
	r := &weftv1.ListServicesResponse{}
	for row := range n.providers.Tables.Services.All(n.providers.Tables.DB.ReadTxn()) {
		key := state.Key(row.Namespace, row.Name)
		v := &weftv1.ServiceSummary{
			Namespace: row.Namespace, Name: row.Name, Type: typeOf(row.Spec), NotServed: balance.NotServed(row), Problems: problems[key],
		}
		for i := range ports[key] {
			v.Ports = append(v.Ports, summary(&ports[key][i]))
		}
		r.Services = append(r.Services, v)
	}
	return r, nil
}

// problemsOf returns the problems of each Service, those of its slices too.
func problemsOf(s Services, tables *state.Tables) map[string][]string {
	out, owners := map[string][]string{}, map[string]string{}
	list := s.Problems()
	if len(list) == 0 {
		return out
	}
	txn := tables.DB.ReadTxn()
	for row := range tables.Services.All(txn) {
		owners["Service "+state.Key(row.Namespace, row.Name)] = state.Key(row.Namespace, row.Name)
	}
	for row := range tables.Endpoints.All(txn) {
		owners["EndpointSlice "+state.Key(row.Namespace, row.Name)] = state.Key(row.Namespace, row.Service)
	}
	for _, p := range list {
		text := p.Field + ": " + p.Value + ": want " + p.Want
		if owner := owners[p.Object]; p.Object != "Service "+owner {
			text = p.String()
		}
		out[owners[p.Object]] = append(out[owners[p.Object]], text)
	}
	return out
}

func typeOf(spec *corev1.ServiceSpec) string {
	if spec.Type == "" {
		return string(corev1.ServiceTypeClusterIP)
	}
	return string(spec.Type)
}

func summary(p *balance.ServicePort) *weftv1.ServicePortSummary {
	out := &weftv1.ServicePortSummary{
		Name: p.Name.Port, Protocol: string(p.Name.Protocol), AffinitySeconds: uint32(p.Affinity / time.Second),
		Near: most(p.Internal), Far: most(p.External),
	}
	for _, f := range p.Frontends {
		out.Frontends = append(out.Frontends, frontend(f))
		out.External = out.External || f.Kind.External()
	}
	return out
}

// most is how many backends there are in the family that has more: a pod of two
// families is one backend to whoever counts.
func most(set []balance.Backend) uint32 {
	v4 := len(ofFamily(set, true))
	return uint32(max(v4, len(set)-v4))
}

func frontend(f balance.Frontend) *weftv1.ServiceFrontend {
	return &weftv1.ServiceFrontend{
		Kind: string(f.Kind), Address: f.Addr.String(), Port: uint32(f.Port), Near: string(f.Kind.Near()), Far: string(f.Kind.Far()),
	}
}

// DumpServices implements weftv1.NodeServer.
func (n *node) DumpServices(context.Context, *weftv1.DumpServicesRequest) (*weftv1.DumpServicesResponse, error) {
	s, err := n.services()
	if err != nil {
		return nil, err
	}
	text, err := s.Dump()
	if err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	}
	return &weftv1.DumpServicesResponse{Text: text}, nil
}
