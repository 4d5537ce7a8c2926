// SPDX-License-Identifier: Apache-2.0

package kubeproxy

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// legacyBinary is iptables as it was before nftables; it acts by the name it is
// called by.
const legacyBinary = "xtables-legacy-multi"

// legacyPath is a PATH with the legacy iptables first.
func (c *Cluster) legacyPath() (string, error) {
	binary, err := exec.LookPath(legacyBinary)
	if err != nil {
		return "", fmt.Errorf("legacy iptables: %w", err)
	}
	if c.legacies == "" {
		folder := filepath.Join(c.folder, "legacy")
		if err := os.Mkdir(folder, 0o700); err != nil {
			return "", err
		}
		for _, tool := range []string{"iptables", "ip6tables"} {
			for _, verb := range []string{"", "-save", "-restore"} {
				if err := os.Symlink(binary, filepath.Join(folder, tool+verb)); err != nil {
					return "", err
				}
			}
		}
		c.legacies = folder
	}
	return c.legacies + ":" + os.Getenv("PATH"), nil
}

// writeKey writes a key to sign service accounts with; nobody asks for one.
func (c *Cluster) writeKey() (string, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return "", err
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return "", err
	}
	path := filepath.Join(c.folder, "accounts.key")
	return path, os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}), 0o600)
}

// proxyConfig writes kube-proxy's configuration. What is not named has
// Kubernetes' default.
func (c *Cluster) proxyConfig(mode Mode) (string, error) {
	kubeconfig, err := c.writeJSON("kubeconfig", map[string]any{
		"apiVersion": "v1", "kind": "Config", "current-context": "c",
		"clusters": []any{map[string]any{"name": "c", "cluster": map[string]any{"server": "https://" + apiAddress, "insecure-skip-tls-verify": true}}},
		"contexts": []any{map[string]any{"name": "c", "context": map[string]any{"cluster": "c", "user": "u"}}},
		"users":    []any{map[string]any{"name": "u", "user": map[string]any{"token": token}}},
	})
	if err != nil {
		return "", err
	}
	return c.writeJSON("proxy-"+string(mode), map[string]any{
		"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",
		"mode": mode, "hostnameOverride": nodeName, "bindAddress": c.config.Node.String(),
		"clusterCIDR": c.config.PodCIDR.String(), "detectLocalMode": "ClusterCIDR",
		"nodePortAddresses": []string{"primary"}, "metricsBindAddress": metricsAddress,
		"clientConnection": map[string]any{"kubeconfig": kubeconfig},
		// The machine's limits stay as they are.
		"conntrack": map[string]any{"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
	})
}

func (c *Cluster) writeJSON(name string, v any) (string, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return "", err
	}
	path := filepath.Join(c.folder, name+".json")
	return path, os.WriteFile(path, b, 0o600)
}
