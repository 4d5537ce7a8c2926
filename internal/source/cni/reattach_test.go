// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/weft-mesh/weft/internal/ipam"
	"github.com/weft-mesh/weft/internal/netdev"
	"github.com/weft-mesh/weft/internal/netdev/nstest"
	"github.com/weft-mesh/weft/internal/state"
)

// The way into the node opens after the datapath is in force, and is closed
// before it is taken away.
func TestLinkIsNeverUpWithoutDatapath(t *testing.T) {
	w := newWorld(t)
	a := w.start()
	a.workload("web")
	pod := nstest.New(t)
	var seen []string
	w.datapath.setHook(func(verb string, p *state.Pod) {
		l, ok, err := a.net.LinkByName(p.Interface)
		switch {
		case err != nil:
			t.Error(err)
		case !ok:
			verb += " gone"
		case l.Up:
			verb += " up"
		default:
			verb += " down"
		}
		seen = append(seen, verb)
	})
	_, err := a.Add(t.Context(), addRequest("c1", "web", pod))
	must(t, err)
	must(t, a.check("c1", pod))
	_, err = a.Add(t.Context(), addRequest("c1", "web", pod))
	must(t, err)
	must(t, a.del("c1"))
	if got := strings.Join(seen, ", "); got != "attach down, attach up, detach gone" {
		t.Errorf("links of attached pods: %s", got)
	}
	seen = nil
	w.datapath.setFail(errors.New("verifier says no"))
	_, err = a.Add(t.Context(), addRequest("c2", "web", pod))
	wantError(t, err, "verifier says no")
	if got := strings.Join(seen, ", "); got != "attach down, detach gone" {
		t.Errorf("links of a pod whose datapath is refused: %s", got)
	}
}

// podRoutes returns the devices of the node's IPv4 routes to pods.
func (w *world) podRoutes(t *testing.T) (out []string) {
	t.Helper()
	must(t, w.ns.Do(func() error {
		b, err := os.ReadFile("/proc/thread-self/net/route")
		for _, line := range strings.Split(string(b), "\n")[1:] {
			if f := strings.Fields(line); len(f) > 1 && strings.HasPrefix(f[0], netdev.HostPrefix) {
				out = append(out, f[0])
			}
		}
		return err
	}))
	return out
}

// An address of the node goes and comes back: the kernel has taken away the
// routes to pods that have it as source.
func TestRejoinAfterAddressFlap(t *testing.T) {
	w := newWorld(t)
	a := w.start()
	a.workload("web")
	pod := nstest.New(t)
	_, err := a.Add(t.Context(), addRequest("c1", "web", pod))
	must(t, err)
	flap := func() {
		t.Helper()
		w.ns.LoopbackUp(t, netip.MustParseAddr("192.0.2.9"))
		if err := a.check("c1", pod); err == nil || len(w.podRoutes(t)) != 0 {
			t.Fatalf("the route outlives its source address: this test tests nothing (%v)", err)
		}
	}
	flap()
	must(t, a.Rejoin(t.Context())) // without the address
	must(t, a.check("c1", pod))
	w.ns.LoopbackUp(t, nodeIP)
	must(t, a.Rejoin(t.Context())) // with it
	must(t, a.check("c1", pod))
	flap() // the route has it as source again
	w.ns.LoopbackUp(t, nodeIP)
	must(t, a.Reattach(t.Context()))
	must(t, a.check("c1", pod))
	flap()
	w.ns.LoopbackUp(t, nodeIP)
	a.close()
	b := w.start() // a restart of the agent repairs it as well
	must(t, b.check("c1", pod))
}

// What the datapath refuses of a Reattach is tried again.
func TestReattachRetries(t *testing.T) {
	w := newWorld(t)
	a := w.start()
	a.workload("web")
	pod := nstest.New(t)
	_, err := a.Add(t.Context(), addRequest("c1", "web", pod))
	must(t, err)
	stop := a.run(t)
	defer stop()
	w.datapath.setFail(errors.New("map is full"))
	wantError(t, a.Reattach(t.Context()), "pod shop/web: attach datapath to wf", "map is full")
	_, err = a.Ready(t.Context(), nil)
	wantError(t, err, "not restored: pod shop/web: attach datapath to wf")
	must(t, w.datapath.Detach(t.Context(), w.datapath.get("c1")))
	w.datapath.setFail(nil)
	eventually(t, "the pod is attached", func() bool { return w.datapath.get("c1") != nil })
	eventually(t, "the agent is ready", func() bool { _, err := a.Ready(t.Context(), nil); return err == nil })
	a.wantPods("c1")
}

// The datapath is loaded anew while an Add is under way: the Add attached to the
// old one and has no row yet, and still its pod is attached to the new one.
func TestReattachWaitsForAdd(t *testing.T) {
	w := newWorld(t)
	a := w.start()
	a.workload("web")
	pod := nstest.New(t)
	var mu sync.Mutex
	calls := 0
	attached, proceed := make(chan struct{}), make(chan struct{})
	w.datapath.setHook(func(string, *state.Pod) {
		mu.Lock()
		calls++
		first := calls == 1
		mu.Unlock()
		if first {
			close(attached)
			<-proceed
		}
	})
	added, reattached := make(chan error, 1), make(chan error, 1)
	go func() {
		_, err := a.Add(t.Context(), addRequest("c1", "web", pod))
		added <- err
	}()
	<-attached
	go func() { reattached <- a.Reattach(t.Context()) }()
	eventually(t, "Reattach waits for the container", func() bool {
		a.locks.mu.Lock()
		defer a.locks.mu.Unlock()
		return a.locks.held["c1"].users == 2
	})
	close(proceed)
	must(t, <-added)
	must(t, <-reattached)
	if calls != 2 {
		t.Errorf("the pod was attached %d times, want once by Add and once by Reattach", calls)
	}
}

// Reattach waits its turn, and then does what the pod needs by then: nothing for
// one that has gone, the new identity for one that has another.
func TestReattachRereads(t *testing.T) {
	w := newWorld(t)
	a := w.start()
	for _, name := range []string{"stays", "goes"} {
		a.workload(name)
		_, err := a.Add(t.Context(), addRequest(name, name, nstest.New(t)))
		must(t, err)
	}
	ctx := t.Context()
	unlock := map[string]func(){}
	for _, name := range []string{"stays", "goes"} {
		var err error
		unlock[name], err = a.locks.lock(ctx, name)
		must(t, err)
	}
	done := make(chan error, 1)
	go func() { done <- a.Reattach(ctx) }()
	eventually(t, "Reattach waits for both", func() bool {
		a.locks.mu.Lock()
		defer a.locks.mu.Unlock()
		return a.locks.held["stays"].users == 2 && a.locks.held["goes"].users == 2
	})
	must(t, a.remove(ctx, ipam.Key{ContainerID: "goes", Interface: "eth0"}))
	a.workload("stays", func(w *state.Workload) { w.Labels = map[string]string{"app": "relabelled"} })
	wl, _, _ := a.tables.Workloads.Get(a.tables.DB.ReadTxn(), state.WorkloadByName.Query("shop/stays"))
	ns, _, _ := a.tables.Namespaces.Get(a.tables.DB.ReadTxn(), state.NamespaceByName.Query("shop"))
	must(t, a.reidentify(ctx, ipam.Key{ContainerID: "stays", Interface: "eth0"}, basis{wl, ns}))
	unlock["stays"]()
	unlock["goes"]()
	must(t, <-done)
	a.wantPods("stays")
	row, _ := a.row("stays")
	want := identityOf("shop", map[string]string{"team": "a"}, "default", map[string]string{"app": "relabelled"})
	if got := w.datapath.get("stays").Identity; got != want || row.Identity != want {
		t.Errorf("identity %d in force, %d in the row, want %d", got, row.Identity, want)
	}
}

// A pod whose link was taken away from below is left to its Del.
func TestReattachWithoutLink(t *testing.T) {
	w := newWorld(t)
	a := w.start()
	a.workload("web")
	_, err := a.Add(t.Context(), addRequest("c1", "web", nstest.New(t)))
	must(t, err)
	must(t, a.net.DeleteLink(netdev.HostName("c1/eth0")))
	w.datapath.setHook(func(verb string, _ *state.Pod) { t.Errorf("%s of a pod without a link", verb) })
	must(t, a.Reattach(t.Context()))
	_, err = a.Ready(t.Context(), nil)
	must(t, err)
	w.datapath.setHook(nil)
	must(t, a.del("c1"))
	a.wantPods()
}

func TestReattachIsGivenUp(t *testing.T) {
	w := newWorld(t)
	a := w.start()
	a.workload("web")
	_, err := a.Add(t.Context(), addRequest("c1", "web", nstest.New(t)))
	must(t, err)
	unlock, err := a.locks.lock(t.Context(), "c1")
	must(t, err)
	defer unlock()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	wantError(t, a.Reattach(ctx), "wait for container c1")
}

// A pending pod is recorded, although it has no row.
func TestRecorded(t *testing.T) {
	w := newWorld(t)
	a := w.start()
	a.workload("web")
	_, err := a.Add(t.Context(), addRequest("c1", "web", nstest.New(t)))
	must(t, err)
	row, _ := a.row("c1")
	a.close()
	w.datapath.setFail(errors.New("map is full"))
	b := w.start()
	if _, ok := b.row("c1"); ok {
		t.Fatal("the pod has a row: this test tests nothing")
	}
	list, err := b.Recorded()
	must(t, err)
	if len(list) != 1 || list[0].Interface != row.Interface || list[0].Ifindex != row.Ifindex || list[0].Identity != row.Identity {
		t.Errorf("recorded: %+v, want %+v", list, row)
	}
	if n, err := LargestIdentity(b.pool.All()); n != row.Identity || err != nil {
		t.Errorf("largest identity %d, %v: want %d", n, err, row.Identity)
	}
}

// New pods follow the MTU, old ones keep theirs.
func TestSetMTU(t *testing.T) {
	w := newWorld(t)
	a := w.start()
	a.workload("web")
	old, fresh := nstest.New(t), nstest.New(t)
	_, err := a.Add(t.Context(), addRequest("c1", "web", old))
	must(t, err)
	must(t, a.SetMTU(1400))
	wantError(t, a.SetMTU(1000), "MTU 1000 of pods: want at least 1280")
	r, err := a.Add(t.Context(), addRequest("c2", "web", fresh))
	must(t, err)
	if r.Mtu != 1400 {
		t.Errorf("the new pod has MTU %d", r.Mtu)
	}
	must(t, a.Reattach(t.Context()))
	must(t, a.check("c1", old))
	must(t, a.check("c2", fresh))
}
