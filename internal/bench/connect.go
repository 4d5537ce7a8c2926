// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// Services are the addresses of many services that follow each other, all of
// one port.
type Services struct {
	First netip.Addr `json:"first"` // IPv4
	Count int        `json:"count"`
	Port  uint16     `json:"port"`
}

// at is the address of service i, from 0.
func (s Services) at(i int) netip.AddrPort {
	return netip.AddrPortFrom(nth(s.First, i), s.Port)
}

// nth is the i-th IPv4 address after first.
func nth(first netip.Addr, i int) netip.Addr {
	b := first.As4()
	n := uint32(b[0])<<24 | uint32(b[1])<<16 | uint32(b[2])<<8 | uint32(b[3])
	n += uint32(i)
	return netip.AddrFrom4([4]byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)})
}

// connects opens one connection after the other. Random services come in the
// same order in each run.
func (c *client) connects() error {
	random := rand.New(rand.NewPCG(1, 2))
	for c.phase != ended {
		to := c.to
		switch {
		case c.services == nil:
		case c.load.Same:
			to = c.services.at(c.services.Count - 1)
		default:
			to = c.services.at(random.IntN(c.services.Count))
		}
		if err := c.connectOnce(to); err != nil {
			return err
		}
	}
	return nil
}

// connectOnce counts what connect(2) took. Client and server go in step, as
// the client waits for the server's end; it closes by a reset, so that no
// side keeps anything of the connection.
func (c *client) connectOnce(to netip.AddrPort) error {
	fd, sa, err := dialer(to)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	before := time.Since(c.began)
	if err := connect(fd, sa); err != nil {
		return fmt.Errorf("connect to %s: %w", to, err)
	}
	after := time.Since(c.began)
	if err := setTimeout(fd, unix.SO_RCVTIMEO, tick); err != nil {
		return err
	}
	if err := readEOF(fd); err != nil {
		return err
	}
	if err := resetOnClose(fd); err != nil {
		return err
	}
	if err := c.count(before, after); err != nil {
		return err
	}
	return c.advance(after)
}

// resetOnClose makes close send a reset.
func resetOnClose(fd int) error {
	if err := unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}); err != nil {
		return fmt.Errorf("set SO_LINGER: %w", err)
	}
	return nil
}
