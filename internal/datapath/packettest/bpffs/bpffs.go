// SPDX-License-Identifier: Apache-2.0

// Package bpffs gives tests a BPF file system of their own, and tells which
// file descriptors they left open.
package bpffs

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weft-mesh/weft/internal/netdev/nstest"
)

// New returns the path of a BPF file system that is mounted nowhere: it lives
// by a file descriptor alone, so nothing is left of it however a test ends.
func New(t testing.TB) string {
	t.Helper()
	nstest.Need(t)
	fd, err := detached()
	if err != nil {
		t.Fatalf("make a BPF file system: %v", err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), fd)
}

func detached() (int, error) {
	ctx, err := unix.Fsopen("bpf", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return 0, fmt.Errorf("fsopen: %w", err)
	}
	defer unix.Close(ctx)
	if err := unix.FsconfigCreate(ctx); err != nil {
		return 0, fmt.Errorf("fsconfig: %w", err)
	}
	fd, err := unix.Fsmount(ctx, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("fsmount: %w", err)
	}
	return fd, nil
}

// Descriptors returns what the process's open BPF objects are, by descriptor.
// Others come and go with the runtime.
func Descriptors(t testing.TB) map[string]string {
	t.Helper()
	const folder = "/proc/self/fd"
	entries, err := os.ReadDir(folder)
	if err != nil {
		t.Fatalf("list open files: %v", err)
	}
	open := map[string]string{}
	for _, e := range entries {
		target, err := os.Readlink(filepath.Join(folder, e.Name()))
		if err != nil {
			continue // the one of the listing itself
		}
		switch target {
		case "anon_inode:bpf-map", "anon_inode:bpf-prog", "anon_inode:bpf_link", "anon_inode:bpf-link", "anon_inode:btf":
			open[e.Name()] = target
		}
	}
	return open
}
