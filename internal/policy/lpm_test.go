// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"math/rand/v2"
	"testing"
)

// fewest is the number of entries that a table needs, by trying everything: at
// each node of each tree to have an entry with any label, or to inherit.
func fewest(t *table) int {
	space := func(i, label int) int {
		type state struct {
			start, size uint32
			label       int
		}
		memo := map[state]int{}
		segments := t.segments[t.first[i]:t.first[i+1]]
		var tree func(s state) int
		below := func(s state) int { // s.size with s.label in force at its root
			var inside []labelled
			for j, x := range segments {
				if x.start < s.start+s.size && (j+1 == len(segments) || segments[j+1].start > s.start) {
					inside = append(inside, x)
				}
			}
			if len(inside) > 1 {
				return tree(state{s.start, s.size / 2, s.label}) + tree(state{s.start + s.size/2, s.size / 2, s.label})
			}
			if t.accepts(inside[0].set, s.label) {
				return 0
			}
			return 1 << 20
		}
		tree = func(s state) int {
			if n, ok := memo[s]; ok {
				return n
			}
			best := below(s)
			for l := range t.labels {
				best = min(best, 1+below(state{s.start, s.size, l}))
			}
			memo[s] = best
			return best
		}
		return tree(state{0, allPorts, label})
	}
	best := 1 << 20
	for l, p := range t.labels {
		if !t.accepts(t.segments[0].set, l) {
			continue
		}
		n := 1
		if t.any != nil && p == (pair{}) {
			n = 0
		}
		for i := 1; i < len(spaces); i++ {
			n += space(i, l)
		}
		best = min(best, n)
	}
	return best
}

// TestTablesHaveTheFewestEntries compares with a search through all tables.
func TestTablesHaveTheFewestEntries(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	randomSpan := func() span {
		protocol := []uint8{0, TCP, TCP, UDP}[r.IntN(4)]
		if protocol == 0 {
			return everything
		}
		first := uint16(r.IntN(20))
		return span{protocol, first, first + uint16(r.IntN(20))}
	}
	for range 400 {
		var in []ranked
		var anyone, some []int32
		for i := range 2 + r.IntN(5) {
			in = append(in, ranked{r.IntN(3) == 0, Outcome{uint32(i), uint32(i), Allow}, append(someSpans(r, 2, randomSpan), randomSpan())})
			if r.IntN(2) == 0 {
				anyone = append(anyone, int32(i))
			} else {
				some = append(some, int32(i))
			}
		}
		in = append(in, ranked{false, Outcome{rankDefault, RuleNone, Allow}, []span{everything}})
		anyone = append(anyone, int32(len(in)-1))
		f := newFlattener(in)
		if got, want := len(f.setAny(anyone)), fewest(newTable(f, f.any, nil)); got != want {
			t.Fatalf("everyone: %d entries, %d are enough", got, want)
		}
		if got, want := len(f.peer(some)), fewest(newTable(f, f.winners(some), f.any)); got != want {
			t.Fatalf("peer: %d entries, %d are enough", got, want)
		}
	}
}

func someSpans(r *rand.Rand, n int, f func() span) []span {
	var out []span
	for range r.IntN(n + 1) {
		out = append(out, f())
	}
	return out
}
