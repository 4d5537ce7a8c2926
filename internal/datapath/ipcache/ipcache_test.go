// SPDX-License-Identifier: Apache-2.0

package ipcache

import (
	"net/netip"
	"path/filepath"
	"testing"

	"github.com/weft-mesh/weft/internal/datapath/packettest/bpffs"
	"github.com/weft-mesh/weft/internal/datapath/pin"
)

func newMap(t *testing.T) *Map {
	t.Helper()
	m, err := pin.Open(filepath.Join(bpffs.New(t), "node"), pin.Sizes{Conntrack: 16, NAT: 16, Events: 256 << 10})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	return New(m)
}

func update(t *testing.T, m *Map, rows map[string]uint64) {
	t.Helper()
	for p, id := range rows {
		if err := m.Update(t.Context(), netip.MustParsePrefix(p), Entry{Identity: id}); err != nil {
			t.Fatal(err)
		}
	}
}

func check(t *testing.T, m *Map, want map[string]uint64) {
	t.Helper()
	for a, id := range want {
		got, ok := m.Lookup(netip.MustParseAddr(a))
		if ok != (id != 0) || got != id {
			t.Errorf("%s has identity %d, %t: want %d", a, got, ok, id)
		}
	}
}

func TestLongestPrefix(t *testing.T) {
	m := newMap(t)
	update(t, m, map[string]uint64{
		"10.0.0.0/8": 1, "10.244.2.0/24": 2, "10.244.2.5/32": 3, "fd00::/16": 4, "fd00:10:244:2::/64": 5, "fd00:10:244:2::5/128": 6,
	})
	check(t, m, map[string]uint64{
		"10.1.1.1": 1, "10.244.2.4": 2, "10.244.2.5": 3, "11.0.0.1": 0,
		"fd00::1": 4, "fd00:10:244:2::4": 5, "fd00:10:244:2::5": 6, "fd01::1": 0,
	})
	update(t, m, map[string]uint64{"10.244.2.5/32": 7})
	check(t, m, map[string]uint64{"10.244.2.5": 7})
}

func TestFamiliesApart(t *testing.T) {
	m := newMap(t)
	update(t, m, map[string]uint64{"0.0.0.0/0": 1})
	check(t, m, map[string]uint64{"192.0.2.1": 1, "2001:db8::1": 0, "::1": 0})
	update(t, m, map[string]uint64{"::/0": 2})
	check(t, m, map[string]uint64{"192.0.2.1": 1, "2001:db8::1": 2})
}

func TestDelete(t *testing.T) {
	m := newMap(t)
	update(t, m, map[string]uint64{"10.0.0.0/8": 1, "10.244.2.0/24": 2})
	for range 2 { // an unknown one is no error
		if err := m.Delete(t.Context(), netip.MustParsePrefix("10.244.2.0/24")); err != nil {
			t.Fatal(err)
		}
	}
	check(t, m, map[string]uint64{"10.244.2.5": 1})
}

func TestPrune(t *testing.T) {
	m := newMap(t)
	rows := map[string]uint64{"10.0.0.0/8": 1, "10.244.2.0/24": 2, "10.244.2.5/32": 3, "fd00::/16": 4, "fd00:1::/64": 5, "::/0": 6}
	update(t, m, rows)
	want := map[netip.Prefix]Entry{netip.MustParsePrefix("10.244.2.0/24"): {}, netip.MustParsePrefix("fd00::/16"): {}}
	for range 2 {
		if err := m.Prune(t.Context(), want); err != nil {
			t.Fatal(err)
		}
	}
	check(t, m, map[string]uint64{"10.1.1.1": 0, "10.244.2.5": 2, "fd00:1::1": 4, "2001:db8::1": 0})
}
