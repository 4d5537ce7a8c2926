// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/cilium/statedb"

	"github.com/weft-mesh/weft/internal/addr"
	"github.com/weft-mesh/weft/internal/state"
)

// The kinds of a flow's endpoint.
const (
	KindPod        = "pod"
	KindNode       = "node"        // this node
	KindRemoteNode = "remote-node" // another node of the cluster
	KindWorld      = "world"       // not of the cluster
	KindUnknown    = "unknown"     // of the cluster's address ranges, or not routable, and nobody's
)

// remember is how long an address still names its last owner, so that the
// last events of a pod that is gone have its name. IPAM gives no address to
// another pod before that.
const remember = 60 * time.Second

// endpoint is what is known about an address. Immutable.
type endpoint struct {
	ip        string
	namespace string
	pod       string
	labels    map[string]string // of the row; not to be changed
	kind      string
}

// owners are the rows that claim one address.
type owners struct {
	pods      []*state.Pod
	workloads []*state.Workload
	nodes     []*state.Node
	endpoint  *endpoint // of the best of them
}

func (o *owners) empty() bool {
	return len(o.pods) == 0 && len(o.workloads) == 0 && len(o.nodes) == 0
}

// index finds the owner of an address: first a pod wired on this node, then a
// workload, then a node. It follows the tables row by row as they change.
// Not safe for concurrent use.
type index struct {
	node   string
	db     *statedb.DB
	now    func() time.Time
	pods   feed[*state.Pod]
	loads  feed[*state.Workload]
	nodes  feed[*state.Node]
	byAddr map[netip.Addr]*owners
	gone   map[netip.Addr]departed
	// devices are the host sides of local pods by their ifindex.
	devices map[uint32]device
	// localByName finds the wired pods of a workload, by state.Key.
	localByName map[string][]*state.Pod
	// prefixes are the pod CIDRs of all nodes, and bits the lengths that
	// occur, each with the number of prefixes that have it.
	prefixes map[netip.Prefix]int
	bits     map[int]int
}

// device is the host side of a local pod.
type device struct {
	name string
	pod  string // state.Key
}

type departed struct {
	endpoint *endpoint
	until    time.Time
}

// newIndex reads all three tables.
func newIndex(node string, t *state.Tables, now func() time.Time) (*index, error) {
	x := &index{
		node: node, db: t.DB, now: now,
		byAddr: map[netip.Addr]*owners{}, gone: map[netip.Addr]departed{},
		devices: map[uint32]device{}, localByName: map[string][]*state.Pod{},
		prefixes: map[netip.Prefix]int{}, bits: map[int]int{},
	}
	if err := x.pods.open(t.DB, t.Pods, func(p *state.Pod) string { return p.ContainerID }); err != nil {
		return nil, err
	}
	if err := x.loads.open(t.DB, t.Workloads, func(w *state.Workload) string { return state.Key(w.Namespace, w.Name) }); err != nil {
		return nil, err
	}
	if err := x.nodes.open(t.DB, t.Nodes, func(n *state.Node) string { return n.Name }); err != nil {
		return nil, err
	}
	x.refresh()
	return x, nil
}

// close ends the watches.
func (x *index) close() {
	x.pods.close()
	x.loads.close()
	x.nodes.close()
}

// refresh takes in what has changed in the tables; cheap when nothing did.
func (x *index) refresh() {
	if !x.pods.changed() && !x.loads.changed() && !x.nodes.changed() {
		return
	}
	txn := x.db.ReadTxn()
	x.nodes.each(txn, x.replaceNode)
	x.loads.each(txn, x.replaceWorkload)
	x.pods.each(txn, x.replacePod)
	for a, d := range x.gone {
		if x.now().After(d.until) {
			delete(x.gone, a)
		}
	}
}

// lookup says who a is.
func (x *index) lookup(a netip.Addr) endpoint {
	a = a.Unmap()
	if o := x.byAddr[a]; o != nil {
		return *o.endpoint
	}
	if d, ok := x.gone[a]; ok && x.now().Before(d.until) {
		return *d.endpoint
	}
	return endpoint{ip: a.String(), kind: x.stranger(a)}
}

// stranger returns the kind of an address without an owner.
func (x *index) stranger(a netip.Addr) string {
	if !a.IsValid() || a.IsUnspecified() || a.IsMulticast() || a.IsLinkLocalUnicast() || a.IsLoopback() {
		return KindUnknown
	}
	for bits := range x.bits {
		if bits > a.BitLen() {
			continue
		}
		if p, err := a.Prefix(bits); err == nil && x.prefixes[p] > 0 {
			return KindUnknown
		}
	}
	return KindWorld
}

func (x *index) replacePod(before, after *state.Pod) {
	if before != nil {
		delete(x.devices, uint32(before.Ifindex))
		key := state.Key(before.Namespace, before.Name)
		x.localByName[key] = without(x.localByName[key], before)
		if len(x.localByName[key]) == 0 {
			delete(x.localByName, key)
		}
	}
	if after != nil {
		key := state.Key(after.Namespace, after.Name)
		x.devices[uint32(after.Ifindex)] = device{after.Interface, key}
		x.localByName[key] = append(x.localByName[key], after)
	}
	x.replace(podIPs(before), podIPs(after), func(o *owners) {
		o.pods = swap(o.pods, before, nil)
	}, func(o *owners) {
		o.pods = swap(o.pods, nil, after)
	})
}

func (x *index) replaceWorkload(before, after *state.Workload) {
	x.replace(workloadIPs(before), workloadIPs(after), func(o *owners) {
		o.workloads = swap(o.workloads, before, nil)
	}, func(o *owners) {
		o.workloads = swap(o.workloads, nil, after)
	})
	// The labels of a wired pod come from here.
	named := after
	if named == nil {
		named = before
	}
	for _, p := range x.localByName[state.Key(named.Namespace, named.Name)] {
		x.replace(nil, p.IPs, nil, func(*owners) {})
	}
}

func (x *index) replaceNode(before, after *state.Node) {
	for _, p := range cidrs(before) {
		count(x.prefixes, p, -1)
		count(x.bits, p.Bits(), -1)
	}
	for _, p := range cidrs(after) {
		count(x.prefixes, p, 1)
		count(x.bits, p.Bits(), 1)
	}
	x.replace(nodeIPs(before), nodeIPs(after), func(o *owners) {
		o.nodes = swap(o.nodes, before, nil)
	}, func(o *owners) {
		o.nodes = swap(o.nodes, nil, after)
	})
}

// replace takes a row away from its old addresses, gives it its new ones and
// finds the best owner of each again.
func (x *index) replace(before, after []netip.Addr, remove, add func(*owners)) {
	for _, a := range before {
		if o := x.byAddr[a.Unmap()]; o != nil {
			remove(o)
		}
	}
	for _, a := range after {
		a = a.Unmap()
		o := x.byAddr[a]
		if o == nil {
			o = &owners{}
			x.byAddr[a] = o
		}
		add(o)
	}
	for _, as := range [][]netip.Addr{before, after} {
		for _, a := range as {
			x.elect(a.Unmap())
		}
	}
}

// elect finds the best owner of a, or forgets it.
func (x *index) elect(a netip.Addr) {
	o := x.byAddr[a]
	switch {
	case o == nil:
	case o.empty():
		delete(x.byAddr, a)
		if o.endpoint != nil && o.endpoint.kind == KindPod {
			x.gone[a] = departed{endpoint: o.endpoint, until: x.now().Add(remember)}
		}
	default:
		delete(x.gone, a)
		o.endpoint = x.best(a, o)
	}
}

func (x *index) best(a netip.Addr, o *owners) *endpoint {
	e := &endpoint{ip: a.String(), kind: KindPod}
	if n := len(o.pods); n > 0 {
		p := o.pods[n-1]
		e.namespace, e.pod = p.Namespace, p.Name
		if w := x.loads.rows[state.Key(p.Namespace, p.Name)]; w != nil {
			e.labels = w.Labels
		}
		return e
	}
	if n := len(o.workloads); n > 0 {
		w := o.workloads[n-1]
		for _, other := range o.workloads {
			if ended(w) && !ended(other) {
				w = other
			}
		}
		e.namespace, e.pod, e.labels = w.Namespace, w.Name, w.Labels
		return e
	}
	e.kind = KindRemoteNode
	if slices.ContainsFunc(o.nodes, func(n *state.Node) bool { return n.Name == x.node }) {
		e.kind = KindNode
	}
	return e
}

func ended(w *state.Workload) bool { return w.Phase == "Succeeded" || w.Phase == "Failed" }

func podIPs(p *state.Pod) []netip.Addr {
	if p == nil {
		return nil
	}
	return p.IPs
}

// workloadIPs is empty for a pod that shares its node's addresses.
func workloadIPs(w *state.Workload) []netip.Addr {
	if w == nil || w.HostNetwork {
		return nil
	}
	return w.IPs
}

// nodeIPs holds the gateway address of each pod CIDR too: the node uses it as
// its source towards remote pods when it tunnels.
func nodeIPs(n *state.Node) []netip.Addr {
	if n == nil {
		return nil
	}
	as := slices.Clone(n.IPs)
	for _, p := range cidrs(n) {
		as = append(as, addr.Gateway(p))
	}
	return as
}

func cidrs(n *state.Node) []netip.Prefix {
	if n == nil {
		return nil
	}
	ps := make([]netip.Prefix, 0, len(n.PodCIDRs))
	for _, p := range n.PodCIDRs {
		ps = append(ps, p.Masked())
	}
	return ps
}

func count[K comparable](m map[K]int, k K, by int) {
	if m[k] += by; m[k] == 0 {
		delete(m, k)
	}
}

func swap[T comparable](rows []T, before, after T) []T {
	var none T
	if before != none {
		rows = without(rows, before)
	}
	if after != none {
		rows = append(rows, after)
	}
	return rows
}

func without[T comparable](rows []T, row T) []T {
	return slices.DeleteFunc(slices.Clone(rows), func(r T) bool { return r == row })
}

// feed follows one table and remembers its rows, so that a change comes with
// the row that it replaces.
type feed[T comparable] struct {
	changes statedb.ChangeIterator[T]
	watch   <-chan struct{}
	rows    map[string]T
	key     func(T) string
}

func (f *feed[T]) open(db *statedb.DB, table statedb.RWTable[T], key func(T) string) error {
	txn := db.WriteTxn(table)
	defer txn.Abort()
	changes, err := table.Changes(txn)
	if err != nil {
		return fmt.Errorf("watch table %s: %w", table.Name(), err)
	}
	txn.Commit()
	closed := make(chan struct{})
	close(closed)
	f.changes, f.watch, f.rows, f.key = changes, closed, map[string]T{}, key
	return nil
}

func (f *feed[T]) close() {
	if f.changes != nil {
		f.changes.Close()
	}
}

func (f *feed[T]) changed() bool {
	select {
	case <-f.watch:
		return true
	default:
		return false
	}
}

// each calls replace for each change up to txn: before is nil for a new row,
// after for one that is gone.
func (f *feed[T]) each(txn statedb.ReadTxn, replace func(before, after T)) {
	changes, watch := f.changes.Next(txn)
	f.watch = watch
	var none T
	for c := range changes {
		k := f.key(c.Object)
		before := f.rows[k]
		if c.Deleted {
			delete(f.rows, k)
			if before != none {
				replace(before, none)
			}
			continue
		}
		f.rows[k] = c.Object
		replace(before, c.Object)
	}
}
