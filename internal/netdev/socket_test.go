// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weft-mesh/weft/internal/netdev/nstest"
)

// udpSocket connects a socket in a namespace, from the local port unless that
// is 0. An IPv6 socket may connect to an IPv4 address.
func udpSocket(t *testing.T, ns *nstest.NS, v6 bool, local int, peer netip.AddrPort) (fd int) {
	t.Helper()
	must(t, ns.Do(func() (err error) {
		family := unix.AF_INET
		var from, to unix.Sockaddr
		if v6 {
			family = unix.AF_INET6
			from, to = &unix.SockaddrInet6{Port: local}, &unix.SockaddrInet6{Addr: peer.Addr().As16(), Port: int(peer.Port())}
		} else {
			from, to = &unix.SockaddrInet4{Port: local}, &unix.SockaddrInet4{Addr: peer.Addr().As4(), Port: int(peer.Port())}
		}
		if fd, err = unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0); err != nil {
			return err
		}
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1); err != nil {
			return err
		}
		return errors.Join(unix.Bind(fd, from), unix.Connect(fd, to))
	}))
	t.Cleanup(func() { unix.Close(fd) })
	return fd
}

func cookie(t *testing.T, fd int) uint64 {
	t.Helper()
	c, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
	must(t, err)
	return c
}

// state is what a reader learns: that it has to wait, or that it was cut.
func state(fd int) string {
	_, _, err := unix.Recvfrom(fd, make([]byte, 1), 0)
	switch {
	case errors.Is(err, unix.EAGAIN):
		return "waits"
	case errors.Is(err, unix.ECONNABORTED):
		return "cut"
	}
	return "other: " + err.Error()
}

func TestCutUDP(t *testing.T) {
	n, own := node(t)
	pods := []*nstest.NS{nstest.New(t), nstest.New(t)}
	for _, ns := range append(pods, own) {
		ns.LoopbackUp(t, netip.MustParseAddr("10.0.0.1"))
	}
	v4, v6 := netip.MustParseAddrPort("10.0.0.1:53"), netip.MustParseAddrPort("[::1]:53")
	other := netip.MustParseAddrPort("10.0.0.1:54")
	var want []UDPSocket
	var sockets []struct {
		name, state string
		fd          int
	}
	add := func(name string, ns *nstest.NS, six bool, local int, peer, wanted netip.AddrPort) {
		fd := udpSocket(t, ns, six, local, peer)
		after := "waits"
		if wanted.IsValid() {
			want = append(want, UDPSocket{Cookie: cookie(t, fd), Peer: wanted})
			if wanted == peer {
				after = "cut"
			}
		}
		sockets = append(sockets, struct {
			name, state string
			fd          int
		}{name, after, fd})
	}
	none := netip.AddrPort{}
	add("IPv4", pods[0], false, 0, v4, v4)
	add("IPv4, not wanted", pods[0], false, 0, v4, none)
	add("IPv6", pods[1], true, 0, v6, v6)
	add("IPv4 by an IPv6 socket", pods[1], true, 0, v4, v4)
	add("connected to something else since", pods[0], false, 0, other, v4)
	add("of the node", own, false, 0, v4, v4)
	add("a twin", pods[0], false, 4000, v4, v4)
	add("the other twin", pods[0], false, 4000, v4, v4)
	add("a twin that stays", pods[1], false, 4000, v4, none)
	add("its twin", pods[1], false, 4000, v4, none)
	plain := filepath.Join(t.TempDir(), "plain")
	must(t, os.WriteFile(plain, nil, 0o600))
	paths := []string{"/nowhere", plain, pods[0].Path(), pods[1].Path()}
	for _, s := range sockets {
		if got := state(s.fd); got != "waits" {
			t.Fatalf("%s: %s", s.name, got)
		}
	}
	cut, err := n.CutUDP(paths, want)
	if err != nil || cut != 6 {
		t.Errorf("%d cut, %v; want 6", cut, err)
	}
	for _, s := range sockets {
		if got := state(s.fd); got != s.state {
			t.Errorf("%s: %s, want %s", s.name, got, s.state)
		}
	}
	if cut, err := n.CutUDP(paths, want); err != nil || cut != 0 {
		t.Errorf("again: %d cut, %v", cut, err)
	}
}
