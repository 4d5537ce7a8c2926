// SPDX-License-Identifier: Apache-2.0

package netdev_test

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/weft-mesh/weft/internal/netdev"
	"github.com/weft-mesh/weft/internal/netdev/nstest"
)

func TestRouteVia(t *testing.T) {
	nstest.Need(t)
	ns := fmt.Sprintf("weft-test-via-%d", os.Getpid())
	if err := netdev.CreateNetNS(ns); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := netdev.DeleteNetNS(ns); err != nil {
			t.Error(err)
		}
	})
	addresses := []netip.Prefix{netip.MustParsePrefix("172.30.0.254/24"), netip.MustParsePrefix("fd00:172:30::fe/64")}
	if err := netdev.CreateBridge(netdev.LabLink{NetNS: ns, Name: "br", Addresses: addresses}, 1500); err != nil {
		t.Fatal(err)
	}
	if err := netdev.SpreadFlows(ns); err != nil {
		t.Fatal(err)
	}
	routes := func(family string) string {
		out, err := exec.Command("ip", "-n", ns, family, "route", "show", "proto", "static").CombinedOutput()
		if err != nil {
			t.Fatalf("ip route: %v: %s", err, out)
		}
		return strings.Join(strings.Fields(string(out)), " ")
	}
	for _, c := range []struct{ family, to, a, b string }{
		{"-4", "172.31.0.1/32", "172.30.0.1", "172.30.0.2"},
		{"-6", "fd00:172:31::1/128", "fd00:172:30::1", "fd00:172:30::2"},
	} {
		to, a, b := netip.MustParsePrefix(c.to), netip.MustParseAddr(c.a), netip.MustParseAddr(c.b)
		for _, via := range [][]netip.Addr{{a, b}, {b}, {a, b}, nil, nil} {
			if err := netdev.RouteVia(ns, "br", to, via); err != nil {
				t.Fatal(err)
			}
			got := routes(c.family)
			if n := strings.Count(got, "via "); n != len(via) {
				t.Errorf("%d next hops: want %v: %s", n, via, got)
			}
		}
	}
}
