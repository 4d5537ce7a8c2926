// SPDX-License-Identifier: Apache-2.0

// Package lb owns the programs that translate services at the sockets of a
// cgroup: all pods and processes of this node.
package lb

import (
	"errors"
	"fmt"
	"runtime"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weft-mesh/weft/internal/datapath/pin"
	"github.com/weft-mesh/weft/internal/datapath/setting"
)

//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -cflags "-O2 -g -mcpu=v3 -Wall -Werror -I../../../bpf/include -I../../../bpf" -no-global-types object ../../../bpf/lb.bpf.c

// Datapath attaches the programs to cgroups.
type Datapath struct {
	maps    *pin.Maps
	objects objectPrograms
}

// hook is one place in the kernel that a program is for.
type hook struct {
	name    string
	since   string // version of Linux
	attach  ebpf.AttachType
	program func(*objectPrograms) *ebpf.Program
}

// hooks are all of them, in the order of attachment: what turns addresses back
// is there before what turns them.
var hooks = []hook{
	{"getpeername4", "5.8", ebpf.AttachCgroupInet4GetPeername, func(p *objectPrograms) *ebpf.Program { return p.SocketPeer4 }},
	{"getpeername6", "5.8", ebpf.AttachCgroupInet6GetPeername, func(p *objectPrograms) *ebpf.Program { return p.SocketPeer6 }},
	{"recvmsg4", "5.2", ebpf.AttachCGroupUDP4Recvmsg, func(p *objectPrograms) *ebpf.Program { return p.SocketRecv4 }},
	{"recvmsg6", "5.2", ebpf.AttachCGroupUDP6Recvmsg, func(p *objectPrograms) *ebpf.Program { return p.SocketRecv6 }},
	{"sock_release", "5.9", ebpf.AttachCgroupInetSockRelease, func(p *objectPrograms) *ebpf.Program { return p.SocketRelease }},
	{"sendmsg4", "4.18", ebpf.AttachCGroupUDP4Sendmsg, func(p *objectPrograms) *ebpf.Program { return p.SocketSend4 }},
	{"sendmsg6", "4.18", ebpf.AttachCGroupUDP6Sendmsg, func(p *objectPrograms) *ebpf.Program { return p.SocketSend6 }},
	{"connect4", "4.17", ebpf.AttachCGroupInet4Connect, func(p *objectPrograms) *ebpf.Program { return p.SocketConnect4 }},
	{"connect6", "4.17", ebpf.AttachCGroupInet6Connect, func(p *objectPrograms) *ebpf.Program { return p.SocketConnect6 }},
	{"post_bind4", "4.17", ebpf.AttachCGroupInet4PostBind, func(p *objectPrograms) *ebpf.Program { return p.SocketBind4 }},
	{"post_bind6", "4.17", ebpf.AttachCGroupInet6PostBind, func(p *objectPrograms) *ebpf.Program { return p.SocketBind6 }},
}

// Load loads the programs with the node's settings. The network namespace of
// the calling thread is the node's: the guard of its ports is for that alone.
func Load(maps *pin.Maps, node setting.Node) (*Datapath, error) {
	spec, err := loadObject()
	if err != nil {
		return nil, fmt.Errorf("read socket object: %w", err)
	}
	if err := node.Apply(spec); err != nil {
		return nil, fmt.Errorf("socket object: %w", err)
	}
	cookie, err := netnsCookie()
	if err != nil {
		return nil, err
	}
	if err := spec.Variables["node_netns_cookie"].Set(cookie); err != nil {
		return nil, fmt.Errorf("socket object: set node_netns_cookie: %w", err)
	}
	d := &Datapath{maps: maps}
	if err := maps.Load(spec, &d.objects); err != nil {
		return nil, fmt.Errorf("socket object (needs Linux 5.18, CONFIG_CGROUP_BPF): %w", err)
	}
	return d, nil
}

// netnsCookie is the number of this thread's network namespace.
func netnsCookie() (uint64, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("open a socket of the node: %w", err)
	}
	defer unix.Close(fd)
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err != nil {
		return 0, fmt.Errorf("number of the node's network namespace (SO_NETNS_COOKIE needs Linux 5.14): %w", err)
	}
	return cookie, nil
}

// Attach puts the programs in force for all sockets that are made in the cgroup
// from now on, and for those below it. Programs of an earlier agent are swapped
// one by one, and never absent.
func (d *Datapath) Attach(cgroupRoot string) error {
	for _, h := range hooks {
		err := d.maps.AttachCgroup(pin.CgroupAttachment{
			Name: h.name, Path: cgroupRoot, Hook: h.attach, Program: h.program(&d.objects),
		})
		if err != nil {
			return fmt.Errorf("services at sockets (%s needs Linux %s, CONFIG_CGROUP_BPF): %w", h.name, h.since, err)
		}
	}
	return nil
}

// Detach takes all programs out of force. Connected sockets keep their backends.
func Detach(maps *pin.Maps) error {
	var errs []error
	for _, h := range hooks {
		errs = append(errs, maps.DetachCgroup(h.name))
	}
	return errors.Join(errs...)
}

// Close closes the programs; attached ones stay in force.
func (d *Datapath) Close() error { return d.objects.Close() }
