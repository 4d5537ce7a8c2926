// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/weft-mesh/weft/internal/datapath/pin"
)

func ptr(a *unix.RawSockaddr) unsafe.Pointer { return unsafe.Pointer(a) }

func TestTCP(t *testing.T) {
	f := newFixture(t, pin.Sizes{})
	f.serve("127.0.1.1:8080", "[fd00::1]:8080")
	v4 := f.service(tcp, "10.96.0.1:80", "127.0.1.1:8080").front
	v6 := f.service(tcp, "[fd00:96::1]:80", "[fd00::1]:8080").front
	for _, c := range []struct {
		name   string
		v6     bool
		proto  int
		front  netip.AddrPort
		server string
	}{
		{"IPv4", false, tcp, v4, "127.0.1.1:8080"},
		{"IPv6", true, tcp, v6, "[fd00::1]:8080"},
		{"IPv4 from an IPv6 socket", true, tcp, v4, "127.0.1.1:8080"},
		{"no service", false, tcp, netip.MustParseAddrPort("127.0.1.1:8080"), "127.0.1.1:8080"},
	} {
		t.Run(c.name, func(t *testing.T) {
			f.TB = t
			s := f.socket(f.pod, c.v6, c.proto)
			s.mustConnect(c.front)
			if got := s.peer(); got != c.front {
				t.Errorf("peer %s, want %s", got, c.front)
			}
			if said, _, err := s.receive(); said != c.server {
				t.Errorf("server %s (%v), want %s", said, err, c.server)
			}
			if n := f.tracked(); len(n) != 0 {
				t.Errorf("%v is tracked, want none: only UDP sockets have to be cut", n)
			}
		})
	}
}

func TestRefused(t *testing.T) {
	f := newFixture(t, pin.Sizes{})
	for _, c := range []struct {
		name  string
		v6    bool
		front string
	}{{"IPv4", false, "10.96.0.1:80"}, {"IPv6", true, "[fd00:96::1]:80"}} {
		t.Run(c.name, func(t *testing.T) {
			f.TB = t
			before := f.count(pin.KernelSocketCountSOCKET_NO_BACKEND)
			stream := f.service(tcp, c.front).front
			dgram := f.service(udp, c.front).front
			if err := f.socket(f.pod, c.v6, tcp).connect(stream); !errors.Is(err, unix.ECONNREFUSED) {
				t.Errorf("TCP: %v, want ECONNREFUSED", err)
			}
			if err := f.socket(f.pod, c.v6, udp).connect(dgram); !errors.Is(err, unix.ECONNREFUSED) {
				t.Errorf("UDP: %v, want ECONNREFUSED", err)
			}
			if err := f.socket(f.pod, c.v6, udp).sendTo(dgram); !errors.Is(err, unix.ECONNREFUSED) {
				t.Errorf("sendto: %v, want ECONNREFUSED", err)
			}
			if n := f.count(pin.KernelSocketCountSOCKET_NO_BACKEND) - before; n != 3 {
				t.Errorf("%d refusals were counted, want 3", n)
			}
		})
	}
}

// TestProtocols: services of one address and port and two protocols have
// nothing in common.
func TestProtocols(t *testing.T) {
	f := newFixture(t, pin.Sizes{})
	f.serve("127.0.1.1:53", "127.0.1.2:53")
	front := f.service(tcp, "10.96.0.10:53", "127.0.1.1:53").front
	f.service(udp, "10.96.0.10:53", "127.0.1.2:53")
	if said := f.dial(false, front); said != "127.0.1.1:53" {
		t.Errorf("TCP: server %s", said)
	}
	if said := f.socket(f.pod, false, udp).ask(front); said != "127.0.1.2:53" {
		t.Errorf("UDP: server %s", said)
	}
}

// TestMPTCP: a client with MPTCP reaches services as any other does. It sees the
// backend as its peer: connect ran for its first subflow, getpeername runs for
// the socket above that.
func TestMPTCP(t *testing.T) {
	f := newFixture(t, pin.Sizes{})
	f.serve("127.0.1.1:8080", "[fd00::1]:8080")
	for _, c := range []struct {
		v6            bool
		front, server string
	}{{false, "10.96.0.1:80", "127.0.1.1:8080"}, {true, "[fd00:96::1]:80", "[fd00::1]:8080"}} {
		front := f.service(tcp, c.front, c.server).front
		s := f.socket(f.pod, c.v6, unix.IPPROTO_MPTCP)
		s.mustConnect(front)
		if said, _, err := s.receive(); said != c.server {
			t.Errorf("server %s (%v), want %s", said, err, c.server)
		}
	}
}

// TestFastOpen: a connect without connect(2).
func TestFastOpen(t *testing.T) {
	f := newFixture(t, pin.Sizes{})
	f.serve("127.0.1.1:8080")
	front := f.service(tcp, "10.96.0.1:80", "127.0.1.1:8080").front
	s := f.socket(f.pod, false, tcp)
	f.must(unix.Sendto(s.fd, nil, unix.MSG_FASTOPEN, s.sockaddr(front)))
	if said, _, err := s.receive(); said != "127.0.1.1:8080" || s.peer() != front {
		t.Errorf("server %s (%v), peer %s", said, err, s.peer())
	}
}

// TestSourceRanges: a service that admits some clients only is left to the
// packets, which show the client's address.
func TestSourceRanges(t *testing.T) {
	f := newFixture(t, pin.Sizes{})
	f.serve("127.0.1.1:8080", "127.0.9.9:80")
	for _, proto := range []uint8{tcp, udp} {
		svc := f.service(proto, "127.0.9.9:80", "127.0.1.1:8080")
		svc.value.Flags = uint32(pin.KernelServiceFlagSERVICE_EXTERNAL | pin.KernelServiceFlagSERVICE_SOURCE_RANGES)
		svc.put()
	}
	front := netip.MustParseAddrPort("127.0.9.9:80")
	if said := f.dial(false, front); said != front.String() {
		t.Errorf("TCP: server %s, want %s", said, front)
	}
	if said := f.socket(f.pod, false, udp).ask(front); said != front.String() {
		t.Errorf("UDP: server %s, want %s", said, front)
	}
}

// TestOtherCgroup: a socket that was made elsewhere is not translated.
func TestOtherCgroup(t *testing.T) {
	f := newFixture(t, pin.Sizes{})
	f.serve("127.0.1.1:8080", "127.0.9.9:80")
	front := f.service(tcp, "127.0.9.9:80", "127.0.1.1:8080").front
	inside := f.socket(f.pod, false, tcp)
	outside := f.outside(func() *socket { return f.socket(f.pod, false, tcp) })
	for s, want := range map[*socket]string{inside: "127.0.1.1:8080", outside: "127.0.9.9:80"} {
		s.mustConnect(front)
		if said, _, err := s.receive(); said != want {
			t.Errorf("server %s (%v), want %s", said, err, want)
		}
	}
}

func TestAffinity(t *testing.T) {
	f := newFixture(t, pin.Sizes{})
	f.serve("127.0.1.1:53", "127.0.1.2:53")
	svc := f.service(tcp, "10.96.0.10:53", "127.0.1.1:53", "127.0.1.2:53")
	svc.value.Affinity = 60
	svc.put()
	svc.only(one)
	first := f.dial(false, svc.front)
	svc.only(two)
	for range 20 {
		if said := f.dial(false, svc.front); said != first {
			t.Fatalf("server %s, want %s", said, first)
		}
	}
	other := f.socket(f.node, false, tcp)
	if err := other.connect(svc.front); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("the node has no server: %v", err) // it asked the second backend, in its own namespace
	}
	key, kept := f.affinity(svc)
	if kept.Backend != svc.ids[one] {
		t.Errorf("backend %d, want %d", kept.Backend, svc.ids[one])
	}
	kept.Last -= 60
	f.must(f.maps.Map("weft_affinity").Put(key, kept))
	if said := f.dial(false, svc.front); said != first {
		t.Errorf("in the last second: server %s, want %s", said, first)
	}
	kept.Last -= 5
	f.must(f.maps.Map("weft_affinity").Put(key, kept))
	if said := f.dial(false, svc.front); said != two.String() {
		t.Errorf("after it expired: server %s, want %s", said, two)
	}
	f.must(f.maps.Map("weft_members").Delete(pin.KernelMemberKey{Set: svc.value.Near.Id, Backend: svc.ids[two]}))
	svc.only(one)
	if said := f.dial(false, svc.front); said != one.String() {
		t.Errorf("after its backend left the set: server %s, want %s", said, one)
	}
}

// TestAffinityOfFamilies: IPv4 and IPv6 addresses of one service port, whose
// backends are others, do not take a client's backend from one another.
func TestAffinityOfFamilies(t *testing.T) {
	f := newFixture(t, pin.Sizes{})
	f.serve("127.0.1.1:53", "127.0.1.2:53", "[fd00::1]:53", "[fd00::2]:53")
	v4 := f.service(tcp, "10.96.0.10:53", "127.0.1.1:53", "127.0.1.2:53")
	v6 := f.service(tcp, "[fd00:96::a]:53", "[fd00::1]:53", "[fd00::2]:53")
	v6.value.Id = v4.value.Id
	for _, svc := range []*service{v4, v6} {
		svc.value.Affinity = 60
		svc.put()
	}
	first4, first6 := f.dial(false, v4.front), f.dial(true, v6.front)
	for range 20 {
		if said := f.dial(false, v4.front); said != first4 {
			t.Fatalf("IPv4: server %s, want %s", said, first4)
		}
		if said := f.dial(true, v6.front); said != first6 {
			t.Fatalf("IPv6: server %s, want %s", said, first6)
		}
	}
}

// affinity is what is remembered of the pod.
func (f *fixture) affinity(svc *service) (key pin.KernelAffinityKey, kept pin.KernelAffinity) {
	f.Helper()
	var cookie uint64
	f.must(f.pod.Do(func() (err error) { cookie, err = netnsCookie(); return err }))
	key.Service = svc.value.Id
	binary.NativeEndian.PutUint64(key.Client.B[8:], cookie)
	f.must(f.maps.Map("weft_affinity").Lookup(key, &kept))
	return key, kept
}

func TestBindGuard(t *testing.T) {
	f := newFixture(t, pin.Sizes{})
	f.service(tcp, nodeV4.String()+":30080", "127.0.1.1:8080")
	f.service(tcp, "["+nodeV6.String()+"]:30081", "[fd00::1]:8080")
	for _, c := range []struct {
		name  string
		pod   bool // in the pod's namespace
		v6    bool
		proto int
		bind  string
		taken bool
	}{
		{"the node's address", false, false, tcp, "172.30.0.1:30080", true},
		{"every IPv4 address", false, false, tcp, "0.0.0.0:30080", true},
		{"every address of both families", false, true, tcp, "[::]:30080", true},
		{"IPv4 on an IPv6 socket", false, true, tcp, "[::ffff:0.0.0.0]:30080", true},
		{"the node's IPv6 address", false, true, tcp, "[fd00:172:30::1]:30081", true},
		{"every IPv6 address", false, true, tcp, "[::]:30081", true},
		{"with MPTCP", false, true, unix.IPPROTO_MPTCP, "[::]:30081", true},
		{"loopback", false, false, tcp, "127.0.0.1:30080", false},
		{"a port of the other family", false, false, tcp, "0.0.0.0:30081", false},
		{"another port", false, false, tcp, "0.0.0.0:30082", false},
		{"another protocol", false, false, udp, "0.0.0.0:30080", false},
		{"in a pod", true, false, tcp, "0.0.0.0:30080", false},
		{"in a pod, IPv6", true, true, tcp, "[::]:30081", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			f.TB = t
			before := f.count(pin.KernelSocketCountSOCKET_BIND)
			ns := f.node
			if c.pod {
				ns = f.pod
			}
			s := f.socket(ns, c.v6, c.proto)
			err := s.bind(netip.MustParseAddrPort(c.bind))
			if c.taken != errors.Is(err, unix.EADDRINUSE) || (err != nil) != c.taken {
				t.Errorf("bind: %v, taken %t", err, c.taken)
			}
			if got := f.count(pin.KernelSocketCountSOCKET_BIND) - before; (got == 1) != c.taken {
				t.Errorf("%d refusals were counted, taken %t", got, c.taken)
			}
			s.close()
		})
	}
}
