// SPDX-License-Identifier: Apache-2.0

package deny

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/weft-mesh/weft/internal/datapath/packettest/bpffs"
	"github.com/weft-mesh/weft/internal/datapath/pin"
)

func open(t *testing.T, dir string, max int) *List {
	t.Helper()
	m, err := pin.Open(dir, pin.Sizes{Conntrack: 64, NAT: 64, Denied: max})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	return New(m)
}

func add(t *testing.T, l *List, want bool, prefixes ...string) {
	t.Helper()
	for _, p := range prefixes {
		if got, err := l.Add(netip.MustParsePrefix(p)); err != nil || got != want {
			t.Fatalf("add %s: %t, %v, want %t", p, got, err, want)
		}
	}
}

func check(t *testing.T, l *List, want ...string) {
	t.Helper()
	list, err := l.List()
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range list {
		got = append(got, fmt.Sprintf("%s %d/%d", e.Prefix, e.Packets, e.Bytes))
	}
	if d := cmp.Diff(want, got, cmpopts.EquateEmpty()); d != "" {
		t.Errorf("list (-want +got):\n%s", d)
	}
}

// TestList: a network inside of another is another one, and the list outlives
// the agent, also one with another size.
func TestList(t *testing.T) {
	dir := bpffs.New(t) + "/node"
	l := open(t, dir, 8)
	check(t, l)
	add(t, l, true, "198.51.100.0/24", "198.51.100.7/32", "0.0.0.0/0", "::/0", "2001:db8::/32")
	add(t, l, false, "198.51.100.0/24", "::/0")
	all := []string{"0.0.0.0/0 0/0", "198.51.100.0/24 0/0", "198.51.100.7/32 0/0", "::/0 0/0", "2001:db8::/32 0/0"}
	check(t, l, all...)
	check(t, open(t, dir, 8), all...)
	check(t, open(t, dir, 16), all...)
}

func TestDelete(t *testing.T) {
	l := open(t, bpffs.New(t)+"/node", 8)
	add(t, l, true, "198.51.100.0/24", "198.51.100.7/32")
	for _, c := range []struct {
		prefix string
		want   bool
	}{{"198.51.100.0/25", false}, {"198.51.100.0/24", true}, {"198.51.100.0/24", false}} {
		if got, err := l.Delete(netip.MustParsePrefix(c.prefix)); err != nil || got != c.want {
			t.Errorf("delete %s: %t, %v, want %t", c.prefix, got, err, c.want)
		}
	}
	check(t, l, "198.51.100.7/32 0/0")
}

// TestCounters: each entry has its own counter, and one that takes another's
// place begins at 0.
func TestCounters(t *testing.T) {
	l := open(t, bpffs.New(t)+"/node", 2)
	add(t, l, true, "198.51.100.0/24", "2001:db8::/32")
	for i := range uint32(2) {
		var perCPU []pin.KernelCounter
		if err := l.counters.Lookup(i, &perCPU); err != nil {
			t.Fatal(err)
		}
		for cpu := range perCPU {
			perCPU[cpu] = pin.KernelCounter{Packets: 1, Bytes: uint64(100 * (i + 1))}
		}
		perCPU[0].Packets += uint64(len(perCPU)) // so that the sum does not hang on the machine
		if err := l.counters.Put(i, perCPU); err != nil {
			t.Fatal(err)
		}
	}
	list, err := l.List()
	if err != nil || len(list) != 2 || list[1].Bytes != 2*list[0].Bytes || list[0].Packets == 0 {
		t.Fatalf("list %v, %v", list, err)
	}
	if _, err := l.Add(netip.MustParsePrefix("203.0.113.0/24")); err == nil || !strings.Contains(err.Error(), "deny 203.0.113.0/24: the list is full (2 networks)") {
		t.Errorf("a third of two: %v", err)
	}
	if _, err := l.Delete(netip.MustParsePrefix("198.51.100.0/24")); err != nil {
		t.Fatal(err)
	}
	add(t, l, true, "203.0.113.0/24")
	list, err = l.List()
	if err != nil || len(list) != 2 || list[0].Packets != 0 || list[0].Bytes != 0 || list[1].Packets == 0 {
		t.Errorf("list %v, %v", list, err)
	}
}
