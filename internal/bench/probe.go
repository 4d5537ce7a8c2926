// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// pace is the time from one attempt of a probe to the next: it leaves most of
// the machine to what is being waited for.
const pace = 250 * time.Microsecond

// attempt is how long a probe lets one connect take: the kernel would repeat a
// lost SYN only after a second.
const attempt = 20 * time.Millisecond

// ask is what a probe is told, one line of JSON each: connect to a service
// until the backend that answers is the one that is wanted.
type ask struct {
	Service netip.AddrPort `json:"service"`
	Want    netip.Addr     `json:"want,omitzero"` // zero: any
	// Patience is when the probe gives up.
	Patience time.Duration `json:"patience_ns"`
}

// found is what a probe says, one line of JSON each: first an empty one, once
// it has begun, then what it found.
type found struct {
	At     time.Duration `json:"at_ns"` // monotonic clock of the machine
	Tries  int           `json:"tries"`
	Errors int           `json:"errors"` // attempts that did not connect
	Last   string        `json:"last,omitempty"`
	Failed string        `json:"failed,omitempty"`
}

// monotonic is a clock that all processes of the machine share.
func monotonic() time.Duration {
	var ts unix.Timespec
	// It fails only for a clock that the kernel does not have.
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
	return time.Duration(ts.Nano())
}

// processProbe serves asks until its input ends.
func processProbe(in io.Reader, out io.Writer) error {
	runtime.LockOSThread()
	lines, answers := bufio.NewScanner(in), json.NewEncoder(out)
	for lines.Scan() {
		var a ask
		if err := json.Unmarshal(lines.Bytes(), &a); err != nil {
			return fmt.Errorf("ask: %w", err)
		}
		first := true
		begun := func() error {
			if !first {
				return nil
			}
			first = false
			return answers.Encode(found{})
		}
		f, err := a.wait(begun)
		if err != nil {
			return err
		}
		if err := answers.Encode(f); err != nil {
			return err
		}
	}
	return lines.Err()
}

// wait calls begun after each attempt that does not succeed.
func (a ask) wait(begun func() error) (found, error) {
	var f found
	for next, end := monotonic(), monotonic()+a.Patience; ; next += pace {
		f.Tries++
		by, err := whoAnswers(a.Service)
		f.At = monotonic()
		switch {
		case err != nil:
			f.Errors++
			f.Last = err.Error()
		case !a.Want.IsValid() || by == a.Want:
			return f, begun()
		}
		if err := begun(); err != nil {
			return f, err
		}
		if f.At > end {
			f.Failed = fmt.Sprintf("%s does not answer at %s within %v", a.Want, a.Service, a.Patience)
			return f, nil
		}
		next = max(next, f.At-pace)
		sleepUntil(next + pace)
	}
}

func sleepUntil(at time.Duration) {
	ts := unix.NsecToTimespec(at.Nanoseconds())
	_ = unix.ClockNanosleep(unix.CLOCK_MONOTONIC, unix.TIMER_ABSTIME, &ts, nil)
}

// whoAnswers connects and reads which address the server was reached at.
func whoAnswers(service netip.AddrPort) (netip.Addr, error) {
	fd, sa, err := dialer(service)
	if err != nil {
		return netip.Addr{}, err
	}
	defer unix.Close(fd)
	if err := setTimeout(fd, unix.SO_SNDTIMEO, attempt); err != nil {
		return netip.Addr{}, err
	}
	if err := connect(fd, sa); err != nil {
		return netip.Addr{}, fmt.Errorf("connect to %s: %w", service, err)
	}
	if err := prepare(fd); err != nil {
		return netip.Addr{}, err
	}
	var text [64]byte
	n, errno := rawRead(fd, text[:])
	for errno == unix.EINTR { // a signal does not end it
		n, errno = rawRead(fd, text[:])
	}
	if errno != 0 {
		return netip.Addr{}, fmt.Errorf("read: %w", stalled(errno))
	}
	if err := resetOnClose(fd); err != nil {
		return netip.Addr{}, err
	}
	return netip.ParseAddr(string(text[:n]))
}

// serveNames tells each client which address it has reached.
func (s *Server) serveNames() error {
	for {
		fd, err := s.accept()
		if fd < 0 || err != nil {
			return err
		}
		at, err := localAddr(fd)
		if err == nil {
			err = writeAll(fd, []byte(at.String()))
		}
		unix.Close(fd)
		if err != nil {
			return err
		}
	}
}

func localAddr(fd int) (netip.Addr, error) {
	sa, err := unix.Getsockname(fd)
	if err != nil {
		return netip.Addr{}, fmt.Errorf("getsockname: %w", err)
	}
	v4, ok := sa.(*unix.SockaddrInet4)
	if !ok {
		return netip.Addr{}, fmt.Errorf("getsockname: address family of %T", sa)
	}
	return netip.AddrFrom4(v4.Addr), nil
}

// prober is a running probe.
type prober struct{ *child }

// wait makes cause happen while the probe is asking, and returns what it found.
func (p *prober) wait(a ask, cause func() error) (found, error) {
	line, err := json.Marshal(a)
	if err != nil {
		return found{}, err
	}
	if _, err := fmt.Fprintf(p.in, "%s\n", line); err != nil {
		return found{}, fmt.Errorf("ask the probe: %w", err)
	}
	if _, err := p.hear(); err != nil {
		return found{}, err
	}
	if err := cause(); err != nil {
		return found{}, err
	}
	f, err := p.hear()
	if err == nil && f.Failed != "" {
		err = errors.New(strings.TrimSuffix(f.Failed+"; "+f.Last, "; "))
	}
	return f, err
}

func (p *prober) hear() (f found, err error) {
	line, err := p.out.ReadBytes('\n')
	if err != nil {
		return f, fmt.Errorf("the probe is gone: %w: %s", err, p.stderr.String())
	}
	return f, json.Unmarshal(line, &f)
}
