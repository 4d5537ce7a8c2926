// SPDX-License-Identifier: Apache-2.0

package maglev

import (
	"fmt"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
)

func backends(n int) []netip.AddrPort {
	out := make([]netip.AddrPort, n)
	a := netip.MustParseAddr("10.244.1.2")
	for i := range out {
		out[i] = netip.AddrPortFrom(a, 8080)
		a = a.Next()
	}
	return out
}

func build(t testing.TB, bs []netip.AddrPort, size uint32) []int32 {
	t.Helper()
	table, err := Build(bs, size)
	if err != nil {
		t.Fatal(err)
	}
	return table
}

func TestSizes(t *testing.T) {
	for i, s := range sizes {
		if !prime(s.size) || s.size < 100*uint32(s.backends) {
			t.Errorf("size %d for %d backends: want a prime, at least 100 for each", s.size, s.backends)
		}
		if i > 0 && (sizes[i-1].size >= s.size || sizes[i-1].backends >= s.backends) {
			t.Errorf("size %d comes after %d", s.size, sizes[i-1].size)
		}
	}
	for n, want := range map[int]uint32{-1: 251, 0: 251, 2: 251, 3: 16381, 100: 65521, 5000: 524287, 10485: MaxSize, 1 << 30: MaxSize} {
		if got := SizeFor(n); got != want {
			t.Errorf("SizeFor(%d) = %d, want %d", n, got, want)
		}
	}
}

func TestRefused(t *testing.T) {
	for _, size := range []uint32{0, 1, 4, 250, 65536, 1 << 31, math.MaxUint32} {
		if _, err := Build(backends(2), size); err == nil {
			t.Errorf("a table of %d entries was built", size)
		}
	}
	if table := build(t, nil, 251); table != nil {
		t.Errorf("a table without backends has %d entries", len(table))
	}
}

// TestGolden fails when tables are not what they were in another version: nodes
// of both would send the packets of a connection to different backends.
func TestGolden(t *testing.T) {
	bs := append(backends(5), netip.MustParseAddrPort("[fd00:10:244:1::5]:53"))
	sum := fnv.New64a()
	for _, e := range build(t, bs, 1021) {
		fmt.Fprintf(sum, "%d ", e)
	}
	if got := fmt.Sprintf("%016x", sum.Sum64()); got != golden {
		t.Errorf("the table's hash is %s, want %s", got, golden)
	}
}

func TestOrderDoesNotMatter(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 50 {
		bs := backends(1 + r.IntN(200))
		size := SizeFor(len(bs))
		want := build(t, bs, size)
		mixed := slices.Clone(bs)
		r.Shuffle(len(mixed), func(i, j int) { mixed[i], mixed[j] = mixed[j], mixed[i] })
		for i, e := range build(t, mixed, size) {
			if mixed[e] != bs[want[i]] {
				t.Fatalf("%d backends: entry %d is %s, in another order %s", len(bs), i, bs[want[i]], mixed[e])
			}
		}
	}
}

func TestEachBackendHasItsShare(t *testing.T) {
	for _, n := range []int{1, 2, 3, 10, 100, 163, 1000, 5000} {
		size := SizeFor(n)
		count := make([]int, n)
		for _, e := range build(t, backends(n), size) {
			count[e]++
		}
		// The backends take turns, so that they differ by one entry.
		if lo, hi := slices.Min(count), slices.Max(count); hi-lo > 1 {
			t.Errorf("%d backends have %d to %d entries", n, lo, hi)
		}
	}
}

func TestFewerEntriesThanBackends(t *testing.T) {
	seen := map[int32]bool{}
	for _, e := range build(t, backends(20), 7) {
		seen[e] = true
	}
	if len(seen) != 7 {
		t.Errorf("7 entries have %d backends", len(seen))
	}
}

// TestRemovalMovesLittle takes backends away, one at a time: at most 1 % of the
// entries of the others may change.
func TestRemovalMovesLittle(t *testing.T) {
	for _, n := range []int{2, 3, 4, 8, 16, 17, 40, 80, 81, 100, 300, 301, 1310} {
		bs := backends(n)
		size := SizeFor(n)
		before := build(t, bs, size)
		worst := 0.0
		for gone := 0; gone < n; gone += 1 + n/101 {
			worst = max(worst, moved(t, bs, before, gone))
		}
		t.Logf("%d backends, %d entries: without one of them at most %.2f %% of the others' entries move", n, size, worst)
		if worst > 1 {
			t.Errorf("%d backends: %.2f %% of the others' entries move, want at most 1 %%", n, worst)
		}
	}
}

// moved is how many percent of the entries of the others have another backend
// when the one called gone goes.
func moved(t *testing.T, bs []netip.AddrPort, before []int32, gone int) float64 {
	rest := slices.Delete(slices.Clone(bs), gone, gone+1)
	after := build(t, rest, uint32(len(before)))
	n, others := 0, 0
	for i, e := range before {
		if int(e) == gone {
			continue
		}
		others++
		if bs[e] != rest[after[i]] {
			n++
		}
	}
	return 100 * float64(n) / float64(others)
}

func BenchmarkBuild(b *testing.B) {
	for _, n := range []int{2, 100, 1000, 5000} {
		b.Run(fmt.Sprintf("backends=%d", n), func(b *testing.B) {
			bs, size := backends(n), SizeFor(n)
			b.ReportAllocs()
			for b.Loop() {
				build(b, bs, size)
			}
			b.ReportMetric(float64(size)*8, "kernel-bytes")
		})
	}
}

const golden = "4e1c4e6dec97eb95"
