// SPDX-License-Identifier: Apache-2.0

package services

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/weft-mesh/weft/internal/addr"
	"github.com/weft-mesh/weft/internal/balance"
	"github.com/weft-mesh/weft/internal/datapath/packettest/bpffs"
	"github.com/weft-mesh/weft/internal/datapath/pin"
	"github.com/weft-mesh/weft/internal/datapath/service"
	"github.com/weft-mesh/weft/internal/datapath/setting"
	"github.com/weft-mesh/weft/internal/netdev"
	"github.com/weft-mesh/weft/internal/state"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// fakeCutter remembers what it was to cut.
type fakeCutter struct {
	mu  sync.Mutex
	cut []netdev.UDPSocket
	err error
}

func (c *fakeCutter) CutUDP(_ []string, sockets []netdev.UDPSocket) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return 0, c.err
	}
	c.cut = append(c.cut, sockets...)
	return len(sockets), nil
}

// fixture is a driver with real tables and real maps.
type fixture struct {
	*Driver
	t      testing.TB
	tables *state.Tables
	maps   *pin.Maps
	dir    string
	cutter *fakeCutter
}

var lifetimes = setting.Lifetimes{TCPSyn: time.Minute, TCPEstablished: time.Hour, TCPClosing: time.Minute, UDP: time.Hour, UDPReplied: time.Hour}

func newFixture(t testing.TB, s pin.Sizes) *fixture {
	t.Helper()
	f := &fixture{t: t, dir: filepath.Join(bpffs.New(t), "node"), cutter: &fakeCutter{}}
	var err error
	f.tables, err = state.New()
	must(t, err)
	f.start(s)
	f.node("10.0.0.1", "fd00::1")
	return f
}

// start makes a new agent's driver.
func (f *fixture) start(s pin.Sizes) {
	f.t.Helper()
	maps, err := pin.Open(f.dir, s)
	must(f.t, err)
	f.t.Cleanup(func() { maps.Close() })
	w, err := service.New(maps, service.Options{})
	must(f.t, err)
	f.maps = maps
	f.Driver, err = New(Config{
		Node: "node1", Tables: f.tables, Writer: w, Reader: service.NewReader(maps, w),
		Connections: service.NewConnections(maps, lifetimes), Cutter: f.cutter,
		Log: slog.New(slog.DiscardHandler),
	})
	must(f.t, err)
}

func sizes() pin.Sizes {
	return pin.Sizes{Endpoints: 16, Conntrack: 64, NAT: 64, Events: 256 << 10, Services: 64, Slots: 256, Backends: 128, Maglev: 16, Affinity: 64, Ranges: 64, ServiceSockets: 64, ServiceFlows: 64}
}

func (f *fixture) node(ips ...string) {
	f.t.Helper()
	as, err := addr.ParseAll(ips)
	must(f.t, err)
	txn := f.tables.DB.WriteTxn(f.tables.Nodes)
	_, _, err = f.tables.Nodes.Insert(txn, &state.Node{Name: "node1", IPs: as, PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24")}})
	must(f.t, err)
	txn.Commit()
}

func (f *fixture) service(name string, change func(*corev1.ServiceSpec)) {
	f.t.Helper()
	spec := &corev1.ServiceSpec{ClusterIP: "10.96.0.1", ClusterIPs: []string{"10.96.0.1"}, Ports: []corev1.ServicePort{{Port: 53, Protocol: "UDP"}}}
	if change != nil {
		change(spec)
	}
	txn := f.tables.DB.WriteTxn(f.tables.Services)
	_, _, err := f.tables.Services.Insert(txn, &state.Service{Namespace: "shop", Name: name, Spec: spec})
	must(f.t, err)
	txn.Commit()
}

func (f *fixture) deleteService(name string) {
	f.t.Helper()
	txn := f.tables.DB.WriteTxn(f.tables.Services)
	_, _, err := f.tables.Services.Delete(txn, &state.Service{Namespace: "shop", Name: name})
	must(f.t, err)
	txn.Commit()
}

// endpoints writes a slice of a service: an address each, with "!" in front for
// one that terminates and serves, with "-" for one that does not serve.
func (f *fixture) endpoints(service string, protocol corev1.Protocol, as ...string) {
	f.t.Helper()
	txn := f.tables.DB.WriteTxn(f.tables.Endpoints)
	_, _, err := f.tables.Endpoints.Insert(txn, slice(service, protocol, as...))
	must(f.t, err)
	txn.Commit()
}

func slice(service string, protocol corev1.Protocol, as ...string) *state.Endpoint {
	yes, no, port, node := true, false, int32(5353), "node1"
	s := &discoveryv1.EndpointSlice{AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Port: &port, Protocol: &protocol}}}
	for _, a := range as {
		c := discoveryv1.EndpointConditions{Ready: &yes, Serving: &yes, Terminating: &no}
		switch a[0] {
		case '!':
			c = discoveryv1.EndpointConditions{Ready: &no, Serving: &yes, Terminating: &yes}
		case '-':
			c = discoveryv1.EndpointConditions{Ready: &no, Serving: &no, Terminating: &yes}
		}
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{strings.TrimLeft(a, "!-")}, Conditions: c, NodeName: &node})
	}
	return &state.Endpoint{Namespace: "shop", Name: service + "-1", Service: service, Slice: s}
}

// workload is a pod of the cluster; an empty address takes it away.
func (f *fixture) workload(name, a string) {
	f.t.Helper()
	txn := f.tables.DB.WriteTxn(f.tables.Workloads)
	row := &state.Workload{Namespace: "shop", Name: name}
	var err error
	if a == "" {
		_, _, err = f.tables.Workloads.Delete(txn, row)
	} else {
		row.IPs = []netip.Addr{netip.MustParseAddr(a)}
		_, _, err = f.tables.Workloads.Insert(txn, row)
	}
	must(f.t, err)
	txn.Commit()
}

// apply puts the tables in force and ends what has to end.
func (f *fixture) apply() {
	f.t.Helper()
	must(f.t, f.Apply())
	must(f.t, f.settle())
}

func (f *fixture) wantDump(want string) {
	f.t.Helper()
	got, err := f.Dump()
	must(f.t, err)
	if d := cmp.Diff(want, got); d != "" {
		f.t.Errorf("maps (-want +got):\n%s", d)
	}
}

// flow puts a connection to a backend, and returns its key.
func (f *fixture) flow(sport uint16, protocol uint8, b service.Numbered, id uint32, at string) pin.KernelFlowKey {
	f.t.Helper()
	k := pin.KernelFlowKey{Sport: sport, Protocol: protocol}
	v := pin.KernelServiceFlow{Service: id, Backend: b.ID, LastSeen: 1 << 30, Dst: pin.KernelAddr{B: addr.To16(netip.MustParseAddr(at))}, Flags: uint32(pin.KernelServiceFlowFlagFLOW_ESTABLISHED)}
	must(f.t, f.maps.Map("weft_service_flows").Put(k, v))
	return k
}

func (f *fixture) hasFlow(k pin.KernelFlowKey) bool {
	var v pin.KernelServiceFlow
	return f.maps.Map("weft_service_flows").Lookup(k, &v) == nil
}

func (f *fixture) socket(cookie uint64, id uint32, b service.Numbered) {
	f.t.Helper()
	must(f.t, f.maps.Map("weft_service_sockets").Put(cookie, pin.KernelServiceSocket{Service: id, Backend: b.ID}))
}

func (f *fixture) inForce(protocol corev1.Protocol) (id uint32, by func(string) service.Numbered) {
	f.t.Helper()
	k, err := f.Kernel(balance.Name{Namespace: "shop", Service: "dns", Protocol: protocol})
	must(f.t, err)
	return k.ID, func(a string) service.Numbered {
		b, ok := k.Backends[netip.AddrPortFrom(netip.MustParseAddr(a), 5353)]
		if !ok {
			f.t.Fatalf("no backend %s in %v", a, k.Backends)
		}
		return b
	}
}

const a1, a2, a3 = "10.244.1.2", "10.244.1.3", "10.244.1.4"

func TestFollowsTables(t *testing.T) {
	f := newFixture(t, sizes())
	f.service("dns", nil)
	f.apply()
	f.wantDump("10.96.0.1:53/UDP shop/dns/UDP near -\n")
	f.endpoints("dns", "UDP", a1, a2)
	f.apply()
	f.wantDump("10.96.0.1:53/UDP shop/dns/UDP near 10.244.1.2:5353 10.244.1.3:5353\n")
	// the slice is of another service now
	e := slice("dns", "UDP", a1)
	e.Service = "other"
	txn := f.tables.DB.WriteTxn(f.tables.Endpoints)
	_, _, err := f.tables.Endpoints.Insert(txn, e)
	must(t, err)
	txn.Commit()
	f.apply()
	f.wantDump("10.96.0.1:53/UDP shop/dns/UDP near -\n")
	f.service("other", func(s *corev1.ServiceSpec) {
		s.ClusterIPs, s.Type, s.Ports[0].NodePort = []string{"10.96.0.2"}, corev1.ServiceTypeNodePort, 30053
	})
	f.apply()
	other := "10.0.0.%d:30053/UDP shop/other/UDP external near 10.244.1.2:5353 far 10.244.1.2:5353\n10.96.0.1:53/UDP shop/dns/UDP near -\n10.96.0.2:53/UDP shop/other/UDP near 10.244.1.2:5353\n"
	f.wantDump(fmt.Sprintf(other, 1))
	before := f.cfg.Writer.Writes().Total()
	f.node("10.0.0.9") // where NodePorts are
	f.apply()
	f.wantDump(fmt.Sprintf(other, 9))
	if n := f.cfg.Writer.Writes().Total() - before; n != 2 {
		t.Errorf("%d writes, want one frontend more and one less", n)
	}
	s := f.Status()
	if s.Services != 2 || s.Ports != 2 || s.Frontends != 3 || s.Backends != 1 || s.Err != nil {
		t.Errorf("status %+v", s)
	}
	if in, ok := f.Input("shop", "other"); !ok || len(in.Slices) != 1 || len(f.Ports("shop", "other")) != 1 || len(f.Ports("", "")) != 2 {
		t.Errorf("input %+v, %v", in, ok)
	}
	f.deleteService("other")
	f.deleteService("dns")
	f.apply()
	f.wantDump("")
	if s := f.Status(); s.Services != 0 || s.Ports != 0 || s.Frontends != 0 || s.Backends != 0 {
		t.Errorf("status of nothing %+v", s)
	}
}

// TestDatagramsEnd: with the endpoint, not before, and only they.
func TestDatagramsEnd(t *testing.T) {
	f := newFixture(t, sizes())
	f.service("dns", nil)
	f.endpoints("dns", "UDP", a1, a2, a3)
	f.apply()
	id, b := f.inForce("UDP")
	first, second, other := f.flow(1, 17, b(a1), id, a1), f.flow(2, 17, b(a2), id, a2), f.flow(3, 17, b(a1), id+1, a1)
	f.socket(101, id, b(a1))
	f.socket(102, id, b(a2))

	f.endpoints("dns", "UDP", "!"+a1, a2, a3)
	f.apply()
	f.wantDump("10.96.0.1:53/UDP shop/dns/UDP near 10.244.1.3:5353 10.244.1.4:5353\nunused backend 10.244.1.2:5353/UDP\n")
	if !f.hasFlow(first) || len(f.cutter.cut) != 0 {
		t.Errorf("the endpoint terminates and serves: flow %v, cut %v", f.hasFlow(first), f.cutter.cut)
	}
	f.endpoints("dns", "UDP", "-"+a1, a2, a3)
	f.apply()
	f.wantDump("10.96.0.1:53/UDP shop/dns/UDP near 10.244.1.3:5353 10.244.1.4:5353\n")
	if f.hasFlow(first) || !f.hasFlow(second) {
		t.Errorf("flows: of what is gone %v, of another backend %v", f.hasFlow(first), f.hasFlow(second))
	}
	want := []netdev.UDPSocket{{Cookie: 101, Peer: netip.MustParseAddrPort(a1 + ":5353")}}
	if !slices.Equal(f.cutter.cut, want) || f.Status().Cut != 1 {
		t.Errorf("cut %v, want %v", f.cutter.cut, want)
	}
	_ = other // the same backend's number means the same port
	f.deleteService("dns")
	f.apply()
	if f.hasFlow(second) || len(f.cutter.cut) != 2 {
		t.Errorf("the service is gone: flow %v, cut %v", f.hasFlow(second), f.cutter.cut)
	}
}

// TestRecreatedBackend: the same address a moment later is another backend.
func TestRecreatedBackend(t *testing.T) {
	f := newFixture(t, sizes())
	f.service("dns", nil)
	f.endpoints("dns", "UDP", a1)
	f.apply()
	id, b := f.inForce("UDP")
	old := f.flow(1, 17, b(a1), id, a1)
	f.endpoints("dns", "UDP")
	must(t, f.Apply())
	f.endpoints("dns", "UDP", a1)
	must(t, f.Apply())
	_, b = f.inForce("UDP")
	fresh := f.flow(2, 17, b(a1), id, a1)
	f.socket(7, id, b(a1))
	must(t, f.settle())
	if !f.hasFlow(fresh) || f.hasFlow(old) || len(f.cutter.cut) != 0 {
		t.Errorf("flow of the new backend %v, of the old one %v, cut %v", f.hasFlow(fresh), f.hasFlow(old), f.cutter.cut)
	}
	f.wantDump("10.96.0.1:53/UDP shop/dns/UDP near 10.244.1.2:5353\n")
}

// TestCutIsTriedAgain: the backend stays known until it worked.
func TestCutIsTriedAgain(t *testing.T) {
	f := newFixture(t, sizes())
	f.service("dns", nil)
	f.endpoints("dns", "UDP", a1)
	f.apply()
	id, b := f.inForce("UDP")
	f.socket(7, id, b(a1))
	f.cutter.err = errors.New("no namespace")
	f.endpoints("dns", "UDP", a2)
	must(t, f.Apply())
	if err := f.settle(); err == nil || !strings.Contains(err.Error(), "no namespace") {
		t.Errorf("error %v", err)
	}
	// another agent does it
	f.cutter.err = nil
	f.start(sizes())
	must(t, f.Apply())
	must(t, f.settle())
	if want := []netdev.UDPSocket{{Cookie: 7, Peer: netip.MustParseAddrPort(a1 + ":5353")}}; !slices.Equal(f.cutter.cut, want) {
		t.Errorf("cut %v, want %v", f.cutter.cut, want)
	}
	f.wantDump("10.96.0.1:53/UDP shop/dns/UDP near 10.244.1.3:5353\n")
}

// TestConnectionsStay: TCP connections end by themselves, or with the pod.
func TestConnectionsStay(t *testing.T) {
	f := newFixture(t, sizes())
	f.service("dns", func(s *corev1.ServiceSpec) { s.Ports[0].Protocol = "TCP" })
	f.endpoints("dns", "TCP", a1, a2, "192.0.2.1")
	f.workload("one", a1)
	f.workload("two", a2)
	f.apply()
	id, b := f.inForce("TCP")
	pod, outside, stays := f.flow(1, 6, b(a1), id, a1), f.flow(2, 6, b("192.0.2.1"), id, "192.0.2.1"), f.flow(3, 6, b(a2), id, a2)
	f.endpoints("dns", "TCP", a2)
	f.apply()
	must(t, f.pass())
	if !f.hasFlow(pod) || !f.hasFlow(outside) || !f.hasFlow(stays) {
		t.Errorf("flows: %v, %v, %v, want all", f.hasFlow(pod), f.hasFlow(outside), f.hasFlow(stays))
	}
	f.workload("one", "")
	must(t, f.pass())
	if f.hasFlow(pod) || !f.hasFlow(outside) || !f.hasFlow(stays) {
		t.Errorf("flows: %v, %v, %v, want all but the first", f.hasFlow(pod), f.hasFlow(outside), f.hasFlow(stays))
	}
}

// TestDirectAnswersStay: how a pod answers clients by itself names no backend, and
// stays until the pod is gone.
func TestDirectAnswersStay(t *testing.T) {
	f := newFixture(t, sizes())
	f.workload("one", a1)
	f.apply()
	var keys []pin.KernelFlowKey
	for _, protocol := range []uint8{6, 17} {
		k := pin.KernelFlowKey{Src: pin.KernelAddr{B: addr.To16(netip.MustParseAddr(a1))}, Protocol: protocol}
		v := pin.KernelServiceFlow{LastSeen: 1 << 30, Flags: uint32(pin.KernelServiceFlowFlagFLOW_REPLY | pin.KernelServiceFlowFlagFLOW_DSR)}
		must(t, f.maps.Map("weft_service_flows").Put(k, v))
		keys = append(keys, k)
	}
	must(t, f.pass())
	for _, k := range keys {
		if !f.hasFlow(k) {
			t.Errorf("protocol %d: gone, the pod is there", k.Protocol)
		}
	}
	f.workload("one", "")
	must(t, f.pass())
	for _, k := range keys {
		if f.hasFlow(k) {
			t.Errorf("protocol %d: stays, the pod is gone", k.Protocol)
		}
	}
}

// TestProblems: what is left out, and why.
func TestProblems(t *testing.T) {
	s := sizes()
	s.Slots = 3
	f := newFixture(t, s)
	f.service("dns", nil)
	f.endpoints("dns", "UDP", a1, a2)
	f.service("echo", nil) // at the same address
	f.service("full", func(s *corev1.ServiceSpec) { s.ClusterIPs = []string{"10.96.0.7"} })
	f.endpoints("full", "UDP", a1, a2)
	if err := f.Apply(); err == nil || !strings.Contains(err.Error(), "shop/full/UDP: map slots is full") {
		t.Errorf("error %v", err)
	}
	var got []string
	for _, p := range f.Problems() {
		got = append(got, p.String())
	}
	want := []string{
		"Service shop/echo: spec.ports: 10.96.0.1:53/UDP: want an address and port that Service shop/dns does not have",
		"Service shop/full: spec.ports: shop/full/UDP: want to be in force: service port shop/full/UDP: map slots is full: it holds 3 entries",
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("problems (-want +got):\n%s", d)
	}
	f.deleteService("dns")
	if err := f.Apply(); err == nil {
		t.Error("no error while the old slots are there")
	}
	must(t, f.settle())
	if p := f.Problems(); len(p) != 0 || f.Status().Err != nil {
		t.Errorf("problems %v, %v", p, f.Status().Err)
	}
	f.wantDump("10.96.0.1:53/UDP shop/echo/UDP near -\n10.96.0.7:53/UDP shop/full/UDP near 10.244.1.2:5353 10.244.1.3:5353\n")
}

func freePort(t *testing.T) int32 {
	t.Helper()
	l, err := net.Listen("tcp", ":0")
	must(t, err)
	defer l.Close()
	return int32(l.Addr().(*net.TCPAddr).Port)
}

func TestHealthChecks(t *testing.T) {
	f := newFixture(t, sizes())
	defer f.health.close()
	port := freePort(t)
	balanced := func(ip string, port int32) func(*corev1.ServiceSpec) {
		return func(s *corev1.ServiceSpec) {
			s.ClusterIPs, s.Type = []string{ip}, corev1.ServiceTypeLoadBalancer
			s.ExternalTrafficPolicy, s.HealthCheckNodePort = corev1.ServiceExternalTrafficPolicyLocal, port
		}
	}
	f.service("dns", balanced("10.96.0.1", port))
	f.endpoints("dns", "UDP", a1, a2, "!"+a3)
	f.apply()
	check := func(code int, service string, ready int) {
		t.Helper()
		r, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d/", port))
		must(t, err)
		defer r.Body.Close()
		b, err := io.ReadAll(r.Body)
		must(t, err)
		var body struct {
			Service struct{ Namespace, Name string }
			Local   int  `json:"localEndpoints"`
			Healthy bool `json:"serviceProxyHealthy"`
		}
		must(t, json.Unmarshal(b, &body))
		if r.StatusCode != code || body.Service.Name != service || body.Local != ready || !body.Healthy || r.Header.Get("X-Load-Balancing-Endpoint-Weight") != fmt.Sprint(ready) {
			t.Errorf("answer %d %s %v, want %d of %s and %d", r.StatusCode, b, r.Header, code, service, ready)
		}
	}
	check(200, "dns", 2)
	f.endpoints("dns", "UDP", "!"+a1)
	f.apply()
	check(503, "dns", 0)
	f.service("echo", balanced("10.96.0.2", port)) // the same port
	f.endpoints("echo", "UDP", a1)
	f.apply()
	check(503, "dns", 0)
	if p := f.Problems(); len(p) != 1 || p[0].Want != "a port that Service shop/dns does not have" {
		t.Errorf("problems %v", p)
	}
	f.deleteService("dns")
	f.apply()
	check(200, "echo", 1)
	l, err := net.Listen("tcp", ":0")
	must(t, err)
	port = int32(l.Addr().(*net.TCPAddr).Port)
	f.service("echo", balanced("10.96.0.2", port))
	f.apply()
	if p := f.Problems(); len(p) != 1 || !strings.Contains(p[0].Want, "address already in use") {
		t.Errorf("problems %v", p)
	}
	must(t, l.Close())
	f.retry()
	check(200, "echo", 1)
}

// TestHealthCheckFlood: those who connect and say nothing take only so many files.
func TestHealthCheckFlood(t *testing.T) {
	s := &healthServer{service: "shop/dns"}
	port := freePort(t)
	s.listen(uint16(port))
	defer s.close()
	files := func() int {
		list, err := os.ReadDir("/proc/self/fd")
		must(t, err)
		return len(list)
	}
	before, clients := files(), maxChecks+64
	for range clients {
		c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		must(t, err)
		defer c.Close()
		if n := files() - before; n > clients+maxChecks+8 {
			t.Fatalf("%d files with %d clients at most", n, clients)
		}
	}
	r, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d/", port)) // behind all of them
	must(t, err)
	defer r.Body.Close()
	if r.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("answer %d", r.StatusCode)
	}
}

// TestRun: a change of the tables is in force soon, by itself.
func TestRun(t *testing.T) {
	f := newFixture(t, sizes())
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- f.Run(ctx) }()
	defer func() {
		cancel()
		must(t, <-done)
	}()
	wait := func(want string) {
		t.Helper()
		for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
			got, err := f.Dump()
			must(t, err)
			if got == want {
				return
			}
			if time.Now().After(deadline) {
				t.Fatalf("maps are %q, want %q", got, want)
			}
		}
	}
	f.service("dns", nil)
	wait("10.96.0.1:53/UDP shop/dns/UDP near -\n")
	for i := range 20 {
		list := []string{a1, a2, a3}[:1+i%3]
		f.endpoints("dns", "UDP", list...)
		wait("10.96.0.1:53/UDP shop/dns/UDP near " + strings.Join(list, ":5353 ") + ":5353\n")
	}
}

// BenchmarkEndpointChange is from the row of a slice to the maps, among many
// services.
func BenchmarkEndpointChange(b *testing.B) {
	for _, n := range []int{10, 1000, 50000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			s := sizes()
			s.Services, s.Slots, s.Backends = n+10, 2*n+1000, 2*n+1000
			f := newFixture(b, s)
			fill(b, f, n)
			start := time.Now()
			must(b, f.Apply())
			b.Logf("first sync of %d services: %v", n, time.Since(start))
			less, both := slice("s5", "UDP", a1), slice("s5", "UDP", a1, a2)
			i := 0
			b.ReportAllocs()
			for b.Loop() {
				e := both
				if i%2 == 0 {
					e = less
				}
				i++
				txn := f.tables.DB.WriteTxn(f.tables.Endpoints)
				_, _, err := f.tables.Endpoints.Insert(txn, e)
				must(b, err)
				txn.Commit()
				must(b, f.Apply())
				if i%64 == 0 {
					b.StopTimer()
					must(b, f.settle())
					b.StartTimer()
				}
			}
		})
	}
}

func fill(b *testing.B, f *fixture, n int) {
	b.Helper()
	txn := f.tables.DB.WriteTxn(f.tables.Services, f.tables.Endpoints)
	ip := netip.MustParseAddr("172.16.0.1")
	for i := range n {
		name := fmt.Sprintf("s%d", i)
		spec := &corev1.ServiceSpec{ClusterIPs: []string{ip.String()}, Ports: []corev1.ServicePort{{Port: 53, Protocol: "UDP"}}}
		ip = ip.Next()
		_, _, err := f.tables.Services.Insert(txn, &state.Service{Namespace: "shop", Name: name, Spec: spec})
		must(b, err)
		_, _, err = f.tables.Endpoints.Insert(txn, slice(name, "UDP", a1, a2))
		must(b, err)
	}
	txn.Commit()
}

// TestEndpointOfNoService: a backend that an earlier agent left, for an endpoint
// still serves there, goes with that, although no service port changes.
func TestEndpointOfNoService(t *testing.T) {
	f := newFixture(t, sizes())
	f.service("dns", nil)
	f.endpoints("dns", "UDP", "!"+a1, a2)
	f.apply()
	f.endpoints("dns", "UDP", a1)
	f.apply()
	f.endpoints("dns", "UDP", "!"+a1, a2)
	f.apply()
	f.start(sizes())
	f.endpoints("gone", "UDP", a1)
	f.endpoints("dns", "UDP", a2)
	f.apply()
	f.wantDump("10.96.0.1:53/UDP shop/dns/UDP near 10.244.1.3:5353\nunused backend 10.244.1.2:5353/UDP\n")
	select {
	case <-f.wake:
	default:
	}
	f.endpoints("gone", "UDP", "-"+a1)
	must(t, f.Apply())
	select {
	case <-f.wake:
	default:
		t.Fatal("nobody looks for backends that may go")
	}
	must(t, f.settle())
	f.wantDump("10.96.0.1:53/UDP shop/dns/UDP near 10.244.1.3:5353\n")
}
