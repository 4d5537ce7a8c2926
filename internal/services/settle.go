// SPDX-License-Identifier: Apache-2.0

package services

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/weft-mesh/weft/internal/balance"
	"github.com/weft-mesh/weft/internal/datapath/service"
	"github.com/weft-mesh/weft/internal/netdev"
	"github.com/weft-mesh/weft/internal/state"
)

// minPass and maxPass bound the time between two walks over the translated
// connections: the fuller their map, the shorter.
const (
	minPass = time.Second
	maxPass = 30 * time.Second
)

// settleConnections ends the connections that must not go on. A backend that has
// left its service port
//   - gets no new connection, and no client stays with it,
//   - keeps its TCP connections until they end, or its pod is gone,
//   - keeps datagrams that are sent to it as long as its endpoint serves, as one
//     that terminates may: then they go to another backend, and sockets that are
//     connected to it are cut.
//
// Backends of a service port that is gone have left, too. One that comes back,
// also in a port that had none, is another backend, so that nothing old is its.
func (d *Driver) settleConnections(ctx context.Context) error {
	for {
		if err := d.pass(); err != nil {
			d.cfg.Log.Error("collect connections of services", "err", err)
		}
		for next := time.After(d.untilPass()); next != nil; {
			select {
			case <-ctx.Done():
				return nil
			case <-next:
				next = nil
			case <-d.wake:
				if err := d.settle(); err != nil {
					d.cfg.Log.Error("end connections of services", "err", err)
				}
			}
		}
	}
}

func (d *Driver) untilPass() time.Duration {
	free := 1 - d.cfg.Connections.Stats().Full
	return minPass + time.Duration(free*free*free*free*float64(maxPass-minPass))
}

// settle is for backends that have left. The first Collect waits for programs
// that had just chosen one.
func (d *Driver) settle() error {
	if err := d.cfg.Writer.Collect(); err != nil {
		return err
	}
	over := d.over()
	if len(over) == 0 {
		return nil
	}
	if err := d.end(over); err != nil {
		d.mu.Lock()
		for id, l := range over { // and again at the next change or pass
			d.left[id] = l
		}
		d.mu.Unlock()
		return err
	}
	d.cfg.Writer.Release(slices.Collect(maps.Values(over)))
	if err := d.cfg.Writer.Collect(); err != nil {
		return err
	}
	d.retry() // there may be room now
	return nil
}

// over takes the backends whose connections end now.
func (d *Driver) over() map[uint32]service.Left {
	d.mu.Lock()
	defer d.mu.Unlock()
	out := map[uint32]service.Left{}
	for id, l := range d.left {
		if l.Name.Protocol != corev1.ProtocolTCP && d.serves(&l) {
			continue
		}
		out[id] = l
		delete(d.left, id)
	}
	return out
}

// end ends them. That a client stayed with one is left to be overwritten: programs
// see that its set has it no more, and deleting what the client has by now would
// move it again.
func (d *Driver) end(over map[uint32]service.Left) error {
	datagrams := false
	for _, l := range over {
		datagrams = datagrams || l.Name.Protocol != corev1.ProtocolTCP
	}
	isOver := func(_, backend uint32) bool { _, ok := over[backend]; return ok }
	if !datagrams {
		return nil
	}
	return errors.Join(
		d.cfg.Connections.Pass(func(f service.Flow) bool { return f.Protocol != unix.IPPROTO_TCP && isOver(f.Service, f.Backend) }),
		d.cutSockets(over))
}

// cutSockets cuts exactly the connected UDP sockets whose backend is over. Their
// entries stay until they are closed, or connected again, which by now they may
// be.
func (d *Driver) cutSockets(over map[uint32]service.Left) error {
	list, err := d.cfg.Connections.Sockets(func(_, backend uint32) bool { _, ok := over[backend]; return ok })
	if err != nil || len(list) == 0 {
		return err
	}
	sockets := make([]netdev.UDPSocket, 0, len(list))
	for _, s := range list {
		sockets = append(sockets, netdev.UDPSocket{Cookie: s.Cookie, Peer: over[s.Backend].At})
	}
	var paths []string
	for p := range d.cfg.Tables.Pods.All(d.cfg.Tables.DB.ReadTxn()) {
		if p.Netns != "" {
			paths = append(paths, p.Netns)
		}
	}
	n, err := d.cfg.Cutter.CutUDP(paths, sockets)
	d.mu.Lock()
	d.status.Cut += uint64(n)
	d.mu.Unlock()
	if err != nil {
		return fmt.Errorf("cut sockets of backends that are gone: %w", err)
	}
	return nil
}

// serves says whether the service port is there, without a new backend at the same
// address, and an endpoint of the service still serves at that: any service, for
// one that an earlier agent left.
func (d *Driver) serves(l *service.Left) bool {
	if l.Service != 0 {
		key := state.Key(l.Name.Namespace, l.Name.Service)
		there := slices.ContainsFunc(d.ports[key], func(p balance.ServicePort) bool { return p.Name == l.Name && !has(&p, l.At) })
		return there && serving(d.slices[key], l.At)
	}
	for _, of := range d.slices {
		if serving(of, l.At) {
			return true
		}
	}
	return false
}

func has(p *balance.ServicePort, at netip.AddrPort) bool {
	for _, s := range p.Sets() {
		_, ok := slices.BinarySearchFunc(s.Backends, at, func(b balance.Backend, at netip.AddrPort) int {
			return netip.AddrPortFrom(b.Addr, b.Port).Compare(at)
		})
		if ok {
			return true
		}
	}
	return false
}

func serving(slices map[string]*state.Endpoint, at netip.AddrPort) bool {
	for _, row := range slices {
		if row.Slice != nil && hasPort(row.Slice, at.Port()) && hasServing(row.Slice, at.Addr()) {
			return true
		}
	}
	return false
}

func hasPort(s *discoveryv1.EndpointSlice, port uint16) bool {
	return slices.ContainsFunc(s.Ports, func(p discoveryv1.EndpointPort) bool { return p.Port != nil && *p.Port == int32(port) })
}

func hasServing(s *discoveryv1.EndpointSlice, a netip.Addr) bool {
	text := a.String()
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		serves := e.Conditions.Serving
		if serves == nil {
			serves = e.Conditions.Ready
		}
		if len(e.Addresses) > 0 && e.Addresses[0] == text && (serves == nil || *serves) {
			return true
		}
	}
	return false
}

// pass deletes the translated connections that have expired, those whose backend
// was a pod that is gone, and datagrams whose backend is gone; and it ends again
// what could not be ended. How pods answer clients by themselves (DSR) names no
// backend (0): the client's node knows it.
func (d *Driver) pass() error {
	here := d.cfg.Connections.Backends()
	isGone := d.gonePods()
	err := d.cfg.Connections.Pass(func(f service.Flow) bool {
		return !here(f.Backend) && (f.Backend != 0 && f.Protocol != unix.IPPROTO_TCP || isGone(f.At.Addr()))
	})
	return errors.Join(err, d.settle())
}

// gonePods returns a function that says whether an address is one of pods, and no
// pod has it. It reads the tables when it is first asked.
func (d *Driver) gonePods() func(netip.Addr) bool {
	var pods map[netip.Addr]bool
	var cidrs []netip.Prefix
	return func(a netip.Addr) bool {
		if pods == nil {
			pods = map[netip.Addr]bool{}
			txn := d.cfg.Tables.DB.ReadTxn()
			for w := range d.cfg.Tables.Workloads.All(txn) {
				for _, ip := range w.IPs {
					pods[ip.Unmap()] = true
				}
			}
			for n := range d.cfg.Tables.Nodes.All(txn) {
				cidrs = append(cidrs, n.PodCIDRs...)
			}
		}
		return !pods[a] && slices.ContainsFunc(cidrs, func(p netip.Prefix) bool { return p.Contains(a) })
	}
}
