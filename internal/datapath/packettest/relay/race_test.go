// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/weft-mesh/weft/internal/addr"
	pt "github.com/weft-mesh/weft/internal/datapath/packettest"
	"github.com/weft-mesh/weft/internal/datapath/pin"
	"github.com/weft-mesh/weft/internal/datapath/setting"
)

// TestRace: more clients than ports on several CPUs, while connections end and
// their ports are taken over: each request that has a flow has one for its answer
// too, which leads back to it.
func TestRace(t *testing.T) {
	const ports, clients, active = 50, 400, 40 // active: at a time, of each CPU
	fix := newFixture(t, func(s *setting.Node) {
		s.ServiceFirstPort, s.ServiceLastPort, s.Lifetimes.UDP = 20000, 20000+ports-1, time.Second
	})
	f := pt.Families[0]
	fix.Serve(far(f, pt.UDP, target(f.RemotePod), target(f.OtherNode)))
	begin := time.Now()
	var wg sync.WaitGroup
	for seed := range uint64(4) {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(seed, 7))
			for time.Since(begin) < 6*time.Second {
				second := int(time.Since(begin) / time.Second)
				client := (second*97 + rnd.IntN(active)) % clients
				p := outside(f, pt.UDP, nodePort(f)).With(func(p *pt.Packet) { p.Sport = 40000 + uint16(client) })
				if err := fix.Repeat(fix.programs["from_uplink"], pt.In{Device: pt.Uplink, Frame: p.Bytes()}, 1); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	fix.Forget()
	taken := fix.whole(t)
	if taken < active {
		t.Errorf("%d connections, want at least %d", taken, active)
	}
}

// whole counts connections, and says which lack their half for the answers.
func (f *fixture) whole(t *testing.T) (n int) {
	t.Helper()
	f.EditFlows(func(k *pin.KernelFlowKey, v *pin.KernelServiceFlow, now uint32) {
		if v.Flags&uint32(pin.KernelServiceFlowFlagFLOW_REPLY) != 0 {
			return
		}
		n++
		other := pin.KernelFlowKey{Src: v.Dst, Dst: v.Src, Sport: v.Dport, Dport: v.Sport, Protocol: k.Protocol}
		var o pin.KernelServiceFlow
		if err := f.Maps.Map("weft_service_flows").Lookup(&other, &o); err != nil {
			t.Errorf("no half for the answers of %v: %v", k, err)
		} else if o.Dst != k.Src || o.Dport != k.Sport {
			t.Errorf("answers to %v go to %v %d", k, o.Dst, pt.HostPort(o.Dport))
		}
	})
	return n
}

// TestMaglev: clients from elsewhere go by the table, those of this node do not.
func TestMaglev(t *testing.T) {
	fix := newFixture(t, func(s *setting.Node) { s.ServiceFirstPort, s.ServiceLastPort = 20000, 29999 })
	const size = 251
	each(t, func(t *testing.T, f pt.Family) {
		fix.Reset()
		s := far(f, pt.UDP, target(f.RemotePod), target(f.OtherNode))
		s.Near = s.Far
		fix.Serve(s)
		table, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: size, Flags: 1 << 12})
		check(t, err)
		defer table.Close()
		for i := range uint32(size) {
			check(t, table.Put(i, uint32(2))) // the second backend
		}
		check(t, fix.Maps.Map("weft_maglev").Put(uint32(farSet), table))
		var v pin.KernelService
		k := pin.KernelServiceKey{Addr: pin.KernelAddr{B: addr.To16(nodePort(f).Addr())}, Port: pt.HostPort(nodePort(f).Port()), Protocol: pt.UDP}
		check(t, fix.Maps.Map("weft_services").Lookup(&k, &v))
		v.Maglev = size
		check(t, fix.Maps.Map("weft_services").Put(&k, &v))
		near := map[string]bool{}
		for i := range 40 {
			out := fix.send(fromUplink, outside(f, pt.UDP, nodePort(f)).With(func(p *pt.Packet) { p.Sport += uint16(i) }))
			if dst(f, out.Frame) != f.OtherNode.String() {
				t.Fatalf("connection %d went to %s, want %s", i, dst(f, out.Frame), f.OtherNode)
			}
			out = fix.send(fromA, request(f, pt.UDP, nodePort(f)).With(func(p *pt.Packet) { p.Sport += uint16(i) }))
			near[dst(f, out.Frame)] = true
		}
		if len(near) != 2 {
			t.Errorf("a pod reached %v, want both backends", near)
		}
	})
}

// TestAffinityEnds: a client that was silent for long may go to any backend.
func TestAffinityEnds(t *testing.T) {
	fix := newFixture(t, nil)
	each(t, func(t *testing.T, f pt.Family) {
		fix.Reset()
		s := near(f, pt.UDP, target(f.B), target(f.RemotePod))
		s.Affinity = 10 * time.Second
		fix.Serve(s)
		seen := map[string]bool{}
		for i := range 40 {
			out := fix.send(fromA, request(f, pt.UDP, clusterIP(f)).With(func(p *pt.Packet) { p.Sport += uint16(i) }))
			seen[dst(f, out.Frame)] = true
			fix.AgeAffinity(11 * time.Second)
		}
		if len(seen) != 2 {
			t.Errorf("the client reached %v, want both backends", seen)
		}
	})
}
