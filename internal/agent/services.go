// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sync/errgroup"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
	"github.com/weft-mesh/weft/internal/admin"
	"github.com/weft-mesh/weft/internal/datapath/deny"
	"github.com/weft-mesh/weft/internal/datapath/service"
	"github.com/weft-mesh/weft/internal/datapath/xdp"
	"github.com/weft-mesh/weft/internal/services"
)

// openServices takes up the services that an earlier agent left in force, and
// puts those of the tables in force. It comes before the programs that read them.
func (a *agent) openServices() error {
	writer, err := service.New(a.maps, service.Options{Maglev: a.cfg.Services.Algorithm == "maglev"})
	if err != nil {
		return err
	}
	a.services, err = services.New(services.Config{
		Node: a.cfg.Node, Tables: a.tables, Writer: writer, Reader: service.NewReader(a.maps, writer),
		Connections: service.NewConnections(a.maps, a.cfg.Conntrack.lifetimes()),
		Cutter:      a.net, Log: a.log, Report: a.reportServices,
	})
	if err != nil {
		return fmt.Errorf("services: %w", err)
	}
	if err := a.services.Apply(); err != nil {
		a.log.Error("services are not all in force; what was before stays", "err", err)
	}
	a.gate.services.Store(a.services)
	a.gate.deny.Store(deny.New(a.maps))
	return nil
}

// reportServices keeps the component in step with the last change.
func (a *agent) reportServices(err error) {
	if err == nil {
		a.health.ready("services")
		return
	}
	a.health.waits("services", "not all in force, what was before is: "+err.Error())
}

// servicesOf returns what tells about Services, once they are read.
func (a *agent) servicesOf() (admin.Services, error) {
	if d := a.gate.services.Load(); d != nil {
		return d, nil
	}
	return nil, errStarting
}

// Deny returns the deny list, once the maps are open.
func (g *gate) Deny() (admin.Deny, error) {
	if l := g.deny.Load(); l != nil {
		return l, nil
	}
	return nil, errStarting
}

func (a *agent) servicesStatus() *weftv1.ServicesStatus {
	v, err := a.servicesOf()
	if err != nil {
		return nil
	}
	list, err := a.gate.deny.Load().List()
	if err != nil {
		a.log.Error("read the deny list", "err", err)
	}
	return admin.DescribeServices(v, a.edge(), len(list))
}

// edge tells what sees packets from outside first.
func (a *agent) edge() admin.Edge {
	e := admin.Edge{XDP: xdp.Off, Tunnel: a.cfg.Datapath.Tunnel == "vxlan", DSR: a.cfg.Services.External == "dsr"}
	if a.gate.services.Load() != nil { // and so the kernel is there
		e.Device, e.XDP, e.Why = a.kernel.edge()
	}
	return e
}

// keepNeighbors lets XDP know the next hops to the other nodes, on whatever
// device the uplink is.
func (a *agent) keepNeighbors(ctx context.Context) error {
	for ctx.Err() == nil {
		device := a.kernel.settings().UplinkIfindex
		keeper := xdp.NewKeeper(a.net, a.maps, device, a.log)
		g, inner := errgroup.WithContext(ctx)
		inner, cancel := context.WithCancel(inner)
		g.Go(func() error {
			defer cancel()
			return keeper.Run(inner)
		})
		g.Go(func() error {
			defer cancel()
			a.wantNeighbors(inner, keeper, device)
			return nil
		})
		if err := g.Wait(); err != nil && ctx.Err() == nil {
			a.log.Warn("next hops of XDP are not followed: tcx does the work", "err", err)
		}
		if device != a.kernel.settings().UplinkIfindex {
			continue
		}
		select {
		case <-ctx.Done():
		case <-a.kernel.reloaded:
		case <-time.After(adaptDelay):
		}
	}
	return nil
}

// wantNeighbors tells the keeper what nodes there are, until the uplink is
// another device.
func (a *agent) wantNeighbors(ctx context.Context, keeper *xdp.Keeper, device int) {
	for ctx.Err() == nil && a.kernel.settings().UplinkIfindex == device {
		rows, changed := a.tables.Nodes.AllWatch(a.tables.DB.ReadTxn())
		var others []netip.Addr
		for n := range rows {
			if n.Name != a.cfg.Node {
				others = append(others, n.IPs...)
			}
		}
		keeper.Want(others)
		select {
		case <-ctx.Done():
		case <-changed:
		case <-a.kernel.reloaded:
		}
	}
}
