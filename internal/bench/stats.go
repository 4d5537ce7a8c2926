// SPDX-License-Identifier: Apache-2.0

package bench

import "slices"

// Spread is the median of some numbers with the smallest and the largest.
type Spread struct {
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
}

// spreadOf returns the zero Spread for no numbers. The median of an even
// number of values is the mean of the middle two.
func spreadOf(values []float64) Spread {
	if len(values) == 0 {
		return Spread{}
	}
	s := slices.Clone(values)
	slices.Sort(s)
	middle := len(s) / 2
	median := s[middle]
	if len(s)%2 == 0 {
		median = (s[middle-1] + s[middle]) / 2
	}
	return Spread{Median: median, Min: s[0], Max: s[len(s)-1]}
}

// ratios divides a by b round by round. A round where either is zero (not
// measured) counts for nothing. Both have the same length.
func ratios(a, b []float64) []float64 {
	var out []float64
	for i := range a {
		if a[i] != 0 && b[i] != 0 {
			out = append(out, a[i]/b[i])
		}
	}
	return out
}
