// SPDX-License-Identifier: Apache-2.0

// Package maglev builds the lookup tables of Maglev (Eisenbud et al., "Maglev: A
// Fast and Reliable Software Network Load Balancer", NSDI 2016, section 3.4):
// each backend has about as many entries as each other, and where one goes
// nearly all entries of the others stay. A table depends on nothing but the set
// of backends and its size, so that each node of the cluster builds the same.
package maglev

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
)

// seed is part of each hash. With another one, nodes of different versions would
// send the packets of one connection to different backends.
const seed = "weft maglev 1\x00"

// sizes says how many backends a table of some size is for. The sizes are the
// greatest primes below powers of two. Up to 300 backends they are as large as
// it takes that less than 1 % of the others' entries move when one goes (the
// tests measure that); above it is 100 entries for each backend, which has the
// same effect and keeps the shares within 1 % of each other.
//
// An entry takes 8 bytes in the kernel, where elements of arrays are rounded up
// to that: 128 KiB for 3 to 16 backends, 512 KiB for 100, 4 MiB for 5,000.
var sizes = [...]struct {
	backends int
	size     uint32
}{
	{2, 251}, {16, 16381}, {80, 32749}, {300, 65521}, {1310, 131071}, {2621, 262139}, {5242, 524287}, {10485, MaxSize},
}

// MaxSize is the size for 10,485 backends, and for more. With more of them each
// has fewer than 100 entries, and the shares differ more.
const MaxSize = 1048573

// SizeFor returns the number of entries, a prime, of a table for n backends.
// Where n passes from one size to the next (above 2, 16, 80, 300, 1310, 2621
// and 5242) the whole table changes. A size must not depend on the past: all
// nodes need the same one.
func SizeFor(n int) uint32 {
	for _, s := range sizes {
		if n <= s.backends {
			return s.size
		}
	}
	return MaxSize
}

// permutation is the order in which a backend wants the entries: next, then
// every skip-th, modulo the size.
type permutation struct{ next, skip uint32 }

// Build returns a table of size entries, each the index of a backend in
// backends. Which backend an entry has does not depend on their order. Without
// backends the table is nil. size is one of SizeFor; another one is refused
// where it is not a prime, for then the permutations would miss entries.
//
// It takes about size × ln(size) steps and 8 bytes for each backend beside the
// table.
func Build(backends []netip.AddrPort, size uint32) ([]int32, error) {
	if !prime(size) || size > 1<<31 {
		return nil, fmt.Errorf("build a maglev table of %d entries: want a prime below 2^31", size)
	}
	if len(backends) == 0 {
		return nil, nil
	}
	order := sorted(backends)
	wants := make([]permutation, len(order))
	for i, b := range order {
		wants[i] = permutationOf(backends[b], size)
	}
	return populate(order, wants, size), nil
}

// sorted returns the indexes of backends in order of address and port.
func sorted(backends []netip.AddrPort) []int32 {
	order := make([]int32, len(backends))
	for i := range order {
		order[i] = int32(i)
	}
	slices.SortStableFunc(order, func(a, b int32) int { return backends[a].Compare(backends[b]) })
	return order
}

func permutationOf(b netip.AddrPort, size uint32) permutation {
	var in [len(seed) + 18]byte
	n := copy(in[:], seed)
	a := b.Addr().As16()
	n += copy(in[n:], a[:])
	binary.BigEndian.PutUint16(in[n:], b.Port())
	sum := sha256.Sum256(in[:])
	offset, skip := binary.BigEndian.Uint64(sum[:8]), binary.BigEndian.Uint64(sum[8:16])
	return permutation{next: uint32(offset % uint64(size)), skip: 1 + uint32(skip%uint64(size-1))}
}

// populate lets the backends take entries in turns, each the next one that it
// wants and that is free. order are the numbers to write.
func populate(order []int32, wants []permutation, size uint32) []int32 {
	table := make([]int32, size)
	taken := make([]uint64, (size+63)/64) // fits into the cache where the table does not
	for n := uint32(0); ; {
		for i := range wants {
			p := &wants[i]
			at := p.next
			for taken[at/64]&(1<<(at%64)) != 0 {
				at = step(at, p.skip, size)
			}
			taken[at/64] |= 1 << (at % 64)
			table[at] = order[i]
			p.next = step(at, p.skip, size)
			if n++; n == size {
				return table
			}
		}
	}
}

// step returns at + skip modulo size; all are below 2^31.
func step(at, skip, size uint32) uint32 {
	if at += skip; at >= size {
		at -= size
	}
	return at
}

func prime(n uint32) bool {
	if n < 2 {
		return false
	}
	for d := uint32(2); uint64(d)*uint64(d) <= uint64(n); d++ {
		if n%d == 0 {
			return false
		}
	}
	return true
}
