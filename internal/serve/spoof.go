// SPDX-License-Identifier: Apache-2.0

package serve

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// SpoofConfig says which packets to forge.
type SpoofConfig struct {
	Source   netip.Addr     // written in the packets
	To       netip.AddrPort // of the same family
	Count    int
	Interval time.Duration
}

const (
	spoofPort = 40000 // source port
	spoofTTL  = 64
	udpHeader = 8
)

// SendSpoofed sends UDP datagrams with a source address of the caller's choice,
// by a raw socket: what a pod must not get away with. It returns how many were
// handed to the kernel.
func SendSpoofed(ctx context.Context, c SpoofConfig) (sent int, err error) {
	if c.Source.Is4() != c.To.Addr().Is4() {
		return 0, fmt.Errorf("source %s and destination %s: want the same address family", c.Source, c.To.Addr())
	}
	packet, family, to := udpPacket(c), unix.AF_INET6, unix.Sockaddr(&unix.SockaddrInet6{Addr: c.To.Addr().As16()})
	if c.Source.Is4() {
		family, to = unix.AF_INET, &unix.SockaddrInet4{Addr: c.To.Addr().As4()}
	}
	// IPPROTO_RAW: the packet comes with its own IP header.
	fd, err := unix.Socket(family, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
	if err != nil {
		return 0, fmt.Errorf("open a raw socket: %w", err)
	}
	defer unix.Close(fd)
	if family == unix.AF_INET6 {
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_HDRINCL, 1); err != nil {
			return 0, fmt.Errorf("ask to write the IPv6 header: %w", err)
		}
	}
	for sent < c.Count {
		if err := unix.Sendto(fd, packet, 0, to); err != nil {
			return sent, fmt.Errorf("send from %s to %s: %w", c.Source, c.To, err)
		}
		if sent++; sent == c.Count || c.Interval == 0 {
			continue
		}
		select {
		case <-ctx.Done():
			return sent, nil
		case <-time.After(c.Interval):
		}
	}
	return sent, nil
}

// udpPacket is a whole IP packet with a valid checksum.
func udpPacket(c SpoofConfig) []byte {
	payload := []byte("forged by weft send-spoofed\n")
	udp := make([]byte, udpHeader, udpHeader+len(payload))
	binary.BigEndian.PutUint16(udp[0:], spoofPort)
	binary.BigEndian.PutUint16(udp[2:], c.To.Port())
	binary.BigEndian.PutUint16(udp[4:], uint16(udpHeader+len(payload)))
	udp = append(udp, payload...)
	src, dst := c.Source.AsSlice(), c.To.Addr().AsSlice()
	pseudo := append(append([]byte{}, src...), dst...)
	pseudo = binary.BigEndian.AppendUint32(pseudo, uint32(len(udp)))
	pseudo = append(pseudo, 0, 0, 0, unix.IPPROTO_UDP)
	binary.BigEndian.PutUint16(udp[6:], checksum(append(pseudo, udp...)))
	if c.Source.Is4() {
		ip := make([]byte, 20)
		ip[0], ip[8], ip[9] = 0x45, spoofTTL, unix.IPPROTO_UDP
		binary.BigEndian.PutUint16(ip[2:], uint16(len(ip)+len(udp)))
		copy(ip[12:], src)
		copy(ip[16:], dst)
		binary.BigEndian.PutUint16(ip[10:], checksum(ip))
		return append(ip, udp...)
	}
	ip := make([]byte, 8, 40)
	ip[0], ip[6], ip[7] = 0x60, unix.IPPROTO_UDP, spoofTTL
	binary.BigEndian.PutUint16(ip[4:], uint16(len(udp)))
	return append(append(append(ip, src...), dst...), udp...)
}

// checksum is that of RFC 1071.
func checksum(b []byte) uint16 {
	var sum uint32
	for i := 0; i < len(b); i += 2 {
		word := uint32(b[i]) << 8
		if i+1 < len(b) {
			word |= uint32(b[i+1])
		}
		sum += word
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}
