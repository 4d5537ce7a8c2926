// SPDX-License-Identifier: Apache-2.0

package netpolapi

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/kubernetes"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	api "sigs.k8s.io/network-policy-api/apis/v1beta1"
	"sigs.k8s.io/network-policy-api/conformance/tests"
	"sigs.k8s.io/network-policy-api/conformance/utils/config"
	"sigs.k8s.io/network-policy-api/conformance/utils/suite"

	"github.com/weft-mesh/weft/test/proberlab"
)

// timeouts are shorter than those of real clusters: a change is in force when
// the call that made it returns.
var timeouts = config.TimeoutConfig{
	RequestTimeout:        400 * time.Millisecond,
	PokeTimeout:           2 * time.Second,
	PokeInterval:          100 * time.Millisecond,
	NamespacesMustBeReady: time.Minute,
}

// TestConformance runs the conformance tests of the ClusterNetworkPolicy
// profile, with its optional features, as they are in the module: their code,
// their manifests. Only what is below is ours: instead of a cluster there is a
// lab, and probers instead of agnhost. All tests run by IPv4 and then by IPv6.
func TestConformance(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("this test makes network namespaces and BPF programs: run it as root")
	}
	began := time.Now()
	s, c, exec := newSuite(t)
	if len(tests.ConformanceTests) == 0 {
		t.Fatal("the module has no tests")
	}
	count := map[bool]int{}
	var failed []string
	for _, family := range families(t) {
		c.setFamily(family)
		for _, test := range tests.ConformanceTests {
			name := fmt.Sprintf("%s/IPv%d", test.ShortName, family)
			ok := t.Run(name, func(t *testing.T) { test.Run(t, s) })
			count[ok]++
			if !ok {
				failed = append(failed, name)
			}
		}
	}
	exec.mu.Lock()
	defer exec.mu.Unlock()
	for _, name := range failed {
		fmt.Println("FAILED", name)
	}
	fmt.Printf("network-policy-api v0.3.0, ClusterNetworkPolicy: %d tests, %d runs of them, %d passed, %d failed; pokes: %v; %.1f s\n",
		len(tests.ConformanceTests), count[true]+count[false], count[true], count[false], exec.pokes, time.Since(began).Seconds())
}

// families are those of WEFT_FAMILIES, or both.
func families(t *testing.T) (list []int) {
	text := os.Getenv("WEFT_FAMILIES")
	if text == "" {
		return []int{4, 6}
	}
	for _, word := range strings.Split(text, ",") {
		n, err := strconv.Atoi(word)
		if err != nil || (n != 4 && n != 6) {
			t.Fatalf("WEFT_FAMILIES %q: want 4, 6 or 4,6", text)
		}
		list = append(list, n)
	}
	return list
}

// newSuite is the module's suite in front of a lab that has its base manifests.
func newSuite(t *testing.T) (*suite.ConformanceTestSuite, *labClient, *execServer) {
	t.Helper()
	o := proberlab.Options{Prefix: "npa", Nodes: 2, Tunnel: "none"}
	l, err := proberlab.New(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Down(); err != nil {
			t.Error(err)
		}
	})
	if err := l.Up(t.Context(), o, proberlab.Objects{}); err != nil {
		t.Fatal(err)
	}
	scheme := clientgoscheme.Scheme
	if err := api.Install(scheme); err != nil {
		t.Fatal(err)
	}
	exec := newExecServer(l)
	t.Cleanup(exec.http.Close)
	cfg := &rest.Config{Host: exec.http.URL}
	clients, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	c := newLabClient(l, o.Nodes, scheme)
	s := suite.New(suite.Options{Client: c, ClientSet: clients, KubeConfig: *cfg, TimeoutConfig: timeouts, EnableAllSupportedFeatures: true})
	s.Setup(t)
	return s, c, exec
}
