// SPDX-License-Identifier: Apache-2.0

package pin

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
)

// XDPMode is where in the kernel an XDP program runs.
type XDPMode string

// The modes.
const (
	XDPNative  XDPMode = "native"  // in the driver of the device
	XDPGeneric XDPMode = "generic" // in the kernel's stack, for any device
)

func (m XDPMode) hook() string { return "xdp_" + string(m) }

func (m XDPMode) flags() link.XDPAttachFlags {
	if m == XDPNative {
		return link.XDPDriverMode
	}
	return link.XDPGenericMode
}

func (m XDPMode) other() XDPMode {
	if m == XDPNative {
		return XDPGeneric
	}
	return XDPNative
}

// AttachXDP puts prog in force on a device and pins its link. One that is there
// in the same mode is updated in place; one in the other mode goes first, since
// no device has both.
func (m *Maps) AttachXDP(device string, ifindex int, mode XDPMode, prog *ebpf.Program) error {
	path := m.linkPath(device, mode.hook())
	done, err := adopt(path, Attachment{Device: device, Ifindex: ifindex, Program: prog, Hook: ebpf.AttachXDP})
	if err != nil || done {
		return err
	}
	if err := m.detachXDP(device, mode.other()); err != nil {
		return err
	}
	l, err := link.AttachXDP(link.XDPOptions{Interface: ifindex, Program: prog, Flags: mode.flags()})
	if err != nil {
		return fmt.Errorf("attach to %s by %s XDP: %w", device, mode, err)
	}
	defer l.Close()
	if err := l.Pin(path); err != nil {
		return fmt.Errorf("pin the XDP link of %s: %w", device, err)
	}
	return nil
}

// DetachXDP takes XDP off a device; an absent program is not an error.
func (m *Maps) DetachXDP(device string) error {
	return errors.Join(m.detachXDP(device, XDPNative), m.detachXDP(device, XDPGeneric))
}

// detachXDP detaches before it removes the pin: a link whose last reference goes
// is taken off some time later, and the other mode is refused until then.
func (m *Maps) detachXDP(device string, mode XDPMode) error {
	path := m.linkPath(device, mode.hook())
	l, err := link.LoadPinnedLink(path, nil)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open the XDP link of %s: %w", device, err)
	}
	defer l.Close()
	if err := l.Detach(); err != nil {
		return fmt.Errorf("detach XDP from %s: %w", device, err)
	}
	if err := os.Remove(path); err != nil {
		return fmt.Errorf("remove the XDP link of %s: %w", device, err)
	}
	return nil
}

// XDPModeOf says in which mode a device has a pinned XDP program; "" for none.
func (m *Maps) XDPModeOf(device string) (XDPMode, error) {
	attached, err := m.Attachments()
	if err != nil {
		return "", err
	}
	for _, a := range attached {
		for _, mode := range []XDPMode{XDPNative, XDPGeneric} {
			if a.Device == device && a.Ifindex != 0 && a.Hook == mode.hook() {
				return mode, nil
			}
		}
	}
	return "", nil
}

// IsXDP says whether the link is one of XDP.
func (a Attached) IsXDP() bool { return a.Hook == XDPNative.hook() || a.Hook == XDPGeneric.hook() }
