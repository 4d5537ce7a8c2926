// SPDX-License-Identifier: Apache-2.0

package pin

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

var errTooBig = unix.E2BIG

// Attachment is one program at one tcx hook of one device.
type Attachment struct {
	Device  string // name, for the pin and for messages
	Ifindex int
	Hook    ebpf.AttachType // AttachTCXIngress or AttachTCXEgress
	Program *ebpf.Program
}

func hookName(h ebpf.AttachType) string {
	if h == ebpf.AttachXDP {
		return "XDP"
	}
	if h == ebpf.AttachTCXEgress {
		return "egress"
	}
	return "ingress"
}

// linkPath has no dots in its last part: bpffs refuses them.
func (m *Maps) linkPath(device, hook string) string {
	return filepath.Join(m.dir, "links", strings.ReplaceAll(device, ".", "%")+"-"+hook)
}

// Attach puts the program in force and pins its link. A link that is already
// there is updated in place, without a packet that meets no program; one whose
// device has gone is replaced.
func (m *Maps) Attach(a Attachment) error {
	path := m.linkPath(a.Device, hookName(a.Hook))
	done, err := adopt(path, a)
	if err != nil || done {
		return err
	}
	l, err := link.AttachTCX(link.TCXOptions{Interface: a.Ifindex, Program: a.Program, Attach: a.Hook})
	if err != nil {
		return fmt.Errorf("attach to %s of %s (tcx needs Linux 6.6): %w", hookName(a.Hook), a.Device, err)
	}
	defer l.Close()
	if err := l.Pin(path); err != nil {
		return fmt.Errorf("pin the link of %s: %w", a.Device, err)
	}
	return nil
}

// adopt updates the pinned link at path; false where a new one is needed.
func adopt(path string, a Attachment) (bool, error) {
	l, err := link.LoadPinnedLink(path, nil)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("open the pinned link of %s: %w", a.Device, err)
	}
	defer l.Close()
	if linkIfindex(l) == a.Ifindex {
		if err := l.Update(a.Program); err != nil {
			return false, fmt.Errorf("swap the program at %s of %s: %w", hookName(a.Hook), a.Device, err)
		}
		return true, nil
	}
	if err := os.Remove(path); err != nil {
		return false, fmt.Errorf("remove the link of a gone device: %w", err)
	}
	return false, nil
}

// linkIfindex is 0 for a link whose device has gone.
func linkIfindex(l link.Link) int {
	info, err := l.Info()
	if err != nil {
		return 0
	}
	if tcx := info.TCX(); tcx != nil {
		return int(tcx.Ifindex)
	}
	if xdp := info.XDP(); xdp != nil {
		return int(xdp.Ifindex)
	}
	return 0
}

// Detach takes both hooks of a device out of force; an absent one is not an
// error.
func (m *Maps) Detach(device string) error {
	var errs []error
	for _, hook := range []string{"ingress", "egress"} {
		err := os.Remove(m.linkPath(device, hook))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("remove the link of %s: %w", device, err))
		}
	}
	return errors.Join(errs...)
}

// Attached is a pinned link as it is in the kernel.
type Attached struct {
	Device    string
	Hook      string // "ingress", "egress", or as XDPMode.hook has it
	Ifindex   int    // 0: the device has gone
	LinkID    uint32 // the same for as long as the device is never without a program
	ProgramID uint32
	Program   string
}

// Attachments lists the pinned links.
func (m *Maps) Attachments() ([]Attached, error) {
	entries, err := os.ReadDir(filepath.Join(m.dir, "links"))
	if err != nil {
		return nil, fmt.Errorf("list links: %w", err)
	}
	var out []Attached
	for _, e := range entries {
		i := strings.LastIndexByte(e.Name(), '-')
		if i < 0 {
			continue
		}
		a := Attached{Device: strings.ReplaceAll(e.Name()[:i], "%", "."), Hook: e.Name()[i+1:]}
		if err := a.read(filepath.Join(m.dir, "links", e.Name())); err != nil {
			return nil, err
		}
		out = append(out, a)
	}
	return out, nil
}

func (a *Attached) read(path string) error {
	l, err := link.LoadPinnedLink(path, nil)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open link of %s: %w", a.Device, err)
	}
	defer l.Close()
	info, err := l.Info()
	if err != nil {
		return fmt.Errorf("read link of %s: %w", a.Device, err)
	}
	a.Ifindex = linkIfindex(l)
	a.LinkID = uint32(info.ID)
	a.ProgramID = uint32(info.Program)
	prog, err := ebpf.NewProgramFromID(info.Program)
	if err != nil {
		return nil // detached in the meantime
	}
	defer prog.Close()
	if pi, err := prog.Info(); err == nil {
		a.Program = pi.Name
	}
	return nil
}

// Remove deletes the whole pin folder: everything is detached and forgotten.
func Remove(dir string) error {
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("remove pins: %w", err)
	}
	return nil
}
