// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"runtime"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Server answers one generator. It is made for one Load: it knows how many
// connections come and how long a request is.
type Server struct {
	load     Load
	listener int
	addr     netip.AddrPort
	stop     atomic.Bool
	buffer   []byte
	report   ServerReport
}

// NewServer listens; port 0 takes a free one. Close it unless Run has returned.
func NewServer(load Load, on netip.AddrPort) (*Server, error) {
	if err := load.validate(); err != nil {
		return nil, err
	}
	fd, addr, err := listen(on)
	if err != nil {
		return nil, err
	}
	size := load.Bytes
	switch load.Mode {
	case Stream:
		size = streamChunk
	case CC, who:
		size = 0
	}
	return &Server{load: load, listener: fd, addr: addr, buffer: make([]byte, size)}, nil
}

// Addr is where it listens.
func (s *Server) Addr() netip.AddrPort { return s.addr }

// Stop makes Run return soon. Any goroutine may call it.
func (s *Server) Stop() { s.stop.Store(true) }

// Close closes the listener.
func (s *Server) Close() error { return unix.Close(s.listener) }

// Run serves until all connections of the load were served and closed, or
// until Stop (the only end of a CRR and of a CC). It takes the calling thread for itself.
func (s *Server) Run() (ServerReport, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer s.Close()
	before, err := processCPU()
	if err == nil {
		err = s.serve()
	}
	after, cpuErr := processCPU()
	s.report.Process = (after - before).Seconds()
	if err = errors.Join(err, cpuErr); err != nil {
		s.report.Error = err.Error()
	}
	return s.report, err
}

func (s *Server) serve() error {
	switch s.load.Mode {
	case CRR, CC:
		return s.serveEach()
	case who:
		return s.serveNames()
	}
	fds, err := s.acceptAll()
	defer func() {
		for _, fd := range fds {
			unix.Close(fd)
		}
	}()
	switch {
	case err != nil || s.stop.Load():
		return err
	case s.load.Mode == Stream:
		return s.sink(fds[0])
	case len(fds) == 1:
		return s.answerAll(fds[0])
	}
	return s.answerMany(fds)
}

// accept returns -1 when told to stop.
func (s *Server) accept() (int, error) {
	for !s.stop.Load() {
		fd, _, err := unix.Accept4(s.listener, unix.SOCK_CLOEXEC)
		switch {
		case err == nil:
			return fd, prepare(fd)
		case err != unix.EAGAIN && err != unix.EINTR && err != unix.ECONNABORTED:
			return -1, fmt.Errorf("accept: %w", err)
		}
	}
	return -1, nil
}

func (s *Server) acceptAll() (fds []int, err error) {
	for range s.load.Connections {
		fd, err := s.accept()
		if fd < 0 || err != nil {
			return fds, err
		}
		fds = append(fds, fd)
	}
	return fds, nil
}

func (s *Server) serveEach() error {
	for {
		fd, err := s.accept()
		if fd < 0 || err != nil {
			return err
		}
		if s.load.Mode == CC {
			s.count()
		} else {
			_, err = s.answer(fd)
		}
		unix.Close(fd)
		if err != nil {
			return err
		}
	}
}

// answer serves one request; it returns false at the end of the connection.
func (s *Server) answer(fd int) (bool, error) {
	have := 0
	for have < len(s.buffer) {
		n, errno := rawRead(fd, s.buffer[have:])
		switch {
		case errno == 0 && n == 0:
			return false, cutOff(have)
		case errno == 0:
			have += n
		case !again(errno):
			return false, fmt.Errorf("read: %w", errno)
		case s.stop.Load():
			return false, nil
		}
	}
	s.count()
	return true, writeAll(fd, s.buffer)
}

func (s *Server) count() {
	s.report.Requests++
	s.report.Received += uint64(len(s.buffer))
}

// cutOff is the error of a connection that ended with so many bytes of a
// request.
func cutOff(have int) error {
	if have == 0 {
		return nil
	}
	return fmt.Errorf("read: %d bytes into a request: %w", have, io.ErrUnexpectedEOF)
}

func (s *Server) answerAll(fd int) error {
	for {
		if more, err := s.answer(fd); !more || err != nil {
			return err
		}
	}
}

// answerMany reads once for each event, so that no connection waits for
// another's half request.
func (s *Server) answerMany(fds []int) error {
	epfd, err := newEpoll(fds)
	if err != nil {
		return err
	}
	defer unix.Close(epfd)
	events := make([]unix.EpollEvent, len(fds))
	have := make([]int, len(fds))
	for open := len(fds); open > 0 && !s.stop.Load(); {
		n, err := rawEpoll(epfd, events, tick)
		if err != nil {
			return err
		}
		for _, event := range events[:n] {
			i := int(event.Fd)
			closed, err := s.take(fds[i], &have[i])
			if err != nil {
				return err
			}
			if closed {
				open--
				if err := unix.EpollCtl(epfd, unix.EPOLL_CTL_DEL, fds[i], nil); err != nil {
					return fmt.Errorf("epoll_ctl: %w", err)
				}
			}
		}
	}
	return nil
}

// take reads what a connection has and answers when that makes a request whole.
func (s *Server) take(fd int, have *int) (closed bool, err error) {
	n, errno := rawRead(fd, s.buffer[*have:])
	switch {
	case again(errno):
		return false, nil
	case errno != 0:
		return false, fmt.Errorf("read: %w", errno)
	case n == 0:
		return true, cutOff(*have)
	}
	*have += n
	if *have < len(s.buffer) {
		return false, nil
	}
	*have = 0
	s.count()
	return false, writeAll(fd, s.buffer)
}

func (s *Server) sink(fd int) error {
	for {
		n, errno := rawRead(fd, s.buffer)
		switch {
		case errno == 0 && n == 0:
			return nil
		case errno == 0:
			s.report.Received += uint64(n)
		case !again(errno):
			return fmt.Errorf("read: %w", errno)
		case s.stop.Load():
			return nil
		}
	}
}
