// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"
)

const (
	port    = 7000
	timeout = 5 * time.Second
)

// serve answers in h by TCP and UDP at its addresses and at more: each answer
// begins with a line that says which address it goes to, then comes what was
// sent.
func (h host) serve(t *testing.T, more ...netip.Addr) {
	t.Helper()
	for _, a := range append(slices.Clone(h.ips), more...) {
		at := netip.AddrPortFrom(a, port).String()
		var (
			tcp net.Listener
			udp net.PacketConn
		)
		err := h.Do(func() (err error) {
			if tcp, err = net.Listen("tcp", at); err != nil {
				return err
			}
			udp, err = net.ListenPacket("udp", at)
			return err
		})
		if err != nil {
			t.Fatalf("serve in %s: %v", h.name, err)
		}
		t.Cleanup(func() { tcp.Close(); udp.Close() })
		go serveTCP(tcp)
		go serveUDP(udp)
	}
}

func serveTCP(l net.Listener) {
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer conn.Close()
			fmt.Fprintln(conn, peer(conn.RemoteAddr()))
			_, _ = io.Copy(conn, conn)
		}()
	}
}

func serveUDP(c net.PacketConn) {
	b := make([]byte, 65536)
	for {
		n, from, err := c.ReadFrom(b)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err == nil {
			_, _ = c.WriteTo(append([]byte(peer(from).String()+"\n"), b[:n]...), from)
		}
	}
}

func peer(a net.Addr) netip.Addr {
	return netip.MustParseAddrPort(a.String()).Addr().Unmap()
}

func payload(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7 + i>>8)
	}
	return b
}

func (h host) dial(network string, to netip.Addr) (c net.Conn, err error) {
	err = h.Do(func() error {
		c, err = net.DialTimeout(network, netip.AddrPortFrom(to, port).String(), timeout)
		return err
	})
	return c, err
}

// tcp sends size bytes to the server at to, gets them back, and returns the
// address that the server saw.
func (h host) tcp(to netip.Addr, size int) (netip.Addr, error) {
	c, err := h.dial("tcp", to)
	if err != nil {
		return netip.Addr{}, err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(2 * timeout))
	sent := payload(size)
	go func() {
		_, _ = c.Write(sent)
		_ = c.(*net.TCPConn).CloseWrite()
	}()
	r := bufio.NewReader(c)
	line, err := r.ReadString('\n')
	if err != nil {
		return netip.Addr{}, err
	}
	got, err := io.ReadAll(r)
	if err != nil {
		return netip.Addr{}, fmt.Errorf("after %d bytes: %w", len(got), err)
	}
	if !bytes.Equal(got, sent) {
		return netip.Addr{}, fmt.Errorf("%d bytes came back from %d, not the same", len(got), size)
	}
	return netip.ParseAddr(strings.TrimSpace(line))
}

// chat sends and receives on c until stop is closed.
func chat(c net.Conn, stop <-chan struct{}) error {
	r := bufio.NewReader(c)
	_ = c.SetDeadline(time.Now().Add(2 * timeout))
	if _, err := r.ReadString('\n'); err != nil {
		return err
	}
	sent, got := payload(200), make([]byte, 200)
	for turn := 0; ; turn++ {
		select {
		case <-stop:
			return nil
		default:
		}
		_ = c.SetDeadline(time.Now().Add(timeout))
		if _, err := c.Write(sent); err != nil {
			return fmt.Errorf("turn %d with %s: %w", turn, c.RemoteAddr(), err)
		}
		if _, err := io.ReadFull(r, got); err != nil {
			return fmt.Errorf("turn %d with %s: %w", turn, c.RemoteAddr(), err)
		}
	}
}

// udp does the same as tcp with one datagram. It is sent up to tries times: a first one
// may be lost where the sender has to learn the MTU of the way.
func (h host) udp(to netip.Addr, size, tries int) (netip.Addr, error) {
	c, err := h.dial("udp", to)
	if err != nil {
		return netip.Addr{}, err
	}
	defer c.Close()
	sent, b := payload(size), make([]byte, 65536)
	for range tries {
		if _, err = c.Write(sent); err != nil {
			continue
		}
		_ = c.SetReadDeadline(time.Now().Add(timeout / time.Duration(tries)))
		var n int
		if n, err = c.Read(b); err != nil {
			continue
		}
		line, got, _ := bytes.Cut(b[:n], []byte("\n"))
		if !bytes.Equal(got, sent) {
			return netip.Addr{}, fmt.Errorf("%d bytes came back from %d, not the same", len(got), size)
		}
		return netip.ParseAddr(string(line))
	}
	return netip.Addr{}, err
}

// ping sends one echo request and returns what ping(8) says.
func (h host) ping(to netip.Addr, args ...string) (string, error) {
	var out []byte
	err := h.Do(func() (err error) {
		out, err = exec.Command("ping", append([]string{"-n", "-c", "1", "-W", "2", to.String()}, args...)...).CombinedOutput()
		return err
	})
	return string(out), err
}

// sendTo sends one datagram and expects no answer.
func (h host) sendTo(to netip.Addr, port uint16, b []byte) error {
	return h.Do(func() error {
		c, err := net.Dial("udp", netip.AddrPortFrom(to, port).String())
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = c.Write(b)
		return err
	})
}
