// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"math/bits"
	"slices"
)

// table turns the winners of all segments into the fewest prefixes that give
// the same answers. It is the ORTC algorithm (Draves and others, "Constructing
// Optimal IP Routing Tables", 1999) with one addition: a segment may have
// several labels that are as good as each other.
//
// A binary tree over the ports of each space has at each node the set of labels
// with which the node's subtree needs the fewest entries: what both children
// accept, or if there is nothing, what either accepts. From the root on, a node
// that accepts what it inherits needs no entry.
type table struct {
	f        *flattener
	winners  []pair
	any      []pair // of AnyPeer, or nil for AnyPeer's own table
	labels   []pair // all that appear; the first are winners
	words    int    // of a set of labels
	segments []labelled
	first    [len(spaces) + 1]int // of segments
	nodes    []node
	sets     []uint64
}

// labelled is a run of segments that accept the same labels.
type labelled struct {
	start uint32
	set   int32 // of table.sets
}

type node struct {
	set         int32
	left, right int32 // 0 for a leaf
}

func newTable(f *flattener, winners, any []pair) *table {
	t := &table{f: f, winners: winners, any: any, nodes: make([]node, 1)}
	t.findLabels()
	t.words = (len(t.labels) + wordBits - 1) / wordBits
	for i := range spaces {
		t.first[i] = len(t.segments)
		for j, start := range f.starts[i] {
			set := t.accepted(int(f.offset[i]) + j)
			if n := len(t.segments); n > t.first[i] && t.same(t.segments[n-1].set, set) {
				t.sets = t.sets[:set]
				continue
			}
			t.segments = append(t.segments, labelled{start, set})
		}
	}
	t.first[len(spaces)] = len(t.segments)
	return t
}

// findLabels collects the winners and, where parts of them may be left out,
// what is left of them.
func (t *table) findLabels() {
	seen := map[pair]bool{}
	add := func(p pair) {
		if !seen[p] {
			seen[p] = true
			t.labels = append(t.labels, p)
		}
	}
	for i, p := range t.winners {
		if i == 0 || p != t.winners[i-1] {
			add(p)
		}
	}
	if t.any == nil {
		return
	}
	for _, p := range slices.Clone(t.labels) {
		add(pair{p.admin, 0})
		add(pair{0, p.lower})
	}
	add(pair{})
}

// accepted appends the set of labels that serve a segment.
func (t *table) accepted(segment int) int32 {
	set := t.newSet()
	want := t.winners[segment]
	for i, l := range t.labels {
		ok := l == want
		if t.any != nil && !ok {
			any := t.any[segment]
			ok = t.f.serves(l.admin, want.admin, any.admin) && t.f.serves(l.lower, want.lower, any.lower)
		}
		if ok {
			t.sets[int(set)+i/wordBits] |= 1 << (i % wordBits)
		}
	}
	return set
}

func (t *table) newSet() int32 {
	at := len(t.sets)
	for range t.words {
		t.sets = append(t.sets, 0)
	}
	return int32(at)
}

func (t *table) set(at int32) []uint64 { return t.sets[at : int(at)+t.words] }

func (t *table) same(a, b int32) bool { return slices.Equal(t.set(a), t.set(b)) }

func (t *table) accepts(set int32, label int) bool {
	return t.sets[int(set)+label/wordBits]&(1<<(label%wordBits)) != 0
}

// choose returns the first label of a set.
func (t *table) choose(set int32) int {
	for i, w := range t.set(set) {
		if w != 0 {
			return i*wordBits + bits.TrailingZeros64(w)
		}
	}
	return 0
}

// build makes the tree over ports [start, start+size) from the segments that
// cover it, of which the first begins at start or before.
func (t *table) build(start, size uint32, segments []labelled) int32 {
	if len(segments) == 1 {
		t.nodes = append(t.nodes, node{set: segments[0].set})
		return int32(len(t.nodes) - 1)
	}
	half := size / 2
	middle := start + half
	right, exact := slices.BinarySearchFunc(segments, middle, func(s labelled, port uint32) int { return int(s.start) - int(port) })
	left := right
	if !exact {
		right--
	}
	l := t.build(start, half, segments[:left])
	r := t.build(middle, half, segments[right:])
	t.nodes = append(t.nodes, node{set: t.join(t.nodes[l].set, t.nodes[r].set), left: l, right: r})
	return int32(len(t.nodes) - 1)
}

// join returns what both sets have, or if that is nothing, what either has.
func (t *table) join(a, b int32) int32 {
	out := t.newSet()
	x, y, z := t.set(a), t.set(b), t.set(out)
	empty := true
	for i := range z {
		z[i] = x[i] & y[i]
		empty = empty && z[i] == 0
	}
	if empty {
		for i := range z {
			z[i] = x[i] | y[i]
		}
	}
	return out
}

// pieces returns the prefixes, in order.
func (t *table) pieces() []piece {
	var roots [len(spaces)]int32
	for i := 1; i < len(spaces); i++ {
		roots[i] = t.build(0, allPorts, t.segments[t.first[i]:t.first[i+1]])
	}
	label, needed := t.root(roots)
	var out []piece
	if needed {
		out = append(out, piece{pair: t.labels[label]})
	}
	for i := 1; i < len(spaces); i++ {
		out = t.emit(out, piece{bits: 8, protocol: spaces[i]}, roots[i], label)
	}
	return out
}

// root chooses the label that all spaces inherit. Where no label is needed,
// none is as good as an entry.
func (t *table) root(roots [len(spaces)]int32) (label int, needed bool) {
	best := -1
	for l := range t.labels {
		if !t.accepts(t.segments[0].set, l) {
			continue
		}
		cost, entry := 0, t.any == nil || t.labels[l] != pair{}
		if entry {
			cost = 1
		}
		for _, r := range roots[1:] {
			if !t.accepts(t.nodes[r].set, l) {
				cost++
			}
		}
		if best < 0 || cost < best {
			best, label, needed = cost, l, entry
		}
	}
	return label, needed
}

// emit appends the entries of a subtree whose prefix is p.
func (t *table) emit(out []piece, p piece, at int32, inherited int) []piece {
	n := t.nodes[at]
	if !t.accepts(n.set, inherited) {
		inherited = t.choose(n.set)
		p.pair = t.labels[inherited]
		out = append(out, p)
	}
	if n.left == 0 {
		return out
	}
	p.bits++
	out = t.emit(out, p, n.left, inherited)
	p.port |= 1 << (16 - (p.bits - 8))
	return t.emit(out, p, n.right, inherited)
}
