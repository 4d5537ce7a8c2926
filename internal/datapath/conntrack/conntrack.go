// SPDX-License-Identifier: Apache-2.0

// Package conntrack collects what is over from the kernel's connection table
// and from the masquerading table that hangs on it.
package conntrack

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weft-mesh/weft/internal/datapath/pin"
	"github.com/weft-mesh/weft/internal/datapath/setting"
)

// batch is how many entries one system call reads.
const batch = 4096

// Collector deletes expired connections. The datapath never uses an expired
// entry, so a late collection costs memory only.
type Collector struct {
	conntrack, nat   *ebpf.Map
	endpoints, quota *ebpf.Map
	lifetimes        setting.Lifetimes
	log              *slog.Logger
	// orphans are NAT entries without a connection at the last pass: a second
	// pass in a row deletes them, for the datapath makes them just before it
	// writes their port into the connection.
	orphans map[pin.KernelNatKey]bool

	live, natLive atomic.Uint64
	deleted       atomic.Uint64
}

// New returns a collector for the tables of m.
func New(m *pin.Maps, l setting.Lifetimes, log *slog.Logger) *Collector {
	return &Collector{
		conntrack: m.Map("weft_conntrack"),
		nat:       m.Map("weft_nat"),
		endpoints: m.Map("weft_endpoints"),
		quota:     m.Map("weft_quota"),
		lifetimes: l,
		log:       log,
		orphans:   map[pin.KernelNatKey]bool{},
	}
}

// minInterval and maxInterval bound the time between two passes.
const (
	minInterval = time.Second
	maxInterval = 30 * time.Second
)

// Run collects until ctx ends, the more often the fuller the table is.
func (c *Collector) Run(ctx context.Context) error {
	for {
		if err := c.Collect(); err != nil {
			c.log.Error("conntrack collection", "err", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(c.interval()):
		}
	}
}

func (c *Collector) interval() time.Duration {
	free := 1 - float64(c.live.Load())/float64(c.conntrack.MaxEntries())
	return minInterval + time.Duration(free*free*free*free*float64(maxInterval-minInterval))
}

// Stats are counts of the collector.
type Stats struct {
	Live    uint64 // connections after the last pass
	NAT     uint64 // masqueraded ones
	Deleted uint64 // by this agent, both tables
}

// Stats returns the counts after the last pass.
func (c *Collector) Stats() Stats {
	return Stats{c.live.Load(), c.natLive.Load(), c.deleted.Load()}
}

// Collect makes one pass over both tables.
func (c *Collector) Collect() error {
	now, err := monotonicSeconds()
	if err != nil {
		return err
	}
	pods, err := c.localPods()
	if err != nil {
		return err
	}
	live, err := c.collectConnections(now, pods)
	if err != nil {
		return err
	}
	if err := c.correctQuota(pods); err != nil {
		return err
	}
	c.live.Store(live)
	natLive, err := c.collectNAT()
	if err != nil {
		return err
	}
	c.natLive.Store(natLive)
	return nil
}

func monotonicSeconds() (uint32, error) {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		return 0, fmt.Errorf("read the monotonic clock: %w", err)
	}
	return uint32(ts.Sec), nil
}

// localPods returns a count of 0 for each address of a pod of this node.
func (c *Collector) localPods() (map[pin.KernelAddr]uint64, error) {
	pods := map[pin.KernelAddr]uint64{}
	err := walk(c.endpoints, func(a *pin.KernelAddr, _ *pin.KernelEndpoint) error {
		pods[*a] = 0
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list endpoints: %w", err)
	}
	return pods, nil
}

// owner is the end whose quota a connection counts for, which the datapath wrote
// into it.
func owner(k *pin.KernelCtKey, e *pin.KernelCtEntry) pin.KernelAddr {
	has := func(f pin.KernelCtFlag) bool { return e.Flags&uint32(f) != 0 }
	if has(pin.KernelCtFlagCT_FROM_A) == has(pin.KernelCtFlagCT_OWNED_ORIG) {
		return k.A
	}
	return k.B
}

// count adds a live connection to the pod of this node that it counts for; one
// that is closed, or whose pod is gone, counts for nobody.
func count(pods map[pin.KernelAddr]uint64, k *pin.KernelCtKey, e *pin.KernelCtEntry) {
	if e.Flags&uint32(pin.KernelCtFlagCT_CLOSED) != 0 {
		return
	}
	a := owner(k, e)
	if n, ok := pods[a]; ok {
		pods[a] = n + 1
	}
}

// correctQuota sets the counters of the datapath, which only go up, to what
// was counted, and forgets those of pods that are gone.
func (c *Collector) correctQuota(pods map[pin.KernelAddr]uint64) error {
	var gone []pin.KernelAddr
	err := walk(c.quota, func(a *pin.KernelAddr, _ *uint64) error {
		if _, ok := pods[*a]; !ok {
			gone = append(gone, *a)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("list quota: %w", err)
	}
	for _, a := range gone {
		if err := c.quota.Delete(a); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("delete a quota: %w", err)
		}
	}
	for a, n := range pods {
		if err := c.quota.Put(a, n); err != nil {
			return fmt.Errorf("correct a quota: %w", err)
		}
	}
	return nil
}

func (c *Collector) collectConnections(now uint32, pods map[pin.KernelAddr]uint64) (live uint64, err error) {
	err = walk(c.conntrack, func(k *pin.KernelCtKey, e *pin.KernelCtEntry) error {
		if !c.expired(k, e, now) {
			live++
			count(pods, k, e)
			return nil
		}
		// it may have seen a packet since the batch was read
		var again pin.KernelCtEntry
		if err := c.conntrack.Lookup(k, &again); err == nil && !c.expired(k, &again, now) {
			live++
			count(pods, k, e)
			return nil
		}
		return c.remove(c.conntrack, k)
	})
	if err != nil {
		return 0, fmt.Errorf("collect connections: %w", err)
	}
	return live, nil
}

func (c *Collector) collectNAT() (live uint64, err error) {
	orphans := map[pin.KernelNatKey]bool{}
	err = walk(c.nat, func(k *pin.KernelNatKey, e *pin.KernelNatEntry) error {
		if c.used(k, e) {
			live++
			return nil
		}
		if c.orphans[*k] {
			return c.remove(c.nat, k)
		}
		orphans[*k] = true
		live++
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("collect masqueraded connections: %w", err)
	}
	c.orphans = orphans
	return live, nil
}

// used says whether the connection of a NAT entry exists and has its port.
func (c *Collector) used(k *pin.KernelNatKey, e *pin.KernelNatEntry) bool {
	var ct pin.KernelCtEntry
	remotePort := k.RemotePort
	if k.Protocol == unix.IPPROTO_ICMP || k.Protocol == unix.IPPROTO_ICMPV6 {
		remotePort = e.PodPort // the echo identifier plays the part of both ports
	}
	key := Key(e.Pod, k.Remote, e.PodPort, remotePort, k.Protocol)
	if err := c.conntrack.Lookup(&key, &ct); err != nil {
		return !errors.Is(err, ebpf.ErrKeyNotExist)
	}
	return ct.NatPort == uint32(k.NatPort)
}

func (c *Collector) remove(m *ebpf.Map, key any) error {
	if err := m.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	c.deleted.Add(1)
	return nil
}

// expired mirrors ct_expired of bpf/lib/conntrack.h.
func (c *Collector) expired(k *pin.KernelCtKey, e *pin.KernelCtEntry, now uint32) bool {
	return int64(int32(now-e.LastSeen)) > int64(lifetime(c.lifetimes, k.Protocol, e.Flags)/time.Second)
}

func lifetime(l setting.Lifetimes, protocol uint8, flags uint32) time.Duration {
	const bothFins = uint32(pin.KernelCtFlagCT_FIN_ORIG | pin.KernelCtFlagCT_FIN_REPLY)
	has := func(f pin.KernelCtFlag) bool { return flags&uint32(f) != 0 }
	switch protocol {
	case unix.IPPROTO_TCP:
		if has(pin.KernelCtFlagCT_RST) || flags&bothFins == bothFins {
			return l.TCPClosing
		}
		if has(pin.KernelCtFlagCT_ESTABLISHED) {
			return l.TCPEstablished
		}
		return l.TCPSyn
	case unix.IPPROTO_UDP:
		if has(pin.KernelCtFlagCT_REPLIED) {
			return l.UDPReplied
		}
		return l.UDP
	}
	return l.Other
}

// Key builds the key of a connection from either end, as ct_key_of of
// bpf/lib/conntrack.h does. Ports are in network order, as read from memory.
func Key(src, dst pin.KernelAddr, sport, dport uint16, protocol uint8) pin.KernelCtKey {
	if less(src, dst) || src == dst && sport <= dport {
		return pin.KernelCtKey{A: src, B: dst, A_port: sport, B_port: dport, Protocol: protocol}
	}
	return pin.KernelCtKey{A: dst, B: src, A_port: dport, B_port: sport, Protocol: protocol}
}

// walk calls f with every entry of m, read in batches.
func walk[K, V any](m *ebpf.Map, f func(*K, *V) error) error {
	keys, values := make([]K, batch), make([]V, batch)
	var cursor ebpf.MapBatchCursor
	for {
		n, err := m.BatchLookup(&cursor, keys, values, nil)
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("read a batch: %w", err)
		}
		for i := range n {
			if err := f(&keys[i], &values[i]); err != nil {
				return err
			}
		}
		if err != nil {
			return nil
		}
	}
}
