// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"encoding/json"
	"net/netip"
	"testing"

	networkingv1 "k8s.io/api/networking/v1"
	policyv1alpha2 "sigs.k8s.io/network-policy-api/apis/v1alpha2"

	"github.com/weft-mesh/weft/internal/state"
)

// FuzzCompile compiles whatever specs JSON can hold, with numbers and texts out
// of range, and asks for a verdict of every pod.
func FuzzCompile(f *testing.F) {
	for seed := range uint64(40) {
		for _, p := range newWorld(seed).in.Policies {
			var spec any = p.NetworkPolicy
			if p.NetworkPolicy == nil {
				spec = p.ClusterNetworkPolicy
			}
			text, err := json.Marshal(spec)
			if err != nil {
				f.Fatal(err)
			}
			f.Add(text, uint8(TCP), uint16(80))
		}
	}
	f.Fuzz(func(t *testing.T, text []byte, protocol uint8, port uint16) {
		in := Input{Pods: tablePods, Identities: tableIDs, Nodes: tableNodes}
		np, cnp := &networkingv1.NetworkPolicySpec{}, &policyv1alpha2.ClusterNetworkPolicySpec{}
		if json.Unmarshal(text, np) == nil {
			in.Policies = append(in.Policies, &state.Policy{Kind: "NetworkPolicy", Namespace: "shop", Name: "p", NetworkPolicy: np})
		}
		if json.Unmarshal(text, cnp) == nil {
			in.Policies = append(in.Policies, &state.Policy{Kind: "ClusterNetworkPolicy", Name: "p", ClusterNetworkPolicy: cnp})
		}
		r := Compile(in)
		for i := range tablePods {
			p := &tablePods[i]
			d := r.Trace(Party{Endpoint: p.ID(), Identity: p.Identity, Addr: p.IPs[0]}, Party{Identity: 3, Addr: netip.MustParseAddr("192.0.2.1")}, protocol, port)
			if v := d.Egress.Verdict; v != Allow && v != Deny {
				t.Errorf("verdict %s", v)
			}
		}
	})
}
