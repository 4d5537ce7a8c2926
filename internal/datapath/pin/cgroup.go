// SPDX-License-Identifier: Apache-2.0

package pin

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// CgroupAttachment is one program at one hook of a cgroup.
type CgroupAttachment struct {
	Name    string // of the pin, without dots; one for each hook
	Path    string // of the cgroup2 folder
	Hook    ebpf.AttachType
	Program *ebpf.Program
}

// cgroupPath is apart from the links of devices, which Attachments lists.
func (m *Maps) cgroupPath(name string) string { return filepath.Join(m.dir, "cgroup", name) }

// AttachCgroup puts the program in force for the sockets of a cgroup and of
// those below it, and pins its link. A link to the same cgroup that is already
// there is updated in place, without a call that meets no program; one to
// another cgroup is replaced.
func (m *Maps) AttachCgroup(a CgroupAttachment) error {
	path := m.cgroupPath(a.Name)
	done, err := adoptCgroup(path, a)
	if err != nil || done {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return fmt.Errorf("make pin folder: %w", err)
	}
	l, err := link.AttachCgroup(link.CgroupOptions{Path: a.Path, Attach: a.Hook, Program: a.Program})
	if err != nil {
		return fmt.Errorf("attach to %s of cgroup %s: %w", a.Name, a.Path, err)
	}
	defer l.Close()
	if err := l.Pin(path); err != nil {
		return fmt.Errorf("pin the link of %s: %w", a.Name, err)
	}
	return nil
}

// adoptCgroup updates the pinned link at path; false where a new one is needed.
func adoptCgroup(path string, a CgroupAttachment) (bool, error) {
	l, err := link.LoadPinnedLink(path, nil)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("open the pinned link of %s: %w", a.Name, err)
	}
	defer l.Close()
	want, err := cgroupID(a.Path)
	if err != nil {
		return false, err
	}
	if linkCgroup(l) == want {
		if err := l.Update(a.Program); err != nil {
			return false, fmt.Errorf("swap the program at %s of cgroup %s: %w", a.Name, a.Path, err)
		}
		return true, nil
	}
	if err := os.Remove(path); err != nil {
		return false, fmt.Errorf("remove the link of another cgroup: %w", err)
	}
	return false, nil
}

// linkCgroup is 0 for a link whose cgroup has gone.
func linkCgroup(l link.Link) uint64 {
	info, err := l.Info()
	if err != nil {
		return 0
	}
	if cgroup := info.Cgroup(); cgroup != nil {
		return cgroup.CgroupId
	}
	return 0
}

// cgroupID is what the kernel knows a cgroup by: the inode of its folder.
func cgroupID(path string) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return 0, fmt.Errorf("look at cgroup %s: %w", path, err)
	}
	return st.Ino, nil
}

// DetachCgroup takes a hook out of force; an absent one is not an error.
func (m *Maps) DetachCgroup(name string) error {
	if err := os.Remove(m.cgroupPath(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the link of %s: %w", name, err)
	}
	return nil
}

// CgroupAttachments lists the pinned links to cgroups; Device is the name of
// the hook, and Ifindex and Hook are not set. One whose cgroup has gone is left
// out.
func (m *Maps) CgroupAttachments() ([]Attached, error) {
	entries, err := os.ReadDir(m.cgroupPath(""))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list links of cgroups: %w", err)
	}
	var out []Attached
	for _, e := range entries {
		a := Attached{Device: e.Name()}
		if err := a.read(m.cgroupPath(e.Name())); err != nil {
			return nil, err
		}
		if a.Program != "" {
			out = append(out, a)
		}
	}
	return out, nil
}
