// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"slices"
	"sort"
)

// spaces are the protocols that rules can tell apart: one space of ports for
// each, and one for all protocols without ports.
var spaces = [4]uint8{0, TCP, UDP, SCTP}

const allPorts = 1 << 16 // the end of a space

// pair is the winners of a segment: indexes into flattener.outcomes, 0 for
// none.
type pair struct{ admin, lower int32 }

// term is a clause with its rank, and its ports in segments.
type term struct {
	admin   bool
	outcome int32
	pieces  [][2]int32 // segments [from, to)
}

// flattener computes the entries of one direction of a subject. Terms are in
// the order of their ranks.
//
// Each space is cut into segments wherever a rule's range begins or ends, so
// that every rule covers whole segments. Segments are numbered over all spaces;
// the first is the one of protocols without ports.
type flattener struct {
	outcomes []Outcome
	terms    []term
	starts   [len(spaces)][]uint32 // first port of each segment
	offset   [len(spaces) + 1]int32
	any      []pair // the winners of AnyPeer, by segment
	memo     map[string][]piece
}

// piece is an entry without direction and peer.
type piece struct {
	bits     uint8
	protocol uint8
	port     uint16
	pair     pair
}

// input of a flattener: the ports of a term.
type ranked struct {
	admin   bool
	outcome Outcome
	ports   []span
}

func newFlattener(in []ranked) *flattener {
	f := &flattener{outcomes: []Outcome{none}, memo: map[string][]piece{}}
	f.cut(in)
	for i := range in {
		last := len(f.outcomes) - 1
		if f.outcomes[last] != in[i].outcome {
			f.outcomes = append(f.outcomes, in[i].outcome)
			last++
		}
		t := term{admin: in[i].admin, outcome: int32(last)}
		for _, s := range in[i].ports {
			t.pieces = append(t.pieces, f.segments(s)...)
		}
		f.terms = append(f.terms, t)
	}
	return f
}

// cut finds the segments.
func (f *flattener) cut(in []ranked) {
	for i, protocol := range spaces {
		starts := []uint32{0}
		for _, r := range in {
			for _, s := range r.ports {
				if s.protocol == protocol && protocol != 0 {
					starts = append(starts, uint32(s.first), uint32(s.last)+1)
				}
			}
		}
		slices.Sort(starts)
		starts = slices.Compact(starts)
		if starts[len(starts)-1] == allPorts {
			starts = starts[:len(starts)-1]
		}
		f.starts[i] = starts
		f.offset[i+1] = f.offset[i] + int32(len(starts))
	}
}

// segments returns what s covers.
func (f *flattener) segments(s span) [][2]int32 {
	if s.protocol == 0 {
		return [][2]int32{{0, f.offset[len(spaces)]}}
	}
	i := slices.Index(spaces[:], s.protocol)
	find := func(port uint32) int32 {
		return f.offset[i] + int32(sort.Search(len(f.starts[i]), func(j int) bool { return f.starts[i][j] >= port }))
	}
	return [][2]int32{{find(uint32(s.first)), find(uint32(s.last) + 1)}}
}

// winners returns the winners of some terms, given by their ascending indexes.
func (f *flattener) winners(terms []int32) []pair {
	n := int(f.offset[len(spaces)])
	out := make([]pair, n)
	admin, lower := n, n // segments without a winner
	for _, i := range terms {
		t := &f.terms[i]
		if (t.admin && admin == 0) || (!t.admin && lower == 0) {
			continue
		}
		for _, p := range t.pieces {
			for j := p[0]; j < p[1]; j++ {
				switch {
				case t.admin && out[j].admin == 0:
					out[j].admin = t.outcome
					admin--
				case !t.admin && out[j].lower == 0:
					out[j].lower = t.outcome
					lower--
				}
			}
		}
	}
	return out
}

// setAny computes the pieces of AnyPeer, from which those of other peers leave
// out what never wins against them.
func (f *flattener) setAny(terms []int32) []piece {
	f.any = f.winners(terms)
	return newTable(f, f.any, nil).pieces()
}

// peer computes the pieces of a peer that some terms match. The result is
// shared.
func (f *flattener) peer(terms []int32) []piece {
	key := make([]byte, 0, 4*len(terms))
	for _, t := range terms {
		key = append(key, byte(t), byte(t>>8), byte(t>>16), byte(t>>24))
	}
	if got, ok := f.memo[string(key)]; ok {
		return got
	}
	got := newTable(f, f.winners(terms), f.any).pieces()
	f.memo[string(key)] = got
	return got
}

// serves is true where a peer may have the outcome have in place of want: it is
// the same, or neither ever wins, because AnyPeer has a less rank.
func (f *flattener) serves(have, want, any int32) bool {
	if have == want {
		return true
	}
	limit := f.outcomes[any].Rank
	return limit < f.outcomes[want].Rank && limit < f.outcomes[have].Rank
}
