// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"

	"github.com/cilium/statedb"

	"github.com/weft-mesh/weft/internal/balance"
	"github.com/weft-mesh/weft/internal/datapath/pin"
	"github.com/weft-mesh/weft/internal/datapath/service"
	"github.com/weft-mesh/weft/internal/state"
)

// servicesDriver brings the tables into the maps.
type servicesDriver struct {
	tables *state.Tables
	writer *service.Writer
	node   balance.Node
	slices statedb.ChangeIterator[*state.Endpoint]
}

// startDriver returns once all that the tables have is in the maps; then it
// follows them until ctx ends.
func startDriver(ctx context.Context, maps *pin.Maps, tables *state.Tables, node netip.Addr, log *slog.Logger) (*servicesDriver, error) {
	writer, err := service.New(maps, service.Options{Maglev: true})
	if err != nil {
		return nil, err
	}
	d := &servicesDriver{tables: tables, writer: writer, node: balance.Node{Name: nodeName, IPs: []netip.Addr{node}}}
	txn := tables.DB.WriteTxn(tables.Endpoints)
	d.slices, err = tables.Endpoints.Changes(txn)
	txn.Commit()
	if err != nil {
		return nil, fmt.Errorf("follow endpoints: %w", err)
	}
	changed := d.step()
	if errs := writer.Errors(); len(errs) > 0 {
		return nil, errs[0]
	}
	go d.follow(ctx, changed, log)
	return d, nil
}

func (d *servicesDriver) step() <-chan struct{} {
	txn := d.tables.DB.ReadTxn()
	list, changed := d.slices.Next(txn)
	var changes []service.Change
	for c := range list {
		row := c.Object
		owner, _, ok := d.tables.Services.Get(txn, state.ServiceByName.Query(state.Key(row.Namespace, row.Service)))
		if !ok {
			continue
		}
		ports, _ := balance.Compute(balance.Input{Service: owner, Slices: []*state.Endpoint{row}, Node: d.node})
		for i := range ports {
			changes = append(changes, service.Change{Name: ports[i].Name, Want: &ports[i]})
		}
	}
	d.writer.Apply(changes)
	return changed
}

func (d *servicesDriver) follow(ctx context.Context, changed <-chan struct{}, log *slog.Logger) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
		changed = d.step()
		if err := d.writer.Collect(); err != nil && !errors.Is(err, context.Canceled) {
			log.Warn("services: remove what is left over", "error", err)
		}
	}
}
