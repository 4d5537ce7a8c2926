// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"fmt"
	"maps"
	"net/netip"
	"testing"

	"github.com/weft-mesh/weft/internal/datapath/pin"
)

var (
	one = netip.MustParseAddrPort("127.0.1.1:53")
	two = netip.MustParseAddrPort("127.0.1.2:53")
)

// families are the ways to a service over UDP.
var families = []struct {
	name            string
	v6              bool
	front, server   string
	front2, server2 string
}{
	{"IPv4", false, "10.96.0.10:53", "127.0.1.1:53", "10.96.0.11:53", "127.0.1.2:53"},
	{"IPv6", true, "[fd00:96::10]:53", "[fd00::1]:53", "[fd00:96::11]:53", "[fd00::2]:53"},
	{"IPv4 from an IPv6 socket", true, "10.96.0.20:53", "127.0.1.1:53", "10.96.0.21:53", "127.0.1.2:53"},
}

func TestConnectedUDP(t *testing.T) {
	f := newFixture(t, pin.Sizes{})
	f.serve("127.0.1.1:53", "127.0.1.2:53", "[fd00::1]:53", "[fd00::2]:53")
	for _, c := range families {
		t.Run(c.name, func(t *testing.T) {
			f.TB = t
			svc := f.service(udp, c.front, c.server)
			s := f.socket(f.pod, c.v6, udp)
			s.mustConnect(svc.front)
			if got := s.peer(); got != svc.front {
				t.Errorf("peer %s, want %s", got, svc.front)
			}
			f.must(s.send())
			if said := s.answer(svc.front); said != c.server {
				t.Errorf("server %s, want %s", said, c.server)
			}
			// an explicit address leads to where the connected socket hears from
			if said := s.ask(svc.front); said != c.server {
				t.Errorf("server %s, want %s", said, c.server)
			}
			want := map[uint64]pin.KernelServiceSocket{s.cookie(): {
				Service: svc.value.Id, Backend: svc.ids[netip.MustParseAddrPort(c.server)]}}
			if got := f.tracked(); !maps.Equal(got, want) {
				t.Errorf("tracked %v, want %v", got, want)
			}
		})
	}
}

// TestReconnect: another connect replaces what the socket was connected to, and
// so does one to no service.
func TestReconnect(t *testing.T) {
	f := newFixture(t, pin.Sizes{})
	f.serve("127.0.1.1:53", "127.0.1.2:53")
	a, b := f.service(udp, "10.96.0.10:53", "127.0.1.1:53"), f.service(udp, "10.96.0.11:53", "127.0.1.2:53")
	empty := f.service(udp, "10.96.0.12:53")
	s := f.socket(f.pod, false, udp)
	backend := func() uint32 { return f.tracked()[s.cookie()].Backend }
	s.mustConnect(a.front)
	if got := backend(); got != a.ids[one] {
		t.Errorf("backend %d, want %d", got, a.ids[one])
	}
	s.mustConnect(b.front)
	if got := backend(); got != b.ids[two] || s.peer() != b.front {
		t.Errorf("backend %d, peer %s, want %d, %s", got, s.peer(), b.ids[two], b.front)
	}
	if err := s.connect(empty.front); err == nil {
		t.Error("connected to a service without backends")
	}
	if got := backend(); got != b.ids[two] || s.peer() != b.front {
		t.Errorf("after a refusal: backend %d, peer %s, want %d, %s", got, s.peer(), b.ids[two], b.front)
	}
	s.disconnect()
	s.mustConnect(one)
	if n := f.tracked(); len(n) != 0 || s.peer() != one {
		t.Errorf("tracked %v, peer %s, want none, %s", n, s.peer(), one)
	}
	f.must(s.send())
	if said := s.answer(one); said != one.String() {
		t.Errorf("server %s, want %s", said, one)
	}
}

// TestReleased: what is known of a socket goes with its last descriptor.
func TestReleased(t *testing.T) {
	f := newFixture(t, pin.Sizes{})
	svc := f.service(udp, "10.96.0.10:53", "127.0.1.1:53")
	for range 3 {
		f.socket(f.pod, false, udp).mustConnect(svc.front)
	}
	s := f.socket(f.pod, true, udp)
	s.mustConnect(svc.front)
	if n := len(f.tracked()); n != 4 {
		t.Fatalf("%d sockets tracked, want 4", n)
	}
	cookie := s.cookie()
	s.close()
	if n := f.tracked(); len(n) != 3 || n[cookie] != (pin.KernelServiceSocket{}) {
		t.Errorf("tracked %v, want 3, without %d", n, cookie)
	}
}

// TestUntracked: where there is no room to note a socket, it works nevertheless.
func TestUntracked(t *testing.T) {
	f := newFixture(t, pin.Sizes{ServiceSockets: 1})
	f.serve("127.0.1.1:53")
	svc := f.service(udp, "10.96.0.10:53", "127.0.1.1:53")
	for range 3 {
		s := f.socket(f.pod, false, udp)
		s.mustConnect(svc.front)
		f.must(s.send())
		s.answer(svc.front)
	}
	if n := f.count(pin.KernelSocketCountSOCKET_UNTRACKED); n != 2 {
		t.Errorf("%d counted, want 2", n)
	}
}

func TestUnconnectedUDP(t *testing.T) {
	f := newFixture(t, pin.Sizes{})
	f.serve("127.0.1.1:53", "127.0.1.2:53", "[fd00::1]:53", "[fd00::2]:53")
	for _, c := range families {
		t.Run(c.name, func(t *testing.T) {
			f.TB = t
			a, b := f.service(udp, c.front, c.server), f.service(udp, c.front2, c.server2)
			s := f.socket(f.pod, c.v6, udp)
			// both are asked before either is heard
			f.must(s.sendTo(a.front))
			f.must(s.sendTo(b.front))
			got := map[netip.AddrPort]string{}
			for range 2 {
				said, from, err := s.receive()
				f.must(err)
				got[from] = said
			}
			want := map[netip.AddrPort]string{a.front: c.server, b.front: c.server2}
			if !maps.Equal(got, want) {
				t.Errorf("heard %v, want %v", got, want)
			}
			direct := netip.MustParseAddrPort(c.server)
			if said := s.ask(a.front); said != c.server {
				t.Errorf("server %s, want %s", said, c.server)
			}
			other := f.socket(f.pod, c.v6, udp)
			if said := other.ask(direct); said != c.server {
				t.Errorf("without a service: server %s, want %s", said, c.server)
			}
		})
	}
}

// TestSharedBackend: the answer seems to come from the service that was asked
// last.
func TestSharedBackend(t *testing.T) {
	f := newFixture(t, pin.Sizes{})
	f.serve("127.0.1.1:53")
	a, b := f.service(udp, "10.96.0.10:53", "127.0.1.1:53"), f.service(udp, "10.96.0.11:53", "127.0.1.1:53")
	s := f.socket(f.pod, false, udp)
	for range 2 {
		s.ask(a.front)
		s.ask(b.front)
	}
}

// TestUDPKeepsItsBackend, until that is gone.
func TestUDPKeepsItsBackend(t *testing.T) {
	f := newFixture(t, pin.Sizes{})
	f.serve("127.0.1.1:53", "127.0.1.2:53")
	svc := f.service(udp, "10.96.0.10:53", "127.0.1.1:53", "127.0.1.2:53")
	sender, connected := f.socket(f.pod, false, udp), f.socket(f.pod, false, udp)
	svc.only(one)
	connected.mustConnect(svc.front)
	sender.ask(svc.front)
	svc.only(two)
	for range 20 {
		if said := sender.ask(svc.front); said != one.String() {
			t.Fatalf("server %s, want %s", said, one)
		}
		connected.mustConnect(svc.front)
		if said := connected.ask(svc.front); said != one.String() {
			t.Fatalf("connected: server %s, want %s", said, one)
		}
	}
	if said := f.socket(f.pod, false, udp).ask(svc.front); said != two.String() {
		t.Errorf("a new socket: server %s, want %s", said, two)
	}
	svc.remove(one, two)
	if said := sender.ask(svc.front); said != two.String() {
		t.Errorf("after its backend has gone: server %s, want %s", said, two)
	}
	connected.mustConnect(svc.front)
	if said := connected.ask(svc.front); said != two.String() {
		t.Errorf("connected, after its backend has gone: server %s, want %s", said, two)
	}
}

// TestManyServices: a socket remembers the eight that it talked to last.
func TestManyServices(t *testing.T) {
	f := newFixture(t, pin.Sizes{})
	f.serve("127.0.1.1:53", "127.0.1.2:53")
	var all []*service
	for i := range 9 {
		svc := f.service(udp, fmt.Sprintf("10.96.1.%d:53", i+1), "127.0.1.1:53", "127.0.1.2:53")
		svc.only(one)
		all = append(all, svc)
	}
	s := f.socket(f.pod, false, udp)
	for _, svc := range all[:8] {
		s.ask(svc.front)
	}
	s.ask(all[0].front) // now all[1] is what was used least recently
	s.ask(all[8].front)
	for i, svc := range all {
		svc.only(two)
		if i == 1 {
			continue
		}
		if said := s.ask(svc.front); said != one.String() {
			t.Errorf("service %d: server %s, want %s", i, said, one)
		}
	}
	if said := s.ask(all[1].front); said != two.String() {
		t.Errorf("the forgotten service: server %s, want %s", said, two)
	}
}
