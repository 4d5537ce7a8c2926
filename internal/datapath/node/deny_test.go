// SPDX-License-Identifier: Apache-2.0

package node

import (
	"testing"

	"github.com/weft-mesh/weft/internal/addr"
	"github.com/weft-mesh/weft/internal/datapath/deny"
	pt "github.com/weft-mesh/weft/internal/datapath/packettest"
)

// TestDeny: where XDP is not in force the list works all the same.
func TestDeny(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family) {
		l := deny.New(fix.Maps)
		if _, err := l.Add(addr.Host(f.World)); err != nil {
			t.Fatal(err)
		}
		good := in(f).With(func(p *pt.Packet) { p.Src = f.World })
		for name, change := range map[string]func(*pt.Packet){
			"for a pod":    func(*pt.Packet) {},
			"for the node": func(p *pt.Packet) { p.Dst = f.Node },
			"a fragment": func(p *pt.Packet) {
				p.Protocol, p.DF, p.Payload, p.Fragment = pt.UDP, false, payload(100), &pt.Fragment{From: 48, To: 96}
			},
		} {
			t.Run(name, func(t *testing.T) {
				fix.Reset()
				fix.fromUplink(t, good.With(change), dropped("denied"))
			})
		}
		t.Run("somebody else", func(t *testing.T) {
			fix.Reset()
			fix.fromUplink(t, in(f).With(func(p *pt.Packet) { p.Dst = f.Node }), pt.Want{Verdict: pt.Next})
		})
		if list, err := l.List(); err != nil || len(list) == 0 || list[len(list)-1].Packets != 3 {
			t.Errorf("list %+v, %v, want 3 packets", list, err)
		}
	})
}
