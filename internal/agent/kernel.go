// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"

	"github.com/weft-mesh/weft/internal/cgroup"
	"github.com/weft-mesh/weft/internal/datapath/lb"
	"github.com/weft-mesh/weft/internal/datapath/node"
	"github.com/weft-mesh/weft/internal/datapath/pin"
	"github.com/weft-mesh/weft/internal/datapath/pod"
	"github.com/weft-mesh/weft/internal/datapath/setting"
	"github.com/weft-mesh/weft/internal/datapath/xdp"
	"github.com/weft-mesh/weft/internal/enforce"
	"github.com/weft-mesh/weft/internal/netdev"
	"github.com/weft-mesh/weft/internal/state"
)

// kernel is what this agent has in force: the programs loaded with the settings
// of the node. It is the Datapath of the CNI server.
type kernel struct {
	maps    *pin.Maps
	enforce *enforce.Enforcer
	cgroup  string // whose sockets services are translated at
	xdp     string // what mode is asked for

	reloaded chan struct{} // of one: programs and settings are others

	mu sync.RWMutex // protects what follows; held for reading while a pod is attached
	programs
	state setting.Node
}

// programs are one set of loaded ones.
type programs struct {
	pods    *pod.Datapath
	node    *node.Datapath
	sockets *lb.Datapath
	first   *xdp.Datapath // sees frames first; nil where there is none
	mode    xdp.Status
	uplink  string
}

func (p *programs) release() error {
	var errs []error
	if p.pods != nil {
		errs = append(errs, p.pods.Close())
	}
	if p.node != nil {
		errs = append(errs, p.node.Close())
	}
	if p.sockets != nil {
		errs = append(errs, p.sockets.Close())
	}
	if p.first != nil {
		errs = append(errs, p.first.Close())
	}
	return errors.Join(errs...)
}

// load replaces programs and settings. Pods that are attached keep the old ones
// until they are attached again.
func (k *kernel) load(s setting.Node, uplink *netdev.Uplink, tunnel *node.Device) error {
	next := programs{uplink: uplink.Name}
	if err := k.attach(&next, s, uplink, tunnel); err != nil {
		return errors.Join(err, next.release())
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	err := k.release()
	k.programs, k.state = next, s
	select {
	case k.reloaded <- struct{}{}:
	default:
	}
	if err != nil {
		return fmt.Errorf("close the programs of before: %w", err)
	}
	return nil
}

func (k *kernel) close() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.release()
}

// attach loads the programs, and puts in force those of the node as a whole.
func (k *kernel) attach(p *programs, s setting.Node, uplink *netdev.Uplink, tunnel *node.Device) (err error) {
	if p.pods, err = pod.Load(k.maps, s); err != nil {
		return err
	}
	if p.node, err = node.Load(k.maps, s); err != nil {
		return err
	}
	if err = p.node.Attach(node.Device{Name: uplink.Name, Ifindex: uplink.Index}, tunnel); err != nil {
		return err
	}
	if p.sockets, err = lb.Load(k.maps, s); err != nil {
		return err
	}
	if err = p.sockets.Attach(k.cgroup); err != nil {
		return err
	}
	return k.attachEdge(p, s, uplink)
}

// attachEdge is the only part that auto mode can do without: tcx does the same.
func (k *kernel) attachEdge(p *programs, s setting.Node, uplink *netdev.Uplink) (err error) {
	p.first, err = xdp.Load(k.maps, s, xdp.Device{Name: uplink.Name, Ifindex: uplink.Index, MAC: uplink.MAC, Kind: uplink.Kind})
	if err == nil {
		p.mode, err = p.first.Attach(k.xdp)
	}
	if err != nil && (k.xdp == xdp.Auto || k.xdp == xdp.Off) {
		p.mode = xdp.Status{Mode: xdp.Off, Reason: err.Error()}
		return nil
	}
	return err
}

// edge returns the uplink, and how XDP is on it.
func (k *kernel) edge() (device, mode, why string) {
	k.mu.RLock()
	defer k.mu.RUnlock()
	if k.mode.Mode == "" {
		return k.uplink, xdp.Off, ""
	}
	return k.uplink, k.mode.Mode, k.mode.Reason
}

// cgroupRoot is the folder of the configuration, or the root of all.
func cgroupRoot(configured string) (string, error) {
	if configured != "" {
		return configured, nil
	}
	return cgroup.Mount()
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
