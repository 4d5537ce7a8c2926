// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"net"
	"slices"
	"testing"
	"time"

	pt "github.com/weft-mesh/weft/internal/datapath/packettest"
)

// BenchmarkFromUplink is what one run of the programs of the uplink takes for a
// packet of a connection that exists, with the 30 ns or so that it takes to look
// at the clock.
func BenchmarkFromUplink(b *testing.B) {
	fix := newFixture(b, nil)
	for _, f := range pt.Families {
		for _, protocol := range []uint8{pt.TCP, pt.UDP} {
			direct := outside(f, protocol, target(f.A))
			request := outside(f, protocol, nodePort(f))
			name := f.Name + map[uint8]string{pt.TCP: "/TCP/", pt.UDP: "/UDP/"}[protocol]
			fix.Reset()
			fix.Serve(far(f, protocol, target(f.A)))
			fix.bench(b, name+"to a pod", "from_uplink", flags(direct, pt.ACK))
			fix.bench(b, name+"to the node", "from_uplink", flags(outside(f, protocol, target(f.Node)), pt.ACK))
			fix.bench(b, name+"service, pod of the node", "from_uplink", flags(request, pt.ACK))
			fix.Reset()
			fix.Serve(far(f, protocol, target(f.RemotePod)))
			fix.bench(b, name+"service, pod of another node", "from_uplink", flags(request, pt.ACK))
			to := snat(f, sentTo(request, target(f.RemotePod)))
			fix.bench(b, name+"answer of another node", "from_uplink", flags(macs(to.Reply(), pt.MACOther, pt.MACNode), pt.ACK))
			fix.bench(b, name+"pod's, on its way out", "to_uplink", flags(direct.Reply(), pt.ACK))
			fix.bench(b, name+"node's, on its way out", "to_uplink", flags(sentFrom(direct.Reply(), target(f.Node)), pt.ACK))
		}
	}
}

func (f *fixture) bench(b *testing.B, name, program string, p pt.Packet) {
	b.Run(name, func(b *testing.B) {
		// the device is the loopback's: the library gives no context to a timed run
		frame := p.With(func(p *pt.Packet) { p.EthDst, p.Payload = make(net.HardwareAddr, 6), payload(200) }).Bytes()
		var took []time.Duration
		f.Do(func() error {
			for b.Loop() {
				_, d, err := f.programs[program].Benchmark(frame, 1, nil)
				if err != nil {
					return err
				}
				took = append(took, d)
			}
			return nil
		})
		slices.Sort(took)
		b.ReportMetric(0, "ns/op")
		b.ReportMetric(float64(took[len(took)/2].Nanoseconds()), "median-ns")
		b.ReportMetric(float64(took[len(took)/20].Nanoseconds()), "p5-ns")
	})
}
