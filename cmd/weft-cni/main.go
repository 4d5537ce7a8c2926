// SPDX-License-Identifier: Apache-2.0

// Command weft-cni is the CNI plugin of weft: a runtime calls it to wire a pod,
// and it asks the agent of the node.
package main

import (
	"os"

	"github.com/containernetworking/cni/pkg/skel"

	"github.com/weft-mesh/weft/internal/source/cni/plugin"
	"github.com/weft-mesh/weft/internal/version"
)

func main() {
	p := &plugin.Plugin{Stdout: os.Stdout, Timeouts: plugin.DefaultTimeouts}
	skel.PluginMainFuncs(p.Funcs(), plugin.Versions(), "weft-cni "+version.String())
}
