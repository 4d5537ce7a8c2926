// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"fmt"
	"os"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/link"
)

// license of the probing programs: some helpers and kfuncs are for GPL only.
const license = "GPL"

// returns is a program that returns v at once.
func returns(v int32) asm.Instructions {
	return asm.Instructions{asm.Mov.Imm(asm.R0, v), asm.Return()}
}

// load loads a program and gives it to f.
func load(spec *ebpf.ProgramSpec, f func(*ebpf.Program) error) error {
	spec.License = license
	p, err := ebpf.NewProgram(spec)
	if err != nil {
		return err
	}
	defer p.Close()
	return f(p)
}

func loads(*ebpf.Program) error { return nil }

func programType(t ebpf.ProgramType) func(*site) error {
	return func(*site) error { return features.HaveProgramType(t) }
}

func mapType(t ebpf.MapType) func(*site) error {
	return func(*site) error { return features.HaveMapType(t) }
}

func helper(t ebpf.ProgramType, fns ...asm.BuiltinFunc) func(*site) error {
	return func(*site) error {
		for _, fn := range fns {
			if err := features.HaveProgramHelper(t, fn); err != nil {
				return fmt.Errorf("%s in %s: %w", fn, t, err)
			}
		}
		return nil
	}
}

// all probes one after the other.
func all(probes ...func(*site) error) func(*site) error {
	return func(s *site) error {
		for _, p := range probes {
			if err := p(s); err != nil {
				return err
			}
		}
		return nil
	}
}

func boundedLoops(*site) error { return features.HaveBoundedLoops() }

// tcx attaches to both directions of a device.
func tcx(s *site) error {
	for _, attach := range []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress} {
		err := load(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, Instructions: returns(0)}, func(p *ebpf.Program) error {
			l, err := link.AttachTCX(link.TCXOptions{Interface: s.veth, Program: p, Attach: attach})
			if err != nil {
				return err
			}
			return l.Close()
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// xdpNative attaches in the driver of a veth device.
func xdpNative(s *site) error {
	const pass = 2
	return load(&ebpf.ProgramSpec{Type: ebpf.XDP, Instructions: returns(pass)}, func(p *ebpf.Program) error {
		l, err := link.AttachXDP(link.XDPOptions{Interface: s.veth, Program: p, Flags: link.XDPDriverMode})
		if err != nil {
			return err
		}
		return l.Close()
	})
}

// cgroupAttach attaches programs of one type to a cgroup, as links.
func cgroupAttach(t ebpf.ProgramType, attaches ...ebpf.AttachType) func(*site) error {
	return func(s *site) error {
		if s.cgroup == "" {
			return s.cgroupErr
		}
		for _, a := range attaches {
			err := load(&ebpf.ProgramSpec{Type: t, AttachType: a, Instructions: returns(1)}, func(p *ebpf.Program) error {
				l, err := link.AttachCgroup(link.CgroupOptions{Path: s.cgroup, Attach: a, Program: p})
				if err != nil {
					return err
				}
				return l.Close()
			})
			if err != nil {
				return fmt.Errorf("%s: %w", a, err)
			}
		}
		return nil
	}
}

// sockmap attaches a program to a SOCKHASH.
func sockmap(t ebpf.ProgramType, attach ebpf.AttachType) func(*site) error {
	return func(*site) error {
		m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.SockHash, KeySize: 4, ValueSize: 8, MaxEntries: 1})
		if err != nil {
			return fmt.Errorf("make a SOCKHASH: %w", err)
		}
		defer m.Close()
		return load(&ebpf.ProgramSpec{Type: t, AttachType: attach, Instructions: returns(1)}, func(p *ebpf.Program) error {
			if err := link.RawAttachProgram(link.RawAttachProgramOptions{Target: m.FD(), Program: p, Attach: attach}); err != nil {
				return err
			}
			return link.RawDetachProgram(link.RawDetachProgramOptions{Target: m.FD(), Program: p, Attach: attach})
		})
	}
}

// kfuncs looks up kernel functions in the kernel's BTF and returns what a call
// needs: their type numbers.
func kfuncs(names ...string) ([]int64, error) {
	spec, err := btf.LoadKernelSpec()
	if err != nil {
		return nil, err
	}
	var ids []int64
	for _, n := range names {
		var f *btf.Func
		if err := spec.TypeByName(n, &f); err != nil {
			return nil, fmt.Errorf("kernel function %s: %w", n, err)
		}
		id, err := spec.TypeID(f)
		if err != nil {
			return nil, fmt.Errorf("kernel function %s: %w", n, err)
		}
		ids = append(ids, int64(id))
	}
	return ids, nil
}

func callKfunc(id int64) asm.Instruction {
	return asm.Instruction{
		OpCode:   asm.OpCode(asm.JumpClass).SetJumpOp(asm.Call),
		Src:      asm.PseudoKfuncCall,
		Constant: id,
	}
}

// iterators loads a loop over numbers by an open-coded iterator.
func iterators(*site) error {
	ids, err := kfuncs("bpf_iter_num_new", "bpf_iter_num_next", "bpf_iter_num_destroy")
	if err != nil {
		return err
	}
	const slot = -8 // of struct bpf_iter_num on the stack
	iterator := func() asm.Instructions {
		return asm.Instructions{asm.Mov.Reg(asm.R1, asm.RFP), asm.Add.Imm(asm.R1, slot)}
	}
	code := append(iterator(),
		asm.Mov.Imm(asm.R2, 0),
		asm.Mov.Imm(asm.R3, 3),
		callKfunc(ids[0]),
	)
	next := iterator()
	next[0] = next[0].WithSymbol("next")
	code = append(code, next...)
	code = append(code, callKfunc(ids[1]), asm.JNE.Imm(asm.R0, 0, "next"))
	code = append(code, iterator()...)
	code = append(code, callKfunc(ids[2]))
	code = append(code, returns(0)...)
	return load(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, Instructions: code}, loads)
}

// rdonlyCast reads a socket's receive queue length through bpf_rdonly_cast.
func rdonlyCast(*site) error {
	ids, err := kfuncs("bpf_rdonly_cast")
	if err != nil {
		return err
	}
	spec, err := btf.LoadKernelSpec()
	if err != nil {
		return err
	}
	var sock *btf.Struct
	if err := spec.TypeByName("sock", &sock); err != nil {
		return fmt.Errorf("struct sock: %w", err)
	}
	id, err := spec.TypeID(sock)
	if err != nil {
		return fmt.Errorf("struct sock: %w", err)
	}
	code := asm.Instructions{
		asm.Mov.Imm(asm.R1, 0),
		asm.Mov.Imm(asm.R2, int32(id)),
		callKfunc(ids[0]),
		asm.LoadMem(asm.R1, asm.R0, 0, asm.DWord),
	}
	return load(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, Instructions: append(code, returns(0)...)}, loads)
}

// congestionControl registers a TCP congestion control made of BPF programs,
// and takes it back.
func congestionControl(*site) error {
	coll, err := ebpf.NewCollection(congestionSpec(fmt.Sprintf("weft_probe%d", os.Getpid()%1000)))
	if err != nil {
		return err
	}
	defer coll.Close()
	l, err := link.AttachStructOps(link.StructOpsOptions{Map: coll.Maps["probe_cc"]})
	if err != nil {
		return err
	}
	return l.Close()
}

// congestionSpec is a struct tcp_congestion_ops with only the functions that
// must be there. Names of congestion controls have at most 15 bytes.
func congestionSpec(name string) *ebpf.CollectionSpec {
	const (
		linkFlag = 1 << 13 // BPF_F_LINK
		nameSize = 16
		pointer  = 8
	)
	spec := &ebpf.CollectionSpec{
		Programs:  map[string]*ebpf.ProgramSpec{},
		Variables: map[string]*ebpf.VariableSpec{},
	}
	u32 := &btf.Int{Name: "unsigned int", Size: 4}
	ops := &btf.Struct{Name: "tcp_congestion_ops"}
	for i, fn := range []string{"ssthresh", "cong_avoid", "undo_cwnd"} {
		ops.Members = append(ops.Members, btf.Member{
			Name:   fn,
			Type:   &btf.Pointer{Target: &btf.FuncProto{Return: u32}},
			Offset: btf.Bits(i * pointer * 8),
		})
		spec.Programs[fn] = &ebpf.ProgramSpec{
			Name: fn, Type: ebpf.StructOps, AttachTo: ops.Name + ":" + fn, License: license,
			SectionName: "struct_ops/" + fn, Instructions: returns(2),
		}
	}
	named := len(ops.Members) * pointer
	char := &btf.Int{Name: "char", Size: 1, Encoding: btf.Char}
	ops.Members = append(ops.Members, btf.Member{
		Name: "name", Type: &btf.Array{Index: u32, Type: char, Nelems: nameSize}, Offset: btf.Bits(named * 8),
	})
	ops.Size = uint32(named + nameSize)
	value := make([]byte, ops.Size)
	copy(value[named:], name)
	spec.Maps = map[string]*ebpf.MapSpec{"probe_cc": {
		Name: "probe_cc", Type: ebpf.StructOpsMap, MaxEntries: 1, Flags: linkFlag,
		Key: &btf.Int{Size: 4}, KeySize: 4, Value: ops, ValueSize: ops.Size,
		Contents: []ebpf.MapKV{{Key: uint32(0), Value: value}},
	}}
	return spec
}
