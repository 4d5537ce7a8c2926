// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
	"github.com/weft-mesh/weft/internal/state"
)

// subject are the rows that an Add needs.
type subject struct {
	node      *state.Node
	workload  *state.Workload
	namespace *state.Namespace
}

// rows reads the subject of r. Without all of it, missing says what is not
// there, and changed has a channel for each row that may bring it.
func (s *Server) rows(r *weftv1.CniAddRequest) (sub subject, missing string, changed [3]<-chan struct{}) {
	txn := s.tables.DB.ReadTxn()
	var haveNode, haveWorkload, haveNamespace bool
	sub.node, _, changed[0], haveNode = s.tables.Nodes.GetWatch(txn, state.NodeByName.Query(s.config.Node))
	sub.workload, _, changed[1], haveWorkload = s.tables.Workloads.GetWatch(txn, state.WorkloadByName.Query(state.Key(r.PodNamespace, r.PodName)))
	sub.namespace, _, changed[2], haveNamespace = s.tables.Namespaces.GetWatch(txn, state.NamespaceByName.Query(r.PodNamespace))
	missing = s.missingNode(sub.node, haveNode)
	switch {
	case missing != "":
	case !haveWorkload:
		missing = "the pod is not known to this node (no such row in table workload)"
	case !haveNamespace:
		missing = fmt.Sprintf("namespace %s is not known to this node", r.PodNamespace)
	default:
		missing = s.missingWorkload(sub.workload, r)
	}
	return sub, missing, changed
}

// missingNode says what an Add misses in this node's row, "" if nothing.
func (s *Server) missingNode(node *state.Node, ok bool) string {
	switch {
	case !ok:
		return fmt.Sprintf("this node, %s, is not known (no such row in table node)", s.config.Node)
	case len(node.PodCIDRs) == 0:
		return fmt.Sprintf("node %s has no pod CIDR", s.config.Node)
	case len(node.IPs) == 0:
		return fmt.Sprintf("node %s has no address", s.config.Node)
	}
	return ""
}

// missingWorkload says what makes w another pod than the one that is to be
// wired, "" if it is that one.
func (s *Server) missingWorkload(w *state.Workload, r *weftv1.CniAddRequest) string {
	switch {
	case w.UID != "" && r.PodUid != "" && w.UID != r.PodUid:
		return fmt.Sprintf("the pod known by that name has UID %s, this one has %s", w.UID, r.PodUid)
	case w.Node != s.config.Node:
		return fmt.Sprintf("the pod is scheduled to node %q, this is %q", w.Node, s.config.Node)
	}
	return ""
}

// waitFor returns the rows of the pod as soon as they are all there.
func (s *Server) waitFor(ctx context.Context, r *weftv1.CniAddRequest) (*subject, error) {
	pod := state.Key(r.PodNamespace, r.PodName)
	timeout := time.NewTimer(s.config.Wait)
	defer timeout.Stop()
	for {
		sub, missing, changed := s.rows(r)
		if missing == "" && sub.workload.HostNetwork {
			return nil, status.Errorf(codes.InvalidArgument, "pod %s uses the node's network: there is nothing to wire", pod)
		}
		if missing == "" {
			return &sub, nil
		}
		select {
		case <-changed[0]:
		case <-changed[1]:
		case <-changed[2]:
		case <-timeout.C:
			return nil, status.Errorf(codes.FailedPrecondition, "pod %s: waited %s: %s", pod, s.config.Wait, missing)
		case <-ctx.Done():
			return nil, status.Errorf(status.FromContextError(ctx.Err()).Code(), "pod %s: given up while waiting: %s", pod, missing)
		}
	}
}
