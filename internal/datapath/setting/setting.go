// SPDX-License-Identifier: Apache-2.0

// Package setting holds what the datapath programs are told when they are
// loaded: constants of the node, and limits of its connections.
package setting

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/features"

	"github.com/weft-mesh/weft/internal/addr"
	"github.com/weft-mesh/weft/internal/datapath/pin"
)

// Node are the constants of this node. An address of a family that the node
// does not have is the zero Addr.
type Node struct {
	UplinkIfindex int
	UplinkMTU     int    // bytes, L3
	TunnelIfindex int    // 0: native routing
	TunnelPort    uint16 // UDP
	TunnelMTU     int    // bytes, L3, inner
	IPv4, IPv6    netip.Addr
	Gateway4      netip.Addr // of the pods
	Gateway6      netip.Addr
	Masquerade    bool
	FirstPort     uint16 // of masqueraded connections
	LastPort      uint16
	// Source ports of clients of services from outside, where the backend is not
	// of this node; apart from those of masqueraded connections.
	ServiceFirstPort uint16
	ServiceLastPort  uint16
	ServiceDSR       bool // backends of other nodes answer clients from outside by themselves; native routing only
	Lifetimes        Lifetimes
	MaxPerPod        int           // connections of one address of a pod; 0: no limit
	KeepEstablished  bool          // connections that policy forbids since a change go on
	ReportInterval   time.Duration // between two updates of one connection, whole seconds; 0: none
}

// Lifetimes is how long conntrack keeps a connection after its last packet, in
// whole seconds.
type Lifetimes struct {
	TCPSyn         time.Duration // handshake not complete
	TCPEstablished time.Duration
	TCPClosing     time.Duration // both FINs or a RST were seen
	UDP            time.Duration // no answer yet
	UDPReplied     time.Duration
	Other          time.Duration // ICMP and the rest
}

// Apply writes the settings into the variables that spec has.
func (n Node) Apply(spec *ebpf.CollectionSpec) error {
	for name, value := range n.variables() {
		v, ok := spec.Variables[name]
		if !ok {
			continue
		}
		if err := v.Set(value); err != nil {
			return fmt.Errorf("set %s: %w", name, err)
		}
	}
	return nil
}

func (n Node) variables() map[string]any {
	kernelAddr := func(a netip.Addr) pin.KernelAddr { return pin.KernelAddr{B: addr.To16(a)} }
	seconds := func(d time.Duration) uint32 { return uint32(d / time.Second) }
	return map[string]any{
		"uplink_ifindex":        uint32(n.UplinkIfindex),
		"uplink_mtu":            uint32(n.UplinkMTU),
		"tunnel_ifindex":        uint32(n.TunnelIfindex),
		"tunnel_mtu":            uint32(n.TunnelMTU),
		"node_v4":               kernelAddr(n.IPv4),
		"node_v6":               kernelAddr(n.IPv6),
		"gateway_v4":            kernelAddr(n.Gateway4),
		"gateway_v6":            kernelAddr(n.Gateway6),
		"masquerade_enabled":    n.Masquerade,
		"masquerade_first_port": n.FirstPort,
		"masquerade_last_port":  n.LastPort,
		"service_first_port":    n.ServiceFirstPort,
		"service_last_port":     n.ServiceLastPort,
		"service_dsr":           n.ServiceDSR,
		"ct_tcp_syn":            seconds(n.Lifetimes.TCPSyn),
		"ct_tcp_established":    seconds(n.Lifetimes.TCPEstablished),
		"ct_tcp_closing":        seconds(n.Lifetimes.TCPClosing),
		"ct_udp":                seconds(n.Lifetimes.UDP),
		"ct_udp_replied":        seconds(n.Lifetimes.UDPReplied),
		"ct_other":              seconds(n.Lifetimes.Other),
		"tunnel_port":           networkOrder(n.TunnelPort),
		"ct_max_per_pod":        uint32(n.MaxPerPod),
		"ipv6_csum_flag":        ipv6ChecksumFlag(),
		"keep_established":      n.KeepEstablished,
		"report_interval":       seconds(n.ReportInterval),
	}
}

// networkOrder returns the port as a program reads it from a packet.
func networkOrder(port uint16) uint16 {
	var b [2]byte
	binary.BigEndian.PutUint16(b[:], port)
	return binary.NativeEndian.Uint16(b[:])
}

// ipv6ChecksumFlag is BPF_F_IPV6 of bpf_l4_csum_replace where this kernel has it.
func ipv6ChecksumFlag() uint64 {
	const bpfFIPv6, since = 1 << 7, 6<<16 | 16<<8
	if v, err := features.LinuxVersionCode(); err != nil || v < since {
		return 0
	}
	return bpfFIPv6
}
