// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/weft-mesh/weft/internal/datapath/pin"
)

// lockPins keeps a second agent out of a pin folder, whatever else is different
// between the two: its programs would replace those of the first. The lock is on
// the folder itself, so it holds in every namespace, and ends with the process.
func lockPins(dir string) (*os.File, error) {
	if err := pin.MountBPF(dir); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make pin folder: %w", err)
	}
	f, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("open pin folder: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		err = fmt.Errorf("lock pinPath %s: %w (is another agent running with it?)", dir, err)
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}
