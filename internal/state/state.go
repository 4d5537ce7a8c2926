// SPDX-License-Identifier: Apache-2.0

// Package state holds weft's tables: what the sources (manifest folder,
// Kubernetes, CNI) know, as immutable rows with snapshots and watches. Sources
// write, everything else reads; no row is changed after it was inserted.
package state

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"sort"
	"strconv"
	"strings"

	"github.com/cilium/statedb"
	"github.com/cilium/statedb/index"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1alpha2 "sigs.k8s.io/network-policy-api/apis/v1alpha2"
)

// Node is a machine of the cluster. Name is unique.
type Node struct {
	Name     string            `json:"name"`
	IPs      []netip.Addr      `json:"ips"`      // InternalIP addresses, in the order of the manifest
	PodCIDRs []netip.Prefix    `json:"podCIDRs"` // at most one for each family
	Labels   map[string]string `json:"labels,omitempty"`
}

// Namespace is a Kubernetes namespace. Name is unique.
type Namespace struct {
	Name   string            `json:"name"`
	Labels map[string]string `json:"labels,omitempty"`
}

// Workload is a pod, on whatever node. Namespace and Name are unique together.
type Workload struct {
	Namespace      string            `json:"namespace"`
	Name           string            `json:"name"`
	UID            string            `json:"uid,omitempty"`
	Node           string            `json:"node"` // empty while not scheduled
	IPs            []netip.Addr      `json:"ips"`  // empty until the pod is wired
	Labels         map[string]string `json:"labels,omitempty"`
	ServiceAccount string            `json:"serviceAccount"` // "default" where the manifest names none
	HostNetwork    bool              `json:"hostNetwork,omitempty"`
	Phase          string            `json:"phase,omitempty"` // Pending, Running, Succeeded, Failed
	Ready          bool              `json:"ready"`
	Ports          []Port            `json:"ports,omitempty"` // of all containers, named or not
}

// Port is a container port; Name may be empty.
type Port struct {
	Name     string          `json:"name,omitempty"`
	Port     uint16          `json:"port"`
	Protocol corev1.Protocol `json:"protocol"`
}

// Service is a Kubernetes Service as written; internal/balance computes
// frontends from it. Status is nil where the object has none.
type Service struct {
	Namespace string                `json:"namespace"`
	Name      string                `json:"name"`
	Labels    map[string]string     `json:"labels,omitempty"`
	Spec      *corev1.ServiceSpec   `json:"spec"`
	Status    *corev1.ServiceStatus `json:"status,omitempty"`
}

// Endpoint is one EndpointSlice. Service is the name of the Service that it
// belongs to, in the same namespace.
type Endpoint struct {
	Namespace string                     `json:"namespace"`
	Name      string                     `json:"name"`
	Service   string                     `json:"service"`
	Slice     *discoveryv1.EndpointSlice `json:"slice"`
}

// Policy is a policy object as written. Exactly one of the spec pointers is
// set, and says which kind it is.
type Policy struct {
	Kind                 string                                   `json:"kind"`
	Namespace            string                                   `json:"namespace"` // empty for a ClusterNetworkPolicy
	Name                 string                                   `json:"name"`
	NetworkPolicy        *networkingv1.NetworkPolicySpec          `json:"networkPolicy,omitempty"`
	ClusterNetworkPolicy *policyv1alpha2.ClusterNetworkPolicySpec `json:"clusterNetworkPolicy,omitempty"`
}

// Identity is a number for a distinct (namespace, namespace labels, service
// account, pod labels); see internal/identity. It means something on this node
// only and is never reused.
type Identity struct {
	ID              uint64            `json:"id"`
	Namespace       string            `json:"namespace"`
	NamespaceLabels map[string]string `json:"namespaceLabels,omitempty"`
	ServiceAccount  string            `json:"serviceAccount"`
	Labels          map[string]string `json:"labels,omitempty"`
}

// Pod is a pod that the CNI plugin wired on this node: the local truth, known
// before the pod's addresses show up in a Workload row. ContainerID (of the
// sandbox) is unique.
type Pod struct {
	ContainerID string       `json:"containerID"`
	Namespace   string       `json:"namespace"`
	Name        string       `json:"name"`
	IPs         []netip.Addr `json:"ips"`
	Interface   string       `json:"interface"` // host side of the veth pair
	Ifindex     int          `json:"ifindex"`   // of Interface, in the node's network namespace
	MAC         string       `json:"mac"`       // of the pod's side
	HostMAC     string       `json:"hostMAC"`   // of the host side, what the pod sees as its gateway
	Identity    uint64       `json:"identity"`
	Netns       string       `json:"netns,omitempty"` // path of the pod's network namespace, as the CNI call gave it
}

// SourceError is what a source could not accept, kept until it is mended. File
// and Document (0 for the first of a file) are unique together.
type SourceError struct {
	File     string `json:"file"`
	Document int    `json:"document"`
	Field    string `json:"field,omitempty"`
	Message  string `json:"message"`
}

// Tables are all tables of one agent. The rows are pointers and immutable.
type Tables struct {
	DB           *statedb.DB
	Nodes        statedb.RWTable[*Node]
	Namespaces   statedb.RWTable[*Namespace]
	Workloads    statedb.RWTable[*Workload]
	Services     statedb.RWTable[*Service]
	Endpoints    statedb.RWTable[*Endpoint]
	Policies     statedb.RWTable[*Policy]
	Identities   statedb.RWTable[*Identity]
	Pods         statedb.RWTable[*Pod]
	SourceErrors statedb.RWTable[*SourceError]
}

// Primary indexes, for lookups: tables.Nodes.Get(txn, state.NodeByName.Query("n1")).
var (
	NodeByName        = byString("name", func(n *Node) string { return n.Name })
	NamespaceByName   = byString("name", func(n *Namespace) string { return n.Name })
	WorkloadByName    = byString("name", func(w *Workload) string { return Key(w.Namespace, w.Name) })
	ServiceByName     = byString("name", func(s *Service) string { return Key(s.Namespace, s.Name) })
	EndpointByName    = byString("name", func(e *Endpoint) string { return Key(e.Namespace, e.Name) })
	PolicyByName      = byString("name", func(p *Policy) string { return p.Kind + "/" + Key(p.Namespace, p.Name) })
	PodByContainer    = byString("container", func(p *Pod) string { return p.ContainerID })
	SourceErrorByFile = byString("file", func(e *SourceError) string { return e.File + "#" + strconv.Itoa(e.Document) })
	IdentityByID      = statedb.Index[*Identity, uint64]{
		Name:       "id",
		FromObject: func(i *Identity) index.KeySet { return index.NewKeySet(index.Uint64(i.ID)) },
		FromKey:    index.Uint64,
		Unique:     true,
	}
)

// Key is "namespace/name", the form that users write.
func Key(namespace, name string) string { return namespace + "/" + name }

func byString[T any](name string, key func(T) string) statedb.Index[T, string] {
	return statedb.Index[T, string]{
		Name:       name,
		FromObject: func(o T) index.KeySet { return index.NewKeySet(index.String(key(o))) },
		FromKey:    index.String,
		Unique:     true,
	}
}

// New makes a database with every table, all empty.
func New() (*Tables, error) {
	t := &Tables{DB: statedb.New()}
	var err error
	add := func(name string, e error) {
		if e != nil && err == nil {
			err = fmt.Errorf("table %s: %w", name, e)
		}
	}
	var e error
	t.Nodes, e = statedb.NewTable(t.DB, "node", NodeByName)
	add("node", e)
	t.Namespaces, e = statedb.NewTable(t.DB, "namespace", NamespaceByName)
	add("namespace", e)
	t.Workloads, e = statedb.NewTable(t.DB, "workload", WorkloadByName)
	add("workload", e)
	t.Services, e = statedb.NewTable(t.DB, "service", ServiceByName)
	add("service", e)
	t.Endpoints, e = statedb.NewTable(t.DB, "endpoint", EndpointByName)
	add("endpoint", e)
	t.Policies, e = statedb.NewTable(t.DB, "policy", PolicyByName)
	add("policy", e)
	t.Identities, e = statedb.NewTable(t.DB, "identity", IdentityByID)
	add("identity", e)
	t.Pods, e = statedb.NewTable(t.DB, "pod", PodByContainer)
	add("pod", e)
	t.SourceErrors, e = statedb.NewTable(t.DB, "source-error", SourceErrorByFile)
	add("source-error", e)
	if err != nil {
		return nil, err
	}
	return t, nil
}

// Listing is a table made printable: a header, a row of cells and a JSON object
// for each row, both in the order of the primary index.
type Listing struct {
	Header []string
	Cells  [][]string
	JSON   [][]byte
}

// ErrNoTable is returned by List for a name that is no table.
type ErrNoTable struct {
	Name  string
	Known []string
}

func (e *ErrNoTable) Error() string {
	return fmt.Sprintf("no table %q: want one of %s", e.Name, strings.Join(e.Known, ", "))
}

// List prints the table called name from one snapshot.
func (t *Tables) List(name string) (*Listing, error) {
	txn := t.DB.ReadTxn()
	lists := map[string]func() (*Listing, error){
		"node":         func() (*Listing, error) { return list(t.Nodes, txn) },
		"namespace":    func() (*Listing, error) { return list(t.Namespaces, txn) },
		"workload":     func() (*Listing, error) { return list(t.Workloads, txn) },
		"service":      func() (*Listing, error) { return list(t.Services, txn) },
		"endpoint":     func() (*Listing, error) { return list(t.Endpoints, txn) },
		"policy":       func() (*Listing, error) { return list(t.Policies, txn) },
		"identity":     func() (*Listing, error) { return list(t.Identities, txn) },
		"pod":          func() (*Listing, error) { return list(t.Pods, txn) },
		"source-error": func() (*Listing, error) { return list(t.SourceErrors, txn) },
	}
	f, ok := lists[name]
	if !ok {
		known := make([]string, 0, len(lists))
		for n := range lists {
			known = append(known, n)
		}
		sort.Strings(known)
		return nil, &ErrNoTable{Name: name, Known: known}
	}
	return f()
}

func list[T statedb.TableWritable](table statedb.Table[T], txn statedb.ReadTxn) (*Listing, error) {
	var zero T
	l := &Listing{Header: zero.TableHeader()}
	for row := range table.All(txn) {
		b, err := json.Marshal(row)
		if err != nil {
			return nil, fmt.Errorf("encode a row of table %s: %w", table.Name(), err)
		}
		l.Cells = append(l.Cells, row.TableRow())
		l.JSON = append(l.JSON, b)
	}
	return l, nil
}

func (*Node) TableHeader() []string { return []string{"NAME", "IPS", "POD CIDRS"} }
func (n *Node) TableRow() []string  { return []string{n.Name, join(n.IPs), join(n.PodCIDRs)} }

func (*Namespace) TableHeader() []string { return []string{"NAME", "LABELS"} }
func (n *Namespace) TableRow() []string  { return []string{n.Name, labels(n.Labels)} }

func (*Workload) TableHeader() []string {
	return []string{"NAMESPACE", "NAME", "NODE", "IPS", "PHASE", "READY", "SERVICE ACCOUNT", "LABELS"}
}
func (w *Workload) TableRow() []string {
	return []string{w.Namespace, w.Name, w.Node, join(w.IPs), w.Phase, strconv.FormatBool(w.Ready), w.ServiceAccount, labels(w.Labels)}
}

func (*Service) TableHeader() []string {
	return []string{"NAMESPACE", "NAME", "TYPE", "CLUSTER IPS", "PORTS"}
}
func (s *Service) TableRow() []string {
	ports := make([]string, 0, len(s.Spec.Ports))
	for _, p := range s.Spec.Ports {
		ports = append(ports, fmt.Sprintf("%d/%s→%s", p.Port, p.Protocol, p.TargetPort.String()))
	}
	return []string{s.Namespace, s.Name, string(s.Spec.Type), strings.Join(s.Spec.ClusterIPs, ","), strings.Join(ports, ",")}
}

func (*Endpoint) TableHeader() []string {
	return []string{"NAMESPACE", "NAME", "SERVICE", "FAMILY", "ADDRESSES"}
}
func (e *Endpoint) TableRow() []string {
	var as []string
	for _, ep := range e.Slice.Endpoints {
		as = append(as, ep.Addresses...)
	}
	return []string{e.Namespace, e.Name, e.Service, string(e.Slice.AddressType), strings.Join(as, ",")}
}

func (*Policy) TableHeader() []string { return []string{"KIND", "NAMESPACE", "NAME"} }
func (p *Policy) TableRow() []string  { return []string{p.Kind, p.Namespace, p.Name} }

func (*Identity) TableHeader() []string {
	return []string{"ID", "NAMESPACE", "SERVICE ACCOUNT", "LABELS", "NAMESPACE LABELS"}
}
func (i *Identity) TableRow() []string {
	return []string{strconv.FormatUint(i.ID, 10), i.Namespace, i.ServiceAccount, labels(i.Labels), labels(i.NamespaceLabels)}
}

func (*Pod) TableHeader() []string {
	return []string{"CONTAINER", "NAMESPACE", "NAME", "IPS", "INTERFACE", "IDENTITY"}
}
func (p *Pod) TableRow() []string {
	return []string{p.ContainerID, p.Namespace, p.Name, join(p.IPs), p.Interface, strconv.FormatUint(p.Identity, 10)}
}

func (*SourceError) TableHeader() []string {
	return []string{"FILE", "DOCUMENT", "FIELD", "MESSAGE"}
}
func (e *SourceError) TableRow() []string {
	return []string{e.File, strconv.Itoa(e.Document), e.Field, e.Message}
}

func join[T fmt.Stringer](xs []T) string {
	ss := make([]string, len(xs))
	for i, x := range xs {
		ss[i] = x.String()
	}
	return strings.Join(ss, ",")
}

func labels(m map[string]string) string {
	ss := make([]string, 0, len(m))
	for k, v := range m {
		ss = append(ss, k+"="+v)
	}
	slices.Sort(ss)
	return strings.Join(ss, ",")
}
