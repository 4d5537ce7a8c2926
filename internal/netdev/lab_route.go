// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// SpreadFlows has a namespace of a lab choose among several next hops by
// addresses and ports, so that the connections of one client spread.
func SpreadFlows(netNS string) error {
	return InNetNS(NetNSPath(netNS), func() error {
		for _, family := range []string{"ipv4", "ipv6"} {
			file := filepath.Join("/proc/sys/net", family, "fib_multipath_hash_policy")
			if err := os.WriteFile(file, []byte("1"), 0o644); err != nil {
				return fmt.Errorf("choose next hops by ports in %s: %w", netNS, err)
			}
		}
		return nil
	})
}

// RouteVia makes a route to destination by any of the next hops, which are on
// the link of device; it replaces one that is there. Without next hops the route
// is removed, and one that is absent is no error.
func RouteVia(netNS, device string, destination netip.Prefix, via []netip.Addr) error {
	h, err := handleAt(netNS)
	if err != nil {
		return err
	}
	defer h.Close()
	route := &netlink.Route{Dst: ipNet(destination), Protocol: unix.RTPROT_STATIC}
	if len(via) == 0 {
		if err := h.RouteDel(route); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("remove the route to %s in %s: %w", destination, netNS, err)
		}
		return nil
	}
	link, err := h.LinkByName(device)
	if err != nil {
		return fmt.Errorf("find %s in %s: %w", device, netNS, err)
	}
	for _, gw := range via {
		route.MultiPath = append(route.MultiPath, &netlink.NexthopInfo{LinkIndex: link.Attrs().Index, Gw: gw.AsSlice()})
	}
	if err := h.RouteReplace(route); err != nil {
		return fmt.Errorf("route to %s by %v in %s: %w", destination, via, netNS, err)
	}
	return nil
}
