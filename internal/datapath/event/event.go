// SPDX-License-Identifier: Apache-2.0

// Package event reads what the datapath programs report: the first packet of
// each connection, periodic counters, closes, and every drop with its reason.
package event

import (
	"net/netip"
	"time"
)

// Type says why an event was sent; the numbers are those of enum event_type in
// bpf/lib/event.h.
type Type uint8

// The types of events.
const (
	TypeNew    Type = 1 // first packet of a connection
	TypeUpdate Type = 2 // counters of a connection that is not new
	TypeClose  Type = 3 // TCP connection closed (FIN seen both ways) or reset
	TypeDrop   Type = 4 // one dropped packet
)

// Direction is the side of the pod that saw the packet.
type Direction uint8

// The directions of events.
const (
	DirectionEgress  Direction = 1 // from a pod of this node
	DirectionIngress Direction = 2 // to a pod of this node
)

// Record is one event as the kernel saw it. Immutable.
type Record struct {
	Type      Type
	Direction Direction
	// Reason of a drop, by name ("spoofed-address"); empty otherwise.
	Reason string
	// CPU and Sequence number the events: each CPU counts its own from 0
	// without gaps, lost ones included.
	CPU      uint32
	Sequence uint64
	Time     time.Time // converted from CLOCK_MONOTONIC by the reader
	Protocol uint8     // IP protocol number
	// Source and Destination of this packet, before source NAT. Ports are 0
	// for protocols without (ICMP carries its echo identifier in both).
	Source, Destination netip.AddrPort
	// SourceIdentity and DestinationIdentity as the kernel knew them.
	SourceIdentity, DestinationIdentity uint64
	// Rule of network policy that refused a packet dropped as "policy"; 0: no
	// rule allows it. See internal/policy.
	Rule               uint32
	TCPFlags           uint8 // of the packet (FIN 1, SYN 2, RST 4, PSH 8, ACK 16)
	ICMPType, ICMPCode uint8
	// Ifindex of the device where the program ran.
	Ifindex uint32
	// Packets and Bytes of the connection so far, both directions; of the
	// packet for a drop.
	Packets, Bytes uint64
}

// Counters of one CPU since the maps were created.
type Counters struct {
	CPU       uint32
	Generated uint64 // events made, lost ones included; also the next Sequence
	Lost      uint64 // of those, the ones that found the ring full
}

// Source is where a flow observer gets its events.
type Source interface {
	// Read blocks for the next event. It returns os.ErrDeadlineExceeded when
	// none came for a while (so that the caller can look at Counters) and
	// os.ErrClosed after Close.
	Read(*Record) error
	// Counters returns one row for each possible CPU.
	Counters() ([]Counters, error)
	Close() error
}
