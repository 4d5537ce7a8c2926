// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"errors"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weft-mesh/weft/internal/datapath/pin"
	"github.com/weft-mesh/weft/internal/netdev"
)

// TestCut: clients of a backend that has gone are told so and find another;
// nobody else notices.
func TestCut(t *testing.T) {
	f := newFixture(t, pin.Sizes{})
	f.serve("127.0.1.1:53", "127.0.1.2:53")
	svc := f.service(udp, "10.96.0.10:53", "127.0.1.1:53", "127.0.1.2:53")
	open := func(v6 bool, to netip.AddrPort) *socket {
		s := f.socket(f.pod, v6, udp)
		s.mustConnect(to)
		return s
	}
	svc.only(one)
	lost := []*socket{open(false, svc.front), open(true, svc.front)}
	moved := open(false, svc.front)
	moved.disconnect() // which no program sees
	moved.mustConnect(two)
	away := open(false, svc.front)
	away.disconnect()
	direct := open(false, one)
	svc.only(two)
	stays := open(true, svc.front)
	svc.remove(one, two)

	f.cut(svc.ids[one], one, len(lost))
	for _, s := range lost {
		if _, _, err := s.receive(); !errors.Is(err, unix.ECONNABORTED) {
			t.Errorf("receive on a socket that was cut: %v, want ECONNABORTED", err)
		}
		if err := s.send(); !errors.Is(err, unix.EDESTADDRREQ) {
			t.Errorf("send on a socket that was cut: %v, want EDESTADDRREQ", err)
		}
		s.mustConnect(svc.front)
		if said := s.ask(svc.front); said != two.String() {
			t.Errorf("after it connected again: server %s, want %s", said, two)
		}
	}
	for s, peer := range map[*socket]netip.AddrPort{moved: two, direct: one, stays: svc.front} {
		f.must(s.send())
		s.answer(peer)
	}
	if said := away.ask(svc.front); said != two.String() {
		t.Errorf("the disconnected socket: server %s, want %s", said, two)
	}
}

// cut does what an agent does when a backend has gone.
func (f *fixture) cut(backend uint32, peer netip.AddrPort, want int) {
	f.Helper()
	var sockets []netdev.UDPSocket
	for cookie, s := range f.tracked() {
		if s.Backend == backend {
			sockets = append(sockets, netdev.UDPSocket{Cookie: cookie, Peer: peer})
		}
	}
	f.must(f.node.Do(func() error {
		n, err := netdev.Open()
		if err != nil {
			return err
		}
		defer n.Close()
		cut, err := n.CutUDP([]string{f.pod.Path()}, sockets)
		if cut != want {
			f.Errorf("%d sockets were cut, want %d", cut, want)
		}
		return err
	}))
}
