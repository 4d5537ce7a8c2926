// SPDX-License-Identifier: Apache-2.0

package pin

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"

	"github.com/weft-mesh/weft/internal/datapath/packettest/bpffs"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func small() Sizes {
	return Sizes{Endpoints: 16, IPCache: 32, Conntrack: 64, NAT: 64, Policy: 128, Classes: 256, Fragments: 64, Events: 256 << 10}
}

func open(t *testing.T, dir string, sizes Sizes) *Maps {
	t.Helper()
	m, err := Open(dir, sizes)
	must(t, err)
	t.Cleanup(func() { m.Close() })
	return m
}

func address(last byte) KernelAddr {
	return KernelAddr{B: [16]byte{10: 0xff, 11: 0xff, 12: 10, 13: 244, 14: 1, 15: last}}
}

func connection(n uint16) KernelCtKey {
	return KernelCtKey{A: address(1), B: address(2), A_port: n, B_port: 80, Protocol: 6}
}

// TestOpenAdopts: a second Open sees what the first made, not a copy of it.
func TestOpenAdopts(t *testing.T) {
	dir := filepath.Join(bpffs.New(t), "lab", "node1")
	first := open(t, dir, small())
	must(t, first.Map("weft_endpoints").Put(address(5), KernelEndpoint{Ifindex: 7}))
	second := open(t, dir, small())
	must(t, first.Map("weft_endpoints").Put(address(6), KernelEndpoint{Ifindex: 8}))
	for last, ifindex := range map[byte]uint32{5: 7, 6: 8} {
		var e KernelEndpoint
		must(t, second.Map("weft_endpoints").Lookup(address(last), &e))
		if e.Ifindex != ifindex {
			t.Errorf("endpoint %d has device %d, want %d", last, e.Ifindex, ifindex)
		}
	}
	if len(second.migrations) != 0 {
		t.Errorf("%d maps were migrated, want none", len(second.migrations))
	}
	for name, m := range first.maps {
		if a, b := mapID(t, m), mapID(t, second.maps[name]); a != b {
			t.Errorf("map %s: %d and %d are not the same", name, a, b)
		}
	}
}

func mapID(t *testing.T, m *ebpf.Map) ebpf.MapID {
	t.Helper()
	info, err := m.Info()
	must(t, err)
	id, _ := info.ID()
	return id
}

func TestOpenSizes(t *testing.T) {
	m := open(t, filepath.Join(bpffs.New(t), "node"), small())
	for name, want := range small().byMap() {
		if want == 0 {
			continue // the default
		}
		if got := int(m.Map(name).MaxEntries()); got != want {
			t.Errorf("map %s has room for %d, want %d", name, got, want)
		}
	}
	must(t, m.Map("weft_endpoints").Put(address(5), KernelEndpoint{}))
	fills, err := m.Fills()
	must(t, err)
	want := []Fill{{"endpoints", 1, 16}, {"ipcache", 0, 32}, {"conntrack", 0, 64}, {"nat", 0, 64}, {"policy", 0, 128}, {"cidr", 0, 256}, {"fragments", 0, 64},
		{"services", 0, 131072}, {"slots", 0, 524288}, {"backends", 0, 262144}, {"members", 0, 262144}, {"affinity", 0, 65536},
		{"source_ranges", 0, 65536}, {"service_sockets", 0, 65536}, {"service_flows", 0, 262144}}
	if d := cmp.Diff(want, fills); d != "" {
		t.Errorf("fills (-want +got):\n%s", d)
	}
}

// TestFillsOfManyEntries: more than one batch.
func TestFillsOfManyEntries(t *testing.T) {
	s := small()
	s.Conntrack = 3*batch + 7
	m := open(t, filepath.Join(bpffs.New(t), "node"), s)
	const n = 2*batch + 11
	for i := range n {
		must(t, m.Map("weft_conntrack").Put(connection(uint16(i)), KernelCtEntry{}))
	}
	fills, err := m.Fills()
	must(t, err)
	if fills[2].Entries != n {
		t.Errorf("%d entries, want %d", fills[2].Entries, n)
	}
}

func TestOpenRefuses(t *testing.T) {
	dir := t.TempDir()
	if _, err := Open(filepath.Join(dir, "node"), small()); err == nil || !strings.Contains(err.Error(), "not in a BPF file system") {
		t.Errorf("a folder that is not in bpffs: %v", err)
	}
	if _, err := os.Stat(filepath.Join(dir, "node")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the folder was made all the same: %v", err)
	}
	bad := small()
	bad.Events = 4097 // no power of two
	pins := filepath.Join(bpffs.New(t), "node")
	if _, err := Open(pins, bad); err == nil || !strings.Contains(err.Error(), "weft_events") {
		t.Errorf("a ring of %d bytes: %v", bad.Events, err)
	}
	open(t, pins, small()) // what the failed Open left is no obstacle
}

// TestNoLeaks: every descriptor of BPF objects is closed, also where Open fails
// half way, and after a migration.
func TestNoLeaks(t *testing.T) {
	dir := filepath.Join(bpffs.New(t), "node")
	before := bpffs.Descriptors(t)
	m, err := Open(dir, small())
	must(t, err)
	must(t, m.Close())
	larger := small()
	larger.Conntrack, larger.Events = 128, 512<<10
	m, err = Open(dir, larger)
	must(t, err)
	must(t, m.FinishMigration())
	must(t, m.Close())
	m, err = Open(dir, small()) // migrated back, not finished
	must(t, err)
	must(t, m.Close())
	bad := small()
	bad.Events = 4097
	if _, err := Open(dir, bad); err == nil {
		t.Error("Open succeeded with a wrong ring size")
	}
	if d := cmp.Diff(before, bpffs.Descriptors(t)); d != "" {
		t.Errorf("open BPF objects (-before +after):\n%s", d)
	}
}

func TestRemove(t *testing.T) {
	dir := filepath.Join(bpffs.New(t), "node")
	m, err := Open(dir, small())
	must(t, err)
	must(t, m.Close())
	must(t, Remove(dir))
	must(t, Remove(dir))
	if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the folder is still there: %v", err)
	}
}
