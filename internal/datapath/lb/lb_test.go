// SPDX-License-Identifier: Apache-2.0

package lb

import (
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
