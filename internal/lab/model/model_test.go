// SPDX-License-Identifier: Apache-2.0

package model_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/weft-mesh/weft/internal/lab/model"
	"github.com/weft-mesh/weft/internal/source/manifest"
)

// world is a cluster of two nodes whose pods become ready when a test says so.
type world struct {
	*model.Cluster
	t     *testing.T
	nextA int
	now   int64 // seconds
}

func newWorld(t *testing.T) *world {
	n := 0
	count := func() string { n++; return fmt.Sprintf("%05d", n) }
	w := &world{t: t, now: 1000}
	cfg := model.Config{Suffix: count, UID: count, Now: func() metav1.Time { return metav1.Unix(w.now, 0) }}
	for i := 1; i <= 2; i++ {
		cfg.Nodes = append(cfg.Nodes, model.Node{
			Name:     fmt.Sprintf("node%d", i),
			IPs:      []netip.Addr{netip.MustParseAddr(fmt.Sprintf("172.30.0.%d", i))},
			PodCIDRs: []netip.Prefix{netip.MustParsePrefix(fmt.Sprintf("10.244.%d.0/24", i))},
		})
	}
	w.Cluster = model.New(cfg)
	return w
}

// apply wants the manifests to be accepted and returns what became of them.
func (w *world) apply(yaml string) []string {
	w.t.Helper()
	changes, errs := w.Apply(w.decode(yaml))
	if len(errs) > 0 {
		w.t.Fatalf("refused: %v", errs)
	}
	out := make([]string, 0, len(changes))
	for _, c := range changes {
		out = append(out, fmt.Sprintf("%s %s", c.ID, c.Outcome))
	}
	return out
}

func (w *world) decode(yaml string) []manifest.Object {
	w.t.Helper()
	objects, errs := manifest.Decode("in.yaml", []byte(yaml))
	if len(errs) > 0 {
		w.t.Fatalf("decode: %v", errs)
	}
	return objects
}

// plan takes one step and returns the numbers of pods to start and to stop.
func (w *world) plan() (start, stop int) {
	a, b := w.Plan()
	return len(a), len(b)
}

// ready makes a pod run with an address.
func (w *world) ready(p *model.Pod) {
	w.nextA++
	w.SetStatus(p.Key(), func(st *corev1.PodStatus) {
		st.PodIPs = []corev1.PodIP{{IP: fmt.Sprintf("10.244.9.%d", w.nextA)}, {IP: fmt.Sprintf("fd00::%d", w.nextA)}}
		st.ContainerStatuses = nil
		for _, ct := range p.Object.Spec.Containers {
			cs := model.Container(&st.ContainerStatuses, ct.Name)
			cs.Ready, cs.State.Running = true, &corev1.ContainerStateRunning{}
		}
		model.Summarize(&p.Object.Spec, st)
	})
}

// settle makes every pod ready and every stopped one gone until nothing is left
// to do, and checks what must hold at each step.
func (w *world) settle(invariant func()) {
	w.t.Helper()
	for range 100 {
		start, stop := w.plan()
		invariant()
		busy := start+stop > 0
		for _, p := range w.Pods() {
			switch {
			case p.Deleting:
				w.Gone(p.Key())
				busy = true
			case !p.Ready():
				w.ready(p)
				busy = true
			}
			invariant()
			if busy {
				break // one change at a time
			}
		}
		if !busy {
			return
		}
	}
	w.t.Fatal("never settles")
}

func deployment(replicas int, command string) string {
	return fmt.Sprintf(`
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: %d
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec: {containers: [{name: a, command: [%s], ports: [{name: http, containerPort: 8080}]}]}
`, replicas, command)
}

func pod(name, more string) string {
	return fmt.Sprintf("apiVersion: v1\nkind: Pod\nmetadata: {name: %s}\nspec: {containers: [{name: a, command: [x]}]%s}\n", name, more)
}

func nodesOf(pods []*model.Pod) (names []string) {
	for _, p := range pods {
		names = append(names, p.Object.Spec.NodeName)
	}
	slices.Sort(names)
	return names
}

func TestPodsSpreadOverNodes(t *testing.T) {
	w := newWorld(t)
	w.apply(deployment(4, "x"))
	if start, stop := w.plan(); start != 4 || stop != 0 {
		t.Errorf("start %d, stop %d: want 4, 0", start, stop)
	}
	if diff := cmp.Diff([]string{"node1", "node1", "node2", "node2"}, nodesOf(w.Pods())); diff != "" {
		t.Error(diff)
	}
	w.apply(pod("named", ", nodeName: node2"))
	w.apply(pod("selected", ", nodeSelector: {kubernetes.io/hostname: node2}"))
	w.Plan()
	for _, name := range []string{"default/named", "default/selected"} {
		if got := w.Pod(name).Object.Spec.NodeName; got != "node2" {
			t.Errorf("%s is on %q: want node2", name, got)
		}
	}
}

func TestPodHasDefaults(t *testing.T) {
	w := newWorld(t)
	w.apply(pod("p", ""))
	w.Plan()
	spec := w.Pod("default/p").Object.Spec
	if spec.ServiceAccountName != "default" || spec.RestartPolicy != corev1.RestartPolicyAlways || *spec.TerminationGracePeriodSeconds != 30 {
		t.Errorf("service account %q, restart policy %q, grace %d", spec.ServiceAccountName, spec.RestartPolicy, *spec.TerminationGracePeriodSeconds)
	}
}

func TestScaling(t *testing.T) {
	w := newWorld(t)
	w.apply(deployment(1, "x"))
	w.settle(func() {})
	first := w.Pods()[0].Key()
	w.apply(deployment(4, "x"))
	w.settle(func() {})
	if n := len(w.Pods()); n != 4 {
		t.Fatalf("%d pods: want 4", n)
	}
	w.apply(deployment(1, "x"))
	w.settle(func() {})
	if pods := w.Pods(); len(pods) != 1 || pods[0].Key() != first {
		t.Errorf("pods %v: want the oldest, %s", pods, first)
	}
	w.apply(deployment(0, "x"))
	w.settle(func() {})
	if n := len(w.Pods()); n != 0 {
		t.Errorf("%d pods: want none", n)
	}
}

// A rolling update never has fewer ready pods than it may miss, nor more beside
// those that terminate than it may have, and it reaches both limits.
func TestRollingUpdate(t *testing.T) {
	for _, c := range []struct {
		replicas           int
		strategy           string
		surge, unavailable int
	}{
		{1, "", 1, 0}, {2, "", 1, 0}, {3, "", 1, 0}, {7, "", 2, 1}, {8, "", 2, 2},
		{4, "{maxSurge: 2, maxUnavailable: 0}", 2, 0},
		{4, "{maxSurge: 0, maxUnavailable: 1}", 0, 1},
		{4, "{maxSurge: 0, maxUnavailable: 0}", 0, 1},
		{4, `{maxSurge: "100%", maxUnavailable: "0%"}`, 4, 0},
		{4, `{maxSurge: "0%", maxUnavailable: "100%"}`, 0, 4},
		{2, "{maxSurge: 0, maxUnavailable: 9}", 0, 2},
	} {
		replicas := c.replicas
		t.Run(fmt.Sprintf("%d %s", replicas, c.strategy), func(t *testing.T) {
			w := newWorld(t)
			with := func(command string) string {
				if c.strategy == "" {
					return deployment(replicas, command)
				}
				return strings.Replace(deployment(replicas, command), "  replicas", "  strategy: {rollingUpdate: "+c.strategy+"}\n  replicas", 1)
			}
			w.apply(with("old"))
			w.settle(func() {})
			w.apply(with("new"))
			least, most := replicas, replicas
			w.settle(func() {
				ready, live := 0, 0
				for _, p := range w.Pods() {
					if p.Deleting {
						continue
					}
					live++
					if p.Ready() {
						ready++
					}
				}
				least, most = min(least, ready), max(most, live)
			})
			if least != replicas-c.unavailable || most != replicas+c.surge {
				t.Errorf("at least %d were ready and at most %d there: want %d and %d", least, most, replicas-c.unavailable, replicas+c.surge)
			}
			for _, p := range w.Pods() {
				if got := p.Object.Spec.Containers[0].Command[0]; got != "new" {
					t.Errorf("pod %s runs %s", p.Key(), got)
				}
			}
			if n := len(w.Pods()); n != replicas {
				t.Errorf("%d pods: want %d", n, replicas)
			}
		})
	}
}

// An update whose pods never become ready keeps the old ones; going back needs
// no new pod.
func TestFailedUpdate(t *testing.T) {
	w := newWorld(t)
	w.apply(deployment(2, "good"))
	w.settle(func() {})
	w.apply(deployment(2, "bad"))
	for range 5 {
		w.Plan()
	}
	if n := len(w.Pods()); n != 3 {
		t.Fatalf("%d pods: want 2 good ones and a bad one", n)
	}
	w.apply(deployment(2, "good"))
	if start, stop := w.plan(); start != 0 || stop != 1 {
		t.Errorf("start %d, stop %d: want 0, 1", start, stop)
	}
}

func TestRecreate(t *testing.T) {
	w := newWorld(t)
	recreate := strings.Replace(deployment(2, "old"), "  replicas", "  strategy: {type: Recreate}\n  replicas", 1)
	w.apply(recreate)
	w.settle(func() {})
	w.apply(strings.Replace(recreate, "[old]", "[new]", 1))
	if start, stop := w.plan(); start != 0 || stop != 2 {
		t.Errorf("start %d, stop %d: want 0, 2", start, stop)
	}
	if start, stop := w.plan(); start != 0 || stop != 0 {
		t.Errorf("start %d, stop %d while the old ones terminate", start, stop)
	}
	w.settle(func() {})
	if n := len(w.Pods()); n != 2 {
		t.Errorf("%d pods: want 2", n)
	}
}

func TestPlainPodChanges(t *testing.T) {
	w := newWorld(t)
	w.apply(pod("p", ""))
	w.settle(func() {})
	uid := w.Pod("default/p").Object.UID
	w.apply(strings.Replace(pod("p", ""), "name: p", "name: p, labels: {a: b}", 1))
	w.settle(func() {})
	if p := w.Pod("default/p").Object; p.UID != uid || p.Labels["a"] != "b" {
		t.Errorf("labels %v, replaced %t: want new labels in place", p.Labels, p.UID != uid)
	}
	w.apply(strings.Replace(pod("p", ""), "[x]", "[z]", 1))
	if start, stop := w.plan(); start != 0 || stop != 1 {
		t.Errorf("start %d, stop %d: want 0, 1", start, stop)
	}
	w.settle(func() {})
	if p := w.Pod("default/p"); p == nil || p.Object.UID == uid {
		t.Error("the pod was not replaced")
	}
}

const service = `
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {ipFamilyPolicy: PreferDualStack, selector: {app: web}, ports: [{name: http, port: 80, targetPort: http}]}
`

func slicesIn(w *world) map[string][]string {
	out := map[string][]string{}
	for _, o := range w.Objects() {
		s, ok := o.(*discoveryv1.EndpointSlice)
		if !ok {
			continue
		}
		out[s.Name] = []string{}
		for _, e := range s.Endpoints {
			state := "not-ready"
			switch {
			case *e.Conditions.Terminating:
				state = "terminating"
			case *e.Conditions.Ready:
				state = "ready"
			}
			port := "no port"
			if len(s.Ports) > 0 {
				port = fmt.Sprint(*s.Ports[0].Port)
			}
			out[s.Name] = append(out[s.Name], fmt.Sprintf("%s %s %s", e.Addresses[0], port, state))
		}
	}
	return out
}

func TestEndpointSlices(t *testing.T) {
	w := newWorld(t)
	w.apply(service)
	if diff := cmp.Diff(map[string][]string{"web-ipv4": {}, "web-ipv6": {}}, slicesIn(w)); diff != "" {
		t.Errorf("without pods: %s", diff)
	}
	w.apply(deployment(2, "x"))
	w.Plan()
	pods := w.Pods()
	w.ready(pods[0])
	w.ready(pods[1])
	w.SetStatus(pods[1].Key(), func(st *corev1.PodStatus) { st.Conditions = nil })
	want := map[string][]string{
		"web-ipv4": {"10.244.9.1 8080 ready", "10.244.9.2 8080 not-ready"},
		"web-ipv6": {"fd00::1 8080 ready", "fd00::2 8080 not-ready"},
	}
	if diff := cmp.Diff(want, slicesIn(w)); diff != "" {
		t.Error(diff)
	}
	w.apply(deployment(0, "x"))
	w.Plan()
	if got := slicesIn(w)["web-ipv4"]; got[0] != "10.244.9.1 8080 terminating" {
		t.Errorf("while terminating: %v", got)
	}
}

// Pods whose named port differs are in different slices.
func TestEndpointSlicesOfNamedPorts(t *testing.T) {
	w := newWorld(t)
	w.apply(service)
	for i, port := range []int{8080, 9090} {
		w.apply(fmt.Sprintf("apiVersion: v1\nkind: Pod\nmetadata: {name: p%d, labels: {app: web}}\n"+
			"spec: {containers: [{name: a, command: [x], ports: [{name: http, containerPort: %d}]}]}\n", i, port))
	}
	w.settle(func() {})
	want := map[string][]string{
		"web-ipv4": {"10.244.9.1 8080 ready"}, "web-ipv4-2": {"10.244.9.2 9090 ready"},
		"web-ipv6": {"fd00::1 8080 ready"}, "web-ipv6-2": {"fd00::2 9090 ready"},
	}
	if diff := cmp.Diff(want, slicesIn(w)); diff != "" {
		t.Error(diff)
	}
}

func serviceSpec(w *world, name string) corev1.ServiceSpec {
	return w.Get(model.ID{Kind: "Service", Namespace: "default", Name: name}).(*corev1.Service).Spec
}

func TestServiceAddresses(t *testing.T) {
	plain := func(name, more string) string {
		return fmt.Sprintf("apiVersion: v1\nkind: Service\nmetadata: {name: %s}\nspec: {selector: {a: b}, ports: [{port: 80}]%s}\n", name, more)
	}
	w := newWorld(t)
	w.apply(service)
	w.apply(plain("single", ""))
	w.apply(plain("given", ", clusterIP: 10.96.0.18"))
	w.apply(plain("next", ""))
	w.apply(plain("none", ", clusterIP: None"))
	w.apply(plain("node", ", type: NodePort"))
	for name, want := range map[string][]string{
		"web": {"10.96.0.16", "fd00:10:96::10"}, "single": {"10.96.0.17"}, "given": {"10.96.0.18"},
		"next": {"10.96.0.19"}, "none": {"None"}, "node": {"10.96.0.20"},
	} {
		if diff := cmp.Diff(want, serviceSpec(w, name).ClusterIPs); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
	if got := serviceSpec(w, "node").Ports[0].NodePort; got != 30000 {
		t.Errorf("node port %d: want 30000", got)
	}
	if got := w.apply(service); got[0] != "Service default/web unchanged" {
		t.Errorf("applied again: %v", got)
	}
	if got := w.apply(strings.Replace(service, "port: 80", "port: 81", 1)); got[0] != "Service default/web changed" {
		t.Errorf("applied with another port: %v", got)
	}
	if got := serviceSpec(w, "web").ClusterIPs; !slices.Equal(got, []string{"10.96.0.16", "fd00:10:96::10"}) {
		t.Errorf("a changed Service moved to %v", got)
	}
}

func TestApplyIsAllOrNothing(t *testing.T) {
	w := newWorld(t)
	_, errs := w.Apply(w.decode(pod("good", "") + "---\n" + pod("bad", ", nodeName: node9") + "---\n" + strings.Replace(pod("lost", ""), "name: lost", "name: lost, namespace: nowhere", 1)))
	var got []string
	for _, e := range errs {
		got = append(got, fmt.Sprintf("%d %s: %s", e.Document, e.Field, e.Message))
	}
	want := []string{
		`1 spec.nodeName: "node9": there is no such node: want one of node1, node2`,
		`2 metadata.namespace: "nowhere": there is no such namespace: apply a Namespace too, or use one of default`,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if start, _ := w.plan(); start != 0 {
		t.Errorf("%d pods were started", start)
	}
}

func TestDeleteNamespaces(t *testing.T) {
	w := newWorld(t)
	namespace := "apiVersion: v1\nkind: Namespace\nmetadata: {name: %s}\n"
	w.apply(fmt.Sprintf(namespace, "other") + "---\n" + strings.Replace(pod("p", ""), "name: p", "name: p, namespace: other", 1) + "---\n" + pod("q", ""))
	w.settle(func() {})
	if _, errs := w.Delete(w.decode(fmt.Sprintf(namespace, "default") + "---\n" + pod("q", ""))); len(errs) != 1 || w.Get(model.ID{Kind: "Pod", Namespace: "default", Name: "q"}) == nil {
		t.Errorf("errors %v: want the namespace default and all else to stay", errs)
	}
	if changes, errs := w.Delete(w.decode(fmt.Sprintf(namespace, "other"))); len(errs) > 0 || changes[0].Outcome != model.Deleted {
		t.Errorf("changes %v, errors %v", changes, errs)
	}
	w.settle(func() {})
	if pods := w.Pods(); len(pods) != 1 || pods[0].Key() != "default/q" {
		t.Errorf("pods %v: want only default/q", pods)
	}
}

func TestLacks(t *testing.T) {
	w := newWorld(t)
	id := model.ID{Group: "apps", Kind: "Deployment", Namespace: "default", Name: "web"}
	why := func() (out []string) {
		for _, l := range w.Lacks([]model.ID{id}) {
			out = append(out, l.Why)
		}
		return out
	}
	w.apply(deployment(1, "x"))
	if diff := cmp.Diff([]string{"0 of 1 pods are ready"}, why()); diff != "" {
		t.Error(diff)
	}
	w.Plan()
	if diff := cmp.Diff([]string{"is not wired yet"}, why()); diff != "" {
		t.Error(diff)
	}
	w.ready(w.Pods()[0])
	if got := why(); got != nil {
		t.Errorf("a ready Deployment lacks %v", got)
	}
	w.Delete(w.decode(deployment(1, "x")))
	w.Plan()
	if diff := cmp.Diff([]string{"is terminating"}, why()); diff != "" {
		t.Error(diff)
	}
	w.settle(func() {})
	if got := why(); got != nil {
		t.Errorf("a deleted Deployment lacks %v", got)
	}
}

func TestSummarize(t *testing.T) {
	running := func(ready bool) corev1.ContainerStatus {
		return corev1.ContainerStatus{Ready: ready, State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}
	}
	ended := func(code int32) corev1.ContainerStatus {
		return corev1.ContainerStatus{State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: code}}}
	}
	spec := &corev1.PodSpec{Containers: make([]corev1.Container, 2)}
	for _, c := range []struct {
		name       string
		containers []corev1.ContainerStatus
		phase      corev1.PodPhase
		ready      bool
	}{
		{"nothing runs", nil, corev1.PodPending, false},
		{"one of two runs", []corev1.ContainerStatus{running(true)}, corev1.PodPending, false},
		{"both run, one is not ready", []corev1.ContainerStatus{running(true), running(false)}, corev1.PodRunning, false},
		{"both are ready", []corev1.ContainerStatus{running(true), running(true)}, corev1.PodRunning, true},
		{"one ended", []corev1.ContainerStatus{running(true), ended(0)}, corev1.PodRunning, false},
		{"both ended well", []corev1.ContainerStatus{ended(0), ended(0)}, corev1.PodSucceeded, false},
		{"one ended badly", []corev1.ContainerStatus{ended(0), ended(1)}, corev1.PodFailed, false},
	} {
		st := corev1.PodStatus{ContainerStatuses: c.containers}
		model.Summarize(spec, &st)
		if got := model.IsReady(&corev1.Pod{Status: st}); st.Phase != c.phase || got != c.ready {
			t.Errorf("%s: phase %s, ready %t: want %s, %t", c.name, st.Phase, got, c.phase, c.ready)
		}
	}
}

func TestExpand(t *testing.T) {
	known := map[string]string{"A": "1", "EMPTY": ""}
	for in, want := range map[string]string{
		"": "", "plain": "plain", "$(A)": "1", "x$(A)y$(A)": "x1y1", "$(EMPTY)": "", "$(UNKNOWN)": "$(UNKNOWN)",
		"$$(A)": "$(A)", "$A": "$A", "$": "$", "$(A": "$(A", "$$": "$", "$$$(A)": "$1",
	} {
		if got := model.Expand(in, known); got != want {
			t.Errorf("Expand(%q) = %q: want %q", in, got, want)
		}
	}
}
