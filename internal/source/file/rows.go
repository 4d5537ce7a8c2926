// SPDX-License-Identifier: Apache-2.0

package file

import (
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"strconv"

	"github.com/cilium/statedb"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1alpha2 "sigs.k8s.io/network-policy-api/apis/v1alpha2"

	"github.com/weft-mesh/weft/internal/source/manifest"
	"github.com/weft-mesh/weft/internal/state"
)

// newObject computes the row of a decoded object. The decoder has checked all
// that is parsed here; what is not valid all the same is left out.
func newObject(o *manifest.Object) *object {
	out := &object{Object: o}
	switch x := o.Typed.(type) {
	case *corev1.Node:
		out.row = nodeRow(x)
	case *corev1.Namespace:
		out.row = &state.Namespace{Name: x.Name, Labels: x.Labels}
	case *corev1.Pod:
		out.row = workloadRow(x)
	case *corev1.Service:
		out.row = serviceRow(x)
	case *discoveryv1.EndpointSlice:
		out.row = &state.Endpoint{Namespace: x.Namespace, Name: x.Name, Service: x.Labels[discoveryv1.LabelServiceName], Slice: x}
	case *networkingv1.NetworkPolicy:
		out.row = &state.Policy{Kind: "NetworkPolicy", Namespace: x.Namespace, Name: x.Name, NetworkPolicy: &x.Spec}
	case *policyv1alpha2.ClusterNetworkPolicy:
		out.row = &state.Policy{Kind: "ClusterNetworkPolicy", Name: x.Name, ClusterNetworkPolicy: &x.Spec}
	}
	return out
}

// sameRow gives o the row that the object had before where that is equal, so
// that an edit elsewhere in a file costs no more comparisons later.
func sameRow(o *object, before *file) *object {
	if old := before.get(o.Ref); old != nil && reflect.DeepEqual(old.row, o.row) {
		o.row = old.row
	}
	return o
}

func nodeRow(n *corev1.Node) *state.Node {
	row := &state.Node{Name: n.Name, Labels: n.Labels}
	for _, a := range n.Status.Addresses {
		if ip, err := netip.ParseAddr(a.Address); err == nil && a.Type == corev1.NodeInternalIP {
			row.IPs = append(row.IPs, ip)
		}
	}
	for _, c := range n.Spec.PodCIDRs {
		if p, err := netip.ParsePrefix(c); err == nil {
			row.PodCIDRs = append(row.PodCIDRs, p)
		}
	}
	return row
}

func serviceRow(s *corev1.Service) *state.Service {
	row := &state.Service{Namespace: s.Namespace, Name: s.Name, Labels: s.Labels, Spec: &s.Spec}
	if len(s.Status.LoadBalancer.Ingress) > 0 || len(s.Status.Conditions) > 0 {
		row.Status = &s.Status
	}
	return row
}

func workloadRow(p *corev1.Pod) *state.Workload {
	row := &state.Workload{
		Namespace: p.Namespace, Name: p.Name, UID: string(p.UID), Node: p.Spec.NodeName, Labels: p.Labels,
		ServiceAccount: p.Spec.ServiceAccountName, HostNetwork: p.Spec.HostNetwork, Phase: string(p.Status.Phase),
	}
	for _, ip := range p.Status.PodIPs {
		if a, err := netip.ParseAddr(ip.IP); err == nil {
			row.IPs = append(row.IPs, a)
		}
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady {
			row.Ready = c.Status == corev1.ConditionTrue
		}
	}
	for _, c := range p.Spec.InitContainers {
		if c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways { // a sidecar
			row.Ports = appendPorts(row.Ports, c.Ports)
		}
	}
	for _, c := range p.Spec.Containers {
		row.Ports = appendPorts(row.Ports, c.Ports)
	}
	return row
}

func appendPorts(to []state.Port, ports []corev1.ContainerPort) []state.Port {
	for _, p := range ports {
		to = append(to, state.Port{Name: p.Name, Port: uint16(p.ContainerPort), Protocol: p.Protocol})
	}
	return to
}

// rows are the rows that the tables should have, by primary key.
type rows struct {
	nodes      map[string]*state.Node
	namespaces map[string]*state.Namespace
	workloads  map[string]*state.Workload
	services   map[string]*state.Service
	endpoints  map[string]*state.Endpoint
	policies   map[string]*state.Policy
}

func (r *rows) add(row any) {
	switch x := row.(type) {
	case *state.Node:
		put(&r.nodes, nodeKey(x), x)
	case *state.Namespace:
		put(&r.namespaces, namespaceKey(x), x)
	case *state.Workload:
		put(&r.workloads, workloadKey(x), x)
	case *state.Service:
		put(&r.services, serviceKey(x), x)
	case *state.Endpoint:
		put(&r.endpoints, endpointKey(x), x)
	case *state.Policy:
		put(&r.policies, policyKey(x), x)
	}
}

func put[V any](m *map[string]V, key string, v V) {
	if *m == nil {
		*m = map[string]V{}
	}
	(*m)[key] = v
}

// The primary keys of package state, as it builds them.
func nodeKey(n *state.Node) string           { return n.Name }
func namespaceKey(n *state.Namespace) string { return n.Name }
func workloadKey(w *state.Workload) string   { return state.Key(w.Namespace, w.Name) }
func serviceKey(s *state.Service) string     { return state.Key(s.Namespace, s.Name) }
func endpointKey(e *state.Endpoint) string   { return state.Key(e.Namespace, e.Name) }
func policyKey(p *state.Policy) string       { return p.Kind + "/" + state.Key(p.Namespace, p.Name) }
func errorKey(e *state.SourceError) string   { return e.File + "#" + strconv.Itoa(e.Document) }

// implied returns the namespaces with those that only pods mention. These have
// the label that Kubernetes gives every namespace.
func (r *rows) implied() map[string]*state.Namespace {
	all := maps.Clone(r.namespaces)
	for _, w := range r.workloads {
		if all[w.Namespace] == nil {
			put(&all, w.Namespace, &state.Namespace{Name: w.Namespace, Labels: map[string]string{corev1.LabelMetadataName: w.Namespace}})
		}
	}
	return all
}

// write brings the tables to want in one transaction and returns how many rows
// it changed.
func (s *Source) write(want *rows, problems []state.SourceError) (int, error) {
	t := s.tables
	errs := make(map[string]*state.SourceError, len(problems))
	for i := range problems {
		errs[errorKey(&problems[i])] = &problems[i]
	}
	txn := t.DB.WriteTxn(t.Nodes, t.Namespaces, t.Workloads, t.Services, t.Endpoints, t.Policies, t.SourceErrors)
	defer txn.Abort()
	total := 0
	for _, sync := range []func() (int, error){
		func() (int, error) { return syncTable(txn, t.Nodes, nodeKey, want.nodes) },
		func() (int, error) { return syncTable(txn, t.Namespaces, namespaceKey, want.implied()) },
		func() (int, error) { return syncTable(txn, t.Workloads, workloadKey, want.workloads) },
		func() (int, error) { return syncTable(txn, t.Services, serviceKey, want.services) },
		func() (int, error) { return syncTable(txn, t.Endpoints, endpointKey, want.endpoints) },
		func() (int, error) { return syncTable(txn, t.Policies, policyKey, want.policies) },
		func() (int, error) { return syncTable(txn, t.SourceErrors, errorKey, errs) },
	} {
		n, err := sync()
		if err != nil {
			return 0, err
		}
		total += n
	}
	if total > 0 {
		txn.Commit()
	}
	return total, nil
}

// syncTable inserts the rows of want that the table does not have like this,
// and deletes those that want does not have. It returns how many these were.
func syncTable[T any](txn statedb.WriteTxn, table statedb.RWTable[*T], key func(*T) string, want map[string]*T) (int, error) {
	var gone []*T
	same := make(map[string]bool, len(want))
	for row := range table.All(txn) {
		k := key(row)
		w, wanted := want[k]
		if !wanted {
			gone = append(gone, row)
		} else if w == row || reflect.DeepEqual(w, row) {
			same[k] = true
		}
	}
	for _, row := range gone {
		if _, _, err := table.Delete(txn, row); err != nil {
			return 0, fmt.Errorf("delete from table %s: %w", table.Name(), err)
		}
	}
	changes := len(gone)
	for k, row := range want {
		if same[k] {
			continue
		}
		if _, _, err := table.Insert(txn, row); err != nil {
			return 0, fmt.Errorf("insert into table %s: %w", table.Name(), err)
		}
		changes++
	}
	return changes, nil
}
