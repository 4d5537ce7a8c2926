// SPDX-License-Identifier: Apache-2.0

package kubeproxy

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/weft-mesh/weft/internal/netdev/nstest"
)

func TestSumSyncs(t *testing.T) {
	const metrics = `# TYPE kubeproxy_sync_proxy_rules_duration_seconds histogram
kubeproxy_sync_proxy_rules_duration_seconds_bucket{ip_family="IPv4",le="0.001"} 0
kubeproxy_sync_proxy_rules_duration_seconds_sum{ip_family="IPv4"} 1.5
kubeproxy_sync_proxy_rules_duration_seconds_count{ip_family="IPv4"} 2
kubeproxy_sync_proxy_rules_duration_seconds_sum{ip_family="IPv6"} 0.25
kubeproxy_sync_proxy_rules_duration_seconds_count{ip_family="IPv6"} 1
kubeproxy_sync_full_proxy_rules_duration_seconds_sum 7
`
	if seconds, count, err := sumSyncs(strings.NewReader(metrics)); seconds != 1.75 || count != 3 || err != nil {
		t.Errorf("%v s, %v times, %v", seconds, count, err)
	}
	if _, _, err := sumSyncs(strings.NewReader("kubeproxy_sync_proxy_rules_duration_seconds_sum x\n")); err == nil {
		t.Error("no error of a metric that is no number")
	}
}

// Objects reach etcd in the node's namespace, as many at a time as it takes.
func TestStore(t *testing.T) {
	ns := nstest.New(t)
	var listener net.Listener
	err := ns.Do(func() (err error) {
		if out, err := exec.Command("ip", "link", "set", "lo", "up").CombinedOutput(); err != nil {
			return fmt.Errorf("ip link: %w: %s", err, out)
		}
		listener, err = net.Listen("tcp", etcdAddress)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	var sizes []int
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var body struct {
			Success []struct{ RequestPut struct{ Key, Value []byte } }
		}
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil || r.URL.Path != "/v3/kv/txn" {
			http.Error(w, fmt.Sprint(r.URL, err), http.StatusBadRequest)
			return
		}
		sizes = append(sizes, len(body.Success))
		if put := body.Success[0].RequestPut; !strings.HasPrefix(string(put.Key), "/registry/") || !json.Valid(put.Value) {
			http.Error(w, "not an object", http.StatusBadRequest)
		}
	})}
	go func() { _ = server.Serve(listener) }()
	defer server.Close()
	a := newAPI(ns.Path())
	defer a.client.CloseIdleConnections()
	objects := make([]Object, 300)
	for i := range objects {
		objects[i] = nodeObject(netip.MustParseAddr("10.0.0.1"))
	}
	if err := a.store(t.Context(), objects); err != nil {
		t.Fatal(err)
	}
	if fmt.Sprint(sizes) != "[128 128 44]" {
		t.Errorf("transactions of %v objects", sizes)
	}
}

func TestProxyConfig(t *testing.T) {
	c := &Cluster{folder: t.TempDir(), config: Config{Node: netip.MustParseAddr("10.0.0.1"), PodCIDR: netip.MustParsePrefix("10.244.1.0/24")}}
	path, err := c.proxyConfig(NFTables)
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`"mode":"nftables"`, `"bindAddress":"10.0.0.1"`, `"clusterCIDR":"10.244.1.0/24"`, `"maxPerCore":0`} {
		if !strings.Contains(string(text), want) {
			t.Errorf("no %s in %s", want, text)
		}
	}
	kubeconfig, err := os.ReadFile(filepath.Join(c.folder, "kubeconfig.json"))
	if err != nil || !strings.Contains(string(kubeconfig), token) {
		t.Errorf("%s, %v", kubeconfig, err)
	}
}

func TestCheckNamesWhatIsMissing(t *testing.T) {
	err := Check(t.TempDir())
	if err == nil || !strings.Contains(err.Error(), "binary of etcd (test/kubeproxy/build.sh makes it)") {
		t.Errorf("error %v", err)
	}
}
