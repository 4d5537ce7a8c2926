// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	pt "github.com/weft-mesh/weft/internal/datapath/packettest"
	"github.com/weft-mesh/weft/internal/netdev"
)

func TestNative(t *testing.T) { testCluster(t, false) }

func TestTunnel(t *testing.T) { testCluster(t, true) }

func testCluster(t *testing.T, tunnel bool) {
	c := newCluster(t, tunnel, false)
	for _, h := range []host{c.a, c.b, c.c, c.node1.host, c.node2.host} {
		h.serve(t)
	}
	c.world.serve(t, c.plain...)
	t.Run("reach", func(t *testing.T) { c.testReach(t) })
	t.Run("MTU", func(t *testing.T) { c.testMTU(t) })
	t.Run("neighbours", func(t *testing.T) { c.testNeighbours(t) })
	t.Run("restart", func(t *testing.T) { c.testRestart(t) })
	t.Run("no drops", func(t *testing.T) { c.checkNoDrops(t) })
	t.Run("TTL", func(t *testing.T) { c.testTTL(t) })
	t.Run("spoofing", func(t *testing.T) { c.testSpoofing(t) })
	t.Run("frames", func(t *testing.T) { c.testFrames(t) })
	if tunnel {
		t.Run("forged tunnel", func(t *testing.T) { c.testForged(t) })
	}
}

// way is one kind of connection, and the address that the server sees.
type way struct {
	name     string
	from     host
	to, seen []netip.Addr
}

func (c *cluster) ways() []way {
	n1, n2 := c.node1, c.node2
	ways := []way{
		{"pod to pod of the node", c.a, c.b.ips, c.a.ips},
		{"pod to itself", c.a, c.a.ips, c.a.ips},
		{"pod to pod of another node", c.a, c.c.ips, c.a.ips},
		{"and back", c.c, c.a.ips, c.c.ips},
		{"node to its pod", n1.host, c.a.ips, n1.ips},
		{"pod to its node", c.a, n1.ips, c.a.ips},
		{"node to node", n1.host, n2.ips, n1.ips},
		{"node to outside", n1.host, c.world.ips, n1.ips},
		{"pod to outside", c.a, c.world.ips, n1.ips},
		{"pod to outside, not masqueraded", c.a, c.plain, c.a.ips},
		{"outside to pod", c.world, c.a.ips, ips("198.51.100.7", "2001:db8::7")},
	}
	if c.tunnel {
		return append(ways, way{"node to pod of another node", n1.host, c.c.ips, n1.gateways}, way{"pod to another node", c.a, n2.ips, n1.ips})
	}
	return append(ways, way{"node to pod of another node", n1.host, c.c.ips, n1.ips}, way{"pod to another node", c.a, n2.ips, c.a.ips})
}

func (c *cluster) testReach(t *testing.T) {
	const large = 4 << 20
	for _, w := range c.ways() {
		for i, family := range []string{"IPv4", "IPv6"} {
			t.Run(w.name+", "+family, func(t *testing.T) {
				check := func(what string, seen netip.Addr, err error) {
					t.Helper()
					if err != nil {
						t.Errorf("%s: %v", what, err)
					} else if seen != w.seen[i] {
						t.Errorf("%s: the server saw %s, want %s", what, seen, w.seen[i])
					}
				}
				if out, err := w.from.ping(w.to[i]); err != nil {
					t.Errorf("ping: %v\n%s", err, out)
				}
				seen, err := w.from.udp(w.to[i], 20, 1)
				check("UDP", seen, err)
				seen, err = w.from.tcp(w.to[i], large)
				check("TCP", seen, err)
				seen, err = w.from.udp(w.to[i], 8000, 5)
				check("UDP in fragments", seen, err)
			})
		}
	}
}

// testMTU: the large transfers before taught the pod how wide the way is.
func (c *cluster) testMTU(t *testing.T) {
	for name, to := range map[string][]netip.Addr{"masqueraded": c.world.ips, "not masqueraded": c.plain} {
		for _, a := range to {
			if out := c.a.ip(t, "route get "+a.String()); !strings.Contains(out, fmt.Sprintf(" mtu %d", worldMTU)) {
				t.Errorf("%s: the pod has not learned the MTU of the way to %s: %s", name, a, out)
			}
		}
	}
}

// testNeighbours: the datapath answers for the gateway where the pod has
// forgotten what it was told.
func (c *cluster) testNeighbours(t *testing.T) {
	host, _ := netdev.MACs("a/eth0")
	for i, gateway := range c.node1.gateways {
		for range 2 {
			c.a.ip(t, fmt.Sprintf("neigh del %s dev eth0", gateway))
			if out, err := c.a.ping(c.world.ips[i]); err != nil {
				t.Errorf("ping: %v\n%s", err, out)
			}
			if out := c.a.ip(t, fmt.Sprintf("neigh show %s", gateway)); !strings.Contains(out, host.String()) {
				t.Errorf("neighbour %s: %q, want %s", gateway, out, host)
			}
		}
	}
}

// testRestart: agents come and go, with other map sizes each, while connections
// of every kind carry on; not one may end.
func (c *cluster) testRestart(t *testing.T) {
	stop := make(chan struct{})
	var talks []chan error
	for i := range c.a.ips {
		for _, to := range []netip.Addr{c.b.ips[i], c.c.ips[i], c.world.ips[i], c.plain[i], c.node1.ips[i]} {
			conn, err := c.a.dial("tcp", to)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			talk := make(chan error, 1)
			talks = append(talks, talk)
			go func() { talk <- chat(conn, stop) }()
		}
	}
	for i := range 4 {
		for _, n := range []*weftNode{c.node1, c.node2} {
			if err := n.pods.Close(); err != nil {
				t.Error(err)
			}
			if err := n.maps.Close(); err != nil {
				t.Error(err)
			}
			c.load(n, 4096+(i/2)*512) // every other restart migrates
		}
	}
	close(stop)
	for _, talk := range talks {
		if err := <-talk; err != nil {
			t.Error(err)
		}
	}
}

// testTTL does what traceroute does: each hop must say that it is one.
func (c *cluster) testTTL(t *testing.T) {
	remote := []string{c.node1.ips[0].String(), c.node1.ips[1].String()}
	for i, family := range []string{"IPv4", "IPv6"} {
		for _, h := range []struct {
			name string
			to   netip.Addr
			ttl  int
			from string
		}{
			{"first hop to outside", c.world.ips[i], 1, remote[i]},
			{"second hop to outside", c.world.ips[i], 2, c.router.ips[i].String()},
			{"second hop to outside, not masqueraded", c.plain[i], 2, c.router.ips[i].String()},
			{"first hop to a pod of another node", c.c.ips[i], 1, remote[i]},
			{"first hop to a pod of the node", c.b.ips[i], 1, remote[i]},
		} {
			t.Run(h.name+", "+family, func(t *testing.T) {
				out, err := c.a.ping(h.to, "-t", fmt.Sprint(h.ttl))
				if err == nil || !strings.Contains(out, "From "+h.from+" ") || !strings.Contains(out, "xceeded") {
					t.Errorf("ping: %v, want an answer of %s:\n%s", err, h.from, out)
				}
			})
		}
		if out, err := c.a.ping(c.world.ips[i], "-t", "3"); err != nil {
			t.Errorf("three hops are enough: %v\n%s", err, out)
		}
	}
}

// sendFrame sends a frame as it is from the pod's interface.
func (h host) sendFrame(frame []byte) error {
	return h.Do(func() error {
		dev, err := net.InterfaceByName("eth0")
		if err != nil {
			return err
		}
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return unix.Sendto(fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: dev.Index, Halen: 6})
	})
}

// expect sends a frame from pod a and waits until exactly the counters in want
// have moved, by one each.
func (c *cluster) expect(t *testing.T, frame []byte, want ...string) {
	t.Helper()
	c.expectAfter(t, func() error { return c.a.sendFrame(frame) }, want...)
}

func (c *cluster) expectAfter(t *testing.T, send func() error, want ...string) {
	t.Helper()
	before := c.node1.counts(t)
	if err := send(); err != nil {
		t.Fatalf("send: %v", err)
	}
	var moved []string
	for deadline := time.Now().Add(timeout); time.Now().Before(deadline); {
		moved = nil
		for name, n := range c.node1.counts(t) {
			// the pod's kernel looks for routers and tells its groups now and then
			for range n - before[name] {
				moved = append(moved, name)
			}
		}
		moved = slices.DeleteFunc(moved, func(name string) bool { return name == "multicast-ignored" })
		if slices.Sort(moved); slices.Equal(moved, want) {
			return
		}
		runtime.Gosched()
	}
	t.Errorf("counted %v, want %v", moved, want)
}

// good is a datagram of pod a to the world, as its stack would send it.
func (c *cluster) good(i int) pt.Packet {
	host, mac := netdev.MACs("a/eth0")
	return pt.Packet{
		EthSrc: mac, EthDst: host, Src: c.a.ips[i], Dst: c.world.ips[i], TTL: 64, Protocol: pt.UDP,
		Sport: 40000, Dport: 9, Payload: []byte("nobody listens"),
	}
}

// testSpoofing: what a pod makes up never leaves the node.
func (c *cluster) testSpoofing(t *testing.T) {
	for i, family := range []string{"IPv4", "IPv6"} {
		good := c.good(i)
		for name, src := range map[string]netip.Addr{
			"another pod": c.b.ips[i], "the node": c.node1.ips[i], "the gateway": c.node1.gateways[i],
			"outside": c.plain[i], "a pod of another node": c.c.ips[i],
		} {
			t.Run(name+", "+family, func(t *testing.T) {
				for _, dst := range []netip.Addr{c.world.ips[i], c.b.ips[i], c.c.ips[i], c.node1.ips[i]} {
					if dst != src {
						c.expect(t, good.With(func(p *pt.Packet) { p.Src, p.Dst = src, dst }).Bytes(), "spoofed-address")
					}
				}
			})
		}
		t.Run("MAC, "+family, func(t *testing.T) {
			c.expect(t, good.With(func(p *pt.Packet) { p.EthSrc = pt.MACB }).Bytes(), "spoofed-mac")
		})
	}
}

// testForged: only the node that holds a pod may send its packets through the
// tunnel, and pods may not speak to the tunnel at all.
func (c *cluster) testForged(t *testing.T) {
	for i, family := range []string{"IPv4", "IPv6"} {
		inner := c.good(i).With(func(p *pt.Packet) { p.Src, p.Dst = c.c.ips[i], c.a.ips[i] })
		vxlan := append([]byte{8, 0, 0, 0, 0, 0, 1, 0}, inner.Bytes()...) // network 1
		t.Run("from outside, "+family, func(t *testing.T) {
			c.expectAfter(t, func() error { return c.world.sendTo(c.node1.ips[i], tunnelPort, vxlan) }, "tunnel-forged")
		})
		t.Run("from a pod, "+family, func(t *testing.T) {
			for _, to := range []netip.Addr{c.node1.ips[i], c.node2.ips[i]} {
				c.expectAfter(t, func() error { return c.a.sendTo(to, tunnelPort, vxlan) }, "tunnel-forged")
			}
		})
		t.Run("from the other node, but not its pod, "+family, func(t *testing.T) {
			other := inner.With(func(p *pt.Packet) { p.Src = c.world.ips[i] })
			vxlan := append([]byte{8, 0, 0, 0, 0, 0, 1, 0}, other.Bytes()...)
			c.expectAfter(t, func() error { return c.node2.sendTo(c.node1.ips[i], tunnelPort, vxlan) }, "tunnel-forged")
		})
	}
}

// testFrames sends what BPF_PROG_TEST_RUN does not take: headers cut off.
func (c *cluster) testFrames(t *testing.T) {
	for i, header := range []int{20, 40} {
		frame := c.good(i).Bytes()
		for _, n := range []int{1, 8, header - 1, header, header + 7} {
			t.Run(fmt.Sprintf("IPv%d, %d bytes", 4+2*i, n), func(t *testing.T) {
				c.expect(t, frame[:14+n], "malformed")
			})
		}
		t.Run(fmt.Sprintf("IPv%d in a VLAN", 4+2*i), func(t *testing.T) {
			for _, id := range []byte{0, 7} {
				c.expect(t, slices.Insert(slices.Clone(frame), 12, 0x81, 0, 0, id), "ethertype")
			}
		})
	}
}
