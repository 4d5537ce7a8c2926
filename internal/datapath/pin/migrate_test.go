// SPDX-License-Identifier: Apache-2.0

package pin

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"

	"github.com/weft-mesh/weft/internal/datapath/packettest/bpffs"
)

// oldEntrySize is that of the value that oldConntrack gives its map.
const oldEntrySize = 32

// oldConntrack makes and pins the connection table of an earlier weft: its
// entries have other fields, in another order, and there is room for more.
func oldConntrack(t *testing.T, dir string, entries int) *ebpf.Map {
	t.Helper()
	spec, err := LoadKernel()
	must(t, err)
	ms := spec.Maps["weft_conntrack"].Copy()
	u64, u32 := &btf.Int{Name: "u64", Size: 8}, &btf.Int{Name: "u32", Size: 4}
	ms.Value = &btf.Struct{Name: "ct_entry", Size: oldEntrySize, Members: []btf.Member{
		{Name: "flags", Type: u32, Offset: 0},
		{Name: "gone", Type: u32, Offset: 32},
		{Name: "dst_identity", Type: u64, Offset: 64},
		{Name: "src_identity", Type: u32, Offset: 128}, // has grown since
		{Name: "last_seen", Type: u32, Offset: 160},
		{Name: "nat_port", Type: u64, Offset: 192}, // has shrunk since
	}}
	ms.ValueSize, ms.MaxEntries = oldEntrySize, 256
	must(t, os.MkdirAll(filepath.Join(dir, "maps"), 0o700))
	m, err := createPinned(ms, filepath.Join(dir, "maps", "conntrack"))
	must(t, err)
	t.Cleanup(func() { m.Close() })
	for i := range entries {
		must(t, m.Put(connection(uint16(i)), oldEntry(uint32(i))))
	}
	return m
}

func oldEntry(i uint32) []byte {
	b := make([]byte, oldEntrySize)
	binary.NativeEndian.PutUint32(b[0:], 1)
	binary.NativeEndian.PutUint32(b[4:], 0xdead)
	binary.NativeEndian.PutUint64(b[8:], 1<<40+uint64(i))
	binary.NativeEndian.PutUint32(b[16:], 300+i)
	binary.NativeEndian.PutUint32(b[20:], 77)
	binary.NativeEndian.PutUint64(b[24:], uint64(12345+i))
	return b
}

func newEntry(i uint32) KernelCtEntry {
	return KernelCtEntry{SrcIdentity: uint64(300 + i), DstIdentity: 1<<40 + uint64(i), Flags: 1, LastSeen: 77, NatPort: 12345 + i}
}

func checkMigrated(t *testing.T, m *Maps, want int) {
	t.Helper()
	mp := m.Map("weft_conntrack")
	n, err := countKeys(mp)
	must(t, err)
	if int(n) != want {
		t.Errorf("%d connections, want %d", n, want)
	}
	for i := range want {
		var e KernelCtEntry
		if err := mp.Lookup(connection(uint16(i)), &e); err != nil {
			t.Errorf("connection %d: %v", i, err)
		} else if e != newEntry(uint32(i)) {
			t.Errorf("connection %d is %+v, want %+v", i, e, newEntry(uint32(i)))
		}
	}
}

func pinned(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(dir, "maps"))
	must(t, err)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func hasAside(t *testing.T, dir string) bool {
	t.Helper()
	return slices.Contains(pinned(t, dir), "conntrack"+asideSuffix)
}

func TestMigrateLayout(t *testing.T) {
	dir := filepath.Join(bpffs.New(t), "node")
	old := oldConntrack(t, dir, 40)
	m := open(t, dir, small())
	checkMigrated(t, m, 40)
	// the old programs still write to the old map
	must(t, old.Put(connection(40), oldEntry(40)))
	// and the new ones to the new map, which is not to be overwritten
	changed := newEntry(3)
	changed.Packets[0] = 9
	must(t, m.Map("weft_conntrack").Put(connection(3), changed))
	must(t, m.FinishMigration())
	var e KernelCtEntry
	must(t, m.Map("weft_conntrack").Lookup(connection(3), &e))
	if e != changed {
		t.Errorf("an entry of the new programs is %+v, want %+v", e, changed)
	}
	must(t, m.Map("weft_conntrack").Put(connection(3), newEntry(3)))
	checkMigrated(t, m, 41)
	if hasAside(t, dir) {
		t.Errorf("left over: %v", pinned(t, dir))
	}
	again := open(t, dir, small())
	if len(again.migrations) != 0 {
		t.Errorf("%d maps were migrated again", len(again.migrations))
	}
	checkMigrated(t, again, 41)
}

// TestMigrateResumes: the agent died after the swap of the pins, before the
// programs were updated; they went on writing to the old map.
func TestMigrateResumes(t *testing.T) {
	dir := filepath.Join(bpffs.New(t), "node")
	old := oldConntrack(t, dir, 10)
	first, err := Open(dir, small())
	must(t, err)
	must(t, first.Close())
	for i := uint32(10); i < 20; i++ {
		must(t, old.Put(connection(uint16(i)), oldEntry(i)))
	}
	second := open(t, dir, small())
	checkMigrated(t, second, 20)
	must(t, old.Put(connection(20), oldEntry(20)))
	must(t, second.FinishMigration())
	checkMigrated(t, second, 21)
	if hasAside(t, dir) {
		t.Errorf("left over: %v", pinned(t, dir))
	}
}

// TestMigrateStartsAgain: the agent died while it copied, before the swap.
func TestMigrateStartsAgain(t *testing.T) {
	dir := filepath.Join(bpffs.New(t), "node")
	oldConntrack(t, dir, 10)
	spec, err := LoadKernel()
	must(t, err)
	half, err := createPinned(spec.Maps["weft_conntrack"], filepath.Join(dir, "maps", "conntrack"+asideSuffix))
	must(t, err)
	must(t, half.Put(connection(0), newEntry(0)))
	must(t, half.Put(connection(99), newEntry(99))) // over since
	must(t, half.Close())
	m := open(t, dir, small())
	checkMigrated(t, m, 10)
	must(t, m.FinishMigration())
	if hasAside(t, dir) {
		t.Errorf("left over: %v", pinned(t, dir))
	}
}

// TestMigrateSize: fewer entries than before; what does not fit is left behind.
func TestMigrateSize(t *testing.T) {
	dir := filepath.Join(bpffs.New(t), "node")
	m, err := Open(dir, small())
	must(t, err)
	for i := range 60 {
		must(t, m.Map("weft_conntrack").Put(connection(uint16(i)), KernelCtEntry{LastSeen: uint32(i)}))
		must(t, m.Map("weft_nat").Put(KernelNatKey{Remote: address(9), NatPort: uint16(i)}, KernelNatEntry{Pod: address(1), PodPort: uint16(i)}))
	}
	must(t, m.Map("weft_ipcache").Put(KernelIpcacheKey{Prefixlen: 128, Addr: [4]uint32{1, 2, 3, 4}}, KernelIpcacheEntry{Identity: 5}))
	must(t, m.Close())
	s := small()
	s.Conntrack, s.NAT, s.IPCache = 20, 200, 64
	m = open(t, dir, s)
	for name, want := range map[string]uint64{"weft_conntrack": 20, "weft_nat": 60, "weft_ipcache": 1} {
		n, err := countKeys(m.Map(name))
		must(t, err)
		if n != want || m.Map(name).MaxEntries() != uint32(s.byMap()[name]) {
			t.Errorf("%s: %d of %d entries, want %d of %d", name, n, m.Map(name).MaxEntries(), want, s.byMap()[name])
		}
	}
	var e KernelNatEntry
	must(t, m.Map("weft_nat").Lookup(KernelNatKey{Remote: address(9), NatPort: 7}, &e))
	if e.PodPort != 7 || e.Pod != address(1) {
		t.Errorf("migrated entry is %+v", e)
	}
	must(t, m.FinishMigration())
}

// TestMigrateLeavesAgentsMapsAlone: what the agent deleted after Open does not
// come back.
func TestMigrateLeavesAgentsMapsAlone(t *testing.T) {
	dir := filepath.Join(bpffs.New(t), "node")
	m, err := Open(dir, small())
	must(t, err)
	must(t, m.Map("weft_endpoints").Put(address(5), KernelEndpoint{Ifindex: 7}))
	must(t, m.Close())
	s := small()
	s.Endpoints = 32
	m = open(t, dir, s)
	must(t, m.Map("weft_endpoints").Delete(address(5)))
	must(t, m.FinishMigration())
	n, err := countKeys(m.Map("weft_endpoints"))
	must(t, err)
	if n != 0 {
		t.Error("a pod that was forgotten is back")
	}
}

// TestMigrateCounters: counts of all CPUs go on where there are more of them.
func TestMigrateCounters(t *testing.T) {
	dir := filepath.Join(bpffs.New(t), "node")
	spec, err := LoadKernel()
	must(t, err)
	ms := spec.Maps["weft_counters"].Copy()
	ms.MaxEntries = 3
	must(t, os.MkdirAll(filepath.Join(dir, "maps"), 0o700))
	old, err := createPinned(ms, filepath.Join(dir, "maps", "counters"))
	must(t, err)
	defer old.Close()
	cpus := ebpf.MustPossibleCPU()
	want := make([]KernelCounter, cpus)
	for i := range want {
		want[i] = KernelCounter{Packets: uint64(i + 1), Bytes: uint64(100 * (i + 1))}
	}
	must(t, old.Put(uint32(2), want))
	m := open(t, dir, small())
	var got []KernelCounter
	must(t, m.Map("weft_counters").Lookup(uint32(2), &got))
	if !slices.Equal(got, want) {
		t.Errorf("counters %v, want %v", got, want)
	}
	must(t, m.FinishMigration())
}
