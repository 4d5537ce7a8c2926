// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/weft-mesh/weft/internal/ipam"
)

// Reattach puts the datapath of every wired pod in force again, and the node's
// way to it: after the datapath was loaded with other settings. A pod whose Add
// begins later has them by itself. Run tries again what failed.
func (s *Server) Reattach(ctx context.Context) error { return s.each(ctx, s.reattach) }

// Rejoin restores the node's way to every wired pod, which the kernel takes away
// with an address of the node. Run tries again what failed.
func (s *Server) Rejoin(ctx context.Context) error { return s.each(ctx, s.rejoin) }

// each calls f with every recorded pod, its lock held. A pod that f fails for is
// pending then.
func (s *Server) each(ctx context.Context, f func(context.Context, *attachment) error) error {
	if err := s.begin(ctx); err != nil {
		return err
	}
	list, err := s.attachments()
	var mu sync.Mutex // protects errs
	errs := []error{err}
	var g errgroup.Group
	g.SetLimit(s.config.Parallel)
	for _, a := range list {
		g.Go(func() error {
			err := s.locked(ctx, a.Key, func(ctx context.Context, k ipam.Key) error { return s.again(ctx, k, f) })
			mu.Lock()
			defer mu.Unlock()
			errs = append(errs, err)
			return nil
		})
	}
	_ = g.Wait() // the errors are in errs
	return errors.Join(errs...)
}

// again calls f with the pod of key as it is now, unless that has gone. The
// container's lock is held.
func (s *Server) again(ctx context.Context, key ipam.Key, f func(context.Context, *attachment) error) error {
	a, ok, err := s.attachment(key)
	if err != nil || !ok || !a.Wired {
		return err
	}
	intact, err := s.linkIntact(a)
	if err == nil && !intact {
		return nil // a Del or a GC is to follow
	}
	if err == nil {
		err = f(ctx, a)
	}
	if err == nil || ctx.Err() != nil {
		return err
	}
	s.setPending(key, err)
	select {
	case s.wake <- struct{}{}:
	default:
	}
	return err
}

func (s *Server) reattach(ctx context.Context, a *attachment) error {
	if err := s.datapath.Attach(ctx, a.row()); err != nil {
		return fmt.Errorf("pod %s: attach datapath to %s: %w", a.pod(), a.hostName(), err)
	}
	return s.join(a)
}

// rejoin leaves a pending pod alone, which is joined once it is restored.
func (s *Server) rejoin(_ context.Context, a *attachment) error {
	if s.isPending(a.Key) {
		return nil
	}
	return s.join(a)
}

// join restores the node's way to a pod.
func (s *Server) join(a *attachment) error {
	spec, err := s.spec(a)
	if err != nil {
		return fmt.Errorf("pod %s: %w", a.pod(), err)
	}
	if err := s.net.JoinPodLink(spec); err != nil {
		return fmt.Errorf("pod %s: join link: %w", a.pod(), err)
	}
	return nil
}
