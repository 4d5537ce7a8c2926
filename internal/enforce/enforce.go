// SPDX-License-Identifier: Apache-2.0

// Package enforce puts compiled network policy in force in the kernel such that
// each endpoint goes from its old rules to its new ones at once, and from a
// policy that cannot be installed nowhere.
//
// Each compiled policy (policy.Subject) gets a number, which is never used
// again, and its entries. A change is made in this order: entries of new
// subjects, classes that are new, the endpoints' subjects one by one, classes
// that nobody names any more, entries of old subjects. A class that comes or
// goes changes what the entries beside it match; so the old subjects get, before
// a class comes, the entries of the class that its addresses had until then, and
// new ones, while a class is still there, those of the class that they will
// have.
//
// The datapath judges an established connection again when the subject of one of
// its ends is another. That is also how a pod that takes on another identity
// is judged again by its peers: once the kernel knows the identity, all subjects
// get new numbers.
//
// Subjects of an earlier agent stay as long as a pod has them that is not attached
// again yet, and with them the classes that there were. Those whose rules are
// still the same keep their numbers.
package enforce

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/cilium/statedb"

	"github.com/weft-mesh/weft/internal/identity"
	"github.com/weft-mesh/weft/internal/policy"
	"github.com/weft-mesh/weft/internal/state"
)

// Kernel is the policy map; *datapath/policy.Map is one.
type Kernel interface {
	Install(subject uint32, entries []policy.Entry) error
	Remove(subject uint32, entries []policy.Entry) error
	Prune(keep func(subject uint32) bool) error
	Subjects() (map[uint32][]policy.Entry, error)
	SetClass(p netip.Prefix, class uint64) error
	DeleteClass(p netip.Prefix) error
	Classes() (map[netip.Prefix]uint64, error)
	MaxEntries() int
}

// Endpoints sets the subject of attached pods.
type Endpoints interface {
	SetSubject(ips []netip.Addr, ifindex int, subject uint32) error
	// Subjects are those that attached pods have.
	Subjects() (map[uint32]bool, error)
}

// Config is what an Enforcer needs.
type Config struct {
	Node       string // name of this node
	Tables     *state.Tables
	Identities *identity.Allocator
	Kernel     Kernel
	Endpoints  Endpoints
	Log        *slog.Logger

	// Known are the identities of addresses that the kernel has from an earlier
	// agent.
	Known map[netip.Addr]uint64
	// Settled returns once the kernel knows the identities that the addresses of
	// the cluster have in the tables.
	Settled func(context.Context) error
	// Generation is that of the manifest folder which the tables hold.
	Generation func() uint64
	// Report is told after every attempt why the change is not in force, or nil.
	Report func(error)
}

// installed is a subject in the kernel.
type installed struct {
	number  uint32
	entries []policy.Entry // with those made for classes in passing
	failed  []policy.Entry // that the kernel refused, or may have
}

// Enforcer keeps the kernel's policy in step with the tables.
type Enforcer struct {
	cfg Config

	mu         sync.Mutex // protects what follows; changes take turns
	compiler   policy.Compiler
	result     *policy.Result
	subjects   map[policy.SubjectKey]*installed
	endpoints  map[policy.EndpointID]uint32 // in force
	classes    map[netip.Prefix]uint64      // in the kernel
	numbered   map[netip.Prefix]uint64      // not yet in the kernel
	nextClass  uint64
	nextNumber uint32
	pending    map[string]*state.Pod // attached before their rows are there, by container
	refused    map[string]error      // why a pod is not attached, by container
	adopted    map[uint32]*installed // subjects of an earlier agent; nil once nobody has them
	restored   bool                  // Prune was called
	links      map[policy.EndpointID]podLink
	pods       []policy.Pod          // of the cluster, at the last change
	retired    []*installed          // that an endpoint may still have until all are switched
	garbage    []*installed          // that nobody has any more, to be removed
	identities map[netip.Addr]uint64 // of the last change
	stale      bool                  // connections are to be judged again under other identities
	generation uint64
	revision   uint64
	changed    time.Time
	err        error
}

// New reads what an earlier agent left, so that numbers are not used again.
func New(c Config) (*Enforcer, error) {
	subjects, err := c.Kernel.Subjects()
	if err != nil {
		return nil, err
	}
	classes, err := c.Kernel.Classes()
	if err != nil {
		return nil, err
	}
	e := &Enforcer{
		cfg: c, classes: classes, nextClass: policy.FirstClass, nextNumber: 1,
		subjects: map[policy.SubjectKey]*installed{}, endpoints: map[policy.EndpointID]uint32{},
		numbered: map[netip.Prefix]uint64{}, pending: map[string]*state.Pod{}, identities: c.Known,
		refused: map[string]error{},
		adopted: map[uint32]*installed{}, links: map[policy.EndpointID]podLink{},
	}
	for n, entries := range subjects {
		e.nextNumber = max(e.nextNumber, n&^subjectFlags+1)
		e.adopted[n] = &installed{number: n, entries: entries}
		for _, x := range entries {
			e.nextClass = max(e.nextClass, x.Peer+1)
		}
	}
	for _, n := range classes {
		e.nextClass = max(e.nextClass, n+1)
	}
	return e, nil
}

// Attach calls attach with the subject of a pod once that is in force; 0 where no
// policy selects it. No change comes in between. The pod counts as one of this
// node until Detach.
func (e *Enforcer) Attach(p *state.Pod, attach func(subject uint32) error) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	before, was := e.pending[p.ContainerID]
	e.pending[p.ContainerID] = p
	delete(e.refused, p.ContainerID)
	err := e.attach(p, attach)
	if err != nil && was {
		e.pending[p.ContainerID] = before
	} else if err != nil {
		delete(e.pending, p.ContainerID)
	}
	return err
}

func (e *Enforcer) attach(p *state.Pod, attach func(subject uint32) error) error {
	id := policy.Endpoint(p.Namespace, p.Name, p.IPs)
	other := slices.ContainsFunc(p.IPs, func(a netip.Addr) bool {
		before, known := e.identities[a]
		return known && before != p.Identity
	})
	err := e.apply()
	number, ok := e.endpoints[id]
	if err != nil && !ok {
		err = fmt.Errorf("policy of pod %s: %w", state.Key(p.Namespace, p.Name), err)
		e.refused[p.ContainerID] = err
		return err
	}
	if err := attach(number); err != nil {
		return err
	}
	if other {
		// The kernel knows it from now on. Should this fail, Run does it again.
		if err := e.renumber(); err != nil {
			e.cfg.Log.Error("connections are not judged again yet", "err", err)
		}
	}
	return nil
}

// Detach forgets a pod.
func (e *Enforcer) Detach(p *state.Pod) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.pending, p.ContainerID)
	delete(e.refused, p.ContainerID)
	delete(e.endpoints, policy.Endpoint(p.Namespace, p.Name, p.IPs))
}

// Apply puts what follows from the tables as they are now in force.
func (e *Enforcer) Apply() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.apply()
}

// Prune removes what an earlier agent left; to be called once the pods of this
// node are attached. What one still has that could not be attached stays until it
// is.
func (e *Enforcer) Prune() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.restored = true
	return e.prune()
}

func (e *Enforcer) prune() error {
	if e.adopted == nil || !e.restored {
		return nil
	}
	used, err := e.cfg.Endpoints.Subjects()
	if err != nil {
		return err
	}
	keep := map[uint32]bool{}
	for _, s := range append(slices.Collect(maps.Values(e.subjects)), e.retired...) {
		keep[s.number] = true
	}
	maps.DeleteFunc(e.adopted, func(n uint32, _ *installed) bool { return !used[n] })
	for n := range e.adopted {
		keep[n] = true
	}
	if err := e.cfg.Kernel.Prune(func(n uint32) bool { return keep[n] }); err != nil {
		return err
	}
	if len(e.adopted) > 0 || e.result == nil {
		return nil
	}
	e.adopted = nil
	return e.dropClasses(wantedClasses(e.result))
}

// retry is how long a change that failed waits for its next attempt.
const retry = 2 * time.Second

// Run follows the tables until ctx ends.
func (e *Enforcer) Run(ctx context.Context) error {
	for {
		turn, stop := context.WithCancel(ctx)
		changed := e.watch(turn)
		err := e.Apply()
		if err == nil {
			err = e.Settle(ctx)
		}
		if ctx.Err() != nil {
			stop()
			return nil
		}
		if err != nil {
			e.cfg.Log.Error("policy is not in force as written; what was before stays", "err", err)
		}
		var again <-chan time.Time
		if err != nil {
			again = time.After(retry)
		}
		select {
		case <-ctx.Done():
			stop()
			return nil
		case <-changed:
		case <-again:
		}
		stop()
	}
}

// Settle has all connections judged again if pods have other identities than
// before, once the kernel knows these.
func (e *Enforcer) Settle(ctx context.Context) error {
	e.mu.Lock()
	stale := e.stale
	e.mu.Unlock()
	if !stale {
		return nil
	}
	if err := e.cfg.Settled(ctx); err != nil {
		return fmt.Errorf("wait for the identities of pods: %w", err)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := e.renumber(); err != nil {
		return e.failed(fmt.Errorf("judge connections again: %w", err))
	}
	e.stale = false
	return nil
}

// failed notes how the last attempt ended; that a pod waits for its policy counts
// as a failure, too.
func (e *Enforcer) failed(err error) error {
	e.err = err
	for _, refused := range e.refused {
		if e.err == nil {
			e.err = refused
		}
	}
	e.cfg.Report(e.err)
	return err
}

// watch returns a channel that is closed after the next change of a row that
// policy depends on.
func (e *Enforcer) watch(ctx context.Context) <-chan struct{} {
	t := e.cfg.Tables
	txn := t.DB.ReadTxn()
	set := statedb.NewWatchSet()
	_, w := t.Policies.AllWatch(txn)
	set.Add(w)
	_, w = t.Namespaces.AllWatch(txn)
	set.Add(w)
	_, w = t.Workloads.AllWatch(txn)
	set.Add(w)
	_, w = t.Pods.AllWatch(txn)
	set.Add(w)
	_, w = t.Nodes.AllWatch(txn)
	set.Add(w)
	changed := make(chan struct{})
	go func() {
		defer close(changed)
		_, _ = set.Wait(ctx, 2*time.Millisecond) // gather what changes at once
	}()
	return changed
}

// apply makes one change. Callers hold mu.
func (e *Enforcer) apply() error {
	generation := e.cfg.Generation()
	in, links, err := e.input()
	if err != nil {
		return e.failed(err)
	}
	result := e.compiler.Compile(in)
	if err := e.install(result, links); err != nil {
		return e.failed(err)
	}
	e.noteIdentities(in.Pods)
	e.pods = in.Pods
	if e.result == nil || !sameRules(e.result, result) {
		e.revision++
		e.changed = time.Now()
	}
	e.result, e.generation = result, generation
	return e.failed(e.prune())
}

// sameRules is true where two results mean the same for the pods of this node.
func sameRules(a, b *policy.Result) bool {
	return maps.Equal(a.Endpoints, b.Endpoints) && maps.Equal(a.Rules, b.Rules) &&
		slices.Equal(a.Prefixes, b.Prefixes) && slices.Equal(a.Problems, b.Problems)
}

// noteIdentities remembers the identities of addresses, and whether one has
// another than at the last change.
func (e *Enforcer) noteIdentities(pods []policy.Pod) {
	now := make(map[netip.Addr]uint64, len(pods))
	for _, p := range pods {
		for _, a := range p.IPs {
			now[a] = p.Identity
			before, known := e.identities[a]
			e.stale = e.stale || known && before != p.Identity
		}
	}
	if e.adopted != nil { // pods of this node are still to come
		for a, id := range e.identities {
			if _, ok := now[a]; !ok {
				now[a] = id
			}
		}
	}
	e.identities = now
}

// renumber gives every subject another number, one after the other, so that the
// datapath judges all connections again.
func (e *Enforcer) renumber() error {
	users := map[uint32][]policy.EndpointID{}
	for id, n := range e.endpoints {
		users[n] = append(users[n], id)
	}
	for _, s := range e.subjects {
		old, next := *s, installed{number: e.next(s.number & subjectFlags)}
		if err := e.write(&next, old.entries); err != nil {
			e.garbage = append(e.garbage, &next)
			return err
		}
		*s = next
		e.retired = append(e.retired, &old)
		for _, id := range users[old.number] {
			if err := e.setSubject(id, s.number); err != nil {
				return err // the next change switches the rest
			}
		}
		if err := e.collectRetired(); err != nil {
			return err
		}
	}
	return nil
}

// setSubject switches a pod.
func (e *Enforcer) setSubject(id policy.EndpointID, number uint32) error {
	link := e.links[id]
	if err := e.cfg.Endpoints.SetSubject(link.ips, link.ifindex, number); err != nil {
		return err
	}
	e.endpoints[id] = number
	return nil
}

// wantedClasses are the classes of a result.
func wantedClasses(r *policy.Result) map[netip.Prefix]uint64 {
	wanted := make(map[netip.Prefix]uint64, len(r.Prefixes))
	for _, c := range r.Prefixes {
		wanted[c.Prefix] = c.Number
	}
	return wanted
}

// install puts a result in force, or leaves everything as it was.
func (e *Enforcer) install(r *policy.Result, links map[policy.EndpointID]podLink) error {
	if err := e.collect(); err != nil {
		return err
	}
	wanted := wantedClasses(r)
	added, err := e.installSubjects(r, wanted)
	if err == nil {
		err = e.addClasses(r, wanted)
	}
	if err != nil {
		return errors.Join(err, e.discard(added))
	}
	if err := e.switchEndpoints(r, links); err != nil {
		return err
	}
	if err := e.collectRetired(); err != nil {
		return err
	}
	if err := e.dropClasses(wanted); err != nil {
		return err
	}
	return e.removeUnused(r)
}

// installSubjects writes the entries of subjects that are new.
func (e *Enforcer) installSubjects(r *policy.Result, wanted map[netip.Prefix]uint64) ([]policy.SubjectKey, error) {
	leaving := leavingClasses(e.classes, wanted)
	var added []policy.SubjectKey
	for key, s := range r.Subjects {
		if _, ok := e.subjects[key]; ok {
			continue
		}
		i := e.adopt(s)
		if i != nil {
			e.subjects[key] = i
			if err := e.extend(i, leaving); err != nil {
				return added, err
			}
			continue
		}
		i = &installed{number: e.next(flags(s))}
		if err := e.write(i, inherit(s.Entries, leaving)); err != nil {
			e.garbage = append(e.garbage, i)
			return added, err
		}
		e.subjects[key] = i
		added = append(added, key)
	}
	return added, nil
}

// Set in the number of a subject whose ingress, or egress, a policy judges
// (SUBJECT_INGRESS and SUBJECT_EGRESS of bpf/lib/policy.h).
const (
	subjectIngress uint32 = 1 << 31
	subjectEgress  uint32 = 1 << 30
	subjectFlags          = subjectIngress | subjectEgress
)

func flags(s *policy.Subject) uint32 {
	var f uint32
	if s.Ingress {
		f |= subjectIngress
	}
	if s.Egress {
		f |= subjectEgress
	}
	return f
}

// next returns a number with these flags that no subject has had.
func (e *Enforcer) next(flags uint32) uint32 {
	n := e.nextNumber
	e.nextNumber++
	return n | flags
}

// adopt returns a subject of an earlier agent with these very rules.
func (e *Enforcer) adopt(s *policy.Subject) *installed {
	if len(e.adopted) == 0 {
		return nil
	}
	want := make(map[policy.Entry]bool, len(s.Entries))
	for _, x := range s.Entries {
		want[x] = true
	}
	for n, i := range e.adopted {
		if n&subjectFlags != flags(s) || len(i.entries) != len(want) {
			continue
		}
		if !slices.ContainsFunc(i.entries, func(x policy.Entry) bool { return !want[x] }) {
			delete(e.adopted, n)
			return i
		}
	}
	return nil
}

// write adds entries to a subject.
func (e *Enforcer) write(i *installed, entries []policy.Entry) error {
	if err := e.cfg.Kernel.Install(i.number, entries); err != nil {
		i.failed = append(i.failed, entries...)
		return err
	}
	i.entries = append(i.entries[:len(i.entries):len(i.entries)], entries...)
	return nil
}

// extend adds what a subject lacks for classes with these parents.
func (e *Enforcer) extend(i *installed, parents map[uint64]uint64) error {
	return e.write(i, inherited(i.entries, parents))
}

// remove takes a subject that nobody has out of the kernel.
func (e *Enforcer) remove(i *installed) error {
	return errors.Join(e.cfg.Kernel.Remove(i.number, i.entries), e.cfg.Kernel.Remove(i.number, i.failed))
}

// collect removes what could not be removed before.
func (e *Enforcer) collect() error {
	for len(e.garbage) > 0 {
		if err := e.remove(e.garbage[0]); err != nil {
			return err
		}
		e.garbage = e.garbage[1:]
	}
	return nil
}

// collectRetired removes what no endpoint has any more.
func (e *Enforcer) collectRetired() error {
	e.garbage = append(e.garbage, e.retired...)
	e.retired = nil
	return e.collect()
}

// discard undoes installSubjects.
func (e *Enforcer) discard(keys []policy.SubjectKey) error {
	for _, k := range keys {
		e.garbage = append(e.garbage, e.subjects[k])
		delete(e.subjects, k)
	}
	return e.collect()
}

// outdated returns the subjects that were compiled before the result. Those of
// the result know its classes: where they say nothing of one, the entries for
// any peer are what it shall meet.
func (e *Enforcer) outdated(r *policy.Result) []*installed {
	out := slices.AppendSeq(slices.Clone(e.retired), maps.Values(e.adopted))
	for key, s := range e.subjects {
		if _, ok := r.Subjects[key]; !ok {
			out = append(out, s)
		}
	}
	return out
}

// addClasses makes classes that are new known; before that, subjects that do
// not speak of them get what their addresses had until now.
func (e *Enforcer) addClasses(r *policy.Result, wanted map[netip.Prefix]uint64) error {
	coming := leavingClasses(wanted, e.classes)
	if len(coming) == 0 {
		return nil
	}
	for _, s := range e.outdated(r) {
		if err := e.extend(s, coming); err != nil {
			return err
		}
	}
	for p, n := range wanted {
		if e.classes[p] == n {
			continue
		}
		if err := e.cfg.Kernel.SetClass(p, n); err != nil {
			return err
		}
		e.classes[p] = n
	}
	clear(e.numbered)
	return nil
}

// dropClasses forgets classes that nobody names any more, unless pods may have
// the rules of an earlier agent, which did.
func (e *Enforcer) dropClasses(wanted map[netip.Prefix]uint64) error {
	if e.adopted != nil {
		return nil
	}
	for p := range e.classes {
		if _, ok := wanted[p]; ok {
			continue
		}
		if err := e.cfg.Kernel.DeleteClass(p); err != nil {
			return err
		}
		delete(e.classes, p)
	}
	return nil
}

// switchEndpoints gives every pod of this node the subject that it now has.
func (e *Enforcer) switchEndpoints(r *policy.Result, links map[policy.EndpointID]podLink) error {
	e.links = links
	for id := range links {
		number := uint32(0)
		if key, ok := r.Endpoints[id]; ok {
			number = e.subjects[key].number
		}
		if err := e.setSubject(id, number); err != nil {
			return err
		}
	}
	for id := range e.endpoints {
		if _, ok := links[id]; !ok {
			delete(e.endpoints, id)
		}
	}
	return nil
}

// removeUnused removes the subjects that no result names any more.
func (e *Enforcer) removeUnused(r *policy.Result) error {
	for key, s := range e.subjects {
		if _, ok := r.Subjects[key]; ok {
			continue
		}
		if e.adopted != nil { // it may be one that a pod still has
			e.adopted[s.number] = s
			delete(e.subjects, key)
			continue
		}
		e.garbage = append(e.garbage, s)
		delete(e.subjects, key)
	}
	return e.collect()
}
