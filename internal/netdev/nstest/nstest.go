// SPDX-License-Identifier: Apache-2.0

// Package nstest makes network namespaces for tests. They are held by file
// descriptors alone, so that nothing is left behind however a test ends.
package nstest

import (
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// NS is a network namespace that lives until Close, or the end of the test.
type NS struct{ f *os.File }

// New makes a namespace; t may be any part of a test, as Close may come
// earlier than its end.
func New(t testing.TB) *NS {
	t.Helper()
	Need(t)
	var ns *NS
	err := onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("unshare: %w", err)
		}
		f, err := os.Open(fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid()))
		ns = &NS{f: f}
		return err
	})
	if err != nil {
		t.Fatalf("make a network namespace: %v", err)
	}
	t.Cleanup(ns.Close)
	return ns
}

// Need skips a test that has no right to make network namespaces; in CI (CI is
// set) that is a failure.
func Need(t testing.TB) {
	t.Helper()
	if os.Geteuid() == 0 {
		return
	}
	if os.Getenv("CI") != "" {
		t.Fatal("this test needs root, and in CI it must run")
	}
	t.Skip("this test needs root")
}

// Path names the namespace for other threads and processes, while it lives.
func (ns *NS) Path() string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), ns.f.Fd()) }

// Close lets go of the namespace. It may be repeated.
func (ns *NS) Close() { _ = ns.f.Close() }

// Do runs fn on a thread that is in the namespace.
func (ns *NS) Do(fn func() error) error {
	return onThread(func() error {
		if err := unix.Setns(int(ns.f.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter the namespace: %w", err)
		}
		return fn()
	})
}

// onThread runs fn on a thread that ends with it.
func onThread(fn func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		done <- fn()
	}()
	return <-done
}

// LoopbackUp sets lo up and gives it the IPv4 address ip, in place of that of an
// earlier call.
func (ns *NS) LoopbackUp(t testing.TB, ip netip.Addr) {
	t.Helper()
	err := ns.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("open a socket: %w", err)
		}
		defer unix.Close(fd)
		lo, err := unix.NewIfreq("lo")
		if err != nil {
			return err
		}
		lo.SetUint16(unix.IFF_UP)
		if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, lo); err != nil {
			return err
		}
		label, err := unix.NewIfreq("lo:0") // so that the kernel's own address is not replaced
		if err != nil {
			return err
		}
		if err := label.SetInet4Addr(ip.AsSlice()); err != nil {
			return err
		}
		if err := unix.IoctlIfreq(fd, unix.SIOCSIFADDR, label); err != nil {
			return fmt.Errorf("set address %s: %w", ip, err)
		}
		return nil
	})
	if err != nil {
		t.Fatalf("set lo up: %v", err)
	}
}
