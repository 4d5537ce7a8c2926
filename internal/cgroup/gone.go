// SPDX-License-Identifier: Apache-2.0

package cgroup

import (
	"errors"
	"os"
	"syscall"
)

// gone tells whether err says that the folder was removed, also while it was
// being read (ENODEV).
func gone(err error) bool {
	return errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ENODEV)
}
