// SPDX-License-Identifier: Apache-2.0

package balance

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/weft-mesh/weft/internal/state"
)

// many is n endpoints on ten nodes in slices of 100, as the controller makes
// them.
func many(n int) []*state.Endpoint {
	var out []*state.Endpoint
	var es []discoveryv1.Endpoint
	for i := range n {
		e := ep(fmt.Sprintf("10.%d.%d.%d node%d ready=true serving=true terminating=false", 244+i/50000, i/250%200, 2+i%250, i%10))
		e.TargetRef = &corev1.ObjectReference{Kind: "Pod", Namespace: "shop", Name: fmt.Sprintf("web-%d", i)}
		es = append(es, e)
		if len(es) == 100 || i == n-1 {
			out = append(out, slice(fmt.Sprintf("web-%d", len(out)), ":8080", es...))
			es = nil
		}
	}
	return out
}

func BenchmarkCompute(b *testing.B) {
	for _, n := range []int{2, 100, 5000} {
		for name, s := range map[string]*state.Service{
			"ClusterIP": service(), "LocalBalancer": service(balancer("203.0.113.9"), externalPolicyLocal),
		} {
			b.Run(fmt.Sprintf("%s/endpoints=%d", name, n), func(b *testing.B) {
				in := Input{Service: s, Slices: many(n), Node: here}
				b.ReportAllocs()
				for b.Loop() {
					if ports, _ := Compute(in); len(ports[0].Internal) != n {
						b.Fatalf("%d backends", len(ports[0].Internal))
					}
				}
			})
		}
	}
}
