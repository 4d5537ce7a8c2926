// SPDX-License-Identifier: Apache-2.0

package bpffs

import (
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
)

// TestDescriptors: a leak of each kind is seen.
func TestDescriptors(t *testing.T) {
	New(t)
	before := len(Descriptors(t))
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()}})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if after := len(Descriptors(t)); after != before+2 {
		t.Errorf("%d open BPF objects with a map and a program more than %d: %v", after, before, Descriptors(t))
	}
}
