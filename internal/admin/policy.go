// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"cmp"
	"context"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
	"github.com/weft-mesh/weft/internal/enforce"
	"github.com/weft-mesh/weft/internal/policy"
	"github.com/weft-mesh/weft/internal/state"
)

// Policy tells which policy is in force; *enforce.Enforcer does.
type Policy interface {
	Status() enforce.Status
	// State returns the compiled policy in force and the pods of the cluster
	// that it is for.
	State() (*policy.Result, []policy.Pod, error)
}

// policy returns the provider, once there is one.
func (n *node) policy() (Policy, error) {
	if n.providers.Policy == nil {
		return nil, status.Error(codes.Unimplemented, "this agent enforces no policy")
	}
	return n.providers.Policy()
}

// inForce is a compiled policy and what it is about, for one question.
type inForce struct {
	*policy.Result
	node   string // that answers
	pods   []policy.Pod
	tables *state.Tables
}

func (n *node) inForce() (*inForce, error) {
	p, err := n.policy()
	if err != nil {
		return nil, err
	}
	r, pods, err := p.State()
	if err != nil {
		return nil, status.Error(codes.Unavailable, err.Error())
	}
	return &inForce{r, n.providers.Node, pods, n.providers.Tables}, nil
}

// PolicyStatus implements weftv1.NodeServer.
func (n *node) PolicyStatus(context.Context, *weftv1.PolicyStatusRequest) (*weftv1.PolicyStatusResponse, error) {
	p, err := n.policy()
	if err != nil {
		return nil, err
	}
	s := p.Status()
	r := &weftv1.PolicyStatusResponse{
		Revision: s.Revision, Generation: s.Generation,
		Policies: uint32(s.Policies), Subjects: uint32(s.Subjects), Pods: uint32(s.Endpoints),
		Entries: uint64(s.Entries), MaxEntries: uint64(s.MaxEntries), Prefixes: uint64(s.Classes),
	}
	for _, problem := range s.Problems {
		r.Problems = append(r.Problems, problem.String())
	}
	if s.Revision > 0 {
		r.Changed = timestamppb.New(s.Changed)
	}
	if s.Err == nil && s.Revision == 0 {
		s.Err = enforce.ErrNotYet
	}
	if s.Err != nil {
		r.Error = s.Err.Error()
	}
	return r, nil
}

// ListPolicies implements weftv1.NodeServer.
func (n *node) ListPolicies(context.Context, *weftv1.ListPoliciesRequest) (*weftv1.ListPoliciesResponse, error) {
	f, err := n.inForce()
	if err != nil {
		return nil, err
	}
	pods, problems := f.selected(), map[policy.Ref][]string{}
	for _, p := range f.Problems {
		problems[p.Policy] = append(problems[p.Policy], p.Message)
	}
	r := &weftv1.ListPoliciesResponse{}
	for row := range f.tables.Policies.All(f.tables.DB.ReadTxn()) {
		ref := policy.Ref{Kind: row.Kind, Namespace: row.Namespace, Name: row.Name}
		tier, priority := place(row)
		r.Policies = append(r.Policies, &weftv1.PolicySummary{
			Kind: row.Kind, Namespace: row.Namespace, Name: row.Name, Tier: tier.String(), Priority: priority,
			Pods: pods[ref], Problems: problems[ref],
		})
	}
	order := map[string]policy.Tier{}
	for _, t := range []policy.Tier{policy.AdminTier, policy.NetworkPolicyTier, policy.BaselineTier} {
		order[t.String()] = t
	}
	slices.SortFunc(r.Policies, func(a, b *weftv1.PolicySummary) int {
		return cmp.Or(cmp.Compare(order[a.Tier], order[b.Tier]), cmp.Compare(a.Priority, b.Priority),
			cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	return r, nil
}

// place is where a policy stands in the order of evaluation.
func place(row *state.Policy) (policy.Tier, int32) {
	c := row.ClusterNetworkPolicy
	switch {
	case c == nil:
		return policy.NetworkPolicyTier, 0
	case c.Tier == "Baseline":
		return policy.BaselineTier, c.Priority
	}
	return policy.AdminTier, c.Priority
}

// selected lists the pods of this node that each policy selects.
func (f *inForce) selected() map[policy.Ref][]string {
	out := map[policy.Ref][]string{}
	for id, refs := range f.Selected {
		for _, r := range refs {
			out[r] = append(out[r], state.Key(id.Namespace, id.Name))
		}
	}
	for _, names := range out {
		slices.Sort(names)
	}
	return out
}
