// SPDX-License-Identifier: Apache-2.0

// Package node owns the programs on the node's own devices: its uplink and the
// tunnel between nodes.
package node

import (
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/weft-mesh/weft/internal/datapath/pin"
	"github.com/weft-mesh/weft/internal/datapath/setting"
)

//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -cflags "-O2 -g -mcpu=v3 -Wall -Werror -I../../../bpf/include -I../../../bpf" -no-global-types object ../../../bpf/node.bpf.c

// Device names a device of the node.
type Device struct {
	Name    string
	Ifindex int
}

// Datapath attaches the node's devices.
type Datapath struct {
	maps    *pin.Maps
	objects objectPrograms
}

// Load loads the programs with the node's settings.
func Load(maps *pin.Maps, node setting.Node) (*Datapath, error) {
	spec, err := loadObject()
	if err != nil {
		return nil, fmt.Errorf("read node object: %w", err)
	}
	if err := node.Apply(spec); err != nil {
		return nil, fmt.Errorf("node object: %w", err)
	}
	d := &Datapath{maps: maps}
	if err := maps.Load(spec, &d.objects); err != nil {
		return nil, fmt.Errorf("node object: %w", err)
	}
	return d, nil
}

// Attach puts the programs in force on the uplink and, where tunnel is not nil,
// on the tunnel device; it takes them off every device that is neither.
func (d *Datapath) Attach(uplink Device, tunnel *Device) error {
	// answers of the node's own services are translated before requests are
	want := []pin.Attachment{
		{Device: uplink.Name, Ifindex: uplink.Ifindex, Hook: ebpf.AttachTCXEgress, Program: d.objects.ToUplink},
		{Device: uplink.Name, Ifindex: uplink.Ifindex, Hook: ebpf.AttachTCXIngress, Program: d.objects.FromUplink},
	}
	if tunnel != nil {
		want = append(want,
			pin.Attachment{Device: tunnel.Name, Ifindex: tunnel.Ifindex, Hook: ebpf.AttachTCXEgress, Program: d.objects.ToTunnel},
			pin.Attachment{Device: tunnel.Name, Ifindex: tunnel.Ifindex, Hook: ebpf.AttachTCXIngress, Program: d.objects.FromTunnel})
	}
	keep := map[string]bool{}
	for _, a := range want {
		keep[a.Device] = true
		if err := d.maps.Attach(a); err != nil {
			return err
		}
	}
	return d.prune(keep)
}

func (d *Datapath) prune(keep map[string]bool) error {
	attached, err := d.maps.Attachments()
	if err != nil {
		return err
	}
	for _, a := range attached {
		switch a.Program {
		case "from_uplink", "to_uplink", "from_tunnel", "to_tunnel":
			if !keep[a.Device] {
				if err := d.maps.Detach(a.Device); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// Close closes the programs; attached ones stay in force.
func (d *Datapath) Close() error { return d.objects.Close() }
