// SPDX-License-Identifier: Apache-2.0

package xdp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/weft-mesh/weft/internal/addr"
	"github.com/weft-mesh/weft/internal/datapath/packettest/bpffs"
	"github.com/weft-mesh/weft/internal/datapath/pin"
	"github.com/weft-mesh/weft/internal/netdev"
)

// table is a kernel's neighbour table, and routes.
type table struct {
	neighbors map[netip.Addr]*netdev.Neighbor
	routes    map[netip.Addr]netip.Addr
	refuses   bool
}

func (f *table) Neighbors(int) (out []netdev.Neighbor, err error) {
	for _, n := range f.neighbors {
		out = append(out, *n)
	}
	return out, nil
}

func (f *table) WatchNeighbors(context.Context, int) (<-chan struct{}, error) { return nil, nil }

func (f *table) KeepNeighbor(_ int, a netip.Addr) error {
	if f.refuses {
		return errors.New("no")
	}
	if f.neighbors[a] == nil {
		f.neighbors[a] = &netdev.Neighbor{Addr: a}
	}
	f.neighbors[a].Kept = true
	return nil
}

func (f *table) ForgetNeighbor(_ int, a netip.Addr) error {
	delete(f.neighbors, a)
	return nil
}

func (f *table) NextHop(_ int, to netip.Addr) (netip.Addr, error) {
	if hop, ok := f.routes[to]; ok {
		return hop, nil
	}
	return netip.Addr{}, nil
}

func ip(s string) netip.Addr { return netip.MustParseAddr(s) }

func hardware(last byte) net.HardwareAddr { return net.HardwareAddr{2, 0, 0, 0, 0, last} }

// TestKeeper: nodes on the link and behind a router, which come, change and go.
func TestKeeper(t *testing.T) {
	maps, err := pin.Open(bpffs.New(t)+"/node", pin.Sizes{Conntrack: 64, NAT: 64})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { maps.Close() })
	near, far, six, router, nowhere := ip("192.0.2.2"), ip("198.51.100.3"), ip("2001:db8::2"), ip("192.0.2.254"), ip("203.0.113.4")
	f := &table{
		neighbors: map[netip.Addr]*netdev.Neighbor{router: {Addr: router, MAC: hardware(254)}},
		routes:    map[netip.Addr]netip.Addr{near: near, far: router, six: six},
	}
	k := NewKeeper(f, maps, 2, slog.New(slog.DiscardHandler))
	step := func(name string, want ...string) {
		t.Helper()
		if err := errors.Join(k.route(), k.sync()); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if d := cmp.Diff(want, hops(t, maps)); d != "" {
			t.Errorf("%s: next hops (-want +got):\n%s", name, d)
		}
	}
	earlier := pin.KernelAddr{B: addr.To16(ip("192.0.2.9"))}
	if err := maps.Map("weft_neighbors").Put(&earlier, &pin.KernelNeighbor{Mac: [6]byte(hardware(9))}); err != nil {
		t.Fatal(err)
	}
	step("not told yet", "192.0.2.9 02:00:00:00:00:09")
	k.Want([]netip.Addr{near, far, six, nowhere})
	step("two are not resolved", "198.51.100.3 02:00:00:00:00:fe")
	f.neighbors[near].MAC, f.neighbors[six].MAC = hardware(2), hardware(6)
	step("all are", "192.0.2.2 02:00:00:00:00:02", "198.51.100.3 02:00:00:00:00:fe", "2001:db8::2 02:00:00:00:00:06")
	f.neighbors[near].MAC, f.neighbors[six].MAC = hardware(3), nil
	step("one has another card, one fails", "192.0.2.2 02:00:00:00:00:03", "198.51.100.3 02:00:00:00:00:fe")
	k.Want([]netip.Addr{far})
	step("two nodes go", "198.51.100.3 02:00:00:00:00:fe")
	if len(f.neighbors) != 1 || !f.neighbors[router].Kept {
		t.Errorf("neighbours %v, want the router alone, kept", f.neighbors)
	}
	k.Want(nil)
	step("the last node goes")
	k.Want([]netip.Addr{far})
	f.neighbors[router] = &netdev.Neighbor{Addr: router, MAC: hardware(254)}
	step("one comes back", "198.51.100.3 02:00:00:00:00:fe")
	f.refuses = true
	k.Want([]netip.Addr{near, far})
	if err := errors.Join(k.route(), k.sync()); err == nil || !strings.Contains(err.Error(), "no") {
		t.Errorf("a kernel that refuses: %v", err)
	}
	if got := hops(t, maps); len(got) != 1 {
		t.Errorf("next hops %v, want the router's", got)
	}
}

func hops(t *testing.T, maps *pin.Maps) (out []string) {
	t.Helper()
	var k pin.KernelAddr
	var v pin.KernelNeighbor
	rows := maps.Map("weft_neighbors").Iterate()
	for rows.Next(&k, &v) {
		out = append(out, fmt.Sprintf("%s %s", addr.From16(k.B), net.HardwareAddr(v.Mac[:])))
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	slices.Sort(out)
	return out
}
