// SPDX-License-Identifier: Apache-2.0

package pod

import (
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	pt "github.com/weft-mesh/weft/internal/datapath/packettest"
)

// BenchmarkFromPod is what the program takes for a packet of a connection that
// exists. Runs of one call go on with the same packet, so only ways that leave
// all but its TTL alone can be measured.
func BenchmarkFromPod(b *testing.B) {
	n := pt.New(b, pt.Sizes())
	d, err := Load(n.Maps, n.Settings())
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { d.Close() })
	for _, f := range pt.Families {
		for name, dst := range map[string]netip.Addr{"remote pod": f.RemotePod, "outside": f.Excluded} {
			b.Run(f.Name+"/"+name, func(b *testing.B) {
				n.Reset()
				p := syn(f, dst).With(func(p *pt.Packet) { p.Flags, p.TTL, p.Payload = pt.ACK, 255, payload(200) })
				benchmark(b, n, d.objects.FromPod, pt.In{Device: pt.PodA, Frame: p.Bytes()})
			})
		}
	}
}

// perCall is fewer runs than the TTL allows.
const perCall = 250

func benchmark(b *testing.B, n *pt.Node, prog *ebpf.Program, in pt.In) {
	var total, best time.Duration
	runs := 0
	for b.Loop() {
		took := n.Time(prog, in, perCall)
		total += took * perCall
		runs += perCall
		if best == 0 || took < best {
			best = took
		}
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(float64(total.Nanoseconds())/float64(runs), "ns/packet")
	b.ReportMetric(float64(best.Nanoseconds()), "best-ns/packet")
}
