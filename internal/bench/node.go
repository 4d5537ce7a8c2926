// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/weft-mesh/weft/internal/cgroup"
	"github.com/weft-mesh/weft/internal/netdev"
)

// cgroupPatience bounds the end of what runs in a cgroup.
const cgroupPatience = 10 * time.Second

// group makes a cgroup2 folder of the site.
func (s *Site) group(name string) (string, error) {
	if s.cgroup == "" {
		mount, err := cgroup.Mount()
		if err != nil {
			return "", err
		}
		s.cgroup = filepath.Join(mount, fmt.Sprintf("%s%d", namePrefix, os.Getpid()))
	}
	folder := filepath.Join(s.cgroup, name)
	return folder, cgroup.Create(folder)
}

// folder makes a temporary folder of the site.
func (s *Site) folder(name string) (string, error) {
	if s.files == "" {
		files, err := os.MkdirTemp("", fmt.Sprintf("%s%d-", namePrefix, os.Getpid()))
		if err != nil {
			return "", err
		}
		s.files = files
	}
	folder := filepath.Join(s.files, name)
	return folder, os.Mkdir(folder, 0o700)
}

// pinRoot is where labs have their pins, too.
const pinRoot = "/sys/fs/bpf/weft"

func sitePins(pid int) string { return fmt.Sprintf("%s/%s%d", pinRoot, namePrefix, pid) }

func (s *Site) removeFolders() error {
	var errs []error
	if s.cgroup != "" {
		ctx, cancel := context.WithTimeout(context.Background(), cgroupPatience)
		defer cancel()
		errs = append(errs, cgroup.Remove(ctx, s.cgroup))
	}
	errs = append(errs, os.RemoveAll(sitePins(os.Getpid())), removeEmpty(pinRoot))
	if s.files != "" {
		errs = append(errs, os.RemoveAll(s.files))
	}
	return errors.Join(errs...)
}

// removeEmpty removes a folder that nobody else uses.
func removeEmpty(folder string) error {
	left, err := os.ReadDir(folder)
	if err != nil || len(left) > 0 {
		return nil // not there, or not ours alone
	}
	return os.Remove(folder)
}

// removeAbandonedFolders takes away those of processes that are gone. Programs
// at the sockets of a cgroup go with it.
func removeAbandonedFolders() error {
	ctx, cancel := context.WithTimeout(context.Background(), cgroupPatience)
	defer cancel()
	var errs []error
	remove := func(parent string, how func(string) error) {
		folders, err := filepath.Glob(filepath.Join(parent, namePrefix+"*"))
		errs = append(errs, err)
		for _, folder := range folders {
			if abandoned(filepath.Base(folder)) {
				errs = append(errs, how(folder))
			}
		}
	}
	if mount, err := cgroup.Mount(); err == nil { // a machine without has none
		remove(mount, func(folder string) error { return cgroup.Remove(ctx, folder) })
	}
	remove(pinRoot, os.RemoveAll)
	remove(os.TempDir(), os.RemoveAll)
	return errors.Join(errs...)
}

// node is the place that services are programmed in: the path Plain, where the
// router is the node, the client a pod of it, and the server every endpoint of
// a fleet.
type node struct {
	client, router, server string // network namespaces
	address                netip.Addr
	pods                   netip.Prefix
	// pod is the cgroup of the client, other one for the processes that
	// program services.
	pod, other string
	folder     string // for their files
}

func (s *Site) node(name string) (*node, error) {
	target, err := s.Build(Plain, 0, false)
	if err != nil {
		return nil, err
	}
	n := &node{
		client: target.Client, server: target.Server, router: fmt.Sprintf("%s%d-%d-router", namePrefix, os.Getpid(), s.paths),
		address: in(2, 1)[0].Addr(), pods: in(1, 0)[0],
	}
	if err := netdev.AddLocalRoute(n.server, fleetEndpoints); err != nil {
		return nil, err
	}
	if err := netdev.AddGatewayRoute(n.router, fleetEndpoints, target.Addr); err != nil {
		return nil, err
	}
	if n.pod, err = s.group(name + "/pod"); err != nil {
		return nil, err
	}
	if n.other, err = s.group(name + "/other"); err != nil {
		return nil, err
	}
	n.folder, err = s.folder(name)
	return n, err
}

// target is the path through services, or with nil straight to the endpoints.
func (n *node) target(name, about string, services *Services) Target {
	if services == nil {
		services = &Services{First: firstEndpoint, Count: 10_000, Port: fleetTarget}
	}
	return Target{
		Name: name, About: about, Client: n.client, Server: n.server, Addr: netip.IPv4Unspecified(), Port: fleetTarget,
		Services: services, ClientCgroup: n.pod,
	}
}
