// SPDX-License-Identifier: Apache-2.0

// Package pod owns the programs on the host side of every pod's veth pair and
// the map of this node's pod addresses.
package pod

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"

	"github.com/cilium/ebpf"

	"github.com/weft-mesh/weft/internal/addr"
	"github.com/weft-mesh/weft/internal/datapath/pin"
	"github.com/weft-mesh/weft/internal/datapath/setting"
)

//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -cflags "-O2 -g -mcpu=v3 -Wall -Werror -I../../../bpf/include -I../../../bpf" -no-global-types object ../../../bpf/pod.bpf.c

// Endpoint is a wired pod.
type Endpoint struct {
	Device   string // host side of the veth pair
	Ifindex  int    // of Device
	MAC      net.HardwareAddr
	HostMAC  net.HardwareAddr
	IPs      []netip.Addr
	Identity uint64
	Subject  uint32 // of policy; 0: none selects the pod
}

// Datapath attaches pods. Safe for concurrent use for different pods.
type Datapath struct {
	maps      *pin.Maps
	endpoints *ebpf.Map
	objects   objectPrograms

	mu sync.Mutex // held while an entry of endpoints is read and written
}

// Load loads the programs with the node's settings.
func Load(maps *pin.Maps, node setting.Node) (*Datapath, error) {
	spec, err := loadObject()
	if err != nil {
		return nil, fmt.Errorf("read pod object: %w", err)
	}
	if err := node.Apply(spec); err != nil {
		return nil, fmt.Errorf("pod object: %w", err)
	}
	d := &Datapath{maps: maps, endpoints: maps.Map("weft_endpoints")}
	if err := maps.Load(spec, &d.objects); err != nil {
		return nil, fmt.Errorf("pod object: %w", err)
	}
	return d, nil
}

// Attach puts the pod's datapath in force: its addresses are known before its
// first packet meets a program. Repeating it, after a restart or with another
// identity, changes what is there in place.
func (d *Datapath) Attach(ep *Endpoint) error {
	if len(ep.MAC) != 6 || len(ep.HostMAC) != 6 {
		return fmt.Errorf("attach %s: want two MAC addresses of 6 bytes, not %q and %q", ep.Device, ep.MAC, ep.HostMAC)
	}
	v := pin.KernelEndpoint{Ifindex: uint32(ep.Ifindex), Identity: ep.Identity, Subject: ep.Subject}
	copy(v.Mac[:], ep.MAC)
	copy(v.HostMac[:], ep.HostMAC)
	if err := d.write(ep.IPs, v); err != nil {
		return err
	}
	// ingress (from the pod) last: until then nothing of the pod is forwarded
	if err := d.maps.Attach(pin.Attachment{Device: ep.Device, Ifindex: ep.Ifindex, Hook: ebpf.AttachTCXEgress, Program: d.objects.ToPod}); err != nil {
		return err
	}
	return d.maps.Attach(pin.Attachment{Device: ep.Device, Ifindex: ep.Ifindex, Hook: ebpf.AttachTCXIngress, Program: d.objects.FromPod})
}

func (d *Datapath) write(ips []netip.Addr, v pin.KernelEndpoint) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, a := range ips {
		if err := d.endpoints.Put(pin.KernelAddr{B: addr.To16(a)}, v); err != nil {
			return fmt.Errorf("write endpoint %s: %w", a, err)
		}
	}
	return nil
}

// SetSubject puts another policy in force for an attached pod, one address
// after the other; addresses that are not, or another pod's by now, are left
// alone.
func (d *Datapath) SetSubject(ips []netip.Addr, ifindex int, subject uint32) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, a := range ips {
		var v pin.KernelEndpoint
		key := pin.KernelAddr{B: addr.To16(a)}
		err := d.endpoints.Lookup(key, &v)
		if errors.Is(err, ebpf.ErrKeyNotExist) || err == nil && v.Ifindex != uint32(ifindex) {
			continue
		}
		if err == nil && v.Subject != subject {
			v.Subject = subject
			err = d.endpoints.Put(key, v)
		}
		if err != nil {
			return fmt.Errorf("set policy of endpoint %s: %w", a, err)
		}
	}
	return nil
}

// Subjects are those that attached pods have.
func (d *Datapath) Subjects() (map[uint32]bool, error) {
	var (
		k   pin.KernelAddr
		v   pin.KernelEndpoint
		out = map[uint32]bool{}
		it  = d.endpoints.Iterate()
	)
	for it.Next(&k, &v) {
		out[v.Subject] = true
	}
	if err := it.Err(); err != nil {
		return nil, fmt.Errorf("walk endpoints: %w", err)
	}
	return out, nil
}

// Detach forgets the pod. An unknown one is not an error; an address that
// another device has taken over by now stays.
func (d *Datapath) Detach(ep *Endpoint) error {
	var errs []error
	for _, a := range ep.IPs {
		errs = append(errs, d.forget(pin.KernelAddr{B: addr.To16(a)}, ep.Ifindex))
	}
	errs = append(errs, d.maps.Detach(ep.Device))
	return errors.Join(errs...)
}

func (d *Datapath) forget(key pin.KernelAddr, ifindex int) error {
	var v pin.KernelEndpoint
	err := d.endpoints.Lookup(key, &v)
	if errors.Is(err, ebpf.ErrKeyNotExist) || err == nil && v.Ifindex != uint32(ifindex) {
		return nil
	}
	if err == nil {
		err = d.endpoints.Delete(key)
	}
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("delete endpoint %s: %w", addr.From16(key.B), err)
	}
	return nil
}

// Attached says whether the pod's addresses and both programs are in force.
func (d *Datapath) Attached(ep *Endpoint) error {
	for _, a := range ep.IPs {
		var v pin.KernelEndpoint
		if err := d.endpoints.Lookup(pin.KernelAddr{B: addr.To16(a)}, &v); err != nil {
			return fmt.Errorf("endpoint %s: %w", a, err)
		}
		if int(v.Ifindex) != ep.Ifindex {
			return fmt.Errorf("endpoint %s belongs to device %d, want %d", a, v.Ifindex, ep.Ifindex)
		}
	}
	attached, err := d.maps.Attachments()
	if err != nil {
		return err
	}
	n := 0
	for _, a := range attached {
		if a.Device == ep.Device && a.Ifindex == ep.Ifindex {
			n++
		}
	}
	if n != 2 {
		return fmt.Errorf("%d of 2 programs are attached to %s", n, ep.Device)
	}
	return nil
}

// Prune forgets every pod that is not among want.
func (d *Datapath) Prune(want []*Endpoint) error {
	ifindexes, devices := map[pin.KernelAddr]int{}, map[string]bool{}
	for _, ep := range want {
		devices[ep.Device] = true
		for _, a := range ep.IPs {
			ifindexes[pin.KernelAddr{B: addr.To16(a)}] = ep.Ifindex
		}
	}
	var (
		k    pin.KernelAddr
		v    pin.KernelEndpoint
		gone []pin.KernelAddr
		it   = d.endpoints.Iterate()
	)
	for it.Next(&k, &v) {
		if want, ok := ifindexes[k]; !ok || want != int(v.Ifindex) {
			gone = append(gone, k)
		}
	}
	if err := it.Err(); err != nil {
		return fmt.Errorf("walk endpoints: %w", err)
	}
	for _, k := range gone {
		if err := d.endpoints.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("delete endpoint %s: %w", addr.From16(k.B), err)
		}
	}
	attached, err := d.maps.Attachments()
	if err != nil {
		return err
	}
	for _, a := range attached {
		if isPodProgram(a.Program) && !devices[a.Device] || a.Ifindex == 0 {
			if err := d.maps.Detach(a.Device); err != nil {
				return err
			}
		}
	}
	return nil
}

func isPodProgram(name string) bool { return name == "from_pod" || name == "to_pod" }

// Close closes the programs; attached ones stay in force.
func (d *Datapath) Close() error { return d.objects.Close() }
