// SPDX-License-Identifier: Apache-2.0

// Package prober is one process per pod that tests of policies talk to: it
// answers on ports by TCP, UDP and SCTP with its name, and tries to reach other
// probers when it is told to. It takes orders over a unix socket, which no
// policy of the network can get in the way of.
//
// SCTP is spoken without the kernel's help, which need not have it: an INIT and
// its INIT-ACK over raw sockets, as far as policies and conntrack can tell.
package prober

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"sync"
)

// Config says what a prober answers, and on what.
type Config struct {
	Name    string // what it answers; at most maxName bytes
	Control string // path of the unix socket for orders
	TCP     []int
	UDP     []int
	SCTP    []int
}

// maxName keeps an answer within one small datagram.
const maxName = 255

// Validate checks what users choose.
func (c Config) Validate() error {
	if c.Name == "" || len(c.Name) > maxName {
		return fmt.Errorf("name %q: want 1 to %d bytes", c.Name, maxName)
	}
	if c.Control == "" {
		return errors.New("control: want the path of a unix socket")
	}
	for protocol, ports := range map[string][]int{TCP: c.TCP, UDP: c.UDP, SCTP: c.SCTP} {
		for i, p := range ports {
			if p < 1 || p > 65535 {
				return fmt.Errorf("%s port %d: want 1 to 65535", protocol, p)
			}
			if slices.Contains(ports[:i], p) {
				return fmt.Errorf("%s port %d: want it once", protocol, p)
			}
		}
	}
	return nil
}

// server is a running prober.
type server struct {
	cfg   Config
	ports map[string]*portCounter // source ports by protocol
	sctp  *sctpSockets

	mu     sync.Mutex
	opened []io.Closer // protected by mu
	closed bool        // protected by mu
}

// Run answers and probes until ctx ends.
func Run(ctx context.Context, cfg Config, log io.Writer) error {
	if err := cfg.Validate(); err != nil {
		return err
	}
	s := &server{cfg: cfg, ports: map[string]*portCounter{}}
	for protocol, ports := range map[string][]int{TCP: cfg.TCP, UDP: cfg.UDP, SCTP: cfg.SCTP} {
		s.ports[protocol] = newPortCounter(ports)
	}
	var serve sync.WaitGroup
	defer serve.Wait()
	defer s.close()
	if err := s.listen(ctx, &serve); err != nil {
		return err
	}
	fmt.Fprintf(log, "prober %s: TCP %s, UDP %s, SCTP %s, orders at %s\n", cfg.Name, list(cfg.TCP), list(cfg.UDP), list(cfg.SCTP), cfg.Control)
	<-ctx.Done()
	return nil
}

// listen opens everything, the socket for orders last: whoever can give orders
// finds all ports open.
func (s *server) listen(ctx context.Context, serve *sync.WaitGroup) error {
	for _, port := range s.cfg.TCP {
		if err := s.listenTCP(serve, port); err != nil {
			return err
		}
	}
	for _, port := range s.cfg.UDP {
		if err := s.listenUDP(serve, port); err != nil {
			return err
		}
	}
	if err := s.openSCTP(serve); err != nil {
		return err
	}
	return s.listenControl(ctx, serve)
}

// opens has c closed at the end.
func (s *server) opens(c io.Closer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		c.Close()
		return
	}
	s.opened = append(s.opened, c)
}

func (s *server) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for _, c := range s.opened {
		c.Close()
	}
}

func list(ports []int) string {
	text := "none"
	for i, p := range ports {
		if i == 0 {
			text = strconv.Itoa(p)
			continue
		}
		text += "," + strconv.Itoa(p)
	}
	return text
}
