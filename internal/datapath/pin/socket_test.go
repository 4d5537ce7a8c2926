// SPDX-License-Identifier: Apache-2.0

package pin

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"

	"github.com/weft-mesh/weft/internal/datapath/packettest/bpffs"
)

// TestSocketMemory: a field in place of reserved bytes is no other layout, as
// nobody could move what sockets remember; another size begins anew.
func TestSocketMemory(t *testing.T) {
	for _, c := range []struct {
		name  string
		size  uint32 // of the value, in bytes
		adopt bool
	}{{"another field", 64, true}, {"another size", 32, false}} {
		t.Run(c.name, func(t *testing.T) {
			dir := filepath.Join(bpffs.New(t), "node1")
			spec, err := LoadKernel()
			must(t, err)
			ms := spec.Maps["weft_socket_peer"].Copy()
			ms.Value = &btf.Struct{Name: "socket_service", Size: c.size, Members: []btf.Member{{Name: "gone", Type: &btf.Int{Name: "u32", Size: 4}}}}
			ms.ValueSize = c.size
			must(t, os.MkdirAll(filepath.Join(dir, "maps"), 0o700))
			old, err := createPinned(ms, filepath.Join(dir, "maps", "socket_peer"))
			must(t, err)
			t.Cleanup(func() { old.Close() })
			m := open(t, dir, small())
			if got := mapID(t, m.Map("weft_socket_peer")) == mapID(t, old); got != c.adopt {
				t.Errorf("adopted: %t, want %t", got, c.adopt)
			}
			must(t, m.FinishMigration())
			again := open(t, dir, small())
			if a, b := mapID(t, m.Map("weft_socket_peer")), mapID(t, again.Map("weft_socket_peer")); a != b || again.Map("weft_socket_peer").Type() != ebpf.SkStorage {
				t.Errorf("maps %d and %d are not the same", a, b)
			}
		})
	}
}
