// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/weft-mesh/weft/internal/addr"
	"github.com/weft-mesh/weft/internal/datapath/setting"
	"github.com/weft-mesh/weft/internal/netdev"
	"github.com/weft-mesh/weft/internal/state"
)

// leastMTU is what IPv6 needs of a link, in bytes (RFC 8200, 5).
const leastMTU = 1280

// settings computes what the programs are told, all but the tunnel's device.
func settings(c *Config, uplink *netdev.Uplink, n *state.Node) (setting.Node, error) {
	first, last, err := portRange(c.Datapath.MasqueradePorts)
	if err != nil {
		return setting.Node{}, err
	}
	serviceFirst, serviceLast, err := portRange(c.Services.Ports)
	if err != nil {
		return setting.Node{}, err
	}
	v4, v6 := addr.Pick(n.IPs)
	s := setting.Node{
		UplinkIfindex:   uplink.Index,
		UplinkMTU:       uplink.MTU,
		IPv4:            v4,
		IPv6:            v6,
		Masquerade:      *c.Datapath.Masquerade,
		KeepEstablished: c.Policy.KeepEstablished,
		MaxPerPod:       c.Conntrack.MaxPerPod,
		FirstPort:       first,
		LastPort:        last,
		Lifetimes:       c.Conntrack.lifetimes(),

		ServiceFirstPort: serviceFirst,
		ServiceLastPort:  serviceLast,
		ServiceDSR:       c.Services.External == "dsr",
		ReportInterval:   time.Duration(*c.Flow.ReportInterval),
	}
	s.TunnelPort = c.Datapath.VXLANPort
	s.TunnelMTU = uplink.MTU - tunnelOverhead(v4.IsValid())
	if c.Datapath.MTU != 0 {
		if c.Datapath.MTU > uplink.MTU {
			return setting.Node{}, fmt.Errorf("datapath.mtu: %d: want at most %d, the MTU of %s", c.Datapath.MTU, uplink.MTU, uplink.Name)
		}
		s.UplinkMTU = c.Datapath.MTU
		s.TunnelMTU = min(s.TunnelMTU, c.Datapath.MTU)
	}
	if mtu := podMTU(c, s); mtu < leastMTU {
		return setting.Node{}, fmt.Errorf("MTU %d of %s leaves %d for pods: want at least %d", uplink.MTU, uplink.Name, mtu, leastMTU)
	}
	for _, p := range n.PodCIDRs {
		if g := addr.Gateway(p); g.Is4() {
			s.Gateway4 = g
		} else {
			s.Gateway6 = g
		}
	}
	return s, nil
}

func gateways(s *setting.Node) []netip.Addr {
	var out []netip.Addr
	for _, g := range []netip.Addr{s.Gateway4, s.Gateway6} {
		if g.IsValid() {
			out = append(out, g)
		}
	}
	return out
}

func (c *ConntrackConfig) lifetimes() setting.Lifetimes {
	return setting.Lifetimes{
		TCPSyn:         time.Duration(c.TCPSyn),
		TCPEstablished: time.Duration(c.TCPEstablished),
		TCPClosing:     time.Duration(c.TCPClosing),
		UDP:            time.Duration(c.UDP),
		UDPReplied:     time.Duration(c.UDPReplied),
		Other:          time.Duration(c.Other),
	}
}

// podMTU is the MTU of pod interfaces.
func podMTU(c *Config, s setting.Node) int {
	if c.Datapath.Tunnel == "vxlan" {
		return s.TunnelMTU
	}
	return s.UplinkMTU
}
