// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"net/netip"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The calls of the measured loop go past the Go scheduler: a thread blocks in
// them as one of a C program would. Every one of them ends within tick, so
// that a loop notices the end of its time or of its caller.
const tick = 100 * time.Millisecond

func rawRead(fd int, b []byte) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall(unix.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)))
	return int(n), errno
}

func rawWrite(fd int, b []byte) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall(unix.SYS_WRITE, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)))
	return int(n), errno
}

// rawEpoll waits at most d. It returns no event when it was interrupted.
func rawEpoll(epfd int, events []unix.EpollEvent, d time.Duration) (int, error) {
	ts := unix.NsecToTimespec(max(0, d.Nanoseconds()))
	n, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT2, uintptr(epfd), uintptr(unsafe.Pointer(unsafe.SliceData(events))),
		uintptr(len(events)), uintptr(unsafe.Pointer(&ts)), 0, 0)
	switch errno {
	case 0:
		return int(n), nil
	case unix.EINTR:
		return 0, nil
	}
	return 0, fmt.Errorf("epoll_pwait2: %w", errno)
}

// again tells an error after which the call is simply repeated.
func again(errno unix.Errno) bool { return errno == unix.EAGAIN || errno == unix.EINTR }

func sockaddr(ap netip.AddrPort) (unix.Sockaddr, int) {
	if a := ap.Addr(); a.Is4() {
		return &unix.SockaddrInet4{Port: int(ap.Port()), Addr: a.As4()}, unix.AF_INET
	}
	return &unix.SockaddrInet6{Port: int(ap.Port()), Addr: ap.Addr().As16()}, unix.AF_INET6
}

// dial connects within patience and returns a blocking socket that sends
// small writes at once and gives up a read after tick.
func dial(to netip.AddrPort) (fd int, err error) {
	fd, sa, err := dialer(to)
	if err != nil {
		return -1, err
	}
	defer func() {
		if err != nil {
			unix.Close(fd)
		}
	}()
	if err := connect(fd, sa); err != nil {
		return -1, fmt.Errorf("connect to %s: %w", to, err)
	}
	return fd, prepare(fd)
}

// dialer returns a socket whose connect gives up after patience.
func dialer(to netip.AddrPort) (fd int, sa unix.Sockaddr, err error) {
	sa, family := sockaddr(to)
	fd, err = unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, nil, fmt.Errorf("socket: %w", err)
	}
	if err := setTimeout(fd, unix.SO_SNDTIMEO, patience); err != nil {
		unix.Close(fd)
		return -1, nil, err
	}
	return fd, sa, nil
}

// connect blocks; a signal does not end it.
func connect(fd int, sa unix.Sockaddr) error {
	err := unix.Connect(fd, sa)
	if err == unix.EINTR {
		err = unix.Connect(fd, sa)
		if err == unix.EISCONN {
			return nil
		}
	}
	if err == unix.EINPROGRESS || err == unix.EALREADY {
		return unix.ETIMEDOUT
	}
	return err
}

// prepare sets what both ends of a connection want.
func prepare(fd int) error {
	if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1); err != nil {
		return fmt.Errorf("set TCP_NODELAY: %w", err)
	}
	return setTimeout(fd, unix.SO_RCVTIMEO, tick)
}

func setTimeout(fd, option int, d time.Duration) error {
	tv := unix.NsecToTimeval(d.Nanoseconds())
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, option, &tv); err != nil {
		return fmt.Errorf("set socket timeout: %w", err)
	}
	return nil
}

// listen returns a listening socket whose accept gives up after tick.
func listen(on netip.AddrPort) (fd int, bound netip.AddrPort, err error) {
	sa, family := sockaddr(on)
	fd, err = unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, on, fmt.Errorf("socket: %w", err)
	}
	defer func() {
		if err != nil {
			unix.Close(fd)
		}
	}()
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
		return -1, on, fmt.Errorf("set SO_REUSEADDR: %w", err)
	}
	if err := setTimeout(fd, unix.SO_RCVTIMEO, tick); err != nil {
		return -1, on, err
	}
	if err := unix.Bind(fd, sa); err != nil {
		return -1, on, fmt.Errorf("bind to %s: %w", on, err)
	}
	if err := unix.Listen(fd, maxConnections); err != nil {
		return -1, on, fmt.Errorf("listen on %s: %w", on, err)
	}
	bound, err = boundTo(fd, on)
	return fd, bound, err
}

func boundTo(fd int, on netip.AddrPort) (netip.AddrPort, error) {
	sa, err := unix.Getsockname(fd)
	if err != nil {
		return on, fmt.Errorf("getsockname: %w", err)
	}
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(on.Addr(), uint16(sa.Port)), nil
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(on.Addr(), uint16(sa.Port)), nil
	}
	return on, fmt.Errorf("getsockname: address family of %T", sa)
}
