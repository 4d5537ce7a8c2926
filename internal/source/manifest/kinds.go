// SPDX-License-Identifier: Apache-2.0

package manifest

import (
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	policyv1alpha2 "sigs.k8s.io/network-policy-api/apis/v1alpha2"
)

// kind is a kind that weft reads, or accepts without reading it.
type kind struct {
	apiVersion string
	name       string
	namespaced bool
	empty      func() runtime.Object
	check      func(*problems, runtime.Object) // sets defaults too; nil for nothing to check
}

func (k kind) group() string { return groupOf(k.apiVersion) }

// kinds are all kinds of the API groups that weft reads and decodes.
func kinds() []kind {
	return []kind{
		{"v1", "Node", false, func() runtime.Object { return &corev1.Node{} }, on(checkNode)},
		{"v1", "Namespace", false, func() runtime.Object { return &corev1.Namespace{} }, on(checkNamespace)},
		{"v1", "ServiceAccount", true, func() runtime.Object { return &corev1.ServiceAccount{} }, nil},
		{"v1", "Pod", true, func() runtime.Object { return &corev1.Pod{} }, on(checkPod)},
		{"v1", "Service", true, func() runtime.Object { return &corev1.Service{} }, on(checkService)},
		{"v1", "ConfigMap", true, func() runtime.Object { return &corev1.ConfigMap{} }, nil},
		{"v1", "Secret", true, func() runtime.Object { return &corev1.Secret{} }, nil},
		{"apps/v1", "Deployment", true, func() runtime.Object { return &appsv1.Deployment{} }, on(checkDeployment)},
		{"discovery.k8s.io/v1", "EndpointSlice", true, func() runtime.Object { return &discoveryv1.EndpointSlice{} }, on(checkEndpointSlice)},
		{"networking.k8s.io/v1", "NetworkPolicy", true, func() runtime.Object { return &networkingv1.NetworkPolicy{} }, on(checkNetworkPolicy)},
		// The two versions have the same fields.
		{"policy.networking.k8s.io/v1beta1", "ClusterNetworkPolicy", false, func() runtime.Object { return &policyv1alpha2.ClusterNetworkPolicy{} }, on(checkClusterNetworkPolicy)},
		{"policy.networking.k8s.io/v1alpha2", "ClusterNetworkPolicy", false, func() runtime.Object { return &policyv1alpha2.ClusterNetworkPolicy{} }, on(checkClusterNetworkPolicy)},
	}
}

// on gives check the type that the kind's empty function makes.
func on[T runtime.Object](check func(*problems, T)) func(*problems, runtime.Object) {
	return func(p *problems, o runtime.Object) {
		if t, ok := o.(T); ok {
			check(p, t)
		}
	}
}

// others are the remaining kinds of the groups above: what weft can do without
// ("" as reason) and what it refuses because its absence would surprise.
func others() map[string]map[string]string {
	const pods = "is not supported: use a Deployment or Pods"
	const older = "is not supported: use a ClusterNetworkPolicy of policy.networking.k8s.io/v1beta1"
	return map[string]map[string]string{
		"": {
			"PersistentVolume": "", "PersistentVolumeClaim": "", "ResourceQuota": "", "LimitRange": "", "Event": "",
			"PodTemplate": "", "ComponentStatus": "",
			"ReplicationController": pods,
			"Endpoints":             "is not supported: use an EndpointSlice of discovery.k8s.io/v1",
			"List":                  "is not supported: write each item as a document of its own, between lines of ---",
		},
		"apps":                     {"ControllerRevision": "", "ReplicaSet": pods, "StatefulSet": pods, "DaemonSet": pods},
		"batch":                    {"Job": pods, "CronJob": pods},
		"discovery.k8s.io":         {},
		"networking.k8s.io":        {"Ingress": "", "IngressClass": "", "IPAddress": "", "ServiceCIDR": ""},
		"policy.networking.k8s.io": {"AdminNetworkPolicy": older, "BaselineAdminNetworkPolicy": older},
	}
}

// plainGroups are the API groups without a dot in their name; all others that
// have none are misspellings.
var plainGroups = []string{"", "apps", "autoscaling", "batch", "extensions", "policy"}

func groupOf(apiVersion string) string {
	group, _, ok := strings.Cut(apiVersion, "/")
	if !ok {
		return ""
	}
	return group
}

func text(m map[string]any, key string) string {
	s, _ := m[key].(string)
	return s
}

// refOf reads what an object calls itself, as far as it can be read.
func refOf(m map[string]any) Ref {
	meta, _ := m["metadata"].(map[string]any)
	r := Ref{Group: groupOf(text(m, "apiVersion")), Kind: text(m, "kind"), Namespace: text(meta, "namespace"), Name: text(meta, "name")}
	for _, k := range kinds() {
		if k.name == r.Kind && k.group() == r.Group && k.namespaced && r.Namespace == "" {
			r.Namespace = corev1.NamespaceDefault
		}
	}
	return r
}

// decodeObject finds the kind of the object m and decodes body, its JSON text.
func decodeObject(m map[string]any, body []byte, p *problems) *Object {
	k, typed := findKind(m, p)
	if !p.ok() {
		return nil
	}
	if !typed {
		return passThrough(m, p)
	}
	obj := k.empty()
	p.checkType(nil, m, reflect.TypeOf(obj))
	if k.name == "ClusterNetworkPolicy" {
		p.requireOfClusterPolicy(m)
	}
	if !p.ok() {
		return nil
	}
	if err := json.Unmarshal(body, obj); err != nil {
		p.say(nil, "%v: want a %s", err, k.name)
		return nil
	}
	checkMeta(p, k, obj)
	if k.check != nil {
		k.check(p, obj)
	}
	return &Object{Typed: obj}
}

// findKind returns the kind that m names. typed is false for one to pass
// through.
func findKind(m map[string]any, p *problems) (k kind, typed bool) {
	version, name := field.NewPath("apiVersion"), field.NewPath("kind")
	for path, want := range map[*field.Path]string{version: "an API version such as v1 or apps/v1", name: "a kind such as Pod"} {
		v, there := m[path.String()]
		if s, ok := v.(string); there && (!ok || s == "") {
			p.add(path, v, want)
		} else if !there {
			p.missing(path, want)
		}
	}
	if !p.ok() {
		slices.SortFunc(p.list, func(a, b problem) int { return strings.Compare(a.field, b.field) })
		return kind{}, false
	}
	apiVersion, kindName := text(m, "apiVersion"), text(m, "kind")
	all := kinds()
	for _, k := range all {
		if k.apiVersion == apiVersion && k.name == kindName {
			return k, true
		}
	}
	group := groupOf(apiVersion)
	rest, ours := others()[group]
	if !ours {
		checkGroup(p, version, apiVersion, group)
		return kind{}, false
	}
	p.wrongKind(all, rest, apiVersion, kindName)
	return kind{}, false
}

// wrongKind reports a kind that a group of weft's own does not have in this
// version.
func (p *problems) wrongKind(all []kind, rest map[string]string, apiVersion, name string) {
	group := groupOf(apiVersion)
	var known []string
	for _, k := range all {
		if k.name == name && (k.group() == group || !strings.Contains(group, ".")) {
			p.add(field.NewPath("apiVersion"), apiVersion, fmt.Sprintf("%q for a %s", k.apiVersion, name))
			return
		}
		if k.group() == group {
			known = append(known, k.name)
		}
	}
	if why, ok := rest[name]; ok {
		if why != "" {
			p.refuse(field.NewPath("kind"), name, why)
		}
		return
	}
	if near, ok := nearest(name, append(known, sortedKeys(rest)...)); ok {
		p.add(field.NewPath("kind"), name, fmt.Sprintf("%q, or another kind of %s", near, apiVersion))
		return
	}
	p.add(field.NewPath("kind"), name, fmt.Sprintf("a kind of %s, such as %s", apiVersion, strings.Join(known, ", ")))
}

// checkGroup reports an API group that is probably one of weft's, misspelled:
// a policy that passes through because of a typing error would protect nothing.
func checkGroup(p *problems, path *field.Path, apiVersion, group string) {
	if slices.Contains(plainGroups, group) {
		return
	}
	var known []string
	for g := range others() {
		known = append(known, g)
	}
	slices.Sort(known)
	if near, ok := nearest(group, known); ok {
		p.add(path, apiVersion, fmt.Sprintf("the group %q, or one that does not look like it", near))
		return
	}
	if !strings.Contains(group, ".") {
		p.add(path, apiVersion, "an API group of Kubernetes, or a custom one with a dot in its name")
	}
}

func passThrough(m map[string]any, p *problems) *Object {
	u := &unstructured.Unstructured{Object: m}
	checkName(p, m)
	return &Object{Typed: u}
}

// checkName wants metadata.name of an object whose type is not known.
func checkName(p *problems, m map[string]any) {
	path := field.NewPath("metadata")
	meta, ok := m["metadata"].(map[string]any)
	if v, there := m["metadata"]; there && !ok && v != nil {
		p.add(path, v, "an object")
		return
	}
	v, there := meta["name"]
	if s, ok := v.(string); there && !ok {
		p.add(path.Child("name"), v, "a text (put it in quotes if it looks like something else)")
	} else if s == "" {
		p.missing(path.Child("name"), "the name of the object")
	}
}
