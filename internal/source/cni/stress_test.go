// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
	"github.com/weft-mesh/weft/internal/netdev/nstest"
	"github.com/weft-mesh/weft/internal/source/cni/plugin"
	"github.com/weft-mesh/weft/internal/source/cni/tombstone"
)

const (
	rounds  = 1000
	workers = 50
)

// serve puts the agent's service on its socket; stop is as sudden as a kill.
func (a *agent) serve() (stop func()) {
	a.w.t.Helper()
	l, err := net.Listen("unix", a.w.socket())
	must(a.w.t, err)
	s := grpc.NewServer(grpc.UnaryInterceptor(a.deadSilence))
	weftv1.RegisterCniServer(s, a.Server)
	go func() { _ = s.Serve(l) }()
	return func() {
		a.gate.kill()
		s.Stop()
		a.close()
	}
}

// deadSilence lets nothing that a killed agent would still say through.
func (a *agent) deadSilence(ctx context.Context, req any, _ *grpc.UnaryServerInfo, h grpc.UnaryHandler) (any, error) {
	resp, err := h(ctx, req)
	if a.gate.isDead() {
		return nil, status.Error(codes.Unavailable, "connection lost")
	}
	return resp, err
}

func (w *world) socket() string { return filepath.Join(w.dir, "weft.sock") }

// runtime calls the plugin as a container runtime does.
type runtime struct {
	w *world
	// live has the owner of each address from its ADD until its release may
	// have been asked for.
	live sync.Map
	up   door
	adds atomic.Int64
	lost atomic.Int64
}

// door is open while an agent serves.
type door struct{ mu sync.RWMutex }

func (d *door) shut() { d.mu.Lock() }
func (d *door) open() { d.mu.Unlock() }
func (d *door) wait() {
	d.mu.RLock()
	defer d.mu.RUnlock()
}

func (r *runtime) plugin(out *bytes.Buffer) *plugin.Plugin {
	return &plugin.Plugin{Stdout: out, Timeouts: plugin.DefaultTimeouts}
}

func (r *runtime) args(container string, ns *nstest.NS, extra map[string]any) *skel.CmdArgs {
	conf := map[string]any{"cniVersion": "1.1.0", "name": "weft", "type": "weft-cni", "socket": r.w.socket(), "stateDir": filepath.Join(r.w.dir, "cni")}
	for k, v := range extra {
		conf[k] = v
	}
	b, err := json.Marshal(conf)
	must(r.w.t, err)
	a := &skel.CmdArgs{ContainerID: container, IfName: "eth0", StdinData: b, Args: "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web"}
	if ns != nil {
		a.Netns = ns.Path()
	}
	return a
}

// add repeats an ADD, each time with a new sandbox, until an agent serves it.
func (r *runtime) add(id string, ns *nstest.NS) (container string, ips []string, prev any, err error) {
	for try := 0; ; try++ {
		container = fmt.Sprintf("%s-%d", id, try)
		var out bytes.Buffer
		err := r.plugin(&out).Add(r.args(container, ns, nil))
		if err == nil {
			var res current.Result
			if err := json.Unmarshal(out.Bytes(), &res); err != nil {
				return "", nil, nil, err
			}
			for _, ip := range res.IPs {
				ips = append(ips, ip.Address.String())
			}
			r.adds.Add(1)
			return container, ips, json.RawMessage(out.Bytes()), r.take(container, ips)
		}
		var e *types.Error
		if !errors.As(err, &e) || e.Code != types.ErrTryAgainLater {
			return "", nil, nil, fmt.Errorf("ADD %s: %w", container, err)
		}
		if err := r.del(container, ns, nil); err != nil {
			return "", nil, nil, err
		}
		r.up.wait()
	}
}

func (r *runtime) take(container string, ips []string) error {
	for _, ip := range ips {
		if other, dup := r.live.LoadOrStore(ip, container); dup {
			return fmt.Errorf("%s and %s both have %s", container, other, ip)
		}
	}
	return nil
}

func (r *runtime) leave(ips []string) {
	for _, ip := range ips {
		r.live.Delete(ip)
	}
}

func (r *runtime) check(container string, ns *nstest.NS, prev any) error {
	for {
		err := r.plugin(nil).Check(r.args(container, ns, map[string]any{"prevResult": prev}))
		var e *types.Error
		if !errors.As(err, &e) || e.Code != types.ErrTryAgainLater {
			return err
		}
		if e.Details == "" { // the agent answered
			return err
		}
		r.up.wait()
	}
}

func (r *runtime) del(container string, ns *nstest.NS, ips []string) error {
	r.leave(ips)
	var errs error
	for range 3 { // a runtime repeats a DEL that failed
		if errs = r.plugin(nil).Del(r.args(container, ns, nil)); errs == nil {
			return nil
		}
	}
	return fmt.Errorf("DEL %s: %w", container, errs)
}

// work is what one of many threads of the runtime does.
func (r *runtime) work(worker int, left *atomic.Int64, keep func(*nstest.NS)) error {
	rnd := rand.New(rand.NewPCG(uint64(worker), 7))
	ns := nstest.New(r.w.t)
	for i := 0; left.Add(-1) >= 0; i++ {
		container, ips, prev, err := r.add(fmt.Sprintf("w%d-%d", worker, i), ns)
		if err != nil {
			return err
		}
		if err := r.check(container, ns, prev); err != nil {
			return fmt.Errorf("CHECK %s: %w", container, err)
		}
		switch rnd.IntN(6) {
		case 0: // the DEL is lost, and the namespace goes
			r.lost.Add(1)
			r.leave(ips)
			ns.Close()
			ns = nstest.New(r.w.t)
		case 1: // the DEL is lost, and the namespace stays
			r.lost.Add(1)
			keep(ns)
			ns = nstest.New(r.w.t)
		default:
			if err := r.del(container, ns, ips); err != nil {
				return err
			}
		}
	}
	keep(ns)
	return nil
}

// A thousand pods, fifty at a time, a third of the DELs lost, the agent killed
// and started again in between: no address is ever given to two, and after a GC
// nothing is left.
func TestThousandRounds(t *testing.T) {
	w := newWorld(t)
	w.cidrs = []netip.Prefix{netip.MustParsePrefix("10.244.0.0/22"), netip.MustParsePrefix("fd00:10:244:1::/64")}
	w.quarantine = 200 * time.Millisecond
	r := &runtime{w: w}
	var left atomic.Int64
	left.Store(rounds)
	var keepMu sync.Mutex
	var kept []*nstest.NS // so that they are not closed before the GC
	keep := func(ns *nstest.NS) {
		keepMu.Lock()
		defer keepMu.Unlock()
		kept = append(kept, ns)
	}
	a := w.start()
	a.workload("web")
	stop := a.serve()
	start := time.Now()
	errs := make(chan error, workers)
	for i := range workers {
		go func() { errs <- r.work(i, &left, keep) }()
	}
	restarts := 0
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for n := 0; n < workers; {
		select {
		case err := <-errs:
			n++
			if err != nil {
				t.Error(err)
			}
		case <-tick.C:
			// Another tenth is done.
			if int(rounds-left.Load())/(rounds/10) > restarts {
				restarts++
				r.up.shut()
				stop()
				a = w.start()
				a.workload("web")
				stop = a.serve()
				r.up.open()
			}
		}
	}
	t.Logf("%d ADDs, %d DELs lost, %d restarts: %s", r.adds.Load(), r.lost.Load(), restarts, time.Since(start).Round(time.Millisecond))
	if restarts == 0 || r.lost.Load() < rounds/5 {
		t.Errorf("%d restarts, %d DELs lost: the test tests nothing", restarts, r.lost.Load())
	}
	before := len(a.pool.All())
	must(t, r.plugin(nil).GC(r.args("", nil, map[string]any{"cni.dev/valid-attachments": []any{}})))
	t.Logf("GC released %d of %d", before-len(a.pool.All()), before)
	a.wantPods()
	for _, u := range a.pool.Usage() {
		if u.Allocated != 0 {
			t.Errorf("usage %+v", u)
		}
	}
	eventually(t, "every address is free again", func() bool {
		for _, u := range a.pool.Usage() {
			if u.Free != u.Size {
				return false
			}
		}
		return true
	})
	if list, err := tombstone.List(filepath.Join(w.dir, "cni")); len(list) != 0 || err != nil {
		t.Errorf("tombstones: %v %v", list, err)
	}
	stop()
}
