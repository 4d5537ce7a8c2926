// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"context"
	"fmt"
	"net/netip"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
	"github.com/weft-mesh/weft/internal/datapath/deny"
	"github.com/weft-mesh/weft/internal/datapath/xdp"
	"github.com/weft-mesh/weft/internal/state"
)

// Deny is the deny list of this node; *deny.List is.
type Deny interface {
	// Add puts a network on the list; false where it is there already.
	Add(netip.Prefix) (bool, error)
	// Delete takes it off; false where it is not there.
	Delete(netip.Prefix) (bool, error)
	// List is in order of address and length.
	List() ([]deny.Entry, error)
	// Max is how many there may be.
	Max() int
}

// Edge is what sees packets from outside first, and how they go on.
type Edge struct {
	Device string // the uplink
	XDP    string // mode that is in force: xdp.Native, xdp.Generic or xdp.Off
	Why    string // why it is not what was asked for; may be empty
	Tunnel bool   // between nodes: XDP has the deny list only
	DSR    bool   // backends of other nodes answer by themselves, else SNAT
}

// String is such as "XDP native on eth0".
func (e Edge) String() string {
	name, why := "XDP "+e.XDP, e.Why
	if e.XDP == xdp.Off {
		name, why = "tcx", "XDP is off"
		if e.Why != "" {
			why += ": " + e.Why
		}
	}
	if e.Device != "" {
		name += " on " + e.Device
	}
	if why != "" {
		name += " (" + why + ")"
	}
	return name
}

func (n *node) deny() (Deny, error) {
	if n.providers.Deny == nil {
		return nil, status.Error(codes.Unimplemented, "this agent has no deny list")
	}
	return n.providers.Deny()
}

// AddDenied implements weftv1.NodeServer.
func (n *node) AddDenied(_ context.Context, req *weftv1.DeniedRequest) (*weftv1.DeniedResponse, error) {
	d, err := n.deny()
	if err != nil {
		return nil, err
	}
	prefixes, err := parsePrefixes(req.Cidrs)
	if err != nil {
		return nil, err
	}
	for _, p := range prefixes {
		if whose := clusterAddresses(n.providers.Tables, p); whose != "" {
			return nil, status.Errorf(codes.InvalidArgument, "network %s: holds %s: the deny list is for what is outside the cluster (policy is for pods)", p, whose)
		}
	}
	return change(prefixes, d.Add)
}

// DeleteDenied implements weftv1.NodeServer.
func (n *node) DeleteDenied(_ context.Context, req *weftv1.DeniedRequest) (*weftv1.DeniedResponse, error) {
	d, err := n.deny()
	if err != nil {
		return nil, err
	}
	prefixes, err := parsePrefixes(req.Cidrs)
	if err != nil {
		return nil, err
	}
	list, err := d.List()
	if err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	}
	there := map[netip.Prefix]bool{}
	for _, x := range list {
		there[x.Prefix] = true
	}
	for _, p := range prefixes {
		if !there[p] {
			return nil, status.Errorf(codes.NotFound, "network %s is not on the deny list", p)
		}
	}
	return change(prefixes, d.Delete)
}

func change(prefixes []netip.Prefix, do func(netip.Prefix) (bool, error)) (*weftv1.DeniedResponse, error) {
	r := &weftv1.DeniedResponse{}
	for _, p := range prefixes {
		changed, err := do(p)
		if err != nil {
			return nil, status.Error(codes.ResourceExhausted, err.Error())
		}
		if changed {
			r.Changed++
		}
	}
	return r, nil
}

// parsePrefixes takes CIDRs and addresses. A CIDR with bits beyond its length is
// refused: it may be a slip.
func parsePrefixes(texts []string) ([]netip.Prefix, error) {
	if len(texts) == 0 {
		return nil, status.Error(codes.InvalidArgument, "want at least one network")
	}
	var out []netip.Prefix
	for _, s := range texts {
		if a, err := netip.ParseAddr(s); err == nil && a.Zone() == "" {
			a = a.Unmap()
			out = append(out, netip.PrefixFrom(a, a.BitLen()))
			continue
		}
		p, err := netip.ParsePrefix(s)
		switch {
		case err != nil || p.Addr().Is4In6():
			return nil, status.Errorf(codes.InvalidArgument, "network %q: want a CIDR such as 198.51.100.0/24, or an address", s)
		case p != p.Masked():
			return nil, status.Errorf(codes.InvalidArgument, "network %q: has bits beyond its length: want %s, or an address", s, p.Masked())
		}
		out = append(out, p)
	}
	return out, nil
}

// clusterAddresses says whose addresses are in p; empty: nobody's of the cluster.
func clusterAddresses(tables *state.Tables, p netip.Prefix) string {
	for row := range tables.Nodes.All(tables.DB.ReadTxn()) {
		for _, ip := range row.IPs {
			if p.Contains(ip.Unmap()) {
				return fmt.Sprintf("%s, an address of node %s", ip, row.Name)
			}
		}
		for _, pods := range row.PodCIDRs {
			if p.Overlaps(pods) {
				return fmt.Sprintf("addresses of %s, the pods of node %s", pods, row.Name)
			}
		}
	}
	return ""
}

// ListDenied implements weftv1.NodeServer.
func (n *node) ListDenied(context.Context, *weftv1.ListDeniedRequest) (*weftv1.ListDeniedResponse, error) {
	d, err := n.deny()
	if err != nil {
		return nil, err
	}
	list, err := d.List()
	if err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	}
	r := &weftv1.ListDeniedResponse{MaxEntries: uint64(d.Max()), Where: n.edge().String()}
	for _, x := range list {
		row := &weftv1.DeniedNetwork{Cidr: x.Prefix.String(), Packets: x.Packets, Bytes: x.Bytes}
		if whose := clusterAddresses(n.providers.Tables, x.Prefix); whose != "" {
			row.Problem = "holds " + whose
		}
		r.Networks = append(r.Networks, row)
	}
	return r, nil
}

// edge is off while it is not known.
func (n *node) edge() Edge {
	if n.providers.Edge == nil {
		return Edge{XDP: xdp.Off}
	}
	return n.providers.Edge()
}
