// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"errors"
	"fmt"
	"runtime"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// A ProbeNet is an empty network namespace to try things in. Its verbs make
// what they try and remove it again; an error means that this kernel cannot.
type ProbeNet struct {
	h     *netlink.Handle
	links int
}

// InProbeNet runs f on a thread of its own in a new network namespace, which
// goes away with the thread. f must not start goroutines that need it.
func InProbeNet(f func(*ProbeNet) error) error {
	done := make(chan error, 1)
	go func() {
		// Never unlocked: the thread ends with the goroutine.
		runtime.LockOSThread()
		done <- inNewNet(f)
	}()
	return <-done
}

func inNewNet(f func(*ProbeNet) error) error {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("make a network namespace: %w", err)
	}
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("open rtnetlink: %w", err)
	}
	defer h.Close()
	lo, err := h.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find the loopback device: %w", err)
	}
	if err := h.LinkSetUp(lo); err != nil {
		return fmt.Errorf("set the loopback device up: %w", err)
	}
	return f(&ProbeNet{h: h})
}

// Veth makes a veth pair, up, and returns the index of one end.
func (p *ProbeNet) Veth() (int, error) {
	l, err := p.veth()
	if err != nil {
		return 0, err
	}
	return l.Attrs().Index, nil
}

func (p *ProbeNet) veth() (netlink.Link, error) {
	a, b := p.name(), p.name()
	if err := p.h.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: a}, PeerName: b}); err != nil {
		return nil, fmt.Errorf("make a veth pair: %w", err)
	}
	for _, n := range []string{b, a} {
		l, err := p.h.LinkByName(n)
		if err != nil {
			return nil, fmt.Errorf("find veth %s: %w", n, err)
		}
		if err := p.h.LinkSetUp(l); err != nil {
			return nil, fmt.Errorf("set veth %s up: %w", n, err)
		}
	}
	return p.h.LinkByName(a)
}

func (p *ProbeNet) name() string {
	p.links++
	return fmt.Sprintf("probe%d", p.links)
}

// Kind makes a device of a kind: "bridge", "vxlan" (with metadata for each
// packet), "geneve", "netkit", "wireguard", "ifb".
func (p *ProbeNet) Kind(kind string) error {
	attrs := netlink.LinkAttrs{Name: p.name()}
	var l netlink.Link
	switch kind {
	case "vxlan":
		l = &netlink.Vxlan{LinkAttrs: attrs, FlowBased: true, Port: 4789}
	case "geneve":
		l = &netlink.Geneve{LinkAttrs: attrs, FlowBased: true, Dport: 6081}
	case "netkit":
		l = &netlink.Netkit{LinkAttrs: attrs, Mode: netlink.NETKIT_MODE_L3}
	default:
		l = &netlink.GenericLink{LinkAttrs: attrs, LinkType: kind}
	}
	if err := p.h.LinkAdd(l); err != nil {
		return fmt.Errorf("make a %s device: %w", kind, err)
	}
	made, err := p.h.LinkByName(attrs.Name)
	if err != nil {
		return fmt.Errorf("find the %s device: %w", kind, err)
	}
	if err := p.h.LinkDel(made); err != nil {
		return fmt.Errorf("delete the %s device: %w", kind, err)
	}
	return nil
}

// Qdisc puts a queueing discipline without options on a veth device.
func (p *ProbeNet) Qdisc(kind string) error {
	l, err := p.veth()
	if err != nil {
		return err
	}
	defer p.h.LinkDel(l)
	q := &netlink.GenericQdisc{
		QdiscAttrs: netlink.QdiscAttrs{LinkIndex: l.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT},
		QdiscType:  kind,
	}
	if err := p.h.QdiscAdd(q); err != nil {
		return fmt.Errorf("add a %s qdisc: %w", kind, err)
	}
	return nil
}

// bigTCP is a packet size, in bytes, above what IP headers can say.
const bigTCP = 128 << 10

// BigTCP lets a veth device carry segments of more than 64 KiB over IPv4 and
// IPv6.
func (p *ProbeNet) BigTCP() error {
	l, err := p.veth()
	if err != nil {
		return err
	}
	defer p.h.LinkDel(l)
	if err := p.h.LinkSetGSOMaxSize(l, bigTCP); err != nil {
		return fmt.Errorf("set gso_max_size: %w", err)
	}
	if err := p.h.LinkSetGSOIPv4MaxSize(l, bigTCP); err != nil {
		return fmt.Errorf("set gso_ipv4_max_size: %w", err)
	}
	// A kernel that does not know the attribute ignores it.
	l, err = p.h.LinkByIndex(l.Attrs().Index)
	if err != nil {
		return fmt.Errorf("read the device back: %w", err)
	}
	if l.Attrs().GSOIPv4MaxSize != bigTCP {
		return fmt.Errorf("gso_ipv4_max_size: %w", errors.ErrUnsupported)
	}
	return nil
}
