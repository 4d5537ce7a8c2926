// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// VXLAN describes the one tunnel device of a node. It has no peer and no
// network identifier of its own: whatever BPF sets as tunnel key goes out.
type VXLAN struct {
	Name     string
	Port     uint16       // UDP, listened on in the node's namespace
	MTU      int          // of what goes into the tunnel, in bytes
	Gateways []netip.Addr // addresses of the device: the source of node → remote pod
}

// EnsureVXLAN makes the device what v says, and makes it anew where port or
// kind differ.
func (n *Net) EnsureVXLAN(v VXLAN) (_ Link, err error) {
	link, made, err := n.vxlanLink(v)
	if err != nil {
		return Link{}, err
	}
	defer func() {
		if err != nil && made {
			_ = n.h.LinkDel(link)
		}
	}()
	if err := n.configureVXLAN(link, v); err != nil {
		return Link{}, err
	}
	l, ok, err := n.LinkByName(v.Name)
	if err == nil && !ok {
		err = fmt.Errorf("link %s vanished", v.Name)
	}
	return l, err
}

// CheckVXLAN returns what is not as EnsureVXLAN(v) left it, nil if all is.
func (n *Net) CheckVXLAN(v VXLAN) error {
	link, err := n.h.LinkByName(v.Name)
	if err != nil {
		return fmt.Errorf("look up link %s: %w", v.Name, err)
	}
	if x, ok := link.(*netlink.Vxlan); !ok || !x.FlowBased || x.Port != int(v.Port) {
		return fmt.Errorf("link %s is not a VXLAN device on UDP port %d", v.Name, v.Port)
	}
	if err := checkLink(link, v.MTU); err != nil {
		return err
	}
	have, err := dump(func() ([]netlink.Addr, error) { return n.h.AddrList(link, netlink.FAMILY_ALL) })
	if err != nil {
		return fmt.Errorf("list addresses of %s: %w", v.Name, err)
	}
	for _, a := range v.Gateways {
		if !slices.ContainsFunc(have, func(x netlink.Addr) bool { return prefix(x.IPNet) == single(a) }) {
			return fmt.Errorf("link %s has no address %s", v.Name, a)
		}
	}
	return nil
}

// DeleteVXLAN removes the device; one that is absent is no error.
func (n *Net) DeleteVXLAN(name string) error { return n.DeleteLink(name) }

func (n *Net) vxlanLink(v VXLAN) (link netlink.Link, made bool, err error) {
	link, err = n.h.LinkByName(v.Name)
	if err == nil {
		if x, ok := link.(*netlink.Vxlan); ok && x.FlowBased && x.Port == int(v.Port) {
			return link, false, nil
		}
		if err := n.h.LinkDel(link); err != nil {
			return nil, false, fmt.Errorf("delete outdated link %s: %w", v.Name, err)
		}
	} else if !notFound(err) {
		return nil, false, fmt.Errorf("look up link %s: %w", v.Name, err)
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = v.Name, v.MTU
	link = &netlink.Vxlan{LinkAttrs: attrs, FlowBased: true, Port: int(v.Port), UDP6ZeroCSumRx: true}
	if err := n.h.LinkAdd(link); err != nil {
		return nil, false, fmt.Errorf("create VXLAN device %s on UDP port %d: %w", v.Name, v.Port, err)
	}
	return link, true, nil
}

func (n *Net) configureVXLAN(link netlink.Link, v VXLAN) error {
	v6 := slices.ContainsFunc(v.Gateways, netip.Addr.Is6)
	if err := n.quietIPv6(link, v6); err != nil {
		return err
	}
	if err := writeSysctls(n.ns, hostSysctls(v.Name, v6)); err != nil {
		return err
	}
	if err := n.h.LinkSetARPOff(link); err != nil {
		return fmt.Errorf("turn ARP off on %s: %w", v.Name, err)
	}
	if link.Attrs().MTU != v.MTU {
		if err := n.h.LinkSetMTU(link, v.MTU); err != nil {
			return fmt.Errorf("set MTU of %s to %d: %w", v.Name, v.MTU, err)
		}
	}
	if err := n.h.LinkSetUp(link); err != nil {
		return fmt.Errorf("set %s up: %w", v.Name, err)
	}
	return replaceAddrs(n.h, link, v.Gateways)
}

// quietIPv6 keeps the kernel from giving link an address of its own. Without
// IPv6 in the kernel there is nothing to keep; required says it is needed.
func (n *Net) quietIPv6(link netlink.Link, required bool) error {
	err := n.h.LinkSetIP6AddrGenMode(link, nl.IN6_ADDR_GEN_MODE_NONE)
	if err != nil && required {
		return fmt.Errorf("turn off IPv6 address generation on %s: %w", link.Attrs().Name, err)
	}
	return nil
}

// replaceAddrs makes want, each as /32 or /128, the addresses of link; IPv6
// link-local ones are the kernel's.
func replaceAddrs(h *netlink.Handle, link netlink.Link, want []netip.Addr) error {
	name := link.Attrs().Name
	have, err := dump(func() ([]netlink.Addr, error) { return h.AddrList(link, netlink.FAMILY_ALL) })
	if err != nil {
		return fmt.Errorf("list addresses of %s: %w", name, err)
	}
	for _, a := range have {
		p := prefix(a.IPNet)
		if p.Addr().IsLinkLocalUnicast() && p.Addr().Is6() || p.IsSingleIP() && slices.Contains(want, p.Addr()) {
			continue
		}
		if err := h.AddrDel(link, &a); err != nil {
			return fmt.Errorf("delete address %s of %s: %w", p, name, err)
		}
	}
	for _, a := range want {
		if err := h.AddrReplace(link, hostAddr(a)); err != nil {
			return fmt.Errorf("add address %s to %s: %w", a, name, err)
		}
	}
	return nil
}

func hostAddr(a netip.Addr) *netlink.Addr {
	x := &netlink.Addr{IPNet: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}}
	if a.Is6() {
		x.Flags = unix.IFA_F_NODAD
	}
	return x
}
