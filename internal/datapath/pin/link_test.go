// SPDX-License-Identifier: Apache-2.0

package pin

import (
	"fmt"
	"net"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/weft-mesh/weft/internal/datapath/packettest/bpffs"
	"github.com/weft-mesh/weft/internal/netdev/nstest"
)

func program(t *testing.T, name string) *ebpf.Program {
	t.Helper()
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: name, Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()},
	})
	must(t, err)
	t.Cleanup(func() { p.Close() })
	return p
}

func programID(t *testing.T, p *ebpf.Program) uint32 {
	t.Helper()
	info, err := p.Info()
	must(t, err)
	id, _ := info.ID()
	return uint32(id)
}

// device makes device name in the namespace anew and returns its number.
func device(t *testing.T, ns *nstest.NS, name string) (index int) {
	t.Helper()
	must(t, ns.Do(func() error {
		_ = exec.Command("ip", "link", "del", name).Run()
		if out, err := exec.Command("ip", "link", "add", name, "type", "veth", "peer", "name", "p-"+name).CombinedOutput(); err != nil {
			return fmt.Errorf("add %s: %w: %s", name, err, out)
		}
		dev, err := net.InterfaceByName(name)
		if err == nil {
			index = dev.Index
		}
		return err
	}))
	return index
}

// attach runs Attach in the namespace, as the agent does in its node's.
func attach(t *testing.T, ns *nstest.NS, m *Maps, a Attachment) {
	t.Helper()
	must(t, ns.Do(func() error { return m.Attach(a) }))
}

func attachments(t *testing.T, m *Maps) []Attached {
	t.Helper()
	got, err := m.Attachments()
	must(t, err)
	return got
}

func TestAttach(t *testing.T) {
	ns, dir := nstest.New(t), filepath.Join(bpffs.New(t), "node")
	m := open(t, dir, small())
	first, second := program(t, "from_first"), program(t, "from_second")
	index := device(t, ns, "wf.1") // a dot, as VLAN devices have
	ingress := Attachment{Device: "wf.1", Ifindex: index, Hook: ebpf.AttachTCXIngress, Program: first}
	egress := Attachment{Device: "wf.1", Ifindex: index, Hook: ebpf.AttachTCXEgress, Program: first}
	want := func(hook string, ifindex int, p *ebpf.Program, name string) Attached {
		return Attached{Device: "wf.1", Hook: hook, Ifindex: ifindex, ProgramID: programID(t, p), Program: name}
	}
	check := func(what string, w ...Attached) {
		t.Helper()
		if d := cmp.Diff(w, attachments(t, m), cmpopts.IgnoreFields(Attached{}, "LinkID")); d != "" {
			t.Errorf("%s (-want +got):\n%s", what, d)
		}
	}

	attach(t, ns, m, ingress)
	attach(t, ns, m, egress)
	check("attached", want("egress", index, first, "from_first"), want("ingress", index, first, "from_first"))
	attach(t, ns, m, ingress)
	check("repeated", want("egress", index, first, "from_first"), want("ingress", index, first, "from_first"))
	before := attachments(t, m)

	// another agent takes over
	must(t, m.Close())
	m = open(t, dir, small())
	ingress.Program = second
	attach(t, ns, m, ingress)
	check("updated in place", want("egress", index, first, "from_first"), want("ingress", index, second, "from_second"))
	for i, a := range attachments(t, m) {
		if a.LinkID != before[i].LinkID {
			t.Errorf("link of %s %s is another: a packet may have met no program", a.Device, a.Hook)
		}
	}

	index2 := device(t, ns, "wf.1")
	if index2 == index {
		t.Fatalf("the device has the same number as before")
	}
	check("device gone", want("egress", 0, first, "from_first"), want("ingress", 0, second, "from_second"))
	ingress.Ifindex, egress.Ifindex = index2, index2
	attach(t, ns, m, ingress)
	attach(t, ns, m, egress)
	check("device made anew", want("egress", index2, first, "from_first"), want("ingress", index2, second, "from_second"))

	must(t, m.Detach("wf.1"))
	must(t, m.Detach("wf.1"))
	check("detached")
}

func TestAttachRefuses(t *testing.T) {
	ns := nstest.New(t)
	m := open(t, filepath.Join(bpffs.New(t), "node"), small())
	err := ns.Do(func() error {
		return m.Attach(Attachment{Device: "wf1", Ifindex: 9999, Hook: ebpf.AttachTCXIngress, Program: program(t, "from_first")})
	})
	if err == nil || len(attachments(t, m)) != 0 {
		t.Errorf("no such device: %v; attached: %v", err, attachments(t, m))
	}
}

// TestAttachLeaksNothing: not on adoption, replacement or listing either.
func TestAttachLeaksNothing(t *testing.T) {
	ns := nstest.New(t)
	m := open(t, filepath.Join(bpffs.New(t), "node"), small())
	p := program(t, "from_first")
	before := bpffs.Descriptors(t)
	for range 3 {
		index := device(t, ns, "wf1")
		for range 2 {
			attach(t, ns, m, Attachment{Device: "wf1", Ifindex: index, Hook: ebpf.AttachTCXIngress, Program: p})
			attachments(t, m)
		}
	}
	must(t, m.Detach("wf1"))
	if d := cmp.Diff(before, bpffs.Descriptors(t)); d != "" {
		t.Errorf("open BPF objects (-before +after):\n%s", d)
	}
}
