// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// Cookie is the number by which BPF programs know the network namespace at path,
// or that of the node where path is empty. No two have the same, ever.
func (n *Net) Cookie(path string) (cookie uint64, err error) {
	ns := n.ns
	if path != "" {
		pod, err := openPodSide(path)
		if err != nil {
			return 0, err
		}
		defer pod.close()
		ns = pod.ns
	}
	err = inNamespace(ns, func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("open a socket in %s: %w", path, err)
		}
		defer unix.Close(fd)
		if cookie, err = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE); err != nil {
			return fmt.Errorf("number of network namespace %s (SO_NETNS_COOKIE needs Linux 5.14): %w", path, err)
		}
		return nil
	})
	return cookie, err
}
