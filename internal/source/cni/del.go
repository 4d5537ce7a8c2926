// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
	"github.com/weft-mesh/weft/internal/ipam"
	"github.com/weft-mesh/weft/internal/netdev"
	"github.com/weft-mesh/weft/internal/source/cni/tombstone"
)

// Del takes back all that an Add made. It succeeds for a pod that is not known.
func (s *Server) Del(ctx context.Context, r *weftv1.CniDelRequest) (*weftv1.CniDelResponse, error) {
	if r.ContainerId == "" || r.Interface == "" {
		return nil, status.Error(codes.InvalidArgument, "del: container_id and interface must be set")
	}
	if err := s.begin(ctx); err != nil {
		return nil, err
	}
	key := ipam.Key{ContainerID: r.ContainerId, Interface: r.Interface}
	if err := s.locked(ctx, key, s.remove); err != nil {
		return nil, status.Errorf(codes.Internal, "del %s: %v", key, err)
	}
	return &weftv1.CniDelResponse{}, nil
}

// locked calls f with the container's lock held.
func (s *Server) locked(ctx context.Context, key ipam.Key, f func(context.Context, ipam.Key) error) error {
	unlock, err := s.locks.lock(ctx, key.ContainerID)
	if err != nil {
		return fmt.Errorf("wait for container %s: %w", key.ContainerID, err)
	}
	defer unlock()
	return f(ctx, key)
}

// remove takes back whatever there is of key. The container's lock is held. It
// goes on when ctx ends: half a removal helps nobody.
func (s *Server) remove(ctx context.Context, key ipam.Key) error {
	ctx, cancel := cleanup(ctx)
	defer cancel()
	a, ok, err := s.attachment(key)
	if err != nil {
		return err
	}
	if !ok {
		// The link may be there nonetheless, if the address file was lost.
		return s.deleteLink(key)
	}
	if err := s.teardown(ctx, a); err != nil {
		return err
	}
	s.log.Info("pod unwired", "pod", a.pod(), "container", a.ContainerID, "ips", a.IPs)
	return nil
}

// teardown undoes an attachment. The link goes before its datapath, so that it is
// never there without. The record goes last: what an error or a crash leaves
// behind can be found again. The container's lock is held.
func (s *Server) teardown(ctx context.Context, a *attachment) error {
	if row, ok := s.row(a.ContainerID); ok && row.Interface == a.hostName() {
		if err := s.deleteRow(a.ContainerID); err != nil {
			return err
		}
	}
	if err := s.deleteLink(a.Key); err != nil {
		return err
	}
	if a.Ifindex != 0 {
		if err := s.datapath.Detach(ctx, a.row()); err != nil {
			return fmt.Errorf("detach datapath from %s: %w", a.hostName(), err)
		}
	}
	if err := s.pool.Release(a.Key); err != nil {
		return fmt.Errorf("release %v: %w", a.IPs, err)
	}
	s.clearPending(a.Key)
	return nil
}

// deleteLink removes the link of key. One that only has the same name, by a
// collision of the hash, is left alone.
func (s *Server) deleteLink(key ipam.Key) error {
	seed := key.String()
	l, ok, err := s.net.LinkByName(netdev.HostName(seed))
	if err != nil || !ok {
		return err
	}
	if hostMAC, _ := netdev.MACs(seed); !bytes.Equal(l.MAC, hostMAC) {
		return nil
	}
	return s.net.DeleteLink(l.Name)
}

// Gc releases every attachment of the network that the runtime does not name,
// and links that nothing is known of.
func (s *Server) Gc(ctx context.Context, r *weftv1.CniGcRequest) (*weftv1.CniGcResponse, error) {
	if err := s.begin(ctx); err != nil {
		return nil, err
	}
	valid := make(map[ipam.Key]bool, len(r.Valid))
	for _, v := range r.Valid {
		valid[ipam.Key{ContainerID: v.ContainerId, Interface: v.Interface}] = true
	}
	errs := []error{s.bury(ctx)}
	list, err := s.attachments()
	errs = append(errs, err)
	released := uint32(0)
	for _, a := range list {
		// Who works on a container at this moment knows better than the list.
		if a.Network != r.Network || valid[a.Key] || s.locks.busy(a.ContainerID) {
			continue
		}
		if err := s.locked(ctx, a.Key, s.remove); err != nil {
			errs = append(errs, fmt.Errorf("release %s: %w", a.Key, err))
			continue
		}
		released++
	}
	errs = append(errs, s.deleteStrays())
	if err := errors.Join(errs...); err != nil {
		return nil, status.Errorf(codes.Internal, "gc: %v", err)
	}
	s.log.Info("attachments collected", "network", r.Network, "released", released, "valid", len(valid))
	return &weftv1.CniGcResponse{Released: released}, nil
}

// deleteStrays removes pod links without a record. A record is there before its
// link and goes after it, so links are listed first.
func (s *Server) deleteStrays() error {
	links, err := s.net.PodLinks()
	if err != nil {
		return err
	}
	known := map[string]bool{}
	for _, a := range s.pool.All() {
		known[netdev.HostName(a.Key.String())] = true
	}
	var errs []error
	for _, l := range links {
		if known[l.Name] {
			continue
		}
		s.log.Warn("link of no known pod is removed", "interface", l.Name)
		errs = append(errs, s.net.DeleteLink(l.Name))
	}
	return errors.Join(errs...)
}

// bury carries out the deletions that the plugin left notes of.
func (s *Server) bury(ctx context.Context) error {
	list, err := tombstone.List(s.config.StateDir)
	errs := []error{err}
	for _, t := range list {
		key := ipam.Key{ContainerID: t.ContainerID, Interface: t.Interface}
		errs = append(errs, s.locked(ctx, key, func(ctx context.Context, _ ipam.Key) error { return s.buryOne(ctx, t) }))
	}
	return errors.Join(errs...)
}

// buryOne carries out t if it is (still) there. The container's lock is held.
func (s *Server) buryOne(ctx context.Context, t tombstone.Tombstone) error {
	there, err := tombstone.Exists(s.config.StateDir, t)
	if err != nil || !there {
		return err
	}
	if err := s.remove(ctx, ipam.Key{ContainerID: t.ContainerID, Interface: t.Interface}); err != nil {
		return fmt.Errorf("carry out the deletion of %s/%s: %w", t.ContainerID, t.Interface, err)
	}
	return tombstone.Remove(s.config.StateDir, t)
}
