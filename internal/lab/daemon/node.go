// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/weft-mesh/weft/internal/cgroup"
	"github.com/weft-mesh/weft/internal/lab/api"
	"github.com/weft-mesh/weft/internal/lab/logfile"
	"github.com/weft-mesh/weft/internal/lab/model"
	"github.com/weft-mesh/weft/internal/lab/node"
	"github.com/weft-mesh/weft/internal/lab/sandbox"
	"github.com/weft-mesh/weft/internal/netdev"
)

// Addresses of the underlay's bridge: the outside world, and every node's
// default gateway.
var (
	underlayIPv4 = netip.MustParsePrefix("172.30.0.254/24")
	underlayIPv6 = netip.MustParsePrefix("fd00:172:30::fe/64")
)

const bridge = "underlay"

// labNode is a node with its agent.
type labNode struct {
	model.Node
	lab   *Lab
	netns string // name
	agent *node.Agent
	cni   *sandbox.CNI
	log   *logfile.Writer
}

func newNode(l *Lab, m model.Node) (*labNode, error) {
	lay := l.layout
	n := &labNode{Node: m, lab: l, netns: lay.NodeNetNS(m.Name)}
	if err := os.MkdirAll(lay.NodeDir(m.Name), 0o755); err != nil {
		return nil, fmt.Errorf("make the folder of %s: %w", m.Name, err)
	}
	var err error
	if n.log, err = logfile.Open(lay.AgentLog(m.Name), logfile.DefaultLimit); err != nil {
		return nil, err
	}
	n.agent = node.New(node.Config{
		Name: m.Name, Weft: l.cfg.Weft,
		ConfigFile: lay.AgentConfig(m.Name), Socket: lay.NodeSocket(m.Name),
		NetNS: n.netnsPath(), Cgroup: lay.AgentCgroup(m.Name),
		Log: n.log, Env: mergeEnv(os.Environ(), []string{"PATH=" + l.path()}),
		Changed: l.notify,
	})
	n.cni, err = sandbox.NewCNI(sandbox.Config{
		Weft: l.cfg.Weft, BinDir: l.weftDir(), NetNS: n.netnsPath(), Socket: lay.NodeSocket(m.Name),
		StateDir: filepath.Join(lay.NodeDir(m.Name), "cni"), CacheDir: filepath.Join(lay.NodeDir(m.Name), "cni-cache"),
	})
	return n, err
}

func (n *labNode) netnsPath() string { return netdev.NetNSPath(n.netns) }

// setup makes the underlay and the nodes, starts the agents and waits for them
// to be ready. It returns nil if all went well.
func (l *Lab) setup(ctx context.Context) *api.Result {
	l.setupOnce.Do(func() {
		if l.setupErr = l.setupNetwork(); l.setupErr == nil {
			go l.reconcile()
			l.kick()
		}
	})
	if l.setupErr != nil {
		return &api.Result{Failures: []string{l.setupErr.Error()}, Broken: true}
	}
	errs := make([]error, len(l.nodes))
	var wg sync.WaitGroup
	for i, n := range l.nodes {
		wg.Go(func() { errs[i] = n.startAgent(ctx) })
	}
	wg.Wait()
	var failures []string
	for _, err := range errs {
		if err != nil {
			failures = append(failures, err.Error())
		}
	}
	if failures == nil {
		return nil
	}
	return &api.Result{Failures: failures}
}

func (l *Lab) setupNetwork() error {
	underlay := l.layout.UnderlayNetNS()
	if err := netdev.CreateNetNS(underlay); err != nil {
		return err
	}
	addresses := []netip.Prefix{underlayIPv4, underlayIPv6}
	if err := netdev.CreateBridge(netdev.LabLink{NetNS: underlay, Name: bridge, Addresses: addresses}, l.cfg.MTU); err != nil {
		return err
	}
	if err := netdev.SpreadFlows(underlay); err != nil {
		return err
	}
	if err := cgroup.Create(filepath.Join(l.layout.Cgroup, "outside", "host")); err != nil {
		return err
	}
	l.progress("underlay: bridge %s with %s and %s, MTU %d", bridge, underlayIPv4, underlayIPv6, l.cfg.MTU)
	for _, n := range l.nodes {
		if err := n.setup(underlay); err != nil {
			return err
		}
		l.progress("%s: %s %s, pods %s %s", n.Name, n.IPs[0], n.IPs[1], n.PodCIDRs[0], n.PodCIDRs[1])
	}
	return nil
}

func (n *labNode) setup(underlay string) error {
	if err := netdev.CreateNetNS(n.netns); err != nil {
		return err
	}
	inside := netdev.LabLink{
		NetNS: n.netns, Name: "eth0",
		Addresses: []netip.Prefix{netip.PrefixFrom(n.IPs[0], underlayIPv4.Bits()), netip.PrefixFrom(n.IPs[1], underlayIPv6.Bits())},
		Gateways:  []netip.Addr{underlayIPv4.Addr(), underlayIPv6.Addr()},
	}
	outside := netdev.LabLink{NetNS: underlay, Name: n.Name, Master: bridge}
	if err := netdev.CreateVeth(outside, inside, n.lab.cfg.MTU); err != nil {
		return err
	}
	lay := n.lab.layout
	for _, dir := range []string{lay.AgentCgroup(n.Name), lay.HostCgroup(n.Name)} {
		if err := cgroup.Create(dir); err != nil {
			return err
		}
	}
	return node.AgentConfig{
		Node: n.Name, RunDir: lay.NodeDir(n.Name), PinPath: lay.PinPath(n.Name), CgroupRoot: lay.NodeCgroup(n.Name),
		Folder: lay.ClusterDir(), Tunnel: n.lab.cfg.Tunnel, Extra: n.lab.cfg.Agent,
	}.Write(lay.AgentConfig(n.Name))
}

// startAgent starts the agent and waits for it to be ready.
func (n *labNode) startAgent(ctx context.Context) error {
	began := time.Now()
	if err := n.agent.Start(); err != nil {
		return err
	}
	if err := n.agent.WaitReady(ctx); err != nil {
		return fmt.Errorf("%s: agent: %w%s", n.Name, err, lastLines("agent", n.lab.layout.AgentLog(n.Name)))
	}
	n.lab.progress("%s: agent ready after %s", n.Name, time.Since(began).Round(time.Millisecond))
	return nil
}

// shutdown ends the pods at once and the agent in an orderly way.
func (n *labNode) shutdown() error {
	err := cgroup.Kill(filepath.Join(n.lab.layout.NodeCgroup(n.Name), "pods"))
	return errors.Join(err, n.agent.Stop(context.Background()), n.log.Close())
}

// lastLines is the end of a log of who, to follow a message.
func lastLines(who, path string) string {
	text := ""
	for _, line := range logfile.Tail(path, 5) {
		text += "\n    " + who + " | " + line
	}
	return text
}
