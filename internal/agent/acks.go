// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
)

// ackFile remembers, for the next agent, up to which event of each CPU all are
// accounted for.
type ackFile struct{ path string }

func (f *ackFile) load() (map[uint32]uint64, error) {
	b, err := os.ReadFile(f.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read acknowledged events: %w", err)
	}
	var m map[uint32]uint64
	if err := json.Unmarshal(b, &m); err != nil {
		return nil, fmt.Errorf("read acknowledged events from %s: %w", f.path, err)
	}
	return m, nil
}

// save writes aside and renames: a half-written file is never read.
func (f *ackFile) save(m map[uint32]uint64) error {
	b, err := json.Marshal(m)
	if err != nil {
		return fmt.Errorf("encode acknowledged events: %w", err)
	}
	aside := f.path + ".new"
	if err := os.WriteFile(aside, b, 0o600); err != nil {
		return fmt.Errorf("write acknowledged events: %w", err)
	}
	if err := os.Rename(aside, f.path); err != nil {
		return fmt.Errorf("rename acknowledged events into place: %w", err)
	}
	return nil
}
