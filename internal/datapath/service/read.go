// SPDX-License-Identifier: Apache-2.0

package service

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weft-mesh/weft/internal/balance"
	"github.com/weft-mesh/weft/internal/datapath/pin"
)

// Sets are the numbers and tables of the sets of one role.
type Sets struct {
	IDs        []uint32
	IPv4, IPv6 []uint32 // Maglev tables of numbers of backends; nil where there is none
}

// Numbered is a backend in the kernel.
type Numbered struct {
	ID   uint32
	Hits uint64 // connections that it was given
}

// Affinity keeps a client with a backend.
type Affinity struct {
	Client  netip.Addr // invalid for one that is known by its Number
	Number  uint64     // the cookie of a network namespace
	Backend uint32
	Left    time.Duration // unless it connects again; not negative
}

// InForce is what the kernel holds of a service port. ID is 0 where it holds
// nothing.
type InForce struct {
	ID       uint32
	Sets     map[balance.Set]Sets
	Backends map[netip.AddrPort]Numbered
	Affinity []Affinity
}

var setNames = [roles]balance.Set{internal: balance.InternalSet, cluster: balance.ClusterSet, external: balance.ExternalSet}

// Reader reads the maps. Safe for concurrent use.
type Reader struct {
	w                  *Writer
	backends, affinity *ebpf.Map
}

// NewReader returns a reader of the maps that w writes.
func NewReader(m *pin.Maps, w *Writer) *Reader {
	return &Reader{
		w: w, backends: m.Map("weft_backends"), affinity: m.Map("weft_affinity"),
	}
}

// Port reads what is in force of a service port.
func (r *Reader) Port(name balance.Name) (InForce, error) {
	out, affinity := r.numbersOf(name)
	for at, b := range out.Backends {
		var v pin.KernelBackend
		err := r.backends.Lookup(b.ID, &v)
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			delete(out.Backends, at) // it has just gone
			continue
		}
		if err != nil {
			return InForce{}, fmt.Errorf("read a backend: %w", err)
		}
		out.Backends[at] = Numbered{b.ID, v.Hits}
	}
	if affinity == 0 {
		return out, nil
	}
	var err error
	out.Affinity, err = r.affinityOf(out.ID, affinity)
	out.Affinity = slices.DeleteFunc(out.Affinity, func(a Affinity) bool { return !out.has(a.Backend) })
	return out, err
}

// has says whether a backend of that number is in a set: a client stays with no
// other.
func (f *InForce) has(backend uint32) bool {
	for _, b := range f.Backends {
		if b.ID == backend {
			return true
		}
	}
	return false
}

// numbersOf asks the writer; the second result is in seconds.
func (r *Reader) numbersOf(name balance.Name) (InForce, uint32) {
	r.w.mu.Lock()
	defer r.w.mu.Unlock()
	p := r.w.ports[name]
	if p == nil {
		return InForce{}, 0
	}
	out := InForce{ID: p.id, Sets: map[balance.Set]Sets{}, Backends: map[netip.AddrPort]Numbered{}}
	for f := range p.sets {
		for role, s := range p.sets[f] {
			if s == nil {
				continue
			}
			one := out.Sets[setNames[role]]
			one.IDs = append(one.IDs, s.id)
			if s.table != 0 && role == external {
				table, _ := r.w.kernel.maglev.read(s.id)
				if f == 0 {
					one.IPv4 = table
				} else {
					one.IPv6 = table
				}
			}
			out.Sets[setNames[role]] = one
			for _, b := range s.slots {
				out.Backends[b.at] = Numbered{ID: b.id}
			}
		}
	}
	return out, p.header.affinity
}

func (r *Reader) affinityOf(service, seconds uint32) ([]Affinity, error) {
	now, err := monotonicSeconds()
	if err != nil {
		return nil, err
	}
	var out []Affinity
	err = walk(r.affinity, func(k *pin.KernelAffinityKey, v *pin.KernelAffinity) error {
		left := int64(seconds) - int64(int32(now-v.Last))
		if k.Service != service || left < 0 {
			return nil
		}
		out = append(out, affinityFrom(k, v, left))
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list affinity: %w", err)
	}
	slices.SortFunc(out, func(a, b Affinity) int {
		return cmp.Or(a.Client.Compare(b.Client), cmp.Compare(a.Number, b.Number))
	})
	return out, nil
}

// affinityFrom reads an entry. The address of a client at the socket is the
// family, 0 for IPv4 and 1 for IPv6, and the cookie of its network namespace.
func affinityFrom(k *pin.KernelAffinityKey, v *pin.KernelAffinity, left int64) Affinity {
	a := Affinity{Backend: v.Backend, Left: time.Duration(left) * time.Second}
	high, low := k.Client.B[:8], k.Client.B[8:]
	if binary.NativeEndian.Uint64(high) <= 1 && !netip.AddrFrom16(k.Client.B).Is4In6() {
		a.Number = binary.NativeEndian.Uint64(low)
		return a
	}
	a.Client = addrOf(k.Client)
	return a
}

func monotonicSeconds() (uint32, error) {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		return 0, fmt.Errorf("read the monotonic clock: %w", err)
	}
	return uint32(ts.Sec), nil
}

// Maglev returns what tables cost.
func (w *Writer) Maglev() MaglevStats {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.maglev
}

// Port is a service port by name and number.
type Port struct {
	Name balance.Name
	ID   uint32
}

// Ports returns the service ports that the writer has, in order.
func (w *Writer) Ports() []Port {
	w.mu.Lock()
	defer w.mu.Unlock()
	var out []Port
	for _, p := range slices.SortedFunc(maps.Values(w.ports), func(a, b *port) int { return compareNames(&a.name, &b.name) }) {
		out = append(out, Port{p.name, p.id})
	}
	return out
}
