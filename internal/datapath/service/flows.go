// SPDX-License-Identifier: Apache-2.0

package service

import (
	"errors"
	"fmt"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weft-mesh/weft/internal/datapath/pin"
	"github.com/weft-mesh/weft/internal/datapath/setting"
)

// Connections are what programs note of connections to services: those that are
// translated packet by packet, and connected UDP sockets. Its methods are called by one goroutine.
type Connections struct {
	flows, sockets     *ebpf.Map
	affinity, backends *ebpf.Map
	lifetimes          setting.Lifetimes

	live, halves, deleted atomic.Uint64
}

// NewConnections returns those of m.
func NewConnections(m *pin.Maps, l setting.Lifetimes) *Connections {
	return &Connections{
		flows: m.Map("weft_service_flows"), sockets: m.Map("weft_service_sockets"), affinity: m.Map("weft_affinity"),
		backends: m.Map("weft_backends"), lifetimes: l,
	}
}

// FlowStats are counts of translated connections.
type FlowStats struct {
	Live    uint64  // after the last pass
	Full    float64 // how full their map was, 0 to 1
	Deleted uint64  // entries, of which most connections have two, since the start
}

// Stats returns the counts. Safe for concurrent use.
func (c *Connections) Stats() FlowStats {
	return FlowStats{c.live.Load(), float64(c.halves.Load()) / float64(c.flows.MaxEntries()), c.deleted.Load()}
}

// Flow is half of a translated connection.
type Flow struct {
	Service, Backend uint32
	Protocol         uint8          // as in IP
	At               netip.AddrPort // of the backend
}

func flowOf(k *pin.KernelFlowKey, v *pin.KernelServiceFlow) Flow {
	f := Flow{Service: v.Service, Backend: v.Backend, Protocol: k.Protocol}
	if v.Flags&uint32(pin.KernelServiceFlowFlagFLOW_REPLY) != 0 {
		f.At = netip.AddrPortFrom(addrOf(k.Src), networkOrder(k.Sport))
	} else {
		f.At = netip.AddrPortFrom(addrOf(v.Dst), networkOrder(v.Dport))
	}
	return f
}

// Backends returns a function that says whether the kernel has a backend, as of
// the first time it was asked about it.
func (c *Connections) Backends() func(id uint32) bool {
	seen := map[uint32]bool{}
	return func(id uint32) bool {
		here, ok := seen[id]
		if !ok {
			var v pin.KernelBackend
			here = !errors.Is(c.backends.Lookup(id, &v), ebpf.ErrKeyNotExist)
			seen[id] = here
		}
		return here
	}
}

// Pass deletes the connections that have expired, and those that over says must
// go.
func (c *Connections) Pass(over func(Flow) bool) error {
	now, err := monotonicSeconds()
	if err != nil {
		return err
	}
	live, halves := uint64(0), uint64(0)
	err = walk(c.flows, func(k *pin.KernelFlowKey, v *pin.KernelServiceFlow) error {
		if over(flowOf(k, v)) {
			return c.remove(k)
		}
		if c.expired(k, v, now) {
			if gone, err := c.expire(k, now); gone || err != nil {
				return err
			}
		}
		halves++
		if v.Flags&uint32(pin.KernelServiceFlowFlagFLOW_REPLY) == 0 || v.Flags&uint32(pin.KernelServiceFlowFlagFLOW_DSR) != 0 {
			live++
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("collect flows of services: %w", err)
	}
	c.live.Store(live)
	c.halves.Store(halves)
	return nil
}

// expire deletes both halves of a connection unless one is alive: packets of
// either may have been seen since. It says whether it is gone.
func (c *Connections) expire(k *pin.KernelFlowKey, now uint32) (bool, error) {
	v, err := c.lookup(k)
	if v == nil || err != nil {
		return true, err
	}
	if !c.expired(k, v, now) {
		return false, nil
	}
	other := otherHalf(k, v)
	o, err := c.lookup(other)
	if err != nil {
		return false, err
	}
	if o != nil && *otherHalf(other, o) == *k {
		if !c.expired(other, o, now) {
			return false, nil
		}
		if err := c.remove(other); err != nil {
			return false, err
		}
	}
	return true, c.remove(k)
}

// lookup returns nil where there is none.
func (c *Connections) lookup(k *pin.KernelFlowKey) (*pin.KernelServiceFlow, error) {
	var v pin.KernelServiceFlow
	err := c.flows.Lookup(k, &v)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read a flow: %w", err)
	}
	return &v, nil
}

// otherHalf mirrors flow_key_other of bpf/lib/flow.h.
func otherHalf(k *pin.KernelFlowKey, v *pin.KernelServiceFlow) *pin.KernelFlowKey {
	return &pin.KernelFlowKey{Src: v.Dst, Dst: v.Src, Sport: v.Dport, Dport: v.Sport, Protocol: k.Protocol}
}

func (c *Connections) remove(k *pin.KernelFlowKey) error {
	if err := c.flows.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("delete a flow: %w", err)
	}
	c.deleted.Add(1)
	return nil
}

// expired mirrors flow_expired of bpf/lib/flow.h.
func (c *Connections) expired(k *pin.KernelFlowKey, v *pin.KernelServiceFlow, now uint32) bool {
	return int64(int32(now-v.LastSeen)) > int64(flowLifetime(c.lifetimes, k.Protocol, v.Flags)/time.Second)
}

func flowLifetime(l setting.Lifetimes, protocol uint8, flags uint32) time.Duration {
	has := func(f pin.KernelServiceFlowFlag) bool { return flags&uint32(f) != 0 }
	fin, back := has(pin.KernelServiceFlowFlagFLOW_FIN), has(pin.KernelServiceFlowFlagFLOW_FIN_BACK)
	switch {
	case protocol == unix.IPPROTO_UDP && has(pin.KernelServiceFlowFlagFLOW_ANSWERED):
		return l.UDPReplied
	case protocol == unix.IPPROTO_UDP:
		return l.UDP
	case has(pin.KernelServiceFlowFlagFLOW_RST), has(pin.KernelServiceFlowFlagFLOW_RST_BACK), fin && back:
		return l.TCPClosing
	case has(pin.KernelServiceFlowFlagFLOW_DSR) && fin:
		return l.TCPSyn
	case has(pin.KernelServiceFlowFlagFLOW_ESTABLISHED):
		return l.TCPEstablished
	}
	return l.TCPSyn
}

// Socket is a connected UDP socket whose peer is a backend.
type Socket struct {
	Cookie           uint64
	Service, Backend uint32
}

// Sockets returns those that want asks for.
func (c *Connections) Sockets(want func(service, backend uint32) bool) ([]Socket, error) {
	var out []Socket
	err := walk(c.sockets, func(cookie *uint64, v *pin.KernelServiceSocket) error {
		if want(v.Service, v.Backend) {
			out = append(out, Socket{*cookie, v.Service, v.Backend})
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list sockets of services: %w", err)
	}
	return out, nil
}
