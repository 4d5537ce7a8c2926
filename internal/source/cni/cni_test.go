// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
	"github.com/weft-mesh/weft/internal/ipam"
	"github.com/weft-mesh/weft/internal/netdev/nstest"
	"github.com/weft-mesh/weft/internal/source/cni/tombstone"
	"github.com/weft-mesh/weft/internal/state"
)

func TestAddCheckDel(t *testing.T) {
	w := newWorld(t)
	a := w.start()
	a.workload("web")
	pod := nstest.New(t)
	r, err := a.Add(t.Context(), addRequest("c1", "web", pod))
	must(t, err)
	want := &weftv1.CniAddResponse{
		HostInterface: r.HostInterface, HostMac: r.HostMac, Mac: r.Mac, Mtu: 1450,
		Ips: []*weftv1.CniIp{{Address: "10.244.1.2/32", Gateway: "10.244.1.1"}, {Address: "fd00:10:244:1::2/128", Gateway: "fd00:10:244:1::1"}},
		Routes: []*weftv1.CniRoute{
			{Destination: "10.244.1.1/32"}, {Destination: "0.0.0.0/0", Gateway: "10.244.1.1"},
			{Destination: "fd00:10:244:1::1/128"}, {Destination: "::/0", Gateway: "fd00:10:244:1::1"},
		},
	}
	if diff := cmp.Diff(want, r, protocmp.Transform()); diff != "" {
		t.Errorf("answer (-want +got):\n%s", diff)
	}
	row, _ := a.row("c1")
	id := identityOf("shop", map[string]string{"team": "a"}, "default", map[string]string{"app": "web"})
	if row.Identity != id || row.Namespace != "shop" || row.Name != "web" || row.Interface != r.HostInterface || row.Ifindex == 0 || row.MAC != r.Mac || row.HostMAC != r.HostMac || row.Netns != pod.Path() {
		t.Errorf("row %+v", row)
	}
	a.wantPods("c1")
	must(t, a.check("c1", pod))

	again, err := a.Add(t.Context(), addRequest("c1", "web", pod))
	must(t, err)
	if diff := cmp.Diff(r, again, protocmp.Transform()); diff != "" {
		t.Errorf("a repeated Add differs:\n%s", diff)
	}
	a.wantPods("c1")
	for range 2 {
		must(t, a.del("c1"))
		a.wantPods()
	}
	if err := a.check("c1", pod); status.Code(err) != codes.NotFound {
		t.Errorf("Check after Del: %v", err)
	}
	if _, err := a.Add(t.Context(), addRequest("c2", "web", pod)); err != nil {
		t.Errorf("Add into the same namespace after Del: %v", err)
	}
}

// A runtime that restarts a sandbox adds the new one before it deletes the old.
func TestTwoSandboxesOfAPod(t *testing.T) {
	w := newWorld(t)
	a := w.start()
	a.workload("web")
	old, fresh := nstest.New(t), nstest.New(t)
	r1, err := a.Add(t.Context(), addRequest("c1", "web", old))
	must(t, err)
	r2, err := a.Add(t.Context(), addRequest("c2", "web", fresh))
	must(t, err)
	if r1.Ips[0].Address == r2.Ips[0].Address {
		t.Errorf("both have %s", r1.Ips[0].Address)
	}
	a.wantPods("c1", "c2")
	must(t, a.del("c1"))
	a.wantPods("c2")
	must(t, a.check("c2", fresh))
}

func TestAddWaitsForTheRow(t *testing.T) {
	w := newWorld(t)
	a := w.start()
	pod := nstest.New(t)
	done := make(chan error, 1)
	go func() {
		_, err := a.Add(t.Context(), addRequest("c1", "late", pod))
		done <- err
	}()
	a.workload("other")
	a.workload("late", func(w *state.Workload) { w.Node = "" })
	select {
	case err := <-done:
		t.Fatalf("Add did not wait: %v", err)
	default:
	}
	a.workload("late")
	must(t, <-done)
	a.wantPods("c1")
}

func TestAddRefused(t *testing.T) {
	w := newWorld(t)
	a := w.start()
	a.config.Wait = time.Millisecond
	pod := nstest.New(t)
	for name, c := range map[string]struct {
		change func(*weftv1.CniAddRequest)
		code   codes.Code
		want   string
	}{
		"unknown pod":       {func(r *weftv1.CniAddRequest) { r.PodName = "nobody" }, codes.FailedPrecondition, "pod shop/nobody: waited 1ms: the pod is not known to this node"},
		"unknown namespace": {func(r *weftv1.CniAddRequest) { r.PodNamespace = "void" }, codes.FailedPrecondition, "pod void/web: waited 1ms: namespace void is not known"},
		"other node":        {func(r *weftv1.CniAddRequest) { r.PodName = "far" }, codes.FailedPrecondition, `the pod is scheduled to node "node2", this is "node1"`},
		"other UID":         {func(r *weftv1.CniAddRequest) { r.PodUid = "u2" }, codes.FailedPrecondition, "the pod known by that name has UID u1, this one has u2"},
		"host network":      {func(r *weftv1.CniAddRequest) { r.PodName = "host" }, codes.InvalidArgument, "pod shop/host uses the node's network"},
		"no identity":       {func(r *weftv1.CniAddRequest) { r.PodName = "refused" }, codes.Internal, "pod shop/refused: assign identity: the file is full"},
		"no container":      {func(r *weftv1.CniAddRequest) { r.ContainerId = "" }, codes.InvalidArgument, "container_id must be set"},
		"no namespace":      {func(r *weftv1.CniAddRequest) { r.Netns = "/nowhere" }, codes.InvalidArgument, "pod shop/web: create link: open /nowhere: no such network namespace"},
		"interface taken":   {func(r *weftv1.CniAddRequest) { r.Interface = "lo" }, codes.Internal, "interface lo exists already"},
	} {
		t.Run(name, func(t *testing.T) {
			a.workload("web", func(w *state.Workload) { w.UID = "u1" })
			insert(a, a.tables.Workloads, &state.Workload{Namespace: "void", Name: "web", Node: "node1"})
			a.workload("far", func(w *state.Workload) { w.Node = "node2" })
			a.workload("host", func(w *state.Workload) { w.HostNetwork = true })
			a.workload("refused")
			r := addRequest("c1", "web", pod)
			c.change(r)
			_, err := a.Add(t.Context(), r)
			wantError(t, err, c.want)
			if status.Code(err) != c.code {
				t.Errorf("code %s, want %s", status.Code(err), c.code)
			}
			a.wantPods()
		})
	}
}

func TestConflicts(t *testing.T) {
	w := newWorld(t)
	a := w.start()
	a.workload("web")
	a.workload("db")
	pod, other := nstest.New(t), nstest.New(t)
	_, err := a.Add(t.Context(), addRequest("c1", "web", pod))
	must(t, err)
	for want, r := range map[string]*weftv1.CniAddRequest{
		"container c1 is wired as pod shop/web":                                         addRequest("c1", "db", pod),
		"container c1 is wired as pod shop/web in":                                      addRequest("c1", "web", other),
		"container c1 has another interface from weft: it gives one to each pod":        {ContainerId: "c1", Netns: pod.Path(), Interface: "net1", PodNamespace: "shop", PodName: "web"},
		"pod shop/db: create link: interface eth0 exists already in " + pod.Path() + "": addRequest("c2", "db", pod),
	} {
		_, err := a.Add(t.Context(), r)
		wantError(t, err, want)
		a.wantPods("c1")
		must(t, a.check("c1", pod))
	}
}

func TestFullPool(t *testing.T) {
	w := newWorld(t)
	w.cidrs = []netip.Prefix{netip.MustParsePrefix("10.244.1.0/30")}
	a := w.start()
	a.workload("web")
	_, err := a.Add(t.Context(), addRequest("c1", "web", nstest.New(t)))
	must(t, err)
	_, err = a.Add(t.Context(), addRequest("c2", "web", nstest.New(t)))
	wantError(t, err, "pod shop/web: allocate address: pod CIDR 10.244.1.0/30 is full: of 1 addresses 1 are allocated")
	if status.Code(err) != codes.ResourceExhausted {
		t.Errorf("code %s", status.Code(err))
	}
	a.wantPods("c1")
}

func TestRollback(t *testing.T) {
	w := newWorld(t)
	a := w.start()
	a.workload("web")
	pod := nstest.New(t)
	w.datapath.setFail(errors.New("verifier says no"))
	_, err := a.Add(t.Context(), addRequest("c1", "web", pod))
	wantError(t, err, "pod shop/web: attach datapath to wf", "verifier says no")
	a.wantPods()
	w.datapath.setFail(nil)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := a.Add(ctx, addRequest("c1", "nobody", pod)); status.Code(err) != codes.Canceled {
		t.Errorf("given up: %v", err)
	}
	_, err = a.Add(t.Context(), addRequest("c1", "web", pod))
	must(t, err)

	// A pod that is wired keeps what it has when a repeated Add fails.
	w.datapath.setFail(errors.New("verifier says no"))
	_, err = a.Add(t.Context(), addRequest("c1", "web", pod))
	wantError(t, err, "verifier says no")
	a.wantPods("c1")
}

func TestCheckNamesWhatIsWrong(t *testing.T) {
	w := newWorld(t)
	a := w.start()
	a.workload("web")
	pod := nstest.New(t)
	_, err := a.Add(t.Context(), addRequest("c1", "web", pod))
	must(t, err)
	_, err = a.Check(t.Context(), &weftv1.CniCheckRequest{ContainerId: "c1", Interface: "eth0", Netns: pod.Path(), Ips: []string{"10.244.1.9/32"}})
	wantError(t, err, "it has addresses [10.244.1.2/32 fd00:10:244:1::2/128]: want [10.244.1.9/32]")
	row, _ := a.row("c1")
	must(t, w.datapath.Detach(t.Context(), row))
	wantError(t, a.check("c1", pod), "datapath: no program is attached")
	must(t, a.net.DeleteLink(row.Interface))
	wantError(t, a.check("c1", pod), "pod shop/web: look up link "+row.Interface)
}

func TestRestore(t *testing.T) {
	w := newWorld(t)
	a := w.start()
	pods := map[string]*nstest.NS{}
	for _, name := range []string{"stays", "gone", "deleted"} {
		a.workload(name)
		pods[name] = nstest.New(t)
		_, err := a.Add(t.Context(), addRequest(name, name, pods[name]))
		must(t, err)
	}
	stays, _ := a.row("stays")
	a.close()
	// While no agent runs: a pod goes with its namespace, another is deleted,
	// a link appears that nothing is known of.
	must(t, tombstone.Write(filepath.Join(w.dir, "cni"), tombstone.Tombstone{ContainerID: "deleted", Interface: "eth0"}))
	must(t, os.WriteFile(filepath.Join(w.dir, "cni", "del", "damaged"), []byte("{"), 0o600))
	b := w.startUnrestored()
	row := w.datapath.get("gone")
	must(t, b.net.DeleteLink(row.Interface))
	stray, err := b.net.CreatePodLink((&attachment{
		Key: ipam.Key{ContainerID: "stray", Interface: "eth0"}, IPs: []netip.Addr{netip.MustParseAddr("10.244.1.200")},
		record: record{Netns: nstest.New(t).Path(), Gateways: []netip.Addr{netip.MustParseAddr("10.244.1.1")}, MTU: 1450},
	}).spec())
	must(t, err)
	_, err = b.Ready(t.Context(), nil)
	wantError(t, err, "pods of the previous run are being restored")
	must(t, b.Restore(t.Context()))
	_, err = b.Ready(t.Context(), nil)
	must(t, err)
	b.wantPods("stays")
	must(t, b.check("stays", pods["stays"]))
	got, _ := b.row("stays")
	if diff := cmp.Diff(stays, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
		t.Errorf("row (-before +after):\n%s", diff)
	}
	if _, ok, _ := b.net.LinkByName(stray.Name); ok {
		t.Error("the stray link is there")
	}
	if list, _ := tombstone.List(filepath.Join(w.dir, "cni")); len(list) != 0 {
		t.Errorf("tombstones: %v", list)
	}
}

// A pod that the datapath refuses at the start is tried again, and named.
func TestRestoreRetries(t *testing.T) {
	w := newWorld(t)
	a := w.start()
	a.workload("web")
	pod := nstest.New(t)
	_, err := a.Add(t.Context(), addRequest("c1", "web", pod))
	must(t, err)
	a.close()
	w.datapath.setFail(errors.New("map is full"))
	b := w.start()
	_, err = b.Ready(t.Context(), nil)
	wantError(t, err, "not restored: pod shop/web: attach datapath to wf", "map is full")
	b.workload("web", func(w *state.Workload) { w.Labels = map[string]string{"app": "relabelled while away"} })
	stop := b.run(t)
	defer stop()
	w.datapath.setFail(nil)
	want := identityOf("shop", map[string]string{"team": "a"}, "default", map[string]string{"app": "relabelled while away"})
	eventually(t, "the pod is restored and has its new identity", func() bool {
		row, ok := b.row("c1")
		return ok && row.Identity == want
	})
	_, err = b.Ready(t.Context(), nil)
	must(t, err)
	b.wantPods("c1")
}

// run starts Run; stop ends it and waits.
func (a *agent) run(t *testing.T) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- a.Run(ctx) }()
	return sync.OnceFunc(func() {
		cancel()
		must(t, <-done)
	})
}

func TestReadyNamesWhatIsMissing(t *testing.T) {
	w := newWorld(t)
	a := w.start()
	for want, node := range map[string]*state.Node{
		"node node1 has no pod CIDR": {Name: "node1"},
		"node node1 has no address":  {Name: "node1", PodCIDRs: w.cidrs},
	} {
		insert(a, a.tables.Nodes, node)
		_, err := a.Ready(t.Context(), nil)
		wantError(t, err, want)
	}
	txn := a.tables.DB.WriteTxn(a.tables.Nodes)
	must(t, a.tables.Nodes.DeleteAll(txn))
	txn.Commit()
	_, err := a.Ready(t.Context(), nil)
	wantError(t, err, "this node, node1, is not known")
}

func TestIdentityFollowsLabels(t *testing.T) {
	w := newWorld(t)
	a := w.start()
	a.workload("web")
	pod := nstest.New(t)
	_, err := a.Add(t.Context(), addRequest("c1", "web", pod))
	must(t, err)
	stop := a.run(t)
	defer stop()
	follows := func(what string, want uint64) {
		t.Helper()
		eventually(t, "the identity follows "+what, func() bool {
			row, _ := a.row("c1")
			return row.Identity == want && w.datapath.get("c1").Identity == want
		})
	}
	labels, nsLabels := map[string]string{"app": "web", "tier": "front"}, map[string]string{"team": "a"}
	a.workload("web", func(w *state.Workload) { w.Labels = labels })
	follows("pod labels", identityOf("shop", nsLabels, "default", labels))
	nsLabels = map[string]string{"team": "another"}
	insert(a, a.tables.Namespaces, &state.Namespace{Name: "shop", Labels: nsLabels})
	follows("namespace labels", identityOf("shop", nsLabels, "default", labels))

	w.datapath.setFail(errors.New("not now"))
	a.workload("web", func(w *state.Workload) { w.Labels = labels; w.ServiceAccount = "robot" })
	wantError(t, a.Reidentify(t.Context()), "pod shop/web: attach datapath", "not now")
	w.datapath.setFail(nil)
	follows("the service account, at a second attempt", identityOf("shop", nsLabels, "robot", labels))
	stop()
	a.close()
	b := w.start()
	if row, _ := b.row("c1"); row.Identity != identityOf("shop", nsLabels, "robot", labels) {
		t.Errorf("after a restart the identity is %d", row.Identity)
	}
}

// The plugin leaves a note also when a running agent was too slow.
func TestTombstonesAreFoundWhileRunning(t *testing.T) {
	w := newWorld(t)
	a := w.start()
	a.workload("web")
	_, err := a.Add(t.Context(), addRequest("c1", "web", nstest.New(t)))
	must(t, err)
	stop := a.run(t)
	defer stop()
	must(t, tombstone.Write(filepath.Join(w.dir, "cni"), tombstone.Tombstone{ContainerID: "c1", Interface: "eth0"}))
	eventually(t, "the pod is released", func() bool { return len(a.pool.All()) == 0 })
	stop()
	a.wantPods()
}

// A note about a container that is added again concerns the former one.
func TestTombstoneBeforeAdd(t *testing.T) {
	w := newWorld(t)
	a := w.start()
	a.workload("web")
	pod := nstest.New(t)
	first, err := a.Add(t.Context(), addRequest("c1", "web", pod))
	must(t, err)
	must(t, tombstone.Write(filepath.Join(w.dir, "cni"), tombstone.Tombstone{ContainerID: "c1", Interface: "eth0"}))
	second, err := a.Add(t.Context(), addRequest("c1", "web", pod))
	must(t, err)
	if first.Ips[0].Address == second.Ips[0].Address {
		t.Error("the address was not released")
	}
	must(t, a.bury(t.Context()))
	a.wantPods("c1")
}

func TestGc(t *testing.T) {
	w := newWorld(t)
	a := w.start()
	for i := range 6 {
		name := fmt.Sprintf("c%d", i)
		a.workload(name)
		r := addRequest(name, name, nstest.New(t))
		if i == 5 {
			r.Network = "other"
		}
		_, err := a.Add(t.Context(), r)
		must(t, err)
	}
	r, err := a.Gc(t.Context(), &weftv1.CniGcRequest{Network: "weft", Valid: []*weftv1.CniAttachment{
		{ContainerId: "c1", Interface: "eth0"}, {ContainerId: "c2", Interface: "net7"}, {ContainerId: "unknown", Interface: "eth0"},
	}})
	must(t, err)
	if r.Released != 4 {
		t.Errorf("released %d, want 4", r.Released)
	}
	a.wantPods("c1", "c5")
}

// A new CIDR is in force for new pods; those that are there keep what they have.
func TestOtherCIDR(t *testing.T) {
	w := newWorld(t)
	a := w.start()
	a.workload("web")
	old := nstest.New(t)
	_, err := a.Add(t.Context(), addRequest("c1", "web", old))
	must(t, err)
	insert(a, a.tables.Nodes, &state.Node{Name: "node1", IPs: []netip.Addr{nodeIP}, PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.9.0.0/24")}})
	r, err := a.Add(t.Context(), addRequest("c2", "web", nstest.New(t)))
	must(t, err)
	if got := r.Ips[0].String(); len(r.Ips) != 1 || r.Ips[0].Address != "10.9.0.2/32" || r.Ips[0].Gateway != "10.9.0.1" {
		t.Errorf("answer %v", got)
	}
	must(t, a.check("c1", old))
	a.wantPods("c1", "c2")
}

// The agent may die at any step of an Add or Del: the next one finds either a
// pod that is wired in whole, or nothing of it; and then everything can be
// released.
func TestCrashAtEveryStep(t *testing.T) {
	for verb, steps := range map[string]int{"add": 3, "del": 2} {
		for step := 1; step <= steps; step++ {
			for _, before := range []bool{true, false} {
				t.Run(fmt.Sprintf("%s step %d before=%v", verb, step, before), func(t *testing.T) { crash(t, verb, step, before) })
			}
		}
	}
}

func crash(t *testing.T, verb string, step int, before bool) {
	w := newWorld(t)
	a := w.start()
	a.workload("web")
	pod := nstest.New(t)
	add := func(a *agent) error {
		_, err := a.Add(t.Context(), addRequest("c1", "web", pod))
		return err
	}
	if verb == "del" {
		must(t, add(a))
	}
	file := filepath.Join(w.dir, "ipam.json")
	var atDeath []byte
	a.gate.mu.Lock()
	if before {
		a.gate.before = step
	} else {
		a.gate.after = step
	}
	a.gate.died = func() { atDeath, _ = os.ReadFile(file) }
	a.gate.mu.Unlock()
	if verb == "add" {
		wantError(t, add(a), "the agent is dead")
	} else {
		wantError(t, a.del("c1"), "the agent is dead")
	}
	a.close()
	must(t, os.WriteFile(file, atDeath, 0o600))

	b := w.start()
	b.workload("web")
	if verb == "add" {
		b.wantPods() // it was not carried out in whole, so nothing is left
		must(t, add(b))
		must(t, b.check("c1", pod))
	} else if slices.Contains(w.datapath.containers(), "c1") {
		must(t, b.check("c1", pod))
	}
	must(t, b.del("c1"))
	b.wantPods()
}

func TestConfigRefused(t *testing.T) {
	for want, c := range map[string]Config{
		"node name must be set":       {StateDir: "/x", MTU: 1500},
		"state folder must be set":    {Node: "n", MTU: 1500},
		"MTU 100 of pods: want at":    {Node: "n", StateDir: "/x", MTU: 100},
		"must not be negative":        {Node: "n", StateDir: "/x", MTU: 1500, Wait: -1},
		"parallel and sweep must not": {Node: "n", StateDir: "/x", MTU: 1500, Parallel: -1},
	} {
		_, err := New(Options{Config: c})
		wantError(t, err, want)
	}
}
