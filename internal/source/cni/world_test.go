// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cilium/statedb"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
	"github.com/weft-mesh/weft/internal/ipam"
	"github.com/weft-mesh/weft/internal/netdev"
	"github.com/weft-mesh/weft/internal/netdev/nstest"
	"github.com/weft-mesh/weft/internal/state"
)

// world is a node with what outlives its agent: the namespace, the kernel's
// datapath, the state folder.
type world struct {
	t          testing.TB
	ns         *nstest.NS
	dir        string
	cidrs      []netip.Prefix
	quarantine time.Duration
	datapath   *fakeDatapath
	log        *slog.Logger
}

var nodeIP = netip.MustParseAddr("172.30.0.1")

func newWorld(t testing.TB) *world {
	ns := nstest.New(t)
	ns.LoopbackUp(t, nodeIP)
	return &world{
		t: t, ns: ns, dir: t.TempDir(),
		cidrs:    []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24"), netip.MustParsePrefix("fd00:10:244:1::/64")},
		datapath: &fakeDatapath{pods: map[string]*state.Pod{}},
		log:      slog.New(slog.DiscardHandler),
	}
}

// agent is one run of the agent.
type agent struct {
	*Server
	w     *world
	gate  *gate
	pool  *ipam.Pool
	net   *netdev.Net
	close func()
}

// start begins a run, with Restore done.
func (w *world) start() *agent {
	w.t.Helper()
	a := w.startUnrestored()
	if err := a.Restore(w.t.Context()); err != nil {
		w.t.Fatal(err)
	}
	return a
}

func (w *world) startUnrestored() *agent {
	w.t.Helper()
	a := &agent{w: w, gate: &gate{}}
	must(w.t, w.ns.Do(func() (err error) {
		a.net, err = netdev.Open()
		return err
	}))
	var err error
	a.pool, err = ipam.Open(ipam.Options{
		Path: filepath.Join(w.dir, "ipam.json"), BootID: "boot1", Now: ipam.SinceBoot, Quarantine: w.quarantine, Log: w.log,
	})
	must(w.t, err)
	tables, err := state.New()
	must(w.t, err)
	a.Server, err = New(Options{
		Config:     Config{Node: "node1", StateDir: filepath.Join(w.dir, "cni"), MTU: 1450, Wait: 5 * time.Second, Sweep: time.Millisecond * 20},
		Tables:     tables,
		Pool:       a.pool,
		Network:    &gatedNetwork{a.net, a.gate},
		Datapath:   &gatedDatapath{w.datapath, a.gate},
		Identities: fakeIdentities{},
		Log:        w.log,
	})
	must(w.t, err)
	a.close = sync.OnceFunc(func() {
		a.gate.kill()
		_ = a.pool.Close()
		_ = a.net.Close()
	})
	w.t.Cleanup(a.close)
	insert(a, tables.Nodes, &state.Node{Name: "node1", IPs: []netip.Addr{nodeIP}, PodCIDRs: w.cidrs})
	insert(a, tables.Namespaces, &state.Namespace{Name: "shop", Labels: map[string]string{"team": "a"}})
	return a
}

func insert[T any](a *agent, table statedb.RWTable[T], row T) {
	a.w.t.Helper()
	txn := a.tables.DB.WriteTxn(table)
	_, _, err := table.Insert(txn, row)
	txn.Commit()
	must(a.w.t, err)
}

// workload makes a pod known.
func (a *agent) workload(name string, change ...func(*state.Workload)) {
	a.w.t.Helper()
	w := &state.Workload{Namespace: "shop", Name: name, Node: "node1", ServiceAccount: "default", Labels: map[string]string{"app": name}}
	for _, f := range change {
		f(w)
	}
	insert(a, a.tables.Workloads, w)
}

func addRequest(container, pod string, ns *nstest.NS) *weftv1.CniAddRequest {
	return &weftv1.CniAddRequest{ContainerId: container, Netns: ns.Path(), Interface: "eth0", PodNamespace: "shop", PodName: pod, Network: "weft"}
}

func (a *agent) check(container string, ns *nstest.NS) error {
	_, err := a.Check(a.w.t.Context(), &weftv1.CniCheckRequest{ContainerId: container, Interface: "eth0", Netns: ns.Path()})
	return err
}

func (a *agent) del(container string) error {
	_, err := a.Del(a.w.t.Context(), &weftv1.CniDelRequest{ContainerId: container, Interface: "eth0"})
	return err
}

// wantPods fails unless exactly these containers are wired, in every respect.
func (a *agent) wantPods(containers ...string) {
	a.w.t.Helper()
	var links, rows, allocs []string
	list, err := a.net.PodLinks()
	must(a.w.t, err)
	for _, l := range list {
		links = append(links, l.Name)
	}
	for row := range a.tables.Pods.All(a.tables.DB.ReadTxn()) {
		rows = append(rows, row.ContainerID)
	}
	for _, x := range a.pool.All() {
		allocs = append(allocs, x.ContainerID)
	}
	var names []string
	for _, c := range containers {
		names = append(names, netdev.HostName(c+"/eth0"))
	}
	for what, s := range map[string]struct{ got, want []string }{
		"links": {links, names}, "rows": {rows, containers}, "allocations": {allocs, containers}, "datapath": {a.w.datapath.containers(), containers},
	} {
		slices.Sort(s.got)
		slices.Sort(s.want)
		if !slices.Equal(s.got, s.want) {
			a.w.t.Errorf("%s: got %v, want %v", what, s.got, s.want)
		}
	}
}

// wantError fails unless err has all the texts.
func wantError(t testing.TB, err error, texts ...string) {
	t.Helper()
	for _, s := range texts {
		if err == nil || !strings.Contains(err.Error(), s) {
			t.Errorf("error %v, want one with %q", err, s)
		}
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// eventually waits until f holds, ten seconds at most.
func eventually(t testing.TB, what string, f func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(10 * time.Second)
	for !f() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("waited in vain until %s", what)
		}
	}
}

// fakeDatapath is the kernel's side: it outlives the agent.
type fakeDatapath struct {
	mu   sync.Mutex
	pods map[string]*state.Pod
	fail error // of Attach
	// hook is called at the beginning of each Attach and Detach, without mu.
	hook func(verb string, p *state.Pod)
}

func (d *fakeDatapath) called(verb string, p *state.Pod) {
	d.mu.Lock()
	hook := d.hook
	d.mu.Unlock()
	if hook != nil {
		hook(verb, p)
	}
}

func (d *fakeDatapath) setHook(hook func(verb string, p *state.Pod)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.hook = hook
}

func (d *fakeDatapath) Attach(_ context.Context, p *state.Pod) error {
	d.called("attach", p)
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.fail != nil {
		return d.fail
	}
	for _, o := range d.pods {
		for _, ip := range o.IPs {
			if o.ContainerID != p.ContainerID && slices.Contains(p.IPs, ip) {
				return fmt.Errorf("containers %s and %s both have %s", o.ContainerID, p.ContainerID, ip)
			}
		}
	}
	d.pods[p.ContainerID] = p
	return nil
}

func (d *fakeDatapath) Detach(_ context.Context, p *state.Pod) error {
	d.called("detach", p)
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.pods, p.ContainerID)
	return nil
}

func (d *fakeDatapath) Attached(_ context.Context, p *state.Pod) error {
	if d.get(p.ContainerID) == nil {
		return errors.New("no program is attached")
	}
	return nil
}

func (d *fakeDatapath) get(container string) *state.Pod {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.pods[container]
}

func (d *fakeDatapath) setFail(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.fail = err
}

func (d *fakeDatapath) containers() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Collect(maps.Keys(d.pods))
}

// fakeIdentities gives the length of everything as number: another label,
// another number.
type fakeIdentities struct{}

func (fakeIdentities) Assign(ns string, nsLabels map[string]string, sa string, labels map[string]string) (uint64, error) {
	if labels["app"] == "refused" {
		return 0, errors.New("the file is full")
	}
	return identityOf(ns, nsLabels, sa, labels), nil
}

func identityOf(ns string, nsLabels map[string]string, sa string, labels map[string]string) uint64 {
	return uint64(256 + len(fmt.Sprint(ns, nsLabels, sa, labels)))
}

// gate stands for the life of an agent: once it is killed, nothing that the
// agent still tries has an effect. Steps are counted, and the agent can be made
// to die before or after one of them.
type gate struct {
	mu     sync.RWMutex
	dead   bool
	steps  int
	before int    // die before this step; 0 is never
	after  int    // die after this step
	died   func() // called at that moment
}

var errDead = errors.New("the agent is dead")

func (g *gate) kill() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.dead = true
}

func (g *gate) isDead() bool {
	g.mu.RLock()
	defer g.mu.RUnlock()
	return g.dead
}

// read lets what changes nothing through, while the agent lives.
func (g *gate) read(f func() error) error {
	g.mu.RLock()
	defer g.mu.RUnlock()
	if g.dead {
		return errDead
	}
	return f()
}

// pass lets one step through.
func (g *gate) pass(f func() error) error {
	g.mu.RLock()
	counted := g.before+g.after > 0
	g.mu.RUnlock()
	if !counted {
		return g.read(f)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.steps++
	if !g.dead && g.steps == g.before {
		g.die()
	}
	if g.dead {
		return errDead
	}
	err := f()
	if g.steps == g.after {
		g.die()
		return errDead
	}
	return err
}

func (g *gate) die() {
	g.dead = true
	g.died()
}

type gatedNetwork struct {
	Network
	g *gate
}

func (n *gatedNetwork) PreparePodLink(s netdev.PodLinkSpec) (l *netdev.PodLink, err error) {
	err = n.g.pass(func() (err error) {
		l, err = n.Network.PreparePodLink(s)
		return err
	})
	return l, err
}

func (n *gatedNetwork) ActivatePodLink(s netdev.PodLinkSpec) error {
	return n.g.pass(func() error { return n.Network.ActivatePodLink(s) })
}

func (n *gatedNetwork) JoinPodLink(s netdev.PodLinkSpec) error {
	return n.g.pass(func() error { return n.Network.JoinPodLink(s) })
}

func (n *gatedNetwork) Addresses() (as []netip.Addr, err error) {
	err = n.g.read(func() (err error) {
		as, err = n.Network.Addresses()
		return err
	})
	return as, err
}

func (n *gatedNetwork) CheckPodLink(s netdev.PodLinkSpec) error {
	return n.g.read(func() error { return n.Network.CheckPodLink(s) })
}

func (n *gatedNetwork) LinkByName(name string) (l netdev.Link, ok bool, err error) {
	err = n.g.read(func() (err error) {
		l, ok, err = n.Network.LinkByName(name)
		return err
	})
	return l, ok, err
}

func (n *gatedNetwork) PodLinks() (l []netdev.Link, err error) {
	err = n.g.read(func() (err error) {
		l, err = n.Network.PodLinks()
		return err
	})
	return l, err
}

func (n *gatedNetwork) DeleteLink(name string) error {
	return n.g.pass(func() error { return n.Network.DeleteLink(name) })
}

type gatedDatapath struct {
	*fakeDatapath
	g *gate
}

func (d *gatedDatapath) Attach(ctx context.Context, p *state.Pod) error {
	return d.g.pass(func() error { return d.fakeDatapath.Attach(ctx, p) })
}

func (d *gatedDatapath) Detach(ctx context.Context, p *state.Pod) error {
	return d.g.pass(func() error { return d.fakeDatapath.Detach(ctx, p) })
}
