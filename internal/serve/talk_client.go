// SPDX-License-Identifier: Apache-2.0

package serve

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// TalkConfig says how to talk to a TalkServer.
type TalkConfig struct {
	Target   string        // HOST:PORT for TCP, HOST:PORT/udp
	Count    int           // messages; 0 until ctx ends
	Interval time.Duration // from one message to the next
	Timeout  time.Duration // to connect, and for each answer
	Size     int           // of a message, in bytes
	// SourcePort is the client's; 0 is any free one.
	SourcePort int
	// Each makes a new socket for each message, Reopen only after an error;
	// otherwise all use the first one.
	Each, Reopen bool
	// Unconnected sends datagrams from a socket that is not connected.
	Unconnected bool
	// Reset ends TCP connections at once, so that their port is free again.
	Reset bool
}

// Validate checks what users choose.
func (c TalkConfig) Validate() error {
	const maxMessage, least = 65507, 16
	switch {
	case c.Count < 0:
		return fmt.Errorf("count %d: want 0 or more", c.Count)
	case c.Interval < 0:
		return fmt.Errorf("interval %s: want 0s or more", c.Interval)
	case c.Timeout <= 0:
		return fmt.Errorf("timeout %s: want more than 0s", c.Timeout)
	case c.Size < least || c.Size > maxMessage:
		return fmt.Errorf("size %d: want %d to %d", c.Size, least, maxMessage)
	case c.SourcePort < 0 || c.SourcePort > 65535:
		return fmt.Errorf("source port %d: want 0 to 65535", c.SourcePort)
	case c.Unconnected && !strings.HasSuffix(c.Target, "/udp"):
		return errors.New("unconnected: want a target with /udp")
	}
	return nil
}

// Reply is what became of one message.
type Reply struct {
	Number int // from 1
	// Local and Peer are the two ends as the client sees them: Peer is who it
	// is connected to, or whom the answer came from where it is not.
	Local, Peer string
	Text        string // the first line of the answer
	Server      string // the first word of it
	Size        int    // of the answer, in bytes
	Took        time.Duration
	Err         error
}

// talker is one run of Talk.
type talker struct {
	cfg    TalkConfig
	host   string
	udp    bool
	conn   net.Conn       // nil before the first message, and after an error with Reopen
	packet net.PacketConn // instead of conn, where it is not connected
	to     net.Addr       // of packet
	lines  *bufio.Reader  // of a TCP connection
}

// Talk sends messages and calls each for what becomes of every one. It ends
// early with a connection that was cut, unless it may make a new one.
func Talk(ctx context.Context, cfg TalkConfig, each func(Reply)) error {
	if err := cfg.Validate(); err != nil {
		return err
	}
	t := &talker{cfg: cfg}
	t.host, t.udp = strings.CutSuffix(cfg.Target, "/udp")
	defer t.close()
	began := time.Now()
	for n := 1; cfg.Count == 0 || n <= cfg.Count; n++ {
		r := t.once(ctx, n)
		if ctx.Err() != nil {
			return nil
		}
		each(r)
		if cfg.Each || r.Err != nil && cfg.Reopen {
			t.close()
		}
		if r.Err != nil && !t.udp && !cfg.Each && !cfg.Reopen {
			return nil
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(time.Until(began.Add(time.Duration(n) * cfg.Interval))):
		}
	}
	return nil
}

func (t *talker) close() {
	if t.conn != nil {
		if tcp, ok := t.conn.(*net.TCPConn); ok && t.cfg.Reset {
			tcp.SetLinger(0)
		}
		t.conn.Close()
	}
	if t.packet != nil {
		t.packet.Close()
	}
	t.conn, t.packet = nil, nil
}

func (t *talker) open(ctx context.Context) error {
	if t.conn != nil || t.packet != nil {
		return nil
	}
	d := dialerFrom(t.cfg.SourcePort, t.udp)
	d.Timeout = t.cfg.Timeout
	var err error
	switch {
	case t.cfg.Unconnected:
		if t.to, err = net.ResolveUDPAddr("udp", t.host); err != nil {
			return err
		}
		network := "udp4"
		if t.to.(*net.UDPAddr).IP.To4() == nil {
			network = "udp6"
		}
		t.packet, err = net.ListenPacket(network, ":"+strconv.Itoa(t.cfg.SourcePort))
	case t.udp:
		t.conn, err = d.DialContext(ctx, "udp", t.host)
	default:
		if t.conn, err = d.DialContext(ctx, "tcp", t.host); err == nil {
			t.lines = bufio.NewReaderSize(t.conn, maxDatagram)
		}
	}
	return err
}

// dialerFrom dials from a port, also one that was used just now; 0 is any.
func dialerFrom(port int, udp bool) net.Dialer {
	if port == 0 {
		return net.Dialer{}
	}
	d := net.Dialer{LocalAddr: &net.TCPAddr{Port: port}}
	if udp {
		d.LocalAddr = &net.UDPAddr{Port: port}
	}
	d.Control = func(_, _ string, raw syscall.RawConn) (err error) {
		controlErr := raw.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
		})
		return errors.Join(controlErr, err)
	}
	return d
}

// once sends message n and waits for its answer.
func (t *talker) once(ctx context.Context, n int) (r Reply) {
	r.Number = n
	began := time.Now()
	defer func() { r.Took = time.Since(began) }()
	if r.Err = t.open(ctx); r.Err != nil {
		return r
	}
	stop := context.AfterFunc(ctx, func() { t.setDeadline(time.Now()) })
	defer stop()
	t.setDeadline(time.Now().Add(t.cfg.Timeout))
	number := fmt.Sprintf("#%d", n)
	message := make([]byte, t.cfg.Size)
	filler{}.Read(message[copy(message, number+" "):])
	message = append(bytes.ReplaceAll(message[:len(message)-1], []byte("\n"), []byte(".")), '\n')
	var answer []byte
	if t.packet != nil {
		r.Local = t.packet.LocalAddr().String()
		answer, r.Peer, r.Err = t.exchangeUnconnected(message, number)
	} else {
		r.Local, r.Peer = t.conn.LocalAddr().String(), t.conn.RemoteAddr().String()
		answer, r.Err = t.exchange(message, number)
	}
	if r.Err != nil {
		return r
	}
	text, _, _ := bytes.Cut(answer, []byte("\n"))
	r.Text, r.Size = string(text), len(answer)
	r.Server, _, _ = strings.Cut(r.Text, " ")
	return r
}

func (t *talker) setDeadline(at time.Time) {
	if t.conn != nil {
		t.conn.SetDeadline(at)
	}
	if t.packet != nil {
		t.packet.SetDeadline(at)
	}
}

func (t *talker) exchange(message []byte, number string) ([]byte, error) {
	if _, err := t.conn.Write(message); err != nil {
		return nil, err
	}
	if !t.udp {
		return t.lines.ReadBytes('\n')
	}
	buf := make([]byte, maxDatagram)
	for {
		n, err := t.conn.Read(buf)
		if err != nil || answers(buf[:n], number) {
			return buf[:n], err
		}
	}
}

func (t *talker) exchangeUnconnected(message []byte, number string) ([]byte, string, error) {
	if _, err := t.packet.WriteTo(message, t.to); err != nil {
		return nil, "", err
	}
	buf := make([]byte, maxDatagram)
	for {
		n, from, err := t.packet.ReadFrom(buf)
		if err != nil {
			return nil, "", err
		}
		if answers(buf[:n], number) {
			return buf[:n], from.String(), nil
		}
	}
}

// answers tells whether a datagram is the answer to a message, not that to an
// earlier one that comes late.
func answers(b []byte, number string) bool {
	text, _, _ := bytes.Cut(b, []byte("\n"))
	return bytes.HasSuffix(text, []byte(": "+number))
}
