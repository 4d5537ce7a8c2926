// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// A client is a process that makes connections as it is told: in a network
// namespace and a cgroup that the test chose. Probes come in at its standard
// input, results go out at its standard output, both as gob.

// clientEnv makes the test binary a client.
const clientEnv = "WEFT_ORACLE_CLIENT"

// Way is how a socket is used.
type Way string

// The ways. All but TCP are of UDP.
const (
	TCP     Way = "TCP"
	Connect Way = "UDP by connect"
	SendTo  Way = "UDP by sendto"
)

// Probe asks for connections to one address: until Want different servers have
// answered and Least connections were made, or Most were.
type Probe struct {
	Way         Way
	Mapped      bool // IPv4 through an IPv6 socket
	From        netip.Addr
	To          netip.AddrPort
	Want        int
	Least, Most int
	Silence     time.Duration // no answer for so long is none
	Aside       bool          // beside the others: its order does not matter
}

// Result is what came of a probe.
type Result struct {
	Seen   map[Answer]int
	Errors map[string]int
	Tries  int
	Last   string // server that answered last
}

// Answer is what a server says: its name, and the client's address as it sees it.
type Answer struct{ Server, Client string }

// Names of errors.
const (
	refused = "refused"
	silent  = "no answer"
)

// runClient answers until the input ends.
func runClient(in io.Reader, out io.Writer) error {
	c := &client{next: firstPort}
	dec, enc := gob.NewDecoder(in), gob.NewEncoder(out)
	for {
		var probes []Probe
		if err := dec.Decode(&probes); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		if err := enc.Encode(c.run(probes)); err != nil {
			return err
		}
	}
}

const firstPort, lastPort = 33000, 60999

// client gives each connection a source port of its own, for what the datapath
// knows of an earlier one shall not matter.
type client struct {
	mu   sync.Mutex
	next int
}

func (c *client) run(probes []Probe) []Result {
	out := make([]Result, len(probes))
	var aside sync.WaitGroup
	gate := make(chan struct{}, 32)
	for i := range probes {
		if probes[i].Aside {
			aside.Go(func() {
				gate <- struct{}{}
				defer func() { <-gate }()
				out[i] = c.probe(&probes[i])
			})
		}
	}
	for i := range probes {
		if !probes[i].Aside {
			out[i] = c.probe(&probes[i])
		}
	}
	aside.Wait()
	return out
}

func (c *client) probe(p *Probe) Result {
	r := Result{Seen: map[Answer]int{}, Errors: map[string]int{}}
	servers := map[string]bool{}
	for r.Tries < p.Most && (r.Tries < p.Least || len(servers) < p.Want) && len(r.Errors) == 0 {
		r.Tries++
		a, err := c.connection(p)
		switch {
		case err == nil:
			r.Seen[a]++
			servers[a.Server], r.Last = true, a.Server
		case errors.Is(err, unix.ECONNREFUSED):
			r.Errors[refused]++
		case errors.Is(err, os.ErrDeadlineExceeded):
			r.Errors[silent]++
		default:
			r.Errors[err.Error()]++
		}
	}
	return r
}

// socket is a descriptor that is not blocking.
type socket struct {
	fd       int
	v6       bool
	deadline time.Time
}

func (c *client) connection(p *Probe) (Answer, error) {
	s, err := c.open(p)
	if err != nil {
		return Answer{}, err
	}
	defer unix.Close(s.fd)
	if p.Way == SendTo {
		if err := unix.Sendto(s.fd, []byte("?"), 0, s.sockaddr(p.To)); err != nil {
			return Answer{}, fmt.Errorf("sendto: %w", err)
		}
		return s.answer(p)
	}
	if err := s.connect(p.To); err != nil {
		return Answer{}, err
	}
	sa, err := unix.Getpeername(s.fd)
	if err != nil {
		return Answer{}, fmt.Errorf("getpeername: %w", err)
	}
	if got := addrPort(sa); got != p.To {
		return Answer{}, fmt.Errorf("the peer is %s", got)
	}
	if p.Way == Connect {
		if _, err := unix.Write(s.fd, []byte("?")); err != nil {
			return Answer{}, fmt.Errorf("write: %w", err)
		}
	}
	return s.answer(p)
}

// open makes a socket that is bound to the next port.
func (c *client) open(p *Probe) (*socket, error) {
	s := &socket{v6: p.Mapped || p.To.Addr().Is6(), deadline: time.Now().Add(p.Silence)}
	family, kind := unix.AF_INET, unix.SOCK_DGRAM
	if s.v6 {
		family = unix.AF_INET6
	}
	if p.Way == TCP {
		kind = unix.SOCK_STREAM
	}
	var err error
	if s.fd, err = unix.Socket(family, kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0); err != nil {
		return nil, fmt.Errorf("socket: %w", err)
	}
	if p.Way == TCP {
		// no TIME_WAIT
		err = unix.SetsockoptLinger(s.fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	} else {
		err = s.wantErrors()
	}
	if err == nil {
		err = c.bind(s, p.From)
	}
	if err != nil {
		unix.Close(s.fd)
		return nil, fmt.Errorf("set up a socket: %w", err)
	}
	return s, nil
}

// wantErrors has ICMP errors told to a socket that is not connected, too.
func (s *socket) wantErrors() error {
	if s.v6 {
		if err := unix.SetsockoptInt(s.fd, unix.SOL_IPV6, unix.IPV6_RECVERR, 1); err != nil {
			return err
		}
	}
	return unix.SetsockoptInt(s.fd, unix.SOL_IP, unix.IP_RECVERR, 1)
}

func (c *client) bind(s *socket, from netip.Addr) error {
	switch {
	case !from.IsValid() && s.v6:
		from = netip.IPv6Unspecified()
	case !from.IsValid():
		from = netip.IPv4Unspecified()
	}
	for {
		err := unix.Bind(s.fd, s.sockaddr(netip.AddrPortFrom(from, c.port())))
		if !errors.Is(err, unix.EADDRINUSE) {
			return err
		}
	}
}

func (c *client) port() uint16 {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.next
	if c.next++; c.next > lastPort {
		c.next = firstPort
	}
	return uint16(p)
}

func (s *socket) sockaddr(a netip.AddrPort) unix.Sockaddr {
	if s.v6 {
		return &unix.SockaddrInet6{Addr: a.Addr().As16(), Port: int(a.Port())}
	}
	return &unix.SockaddrInet4{Addr: a.Addr().As4(), Port: int(a.Port())}
}

func addrPort(sa unix.Sockaddr) netip.AddrPort {
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(sa.Addr).Unmap(), uint16(sa.Port))
	}
	return netip.AddrPort{}
}

func (s *socket) connect(to netip.AddrPort) error {
	err := unix.Connect(s.fd, s.sockaddr(to))
	if !errors.Is(err, unix.EINPROGRESS) {
		return err
	}
	if err := s.wait(unix.POLLOUT); err != nil {
		return err
	}
	code, err := unix.GetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_ERROR)
	if err != nil {
		return err
	}
	if code != 0 {
		return unix.Errno(code)
	}
	return nil
}

func (s *socket) wait(events int16) error {
	for {
		left := time.Until(s.deadline)
		if left <= 0 {
			return os.ErrDeadlineExceeded
		}
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(s.fd), Events: events}}, int(left.Milliseconds())+1)
		if n > 0 {
			return nil
		}
		if err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("poll: %w", err)
		}
	}
}

// answer is one that must seem to come from where it was asked for.
func (s *socket) answer(p *Probe) (Answer, error) {
	if err := s.wait(unix.POLLIN); err != nil {
		return Answer{}, err
	}
	b := make([]byte, 256)
	n, sa, err := unix.Recvfrom(s.fd, b, 0)
	if err != nil {
		return Answer{}, fmt.Errorf("receive: %w", err)
	}
	if p.Way != TCP {
		if from := addrPort(sa); from != p.To {
			return Answer{}, fmt.Errorf("the answer came from %s", from)
		}
	}
	server, client, ok := strings.Cut(string(b[:n]), " ")
	if !ok {
		return Answer{}, fmt.Errorf("the answer is %q", b[:n])
	}
	return Answer{server, client}, nil
}
