// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"

	"github.com/weft-mesh/weft/internal/datapath/node"
	"github.com/weft-mesh/weft/internal/datapath/pin"
	"github.com/weft-mesh/weft/internal/datapath/pod"
	"github.com/weft-mesh/weft/internal/datapath/setting"
	"github.com/weft-mesh/weft/internal/enforce"
	"github.com/weft-mesh/weft/internal/netdev"
	"github.com/weft-mesh/weft/internal/state"
)

// kernel is what this agent has in force: the programs loaded with the settings
// of the node. It is the Datapath of the CNI server.
type kernel struct {
	maps    *pin.Maps
	enforce *enforce.Enforcer

	mu    sync.RWMutex // protects what follows; held for reading while a pod is attached
	pods  *pod.Datapath
	node  *node.Datapath
	state setting.Node
}

// load replaces programs and settings. Pods that are attached keep the old ones
// until they are attached again.
func (k *kernel) load(s setting.Node, uplink node.Device, tunnel *node.Device) (err error) {
	pods, err := pod.Load(k.maps, s)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			pods.Close()
		}
	}()
	nodes, err := node.Load(k.maps, s)
	if err != nil {
		return err
	}
	if err := nodes.Attach(uplink, tunnel); err != nil {
		nodes.Close()
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.pods != nil {
		k.pods.Close()
		k.node.Close()
	}
	k.pods, k.node, k.state = pods, nodes, s
	return nil
}

func (k *kernel) close() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.pods == nil {
		return nil
	}
	return errors.Join(k.pods.Close(), k.node.Close())
}

func (k *kernel) settings() setting.Node {
	k.mu.RLock()
	defer k.mu.RUnlock()
	return k.state
}

var errNotLoaded = errors.New("the datapath is not loaded yet")

func endpoint(p *state.Pod) (*pod.Endpoint, error) {
	mac, err := net.ParseMAC(p.MAC)
	if err != nil {
		return nil, fmt.Errorf("pod %s: %w", state.Key(p.Namespace, p.Name), err)
	}
	hostMAC, err := net.ParseMAC(p.HostMAC)
	if err != nil {
		return nil, fmt.Errorf("pod %s: %w", state.Key(p.Namespace, p.Name), err)
	}
	return &pod.Endpoint{
		Device: p.Interface, Ifindex: p.Ifindex, MAC: mac, HostMAC: hostMAC, IPs: p.IPs, Identity: p.Identity,
	}, nil
}

// Attach puts the pod's datapath in force, and before it the policy that selects
// the pod.
func (k *kernel) Attach(_ context.Context, p *state.Pod) error {
	ep, err := endpoint(p)
	if err != nil {
		return err
	}
	return k.enforce.Attach(p, func(subject uint32) error {
		ep.Subject = subject
		k.mu.RLock()
		defer k.mu.RUnlock()
		if k.pods == nil {
			return errNotLoaded
		}
		return k.pods.Attach(ep)
	})
}

// Detach takes it out of force.
func (k *kernel) Detach(_ context.Context, p *state.Pod) error {
	ep, err := endpoint(p)
	if err != nil {
		return err
	}
	k.enforce.Detach(p)
	k.mu.RLock()
	defer k.mu.RUnlock()
	if k.pods == nil {
		return errNotLoaded
	}
	return k.pods.Detach(ep)
}

// Attached says what of the pod's datapath is not in force.
func (k *kernel) Attached(_ context.Context, p *state.Pod) error {
	ep, err := endpoint(p)
	if err != nil {
		return err
	}
	k.mu.RLock()
	defer k.mu.RUnlock()
	if k.pods == nil {
		return errNotLoaded
	}
	return k.pods.Attached(ep)
}

// SetSubject puts another policy in force for an attached pod.
func (k *kernel) SetSubject(ips []netip.Addr, ifindex int, subject uint32) error {
	k.mu.RLock()
	defer k.mu.RUnlock()
	if k.pods == nil {
		return nil // no pod is attached yet
	}
	return k.pods.SetSubject(ips, ifindex, subject)
}

// Subjects are those that attached pods have.
func (k *kernel) Subjects() (map[uint32]bool, error) {
	k.mu.RLock()
	defer k.mu.RUnlock()
	if k.pods == nil {
		return nil, errNotLoaded
	}
	return k.pods.Subjects()
}

// prune forgets every pod that is not among recorded.
func (k *kernel) prune(recorded []*state.Pod) error {
	var want []*pod.Endpoint
	for _, p := range recorded {
		ep, err := endpoint(p)
		if err != nil {
			return err
		}
		want = append(want, ep)
	}
	k.mu.RLock()
	defer k.mu.RUnlock()
	return k.pods.Prune(want)
}

// tunnelName is the VXLAN device of a node.
const tunnelName = "weft_vxlan"

// tunnelOverhead is what VXLAN puts in front of an inner L3 packet, in bytes:
// inner Ethernet, VXLAN, UDP and the outer IP header (RFC 7348, 4.3).
func tunnelOverhead(v4 bool) int {
	if v4 {
		return 14 + 8 + 8 + 20
	}
	return 14 + 8 + 8 + 40
}

// ensureTunnel makes the tunnel device, or removes what is left of one.
func ensureTunnel(n *netdev.Net, c DatapathConfig, s *setting.Node) (*node.Device, error) {
	if c.Tunnel != "vxlan" {
		return nil, n.DeleteVXLAN(tunnelName)
	}
	l, err := n.EnsureVXLAN(tunnel(c, s))
	if err != nil {
		return nil, err
	}
	s.TunnelIfindex = l.Ifindex
	return &node.Device{Name: l.Name, Ifindex: l.Ifindex}, nil
}

func tunnel(c DatapathConfig, s *setting.Node) netdev.VXLAN {
	return netdev.VXLAN{Name: tunnelName, Port: c.VXLANPort, MTU: s.TunnelMTU, Gateways: gateways(s)}
}

// checkTunnel says what the tunnel device is not that ensureTunnel made it. It
// changes nothing, and so causes no event of a link.
func checkTunnel(n *netdev.Net, c DatapathConfig, s *setting.Node) error {
	if c.Tunnel != "vxlan" {
		return nil
	}
	if err := n.CheckVXLAN(tunnel(c, s)); err != nil {
		return err
	}
	l, _, err := n.LinkByName(tunnelName)
	if err == nil && l.Ifindex != s.TunnelIfindex {
		err = fmt.Errorf("link %s was made anew by somebody else", tunnelName)
	}
	return err
}
