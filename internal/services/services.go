// SPDX-License-Identifier: Apache-2.0

// Package services keeps the kernel's maps of services in step with the tables:
// what changed there is computed anew (package balance), written without a gap
// (package datapath/service), and connections that must not go on are ended.
package services

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/cilium/statedb"
	"golang.org/x/sync/errgroup"

	"github.com/weft-mesh/weft/internal/balance"
	"github.com/weft-mesh/weft/internal/datapath/service"
	"github.com/weft-mesh/weft/internal/netdev"
	"github.com/weft-mesh/weft/internal/state"
)

// Cutter cuts connected UDP sockets in network namespaces; *netdev.Net is one.
type Cutter interface {
	CutUDP(netnsPaths []string, sockets []netdev.UDPSocket) (int, error)
}

// Config is what a Driver needs.
type Config struct {
	Node        string // name of this node
	Tables      *state.Tables
	Writer      *service.Writer
	Reader      *service.Reader
	Connections *service.Connections
	Cutter      Cutter
	Log         *slog.Logger
	// Report is told after every change why it is not in force, or nil. May be
	// nil.
	Report func(error)
}

// retryDelay is the time until what the kernel refused is tried again.
const retryDelay = 2 * time.Second

// gather is how long a change waits for others that come with it.
const gather = 500 * time.Microsecond

// Driver keeps the maps in step. Its methods are safe for concurrent use.
type Driver struct {
	cfg    Config
	wake   chan struct{} // of one: there is something to settle
	health healthServers

	mu        sync.Mutex // protects what follows; changes take turns
	services  statedb.ChangeIterator[*state.Service]
	endpoints statedb.ChangeIterator[*state.Endpoint]
	slices    map[string]map[string]*state.Endpoint // by service, then by slice
	owner     map[string]string                     // the service that a slice was of
	ports     map[string][]balance.ServicePort      // by service
	problems  map[string][]balance.Problem
	node      balance.Node
	swept     bool
	status    Status
	left      map[uint32]service.Left // backends that connections may still use
}

// New returns a driver of what the tables will hold; nothing is written yet.
func New(c Config) (*Driver, error) {
	d := &Driver{
		cfg: c, wake: make(chan struct{}, 1),
		slices: map[string]map[string]*state.Endpoint{}, owner: map[string]string{},
		ports: map[string][]balance.ServicePort{}, problems: map[string][]balance.Problem{},
		left:   map[uint32]service.Left{},
		health: healthServers{wanted: map[string]healthCheck{}, servers: map[uint16]*healthServer{}},
	}
	txn := c.Tables.DB.WriteTxn(c.Tables.Services, c.Tables.Endpoints)
	defer txn.Commit()
	var err error
	if d.services, err = c.Tables.Services.Changes(txn); err != nil {
		return nil, fmt.Errorf("follow the table of services: %w", err)
	}
	if d.endpoints, err = c.Tables.Endpoints.Changes(txn); err != nil {
		return nil, fmt.Errorf("follow the table of endpoints: %w", err)
	}
	return d, nil
}

// Run keeps the maps in step until ctx ends. What is in force then stays so.
func (d *Driver) Run(ctx context.Context) error {
	defer d.health.close()
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return d.followTables(ctx) })
	g.Go(func() error { return d.settleConnections(ctx) })
	return g.Wait()
}

// followTables applies what changes, and tries again what failed.
func (d *Driver) followTables(ctx context.Context) error {
	retry := time.NewTicker(retryDelay)
	defer retry.Stop()
	for {
		// The watch comes before the change, or one in between would be missed.
		changed, stop := d.watch(ctx)
		_ = d.Apply() // what failed is reported
		select {
		case <-ctx.Done():
			stop()
			return nil
		case <-changed:
		case <-retry.C:
			d.retry()
		}
		stop()
	}
}

// watch returns a channel that is closed at the next change of a row that Apply
// reads.
func (d *Driver) watch(ctx context.Context) (<-chan struct{}, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	txn := d.cfg.Tables.DB.ReadTxn()
	_, services := d.cfg.Tables.Services.AllWatch(txn)
	_, endpoints := d.cfg.Tables.Endpoints.AllWatch(txn)
	_, nodes := d.cfg.Tables.Nodes.AllWatch(txn)
	set := statedb.NewWatchSet()
	set.Add(services, endpoints, nodes)
	changed := make(chan struct{})
	go func() {
		defer close(changed)
		_, _ = set.Wait(ctx, gather)
	}()
	return changed, cancel
}

// Apply puts in force what follows from the tables as they are now. The error is
// about what could not be; the rest is in force.
func (d *Driver) Apply() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	start := time.Now()
	if dirty := d.follow(); len(dirty) > 0 || !d.swept {
		d.write(d.compute(dirty))
		d.status.Sync, d.status.Changed = time.Since(start), time.Now()
	}
	if err := d.sweep(); err != nil {
		return d.report(err)
	}
	return d.report(d.failure())
}

// sweep lets go of what an earlier agent left, once.
func (d *Driver) sweep() error {
	if d.swept {
		return nil
	}
	left, err := d.cfg.Writer.Sweep()
	d.letGo(left)
	if err != nil {
		return fmt.Errorf("let go of services that are gone: %w", err)
	}
	d.swept = true
	return nil
}

func (d *Driver) report(err error) error {
	if d.cfg.Report != nil {
		d.cfg.Report(err)
	}
	return err
}

func (d *Driver) failure() error {
	list := d.cfg.Writer.Errors()
	switch len(list) {
	case 0:
		return nil
	case 1:
		return list[0]
	}
	return fmt.Errorf("%w (and %d more like it)", list[0], len(list)-1)
}

// write puts changes in force, and leaves the rest to settleConnections. Where
// nothing is written, an endpoint that keeps a backend which has left may have
// gone all the same: one of a Service that has no port.
func (d *Driver) write(changes []service.Change) {
	out := d.cfg.Writer.Apply(changes)
	if out.Changed > 0 || len(d.left) > 0 {
		d.letGo(out.Left)
	}
}

// letGo notes backends that have left, and wakes settleConnections: also for
// those of earlier changes, whose endpoints may have gone by now.
func (d *Driver) letGo(left []service.Left) {
	for _, l := range left {
		d.left[l.Backend] = l
	}
	select {
	case d.wake <- struct{}{}:
	default:
	}
}

// retry does again what failed.
func (d *Driver) retry() {
	d.health.listen()
	d.mu.Lock()
	defer d.mu.Unlock()
	if changes := d.cfg.Writer.Retries(); len(changes) > 0 {
		d.write(changes)
	}
}

// follow takes in what has changed, and returns the services that it is about.
func (d *Driver) follow() map[string]bool {
	dirty := map[string]bool{}
	txn := d.cfg.Tables.DB.ReadTxn()
	changes, _ := d.services.Next(txn)
	for c := range changes {
		dirty[state.Key(c.Object.Namespace, c.Object.Name)] = true
	}
	rows, _ := d.endpoints.Next(txn)
	for c := range rows {
		d.followSlice(c, dirty)
	}
	row, _, ok := d.cfg.Tables.Nodes.Get(txn, state.NodeByName.Query(d.cfg.Node))
	if !ok {
		return dirty // what was computed for it stays
	}
	node := balance.NodeOf(row)
	if node.Zone != d.node.Zone || !slices.Equal(node.IPs, d.node.IPs) || node.Name != d.node.Name {
		d.node = node
		for s := range d.cfg.Tables.Services.All(txn) {
			dirty[state.Key(s.Namespace, s.Name)] = true
		}
	}
	return dirty
}

// followSlice moves a slice to the service that it belongs to.
func (d *Driver) followSlice(c statedb.Change[*state.Endpoint], dirty map[string]bool) {
	e := c.Object
	key, of := state.Key(e.Namespace, e.Name), state.Key(e.Namespace, e.Service)
	if before, ok := d.owner[key]; ok {
		dirty[before] = true
		delete(d.slices[before], key)
		if len(d.slices[before]) == 0 {
			delete(d.slices, before)
		}
		delete(d.owner, key)
	}
	if c.Deleted {
		return
	}
	dirty[of] = true
	d.owner[key] = of
	if d.slices[of] == nil {
		d.slices[of] = map[string]*state.Endpoint{}
	}
	d.slices[of][key] = e
}

// input is what the ports of a service follow from.
func (d *Driver) input(s *state.Service) balance.Input {
	in := balance.Input{Service: s, Node: d.node}
	of := d.slices[state.Key(s.Namespace, s.Name)]
	in.Slices = make([]*state.Endpoint, 0, len(of))
	for _, e := range of { // their order does not matter
		in.Slices = append(in.Slices, e)
	}
	return in
}

// compute returns what the ports of these services shall be.
func (d *Driver) compute(dirty map[string]bool) []service.Change {
	txn := d.cfg.Tables.DB.ReadTxn()
	changes := make([]service.Change, 0, len(dirty))
	for _, key := range slices.Sorted(maps.Keys(dirty)) {
		next := d.computeService(txn, key)
		for _, p := range d.ports[key] {
			if !slices.ContainsFunc(next, func(n balance.ServicePort) bool { return n.Name == p.Name }) {
				changes = append(changes, service.Change{Name: p.Name})
			}
		}
		for i := range next {
			changes = append(changes, service.Change{Name: next[i].Name, Want: &next[i]})
		}
		d.status.count(d.ports[key], -1)
		d.status.count(next, 1)
		delete(d.ports, key)
		if len(next) > 0 {
			d.ports[key] = next
		}
		d.health.want(key, next)
	}
	d.health.listen()
	return changes
}

func (d *Driver) computeService(txn statedb.ReadTxn, key string) []balance.ServicePort {
	delete(d.problems, key)
	row, _, ok := d.cfg.Tables.Services.Get(txn, state.ServiceByName.Query(key))
	if !ok {
		return nil
	}
	ports, problems := balance.Compute(d.input(row))
	if len(problems) > 0 {
		d.problems[key] = problems
	}
	return ports
}
