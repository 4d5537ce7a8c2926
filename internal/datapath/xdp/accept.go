// SPDX-License-Identifier: Apache-2.0

package xdp

import (
	"fmt"
	"io"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
)

// Accept lets a veth device take what its peer sends by native XDP, which it
// otherwise loses: it has a program that passes everything until it is closed.
func Accept(ifindex int) (io.Closer, error) {
	const pass = 2
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "accept", Type: ebpf.XDP, License: "GPL", SectionName: "xdp.frags", Flags: fragsFlag,
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, pass), asm.Return()},
	})
	if err != nil {
		return nil, fmt.Errorf("load a program that passes frames: %w", err)
	}
	defer prog.Close()
	l, err := link.AttachXDP(link.XDPOptions{Interface: ifindex, Program: prog, Flags: link.XDPDriverMode})
	if err != nil {
		return nil, fmt.Errorf("attach a program that passes frames to device %d: %w", ifindex, err)
	}
	return l, nil
}

// fragsFlag is BPF_F_XDP_HAS_FRAGS: frames of more than one buffer come too.
const fragsFlag = 1 << 5
