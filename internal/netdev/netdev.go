// SPDX-License-Identifier: Apache-2.0

// Package netdev is weft's only door to rtnetlink and network namespaces: a
// handful of verbs over the links, addresses, routes and neighbours of the
// network namespace that the agent runs in (the node), and over the one link
// that a pod gets. Every verb may be repeated.
package netdev

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"runtime"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Route protocol numbers (rtm_protocol) that mark weft's own routes, so that
// nothing else is ever pruned. Both are in the range that rtnetlink leaves to
// users.
const (
	// NodeProtocol marks routes to the pods of other nodes.
	NodeProtocol = 0x77
	// PodProtocol marks the host route of each local pod.
	PodProtocol = 0x78
)

// dumpRetries bounds how often a dump is repeated that the kernel reports as
// interrupted by a change.
const dumpRetries = 20

// Net acts on one network namespace. It is safe for concurrent use.
type Net struct {
	h  *netlink.Handle
	ns netns.NsHandle
}

// Open returns a Net for the network namespace of the calling thread.
func Open() (*Net, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	ns, err := netns.Get()
	if err != nil {
		return nil, fmt.Errorf("open the current network namespace: %w", err)
	}
	h, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		ns.Close()
		return nil, fmt.Errorf("open rtnetlink: %w", err)
	}
	return &Net{h: h, ns: ns}, nil
}

// Close releases the sockets and the namespace. No verb may run at that time
// or later.
func (n *Net) Close() error {
	n.h.Close()
	if err := n.ns.Close(); err != nil {
		return fmt.Errorf("close the network namespace: %w", err)
	}
	return nil
}

// inNamespace runs fn on a thread that is in ns. The thread is given back only
// if it could return to where it was.
func inNamespace(ns netns.NsHandle, fn func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		back, err := netns.Get()
		if err != nil {
			runtime.UnlockOSThread()
			done <- fmt.Errorf("open the current network namespace: %w", err)
			return
		}
		defer back.Close()
		if err := netns.Set(ns); err != nil {
			runtime.UnlockOSThread()
			done <- fmt.Errorf("enter the network namespace: %w", err)
			return
		}
		err = fn()
		if netns.Set(back) == nil {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	return <-done
}

// dump repeats f while the kernel says that a change interrupted it.
func dump[T any](f func() ([]T, error)) ([]T, error) {
	var out []T
	var err error
	for range dumpRetries {
		if out, err = f(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			return out, err
		}
	}
	return out, err
}

func notFound(err error) bool {
	var e netlink.LinkNotFoundError
	return errors.As(err, &e) || errors.Is(err, unix.ENODEV)
}

func ipNet(p netip.Prefix) *net.IPNet {
	a := p.Addr()
	return &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(p.Bits(), a.BitLen())}
}

func prefix(n *net.IPNet) netip.Prefix {
	if n == nil {
		return netip.Prefix{}
	}
	a, ok := netip.AddrFromSlice(n.IP)
	if !ok {
		return netip.Prefix{}
	}
	ones, bits := n.Mask.Size()
	if a.Is4In6() && bits == 32 {
		a = a.Unmap()
	}
	return netip.PrefixFrom(a, ones)
}

func ipAddr(ip net.IP) netip.Addr {
	a, _ := netip.AddrFromSlice(ip)
	return a.Unmap()
}

func family(a netip.Addr) int {
	if a.Is4() {
		return netlink.FAMILY_V4
	}
	return netlink.FAMILY_V6
}

// sameFamily returns the first address of as in the family of a, or the zero
// Addr.
func sameFamily(as []netip.Addr, a netip.Addr) netip.Addr {
	for _, b := range as {
		if b.Is4() == a.Is4() {
			return b
		}
	}
	return netip.Addr{}
}
