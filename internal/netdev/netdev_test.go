// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"context"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/vishvananda/netlink"

	"github.com/weft-mesh/weft/internal/netdev/nstest"
)

var (
	addrs  = func(ss ...string) []netip.Addr { return parse(netip.MustParseAddr, ss) }
	opts   = cmp.Options{cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{}), cmpopts.EquateEmpty()}
	nodeIP = addrs("172.30.0.1", "fd00:172:30::1")
)

func parse[T any](f func(string) T, ss []string) []T {
	out := make([]T, len(ss))
	for i, s := range ss {
		out[i] = f(s)
	}
	return out
}

// node makes a namespace with an uplink eth0 that has nodeIP and default
// routes.
func node(t *testing.T) (*Net, *nstest.NS) {
	t.Helper()
	ns := nstest.New(t)
	var n *Net
	err := ns.Do(func() (err error) {
		n, err = Open()
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.Close() })
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "eth0"
	must(t, n.h.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "underlay", PeerTxQLen: -1}))
	for _, name := range []string{"lo", "underlay", "eth0"} {
		link, err := n.h.LinkByName(name)
		must(t, err)
		must(t, n.h.LinkSetUp(link))
		if name == "eth0" {
			must(t, n.h.AddrAdd(link, &netlink.Addr{IPNet: ipNet(netip.MustParsePrefix("172.30.0.1/24"))}))
			must(t, n.h.AddrAdd(link, &netlink.Addr{IPNet: ipNet(netip.MustParsePrefix("fd00:172:30::1/64")), Flags: 2}))
			must(t, n.h.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Gw: nodeGateway.AsSlice()}))
		}
	}
	return n, ns
}

var nodeGateway = netip.MustParseAddr("172.30.0.254")

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func podSpec(pod *nstest.NS) PodLinkSpec {
	return PodLinkSpec{
		Seed: "c1/eth0", Netns: pod.Path(), Interface: "eth0",
		IPs: addrs("10.244.1.5", "fd00:10:244:1::5"), Gateways: addrs("10.244.1.1", "fd00:10:244:1::1"),
		Sources: nodeIP, MTU: 1450,
	}
}

func TestUplink(t *testing.T) {
	n, _ := node(t)
	for _, name := range []string{"", "eth0"} {
		u, err := n.Uplink(name)
		must(t, err)
		if u.Name != "eth0" || u.MTU != 1500 || u.Index == 0 || !slices.Contains(u.Addrs, netip.MustParsePrefix("172.30.0.1/24")) {
			t.Errorf("Uplink(%q) = %+v", name, u)
		}
	}
	if _, err := n.Uplink("eth9"); err == nil || !strings.Contains(err.Error(), `uplink "eth9": no such device`) {
		t.Errorf("unknown uplink: %v", err)
	}
	link, err := n.h.LinkByName("eth0")
	must(t, err)
	must(t, n.h.LinkSetDown(link))
	if _, err := n.Uplink(""); err == nil || !strings.Contains(err.Error(), "no default route") {
		t.Errorf("no default route: %v", err)
	}
}

func TestPodLink(t *testing.T) {
	n, ns := node(t)
	pod := nstest.New(t)
	spec := podSpec(pod)
	first, err := n.CreatePodLink(spec)
	must(t, err)
	must(t, n.CheckPodLink(spec))
	again, err := n.CreatePodLink(spec)
	must(t, err)
	if diff := cmp.Diff(first, again); diff != "" {
		t.Errorf("a repeated CreatePodLink differs (-first +again):\n%s", diff)
	}
	must(t, n.CheckPodLink(spec))
	checkHostSide(t, n, ns, first)
	checkPodSide(t, pod, first)

	links, err := n.PodLinks()
	must(t, err)
	if len(links) != 1 || links[0].Ifindex != first.Ifindex || links[0].MTU != 1450 || !links[0].Up {
		t.Errorf("PodLinks() = %+v", links)
	}
	must(t, n.DeleteLink(first.Name))
	must(t, n.DeleteLink(first.Name))
	if err := n.CheckPodLink(spec); err == nil {
		t.Error("CheckPodLink accepts a deleted link")
	}
}

func checkHostSide(t *testing.T, n *Net, ns *nstest.NS, l *PodLink) {
	t.Helper()
	link, err := n.h.LinkByName(l.Name)
	must(t, err)
	if got := link.Attrs().HardwareAddr.String(); got != l.HostMAC.String() {
		t.Errorf("host MAC %s, want %s", got, l.HostMAC)
	}
	list, err := n.h.AddrList(link, netlink.FAMILY_ALL)
	must(t, err)
	if len(list) != 0 {
		t.Errorf("the node's side has addresses: %v", list)
	}
	for dst, src := range map[string]string{"10.244.1.5": "172.30.0.1", "fd00:10:244:1::5": "fd00:172:30::1"} {
		routes, err := n.h.RouteGet(netip.MustParseAddr(dst).AsSlice())
		must(t, err)
		if len(routes) != 1 || routes[0].LinkIndex != l.Ifindex || ipAddr(routes[0].Src) != netip.MustParseAddr(src) {
			t.Errorf("route to %s: %v", dst, routes)
		}
	}
	neighs, err := n.h.NeighList(l.Ifindex, netlink.FAMILY_ALL)
	must(t, err)
	permanent := 0
	for _, x := range neighs {
		if x.State == netlink.NUD_PERMANENT && x.HardwareAddr.String() == l.PodMAC.String() {
			permanent++
		}
	}
	if permanent != 2 {
		t.Errorf("%d permanent neighbours, want 2: %v", permanent, neighs)
	}
	for _, s := range hostSysctls(l.Name, true) {
		must(t, ns.Do(func() error {
			b, err := os.ReadFile(sysctlRoot + "/" + s.path)
			if strings.TrimSpace(string(b)) != s.value {
				t.Errorf("sysctl %s is %q, want %q", s.path, b, s.value)
			}
			return err
		}))
	}
}

func checkPodSide(t *testing.T, pod *nstest.NS, l *PodLink) {
	t.Helper()
	p, err := openPodSide(pod.Path())
	must(t, err)
	defer p.close()
	lo, err := p.h.LinkByName("lo")
	must(t, err)
	must(t, checkLink(lo, 0))
	link, err := p.h.LinkByName("eth0")
	must(t, err)
	if got := link.Attrs().HardwareAddr.String(); got != l.PodMAC.String() {
		t.Errorf("pod MAC %s, want %s", got, l.PodMAC)
	}
	// The link-local one is the kernel's, which works on it a moment longer.
	for deadline := time.Now().Add(10 * time.Second); ; {
		list, err := p.h.AddrList(link, netlink.FAMILY_ALL)
		must(t, err)
		i := slices.IndexFunc(list, func(a netlink.Addr) bool { return a.Flags&0x40 != 0 })
		if i < 0 {
			return
		}
		if !list[i].IP.IsLinkLocalUnicast() || time.Now().After(deadline) {
			t.Fatalf("address %s is tentative", list[i].IPNet)
		}
	}
}

func TestPodLinkMended(t *testing.T) {
	n, _ := node(t)
	pod := nstest.New(t)
	spec := podSpec(pod)
	l, err := n.CreatePodLink(spec)
	must(t, err)
	p, err := openPodSide(pod.Path())
	must(t, err)
	defer p.close()
	podLink := func() netlink.Link {
		link, err := p.h.LinkByName("eth0")
		must(t, err)
		return link
	}
	hostLink, err := n.h.LinkByName(l.Name)
	must(t, err)
	for name, spoil := range map[string]func() error{
		"pod down":        func() error { return p.h.LinkSetDown(podLink()) },
		"host down":       func() error { return n.h.LinkSetDown(hostLink) },
		"mtu":             func() error { return p.h.LinkSetMTU(podLink(), 1400) },
		"address":         func() error { return p.h.AddrDel(podLink(), hostAddr(spec.IPs[1])) },
		"default route":   func() error { return p.h.RouteDel(&netlink.Route{Gw: spec.Gateways[0].AsSlice()}) },
		"host route":      func() error { return n.h.RouteDel(&netlink.Route{Dst: ipNet(single(spec.IPs[0])), Scope: 253}) },
		"pod link rename": func() error { return p.h.LinkSetName(podLink(), "eth1") },
	} {
		t.Run(name, func(t *testing.T) {
			must(t, spoil())
			if err := n.CheckPodLink(spec); err == nil {
				t.Error("CheckPodLink sees nothing")
			}
			_, err := n.CreatePodLink(spec)
			must(t, err)
			must(t, n.CheckPodLink(spec))
			hostLink, err = n.h.LinkByName(l.Name)
			must(t, err)
		})
	}
}

// Nothing that a pod sends reaches the node before its link is activated.
func TestPodLinkIsPreparedDown(t *testing.T) {
	n, _ := node(t)
	pod := nstest.New(t)
	spec := podSpec(pod)
	up := func() (host, inPod bool) {
		t.Helper()
		l, ok, err := n.LinkByName(HostName(spec.Seed))
		if !ok || err != nil {
			t.Fatalf("the link is not there: %v", err)
		}
		p, err := openPodSide(pod.Path())
		must(t, err)
		defer p.close()
		link, err := p.h.LinkByName("eth0")
		must(t, err)
		return l.Up, link.Attrs().Flags&net.FlagUp != 0
	}
	first, err := n.PreparePodLink(spec)
	must(t, err)
	if host, inPod := up(); host || inPod {
		t.Errorf("a prepared link is up: host %v, pod %v", host, inPod)
	}
	must(t, n.ActivatePodLink(spec))
	must(t, n.CheckPodLink(spec))
	again, err := n.PreparePodLink(spec)
	must(t, err)
	if host, inPod := up(); !host || !inPod || first.Ifindex != again.Ifindex {
		t.Errorf("preparing an active link again changes it: host %v, pod %v, %+v", host, inPod, again)
	}
	must(t, n.DeleteLink(first.Name))
	for what, err := range map[string]error{"Activate": n.ActivatePodLink(spec), "Join": n.JoinPodLink(spec)} {
		if err == nil || !strings.Contains(err.Error(), "look up link "+first.Name) {
			t.Errorf("%s without a link: %v", what, err)
		}
	}
}

// On a node that is a router, what a pod sends is not forwarded without a program.
func TestPodLinkForwardsNothing(t *testing.T) {
	n, ns := node(t)
	for _, path := range []string{"ipv4/ip_forward", "ipv6/conf/all/forwarding"} {
		must(t, writeSysctls(n.ns, []sysctl{{path, "1"}}))
	}
	l, err := n.CreatePodLink(podSpec(nstest.New(t)))
	must(t, err)
	for _, family := range []string{"ipv4", "ipv6"} {
		must(t, ns.Do(func() error {
			b, err := os.ReadFile(sysctlRoot + "/" + family + "/conf/" + l.Name + "/forwarding")
			if strings.TrimSpace(string(b)) != "0" {
				t.Errorf("forwarding of %s is %q", family, b)
			}
			return err
		}))
	}
}

// The kernel takes the IPv4 routes away that have a deleted address as source.
func TestJoinPodLinkAfterAddressFlap(t *testing.T) {
	n, _ := node(t)
	spec := podSpec(nstest.New(t))
	l, err := n.CreatePodLink(spec)
	must(t, err)
	eth0, err := n.h.LinkByName("eth0")
	must(t, err)
	address := &netlink.Addr{IPNet: ipNet(netip.MustParsePrefix("172.30.0.1/24"))}
	must(t, n.h.AddrDel(eth0, address))
	if err := n.CheckPodLink(spec); err == nil {
		t.Fatal("the route to the pod outlives its source address: this test tests nothing")
	}
	without := spec
	without.Sources = spec.Sources[1:]
	must(t, n.JoinPodLink(without))
	must(t, n.CheckPodLink(spec))
	must(t, n.h.AddrAdd(eth0, address))
	must(t, n.JoinPodLink(spec))
	routes, err := n.h.RouteGet(spec.IPs[0].AsSlice())
	must(t, err)
	if len(routes) != 1 || routes[0].LinkIndex != l.Ifindex || ipAddr(routes[0].Src) != nodeIP[0] {
		t.Errorf("route to the pod: %v", routes)
	}
}

func TestPodLinkRefused(t *testing.T) {
	n, _ := node(t)
	pod := nstest.New(t)
	p, err := openPodSide(pod.Path())
	must(t, err)
	defer p.close()
	plain := t.TempDir() + "/netns"
	must(t, os.WriteFile(plain, nil, 0o600))
	for name, c := range map[string]struct {
		change func(*PodLinkSpec)
		want   string
	}{
		"no namespace":     {func(s *PodLinkSpec) { s.Netns = "/nowhere" }, "open /nowhere: no such network namespace"},
		"plain file":       {func(s *PodLinkSpec) { s.Netns = plain }, "no such network namespace"},
		"no gateway":       {func(s *PodLinkSpec) { s.Gateways = s.Gateways[:1] }, "no gateway in the family of pod address fd00:10:244:1::5"},
		"no address":       {func(s *PodLinkSpec) { s.IPs = nil }, "needs an address"},
		"mtu of no use":    {func(s *PodLinkSpec) { s.MTU = 70000 }, "create veth pair"},
		"too small for v6": {func(s *PodLinkSpec) { s.MTU = 1000 }, "IPv6"},
		"source not local": {func(s *PodLinkSpec) { s.Sources = addrs("192.0.2.1") }, "route to pod 10.244.1.5 dev wf"},
	} {
		t.Run(name, func(t *testing.T) {
			spec := podSpec(pod)
			c.change(&spec)
			if _, err := n.CreatePodLink(spec); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want %q", err, c.want)
			}
			links, err := n.PodLinks()
			must(t, err)
			if len(links) != 0 {
				t.Errorf("left behind: %v", links)
			}
		})
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "eth0"
	must(t, p.h.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "other", PeerTxQLen: -1}))
	if _, err := n.CreatePodLink(podSpec(pod)); err == nil || !strings.Contains(err.Error(), "interface eth0 exists already") {
		t.Errorf("taken interface: %v", err)
	}
	must(t, DeletePodInterface(pod.Path(), "eth0", "c1/eth0"))
	if _, err := p.h.LinkByName("eth0"); err != nil {
		t.Errorf("DeletePodInterface removed what is not weft's: %v", err)
	}
}

func TestDeletePodInterface(t *testing.T) {
	n, _ := node(t)
	pod := nstest.New(t)
	l, err := n.CreatePodLink(podSpec(pod))
	must(t, err)
	for range 2 {
		must(t, DeletePodInterface(pod.Path(), "eth0", "c1/eth0"))
	}
	must(t, DeletePodInterface("/nowhere", "eth0", "c1/eth0"))
	if _, ok, err := n.LinkByName(l.Name); ok || err != nil {
		t.Errorf("the node's side is there: %v %v", ok, err)
	}
}

func TestRoutes(t *testing.T) {
	n, _ := node(t)
	_, err := n.EnsureVXLAN(VXLAN{Name: "weft_vxlan", Port: 4789, MTU: 1430, Gateways: addrs("10.244.1.1", "fd00:10:244:1::1")})
	must(t, err)
	link, err := n.h.LinkByName("eth0")
	must(t, err)
	foreign := netip.MustParsePrefix("10.99.0.0/16")
	must(t, n.h.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: ipNet(foreign), Scope: 253}))
	_, err = n.CreatePodLink(podSpec(nstest.New(t)))
	must(t, err)

	native := []Route{
		{Destination: netip.MustParsePrefix("10.244.2.0/24"), Via: netip.MustParseAddr("172.30.0.2"), Device: "eth0", Source: nodeIP[0]},
		{Destination: netip.MustParsePrefix("fd00:10:244:2::/64"), Via: netip.MustParseAddr("fd00:172:30::2"), Device: "eth0", Source: nodeIP[1], MTU: 1400},
	}
	tunnel := []Route{
		{Destination: native[0].Destination, Device: "weft_vxlan", Source: netip.MustParseAddr("10.244.1.1")},
		{Destination: native[1].Destination, Device: "weft_vxlan", Source: netip.MustParseAddr("fd00:10:244:1::1")},
	}
	for _, want := range [][]Route{native, native, tunnel, native} {
		for _, r := range want {
			must(t, n.ReplaceRoute(r))
		}
		got, err := n.Routes()
		must(t, err)
		if diff := cmp.Diff(want, got, opts); diff != "" {
			t.Fatalf("routes (-want +got):\n%s", diff)
		}
	}
	for range 2 {
		must(t, n.DeleteRoute(native[0].Destination))
		must(t, n.DeleteRoute(native[1].Destination))
		must(t, n.DeleteRoute(foreign))
	}
	got, err := n.Routes()
	must(t, err)
	if len(got) != 0 {
		t.Errorf("routes are left: %v", got)
	}
	if all, _ := n.h.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Dst: ipNet(foreign)}, netlink.RT_FILTER_DST); len(all) != 1 {
		t.Errorf("somebody else's route was deleted")
	}
	if err := n.ReplaceRoute(Route{Destination: foreign, Device: "eth9"}); err == nil || !strings.Contains(err.Error(), "look up device eth9") {
		t.Errorf("unknown device: %v", err)
	}
}

func TestVXLAN(t *testing.T) {
	n, _ := node(t)
	v := VXLAN{Name: "weft_vxlan", Port: 4789, MTU: 1430, Gateways: addrs("10.244.1.1", "fd00:10:244:1::1")}
	ensure := func() Link {
		t.Helper()
		l, err := n.EnsureVXLAN(v)
		must(t, err)
		link, err := n.h.LinkByName(v.Name)
		must(t, err)
		x, ok := link.(*netlink.Vxlan)
		if !ok || !x.FlowBased || x.Port != int(v.Port) || l.MTU != v.MTU || !l.Up || x.RawFlags&0x80 == 0 {
			t.Fatalf("device is %+v", link)
		}
		list, err := n.h.AddrList(link, netlink.FAMILY_ALL)
		must(t, err)
		var got []netip.Addr
		for _, a := range list {
			got = append(got, prefix(a.IPNet).Addr())
		}
		if diff := cmp.Diff(v.Gateways, got, opts); diff != "" {
			t.Fatalf("addresses (-want +got):\n%s", diff)
		}
		return l
	}
	first := ensure()
	if again := ensure(); again.Ifindex != first.Ifindex {
		t.Error("a repeated EnsureVXLAN made the device anew")
	}
	v.MTU, v.Gateways = 1400, addrs("10.244.9.1")
	if l := ensure(); l.Ifindex != first.Ifindex {
		t.Error("a new MTU made the device anew")
	}
	v.Port = 8472
	if l := ensure(); l.Ifindex == first.Ifindex {
		t.Error("a new port did not make the device anew")
	}
	must(t, n.DeleteVXLAN(v.Name))
	must(t, n.DeleteVXLAN(v.Name))
}

func TestCheckVXLAN(t *testing.T) {
	n, _ := node(t)
	v := VXLAN{Name: "weft_vxlan", Port: 4789, MTU: 1430, Gateways: addrs("10.244.1.1", "fd00:10:244:1::1")}
	if err := n.CheckVXLAN(v); err == nil {
		t.Error("an absent device is fine")
	}
	link := func() netlink.Link {
		link, err := n.h.LinkByName(v.Name)
		must(t, err)
		return link
	}
	for want, spoil := range map[string]func() error{
		"is down":                   func() error { return n.h.LinkSetDown(link()) },
		"has MTU 1400: want 1430":   func() error { return n.h.LinkSetMTU(link(), 1400) },
		"has no address 10.244.1.1": func() error { return n.h.AddrDel(link(), hostAddr(v.Gateways[0])) },
		"is not a VXLAN device on":  func() error { v.Port++; return nil },
		"look up link weft_vxlan":   func() error { return n.DeleteVXLAN(v.Name) },
	} {
		_, err := n.EnsureVXLAN(v)
		must(t, err)
		must(t, n.CheckVXLAN(v))
		must(t, spoil())
		if err := n.CheckVXLAN(v); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
}

func TestReserveLocalPorts(t *testing.T) {
	n, ns := node(t)
	list := func() (s string) {
		must(t, ns.Do(func() error {
			b, err := os.ReadFile(sysctlRoot + "/" + reservedPorts)
			s = strings.TrimSpace(string(b))
			return err
		}))
		return s
	}
	for _, c := range []struct {
		first, last uint16
		want        string
	}{
		{10000, 29999, "10000-29999"}, {10000, 29999, "10000-29999"}, {11000, 12000, "10000-29999"},
		{40000, 40000, "10000-29999,40000"}, {29000, 39999, "10000-40000"}, {65000, 65535, "10000-40000,65000-65535"},
	} {
		must(t, n.ReserveLocalPorts(c.first, c.last))
		if got := list(); got != c.want {
			t.Errorf("with %d-%d: %q, want %q", c.first, c.last, got, c.want)
		}
	}
	if b, _ := os.ReadFile(sysctlRoot + "/" + reservedPorts); strings.TrimSpace(string(b)) == list() {
		t.Errorf("another namespace has them too: %s", b)
	}
}

// watched waits until ch has told of something and f holds.
func watched(t *testing.T, ch <-chan struct{}, f func() bool) {
	t.Helper()
	deadline := time.After(10 * time.Second)
	for {
		select {
		case <-ch:
		case <-deadline:
			t.Fatal("no change was reported")
		}
		if f() {
			return
		}
	}
}

func TestWatchLinks(t *testing.T) {
	n, _ := node(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ch, err := n.WatchLinks(ctx)
	must(t, err)
	link, err := n.h.LinkByName("eth0")
	must(t, err)
	must(t, n.h.LinkSetMTU(link, 1400))
	watched(t, ch, func() bool {
		u, err := n.Uplink("eth0")
		must(t, err)
		return u.MTU == 1400
	})
	cancel()
	deadline := time.After(10 * time.Second)
	for open := true; open; {
		select {
		case _, open = <-ch:
		case <-deadline:
			t.Fatal("the channel stays open after cancel")
		}
	}
}

// What is not relevant is not told; a lost subscription is renewed, and told.
func TestWatch(t *testing.T) {
	subscriptions := make(chan chan int)
	subscribe := func(context.Context) (<-chan int, error) {
		ch := make(chan int)
		subscriptions <- ch
		return ch, nil
	}
	var out <-chan struct{}
	started := make(chan error)
	go func() {
		var err error
		out, err = watch(t.Context(), subscribe, func(x int) bool { return x > 0 })
		started <- err
	}()
	ch := <-subscriptions
	must(t, <-started)
	ch <- 0
	ch <- 0 // the first has been judged
	if len(out) != 0 {
		t.Error("an update that is not relevant is told")
	}
	ch <- 1
	ch <- 0
	if len(out) != 1 {
		t.Error("an update is not told")
	}
	<-out
	close(ch)
	ch = <-subscriptions
	<-out
	ch <- 1
	<-out
}

func TestWatchAddresses(t *testing.T) {
	n, _ := node(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ch, err := n.WatchAddresses(ctx)
	must(t, err)
	link, err := n.h.LinkByName("eth0")
	must(t, err)
	want := netip.MustParseAddr("192.0.2.7")
	must(t, n.h.AddrAdd(link, hostAddr(want)))
	deadline := time.After(10 * time.Second)
	for {
		select {
		case <-ch:
		case <-deadline:
			t.Fatal("no change was reported")
		}
		got, err := n.Addresses()
		must(t, err)
		if slices.Contains(got, want) {
			break
		}
	}
	cancel()
	for open := true; open; {
		select {
		case _, open = <-ch:
		case <-deadline:
			t.Fatal("the channel stays open after cancel")
		}
	}
}

func TestNames(t *testing.T) {
	if name := HostName("c1/eth0"); !isHostName(name) || len(name) != 12 || name == HostName("c2/eth0") {
		t.Errorf("HostName = %q", name)
	}
	for _, name := range []string{"wf", "wf012345678", "wf012345678g", "weft_vxlan"} {
		if isHostName(name) {
			t.Errorf("%q is taken for a pod link", name)
		}
	}
	host, pod := MACs("c1/eth0")
	if host[0]&3 != 2 || pod[0]&3 != 2 || host.String() == pod.String() {
		t.Errorf("MACs = %s %s", host, pod)
	}
}
