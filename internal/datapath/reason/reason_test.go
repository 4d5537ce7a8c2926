// SPDX-License-Identifier: Apache-2.0

package reason

import "testing"

func TestEveryReasonHasItsOwnName(t *testing.T) {
	if len(names) != Max {
		t.Fatalf("%d names for %d reasons of bpf/lib/reason.h", len(names), Max)
	}
	seen := map[string]int{}
	for r, n := range names {
		if n == "" && r != 0 {
			t.Errorf("reason %d has no name", r)
		}
		if other, ok := seen[n]; ok {
			t.Errorf("reasons %d and %d are both called %q", other, r, n)
		}
		seen[n] = r
	}
}
