// SPDX-License-Identifier: Apache-2.0

package manifest

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// checkType reports where the tree v, as the JSON reader made it, does not fit
// the Go type t: unknown fields, wrong types, numbers out of range. A JSON
// decoder says no more than the first of these, and without the index of a
// list or the value.
func (p *problems) checkType(path *field.Path, v any, t reflect.Type) {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if v == nil || t.Kind() == reflect.Interface {
		return
	}
	if reflect.PointerTo(t).Implements(reflect.TypeFor[json.Unmarshaler]()) {
		p.checkCustom(path, v, t)
		return
	}
	switch t.Kind() {
	case reflect.Struct:
		p.checkStruct(path, v, t)
	case reflect.Map:
		p.checkMap(path, v, t)
	case reflect.Slice:
		p.checkSlice(path, v, t)
	default:
		p.checkScalar(path, v, t)
	}
}

// maxQuantity bounds the text of a quantity, in bytes: reading one takes time
// that grows with the square of its length.
const maxQuantity = 256

// checkCustom lets a type that reads itself (a quantity, a time) read v.
func (p *problems) checkCustom(path *field.Path, v any, t reflect.Type) {
	text, err := json.Marshal(v)
	if err == nil && t == reflect.TypeFor[resource.Quantity]() && len(text) > maxQuantity {
		err = fmt.Errorf("%d bytes", len(text))
	}
	if err == nil {
		err = json.Unmarshal(text, reflect.New(t).Interface())
	}
	if err == nil {
		return
	}
	switch t {
	case reflect.TypeFor[resource.Quantity]():
		p.add(path, v, "a quantity such as 500m or 1Gi")
	case reflect.TypeFor[metav1.Time](), reflect.TypeFor[metav1.MicroTime]():
		p.add(path, v, "a time such as 2026-01-02T15:04:05Z")
	case reflect.TypeFor[intstr.IntOrString]():
		p.add(path, v, "a whole number or a name")
	case reflect.TypeFor[metav1.Duration]():
		p.add(path, v, "a duration such as 1m30s")
	default:
		p.add(path, v, fmt.Sprintf("a %s: %v", t.Name(), err))
	}
}

func (p *problems) checkStruct(path *field.Path, v any, t reflect.Type) {
	m, ok := v.(map[string]any)
	if !ok {
		p.add(path, v, "an object")
		return
	}
	fields := map[string]reflect.Type{}
	addFields(fields, t)
	for _, key := range sortedKeys(m) {
		ft, known := fields[key]
		if !known {
			p.unknownField(path.Child(key), key, m[key], fields)
			continue
		}
		p.checkType(path.Child(key), m[key], ft)
	}
}

func (p *problems) unknownField(path *field.Path, key string, v any, fields map[string]reflect.Type) {
	known := sortedKeys(fields)
	if near, ok := nearest(key, known); ok {
		p.say(path, "unknown field with value %s: want %q", show(v), near)
		return
	}
	const few = 16
	if len(known) > few {
		p.say(path, "unknown field with value %s: want a field of the Kubernetes API", show(v))
		return
	}
	p.say(path, "unknown field with value %s: want one of %s", show(v), strings.Join(known, ", "))
}

// addFields adds the JSON names of a struct, those of inlined structs too.
func addFields(fields map[string]reflect.Type, t reflect.Type) {
	for i := range t.NumField() {
		f := t.Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch {
		case name == "-" || (!f.IsExported() && !f.Anonymous):
		case f.Anonymous && name == "":
			ft := f.Type
			if ft.Kind() == reflect.Pointer {
				ft = ft.Elem()
			}
			addFields(fields, ft)
		case name == "":
			fields[f.Name] = f.Type
		default:
			fields[name] = f.Type
		}
	}
}

func (p *problems) checkMap(path *field.Path, v any, t reflect.Type) {
	m, ok := v.(map[string]any)
	if !ok {
		p.add(path, v, "an object")
		return
	}
	for _, key := range sortedKeys(m) {
		p.checkType(path.Key(key), m[key], t.Elem())
	}
}

func (p *problems) checkSlice(path *field.Path, v any, t reflect.Type) {
	if t.Elem().Kind() == reflect.Uint8 {
		s, ok := v.(string)
		if _, err := base64.StdEncoding.DecodeString(s); !ok || err != nil {
			p.add(path, v, "a text in base64")
		}
		return
	}
	list, ok := v.([]any)
	if !ok {
		p.add(path, v, "a list")
		return
	}
	for i, x := range list {
		p.checkType(path.Index(i), x, t.Elem())
	}
}

func (p *problems) checkScalar(path *field.Path, v any, t reflect.Type) {
	switch t.Kind() {
	case reflect.String:
		if _, ok := v.(string); !ok {
			p.add(path, v, "a text (put it in quotes if it looks like something else)")
		}
	case reflect.Bool:
		if _, ok := v.(bool); !ok {
			p.add(path, v, "true or false")
		}
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		if n, ok := v.(int64); !ok || reflect.Zero(t).OverflowInt(n) {
			p.add(path, v, wholeNumber(v, t.Bits()))
		}
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		if n, ok := v.(int64); !ok || n < 0 || reflect.Zero(t).OverflowUint(uint64(n)) {
			p.add(path, v, "a whole number that is not negative")
		}
	case reflect.Float32, reflect.Float64:
		switch n := v.(type) {
		case int64:
		case float64:
			if math.IsInf(n, 0) || math.IsNaN(n) {
				p.add(path, v, "a finite number")
			}
		default:
			p.add(path, v, "a number")
		}
	}
}

func wholeNumber(v any, bits int) string {
	switch v.(type) {
	case int64, float64:
		return fmt.Sprintf("a whole number of at most %d bits", bits)
	case string:
		return "a whole number, without quotes"
	}
	return "a whole number"
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
