// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"path/filepath"
	"testing"

	"github.com/weft-mesh/weft/internal/datapath/packettest/bpffs"
	"github.com/weft-mesh/weft/internal/datapath/pin"
	policymap "github.com/weft-mesh/weft/internal/datapath/policy"
	"github.com/weft-mesh/weft/internal/policy"
)

// BenchmarkInstall writes 1,000 subjects with 104 entries each, the size of
// 1,000 policies over 1,000 identities where every pod is of this node, and then
// one subject more, which is what a change of one policy costs.
func BenchmarkInstall(b *testing.B) {
	entries := make([]policy.Entry, 104)
	for i := range entries {
		entries[i] = policy.Entry{Direction: policy.Ingress, Peer: uint64(i), Lower: policy.Outcome{Rank: 1, Rule: 2, Verdict: policy.Allow}}
	}
	open := func(b *testing.B) *policymap.Map {
		maps, err := pin.Open(filepath.Join(bpffs.New(b), "node"), pin.Sizes{})
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { maps.Close() })
		return policymap.New(maps)
	}
	b.Run("all", func(b *testing.B) {
		m := open(b)
		for b.Loop() {
			for s := range uint32(1000) {
				if err := m.Install(s+1, entries); err != nil {
					b.Fatal(err)
				}
			}
		}
	})
	b.Run("one", func(b *testing.B) {
		m := open(b)
		for s := range uint32(1000) {
			if err := m.Install(s+1, entries); err != nil {
				b.Fatal(err)
			}
		}
		for b.Loop() {
			if err := m.Install(2000, entries); err != nil {
				b.Fatal(err)
			}
			if err := m.Remove(2000, entries); err != nil {
				b.Fatal(err)
			}
		}
	})
}
