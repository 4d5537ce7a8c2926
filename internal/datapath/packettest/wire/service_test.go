// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	pt "github.com/weft-mesh/weft/internal/datapath/packettest"
	"github.com/weft-mesh/weft/internal/datapath/pin"
)

func TestServicesNative(t *testing.T) { testServices(t, newCluster(t, false, false)) }

func TestServicesTunnel(t *testing.T) { testServices(t, newCluster(t, true, false)) }

func TestServicesDSR(t *testing.T) { testServices(t, newCluster(t, false, true)) }

// testServices: sockets of pods and of the world reach backends of every kind by
// the addresses of a service.
func testServices(t *testing.T, c *cluster) {
	for _, h := range []host{c.a, c.b, c.c, c.node1.host, c.node2.host} {
		h.serve(t)
	}
	c.world.serve(t, c.plain...)
	for _, a := range c.balancer() {
		c.router.ip(t, fmt.Sprintf("route add %s via %s", a, c.node1.ips[family(a)]))
	}
	t.Run("near", c.testNear)
	t.Run("far", c.testFar)
	t.Run("no drops", func(t *testing.T) {
		if c.tunnel {
			// so the world learns what fits
			c.checkNoDrops(t, "too-big")
		} else {
			c.checkNoDrops(t)
		}
	})
	t.Run("no backend", c.testNoBackend)
}

func family(a netip.Addr) int {
	if a.Is4() {
		return 0
	}
	return 1
}

func (c *cluster) clusterIP() []netip.Addr { return ips("10.96.0.10", "fd00:10:96::10") }

func (c *cluster) balancer() []netip.Addr { return ips("192.0.2.10", "2001:db8:2::10") }

// offer makes the service one with these backends, for clients of both kinds, on
// every node; dual stack.
func (c *cluster) offer(t *testing.T, backends []netip.Addr) {
	t.Helper()
	for _, n := range []*weftNode{c.node1, c.node2} {
		var services []pt.Service
		for i := range n.ips {
			for _, protocol := range []uint8{pt.TCP, pt.UDP} {
				s := pt.Service{Protocol: protocol, Flags: pin.KernelServiceFlagSERVICE_EXTERNAL}
				for _, a := range []netip.Addr{c.clusterIP()[i], c.balancer()[i], n.ips[i]} {
					s.Frontends = append(s.Frontends, netip.AddrPortFrom(a, port))
				}
				if backends != nil {
					s.Near = []netip.AddrPort{netip.AddrPortFrom(backends[i], port)}
					s.Far = s.Near
				}
				services = append(services, s)
			}
		}
		pt.Serve(t, n.maps, services...)
	}
}

// talk sends over every protocol, little and much, and says what address the
// server must have seen.
func (c *cluster) talk(t *testing.T, from host, to, seen netip.Addr) {
	t.Helper()
	check := func(what string, got netip.Addr, err error) {
		t.Helper()
		if err != nil {
			t.Errorf("%s to %s: %v", what, to, err)
		} else if got != seen {
			t.Errorf("%s to %s: the server saw %s, want %s", what, to, got, seen)
		}
	}
	for _, size := range []int{20, 1400} {
		got, err := from.udp(to, size, 5)
		check(fmt.Sprintf("UDP, %d bytes", size), got, err)
	}
	got, err := from.tcp(to, 1<<20)
	check("TCP", got, err)
	got, err = from.udp(to, 8000, 5)
	// what begins in fragments does not go by DSR
	if c.dsr && from.name == "world" && err == nil && got == c.node1.ips[family(to)] {
		got = seen
	}
	check("UDP in fragments", got, err)
}

func (c *cluster) testNear(t *testing.T) {
	// a pod is itself to another node, unless the underlay does not know it
	other := c.a.ips
	if c.tunnel {
		other = c.node1.ips
	}
	for _, w := range []struct {
		name          string
		backend, seen []netip.Addr
	}{
		{"pod of the node", c.b.ips, c.a.ips},
		{"pod of another node", c.c.ips, c.a.ips},
		{"itself", c.a.ips, c.node1.gateways},
		{"its node", c.node1.ips, c.a.ips},
		{"another node", c.node2.ips, other},
		{"outside", c.world.ips, c.node1.ips},
		{"outside, not masqueraded", c.plain, c.a.ips},
	} {
		t.Run(w.name, func(t *testing.T) {
			c.offer(t, w.backend)
			for i := range w.backend {
				for _, to := range []netip.Addr{c.clusterIP()[i], c.node1.ips[i], c.balancer()[i]} {
					c.talk(t, c.a, to, w.seen[i])
				}
			}
		})
	}
}

func (c *cluster) testFar(t *testing.T) {
	client := ips("198.51.100.7", "2001:db8::7")
	remote := c.node1.ips
	switch {
	case c.tunnel:
		remote = c.node1.gateways
	case c.dsr:
		remote = client
	}
	for _, w := range []struct {
		name          string
		backend, seen []netip.Addr
	}{
		{"pod of the node", c.a.ips, client},
		{"pod of another node", c.c.ips, remote},
		{"the node", c.node1.ips, client},
		{"another node", c.node2.ips, c.node1.ips},
	} {
		t.Run(w.name, func(t *testing.T) {
			c.offer(t, w.backend)
			for i := range w.backend {
				for _, to := range []netip.Addr{c.node1.ips[i], c.balancer()[i]} {
					c.talk(t, c.world, to, w.seen[i])
				}
			}
		})
	}
	// a pod asks another node, whose backend is anywhere
	for name, backend := range map[string][]netip.Addr{"there": c.c.ips, "here": c.b.ips} {
		t.Run("pod by another node, backend "+name, func(t *testing.T) {
			c.offer(t, backend)
			for i := range backend {
				if _, err := c.a.tcp(c.node2.ips[i], 1<<20); err != nil {
					t.Errorf("TCP to %s: %v", c.node2.ips[i], err)
				}
				if _, err := c.a.udp(c.node2.ips[i], 1400, 5); err != nil {
					t.Errorf("UDP to %s: %v", c.node2.ips[i], err)
				}
			}
		})
	}
}

// testNoBackend: a connect fails at once.
func (c *cluster) testNoBackend(t *testing.T) {
	c.offer(t, nil)
	for i, a := range c.clusterIP() {
		if conn, err := c.a.dial("tcp", a); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("pod to %s: %v, %v", a, conn, err)
		}
		if conn, err := c.world.dial("tcp", c.balancer()[i]); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("world to %s: %v, %v", c.balancer()[i], conn, err)
		}
	}
}
