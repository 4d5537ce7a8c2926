// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestSpreadOf(t *testing.T) {
	for _, c := range []struct {
		name   string
		values []float64
		want   Spread
	}{
		{"nothing", nil, Spread{}},
		{"one", []float64{3}, Spread{3, 3, 3}},
		{"odd, unsorted", []float64{9, 1, 2}, Spread{2, 1, 9}},
		{"even: mean of the middle two", []float64{4, 1, 2, 9}, Spread{3, 1, 9}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if diff := cmp.Diff(c.want, spreadOf(c.values)); diff != "" {
				t.Error(diff)
			}
		})
	}
	values := []float64{2, 1}
	spreadOf(values)
	if values[0] != 2 {
		t.Error("spreadOf sorted its argument")
	}
}

// The ratios are taken within a round: a machine that gets slower over time
// does not show in them.
func TestRatiosArePairwise(t *testing.T) {
	a := []float64{100, 50, 10}
	b := []float64{200, 100, 20}
	if got, want := spreadOf(ratios(a, b)), (Spread{0.5, 0.5, 0.5}); got != want {
		t.Errorf("got %v, want %v", got, want)
	}
	if got := ratios([]float64{1, 0, 4}, []float64{0, 1, 2}); !cmp.Equal(got, []float64{2}) {
		t.Errorf("rounds without a number: got %v, want [2]", got)
	}
}
