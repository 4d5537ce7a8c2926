// SPDX-License-Identifier: Apache-2.0

package service

import (
	"net/netip"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/weft-mesh/weft/internal/balance"
	"github.com/weft-mesh/weft/internal/datapath/packettest/bpffs"
	"github.com/weft-mesh/weft/internal/datapath/pin"
	"github.com/weft-mesh/weft/internal/datapath/setting"
)

func openMaps(t testing.TB, dir string, s pin.Sizes) *pin.Maps {
	t.Helper()
	m, err := pin.Open(dir, s)
	must(t, err)
	t.Cleanup(func() { m.Close() })
	return m
}

func sizes() pin.Sizes {
	return pin.Sizes{Endpoints: 16, Conntrack: 64, NAT: 64, Events: 256 << 10, Services: 64, Slots: 256, Backends: 128, Maglev: 16, Affinity: 64, Ranges: 64, ServiceSockets: 64, ServiceFlows: 64}
}

// shop are service ports of all kinds.
func shop() []*balance.ServicePort {
	web := nodePort(clusterIP("web", "10.96.0.1:80", many(3)), "172.30.0.1:30080")
	web.Frontends = append(web.Frontends, balance.Frontend{Addr: netip.MustParseAddr("192.0.2.7"), Port: 80, Kind: balance.LoadBalancer})
	web.External, web.LocalExternal = many(3)[1:], true
	web.SourceRanges = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/16")}
	six := balance.Backend{Addr: netip.MustParseAddr("fd00:10:244:1::2"), Port: 53}
	dns := &balance.ServicePort{
		Name:      balance.Name{Namespace: "kube-system", Service: "dns", Protocol: "UDP"},
		Frontends: []balance.Frontend{{Addr: netip.MustParseAddr("10.96.0.10"), Port: 53, Kind: balance.ClusterIP}, {Addr: netip.MustParseAddr("fd00:96::a"), Port: 53, Kind: balance.ClusterIP}},
		Internal:  append(many(2), six), Affinity: 3 * time.Hour,
	}
	return []*balance.ServicePort{web, dns, clusterIP("empty", "10.96.0.3:80", nil)}
}

const shopDump = `10.96.0.10:53/UDP kube-system/dns/UDP affinity=10800s near 10.244.1.2:8080 10.244.1.3:8080
10.96.0.1:80/TCP shop/web:http/TCP near 10.244.1.2:8080 10.244.1.3:8080 10.244.1.4:8080
10.96.0.3:80/TCP shop/empty:http/TCP near -
172.30.0.1:30080/TCP shop/web:http/TCP external local maglev=251 near 10.244.1.2:8080 10.244.1.3:8080 10.244.1.4:8080 far 10.244.1.3:8080 10.244.1.4:8080
192.0.2.7:80/TCP shop/web:http/TCP external local ranges maglev=251 near 10.244.1.2:8080 10.244.1.3:8080 10.244.1.4:8080 far 10.244.1.3:8080 10.244.1.4:8080
[fd00:96::a]:53/UDP kube-system/dns/UDP affinity=10800s near [fd00:10:244:1::2]:53
range shop/web:http/TCP 10.0.0.0/8
range shop/web:http/TCP fd00::/16
`

// TestKernel writes the kernel's own maps, and adopts them.
func TestKernel(t *testing.T) {
	dir := filepath.Join(bpffs.New(t), "node")
	maps := openMaps(t, dir, sizes())
	w, err := New(maps, Options{Maglev: true})
	must(t, err)
	apply(t, w, shop()...)
	sweep(t, w)
	if d := cmp.Diff(shopDump, dumpOf(t, w)); d != "" {
		t.Fatalf("maps (-want +got):\n%s", d)
	}
	ports := w.Ports()
	again, err := New(openMaps(t, dir, sizes()), Options{Maglev: true})
	must(t, err)
	apply(t, again, shop()...)
	sweep(t, again)
	if n := again.Writes().Total(); n != 0 {
		t.Errorf("the second agent wrote %+v, want nothing", again.Writes())
	}
	if d := cmp.Diff(shopDump, dumpOf(t, again)); d != "" {
		t.Errorf("maps after a restart (-want +got):\n%s", d)
	}
	if !slices.Equal(ports, again.Ports()) {
		t.Errorf("ports %v, were %v", again.Ports(), ports)
	}
	third, err := New(openMaps(t, dir, sizes()), Options{})
	must(t, err)
	sweep(t, third)
	if d := cmp.Diff("", dumpOf(t, third)); d != "" {
		t.Errorf("nobody wants anything (-want +got):\n%s", d)
	}
}

// TestKernelFull: what E2BIG and ENOSPC of the kernel lead to.
func TestKernelFull(t *testing.T) {
	s := sizes()
	s.Slots = 100
	w, err := New(openMaps(t, filepath.Join(bpffs.New(t), "node"), s), Options{})
	must(t, err)
	big, small := clusterIP("big", "10.96.0.1:80", many(120)), clusterIP("small", "10.96.0.2:80", many(2))
	ranges := clusterIP("ranges", "10.96.0.4:80", many(1))
	for i := range 70 {
		ranges.SourceRanges = append(ranges.SourceRanges, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i)}), 16))
	}
	w.Apply([]Change{{big.Name, big}, {small.Name, small}, {ranges.Name, ranges}})
	errs := w.Errors()
	if len(errs) != 2 || errs[0].Map != "slots" || errs[1].Map != "source_ranges" {
		t.Errorf("errors %v, want one of slots and one of source_ranges", errs)
	}
	must(t, w.Collect())
	if d := cmp.Diff("10.96.0.2:80/TCP shop/small:http/TCP near 10.244.1.2:8080 10.244.1.3:8080\n", dumpOf(t, w)); d != "" {
		t.Errorf("maps (-want +got):\n%s", d)
	}
}

// TestReader reads what programs write.
func TestReader(t *testing.T) {
	maps := openMaps(t, filepath.Join(bpffs.New(t), "node"), sizes())
	w, err := New(maps, Options{Maglev: true})
	must(t, err)
	apply(t, w, shop()...)
	r := NewReader(maps, w)
	dns := shop()[1]
	p, err := r.Port(dns.Name)
	must(t, err)
	at := netip.MustParseAddrPort("10.244.1.3:8080")
	id := p.Backends[at].ID
	must(t, maps.Map("weft_backends").Put(id, pin.KernelBackend{Addr: kernelAddr(at.Addr()), Port: networkOrder(at.Port()), Protocol: 17, Hits: 12}))
	now, err := monotonicSeconds()
	must(t, err)
	client := netip.MustParseAddr("10.244.1.77")
	put := func(a pin.KernelAddr, service, last uint32) {
		must(t, maps.Map("weft_affinity").Put(pin.KernelAffinityKey{Client: a, Service: service}, pin.KernelAffinity{Backend: id, Last: last}))
	}
	put(kernelAddr(client), p.ID, now-100)
	put(kernelAddr(netip.MustParseAddr("10.244.1.78")), p.ID, now-10801) // over
	put(kernelAddr(client), p.ID+1, now)
	number := pin.KernelAddr{}
	number.B[8] = 7
	put(number, p.ID, now)
	number.B[0], number.B[8] = 1, 8 // for IPv6
	put(number, p.ID, now)
	p, err = r.Port(dns.Name)
	must(t, err)
	if p.Backends[at].Hits != 12 || len(p.Backends) != 3 || len(p.Sets[balance.InternalSet].IDs) != 2 {
		t.Errorf("port is %+v", p)
	}
	want := []Affinity{{Number: 7, Backend: id, Left: 10800 * time.Second}, {Number: 8, Backend: id, Left: 10800 * time.Second}, {Client: client, Backend: id, Left: 10700 * time.Second}}
	for i, a := range p.Affinity {
		if i < len(want) && want[i].Left-a.Left < 3*time.Second {
			a.Left = want[i].Left
		}
		if i >= len(want) || a != want[i] {
			t.Errorf("affinity %+v, want %+v", p.Affinity, want)
		}
	}
	web, err := r.Port(shop()[0].Name)
	must(t, err)
	if far := web.Sets[balance.ExternalSet]; len(far.IPv4) != 251 || far.IPv6 != nil {
		t.Errorf("tables of %d and %d entries", len(far.IPv4), len(far.IPv6))
	}
	if none, err := r.Port(name("none")); err != nil || none.ID != 0 {
		t.Errorf("a port that is none: %+v, %v", none, err)
	}
}

var lifetimes = setting.Lifetimes{TCPSyn: 60 * time.Second, TCPEstablished: 6 * time.Hour, TCPClosing: 10 * time.Second, UDP: 30 * time.Second, UDPReplied: 120 * time.Second}

// flows puts the two halves of a connection.
func flows(t *testing.T, m *pin.Maps, port uint16, protocol uint8, v pin.KernelServiceFlow, age [2]uint32) [2]pin.KernelFlowKey {
	t.Helper()
	now, err := monotonicSeconds()
	must(t, err)
	client, vip, to := kernelAddr(netip.MustParseAddr("192.0.2.1")), kernelAddr(netip.MustParseAddr("10.96.0.1")), kernelAddr(netip.MustParseAddr("10.244.1.2"))
	k := pin.KernelFlowKey{Src: client, Dst: vip, Sport: networkOrder(port), Dport: networkOrder(80), Protocol: protocol}
	v.Src, v.Dst, v.Sport, v.Dport, v.LastSeen = client, to, k.Sport, networkOrder(8080), now-age[0]
	must(t, m.Map("weft_service_flows").Put(k, v))
	back, bv := *otherHalf(&k, &v), v
	bv.Src, bv.Dst, bv.Sport, bv.Dport, bv.LastSeen = vip, client, k.Dport, k.Sport, now-age[1]
	bv.Flags |= uint32(pin.KernelServiceFlowFlagFLOW_REPLY)
	must(t, m.Map("weft_service_flows").Put(back, bv))
	return [2]pin.KernelFlowKey{k, back}
}

func TestFlows(t *testing.T) {
	m := openMaps(t, filepath.Join(bpffs.New(t), "node"), sizes())
	c := NewConnections(m, lifetimes)
	const established, fin, finBack = uint32(pin.KernelServiceFlowFlagFLOW_ESTABLISHED), uint32(pin.KernelServiceFlowFlagFLOW_FIN), uint32(pin.KernelServiceFlowFlagFLOW_FIN_BACK)
	var keys [][2]pin.KernelFlowKey
	cases := []struct {
		name     string
		protocol uint8
		flow     pin.KernelServiceFlow
		age      [2]uint32
		stays    bool
	}{
		{"established", 6, pin.KernelServiceFlow{Service: 1, Backend: 1, Flags: established}, [2]uint32{300, 300}, true},
		{"half open", 6, pin.KernelServiceFlow{Service: 1, Backend: 1}, [2]uint32{61, 61}, false},
		{"closing", 6, pin.KernelServiceFlow{Service: 1, Backend: 1, Flags: established | fin | finBack}, [2]uint32{11, 11}, false},
		{"half closed", 6, pin.KernelServiceFlow{Service: 1, Backend: 1, Flags: established | fin}, [2]uint32{300, 300}, true},
		{"one half is alive", 17, pin.KernelServiceFlow{Service: 1, Backend: 1}, [2]uint32{31, 1}, true},
		{"old datagrams", 17, pin.KernelServiceFlow{Service: 1, Backend: 1}, [2]uint32{31, 32}, false},
		{"of a backend that went", 17, pin.KernelServiceFlow{Service: 1, Backend: 2}, [2]uint32{0, 0}, false},
		{"of another service", 17, pin.KernelServiceFlow{Service: 3, Backend: 2}, [2]uint32{0, 0}, true},
	}
	for i, x := range cases {
		keys = append(keys, flows(t, m, uint16(1000+i), x.protocol, x.flow, x.age))
	}
	must(t, c.Pass(func(f Flow) bool {
		if f.At.String() != "10.244.1.2:8080" {
			t.Errorf("backend of a flow at %s", f.At)
		}
		return f.Service == 1 && f.Backend == 2
	}))
	var v pin.KernelServiceFlow
	for i, x := range cases {
		for half, k := range keys[i] {
			if is := m.Map("weft_service_flows").Lookup(k, &v) == nil; is != x.stays {
				t.Errorf("%s: half %d is there: %v, want %v", x.name, half, is, x.stays)
			}
		}
	}
	if s := c.Stats(); s.Live != 4 || s.Deleted != 8 {
		t.Errorf("stats %+v", s)
	}
}

func TestSockets(t *testing.T) {
	m := openMaps(t, filepath.Join(bpffs.New(t), "node"), sizes())
	c := NewConnections(m, lifetimes)
	for i := range uint32(4) {
		must(t, m.Map("weft_service_sockets").Put(uint64(100+i), pin.KernelServiceSocket{Service: i % 2, Backend: i}))
	}
	odd := func(service, backend uint32) bool { return backend%2 == 1 }
	list, err := c.Sockets(odd)
	must(t, err)
	slices.SortFunc(list, func(a, b Socket) int { return int(a.Cookie) - int(b.Cookie) })
	if want := []Socket{{101, 1, 1}, {103, 1, 3}}; !slices.Equal(list, want) {
		t.Errorf("sockets %v, want %v", list, want)
	}
}
