// SPDX-License-Identifier: Apache-2.0

// Package deny drives the deny list of a node: networks whose packets are
// dropped as they arrive. The pinned map is the list, so that it stays in force,
// and known, without an agent and from one agent to the next.
package deny

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"unsafe"

	"github.com/cilium/ebpf"

	"github.com/weft-mesh/weft/internal/addr"
	"github.com/weft-mesh/weft/internal/datapath/pin"
)

// Entry is a network on the list, with what was dropped of it.
type Entry struct {
	Prefix         netip.Prefix
	Packets, Bytes uint64
}

// List is the deny list. Safe for concurrent use; only one process may change
// the list at a time.
type List struct {
	networks, counters *ebpf.Map
	mu                 sync.Mutex // held by changes
}

// New returns the list in the maps of m.
func New(m *pin.Maps) *List {
	return &List{networks: m.Map("weft_deny"), counters: m.Map("weft_denied")}
}

// Max is how many networks there may be.
func (l *List) Max() int { return int(min(l.networks.MaxEntries(), l.counters.MaxEntries())) }

func key(p netip.Prefix) pin.KernelDenyKey {
	b, bits := addr.PrefixTo16(p)
	k := pin.KernelDenyKey{Prefixlen: uint32(bits)}
	k.Addr = *(*[4]uint32)(unsafe.Pointer(&b))
	return k
}

func prefix(k pin.KernelDenyKey) netip.Prefix {
	return addr.PrefixFrom16(*(*[16]byte)(unsafe.Pointer(&k.Addr)), int(k.Prefixlen))
}

// Add puts a network on the list; false where it is there already.
func (l *List) Add(p netip.Prefix) (bool, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	k := key(p)
	var e pin.KernelDenyEntry
	err := l.networks.Lookup(&k, &e)
	if err == nil && e.Prefixlen == k.Prefixlen { // a lookup finds the networks around it too
		return false, nil
	}
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return false, fmt.Errorf("deny %s: look it up: %w", p, err)
	}
	place, err := l.freeCounter()
	if err != nil {
		return false, fmt.Errorf("deny %s: %w", p, err)
	}
	if err := l.networks.Put(&k, &pin.KernelDenyEntry{Counter: place, Prefixlen: k.Prefixlen}); err != nil {
		return false, fmt.Errorf("deny %s: %w", p, err)
	}
	return true, nil
}

// Delete takes a network off the list; false where it is not there.
func (l *List) Delete(p netip.Prefix) (bool, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	k := key(p)
	err := l.networks.Delete(&k)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("no longer deny %s: %w", p, err)
	}
	return true, nil
}

// freeCounter returns a counter that no entry has, at 0.
func (l *List) freeCounter() (uint32, error) {
	taken := map[uint32]bool{}
	err := l.walk(func(_ pin.KernelDenyKey, e pin.KernelDenyEntry) error {
		taken[e.Counter] = true
		return nil
	})
	if err != nil {
		return 0, err
	}
	place := uint32(0)
	for taken[place] {
		place++
	}
	if int(place) >= l.Max() {
		return 0, fmt.Errorf("the list is full (%d networks)", l.Max())
	}
	cpus, err := ebpf.PossibleCPU()
	if err != nil {
		return 0, fmt.Errorf("count the processors: %w", err)
	}
	if err := l.counters.Put(place, make([]pin.KernelCounter, cpus)); err != nil {
		return 0, fmt.Errorf("reset its counter: %w", err)
	}
	return place, nil
}

func (l *List) walk(f func(pin.KernelDenyKey, pin.KernelDenyEntry) error) error {
	const batch = 1024
	var cursor ebpf.MapBatchCursor
	keys, entries := make([]pin.KernelDenyKey, batch), make([]pin.KernelDenyEntry, batch)
	for {
		n, err := l.networks.BatchLookup(&cursor, keys, entries, nil)
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("read the list: %w", err)
		}
		for i := range n {
			if err := f(keys[i], entries[i]); err != nil {
				return err
			}
		}
		if err != nil {
			return nil
		}
	}
}

// List returns the list in order of address and length.
func (l *List) List() ([]Entry, error) {
	var out []Entry
	err := l.walk(func(k pin.KernelDenyKey, e pin.KernelDenyEntry) error {
		row := Entry{Prefix: prefix(k)}
		var perCPU []pin.KernelCounter
		if err := l.counters.Lookup(e.Counter, &perCPU); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("read the counter of %s: %w", row.Prefix, err)
		}
		for _, c := range perCPU {
			row.Packets += c.Packets
			row.Bytes += c.Bytes
		}
		out = append(out, row)
		return nil
	})
	if err != nil {
		return nil, err
	}
	slices.SortFunc(out, func(a, b Entry) int {
		return cmp.Or(a.Prefix.Addr().Compare(b.Prefix.Addr()), cmp.Compare(a.Prefix.Bits(), b.Prefix.Bits()))
	})
	return out, nil
}
