// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"sigs.k8s.io/yaml"
)

// patience is how long an answer may take that must come; silence is how long
// one is waited for that must not.
const (
	patience = 5 * time.Second
	silence  = 60 * time.Millisecond
)

// question is a place that a client asks, and what must come of it.
type question struct {
	client string
	place  place
	want   verdict
	probe  Probe
}

// check has all clients ask what this step may have changed, and compares what
// the kernel's maps hold.
func (o *oracle) check() {
	o.t.Helper()
	o.inForce()
	o.forget()
	where := everywhere()
	slow := o.ask.chance(5)
	type answers struct {
		asked   []question
		results []Result
		err     error
	}
	var all []chan answers
	for _, client := range []string{insidePod, insideNode, outside} {
		asked := o.choose(client, where, slow)
		var probes []Probe
		for i := range asked {
			probes = append(probes, asked[i].probe)
		}
		c := make(chan answers, 1)
		all = append(all, c)
		go func() {
			results, err := o.w.clients[client].ask(probes)
			c <- answers{asked, results, err}
		}()
	}
	for _, c := range all {
		a := <-c
		o.w.must(a.err, "ask")
		for i := range a.asked {
			o.judge(&a.asked[i], &a.results[i])
		}
	}
	if o.step%6 == 5 {
		o.settled()
	}
}

// choose returns questions about places whose Service was touched, and some
// others.
func (o *oracle) choose(client string, where []place, slow bool) []question {
	var out []question
	for _, p := range where {
		from := o.source(client, p)
		was, want := o.before.expect(client, from, p), o.now.expect(client, from, p)
		if !o.touched(&was) && !o.touched(&want) && !o.ask.chance(3) {
			continue
		}
		if dear(p, &want) && (!slow || o.ask.chance(60)) {
			continue
		}
		out = append(out, question{client, p, want, o.probe(from, p, &want)})
	}
	o.ask.Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
	return out
}

// source is the address that the client has.
func (o *oracle) source(client string, p place) netip.Addr {
	f := family(p.at.Addr())
	switch client {
	case insidePod:
		return localPods[0][f]
	case insideNode:
		return nodeIPs[f]
	}
	return worldIPs[f+2*o.ask.IntN(2)]
}

func (o *oracle) touched(v *verdict) bool {
	if v.claim == nil {
		return false
	}
	name := v.claim.service.Name
	if o.before.services[name] != o.now.services[name] || o.before.node != o.now.node {
		return true
	}
	of := func(s *discoveryv1.EndpointSlice) bool {
		return s != nil && s.Labels[discoveryv1.LabelServiceName] == name
	}
	for slice := range maps.Keys(o.now.slices) {
		if a, b := o.before.slices[slice], o.now.slices[slice]; a != b && (of(a) || of(b)) {
			return true
		}
	}
	for slice, s := range o.before.slices {
		if o.now.slices[slice] == nil && of(s) {
			return true
		}
	}
	return false
}

// dear are connections that take long: those without an answer, and those by
// TCP over IPv6 that an ICMP error refuses. Where that comes while connect still
// has the socket, as it does through veth pairs, Linux waits for the next one.
func dear(p place, want *verdict) bool {
	return want.end == isDrop || want.end == isRefuse && want.packets && p.protocol == corev1.ProtocolTCP && p.at.Addr().Is6()
}

func (o *oracle) probe(from netip.Addr, p place, want *verdict) Probe {
	out := Probe{Way: TCP, To: p.at, Least: 1, Most: 1, Silence: patience}
	if p.protocol == corev1.ProtocolUDP {
		out.Way = pick(o.ask, Connect, SendTo)
	}
	out.Mapped = p.at.Addr().Is4() && o.ask.chance(25)
	if !slices.Contains(localPods[0], from) && !slices.Contains(nodeIPs, from) {
		out.From = from
	}
	switch {
	case dear(p, want) && want.end == isDrop:
		out.Silence, out.Aside = silence, true
	case dear(p, want):
		out.Aside = true
	case want.end == reaches && want.sticks:
		out.Want, out.Least, out.Most = 1, 4, 4
	case want.end == reaches:
		n := len(want.backends)
		out.Want, out.Least, out.Most = n, n+2, 200*n
	}
	return out
}

// judge compares what came of a question with what must.
func (o *oracle) judge(q *question, r *Result) {
	o.t.Helper()
	o.questions++
	o.connections += r.Tries
	var servers []string
	for a := range r.Seen {
		if !slices.Contains(servers, a.Server) {
			servers = append(servers, a.Server)
		}
		if err := q.seen(a); err != nil {
			o.failAt(q, r, "%v", err)
		}
	}
	slices.Sort(servers)
	only := func(e string) bool { return len(servers) == 0 && len(r.Errors) == 1 && r.Errors[e] > 0 }
	good := false
	switch q.want.end {
	case isDrop:
		good = only(silent)
		o.quiet++
	case isRefuse:
		good = only(refused)
	case isPlain:
		good = len(r.Errors) == 0 && slices.Equal(servers, []string{plain})
	case reaches:
		good = len(r.Errors) == 0 && (slices.Equal(servers, q.want.backends) ||
			q.want.sticks && len(servers) == 1 && slices.Contains(q.want.backends, servers[0]))
	}
	if !good {
		o.failAt(q, r, "a connection %s", q.want.String())
	}
	if good && q.want.sticks && q.want.end == reaches {
		o.stick(q, r)
	}
}

// seen says whether a server saw the client as it must.
func (q *question) seen(a Answer) error {
	f := family(q.place.at.Addr())
	want := ""
	at, err := netip.ParseAddrPort(a.Server)
	local := err == nil && slices.ContainsFunc(localPods, func(p []netip.Addr) bool { return p[f] == at.Addr() })
	switch {
	case a.Server == plain && q.client != outside: // as the node routes it
		return nil
	case q.client == outside && (local || a.Server == plain):
		want = q.probe.From.String()
	case q.client == insidePod && q.want.packets && at.Addr() == localPods[0][f]:
		want = gateways[f].String()
	case q.client == insidePod:
		want = localPods[0][f].String()
	default:
		want = nodeIPs[f].String()
	}
	if a.Client != want {
		return fmt.Errorf("the backend %s saw %s, want %s", a.Server, a.Client, want)
	}
	return nil
}

// stickyKey is a client of a service port in one family.
type stickyKey struct {
	port   string
	family int
	client string
}

// stick: a client that a backend has stays there while it may.
func (o *oracle) stick(q *question, r *Result) {
	o.t.Helper()
	k := stickyKey{q.want.claim.name(), family(q.place.at.Addr()), q.client}
	if q.want.packets {
		k.client = o.sourceOf(q).String()
	}
	if was, ok := o.last[k]; ok && was != r.Last && slices.Contains(q.want.backends, was) {
		o.failAt(q, r, "the client was with %s before", was)
	}
	o.last[k] = r.Last
}

func (o *oracle) sourceOf(q *question) netip.Addr {
	if q.probe.From.IsValid() {
		return q.probe.From
	}
	return localPods[0][family(q.place.at.Addr())]
}

// forget forgets clients whose backend their service port has no more, or that
// has no affinity any more.
func (o *oracle) forget() {
	for k, backend := range o.last {
		if !o.has(k, backend) {
			delete(o.last, k)
		}
	}
}

func (o *oracle) has(k stickyKey, backend string) bool {
	name, _, _ := strings.Cut(k.port, ":")
	s := o.now.services[name]
	if s == nil || s.Spec.SessionAffinity != corev1.ServiceAffinityClientIP {
		return false
	}
	for _, p := range everywhere() {
		if family(p.at.Addr()) != k.family {
			continue
		}
		for _, client := range []string{insidePod, outside} {
			v := o.now.expect(client, worldIPs[k.family], p)
			if v.claim != nil && v.claim.name() == k.port && slices.Contains(v.backends, backend) {
				return true
			}
		}
	}
	return false
}

// forgetChanged forgets clients of Services that changed while no agent was
// there: whether the next one knows them again depends on how much.
func (o *oracle) forgetChanged() {
	for k := range o.last {
		name, _, _ := strings.Cut(k.port, ":")
		if o.before.services[name] != o.now.services[name] {
			delete(o.last, k)
		}
	}
}

// failAt ends the test with all that one needs to see the same again.
func (o *oracle) failAt(q *question, r *Result, format string, args ...any) {
	o.t.Helper()
	again := "it was so once only"
	if results, err := o.w.clients[q.client].ask([]Probe{q.probe}); err != nil {
		again = err.Error()
	} else {
		again = fmt.Sprintf("asked again: %s", results[0].text())
	}
	names := map[string]bool{}
	for _, objects := range []*objects{o.before, o.now} {
		for _, s := range objects.services {
			for _, port := range s.Spec.Ports {
				if objects.kindOf(s, port, q.place) != "" {
					names[s.Name] = true
				}
			}
		}
	}
	what := fmt.Sprintf("%s to %s, by %s (mapped: %v), from %s: want: %s\ngot: %s\n%s", q.client, q.place, q.probe.Way, q.probe.Mapped, q.probe.From, fmt.Sprintf(format, args...), r.text(), again)
	o.fail("%s\n%s", what, o.manifests(slices.Sorted(maps.Keys(names))))
}

func (r *Result) text() string {
	var words []string
	for a, n := range r.Seen {
		words = append(words, fmt.Sprintf("%s (saw %s) %d times", a.Server, a.Client, n))
	}
	for e, n := range r.Errors {
		words = append(words, fmt.Sprintf("%q %d times", e, n))
	}
	slices.Sort(words)
	return strings.Join(words, ", ")
}

// manifests are the objects of some Services, of the step before and of now.
func (o *oracle) manifests(names []string) string {
	var b strings.Builder
	for _, when := range []struct {
		title   string
		objects *objects
	}{{"before", o.before}, {"now", o.now}} {
		fmt.Fprintf(&b, "# %s\n", when.title)
		list := []any{when.objects.node}
		for _, name := range names {
			if s := when.objects.services[name]; s != nil {
				list = append(list, s)
			}
			for _, slice := range slices.Sorted(maps.Keys(when.objects.slices)) {
				if s := when.objects.slices[slice]; s.Labels[discoveryv1.LabelServiceName] == name {
					list = append(list, s)
				}
			}
		}
		for _, x := range list {
			text, err := yaml.Marshal(x)
			if err != nil {
				text = []byte(err.Error())
			}
			fmt.Fprintf(&b, "---\n%s", text)
		}
	}
	return b.String()
}

func (o *oracle) fail(format string, args ...any) {
	o.t.Helper()
	dump, err := o.driver.Dump()
	if err != nil {
		dump = err.Error()
	}
	o.t.Fatalf("seed %d, step %d (go test -run %s ./test/oracle -seed %d -steps %d): %s\nthis step did: %s\nmaps:\n%s",
		*seed, o.step, o.t.Name(), *seed, o.step+1, fmt.Sprintf(format, args...), strings.Join(o.did, "; "), dump)
}
