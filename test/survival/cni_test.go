// SPDX-License-Identifier: Apache-2.0

package survival

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/weft-mesh/weft/internal/ipam"
	"github.com/weft-mesh/weft/internal/netdev"
	"github.com/weft-mesh/weft/test/testlab"
)

const (
	rounds     = 1000
	restarts   = 8                // of the agent while the rounds run
	quarantine = 60 * time.Second // an address rests for that long
	tryTime    = 2 * time.Minute  // for an ADD, with agents that die in between
)

// owners knows who has which address, and since when the others are free.
type owners struct {
	mu    sync.Mutex
	now   map[netip.Addr]string    // protected by mu
	freed map[netip.Addr]time.Time // protected by mu
}

// take notes what an ADD gave; nobody else may have it.
func (o *owners) take(id string, ips []netip.Addr) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, ip := range ips {
		if other, ok := o.now[ip]; ok {
			return fmt.Errorf("%s was given to %s while %s has it", ip, id, other)
		}
		if at, ok := o.freed[ip]; ok && time.Since(at) < quarantine {
			return fmt.Errorf("%s was given to %s %v after it was released", ip, id, time.Since(at))
		}
		o.now[ip] = id
	}
	return nil
}

// give notes a DEL.
func (o *owners) give(ips []netip.Addr) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, ip := range ips {
		delete(o.now, ip)
		o.freed[ip] = time.Now()
	}
}

// TestThousandPods is a runtime's life with the real plugin and the real agent:
// 1,000 ADD, CHECK and DEL, 50 at the same time, a third of the DELs never made,
// the agent killed and started in between. After a GC that names nobody
// everything is free again.
func TestThousandPods(t *testing.T) {
	n := newLonely(t)
	o := &owners{now: map[netip.Addr]string{}, freed: map[netip.Addr]time.Time{}}
	var next, done, retries atomic.Int64
	began := time.Now()
	g, ctx := errgroup.WithContext(t.Context())
	for w := range lonelyPods {
		g.Go(func() error {
			for ctx.Err() == nil {
				i := next.Add(1)
				if i > rounds {
					return nil
				}
				again, err := n.round(ctx, o, int(i), fmt.Sprintf("p%d", w))
				if err != nil {
					return fmt.Errorf("round %d: %w", i, err)
				}
				retries.Add(int64(again))
				done.Add(1)
			}
			return nil
		})
	}
	g.Go(func() error { return n.killBetween(ctx, &done) })
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d rounds in %v, %d kills of the agent, %d calls repeated", rounds, time.Since(began).Round(time.Millisecond), restarts, retries.Load())
	t.Logf("before GC: %d addresses taken, %d pod links", len(o.now), len(n.podLinks(t)))
	n.collect(t)
	n.checkEmpty(t)
}

// killBetween kills and starts the agent each time when a part of the rounds is
// done.
func (n *lonely) killBetween(ctx context.Context, done *atomic.Int64) error {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for i := range restarts {
		for done.Load() < int64((i+1)*rounds/(restarts+1)) {
			select {
			case <-tick.C:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		if err := n.agent.Kill(); err != nil {
			return err
		}
		if err := n.agent.Start(); err != nil {
			return err
		}
	}
	return nil
}

// round is the life of one pod; again is how many calls had to be repeated
// because the agent died.
func (n *lonely) round(ctx context.Context, o *owners, i int, pod string) (again int, err error) {
	netns := fmt.Sprintf("%s%d", n.layout.NetNSPrefix(), i)
	if err := netdev.CreateNetNS(netns); err != nil {
		return 0, err
	}
	c := container{id: fmt.Sprintf("%064x", i), netns: netdev.NetNSPath(netns), pod: pod}
	var ips []netip.Addr
	again, err = repeat(ctx, func() (err error) {
		ips, err = n.cni.add(ctx, c)
		return err
	})
	if err != nil {
		return again, err
	}
	if err := o.take(c.id, ips); err != nil {
		return again, err
	}
	more, err := repeat(ctx, func() error { return n.cni.check(ctx, c) })
	if again += more; err != nil {
		return again, err
	}
	switch i % 6 {
	case 0: // the DEL is lost, and the pod's network stays
		return again, nil
	case 3: // the DEL is lost
		return again, netdev.DeleteNetNS(netns)
	}
	o.give(ips) // noted before: the next one may have it the moment it is free
	if err := n.cni.del(ctx, c); err != nil {
		return again, err // a DEL succeeds without an agent, too
	}
	if i%5 == 0 {
		if err := n.cni.del(ctx, c); err != nil {
			return again, fmt.Errorf("repeated: %w", err)
		}
	}
	return again, netdev.DeleteNetNS(netns)
}

// repeat calls again and again until there is no error.
func repeat(ctx context.Context, call func() error) (again int, err error) {
	ctx, cancel := context.WithTimeout(ctx, tryTime)
	defer cancel()
	tick := time.NewTicker(300 * time.Millisecond)
	defer tick.Stop()
	for {
		if err = call(); err == nil {
			return again, nil
		}
		again++
		select {
		case <-tick.C:
		case <-ctx.Done():
			return again, err
		}
	}
}

// collect is a runtime that starts with nothing: it has forgotten what it did,
// and tells the plugin that no pod is there.
func (n *lonely) collect(t *testing.T) {
	t.Helper()
	if err := os.RemoveAll(n.cacheDir()); err != nil {
		t.Fatal(err)
	}
	if _, err := repeat(t.Context(), func() error { return n.cni.gc(t.Context()) }); err != nil {
		t.Fatal(err)
	}
}

func (n *lonely) checkEmpty(t *testing.T) {
	t.Helper()
	await(t, waitTime, func() error {
		out, err := n.lab.Weft(t.Context(), "table", "list", "pod", "-o", "json", "--socket", n.layout.NodeSocket(lonelyName))
		if err != nil {
			return err
		}
		var rows []json.RawMessage
		if err := json.Unmarshal([]byte(out), &rows); err != nil {
			return err
		}
		if len(rows) > 0 {
			return fmt.Errorf("%d pods are in the table", len(rows))
		}
		return nil
	})
	if left := n.podLinks(t); len(left) > 0 {
		t.Errorf("%d links are left: %v", len(left), left)
	}
	await(t, waitTime, func() error {
		tombstones, err := os.ReadDir(filepath.Join(n.stateDir(), "del"))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if len(tombstones) > 0 {
			return fmt.Errorf("%d tombstones are left", len(tombstones))
		}
		return nil
	})
	st := agentStatus(t, n.lab, n.layout.NodeSocket(lonelyName))
	for _, p := range st.Programs {
		if p.Device != "eth0" {
			t.Errorf("program %s is still attached to %s", p.Name, p.Device)
		}
	}
	n.checkAddresses(t)
}

// checkAddresses reads the address file once the agent is gone.
func (n *lonely) checkAddresses(t *testing.T) {
	t.Helper()
	if err := n.agent.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	boot, err := ipam.BootID()
	if err != nil {
		t.Fatal(err)
	}
	pool, err := ipam.Open(ipam.Options{
		Path: filepath.Join(n.layout.NodeDir(lonelyName), "ipam.json"), CIDRs: n.cidrs,
		BootID: boot, Now: ipam.SinceBoot, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	for _, u := range pool.Usage() {
		t.Logf("%s: %d addresses, %d allocated, %d resting", u.CIDR, u.Size, u.Allocated, u.Quarantined)
		if u.Allocated != 0 {
			t.Errorf("%s: %d addresses are allocated, want none", u.CIDR, u.Allocated)
		}
	}
}

// agentStatus asks an agent by its socket.
func agentStatus(t *testing.T, l *testlab.Lab, socket string) *testlab.AgentStatus {
	t.Helper()
	var st testlab.AgentStatus
	if err := json.Unmarshal([]byte(l.Must(t, "status", "-o", "json", "--socket", socket)), &st); err != nil {
		t.Fatal(err)
	}
	return &st
}
