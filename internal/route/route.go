// SPDX-License-Identifier: Apache-2.0

// Package route computes, from the rows of the tables, what the datapath has to
// know of each address of the cluster, and which routes the node's kernel needs.
// It is pure: the same rows give the same answer in whatever order they come.
//
// Who has an address, the first that applies:
//
//  1. this node, if the address is its own or was passed in as one;
//  2. another node, if it is one of its addresses (of several nodes, the first
//     by name); loopback, link-local and unspecified addresses are no node's;
//  3. a pod wired on this node (of several, the one with the least container
//     ID);
//  4. a workload on another node. One that is finished (Succeeded, Failed), not
//     scheduled or on the host network claims nothing, nor does any for an
//     address of this node's own pod CIDRs: what is not wired here does not
//     exist. Of several, a Running one goes before the others, then the first
//     by namespace/name.
//
// The rest of a pod CIDR belongs to its node, with identity unknown. What no
// entry covers is the outside world.
package route

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/cilium/statedb"

	"github.com/weft-mesh/weft/internal/addr"
	"github.com/weft-mesh/weft/internal/identity"
	"github.com/weft-mesh/weft/internal/state"
)

// Kind says how packets to a prefix travel.
type Kind uint8

const (
	// Node: an address of this node, for its own network stack.
	Node Kind = iota + 1
	// RemoteNode: an address of another node, by the network between nodes.
	RemoteNode
	// Pod: one address of a pod, here or by way of the next hop.
	Pod
	// PodCIDR: all pods of a node that have no entry of their own.
	PodCIDR
)

func (k Kind) String() string {
	switch k {
	case Node:
		return "node"
	case RemoteNode:
		return "remote-node"
	case Pod:
		return "pod"
	case PodCIDR:
		return "pod-cidr"
	}
	return fmt.Sprintf("Kind(%d)", uint8(k))
}

// Entry is what is known of a prefix. All entries are in the cluster; the world
// has none.
type Entry struct {
	Identity uint64
	Kind     Kind
	// NextHop4 and NextHop6 are the underlay addresses of the node that holds
	// the prefix. Both are zero on this node, one is where that node has only
	// the other family, and both are where that node is not known.
	NextHop4, NextHop6 netip.Addr
	// Local is true on this node.
	Local bool
}

// Route is a route of the node's kernel to the pods of another node. Either Via
// is valid or Tunnel is true.
type Route struct {
	Destination netip.Prefix
	Node        string     // that holds Destination
	Via         netip.Addr // on the uplink
	Tunnel      bool       // through the tunnel device
	Source      netip.Addr // preferred source address; zero leaves it to the kernel
}

// Input is everything that a computation reads.
type Input struct {
	Node      string // name of this node
	Tunnel    bool   // pods of other nodes are reached through the tunnel device
	Nodes     []*state.Node
	Workloads []*state.Workload
	Pods      []*state.Pod // wired on this node
	// Addresses are further addresses of this node, beside those of its row.
	Addresses []netip.Addr
	// Identity returns the number of a workload of another node; 0 means that
	// it has none yet and is the same as identity.Unknown.
	Identity func(*state.Workload) uint64
}

// Read fills the rows of an Input from one snapshot.
func (in *Input) Read(t *state.Tables, txn statedb.ReadTxn) {
	in.Nodes = statedb.Collect(t.Nodes.All(txn))
	in.Workloads = statedb.Collect(t.Workloads.All(txn))
	in.Pods = statedb.Collect(t.Pods.All(txn))
}

// Result is what Compute returns.
type Result struct {
	Entries map[netip.Prefix]Entry
	Routes  map[netip.Prefix]Route // by Destination
	// Conflicts say, in order, which claims were not granted although nothing
	// but another claim speaks against them.
	Conflicts []string
}

// Compute returns what the datapath and the kernel of in.Node need.
func Compute(in Input) Result {
	c := &computation{in: in, hops: map[string]hop{}, owners: map[netip.Prefix]string{}, out: Result{
		Entries: map[netip.Prefix]Entry{}, Routes: map[netip.Prefix]Route{},
	}}
	nodes := slices.SortedFunc(slices.Values(in.Nodes), func(a, b *state.Node) int { return strings.Compare(a.Name, b.Name) })
	c.ownAddresses(nodes)
	c.remoteAddresses(nodes)
	c.localPods()
	c.remotePods()
	c.podCIDRs(nodes)
	slices.Sort(c.out.Conflicts)
	return c.out
}

// hop is how to reach a node.
type hop struct{ v4, v6 netip.Addr }

type computation struct {
	in     Input
	own    []netip.Prefix          // pod CIDRs of this node
	hops   map[string]hop          // by name of another node
	owners map[netip.Prefix]string // who has a prefix, for messages
	out    Result
}

// claim enters e for p unless another has it. Claims come in the order of their
// right.
func (c *computation) claim(who string, p netip.Prefix, e Entry) {
	if owner, taken := c.owners[p]; taken {
		if owner != who {
			c.out.Conflicts = append(c.out.Conflicts, fmt.Sprintf("%s: claimed by %s and by %s: %s has it", p, owner, who, owner))
		}
		return
	}
	c.owners[p] = who
	c.out.Entries[p] = e
}

func (c *computation) isOwn(a netip.Addr) bool {
	return slices.ContainsFunc(c.own, func(p netip.Prefix) bool { return p.Contains(a) })
}

func (c *computation) ownAddresses(nodes []*state.Node) {
	who, e := "node "+c.in.Node, Entry{Identity: identity.Node, Kind: Node, Local: true}
	for _, n := range nodes {
		if n.Name != c.in.Node {
			continue
		}
		for _, a := range n.IPs {
			c.claimNode(who, a, e)
		}
		for _, p := range n.PodCIDRs {
			c.own = append(c.own, p.Masked())
			if c.in.Tunnel { // the tunnel device has it, to speak to remote pods
				c.claim(who, addr.Host(addr.Gateway(p)), e)
			}
		}
	}
	for _, a := range c.in.Addresses {
		c.claimNode(who, a, e)
	}
}

// claimNode enters an address of a node, unless it means the same on every
// host or link: no packet of a pod to such an address is for the node.
func (c *computation) claimNode(who string, a netip.Addr, e Entry) {
	a = a.Unmap()
	if a.IsLoopback() || a.IsLinkLocalUnicast() || a.IsUnspecified() || a.IsMulticast() {
		return
	}
	c.claim(who, addr.Host(a), e)
}

func (c *computation) remoteAddresses(nodes []*state.Node) {
	for _, n := range nodes {
		if n.Name == c.in.Node {
			continue
		}
		var h hop
		h.v4, h.v6 = addr.Pick(n.IPs)
		c.hops[n.Name] = h
		for _, a := range n.IPs {
			c.claimNode("node "+n.Name, a, Entry{Identity: identity.RemoteNode, Kind: RemoteNode, NextHop4: h.v4, NextHop6: h.v6})
		}
	}
}

func (c *computation) localPods() {
	pods := slices.SortedFunc(slices.Values(c.in.Pods), func(a, b *state.Pod) int { return strings.Compare(a.ContainerID, b.ContainerID) })
	for _, p := range pods {
		id := p.Identity
		if id == 0 {
			id = identity.Unknown
		}
		for _, a := range p.IPs {
			c.claim("pod "+state.Key(p.Namespace, p.Name), addr.Host(a), Entry{Identity: id, Kind: Pod, Local: true})
		}
	}
}

func (c *computation) remotePods() {
	for _, w := range slices.SortedFunc(slices.Values(c.in.Workloads), byRight) {
		if !c.claims(w) {
			continue
		}
		id := identity.Unknown
		if n := c.in.Identity(w); n != 0 {
			id = n
		}
		h := c.hops[w.Node]
		for _, a := range w.IPs {
			if !c.isOwn(a.Unmap()) {
				c.claim("pod "+state.Key(w.Namespace, w.Name), addr.Host(a), Entry{Identity: id, Kind: Pod, NextHop4: h.v4, NextHop6: h.v6})
			}
		}
	}
}

// claims is true for a workload that has its addresses for itself, on another
// node.
func (c *computation) claims(w *state.Workload) bool {
	return w.Node != "" && w.Node != c.in.Node && !w.HostNetwork && w.Phase != "Succeeded" && w.Phase != "Failed"
}

func byRight(a, b *state.Workload) int {
	rank := func(w *state.Workload) int {
		if w.Phase == "Running" {
			return 0
		}
		return 1
	}
	return cmp.Or(rank(a)-rank(b), strings.Compare(state.Key(a.Namespace, a.Name), state.Key(b.Namespace, b.Name)))
}

// podCIDRs enters what is left of pod CIDRs, and the routes to them. A CIDR of
// another node that lies in one of this node's, or that holds the address of a
// node, gets neither: packets to pods here, or to the next hop itself, would
// go astray.
func (c *computation) podCIDRs(nodes []*state.Node) {
	for _, p := range c.own {
		c.claim("node "+c.in.Node, p, Entry{Identity: identity.Unknown, Kind: PodCIDR, Local: true})
	}
	for _, n := range nodes {
		if n.Name == c.in.Node {
			continue
		}
		for _, p := range n.PodCIDRs {
			c.remoteCIDR(n, p.Masked())
		}
	}
}

func (c *computation) remoteCIDR(n *state.Node, p netip.Prefix) {
	if why := c.unusable(p); why != "" {
		c.out.Conflicts = append(c.out.Conflicts, fmt.Sprintf("pod CIDR %s of node %s: %s: it is left out", p, n.Name, why))
		return
	}
	if _, taken := c.owners[p]; taken {
		c.claim("node "+n.Name, p, Entry{}) // for the message
		return
	}
	h := c.hops[n.Name]
	e := Entry{Identity: identity.Unknown, Kind: PodCIDR, NextHop4: h.v4, NextHop6: h.v6}
	c.claim("node "+n.Name, p, e)
	if c.in.Tunnel { // what that node speaks to pods with
		e.Identity, e.Kind = identity.RemoteNode, Pod
		c.claim("node "+n.Name, addr.Host(addr.Gateway(p)), e)
	}
	c.route(n.Name, p, h)
}

func (c *computation) unusable(p netip.Prefix) string {
	for _, own := range c.own {
		if own.Bits() <= p.Bits() && own.Contains(p.Addr()) {
			return fmt.Sprintf("lies in %s of this node", own)
		}
	}
	var inside []netip.Addr
	for _, n := range c.in.Nodes {
		for _, a := range n.IPs {
			if p.Contains(a.Unmap()) {
				inside = append(inside, a.Unmap())
			}
		}
	}
	if len(inside) == 0 {
		return ""
	}
	return fmt.Sprintf("holds node address %s", slices.MinFunc(inside, netip.Addr.Compare))
}

// route enters the kernel's route to p, if there is a way to it.
func (c *computation) route(node string, p netip.Prefix, h hop) {
	r := Route{Destination: p, Node: node}
	via := h.v4
	if p.Addr().Is6() {
		via = h.v6
	}
	switch {
	case c.in.Tunnel && (h.v4.IsValid() || h.v6.IsValid()):
		r.Tunnel = true
		for _, own := range c.own {
			if own.Addr().Is4() == p.Addr().Is4() {
				r.Source = addr.Gateway(own)
			}
		}
	case !c.in.Tunnel && via.IsValid():
		r.Via = via
	default:
		c.out.Conflicts = append(c.out.Conflicts, fmt.Sprintf("pod CIDR %s of node %s: the node has no address to reach it by: no route", p, node))
		return
	}
	c.out.Routes[p] = r
}
