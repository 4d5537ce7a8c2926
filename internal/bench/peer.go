// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"net/netip"
	"time"

	"github.com/weft-mesh/weft/internal/bench/kubeproxy"
)

var peerAbout = map[kubeproxy.Mode]string{
	kubeproxy.IPTables: "kube-proxy, iptables by the legacy binaries, in the node's namespace",
	kubeproxy.NFTables: "kube-proxy, nftables, in the node's namespace",
}

// peer is kube-proxy on a node.
type peer struct {
	config  kubeproxy.Config
	mode    kubeproxy.Mode
	fleet   fleet
	cluster *kubeproxy.Cluster
}

func newPeer(binaries string, mode kubeproxy.Mode, f fleet, n *node) *peer {
	return &peer{mode: mode, fleet: f, config: kubeproxy.Config{
		Binaries: binaries, NetNS: NetnsPath(n.router), Folder: n.folder, Node: n.address, PodCIDR: n.pods, Cgroup: n.other,
	}}
}

// start counts from kube-proxy's own start: the API server is there before.
func (p *peer) start(ctx context.Context) (time.Duration, error) {
	objects, err := p.fleet.objects()
	if err != nil {
		return 0, err
	}
	if p.cluster, err = kubeproxy.Start(ctx, p.config, objects); err != nil {
		return 0, err
	}
	began := monotonic()
	return began, p.cluster.StartProxy(p.mode)
}

func (p *peer) synced(ctx context.Context) (float64, error) {
	return p.cluster.SyncSeconds(ctx)
}

func (*peer) ways() []string { return []string{"API"} }

func (p *peer) change(ctx context.Context, _ string, i int, endpoints []netip.Addr) (time.Duration, error) {
	path, body, err := p.fleet.patch(i, endpoints)
	if err != nil {
		return 0, err
	}
	began := monotonic()
	return began, p.cluster.Patch(ctx, path, body)
}

func (*peer) memory(context.Context) (*Memory, error) { return nil, nil }

func (p *peer) log() string {
	if p.cluster == nil {
		return ""
	}
	return p.cluster.ProxyLog()
}

// remove has nothing to do: the rules go with the namespace.
func (*peer) remove() error { return nil }

func (p *peer) stop() error {
	if p.cluster == nil {
		return nil
	}
	err := p.cluster.Close()
	p.cluster = nil
	return err
}
