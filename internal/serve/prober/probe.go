// SPDX-License-Identifier: Apache-2.0

package prober

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"
)

// Protocols of probes.
const (
	TCP  = "TCP"
	UDP  = "UDP"
	SCTP = "SCTP"
)

// Job is one thing to reach.
type Job struct {
	Protocol string         `json:"protocol"`
	To       netip.AddrPort `json:"to"`
}

// Outcomes of a probe. Only NoAnswer is how a policy that drops looks.
const (
	Reached  = "reached"   // and answered with a name
	NoAnswer = "no answer" // nothing came back, on every try
	Refused  = "refused"   // something said no: a reset, an abort or an ICMP error
	Broken   = "broken"    // an error of the machine, or an answer cut short
)

// Verdict is what became of a Job.
type Verdict struct {
	Outcome string        `json:"outcome"`
	Answer  string        `json:"answer,omitempty"` // name of who answered
	Detail  string        `json:"detail,omitempty"` // of Refused and Broken
	Tries   int           `json:"tries"`
	Took    time.Duration `json:"took"`
}

// String is the verdict for people.
func (v Verdict) String() string {
	switch {
	case v.Outcome == Reached:
		return Reached + " " + v.Answer
	case v.Detail != "":
		return v.Outcome + ": " + v.Detail
	}
	return v.Outcome
}

// Batch is what a prober does at once.
type Batch struct {
	Jobs    []Job         `json:"jobs"`
	Timeout time.Duration `json:"timeout"` // of one try; more than 0
	Tries   int           `json:"tries"`   // until something comes back; at least 1
}

// Validate checks what others send.
func (b Batch) Validate() error {
	if b.Timeout <= 0 || b.Tries < 1 {
		return fmt.Errorf("timeout %s, tries %d: want more than 0s and at least 1", b.Timeout, b.Tries)
	}
	for i, j := range b.Jobs {
		if j.Protocol != TCP && j.Protocol != UDP && j.Protocol != SCTP {
			return fmt.Errorf("job %d: protocol %q: want TCP, UDP or SCTP", i, j.Protocol)
		}
		if !j.To.IsValid() || j.To.Port() == 0 {
			return fmt.Errorf("job %d: destination %q: want IP:PORT", i, j.To)
		}
	}
	return nil
}

var errRefused = errors.New("aborted by the other end")

// run does all jobs at the same time.
func (s *server) run(ctx context.Context, b Batch) []Verdict {
	verdicts := make([]Verdict, len(b.Jobs))
	var wg sync.WaitGroup
	for i, j := range b.Jobs {
		wg.Go(func() { verdicts[i] = s.probe(ctx, j, b) })
	}
	wg.Wait()
	return verdicts
}

func (s *server) probe(ctx context.Context, j Job, b Batch) Verdict {
	began := time.Now()
	var v Verdict
	for try := 1; try <= b.Tries && ctx.Err() == nil; try++ {
		v = outcome(s.try(ctx, j, b.Timeout))
		v.Tries = try
		if v.Outcome != NoAnswer {
			break
		}
	}
	v.Took = time.Since(began)
	return v
}

func (s *server) try(ctx context.Context, j Job, timeout time.Duration) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	ports := s.ports[j.Protocol]
	if j.Protocol == SCTP {
		return s.sctp.probe(ctx, ports.next(), j.To)
	}
	for range maxBusy {
		name, err := ask(ctx, j, ports.next())
		if !errors.Is(err, syscall.EADDRINUSE) {
			return name, err
		}
	}
	return "", syscall.EADDRINUSE
}

// maxBusy is how many source ports in a row may be taken by others.
const maxBusy = 100

// ask connects from the local port and reads the name of who answers.
func ask(ctx context.Context, j Job, local uint16) (string, error) {
	network, addr := "tcp", net.Addr(&net.TCPAddr{Port: int(local)})
	if j.Protocol == UDP {
		network, addr = "udp", &net.UDPAddr{Port: int(local)}
	}
	d := net.Dialer{LocalAddr: addr}
	conn, err := d.DialContext(ctx, network, j.To.String())
	if err != nil {
		return "", err
	}
	defer conn.Close()
	deadline, _ := ctx.Deadline() // try sets one
	if err := conn.SetDeadline(deadline); err != nil {
		return "", err
	}
	buf := make([]byte, maxName+1)
	if j.Protocol == UDP {
		if _, err := conn.Write([]byte("who are you?")); err != nil {
			return "", err
		}
		n, err := conn.Read(buf)
		return string(buf[:n]), err
	}
	n, err := io.ReadFull(conn, buf)
	if errors.Is(err, io.ErrUnexpectedEOF) {
		err = nil // the name, and the end
	}
	return string(buf[:n]), err
}

func outcome(name string, err error) Verdict {
	var timeout interface{ Timeout() bool }
	switch {
	case err == nil:
		return Verdict{Outcome: Reached, Answer: name}
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded), errors.As(err, &timeout) && timeout.Timeout():
		return Verdict{Outcome: NoAnswer}
	case errors.Is(err, errRefused), errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.ECONNRESET),
		errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH), errors.Is(err, syscall.EACCES):
		return Verdict{Outcome: Refused, Detail: err.Error()}
	}
	return Verdict{Outcome: Broken, Detail: err.Error()}
}

// Source ports are given out in turn, so that the connections of one step never
// look like those of an earlier one, which conntrack may still know.
const (
	firstPort = 10000
	lastPort  = 65535
)

type portCounter struct {
	mu     sync.Mutex
	last   int   // protected by mu
	except []int // immutable; ports that are served
}

func newPortCounter(except []int) *portCounter {
	return &portCounter{last: firstPort - 1, except: except}
}

func (c *portCounter) next() uint16 {
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		if c.last++; c.last > lastPort {
			c.last = firstPort
		}
		if !slices.Contains(c.except, c.last) {
			return uint16(c.last)
		}
	}
}
