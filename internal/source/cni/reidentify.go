// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"context"
	"errors"
	"fmt"

	"github.com/weft-mesh/weft/internal/ipam"
	"github.com/weft-mesh/weft/internal/state"
)

// Reidentify gives every pod of this node the identity that its labels and
// those of its namespace ask for now, and puts it in force. A pod whose rows
// are not there keeps what it has. Run does the same at each change.
func (s *Server) Reidentify(ctx context.Context) error {
	_, err := newFollower(s).step(ctx)
	return err
}

// follower remembers from which rows each pod got its identity.
type follower struct {
	s    *Server
	seen map[ipam.Key]basis
}

// basis are the rows that decide an identity. Rows are immutable: the same
// pointer is the same content.
type basis struct {
	workload  *state.Workload
	namespace *state.Namespace
}

func newFollower(s *Server) *follower { return &follower{s: s, seen: map[ipam.Key]basis{}} }

// errNotRestored is about a pod that is pending, which is reported elsewhere.
var errNotRestored = errors.New("not restored yet")

// step looks at each pod once; one of changed is closed when it is time to look
// again.
func (f *follower) step(ctx context.Context) (changed [3]<-chan struct{}, err error) {
	t := f.s.tables
	txn := t.DB.ReadTxn()
	_, changed[0] = t.Pods.AllWatch(txn)
	_, changed[1] = t.Workloads.AllWatch(txn)
	_, changed[2] = t.Namespaces.AllWatch(txn)
	list, err := f.s.attachments()
	errs := []error{err}
	seen := make(map[ipam.Key]basis, len(list))
	for _, a := range list {
		w, _, haveWorkload := t.Workloads.Get(txn, state.WorkloadByName.Query(a.pod()))
		n, _, haveNamespace := t.Namespaces.Get(txn, state.NamespaceByName.Query(a.Namespace))
		if !a.Wired || !haveWorkload || !haveNamespace {
			continue
		}
		b := basis{w, n}
		if f.seen[a.Key] != b {
			err := f.s.locked(ctx, a.Key, func(ctx context.Context, k ipam.Key) error { return f.s.reidentify(ctx, k, b) })
			if err != nil && !errors.Is(err, errNotRestored) {
				errs = append(errs, fmt.Errorf("pod %s: %w", a.pod(), err))
			}
			if err != nil {
				continue
			}
		}
		seen[a.Key] = b
	}
	f.seen = seen
	return changed, errors.Join(errs...)
}

// reidentify puts the identity that b asks for in force. The container's lock
// is held.
func (s *Server) reidentify(ctx context.Context, key ipam.Key, b basis) error {
	a, ok, err := s.attachment(key)
	if err != nil || !ok || !a.Wired {
		return err
	}
	if _, ok := s.row(key.ContainerID); !ok {
		return errNotRestored
	}
	if a.UID != "" && b.workload.UID != "" && a.UID != b.workload.UID {
		return nil // another pod by now has the name
	}
	id, err := s.identities.Assign(a.Namespace, b.namespace.Labels, b.workload.ServiceAccount, b.workload.Labels)
	if err != nil {
		return fmt.Errorf("assign identity: %w", err)
	}
	if id == a.Identity {
		return nil
	}
	old := a.Identity
	a.Identity = id
	if err := s.datapath.Attach(ctx, a.row()); err != nil {
		return fmt.Errorf("attach datapath to %s: %w", a.hostName(), err)
	}
	if err := s.store(a); err != nil {
		return err
	}
	s.log.Info("pod has another identity", "pod", a.pod(), "container", a.ContainerID, "from", old, "to", id)
	return s.insertRow(a.row())
}
