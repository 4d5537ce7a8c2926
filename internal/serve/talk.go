// SPDX-License-Identifier: Apache-2.0

package serve

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"
)

// TalkServer answers each line by TCP, and each datagram by UDP, with its name
// and what it heard from whom.
type TalkServer struct {
	Port int // TCP and UDP, all addresses; 0 is a free one
	Name string
	// Drain is how long open connections go on after ctx has ended.
	Drain time.Duration

	mu    sync.Mutex
	conns map[net.Conn]struct{} // protected by mu
	open  sync.WaitGroup        // of conns
}

// Run serves until ctx ends and the connections are closed or drained.
func (s *TalkServer) Run(ctx context.Context, log io.Writer) error {
	listener, err := net.Listen("tcp", net.JoinHostPort("", strconv.Itoa(s.Port)))
	if err != nil {
		return fmt.Errorf("listen by TCP: %w", err)
	}
	defer listener.Close()
	port := listener.Addr().(*net.TCPAddr).Port
	packets, err := listenPacket(port)
	if err != nil {
		return err
	}
	defer packets.Close()
	fmt.Fprintf(log, "%s: talk on port %d by TCP and UDP\n", s.Name, port)
	stop := context.AfterFunc(ctx, func() {
		listener.Close()
		packets.Close()
	})
	defer stop()
	s.conns = map[net.Conn]struct{}{}
	failed := make(chan error, 2)
	go func() { failed <- s.serveTCP(listener) }()
	go func() { failed <- s.serveUDP(packets) }()
	err = <-failed
	if errors.Is(err, net.ErrClosed) {
		err = nil
	}
	s.drain()
	return err
}

func (s *TalkServer) serveTCP(listener net.Listener) error {
	for {
		conn, err := listener.Accept()
		if err != nil {
			return fmt.Errorf("accept: %w", err)
		}
		s.mu.Lock()
		s.conns[conn] = struct{}{}
		s.open.Add(1)
		s.mu.Unlock()
		go s.talk(conn)
	}
}

// talk ends with the connection: an error of either side is the end.
func (s *TalkServer) talk(conn net.Conn) {
	defer s.open.Done()
	defer func() {
		conn.Close()
		s.mu.Lock()
		delete(s.conns, conn)
		s.mu.Unlock()
	}()
	lines := bufio.NewReaderSize(conn, maxDatagram)
	for {
		line, err := lines.ReadSlice('\n')
		if err != nil {
			return
		}
		if _, err := conn.Write(heard(s.Name, conn.RemoteAddr(), line, 0)); err != nil {
			return
		}
	}
}

func (s *TalkServer) drain() {
	timer := time.AfterFunc(s.Drain, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		for conn := range s.conns {
			conn.Close()
		}
	})
	defer timer.Stop()
	s.open.Wait()
}

func (s *TalkServer) serveUDP(packets net.PacketConn) error {
	buf := make([]byte, maxDatagram)
	for {
		n, from, err := packets.ReadFrom(buf)
		if errors.Is(err, net.ErrClosed) {
			return err
		}
		if err != nil {
			continue // an ICMP error of an earlier answer
		}
		packets.WriteTo(heard(s.Name, from, buf[:n], n), from)
	}
}

// heard is an answer of at least size bytes: who heard how much from whom, and
// the first word of it.
func heard(name string, from net.Addr, message []byte, size int) []byte {
	word, _, _ := strings.Cut(strings.TrimSpace(string(message[:min(len(message), 64)])), " ")
	text := fmt.Sprintf("%s heard %d bytes from %s: %s\n", name, len(message), from, word)
	if size <= len(text) {
		return []byte(text)
	}
	b := make([]byte, size)
	filler{}.Read(b[copy(b, text):])
	return b
}
