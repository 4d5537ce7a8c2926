// SPDX-License-Identifier: Apache-2.0

// Package traffic is for benches: it makes small UDP datagrams faster than what
// is measured can take them, and counts those that arrive.
package traffic

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/weft-mesh/weft/internal/addr"
	"github.com/weft-mesh/weft/internal/datapath/pin"
)

//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -cflags "-O2 -g -mcpu=v3 -Wall -Werror -I../../../bpf/include -I../../../bpf" -no-global-types object ../../../bpf/traffic.bpf.c

// Stream is what is sent: datagrams over IPv4 in frames of 60 bytes.
type Stream struct {
	Ifindex  int // of the veth device that they leave by
	From, To net.HardwareAddr
	Src      netip.Addr
	Dst      netip.AddrPort
	Clients  int    // source ports that take turns, from 1024 on
	Arrived  uint16 // destination port with which they arrive
}

// frameLen is that of the shortest Ethernet frame, without its checksum.
const frameLen = 60

// frame is the first datagram.
func (s Stream) frame() []byte {
	b := make([]byte, 0, frameLen)
	b = append(append(b, s.To...), s.From...)
	b = append(b, 0x08, 0x00)
	ip := []byte{0x45, 0, 0, frameLen - 14, 0, 0, 0x40, 0, 64, unix.IPPROTO_UDP, 0, 0}
	ip = append(append(ip, s.Src.AsSlice()...), s.Dst.Addr().AsSlice()...)
	binary.BigEndian.PutUint16(ip[10:], checksum(ip))
	b = append(b, ip...)
	b = binary.BigEndian.AppendUint16(b, 1024)
	b = binary.BigEndian.AppendUint16(b, s.Dst.Port())
	b = binary.BigEndian.AppendUint16(b, frameLen-34)
	return append(b, make([]byte, frameLen-len(b))...)
}

func checksum(b []byte) uint16 {
	var sum uint32
	for i := 0; i < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum > 0xffff {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}

// Line is a source and a sink at the same device.
type Line struct {
	stream  Stream
	objects objectObjects
	sink    link.Link
}

// Sinks: where in the kernel arrivals are counted and dropped.
const (
	Frames  = "frames"  // by native XDP, for what is sent by XDP
	Packets = "packets" // by tcx, for what is sent as packets
)

// NewLine loads the programs and attaches the sink. It runs in the network
// namespace of the device.
func NewLine(s Stream, sink string) (_ *Line, err error) {
	spec, err := loadObject()
	if err != nil {
		return nil, fmt.Errorf("read traffic object: %w", err)
	}
	var words [6]uint64
	copy((*[48]byte)(unsafe.Pointer(&words))[:], s.frame())
	for name, v := range map[string]any{
		"out_ifindex": uint32(s.Ifindex), "header": words, "clients": uint32(s.Clients), "arrived_port": networkOrder(s.Arrived),
	} {
		if err := spec.Variables[name].Set(v); err != nil {
			return nil, fmt.Errorf("traffic object: set %s: %w", name, err)
		}
	}
	l := &Line{stream: s}
	if err := spec.LoadAndAssign(&l.objects, nil); err != nil {
		return nil, fmt.Errorf("traffic object: %w", err)
	}
	defer func() {
		if err != nil {
			l.objects.Close()
		}
	}()
	if sink == Frames {
		l.sink, err = link.AttachXDP(link.XDPOptions{Interface: s.Ifindex, Program: l.objects.SinkFrames, Flags: link.XDPDriverMode})
	} else {
		l.sink, err = link.AttachTCX(link.TCXOptions{Interface: s.Ifindex, Program: l.objects.SinkPackets, Attach: ebpf.AttachTCXIngress})
	}
	if err != nil {
		return nil, fmt.Errorf("attach the sink: %w", err)
	}
	return l, nil
}

func networkOrder(port uint16) uint16 {
	var b [2]byte
	binary.BigEndian.PutUint16(b[:], port)
	return binary.NativeEndian.Uint16(b[:])
}

// Send sends n datagrams. It runs in the network namespace of the device.
func (l *Line) Send(n int) error {
	_, err := l.objects.Generate.Run(&ebpf.RunOptions{Data: l.stream.frame(), Repeat: uint32(n), Flags: unix.BPF_F_TEST_XDP_LIVE_FRAMES})
	if err != nil {
		return fmt.Errorf("send %d datagrams (live frames need Linux 5.18): %w", n, err)
	}
	return nil
}

// Arrived is how many arrived so far.
func (l *Line) Arrived() (uint64, error) {
	var perCPU []uint64
	if err := l.objects.Counts.Lookup(uint32(0), &perCPU); err != nil {
		return 0, fmt.Errorf("read the sink's counter: %w", err)
	}
	var n uint64
	for _, c := range perCPU {
		n += c
	}
	return n, nil
}

// Close takes the sink off.
func (l *Line) Close() error { return errors.Join(l.sink.Close(), l.objects.Close()) }

// Service is a node port with one backend on another node.
type Service struct {
	Frontend, Backend netip.AddrPort
	NodeMAC           net.HardwareAddr // of the backend's node
	Node              netip.Addr
	Others            int // services beside it
}

// Enter enters a service of UDP for clients from outside, and its next hop,
// into the maps of a node.
func Enter(maps *pin.Maps, s Service) error {
	const id = 1
	kernel := func(a netip.Addr) pin.KernelAddr { return pin.KernelAddr{B: addr.To16(a)} }
	value := pin.KernelService{Id: id, Flags: uint32(pin.KernelServiceFlagSERVICE_EXTERNAL)}
	value.Far.Id, value.Far.Count = id, 1
	for _, e := range []struct {
		name       string
		key, value any
	}{
		{"weft_backends", uint32(id), &pin.KernelBackend{Addr: kernel(s.Backend.Addr()), Port: networkOrder(s.Backend.Port()), Protocol: unix.IPPROTO_UDP}},
		{"weft_slots", &pin.KernelSlotKey{Set: id}, uint32(id)},
		{"weft_services", &pin.KernelServiceKey{Addr: kernel(s.Frontend.Addr()), Port: networkOrder(s.Frontend.Port()), Protocol: unix.IPPROTO_UDP}, &value},
		{"weft_neighbors", ptr(kernel(s.Node)), &pin.KernelNeighbor{Mac: [6]byte(s.NodeMAC)}},
	} {
		if err := maps.Map(e.name).Put(e.key, e.value); err != nil {
			return fmt.Errorf("enter a service into %s: %w", e.name, err)
		}
	}
	return others(maps, s.Others)
}

func ptr[T any](v T) *T { return &v }

// others enters n services that nobody asks.
func others(maps *pin.Maps, n int) error {
	if n == 0 {
		return nil
	}
	keys, values := make([]pin.KernelServiceKey, n), make([]pin.KernelService, n)
	for i := range n {
		a := netip.AddrFrom4([4]byte{10, byte(96 + i>>16), byte(i >> 8), byte(i)})
		keys[i] = pin.KernelServiceKey{Addr: pin.KernelAddr{B: addr.To16(a)}, Port: networkOrder(80), Protocol: unix.IPPROTO_TCP}
		values[i] = pin.KernelService{Id: uint32(10 + i)}
	}
	if _, err := maps.Map("weft_services").BatchUpdate(keys, values, nil); err != nil {
		return fmt.Errorf("enter %d services: %w", n, err)
	}
	return nil
}
