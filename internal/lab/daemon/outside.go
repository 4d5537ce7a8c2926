// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"net/netip"
	"slices"

	"github.com/weft-mesh/weft/internal/netdev"
)

// routeOutside gives the world outside a route to each address of the load
// balancers, by the nodes that answer for it; l.mu is held.
func (l *Lab) routeOutside() error {
	want := map[netip.Addr][]netip.Addr{}
	for ip, nodes := range l.cluster.Outside() {
		for _, n := range nodes {
			i := slices.IndexFunc(n.IPs, func(a netip.Addr) bool { return a.Is4() == ip.Is4() })
			want[ip] = append(want[ip], n.IPs[i])
		}
	}
	var errs []error
	route := func(ip netip.Addr, via []netip.Addr) bool {
		err := netdev.RouteVia(l.layout.UnderlayNetNS(), bridge, netip.PrefixFrom(ip, ip.BitLen()), via)
		errs = append(errs, err)
		return err == nil
	}
	for ip := range l.routed {
		if want[ip] == nil && route(ip, nil) {
			delete(l.routed, ip)
		}
	}
	for ip, via := range want {
		if !slices.Equal(l.routed[ip], via) && route(ip, via) {
			l.routed[ip] = via
		}
	}
	return errors.Join(errs...)
}
