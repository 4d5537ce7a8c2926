// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Neighbor is another machine on the link of a device, as the kernel knows it.
type Neighbor struct {
	Addr netip.Addr
	MAC  net.HardwareAddr // nil while it is not known
	Kept bool             // see KeepNeighbor
}

// usable are the states in which the kernel itself sends to a neighbour.
const usable = netlink.NUD_PERMANENT | netlink.NUD_NOARP | netlink.NUD_REACHABLE | netlink.NUD_PROBE | netlink.NUD_STALE | netlink.NUD_DELAY

// Neighbors lists the neighbours on the link of the device with that index.
func (n *Net) Neighbors(device int) ([]Neighbor, error) {
	list, err := dump(func() ([]netlink.Neigh, error) { return n.h.NeighList(device, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("list neighbours: %w", err)
	}
	var out []Neighbor
	for _, x := range list {
		if x.Family != netlink.FAMILY_V4 && x.Family != netlink.FAMILY_V6 {
			continue
		}
		e := Neighbor{Addr: ipAddr(x.IP), Kept: x.FlagsExt&netlink.NTF_EXT_MANAGED != 0}
		if x.State&usable != 0 {
			e.MAC = x.HardwareAddr
		}
		out = append(out, e)
	}
	return out, nil
}

// KeepNeighbor has the kernel find out the hardware address of a neighbour, and
// ask again before it forgets it. It needs Linux 5.16.
func (n *Net) KeepNeighbor(device int, a netip.Addr) error {
	err := n.h.NeighSet(&netlink.Neigh{LinkIndex: device, Family: family(a), IP: a.AsSlice(), FlagsExt: netlink.NTF_EXT_MANAGED})
	if err != nil {
		return fmt.Errorf("keep neighbour %s (needs Linux 5.16): %w", a, err)
	}
	return nil
}

// ForgetNeighbor has the kernel forget a neighbour; one that it does not know is
// no error.
func (n *Net) ForgetNeighbor(device int, a netip.Addr) error {
	err := n.h.NeighDel(&netlink.Neigh{LinkIndex: device, Family: family(a), IP: a.AsSlice()})
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("forget neighbour %s: %w", a, err)
	}
	return nil
}

// NextHop is who on the link of a device gets what is sent to an address: its
// owner, or a router. The zero Addr means that no route leads there by the
// device.
func (n *Net) NextHop(device int, to netip.Addr) (netip.Addr, error) {
	routes, err := n.h.RouteGet(to.AsSlice())
	if errors.Is(err, unix.ENETUNREACH) || errors.Is(err, unix.EHOSTUNREACH) {
		return netip.Addr{}, nil
	}
	if err != nil {
		return netip.Addr{}, fmt.Errorf("find the route to %s: %w", to, err)
	}
	for _, r := range routes {
		switch {
		case r.LinkIndex != device:
		case r.Gw != nil:
			return ipAddr(r.Gw), nil
		case r.Via == nil: // else a router of the other family
			return to, nil
		}
	}
	return netip.Addr{}, nil
}

// WatchNeighbors is WatchAddresses for the neighbours on the link of a device.
func (n *Net) WatchNeighbors(ctx context.Context, device int) (<-chan struct{}, error) {
	subscribe := func(ctx context.Context) (<-chan netlink.NeighUpdate, error) {
		ch := make(chan netlink.NeighUpdate, 64)
		if err := netlink.NeighSubscribeAt(n.ns, ch, ctx.Done()); err != nil {
			return nil, fmt.Errorf("subscribe to neighbour changes: %w", err)
		}
		return ch, nil
	}
	return watch(ctx, subscribe, func(u netlink.NeighUpdate) bool { return u.LinkIndex == device })
}
