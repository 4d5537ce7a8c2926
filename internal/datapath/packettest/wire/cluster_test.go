// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/weft-mesh/weft/internal/addr"
	"github.com/weft-mesh/weft/internal/datapath/event"
	"github.com/weft-mesh/weft/internal/datapath/ipcache"
	"github.com/weft-mesh/weft/internal/datapath/node"
	"github.com/weft-mesh/weft/internal/datapath/packettest/bpffs"
	"github.com/weft-mesh/weft/internal/datapath/pin"
	"github.com/weft-mesh/weft/internal/datapath/pod"
	"github.com/weft-mesh/weft/internal/datapath/reason"
	"github.com/weft-mesh/weft/internal/datapath/setting"
	"github.com/weft-mesh/weft/internal/netdev"
	"github.com/weft-mesh/weft/internal/netdev/nstest"
)

const (
	uplinkMTU = 1500
	worldMTU  = 1400 // of the router's way to the world
	tunnelMTU = uplinkMTU - 50

	tunnelPort = 4789
)

// host is a network namespace with an address of each family.
type host struct {
	*nstest.NS
	name string
	ips  []netip.Addr // IPv4, IPv6
}

// weftNode is a node with the datapath in force.
type weftNode struct {
	host
	net      *netdev.Net
	folder   string // of the pins
	maps     *pin.Maps
	pods     *pod.Datapath
	wired    []*pod.Endpoint
	cidrs    []netip.Prefix
	gateways []netip.Addr
}

// cluster is two nodes on a router, behind which the world lies.
//
//	pods a, b ─ node1 ─┐
//	                   ├─ router ── (MTU 1400) ── world
//	pod c ───── node2 ─┘
type cluster struct {
	t            *testing.T
	tunnel       bool
	dsr          bool
	router       host
	world        host
	plain        []netip.Addr // addresses of the world that are not masqueraded
	node1, node2 *weftNode
	a, b, c      host
}

func ips(ss ...string) (out []netip.Addr) {
	for _, s := range ss {
		out = append(out, netip.MustParseAddr(s))
	}
	return out
}

func (c *cluster) must(err error, step string) {
	c.t.Helper()
	if err != nil {
		c.t.Fatalf("%s: %v", step, err)
	}
}

func (c *cluster) host(name string, as []netip.Addr) host {
	c.t.Helper()
	h := host{NS: nstest.New(c.t), name: name, ips: as}
	h.set(c.t, "ipv6/conf/all/accept_dad", "0")
	h.set(c.t, "ipv6/conf/default/accept_dad", "0")
	h.ip(c.t, "link set lo up")
	return h
}

// set writes a sysctl below net.
func (h host) set(t *testing.T, key, value string) {
	t.Helper()
	if err := h.Do(func() error { return os.WriteFile("/proc/sys/net/"+key, []byte(value), 0) }); err != nil {
		t.Fatalf("%s: %v", h.name, err)
	}
}

// ip runs commands of ip(8) and returns what they say.
func (h host) ip(t *testing.T, lines ...string) string {
	t.Helper()
	var out []byte
	err := h.Do(func() (err error) {
		cmd := exec.Command("ip", "-batch", "-")
		cmd.Stdin = strings.NewReader(strings.Join(lines, "\n") + "\n")
		out, err = cmd.CombinedOutput()
		return err
	})
	if err != nil {
		t.Fatalf("%s: %v: %s\n%s", h.name, err, out, strings.Join(lines, "\n"))
	}
	return string(out)
}

func newCluster(t *testing.T, tunnel, dsr bool) *cluster {
	t.Helper()
	c := &cluster{t: t, tunnel: tunnel, dsr: dsr, plain: ips("203.0.113.7", "2001:db8:1::7")}
	c.router = c.host("router", ips("172.30.0.254", "fd00:172:30::fe"))
	c.world = c.host("world", ips("198.51.100.7", "2001:db8::7"))
	c.underlay()
	c.node1 = c.node("node1", 1)
	c.node2 = c.node("node2", 2)
	c.introduce(c.node1, c.node2)
	c.introduce(c.node2, c.node1)
	c.a = c.pod(c.node1, "a", 5)
	c.b = c.pod(c.node1, "b", 6)
	c.c = c.pod(c.node2, "c", 5)
	return c
}

func (c *cluster) underlay() {
	c.router.set(c.t, "ipv4/ip_forward", "1")
	c.router.set(c.t, "ipv6/conf/all/forwarding", "1")
	// every ICMP error is wanted
	c.router.set(c.t, "ipv4/icmp_ratelimit", "0")
	c.router.set(c.t, "ipv6/icmp/ratelimit", "0")
	c.router.ip(c.t,
		"link add br0 type bridge", "link set br0 mtu 1500 up",
		"addr add 172.30.0.254/24 dev br0", "addr add fd00:172:30::fe/64 dev br0 nodad",
		fmt.Sprintf("link add world mtu %d type veth peer name eth0 netns %s mtu %d", uplinkMTU, c.world.Path(), uplinkMTU),
		"link set world up", "addr add 198.51.100.1/24 dev world", "addr add 2001:db8::1/64 dev world nodad",
		// narrower than both ends know, so that they do not agree on it in their SYNs
		fmt.Sprintf("route add 198.51.100.7 dev world mtu lock %d", worldMTU), fmt.Sprintf("route add 2001:db8::7 dev world mtu %d", worldMTU),
		fmt.Sprintf("route add 203.0.113.7 via 198.51.100.7 mtu lock %d", worldMTU), fmt.Sprintf("route add 2001:db8:1::7 via 2001:db8::7 mtu %d", worldMTU),
	)
	c.world.ip(c.t,
		"link set eth0 up",
		"addr add 198.51.100.7/24 dev eth0", "addr add 2001:db8::7/64 dev eth0 nodad",
		"addr add 203.0.113.7/32 dev lo", "addr add 2001:db8:1::7/128 dev lo nodad",
		"route add default via 198.51.100.1", "route add default via 2001:db8::1",
	)
}

// node makes a node with its uplink and loads the datapath.
func (c *cluster) node(name string, number int) *weftNode {
	c.t.Helper()
	n := &weftNode{host: c.host(name, ips(fmt.Sprintf("172.30.0.%d", number), fmt.Sprintf("fd00:172:30::%d", number)))}
	n.cidrs = []netip.Prefix{
		netip.MustParsePrefix(fmt.Sprintf("10.244.%d.0/24", number)), netip.MustParsePrefix(fmt.Sprintf("fd00:10:244:%d::/64", number)),
	}
	n.gateways = ips(fmt.Sprintf("10.244.%d.1", number), fmt.Sprintf("fd00:10:244:%d::1", number))
	c.router.ip(c.t,
		fmt.Sprintf("link add %s mtu %d type veth peer name eth0 netns %s mtu %d", name, uplinkMTU, n.Path(), uplinkMTU),
		fmt.Sprintf("link set %s master br0 up", name),
		fmt.Sprintf("route add %s via %s", n.cidrs[0], n.ips[0]), fmt.Sprintf("route add %s via %s", n.cidrs[1], n.ips[1]),
	)
	n.ip(c.t,
		"link set eth0 up", fmt.Sprintf("addr add %s/24 dev eth0", n.ips[0]), fmt.Sprintf("addr add %s/64 dev eth0 nodad", n.ips[1]),
		"route add default via 172.30.0.254", "route add default via fd00:172:30::fe",
	)
	c.must(n.Do(func() (err error) { n.net, err = netdev.Open(); return err }), "open "+name)
	c.t.Cleanup(func() { n.net.Close() })
	n.folder = bpffs.New(c.t) + "/" + name
	c.load(n, 4096)
	return n
}

// load puts the datapath in force, as an agent does when it starts: what an
// earlier one left is adopted, and migrated where room is another.
func (c *cluster) load(n *weftNode, room int) {
	c.t.Helper()
	maps, err := pin.Open(n.folder, pin.Sizes{Conntrack: room, NAT: room, Events: 256 << 10})
	c.must(err, "open maps")
	c.t.Cleanup(func() { maps.Close() })
	n.maps = maps
	uplink, err := n.net.Uplink("eth0")
	c.must(err, "uplink")
	s := setting.Node{
		UplinkIfindex: uplink.Index, UplinkMTU: uplinkMTU, TunnelMTU: tunnelMTU, IPv4: n.ips[0], IPv6: n.ips[1],
		Gateway4: n.gateways[0], Gateway6: n.gateways[1], Masquerade: true, FirstPort: 10000, LastPort: 19999,
		ServiceFirstPort: 20000, ServiceLastPort: 29999, ServiceDSR: c.dsr,
		Lifetimes: setting.Lifetimes{TCPSyn: time.Minute, TCPEstablished: time.Hour, TCPClosing: 10 * time.Second, UDP: time.Minute, UDPReplied: time.Minute, Other: time.Minute},
	}
	var tunnel *node.Device
	if c.tunnel {
		l, err := n.net.EnsureVXLAN(netdev.VXLAN{Name: "weft_vxlan", Port: tunnelPort, MTU: tunnelMTU, Gateways: n.gateways})
		c.must(err, "tunnel device")
		s.TunnelIfindex, s.TunnelPort, tunnel = l.Ifindex, tunnelPort, &node.Device{Name: l.Name, Ifindex: l.Ifindex}
	}
	nodes, err := node.Load(maps, s)
	c.must(err, "load")
	c.t.Cleanup(func() { nodes.Close() })
	n.pods, err = pod.Load(maps, s)
	c.must(err, "load")
	c.t.Cleanup(func() { n.pods.Close() })
	c.must(n.Do(func() error { return nodes.Attach(node.Device{Name: "eth0", Ifindex: uplink.Index}, tunnel) }), "attach")
	for _, ep := range n.wired {
		c.must(n.Do(func() error { return n.pods.Attach(ep) }), "attach a pod again")
	}
	c.must(maps.FinishMigration(), "finish the migration")
}

// introduce tells n where everything is.
func (c *cluster) introduce(n, other *weftNode) {
	c.t.Helper()
	entries := map[netip.Prefix]ipcache.Entry{}
	device := "eth0"
	if c.tunnel {
		device = "weft_vxlan"
	}
	for i := range n.ips {
		hop := ipcache.Entry{NextHop4: other.ips[0], NextHop6: other.ips[1]}
		with := func(id uint64, f ipcache.Flags) ipcache.Entry { hop.Identity, hop.Flags = id, f; return hop }
		entries[addr.Host(n.ips[i])] = ipcache.Entry{Identity: 1, Flags: ipcache.LocalNode}
		entries[n.cidrs[i]] = ipcache.Entry{Identity: 3, Flags: ipcache.LocalCIDR}
		entries[addr.Host(other.ips[i])] = with(2, ipcache.RemoteNode)
		entries[other.cidrs[i]] = with(400, ipcache.Pod)
		entries[addr.Host(c.plain[i])] = ipcache.Entry{Identity: 3, Flags: ipcache.NoMasquerade}
		r := netdev.Route{Destination: other.cidrs[i], Device: device, Via: other.ips[i], Source: n.ips[i]}
		if c.tunnel {
			entries[addr.Host(n.gateways[i])] = ipcache.Entry{Identity: 1, Flags: ipcache.LocalNode}
			entries[addr.Host(other.gateways[i])] = with(2, ipcache.Pod)
			r.Via, r.Source = netip.Addr{}, n.gateways[i]
		}
		c.must(n.net.ReplaceRoute(r), "route")
	}
	cache := ipcache.New(n.maps)
	for p, e := range entries {
		c.must(cache.Update(c.t.Context(), p, e), "address map")
	}
}

func (c *cluster) podMTU() int {
	if c.tunnel {
		return tunnelMTU
	}
	return uplinkMTU
}

// pod wires a pod to n.
func (c *cluster) pod(n *weftNode, name string, last int) host {
	c.t.Helper()
	prefix := strings.TrimSuffix(n.cidrs[0].Addr().String(), "0")
	h := c.host(name, ips(fmt.Sprintf("%s%d", prefix, last), fmt.Sprintf("%s%d", n.cidrs[1].Addr(), last)))
	l, err := n.net.CreatePodLink(netdev.PodLinkSpec{
		Seed: name + "/eth0", Netns: h.Path(), Interface: "eth0", IPs: h.ips, Gateways: n.gateways, Sources: n.ips, MTU: c.podMTU(),
	})
	c.must(err, "wire pod "+name)
	ep := &pod.Endpoint{Device: l.Name, Ifindex: l.Ifindex, MAC: l.PodMAC, HostMAC: l.HostMAC, IPs: h.ips, Identity: 300 + uint64(last)}
	c.must(n.Do(func() error { return n.pods.Attach(ep) }), "attach pod "+name)
	c.must(n.pods.Attached(ep), "pod "+name)
	n.wired = append(n.wired, ep)
	return h
}

// counts returns what a node has counted, by reason.
func (n *weftNode) counts(t *testing.T) map[string]uint64 {
	t.Helper()
	rows, err := reason.Counts(n.maps)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]uint64{}
	for _, r := range rows {
		out[reason.Name(r.Reason)] = r.Packets
	}
	return out
}

// checkNoDrops says which packets the nodes dropped, but for these reasons.
func (c *cluster) checkNoDrops(t *testing.T, but ...string) {
	t.Helper()
	for _, n := range []*weftNode{c.node1, c.node2} {
		ring, err := event.NewRing(n.maps)
		if err != nil {
			t.Fatal(err)
		}
		var r event.Record
		seen := map[string]int{}
		for err = ring.Read(&r); err == nil; err = ring.Read(&r) {
			if r.Type == event.TypeDrop && !slices.Contains(but, fmt.Sprint(r.Reason)) {
				seen[fmt.Sprintf("%s: protocol %d, %s > %s", r.Reason, r.Protocol, r.Source, r.Destination)]++
			}
		}
		for what, count := range seen {
			t.Errorf("%s dropped %d times %s", n.name, count, what)
		}
		if err := ring.Close(); err != nil {
			t.Error(err)
		}
		for name, count := range n.counts(t) {
			if slices.Contains(drops(), name) && !slices.Contains(but, name) {
				t.Errorf("%s dropped %d packets: %s", n.name, count, name)
			}
		}
	}
}

// drops are the names of the reasons to drop a packet.
func drops() (names []string) {
	for r := range reason.Max {
		if reason.IsDrop(uint8(r)) {
			names = append(names, reason.Name(uint8(r)))
		}
	}
	return names
}
