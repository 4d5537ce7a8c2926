// SPDX-License-Identifier: Apache-2.0

package xdp

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weft-mesh/weft/internal/addr"
	pt "github.com/weft-mesh/weft/internal/datapath/packettest"
	"github.com/weft-mesh/weft/internal/datapath/pin"
)

// BenchmarkHit is what the program takes for a packet that it sends on, to a
// backend and back, among 10 and among 50,000 services.
func BenchmarkHit(b *testing.B) {
	for _, services := range []int{10, 50000} {
		b.Run(fmt.Sprint(services), func(b *testing.B) {
			fix := benchFixture(b, services)
			eachBench(b, func(b *testing.B, f pt.Family, protocol uint8) {
				for name, flags := range map[string]pin.KernelServiceFlowFlag{"request": 0, "answer": pin.KernelServiceFlowFlagFLOW_REPLY} {
					b.Run(name, func(b *testing.B) {
						fix.clear("weft_service_flows")
						frame := fix.circle(f, protocol, flags).Bytes()
						if got, _ := fix.run(fix.objects.FromWire, frame); got != tx {
							b.Fatalf("verdict %d, want %d", got, tx)
						}
						fix.bench(b, frame)
					})
				}
			})
		})
	}
}

// BenchmarkFirst is what it takes for the first packet of a connection, the
// kernel's own clock around one run included.
func BenchmarkFirst(b *testing.B) {
	for _, services := range []int{10, 50000} {
		b.Run(fmt.Sprint(services), func(b *testing.B) {
			fix := benchFixture(b, services)
			eachBench(b, func(b *testing.B, f pt.Family, protocol uint8) {
				frame := request(f, protocol).Bytes()
				var total time.Duration
				n := 0
				for b.Loop() {
					fix.clear("weft_service_flows")
					got, took, err := fix.objects.FromWire.Benchmark(frame, 1, nil)
					fix.must(err)
					if got != tx {
						b.Fatalf("verdict %d, want %d", got, tx)
					}
					total += took
					n++
				}
				b.ReportMetric(0, "ns/op")
				b.ReportMetric(float64(total.Nanoseconds())/float64(n), "ns/packet")
			})
		})
	}
}

func eachBench(b *testing.B, f func(*testing.B, pt.Family, uint8)) {
	for _, fam := range pt.Families {
		b.Run(fam.Name+"/TCP", func(b *testing.B) { f(b, fam, pt.TCP) })
		b.Run(fam.Name+"/UDP", func(b *testing.B) { f(b, fam, pt.UDP) })
	}
}

// BenchmarkPass is what it takes for a packet that is not its own.
func BenchmarkPass(b *testing.B) {
	fix := benchFixture(b, 50000)
	for _, f := range pt.Families {
		p := request(f, pt.TCP).With(func(p *pt.Packet) { p.Dport, p.Flags = 81, pt.ACK })
		b.Run(f.Name, func(b *testing.B) { fix.bench(b, p.Bytes()) })
	}
}

// BenchmarkDeny is what it takes to drop a packet, with 10,000 networks on the list.
func BenchmarkDeny(b *testing.B) {
	fix := benchFixture(b, 10)
	entries := fix.Maps.Map("weft_deny")
	for i := range uint32(10000) {
		k := pin.KernelDenyKey{Prefixlen: 120, Addr: asUint32s(addr.To16(netip.AddrFrom4([4]byte{203, byte(i >> 8), byte(i), 0})))}
		fix.must(entries.Put(&k, &pin.KernelDenyEntry{Counter: i, Prefixlen: 120}))
	}
	p := request(pt.Families[0], pt.TCP).With(func(p *pt.Packet) { p.Src = netip.MustParseAddr("203.1.2.3") })
	fix.bench(b, p.Bytes())
}

func benchFixture(b *testing.B, services int) *fixture {
	n := pt.New(b, pin.Sizes{Conntrack: 512, NAT: 512})
	fix := &fixture{b, n, load(b, n, nil)}
	fix.nodePorts()
	var keys []pin.KernelServiceKey
	var values []pin.KernelService
	for i := range services {
		a := netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)})
		if i%2 == 1 {
			a = netip.AddrFrom16([16]byte{0: 0xfd, 14: byte(i >> 8), 15: byte(i)})
		}
		keys = append(keys, pin.KernelServiceKey{Addr: pin.KernelAddr{B: addr.To16(a)}, Port: pt.HostPort(80), Protocol: pt.TCP})
		values = append(values, pin.KernelService{Id: uint32(1000 + i)})
	}
	_, err := n.Maps.Map("weft_services").BatchUpdate(keys, values, nil)
	fix.must(err)
	return fix
}

// perCall is fewer runs than the TTL allows: runs of one call go on with the same
// packet. Their time is the kernel's own: to begin and end a call takes 15 ms.
const perCall = 250

func (f *fixture) bench(b *testing.B, frame []byte) {
	b.Helper()
	var total, best time.Duration
	runs := 0
	for b.Loop() {
		_, took, err := f.objects.FromWire.Benchmark(frame, perCall, nil)
		f.must(err)
		total += took
		runs++
		if best == 0 || took < best {
			best = took
		}
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(float64(total.Nanoseconds())/float64(runs), "ns/packet")
	b.ReportMetric(float64(best.Nanoseconds()), "best-ns/packet")
}

// circle makes two flows of which each leads to the other, by this node's own
// address, so that one packet is a hit time after time.
func (f *fixture) circle(fam pt.Family, protocol uint8, flags pin.KernelServiceFlowFlag) pt.Packet {
	p := request(fam, protocol).With(func(p *pt.Packet) { p.Dst, p.TTL, p.Flags, p.Payload = fam.OtherNode, 255, pt.ACK, nil })
	a := pin.KernelFlowKey{
		Src: pin.KernelAddr{B: addr.To16(p.Src)}, Dst: pin.KernelAddr{B: addr.To16(p.Dst)},
		Sport: pt.HostPort(p.Sport), Dport: pt.HostPort(p.Dport), Protocol: protocol,
	}
	z := pin.KernelFlowKey{
		Src: pin.KernelAddr{B: addr.To16(fam.Node)}, Dst: pin.KernelAddr{B: addr.To16(fam.RemotePod)},
		Sport: pt.HostPort(natPort), Dport: pt.HostPort(backendPort), Protocol: protocol,
	}
	f.neighbor(fam.OtherNode, pt.MACNode)
	var now unix.Timespec
	f.must(unix.ClockGettime(unix.CLOCK_MONOTONIC, &now))
	for from, to := range map[pin.KernelFlowKey]pin.KernelFlowKey{a: z, z: a} {
		f.put("weft_service_flows", &from, &pin.KernelServiceFlow{
			Src: to.Src, Dst: to.Dst, Sport: to.Sport, Dport: to.Dport, Flags: uint32(flags | established), Backend: 10, LastSeen: uint32(now.Sec), Mac: [6]byte(pt.MACNode),
		})
	}
	return p
}

const established = pin.KernelServiceFlowFlagFLOW_FAR | pin.KernelServiceFlowFlagFLOW_SNAT | pin.KernelServiceFlowFlagFLOW_ANSWERED | pin.KernelServiceFlowFlagFLOW_ESTABLISHED
