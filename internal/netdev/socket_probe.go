// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// CutUDP connects a UDP socket and cuts it.
func (p *ProbeNet) CutUDP() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open a socket: %w", err)
	}
	defer unix.Close(fd)
	peer := netip.MustParseAddrPort("127.0.0.1:9")
	if err := unix.Connect(fd, &unix.SockaddrInet4{Addr: peer.Addr().As4(), Port: int(peer.Port())}); err != nil {
		return fmt.Errorf("connect a socket: %w", err)
	}
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
	if err != nil {
		return fmt.Errorf("read a socket's number: %w", err)
	}
	n, err := Open()
	if err != nil {
		return err
	}
	defer n.Close()
	cut, err := n.CutUDP(nil, []UDPSocket{{Cookie: cookie, Peer: peer}})
	if err == nil && cut != 1 {
		err = errors.New("the socket was not found")
	}
	return err
}
