// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/statedb"

	"github.com/weft-mesh/weft/internal/policy"
	"github.com/weft-mesh/weft/internal/state"
)

// watcher sees every state that a change goes through.
type watcher struct {
	*world
	qs     []question
	before map[netip.Addr]string
	seen   map[netip.Addr][]string // each once, in order
}

// watch begins to look at the pods that are attached.
func (w *world) watchPods() *watcher {
	x := &watcher{world: w, qs: w.questions(), before: map[netip.Addr]string{}, seen: map[netip.Addr][]string{}}
	for a := range w.kernel.endpoints {
		x.before[a] = w.answers(a, x.qs)
	}
	w.kernel.see = func() {
		for a := range x.before {
			now := w.answers(a, x.qs)
			if n := len(x.seen[a]); n == 0 && now != x.before[a] || n > 0 && x.seen[a][n-1] != now {
				x.seen[a] = append(x.seen[a], now)
			}
		}
	}
	return x
}

// stop looks no more and says whether every pod went at once from what it had
// to what it has, if that is another thing.
func (x *watcher) stop(what string) {
	x.Helper()
	x.kernel.see = func() {}
	for a, before := range x.before {
		after := x.answers(a, x.qs)
		want := []string{after}
		if after == before {
			want = nil
		}
		if !slices.Equal(x.seen[a], want) {
			x.Errorf("%s: pod %s had %d states in between, want %d: %s", what, a, len(x.seen[a]), len(want), x.firstThird(a, before, after))
		}
	}
}

// firstThird is a verdict that is neither the old nor the new one.
func (x *watcher) firstThird(pod netip.Addr, before, after string) string {
	b, a := strings.Split(before, ";"), strings.Split(after, ";")
	for _, s := range x.seen[pod] {
		for i, v := range strings.Split(s, ";") {
			if v != b[i] && v != a[i] {
				return fmt.Sprintf("%+v was %q, became %q, and was %q meanwhile", x.qs[i], b[i], a[i], v)
			}
		}
	}
	return "old and new ones at the same time"
}

// agree compares the kernel with the compiler.
func (w *world) agree(what string) {
	w.Helper()
	r, pods, err := w.State()
	check(w, err)
	for _, p := range pods {
		if !p.Local {
			continue
		}
		self := policy.Party{Endpoint: p.ID(), Identity: p.Identity, Addr: p.IPs[0]}
		for _, q := range w.questions() {
			other := policy.Party{Identity: q.identity, Addr: q.addr}
			if q.addr == self.Addr {
				continue
			}
			f := r.Trace(self, other, q.protocol, q.port).Egress
			if q.direction == policy.Ingress {
				f = r.Trace(other, self, q.protocol, q.port).Ingress
			}
			if want, got := fmt.Sprintf("%s %d", f.Verdict, f.Rule.Number), w.kernel.answer(self.Addr, q); got != want {
				w.Fatalf("%s: pod %s, %+v: the kernel says %q, the compiler %q", what, p.Name, q, got, want)
			}
		}
	}
}

// clean compares what the kernel holds with what it must: nothing is left over.
func (w *world) clean(what string) {
	w.Helper()
	r, _, err := w.State()
	check(w, err)
	if got, want := len(w.kernel.entries), len(r.Subjects); got != want {
		w.Errorf("%s: %d subjects in the kernel, want %d", what, got, want)
	}
	if got := wantedClasses(r); !maps.Equal(got, w.kernel.classes) {
		w.Errorf("%s: classes %v, want %v", what, w.kernel.classes, got)
	}
}

// TestChangesAreAtomic: after every single write of a change, each pod has all of
// its old verdicts or all of its new ones.
func TestChangesAreAtomic(t *testing.T) {
	for seed := range uint64(30) {
		g := generator{rand.New(rand.NewPCG(seed, 5))}
		w := newWorld(t)
		w.populate(4, 4)
		check(t, w.Prune())
		var ps []*state.Policy
		for i := range 12 {
			what := fmt.Sprintf("seed %d, change %d", seed, i)
			for range 1 + g.IntN(2) {
				ps = g.change(ps)
			}
			w.policies(ps...)
			x := w.watchPods()
			check(t, w.Apply())
			x.stop(what)
			w.agree(what)
			w.clean(what)
		}
		if t.Failed() {
			return
		}
	}
}

// TestRefusedChanges: whatever write of a change the kernel refuses, each pod has
// all of the old verdicts or all of the new ones, and the next attempt succeeds.
func TestRefusedChanges(t *testing.T) {
	for seed := range uint64(20) {
		g := generator{rand.New(rand.NewPCG(seed, 6))}
		w := newWorld(t)
		w.populate(3, 3)
		check(t, w.Prune())
		var ps []*state.Policy
		for i := range 10 {
			what := fmt.Sprintf("seed %d, change %d", seed, i)
			ps = g.change(g.change(ps))
			w.policies(ps...)
			x := w.watchPods()
			w.kernel.changes, w.kernel.failAt = 0, 1+g.IntN(12)
			err := w.Apply()
			refused := w.kernel.changes >= w.kernel.failAt
			w.kernel.failAt = 0
			if refused != (err != nil) {
				t.Errorf("%s: refused %t, and the error is %v", what, refused, err)
			}
			if st := w.Status(); (st.Err != nil) != refused || (w.reports[len(w.reports)-1] != nil) != refused {
				t.Errorf("%s: refused %t, status %v, report %v", what, refused, st.Err, w.reports[len(w.reports)-1])
			}
			check(t, w.Apply())
			x.stop(what)
			w.agree(what)
			w.clean(what)
		}
		if t.Failed() {
			return
		}
	}
}

// TestFullMap: what does not fit changes nothing, says so, and is in force once it
// fits.
func TestFullMap(t *testing.T) {
	w := newWorld(t)
	w.populate(3, 3)
	check(t, w.Prune())
	w.policies(allowFrom("a", "web", 80, block("10.0.0.0/8")))
	check(t, w.Apply())
	entries, classes, status := len(w.kernel.entries), maps.Clone(w.kernel.classes), w.Status()
	w.kernel.max = w.kernel.count() + 3
	var many []*state.Policy
	for i := range 10 {
		many = append(many, allowFrom(fmt.Sprintf("b%d", i), "web", int32(8000+i), block("10.0.0.0/8", "10.244.0.0/16")))
	}
	w.policies(many...)
	x := w.watchPods()
	err := w.Apply()
	if err == nil || !strings.Contains(err.Error(), "no space left") {
		t.Fatalf("got %v", err)
	}
	x.stop("full")
	if len(w.kernel.entries) != entries || !maps.Equal(w.kernel.classes, classes) {
		t.Errorf("%d subjects and classes %v, want %d and %v", len(w.kernel.entries), w.kernel.classes, entries, classes)
	}
	st := w.Status()
	if st.Err == nil || st.Revision != status.Revision || st.Entries != status.Entries || st.MaxEntries != w.kernel.max {
		t.Errorf("status %+v, was %+v", st, status)
	}
	// a new pod that needs what does not fit is refused, one that does not is not
	fresh := w.pod("new", "web", 9)
	if err := w.Attach(fresh, func(uint32) error { t.Error("attached"); return nil }); err == nil {
		t.Error("a pod whose policy is not in force was attached")
	}
	w.Detach(fresh)
	w.kernel.max = 1 << 20
	check(t, w.Apply())
	w.agree("room again")
	w.clean("room again")
	if st := w.Status(); st.Err != nil || st.Revision != status.Revision+1 {
		t.Errorf("status %+v", st)
	}
}

// TestOtherIdentity: a pod of another node changes its labels. Connections are
// judged again, but not before the kernel knows who it is now.
func TestOtherIdentity(t *testing.T) {
	w := newWorld(t)
	w.populate(2, 3)
	check(t, w.Prune())
	w.policies(allowApp("a", "web", "client"))
	check(t, w.Apply())
	before := w.kernel.endpoints[local(2)]
	if before == 0 || w.kernel.endpoints[local(3)] != 0 {
		t.Fatalf("subjects %v", w.kernel.endpoints)
	}
	check(t, w.Settle(t.Context()))
	if w.settled != 0 || w.kernel.endpoints[local(2)] != before {
		t.Error("judged again without a reason")
	}
	w.workload("r2", "node2", "client", remote(2))
	x := w.watchPods()
	check(t, w.Apply())
	w.onSettle = func() { // known in the kernel only now
		if n := w.kernel.endpoints[local(2)]; n != before {
			t.Errorf("judged again too early: subject %d, was %d", n, before)
		}
	}
	check(t, w.Settle(t.Context()))
	x.stop("other identity")
	if w.settled != 1 {
		t.Errorf("waited %d times for identities", w.settled)
	}
	if n := w.kernel.endpoints[local(2)]; n == before || n == 0 {
		t.Errorf("subject %d, was %d", n, before)
	}
	w.agree("other identity")
	w.clean("other identity")
	check(t, w.Settle(t.Context()))
	if w.settled != 1 {
		t.Error("waits again without a reason")
	}
}

// TestOwnIdentity: a pod of this node changes its labels. Its identity and its
// policy change at once, and those who speak with it are judged again after.
func TestOwnIdentity(t *testing.T) {
	w := newWorld(t)
	w.populate(3, 0)
	check(t, w.Prune())
	w.policies(allowApp("a", "web", "client"), allowFrom("b", "client", 0))
	check(t, w.Apply())
	web := w.kernel.endpoints[local(2)]
	p := w.pod("l3", "client", 3) // was db
	check(t, w.Attach(p, func(subject uint32) error {
		if subject == 0 {
			t.Error("it has the identity of a client, and not the policy")
		}
		w.kernel.attach(p.IPs, p.Ifindex, subject)
		if w.kernel.endpoints[local(2)] != web {
			t.Error("its peers were judged before its identity was known")
		}
		return nil
	}))
	if w.kernel.endpoints[local(2)] == web {
		t.Error("its peers are not judged again")
	}
	if got := w.kernel.endpoints[local(3)]; got == 0 {
		t.Error("no policy")
	}
	w.agree("own identity")
}

// TestAttach: a pod is attached with its policy in force; no change comes in
// between; one that is not attached leaves nothing behind.
func TestAttach(t *testing.T) {
	w := newWorld(t)
	w.policies(allowFrom("a", "web", 80))
	w.workload("l2", "node1", "web", local(2))
	p := w.pod("l2", "web", 2)
	broken := errors.New("no such device")
	if err := w.Attach(p, func(uint32) error { return broken }); !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
	check(t, w.Apply())
	if st := w.Status(); st.Endpoints != 0 || st.Subjects != 0 {
		t.Errorf("status %+v", st)
	}
	check(t, w.Attach(p, func(subject uint32) error {
		if len(w.kernel.entries[subject]) == 0 || subject&subjectIngress == 0 {
			t.Errorf("subject %#x has %d entries", subject, len(w.kernel.entries[subject]))
		}
		if w.mu.TryLock() {
			t.Error("a change may come in between")
		}
		w.kernel.attach(p.IPs, p.Ifindex, subject)
		return nil
	}))
	// the row is not there yet; the pod counts all the same
	w.policies(allowFrom("a", "web", 443))
	x := w.watchPods()
	check(t, w.Apply())
	x.stop("between Attach and the row")
	w.agree("between Attach and the row")
	w.Detach(p)
	check(t, w.Apply())
	if st := w.Status(); st.Endpoints != 0 {
		t.Errorf("status %+v", st)
	}
}

// TestRestart: the next agent finds the policy of the last one. Whatever was
// written in between, each pod keeps what it has until it is attached again, and
// then has what is written now.
func TestRestart(t *testing.T) {
	for seed := range uint64(30) {
		g := generator{rand.New(rand.NewPCG(seed, 7))}
		w := newWorld(t)
		w.populate(4, 4)
		check(t, w.Prune())
		var ps []*state.Policy
		for range 5 {
			ps = g.change(ps)
		}
		w.policies(ps...)
		check(t, w.Apply())
		same := seed%3 == 0
		if !same {
			ps = g.change(g.change(ps))
			w.policies(ps...)
		}
		used, subjects := maps.Clone(w.kernel.used), maps.Clone(w.kernel.endpoints)
		rows := statedb.Collect(w.tables.Pods.All(w.tables.DB.ReadTxn()))
		txn := w.tables.DB.WriteTxn(w.tables.Pods)
		check(t, w.tables.Pods.DeleteAll(txn))
		txn.Commit()
		what := fmt.Sprintf("seed %d", seed)
		x := w.watchPods()
		w.start(maps.Clone(w.Enforcer.identities))
		for _, p := range rows {
			w.add(p)
		}
		check(t, w.Apply())
		check(t, w.Prune())
		x.stop(what)
		w.agree(what)
		w.clean(what)
		if same && !maps.Equal(subjects, w.kernel.endpoints) {
			t.Errorf("%s: nothing changed, and the subjects %v became %v", what, subjects, w.kernel.endpoints)
		}
		w.policies(g.change(ps)...)
		check(t, w.Apply())
		for a, n := range w.kernel.endpoints {
			if n != 0 && used[n] && n != subjects[a] && !slices.Contains(slices.Collect(maps.Values(subjects)), n) {
				t.Errorf("%s: number %#x was used again", what, n)
			}
		}
		check(t, w.Settle(t.Context()))
		if w.settled != 0 {
			t.Errorf("%s: no identity has changed, and all is judged again", what)
		}
		if t.Failed() {
			return
		}
	}
}

// TestRestartWithOtherIdentities: a pod changed its labels while no agent ran.
func TestRestartWithOtherIdentities(t *testing.T) {
	w := newWorld(t)
	w.populate(1, 2)
	check(t, w.Prune())
	w.policies(allowApp("a", "web", "client"))
	check(t, w.Apply())
	known, before := maps.Clone(w.Enforcer.identities), w.kernel.endpoints[local(2)]
	w.workload("r2", "node2", "client", remote(2))
	w.start(known)
	w.add(w.pod("l2", "web", 2))
	check(t, w.Prune())
	check(t, w.Settle(t.Context()))
	if w.settled != 1 || w.kernel.endpoints[local(2)] == before {
		t.Errorf("waited %d times, subject %d, was %d", w.settled, w.kernel.endpoints[local(2)], before)
	}
	w.clean("restart")
}

func TestStatus(t *testing.T) {
	w := newWorld(t)
	if _, err := w.Result(); !errors.Is(err, ErrNotYet) {
		t.Errorf("got %v", err)
	}
	if got := w.RuleName(99); got != "rule 99" {
		t.Errorf("rule name %q", got)
	}
	w.policies(allowFrom("a", "web", 80, block("10.0.0.0/8")))
	w.populate(3, 1)
	check(t, w.Prune())
	st := w.Status()
	if st.Generation != 7 || st.Policies != 1 || st.Subjects != 1 || st.Endpoints != 1 || st.Classes != 1 || st.Entries != w.kernel.count() || st.Err != nil || st.Revision == 0 {
		t.Errorf("status %+v", st)
	}
	check(t, w.Apply())
	if again := w.Status(); again.Revision != st.Revision || again.Changed != st.Changed {
		t.Errorf("a change of nothing counts: %+v, was %+v", again, st)
	}
	r, err := w.Result()
	check(t, err)
	for n, rule := range r.Rules {
		if got := w.RuleName(n); got != rule.String() {
			t.Errorf("rule %d is called %q, want %q", n, got, rule)
		}
	}
}

// TestRestartThatDoesNotFit: a pod that cannot be attached again, because its new
// rules do not fit beside the old ones, keeps the old ones until it can.
func TestRestartThatDoesNotFit(t *testing.T) {
	w := newWorld(t)
	w.populate(2, 2)
	check(t, w.Prune())
	w.policies(allowFrom("a", "web", 80, block("10.0.0.0/8")))
	check(t, w.Apply())
	txn := w.tables.DB.WriteTxn(w.tables.Pods)
	check(t, w.tables.Pods.DeleteAll(txn))
	txn.Commit()
	w.policies(allowFrom("a", "web", 443, block("10.0.0.0/8", "10.244.2.2/32")))
	w.kernel.max = w.kernel.count() + 1
	x := w.watchPods()
	w.start(maps.Clone(w.Enforcer.identities))
	if err := w.Attach(w.pod("l2", "web", 2), func(uint32) error { t.Error("attached"); return nil }); err == nil {
		t.Error("it fits")
	}
	w.add(w.pod("l3", "db", 3))
	check(t, w.Prune())
	check(t, w.Apply())
	if st := w.Status(); st.Err == nil || w.reports[len(w.reports)-1] == nil {
		t.Error("a pod waits for its policy, and the status does not say so")
	}
	if len(x.seen[local(2)]) > 0 {
		t.Errorf("the pod has lost its rules: %s", x.firstThird(local(2), x.before[local(2)], ""))
	}
	w.kernel.max = 1 << 20
	w.add(w.pod("l2", "web", 2))
	check(t, w.Apply())
	x.stop("fits again")
	if st := w.Status(); st.Err != nil {
		t.Errorf("it fits again: %v", st.Err)
	}
	w.agree("fits again")
	w.clean("fits again")
}
