// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/weft-mesh/weft/internal/netdev"
)

// Baseline is a kind of path to compare with.
type Baseline string

// The baselines. None has a policy, a CNI or a netfilter rule.
const (
	// Host: two namespaces joined by one veth pair.
	Host Baseline = "host"
	// HostAcross: two namespaces, each with a veth pair to a bridge in a third.
	HostAcross Baseline = "host-across"
	// Plain: two namespaces, each with a veth pair to a router namespace that
	// forwards between them (ip_forward).
	Plain Baseline = "plain"
	// PlainAcross: as Plain, with two routers that are joined by a bridge in a
	// namespace of its own; the shape of two nodes.
	PlainAcross Baseline = "plain-across"
	// PlainVXLAN: as PlainAcross, with a VXLAN device of the kernel on each router.
	PlainVXLAN Baseline = "plain-vxlan"
)

var about = map[Baseline]string{
	Host:        "two namespaces joined by one veth pair; no policy",
	HostAcross:  "two namespaces joined by a bridge, a veth pair each; no policy",
	Plain:       "two namespaces and a router between them: veth + kernel forwarding, no CNI, no policy",
	PlainAcross: "two namespaces, each behind a router, the routers joined by a bridge: veth + kernel forwarding, no CNI, no policy",
	PlainVXLAN:  "two namespaces, each behind a router with a kernel VXLAN device, the routers joined by a bridge: veth + kernel forwarding, no CNI, no policy",
}

// ParseBaseline returns the baseline of that name.
func ParseBaseline(name string) (Baseline, error) {
	b := Baseline(name)
	if _, ok := about[b]; !ok {
		return "", fmt.Errorf("baseline %q: it is one of %s, %s, %s, %s, %s", name, Host, HostAcross, Plain, PlainAcross, PlainVXLAN)
	}
	return b, nil
}

const (
	underlayMTU   = 1500
	vxlanOverhead = 50 // over IPv4
	namePrefix    = "wfbench-"
)

// Site holds the namespaces of baselines. They are named wfbench-PID-…, and
// so are a cgroup2 folder, a temporary one and one of pins.
type Site struct {
	made   []string
	paths  int
	cgroup string // "" while there is none, as with files
	files  string
}

// NewSite takes away what a site of a process that is gone has left.
func NewSite() (*Site, error) {
	if err := removeAbandoned(); err != nil {
		return nil, err
	}
	return &Site{}, nil
}

func removeAbandoned() error {
	if err := removeAbandonedFolders(); err != nil { // first, as processes hold namespaces
		return err
	}
	names, err := netdev.ListNetNS()
	if err != nil {
		return err
	}
	for _, name := range names {
		if abandoned(name) {
			if err := netdev.DeleteNetNS(name); err != nil {
				return err
			}
		}
	}
	return nil
}

func abandoned(name string) bool {
	rest, ok := strings.CutPrefix(name, namePrefix)
	if !ok {
		return false
	}
	digits, _, _ := strings.Cut(rest, "-")
	pid, err := strconv.Atoi(digits)
	if err != nil {
		return false
	}
	_, err = os.Stat(fmt.Sprintf("/proc/%d", pid))
	return errors.Is(err, os.ErrNotExist)
}

// Close removes all namespaces of the site, and with them their devices, and
// the cgroup with what runs in it, and the files.
func (s *Site) Close() error {
	errs := []error{s.removeFolders()}
	for _, name := range slices.Backward(s.made) {
		errs = append(errs, netdev.DeleteNetNS(name))
	}
	s.made = nil
	return errors.Join(errs...)
}

// Build makes a baseline, its own at each call. Its ends have the MTU given, 0
// is what the path carries; addr picks the address of its server.
func (s *Site) Build(b Baseline, mtu int, ipv6 bool) (Target, error) {
	s.paths++
	p := &path{site: s, prefix: fmt.Sprintf("%s%d-%d-", namePrefix, os.Getpid(), s.paths), mtu: mtu}
	if p.mtu == 0 {
		p.mtu = underlayMTU
		if b == PlainVXLAN {
			p.mtu -= vxlanOverhead
		}
	}
	build := map[Baseline]func() error{
		Host: p.host, HostAcross: p.hostAcross, Plain: p.plain,
		PlainAcross: func() error { return p.across(false) }, PlainVXLAN: func() error { return p.across(true) },
	}[b]
	if build == nil {
		return Target{}, fmt.Errorf("baseline %q: not known", b)
	}
	if err := build(); err != nil {
		return Target{}, fmt.Errorf("build baseline %s: %w", b, err)
	}
	addr := p.server[0]
	if ipv6 {
		addr = p.server[1]
	}
	return Target{Name: string(b), About: about[b], Client: p.name("client"), Server: p.name("server"), Addr: addr}, nil
}

// path is a baseline being built. Its subnets are numbered: subnet n is
// 10.99.n.0/24 and fd00:99:n::/64.
type path struct {
	site   *Site
	prefix string
	mtu    int
	server []netip.Addr // IPv4, IPv6
}

func (p *path) name(role string) string { return p.prefix + role }

func (p *path) namespaces(roles ...string) error {
	for _, role := range roles {
		if err := netdev.CreateNetNS(p.name(role)); err != nil {
			return err
		}
		p.site.made = append(p.site.made, p.name(role))
	}
	return nil
}

// in returns host h of subnet n, in both families.
func in(n, h byte) []netip.Prefix {
	v6 := [16]byte{0: 0xfd, 3: 0x99, 5: n, 15: h}
	return []netip.Prefix{
		netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 99, n, h}), 24),
		netip.PrefixFrom(netip.AddrFrom16(v6), 64),
	}
}

func addrs(prefixes []netip.Prefix) []netip.Addr {
	var out []netip.Addr
	for _, p := range prefixes {
		out = append(out, p.Addr())
	}
	return out
}

// host: client .1 — .2 server, in subnet 1.
func (p *path) host() error {
	if err := p.namespaces("client", "server"); err != nil {
		return err
	}
	p.server = addrs(in(1, 2))
	return netdev.CreateVeth(
		netdev.LabLink{NetNS: p.name("client"), Name: "eth0", Addresses: in(1, 1)},
		netdev.LabLink{NetNS: p.name("server"), Name: "eth0", Addresses: in(1, 2)}, p.mtu)
}

func (p *path) hostAcross() error {
	if err := p.namespaces("client", "underlay", "server"); err != nil {
		return err
	}
	p.server = addrs(in(1, 2))
	if err := p.bridge(); err != nil {
		return err
	}
	if err := p.plug("client", in(1, 1), p.mtu); err != nil {
		return err
	}
	return p.plug("server", in(1, 2), p.mtu)
}

func (p *path) bridge() error {
	return netdev.CreateBridge(netdev.LabLink{NetNS: p.name("underlay"), Name: "br0"}, underlayMTU)
}

// plug gives role an eth0 with a port on the bridge.
func (p *path) plug(role string, addresses []netip.Prefix, mtu int) error {
	return netdev.CreateVeth(
		netdev.LabLink{NetNS: p.name(role), Name: "eth0", Addresses: addresses},
		netdev.LabLink{NetNS: p.name("underlay"), Name: role, Master: "br0"}, mtu)
}

// end gives role (.2 of subnet n) a link to its router (.1) and a default route.
func (p *path) end(role, router string, n byte) error {
	return netdev.CreateVeth(
		netdev.LabLink{NetNS: p.name(router), Name: role, Addresses: in(n, 1)},
		netdev.LabLink{NetNS: p.name(role), Name: "eth0", Addresses: in(n, 2), Gateways: addrs(in(n, 1))}, p.mtu)
}

// plain: client in subnet 1, server in subnet 2, the router in both.
func (p *path) plain() error {
	if err := p.namespaces("client", "router", "server"); err != nil {
		return err
	}
	p.server = addrs(in(2, 2))
	if err := netdev.EnableForwarding(p.name("router")); err != nil {
		return err
	}
	if err := p.end("client", "router", 1); err != nil {
		return err
	}
	return p.end("server", "router", 2)
}

// across: client in subnet 1 behind router1, server in subnet 2 behind
// router2; the routers meet in subnet 3 on a bridge and, with vxlan, in subnet
// 4 inside the tunnel.
func (p *path) across(vxlan bool) error {
	if err := p.namespaces("client", "router1", "underlay", "router2", "server"); err != nil {
		return err
	}
	p.server = addrs(in(2, 2))
	if err := p.bridge(); err != nil {
		return err
	}
	for i, role := range []string{"client", "server"} {
		own, other := byte(i+1), byte(2-i)
		if err := p.router(role, own, other, vxlan); err != nil {
			return err
		}
	}
	return nil
}

func (p *path) router(role string, own, other byte, vxlan bool) error {
	router := fmt.Sprintf("router%d", own)
	if err := netdev.EnableForwarding(p.name(router)); err != nil {
		return err
	}
	if err := p.end(role, router, own); err != nil {
		return err
	}
	if err := p.plug(router, in(3, own), underlayMTU); err != nil {
		return err
	}
	meet := byte(3)
	if vxlan {
		meet = 4
		err := netdev.CreateKernelVXLAN(netdev.KernelVXLAN{
			Link: netdev.LabLink{NetNS: p.name(router), Name: "vxlan0", Addresses: in(meet, own)},
			ID:   99, Port: 4789, Device: "eth0", Local: in(3, own)[0].Addr(), Remote: in(3, other)[0].Addr(),
			MTU: underlayMTU - vxlanOverhead,
		})
		if err != nil {
			return err
		}
	}
	for family, subnet := range in(other, 0) {
		if err := netdev.AddGatewayRoute(p.name(router), subnet, in(meet, other)[family].Addr()); err != nil {
			return err
		}
	}
	return nil
}
