// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// EnableForwarding makes a named network namespace a router, for IPv4 and IPv6.
func EnableForwarding(name string) error {
	ns, err := netns.GetFromName(name)
	if err != nil {
		return fmt.Errorf("open network namespace %s: %w", name, err)
	}
	defer ns.Close()
	err = writeSysctls(ns, []sysctl{
		{path: "ipv4/ip_forward", value: "1"},
		{path: "ipv6/conf/all/forwarding", value: "1"},
	})
	if err != nil {
		return fmt.Errorf("make a router of %s: %w", name, err)
	}
	return nil
}

// AddGatewayRoute routes to by a gateway on a link of a named network namespace.
func AddGatewayRoute(name string, to netip.Prefix, gateway netip.Addr) error {
	h, err := handleAt(name)
	if err != nil {
		return err
	}
	defer h.Close()
	if err := h.RouteAdd(&netlink.Route{Dst: ipNet(to), Gw: gateway.AsSlice()}); err != nil {
		return fmt.Errorf("route %s by %s in %s: %w", to, gateway, name, err)
	}
	return nil
}

// AddLocalRoute makes all addresses of a prefix those of a named network
// namespace.
func AddLocalRoute(name string, prefix netip.Prefix) error {
	h, err := handleAt(name)
	if err != nil {
		return err
	}
	defer h.Close()
	lo, err := h.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find lo in %s: %w", name, err)
	}
	route := netlink.Route{Dst: ipNet(prefix), LinkIndex: lo.Attrs().Index, Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL, Scope: netlink.SCOPE_HOST}
	if err := h.RouteAdd(&route); err != nil {
		return fmt.Errorf("make %s local in %s: %w", prefix, name, err)
	}
	return nil
}

// KernelVXLAN is a point-to-point VXLAN device of the kernel, with no BPF.
type KernelVXLAN struct {
	Link          LabLink
	ID            int
	Port          int // UDP, of both ends
	Device        string
	Local, Remote netip.Addr
	MTU           int
}

// CreateKernelVXLAN makes the device.
func CreateKernelVXLAN(v KernelVXLAN) error {
	h, err := handleAt(v.Link.NetNS)
	if err != nil {
		return err
	}
	defer h.Close()
	device, err := h.LinkByName(v.Device)
	if err != nil {
		return fmt.Errorf("find %s in %s: %w", v.Device, v.Link.NetNS, err)
	}
	link := &netlink.Vxlan{
		LinkAttrs: linkAttrs(v.Link.Name, v.MTU), VxlanId: v.ID, Port: v.Port, VtepDevIndex: device.Attrs().Index,
		SrcAddr: v.Local.AsSlice(), Group: v.Remote.AsSlice(), Learning: true,
	}
	if err := h.LinkAdd(link); err != nil {
		return fmt.Errorf("create %s in %s: %w", v.Link.Name, v.Link.NetNS, err)
	}
	return configure(h, v.Link)
}

// NamedLink is a device of a named network namespace.
type NamedLink struct {
	MTU       int
	Addresses []netip.Addr // global ones, not link-local
}

// LinkIn returns the device called link in a named network namespace; ok is
// false if there is none.
func LinkIn(name, link string) (l NamedLink, ok bool, err error) {
	h, err := handleAt(name)
	if err != nil {
		return l, false, err
	}
	defer h.Close()
	device, err := h.LinkByName(link)
	if notFound(err) {
		return l, false, nil
	}
	if err != nil {
		return l, false, fmt.Errorf("look up %s in %s: %w", link, name, err)
	}
	l.MTU = device.Attrs().MTU
	addrs, err := dump(func() ([]netlink.Addr, error) { return h.AddrList(device, netlink.FAMILY_ALL) })
	if err != nil {
		return l, false, fmt.Errorf("list addresses of %s in %s: %w", link, name, err)
	}
	for _, a := range addrs {
		if ip := ipAddr(a.IP); ip.IsGlobalUnicast() {
			l.Addresses = append(l.Addresses, ip)
		}
	}
	return l, true, nil
}
