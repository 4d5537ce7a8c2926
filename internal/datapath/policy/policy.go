// SPDX-License-Identifier: Apache-2.0

// Package policy drives the kernel's maps of network policy: the entries of each
// subject, and the classes of the prefixes that policies name.
package policy

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"unsafe"

	"github.com/cilium/ebpf"

	"github.com/weft-mesh/weft/internal/addr"
	"github.com/weft-mesh/weft/internal/datapath/pin"
	"github.com/weft-mesh/weft/internal/policy"
)

// Map holds entries and classes. Safe for concurrent use for different subjects.
type Map struct {
	entries, classes *ebpf.Map
}

// New returns the maps of m.
func New(m *pin.Maps) *Map {
	return &Map{entries: m.Map("weft_policy"), classes: m.Map("weft_cidr")}
}

// exactBits is the length of subject, direction and peer in a key, which
// always match in full (POLICY_EXACT of bpf/lib/policy.h).
const exactBits = 104

func key(subject uint32, e policy.Entry) pin.KernelPolicyKey {
	k := pin.KernelPolicyKey{
		Prefixlen: exactBits + uint32(e.Bits),
		Subject:   networkOrder32(subject),
		Direction: uint8(e.Direction),
		Protocol:  e.Protocol,
		Port:      networkOrder16(e.Port),
	}
	binary.BigEndian.PutUint64(k.Peer[:], e.Peer)
	return k
}

// networkOrder32 returns v such that it lies in memory in network order; it is
// its own inverse.
func networkOrder32(v uint32) uint32 {
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], v)
	return binary.NativeEndian.Uint32(b[:])
}

// entryOf is what key and value were made of.
func entryOf(k *pin.KernelPolicyKey, v *pin.KernelPolicyEntry) policy.Entry {
	return policy.Entry{
		Direction: policy.Direction(k.Direction), Peer: binary.BigEndian.Uint64(k.Peer[:]),
		Bits: uint8(k.Prefixlen - exactBits), Protocol: k.Protocol, Port: networkOrder16(k.Port),
		Admin: policy.Outcome{Rank: v.AdminRank, Rule: v.AdminRule, Verdict: policy.Verdict(v.AdminVerdict)},
		Lower: policy.Outcome{Rank: v.Rank, Rule: v.Rule, Verdict: policy.Verdict(v.Verdict)},
	}
}

func networkOrder16(v uint16) uint16 {
	var b [2]byte
	binary.BigEndian.PutUint16(b[:], v)
	return binary.NativeEndian.Uint16(b[:])
}

func subjectOf(k *pin.KernelPolicyKey) uint32 { return networkOrder32(k.Subject) }

func value(e policy.Entry) pin.KernelPolicyEntry {
	return pin.KernelPolicyEntry{
		AdminRank: e.Admin.Rank, AdminRule: e.Admin.Rule, AdminVerdict: uint8(e.Admin.Verdict),
		Rank: e.Lower.Rank, Rule: e.Lower.Rule, Verdict: uint8(e.Lower.Verdict),
	}
}

// Install writes all entries of a subject, or none: after an error what was
// written of them is removed again.
func (m *Map) Install(subject uint32, entries []policy.Entry) error {
	for i, e := range entries {
		if err := m.entries.Put(key(subject, e), value(e)); err != nil {
			err = fmt.Errorf("write policy entry %d of %d (the map holds %d in all): %w", i+1, len(entries), m.entries.MaxEntries(), err)
			return errors.Join(err, m.Remove(subject, entries[:i]))
		}
	}
	return nil
}

// Remove deletes entries of a subject; absent ones are not an error.
func (m *Map) Remove(subject uint32, entries []policy.Entry) error {
	for _, e := range entries {
		if err := m.entries.Delete(key(subject, e)); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("delete a policy entry: %w", err)
		}
	}
	return nil
}

// Subjects reads the entries of every subject that the map holds, in no order.
func (m *Map) Subjects() (map[uint32][]policy.Entry, error) {
	var (
		k   pin.KernelPolicyKey
		v   pin.KernelPolicyEntry
		out = map[uint32][]policy.Entry{}
		it  = m.entries.Iterate()
	)
	for it.Next(&k, &v) {
		subject := subjectOf(&k)
		out[subject] = append(out[subject], entryOf(&k, &v))
	}
	if err := it.Err(); err != nil {
		return nil, fmt.Errorf("walk the policy map: %w", err)
	}
	return out, nil
}

// Prune deletes every entry whose subject keep refuses.
func (m *Map) Prune(keep func(subject uint32) bool) error {
	var (
		k    pin.KernelPolicyKey
		v    pin.KernelPolicyEntry
		gone []pin.KernelPolicyKey
		it   = m.entries.Iterate()
	)
	for it.Next(&k, &v) {
		if !keep(subjectOf(&k)) {
			gone = append(gone, k)
		}
	}
	if err := it.Err(); err != nil {
		return fmt.Errorf("walk the policy map: %w", err)
	}
	for _, k := range gone {
		if err := m.entries.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("delete a policy entry: %w", err)
		}
	}
	return nil
}

// MaxEntries is how many entries there can be, all subjects together.
func (m *Map) MaxEntries() int { return int(m.entries.MaxEntries()) }

func classKey(p netip.Prefix) pin.KernelIpcacheKey {
	b, bits := addr.PrefixTo16(p)
	return pin.KernelIpcacheKey{Prefixlen: uint32(bits), Addr: *(*[4]uint32)(unsafe.Pointer(&b))}
}

// SetClass gives the addresses of p, those of longer prefixes apart, a class.
func (m *Map) SetClass(p netip.Prefix, class uint64) error {
	if err := m.classes.Put(classKey(p), class); err != nil {
		return fmt.Errorf("write class of %s: %w", p, err)
	}
	return nil
}

// DeleteClass forgets p; an unknown one is not an error.
func (m *Map) DeleteClass(p netip.Prefix) error {
	if err := m.classes.Delete(classKey(p)); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("delete class of %s: %w", p, err)
	}
	return nil
}

// Classes reads the class of every prefix.
func (m *Map) Classes() (map[netip.Prefix]uint64, error) {
	var (
		k   pin.KernelIpcacheKey
		v   uint64
		out = map[netip.Prefix]uint64{}
		it  = m.classes.Iterate()
	)
	for it.Next(&k, &v) {
		out[addr.PrefixFrom16(*(*[16]byte)(unsafe.Pointer(&k.Addr)), int(k.Prefixlen))] = v
	}
	if err := it.Err(); err != nil {
		return nil, fmt.Errorf("walk the map of classes: %w", err)
	}
	return out, nil
}
