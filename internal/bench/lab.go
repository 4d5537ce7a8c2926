// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/weft-mesh/weft/internal/lab/layout"
	"github.com/weft-mesh/weft/internal/netdev"
)

// labUnderlay and labPods are the addressing of every lab: node n is host n of
// the one, its pods are in subnet n of the other.
var (
	labUnderlay = netip.MustParsePrefix("172.30.0.0/24")
	labPods     = netip.MustParsePrefix("10.244.0.0/16")
)

// Lab is what a running lab's namespaces tell of it.
type Lab struct {
	Names   layout.Layout
	Nodes   map[byte]LabEnd // by number
	Pods    []LabEnd        // sorted by namespace name
	Routing string          // native or vxlan
}

// LabEnd is a pod or a node of a lab.
type LabEnd struct {
	Netns  string
	Node   byte
	V4, V6 netip.Addr
	MTU    int
}

func (e LabEnd) addr(ipv6 bool) netip.Addr {
	if ipv6 {
		return e.V6
	}
	return e.V4
}

// ReadLab looks at the namespaces weft-LAB-….
func ReadLab(name string) (*Lab, error) {
	names, err := layout.New(name)
	if err != nil {
		return nil, err
	}
	all, err := netdev.ListNetNS()
	if err != nil {
		return nil, err
	}
	lab := &Lab{Names: names, Nodes: map[byte]LabEnd{}, Routing: "native"}
	for _, netns := range all {
		if strings.HasPrefix(netns, names.NetNSPrefix()) {
			if err := lab.read(netns); err != nil {
				return nil, err
			}
		}
	}
	if len(lab.Nodes) == 0 {
		return nil, fmt.Errorf("lab %s: no namespace %s… with a node's address: is it up?", name, names.NetNSPrefix())
	}
	slices.SortFunc(lab.Pods, func(a, b LabEnd) int { return strings.Compare(a.Netns, b.Netns) })
	return lab, nil
}

func (l *Lab) read(netns string) error {
	link, ok, err := netdev.LinkIn(netns, "eth0")
	if err != nil || !ok {
		return err
	}
	end := LabEnd{Netns: netns, MTU: link.MTU}
	for _, a := range link.Addresses {
		if a.Is4() {
			end.V4 = a
		} else {
			end.V6 = a
		}
	}
	pod := strings.HasPrefix(netns, l.Names.NetNSPrefix()+"pod-")
	switch {
	case pod && labPods.Contains(end.V4):
		end.Node = end.V4.As4()[2]
		l.Pods = append(l.Pods, end)
	case !pod && labUnderlay.Contains(end.V4):
		end.Node = end.V4.As4()[3]
		l.Nodes[end.Node] = end
		if _, tunnel, err := netdev.LinkIn(netns, "weft_vxlan"); err != nil {
			return err
		} else if tunnel {
			l.Routing = "vxlan"
		}
	}
	return nil
}

// Pod returns the pod NS/NAME.
func (l *Lab) Pod(name string) (LabEnd, error) {
	namespace, pod, _ := strings.Cut(name, "/")
	netns := l.Names.PodNetNS(namespace, pod)
	for _, p := range l.Pods {
		if p.Netns == netns {
			return p, nil
		}
	}
	return LabEnd{}, fmt.Errorf("lab %s has no pod %s with an address", l.Names.Name, name)
}

// Pair returns two pods on one node, or on two.
func (l *Lab) Pair(sameNode bool) (client, server LabEnd, err error) {
	for _, a := range l.Pods {
		for _, b := range l.Pods {
			if a != b && (a.Node == b.Node) == sameNode {
				return a, b, nil
			}
		}
	}
	where := "on two nodes"
	if sameNode {
		where = "on one node"
	}
	return client, server, fmt.Errorf("lab %s has no two pods %s", l.Names.Name, where)
}

// agents returns the cgroups of the agents of nodes, as far as there are any.
func (l *Lab) agents(nodes ...byte) (dirs []string) {
	for _, n := range nodes {
		dir := l.Names.AgentCgroup(strings.TrimPrefix(l.Nodes[n].Netns, l.Names.NetNSPrefix()))
		if _, err := os.Stat(dir); err == nil && !slices.Contains(dirs, dir) {
			dirs = append(dirs, dir)
		}
	}
	return dirs
}

// Targets returns the pair of pods and what to compare it with: the same over
// plain veth and kernel forwarding (and through the kernel's own VXLAN where
// the lab uses VXLAN), and host to host. Across nodes the hosts are the nodes'
// own namespaces; on one node they are two namespaces joined by a veth pair.
func (l *Lab) Targets(s *Site, client, server LabEnd, ipv6 bool) ([]Target, error) {
	pods := Target{Name: "pods", Client: client.Netns, Server: server.Netns, Addr: server.addr(ipv6), Cgroups: l.agents(client.Node, server.Node)}
	kinds := []Baseline{Plain, Host}
	if client.Node == server.Node {
		pods.About = "two pods on one node, wired by weft"
	} else {
		pods.About = "two pods on two nodes, wired by weft, " + l.Routing
		kinds = []Baseline{PlainAcross}
		if l.Routing == "vxlan" {
			kinds = append(kinds, PlainVXLAN)
		}
	}
	targets := []Target{pods}
	for _, kind := range kinds {
		t, err := s.Build(kind, client.MTU, ipv6)
		if err != nil {
			return nil, err
		}
		targets = append(targets, t)
	}
	if client.Node != server.Node {
		from, to := l.Nodes[client.Node], l.Nodes[server.Node]
		targets = append(targets, Target{
			Name: "nodes", About: "the same two nodes, from the one's own namespace to the other's",
			Client: from.Netns, Server: to.Netns, Addr: to.addr(ipv6),
		})
	}
	return targets, nil
}
