// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"runtime"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"golang.org/x/sys/unix"
)

// RunClient puts load on a server and reports. It takes the calling thread for
// itself and is meant for a process that does nothing else. With services, the
// connections of a CC go to them. The report is valid also with an error, which
// it names.
func RunClient(load Load, to netip.AddrPort, services *Services) (ClientReport, error) {
	if err := load.validate(); err != nil {
		return ClientReport{}, err
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	c := newClient(load, to)
	c.services = services
	err := c.run()
	c.report.Answered = c.answered
	c.report.Sent = c.sent
	if err != nil {
		c.report.Error = err.Error()
	}
	return c.report, err
}

// client is one run of a generator.
type client struct {
	load             Load
	to               netip.AddrPort
	services         *Services
	request          []byte
	answer           []byte
	hist             *hdrhistogram.Histogram // nanoseconds
	began            time.Time
	phase            phase
	before           usage
	requests, bytes  uint64 // measured
	answered, sent   uint64 // all
	report           ClientReport
	fds              []int
	measured, ending time.Duration // since began: when the phases change
}

type phase int

const (
	warming phase = iota
	measuring
	ended
)

func newClient(load Load, to netip.AddrPort) *client {
	size := load.Bytes
	switch load.Mode {
	case Stream:
		size = streamChunk
	case CC:
		size = 0
	}
	return &client{
		load: load, to: to, request: make([]byte, size), answer: make([]byte, size),
		hist: hdrhistogram.New(1, time.Minute.Nanoseconds(), 3), measured: load.Warmup, ending: load.Warmup + load.Duration,
	}
}

func (c *client) run() error {
	defer c.close()
	if c.load.Mode != CRR && c.load.Mode != CC {
		if err := c.connect(); err != nil {
			return err
		}
	}
	c.began = time.Now()
	switch {
	case c.load.Mode == Stream:
		return c.stream(c.fds[0])
	case c.load.Mode == CRR:
		return c.repeat(c.connectAndAsk)
	case c.load.Mode == CC:
		return c.connects()
	case c.load.Rate > 0:
		return c.openLoop()
	case c.load.Connections > 1:
		return c.closedLoop()
	}
	return c.repeat(func() error { return c.ask(c.fds[0]) })
}

func (c *client) connect() error {
	for range c.load.Connections {
		fd, err := dial(c.to)
		if err != nil {
			return err
		}
		c.fds = append(c.fds, fd)
	}
	return nil
}

func (c *client) close() {
	for _, fd := range c.fds {
		unix.Close(fd)
	}
}

// advance moves to the phase of the time now, since began, reading the clocks of
// the processors where the measured part begins and ends.
func (c *client) advance(now time.Duration) error {
	if c.phase == warming && now >= c.measured {
		u, err := readUsage()
		if err != nil {
			return err
		}
		c.before, c.phase = u, measuring
		c.ending = now + c.load.Duration // also where the machine let it begin late
		return nil
	}
	if c.phase == measuring && now >= c.ending {
		u, err := readUsage()
		if err != nil {
			return err
		}
		c.phase = ended
		return c.finish(u)
	}
	return nil
}

func (c *client) finish(after usage) error {
	c.report.Seconds = after.at.Sub(c.before.at).Seconds()
	c.report.Requests, c.report.Bytes = c.requests, c.bytes
	c.report.Process = (after.process - c.before.process).Seconds()
	c.report.Machine = after.machine.minus(c.before.machine)
	if c.load.Mode == Stream {
		return nil
	}
	l, err := latencyOf(c.hist)
	c.report.Latency = l
	return err
}

func latencyOf(h *hdrhistogram.Histogram) (*Latency, error) {
	hdr, err := h.Encode(hdrhistogram.V2CompressedEncodingCookieBase)
	if err != nil {
		return nil, fmt.Errorf("encode histogram: %w", err)
	}
	us := func(ns int64) float64 { return float64(ns) / 1e3 }
	return &Latency{
		Mean: h.Mean() / 1e3, P50: us(h.ValueAtQuantile(50)), P99: us(h.ValueAtQuantile(99)),
		P999: us(h.ValueAtQuantile(99.9)), Max: us(h.Max()), HDR: string(hdr),
	}, nil
}

// count takes a request that was sent, or due, at one time and answered at another.
func (c *client) count(sent, answered time.Duration) error {
	c.answered++
	c.sent += uint64(len(c.request))
	if c.phase == measuring && sent >= c.measured {
		c.requests++
		c.bytes += uint64(len(c.request))
		if err := c.hist.RecordValue((answered - sent).Nanoseconds()); err != nil {
			return fmt.Errorf("latency of %v: %w", answered-sent, err)
		}
	}
	return nil
}

// repeat runs one request after the other.
func (c *client) repeat(one func() error) error {
	now := time.Since(c.began)
	for c.phase != ended {
		if err := one(); err != nil {
			return err
		}
		sent := now
		now = time.Since(c.began)
		if err := c.count(sent, now); err != nil {
			return err
		}
		if err := c.advance(now); err != nil {
			return err
		}
	}
	return nil
}

func (c *client) ask(fd int) error {
	if err := writeAll(fd, c.request); err != nil {
		return err
	}
	return readFull(fd, c.answer)
}

// connectAndAsk leaves closing to the server first, as HTTP servers do: the
// TIME-WAIT is then not on the side that needs a fresh port each time.
func (c *client) connectAndAsk() error {
	fd, err := dial(c.to)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := c.ask(fd); err != nil {
		return err
	}
	return readEOF(fd)
}

func (c *client) stream(fd int) error {
	for c.phase != ended {
		n, errno := rawWrite(fd, c.request)
		if errno != 0 && errno != unix.EINTR {
			return fmt.Errorf("write: %w", stalled(errno))
		}
		if errno == 0 {
			c.sent += uint64(n)
			if c.phase == measuring {
				c.bytes += uint64(n)
			}
		}
		if err := c.advance(time.Since(c.began)); err != nil {
			return err
		}
	}
	if err := unix.Shutdown(fd, unix.SHUT_WR); err != nil {
		return fmt.Errorf("shutdown: %w", err)
	}
	return readEOF(fd) // the server has all of it
}

// stalled names what a timeout of a socket means.
func stalled(errno unix.Errno) error {
	if errno == unix.EAGAIN {
		return fmt.Errorf("nothing moved for %v", patience)
	}
	return errno
}

func writeAll(fd int, b []byte) error {
	for len(b) > 0 {
		n, errno := rawWrite(fd, b)
		switch {
		case errno == 0:
			b = b[n:]
		case errno != unix.EINTR:
			return fmt.Errorf("write: %w", stalled(errno))
		}
	}
	return nil
}

var errNoAnswer = fmt.Errorf("no answer within %v", patience)

// readFull waits for all of b, at most patience without any byte.
func readFull(fd int, b []byte) error {
	for waits := 0; len(b) > 0; {
		n, errno := rawRead(fd, b)
		switch {
		case errno == 0 && n == 0:
			return fmt.Errorf("read: %w", io.ErrUnexpectedEOF)
		case errno == 0:
			b, waits = b[n:], 0
		case !again(errno):
			return fmt.Errorf("read: %w", errno)
		case time.Duration(waits)*tick >= patience:
			return errNoAnswer
		default:
			waits++
		}
	}
	return nil
}

func readEOF(fd int) error {
	var b [1]byte
	err := readFull(fd, b[:])
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return nil
	}
	if err == nil {
		return errors.New("read: more than the answer")
	}
	return err
}
