// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestResolvConf(t *testing.T) {
	const head = "# Written by weft lab.\n"
	const search = "search ns.svc.cluster.local svc.cluster.local cluster.local"
	cluster := []netip.Addr{netip.MustParseAddr("10.96.0.10"), netip.MustParseAddr("fd00:10:96::a")}
	two := "2"
	own := &corev1.PodDNSConfig{
		Nameservers: []string{"192.0.2.1"}, Searches: []string{"example.com"},
		Options: []corev1.PodDNSConfigOption{{Name: "ndots", Value: &two}, {Name: "rotate"}},
	}
	for _, c := range []struct {
		name    string
		spec    corev1.PodSpec
		servers []netip.Addr
		want    string
	}{
		{"no server", corev1.PodSpec{}, nil, search + "\noptions ndots:5\n"},
		{"by default", corev1.PodSpec{}, cluster, "nameserver 10.96.0.10\nnameserver fd00:10:96::a\n" + search + "\noptions ndots:5\n"},
		{"with more", corev1.PodSpec{DNSPolicy: corev1.DNSClusterFirst, DNSConfig: own}, cluster[:1],
			"nameserver 10.96.0.10\nnameserver 192.0.2.1\n" + search + " example.com\noptions ndots:2\noptions rotate\n"},
		{"only its own", corev1.PodSpec{DNSPolicy: corev1.DNSNone, DNSConfig: own}, cluster,
			"nameserver 192.0.2.1\nsearch example.com\noptions ndots:2\noptions rotate\n"},
		{"the node's", corev1.PodSpec{DNSPolicy: corev1.DNSDefault}, cluster, ""},
		{"on the node's network", corev1.PodSpec{HostNetwork: true}, cluster, ""},
		{"on the node's network, asking for it", corev1.PodSpec{HostNetwork: true, DNSPolicy: corev1.DNSClusterFirstWithHostNet}, cluster[:1],
			"nameserver 10.96.0.10\n" + search + "\noptions ndots:5\n"},
	} {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns"}, Spec: c.spec}
		if diff := cmp.Diff(head+c.want, resolvConf(pod, c.servers)); diff != "" {
			t.Errorf("%s: %s", c.name, diff)
		}
	}
}
