// SPDX-License-Identifier: Apache-2.0

package xdp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/cilium/ebpf"

	"github.com/weft-mesh/weft/internal/addr"
	"github.com/weft-mesh/weft/internal/datapath/pin"
	"github.com/weft-mesh/weft/internal/netdev"
)

// Net is the part of netdev.Net that a Keeper needs.
type Net interface {
	Neighbors(device int) ([]netdev.Neighbor, error)
	WatchNeighbors(ctx context.Context, device int) (<-chan struct{}, error)
	KeepNeighbor(device int, a netip.Addr) error
	ForgetNeighbor(device int, a netip.Addr) error
	NextHop(device int, to netip.Addr) (netip.Addr, error)
}

// routesInterval is how often the next hops are asked for again.
const routesInterval = 30 * time.Second

// Keeper keeps the hardware addresses that frames to other nodes go to, as the
// kernel's neighbour table has them. A node that is not known yet is left to
// tcx.
type Keeper struct {
	net    Net
	device int
	hops   *ebpf.Map
	log    *slog.Logger
	wake   chan struct{} // holds one value when want changed

	mu   sync.Mutex
	want []netip.Addr // protected by mu; nil until told

	// Of Run alone.
	routes map[netip.Addr]netip.Addr // from a node to the next hop
	kept   map[netip.Addr]bool       // next hops that the kernel keeps for us
}

// NewKeeper returns a Keeper for the device with that index.
func NewKeeper(n Net, maps *pin.Maps, device int, log *slog.Logger) *Keeper {
	return &Keeper{
		net: n, device: device, hops: maps.Map("weft_neighbors"), log: log, wake: make(chan struct{}, 1),
		kept: map[netip.Addr]bool{},
	}
}

// Want sets the addresses of all other nodes.
func (k *Keeper) Want(nodes []netip.Addr) {
	k.mu.Lock()
	k.want = append([]netip.Addr{}, nodes...) // not nil, also without nodes
	k.mu.Unlock()
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// Run keeps the addresses until ctx ends. What it leaves in the map stays in
// force for the next agent.
func (k *Keeper) Run(ctx context.Context) error {
	changed, err := k.net.WatchNeighbors(ctx, k.device)
	if err != nil {
		return err
	}
	ticker := time.NewTicker(routesInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case _, ok := <-changed:
			if !ok {
				return nil
			}
			err = k.sync()
		case <-ticker.C:
			err = errors.Join(k.route(), k.sync())
		case <-k.wake:
			err = errors.Join(k.route(), k.sync())
		}
		if err != nil {
			k.log.Warn("next hops of XDP are not all in force: tcx does the work", "err", err)
		}
	}
}

// route finds the next hop of each node.
func (k *Keeper) route() error {
	k.mu.Lock()
	want := k.want
	k.mu.Unlock()
	if want == nil {
		return nil // not told yet: what an earlier agent left stays
	}
	var errs []error
	routes := map[netip.Addr]netip.Addr{}
	for _, node := range want {
		hop, err := k.net.NextHop(k.device, node)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		if hop.IsValid() {
			routes[node] = hop
		}
	}
	k.routes = routes
	return errors.Join(errs...)
}

// sync makes the map like the kernel's table.
func (k *Keeper) sync() error {
	if k.routes == nil {
		return nil
	}
	list, err := k.net.Neighbors(k.device)
	if err != nil {
		return err
	}
	known := map[netip.Addr]netdev.Neighbor{}
	for _, n := range list {
		known[n.Addr] = n
	}
	errs := []error{k.keep(known)}
	for node, hop := range k.routes {
		if mac := known[hop].MAC; len(mac) == 6 {
			errs = append(errs, k.put(node, mac))
		}
	}
	return errors.Join(append(errs, k.prune(known))...)
}

// keep has the kernel keep every next hop, and those no more that are none.
func (k *Keeper) keep(known map[netip.Addr]netdev.Neighbor) error {
	var errs []error
	hops := map[netip.Addr]bool{}
	for _, hop := range k.routes {
		hops[hop] = true
	}
	for hop := range hops {
		if !known[hop].Kept {
			if err := k.net.KeepNeighbor(k.device, hop); err != nil {
				errs = append(errs, err)
				continue
			}
		}
		k.kept[hop] = true
	}
	for hop := range k.kept {
		if !hops[hop] {
			errs = append(errs, k.net.ForgetNeighbor(k.device, hop))
			delete(k.kept, hop)
		}
	}
	return errors.Join(errs...)
}

func (k *Keeper) put(node netip.Addr, mac net.HardwareAddr) error {
	key, want := pin.KernelAddr{B: addr.To16(node)}, pin.KernelNeighbor{Mac: [6]byte(mac)}
	var have pin.KernelNeighbor
	if err := k.hops.Lookup(&key, &have); err == nil && have == want {
		return nil
	}
	if err := k.hops.Put(&key, &want); err != nil {
		return fmt.Errorf("enter next hop %s of node %s: %w", mac, node, err)
	}
	return nil
}

// prune takes out who is no node any more, or has no known next hop.
func (k *Keeper) prune(known map[netip.Addr]netdev.Neighbor) error {
	var (
		key  pin.KernelAddr
		n    pin.KernelNeighbor
		gone []pin.KernelAddr
		rows = k.hops.Iterate()
	)
	for rows.Next(&key, &n) {
		hop, ok := k.routes[addr.From16(key.B)]
		if !ok || len(known[hop].MAC) != 6 {
			gone = append(gone, key)
		}
	}
	if err := rows.Err(); err != nil {
		return fmt.Errorf("walk the next hops: %w", err)
	}
	for _, key := range gone {
		if err := k.hops.Delete(&key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("remove next hop of %s: %w", addr.From16(key.B), err)
		}
	}
	return nil
}
