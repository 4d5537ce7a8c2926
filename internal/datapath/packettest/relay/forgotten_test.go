// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"bytes"
	"slices"
	"testing"

	pt "github.com/weft-mesh/weft/internal/datapath/packettest"
)

// TestConntrackForgets: the connection's entry is lost while its flow lives, and the
// backend speaks first. Its answers still come from the Service, also after the
// client has spoken.
func TestConntrackForgets(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family) {
		protocols(t, func(t *testing.T, protocol uint8) {
			fix.Reset()
			fix.Serve(far(f, protocol, target(f.A)))
			p := outside(f, protocol, nodePort(f))
			r := flags(macs(sentTo(p, target(f.A)).Reply(), pt.MACA, pt.HostMACA), pt.ACK)
			want := delivered(sentFrom(r, nodePort(f)), nil, nil)[14:]
			answers := func(when string) {
				t.Helper()
				if o := fix.send(fromA, r); !bytes.Equal(o.Frame[14:], want) {
					t.Errorf("%s the answer is not from the Service (verdict %d)", when, o.Verdict)
				}
			}
			fix.send(fromUplink, p)
			fix.send(fromA, flags(r, pt.SYN|pt.ACK))
			fix.send(fromUplink, flags(p, pt.ACK))
			answers("before")
			m := fix.Maps.Map("weft_conntrack")
			key := make([]byte, m.KeySize())
			for m.NextKey(nil, &key) == nil {
				check(t, m.Delete(key))
			}
			answers("once forgotten")
			answers("again")
			fix.send(fromUplink, flags(p, pt.ACK))
			answers("after the client spoke")
		})
	})
}

// TestResetBeginsNothing: a RST that belongs to no connection makes none.
func TestResetBeginsNothing(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family) {
		fix.Reset()
		fix.Serve(far(f, pt.TCP, target(f.RemotePod)))
		fix.send(fromUplink, flags(outside(f, pt.TCP, nodePort(f)), pt.RST))
		if flows := fix.Flows(); len(flows) != 0 {
			t.Errorf("flows: %v", flows)
		}
	})
}

// TestDSROptionChangesNoOther: an option on a datagram of a connection that was
// translated here leaves it alone; one from a pod of the cluster means nothing.
func TestDSROptionChangesNoOther(t *testing.T) {
	fix := newFixture(t, withDSR)
	each(t, func(t *testing.T, f pt.Family) {
		fix.Reset()
		fix.Serve(far(f, pt.UDP, target(f.A)))
		p := outside(f, pt.UDP, nodePort(f))
		to := sentTo(p, target(f.A))
		fix.send(fromUplink, p)
		before := fix.Flows()
		fix.Run(fix.programs["from_uplink"], pt.In{Device: pt.Uplink, Frame: withOption(to.Bytes(), balancer(f))})
		if after := fix.Flows(); len(before) != 2 || !slices.Equal(before, after) {
			t.Errorf("the flows were\n%v, and are\n%v", before, after)
		}
		fix.Reset()
		fix.Serve(far(f, pt.UDP, target(f.A)))
		q := to.With(func(p *pt.Packet) { p.Src = f.RemotePod })
		fix.Run(fix.programs["from_uplink"], pt.In{Device: pt.Uplink, Frame: withOption(q.Bytes(), balancer(f))})
		if flows := fix.Flows(); len(flows) != 0 {
			t.Errorf("a pod has made flows: %v", flows)
		}
	})
}
