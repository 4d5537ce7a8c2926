// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"golang.org/x/sync/errgroup"

	"github.com/weft-mesh/weft/internal/ipam"
	"github.com/weft-mesh/weft/internal/netdev"
)

// Restore takes up where the previous run ended: pods whose link is there get
// their datapath, the node's way to them and their row, under the identity they had; whatever else is
// stored is released, links of no known pod are removed, and the deletions that
// the plugin left notes of are carried out. It is to be called once, before the
// service is served. A pod that the datapath refuses is no error: Run tries it
// again, and Ready names it.
func (s *Server) Restore(ctx context.Context) error {
	if err := s.bury(ctx); err != nil {
		// Run tries again; a note that nobody can read must not keep all pods down.
		s.log.Error("tombstones are not all carried out", "error", err)
	}
	list, err := s.attachments()
	if err != nil {
		return fmt.Errorf("read stored attachments: %w", err)
	}
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(s.config.Parallel)
	for _, a := range list {
		g.Go(func() error { return s.locked(gctx, a.Key, s.restoreOne) })
	}
	if err := g.Wait(); err != nil {
		return fmt.Errorf("restore pods: %w", err)
	}
	if err := s.deleteStrays(); err != nil {
		return fmt.Errorf("remove links of no known pod: %w", err)
	}
	close(s.restored)
	return nil
}

// restoreOne restores one pod, or notes it as pending. The container's lock is
// held.
func (s *Server) restoreOne(ctx context.Context, key ipam.Key) error {
	err := s.restore(ctx, key)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err == nil {
		s.clearPending(key)
		return nil
	}
	s.setPending(key, err)
	return nil
}

func (s *Server) setPending(key ipam.Key, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pending[key] == nil {
		s.log.Error("pod is not restored", "container", key.ContainerID, "error", err)
	}
	s.pending[key] = err
}

func (s *Server) isPending(key ipam.Key) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pending[key] != nil
}

func (s *Server) restore(ctx context.Context, key ipam.Key) error {
	a, ok, err := s.attachment(key)
	if err != nil || !ok {
		return err
	}
	intact, err := s.linkIntact(a)
	if err != nil {
		return err
	}
	if !intact {
		s.log.Info("pod has gone and is released", "pod", a.pod(), "container", a.ContainerID, "ips", a.IPs)
		return s.teardown(ctx, a)
	}
	if err := s.datapath.Attach(ctx, a.row()); err != nil {
		return fmt.Errorf("pod %s: attach datapath to %s: %w", a.pod(), a.hostName(), err)
	}
	if err := s.join(a); err != nil {
		return err
	}
	return s.insertRow(a.row())
}

// linkIntact says whether the link of a wired pod is the one that was made for
// it.
func (s *Server) linkIntact(a *attachment) (bool, error) {
	if !a.Wired {
		return false, nil
	}
	l, ok, err := s.net.LinkByName(a.hostName())
	if err != nil || !ok {
		return false, err
	}
	hostMAC, _ := netdev.MACs(a.seed())
	return l.Ifindex == a.Ifindex && bytes.Equal(l.MAC, hostMAC), nil
}

// retryPending tries again to restore what the datapath refused.
func (s *Server) retryPending(ctx context.Context) error {
	s.mu.Lock()
	keys := slices.Collect(maps.Keys(s.pending))
	s.mu.Unlock()
	for _, key := range keys {
		if err := s.locked(ctx, key, s.restoreOne); err != nil {
			return err
		}
	}
	return s.pendingError()
}

func (s *Server) clearPending(key ipam.Key) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.pending, key)
}

// pendingError names what could not be restored, nil if all could.
func (s *Server) pendingError() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	keys := slices.SortedFunc(maps.Keys(s.pending), func(a, b ipam.Key) int { return cmp.Compare(a.String(), b.String()) })
	errs := make([]error, len(keys))
	for i, k := range keys {
		errs[i] = fmt.Errorf("not restored: %w", s.pending[k])
	}
	return errors.Join(errs...)
}
