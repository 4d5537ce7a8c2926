// SPDX-License-Identifier: Apache-2.0

package pin

import (
	"errors"
	"fmt"
	"os"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"
)

// migration is a map whose contents move from an old layout to a new one. The
// old map stays, pinned aside, until the programs that write to it are gone: an
// agent that dies in between leaves all that the next one needs.
type migration struct {
	name       string
	aside      string // pin of from
	from, to   *ebpf.Map
	key, value []fieldMove
}

// asideSuffix ends the pin of a map that is being made or waits to be dropped.
// It has no dot: the BPF file system refuses names with one.
const asideSuffix = "-aside"

// writtenByPrograms are the maps whose entries come from packets. All others
// are written by the agent, which knows better than an old map what belongs
// there.
var writtenByPrograms = map[string]bool{"weft_conntrack": true, "weft_nat": true, "weft_fragments": true, "weft_service_flows": true, "weft_affinity": true, "weft_service_sockets": true}

// fieldMove copies size bytes from one offset to another.
type fieldMove struct{ from, to, size int }

// sameLayout says whether a pinned map can be used as it is.
func sameLayout(old *ebpf.Map, spec *ebpf.MapSpec) (bool, error) {
	if old.Type() != spec.Type || old.KeySize() != spec.KeySize || old.ValueSize() != spec.ValueSize ||
		old.MaxEntries() != spec.MaxEntries {
		return false, nil
	}
	if spec.InnerMap != nil {
		return sameInner(old, spec.InnerMap)
	}
	// Nobody can copy the memory of sockets: new fields of it take reserved bytes.
	if spec.Key == nil || spec.Value == nil || spec.Type == ebpf.SkStorage {
		return true, nil
	}
	from, err := mapTypes(old)
	if err != nil || from == nil {
		// a map without BTF: the sizes agree, and that is all there is to know
		return true, err
	}
	for _, t := range []btf.Type{spec.Key, spec.Value} {
		if !sameType(from, t) {
			return false, nil
		}
	}
	return true, nil
}

// mapTypes returns the types that the kernel knows of a map, or nil.
func mapTypes(m *ebpf.Map) (*btf.Spec, error) {
	info, err := m.Info()
	if err != nil {
		return nil, fmt.Errorf("read map info: %w", err)
	}
	id, ok := info.BTFID()
	if !ok || id == 0 {
		return nil, nil
	}
	h, err := btf.NewHandleFromID(id)
	if err != nil {
		return nil, fmt.Errorf("open the BTF of the map: %w", err)
	}
	defer h.Close()
	spec, err := h.Spec(nil)
	if err != nil {
		return nil, fmt.Errorf("read the BTF of the map: %w", err)
	}
	return spec, nil
}

// sameType says whether a struct has the same members at the same places in
// both; other types are compared by size only, which the caller has done.
func sameType(old *btf.Spec, t btf.Type) bool {
	want, ok := btf.UnderlyingType(t).(*btf.Struct)
	if !ok {
		return true
	}
	var have *btf.Struct
	if err := old.TypeByName(want.Name, &have); err != nil || len(have.Members) != len(want.Members) {
		return false
	}
	for i, m := range want.Members {
		if h := have.Members[i]; h.Name != m.Name || h.Offset != m.Offset {
			return false
		}
	}
	return true
}

// moves pairs the members of a struct by name.
func moves(old *btf.Spec, t btf.Type, oldSize, newSize uint32) ([]fieldMove, error) {
	whole := []fieldMove{{0, 0, int(min(oldSize, newSize))}}
	want, ok := btf.UnderlyingType(t).(*btf.Struct)
	if !ok || old == nil {
		return whole, nil
	}
	var have *btf.Struct
	if err := old.TypeByName(want.Name, &have); err != nil {
		return whole, nil
	}
	byName := map[string]btf.Member{}
	for _, m := range have.Members {
		byName[m.Name] = m
	}
	var out []fieldMove
	for _, m := range want.Members {
		h, ok := byName[m.Name]
		if !ok {
			continue
		}
		oldLen, err := btf.Sizeof(h.Type)
		if err != nil {
			return nil, fmt.Errorf("size of %s.%s: %w", want.Name, m.Name, err)
		}
		newLen, err := btf.Sizeof(m.Type)
		if err != nil {
			return nil, fmt.Errorf("size of %s.%s: %w", want.Name, m.Name, err)
		}
		out = append(out, fieldMove{int(h.Offset.Bytes()), int(m.Offset.Bytes()), min(oldLen, newLen)})
	}
	return out, nil
}

// migrate makes the new map aside, copies what the old one holds and swaps the
// two pins. The ring buffer has no entries, and those of sockets can be reached
// by their owners only: these start anew.
func migrate(name string, old *ebpf.Map, spec *ebpf.MapSpec, path string) (_ *migration, err error) {
	mig, err := newMigration(name, old, spec, path)
	if err != nil {
		return nil, err
	}
	if err := os.Remove(mig.aside); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("remove an unfinished migration: %w", err)
	}
	mig.to, err = createPinned(spec, mig.aside)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			os.Remove(mig.aside)
			mig.to.Close()
		}
	}()
	if err := mig.copy(); err != nil {
		return nil, err
	}
	if err := unix.Renameat2(unix.AT_FDCWD, mig.aside, unix.AT_FDCWD, path, unix.RENAME_EXCHANGE); err != nil {
		return nil, fmt.Errorf("swap the old pin and the new: %w", err)
	}
	return mig, nil
}

// resume goes on with a migration to the map at path that an agent began and
// did not finish; nil where there is none.
func resume(name string, to *ebpf.Map, spec *ebpf.MapSpec, path string) (_ *migration, err error) {
	old, err := ebpf.LoadPinnedMap(path+asideSuffix, nil)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open the map of an unfinished migration: %w", err)
	}
	defer func() {
		if err != nil {
			old.Close()
		}
	}()
	mig, err := newMigration(name, old, spec, path)
	if err != nil {
		return nil, err
	}
	mig.to = to
	if writtenByPrograms[name] {
		err = mig.copy()
	}
	return mig, err
}

func newMigration(name string, old *ebpf.Map, spec *ebpf.MapSpec, path string) (*migration, error) {
	types, err := mapTypes(old)
	if err != nil {
		return nil, err
	}
	mig := &migration{name: name, aside: path + asideSuffix, from: old}
	if mig.key, err = moves(types, spec.Key, old.KeySize(), spec.KeySize); err != nil {
		return nil, err
	}
	if mig.value, err = moves(types, spec.Value, old.ValueSize(), spec.ValueSize); err != nil {
		return nil, err
	}
	return mig, nil
}

// copy adds to the new map what only the old one has. Where the new map is
// smaller and full, the rest is left behind.
func (g *migration) copy() error {
	switch g.to.Type() {
	case ebpf.RingBuf, ebpf.SkStorage:
		return nil
	case ebpf.PerCPUArray:
		return g.copyPerCPU()
	case ebpf.HashOfMaps:
		return copyInner(g.from, g.to)
	}
	err := walkRaw(g.from, func(key, value []byte) error {
		k, v := apply(g.key, key, g.to.KeySize()), apply(g.value, value, g.to.ValueSize())
		err := g.to.Update(k, v, ebpf.UpdateNoExist)
		if errors.Is(err, ebpf.ErrKeyExist) {
			return nil
		}
		return err
	})
	if err != nil && !errors.Is(err, errTooBig) {
		return fmt.Errorf("copy entries: %w", err)
	}
	return nil
}

func (g *migration) copyPerCPU() error {
	for i := uint32(0); i < min(g.from.MaxEntries(), g.to.MaxEntries()); i++ {
		var old [][]byte
		if err := g.from.Lookup(i, &old); err != nil {
			return fmt.Errorf("read slot %d: %w", i, err)
		}
		values := make([][]byte, len(old))
		for cpu, v := range old {
			values[cpu] = apply(g.value, v, g.to.ValueSize())
		}
		if err := g.to.Put(i, values); err != nil {
			return fmt.Errorf("write slot %d: %w", i, err)
		}
	}
	return nil
}

func apply(ms []fieldMove, from []byte, size uint32) []byte {
	to := make([]byte, size)
	for _, m := range ms {
		copy(to[m.to:m.to+m.size], from[m.from:m.from+m.size])
	}
	return to
}

// FinishMigration copies what the old programs wrote between Open and the
// moment when every link was updated to programs with the new maps, and drops
// the old maps.
func (m *Maps) FinishMigration() error {
	for _, g := range m.migrations {
		if writtenByPrograms[g.name] {
			if err := g.copy(); err != nil {
				return fmt.Errorf("map %s: %w", g.name, err)
			}
		}
	}
	for _, g := range m.migrations {
		if err := os.Remove(g.aside); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("remove the old map %s: %w", g.name, err)
		}
		if err := g.from.Close(); err != nil {
			return fmt.Errorf("close the old map %s: %w", g.name, err)
		}
	}
	m.migrations = nil
	return nil
}
