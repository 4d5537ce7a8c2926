// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"
)

// Defaults of the network configuration.
const (
	defaultSocket   = "/run/weft/weft.sock"
	defaultStateDir = "/run/weft/cni"
)

// config is the network configuration. Socket and StateDir are weft's own
// fields, both absolute paths.
type config struct {
	types.PluginConf
	Socket   string `json:"socket"`
	StateDir string `json:"stateDir"`

	RuntimeConfig struct {
		PortMappings []portMapping `json:"portMappings"`
	} `json:"runtimeConfig"`
}

// portMapping is what a runtime passes for a container's hostPort.
type portMapping struct {
	HostPort      int    `json:"hostPort"`
	ContainerPort int    `json:"containerPort"`
	Protocol      string `json:"protocol"`
	HostIP        string `json:"hostIP"`
}

// known are the fields that a configuration may have. Those of the CNI
// specification that weft has no use for are let through, as a runtime may add
// them; so is what begins with "cni.dev/".
var known = []string{
	"socket", "stateDir",
	"args", "capabilities", "cniVersion", "cniVersions", "disableCheck", "disableGC", "dns", "ipMasq", "ipam",
	"loadOnlyInlinedPlugins", "name", "prevResult", "runtimeConfig", "type",
}

func invalid(format string, args ...any) error {
	return types.NewError(types.ErrInvalidNetworkConfig, "weft: network configuration: "+fmt.Sprintf(format, args...), "")
}

// parse reads and checks a network configuration.
func parse(data []byte) (*config, error) {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(data, &fields); err != nil {
		return nil, types.NewError(types.ErrDecodingFailure, "weft: network configuration: "+err.Error(), "")
	}
	for _, f := range slices.Sorted(maps.Keys(fields)) {
		if !slices.Contains(known, f) && !strings.HasPrefix(f, "cni.dev/") {
			return nil, invalid("unknown field %q: weft's own fields are socket and stateDir", f)
		}
	}
	c := &config{Socket: defaultSocket, StateDir: defaultStateDir}
	if err := json.Unmarshal(data, c); err != nil {
		return nil, types.NewError(types.ErrDecodingFailure, "weft: network configuration: "+err.Error(), "")
	}
	if !c.IPAM.IsEmpty() {
		return nil, invalid("ipam.type %q: weft gives addresses itself, leave ipam out", c.IPAM.Type)
	}
	for name, path := range map[string]string{"socket": c.Socket, "stateDir": c.StateDir} {
		if !filepath.IsAbs(path) {
			return nil, invalid("%s %q: want an absolute path", name, path)
		}
	}
	return c, nil
}

// refuseHostPorts fails if the pod wants a port of the node: weft has none to
// give.
func (c *config) refuseHostPorts() error {
	for _, m := range c.RuntimeConfig.PortMappings {
		if m.HostPort != 0 {
			return types.NewError(types.ErrUnsupportedField, fmt.Sprintf(
				"weft: runtimeConfig.portMappings: hostPort %d (container port %d/%s) is not supported: use a Service, or hostNetwork",
				m.HostPort, m.ContainerPort, m.Protocol), "")
		}
	}
	return nil
}

// previousIPs returns the addresses of prevResult that belong to the pod, with
// prefix length.
func (c *config) previousIPs() ([]string, error) {
	if c.RawPrevResult == nil {
		return nil, invalid("prevResult is missing, which CHECK needs")
	}
	if err := version.ParsePrevResult(&c.PluginConf); err != nil {
		return nil, types.NewError(types.ErrDecodingFailure, "weft: prevResult: "+err.Error(), "")
	}
	res, err := current.NewResultFromResult(c.PrevResult)
	if err != nil {
		return nil, types.NewError(types.ErrDecodingFailure, "weft: prevResult: "+err.Error(), "")
	}
	out := make([]string, len(res.IPs))
	for i, ip := range res.IPs {
		out[i] = ip.Address.String()
	}
	return out, nil
}

// pod names the pod that a runtime wants to have wired.
type pod struct{ namespace, name, uid string }

// podOf reads CNI_ARGS, "KEY=VALUE;KEY=VALUE"; other keys do not concern weft.
func podOf(args string) (pod, error) {
	var p pod
	targets := map[string]*string{"K8S_POD_NAMESPACE": &p.namespace, "K8S_POD_NAME": &p.name, "K8S_POD_UID": &p.uid}
	for _, arg := range strings.Split(args, ";") {
		key, value, _ := strings.Cut(arg, "=")
		if t := targets[key]; t != nil {
			*t = value
		}
	}
	if p.namespace == "" || p.name == "" {
		return pod{}, types.NewError(types.ErrInvalidEnvironmentVariables,
			"weft: CNI_ARGS must have K8S_POD_NAMESPACE and K8S_POD_NAME: weft wires Kubernetes pods only", "")
	}
	return p, nil
}
