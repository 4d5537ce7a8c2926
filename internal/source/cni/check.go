// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"context"
	"fmt"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
	"github.com/weft-mesh/weft/internal/addr"
	"github.com/weft-mesh/weft/internal/ipam"
)

// Check fails with what is not as an Add left it; NOT_FOUND for a pod that is
// not known.
func (s *Server) Check(ctx context.Context, r *weftv1.CniCheckRequest) (*weftv1.CniCheckResponse, error) {
	if err := s.begin(ctx); err != nil {
		return nil, err
	}
	key := ipam.Key{ContainerID: r.ContainerId, Interface: r.Interface}
	a, ok, err := s.attachment(key)
	if err != nil {
		return nil, status.Errorf(codes.Internal, "check: %v", err)
	}
	if !ok || !a.Wired {
		return nil, status.Errorf(codes.NotFound, "container %s has no interface %s from weft", r.ContainerId, r.Interface)
	}
	if err := s.check(ctx, a, r); err != nil {
		return nil, status.Errorf(codes.FailedPrecondition, "pod %s: %v", a.pod(), err)
	}
	return &weftv1.CniCheckResponse{}, nil
}

func (s *Server) check(ctx context.Context, a *attachment, r *weftv1.CniCheckRequest) error {
	have := make([]string, len(a.IPs))
	for i, ip := range a.IPs {
		have[i] = addr.Host(ip).String()
	}
	want := slices.Sorted(slices.Values(r.Ips))
	slices.Sort(have)
	if len(want) > 0 && !slices.Equal(have, want) {
		return fmt.Errorf("it has addresses %v: want %v", have, want)
	}
	spec := a.spec()
	if r.Netns != "" {
		spec.Netns = r.Netns
	}
	if err := s.net.CheckPodLink(spec); err != nil {
		return err
	}
	row, ok := s.row(a.ContainerID)
	if !ok {
		return fmt.Errorf("it has no row in table pod")
	}
	if c, ok := s.datapath.(Checker); ok {
		if err := c.Attached(ctx, row); err != nil {
			return fmt.Errorf("datapath: %w", err)
		}
	}
	return nil
}
