// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"

	"github.com/weft-mesh/weft/internal/admin"
	"github.com/weft-mesh/weft/internal/datapath/ipcache"
	policymap "github.com/weft-mesh/weft/internal/datapath/policy"
	"github.com/weft-mesh/weft/internal/enforce"
)

// openPolicy takes up the policy that an earlier agent left in force.
func (a *agent) openPolicy() error {
	known, err := ipcache.New(a.maps).Hosts()
	if err != nil {
		return err
	}
	e, err := enforce.New(enforce.Config{
		Node: a.cfg.Node, Tables: a.tables, Identities: a.identities,
		Kernel: policymap.New(a.maps), Endpoints: a.kernel, Log: a.log,
		Known:      known,
		Settled:    func(ctx context.Context) error { return a.forward.waitInForce(ctx) },
		Generation: a.source.Generation,
		Report:     a.reportPolicy,
	})
	if err != nil {
		return fmt.Errorf("read the policy that is in force: %w", err)
	}
	a.enforce, a.kernel.enforce = e, e
	a.gate.enforce.Store(e)
	return nil
}

// reportPolicy keeps the component in step with the last change.
func (a *agent) reportPolicy(err error) {
	if err == nil {
		a.health.ready("policy")
		return
	}
	a.health.waits("policy", "the last change is not in force, what was before is: "+err.Error())
}

// Policy returns what tells about policy, once it is read.
func (g *gate) Policy() (admin.Policy, error) {
	if e := g.enforce.Load(); e != nil {
		return e, nil
	}
	return nil, errStarting
}

// applyPolicy returns once what follows from the tables is in force, and
// connections were judged by it.
func (a *agent) applyPolicy(ctx context.Context) error {
	if err := a.enforce.Apply(); err != nil {
		return err
	}
	if err := a.forward.waitInForce(ctx); err != nil {
		return err
	}
	return a.enforce.Settle(ctx)
}
