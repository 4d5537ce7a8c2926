// SPDX-License-Identifier: Apache-2.0

// Package xdp owns the program that sees the uplink's frames before the kernel
// makes packets of them: the deny list, and what is between clients outside and
// backends on other nodes. It only saves time: tcx does the same for what it
// does not take.
package xdp

import (
	"errors"
	"fmt"
	"net"

	"github.com/weft-mesh/weft/internal/datapath/pin"
	"github.com/weft-mesh/weft/internal/datapath/setting"
)

//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -cflags "-O2 -g -mcpu=v3 -Wall -Werror -I../../../bpf/include -I../../../bpf" -no-global-types object ../../../bpf/xdp.bpf.c

// Device is the uplink.
type Device struct {
	Name    string
	Ifindex int
	MAC     net.HardwareAddr
	Kind    string // of a virtual device: "veth", "bond", …
}

// Modes that can be asked for.
const (
	Off     = "off"
	Auto    = "auto" // native where the driver has it and does not lose by it, else generic
	Native  = string(pin.XDPNative)
	Generic = string(pin.XDPGeneric)
)

// Status is what is in force.
type Status struct {
	Mode string // Native, Generic or Off
	// Reason is why it is not what was asked for, or does less; may be empty.
	Reason string
}

// String is "native", or "generic (native: no such driver)".
func (s Status) String() string {
	if s.Reason == "" {
		return s.Mode
	}
	return s.Mode + " (" + s.Reason + ")"
}

// Datapath attaches the uplink.
type Datapath struct {
	maps    *pin.Maps
	device  Device
	tunnel  bool
	objects objectPrograms
}

// Load loads the program for a device, with the node's settings.
func Load(maps *pin.Maps, node setting.Node, device Device) (*Datapath, error) {
	spec, err := loadObject()
	if err != nil {
		return nil, fmt.Errorf("read XDP object: %w", err)
	}
	if err := node.Apply(spec); err != nil {
		return nil, fmt.Errorf("XDP object: %w", err)
	}
	var mac [6]byte
	copy(mac[:], device.MAC)
	if err := spec.Variables["uplink_mac"].Set(mac); err != nil {
		return nil, fmt.Errorf("XDP object: set uplink_mac: %w", err)
	}
	d := &Datapath{maps: maps, device: device, tunnel: node.TunnelIfindex != 0}
	if err := maps.Load(spec, &d.objects); err != nil {
		return nil, fmt.Errorf("XDP object (needs Linux 5.18): %w", err)
	}
	return d, nil
}

// Attach puts the program in force as mode says, and takes it off every other
// device. A program of an earlier agent is swapped, and never absent in between:
// Auto keeps the mode that it finds. An error of Auto means that no mode works:
// tcx does all the work then.
func (d *Datapath) Attach(mode string) (Status, error) {
	if err := d.prune(); err != nil {
		return Status{Mode: Off}, err
	}
	st, err := d.attach(mode)
	if err == nil && d.tunnel && st.Mode != Off {
		st.Reason = joinReasons(st.Reason, "deny list only: services go through the tunnel")
	}
	return st, err
}

func joinReasons(a, b string) string {
	if a == "" {
		return b
	}
	return a + "; " + b
}

func (d *Datapath) attach(mode string) (Status, error) {
	put := func(m pin.XDPMode) error {
		return d.maps.AttachXDP(d.device.Name, d.device.Ifindex, m, d.objects.FromWire)
	}
	switch mode {
	case Off:
		return Status{Mode: Off, Reason: "by configuration"}, d.maps.DetachXDP(d.device.Name)
	case Native, Generic:
		if err := put(pin.XDPMode(mode)); err != nil {
			return Status{Mode: Off}, err
		}
		return Status{Mode: mode}, nil
	case Auto:
		return d.auto(put)
	}
	return Status{Mode: Off}, fmt.Errorf("XDP mode %q: want auto, native, generic or off", mode)
}

func (d *Datapath) auto(put func(pin.XDPMode) error) (Status, error) {
	now, err := d.maps.XDPModeOf(d.device.Name)
	if err != nil {
		return Status{Mode: Off}, err
	}
	if now == pin.XDPGeneric {
		if err := put(now); err != nil {
			return Status{Mode: Off}, err
		}
		return Status{Mode: Generic, Reason: "as it was before this agent"}, nil
	}
	native := errVeth
	if d.device.Kind != "veth" {
		native = put(pin.XDPNative)
	}
	if native == nil {
		return Status{Mode: Native}, nil
	}
	if err := put(pin.XDPGeneric); err != nil {
		return Status{Mode: Off}, errors.Join(native, err)
	}
	return Status{Mode: Generic, Reason: native.Error()}, nil
}

// errVeth is why Auto does without: streams to pods have a third of their speed
// then, and the peer loses what is sent to it unless it has a program too.
var errVeth = errors.New("native XDP slows a veth device down")

// prune takes the program off devices that are not the uplink any more.
func (d *Datapath) prune() error {
	attached, err := d.maps.Attachments()
	if err != nil {
		return err
	}
	for _, a := range attached {
		if a.Device != d.device.Name && a.IsXDP() {
			if err := d.maps.DetachXDP(a.Device); err != nil {
				return err
			}
		}
	}
	return nil
}

// Close closes the program; an attached one stays in force.
func (d *Datapath) Close() error { return d.objects.Close() }
