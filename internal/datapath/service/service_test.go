// SPDX-License-Identifier: Apache-2.0

package service

import (
	"errors"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/weft-mesh/weft/internal/balance"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func name(service string) balance.Name {
	return balance.Name{Namespace: "shop", Service: service, Port: "http", Protocol: "TCP"}
}

// many makes n backends.
func many(n int) []balance.Backend {
	out := make([]balance.Backend, n)
	a := netip.MustParseAddr("10.244.1.2")
	for i := range out {
		out[i] = balance.Backend{Addr: a, Port: 8080, State: balance.Active}
		a = a.Next()
	}
	return out
}

// clusterIP is a port at a cluster address only.
func clusterIP(service, at string, list []balance.Backend) *balance.ServicePort {
	a := netip.MustParseAddrPort(at)
	return &balance.ServicePort{
		Name:      name(service),
		Frontends: []balance.Frontend{{Addr: a.Addr(), Port: a.Port(), Kind: balance.ClusterIP}},
		Internal:  list,
	}
}

// nodePort adds one for clients from outside.
func nodePort(p *balance.ServicePort, at string) *balance.ServicePort {
	a := netip.MustParseAddrPort(at)
	c := *p
	c.Frontends = append(slices.Clone(p.Frontends), balance.Frontend{Addr: a.Addr(), Port: a.Port(), Kind: balance.NodePort})
	c.Cluster, c.External = c.Internal, c.Internal
	return &c
}

func newTest(t testing.TB, f *fake, o Options) *Writer {
	t.Helper()
	w, err := newWriter(f.kernel(), o)
	must(t, err)
	return w
}

// apply makes changes and expects them in force.
func apply(t testing.TB, w *Writer, want ...*balance.ServicePort) Outcome {
	t.Helper()
	var changes []Change
	for _, p := range want {
		changes = append(changes, Change{p.Name, p})
	}
	out := w.Apply(changes)
	w.Release(out.Left)
	for _, err := range w.Errors() {
		t.Fatal(err)
	}
	must(t, w.Collect())
	return out
}

// sweep is Sweep where nobody uses what an earlier agent left.
func sweep(t testing.TB, w *Writer) {
	t.Helper()
	left, err := w.Sweep()
	must(t, err)
	w.Release(left)
	must(t, w.Collect())
}

func dumpOf(t testing.TB, w *Writer) string {
	t.Helper()
	var b strings.Builder
	must(t, w.Dump(&b))
	return b.String()
}

// TestWritesOfOneEndpoint: as many for two backends as for five thousand.
func TestWritesOfOneEndpoint(t *testing.T) {
	for _, n := range []int{3, 100, 5000} {
		f := newFake(1 << 20)
		w := newTest(t, f, Options{})
		all := many(n)
		apply(t, w, nodePort(clusterIP("web", "10.96.0.1:80", all), "172.30.0.1:30080"))
		count := func(list []balance.Backend) Writes {
			before := w.Writes()
			apply(t, w, nodePort(clusterIP("web", "10.96.0.1:80", list), "172.30.0.1:30080"))
			after := w.Writes()
			return Writes{after.Services - before.Services, after.Slots - before.Slots, after.Backends - before.Backends, 0, 0, 0}
		}
		less := slices.Delete(slices.Clone(all), 1, 2)
		// a slot is overwritten, both frontends count less, the last slot and the backend go
		if d := cmp.Diff(Writes{Services: 2, Slots: 2, Backends: 1}, count(less)); d != "" {
			t.Errorf("%d backends, one goes (-want +got):\n%s", n, d)
		}
		if d := cmp.Diff(Writes{Services: 2, Slots: 1, Backends: 1}, count(all)); d != "" {
			t.Errorf("%d backends, one comes (-want +got):\n%s", n, d)
		}
		other := slices.Clone(less)
		other = append(other, balance.Backend{Addr: netip.MustParseAddr("10.250.0.1"), Port: 8080})
		// one for another: nothing but a slot
		if d := cmp.Diff(Writes{Slots: 1, Backends: 2}, count(other)); d != "" {
			t.Errorf("%d backends, one is another (-want +got):\n%s", n, d)
		}
		if d := cmp.Diff(Writes{}, count(other)); d != "" {
			t.Errorf("%d backends, nothing changes (-want +got):\n%s", n, d)
		}
	}
}

// TestPolicySwitchesAtOnce: with another externalTrafficPolicy a frontend gets
// flag and set in one write.
func TestPolicySwitchesAtOnce(t *testing.T) {
	f := newFake(1 << 20)
	w := newTest(t, f, Options{})
	p := nodePort(clusterIP("web", "10.96.0.1:80", many(40)), "172.30.0.1:30080")
	apply(t, w, p)
	local := *p
	local.External, local.LocalExternal = many(40)[:39], true
	before := w.Writes()
	f.check = func() {
		for k, v := range f.services.m {
			if v.Flags&1 == 0 {
				continue
			}
			if isLocal := v.Flags&2 != 0; isLocal != (v.Far.Count == 39) {
				t.Errorf("frontend %s: flags %d and %d backends", frontendOf(&k), v.Flags, v.Far.Count)
			}
		}
	}
	apply(t, w, &local)
	if n := w.Writes().Services - before.Services; n != 1 {
		t.Errorf("%d frontends written, want 1", n)
	}
	must(t, f.equal(state{p.Name: &local}, false))
}

// TestFull: what does not fit leaves the rest alone, says so, and is tried again.
func TestFull(t *testing.T) {
	f := newFake(1 << 20)
	w := newTest(t, f, Options{})
	f.slots.max, f.backends.max = 6, 5
	a, b := clusterIP("a", "10.96.0.1:80", many(2)), clusterIP("b", "10.96.0.2:80", many(2))
	apply(t, w, a, b)
	was := dumpOf(t, w)
	a4, c := clusterIP("a", "10.96.0.1:80", many(4)), clusterIP("c", "10.96.0.3:80", many(1))
	w.Release(w.Apply([]Change{{a4.Name, a4}, {c.Name, c}}).Left)
	errs := w.Errors()
	if len(errs) != 1 || errs[0].Name != a4.Name || errs[0].Map != "backends" || errs[0].Size != 5 || !errors.Is(errs[0], unix.E2BIG) {
		t.Fatalf("errors %v, want one of port a and map backends", errs)
	}
	want := "service port shop/a:http/TCP: map backends is full: it holds 5 entries"
	if errs[0].Error() != want {
		t.Errorf("error %q, want %q", errs[0], want)
	}
	must(t, w.Collect())
	if d := cmp.Diff(was+"10.96.0.3:80/TCP shop/c:http/TCP near 10.244.1.2:8080\n", dumpOf(t, w)); d != "" {
		t.Errorf("maps (-want +got):\n%s", d)
	}
	f.backends.max = 100
	w.Release(w.Apply(w.Retries()).Left)
	if errs := w.Errors(); len(errs) != 1 || errs[0].Map != "slots" {
		t.Fatalf("errors %v, want one of map slots", errs)
	}
	must(t, w.Collect())
	w.Release(w.Apply([]Change{{b.Name, nil}, {c.Name, nil}}).Left)
	must(t, w.Collect())
	w.Release(w.Apply(w.Retries()).Left)
	if errs := w.Errors(); len(errs) != 0 {
		t.Errorf("errors %v when there is room", errs)
	}
	must(t, w.Collect())
	must(t, f.equal(state{a4.Name: a4}, false))
}

// TestFullFrontends: the frontends that fit are there.
func TestFullFrontends(t *testing.T) {
	f := newFake(1 << 20)
	w := newTest(t, f, Options{})
	f.services.max = 1
	p := nodePort(clusterIP("web", "10.96.0.1:80", many(2)), "172.30.0.1:30080")
	w.Release(w.Apply([]Change{{p.Name, p}}).Left)
	errs := w.Errors()
	if len(errs) != 1 || errs[0].Frontend.String() != "172.30.0.1:30080" || errs[0].Map != "services" {
		t.Fatalf("errors %v, want one of the NodePort", errs)
	}
	f.services.max = 2
	w.Release(w.Apply(w.Retries()).Left)
	must(t, w.Collect())
	must(t, f.equal(state{p.Name: p}, false))
}

// TestFullTables: clients from outside then choose at random.
func TestFullTables(t *testing.T) {
	f := newFake(1 << 20)
	w := newTest(t, f, Options{Maglev: true})
	f.maglev.max = 0
	p := nodePort(clusterIP("web", "10.96.0.1:80", many(2)), "172.30.0.1:30080")
	w.Release(w.Apply([]Change{{p.Name, p}}).Left)
	if errs := w.Errors(); len(errs) != 1 || errs[0].Map != "maglev" {
		t.Fatalf("errors %v, want one of map maglev", errs)
	}
	must(t, w.Collect())
	must(t, f.equal(state{p.Name: p}, false))
	f.maglev.max = 1
	w.Release(w.Apply(w.Retries()).Left)
	must(t, w.Collect())
	must(t, f.equal(state{p.Name: p}, true))
	if s := w.Maglev(); s.Tables != 1 || s.Bytes != 251*8 {
		t.Errorf("tables: %+v", s)
	}
}

// TestConflicts: the first by name has a frontend that two want, and the other
// gets it when it goes.
func TestConflicts(t *testing.T) {
	f := newFake(1 << 20)
	w := newTest(t, f, Options{})
	a, b := clusterIP("a", "10.96.0.1:80", many(1)), clusterIP("b", "10.96.0.1:80", many(3))
	apply(t, w, b)
	if c := w.Conflicts(); len(c) != 0 {
		t.Errorf("conflicts %v", c)
	}
	apply(t, w, a)
	want := []Conflict{{Loser: b.Name, Winner: a.Name, Frontend: netip.MustParseAddrPort("10.96.0.1:80")}}
	if c := w.Conflicts(); !slices.Equal(c, want) {
		t.Errorf("conflicts %v, want %v", c, want)
	}
	must(t, f.equal(state{a.Name: a, b.Name: b}, false))
	w.Release(w.Apply([]Change{{a.Name, nil}}).Left)
	must(t, w.Collect())
	must(t, f.equal(state{b.Name: b}, false))
}

// TestOutcome: who must be told of what goes and comes.
func TestOutcome(t *testing.T) {
	f := newFake(1 << 20)
	w := newTest(t, f, Options{})
	empty, two, three := clusterIP("a", "10.96.0.1:80", nil), clusterIP("a", "10.96.0.1:80", many(2)), clusterIP("a", "10.96.0.1:80", many(3))
	left := func(ids ...uint32) (out []Left) {
		for _, id := range ids {
			out = append(out, Left{two.Name, 1, id, atOf(&many(4)[id-1])})
		}
		return out
	}
	for i, step := range []struct {
		want *balance.ServicePort
		out  Outcome
	}{
		{empty, Outcome{Changed: 1}},
		{three, Outcome{Changed: 1}},
		{two, Outcome{Changed: 1, Left: left(3)}},
		{empty, Outcome{Changed: 1, Left: left(1, 2)}},
		{two, Outcome{Changed: 1}},
	} {
		if d := cmp.Diff(step.out, apply(t, w, step.want), cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })); d != "" {
			t.Errorf("step %d (-want +got):\n%s", i, d)
		}
	}
	out := w.Apply([]Change{{two.Name, nil}})
	if len(out.Left) != 2 || out.Left[0].Backend != 4 || out.Left[1].Backend != 5 {
		t.Errorf("the port goes: %+v, want backends 4 and 5, for numbers are not used again", out)
	}
	must(t, w.Collect())
	if n := len(f.backends.m); n != 2 {
		t.Errorf("%d backends, want those that are not released", n)
	}
}

// TestRangesOfIPv6: clients of IPv4 are not among them.
func TestRangesOfIPv6(t *testing.T) {
	all := rangesOf(1, []netip.Prefix{netip.MustParsePrefix("::/0")})
	contains := func(s string) bool {
		a := netip.AddrFrom16(netip.MustParseAddr(s).As16())
		return slices.ContainsFunc(all, func(k rangeKey) bool {
			var b [16]byte
			for i, w := range k.Addr {
				putNativeWord(b[4*i:], w)
			}
			return netip.PrefixFrom(netip.AddrFrom16(b), int(k.Prefixlen)-32).Contains(a)
		})
	}
	for s, want := range map[string]bool{
		"10.0.0.1": false, "255.255.255.255": false, "::1": true, "fd00::1": true, "ffff::": true, "::fffe:a00:1": true, "::1:ffff:a00:1": true,
	} {
		if contains(s) != want {
			t.Errorf("%s is in the ranges: %v, want %v", s, !want, want)
		}
	}
	if n := len(rangesOf(1, []netip.Prefix{netip.MustParsePrefix("fd00::/8"), netip.MustParsePrefix("0.0.0.0/0")})); n != 2 {
		t.Errorf("%d keys of two ranges", n)
	}
}

// TestAdoptsUnsound: an agent died in the middle of a removal.
func TestAdoptsUnsound(t *testing.T) {
	f := newFake(1 << 20)
	w := newTest(t, f, Options{})
	p := clusterIP("web", "10.96.0.1:80", many(5))
	p.Affinity = time.Hour
	apply(t, w, p)
	for k, v := range f.slots.m { // slot 0 was overwritten by the last one
		if k.Slot == 4 {
			f.slots.m[slotKey{Set: k.Set, Slot: 0}] = v
		}
	}
	f.ranges.m[rangeKey{Prefixlen: 40, Service: 77}] = 1
	f.backends.m[900] = f.backends.m[1]
	f.maglev.m[50] = []uint32{1}
	w = newTest(t, f, Options{})
	w.Apply([]Change{{p.Name, p}})
	sweep(t, w)
	must(t, f.equal(state{p.Name: p}, false))
	if ids := slices.Sorted(maps.Keys(f.backends.m)); !slices.Equal(ids, []uint32{2, 3, 4, 5, 901}) {
		t.Errorf("backends %v: want those of before that slots lead to", ids)
	}
}

func TestNameOf(t *testing.T) {
	for want, n := range map[string]balance.Name{
		"shop/web:http/TCP": name("web"),
		"shop/web/UDP":      {Namespace: "shop", Service: "web", Protocol: "UDP"},
	} {
		if got := NameOf(n); got != want {
			t.Errorf("%v is %q, want %q", n, got, want)
		}
	}
	if s := protocolName(132) + ", " + protocolName(1); s != "SCTP, protocol 1" {
		t.Error(s)
	}
}
