// SPDX-License-Identifier: Apache-2.0

package xdp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/weft-mesh/weft/internal/addr"
	"github.com/weft-mesh/weft/internal/datapath/ipcache"
	"github.com/weft-mesh/weft/internal/datapath/node"
	pt "github.com/weft-mesh/weft/internal/datapath/packettest"
	"github.com/weft-mesh/weft/internal/datapath/packettest/bpffs"
	"github.com/weft-mesh/weft/internal/datapath/pin"
	"github.com/weft-mesh/weft/internal/datapath/setting"
	"github.com/weft-mesh/weft/internal/netdev"
	"github.com/weft-mesh/weft/internal/netdev/nstest"
)

// site is a node with XDP on its uplink and nothing else, a client outside and
// the backend's node, all on one link.
//
//	client ─┐
//	node ───┼─ bridge
//	other ──┘
type site struct {
	*fixture
	client, node, other, bridge *nstest.NS
	device                      Device
}

// clients outside, in place of pt's, which would need a router.
var clients = []netip.Addr{netip.MustParseAddr("172.30.0.254"), netip.MustParseAddr("fd00:172:30::fe")}

func ipIn(t testing.TB, ns *nstest.NS, lines ...string) {
	t.Helper()
	err := ns.Do(func() error {
		cmd := exec.Command("ip", "-batch", "-")
		cmd.Stdin = strings.NewReader(strings.Join(lines, "\n") + "\n")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
	if err != nil {
		t.Fatalf("ip: %v\n%s", err, strings.Join(lines, "\n"))
	}
}

// txChecksums is ETHTOOL_STXCSUM (include/uapi/linux/ethtool.h).
const txChecksums = 0x17

// offload turns an offload of a device on or off.
func offload(t testing.TB, ns *nstest.NS, device string, command, on uint32) {
	t.Helper()
	err := ns.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		value := [2]uint32{command, on}
		var req struct {
			name [unix.IFNAMSIZ]byte
			data unsafe.Pointer
			_    [16]byte
		}
		copy(req.name[:], device)
		req.data = unsafe.Pointer(&value)
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&req))); errno != 0 {
			return errno
		}
		return nil
	})
	if err != nil {
		t.Fatalf("offload %#x of %s: %v", command, device, err)
	}
}

func newLink(t testing.TB) *site {
	t.Helper()
	l := &site{client: nstest.New(t), node: nstest.New(t), other: nstest.New(t), bridge: nstest.New(t)}
	ipIn(t, l.bridge, "link add br0 type bridge mcast_snooping 0", "link set br0 up")
	v4, v6 := pt.Families[0], pt.Families[1]
	l.port(t, l.client, "client", clients[0], clients[1])
	l.port(t, l.node, "node", v4.Node, v6.Node)
	l.port(t, l.other, "other", v4.OtherNode, v6.OtherNode)
	ipIn(t, l.other, "link set lo up", fmt.Sprintf("addr add %s/32 dev lo", v4.RemotePod), fmt.Sprintf("addr add %s/128 dev lo nodad", v6.RemotePod))
	l.open(t)
	return l
}

// port connects a namespace. What it sends is complete: nothing is left to the
// device.
func (l *site) port(t testing.TB, ns *nstest.NS, name string, v4, v6 netip.Addr) {
	t.Helper()
	ipIn(t, ns, fmt.Sprintf("link add eth0 type veth peer name %s netns %s", name, l.bridge.Path()),
		fmt.Sprintf("addr add %s/24 dev eth0", v4), fmt.Sprintf("addr add %s/64 dev eth0 nodad", v6), "link set eth0 up")
	ipIn(t, l.bridge, "link set "+name+" master br0", "link set "+name+" up")
	offload(t, ns, "eth0", txChecksums, 0)
}

func (l *site) open(t testing.TB) {
	t.Helper()
	maps, err := pin.Open(bpffs.New(t)+"/node", pin.Sizes{Conntrack: 64, NAT: 64})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { maps.Close() })
	l.fixture = &fixture{TB: t, Node: &pt.Node{Maps: maps}}
	l.must(l.node.Do(func() error {
		dev, err := net.InterfaceByName("eth0")
		if err == nil {
			l.device = Device{Name: "eth0", Ifindex: dev.Index, MAC: dev.HardwareAddr, Kind: "veth"}
		}
		return err
	}))
	cache := ipcache.New(maps)
	for _, f := range pt.Families {
		bits := 24
		if f.V6 {
			bits = 64
		}
		for p, e := range map[netip.Prefix]ipcache.Entry{
			addr.Host(f.Node):                            {Identity: pt.IdentityNode, Flags: ipcache.LocalNode},
			addr.Host(f.OtherNode):                       {Identity: pt.IdentityRemoteNode, Flags: ipcache.RemoteNode, NextHop4: pt.Families[0].OtherNode, NextHop6: pt.Families[1].OtherNode},
			netip.PrefixFrom(f.RemotePod, bits).Masked(): {Identity: pt.IdentityRemotePods, Flags: ipcache.Pod, NextHop4: pt.Families[0].OtherNode, NextHop6: pt.Families[1].OtherNode},
		} {
			l.must(cache.Update(context.Background(), p, e))
		}
	}
	for i, f := range pt.Families {
		for j, protocol := range []uint8{pt.TCP, pt.UDP} {
			l.service(frontend{f.Node, nodePort, protocol, uint32(1 + 2*i + j), external, []netip.AddrPort{netip.AddrPortFrom(f.RemotePod, backendPort)}})
		}
	}
	l.Datapath = l.load(t)
}

func (l *site) load(t testing.TB) *Datapath {
	t.Helper()
	d, err := Load(l.Maps, l.settings(), l.device)
	l.must(err)
	t.Cleanup(func() { d.Close() })
	return d
}

func (l *site) settings() setting.Node {
	return setting.Node{
		UplinkIfindex: l.device.Ifindex, UplinkMTU: 1500, IPv4: pt.Families[0].Node, IPv6: pt.Families[1].Node,
		ServiceFirstPort: 20000, ServiceLastPort: 29999,
		Lifetimes: setting.Lifetimes{TCPSyn: time.Minute, TCPEstablished: time.Hour, TCPClosing: 10 * time.Second, UDP: time.Minute, UDPReplied: time.Minute, Other: time.Minute},
	}
}

// keep runs a Keeper until it knows the other node.
func (l *site) keep(t testing.TB) {
	t.Helper()
	var n *netdev.Net
	l.must(l.node.Do(func() (err error) { n, err = netdev.Open(); return err }))
	ctx, cancel := context.WithCancel(context.Background())
	k := NewKeeper(n, l.Maps, l.device.Ifindex, slog.New(slog.DiscardHandler))
	done := make(chan error, 1)
	go func() { done <- k.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("keeper: %v", err)
		}
		n.Close()
	})
	k.Want([]netip.Addr{pt.Families[0].OtherNode, pt.Families[1].OtherNode})
	eventually(t, "the other node's next hops", func() bool { return l.neighbors() == 2 })
}

func (l *site) neighbors() (n int) {
	var k pin.KernelAddr
	var v pin.KernelNeighbor
	rows := l.Maps.Map("weft_neighbors").Iterate()
	for rows.Next(&k, &v) {
		n++
	}
	l.must(rows.Err())
	return n
}

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within 20 s: %s", what)
		}
	}
}

// attach is in force until the end of t.
func (l *site) attach(t testing.TB, mode string) {
	t.Helper()
	var st Status
	l.must(l.node.Do(func() (err error) { st, err = l.Attach(mode); return err }))
	t.Cleanup(func() { l.must(l.Maps.DetachXDP("eth0")) })
	if st.Mode != mode || st.Reason != "" {
		t.Fatalf("status %+v, want %s", st, mode)
	}
	if mode == Native {
		l.accept(t)
	}
}

// accept has the other end of the uplink take what XDP sends.
func (l *site) accept(t testing.TB) {
	t.Helper()
	l.must(l.bridge.Do(func() error {
		dev, err := net.InterfaceByName("node")
		if err != nil {
			return err
		}
		a, err := Accept(dev.Index)
		if err == nil {
			t.Cleanup(func() { a.Close() })
		}
		return err
	}))
}

// echo answers on the backend's address and tells who asked.
func (l *site) echo(t testing.TB, network string, f pt.Family) <-chan netip.AddrPort {
	t.Helper()
	asked := make(chan netip.AddrPort, 64)
	at := netip.AddrPortFrom(f.RemotePod, backendPort)
	l.must(l.other.Do(func() error {
		if network == "udp" {
			c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
			if err != nil {
				return err
			}
			t.Cleanup(func() { c.Close() })
			go func() {
				b := make([]byte, 2000)
				for {
					n, from, err := c.ReadFromUDPAddrPort(b)
					if err != nil {
						return
					}
					asked <- from
					if _, err := c.WriteToUDPAddrPort(b[:n], from); err != nil {
						return
					}
				}
			}()
			return nil
		}
		lis, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(at))
		if err != nil {
			return err
		}
		t.Cleanup(func() { lis.Close() })
		go func() {
			for {
				c, err := lis.AcceptTCP()
				if err != nil {
					return
				}
				asked <- c.RemoteAddr().(*net.TCPAddr).AddrPort()
				go func() {
					defer c.Close()
					_, _ = io.Copy(c, c)
				}()
			}
		}()
		return nil
	}))
	return asked
}

func (l *site) dial(network string, f pt.Family) (c net.Conn, err error) {
	err = l.client.Do(func() error {
		d := net.Dialer{Timeout: 10 * time.Second}
		c, err = d.Dial(network, netip.AddrPortFrom(f.Node, nodePort).String())
		return err
	})
	return c, err
}

// exchange sends b and reads it back.
func exchange(c net.Conn, b []byte) error {
	if err := c.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		return err
	}
	sent := make(chan error, 1)
	go func() {
		_, err := c.Write(b)
		sent <- err
	}()
	got := make([]byte, len(b))
	_, err := io.ReadFull(c, got)
	if err == nil && !bytes.Equal(b, got) {
		err = errors.New("what came back is not what was sent")
	}
	return errors.Join(err, <-sent)
}

// TestWire: real sockets check the checksums, and there is no tcx program that
// could do XDP's work.
func TestWire(t *testing.T) {
	l := newLink(t)
	l.keep(t)
	for _, mode := range []string{Generic, Native} {
		t.Run(mode, func(t *testing.T) {
			l.attach(t, mode)
			for _, f := range pt.Families {
				t.Run(f.Name, func(t *testing.T) {
					t.Run("TCP", func(t *testing.T) { l.converse(t, "tcp", f, 1<<20) })
					t.Run("UDP", func(t *testing.T) { l.converse(t, "udp", f, 1400) })
				})
			}
		})
	}
}

// converse exchanges data by way of the node port. One packet in 65,536 looks to
// XDP as if its checksum were not complete; there is no tcx here to take it, so
// a conversation that meets one is held again.
func (l *site) converse(t *testing.T, network string, f pt.Family, size int) {
	asked := l.echo(t, network, f)
	before := l.counters()["service"].Packets
	var err error
	for range 3 {
		if err = l.exchangeAll(network, f, size); err == nil {
			break
		}
		t.Logf("once more: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	from := <-asked
	if from.Addr().Unmap() != f.Node || from.Port() < 20000 || from.Port() > 29999 {
		t.Errorf("the backend was asked by %s, want the node", from)
	}
	if n := l.counters()["service"].Packets - before; n < 6 {
		t.Errorf("XDP sent %d packets on, want all", n)
	}
}

func (l *site) exchangeAll(network string, f pt.Family, size int) error {
	c, err := l.dial(network, f)
	if err != nil {
		return err
	}
	defer c.Close()
	for _, b := range [][]byte{[]byte("x"), payload(size), []byte("an odd one.")} {
		if err := exchange(c, b); err != nil {
			return fmt.Errorf("%d bytes: %w", len(b), err)
		}
	}
	return nil
}

// TestLeftOnTheWire: what XDP leaves to tcx arrives there as if XDP were not
// there, behind either mode: here all is left, as every checksum is left to the
// device.
func TestLeftOnTheWire(t *testing.T) {
	l := newLink(t)
	l.keep(t)
	for _, ns := range []*nstest.NS{l.client, l.other} {
		offload(t, ns, "eth0", txChecksums, 1)
	}
	d, err := node.Load(l.Maps, l.settings())
	l.must(err)
	t.Cleanup(func() { d.Close() })
	l.must(l.node.Do(func() error { return d.Attach(node.Device{Name: "eth0", Ifindex: l.device.Ifindex}, nil) }))
	for _, mode := range []string{Generic, Native} {
		t.Run(mode, func(t *testing.T) {
			l.attach(t, mode)
			for _, f := range pt.Families {
				t.Run(f.Name, func(t *testing.T) {
					t.Run("TCP", func(t *testing.T) { l.converse(t, "tcp", f, 1<<20) })
					t.Run("UDP", func(t *testing.T) { l.converse(t, "udp", f, 1400) })
				})
			}
		})
	}
}

// TestAttach: modes, their change, and that a new agent does not leave a gap.
func TestAttach(t *testing.T) {
	l := newLink(t)
	for _, c := range []struct{ ask, mode, reason string }{
		{Auto, Generic, "native XDP slows a veth device down"},
		{Native, Native, ""},
		{Generic, Generic, ""},
		{Auto, Generic, "as it was before this agent"},
		{Off, Off, "by configuration"},
		{Off, Off, "by configuration"},
	} {
		var st Status
		l.must(l.node.Do(func() (err error) { st, err = l.load(t).Attach(c.ask); return err }))
		if st != (Status{c.mode, c.reason}) {
			t.Errorf("%s: %+v, want %s because %q", c.ask, st, c.mode, c.reason)
		}
		want := c.mode
		if want == Off {
			want = ""
		}
		if got, err := l.Maps.XDPModeOf("eth0"); err != nil || string(got) != want {
			t.Errorf("%s: in the kernel %q, %v, want %q", c.ask, got, err, want)
		}
	}
	if _, err := l.Attach("fast"); err == nil {
		t.Error("mode fast: no error")
	}
}

// TestAdopt: the program of a new agent takes the old one's place in the same
// link, and one on a device that is the uplink no more goes.
func TestAdopt(t *testing.T) {
	l := newLink(t)
	for _, mode := range []string{Native, Generic} {
		l.attach(t, mode)
		before := l.attachment(t)
		d := l.load(t)
		l.must(l.node.Do(func() error { _, err := d.Attach(mode); return err }))
		after := l.attachment(t)
		if before.LinkID != after.LinkID || before.ProgramID == after.ProgramID || after.Program != "from_wire" {
			t.Errorf("%s: before %+v, after %+v", mode, before, after)
		}
	}
	ipIn(t, l.node, "link add eth1 type veth peer name eth2")
	var dev *net.Interface
	l.must(l.node.Do(func() (err error) { dev, err = net.InterfaceByName("eth1"); return err }))
	l.device = Device{Name: "eth1", Ifindex: dev.Index, MAC: dev.HardwareAddr}
	d := l.load(t)
	l.must(l.node.Do(func() error { _, err := d.Attach(Generic); return err }))
	if a := l.attachment(t); a.Device != "eth1" {
		t.Errorf("attached: %+v, want eth1 alone", a)
	}
}

func (l *site) attachment(t *testing.T) pin.Attached {
	t.Helper()
	list, err := l.Maps.Attachments()
	l.must(err)
	if len(list) != 1 {
		t.Fatalf("attached: %+v, want one", list)
	}
	return list[0]
}
