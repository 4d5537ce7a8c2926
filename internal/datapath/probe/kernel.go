// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"
)

// kernelBTF loads the kernel's own type information.
func kernelBTF(*site) error {
	_, err := btf.LoadKernelSpec()
	return err
}

// fileSystem says whether the kernel knows a file system.
func fileSystem(name string) func(*site) error {
	return func(*site) error {
		list, err := os.ReadFile("/proc/filesystems")
		if err != nil {
			return fmt.Errorf("list file systems: %w", err)
		}
		for line := range strings.Lines(string(list)) {
			if f := strings.Fields(line); len(f) > 0 && f[len(f)-1] == name {
				return nil
			}
		}
		return fmt.Errorf("file system %s: %w", name, errors.ErrUnsupported)
	}
}

// mounted says whether a file system of the type is mounted.
func mounted(fsType string) func(*site) error {
	return func(*site) error {
		_, err := mountPoint(fsType)
		return err
	}
}

// mountPoint returns where the first file system of the type is mounted.
func mountPoint(fsType string) (string, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return "", fmt.Errorf("list mounts: %w", err)
	}
	defer f.Close()
	return findMount(f, fsType)
}

// findMount reads mountinfo: "36 35 98:0 /root /mount/point opts … - type …".
func findMount(mountinfo io.Reader, fsType string) (string, error) {
	lines := bufio.NewScanner(mountinfo)
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		dash := slices.Index(fields, "-")
		if dash < 5 || dash+1 >= len(fields) || fields[dash+1] != fsType {
			continue
		}
		return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(fields[4]), nil
	}
	if err := lines.Err(); err != nil {
		return "", fmt.Errorf("list mounts: %w", err)
	}
	return "", fmt.Errorf("no %s is mounted", fsType)
}

// makeCgroup makes an empty cgroup for this probing.
func makeCgroup() (string, error) {
	root, err := mountPoint("cgroup2")
	if err != nil {
		return "", err
	}
	dir, err := os.MkdirTemp(root, "weft-probe-")
	if err != nil {
		return "", fmt.Errorf("make a cgroup: %w", err)
	}
	return dir, nil
}

// socket opens a socket and closes it.
func socket(family, kind, protocol int) func(*site) error {
	return func(*site) error {
		fd, err := unix.Socket(family, kind, protocol)
		if err != nil {
			return fmt.Errorf("open a socket: %w", err)
		}
		return unix.Close(fd)
	}
}

// withTCP gives f a TCP socket that is not connected.
func withTCP(f func(fd int) error) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open a TCP socket: %w", err)
	}
	defer unix.Close(fd)
	return f(fd)
}

// congestion lets a socket use a congestion control of the kernel's.
func congestion(name string) func(*site) error {
	return func(*site) error {
		return withTCP(func(fd int) error {
			if err := unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, name); err != nil {
				return fmt.Errorf("use %s: %w", name, err)
			}
			return nil
		})
	}
}

// kernelTLS asks for the TLS layer on a socket. That it must be connected
// first is the answer of a kernel that has it.
func kernelTLS(*site) error {
	return withTCP(func(fd int) error {
		err := unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_ULP, "tls")
		if err == nil || errors.Is(err, unix.ENOTCONN) {
			return nil
		}
		return fmt.Errorf("set TCP_ULP tls: %w", err)
	})
}
