// SPDX-License-Identifier: Apache-2.0

package services

import (
	"fmt"
	"net/netip"

	"github.com/weft-mesh/weft/internal/datapath/service"
	"github.com/weft-mesh/weft/internal/netdev"
	"golang.org/x/sys/unix"
)

// numbers are those of a service port and of one of its backends.
type numbers struct{ service, backend uint32 }

// ended is what changes mean for connections: those of UDP end with their
// backend, those of TCP with its pod.
type ended struct {
	left     map[numbers]netip.AddrPort
	gone     map[uint32]bool // service ports
	filled   map[uint32]bool
	draining map[numbers]netip.AddrPort // backends that left, while their pod is there
}

func newEnded() ended {
	return ended{
		left: map[numbers]netip.AddrPort{}, gone: map[uint32]bool{}, filled: map[uint32]bool{},
		draining: map[numbers]netip.AddrPort{},
	}
}

func (e *ended) empty() bool { return len(e.left)+len(e.gone)+len(e.filled) == 0 }

func (e *ended) add(o *service.Outcome) {
	for _, l := range o.Left {
		n := numbers{l.Service, l.Backend}
		e.left[n] = l.At
		e.draining[n] = l.At
	}
	for _, p := range o.Gone {
		e.gone[p.ID] = true
	}
	for _, p := range o.Filled {
		e.filled[p.ID] = true
	}
}

// lost says whether a client may not stay with the backend.
func (e *ended) lost(service, backend uint32) bool {
	_, left := e.left[numbers{service, backend}]
	return left || e.gone[service]
}

// flowEnds says which translated connections end now.
func (d *Driver) flowEnds(e *ended) func(service.Flow) bool {
	alive := d.podAddresses(e)
	return func(f service.Flow) bool {
		if f.Protocol != unix.IPPROTO_TCP && (e.lost(f.Service, f.Backend) || e.filled[f.Service]) {
			return true
		}
		_, draining := e.draining[numbers{f.Service, f.Backend}]
		return draining && !alive[f.At.Addr()]
	}
}

// podAddresses are those of all pods, or nothing where no backend drains.
func (d *Driver) podAddresses(e *ended) map[netip.Addr]bool {
	if len(e.draining) == 0 {
		return nil
	}
	alive := map[netip.Addr]bool{}
	for w := range d.cfg.Tables.Workloads.All(d.cfg.Tables.DB.ReadTxn()) {
		for _, ip := range w.IPs {
			alive[ip.Unmap()] = true
		}
	}
	return alive
}

// forgetDrained is for backends whose pods are gone: their connections are too.
func (d *Driver) forgetDrained(e *ended) {
	alive := d.podAddresses(e)
	d.mu.Lock()
	defer d.mu.Unlock()
	for n, at := range e.draining {
		if !alive[at.Addr()] {
			delete(d.over.draining, n)
		}
	}
}

// cutSockets cuts exactly the connected UDP sockets whose backend has left.
func (d *Driver) cutSockets(e *ended) error {
	list, err := d.cfg.Connections.Sockets(e.lost)
	if err != nil || len(list) == 0 {
		return err
	}
	var sockets []netdev.UDPSocket
	for _, s := range list {
		if at, ok := e.left[numbers{s.Service, s.Backend}]; ok {
			sockets = append(sockets, netdev.UDPSocket{Cookie: s.Cookie, Peer: at})
		}
	}
	var paths []string
	for p := range d.cfg.Tables.Pods.All(d.cfg.Tables.DB.ReadTxn()) {
		if p.Netns != "" {
			paths = append(paths, p.Netns)
		}
	}
	n, err := d.cfg.Cutter.CutUDP(paths, sockets)
	d.mu.Lock()
	d.cut += uint64(n)
	d.mu.Unlock()
	if err != nil {
		return fmt.Errorf("cut sockets of backends that are gone: %w", err)
	}
	return nil
}
