// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/weft-mesh/weft/internal/addr"
	"github.com/weft-mesh/weft/internal/datapath/ipcache"
	"github.com/weft-mesh/weft/internal/datapath/lb"
	"github.com/weft-mesh/weft/internal/datapath/node"
	"github.com/weft-mesh/weft/internal/datapath/packettest/bpffs"
	"github.com/weft-mesh/weft/internal/datapath/pin"
	"github.com/weft-mesh/weft/internal/datapath/pod"
	"github.com/weft-mesh/weft/internal/datapath/setting"
	"github.com/weft-mesh/weft/internal/netdev"
	"github.com/weft-mesh/weft/internal/netdev/nstest"
)

// Addresses of the world.
var (
	nodeIPs    = ips("172.30.0.1", "fd00:172:30::1", "172.30.0.11", "fd00:172:30::11")
	routerIPs  = ips("172.30.0.254", "fd00:172:30::fe")
	gateways   = ips("10.244.1.1", "fd00:10:244:1::1")
	localPods  = [][]netip.Addr{pair(1, 2), pair(1, 3), pair(1, 4), pair(1, 5)} // the first one is the client
	remotePods = [][]netip.Addr{pair(2, 2), pair(2, 3), pair(2, 4)}
	worldIPs   = ips("198.51.100.7", "2001:db8::7", "198.51.100.8", "2001:db8::8") // of clients
	clusterIPs = [][]netip.Addr{seq("10.96.0.", 10, 10), seq("fd00:10:96::", 10, 10)}
	// ExternalIPs and addresses of load balancers.
	balancerIPs = [][]netip.Addr{seq("192.0.2.", 10, 3), seq("2001:db8:2::", 10, 3)}

	servicePorts = []uint16{53, 80, 81}
	nodePorts    = []uint16{30000, 30001, 30002, 30003, 30004}
	targetPorts  = []uint16{8080, 8081, 8082}
)

func ips(ss ...string) (out []netip.Addr) {
	for _, s := range ss {
		out = append(out, netip.MustParseAddr(s))
	}
	return out
}

func pair(node, pod int) []netip.Addr {
	return ips(fmt.Sprintf("10.244.%d.%d", node, pod), fmt.Sprintf("fd00:10:244:%d::%d", node, pod))
}

func seq(prefix string, first, n int) (out []netip.Addr) {
	for i := range n {
		out = append(out, netip.MustParseAddr(fmt.Sprint(prefix, first+i)))
	}
	return out
}

func flat(lists ...[]netip.Addr) (out []netip.Addr) {
	for _, l := range lists {
		out = append(out, l...)
	}
	return out
}

func family(a netip.Addr) int {
	if a.Is4() {
		return 0
	}
	return 1
}

// plain is the name of servers that a connection reaches where nothing is
// translated.
const plain = "plain"

// world is a node with pods, pods of another node, and a client outside.
//
//	pods ── node ──┐
//	               ├── bridge in router: pods of another node, and servers at
//	outside ───────┘   the addresses of Services, for what is not translated
type world struct {
	t       testing.TB
	folder  string // of the pins
	cgroup  string // of all processes of the node
	node    host
	router  host
	outside host
	pods    []host
	net     *netdev.Net
	maps    *pin.Maps
	wired   []*pod.Endpoint
	clients map[string]*remote
}

type host struct {
	*nstest.NS
	name string
}

func newWorld(t testing.TB) *world {
	t.Helper()
	w := &world{t: t, folder: filepath.Join(bpffs.New(t), "node"), clients: map[string]*remote{}}
	w.cgroup = w.makeCgroup()
	w.router, w.outside, w.node = w.host("router"), w.host("outside"), w.host("node")
	w.underlay()
	w.must(w.node.Do(func() (err error) { w.net, err = netdev.Open(); return err }), "open node")
	t.Cleanup(func() { w.net.Close() })
	w.wire()
	w.open()
	w.introduce()
	w.serve()
	w.start(insidePod, w.pods[0], w.cgroup)
	w.start(insideNode, w.node, w.cgroup)
	w.start(outside, w.outside, "")
	return w
}

func (w *world) must(err error, step string) {
	w.t.Helper()
	if err != nil {
		w.t.Fatalf("%s: %v", step, err)
	}
}

func (w *world) host(name string) host {
	w.t.Helper()
	h := host{nstest.New(w.t), name}
	w.must(h.Do(func() error {
		// every ICMP error is wanted
		for key, value := range map[string]string{
			"ipv6/conf/all/accept_dad": "0", "ipv6/conf/default/accept_dad": "0", "ipv4/icmp_ratelimit": "0", "ipv6/icmp/ratelimit": "0",
		} {
			if err := os.WriteFile("/proc/sys/net/"+key, []byte(value), 0); err != nil {
				return err
			}
		}
		return nil
	}), "set up "+name)
	w.ip(h, "link set lo up")
	return h
}

func (w *world) ip(h host, lines ...string) {
	w.t.Helper()
	w.must(h.Do(func() error {
		cmd := exec.Command("ip", "-batch", "-")
		cmd.Stdin = strings.NewReader(strings.Join(lines, "\n") + "\n")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	}), "ip in "+h.name)
}

// onLoopback are commands that give lo addresses.
func onLoopback(as ...netip.Addr) (lines []string) {
	for _, a := range as {
		l := fmt.Sprintf("addr add %s dev lo", addr.Host(a))
		if a.Is6() {
			l += " nodad"
		}
		lines = append(lines, l)
	}
	return lines
}

// routes are commands for routes to prefixes by a gateway of their family.
func routes(via []netip.Addr, prefixes ...string) (lines []string) {
	for _, s := range prefixes {
		p := netip.MustParsePrefix(s)
		lines = append(lines, fmt.Sprintf("route add %s via %s", p, via[family(p.Addr())]))
	}
	return lines
}

func (w *world) underlay() {
	w.ip(w.router,
		"link add br0 type bridge", "link set br0 up", "addr add 172.30.0.254/24 dev br0", "addr add fd00:172:30::fe/64 dev br0 nodad",
		"link add node type veth peer name eth0 netns "+w.node.Path(), "link set node master br0 up",
		"link add outside type veth peer name eth0 netns "+w.outside.Path(), "link set outside master br0 up",
	)
	w.ip(w.router, onLoopback(flat(flat(remotePods...), flat(clusterIPs...), flat(balancerIPs...))...)...)
	w.ip(w.router, routes(nodeIPs, "10.244.1.0/24", "fd00:10:244:1::/64")...)
	w.ip(w.node,
		"link set eth0 up", "addr add 172.30.0.1/24 dev eth0", "addr add fd00:172:30::1/64 dev eth0 nodad",
		// a source of nothing: the first address is
		"addr add 172.30.0.11/24 dev eth0", "addr add fd00:172:30::11/64 dev eth0 nodad preferred_lft 0",
		"route add default via 172.30.0.254", "route add default via fd00:172:30::fe",
	)
	out := ips("172.30.0.200", "fd00:172:30::200")
	w.ip(w.node, routes(out, "198.51.100.0/24", "2001:db8::/64")...)
	w.ip(w.outside, "link set eth0 up", "addr add 172.30.0.200/24 dev eth0", "addr add fd00:172:30::200/64 dev eth0 nodad")
	w.ip(w.outside, onLoopback(worldIPs...)...)
	w.ip(w.outside, routes(nodeIPs, "10.96.0.0/16", "fd00:10:96::/64", "192.0.2.0/24", "2001:db8:2::/64")...)
}

var lifetimes = setting.Lifetimes{
	TCPSyn: 20 * time.Second, TCPEstablished: time.Minute, TCPClosing: 2 * time.Second,
	UDP: 3 * time.Second, UDPReplied: 3 * time.Second, Other: 5 * time.Second,
}

// open opens the maps and puts the programs in force, as an agent does when it
// starts.
func (w *world) open() {
	w.t.Helper()
	maps, err := pin.Open(w.folder, pin.Sizes{Events: 256 << 10})
	w.must(err, "open maps")
	w.t.Cleanup(func() { maps.Close() })
	w.maps = maps
	w.must(w.node.Do(func() error { return w.attach(maps) }), "put programs in force")
	w.must(maps.FinishMigration(), "finish the migration")
}

func (w *world) attach(maps *pin.Maps) error {
	uplink, err := w.net.Uplink("eth0")
	if err != nil {
		return err
	}
	s := setting.Node{
		UplinkIfindex: uplink.Index, UplinkMTU: 1500, IPv4: nodeIPs[0], IPv6: nodeIPs[1], Gateway4: gateways[0], Gateway6: gateways[1],
		Masquerade: true, FirstPort: 10000, LastPort: 19999, ServiceFirstPort: 20000, ServiceLastPort: 29999, Lifetimes: lifetimes,
	}
	sockets, err := lb.Load(maps, s)
	if err != nil {
		return err
	}
	defer sockets.Close()
	if err := sockets.Attach(w.cgroup); err != nil {
		return err
	}
	pods, err := pod.Load(maps, s)
	if err != nil {
		return err
	}
	defer pods.Close()
	for _, ep := range w.wired {
		if err := pods.Attach(ep); err != nil {
			return err
		}
	}
	nodes, err := node.Load(maps, s)
	if err != nil {
		return err
	}
	defer nodes.Close()
	return nodes.Attach(node.Device{Name: "eth0", Ifindex: uplink.Index}, nil)
}

// introduce tells the node where everything is.
func (w *world) introduce() {
	w.t.Helper()
	with := func(id uint64, f ipcache.Flags) ipcache.Entry {
		return ipcache.Entry{NextHop4: routerIPs[0], NextHop6: routerIPs[1], Identity: id, Flags: f}
	}
	entries := map[netip.Prefix]ipcache.Entry{}
	for _, a := range nodeIPs {
		entries[addr.Host(a)] = ipcache.Entry{Identity: 1, Flags: ipcache.LocalNode}
	}
	for i, bits := range []int{24, 64} {
		cidr := func(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, bits).Masked() }
		entries[cidr(localPods[0][i])] = ipcache.Entry{Identity: 3, Flags: ipcache.LocalCIDR}
		entries[cidr(remotePods[0][i])] = with(400, ipcache.Pod)
		entries[addr.Host(routerIPs[i])] = with(2, ipcache.RemoteNode)
		r := netdev.Route{Destination: cidr(remotePods[0][i]), Device: "eth0", Via: routerIPs[i], Source: nodeIPs[i]}
		w.must(w.net.ReplaceRoute(r), "route")
	}
	cache := ipcache.New(w.maps)
	for p, e := range entries {
		w.must(cache.Update(w.t.Context(), p, e), "address map")
	}
}

// wire makes the pods of the node.
func (w *world) wire() {
	w.t.Helper()
	for i, as := range localPods {
		h := w.host(fmt.Sprintf("pod%d", i))
		l, err := w.net.CreatePodLink(netdev.PodLinkSpec{
			Seed: h.name + "/eth0", Netns: h.Path(), Interface: "eth0", IPs: as, Gateways: gateways, Sources: nodeIPs[:2], MTU: 1500,
		})
		w.must(err, "wire "+h.name)
		w.pods = append(w.pods, h)
		w.wired = append(w.wired, &pod.Endpoint{Device: l.Name, Ifindex: l.Ifindex, MAC: l.PodMAC, HostMAC: l.HostMAC, IPs: as, Identity: 300 + uint64(i)})
	}
}

// serve starts all servers. They are not in the cgroup: nothing of what they do
// is translated.
func (w *world) serve() {
	for i, h := range w.pods {
		w.listen(h, "", localPods[i], targetPorts)
	}
	w.listen(w.router, "", flat(remotePods...), targetPorts)
	w.listen(w.router, plain, flat(flat(clusterIPs...), flat(balancerIPs...)), servicePorts)
	w.listen(w.node, plain, nodeIPs, nodePorts)
}

// listen answers by TCP and UDP with the name, or the address and port where it
// is empty, and the address of the client.
func (w *world) listen(h host, name string, as []netip.Addr, ports []uint16) {
	w.t.Helper()
	w.must(h.Do(func() error {
		for _, a := range as {
			for _, p := range ports {
				if err := w.listenAt(name, netip.AddrPortFrom(a, p).String()); err != nil {
					return err
				}
			}
		}
		return nil
	}), "serve in "+h.name)
}

func (w *world) listenAt(name, at string) error {
	if name == "" {
		name = at
	}
	l, err := net.Listen("tcp", at)
	if err != nil {
		return err
	}
	w.t.Cleanup(func() { l.Close() })
	u, err := net.ListenPacket("udp", at)
	if err != nil {
		return err
	}
	w.t.Cleanup(func() { u.Close() })
	go answerTCP(l, name)
	go answerUDP(u.(*net.UDPConn), name)
	return nil
}

func answerTCP(l net.Listener, says string) {
	for {
		c, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue // the client has gone
		}
		_, _ = c.Write([]byte(says + " " + c.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap().String()))
		_ = c.Close()
	}
}

func answerUDP(c *net.UDPConn, says string) {
	b := make([]byte, 64)
	for {
		_, from, err := c.ReadFromUDPAddrPort(b)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err == nil {
			_, _ = c.WriteToUDPAddrPort([]byte(says+" "+from.Addr().Unmap().String()), from)
		}
	}
}
