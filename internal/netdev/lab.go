// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// netnsDir is where `ip netns` looks for named network namespaces.
const netnsDir = "/run/netns"

// NetNSPath is the file of the named network namespace, as `ip netns` knows it.
func NetNSPath(name string) string { return filepath.Join(netnsDir, name) }

// CreateNetNS makes a network namespace that `ip netns` lists under name, with
// its loopback device up. It fails where the name is taken.
func CreateNetNS(name string) (err error) {
	path := NetNSPath(name)
	if err := shareNetNSDir(); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_RDONLY|os.O_CREATE|os.O_EXCL, 0o444)
	if err != nil {
		return fmt.Errorf("name network namespace %s: %w", name, err)
	}
	f.Close()
	defer func() {
		if err != nil {
			err = errors.Join(err, DeleteNetNS(name))
		}
	}()
	// The thread is never unlocked, so it ends with the goroutine and nobody
	// else ever runs in the new namespace by accident.
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		done <- newNetNSAt(path)
	}()
	if err := <-done; err != nil {
		return fmt.Errorf("create network namespace %s: %w", name, err)
	}
	return nil
}

func newNetNSAt(path string) error {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("unshare: %w", err)
	}
	// No address has to wait for duplicate address detection.
	for _, key := range []string{"all", "default"} {
		file := filepath.Join("/proc/sys/net/ipv6/conf", key, "accept_dad")
		if err := os.WriteFile(file, []byte("0"), 0o644); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("turn off duplicate address detection by %s: %w", file, err)
		}
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find lo: %w", err)
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	if err := unix.Mount("/proc/thread-self/ns/net", path, "none", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind it to %s: %w", path, err)
	}
	return nil
}

// DeleteNetNS takes the name away; the namespace itself goes with its last
// process. A name that is not there is no error. An empty folder of namespaces
// goes too.
func DeleteNetNS(name string) error {
	path := NetNSPath(name)
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("unmount network namespace %s: %w", name, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove the name of network namespace %s: %w", name, err)
	}
	removeNetNSDir()
	return nil
}

// ListNetNS returns the names of all named network namespaces, sorted.
func ListNetNS() ([]string, error) {
	entries, err := os.ReadDir(netnsDir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list network namespaces: %w", err)
	}
	names := make([]string, 0, len(entries))
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names, nil
}

// LabLink is a device to make in a named network namespace.
type LabLink struct {
	NetNS string
	Name  string
	// Master is a bridge of the same namespace to enslave the device to; may be empty.
	Master string
	// Addresses with their prefix length; used at once, without duplicate
	// address detection.
	Addresses []netip.Prefix
	// Gateways get a default route each.
	Gateways []netip.Addr
}

// CreateBridge makes a bridge that forwards as soon as it is up.
func CreateBridge(l LabLink, mtu int) error {
	h, err := handleAt(l.NetNS)
	if err != nil {
		return err
	}
	defer h.Close()
	br := &netlink.Bridge{LinkAttrs: linkAttrs(l.Name, mtu)}
	if err := h.LinkAdd(br); err != nil {
		return fmt.Errorf("create bridge %s in %s: %w", l.Name, l.NetNS, err)
	}
	// A bridge takes the smallest MTU of its ports unless it was set by hand.
	if err := h.LinkSetMTU(br, mtu); err != nil {
		return fmt.Errorf("set the MTU of bridge %s in %s: %w", l.Name, l.NetNS, err)
	}
	return configure(h, l)
}

// CreateVeth makes a pair with one end in each namespace.
func CreateVeth(a, b LabLink, mtu int) error {
	h, err := handleAt(a.NetNS)
	if err != nil {
		return err
	}
	defer h.Close()
	peerNS, err := netns.GetFromName(b.NetNS)
	if err != nil {
		return fmt.Errorf("open network namespace %s: %w", b.NetNS, err)
	}
	defer peerNS.Close()
	veth := &netlink.Veth{
		LinkAttrs:     linkAttrs(a.Name, mtu),
		PeerName:      b.Name,
		PeerMTU:       uint32(mtu),
		PeerNamespace: netlink.NsFd(int(peerNS)),
	}
	if err := h.LinkAdd(veth); err != nil {
		return fmt.Errorf("create veth pair %s in %s and %s in %s: %w", a.Name, a.NetNS, b.Name, b.NetNS, err)
	}
	peer, err := netlink.NewHandleAt(peerNS, unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("open netlink in %s: %w", b.NetNS, err)
	}
	defer peer.Close()
	if err := configure(h, a); err != nil {
		return err
	}
	return configure(peer, b)
}

func linkAttrs(name string, mtu int) netlink.LinkAttrs {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	attrs.MTU = mtu
	return attrs
}

func handleAt(name string) (*netlink.Handle, error) {
	ns, err := netns.GetFromName(name)
	if err != nil {
		return nil, fmt.Errorf("open network namespace %s: %w", name, err)
	}
	defer ns.Close()
	h, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink in %s: %w", name, err)
	}
	return h, nil
}

func configure(h *netlink.Handle, l LabLink) error {
	link, err := h.LinkByName(l.Name)
	if err != nil {
		return fmt.Errorf("find %s in %s: %w", l.Name, l.NetNS, err)
	}
	if l.Master != "" {
		master, err := h.LinkByName(l.Master)
		if err != nil {
			return fmt.Errorf("find bridge %s in %s: %w", l.Master, l.NetNS, err)
		}
		if err := h.LinkSetMaster(link, master); err != nil {
			return fmt.Errorf("enslave %s to %s in %s: %w", l.Name, l.Master, l.NetNS, err)
		}
	}
	if err := h.LinkSetUp(link); err != nil {
		return fmt.Errorf("set %s up in %s: %w", l.Name, l.NetNS, err)
	}
	for _, p := range l.Addresses {
		a := &netlink.Addr{IPNet: &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}}
		if p.Addr().Is6() {
			a.Flags = unix.IFA_F_NODAD
		}
		if err := h.AddrAdd(link, a); err != nil {
			return fmt.Errorf("give %s to %s in %s: %w", p, l.Name, l.NetNS, err)
		}
	}
	for _, gw := range l.Gateways {
		r := &netlink.Route{LinkIndex: link.Attrs().Index, Gw: gw.AsSlice()}
		if err := h.RouteAdd(r); err != nil {
			return fmt.Errorf("route %s by %s in %s: %w", l.Name, gw, l.NetNS, err)
		}
	}
	return nil
}

// InNetNS runs f on a thread of its own that is in the network namespace of the
// file path. Sockets that f itself makes, not its goroutines, belong there for
// good.
func InNetNS(path string, f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // for ever: the thread ends with the goroutine
		ns, err := netns.GetFromPath(path)
		if err != nil {
			done <- fmt.Errorf("open network namespace: %w", err)
			return
		}
		defer ns.Close()
		if err := netns.Set(ns); err != nil {
			done <- fmt.Errorf("enter network namespace %s: %w", path, err)
			return
		}
		done <- f()
	}()
	return <-done
}
