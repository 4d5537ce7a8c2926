// SPDX-License-Identifier: Apache-2.0

package serve

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"
)

// Probe tries to reach "HOST:PORT", or "HOST:PORT/udp", once: by TCP with a
// handshake, by UDP with a datagram of size bytes that an echo server sends back.
// It returns how long that took.
func Probe(ctx context.Context, target string, size int, timeout time.Duration) (time.Duration, error) {
	address, network := target, "tcp"
	if i := strings.LastIndexByte(target, '/'); i >= 0 {
		address, network = target[:i], target[i+1:]
	}
	if network != "tcp" && network != "udp" {
		return 0, fmt.Errorf("%q: want HOST:PORT, HOST:PORT/tcp or HOST:PORT/udp", target)
	}
	if size < 1 || size > maxDatagram {
		return 0, fmt.Errorf("size %d of datagrams: want 1 to %d", size, maxDatagram)
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	began := time.Now()
	var d net.Dialer
	conn, err := d.DialContext(ctx, network, address)
	if err != nil {
		return 0, fmt.Errorf("reach %s: %w", target, err)
	}
	defer conn.Close()
	if network == "udp" {
		deadline, _ := ctx.Deadline()
		if err := conn.SetDeadline(deadline); err != nil {
			return 0, fmt.Errorf("reach %s: %w", target, err)
		}
		if err := pingUDP(conn, size); err != nil {
			return 0, fmt.Errorf("reach %s: %w", target, err)
		}
	}
	return time.Since(began), nil
}

func pingUDP(conn net.Conn, size int) error {
	ping := make([]byte, size)
	if _, err := (filler{}).Read(ping); err != nil {
		return err
	}
	if _, err := conn.Write(ping); err != nil {
		return err
	}
	buf := make([]byte, maxDatagram)
	n, err := conn.Read(buf)
	if err != nil {
		return err
	}
	if !bytes.Equal(buf[:n], ping) {
		return errors.New("the answer is not what was sent: is it an echo server?")
	}
	return nil
}
