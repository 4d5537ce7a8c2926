// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Route leads to the pods of another node. Destination is unique among weft's
// routes.
type Route struct {
	Destination netip.Prefix
	Via         netip.Addr // next hop; the zero Addr where the destination is on the link
	Device      string
	Source      netip.Addr // preferred source; the zero Addr leaves it to the kernel
	MTU         int        // in bytes; 0 is the device's
}

// ReplaceRoute puts r in place of whatever route weft had for its destination.
func (n *Net) ReplaceRoute(r Route) error {
	nr, err := n.toRoute(r)
	if err != nil {
		return err
	}
	if err := n.h.RouteReplace(nr); err != nil {
		return fmt.Errorf("route to %s via %s dev %s src %s: %w", r.Destination, r.Via, r.Device, r.Source, err)
	}
	return nil
}

func (n *Net) toRoute(r Route) (*netlink.Route, error) {
	link, err := n.h.LinkByName(r.Device)
	if err != nil {
		return nil, fmt.Errorf("route to %s: look up device %s: %w", r.Destination, r.Device, err)
	}
	nr := &netlink.Route{
		LinkIndex: link.Attrs().Index,
		Dst:       ipNet(r.Destination.Masked()),
		Protocol:  NodeProtocol,
		MTU:       r.MTU,
	}
	if r.Via.IsValid() {
		nr.Gw = r.Via.AsSlice()
	} else {
		nr.Scope = netlink.SCOPE_LINK
	}
	if r.Source.IsValid() {
		nr.Src = r.Source.AsSlice()
	}
	return nr, nil
}

// DeleteRoute removes weft's route to destination; one that is absent is no
// error, and routes of others are left alone.
func (n *Net) DeleteRoute(destination netip.Prefix) error {
	destination = destination.Masked()
	routes, err := n.nodeRoutes(family(destination.Addr()))
	if err != nil {
		return err
	}
	for _, r := range routes {
		if prefix(r.Dst) != destination {
			continue
		}
		if err := n.h.RouteDel(&r); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("delete route to %s: %w", destination, err)
		}
	}
	return nil
}

// Routes lists weft's routes to the pods of other nodes.
func (n *Net) Routes() ([]Route, error) {
	var out []Route
	names := map[int]string{}
	for _, f := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		routes, err := n.nodeRoutes(f)
		if err != nil {
			return nil, err
		}
		for _, r := range routes {
			out = append(out, Route{
				Destination: prefix(r.Dst),
				Via:         ipAddr(r.Gw),
				Device:      n.deviceName(names, r.LinkIndex),
				Source:      ipAddr(r.Src),
				MTU:         r.MTU,
			})
		}
	}
	return out, nil
}

func (n *Net) nodeRoutes(family int) ([]netlink.Route, error) {
	routes, err := dump(func() ([]netlink.Route, error) {
		return n.h.RouteListFiltered(family, &netlink.Route{Protocol: NodeProtocol}, netlink.RT_FILTER_PROTOCOL)
	})
	if err != nil {
		return nil, fmt.Errorf("list node routes: %w", err)
	}
	return routes, nil
}

// deviceName returns the name of a device, or "" if it has gone meanwhile.
func (n *Net) deviceName(names map[int]string, index int) string {
	if name, ok := names[index]; ok {
		return name
	}
	if link, err := n.h.LinkByIndex(index); err == nil {
		names[index] = link.Attrs().Name
	}
	return names[index]
}
