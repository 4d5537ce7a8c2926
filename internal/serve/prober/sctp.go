// SPDX-License-Identifier: Apache-2.0

package prober

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"sync"
)

// Numbers of RFC 9260.
const (
	sctpHeader    = 12 // source port, destination port, tag, checksum
	chunkInit     = 1
	chunkInitAck  = 2
	chunkAbort    = 6
	initLength    = 20 // of an INIT or INIT-ACK chunk without parameters
	paramCookie   = 7
	paramHeader   = 4
	initWindow    = 65536
	initStreams   = 1
	maxSCTPPacket = 1500
)

// sctpSockets are one raw socket for each family. A raw socket is also what
// keeps a kernel without SCTP from answering "protocol unreachable".
type sctpSockets struct {
	v4, v6 *net.IPConn

	mu      sync.Mutex
	waiting map[sctpPeer]chan<- string // protected by mu; gets the answer, "" for a refusal
}

// sctpPeer is a probe under way.
type sctpPeer struct {
	remote netip.AddrPort
	local  uint16
}

// openSCTP opens the raw sockets and answers an INIT with an INIT-ACK that has
// the name as its cookie; on a port that is not served with an ABORT.
func (s *server) openSCTP(serve *sync.WaitGroup) error {
	v4, err := net.ListenIP("ip4:132", &net.IPAddr{IP: net.IPv4zero})
	if err != nil {
		return fmt.Errorf("open a raw SCTP socket (it needs CAP_NET_RAW): %w", err)
	}
	s.opens(v4)
	v6, err := net.ListenIP("ip6:132", &net.IPAddr{IP: net.IPv6unspecified})
	if err != nil {
		return fmt.Errorf("open a raw SCTP socket: %w", err)
	}
	s.opens(v6)
	s.sctp = &sctpSockets{v4: v4, v6: v6, waiting: map[sctpPeer]chan<- string{}}
	serve.Go(func() { s.receiveSCTP(v4) })
	serve.Go(func() { s.receiveSCTP(v6) })
	return nil
}

func (s *server) receiveSCTP(c *net.IPConn) {
	buf := make([]byte, maxSCTPPacket)
	for {
		n, from, err := c.ReadFromIP(buf)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue // an ICMP error of an earlier packet
		}
		addr, ok := netip.AddrFromSlice(from.IP)
		if !ok {
			continue
		}
		if p, ok := parseSCTP(buf[:n]); ok {
			s.handleSCTP(c, addr.Unmap(), p)
		}
	}
}

func (s *server) handleSCTP(c *net.IPConn, from netip.Addr, p sctpPacket) {
	if p.chunk != chunkInit {
		s.sctp.answered(sctpPeer{remote: netip.AddrPortFrom(from, p.sport), local: p.dport}, p)
		return
	}
	answer := sctpPacket{sport: p.dport, dport: p.sport, tag: p.initTag, chunk: chunkAbort}
	if slices.Contains(s.cfg.SCTP, int(p.dport)) {
		answer.chunk, answer.initTag, answer.cookie = chunkInitAck, rand.Uint32()|1, s.cfg.Name
	}
	c.WriteToIP(answer.marshal(), &net.IPAddr{IP: from.AsSlice()}) // lost answers are asked for again
}

func (k *sctpSockets) answered(peer sctpPeer, p sctpPacket) {
	k.mu.Lock()
	defer k.mu.Unlock()
	answer, ok := k.waiting[peer]
	if !ok || (p.chunk != chunkInitAck && p.chunk != chunkAbort) {
		return
	}
	delete(k.waiting, peer)
	answer <- p.cookie // has room for one
}

// probe sends an INIT from the local port and waits for what comes back.
func (k *sctpSockets) probe(ctx context.Context, local uint16, to netip.AddrPort) (string, error) {
	peer, answer := sctpPeer{remote: to, local: local}, make(chan string, 1)
	k.mu.Lock()
	k.waiting[peer] = answer
	k.mu.Unlock()
	defer func() {
		k.mu.Lock()
		delete(k.waiting, peer)
		k.mu.Unlock()
	}()
	c := k.v6
	if to.Addr().Is4() {
		c = k.v4
	}
	p := sctpPacket{sport: local, dport: to.Port(), chunk: chunkInit, initTag: rand.Uint32() | 1}
	if _, err := c.WriteToIP(p.marshal(), &net.IPAddr{IP: to.Addr().AsSlice()}); err != nil {
		return "", err
	}
	select {
	case name := <-answer:
		if name == "" {
			return "", errRefused
		}
		return name, nil
	case <-ctx.Done():
		return "", ctx.Err()
	}
}

// sctpPacket is a packet with one chunk.
type sctpPacket struct {
	sport, dport uint16
	tag          uint32 // verification tag
	chunk        uint8
	initTag      uint32 // of an INIT or INIT-ACK
	cookie       string // of an INIT-ACK
}

func (p sctpPacket) marshal() []byte {
	b := make([]byte, sctpHeader, 64+len(p.cookie))
	binary.BigEndian.PutUint16(b[0:], p.sport)
	binary.BigEndian.PutUint16(b[2:], p.dport)
	binary.BigEndian.PutUint32(b[4:], p.tag)
	if p.chunk == chunkAbort {
		b = append(b, chunkAbort, 0, 0, 4)
	} else {
		length := initLength
		if p.cookie != "" {
			length += paramHeader + len(p.cookie)
		}
		b = append(b, p.chunk, 0)
		b = binary.BigEndian.AppendUint16(b, uint16(length))
		b = binary.BigEndian.AppendUint32(b, p.initTag)
		b = binary.BigEndian.AppendUint32(b, initWindow)
		b = binary.BigEndian.AppendUint16(b, initStreams)
		b = binary.BigEndian.AppendUint16(b, initStreams)
		b = binary.BigEndian.AppendUint32(b, p.initTag) // first transmission sequence number
	}
	if p.cookie != "" {
		b = binary.BigEndian.AppendUint16(b, paramCookie)
		b = binary.BigEndian.AppendUint16(b, uint16(paramHeader+len(p.cookie)))
		b = append(b, p.cookie...)
	}
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	binary.LittleEndian.PutUint32(b[8:], crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)))
	return b
}

// parseSCTP reads a packet that a prober may have sent; ok is false for others.
func parseSCTP(b []byte) (p sctpPacket, ok bool) {
	if len(b) < sctpHeader+4 {
		return p, false
	}
	sum := binary.LittleEndian.Uint32(b[8:])
	copy(b[8:12], []byte{0, 0, 0, 0})
	if crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)) != sum {
		return p, false
	}
	p.sport, p.dport, p.tag = binary.BigEndian.Uint16(b[0:]), binary.BigEndian.Uint16(b[2:]), binary.BigEndian.Uint32(b[4:])
	chunk := b[sctpHeader:]
	p.chunk = chunk[0]
	length := int(binary.BigEndian.Uint16(chunk[2:]))
	if p.chunk != chunkInit && p.chunk != chunkInitAck {
		return p, true
	}
	if length < initLength || length > len(chunk) {
		return p, false
	}
	p.initTag = binary.BigEndian.Uint32(chunk[4:])
	if param := chunk[initLength:length]; len(param) > paramHeader && binary.BigEndian.Uint16(param) == paramCookie {
		p.cookie = string(param[paramHeader:])
	}
	return p, true
}
