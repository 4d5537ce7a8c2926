// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net"
	"strings"

	"github.com/vishvananda/netlink"
)

// HostPrefix begins the name of the node's side of every pod link.
const HostPrefix = "wf"

// hostDigits is how many hexadecimal digits follow HostPrefix: the whole stays
// below the 15 characters of an interface name.
const hostDigits = 10

// HostName returns the name of the node's side of the link that belongs to
// seed ("CONTAINERID/INTERFACE"): always the same for the same seed.
func HostName(seed string) string {
	sum := sha256.Sum256([]byte(seed))
	return HostPrefix + hex.EncodeToString(sum[:])[:hostDigits]
}

// MACs returns the hardware addresses of both sides of the link that belongs
// to seed, locally administered, unicast, always the same for the same seed.
func MACs(seed string) (host, pod net.HardwareAddr) { return mac("host", seed), mac("pod", seed) }

func mac(side, seed string) net.HardwareAddr {
	sum := sha256.Sum256([]byte(side + " " + seed))
	m := net.HardwareAddr(sum[:6])
	m[0] = m[0]&^1 | 2
	return m
}

// Link is a device of the node.
type Link struct {
	Name    string
	Ifindex int
	MAC     net.HardwareAddr
	MTU     int
	Up      bool // administratively
}

// LinkByName returns the device called name; ok is false if there is none.
func (n *Net) LinkByName(name string) (l Link, ok bool, err error) {
	link, err := n.h.LinkByName(name)
	if notFound(err) {
		return Link{}, false, nil
	}
	if err != nil {
		return Link{}, false, fmt.Errorf("look up link %s: %w", name, err)
	}
	return toLink(link), true, nil
}

// PodLinks lists the node's sides of all pod links.
func (n *Net) PodLinks() ([]Link, error) {
	list, err := dump(n.h.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list links: %w", err)
	}
	var out []Link
	for _, l := range list {
		if l.Type() == "veth" && isHostName(l.Attrs().Name) {
			out = append(out, toLink(l))
		}
	}
	return out, nil
}

// DeleteLink removes the device called name; one that is absent is no error.
func (n *Net) DeleteLink(name string) error {
	link, err := n.h.LinkByName(name)
	if notFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("look up link %s: %w", name, err)
	}
	if err := n.h.LinkDel(link); err != nil && !notFound(err) {
		return fmt.Errorf("delete link %s: %w", name, err)
	}
	return nil
}

func toLink(l netlink.Link) Link {
	a := l.Attrs()
	return Link{Name: a.Name, Ifindex: a.Index, MAC: a.HardwareAddr, MTU: a.MTU, Up: a.Flags&net.FlagUp != 0}
}

func isHostName(name string) bool {
	digits, ok := strings.CutPrefix(name, HostPrefix)
	return ok && len(digits) == hostDigits && strings.Trim(digits, "0123456789abcdef") == ""
}
