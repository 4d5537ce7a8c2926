// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
)

// Uplink is the device that carries the node's traffic to other nodes.
type Uplink struct {
	Name  string
	Index int
	MTU   int
	MAC   net.HardwareAddr
	Kind  string         // of a virtual device: "veth", "bond", …; "device" of others
	Addrs []netip.Prefix // with the prefix length of their network, link-local ones included
}

// Uplink describes the device called name, or, for an empty name, the device
// of the default route with the lowest metric (IPv4 first, then IPv6).
func (n *Net) Uplink(name string) (*Uplink, error) {
	link, err := n.uplinkLink(name)
	if err != nil {
		return nil, err
	}
	a := link.Attrs()
	addrs, err := dump(func() ([]netlink.Addr, error) { return n.h.AddrList(link, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("list addresses of uplink %s: %w", a.Name, err)
	}
	u := &Uplink{Name: a.Name, Index: a.Index, MTU: a.MTU, MAC: a.HardwareAddr, Kind: link.Type()}
	for _, x := range addrs {
		u.Addrs = append(u.Addrs, prefix(x.IPNet))
	}
	return u, nil
}

func (n *Net) uplinkLink(name string) (netlink.Link, error) {
	if name != "" {
		link, err := n.h.LinkByName(name)
		if notFound(err) {
			return nil, fmt.Errorf("uplink %q: no such device in this network namespace", name)
		}
		if err != nil {
			return nil, fmt.Errorf("look up uplink %q: %w", name, err)
		}
		return link, nil
	}
	index, err := n.defaultDevice()
	if err != nil {
		return nil, err
	}
	link, err := n.h.LinkByIndex(index)
	if err != nil {
		return nil, fmt.Errorf("look up the device of the default route (ifindex %d): %w", index, err)
	}
	return link, nil
}

// defaultDevice returns the ifindex of the best default route.
func (n *Net) defaultDevice() (int, error) {
	for _, f := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		routes, err := dump(func() ([]netlink.Route, error) {
			return n.h.RouteListFiltered(f, &netlink.Route{}, netlink.RT_FILTER_DST)
		})
		if err != nil {
			return 0, fmt.Errorf("list default routes: %w", err)
		}
		if index := bestDevice(routes); index != 0 {
			return index, nil
		}
	}
	return 0, errors.New("no default route in this network namespace: name the uplink in the configuration (datapath.uplink)")
}

func bestDevice(routes []netlink.Route) int {
	index, metric := 0, 0
	for _, r := range routes {
		dev := r.LinkIndex
		if dev == 0 && len(r.MultiPath) > 0 {
			dev = r.MultiPath[0].LinkIndex
		}
		if dev != 0 && (index == 0 || r.Priority < metric) {
			index, metric = dev, r.Priority
		}
	}
	return index
}

// Addresses returns every address that is local to the namespace, those of
// loopback included, in no order.
func (n *Net) Addresses() ([]netip.Addr, error) {
	list, err := dump(func() ([]netlink.Addr, error) { return n.h.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("list local addresses: %w", err)
	}
	out := make([]netip.Addr, 0, len(list))
	for _, a := range list {
		out = append(out, ipAddr(a.IP))
	}
	return out, nil
}
