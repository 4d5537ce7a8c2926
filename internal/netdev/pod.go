// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// PodLinkSpec says how a pod is joined to its node: a veth pair whose peer is
// the pod's interface.
type PodLinkSpec struct {
	Seed      string       // "CONTAINERID/INTERFACE": decides name and hardware addresses, see HostName and MACs
	Netns     string       // path of the pod's network namespace
	Interface string       // name in the pod's namespace, such as eth0
	IPs       []netip.Addr // of the pod, at most one of each family
	Gateways  []netip.Addr // what the pod's routes point to, one of each family in IPs
	Sources   []netip.Addr // of the node, what it talks to the pod from; may lack a family
	MTU       int          // in bytes
}

// PodLink is the result of CreatePodLink.
type PodLink struct {
	Name    string // node's side
	Ifindex int    // of the node's side
	HostMAC net.HardwareAddr
	PodMAC  net.HardwareAddr
}

// ErrNoNetns is wrapped by errors about a pod's network namespace that is not
// there.
var ErrNoNetns = errors.New("no such network namespace")

func (s *PodLinkSpec) validate() error {
	switch {
	case s.Seed == "" || s.Netns == "" || s.Interface == "":
		return errors.New("seed, namespace and interface name of a pod link must be set")
	case len(s.IPs) == 0:
		return errors.New("a pod link needs an address")
	}
	for _, ip := range s.IPs {
		if !sameFamily(s.Gateways, ip).IsValid() {
			return fmt.Errorf("no gateway in the family of pod address %s", ip)
		}
	}
	return nil
}

func (s *PodLinkSpec) v6() bool { return slices.ContainsFunc(s.IPs, netip.Addr.Is6) }

// podSide is the pod's namespace, opened for one verb.
type podSide struct {
	ns netns.NsHandle
	h  *netlink.Handle
}

func openPodSide(path string) (*podSide, error) {
	ns, err := netns.GetFromPath(path)
	if errors.Is(err, unix.ENOENT) {
		return nil, fmt.Errorf("open %s: %w", path, ErrNoNetns)
	}
	if err != nil {
		return nil, fmt.Errorf("open network namespace %s: %w", path, err)
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(ns), &fs); err == nil && fs.Type != unix.NSFS_MAGIC {
		// What is left of a namespace that was unmounted is a plain file.
		ns.Close()
		return nil, fmt.Errorf("open %s: %w", path, ErrNoNetns)
	}
	h, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		ns.Close()
		return nil, fmt.Errorf("open rtnetlink in %s: %w", path, err)
	}
	return &podSide{ns: ns, h: h}, nil
}

func (p *podSide) close() {
	p.h.Close()
	_ = p.ns.Close()
}

// CreatePodLink joins a pod to the node: PreparePodLink and ActivatePodLink,
// for who has nothing to attach in between. On an error nothing that it made
// is left.
func (n *Net) CreatePodLink(spec PodLinkSpec) (*PodLink, error) {
	_, had, err := n.LinkByName(HostName(spec.Seed))
	if err != nil {
		return nil, err
	}
	l, err := n.PreparePodLink(spec)
	if err != nil {
		return nil, err
	}
	if err := n.ActivatePodLink(spec); err != nil {
		if !had {
			err = errors.Join(err, n.DeleteLink(l.Name))
		}
		return nil, err
	}
	return l, nil
}

// PreparePodLink makes the pair of links, both sides down, unless it is there:
// nothing that the pod sends reaches the node before ActivatePodLink, so that
// programs can be attached. On an error nothing that it made is left.
func (n *Net) PreparePodLink(spec PodLinkSpec) (*PodLink, error) {
	if err := spec.validate(); err != nil {
		return nil, err
	}
	pod, err := openPodSide(spec.Netns)
	if err != nil {
		return nil, err
	}
	defer pod.close()
	host, err := n.ensureVeth(spec, pod)
	if err != nil {
		return nil, err
	}
	hostMAC, podMAC := MACs(spec.Seed)
	a := host.Attrs()
	return &PodLink{Name: a.Name, Ifindex: a.Index, HostMAC: hostMAC, PodMAC: podMAC}, nil
}

// ActivatePodLink brings a prepared link up: the node's side, then the pod's
// side with its addresses and routes, then the node's way to the pod. Repeating
// it mends what differs.
func (n *Net) ActivatePodLink(spec PodLinkSpec) error {
	if err := spec.validate(); err != nil {
		return err
	}
	pod, err := openPodSide(spec.Netns)
	if err != nil {
		return err
	}
	defer pod.close()
	host, err := n.hostSide(spec)
	if err != nil {
		return err
	}
	if err := n.configureHost(host, spec); err != nil {
		return err
	}
	if err := pod.configure(spec); err != nil {
		return err
	}
	return n.reachPod(host, spec)
}

// JoinPodLink does the node's part of ActivatePodLink again, without the pod's
// namespace: the kernel takes the routes to pods away when the address goes that
// they have as source.
func (n *Net) JoinPodLink(spec PodLinkSpec) error {
	host, err := n.hostSide(spec)
	if err != nil {
		return err
	}
	if err := n.configureHost(host, spec); err != nil {
		return err
	}
	return n.reachPod(host, spec)
}

// hostSide returns the node's side of an existing link.
func (n *Net) hostSide(spec PodLinkSpec) (netlink.Link, error) {
	name := HostName(spec.Seed)
	host, err := n.h.LinkByName(name)
	if err != nil {
		return nil, fmt.Errorf("look up link %s: %w", name, err)
	}
	if hostMAC, _ := MACs(spec.Seed); !bytes.Equal(host.Attrs().HardwareAddr, hostMAC) {
		return nil, fmt.Errorf("link %s belongs to another pod", name)
	}
	return host, nil
}

// ensureVeth returns the node's side of the pair, made unless the very same
// pair exists.
func (n *Net) ensureVeth(spec PodLinkSpec, pod *podSide) (netlink.Link, error) {
	name := HostName(spec.Seed)
	hostMAC, podMAC := MACs(spec.Seed)
	old, err := n.h.LinkByName(name)
	if err != nil && !notFound(err) {
		return nil, fmt.Errorf("look up link %s: %w", name, err)
	}
	if err == nil {
		if !bytes.Equal(old.Attrs().HardwareAddr, hostMAC) {
			return nil, fmt.Errorf("link %s exists and belongs to another pod", name)
		}
		if pod.isPeer(spec.Interface, podMAC, old.Attrs().Index) {
			return old, nil
		}
		if err := n.h.LinkDel(old); err != nil && !notFound(err) {
			return nil, fmt.Errorf("delete outdated link %s: %w", name, err)
		}
	}
	if _, err := pod.h.LinkByName(spec.Interface); err == nil {
		return nil, fmt.Errorf("interface %s exists already in %s", spec.Interface, spec.Netns)
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.HardwareAddr, attrs.MTU = name, hostMAC, spec.MTU
	veth := netlink.NewVeth(attrs)
	veth.PeerName, veth.PeerHardwareAddr, veth.PeerMTU = spec.Interface, podMAC, uint32(spec.MTU)
	veth.PeerNamespace = netlink.NsFd(pod.ns)
	if err := n.h.LinkAdd(veth); err != nil {
		return nil, fmt.Errorf("create veth pair %s, %s in %s: %w", name, spec.Interface, spec.Netns, err)
	}
	link, err := n.h.LinkByName(name)
	if err != nil {
		return nil, fmt.Errorf("look up new link %s: %w", name, err)
	}
	return link, nil
}

// isPeer says whether the pod's interface is the other side of hostIndex.
func (p *podSide) isPeer(name string, mac net.HardwareAddr, hostIndex int) bool {
	link, err := p.h.LinkByName(name)
	if err != nil {
		return false
	}
	a := link.Attrs()
	return link.Type() == "veth" && a.ParentIndex == hostIndex && bytes.Equal(a.HardwareAddr, mac)
}

// configureHost brings the node's side up, without any address.
func (n *Net) configureHost(link netlink.Link, spec PodLinkSpec) error {
	name := link.Attrs().Name
	if err := n.quietIPv6(link, spec.v6()); err != nil {
		return err
	}
	if err := writeSysctls(n.ns, hostSysctls(name, spec.v6())); err != nil {
		return err
	}
	return bringUp(n.h, link, spec.MTU)
}

func bringUp(h *netlink.Handle, link netlink.Link, mtu int) error {
	a := link.Attrs()
	if mtu != 0 && a.MTU != mtu {
		if err := h.LinkSetMTU(link, mtu); err != nil {
			return fmt.Errorf("set MTU of %s to %d: %w", a.Name, mtu, err)
		}
	}
	if a.Flags&net.FlagUp != 0 {
		return nil
	}
	if err := h.LinkSetUp(link); err != nil {
		return fmt.Errorf("set %s up: %w", a.Name, err)
	}
	return nil
}

// configure sets up the pod's side: addresses, the gateway on the link, and
// the default route through it.
func (p *podSide) configure(spec PodLinkSpec) error {
	if spec.v6() {
		if err := writeSysctls(p.ns, podSysctls(spec.Interface)); err != nil {
			return err
		}
	}
	for _, name := range []string{"lo", spec.Interface} {
		link, err := p.h.LinkByName(name)
		if err != nil {
			return fmt.Errorf("look up %s in %s: %w", name, spec.Netns, err)
		}
		mtu := spec.MTU
		if name == "lo" {
			mtu = 0
		}
		if err := bringUp(p.h, link, mtu); err != nil {
			return fmt.Errorf("in %s: %w", spec.Netns, err)
		}
		if name == "lo" {
			continue
		}
		if err := replaceAddrs(p.h, link, spec.IPs); err != nil {
			return fmt.Errorf("in %s: %w", spec.Netns, err)
		}
		if err := p.replaceRoutes(link, spec); err != nil {
			return fmt.Errorf("in %s: %w", spec.Netns, err)
		}
		if err := p.knowGateways(link, spec); err != nil {
			return fmt.Errorf("in %s: %w", spec.Netns, err)
		}
	}
	return nil
}

// knowGateways spares the pod the resolution of its gateways, before its first
// packet and whenever the entry would be probed again.
func (p *podSide) knowGateways(link netlink.Link, spec PodLinkSpec) error {
	hostMAC, _ := MACs(spec.Seed)
	for _, ip := range spec.IPs {
		gateway := sameFamily(spec.Gateways, ip)
		neigh := netlink.Neigh{
			LinkIndex: link.Attrs().Index, Family: family(gateway), State: netlink.NUD_PERMANENT,
			IP: gateway.AsSlice(), HardwareAddr: hostMAC,
		}
		if err := p.h.NeighSet(&neigh); err != nil {
			return fmt.Errorf("neighbour entry of gateway %s: %w", gateway, err)
		}
	}
	return nil
}

func (p *podSide) replaceRoutes(link netlink.Link, spec PodLinkSpec) error {
	for _, ip := range spec.IPs {
		for _, r := range podRoutes(link.Attrs().Index, ip, sameFamily(spec.Gateways, ip)) {
			if err := p.h.RouteReplace(&r); err != nil {
				return fmt.Errorf("route to %s: %w", prefix(r.Dst), err)
			}
		}
	}
	return nil
}

// podRoutes are the two routes that a pod has in a family, in the order in
// which the kernel accepts them.
func podRoutes(index int, ip, gateway netip.Addr) []netlink.Route {
	all := netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	if ip.Is6() {
		all = netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	}
	return []netlink.Route{
		{LinkIndex: index, Dst: ipNet(single(gateway)), Scope: netlink.SCOPE_LINK, Src: ip.AsSlice()},
		{LinkIndex: index, Dst: ipNet(all), Gw: gateway.AsSlice(), Src: ip.AsSlice()},
	}
}

// reachPod lets the node's own stack reach the pod: host route and permanent
// neighbour, so that nothing has to be resolved.
func (n *Net) reachPod(link netlink.Link, spec PodLinkSpec) error {
	a := link.Attrs()
	_, podMAC := MACs(spec.Seed)
	for _, ip := range spec.IPs {
		r := netlink.Route{LinkIndex: a.Index, Dst: ipNet(single(ip)), Scope: netlink.SCOPE_LINK, Protocol: PodProtocol}
		if src := sameFamily(spec.Sources, ip); src.IsValid() {
			r.Src = src.AsSlice()
		}
		if err := n.h.RouteReplace(&r); err != nil {
			return fmt.Errorf("route to pod %s dev %s: %w", ip, a.Name, err)
		}
		neigh := netlink.Neigh{LinkIndex: a.Index, Family: family(ip), State: netlink.NUD_PERMANENT, IP: ip.AsSlice(), HardwareAddr: podMAC}
		if err := n.h.NeighSet(&neigh); err != nil {
			return fmt.Errorf("neighbour entry of pod %s on %s: %w", ip, a.Name, err)
		}
	}
	return nil
}

func single(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// CheckPodLink returns what is not as CreatePodLink(spec) left it, nil if all
// is.
func (n *Net) CheckPodLink(spec PodLinkSpec) error {
	if err := spec.validate(); err != nil {
		return err
	}
	name := HostName(spec.Seed)
	host, err := n.h.LinkByName(name)
	if err != nil {
		return fmt.Errorf("look up link %s: %w", name, err)
	}
	pod, err := openPodSide(spec.Netns)
	if err != nil {
		return err
	}
	defer pod.close()
	if err := n.checkHost(host, spec); err != nil {
		return err
	}
	return pod.check(host.Attrs().Index, spec)
}

func (n *Net) checkHost(host netlink.Link, spec PodLinkSpec) error {
	a := host.Attrs()
	if err := checkLink(host, spec.MTU); err != nil {
		return err
	}
	for _, ip := range spec.IPs {
		routes, err := n.h.RouteGetWithOptions(ip.AsSlice(), &netlink.RouteGetOptions{FIBMatch: true})
		if err != nil {
			return fmt.Errorf("look up the route to pod %s: %w", ip, err)
		}
		if len(routes) != 1 || routes[0].LinkIndex != a.Index || prefix(routes[0].Dst) != single(ip) {
			return fmt.Errorf("the node has no route to pod %s dev %s", ip, a.Name)
		}
	}
	return nil
}

func checkLink(l netlink.Link, mtu int) error {
	a := l.Attrs()
	if a.Flags&net.FlagUp == 0 {
		return fmt.Errorf("link %s is down", a.Name)
	}
	if mtu != 0 && a.MTU != mtu {
		return fmt.Errorf("link %s has MTU %d: want %d", a.Name, a.MTU, mtu)
	}
	return nil
}

func (p *podSide) check(hostIndex int, spec PodLinkSpec) error {
	_, podMAC := MACs(spec.Seed)
	if !p.isPeer(spec.Interface, podMAC, hostIndex) {
		return fmt.Errorf("interface %s in %s is not the pod's side of %s", spec.Interface, spec.Netns, HostName(spec.Seed))
	}
	link, err := p.h.LinkByName(spec.Interface)
	if err != nil {
		return fmt.Errorf("look up %s in %s: %w", spec.Interface, spec.Netns, err)
	}
	if err := checkLink(link, spec.MTU); err != nil {
		return fmt.Errorf("in %s: %w", spec.Netns, err)
	}
	addrs, err := dump(func() ([]netlink.Addr, error) { return p.h.AddrList(link, netlink.FAMILY_ALL) })
	if err != nil {
		return fmt.Errorf("list addresses of %s in %s: %w", spec.Interface, spec.Netns, err)
	}
	for _, ip := range spec.IPs {
		if !slices.ContainsFunc(addrs, func(a netlink.Addr) bool { return prefix(a.IPNet) == single(ip) }) {
			return fmt.Errorf("interface %s in %s has no address %s", spec.Interface, spec.Netns, ip)
		}
		if err := p.checkRoutes(link, ip, spec); err != nil {
			return err
		}
	}
	return nil
}

func (p *podSide) checkRoutes(link netlink.Link, ip netip.Addr, spec PodLinkSpec) error {
	index := link.Attrs().Index
	have, err := dump(func() ([]netlink.Route, error) {
		return p.h.RouteListFiltered(family(ip), &netlink.Route{LinkIndex: index}, netlink.RT_FILTER_OIF)
	})
	if err != nil {
		return fmt.Errorf("list routes in %s: %w", spec.Netns, err)
	}
	for _, want := range podRoutes(index, ip, sameFamily(spec.Gateways, ip)) {
		same := func(r netlink.Route) bool { return prefix(r.Dst) == prefix(want.Dst) && r.Gw.Equal(want.Gw) }
		if !slices.ContainsFunc(have, same) {
			return fmt.Errorf("no route to %s on %s in %s", prefix(want.Dst), spec.Interface, spec.Netns)
		}
	}
	return nil
}

// DeletePodInterface removes the pod's side of the link that belongs to seed,
// and with it the whole pair, from inside the pod's namespace. A namespace or
// interface that is absent is no error; an interface that is not weft's stays.
func DeletePodInterface(netnsPath, name, seed string) error {
	pod, err := openPodSide(netnsPath)
	if errors.Is(err, ErrNoNetns) {
		return nil
	}
	if err != nil {
		return err
	}
	defer pod.close()
	link, err := pod.h.LinkByName(name)
	if notFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("look up %s in %s: %w", name, netnsPath, err)
	}
	if _, podMAC := MACs(seed); link.Type() != "veth" || !bytes.Equal(link.Attrs().HardwareAddr, podMAC) {
		return nil
	}
	if err := pod.h.LinkDel(link); err != nil && !notFound(err) {
		return fmt.Errorf("delete %s in %s: %w", name, netnsPath, err)
	}
	return nil
}
