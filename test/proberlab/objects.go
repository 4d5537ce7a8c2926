// SPDX-License-Identifier: Apache-2.0

package proberlab

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/weft-mesh/weft/internal/lab/api"
)

// Object is any Kubernetes object, with its kind and API version set.
type Object interface {
	metav1.Object
	runtime.Object
}

// Ref names an object.
type Ref struct{ Kind, Namespace, Name string }

// String is KIND NAMESPACE/NAME.
func (r Ref) String() string {
	if r.Namespace == "" {
		return r.Kind + " " + r.Name
	}
	return r.Kind + " " + r.Namespace + "/" + r.Name
}

// RefOf names o.
func RefOf(o Object) Ref {
	return Ref{o.GetObjectKind().GroupVersionKind().Kind, o.GetNamespace(), o.GetName()}
}

// Objects is a set of objects as a user would apply them. An object that was
// put in must not be changed any more: Put another one.
type Objects map[Ref]Object

// Put adds objects, in place of those with the same names.
func (s Objects) Put(objects ...Object) {
	for _, o := range objects {
		s[RefOf(o)] = o
	}
}

func (s Objects) clone() Objects { return maps.Clone(s) }

func (s Objects) has(kind string) bool {
	for r := range s {
		if r.Kind == kind {
			return true
		}
	}
	return false
}

// diff is what to delete and what to apply so that s becomes want.
func (s Objects) diff(want Objects) (gone, changed Objects) {
	gone, changed = Objects{}, Objects{}
	for r, o := range s {
		if want[r] == nil {
			gone[r] = o
		}
	}
	for r, o := range want {
		if s[r] == nil || !same(s[r], o) {
			changed[r] = o
		}
	}
	return gone, changed
}

func same(a, b Object) bool {
	x, err1 := json.Marshal(a)
	y, err2 := json.Marshal(b)
	return err1 == nil && err2 == nil && bytes.Equal(x, y)
}

// file is the objects as a manifest.
func (s Objects) file() (api.File, error) {
	refs := slices.SortedFunc(maps.Keys(s), func(a, b Ref) int { return bytes.Compare([]byte(a.String()), []byte(b.String())) })
	var b bytes.Buffer
	for _, r := range refs {
		if err := json.NewEncoder(&b).Encode(s[r]); err != nil {
			return api.File{}, fmt.Errorf("encode %s: %w", r, err)
		}
	}
	return api.File{Name: "objects.json", Data: b.Bytes()}, nil
}
