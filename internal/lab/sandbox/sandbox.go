// SPDX-License-Identifier: Apache-2.0

// Package sandbox makes what the containers of a pod share: a network namespace,
// wired by the CNI plugin the way a container runtime does it, and UTS and IPC
// namespaces.
package sandbox

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"
	"golang.org/x/sys/unix"

	"github.com/weft-mesh/weft/internal/lab/shim"
)

// network is the name of the one network of a lab.
const network = "weft"

// CNI runs the CNI plugin of one node.
type CNI struct {
	list *libcni.NetworkConfigList
	cni  *libcni.CNIConfig
}

// Config says where the things of a node's CNI are; all fields are required.
type Config struct {
	Weft   string // executable
	BinDir string // folder of weft-cni
	NetNS  string // file of the node's network namespace, where the plugin runs
	Socket string // of the node's agent
	// StateDir is for the plugin, CacheDir for results, as a runtime keeps them.
	StateDir, CacheDir string
}

// NewCNI prepares the plugin's network configuration.
func NewCNI(c Config) (*CNI, error) {
	conf := map[string]any{
		"cniVersion": "1.1.0",
		"name":       network,
		"plugins": []any{map[string]any{
			"type": "weft-cni", "socket": c.Socket, "stateDir": c.StateDir,
		}},
	}
	b, err := json.Marshal(conf)
	if err != nil {
		return nil, fmt.Errorf("encode CNI configuration: %w", err)
	}
	list, err := libcni.NetworkConfFromBytes(b)
	if err != nil {
		return nil, fmt.Errorf("read CNI configuration: %w", err)
	}
	x := &nodeExec{weft: c.Weft, netns: c.NetNS}
	return &CNI{list: list, cni: libcni.NewCNIConfigWithCacheDir([]string{c.BinDir}, c.CacheDir, x)}, nil
}

// Pod is a sandbox as the CNI plugin is told about it.
type Pod struct {
	ID        string // of the container, unique
	NetNS     string // file of the network namespace
	Namespace string
	Name      string
	UID       string
}

func (p Pod) runtimeConf() *libcni.RuntimeConf {
	return &libcni.RuntimeConf{
		ContainerID: p.ID,
		NetNS:       p.NetNS,
		IfName:      "eth0",
		Args: [][2]string{
			{"IgnoreUnknown", "1"},
			{"K8S_POD_NAMESPACE", p.Namespace},
			{"K8S_POD_NAME", p.Name},
			{"K8S_POD_INFRA_CONTAINER_ID", p.ID},
			{"K8S_POD_UID", p.UID},
		},
	}
}

// Add wires a pod and returns its addresses.
func (c *CNI) Add(ctx context.Context, p Pod) ([]netip.Addr, error) {
	res, err := c.cni.AddNetworkList(ctx, c.list, p.runtimeConf())
	if err != nil {
		return nil, fmt.Errorf("CNI ADD: %w", err)
	}
	result, err := types100.NewResultFromResult(res)
	if err != nil {
		return nil, fmt.Errorf("read the result of CNI ADD: %w", err)
	}
	var ips []netip.Addr
	for _, ip := range result.IPs {
		a, ok := netip.AddrFromSlice(ip.Address.IP)
		if !ok {
			return nil, fmt.Errorf("read the result of CNI ADD: address %v", ip.Address)
		}
		ips = append(ips, a.Unmap())
	}
	if len(ips) == 0 {
		return nil, errors.New("read the result of CNI ADD: no address")
	}
	return ips, nil
}

// Del takes the wiring away; repeating it is no error.
func (c *CNI) Del(ctx context.Context, p Pod) error {
	if err := c.cni.DelNetworkList(ctx, c.list, p.runtimeConf()); err != nil {
		return fmt.Errorf("CNI DEL: %w", err)
	}
	return nil
}

// nodeExec runs plugins in the network namespace of a node.
type nodeExec struct {
	version.PluginDecoder
	weft, netns string
}

func (*nodeExec) FindInPath(plugin string, paths []string) (string, error) {
	return invoke.FindInPath(plugin, paths)
}

func (x *nodeExec) ExecPlugin(ctx context.Context, plugin string, stdin []byte, env []string) ([]byte, error) {
	args, err := shim.Command(shim.Spec{NetNS: x.netns, Argv: []string{plugin}})
	if err != nil {
		return nil, err
	}
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, x.weft, args...)
	cmd.Env, cmd.Stdin, cmd.Stdout, cmd.Stderr = env, bytes.NewReader(stdin), &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return nil, pluginError(err, stdout.Bytes(), stderr.String())
	}
	return stdout.Bytes(), nil
}

// pluginError prefers the error that the plugin itself printed.
func pluginError(err error, stdout []byte, stderr string) error {
	reported := types.Error{}
	if json.Unmarshal(stdout, &reported) == nil && reported.Msg != "" {
		return &reported
	}
	if text := strings.TrimSpace(stderr); text != "" {
		return fmt.Errorf("run the plugin: %w: %s", err, text)
	}
	return fmt.Errorf("run the plugin: %w", err)
}

// Share makes UTS and IPC namespaces and keeps them at the files dir/uts and
// dir/ipc until Unshare.
func Share(dir, hostname string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make a folder for namespaces: %w", err)
	}
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // for ever: the thread ends with the goroutine
		done <- share(dir, hostname)
	}()
	if err := <-done; err != nil {
		return errors.Join(fmt.Errorf("make namespaces of the pod: %w", err), Unshare(dir))
	}
	return nil
}

func share(dir, hostname string) error {
	if err := unix.Unshare(unix.CLONE_NEWUTS | unix.CLONE_NEWIPC); err != nil {
		return fmt.Errorf("unshare: %w", err)
	}
	if err := unix.Sethostname([]byte(hostname[:min(len(hostname), 63)])); err != nil {
		return fmt.Errorf("set host name: %w", err)
	}
	for _, kind := range []string{"uts", "ipc"} {
		at := filepath.Join(dir, kind)
		if err := os.WriteFile(at, nil, 0o444); err != nil {
			return fmt.Errorf("make a mount point: %w", err)
		}
		if err := unix.Mount("/proc/thread-self/ns/"+kind, at, "none", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("keep the %s namespace: %w", kind, err)
		}
	}
	return nil
}

// Unshare lets the namespaces go and removes their folder; repeating it is no
// error.
func Unshare(dir string) error {
	for _, kind := range []string{"uts", "ipc"} {
		err := unix.Unmount(filepath.Join(dir, kind), unix.MNT_DETACH)
		if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("unmount the %s namespace of a pod: %w", kind, err)
		}
	}
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("remove the folder of a pod's namespaces: %w", err)
	}
	return nil
}
