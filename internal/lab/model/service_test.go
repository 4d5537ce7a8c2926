// SPDX-License-Identifier: Apache-2.0

package model_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/weft-mesh/weft/internal/lab/model"
)

func serviceYAML(name, spec string) string {
	return fmt.Sprintf("apiVersion: v1\nkind: Service\nmetadata: {name: %s}\nspec: {%s}\n", name, spec)
}

func (w *world) service(name string) *corev1.Service {
	w.t.Helper()
	svc, ok := w.Get(model.ID{Kind: "Service", Namespace: "default", Name: name}).(*corev1.Service)
	if !ok {
		w.t.Fatalf("there is no Service %s", name)
	}
	return svc
}

func ingressOf(svc *corev1.Service) (ips []string) {
	for _, in := range svc.Status.LoadBalancer.Ingress {
		ips = append(ips, in.IP)
	}
	return ips
}

func TestNodePortsAndBalancers(t *testing.T) {
	w := newWorld(t)
	const ports = "ports: [{port: 80}], "
	w.apply(serviceYAML("fixed", "ports: [{port: 80, nodePort: 30001}], type: NodePort"))
	w.apply(serviceYAML("node", ports+"type: NodePort"))
	w.apply(serviceYAML("lb", ports+"type: LoadBalancer, ipFamilyPolicy: RequireDualStack, externalTrafficPolicy: Local"))
	w.apply(serviceYAML("bare", ports+"type: LoadBalancer, allocateLoadBalancerNodePorts: false"))
	w.apply(serviceYAML("own", ports+"type: LoadBalancer") + "status: {loadBalancer: {ingress: [{ip: 203.0.113.9}, {hostname: lb.example}]}}\n")
	for name, want := range map[string]struct {
		nodePort, health int32
		ingress          []string
	}{
		"fixed": {30001, 0, nil},
		"node":  {30000, 0, nil},
		"lb":    {30002, 30003, []string{"172.31.0.1", "fd00:172:31::1"}},
		"bare":  {0, 0, []string{"172.31.0.2"}},
		"own":   {30004, 0, []string{"203.0.113.9", ""}},
	} {
		svc := w.service(name)
		if got := svc.Spec.Ports[0].NodePort; got != want.nodePort || svc.Spec.HealthCheckNodePort != want.health {
			t.Errorf("%s: node port %d, for health %d: want %d, %d", name, got, svc.Spec.HealthCheckNodePort, want.nodePort, want.health)
		}
		if diff := cmp.Diff(want.ingress, ingressOf(svc)); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
	if m := w.service("own").Status.LoadBalancer.Ingress[0].IPMode; m == nil || *m != corev1.LoadBalancerIPModeVIP {
		t.Errorf("mode %v: want VIP", m)
	}
	again := w.apply(serviceYAML("lb", ports+"type: LoadBalancer, ipFamilyPolicy: RequireDualStack, externalTrafficPolicy: Local"))
	if again[0] != "Service default/lb unchanged" {
		t.Error(again[0])
	}
	w.apply(serviceYAML("lb", ports+"type: LoadBalancer, ipFamilyPolicy: RequireDualStack"))
	if svc := w.service("lb"); svc.Spec.HealthCheckNodePort != 0 || svc.Spec.Ports[0].NodePort != 30002 || ingressOf(svc)[0] != "172.31.0.1" {
		t.Errorf("with policy Cluster: %+v, %v", svc.Spec, ingressOf(svc))
	}
}

func TestServiceDefaults(t *testing.T) {
	w := newWorld(t)
	w.apply(serviceYAML("plain", "ports: [{port: 80}]"))
	s := w.service("plain").Spec
	if s.Type != "ClusterIP" || *s.InternalTrafficPolicy != "Cluster" || s.ExternalTrafficPolicy != "" || s.SessionAffinity != "None" || s.SessionAffinityConfig != nil ||
		s.Ports[0].Protocol != "TCP" || s.Ports[0].TargetPort.IntVal != 80 || *s.IPFamilyPolicy != "SingleStack" {
		t.Errorf("plain: %+v", s)
	}
	w.apply(serviceYAML("sticky", "ports: [{port: 80}], sessionAffinity: ClientIP, externalIPs: [203.0.113.1]"))
	s = w.service("sticky").Spec
	if *s.SessionAffinityConfig.ClientIP.TimeoutSeconds != 10800 || s.ExternalTrafficPolicy != "Cluster" {
		t.Errorf("sticky: %+v", s)
	}
}

func TestFamilies(t *testing.T) {
	w := newWorld(t)
	for _, c := range []struct {
		name, spec string
		want       []string
		families   []corev1.IPFamily
	}{
		{"six", "ipFamilies: [IPv6]", []string{"fd00:10:96::10"}, []corev1.IPFamily{"IPv6"}},
		{"sixfirst", "ipFamilies: [IPv6], ipFamilyPolicy: PreferDualStack", []string{"fd00:10:96::11", "10.96.0.16"}, []corev1.IPFamily{"IPv6", "IPv4"}},
		{"both", "ipFamilies: [IPv4, IPv6]", []string{"10.96.0.17", "fd00:10:96::12"}, []corev1.IPFamily{"IPv4", "IPv6"}},
		{"given", "clusterIP: fd00:10:96::99, ipFamilyPolicy: RequireDualStack", []string{"fd00:10:96::99", "10.96.0.18"}, []corev1.IPFamily{"IPv6", "IPv4"}},
		{"dns", "clusterIPs: [10.96.0.10, 'fd00:10:96::a']", []string{"10.96.0.10", "fd00:10:96::a"}, []corev1.IPFamily{"IPv4", "IPv6"}},
		{"headless", "clusterIP: None, selector: {a: b}", []string{"None"}, []corev1.IPFamily{"IPv4"}},
		{"own", "clusterIP: None", []string{"None"}, []corev1.IPFamily{"IPv4", "IPv6"}},
	} {
		w.apply(serviceYAML(c.name, "ports: [{port: 80}], "+c.spec))
		s := w.service(c.name).Spec
		if diff := cmp.Diff(c.want, s.ClusterIPs); diff != "" {
			t.Errorf("%s: %s", c.name, diff)
		}
		if !slices.Equal(c.families, s.IPFamilies) {
			t.Errorf("%s: families %v: want %v", c.name, s.IPFamilies, c.families)
		}
	}
	w.apply(serviceYAML("both", "ports: [{port: 80}]"))
	if got := w.service("both").Spec.ClusterIPs; !slices.Equal(got, []string{"10.96.0.17"}) {
		t.Errorf("back to one family: %v", got)
	}
}

func TestServicesAreRefused(t *testing.T) {
	w := newWorld(t)
	w.apply(serviceYAML("there", "ports: [{port: 80, nodePort: 30000}], type: NodePort, clusterIP: 10.96.0.50"))
	for _, c := range []struct{ name, spec, want string }{
		{"cluster IP of another", "clusterIP: 10.96.0.50", `spec.clusterIP: "10.96.0.50": is the address of Service default/there already`},
		{"cluster IP elsewhere", "clusterIP: 10.244.1.1", `spec.clusterIP: "10.244.1.1": want an address of 10.96.0.0/16`},
		{"family of the cluster IP", "clusterIP: 10.96.0.51, ipFamilies: [IPv6]", `spec.clusterIP: "10.96.0.51": want an IPv6 address, as ipFamilies says`},
		{"two families in single stack", "ipFamilies: [IPv4, IPv6], ipFamilyPolicy: SingleStack", `spec.ipFamilies: "[IPv4 IPv6]": want one family with ipFamilyPolicy SingleStack`},
		{"a family twice", "ipFamilies: [IPv4, IPv4]", `spec.ipFamilies: "[IPv4 IPv4]": want each family at most once`},
		{"policy", "ipFamilyPolicy: Both", `spec.ipFamilyPolicy: "Both": want one of SingleStack, PreferDualStack, RequireDualStack`},
		{"headless NodePort", "clusterIP: None, type: NodePort", `spec.clusterIP: "None": want an address, or no such field, in a Service of type NodePort`},
		{"node port of another", "type: NodePort|30000", `spec.ports[0].nodePort: 30000: is a node port of Service default/there already`},
		{"node port out of range", "type: NodePort|80", `spec.ports[0].nodePort: "80": want 30000 to 32767`},
		{"health port without need", "type: LoadBalancer, healthCheckNodePort: 30009", `spec.healthCheckNodePort: "30009": want no such field but with type LoadBalancer and externalTrafficPolicy Local`},
		{"external policy of a cluster address", "externalTrafficPolicy: Local", `spec.externalTrafficPolicy: "Local": want no such field in a Service of type ClusterIP without externalIPs: nothing comes to it from outside`},
		{"affinity", "sessionAffinityConfig: {clientIP: {timeoutSeconds: 5}}", `spec.sessionAffinityConfig: want no such field with sessionAffinity None`},
		{"source ranges", "loadBalancerSourceRanges: [10.0.0.0/8]", `spec.loadBalancerSourceRanges: want no such field in a Service of type ClusterIP: it is for LoadBalancer`},
		{"distribution", "trafficDistribution: Near", `spec.trafficDistribution: "Near": want one of [PreferClose PreferSameZone PreferSameNode]`},
		{"external IP", "externalIPs: [127.0.0.1]", `spec.externalIPs[0]: "127.0.0.1": want an address of the network outside: not an unspecified, loopback, link-local or multicast one`},
		{"external name with an address", "type: ExternalName, externalName: example.com, clusterIP: 10.96.0.52", `spec.clusterIP: want no such field in a Service of type ExternalName, which has no address`},
	} {
		spec, nodePort, _ := strings.Cut(c.spec, "|")
		port := "ports: [{port: 80}], "
		if nodePort != "" {
			port = "ports: [{port: 80, nodePort: " + nodePort + "}], "
		}
		_, errs := w.Apply(w.decode(serviceYAML("new", port+spec)))
		if len(errs) != 1 || errs[0].File != "in.yaml" || errs[0].Field+": "+errs[0].Message != c.want {
			t.Errorf("%s: got %v\nwant %s", c.name, errs, c.want)
		}
	}
}

func (w *world) slices(service string) (out []*discoveryv1.EndpointSlice) {
	for _, o := range w.Objects() {
		if s, ok := o.(*discoveryv1.EndpointSlice); ok && s.Labels[discoveryv1.LabelServiceName] == service {
			out = append(out, s)
		}
	}
	return out
}

func TestNodeLabelsAndHints(t *testing.T) {
	w := newWorld(t)
	w.apply("apiVersion: v1\nkind: Node\nmetadata: {name: node1, labels: {topology.kubernetes.io/zone: a}}\n")
	w.apply(serviceYAML("web", "selector: {app: web}, ports: [{port: 80}], trafficDistribution: PreferSameNode"))
	w.apply(strings.Replace(pod("p", ", nodeSelector: {topology.kubernetes.io/zone: a}, hostname: first, subdomain: web"), "name: p", "name: p, labels: {app: web}", 1))
	w.settle(func() {})
	e := w.slices("web")[0].Endpoints[0]
	if *e.NodeName != "node1" || *e.Zone != "a" || *e.Hostname != "first" || e.TargetRef.Name != "p" {
		t.Errorf("endpoint %+v", e)
	}
	if e.Hints == nil || e.Hints.ForZones[0].Name != "a" || e.Hints.ForNodes[0].Name != "node1" {
		t.Errorf("hints %+v", e.Hints)
	}
	_, errs := w.Apply(w.decode("apiVersion: v1\nkind: Node\nmetadata: {name: node7, labels: {kubernetes.io/hostname: x}}\nspec: {podCIDR: 10.0.0.0/24}\n"))
	if len(errs) != 3 {
		t.Errorf("errors %v: want three", errs)
	}
	w.Delete(w.decode("apiVersion: v1\nkind: Node\nmetadata: {name: node1}\n"))
	if e := w.slices("web")[0].Endpoints[0]; e.Zone != nil {
		t.Errorf("zone %q after the label was taken away", *e.Zone)
	}
}

func TestTerminatingAndUnreadyEndpoints(t *testing.T) {
	w := newWorld(t)
	w.apply(serviceYAML("web", "selector: {app: web}, ports: [{port: 80}]") + "---\n" + serviceYAML("all", "clusterIP: None, selector: {app: web}, ports: [{port: 80}], publishNotReadyAddresses: true"))
	w.apply(deployment(1, "x"))
	w.settle(func() {})
	conditions := func(service string) string {
		c := w.slices(service)[0].Endpoints[0].Conditions
		return fmt.Sprintf("ready %t, serving %t, terminating %t", *c.Ready, *c.Serving, *c.Terminating)
	}
	check := func(when, web, all string) {
		t.Helper()
		if got := conditions("web"); got != web {
			t.Errorf("%s: %s: want %s", when, got, web)
		}
		if got := conditions("all"); got != all {
			t.Errorf("%s: with addresses that are not ready: %s: want %s", when, got, all)
		}
	}
	check("ready", "ready true, serving true, terminating false", "ready true, serving true, terminating false")
	w.apply(deployment(0, "x"))
	w.Plan()
	check("terminating", "ready false, serving true, terminating true", "ready true, serving true, terminating true")
	w.SetStatus(w.Pods()[0].Key(), func(st *corev1.PodStatus) { st.Conditions[0].Status = corev1.ConditionFalse })
	check("terminating and not ready", "ready false, serving false, terminating true", "ready true, serving false, terminating true")
	if _, ok := w.slices("all")[0].Labels[corev1.IsHeadlessService]; !ok {
		t.Error("the slice of a headless Service has no label that says so")
	}
}

// A slice holds 100 endpoints, and those that stay stay where they are.
func TestSlicesAreFilledAndStable(t *testing.T) {
	w := newWorld(t)
	w.apply(serviceYAML("web", "selector: {app: web}, ports: [{port: 80}]"))
	w.apply(deployment(250, "x"))
	for start, stop := w.plan(); start+stop > 0; start, stop = w.plan() {
		for _, p := range w.Pods() {
			w.ready(p)
		}
	}
	sizes := func() (out []int) {
		for _, s := range w.slices("web") {
			out = append(out, len(s.Endpoints))
		}
		return out
	}
	if diff := cmp.Diff([]int{100, 100, 50}, sizes()); diff != "" {
		t.Error(diff)
	}
	before := w.slices("web")
	gone := w.Pods()[0]
	w.Gone(gone.Key())
	after := w.slices("web")
	changed := 0
	for i := range before {
		if !cmp.Equal(before[i], after[i]) {
			changed++
		}
	}
	if changed != 1 {
		t.Errorf("%d slices changed with one pod: want 1", changed)
	}
	w.Plan()
	w.ready(w.PodsOf(model.ID{Group: "apps", Kind: "Deployment", Namespace: "default", Name: "web"})[249])
	if diff := cmp.Diff([]int{100, 100, 50}, sizes()); diff != "" {
		t.Errorf("with a new pod: %s", diff)
	}
}

func TestMinReadySeconds(t *testing.T) {
	w := newWorld(t)
	slow := func(command string) string {
		return strings.Replace(deployment(1, command), "  replicas", "  minReadySeconds: 5\n  replicas", 1)
	}
	id := model.ID{Group: "apps", Kind: "Deployment", Namespace: "default", Name: "web"}
	w.apply(slow("old"))
	w.Plan()
	w.ready(w.Pods()[0])
	if l := w.Lacks([]model.ID{id}); len(l) != 1 || l[0].Why != "has not been ready for minReadySeconds" {
		t.Errorf("lacks %v", l)
	}
	if got := w.Wake(); got != 5*time.Second {
		t.Errorf("wake after %s: want 5s", got)
	}
	w.now += 5
	if l := w.Lacks([]model.ID{id}); l != nil || w.Wake() != 0 {
		t.Errorf("lacks %v, wake after %s", l, w.Wake())
	}
	w.apply(slow("new"))
	w.Plan()
	w.ready(w.PodsOf(id)[1])
	if _, stop := w.plan(); stop != 0 {
		t.Error("the old pod is stopped for one that is not available yet")
	}
	w.now += 5
	if _, stop := w.plan(); stop != 1 {
		t.Error("the old pod is not stopped")
	}
}
