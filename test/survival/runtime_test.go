// SPDX-License-Identifier: Apache-2.0

package survival

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"

	"github.com/containernetworking/cni/libcni"
	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/weft-mesh/weft/internal/netdev"
)

// container is a pod's sandbox as a runtime tells the CNI plugin about it.
type container struct {
	id    string
	netns string // file
	pod   string // of the namespace default
}

func (c container) conf() *libcni.RuntimeConf {
	return &libcni.RuntimeConf{
		ContainerID: c.id, NetNS: c.netns, IfName: "eth0",
		Args: [][2]string{{"IgnoreUnknown", "1"}, {"K8S_POD_NAMESPACE", "default"}, {"K8S_POD_NAME", c.pod}},
	}
}

// cniRuntime calls the plugin as a container runtime does, all verbs of it, in
// the network of a node.
type cniRuntime struct {
	netns string // file, of the node
	cni   *libcni.CNIConfig
	list  *libcni.NetworkConfigList
}

func newRuntime(netns, bin, cache, socket, stateDir string) (*cniRuntime, error) {
	conf, err := json.Marshal(map[string]any{
		"cniVersion": "1.1.0", "name": "weft",
		"plugins": []any{map[string]any{"type": "weft-cni", "socket": socket, "stateDir": stateDir}},
	})
	if err != nil {
		return nil, err
	}
	list, err := libcni.NetworkConfFromBytes(conf)
	if err != nil {
		return nil, err
	}
	return &cniRuntime{netns: netns, list: list, cni: libcni.NewCNIConfigWithCacheDir([]string{bin}, cache, nil)}, nil
}

// here runs call on a thread in the node's network; the plugin that it starts is
// there, too.
func (r *cniRuntime) here(verb string, call func() error) error {
	if err := netdev.InNetNS(r.netns, call); err != nil {
		return fmt.Errorf("CNI %s: %w", verb, err)
	}
	return nil
}

func (r *cniRuntime) add(ctx context.Context, c container) (ips []netip.Addr, err error) {
	err = r.here("ADD", func() error {
		res, err := r.cni.AddNetworkList(ctx, r.list, c.conf())
		if err != nil {
			return err
		}
		result, err := types100.NewResultFromResult(res)
		if err != nil {
			return err
		}
		for _, ip := range result.IPs {
			a, _ := netip.AddrFromSlice(ip.Address.IP)
			ips = append(ips, a.Unmap())
		}
		if len(ips) != 2 {
			return fmt.Errorf("the pod has addresses %v, want one of each family", ips)
		}
		return nil
	})
	return ips, err
}

func (r *cniRuntime) check(ctx context.Context, c container) error {
	return r.here("CHECK", func() error { return r.cni.CheckNetworkList(ctx, r.list, c.conf()) })
}

func (r *cniRuntime) del(ctx context.Context, c container) error {
	return r.here("DEL", func() error { return r.cni.DelNetworkList(ctx, r.list, c.conf()) })
}

// gc names no attachment at all.
func (r *cniRuntime) gc(ctx context.Context) error {
	return r.here("GC", func() error { return r.cni.GCNetworkList(ctx, r.list, &libcni.GCArgs{}) })
}
