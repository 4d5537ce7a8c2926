// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"
)

// ExitError makes weft end with Code and print nothing more: the command that
// weft ran for the user has already said what was wrong.
type ExitError struct{ Code int }

func (e *ExitError) Error() string { return fmt.Sprintf("exit code %d", e.Code) }

func asExit(err error, target **ExitError) bool { return errors.As(err, target) }
