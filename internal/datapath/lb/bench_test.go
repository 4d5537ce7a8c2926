// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"os/exec"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weft-mesh/weft/internal/datapath/pin"
)

// fill makes n more services of two backends.
func (f *fixture) fill(n int) {
	f.Helper()
	for i := range n {
		var ip [4]byte
		binary.BigEndian.PutUint32(ip[:], 10<<24|100<<16|uint32(i))
		front := netip.AddrPortFrom(netip.AddrFrom4(ip), 80).String()
		f.service(udp, front, fmt.Sprintf("10.244.%d.%d:8080", i>>8&255, i&255), fmt.Sprintf("10.245.%d.%d:8080", i>>8&255, i&255))
	}
}

// connects opens, connects and closes UDP sockets: what connect costs, and no
// handshake.
func (f *fixture) connects(b *testing.B, to netip.AddrPort) {
	f.must(f.pod.Do(func() error {
		sa := unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())}
		for b.Loop() {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			if err := unix.Connect(fd, &sa); err != nil {
				return err
			}
			unix.Close(fd)
		}
		return nil
	}))
}

// everywhere is connects to one service after the other: none is in the CPU's
// caches when its turn comes.
func (f *fixture) everywhere(b *testing.B, services int) {
	f.must(f.pod.Do(func() error {
		if out, err := exec.Command("ip", "route", "replace", "local", "10.244.0.0/15", "dev", "lo").CombinedOutput(); err != nil {
			return fmt.Errorf("ip route: %w: %s", err, out)
		}
		sa := unix.SockaddrInet4{Port: 80}
		for i := 0; b.Loop(); i++ {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			const stride = 7919 // prime
			binary.BigEndian.PutUint32(sa.Addr[:], 10<<24|100<<16|uint32(i*stride%services))
			if err := unix.Connect(fd, &sa); err != nil {
				return err
			}
			unix.Close(fd)
		}
		return nil
	}))
}

// handshakes opens, connects and closes TCP connections over loopback, with a
// reset at the end: ports do not run out.
func (f *fixture) handshakes(b *testing.B, to netip.AddrPort) {
	f.must(f.pod.Do(func() error {
		sa := unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())}
		for b.Loop() {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			if err := unix.Connect(fd, &sa); err != nil {
				return err
			}
			if err := unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}); err != nil {
				return err
			}
			unix.Close(fd)
		}
		return nil
	}))
}

// BenchmarkConnect: a socket, connect to a service, close; beside connect to an
// address that is no service, and without weft.
func BenchmarkConnect(b *testing.B) {
	direct := netip.MustParseAddrPort("127.0.1.1:53")
	for _, n := range []int{10, 1000, 10000, 50000} {
		b.Run(fmt.Sprintf("services=%d", n), func(b *testing.B) {
			f := newFixture(b, pin.Sizes{})
			f.fill(n - 2)
			stream := f.service(tcp, "10.96.0.10:53", direct.String())
			dgram := f.service(udp, "10.96.0.10:53", direct.String())
			f.listen(direct)
			b.Run("UDP", func(b *testing.B) { f.TB = b; f.connects(b, dgram.front) })
			b.Run("UDP-everywhere", func(b *testing.B) { f.TB = b; f.everywhere(b, n-2) })
			b.Run("UDP-direct", func(b *testing.B) { f.TB = b; f.connects(b, direct) })
			b.Run("TCP", func(b *testing.B) { f.TB = b; f.handshakes(b, stream.front) })
			b.Run("TCP-direct", func(b *testing.B) { f.TB = b; f.handshakes(b, direct) })
		})
	}
	b.Run("without", func(b *testing.B) {
		f := newFixture(b, pin.Sizes{})
		f.must(Detach(f.maps))
		f.listen(direct)
		b.Run("UDP", func(b *testing.B) { f.TB = b; f.connects(b, direct) })
		b.Run("TCP", func(b *testing.B) { f.TB = b; f.handshakes(b, direct) })
	})
}

// listen accepts and closes.
func (f *fixture) listen(a netip.AddrPort) {
	f.Helper()
	f.must(f.pod.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		f.Cleanup(func() { unix.Close(fd) })
		if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: a.Addr().As4(), Port: int(a.Port())}); err != nil {
			return err
		}
		if err := unix.Listen(fd, 1024); err != nil {
			return err
		}
		go func() {
			for {
				c, _, err := unix.Accept(fd)
				if err != nil {
					return
				}
				unix.Close(c)
			}
		}()
		return nil
	}))
}
