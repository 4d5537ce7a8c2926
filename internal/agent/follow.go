// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"time"

	"github.com/weft-mesh/weft/internal/source/cni"
	"github.com/weft-mesh/weft/internal/state"
)

// adaptDelay is between two attempts to adapt to the node as it is.
const adaptDelay = 5 * time.Second

// followNode adapts what is in force to the node: when its row, its addresses or
// its devices change.
func (a *agent) followNode(ctx context.Context, now *self, server *cni.Server) error {
	addresses, err := a.net.WatchAddresses(ctx)
	if err != nil {
		return err
	}
	links, err := a.net.WatchLinks(ctx)
	if err != nil {
		return err
	}
	a.renewRoutes(ctx, server) // for what changed before the watches began
	for ctx.Err() == nil {
		row, _, changed, ok := a.tables.Nodes.GetWatch(a.tables.DB.ReadTxn(), state.NodeByName.Query(a.cfg.Node))
		var retry <-chan time.Time
		if ok {
			if now, err = a.adapt(ctx, now, row, server); err != nil {
				a.health.waits("node", err.Error())
				a.log.Error("adapt to the node", "err", err)
				retry = time.After(adaptDelay)
			} else {
				a.health.ready("node")
			}
		} else {
			a.health.waits("node", "the Node object is gone; what was in force stays")
		}
		select {
		case <-ctx.Done():
		case <-changed:
		case <-retry:
		case <-addresses:
			a.renewRoutes(ctx, server)
		case <-links:
			a.renewRoutes(ctx, server)
		}
	}
	return nil
}

// renewRoutes is for a node whose addresses or devices have changed: the kernel
// takes routes away with the address that they have as source and with the
// device that they lead to, and gives none of them back.
func (a *agent) renewRoutes(ctx context.Context, server *cni.Server) {
	a.forward.trigger() // the node's own addresses are among what it computes
	a.forward.routes.Renew()
	if err := server.Rejoin(ctx); err != nil && ctx.Err() == nil {
		a.log.Warn("ways to pods are not all in force, trying again", "err", err)
	}
}

// adapt loads the programs anew where the settings that follow from the node are
// others, or the tunnel's device is not what was made. It returns what is in
// force.
func (a *agent) adapt(ctx context.Context, now *self, row *state.Node, server *cni.Server) (*self, error) {
	next, err := a.lookAtNode(row)
	if err != nil {
		return now, err
	}
	next.setting.TunnelIfindex = now.setting.TunnelIfindex
	damage := checkTunnel(a.net, a.cfg.Datapath, &next.setting)
	if next.setting == now.setting && damage == nil {
		return now, nil
	}
	a.log.Info("node has changed, loading programs anew", "was", now.setting, "is", next.setting, "tunnel", damage)
	if err := a.loadPrograms(next); err != nil {
		return now, err
	}
	if err := server.SetMTU(podMTU(a.cfg, next.setting)); err != nil {
		a.log.Error("MTU of new pods stays", "err", err)
	}
	if err := server.Reattach(ctx); err != nil && ctx.Err() == nil {
		a.log.Warn("pods have not all the new programs, trying again", "err", err)
	}
	a.forward.trigger()
	a.forward.routes.Renew()
	return next, nil
}
