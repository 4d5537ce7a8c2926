// SPDX-License-Identifier: Apache-2.0

package service

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weft-mesh/weft/internal/datapath/pin"
)

// table is one map of the kernel. put and remove stop at the first entry that
// fails, and say how many before it were done; remove passes over absent keys.
type table[K comparable, V any] interface {
	put(keys []K, values []V) (int, error)
	remove(keys []K) (int, error)
	each(func(*K, *V) error) error
	size() int
}

// arrays is the map of Maglev tables, by set.
type arrays interface {
	put(sets []uint32, tables [][]uint32) (int, error)
	remove(sets []uint32) (int, error)
	// read returns a table, or nil where there is none.
	read(set uint32) ([]uint32, error)
	sets() ([]uint32, error)
	size() int
}

type (
	serviceKey = pin.KernelServiceKey
	slotKey    = pin.KernelSlotKey
	memberKey  = pin.KernelMemberKey
	rangeKey   = pin.KernelRangeKey
)

// kernel are the maps that a Writer writes, and how to wait until no program
// works with what it read from them before.
type kernel struct {
	services table[serviceKey, pin.KernelService]
	slots    table[slotKey, uint32]
	backends table[uint32, pin.KernelBackend]
	members  table[memberKey, uint8]
	ranges   table[rangeKey, uint8]
	maglev   arrays
	grace    func() error
}

func kernelOf(m *pin.Maps) (*kernel, error) {
	tables, err := newInnerMaps(m)
	if err != nil {
		return nil, err
	}
	return &kernel{
		services: hash[serviceKey, pin.KernelService]{m.Map("weft_services")},
		slots:    hash[slotKey, uint32]{m.Map("weft_slots")},
		backends: hash[uint32, pin.KernelBackend]{m.Map("weft_backends")},
		members:  hash[memberKey, uint8]{m.Map("weft_members")},
		ranges:   hash[rangeKey, uint8]{m.Map("weft_source_ranges")},
		maglev:   tables,
		grace:    grace,
	}, nil
}

// grace returns once every program that runs now has ended: membarrier(2) waits
// for an RCU grace period.
func grace() error {
	const global = 1 // MEMBARRIER_CMD_GLOBAL
	_, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, global, 0, 0)
	if errno != 0 {
		return fmt.Errorf("wait for running programs (membarrier): %w", errno)
	}
	return nil
}

// batch is how many entries one system call reads or writes at most.
const batch = 4096

type hash[K comparable, V any] struct{ m *ebpf.Map }

func (h hash[K, V]) put(keys []K, values []V) (int, error) {
	return inBatches(len(keys), func(from, to int) (int, error) {
		return h.m.BatchUpdate(keys[from:to], values[from:to], nil)
	})
}

func (h hash[K, V]) remove(keys []K) (int, error) {
	done := 0
	for done < len(keys) {
		rest := keys[done:]
		n, err := inBatches(len(rest), func(from, to int) (int, error) { return h.m.BatchDelete(rest[from:to], nil) })
		done += n
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return done, err
		}
		if err != nil {
			done++ // it is absent already
		}
	}
	return done, nil
}

// inBatches calls f for parts of n entries, and returns how many are done.
func inBatches(n int, f func(from, to int) (int, error)) (int, error) {
	done := 0
	for done < n {
		to := min(done+batch, n)
		k, err := f(done, to)
		if err != nil {
			if k >= to-done { // the kernel did not even count
				k = 0
			}
			return done + k, err
		}
		done = to
	}
	return n, nil
}

func (h hash[K, V]) each(f func(*K, *V) error) error { return walk(h.m, f) }

func (h hash[K, V]) size() int { return int(h.m.MaxEntries()) }

// walk calls f with every entry of m, read in batches.
func walk[K, V any](m *ebpf.Map, f func(*K, *V) error) error {
	keys, values := make([]K, batch), make([]V, batch)
	var cursor ebpf.MapBatchCursor
	for {
		n, err := m.BatchLookup(&cursor, keys, values, nil)
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("read a batch: %w", err)
		}
		for i := range n {
			if err := f(&keys[i], &values[i]); err != nil {
				return err
			}
		}
		if err != nil {
			return nil
		}
	}
}

// innerMaps is weft_maglev.
type innerMaps struct {
	outer *ebpf.Map
	spec  *ebpf.MapSpec
}

func newInnerMaps(m *pin.Maps) (*innerMaps, error) {
	const name = "weft_maglev"
	spec, err := pin.LoadKernel()
	if err != nil {
		return nil, fmt.Errorf("read map object: %w", err)
	}
	return &innerMaps{m.Map(name), spec.Maps[name].InnerMap}, nil
}

// innerBatch is how many tables are put at once: each has a descriptor until it
// is in its place, and each system call waits for running programs.
const innerBatch = 256

func (t *innerMaps) put(sets []uint32, tables [][]uint32) (int, error) {
	for done := 0; done < len(sets); {
		to := min(done+innerBatch, len(sets))
		n, err := t.putSome(sets[done:to], tables[done:to])
		if err != nil {
			return done + n, err
		}
		done = to
	}
	return len(sets), nil
}

func (t *innerMaps) putSome(sets []uint32, tables [][]uint32) (int, error) {
	fds := make([]uint32, 0, len(tables))
	for _, entries := range tables {
		m, err := t.build(entries)
		if err != nil {
			return 0, err
		}
		defer m.Close()
		fds = append(fds, uint32(m.FD()))
	}
	n, err := t.outer.BatchUpdate(sets, fds, nil)
	if err != nil && n >= len(sets) {
		n = 0
	}
	return n, err
}

// build makes a table aside.
func (t *innerMaps) build(entries []uint32) (*ebpf.Map, error) {
	spec := t.spec.Copy()
	spec.MaxEntries = uint32(len(entries))
	m, err := ebpf.NewMap(spec)
	if err != nil {
		return nil, fmt.Errorf("create a table of %d entries: %w", len(entries), err)
	}
	keys := make([]uint32, len(entries))
	for i := range keys {
		keys[i] = uint32(i)
	}
	if _, err := m.BatchUpdate(keys, entries, nil); err != nil {
		m.Close()
		return nil, fmt.Errorf("write a table of %d entries: %w", len(entries), err)
	}
	return m, nil
}

func (t *innerMaps) remove(sets []uint32) (int, error) {
	return hash[uint32, uint32]{t.outer}.remove(sets)
}

func (t *innerMaps) read(set uint32) ([]uint32, error) {
	var m *ebpf.Map
	err := t.outer.Lookup(set, &m)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open a table: %w", err)
	}
	defer m.Close()
	out := make([]uint32, m.MaxEntries())
	err = walk(m, func(k, v *uint32) error { out[*k] = *v; return nil })
	return out, err
}

func (t *innerMaps) sets() ([]uint32, error) {
	var out []uint32
	err := walk(t.outer, func(k, _ *uint32) error { out = append(out, *k); return nil })
	return out, err
}

func (t *innerMaps) size() int { return int(t.outer.MaxEntries()) }
