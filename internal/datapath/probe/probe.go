// SPDX-License-Identifier: Apache-2.0

// Package probe finds out what this kernel can do, by doing it: it loads tiny
// programs, makes maps, attaches them to throw-away devices, cgroups and
// sockets in a network namespace of its own, and removes all of it again.
package probe

import (
	"bytes"
	"errors"
	"fmt"
	"os"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weft-mesh/weft/internal/netdev"
)

// Status of a feature.
type Status string

// The statuses.
const (
	Available Status = "yes"
	Missing   Status = "no"
	// Unknown is for a probe that could not be done, such as for lack of
	// privileges.
	Unknown Status = "unknown"
)

// Result is what is known about one feature of this kernel. The JSON names
// stay.
type Result struct {
	Group   string `json:"group"`
	Feature string `json:"feature"`
	Status  Status `json:"status"`
	// Required features are those that weft cannot do without.
	Required bool `json:"required"`
	// Effect is what weft does because of Status.
	Effect string `json:"effect"`
	// Since is the kernel version that has it, if built with Option.
	Since  string `json:"since"`
	Option string `json:"option,omitempty"`
	// Error is what the kernel said, where Status is not Available.
	Error string `json:"error,omitempty"`
}

// Report is all about this kernel.
type Report struct {
	Kernel   string   `json:"kernel"` // release and machine, as uname has it
	OK       bool     `json:"ok"`     // all required features are there
	Features []Result `json:"features"`
}

// feature is one thing to be probed.
type feature struct {
	group, name   string
	since, option string
	required      bool
	// use is what weft does with it, instead what it does without.
	use, instead string
	probe        func(*site) error
}

// site is where things are tried.
type site struct {
	net    *netdev.ProbeNet
	veth   int    // index of a device that is up
	cgroup string // an empty cgroup2 folder; "" where there is none
	// cgroupErr says why there is none.
	cgroupErr error
}

// Run probes everything; it needs root. The error is about probing itself.
func Run() (*Report, error) {
	kernel, err := kernelName()
	if err != nil {
		return nil, err
	}
	if os.Geteuid() != 0 {
		return nil, errors.New("probing the kernel needs root (CAP_BPF, CAP_NET_ADMIN, CAP_SYS_ADMIN)")
	}
	report := &Report{Kernel: kernel, OK: true}
	err = netdev.InProbeNet(func(n *netdev.ProbeNet) error {
		s, err := newSite(n)
		if err != nil {
			return err
		}
		defer s.close()
		for _, f := range catalogue {
			r := f.run(s)
			report.OK = report.OK && (!r.Required || r.Status == Available)
			report.Features = append(report.Features, r)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("probe the kernel: %w", err)
	}
	return report, nil
}

func newSite(n *netdev.ProbeNet) (*site, error) {
	veth, err := n.Veth()
	if err != nil {
		return nil, err
	}
	s := &site{net: n, veth: veth}
	s.cgroup, s.cgroupErr = makeCgroup()
	return s, nil
}

func (s *site) close() {
	if s.cgroup != "" {
		os.Remove(s.cgroup)
	}
}

func (f *feature) run(s *site) Result {
	r := Result{
		Group: f.group, Feature: f.name, Required: f.required, Since: f.since, Option: f.option,
		Status: Available, Effect: f.use,
	}
	if err := f.probe(s); err != nil {
		r.Status, r.Error, r.Effect = statusOf(err), firstLine(err), f.instead
	}
	return r
}

// statusOf tells "the kernel does not have it" from "it could not be tried".
func statusOf(err error) Status {
	for _, denied := range []error{unix.EPERM, unix.EACCES, unix.ENOMEM, unix.EMFILE, unix.ENFILE} {
		if errors.Is(err, denied) && !errors.Is(err, ebpf.ErrNotSupported) {
			return Unknown
		}
	}
	return Missing
}

func firstLine(err error) string {
	line, _, _ := bytes.Cut([]byte(err.Error()), []byte("\n"))
	return string(line)
}

func kernelName() (string, error) {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "", fmt.Errorf("uname: %w", err)
	}
	return unix.ByteSliceToString(u.Release[:]) + " " + unix.ByteSliceToString(u.Machine[:]), nil
}
