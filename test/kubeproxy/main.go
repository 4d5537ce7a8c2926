// SPDX-License-Identifier: Apache-2.0

// Kubeproxy is what weft's services are measured beside: kube-proxy as
// Kubernetes ships it, with the API server and the etcd that feed it, in one
// program. The name that it is called by chooses the component.
package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
)

func main() {
	var component *cobra.Command
	switch name := filepath.Base(os.Args[0]); name {
	case "etcd":
		etcdmain.Main(os.Args)
		return
	case "kube-apiserver":
		component = apiserver.NewAPIServerCommand()
	case "kube-proxy":
		component = proxy.NewProxyCommand()
	default:
		fmt.Fprintf(os.Stderr, "%s: call it etcd, kube-apiserver or kube-proxy\n", name)
		os.Exit(2)
	}
	os.Exit(cli.Run(component))
}
