// SPDX-License-Identifier: Apache-2.0

package prober

import (
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync"
	"time"

	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
)

// answerTime is how long a client has to take a TCP answer.
const answerTime = 5 * time.Second

// listenTCP answers every connection with the name and closes it.
func (s *server) listenTCP(serve *sync.WaitGroup, port int) error {
	l, err := net.Listen("tcp", net.JoinHostPort("", strconv.Itoa(port)))
	if err != nil {
		return fmt.Errorf("listen on TCP port %d: %w", port, err)
	}
	s.opens(l)
	serve.Go(func() {
		for {
			conn, err := l.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil {
				continue // the client has gone again
			}
			go s.answerTCP(conn)
		}
	})
	return nil
}

func (s *server) answerTCP(conn net.Conn) {
	defer conn.Close()
	if conn.SetDeadline(time.Now().Add(answerTime)) == nil {
		conn.Write([]byte(s.cfg.Name)) // a client that has gone needs no answer
	}
}

// listenUDP answers every datagram with the name, from the address that the
// client asked: a node has several.
func (s *server) listenUDP(serve *sync.WaitGroup, port int) error {
	c4, err := net.ListenPacket("udp4", net.JoinHostPort("0.0.0.0", strconv.Itoa(port)))
	if err != nil {
		return fmt.Errorf("listen on UDP port %d: %w", port, err)
	}
	s.opens(c4)
	p4 := ipv4.NewPacketConn(c4)
	if err := p4.SetControlMessage(ipv4.FlagDst, true); err != nil {
		return fmt.Errorf("ask for destinations on UDP port %d: %w", port, err)
	}
	c6, err := net.ListenPacket("udp6", net.JoinHostPort("::", strconv.Itoa(port)))
	if err != nil {
		return fmt.Errorf("listen on UDP port %d: %w", port, err)
	}
	s.opens(c6)
	p6 := ipv6.NewPacketConn(c6)
	if err := p6.SetControlMessage(ipv6.FlagDst, true); err != nil {
		return fmt.Errorf("ask for destinations on UDP port %d: %w", port, err)
	}
	serve.Go(func() { s.answerUDP4(p4) })
	serve.Go(func() { s.answerUDP6(p6) })
	return nil
}

func (s *server) answerUDP4(c *ipv4.PacketConn) {
	buf := make([]byte, maxName)
	for {
		_, cm, from, err := c.ReadFrom(buf)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err == nil && cm != nil {
			c.WriteTo([]byte(s.cfg.Name), &ipv4.ControlMessage{Src: cm.Dst}, from) // lost answers are asked for again
		}
	}
}

func (s *server) answerUDP6(c *ipv6.PacketConn) {
	buf := make([]byte, maxName)
	for {
		_, cm, from, err := c.ReadFrom(buf)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err == nil && cm != nil {
			c.WriteTo([]byte(s.cfg.Name), &ipv6.ControlMessage{Src: cm.Dst}, from) // lost answers are asked for again
		}
	}
}
