// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// shareNetNSDir makes the folder of named network namespaces a shared mount of
// its own, as `ip netns add` does. Where that came second, it would copy the
// mounts of the namespaces that are there already, and their names could
// not be removed while the copies beneath are in place.
func shareNetNSDir() error {
	if err := os.MkdirAll(netnsDir, 0o755); err != nil {
		return fmt.Errorf("make the folder of network namespaces: %w", err)
	}
	dir, err := os.Open(netnsDir)
	if err != nil {
		return fmt.Errorf("open the folder of network namespaces: %w", err)
	}
	defer dir.Close() // which unlocks it
	if err := unix.Flock(int(dir.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("lock %s: %w", netnsDir, err)
	}
	err = unix.Mount("", netnsDir, "none", unix.MS_SHARED|unix.MS_REC, "")
	if !errors.Is(err, unix.EINVAL) { // that is: not a mount point yet
		return wrapShare(err)
	}
	if err := unix.Mount(netnsDir, netnsDir, "none", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("bind %s to itself: %w", netnsDir, err)
	}
	return wrapShare(unix.Mount("", netnsDir, "none", unix.MS_SHARED|unix.MS_REC, ""))
}

func wrapShare(err error) error {
	if err != nil {
		return fmt.Errorf("share the mount of %s: %w", netnsDir, err)
	}
	return nil
}

// removeNetNSDir takes the folder away when it is empty. The kernel refuses
// to unmount it while a namespace is mounted in it.
func removeNetNSDir() {
	entries, err := os.ReadDir(netnsDir)
	if err != nil || len(entries) > 0 {
		return
	}
	_ = unix.Unmount(netnsDir, 0)
	_ = os.Remove(netnsDir) // only succeeds where it is empty and no mount point
}
