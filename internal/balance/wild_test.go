// SPDX-License-Identifier: Apache-2.0

package balance

import (
	"encoding/json"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/weft-mesh/weft/internal/state"
)

// wildValues are what a field may wrongly hold.
var wildValues = []any{
	nil, "", "None", "Local", "SCTP", "web", "10.96.0.10", "fd00::1", "::", "::1", "255.255.255.255", "::ffff:10.0.0.1", "fe80::1%eth0", "10.0.0.0/33", "::/0", "x",
	0.0, -1.0, 65535.0, 65536.0, 2147483647.0, -2147483648.0, true, false, []any{}, map[string]any{},
}

// spoil changes some leaves of a JSON value.
func (r random) spoil(v any) any {
	if r.chance(4) {
		return pickOf(r, wildValues...)
	}
	switch x := v.(type) {
	case map[string]any:
		for _, k := range slices.Sorted(maps.Keys(x)) {
			x[k] = r.spoil(x[k])
		}
	case []any:
		for i := range x {
			x[i] = r.spoil(x[i])
		}
		if len(x) > 0 && r.chance(5) {
			x = append(x, x[r.IntN(len(x))])
		}
		return x
	}
	return v
}

// wild decodes a spoiled copy of from into to; a spoilt type leaves to as it is,
// but partly written.
func wild(t *testing.T, r random, from, to any) {
	b, err := json.Marshal(from)
	if err != nil {
		t.Fatal(err)
	}
	var v any
	if err := json.Unmarshal(b, &v); err != nil {
		t.Fatal(err)
	}
	if b, err = json.Marshal(r.spoil(v)); err != nil {
		t.Fatal(err)
	}
	_ = json.Unmarshal(b, to) // what could be read is a good test too
}

// TestWild computes Services and slices that no API server would let pass: what
// comes out must still be sound, and the input unchanged.
func TestWild(t *testing.T) {
	ports, problems := 0, 0
	for seed := range uint64(10000) {
		r := random{rand.New(rand.NewPCG(seed, 5))}
		in := r.input()
		spec, status := &corev1.ServiceSpec{}, &corev1.ServiceStatus{}
		wild(t, r, in.Service.Spec, spec)
		wild(t, r, in.Service.Status, status)
		in.Service.Spec, in.Service.Status = spec, status
		for i := range in.Slices {
			s := &discoveryv1.EndpointSlice{}
			wild(t, r, in.Slices[i].Slice, s)
			in.Slices[i].Slice = s
		}
		keep := clone(in)
		ps, said := Compute(in)
		if err := invariant(in, ps); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		if !reflect.DeepEqual(in, keep) {
			t.Fatalf("seed %d: the input was changed", seed)
		}
		mix(r, in.Slices)
		ps2, said2 := Compute(in)
		if !reflect.DeepEqual(ps, ps2) || !reflect.DeepEqual(said, said2) {
			t.Fatalf("seed %d: slices in another order have another result", seed)
		}
		ports, problems = ports+len(ps), problems+len(said)
	}
	t.Logf("%d ports, %d problems", ports, problems)
	if ports == 0 || problems == 0 {
		t.Error("nothing was wild")
	}
}

func clone(in Input) Input {
	out := in
	s := *in.Service
	s.Spec, s.Status = s.Spec.DeepCopy(), s.Status.DeepCopy()
	out.Service, out.Slices = &s, nil
	for _, row := range in.Slices {
		c := *row
		c.Slice = row.Slice.DeepCopy()
		out.Slices = append(out.Slices, &c)
	}
	return out
}

func TestNothing(t *testing.T) {
	for _, in := range []Input{
		{},
		{Service: &state.Service{}},
		{Service: &state.Service{Spec: &corev1.ServiceSpec{}}, Slices: []*state.Endpoint{nil, {}}},
		{Service: service(), Slices: []*state.Endpoint{nil, {Namespace: "shop", Service: "web"}}},
	} {
		ports, _ := Compute(in)
		for _, p := range ports {
			if len(p.Internal) != 0 {
				t.Errorf("%v has backends", p.Name)
			}
		}
	}
}

// FuzzCompute takes a Service and an EndpointSlice as JSON.
func FuzzCompute(f *testing.F) {
	s, _ := json.Marshal(corev1.Service{Spec: *service(dualStack, externalPolicyLocal).Spec})
	e, _ := json.Marshal(inSlice("10.244.1.2 node1 zone=a")[0].Slice)
	f.Add(s, e)
	f.Fuzz(func(t *testing.T, s, e []byte) {
		var svc corev1.Service
		var es discoveryv1.EndpointSlice
		if json.Unmarshal(s, &svc) != nil || json.Unmarshal(e, &es) != nil {
			return
		}
		in := Input{Node: here, Service: &state.Service{Spec: &svc.Spec, Status: &svc.Status, Labels: svc.Labels}, Slices: []*state.Endpoint{{Slice: &es}}}
		ports, _ := Compute(in)
		if err := invariant(in, ports); err != nil {
			t.Error(err)
		}
	})
}
