// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/cilium/statedb"
	"golang.org/x/sync/errgroup"

	"github.com/weft-mesh/weft/internal/datapath/ipcache"
	"github.com/weft-mesh/weft/internal/identity"
	"github.com/weft-mesh/weft/internal/netdev"
	"github.com/weft-mesh/weft/internal/reconcile"
	"github.com/weft-mesh/weft/internal/route"
	"github.com/weft-mesh/weft/internal/state"
)

// forwarding computes what the node knows of every address, and keeps the
// kernel's address map and the node's routes equal to it.
type forwarding struct {
	cfg        *Config
	tables     *state.Tables
	net        *netdev.Net
	identities *identity.Allocator
	kernel     *kernel
	health     *components
	log        *slog.Logger

	addresses *reconcile.Reconciler[netip.Prefix, ipcache.Entry]
	routes    *reconcile.Reconciler[netip.Prefix, netdev.Route]

	wake chan struct{} // of one; a computation is due

	mu        sync.Mutex // protects what follows; computations take turns
	revision  uint64
	entries   map[netip.Prefix]ipcache.Entry
	nodes     map[netip.Prefix]netdev.Route
	conflicts []string
}

func newForwarding(a *agent) *forwarding {
	f := &forwarding{
		cfg: a.cfg, tables: a.tables, net: a.net, identities: a.identities, kernel: a.kernel,
		health: a.health, log: a.log, wake: make(chan struct{}, 1),
	}
	f.addresses = must(reconcile.New(reconcile.Config[netip.Prefix, ipcache.Entry]{
		Name:   "addresses",
		Target: ipcache.New(a.maps),
		Equal:  func(x, y ipcache.Entry) bool { return x == y },
		Log:    a.log,
		Desired: func() (map[netip.Prefix]ipcache.Entry, uint64) {
			f.mu.Lock()
			defer f.mu.Unlock()
			return f.entries, f.revision
		},
	}))
	f.routes = must(reconcile.New(reconcile.Config[netip.Prefix, netdev.Route]{
		Name:   "routes",
		Target: &routeTarget{a.net},
		Equal:  func(x, y netdev.Route) bool { return x == y },
		Log:    a.log,
		Desired: func() (map[netip.Prefix]netdev.Route, uint64) {
			f.mu.Lock()
			defer f.mu.Unlock()
			return f.nodes, f.revision
		},
	}))
	return f
}

// must is for constructors that fail on a wrong call only.
func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// run computes at every change until ctx ends.
func (f *forwarding) run(ctx context.Context) error {
	if _, err := f.compute(); err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return f.addresses.Run(ctx) })
	g.Go(func() error { return f.routes.Run(ctx) })
	g.Go(func() error { return f.report(ctx, "addresses", f.addresses.Status) })
	g.Go(func() error { return f.report(ctx, "routes", f.routes.Status) })
	g.Go(func() error { return f.follow(ctx) })
	return g.Wait()
}

func (f *forwarding) follow(ctx context.Context) error {
	for ctx.Err() == nil {
		f.turn(ctx)
	}
	return nil
}

// turn computes, and returns when it is time to do so again.
func (f *forwarding) turn(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends the watch also where something else ended the turn
	changed := f.watch(ctx)
	if _, err := f.compute(); err != nil {
		f.health.waits("addresses", err.Error())
		f.log.Error("compute addresses", "err", err)
	}
	select {
	case <-ctx.Done():
	case <-changed:
	case <-f.wake:
	}
}

// watch returns a channel that is closed at the next change of a row that the
// computation reads. It must be called before the rows are read.
func (f *forwarding) watch(ctx context.Context) <-chan struct{} {
	txn := f.tables.DB.ReadTxn()
	_, nodes := f.tables.Nodes.AllWatch(txn)
	_, namespaces := f.tables.Namespaces.AllWatch(txn)
	_, workloads := f.tables.Workloads.AllWatch(txn)
	_, pods := f.tables.Pods.AllWatch(txn)
	set := statedb.NewWatchSet()
	set.Add(nodes, namespaces, workloads, pods)
	changed := make(chan struct{})
	go func() {
		defer close(changed)
		// gather what changes at the same time
		_, _ = set.Wait(ctx, 5*time.Millisecond)
	}()
	return changed
}

// trigger asks for a computation; it does not wait.
func (f *forwarding) trigger() {
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// compute reads the tables as they are now and returns the revision of what
// follows from them.
func (f *forwarding) compute() (uint64, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	in := route.Input{Node: f.cfg.Node, Tunnel: f.cfg.Datapath.Tunnel == "vxlan"}
	txn := f.tables.DB.ReadTxn()
	in.Read(f.tables, txn)
	var err error
	if in.Addresses, err = f.net.Addresses(); err != nil {
		return 0, err
	}
	if in.Identity, err = f.identify(txn, in.Workloads); err != nil {
		return 0, err
	}
	result := route.Compute(in)
	f.entries = f.kernelEntries(&in, result.Entries)
	f.nodes = f.kernelRoutes(result.Routes)
	f.revision++
	if !slices.Equal(f.conflicts, result.Conflicts) {
		f.conflicts = result.Conflicts
		for _, c := range f.conflicts {
			f.log.Warn("address conflict", "what", c)
		}
	}
	f.addresses.Trigger()
	f.routes.Trigger()
	return f.revision, nil
}

// identify gives every workload its number, all new ones with one write.
func (f *forwarding) identify(txn statedb.ReadTxn, ws []*state.Workload) (func(*state.Workload) uint64, error) {
	ids, err := f.identities.AssignWorkloads(f.tables, txn, ws)
	if err != nil {
		return nil, err
	}
	byName := make(map[string]uint64, len(ws))
	for i, w := range ws {
		byName[state.Key(w.Namespace, w.Name)] = ids[i]
	}
	return func(w *state.Workload) uint64 { return byName[state.Key(w.Namespace, w.Name)] }, nil
}

// kernelEntries says how packets to each prefix travel, with the outside
// networks that see pod addresses.
func (f *forwarding) kernelEntries(in *route.Input, es map[netip.Prefix]route.Entry) map[netip.Prefix]ipcache.Entry {
	out := make(map[netip.Prefix]ipcache.Entry, len(es))
	for _, p := range f.cfg.Datapath.exclude() {
		out[p] = ipcache.Entry{Identity: identity.World, Flags: ipcache.NoMasquerade}
	}
	for p, e := range es {
		out[p] = ipcache.Entry{Identity: e.Identity, NextHop4: e.NextHop4, NextHop6: e.NextHop6, Flags: flags(e)}
	}
	return out
}

func flags(e route.Entry) ipcache.Flags {
	switch {
	case e.Kind == route.Node:
		return ipcache.LocalNode
	case e.Kind == route.RemoteNode:
		return ipcache.RemoteNode
	case e.Local:
		return ipcache.LocalCIDR
	}
	return ipcache.Pod
}

func (f *forwarding) kernelRoutes(rs map[netip.Prefix]route.Route) map[netip.Prefix]netdev.Route {
	s := f.kernel.settings()
	out := make(map[netip.Prefix]netdev.Route, len(rs))
	for p, r := range rs {
		n := netdev.Route{Destination: r.Destination, Via: r.Via, Source: r.Source, Device: tunnelName}
		if !r.Tunnel {
			name := deviceName(uint32(s.UplinkIfindex))
			if name == "" {
				continue // the uplink is gone: followNode says so
			}
			n.Device = name
		}
		out[p] = n
	}
	return out
}

// report keeps a component's state in step with a reconciler.
func (f *forwarding) report(ctx context.Context, name string, status func() (reconcile.Status, <-chan struct{})) error {
	for {
		st, changed := status()
		switch {
		case st.LastError != nil:
			f.health.waits(name, fmt.Sprintf("%d of %d not in force: %v", st.Pending, st.Keys+st.Pending, st.LastError))
		case st.Applied > 0:
			f.health.ready(name)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
	}
}

// waitFirst returns once both targets were written for the first time; what
// failed is tried again and does not stand in the way of the rest.
func (f *forwarding) waitFirst(ctx context.Context) error {
	for _, status := range []func() (reconcile.Status, <-chan struct{}){f.addresses.Status, f.routes.Status} {
		for {
			st, changed := status()
			if st.Desired > 0 {
				break
			}
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-changed:
			}
		}
	}
	return nil
}

// waitInForce returns once what follows from the tables as they are now is in
// force.
func (f *forwarding) waitInForce(ctx context.Context) error {
	revision, err := f.compute()
	if err != nil {
		return err
	}
	if err := f.addresses.Wait(ctx, revision); err != nil {
		return err
	}
	return f.routes.Wait(ctx, revision)
}

// identitiesInUse are those that the kernel or a pod's row may speak of.
func (f *forwarding) identitiesInUse() map[uint64]bool {
	used := map[uint64]bool{}
	f.mu.Lock()
	for _, e := range f.entries {
		used[e.Identity] = true
	}
	f.mu.Unlock()
	for p := range f.tables.Pods.All(f.tables.DB.ReadTxn()) {
		used[p.Identity] = true
	}
	return used
}

// routeTarget is the node's routing table as a reconcile target.
type routeTarget struct{ net *netdev.Net }

func (t *routeTarget) Update(_ context.Context, _ netip.Prefix, r netdev.Route) error {
	return t.net.ReplaceRoute(r)
}

func (t *routeTarget) Delete(_ context.Context, p netip.Prefix) error { return t.net.DeleteRoute(p) }

func (t *routeTarget) Prune(_ context.Context, want map[netip.Prefix]netdev.Route) error {
	have, err := t.net.Routes()
	if err != nil {
		return err
	}
	for _, r := range have {
		if _, ok := want[r.Destination]; ok {
			continue
		}
		if err := t.net.DeleteRoute(r.Destination); err != nil {
			return err
		}
	}
	return nil
}
