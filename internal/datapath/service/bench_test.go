// SPDX-License-Identifier: Apache-2.0

package service

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/weft-mesh/weft/internal/balance"
	"github.com/weft-mesh/weft/internal/datapath/packettest/bpffs"
	"github.com/weft-mesh/weft/internal/datapath/pin"
)

// world is services with as many backends each, all of them distinct.
func world(services, backends int) []Change {
	at, vip := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("172.16.0.1")
	out := make([]Change, services)
	for i := range out {
		list := make([]balance.Backend, backends)
		for j := range list {
			list[j] = balance.Backend{Addr: at, Port: 8080}
			at = at.Next()
		}
		p := clusterIP(fmt.Sprintf("s%05d", i), netip.AddrPortFrom(vip, 80).String(), list)
		out[i] = Change{p.Name, p}
		vip = vip.Next()
	}
	return out
}

func largeSizes(services, backends int) pin.Sizes {
	s := sizes()
	s.Services, s.Slots, s.Backends = services+64, services*backends+1024, services*backends+1024
	return s
}

func benchWriter(b *testing.B, services, backends int) *Writer {
	b.Helper()
	w, err := New(openMaps(b, filepath.Join(bpffs.New(b), "node"), largeSizes(services, backends)), Options{Maglev: true})
	must(b, err)
	return w
}

var worlds = []struct{ services, backends int }{{1000, 2}, {50000, 2}, {200, 5000}}

// BenchmarkSync is the first sync of a node without any.
func BenchmarkSync(b *testing.B) {
	for _, x := range worlds {
		b.Run(fmt.Sprintf("%dx%d", x.services, x.backends), func(b *testing.B) {
			changes := world(x.services, x.backends)
			b.ReportAllocs()
			for b.Loop() {
				b.StopTimer()
				w := benchWriter(b, x.services, x.backends)
				b.StartTimer()
				w.Apply(changes)
				if errs := w.Errors(); len(errs) > 0 {
					b.Fatal(errs[0])
				}
			}
		})
	}
}

// BenchmarkAdopt is the first sync of an agent that finds all in force.
func BenchmarkAdopt(b *testing.B) {
	for _, x := range worlds {
		b.Run(fmt.Sprintf("%dx%d", x.services, x.backends), func(b *testing.B) {
			maps := openMaps(b, filepath.Join(bpffs.New(b), "node"), largeSizes(x.services, x.backends))
			changes := world(x.services, x.backends)
			w, err := New(maps, Options{})
			must(b, err)
			w.Apply(changes)
			b.ReportAllocs()
			for b.Loop() {
				w, err := New(maps, Options{})
				must(b, err)
				w.Apply(changes)
				if n := w.Writes().Total(); n != 0 {
					b.Fatalf("%d writes", n)
				}
			}
		})
	}
}

// BenchmarkChange is one endpoint that comes or goes.
func BenchmarkChange(b *testing.B) {
	for _, x := range worlds {
		b.Run(fmt.Sprintf("%dx%d", x.services, x.backends), func(b *testing.B) {
			w := benchWriter(b, x.services, x.backends)
			changes := world(x.services, x.backends)
			w.Apply(changes)
			full := changes[x.services/2]
			less := *full.Want
			less.Internal = slices.Delete(slices.Clone(less.Internal), 1, 2)
			both := [2]Change{{full.Name, &less}, full}
			before, n := w.Writes().Total(), 0
			b.ReportAllocs()
			for b.Loop() {
				w.Apply(both[n%2 : n%2+1])
				if n++; n%64 == 0 {
					b.StopTimer()
					must(b, w.Collect())
					b.StartTimer()
				}
			}
			b.ReportMetric(float64(w.Writes().Total()-before)/float64(n), "writes/op")
		})
	}
}

// BenchmarkMemory tells what the kernel allocates for each entry, and the agent
// for each service port.
func BenchmarkMemory(b *testing.B) {
	const n = 50000
	used := func(m *ebpf.Map) float64 {
		text, err := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", m.FD()))
		must(b, err)
		_, rest, _ := strings.Cut(string(text), "memlock:")
		var bytes float64
		_, err = fmt.Sscan(rest, &bytes)
		must(b, err)
		return bytes
	}
	for b.Loop() {
		s := largeSizes(n, 2)
		s.Ranges, s.Affinity, s.ServiceFlows, s.ServiceSockets = 2*n, 2*n, 2*n, 2*n
		maps := openMaps(b, filepath.Join(bpffs.New(b), "node"), s)
		names := []string{"services", "slots", "backends", "members", "source_ranges", "service_flows", "service_sockets"}
		before := map[string]float64{}
		for _, name := range names {
			before[name] = used(maps.Map("weft_" + name))
		}
		w, err := New(maps, Options{})
		must(b, err)
		changes := world(n, 2)
		for i := range changes {
			changes[i].Want.Affinity = time.Hour
			changes[i].Want.SourceRanges = []netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i)}), 24)}
		}
		heap := heapBytes()
		w.Apply(changes)
		must(b, w.Collect())
		b.ReportMetric(float64(heapBytes()-heap)/n, "heap-B/service")
		for i := range uint32(n) {
			must(b, maps.Map("weft_service_flows").Put(pin.KernelFlowKey{Sport: uint16(i), Dport: uint16(i >> 16)}, pin.KernelServiceFlow{}))
			must(b, maps.Map("weft_service_sockets").Put(uint64(i), pin.KernelServiceSocket{}))
		}
		for i, name := range names {
			entries := []float64{n, 2 * n, 2 * n, 2 * n, n, n, n}[i]
			b.ReportMetric((used(maps.Map("weft_"+name))-before[name])/entries, name+"-B")
		}
		runtime.KeepAlive(w)
		runtime.KeepAlive(changes)
	}
}

func heapBytes() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
