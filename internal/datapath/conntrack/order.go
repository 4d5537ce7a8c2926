// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"encoding/binary"

	"github.com/weft-mesh/weft/internal/datapath/pin"
)

// less mirrors addr_less of bpf/lib/addr.h: two machine words, as they lie in
// memory.
func less(a, b pin.KernelAddr) bool {
	a0, b0 := binary.NativeEndian.Uint64(a.B[:8]), binary.NativeEndian.Uint64(b.B[:8])
	if a0 != b0 {
		return a0 < b0
	}
	return binary.NativeEndian.Uint64(a.B[8:]) < binary.NativeEndian.Uint64(b.B[8:])
}
