// SPDX-License-Identifier: Apache-2.0

package manifest

import (
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// good is one manifest of each kind that weft reads, and some to pass through.
func good(t testing.TB) []byte {
	data, err := os.ReadFile("testdata/good.yaml")
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func TestDecodeGood(t *testing.T) {
	objs, errs := Decode("good.yaml", good(t))
	for _, e := range errs {
		t.Error(Format(e))
	}
	var refs []string
	for _, o := range objs {
		refs = append(refs, o.Ref.String())
	}
	want := []string{
		"Namespace shop", "Node node1", "ServiceAccount shop/web", "Pod shop/web-0", "Pod default/host", "Deployment shop/web",
		"Service shop/web", "Service default/none", "EndpointSlice shop/web-abc", "NetworkPolicy shop/web", "ClusterNetworkPolicy tenants",
		"ClusterNetworkPolicy default", "ConfigMap default/settings",
		"Secret default/token", "XAccessPolicy shop/tools", "ClusterRole reader", "Ingress web", "CustomResourceDefinition things.example.com",
	}
	if d := cmp.Diff(want, refs); d != "" {
		t.Errorf("objects (-want +got):\n%s", d)
	}
}

func TestDefaultsAreThoseOfKubernetes(t *testing.T) {
	objs, _ := Decode("good.yaml", good(t))
	for _, o := range objs {
		switch x := o.Typed.(type) {
		case *corev1.Pod:
			want := map[string]string{"web-0": "web", "host": "default"}[x.Name]
			if x.Spec.ServiceAccountName != want {
				t.Errorf("%s has service account %q, want %q", o.Ref, x.Spec.ServiceAccountName, want)
			}
			if x.Namespace != o.Namespace {
				t.Errorf("%s has namespace %q", o.Ref, x.Namespace)
			}
			for _, p := range x.Spec.Containers[0].Ports {
				if p.Protocol != corev1.ProtocolTCP {
					t.Errorf("%s: protocol %q", o.Ref, p.Protocol)
				}
			}
		case *appsv1.Deployment:
			if x.Spec.Replicas == nil || *x.Spec.Replicas != 1 {
				t.Errorf("replicas %v, want 1", x.Spec.Replicas)
			}
		case *corev1.Namespace:
			if x.Labels["kubernetes.io/metadata.name"] != "shop" {
				t.Errorf("labels %v", x.Labels)
			}
		case *corev1.Service:
			if x.Name == "web" && (x.Spec.Type != corev1.ServiceTypeClusterIP || x.Spec.Ports[0].TargetPort.IntVal != 80) {
				t.Errorf("service without its defaults: %+v", x.Spec)
			}
		}
	}
}

func TestPassThroughKeepsContent(t *testing.T) {
	objs, errs := Decode("a.yaml", []byte("apiVersion: example.com/v1\nkind: Thing\nmetadata: {name: x}\nspec: {a: 1}\n"))
	if len(errs) > 0 || len(objs) != 1 {
		t.Fatalf("%v, %v", objs, errs)
	}
	u, ok := objs[0].Typed.(*unstructured.Unstructured)
	if n, _, _ := unstructured.NestedInt64(u.Object, "spec", "a"); !ok || n != 1 {
		t.Errorf("object %+v", objs[0].Typed)
	}
}

func TestDocumentNumbersAndLines(t *testing.T) {
	const text = "# a comment only\n---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\n---\n# empty\n---\n{{ bad\n--- {apiVersion: v1, kind: ConfigMap, metadata: {name: b}}\n"
	docs := Documents("f.yaml", []byte(text))
	type at struct {
		Number, Line int
		Name         string
		Bad          bool
	}
	var got []at
	for _, d := range docs {
		got = append(got, at{d.Number, d.Line, d.Ref.Name, len(d.Errors) > 0})
	}
	want := []at{{0, 3, "a", false}, {2, 9, "", true}, {3, 10, "b", false}}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("documents (-want +got):\n%s", d)
	}
}

func TestBadDocumentKeepsItsName(t *testing.T) {
	docs := Documents("f.yaml", []byte("apiVersion: v1\nkind: Pod\nmetadata: {name: web}\nspec: {containres: []}\n"))
	if want := (Ref{Kind: "Pod", Namespace: "default", Name: "web"}); len(docs) != 1 || docs[0].Ref != want {
		t.Fatalf("documents %+v, want one that is %+v", docs, want)
	}
}

func TestJSONFile(t *testing.T) {
	const text = `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"a"}}
		{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"b","name":"c"}} {"apiVersion"`
	objs, errs := Decode("f.json", []byte(text))
	if len(objs) != 1 || objs[0].Name != "a" {
		t.Errorf("objects %+v", objs)
	}
	var got []string
	for _, e := range errs {
		got = append(got, Format(e))
	}
	want := []string{
		"f.json, document 1, metadata.name: key appears twice: want it once",
		"f.json, document 2: unexpected end of JSON input at byte 13 of the document: want JSON",
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("errors (-want +got):\n%s", d)
	}
}

func TestLimits(t *testing.T) {
	for name, data := range map[string][]byte{
		"bytes":     make([]byte, MaxFileSize+1),
		"documents": []byte(strings.Repeat("--- a\n", MaxDocuments+1)),
	} {
		t.Run(name, func(t *testing.T) {
			objs, errs := Decode("big.yaml", data)
			if len(objs) != 0 || len(errs) != 1 || errs[0].File != "big.yaml" {
				t.Errorf("%d objects, errors %v", len(objs), errs)
			}
		})
	}
}

// FuzzDecode: never a panic; every document is either an object with a name or
// an error that names the file.
func FuzzDecode(f *testing.F) {
	f.Add("good.yaml", good(f))
	for _, c := range wrong {
		f.Add("f.yaml", []byte(c.text))
	}
	f.Add("f.json", []byte(`{"apiVersion":"v1","kind":"Pod","metadata":{"name":"a"}}{`))
	f.Add("f.yaml", []byte("a: &a [1]\nb: *a\n<<: {c: 1}\n"))
	f.Fuzz(func(t *testing.T, file string, data []byte) {
		for _, d := range Documents(file, data) {
			if (d.Object == nil) == (len(d.Errors) == 0) {
				t.Fatalf("document %+v has both or neither", d)
			}
			if d.Object != nil && (d.Object.Name == "" || d.Object.Kind == "" || d.Object.Typed == nil) {
				t.Fatalf("object without a name, kind or type: %+v", d.Object)
			}
			for _, e := range d.Errors {
				if e.File != file || e.Message == "" || e.Document != d.Number {
					t.Fatalf("error %+v of document %d", e, d.Number)
				}
			}
		}
	})
}
