// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"io"
	"time"

	"golang.org/x/sys/unix"
)

// loop drives many connections of a client from one thread.
type loop struct {
	*client
	epfd   int
	events []unix.EpollEvent
	due    []time.Duration // by connection: when its request was sent, or should have been
	have   []int           // by connection: bytes of the answer so far
	owed   int             // requests without their answer
	now    time.Duration
	heard  time.Duration // last answer
}

func (c *client) newLoop() (*loop, error) {
	epfd, err := newEpoll(c.fds)
	if err != nil {
		return nil, err
	}
	n := len(c.fds)
	return &loop{client: c, epfd: epfd, events: make([]unix.EpollEvent, n), due: make([]time.Duration, n), have: make([]int, n)}, nil
}

// newEpoll watches the sockets for input; an event's Fd is the index.
func newEpoll(fds []int) (int, error) {
	epfd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("epoll_create1: %w", err)
	}
	for i, fd := range fds {
		if err := watch(epfd, fd, i); err != nil {
			unix.Close(epfd)
			return -1, err
		}
	}
	return epfd, nil
}

func watch(epfd, fd, index int) error {
	event := unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(index)}
	if err := unix.EpollCtl(epfd, unix.EPOLL_CTL_ADD, fd, &event); err != nil {
		return fmt.Errorf("epoll_ctl: %w", err)
	}
	return nil
}

// closedLoop has every connection send its next request at its answer.
func (c *client) closedLoop() error {
	l, err := c.newLoop()
	if err != nil {
		return err
	}
	defer unix.Close(l.epfd)
	for i := range c.fds {
		if err := l.send(i, 0); err != nil {
			return err
		}
	}
	for c.phase != ended {
		if err := l.wait(tick, func(i int) error { return l.send(i, l.now) }); err != nil {
			return err
		}
	}
	return l.drain()
}

// openLoop sends a request each 1/Rate seconds on whichever connection is
// free; where none is, the request waits and its latency tells.
func (c *client) openLoop() error {
	l, err := c.newLoop()
	if err != nil {
		return err
	}
	defer unix.Close(l.epfd)
	free := make([]int, 0, len(c.fds))
	for i := range c.fds {
		free = append(free, i)
	}
	interval := time.Duration(float64(time.Second) / c.load.Rate)
	next := time.Duration(0)
	for c.phase != ended {
		for ; len(free) > 0 && next <= l.now; next += interval {
			i := free[len(free)-1]
			free = free[:len(free)-1]
			if err := l.send(i, next); err != nil {
				return err
			}
		}
		pause := tick
		if len(free) > 0 {
			pause = min(tick, next-time.Since(c.began))
		}
		if len(free) == len(c.fds) {
			l.heard = l.now // nothing is asked, so nothing is owed
		}
		if err := l.wait(pause, func(i int) error { free = append(free, i); return nil }); err != nil {
			return err
		}
	}
	return l.drain()
}

// drain takes the answers that are still owed, so that no connection is closed
// over one.
func (l *loop) drain() error {
	for l.owed > 0 {
		if err := l.wait(tick, func(int) error { return nil }); err != nil {
			return err
		}
	}
	return nil
}

func (l *loop) send(i int, due time.Duration) error {
	l.due[i], l.have[i] = due, 0
	l.owed++
	return writeAll(l.fds[i], l.request)
}

// wait takes the answers that come within d and calls then for each connection
// that has its answer whole.
func (l *loop) wait(d time.Duration, then func(i int) error) error {
	n, err := rawEpoll(l.epfd, l.events, d)
	if err != nil {
		return err
	}
	l.now = time.Since(l.began)
	for _, event := range l.events[:n] {
		whole, err := l.receive(int(event.Fd))
		if err != nil {
			return err
		}
		if !whole {
			continue
		}
		l.owed--
		l.now = time.Since(l.began)
		if err := l.count(l.due[event.Fd], l.now); err != nil {
			return err
		}
		if err := then(int(event.Fd)); err != nil {
			return err
		}
	}
	if n > 0 {
		l.heard = l.now
	} else if l.now-l.heard > patience {
		return errNoAnswer
	}
	return l.advance(l.now)
}

// receive reads once; the socket is known to have something.
func (l *loop) receive(i int) (whole bool, err error) {
	n, errno := rawRead(l.fds[i], l.answer[l.have[i]:])
	switch {
	case again(errno):
		return false, nil
	case errno != 0:
		return false, fmt.Errorf("read: %w", errno)
	case n == 0:
		return false, fmt.Errorf("read: %w", io.ErrUnexpectedEOF)
	}
	l.have[i] += n
	return l.have[i] == len(l.answer), nil
}
