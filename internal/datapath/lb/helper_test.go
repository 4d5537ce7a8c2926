// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weft-mesh/weft/internal/addr"
	"github.com/weft-mesh/weft/internal/datapath/packettest/bpffs"
	"github.com/weft-mesh/weft/internal/datapath/packettest/cgroup"
	"github.com/weft-mesh/weft/internal/datapath/pin"
	"github.com/weft-mesh/weft/internal/datapath/setting"
	"github.com/weft-mesh/weft/internal/netdev/nstest"
)

const (
	tcp = unix.IPPROTO_TCP
	udp = unix.IPPROTO_UDP
)

var (
	nodeV4 = netip.MustParseAddr("172.30.0.1")
	nodeV6 = netip.MustParseAddr("fd00:172:30::1")
)

// fixture is a node and a pod: two network namespaces and a cgroup that this
// process is in. Backends are servers in the pod's namespace.
type fixture struct {
	testing.TB
	dir       string // of the pins
	cgroup    string
	node, pod *nstest.NS
	maps      *pin.Maps
	numbers   uint32 // the last one that was given
}

func newFixture(t testing.TB, sizes pin.Sizes) *fixture {
	t.Helper()
	f := &fixture{TB: t, dir: filepath.Join(bpffs.New(t), "weft"), node: nstest.New(t), pod: nstest.New(t)}
	f.setUp(f.node, nodeV4.String()+"/24", nodeV6.String()+"/64")
	f.setUp(f.pod, "fd00::1/128", "fd00::2/128", "fd00::3/128")
	f.cgroup = cgroup.Enter(t)
	f.maps = f.open(sizes)
	f.attach()
	return f
}

func (f *fixture) setUp(ns *nstest.NS, addrs ...string) {
	f.Helper()
	commands := [][]string{{"link", "set", "lo", "up"}}
	for _, a := range addrs {
		c := []string{"addr", "add", a, "dev", "lo"}
		if netip.MustParsePrefix(a).Addr().Is6() {
			c = append(c, "nodad")
		}
		commands = append(commands, c)
	}
	f.must(ns.Do(func() error {
		for _, c := range commands {
			if out, err := exec.Command("ip", c...).CombinedOutput(); err != nil {
				return fmt.Errorf("ip %v: %w: %s", c, err, out)
			}
		}
		return nil
	}))
}

func (f *fixture) must(err error) {
	f.Helper()
	if err != nil {
		f.Fatal(err)
	}
}

func (f *fixture) open(sizes pin.Sizes) *pin.Maps {
	f.Helper()
	m, err := pin.Open(f.dir, sizes)
	f.must(err)
	f.Cleanup(func() { m.Close() })
	return m
}

// attach does what an agent does when it starts.
func (f *fixture) attach() {
	f.Helper()
	f.must(f.node.Do(func() error {
		d, err := Load(f.maps, setting.Node{IPv4: nodeV4, IPv6: nodeV6})
		if err != nil {
			return err
		}
		defer d.Close()
		return d.Attach(f.cgroup)
	}))
}

func (f *fixture) number() uint32 { f.numbers++; return f.numbers }

// service is one frontend as the maps have it.
type service struct {
	f     *fixture
	front netip.AddrPort
	key   pin.KernelServiceKey
	value pin.KernelService
	ids   map[netip.AddrPort]uint32 // of backends
	proto uint8
}

func (f *fixture) service(proto uint8, front string, backends ...string) *service {
	f.Helper()
	s := &service{f: f, front: netip.MustParseAddrPort(front), proto: proto, ids: map[netip.AddrPort]uint32{}}
	s.key = pin.KernelServiceKey{Addr: kernelAddr(s.front.Addr()), Port: htons(s.front.Port()), Protocol: proto}
	s.value.Id, s.value.Near.Id = f.number(), f.number()
	for _, b := range backends {
		s.add(netip.MustParseAddrPort(b))
	}
	return s.put()
}

func (s *service) put() *service {
	s.f.Helper()
	s.f.must(s.f.maps.Map("weft_services").Put(s.key, s.value))
	return s
}

func (s *service) add(b netip.AddrPort) {
	s.f.Helper()
	id := s.f.number()
	s.ids[b] = id
	s.f.must(s.f.maps.Map("weft_backends").Put(id, pin.KernelBackend{Addr: kernelAddr(b.Addr()), Port: htons(b.Port()), Protocol: s.proto}))
	s.slot(s.value.Near.Count, id)
	s.f.must(s.f.maps.Map("weft_members").Put(pin.KernelMemberKey{Set: s.value.Near.Id, Backend: id}, uint8(1)))
	s.value.Near.Count++
}

func (s *service) slot(i, backend uint32) {
	s.f.Helper()
	s.f.must(s.f.maps.Map("weft_slots").Put(pin.KernelSlotKey{Set: s.value.Near.Id, Slot: i}, backend))
}

// only lets new connections go to one backend; the others stay where they are
// in use.
func (s *service) only(b netip.AddrPort) {
	s.f.Helper()
	for i := range s.value.Near.Count {
		s.slot(i, s.ids[b])
	}
}

// remove deletes a backend of two.
func (s *service) remove(b, other netip.AddrPort) {
	s.f.Helper()
	s.only(other)
	s.f.must(s.f.maps.Map("weft_members").Delete(pin.KernelMemberKey{Set: s.value.Near.Id, Backend: s.ids[b]}))
	s.f.must(s.f.maps.Map("weft_backends").Delete(s.ids[b]))
}

func kernelAddr(a netip.Addr) pin.KernelAddr { return pin.KernelAddr{B: addr.To16(a)} }

// htons returns the port as a program reads it from a packet.
func htons(port uint16) uint16 {
	var b [2]byte
	binary.BigEndian.PutUint16(b[:], port)
	return binary.NativeEndian.Uint16(b[:])
}

// count reads one of weft_socket_counts.
func (f *fixture) count(what pin.KernelSocketCount) (n uint64) {
	f.Helper()
	var cpus []uint64
	f.must(f.maps.Map("weft_socket_counts").Lookup(uint32(what), &cpus))
	for _, c := range cpus {
		n += c
	}
	return n
}

// tracked returns weft_service_sockets.
func (f *fixture) tracked() map[uint64]pin.KernelServiceSocket {
	f.Helper()
	out := map[uint64]pin.KernelServiceSocket{}
	var k uint64
	var v pin.KernelServiceSocket
	it := f.maps.Map("weft_service_sockets").Iterate()
	for it.Next(&k, &v) {
		out[k] = v
	}
	f.must(it.Err())
	return out
}

// serve answers in the pod, over TCP and UDP, with the address that was asked.
func (f *fixture) serve(addrs ...string) {
	f.Helper()
	for _, a := range addrs {
		f.must(f.pod.Do(func() error {
			l, err := net.Listen("tcp", a)
			if err != nil {
				return err
			}
			f.Cleanup(func() { l.Close() })
			go func() {
				for {
					c, err := l.Accept()
					if err != nil {
						return
					}
					_, _ = c.Write([]byte(a))
					c.Close()
				}
			}()
			u, err := net.ListenPacket("udp", a)
			if err != nil {
				return err
			}
			f.Cleanup(func() { u.Close() })
			go func() {
				buf := make([]byte, 64)
				for {
					_, from, err := u.ReadFrom(buf)
					if err != nil {
						return
					}
					_, _ = u.WriteTo([]byte(a), from)
				}
			}()
			return nil
		}))
	}
}

// socket is a plain one, so that a test decides on every system call.
type socket struct {
	f     *fixture
	fd    int
	v6    bool
	proto int
}

// open opens a socket in a namespace; it is closed with the test.
func (f *fixture) socket(ns *nstest.NS, v6 bool, proto int) *socket {
	f.Helper()
	s := &socket{f: f, v6: v6, proto: proto}
	f.must(ns.Do(func() (err error) {
		family, kind := unix.AF_INET, unix.SOCK_STREAM
		if v6 {
			family = unix.AF_INET6
		}
		if proto == udp {
			kind = unix.SOCK_DGRAM
		}
		s.fd, err = unix.Socket(family, kind|unix.SOCK_CLOEXEC, proto)
		return err
	}))
	wait := unix.NsecToTimeval(int64(5 * time.Second))
	f.must(unix.SetsockoptTimeval(s.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait))
	f.Cleanup(s.close)
	return s
}

func (s *socket) close() {
	if s.fd >= 0 {
		unix.Close(s.fd)
	}
	s.fd = -1
}

func (s *socket) sockaddr(a netip.AddrPort) unix.Sockaddr {
	if s.v6 {
		return &unix.SockaddrInet6{Addr: a.Addr().As16(), Port: int(a.Port())}
	}
	return &unix.SockaddrInet4{Addr: a.Addr().As4(), Port: int(a.Port())}
}

func addrPort(sa unix.Sockaddr) netip.AddrPort {
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(sa.Addr).Unmap(), uint16(sa.Port))
	}
	return netip.AddrPort{}
}

func (s *socket) connect(a netip.AddrPort) error { return unix.Connect(s.fd, s.sockaddr(a)) }

func (s *socket) mustConnect(a netip.AddrPort) {
	s.f.Helper()
	if err := s.connect(a); err != nil {
		s.f.Fatalf("connect to %s: %v", a, err)
	}
}

// disconnect is connect to an address of no family.
func (s *socket) disconnect() {
	s.f.Helper()
	var none unix.RawSockaddr
	_, _, err := unix.Syscall(unix.SYS_CONNECT, uintptr(s.fd), uintptr(ptr(&none)), unix.SizeofSockaddrInet4)
	if err != 0 {
		s.f.Fatalf("disconnect: %v", err)
	}
}

func (s *socket) bind(a netip.AddrPort) error { return unix.Bind(s.fd, s.sockaddr(a)) }

func (s *socket) peer() netip.AddrPort {
	s.f.Helper()
	sa, err := unix.Getpeername(s.fd)
	if err != nil {
		s.f.Fatalf("getpeername: %v", err)
	}
	return addrPort(sa)
}

func (s *socket) cookie() uint64 {
	s.f.Helper()
	c, err := unix.GetsockoptUint64(s.fd, unix.SOL_SOCKET, unix.SO_COOKIE)
	s.f.must(err)
	return c
}

func (s *socket) sendTo(a netip.AddrPort) error {
	return unix.Sendto(s.fd, []byte("?"), 0, s.sockaddr(a))
}

func (s *socket) send() error {
	_, err := unix.Write(s.fd, []byte("?"))
	return err
}

// outside calls open while this process is in the cgroup that it came from.
func (f *fixture) outside(open func() *socket) (s *socket) {
	f.Helper()
	f.must(cgroup.Within(filepath.Dir(f.cgroup), f.cgroup, func() { s = open() }))
	return s
}

// receive returns what a server said, and who it was as far as can be seen.
func (s *socket) receive() (string, netip.AddrPort, error) {
	buf := make([]byte, 64)
	for {
		n, sa, err := unix.Recvfrom(s.fd, buf, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return "", netip.AddrPort{}, err
		}
		return string(buf[:n]), addrPort(sa), nil
	}
}

// ask sends one datagram to a and returns the server that answered; the answer
// must seem to come from a.
func (s *socket) ask(a netip.AddrPort) string {
	s.f.Helper()
	if err := s.sendTo(a); err != nil {
		s.f.Fatalf("send to %s: %v", a, err)
	}
	return s.answer(a)
}

// answer is the one that must seem to come from a.
func (s *socket) answer(a netip.AddrPort) string {
	s.f.Helper()
	said, from, err := s.receive()
	if err != nil {
		s.f.Fatalf("receive from %s: %v", a, err)
	}
	if from != a {
		s.f.Errorf("the answer of %s came from %s, want %s", said, from, a)
	}
	return said
}

// dial connects in the pod and returns the server that answered.
func (f *fixture) dial(v6 bool, a netip.AddrPort) string {
	f.Helper()
	s := f.socket(f.pod, v6, tcp)
	defer s.close()
	s.mustConnect(a)
	said, _, err := s.receive()
	if err != nil {
		f.Fatalf("read from %s: %v", a, err)
	}
	return said
}
