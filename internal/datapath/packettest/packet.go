// SPDX-License-Identifier: Apache-2.0

package packettest

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
)

// TCP flags of Packet.Flags.
const (
	FIN = 0x01
	SYN = 0x02
	RST = 0x04
	PSH = 0x08
	ACK = 0x10
)

// IP protocol numbers.
const (
	ICMP   = 1
	TCP    = 6
	UDP    = 17
	ICMPv6 = 58
	SCTP   = 132
)

// Packet describes an Ethernet frame; Bytes builds it with right lengths and
// checksums. It is a value: a case copies a good one and changes one field.
type Packet struct {
	EthSrc, EthDst net.HardwareAddr
	EtherType      uint16 // 0: that of the addresses
	Src, Dst       netip.Addr
	TTL            uint8  // or hop limit
	ID             uint32 // of a datagram's fragments
	DF             bool   // IPv4
	Options        int    // IPv4, bytes, a multiple of 4
	Extensions     []Extension
	Protocol       uint8
	Sport, Dport   uint16 // of TCP, UDP and SCTP
	Flags          uint8  // TCP
	Type, Code     uint8  // ICMP
	Rest           uint32 // ICMP, bytes 4 to 7
	NoChecksum     bool   // UDP
	Payload        []byte
	Fragment       *Fragment // nil: whole
}

// Fragment is the part of the L4 packet that the frame carries, in bytes.
type Fragment struct{ From, To int }

// Extension is an IPv6 extension header.
type Extension struct {
	Protocol uint8
	Words    uint8 // length in units of 8 bytes beyond the first 8
}

// V6 says which family the packet belongs to.
func (p Packet) V6() bool { return p.Src.Is6() }

// AddrPortSrc is the packet's source, with its port.
func (p Packet) AddrPortSrc() netip.AddrPort { return netip.AddrPortFrom(p.Src, p.Sport) }

// AddrPortDst is the packet's destination, with its port.
func (p Packet) AddrPortDst() netip.AddrPort { return netip.AddrPortFrom(p.Dst, p.Dport) }

// With returns a copy that f has changed.
func (p Packet) With(f func(*Packet)) Packet {
	f(&p)
	return p
}

// Reply returns the packet's answer: both ends swapped.
func (p Packet) Reply() Packet {
	p.Src, p.Dst = p.Dst, p.Src
	p.Sport, p.Dport = p.Dport, p.Sport
	switch {
	case p.Protocol == ICMP && p.Type == 8:
		p.Type = 0
	case p.Protocol == ICMPv6 && p.Type == 128:
		p.Type = 129
	}
	return p
}

// Bytes builds the frame. It panics on a packet that cannot be built, which is
// a mistake of the test.
func (p Packet) Bytes() []byte {
	eth := make([]byte, 0, 14)
	eth = append(append(eth, p.EthDst...), p.EthSrc...)
	etherType := p.EtherType
	if etherType == 0 {
		etherType = uint16(layers.EthernetTypeIPv4)
		if p.V6() {
			etherType = uint16(layers.EthernetTypeIPv6)
		}
	}
	return append(binary.BigEndian.AppendUint16(eth, etherType), p.L3()...)
}

// L3 builds the packet without its Ethernet header.
func (p Packet) L3() []byte {
	l4 := p.l4()
	whole := len(l4)
	part := Fragment{0, whole}
	if p.Fragment != nil {
		part = *p.Fragment
	}
	l4 = l4[part.From:part.To]
	if p.V6() {
		return p.ipv6(l4, part, whole)
	}
	ip := p.ipv4()
	ip.FragOffset = uint16(part.From / 8)
	if part.To < whole {
		ip.Flags |= layers.IPv4MoreFragments
	}
	return serialize(ip, gopacket.Payload(l4))
}

func (p Packet) ipv4() *layers.IPv4 {
	ip := &layers.IPv4{
		Version: 4, TTL: p.TTL, Id: uint16(p.ID), Protocol: layers.IPProtocol(p.Protocol),
		SrcIP: p.Src.AsSlice(), DstIP: p.Dst.AsSlice(),
	}
	if p.DF {
		ip.Flags = layers.IPv4DontFragment
	}
	for range p.Options {
		ip.Options = append(ip.Options, layers.IPv4Option{OptionType: 1}) // no operation
	}
	return ip
}

func (p Packet) ipv6(l4 []byte, part Fragment, whole int) []byte {
	var chain []byte
	next := p.Protocol
	if p.Fragment != nil {
		offset := uint16(part.From)
		if part.To < whole {
			offset |= 1
		}
		chain = binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint16([]byte{next, 0}, offset), p.ID)
		next = 44
	}
	for i := len(p.Extensions) - 1; i >= 0; i-- {
		e := p.Extensions[i]
		h := make([]byte, 8*(1+int(e.Words)))
		h[0], h[1] = next, e.Words
		switch e.Protocol {
		case 44: // a whole packet in one fragment
		case 51: // AH counts in units of 4 bytes, without the first two
			h[1] = byte(len(h)/4 - 2)
		default:
			h[2], h[3] = 1, byte(len(h)-4) // PadN
		}
		chain, next = append(h, chain...), e.Protocol
	}
	ip := &layers.IPv6{
		Version: 6, HopLimit: p.TTL, NextHeader: layers.IPProtocol(next),
		SrcIP: p.Src.AsSlice(), DstIP: p.Dst.AsSlice(),
	}
	return serialize(ip, gopacket.Payload(append(chain, l4...)))
}

// l4 builds everything behind the IP headers.
func (p Packet) l4() []byte {
	var pseudo gopacket.NetworkLayer = p.ipv4()
	if p.V6() {
		pseudo = &layers.IPv6{Version: 6, SrcIP: p.Src.AsSlice(), DstIP: p.Dst.AsSlice()}
	}
	switch p.Protocol {
	case TCP:
		tcp := &layers.TCP{
			SrcPort: layers.TCPPort(p.Sport), DstPort: layers.TCPPort(p.Dport), Seq: 1000, Ack: 2000, Window: 0xfff0,
			FIN: p.Flags&FIN != 0, SYN: p.Flags&SYN != 0, RST: p.Flags&RST != 0, PSH: p.Flags&PSH != 0, ACK: p.Flags&ACK != 0,
		}
		must(tcp.SetNetworkLayerForChecksum(pseudo))
		return serialize(tcp, gopacket.Payload(p.Payload))
	case UDP:
		udp := &layers.UDP{SrcPort: layers.UDPPort(p.Sport), DstPort: layers.UDPPort(p.Dport)}
		must(udp.SetNetworkLayerForChecksum(pseudo))
		b := serialize(udp, gopacket.Payload(p.Payload))
		if p.NoChecksum {
			b[6], b[7] = 0, 0
		}
		return b
	case ICMP:
		icmp := &layers.ICMPv4{TypeCode: layers.CreateICMPv4TypeCode(p.Type, p.Code), Id: uint16(p.Rest >> 16), Seq: uint16(p.Rest)}
		return serialize(icmp, gopacket.Payload(p.Payload))
	case ICMPv6:
		icmp := &layers.ICMPv6{TypeCode: layers.CreateICMPv6TypeCode(p.Type, p.Code)}
		must(icmp.SetNetworkLayerForChecksum(pseudo))
		return serialize(icmp, gopacket.Payload(append(binary.BigEndian.AppendUint32(nil, p.Rest), p.Payload...)))
	case SCTP:
		b := binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, p.Sport), p.Dport)
		return append(append(b, make([]byte, 8)...), p.Payload...)
	}
	return p.Payload
}

func serialize(ls ...gopacket.SerializableLayer) []byte {
	buf := gopacket.NewSerializeBuffer()
	must(gopacket.SerializeLayers(buf, gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true}, ls...))
	return append([]byte(nil), buf.Bytes()...)
}

func must(err error) {
	if err != nil {
		panic(fmt.Sprintf("build a packet: %v", err))
	}
}

// ARP describes an ARP packet.
type ARP struct {
	EthSrc, EthDst       net.HardwareAddr
	Operation            uint16 // 1 request, 2 reply
	SenderMAC, TargetMAC net.HardwareAddr
	SenderIP, TargetIP   netip.Addr
}

// With returns a copy that f has changed.
func (a ARP) With(f func(*ARP)) ARP {
	f(&a)
	return a
}

// Bytes builds the frame.
func (a ARP) Bytes() []byte {
	return serialize(
		&layers.Ethernet{SrcMAC: a.EthSrc, DstMAC: a.EthDst, EthernetType: layers.EthernetTypeARP},
		&layers.ARP{
			AddrType: layers.LinkTypeEthernet, Protocol: layers.EthernetTypeIPv4, HwAddressSize: 6, ProtAddressSize: 4,
			Operation: a.Operation, SourceHwAddress: a.SenderMAC, DstHwAddress: a.TargetMAC,
			SourceProtAddress: a.SenderIP.AsSlice(), DstProtAddress: a.TargetIP.AsSlice(),
		})
}
