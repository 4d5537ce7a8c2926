// SPDX-License-Identifier: Apache-2.0

package balance

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// TestExplainAgrees: what Explain says is chosen is what Compute chose, for
// random Services.
func TestExplainAgrees(t *testing.T) {
	seen := map[string]int{}
	for seed := range uint64(2000) {
		in := random{rand.New(rand.NewPCG(seed, 44))}.input()
		ports, _ := Compute(in)
		if (NotServed(in.Service) != "") && len(ports) > 0 {
			t.Fatalf("seed %d: not served: %s", seed, NotServed(in.Service))
		}
		for i := range ports {
			p := &ports[i]
			all := Explain(in, p)
			for _, s := range p.Sets() {
				var chosen []Backend
				for _, x := range all {
					why, left := x.Why[s.Name]
					if seen[why]++; !left {
						chosen = append(chosen, x.Backend)
					} else if why == "" {
						t.Fatalf("seed %d: %v is left out of %s for no reason", seed, x, s.Name)
					}
				}
				if !slices.Equal(chosen, s.Backends) {
					t.Fatalf("seed %d, %v: %s: explained\n%v\nchosen\n%v", seed, p.Name, s.Name, chosen, s.Backends)
				}
			}
		}
	}
	for _, why := range []string{"", WhyNotReady, WhyTerminating, WhyElsewhere, WhyNodeHints, WhyZoneHints, WhyFamily} {
		if seen[why] < 10 {
			t.Errorf("%q came %d times", why, seen[why])
		}
	}
}

func TestExplain(t *testing.T) {
	in := Input{Service: service(internalPolicyLocal), Node: here,
		Slices: inSlice("10.244.1.2 node1", "10.244.1.3 node1 ready=false serving=true terminating=true", "10.244.2.2 node2", "10.244.1.4 node1 ready=false")}
	ports, problems := Compute(in)
	if len(ports) == 0 || len(problems) > 0 {
		t.Fatalf("%v, %v", ports, problems)
	}
	var b strings.Builder
	all := Explain(in, &ports[0])
	for _, x := range all {
		fmt.Fprintf(&b, "%s %s %s\n", x.Addr, x.State, x.Why[InternalSet])
	}
	v4, v6 := Rule(in, ports[0].Sets()[0], all)
	fmt.Fprintf(&b, "%q %q", v4, v6)
	want := `10.244.1.2 active 
10.244.1.3 terminating terminating, and others are ready
10.244.1.4 not ready not ready
10.244.2.2 active not on this node, and the policy is Local
"ready ones of this node" ""`
	if b.String() != want {
		t.Errorf("got\n%s\nwant\n%s", b.String(), want)
	}
}
