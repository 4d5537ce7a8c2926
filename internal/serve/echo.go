// SPDX-License-Identifier: Apache-2.0

package serve

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
)

// maxDatagram is the largest UDP payload.
const maxDatagram = 65535

// Echo sends back whatever comes to port by TCP and by UDP, until ctx ends.
func Echo(ctx context.Context, port int, log io.Writer) error {
	listener, err := net.Listen("tcp", net.JoinHostPort("", strconv.Itoa(port)))
	if err != nil {
		return fmt.Errorf("listen by TCP: %w", err)
	}
	defer listener.Close()
	port = listener.Addr().(*net.TCPAddr).Port
	packets, err := listenPacket(port)
	if err != nil {
		return err
	}
	defer packets.Close()
	fmt.Fprintf(log, "echo on port %d by TCP and UDP\n", port)
	stop := context.AfterFunc(ctx, func() {
		listener.Close()
		packets.Close()
	})
	defer stop()
	failed := make(chan error, 2)
	go func() { failed <- echoTCP(listener) }()
	go func() { failed <- echoUDP(packets) }()
	if err := <-failed; !errors.Is(err, net.ErrClosed) {
		return err
	}
	return nil
}

func listenPacket(port int) (net.PacketConn, error) {
	packets, err := net.ListenPacket("udp", net.JoinHostPort("", strconv.Itoa(port)))
	if err != nil {
		return nil, fmt.Errorf("listen by UDP: %w", err)
	}
	return packets, nil
}

func echoTCP(listener net.Listener) error {
	for {
		conn, err := listener.Accept()
		if err != nil {
			return fmt.Errorf("accept: %w", err)
		}
		go func() {
			defer conn.Close()
			io.Copy(conn, conn) // an end of either side is the end
		}()
	}
}

func echoUDP(packets net.PacketConn) error {
	buf := make([]byte, maxDatagram)
	for {
		n, from, err := packets.ReadFrom(buf)
		if errors.Is(err, net.ErrClosed) {
			return err
		}
		if err != nil {
			continue // an ICMP error of an earlier answer
		}
		packets.WriteTo(buf[:n], from)
	}
}
