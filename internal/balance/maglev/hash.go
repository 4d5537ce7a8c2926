// SPDX-License-Identifier: Apache-2.0

package maglev

import (
	"encoding/binary"
	"math/bits"
	"net/netip"
)

// Hash is what connection_hash of bpf/lib/service.h computes of a connection.
// Its entry in a table is Hash modulo the size.
func Hash(client, frontend netip.AddrPort, protocol uint8) uint32 {
	const k = 0x9e3779b97f4a7c15
	c, f := client.Addr().As16(), frontend.Addr().As16()
	word := binary.LittleEndian.Uint64
	h := uint64(bits.ReverseBytes16(client.Port()))<<32 | uint64(bits.ReverseBytes16(frontend.Port()))<<8 | uint64(protocol)
	h = (h ^ word(c[:8])) * k
	h = (h ^ h>>29 ^ word(c[8:])) * k
	h = (h ^ h>>31 ^ word(f[:8])) * k
	h = (h ^ h>>30 ^ word(f[8:])) * k
	h ^= h >> 32
	return uint32(h)
}
