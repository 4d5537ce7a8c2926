// SPDX-License-Identifier: Apache-2.0

package pin

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/weft-mesh/weft/internal/datapath/packettest/bpffs"
)

// putTable adds an inner map of size entries that all hold n.
func putTable(t *testing.T, outer *ebpf.Map, inner *ebpf.MapSpec, n uint32, size int) {
	t.Helper()
	spec := inner.Copy()
	spec.MaxEntries = uint32(size)
	m, err := ebpf.NewMap(spec)
	must(t, err)
	defer m.Close()
	value := make([]byte, spec.ValueSize)
	value[0] = byte(n)
	for i := range size {
		must(t, m.Put(uint32(i), value))
	}
	must(t, outer.Put(n, m))
}

func innerSpec(t *testing.T) *ebpf.MapSpec {
	t.Helper()
	spec, err := LoadKernel()
	must(t, err)
	return spec.Maps["weft_maglev"].InnerMap
}

// TestInnerMapsAreAdopted: tables of all sizes stay where the map of maps does,
// and move where its own size is another.
func TestInnerMapsAreAdopted(t *testing.T) {
	dir := filepath.Join(bpffs.New(t), "node")
	s := small()
	s.Maglev = 600
	m := open(t, dir, s)
	const n = innerBatch + 20
	for i := range uint32(n) {
		putTable(t, m.Map("weft_maglev"), innerSpec(t), i, 3+int(i%5))
	}
	again := open(t, dir, s)
	if len(again.migrations) != 0 {
		t.Errorf("%d maps were migrated, want none", len(again.migrations))
	}
	s.Maglev = 700
	moved := open(t, dir, s)
	must(t, moved.FinishMigration())
	for i := range uint32(n) {
		var table *ebpf.Map
		must(t, moved.Map("weft_maglev").Lookup(i, &table))
		var v uint32
		must(t, table.Lookup(uint32(0), &v))
		if v != i&0xff || table.MaxEntries() != 3+i%5 {
			t.Errorf("table %d holds %d and has %d entries, want %d", i, v, table.MaxEntries(), 3+i%5)
		}
		must(t, table.Close())
	}
	s.Maglev = 10
	must(t, open(t, dir, s).FinishMigration()) // the rest is left behind
}

// TestInnerMapsOfAnotherLayout: a map of maps that does not take the tables of
// this version is made anew, empty.
func TestInnerMapsOfAnotherLayout(t *testing.T) {
	dir := filepath.Join(bpffs.New(t), "node")
	spec, err := LoadKernel()
	must(t, err)
	ms := spec.Maps["weft_maglev"].Copy()
	ms.InnerMap.ValueSize, ms.InnerMap.Value = 8, nil
	must(t, os.MkdirAll(filepath.Join(dir, "maps"), 0o700))
	old, err := createPinned(ms, filepath.Join(dir, "maps", "maglev"))
	must(t, err)
	defer old.Close()
	putTable(t, old, ms.InnerMap, 1, 5)
	m := open(t, dir, small())
	must(t, m.FinishMigration())
	var table *ebpf.Map
	if err := m.Map("weft_maglev").Lookup(uint32(1), &table); err == nil {
		t.Error("a table of another layout is there")
		table.Close()
	}
	putTable(t, m.Map("weft_maglev"), innerSpec(t), 1, 5)
}
