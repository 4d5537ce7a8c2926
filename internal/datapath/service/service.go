// SPDX-License-Identifier: Apache-2.0

// Package service writes the kernel's maps of services (bpf/lib/service.h), and
// reads what programs put into them.
//
// # Order
//
// A Writer changes many service ports at once, in steps; after each single write
// every service has a backend that had one before and has one then:
//
//  1. what is new and nobody finds yet: backends, slots, members, source ranges,
//     Maglev tables of new sets;
//  2. slots of sets that change in place;
//  3. frontends, each by one write: count and number of its sets, flags, affinity;
//  4. what must not be found any more: frontends, members, source ranges;
//     then Maglev tables that change in place;
//  5. by Collect, when no program can hold a frontend of before step 3: slots,
//     sets, tables that nothing refers to, and backends that were released.
//
// A set changes in place where few of its backends do and all else of the port
// stays: a backend that goes is overwritten by the last one, so that one endpoint
// costs the same number of writes in a set of two and of five thousand. All other
// changes build a new set aside and switch each frontend to it.
//
// # Numbers
//
// Backends, sets and service ports have numbers that are not used again. Those of
// an earlier agent stay: a service port is known by its cluster addresses, a
// backend by its address and port within it. What nobody took over when the first
// sync is complete, Sweep removes.
//
// # Memory
//
// Of the kernel, in bytes for each entry, as it tells itself (BenchmarkMemory):
// frontend 112, slot 72, backend 96, member 72, source range 45, half of a
// translated connection 160, socket 72, entry of a Maglev table 8. A service port
// with a cluster address and two backends takes 448; this package takes about 850
// more for it.
package service

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"

	"github.com/weft-mesh/weft/internal/addr"
	"github.com/weft-mesh/weft/internal/balance"
	"github.com/weft-mesh/weft/internal/datapath/pin"
)

// Options of a Writer.
type Options struct {
	Maglev bool // far clients choose by Maglev tables, else at random
}

// Writer keeps the maps equal to what is wanted. Safe for concurrent use.
type Writer struct {
	options Options
	kernel  *kernel

	mu      sync.Mutex // protects what follows
	ports   map[balance.Name]*port
	failing map[*port]bool
	owners  map[serviceKey]*port   // that a frontend shall belong to
	rivals  map[serviceKey][]*port // that want it as well
	inForce map[serviceKey]frontend
	adopted *adopted // what an earlier agent left and nobody took; nil after Sweep
	garbage garbage
	left    []Left          // to be told
	lingers map[uint32]Left // backends that no set holds, until Release
	next    numbers
	writes  Writes
	maglev  MaglevStats
}

// numbers are the next ones to give.
type numbers struct{ service, set, backend uint32 }

// frontend is what a key of weft_services holds.
type frontend struct {
	port  *port // nil: of an earlier agent
	value pin.KernelService
}

// backend is an endpoint of one port.
type backend struct {
	at   netip.AddrPort
	id   uint32
	refs uint32 // sets that hold it
	here bool   // in the kernel
}

// set is a numbered set of backends in the kernel, never empty.
type set struct {
	id      uint32
	list    []balance.Backend // what it holds, in order
	slots   []*backend        // as the kernel has them
	written int               // slots that the kernel has, some of them beyond its count
	members bool              // they are in weft_members
	table   uint32            // entries of its Maglev table, 0: none
	suspect bool              // the table is of an earlier agent
	broken  bool              // it may hold other backends than slots says
	fixed   bool              // it does not change in place
	// Of the plan that is being made:
	taken bool
	wish  uint32 // entries that its table shall have
	edit  *edit
}

// Roles of sets: the fields of balance.ServicePort.
const (
	internal = iota
	cluster
	external
	roles
)

// sets are those of a port by family, IPv4 first, and role. One set may have
// several roles; nil is one without backends.
type sets [2][roles]*set

// each yields the sets, once each.
func (s *sets) each(yield func(*set) bool) {
	for f := range s {
		for r, one := range s[f] {
			if one != nil && !slices.Contains(s[f][:r], one) && !yield(one) {
				return
			}
		}
	}
}

func (s *sets) has(one *set) bool {
	return slices.Contains(s[0][:], one) || slices.Contains(s[1][:], one)
}

// header is what, when it changes, is switched together with the sets.
type header struct {
	affinity uint32 // seconds
	local    bool
}

// port is a service port.
type port struct {
	name   balance.Name
	id     uint32
	want   *balance.ServicePort // in force, or wanted where it is failing
	claims []serviceKey         // frontends it wants
	keys   []serviceKey         // frontends that it has in the kernel
	pool   []*backend           // in order of address and port
	sets   sets
	header header
	ranges []rangeKey
	errs   []*Error
	stuck  bool // a frontend still refers to sets of before
}

// Writes counts entries written and removed since the start, by map.
type Writes struct{ Services, Slots, Backends, Members, Ranges, Tables uint64 }

// Total is the sum of all maps.
func (w Writes) Total() uint64 {
	return w.Services + w.Slots + w.Backends + w.Members + w.Ranges + w.Tables
}

// New reads the maps, and adopts what an earlier agent left in them.
func New(m *pin.Maps, o Options) (*Writer, error) {
	k, err := kernelOf(m)
	if err != nil {
		return nil, err
	}
	w, err := newWriter(k, o)
	if err != nil {
		return nil, err
	}
	return w, w.skipUsed(m)
}

func newWriter(k *kernel, o Options) (*Writer, error) {
	w := &Writer{
		options: o, kernel: k, ports: map[balance.Name]*port{}, failing: map[*port]bool{},
		owners: map[serviceKey]*port{}, rivals: map[serviceKey][]*port{}, inForce: map[serviceKey]frontend{},
		lingers: map[uint32]Left{}, next: numbers{1, 1, 1},
	}
	if err := w.adopt(); err != nil {
		return nil, fmt.Errorf("read the services that are in force: %w", err)
	}
	return w, nil
}

// Writes returns the counts.
func (w *Writer) Writes() Writes {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.writes
}

var protocols = map[corev1.Protocol]uint8{corev1.ProtocolTCP: 6, corev1.ProtocolUDP: 17, corev1.ProtocolSCTP: 132}

func protocolName(p uint8) string {
	for name, n := range protocols {
		if n == p {
			return string(name)
		}
	}
	return fmt.Sprintf("protocol %d", p)
}

func keyOf(f *balance.Frontend, p corev1.Protocol) serviceKey {
	return serviceKey{Addr: kernelAddr(f.Addr), Port: networkOrder(f.Port), Protocol: protocols[p]}
}

func atOf(b *balance.Backend) netip.AddrPort { return netip.AddrPortFrom(b.Addr, b.Port) }

func kernelAddr(a netip.Addr) pin.KernelAddr { return pin.KernelAddr{B: addr.To16(a)} }

func addrOf(a pin.KernelAddr) netip.Addr { return addr.From16(a.B) }

// networkOrder returns v such that it lies in memory in network order; it is its
// own inverse.
func networkOrder(v uint16) uint16 {
	var b [2]byte
	binary.BigEndian.PutUint16(b[:], v)
	return binary.NativeEndian.Uint16(b[:])
}

func nativeWord(b []byte) uint32 { return binary.NativeEndian.Uint32(b) }

func putNativeWord(b []byte, w uint32) { binary.NativeEndian.PutUint32(b, w) }

// frontendOf returns where a key is.
func frontendOf(k *serviceKey) netip.AddrPort {
	return netip.AddrPortFrom(addrOf(k.Addr), networkOrder(k.Port))
}

// family is the first index of sets.
func family(a netip.Addr) int {
	if a.Is4() {
		return 0
	}
	return 1
}

// cut returns the backends of a family. All of IPv4 come first.
func cut(list []balance.Backend, family int) []balance.Backend {
	n, _ := slices.BinarySearchFunc(list, 0, func(b balance.Backend, _ int) int {
		if b.Addr.Is4() {
			return -1
		}
		return 1
	})
	if family == 0 {
		return list[:n]
	}
	return list[n:]
}
