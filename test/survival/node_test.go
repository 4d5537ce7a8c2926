// SPDX-License-Identifier: Apache-2.0

package survival

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/weft-mesh/weft/internal/cgroup"
	"github.com/weft-mesh/weft/internal/lab/layout"
	"github.com/weft-mesh/weft/internal/lab/node"
	"github.com/weft-mesh/weft/internal/netdev"
	"github.com/weft-mesh/weft/test/testlab"
)

// lonely is a node with a real agent and without a lab's daemon, for what a lab
// does not do: a large pod CIDR, and a runtime that loses its DELs. It lies where
// a lab of its name would, and goes with that.
type lonely struct {
	lab    *testlab.Lab
	layout layout.Layout
	agent  *node.Agent
	cni    *cniRuntime
	cidrs  []netip.Prefix
	log    *os.File
}

const lonelyName = "n1"

// lonelyPods is how many pods the node's manifests have: p0, p1...
const lonelyPods = 50

func newLonely(t *testing.T) *lonely {
	t.Helper()
	l := testlab.New(t)
	lay, err := layout.New(l.Name)
	if err != nil {
		t.Fatal(err)
	}
	lay.Root = l.Root
	n := &lonely{lab: l, layout: lay, cidrs: []netip.Prefix{
		netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:10:244::/64"),
	}}
	for _, step := range []func() error{n.makeFolders, n.makeNetwork, n.writeManifests, n.writeConfig, n.prepare} {
		if err := step(); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		if err := n.agent.Stop(context.Background()); err != nil {
			t.Error(err)
		}
		n.log.Close()
	})
	n.start(t)
	return n
}

func (n *lonely) makeFolders() error {
	for _, dir := range []string{n.layout.NodeDir(lonelyName), n.layout.ClusterDir()} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	return cgroup.Create(n.layout.AgentCgroup(lonelyName))
}

func (n *lonely) makeNetwork() error {
	for _, name := range []string{n.layout.UnderlayNetNS(), n.layout.NodeNetNS(lonelyName)} {
		if err := netdev.CreateNetNS(name); err != nil {
			return err
		}
	}
	prefixes := func(s ...string) (out []netip.Prefix) {
		for _, p := range s {
			out = append(out, netip.MustParsePrefix(p))
		}
		return out
	}
	return netdev.CreateVeth(
		netdev.LabLink{NetNS: n.layout.UnderlayNetNS(), Name: lonelyName, Addresses: prefixes("172.30.0.254/24", "fd00:172:30::fe/64")},
		netdev.LabLink{
			NetNS: n.layout.NodeNetNS(lonelyName), Name: "eth0", Addresses: prefixes("172.30.0.1/24", "fd00:172:30::1/64"),
			Gateways: []netip.Addr{netip.MustParseAddr("172.30.0.254"), netip.MustParseAddr("fd00:172:30::fe")},
		}, 1500)
}

func (n *lonely) writeManifests() error {
	var b strings.Builder
	fmt.Fprintf(&b, `apiVersion: v1
kind: Node
metadata: {name: %s}
spec: {podCIDRs: [%q, %q]}
status: {addresses: [{type: InternalIP, address: 172.30.0.1}, {type: InternalIP, address: "fd00:172:30::1"}]}
---
apiVersion: v1
kind: Namespace
metadata: {name: default}
`, lonelyName, n.cidrs[0], n.cidrs[1])
	for i := range lonelyPods {
		b.WriteString(pod(fmt.Sprintf("p%d", i), lonelyName, "sleep"))
	}
	return os.WriteFile(filepath.Join(n.layout.ClusterDir(), "cluster.yaml"), []byte(b.String()), 0o644)
}

func (n *lonely) writeConfig() error {
	return node.AgentConfig{
		Node: lonelyName, RunDir: n.layout.NodeDir(lonelyName), PinPath: n.layout.PinPath(lonelyName),
		CgroupRoot: n.layout.NodeCgroup(lonelyName), Folder: n.layout.ClusterDir(), Tunnel: "none",
	}.Write(n.layout.AgentConfig(lonelyName))
}

func (n *lonely) prepare() (err error) {
	if n.log, err = os.Create(n.layout.AgentLog(lonelyName)); err != nil {
		return err
	}
	weft := filepath.Join(n.lab.Bin, "weft")
	n.agent = node.New(node.Config{
		Name: lonelyName, Weft: weft, ConfigFile: n.layout.AgentConfig(lonelyName), Socket: n.layout.NodeSocket(lonelyName),
		NetNS: n.netns(), Cgroup: n.layout.AgentCgroup(lonelyName), Log: n.log, Env: os.Environ(), Changed: func() {},
	})
	n.cni, err = newRuntime(n.netns(), n.lab.Bin, n.cacheDir(), n.layout.NodeSocket(lonelyName), n.stateDir())
	return err
}

func (n *lonely) netns() string    { return netdev.NetNSPath(n.layout.NodeNetNS(lonelyName)) }
func (n *lonely) stateDir() string { return filepath.Join(n.layout.NodeDir(lonelyName), "cni") }
func (n *lonely) cacheDir() string { return filepath.Join(n.layout.NodeDir(lonelyName), "cni-cache") }

func (n *lonely) start(t testing.TB) {
	t.Helper()
	if err := n.agent.Start(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), waitTime)
	defer cancel()
	if err := n.agent.WaitReady(ctx); err != nil {
		t.Fatal(err)
	}
}

// podLinks are the node's sides of pods.
func (n *lonely) podLinks(t *testing.T) []string {
	t.Helper()
	var names []string
	err := netdev.InNetNS(n.netns(), func() error {
		net, err := netdev.Open()
		if err != nil {
			return err
		}
		defer net.Close()
		links, err := net.PodLinks()
		for _, l := range links {
			names = append(names, l.Name)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}
