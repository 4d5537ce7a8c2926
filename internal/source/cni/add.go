// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
	"github.com/weft-mesh/weft/internal/addr"
	"github.com/weft-mesh/weft/internal/ipam"
	"github.com/weft-mesh/weft/internal/netdev"
	"github.com/weft-mesh/weft/internal/source/cni/tombstone"
	"github.com/weft-mesh/weft/internal/state"
)

// Add wires a pod and returns once its datapath is in force.
func (s *Server) Add(ctx context.Context, r *weftv1.CniAddRequest) (*weftv1.CniAddResponse, error) {
	if err := validateAdd(r); err != nil {
		return nil, err
	}
	if err := s.begin(ctx); err != nil {
		return nil, err
	}
	subject, err := s.waitFor(ctx, r)
	if err != nil {
		return nil, err
	}
	unlock, err := s.locks.lock(ctx, r.ContainerId)
	if err != nil {
		return nil, status.FromContextError(err).Err()
	}
	defer unlock()
	select {
	case s.slots <- struct{}{}:
		defer func() { <-s.slots }()
	case <-ctx.Done():
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	a, err := s.add(ctx, r, subject)
	if err != nil {
		return nil, status.Errorf(addCode(err), "pod %s: %v", state.Key(r.PodNamespace, r.PodName), err)
	}
	s.log.Info("pod wired", "pod", a.pod(), "container", a.ContainerID, "ips", a.IPs, "interface", a.hostName(), "identity", a.Identity)
	return response(a), nil
}

func validateAdd(r *weftv1.CniAddRequest) error {
	for _, f := range []struct{ name, value string }{
		{"container_id", r.ContainerId}, {"netns", r.Netns}, {"interface", r.Interface},
		{"pod_namespace", r.PodNamespace}, {"pod_name", r.PodName},
	} {
		if f.value == "" {
			return status.Errorf(codes.InvalidArgument, "add: %s must be set", f.name)
		}
	}
	return nil
}

// addCode tells a caller what sort of error it is.
func addCode(err error) codes.Code {
	var full *ipam.FullError
	var conflict *conflictError
	switch {
	case errors.As(err, &full):
		return codes.ResourceExhausted
	case errors.As(err, &conflict):
		return codes.AlreadyExists
	case errors.Is(err, netdev.ErrNoNetns):
		return codes.InvalidArgument
	case errors.Is(err, ipam.ErrNoCIDR):
		return codes.FailedPrecondition
	case errors.Is(err, context.DeadlineExceeded):
		return codes.DeadlineExceeded
	case errors.Is(err, context.Canceled):
		return codes.Canceled
	}
	return codes.Internal
}

// conflictError says that a container is wired in another way.
type conflictError struct{ message string }

func (e *conflictError) Error() string { return e.message }

// add does the work of Add, with the container's lock held.
func (s *Server) add(ctx context.Context, r *weftv1.CniAddRequest, sub *subject) (_ *attachment, err error) {
	key := ipam.Key{ContainerID: r.ContainerId, Interface: r.Interface}
	if err := s.buryOne(ctx, tombstone.Tombstone{ContainerID: key.ContainerID, Interface: key.Interface}); err != nil {
		return nil, err
	}
	identity, err := s.identities.Assign(r.PodNamespace, sub.namespace.Labels, sub.workload.ServiceAccount, sub.workload.Labels)
	if err != nil {
		return nil, fmt.Errorf("assign identity: %w", err)
	}
	a, err := s.allocate(r, key, sub)
	if err != nil {
		return nil, err
	}
	known := a.Wired
	defer func() {
		// A pod that was wired before this call keeps what it has.
		if err != nil && !known {
			ctx, cancel := cleanup(ctx)
			defer cancel()
			err = errors.Join(err, s.teardown(ctx, a))
		}
	}()
	a.Identity = identity
	if err := s.wire(ctx, a); err != nil {
		return nil, err
	}
	a.Wired = true
	if err := s.store(a); err != nil {
		return nil, err
	}
	if err := s.insertRow(a.row()); err != nil {
		return nil, err
	}
	s.clearPending(a.Key)
	return a, nil
}

// allocate returns the attachment of key, made unless it is there.
func (s *Server) allocate(r *weftv1.CniAddRequest, key ipam.Key, sub *subject) (*attachment, error) {
	if row, ok := s.row(key.ContainerID); ok && row.Interface != netdev.HostName(key.String()) {
		return nil, &conflictError{fmt.Sprintf("container %s has another interface from weft: it gives one to each pod", key.ContainerID)}
	}
	if err := s.pool.SetCIDRs(sub.node.PodCIDRs); err != nil {
		return nil, fmt.Errorf("node %s: %w", sub.node.Name, err)
	}
	v4, v6 := addr.Pick(sub.node.IPs)
	rec := record{
		Network: r.Network, Netns: r.Netns, Namespace: r.PodNamespace, Name: r.PodName, UID: r.PodUid,
		Sources: valid(v4, v6), MTU: int(s.mtu.Load()),
	}
	for _, c := range sub.node.PodCIDRs {
		rec.Gateways = append(rec.Gateways, addr.Gateway(c))
	}
	data, err := rec.encode()
	if err != nil {
		return nil, err
	}
	alloc, created, err := s.pool.Allocate(key, data)
	if err != nil {
		return nil, fmt.Errorf("allocate address: %w", err)
	}
	a, err := decode(alloc)
	if err != nil {
		return nil, err
	}
	if created {
		return a, s.fromCIDRs(a, sub.node)
	}
	if a.Netns != r.Netns || a.Namespace != r.PodNamespace || a.Name != r.PodName {
		return nil, &conflictError{fmt.Sprintf("container %s is wired as pod %s in %s", key.ContainerID, a.pod(), a.Netns)}
	}
	return a, nil
}

// fromCIDRs undoes an allocation that was made just while the node's CIDRs were
// replaced, and is therefore not in those that the pod's gateways are from.
func (s *Server) fromCIDRs(a *attachment, node *state.Node) error {
	for _, ip := range a.IPs {
		if !slices.ContainsFunc(node.PodCIDRs, func(c netip.Prefix) bool { return c.Contains(ip) }) {
			err := fmt.Errorf("address %s is in none of the pod CIDRs %v of node %s, which have just changed", ip, node.PodCIDRs, node.Name)
			return errors.Join(err, s.pool.Release(a.Key))
		}
	}
	return nil
}

// wire makes the pod's link, puts its datapath in force, and lets traffic in
// then; or mends what there is of these.
func (s *Server) wire(ctx context.Context, a *attachment) error {
	spec, err := s.spec(a)
	if err != nil {
		return err
	}
	if err := s.link(ctx, a, spec); err != nil {
		return err
	}
	if err := s.datapath.Attach(ctx, a.row()); err != nil {
		return fmt.Errorf("attach datapath to %s: %w", a.hostName(), err)
	}
	if err := s.net.ActivatePodLink(spec); err != nil {
		return fmt.Errorf("activate link: %w", err)
	}
	return nil
}

// link makes the pod's link, unless it is there, and stores its ifindex: from
// then on a crash can be cleaned up.
func (s *Server) link(ctx context.Context, a *attachment, spec netdev.PodLinkSpec) error {
	l, err := s.net.PreparePodLink(spec)
	if err != nil {
		return fmt.Errorf("create link: %w", err)
	}
	if a.Ifindex == l.Ifindex {
		return nil
	}
	if a.Ifindex != 0 {
		if err := s.datapath.Detach(ctx, a.row()); err != nil {
			return fmt.Errorf("detach datapath from the former %s: %w", a.hostName(), err)
		}
	}
	a.Ifindex = l.Ifindex
	return s.store(a)
}

func valid(as ...netip.Addr) []netip.Addr {
	var out []netip.Addr
	for _, a := range as {
		if a.IsValid() {
			out = append(out, a)
		}
	}
	return out
}

func response(a *attachment) *weftv1.CniAddResponse {
	row := a.row()
	r := &weftv1.CniAddResponse{HostInterface: row.Interface, HostMac: row.HostMAC, Mac: row.MAC, Mtu: uint32(a.MTU)}
	for _, ip := range a.IPs {
		gateway := pick(a.Gateways, ip)
		r.Ips = append(r.Ips, &weftv1.CniIp{Address: addr.Host(ip).String(), Gateway: gateway.String()})
		all := netip.PrefixFrom(netip.IPv4Unspecified(), 0)
		if ip.Is6() {
			all = netip.PrefixFrom(netip.IPv6Unspecified(), 0)
		}
		r.Routes = append(r.Routes,
			&weftv1.CniRoute{Destination: addr.Host(gateway).String()},
			&weftv1.CniRoute{Destination: all.String(), Gateway: gateway.String()})
	}
	return r
}

// pick returns the address of as in the family of ip.
func pick(as []netip.Addr, ip netip.Addr) netip.Addr {
	v4, v6 := addr.Pick(as)
	if ip.Is4() {
		return v4
	}
	return v6
}
