// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	policyv1alpha2 "sigs.k8s.io/network-policy-api/apis/v1alpha2"

	weftv1 "github.com/weft-mesh/weft/api/weft/v1"
	"github.com/weft-mesh/weft/internal/admin"
	"github.com/weft-mesh/weft/internal/enforce"
	"github.com/weft-mesh/weft/internal/policy"
	"github.com/weft-mesh/weft/internal/state"
)

// fakePolicy is what an agent has in force.
type fakePolicy struct {
	status enforce.Status
	result *policy.Result
	pods   []policy.Pod
}

func (p *fakePolicy) Status() enforce.Status { return p.status }

func (p *fakePolicy) State() (*policy.Result, []policy.Pod, error) { return p.result, p.pods, nil }

func samplePolicies() []*state.Policy {
	first, last, tcp := intstr.FromInt32(8000), int32(8100), corev1.ProtocolTCP
	web := metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}
	return []*state.Policy{
		{Kind: "NetworkPolicy", Namespace: "shop", Name: "web", NetworkPolicy: &networkingv1.NetworkPolicySpec{
			PodSelector: web,
			Ingress: []networkingv1.NetworkPolicyIngressRule{{
				From: []networkingv1.NetworkPolicyPeer{
					{PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "client"}}},
					{IPBlock: &networkingv1.IPBlock{CIDR: "192.0.2.0/24", Except: []string{"192.0.2.128/25"}}},
				},
				Ports: []networkingv1.NetworkPolicyPort{{Port: &first, EndPort: &last, Protocol: &tcp}},
			}},
		}},
		{Kind: "ClusterNetworkPolicy", Name: "guard", ClusterNetworkPolicy: &policyv1alpha2.ClusterNetworkPolicySpec{
			Tier: policyv1alpha2.AdminTier, Priority: 10,
			Subject: policyv1alpha2.ClusterNetworkPolicySubject{Namespaces: &metav1.LabelSelector{}},
			Egress: []policyv1alpha2.ClusterNetworkPolicyEgressRule{{
				Name: "names", Action: "Deny",
				To: []policyv1alpha2.ClusterNetworkPolicyEgressPeer{{Networks: []policyv1alpha2.CIDR{"203.0.113.0/24"}}},
			}, {
				Action: "Accept", To: []policyv1alpha2.ClusterNetworkPolicyEgressPeer{{DomainNames: []policyv1alpha2.DomainName{"example.com"}}},
			}},
		}},
	}
}

// servePolicy runs the API of an agent for the test, at $WEFT_SOCKET.
func servePolicy(t *testing.T) *fakePolicy {
	t.Helper()
	tables, err := state.New()
	if err != nil {
		t.Fatal(err)
	}
	ip := netip.MustParseAddr
	f := &fakePolicy{pods: []policy.Pod{
		{Namespace: "shop", Name: "web", Identity: 256, IPs: []netip.Addr{ip("10.244.1.2"), ip("fd00:10:244:1::2")}, Local: true},
		{Namespace: "shop", Name: "client", Identity: 257, IPs: []netip.Addr{ip("10.244.2.2"), ip("fd00:10:244:2::2")}},
		{Namespace: "bank", Name: "open", Identity: 258, IPs: []netip.Addr{ip("10.244.1.3")}, Local: true},
	}}
	in := policy.Input{Policies: samplePolicies(), Pods: f.pods}
	txn := tables.DB.WriteTxn(tables.Policies, tables.Identities, tables.Workloads)
	for _, p := range in.Policies {
		tables.Policies.Insert(txn, p)
	}
	for i, app := range []string{"web", "client", "open"} {
		id := &state.Identity{ID: uint64(256 + i), Namespace: f.pods[i].Namespace, ServiceAccount: "default", Labels: map[string]string{"app": app}}
		in.Identities = append(in.Identities, id)
		tables.Identities.Insert(txn, id)
	}
	tables.Workloads.Insert(txn, &state.Workload{Namespace: "shop", Name: "client", Node: "node2", IPs: f.pods[1].IPs})
	txn.Commit()
	f.result = policy.Compile(in)
	f.status = enforce.Status{
		Revision: 12, Generation: 34, Changed: time.Unix(1770000000, 0), Policies: 2, Subjects: 2, Endpoints: 2,
		Entries: 20, MaxEntries: 131072, Classes: 3, Problems: f.result.Problems,
	}
	path := filepath.Join(t.TempDir(), "weft.sock")
	s, err := admin.New(admin.Config{Socket: path}, admin.Providers{
		Status: nodeState, Tables: tables, Flows: &fakeFlows{asked: make(chan *weftv1.ObserveRequest, 1)},
		Node: "node1", Policy: func() (admin.Policy, error) { return f, nil },
	}, slog.New(slog.NewTextHandler(io.Discard, nil)))
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	select {
	case <-s.Listening():
	case <-time.After(10 * time.Second):
		t.Fatal("no API")
	}
	t.Setenv(socketEnv, path)
	return f
}

func runPolicy(t *testing.T, args ...string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	root := &cobra.Command{Use: "weft", SilenceUsage: true, SilenceErrors: true}
	root.AddCommand(newPolicyCommand(IO{In: strings.NewReader(""), Out: &out, Err: io.Discard}))
	root.SetOut(&out)
	root.SetArgs(append([]string{"policy"}, args...))
	err := root.ExecuteContext(t.Context())
	return out.String(), err
}

func TestPolicyHelp(t *testing.T) {
	for _, c := range []string{"", "list", "status", "show", "trace"} {
		out, err := runPolicy(t, append(strings.Fields(c), "--help")...)
		if err != nil {
			t.Fatal(err)
		}
		golden(t, strings.TrimSuffix("help-policy-"+c, "-"), out)
	}
}

func TestPolicyOutput(t *testing.T) {
	servePolicy(t)
	for name, args := range map[string]string{
		"list": "list", "status": "status", "show": "show shop/web", "show-open": "show bank/open",
		"trace":     "trace --from shop/client --to shop/web --port 8080/tcp",
		"trace-out": "trace --from shop/web --to 203.0.113.9 --port 443/TCP",
	} {
		for _, format := range []string{"table", "json"} {
			out, err := runPolicy(t, append(strings.Fields(args), "-o", format)...)
			if err != nil {
				t.Fatal(err)
			}
			golden(t, "policy-"+name+"-"+format, out)
		}
	}
}

// TestPolicyNotInForce: the status is printed, and the exit code is not 0.
func TestPolicyNotInForce(t *testing.T) {
	f := servePolicy(t)
	f.status.Err = errors.New("write policy entry 60 of 105: no space left on device")
	for _, format := range []string{"table", "json"} {
		out, err := runPolicy(t, "status", "-o", format)
		if err == nil || err.Error() != "the last change of policy is not in force: "+f.status.Err.Error() {
			t.Errorf("got %v", err)
		}
		golden(t, "policy-status-failed-"+format, out)
	}
}

func TestPolicyErrors(t *testing.T) {
	servePolicy(t)
	for args, want := range map[string]string{
		"list -o yaml":                           `output "yaml": want table or json`,
		"show":                                   "accepts 1 arg(s), received 0",
		"show shop/client":                       `pod "shop/client" is not one of node1 that has an address of its own: want NAMESPACE/NAME`,
		"trace --from shop/web":                  `required flag(s) "port", "to" not set`,
		"trace --from shop/web --to x --port 80": `port "80": want PORT/PROTOCOL such as 80/TCP, or ICMP or ICMPv6`,
		"trace --from shop/web --to x --port 0/TCP":      `port "0/TCP": want a number from 1 to 65535 before the slash`,
		"trace --from shop/web --to x --port 70000/TCP":  `port "70000/TCP": want a number from 1 to 65535 before the slash`,
		"trace --from shop/web --to x --port icmp":       `no pod "x": want NAMESPACE/NAME or an address`,
		"trace --from shop/web --to 10.0.0.1 --port 1/X": `protocol "X": want TCP, UDP, SCTP, ICMP, ICMPv6 or a number from 1 to 255`,
	} {
		out, err := runPolicy(t, strings.Fields(args)...)
		if err == nil || err.Error() != want || out != "" {
			t.Errorf("weft policy %s: got %v, want %q, and printed %q", args, err, want, out)
		}
	}
}
