// SPDX-License-Identifier: Apache-2.0

// Package ipcache drives the kernel's longest-prefix map from addresses to
// identities and next hops.
package ipcache

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"unsafe"

	"github.com/cilium/ebpf"

	"github.com/weft-mesh/weft/internal/addr"
	"github.com/weft-mesh/weft/internal/datapath/pin"
)

// Entry is what the datapath knows of a prefix.
type Entry struct {
	Identity uint64
	// NextHop4 and NextHop6 are the underlay addresses of the node that holds
	// the prefix; zero on this node and outside.
	NextHop4, NextHop6 netip.Addr
	Flags              Flags
}

// Flags say how packets to a prefix travel; enum ipcache_flag in
// bpf/lib/endpoint.h.
type Flags uint32

// The flags; see bpf/lib/endpoint.h.
const (
	LocalNode    = Flags(pin.KernelIpcacheFlagIPCACHE_LOCAL_NODE)
	LocalCIDR    = Flags(pin.KernelIpcacheFlagIPCACHE_LOCAL_CIDR)
	Pod          = Flags(pin.KernelIpcacheFlagIPCACHE_POD)
	RemoteNode   = Flags(pin.KernelIpcacheFlagIPCACHE_REMOTE_NODE)
	NoMasquerade = Flags(pin.KernelIpcacheFlagIPCACHE_NO_MASQUERADE)
)

// Map is the reconcile target for prefixes.
type Map struct{ m *ebpf.Map }

// New returns the target for the map of m.
func New(m *pin.Maps) *Map { return &Map{m.Map("weft_ipcache")} }

func key(p netip.Prefix) pin.KernelIpcacheKey {
	b, bits := addr.PrefixTo16(p)
	k := pin.KernelIpcacheKey{Prefixlen: uint32(bits)}
	k.Addr = *(*[4]uint32)(unsafe.Pointer(&b))
	return k
}

func prefix(k pin.KernelIpcacheKey) netip.Prefix {
	return addr.PrefixFrom16(*(*[16]byte)(unsafe.Pointer(&k.Addr)), int(k.Prefixlen))
}

// Update sets the entry of p.
func (t *Map) Update(_ context.Context, p netip.Prefix, e Entry) error {
	v := pin.KernelIpcacheEntry{
		Identity: e.Identity,
		NextHop6: pin.KernelAddr{B: addr.To16(e.NextHop6)},
		Flags:    uint32(e.Flags),
	}
	if e.NextHop4.Is4() {
		b := e.NextHop4.As4()
		v.NextHop4 = *(*uint32)(unsafe.Pointer(&b)) // network order in memory
	}
	if err := t.m.Put(key(p), v); err != nil {
		return fmt.Errorf("write %s to the address map: %w", p, err)
	}
	return nil
}

// Delete forgets p; an unknown one is not an error.
func (t *Map) Delete(_ context.Context, p netip.Prefix) error {
	if err := t.m.Delete(key(p)); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("delete %s from the address map: %w", p, err)
	}
	return nil
}

// Prune deletes every prefix that want does not have.
func (t *Map) Prune(ctx context.Context, want map[netip.Prefix]Entry) error {
	var (
		k    pin.KernelIpcacheKey
		v    pin.KernelIpcacheEntry
		gone []netip.Prefix
		it   = t.m.Iterate()
	)
	for it.Next(&k, &v) {
		if p := prefix(k); !has(want, p) {
			gone = append(gone, p)
		}
	}
	if err := it.Err(); err != nil {
		return fmt.Errorf("walk the address map: %w", err)
	}
	for _, p := range gone {
		if err := t.Delete(ctx, p); err != nil {
			return err
		}
	}
	return nil
}

func has(want map[netip.Prefix]Entry, p netip.Prefix) bool {
	_, ok := want[p]
	return ok
}

// Hosts returns the identity of every single address that the map names.
func (t *Map) Hosts() (map[netip.Addr]uint64, error) {
	var (
		k   pin.KernelIpcacheKey
		v   pin.KernelIpcacheEntry
		out = map[netip.Addr]uint64{}
		it  = t.m.Iterate()
	)
	for it.Next(&k, &v) {
		if p := prefix(k); p.IsSingleIP() {
			out[p.Addr()] = v.Identity
		}
	}
	if err := it.Err(); err != nil {
		return nil, fmt.Errorf("walk the address map: %w", err)
	}
	return out, nil
}

// Lookup returns the identity of the longest prefix that holds a; false where
// there is none.
func (t *Map) Lookup(a netip.Addr) (uint64, bool) {
	var v pin.KernelIpcacheEntry
	if err := t.m.Lookup(key(addr.Host(a)), &v); err != nil {
		return 0, false
	}
	return v.Identity, true
}
