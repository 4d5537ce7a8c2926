// SPDX-License-Identifier: Apache-2.0

// Package services keeps the kernel's maps of services in step with the tables:
// what changed there is computed anew (package balance), written without a gap
// (package datapath/service), and connections that must not go on are ended.
package services

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cilium/statedb"

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
	SCTP        bool // the kernel has it
	Log         *slog.Logger
	// Report is told after every change why it is not in force, or nil. May be
	// nil.
	Report func(error)
}

const (
	// passInterval is the time between two walks over the translated connections.
	passInterval = 5 * time.Second
	// retryDelay is the time until what the kernel refused is tried again.
	retryDelay = 2 * time.Second
)

// Driver keeps the maps in step. Its methods are safe for concurrent use.
type Driver struct {
	cfg  Config
	wake chan struct{} // of one: there is something to settle

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
	changed   time.Time
	took      time.Duration
	over      ended // to be settled
	cut       uint64
}

// New returns a driver of what the tables will hold; nothing is written yet.
func New(c Config) (*Driver, error) {
	d := &Driver{
		cfg: c, wake: make(chan struct{}, 1),
		slices: map[string]map[string]*state.Endpoint{}, owner: map[string]string{},
		ports: map[string][]balance.ServicePort{}, problems: map[string][]balance.Problem{},
		over:   newEnded(),
		health: healthServers{log: c.Log, servers: map[uint16]*healthServer{}},
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
	pass := time.NewTicker(passInterval)
	defer pass.Stop()
	var retry <-chan time.Time
	for {
		// The watch comes before the change, or one in between would be missed.
		changed, stop := d.watch(ctx)
		err := d.Apply()
		if err != nil && retry == nil {
			retry = time.After(retryDelay)
		}
		select {
		case <-ctx.Done():
			stop()
			return nil
		case <-changed:
		case <-d.wake:
			d.settle()
		case <-pass.C:
			d.pass()
		case <-retry:
			retry = nil
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
		// gather what changes at the same time
		_, _ = set.Wait(ctx, time.Millisecond)
	}()
	return changed, cancel
}

// Apply puts in force what follows from the tables as they are now. The error is
// about what could not be; the rest is in force.
func (d *Driver) Apply() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	start := time.Now()
	dirty := d.follow()
	if len(dirty) > 0 || !d.swept {
		d.write(d.compute(dirty))
		d.took, d.changed = time.Since(start), time.Now()
	}
	if !d.swept {
		if err := d.cfg.Writer.Sweep(); err != nil {
			return d.report(fmt.Errorf("let go of services that are gone: %w", err))
		}
		d.swept = true
	}
	return d.report(d.failures())
}

func (d *Driver) report(err error) error {
	if d.cfg.Report != nil {
		d.cfg.Report(err)
	}
	return err
}

func (d *Driver) failures() error {
	list := d.cfg.Writer.Errors()
	switch len(list) {
	case 0:
		return nil
	case 1:
		return list[0]
	}
	return fmt.Errorf("%w (and %d more service ports)", list[0], len(list)-1)
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
			continue
		}
		dirty[of] = true
		d.owner[key] = of
		if d.slices[of] == nil {
			d.slices[of] = map[string]*state.Endpoint{}
		}
		d.slices[of][key] = e
	}
	if row, _, ok := d.cfg.Tables.Nodes.Get(txn, state.NodeByName.Query(d.cfg.Node)); ok {
		node := balance.NodeOf(row)
		if node.Zone != d.node.Zone || !slices.Equal(node.IPs, d.node.IPs) || node.Name != d.node.Name {
			d.node = node
			for s := range d.cfg.Tables.Services.All(txn) {
				dirty[state.Key(s.Namespace, s.Name)] = true
			}
		}
	}
	return dirty
}

// input is what the ports of a service follow from.
func (d *Driver) input(s *state.Service) balance.Input {
	key := state.Key(s.Namespace, s.Name)
	in := balance.Input{Service: s, Node: d.node, SCTP: d.cfg.SCTP}
	for _, name := range slices.Sorted(maps.Keys(d.slices[key])) {
		in.Slices = append(in.Slices, d.slices[key][name])
	}
	return in
}

// compute returns what the ports of these services shall be.
func (d *Driver) compute(dirty map[string]bool) []service.Change {
	txn := d.cfg.Tables.DB.ReadTxn()
	changes := make([]service.Change, 0, len(dirty))
	for _, key := range slices.Sorted(maps.Keys(dirty)) {
		var next []balance.ServicePort
		delete(d.problems, key)
		row, _, ok := d.cfg.Tables.Services.Get(txn, state.ServiceByName.Query(key))
		if ok {
			var problems []balance.Problem
			if next, problems = balance.Compute(d.input(row)); len(problems) > 0 {
				d.problems[key] = problems
			}
		}
		for _, p := range d.ports[key] {
			if !slices.ContainsFunc(next, func(n balance.ServicePort) bool { return n.Name == p.Name }) {
				changes = append(changes, service.Change{Name: p.Name})
			}
		}
		for i := range next {
			changes = append(changes, service.Change{Name: next[i].Name, Want: &next[i]})
		}
		delete(d.ports, key)
		if len(next) > 0 {
			d.ports[key] = next
		}
		d.health.want(key, next)
	}
	return changes
}

// write puts changes in force, and leaves the rest to Run.
func (d *Driver) write(changes []service.Change) {
	out := d.cfg.Writer.Apply(changes)
	d.over.add(&out)
	select {
	case d.wake <- struct{}{}:
	default:
	}
}

// retry writes again what the kernel refused.
func (d *Driver) retry() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if changes := d.cfg.Writer.Retries(); len(changes) > 0 {
		d.write(changes)
	}
}

// Ports returns the service ports that are wanted, in order of name: those of
// one Service, or all where both names are empty.
func (d *Driver) Ports(namespace, name string) []balance.ServicePort {
	d.mu.Lock()
	defer d.mu.Unlock()
	if namespace != "" || name != "" {
		return slices.Clone(d.ports[state.Key(namespace, name)])
	}
	var out []balance.ServicePort
	for _, key := range slices.Sorted(maps.Keys(d.ports)) {
		out = append(out, d.ports[key]...)
	}
	return out
}

// Problems returns what of Services and EndpointSlices is left out, and
// frontends that two Services want.
func (d *Driver) Problems() []balance.Problem {
	d.mu.Lock()
	defer d.mu.Unlock()
	var out []balance.Problem
	for _, key := range slices.Sorted(maps.Keys(d.problems)) {
		out = append(out, d.problems[key]...)
	}
	for _, c := range d.cfg.Writer.Conflicts() {
		out = append(out, balance.Problem{
			Object: "Service " + state.Key(c.Loser.Namespace, c.Loser.Service),
			Field:  "spec.ports", Value: c.Frontend.String() + "/" + string(c.Loser.Protocol),
			Want: "an address and port that is not that of Service " + state.Key(c.Winner.Namespace, c.Winner.Service),
		})
	}
	out = append(out, d.health.problems()...)
	slices.SortStableFunc(out, func(a, b balance.Problem) int {
		return cmp.Or(strings.Compare(a.Object, b.Object), strings.Compare(a.Field, b.Field))
	})
	return out
}

// Input returns what the service ports of a Service are computed from.
func (d *Driver) Input(namespace, name string) (balance.Input, bool) {
	row, _, ok := d.cfg.Tables.Services.Get(d.cfg.Tables.DB.ReadTxn(), state.ServiceByName.Query(state.Key(namespace, name)))
	if !ok {
		return balance.Input{}, false
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.input(row), true
}

// Kernel reads what the kernel has of a service port.
func (d *Driver) Kernel(name balance.Name) (service.InForce, error) { return d.cfg.Reader.Port(name) }

// Dump prints the kernel's maps as text.
func (d *Driver) Dump() (string, error) {
	var b strings.Builder
	err := d.cfg.Writer.Dump(&b)
	return b.String(), err
}

// Status sums up what is in force.
type Status struct {
	Services, Ports, Frontends, Backends int
	Err                                  error         // why not all is
	Changed                              time.Time     // of the last change
	Sync                                 time.Duration // that it took
	Maglev                               service.MaglevStats
	Flows                                service.FlowStats
	Cut                                  uint64 // sockets
}

// Status returns the state as of now.
func (d *Driver) Status() Status {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := Status{
		Services: len(d.ports), Changed: d.changed, Sync: d.took, Err: d.failures(),
		Maglev: d.cfg.Writer.Maglev(), Flows: d.cfg.Connections.Stats(), Cut: d.cut,
	}
	for _, list := range d.ports {
		s.Ports += len(list)
		for i := range list {
			s.Frontends += len(list[i].Frontends)
			s.Backends += max(len(list[i].Internal), len(list[i].Cluster), len(list[i].External))
		}
	}
	return s
}

// settle ends the connections that must not go on, and then lets go of what
// nothing can be using.
func (d *Driver) settle() {
	d.mu.Lock()
	over := d.over
	d.over = newEnded()
	d.over.draining = over.draining
	d.mu.Unlock()
	var errs []error
	if !over.empty() {
		errs = append(errs, d.cfg.Connections.ForgetAffinity(over.lost))
		errs = append(errs, d.cfg.Connections.Pass(d.flowEnds(&over)))
		errs = append(errs, d.cutSockets(&over))
	}
	errs = append(errs, d.cfg.Writer.Collect())
	if err := errors.Join(errs...); err != nil {
		d.cfg.Log.Error("end connections of services", "err", err)
	}
}

// pass deletes connections that have expired, and those of drained backends.
func (d *Driver) pass() {
	d.mu.Lock()
	over := ended{draining: maps.Clone(d.over.draining)}
	d.mu.Unlock()
	if err := d.cfg.Connections.Pass(d.flowEnds(&over)); err != nil {
		d.cfg.Log.Error("collect connections of services", "err", err)
	}
	d.forgetDrained(&over)
}
