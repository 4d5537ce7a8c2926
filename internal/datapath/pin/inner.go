// SPDX-License-Identifier: Apache-2.0

package pin

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// sameInner says whether a map of maps takes maps like inner. The kernel compares
// them before it looks for the key: the update of an absent one, which changes
// nothing, tells.
func sameInner(old *ebpf.Map, inner *ebpf.MapSpec) (bool, error) {
	m, err := ebpf.NewMap(inner)
	if err != nil {
		return false, fmt.Errorf("create an inner map: %w", err)
	}
	defer m.Close()
	const absent = uint32(math.MaxUint32)
	err = old.Update(absent, m, ebpf.UpdateExist)
	switch {
	case err == nil, errors.Is(err, ebpf.ErrKeyNotExist):
		return true, nil
	case errors.Is(err, unix.EINVAL):
		return false, nil
	}
	return false, fmt.Errorf("try an inner map: %w", err)
}

// innerBatch is how many inner maps are open at once: a write to a map of maps
// waits for the programs that run, so one by one they would take a minute.
const innerBatch = 256

// copyInner puts the inner maps of one map into another: the maps themselves,
// not copies. If these are of another layout none is taken over.
func copyInner(from, to *ebpf.Map) error {
	if from.KeySize() != 4 || to.KeySize() != 4 {
		return nil
	}
	keys, err := innerKeys(from)
	if err != nil {
		return err
	}
	keys = keys[:min(len(keys), int(to.MaxEntries()))]
	for len(keys) > 0 {
		n := min(len(keys), innerBatch)
		err := copyInnerBatch(from, to, keys[:n])
		if errors.Is(err, unix.EINVAL) {
			return nil
		}
		if err != nil {
			return err
		}
		keys = keys[n:]
	}
	return nil
}

func innerKeys(m *ebpf.Map) ([]uint32, error) {
	var keys []uint32
	err := walkRaw(m, func(key, _ []byte) error {
		keys = append(keys, binary.NativeEndian.Uint32(key))
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list inner maps: %w", err)
	}
	return keys, nil
}

func copyInnerBatch(from, to *ebpf.Map, keys []uint32) error {
	var (
		found []uint32
		fds   []uint32
		open  []*ebpf.Map
	)
	defer func() {
		for _, m := range open {
			m.Close()
		}
	}()
	for _, k := range keys {
		var inner *ebpf.Map
		err := from.Lookup(k, &inner)
		if errors.Is(err, ebpf.ErrKeyNotExist) || errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return fmt.Errorf("open an inner map: %w", err)
		}
		open, found, fds = append(open, inner), append(found, k), append(fds, uint32(inner.FD()))
	}
	if len(found) == 0 {
		return nil
	}
	if _, err := to.BatchUpdate(found, fds, nil); err != nil {
		return fmt.Errorf("copy inner maps: %w", err)
	}
	return nil
}
