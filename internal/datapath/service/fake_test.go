// SPDX-License-Identifier: Apache-2.0

package service

import (
	"maps"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/weft-mesh/weft/internal/datapath/pin"
)

// fakeTable is a map in memory that tells of each single write.
type fakeTable[K comparable, V any] struct {
	m       map[K]V
	max     int
	written func()
	writes  int
}

func (t *fakeTable[K, V]) put(keys []K, values []V) (int, error) {
	for i, k := range keys {
		if _, ok := t.m[k]; !ok && len(t.m) >= t.max {
			return i, unix.E2BIG
		}
		t.m[k] = values[i]
		t.writes++
		t.written()
	}
	return len(keys), nil
}

func (t *fakeTable[K, V]) remove(keys []K) (int, error) {
	for _, k := range keys {
		if _, ok := t.m[k]; ok {
			delete(t.m, k)
			t.writes++
			t.written()
		}
	}
	return len(keys), nil
}

func (t *fakeTable[K, V]) each(f func(*K, *V) error) error {
	for k, v := range t.m {
		if err := f(&k, &v); err != nil {
			return err
		}
	}
	return nil
}

func (t *fakeTable[K, V]) size() int { return t.max }

type fakeArrays struct{ fakeTable[uint32, []uint32] }

func (t *fakeArrays) read(set uint32) ([]uint32, error) { return t.m[set], nil }

func (t *fakeArrays) sets() ([]uint32, error) { return slices.Collect(maps.Keys(t.m)), nil }

// fake is a kernel in memory. Programs in it may still hold every value that a
// frontend had since the last grace period.
type fake struct {
	services *fakeTable[serviceKey, pin.KernelService]
	slots    *fakeTable[slotKey, uint32]
	backends *fakeTable[uint32, pin.KernelBackend]
	members  *fakeTable[memberKey, uint8]
	ranges   *fakeTable[rangeKey, uint8]
	maglev   *fakeArrays
	held     map[serviceKey][]pin.KernelService
	check    func() // after each write
	fuse     int    // writes until the agent dies; 0: it lives
}

// died is what a write panics with when the agent dies of it.
type died struct{}

func newFake(max int) *fake {
	f := &fake{held: map[serviceKey][]pin.KernelService{}, check: func() {}}
	written := func() {
		for k, v := range f.services.m {
			if !slices.Contains(f.held[k], v) {
				f.held[k] = append(f.held[k], v)
			}
		}
		f.check()
		if f.fuse > 0 {
			if f.fuse--; f.fuse == 0 {
				panic(died{})
			}
		}
	}
	f.services = &fakeTable[serviceKey, pin.KernelService]{map[serviceKey]pin.KernelService{}, max, written, 0}
	f.slots = &fakeTable[slotKey, uint32]{map[slotKey]uint32{}, max, written, 0}
	f.backends = &fakeTable[uint32, pin.KernelBackend]{map[uint32]pin.KernelBackend{}, max, written, 0}
	f.members = &fakeTable[memberKey, uint8]{map[memberKey]uint8{}, max, written, 0}
	f.ranges = &fakeTable[rangeKey, uint8]{map[rangeKey]uint8{}, max, written, 0}
	f.maglev = &fakeArrays{fakeTable[uint32, []uint32]{map[uint32][]uint32{}, max, written, 0}}
	return f
}

func (f *fake) kernel() *kernel {
	return &kernel{f.services, f.slots, f.backends, f.members, f.ranges, f.maglev, func() error {
		clear(f.held)
		return nil
	}}
}

// backend mirrors any_backend of bpf/lib/service.h.
func (f *fake) backend(set, count, random uint32) *pin.KernelBackend {
	const tries = 4
	for i := uint32(0); i < tries && count > 0; i++ {
		id, ok := f.slots.m[slotKey{Set: set, Slot: (random + i) % count}]
		if !ok {
			continue
		}
		if b, ok := f.backends.m[id]; ok {
			return &b
		}
	}
	return nil
}

// far mirrors what service_backend does of the far set.
func (f *fake) far(v *pin.KernelService, hash uint32) *pin.KernelBackend {
	if v.Maglev != 0 && v.Far.Count > 0 {
		table := f.maglev.m[v.Far.Id]
		if slot := hash % v.Maglev; int(slot) < len(table) {
			if b, ok := f.backends.m[table[slot]]; ok {
				return &b
			}
		}
	}
	return f.backend(v.Far.Id, v.Far.Count, hash)
}
